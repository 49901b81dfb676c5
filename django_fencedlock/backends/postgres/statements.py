"""The SQL of session locks. Each statement is one round trip."""

from __future__ import annotations

from ...storage.dialect import FENCE, HELD, LOCK_WAIT
from ...storage.fences import FORCED, IS_FORCED
from ...storage.postgresql import INTO_HELD, LAZY_LIMITS, SET_ALL, TIMES, VALUES
from ..interface import SHARED

#: Every advisory lock of this database that a session holds or waits for.
LOCKS = """locks AS MATERIALIZED (
    SELECT l.pid::bigint AS pid, (l.classid::bigint << 32) | l.objid::bigint AS key, l.granted,
    l.mode = 'ShareLock' AS shared
    FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 1
    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))"""

# The server ends a session that is idle for the ttl of its locks: that frees the locks of a
# process that is paused or unreachable. 0 turns the limit off.
_IDLE = "set_config('idle_session_timeout', %(idle)s, false)"

#: Whether a row says that the name is live at another lock service. The row that readers of the
#: database backend lock doesn't.
_ELSEWHERE = f"""h.expires_at > clock_timestamp() AND h.owner <> '{SHARED}'
    AND (h.alias <> %(alias)s::text OR h.backend <> %(backend)s::text)"""

# The registry row is written first: its condition is checked against the newest version of the
# row, also after a long wait. A name that is live at another lock service keeps its fence.
# LATERAL: otherwise the clock might be read before the wait.
_RECORD = f"""
h AS (
    {INTO_HELD}
    SELECT {{values}}, {TIMES}
    FROM l CROSS JOIN LATERAL (SELECT clock_timestamp() AS now WHERE {{ok}}) c
    WHERE NOT EXISTS (
        SELECT 1 FROM {HELD} h WHERE h.name = {{name}} AND h.slot <> '' AND {_ELSEWHERE})
    ON CONFLICT (name, slot) DO UPDATE SET {SET_ALL}
    WHERE h.expires_at <= clock_timestamp() OR h.owner = '{SHARED}'
    OR (h.alias = EXCLUDED.alias AND h.backend = EXCLUDED.backend)
    RETURNING h.name, h.owner),
f AS (
    INSERT INTO {FENCE} AS f (name, token, owner) SELECT h.name, 1, h.owner FROM h
    ON CONFLICT (name) DO UPDATE SET token = f.token + 1, owner = EXCLUDED.owner
    RETURNING f.name, f.token)
"""

_TRY_KEY = "l AS MATERIALIZED (SELECT pg_try_advisory_lock(%(session_key)s::bigint) AS ok)"

# lock_timeout counts for each lock separately: the rows get a short one of their own. Both revert
# when the statement ends. Each part reads from the part before it, which sets the order.
_WAIT_FOR_KEY = f"""
s AS MATERIALIZED (SELECT set_config('lock_timeout', %(wait)s, true)),
g AS MATERIALIZED (SELECT true AS ok, pg_advisory_lock(%(session_key)s::bigint) FROM s),
l AS MATERIALIZED (SELECT g.ok, set_config('lock_timeout', '{LOCK_WAIT}', true) FROM g)
"""

# What a holder's row says of it; the first nine columns are the fields of `Owner`.
HOLDER = """h.owner, h.host, h.boot_id, h.pid_namespace, h.pid, h.pid_started, h.thread,
    h.task_name, h.task_id, h.session_pid, h.alias, h.backend, h.slot <> '' AS shared,
    extract(epoch FROM h.expires_at - clock_timestamp())::double precision AS expires_in,
    extract(epoch FROM clock_timestamp() - h.acquired_at)::double precision AS held_for,"""
HOLDER += f"""(SELECT f.token FROM {FENCE} f WHERE f.name = h.name
    AND f.owner = CASE WHEN h.slot = '' THEN h.owner ELSE '{SHARED}' END) AS token"""
# The row that most likely refused a claim: one of this service, unless its key was free.
_REFUSING = f"""h.owner <> '{SHARED}'
    ORDER BY (h.alias = %(alias)s::text AND h.backend = %(backend)s::text) = l.ok,
    h.expires_at DESC LIMIT 1"""

# Each claim returns: whether the key was free; the token, NULL if the name is live at another lock
# service; the server process. Without a grant, a fenced one also returns the row of the name.
_GRANTED = f"pg_backend_pid(), CASE WHEN l.ok THEN {_IDLE} END"
_UNFENCED = f"SELECT l.ok, NULL::bigint, {_GRANTED} FROM l"
_FENCED = f"""{_RECORD.format(values=VALUES, ok="l.ok", name="%(name)s::text")}
SELECT l.ok, (SELECT f.token FROM f), {_GRANTED}, x.* FROM l LEFT JOIN LATERAL (
    SELECT {HOLDER} FROM {HELD} h WHERE h.name = %(name)s::text
    AND (NOT l.ok OR NOT EXISTS (SELECT 1 FROM f)) AND {_REFUSING}) x ON true
"""
# A session takes the key once for all of its readers. The server would grant it again also while a
# writer waits, so a further reader looks for waiting sessions instead. `again` is for a reader that
# has the key, but no token yet.
_SHARE_KEY = f"""{LOCKS},
l AS MATERIALIZED (SELECT CASE %(how)s::text
    WHEN 'try' THEN pg_try_advisory_lock_shared(%(session_key)s::bigint)
    WHEN 'join' THEN NOT EXISTS (
        SELECT 1 FROM locks k WHERE k.key = %(session_key)s::bigint AND NOT k.granted)
    ELSE true END AS ok)
"""
_WAIT_TO_SHARE = _WAIT_FOR_KEY.replace("pg_advisory_lock(", "pg_advisory_lock_shared(")

# The snapshot of the statement is older than its lock. So the newest fence is read by FOR SHARE,
# which lets other readers' transactions be; and it is read only if readers have the fence in the
# snapshot: two readers that have the row locked so would each wait to update it.
# Without a token, a writer came after the snapshot, and a further statement reads its grant.
_SHARE = f"""
o AS MATERIALIZED (SELECT l.ok AND NOT EXISTS (
    SELECT 1 FROM {HELD} h WHERE h.name = %(name)s::text AND {_ELSEWHERE}) AS ok FROM l),
e AS MATERIALIZED (
    SELECT EXISTS (SELECT 1 FROM {FENCE} f WHERE f.name = %(name)s::text AND f.owner = '{SHARED}')
    AS shared),
k AS MATERIALIZED (
    SELECT f.token FROM {FENCE} f WHERE f.name = %(name)s::text AND f.owner = '{SHARED}'
    AND (SELECT o.ok AND e.shared FROM o, e) FOR SHARE),
u AS (
    INSERT INTO {FENCE} AS f (name, token, owner)
    SELECT %(name)s::text, 1, '{SHARED}' FROM o, e WHERE o.ok AND NOT e.shared
    ON CONFLICT (name) DO UPDATE
    SET token = f.token + (f.owner <> EXCLUDED.owner)::int, owner = EXCLUDED.owner
    RETURNING f.token),
t AS MATERIALIZED (SELECT k.token FROM k UNION ALL SELECT u.token FROM u),
h AS (
    {INTO_HELD}
    SELECT {VALUES}, {TIMES} FROM t CROSS JOIN LATERAL (
        SELECT clock_timestamp() AS now WHERE t.token IS NOT NULL) c
    ON CONFLICT (name, slot) DO UPDATE SET {SET_ALL})
SELECT l.ok, (SELECT t.token FROM t), {_GRANTED}, x.* FROM l LEFT JOIN LATERAL (
    SELECT {HOLDER} FROM {HELD} h WHERE h.name = %(name)s::text
    AND (NOT l.ok OR NOT EXISTS (SELECT 1 FROM t) AND {_ELSEWHERE}) AND {_REFUSING}) x ON true
"""
#: By whether the claim is shared, and whether it is fenced.
TRY = {
    (False, True): f"WITH {_TRY_KEY}, {_FENCED}",
    (False, False): f"WITH {_TRY_KEY} {_UNFENCED}",
    (True, True): f"WITH {_SHARE_KEY}, {_SHARE}",
    (True, False): f"WITH {_SHARE_KEY} {_UNFENCED}",
}
WAIT = {
    (False, True): f"WITH {_WAIT_FOR_KEY}, {_FENCED}",
    (False, False): f"WITH {_WAIT_FOR_KEY} {_UNFENCED}",
    (True, True): f"WITH {_WAIT_TO_SHARE}, {_SHARE}",
    (True, False): f"WITH {_WAIT_TO_SHARE} {_UNFENCED}",
}

# The arrays are hidden from the planner: it would plan each statement again for their lengths,
# which takes four times as long as the rest.
_MANY = """unnest((SELECT %(names)s::text[]), (SELECT %(owners)s::text[]),
    (SELECT %(keys)s::bigint[])) WITH ORDINALITY AS n(name, owner, session_key, place)"""
_TRY_KEYS = f"""
l AS MATERIALIZED (SELECT n.*, pg_try_advisory_lock(n.session_key) AS ok FROM {_MANY}),
a AS MATERIALIZED (SELECT bool_and(l.ok) AS ok FROM l)
"""
# The key of a row is random: XOR makes another random key for each place.
_EACH = VALUES.replace("%(id)s::bigint", "%(id)s::bigint # l.place")
for _column, _type in (("name", "text"), ("owner", "text"), ("session_key", "bigint")):
    _EACH = _EACH.replace(f"%({_column})s::{_type}", f"l.{_column}")
_ALL_GRANTED = f"""pg_backend_pid(), CASE WHEN a.ok THEN {_IDLE}
    WHEN l.ok THEN pg_advisory_unlock(l.session_key)::text END"""

# Claim all or none: a row for each, in their order, as a single claim has it.
_TRY_ALL = f"""
WITH {_TRY_KEYS}, {_RECORD.format(values=_EACH, ok="(SELECT a.ok FROM a)", name="l.name")}
SELECT l.ok, f.token, {_ALL_GRANTED}, x.*
FROM l CROSS JOIN a LEFT JOIN f ON f.name = l.name LEFT JOIN LATERAL (
    SELECT {HOLDER} FROM {HELD} h
    WHERE h.name = l.name AND NOT (l.ok AND (f.token IS NOT NULL OR NOT a.ok))
    AND {_REFUSING}) x ON true
ORDER BY l.place
"""
_TRY_ALL_UNFENCED = f"""
WITH {_TRY_KEYS} SELECT l.ok, NULL::bigint, {_ALL_GRANTED} FROM l CROSS JOIN a ORDER BY l.place
"""
#: By whether they are fenced.
TRY_ALL = {True: _TRY_ALL, False: _TRY_ALL_UNFENCED}

# False if the session didn't hold the key; the server only adds a warning.
_UNLOCK = "pg_advisory_unlock(%(key)s::bigint)"
UNLOCK_ALL = "SELECT pg_advisory_unlock(k.key) FROM unnest(%(keys)s::bigint[]) AS k(key)"
UNLOCK_SHARED = UNLOCK_ALL.replace("unlock(", "unlock_shared(")

# Each release returns: whether the session held the key; whether the lock was released by force.
# The key may be free before the row is deleted: the row is deleted by its owner.
_FORCED = IS_FORCED.format(owner="%(owner)s")
_RELEASE = f"""
WITH {LAZY_LIMITS},
d AS (DELETE FROM {HELD} h USING s WHERE h.name = %(name)s AND h.owner = %(owner)s)
SELECT {{}}, {_FORCED}, {_IDLE}
"""
_RELEASE_UNFENCED = f"SELECT {{}}, false, {_IDLE}"
# The last reader of a session unlocks the key.
_UNSHARE = """CASE WHEN %(last)s::boolean
    THEN pg_advisory_unlock_shared(%(key)s::bigint) ELSE true END"""
RELEASE = {
    (False, True): _RELEASE.format(_UNLOCK),
    (False, False): _RELEASE_UNFENCED.format(_UNLOCK),
    (True, True): _RELEASE.format(_UNSHARE),
    (True, False): _RELEASE_UNFENCED.format(_UNSHARE),
}

# The same of many: a row for each, in their order.
_RELEASE_ALL = f"""
WITH {LAZY_LIMITS},
l AS MATERIALIZED (SELECT n.* FROM s, {_MANY}),
d AS (DELETE FROM {HELD} h USING l WHERE h.name = l.name AND h.owner = l.owner)
SELECT pg_advisory_unlock(l.session_key), {IS_FORCED.format(owner="l.owner")}, {_IDLE} FROM l
ORDER BY l.place
"""
_RELEASE_ALL_UNFENCED = f"""
SELECT pg_advisory_unlock(n.session_key), false, {_IDLE} FROM {_MANY} ORDER BY n.place
"""
RELEASE_ALL = {True: _RELEASE_ALL, False: _RELEASE_ALL_UNFENCED}

# Clear the row of an owner whose session is gone, or end that session: a child that a dead process
# forked keeps it open.
# Returns: whether the row was deleted; the session that still holds the key, or NULL; the owner's
# process.
EVICT = f"""
WITH {LOCKS},
k AS MATERIALIZED (
    SELECT h.session_pid, h.boot_id, h.pid_namespace, h.pid, h.pid_started,
    pg_terminate_backend(CASE WHEN %(ends)s THEN a.pid END) FROM {HELD} h
    JOIN locks k ON k.pid = h.session_pid AND k.key = h.session_key AND k.granted
    LEFT JOIN pg_stat_activity a ON a.pid = k.pid AND a.backend_start = h.session_started
    WHERE h.name = %(name)s AND h.owner = %(owner)s),
d AS (
    DELETE FROM {HELD} h WHERE h.name = %(name)s AND h.owner = %(owner)s
    AND NOT EXISTS (SELECT 1 FROM k) RETURNING h.name)
SELECT EXISTS (SELECT 1 FROM d), k.* FROM (SELECT 1) one LEFT JOIN k ON true
"""

# Renew what this session holds. The server's own table of locks proves that it holds each key.
# Rows that a transaction has locked are skipped. Not prepared: the plan that ignores the arrays'
# lengths is 20 times slower. A lock that was released by force isn't renewed.
# Returns for each owner: whether the key is held, the row was renewed, the row is there, the lock
# was released by force.
RENEW = f"""
WITH {LAZY_LIMITS}, {LOCKS}, i AS MATERIALIZED (SELECT {_IDLE} FROM s),
w AS MATERIALIZED (
    SELECT w.name, w.owner, w.ttl, k.key IS NOT NULL AS held, r.owner IS NOT NULL AS forced
    FROM i CROSS JOIN unnest(%(names)s::text[], %(owners)s::text[],
        %(ttls)s::double precision[], %(keys)s::bigint[]) AS w(name, owner, ttl, key)
    LEFT JOIN locks k ON k.key = w.key AND k.pid = pg_backend_pid() AND k.granted
    LEFT JOIN {FORCED} r ON r.owner = w.owner),
p AS MATERIALIZED (
    SELECT h.id, w.ttl FROM {HELD} h JOIN w ON h.name = w.name AND h.owner = w.owner
    WHERE w.held AND NOT w.forced FOR UPDATE OF h SKIP LOCKED),
u AS (
    UPDATE {HELD} h SET renewed_at = c.now, expires_at = c.now + p.ttl * interval '1 second'
    FROM p, (SELECT clock_timestamp() AS now) c WHERE h.id = p.id
    RETURNING h.owner)
SELECT w.owner, w.held, u.owner IS NOT NULL, x.owner IS NOT NULL AND NOT w.forced, w.forced
FROM w LEFT JOIN u ON u.owner = w.owner
LEFT JOIN {HELD} x ON x.name = w.name AND x.owner = w.owner
"""

#: Whether this session has the key, and the owner of a fenced lock its row.
VERIFY = f"""
WITH {LOCKS} SELECT NOT {_FORCED} AND EXISTS (
    SELECT 1 FROM locks k WHERE k.key = %(key)s AND k.pid = pg_backend_pid() AND k.granted)
AND (NOT %(fenced)s OR EXISTS (
    SELECT 1 FROM {HELD} x WHERE x.name = %(name)s AND x.owner = %(owner)s))
"""

# Who holds each of many keys: the session, what it calls itself, how many sessions wait for the
# key, and the registry row of that very session.
HOLDERS = f"""
WITH {LOCKS}, q AS (SELECT key, count(*) AS waiting FROM locks WHERE NOT granted GROUP BY key)
SELECT w.name, k.pid, k.shared, a.application_name, coalesce(q.waiting, 0), {HOLDER}
FROM unnest(%(names)s::text[], %(keys)s::bigint[]) AS w(name, key)
JOIN locks k ON k.key = w.key AND k.granted LEFT JOIN pg_stat_activity a ON a.pid = k.pid
LEFT JOIN q ON q.key = w.key
LEFT JOIN {HELD} h ON h.name = w.name AND h.session_pid = k.pid AND h.session_key = k.key
    AND (h.slot <> '') = k.shared
ORDER BY h.acquired_at
"""

# With the time zone written out: with USE_TZ = False an hour of autumn would be ambiguous.
IDENTITY = """
SELECT a.pid, a.backend_start AT TIME ZONE 'UTC' FROM pg_stat_activity a
WHERE a.pid = pg_backend_pid()
"""

PID = "SELECT pg_backend_pid()"

#: Set, for the session, those of the given settings that this server knows.
CONFIGURE = """
SELECT set_config(p.name, g.value, false) FROM pg_settings p
JOIN unnest(%(names)s::text[], %(values)s::text[]) AS g(name, value) ON g.name = p.name
"""

#: Equal for two routes to one database; the last two are the size of the server's lock table.
SERVER = """
SELECT current_database(), pg_postmaster_start_time()::text,
current_setting('max_connections')::bigint,
current_setting('max_locks_per_transaction')::bigint
"""
