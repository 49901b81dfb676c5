"""The ledger on PostgreSQL: each act is one statement, and thus one round trip."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ..backends.interface import SHARED
from .connections import CURSOR
from .dialect import (
    CLEAR,
    COLUMNS,
    FENCE,
    HELD,
    LOCK_WAIT,
    TIME_COLUMNS,
    UPDATED,
    Claimed,
    Entry,
    Newest,
    find_pin,
    new_id,
    seen_values,
)
from .readers import FOREVER, NOTED, SharedLedger
from .sets import OF_EACH

#: Whatever the server's setting is, the commit outlasts a crash: otherwise a token could be granted
#: again, or a stored message be lost.
DURABLE = "set_config('synchronous_commit', 'on', true)"
# The limits are set within the statement that they are for: a SET of the session would leak to
# other clients through a pooler. The statement that follows has to read from s, or it never runs.
LIMITS = f"s AS MATERIALIZED (SELECT set_config('lock_timeout', '{LOCK_WAIT}', true), {DURABLE})"
# A renewal or a deletion that a crash undoes costs nothing.
LAZY_LIMITS = LIMITS.replace("'on'", "'off'")

# Where statements are prepared, the server has to know the types of their parameters.
TYPES = {
    "id": "bigint",
    "fenced": "boolean",
    "pid": "bigint",
    "pid_started": "bigint",
    "session_pid": "bigint",
    "session_started": "timestamptz",
    "session_key": "bigint",
    "permits": "integer",
    "token": "bigint",
    "ttl": "double precision",
}
VALUES = ", ".join(f"%({column})s::{TYPES.get(column, 'text')}" for column in COLUMNS)
TIMES = "c.now, c.now, c.now + %(ttl)s * interval '1 second'"
SET_ALL = ", ".join(f"{column} = EXCLUDED.{column}" for column in UPDATED)
INTO_HELD = f"INSERT INTO {HELD} AS h ({', '.join((*COLUMNS, *TIME_COLUMNS))})"

# A request may reach the server twice, the second time when its holder is at work already: with a
# token of its own, it would fence off that holder.
DRAW = "token = f.token + (f.owner <> EXCLUDED.owner)::int"

# A live row is looked at before it is locked: ON CONFLICT locks the row that it then leaves alone,
# and tries that are refused kept up to all renewals of that row from it.
_CLAIM_ROW = f"""
    {INTO_HELD}
    SELECT {VALUES}, {TIMES} FROM s, (SELECT clock_timestamp() AS now) c
    WHERE NOT EXISTS (
        SELECT 1 FROM {HELD} x WHERE x.name = %(name)s::text AND x.owner <> %(fence_owner)s::text
        AND x.expires_at > clock_timestamp() AND (x.slot = '' OR %(slot)s::text = ''))
    ON CONFLICT (name, slot) DO UPDATE SET {SET_ALL}
    WHERE h.expires_at <= clock_timestamp() OR h.owner = EXCLUDED.owner
    RETURNING h.name, h.owner
"""

CLAIM = f"""
WITH {LIMITS}, h AS ({_CLAIM_ROW})
INSERT INTO {FENCE} AS f (name, token, owner) SELECT h.name, 1, h.owner FROM h
ON CONFLICT (name) DO UPDATE SET {DRAW}, owner = EXCLUDED.owner
RETURNING f.token
"""
# Never a reader's: two parameters less.
CLAIM = CLAIM.replace("%(slot)s::text", "''").replace("%(fence_owner)s", "%(owner)s")

ENTER = f"WITH {LIMITS} {_CLAIM_ROW}"

#: True if the name is live at another lock service.
CONFLICT = f"""EXISTS (
    SELECT 1 FROM {HELD} x WHERE x.name = %(name)s::text AND x.expires_at > clock_timestamp()
    AND (x.alias <> %(alias)s::text OR x.backend <> %(backend)s::text)
    AND x.owner <> '{SHARED}')"""

# The fence comes first: whether its token rises decides everything.
RECORD = f"""
WITH {LIMITS}, f AS (
    INSERT INTO {FENCE} AS f (name, token, owner)
    SELECT %(name)s::text, %(token)s::bigint, %(fence_owner)s::text FROM s WHERE NOT {CONFLICT}
    ON CONFLICT (name) DO UPDATE SET token = EXCLUDED.token, owner = EXCLUDED.owner
    WHERE f.token < EXCLUDED.token AND (
        %(seen)s::bigint IS NULL OR f.token = %(seen)s::bigint AND f.owner = %(writer)s::text)
    RETURNING f.token)
{INTO_HELD}
SELECT {VALUES}, {TIMES} FROM f, (SELECT clock_timestamp() AS now) c
ON CONFLICT (name, slot) DO UPDATE SET {SET_ALL}
RETURNING h.name
"""

# The rest of the readers' grants is unlocked: one may have the fence locked.
RECORD_READER = f"""
WITH {LIMITS}
{INTO_HELD}
SELECT {VALUES}, {TIMES} FROM s, (SELECT clock_timestamp() AS now) c
WHERE NOT {CONFLICT} AND EXISTS (
    SELECT 1 FROM {FENCE} f WHERE f.name = %(name)s::text AND f.token = %(seen)s::bigint
    AND f.owner = %(writer)s::text AND %(token)s::bigint = f.token)
ON CONFLICT (name, slot) DO UPDATE SET {SET_ALL}
RETURNING h.name
"""

# Readers and writers. The claim of a reader locks the anchor, and so does a writer's: it is the row
# with slot ''. Each compares the newest version of that row, also after a wait.
_ANCHOR = {
    column: f"%({column})s::{TYPES.get(column, 'text')}"
    for column in ("name", "alias", "backend", "fenced")
} | {"id": "%(anchor)s::bigint", "owner": f"'{SHARED}'"}
_EMPTY = {"pid": "0", "pid_started": "0", "permits": "NULL::integer"}
_EMPTY |= {each: f"NULL::{TYPES[each]}" for each in COLUMNS if each.startswith("session_")}
_ANCHOR_VALUES = ", ".join(_ANCHOR.get(each, _EMPTY.get(each, "''")) for each in COLUMNS)
# It rises with each reader, by which `settle()` notices a reader that came meanwhile.
_RISING = "renewed_at = greatest(EXCLUDED.renewed_at, h.renewed_at + interval '1 microsecond')"
_SET_ANCHOR = SET_ALL.replace("renewed_at = EXCLUDED.renewed_at", _RISING)

#: Whether a writer has the name, or stops new readers. A claim that comes twice has its row.
_CLOSED = f"""CASE WHEN {{row}}.owner <> '{SHARED}' THEN {{row}}.expires_at > clock_timestamp()
    ELSE coalesce({{row}}.no_readers_until > clock_timestamp(), false) AND NOT EXISTS (
        SELECT 1 FROM {HELD} o WHERE o.name = %(name)s::text AND o.slot = %(slot)s::text) END"""

# As in a writer's claim, the anchor is looked at before it is locked.
CLAIM_SHARED = f"""
WITH {LIMITS}, c AS MATERIALIZED (SELECT clock_timestamp() AS now), a AS (
    {INTO_HELD}
    SELECT {_ANCHOR_VALUES}, c.now, c.now, c.now + interval '{FOREVER} seconds' FROM s, c
    WHERE NOT EXISTS (
        SELECT 1 FROM {HELD} x WHERE x.name = %(name)s::text AND x.slot = ''
        AND {_CLOSED.format(row="x")})
    ON CONFLICT (name, slot) DO UPDATE SET {_SET_ANCHOR}
    WHERE NOT {_CLOSED.format(row="h")}
    RETURNING h.name)
{INTO_HELD}
SELECT {VALUES}, {TIMES} FROM a, c
ON CONFLICT (name, slot) DO UPDATE SET {SET_ALL}
RETURNING h.name
"""

# As long as the reader's row is there, no writer is granted. It is locked, so that the fence isn't
# raised for a reader whose lease has expired, beside a writer. The fence is locked by the first
# reader alone: another one's transaction may have it locked.
DRAW_SHARED = f"""
WITH {LIMITS}, r AS MATERIALIZED (
    SELECT h.name FROM {HELD} h, s WHERE h.name = %(name)s::text AND h.slot = %(slot)s::text
    FOR UPDATE OF h),
k AS MATERIALIZED (
    SELECT f.token FROM r JOIN {FENCE} f ON f.name = r.name AND f.owner = '{SHARED}'),
f AS (
    INSERT INTO {FENCE} AS f (name, token, owner)
    SELECT r.name, 1, '{SHARED}' FROM r WHERE NOT EXISTS (SELECT 1 FROM k)
    ON CONFLICT (name) DO UPDATE SET {DRAW}, owner = EXCLUDED.owner
    RETURNING f.token)
SELECT token FROM k UNION ALL SELECT token FROM f
"""

NOTE_WRITER = f"""
WITH {LAZY_LIMITS}
UPDATE {HELD} h SET no_readers_until = clock_timestamp() + interval '{NOTED} seconds' FROM s
WHERE h.name = %(name)s::text AND h.slot = '' AND h.owner = '{SHARED}'
"""

# One statement sees the rows as they were when it began. The anchor is freed only if every reader
# that was there then was deleted here, and none has come since: its `renewed_at` is the same. Both
# are compared with the newest version of each row.
# Returns: whether the leaving reader had a row; whether the anchor was freed.
_SETTLE = f"""
WITH {LAZY_LIMITS}, a AS MATERIALIZED (
    SELECT h.id, h.renewed_at FROM {HELD} h, s
    WHERE h.name = %(name)s::text AND h.slot = '' AND h.owner = '{SHARED}'),
d AS (
    DELETE FROM {HELD} h USING s WHERE h.name = %(name)s::text AND h.slot <> ''
    AND (h.slot = %(owner)s::text OR h.expires_at <= clock_timestamp()) RETURNING h.slot),
u AS (
    {{}} h.id = a.id AND h.owner = '{SHARED}' AND h.renewed_at = a.renewed_at AND (
        SELECT count(*) FROM d) = (
        SELECT count(*) FROM {HELD} x WHERE x.name = %(name)s::text AND x.slot <> '')
    RETURNING h.id)
SELECT EXISTS (SELECT 1 FROM d WHERE slot = %(owner)s::text), EXISTS (SELECT 1 FROM u)
"""
SETTLE = _SETTLE.format(f"UPDATE {HELD} h SET expires_at = clock_timestamp() FROM a WHERE")
# While a writer waits, the anchor keeps new readers out.
LEAVE = _SETTLE.format(
    f"DELETE FROM {HELD} h USING a WHERE coalesce(h.no_readers_until, '-infinity') <= "
    "clock_timestamp() AND"
)

# A set is an array for each column that differs, in the order of the names. Rows are locked in that
# order, those of the registry before the fences: two sets don't wait for each other.
_SET = """e AS MATERIALIZED (
    SELECT e.* FROM s, unnest(%(ids)s::bigint[], %(names)s::text[], %(owners)s::text[],
        %(permits)s::int[], {}) WITH ORDINALITY AS e(id, name, owner, permits, {}, place))"""
_SET_VALUES = ", ".join(
    f"e.{column}" if column in OF_EACH else f"%({column})s::{TYPES.get(column, 'text')}"
    for column in COLUMNS
)

_SET_ROWS = f"""
    {INTO_HELD}
    SELECT {_SET_VALUES}, {TIMES} FROM e, (SELECT clock_timestamp() AS now) c
    WHERE NOT EXISTS (
        SELECT 1 FROM {HELD} x WHERE x.name = ANY(%(names)s::text[])
        AND x.owner <> ALL(%(owners)s::text[]) AND x.expires_at > clock_timestamp())
    ORDER BY e.place
    ON CONFLICT (name, slot) DO UPDATE SET {SET_ALL}
    WHERE h.expires_at <= clock_timestamp() OR h.owner = EXCLUDED.owner
    RETURNING h.name, h.owner
"""
_WHOLE_SET = "(SELECT count(*) FROM h) = cardinality(%(names)s::text[])"

# Another session may take a row after the statement began: then the set isn't whole, no fence is
# raised, and `claim_all()` deletes the rows that it took.
CLAIM_SET = f"""
WITH {LIMITS}, {_SET.format("ARRAY[]::int[]", "n")}, h AS ({_SET_ROWS}), f AS (
    INSERT INTO {FENCE} AS f (name, token, owner)
    SELECT h.name, 1, h.owner FROM h WHERE {_WHOLE_SET} ORDER BY h.name COLLATE "C"
    ON CONFLICT (name) DO UPDATE SET {DRAW}, owner = EXCLUDED.owner
    RETURNING f.name, f.token)
SELECT h.name, f.token FROM h LEFT JOIN f USING (name)
"""

ENTER_SET = f"WITH {LIMITS}, {_SET.format('ARRAY[]::int[]', 'n')} {_SET_ROWS}"

RECORD_SET = f"""
WITH {LIMITS}, {_SET.format("%(tokens)s::bigint[]", "token")}, f AS (
    INSERT INTO {FENCE} AS f (name, token, owner)
    SELECT e.name, e.token, e.owner FROM e WHERE NOT EXISTS (
        SELECT 1 FROM {HELD} x WHERE x.name = e.name AND x.expires_at > clock_timestamp()
        AND (x.alias <> %(alias)s::text OR x.backend <> %(backend)s::text)
        AND x.owner <> '{SHARED}')
    ORDER BY e.place
    ON CONFLICT (name) DO UPDATE SET token = EXCLUDED.token, owner = EXCLUDED.owner
    WHERE f.token < EXCLUDED.token
    RETURNING f.name)
{INTO_HELD}
SELECT {_SET_VALUES}, {TIMES} FROM e JOIN f USING (name),
    (SELECT clock_timestamp() AS now) c ORDER BY e.place
ON CONFLICT (name, slot) DO UPDATE SET {SET_ALL}
RETURNING h.name
"""

# An owner holds one name only, so no wrong pair is ever found.
CLEAR_MANY = f"""
DELETE FROM {HELD} WHERE name = ANY(%(names)s::text[]) AND owner = ANY(%(owners)s::text[])
RETURNING owner
"""

#: With how the rows are locked.
RENEW = f"""
WITH {LAZY_LIMITS},
w AS MATERIALIZED (
    SELECT name, owner, ttl FROM s, unnest(%(names)s::text[], %(owners)s::text[],
        %(ttls)s::double precision[]) AS w(name, owner, ttl)),
p AS MATERIALIZED (
    SELECT h.id, w.ttl FROM {HELD} h JOIN w ON h.name = w.name AND h.owner = w.owner
    {{}})
UPDATE {HELD} h SET renewed_at = c.now, expires_at = c.now + p.ttl * interval '1 second'
FROM p, (SELECT clock_timestamp() AS now) c WHERE h.id = p.id RETURNING h.owner
"""

#: What `session_words()` describes.
_SESSION = """a.pid, a.application_name, a.state,
extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, a.backend_start))"""
# Row locks aren't in pg_locks, but the row itself names the transaction that has it locked. Where
# several have, it names none.
PINNED_BY = f"""
SELECT {_SESSION} FROM {FENCE} f
JOIN pg_locks l ON l.locktype = 'transactionid' AND l.granted AND l.transactionid = f.xmax
JOIN pg_stat_activity a ON a.pid = l.pid
WHERE f.name = %(name)s
"""

# By a change of the schema, an index that is made, or a VACUUM FULL: what keeps writes waiting.
LOCKED_BY = f"""
SELECT c.relname, {_SESSION}
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.granted AND c.relkind IN ('r', 'p')
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
AND starts_with(c.relname, 'django_fencedlock_') ORDER BY a.xact_start, c.relname
"""


def sqlstate(error: Error) -> str | None:
    """What the server called an error; psycopg 2 has another word for it than psycopg 3."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def session_words(number: int, program: str | None, state: str | None, seconds: float) -> str:
    """Describe a session of the server for people."""
    by = f" of {program!r}" if program else ""
    return f"server session {number}{by}, {state or 'state unknown'}, begun {seconds:.1f} s ago"


class DriverCursor:
    """A cursor of the driver that raises Django's errors, and takes half the time of Django's."""

    def __init__(self, connection: BaseDatabaseWrapper, raw: Any, prepare: bool | None) -> None:
        self._raw, self._errors, self._prepare = raw, connection.wrap_database_errors, prepare
        # No errors of the server: execute() has read the whole answer.
        self.fetchone, self.fetchall = raw.fetchone, raw.fetchall

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def execute(self, statement: str, given: Any = ()) -> None:
        with self._errors:
            self._raw.execute(statement, given, prepare=self._prepare)

    @property
    def rowcount(self) -> int:
        return int(self._raw.rowcount)


class PostgresLedger(SharedLedger):
    clock = "clock_timestamp()"
    expiry = "clock_timestamp() + %(ttl)s * interval '1 second'"
    lock_rows = "FOR UPDATE OF h"
    lock_free_rows = "FOR UPDATE OF h SKIP LOCKED"

    def times(self, ttl: float = 0.0) -> dict[str, Any]:
        return {"ttl": ttl}

    def cursor(
        self, connection: BaseDatabaseWrapper, *, prepare: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a cursor that prepares its statements, which show their parameters' types."""
        # Unless `prepare` is False: the server then plans for the present length of an array.
        raw = getattr(connection, CURSOR, None)
        return connection.cursor() if raw is None else DriverCursor(connection, raw, prepare)

    def claim(
        self, connection: BaseDatabaseWrapper, entry: Entry, *, draw: bool = True
    ) -> tuple[bool, int | None]:
        draw = draw and entry.fenced
        with self.cursor(connection) as cursor:
            cursor.execute(CLAIM if draw else ENTER, self.parameters(connection, entry))
            row = cursor.fetchone()
        return row is not None, row[0] if row and draw else None

    def record(
        self, connection: BaseDatabaseWrapper, entry: Entry, token: int, seen: Newest | None = None
    ) -> bool:
        given = {**self.parameters(connection, entry), "token": token, **seen_values(seen)}
        with self.cursor(connection) as cursor:
            # Readers leave the fence of the readers before them alone.
            cursor.execute(RECORD_READER if seen == (token, SHARED) else RECORD, given)
            return cursor.fetchone() is not None

    def claim_all(
        self, connection: BaseDatabaseWrapper, entries: Sequence[Entry]
    ) -> list[int | None] | None:
        with self.cursor(connection) as cursor:
            fenced = entries[0].fenced
            given = self.parameters(connection, entries[0]) | _set_arrays(entries)
            cursor.execute(CLAIM_SET if fenced else ENTER_SET, given)
            rows = cursor.fetchall()
            if len(rows) == len(entries):
                tokens = dict(rows)
                return [tokens[entry.name] if fenced else None for entry in entries]
            if rows:
                cursor.execute(CLEAR_MANY, given)
        return None

    def record_all(
        self, connection: BaseDatabaseWrapper, grants: Sequence[tuple[Entry, int]]
    ) -> set[str]:
        entries = [entry for entry, _ in grants]
        given = self.parameters(connection, entries[0]) | _set_arrays(entries)
        given["tokens"] = [token for _, token in grants]
        with self.cursor(connection) as cursor:
            cursor.execute(RECORD_SET, given)
            return {name for (name,) in cursor.fetchall()}

    def clear(self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed]) -> int:
        if len(leases) == 1:
            return super().clear(connection, leases)
        with self.cursor(connection, prepare=False) as cursor:
            cursor.execute(CLEAR_MANY, _arrays(leases))
            return int(cursor.rowcount)

    def claim_shared(
        self, connection: BaseDatabaseWrapper, entry: Entry
    ) -> tuple[bool, int | None]:
        given = self.parameters(connection, entry)
        with self.cursor(connection) as cursor:
            cursor.execute(CLAIM_SHARED, {**given, "anchor": new_id()})
            if cursor.fetchone() is None:
                return False, None
            if not entry.fenced:
                return True, None
            try:
                cursor.execute(DRAW_SHARED, given)
                row = cursor.fetchone()
            except BaseException:
                # The row is committed already, and would exclude writers for a whole ttl.
                with contextlib.suppress(Error):
                    cursor.execute(CLEAR, given)
                raise
            return row is not None, row and row[0]

    def note_writer(self, connection: BaseDatabaseWrapper, name: str) -> None:
        with self.cursor(connection) as cursor:
            cursor.execute(NOTE_WRITER, {"name": name})

    def _settle(
        self, connection: BaseDatabaseWrapper, name: str, leaving: str = ""
    ) -> tuple[bool, bool]:
        with self.cursor(connection) as cursor:
            cursor.execute(LEAVE if leaving else SETTLE, {"name": name, "owner": leaving})
            was_there, settled = cursor.fetchone()
            return was_there, settled

    def clear_all(self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed]) -> set[str]:
        with self.cursor(connection) as cursor:
            cursor.execute(CLEAR_MANY, _arrays(leases))
            return {owner for (owner,) in cursor.fetchall()}

    def _renew(
        self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed], lock: str
    ) -> set[str]:
        with self.cursor(connection, prepare=False) as cursor:
            cursor.execute(RENEW.format(lock), _arrays(leases))
            return {owner for (owner,) in cursor.fetchall()}

    def rolls_back(self, connection: BaseDatabaseWrapper, error: Error) -> bool:
        return False

    def is_row_locked(self, error: Error) -> bool:
        # lock_not_available, deadlock_detected
        return sqlstate(error) in ("55P03", "40P01")

    def pinned_by(self, connection: BaseDatabaseWrapper, name: str) -> str | None:
        with connection.cursor() as cursor:
            cursor.execute(PINNED_BY, {"name": name})
            found = cursor.fetchone()
        if found:
            return f"the transaction of {session_words(*found)}"
        return find_pin(self, connection, name)

    def tables_locked_by(self, connection: BaseDatabaseWrapper) -> str | None:
        with connection.cursor() as cursor:
            cursor.execute(LOCKED_BY)
            found = cursor.fetchall()
        return " and ".join(
            f"{session_words(*facts)}, has table {table} locked" for table, *facts in found
        )


def _set_arrays(entries: Sequence[Entry]) -> dict[str, list[Any]]:
    return {
        "ids": [new_id() for _ in entries],
        "names": [entry.name for entry in entries],
        "owners": [entry.owner.id for entry in entries],
        "permits": [entry.permits for entry in entries],
    }


def _arrays(leases: Sequence[Claimed]) -> dict[str, list[Any]]:
    return {
        "names": [lease.name for lease in leases],
        "owners": [lease.owner for lease in leases],
        "ttls": [lease.ttl for lease in leases],
    }
