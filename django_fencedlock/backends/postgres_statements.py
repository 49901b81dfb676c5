"""The SQL of session locks. Each statement is one round trip, and none is run twice by itself."""

from __future__ import annotations

from dataclasses import fields

from ..storage.dialect import FENCE, HELD, LOCK_WAIT
from ..storage.fences import FORCED, IS_FORCED
from ..storage.postgresql import INTO_HELD, LAZY_LIMITS, SET_ALL, TIMES, VALUES
from ..storage.vendors import Row

#: Every advisory lock that is held in this database, by its server process and 64-bit key.
LOCKS = """locks AS MATERIALIZED (
    SELECT l.pid::bigint AS pid, (l.classid::bigint << 32) | l.objid::bigint AS key
    FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))"""

# The registry's row comes first, for its condition is looked at with the newest row, also after
# a long wait: a holder at another lock service must not be fenced off by a grant that is refused.
# LATERAL, or the clock might be read before the wait.
_RECORD = f"""
h AS (
    {INTO_HELD}
    SELECT {VALUES}, {TIMES}
    FROM l CROSS JOIN LATERAL (SELECT clock_timestamp() AS now WHERE l.ok) c
    ON CONFLICT (name) DO UPDATE SET {SET_ALL}
    WHERE h.expires_at <= clock_timestamp()
    OR (h.alias = EXCLUDED.alias AND h.backend = EXCLUDED.backend)
    RETURNING h.name, h.owner),
f AS (
    INSERT INTO {FENCE} AS f (name, token, owner) SELECT h.name, 1, h.owner FROM h
    ON CONFLICT (name) DO UPDATE SET token = f.token + 1, owner = EXCLUDED.owner
    RETURNING f.token)
"""

_TRY_KEY = "l AS MATERIALIZED (SELECT pg_try_advisory_lock(%(session_key)s::bigint) AS ok)"

# lock_timeout counts for each lock anew: the rows get a short one of their own. Both revert when
# the statement ends. Each part reads from the one before it, or it wouldn't run, or not in time.
_WAIT_FOR_KEY = f"""
s AS MATERIALIZED (SELECT set_config('lock_timeout', %(wait)s, true)),
g AS MATERIALIZED (SELECT true AS ok, pg_advisory_lock(%(session_key)s::bigint) FROM s),
l AS MATERIALIZED (SELECT g.ok, set_config('lock_timeout', '{LOCK_WAIT}', true) FROM g)
"""

# Each grant returns: whether the key was got; the token, NULL if the name is live at another lock
# service; whether the holder is past his time; the server process.
TRY = f"""
WITH {_TRY_KEY}, {_RECORD}
SELECT l.ok, (SELECT f.token FROM f),
CASE WHEN l.ok THEN false ELSE EXISTS (
    SELECT 1 FROM {HELD} x WHERE x.name = %(name)s AND x.expires_at < clock_timestamp()) END,
pg_backend_pid()
FROM l
"""
TRY_UNFENCED = f"WITH {_TRY_KEY} SELECT l.ok, NULL::bigint, false, pg_backend_pid() FROM l"

WAIT = f"""
WITH {_WAIT_FOR_KEY}, {_RECORD}
SELECT l.ok, (SELECT f.token FROM f), false, pg_backend_pid() FROM l
"""
WAIT_UNFENCED = f"WITH {_WAIT_FOR_KEY} SELECT l.ok, NULL::bigint, false, pg_backend_pid() FROM l"

#: False if the session didn't hold the key: the server says no more than a warning.
UNLOCK = "SELECT pg_advisory_unlock(%(key)s::bigint)"
#: The same of one that is listed; and whether it had been taken away by force.
UNLOCK_LISTED = f"{UNLOCK}, {IS_FORCED.format(owner='%(owner)s')}"

# The key is free before the row is gone, which harms nobody: the row is deleted by its owner.
# Returns: whether the session had the key; whether the lock had been taken away by force.
RELEASE = f"""
WITH {LAZY_LIMITS},
d AS (DELETE FROM {HELD} h USING s WHERE h.name = %(name)s AND h.owner = %(owner)s)
SELECT pg_advisory_unlock(%(key)s::bigint), {IS_FORCED.format(owner="%(owner)s")}
"""

CLEAR = f"DELETE FROM {HELD} WHERE name = %(name)s AND owner = %(owner)s RETURNING true"

# For a holder whose process is gone. Its session ends with it, and has to go before the row does,
# by which the session is known.
# Returns: the session that still has the key, or NULL; whether the row was deleted.
EVICT = f"""
WITH {LOCKS},
k AS MATERIALIZED (
    SELECT h.session_pid FROM {HELD} h
    JOIN locks k ON k.pid = h.session_pid AND k.key = h.session_key
    WHERE h.name = %(name)s AND h.owner = %(owner)s),
d AS (
    DELETE FROM {HELD} h WHERE h.name = %(name)s AND h.owner = %(owner)s
    AND NOT EXISTS (SELECT 1 FROM k) RETURNING h.name)
SELECT (SELECT k.session_pid FROM k), EXISTS (SELECT 1 FROM d)
"""

#: End the session of a holder whose process is gone: a child that it forked keeps it open.
END_ORPHAN = f"""
WITH {LOCKS}
SELECT pg_terminate_backend(a.pid) FROM {HELD} h
JOIN locks k ON k.pid = h.session_pid AND k.key = h.session_key
JOIN pg_stat_activity a ON a.pid = h.session_pid AND a.backend_start = h.session_started
WHERE h.name = %(name)s AND h.owner = %(owner)s
"""

#: Renew one row, right after a wait; no row if it is somebody else's by now.
EXTEND = f"""
WITH {LAZY_LIMITS}
UPDATE {HELD} h SET renewed_at = c.now, expires_at = c.now + %(ttl)s * interval '1 second'
FROM s, (SELECT clock_timestamp() AS now) c
WHERE h.name = %(name)s AND h.owner = %(owner)s RETURNING true
"""

# A renewal proves that each key is held, by the session that got it. Rows that somebody has locked
# are passed over. Not to be prepared: the plan without the arrays' lengths is far slower.
# Nor is a lock renewed that was taken away by force: it looks as if its row were gone.
# Returns for each owner: whether the key is held, the row was renewed, the row is there, the lock
# was taken away.
RENEW = f"""
WITH {LAZY_LIMITS}, {LOCKS},
w AS MATERIALIZED (
    SELECT w.name, w.owner, w.ttl, k.key IS NOT NULL AS held, r.owner IS NOT NULL AS forced
    FROM s CROSS JOIN unnest(
        %(names)s::text[], %(owners)s::text[], %(ttls)s::double precision[],
        %(keys)s::bigint[], %(pids)s::bigint[]) AS w(name, owner, ttl, key, pid)
    LEFT JOIN locks k ON k.key = w.key AND k.pid = w.pid
    LEFT JOIN {FORCED} r ON r.owner = w.owner),
p AS MATERIALIZED (
    SELECT h.name, w.ttl FROM {HELD} h JOIN w ON h.name = w.name AND h.owner = w.owner
    WHERE w.held AND NOT w.forced FOR UPDATE OF h SKIP LOCKED),
u AS (
    UPDATE {HELD} h SET renewed_at = c.now, expires_at = c.now + p.ttl * interval '1 second'
    FROM p, (SELECT clock_timestamp() AS now) c WHERE h.name = p.name
    RETURNING h.owner)
SELECT w.owner, w.held, u.owner IS NOT NULL, x.owner IS NOT NULL AND NOT w.forced, w.forced
FROM w LEFT JOIN u ON u.owner = w.owner
LEFT JOIN {HELD} x ON x.name = w.name AND x.owner = w.owner
"""

#: Whether this session has the key; whether the row is the owner's.
VERIFY = f"""
WITH {LOCKS}
SELECT EXISTS (SELECT 1 FROM locks k WHERE k.key = %(key)s AND k.pid = pg_backend_pid()),
EXISTS (SELECT 1 FROM {HELD} x WHERE x.name = %(name)s AND x.owner = %(owner)s)
AND NOT {IS_FORCED.format(owner="%(owner)s")}
"""
VERIFY_UNFENCED = f"""
WITH {LOCKS}
SELECT EXISTS (SELECT 1 FROM locks k WHERE k.key = %(key)s AND k.pid = pg_backend_pid()), true
"""
VERIFY_LISTED = f"""
WITH {LOCKS}
SELECT EXISTS (SELECT 1 FROM locks k WHERE k.key = %(key)s AND k.pid = pg_backend_pid()),
NOT {IS_FORCED.format(owner="%(owner)s")}
"""

IS_TAKEN = f"WITH {LOCKS} SELECT EXISTS (SELECT 1 FROM locks k WHERE k.key = %(key)s)"

#: The columns of `Row` that stand in the registry.
ROW = [each.name for each in fields(Row) if each.name not in ("token", "live")]

#: Who has the key: what its session calls itself, and the registry's row of that very session.
HOLDER = f"""
WITH {LOCKS}
SELECT k.pid, a.application_name, {", ".join(f"h.{column}" for column in ROW)},
f.token, h.expires_at > clock_timestamp()
FROM locks k LEFT JOIN pg_stat_activity a ON a.pid = k.pid
LEFT JOIN {HELD} h ON h.name = %(name)s AND h.session_pid = k.pid AND h.session_key = k.key
LEFT JOIN {FENCE} f ON f.name = h.name AND f.owner = h.owner
WHERE k.key = %(key)s
"""
#: The same of many names, for people; those that nobody has are left out.
HOLDERS = f"""
WITH {LOCKS}
SELECT w.name, k.pid, a.application_name, h.owner, f.token, h.acquired_at, h.expires_at,
h.host, h.pid, h.thread, h.task_name, h.task_id
FROM unnest(%(names)s::text[], %(keys)s::bigint[]) AS w(name, key)
JOIN locks k ON k.key = w.key LEFT JOIN pg_stat_activity a ON a.pid = k.pid
LEFT JOIN {HELD} h ON h.name = w.name AND h.session_pid = k.pid AND h.session_key = k.key
LEFT JOIN {FENCE} f ON f.name = h.name AND f.owner = h.owner
"""
#: How many sessions wait for each of many keys.
WAITING = """
SELECT w.name, count(l.pid)
FROM unnest(%(names)s::text[], %(keys)s::bigint[]) AS w(name, key)
LEFT JOIN pg_locks l ON l.locktype = 'advisory' AND l.objsubid = 1 AND NOT l.granted
AND (l.classid::bigint << 32) | l.objid::bigint = w.key
AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
GROUP BY w.name
"""
HOLDER_UNRECORDED = f"""
WITH {LOCKS}
SELECT k.pid, a.application_name
FROM locks k LEFT JOIN pg_stat_activity a ON a.pid = k.pid WHERE k.key = %(key)s
"""

#: The names among these whose holder is past his time.
OVERDUE = f"""
SELECT x.name FROM {HELD} x
WHERE x.name = ANY(%(names)s::text[]) AND x.expires_at < clock_timestamp()
"""

# End a session that hangs, if it still has the lock, and *every* row of it is past its time.
# Without the function's own time-out, which looks every 100 ms only.
TERMINATE = f"""
WITH {LOCKS},
v AS MATERIALIZED (
    SELECT DISTINCT h.session_pid AS pid FROM {HELD} h
    JOIN locks k ON k.pid = h.session_pid AND k.key = h.session_key
    JOIN pg_stat_activity a ON a.pid = h.session_pid AND a.backend_start = h.session_started
    WHERE h.name = ANY(%(names)s::text[]) AND h.expires_at < clock_timestamp()
    AND h.session_pid <> pg_backend_pid()
    AND NOT EXISTS (
        SELECT 1 FROM {HELD} x
        WHERE x.session_pid = h.session_pid AND x.session_started = h.session_started
        AND x.expires_at >= clock_timestamp()))
SELECT v.pid, pg_terminate_backend(v.pid::int) FROM v
"""

#: The sessions of overdue holders that this role may not look into, and so may not end.
HIDDEN = f"""
WITH {LOCKS}
SELECT DISTINCT h.session_pid, a.usename FROM {HELD} h
JOIN locks k ON k.pid = h.session_pid AND k.key = h.session_key
JOIN pg_stat_activity a ON a.pid = h.session_pid AND a.backend_start IS NULL
WHERE h.name = ANY(%(names)s::text[]) AND h.expires_at < clock_timestamp()
"""

# With the time zone spelt out: with USE_TZ = False an hour of autumn would be two.
IDENTITY = """
SELECT a.pid, a.backend_start AT TIME ZONE 'UTC' FROM pg_stat_activity a
WHERE a.pid = pg_backend_pid()
"""

#: Set what this server knows of the given settings, for the session.
CONFIGURE = """
SELECT set_config(p.name, g.value, false) FROM pg_settings p
JOIN unnest(%(names)s::text[], %(values)s::text[]) AS g(name, value) ON g.name = p.name
"""

#: One database is as good as another if they are the same.
DATABASE = "SELECT current_database(), pg_postmaster_start_time()::text"

LOCK_TABLE = """
SELECT current_setting('max_connections')::bigint,
current_setting('max_locks_per_transaction')::bigint
"""
