"""The ledger on PostgreSQL: each act is one statement, and thus one round trip."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from .connections import CURSOR
from .dialect import (
    COLUMNS,
    FENCE,
    HELD,
    LOCK_WAIT,
    TIME_COLUMNS,
    Claimed,
    Entry,
    Ledger,
    Newest,
    find_pin,
    seen_values,
)

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
SET_ALL = ", ".join(f"{column} = EXCLUDED.{column}" for column in (*COLUMNS[1:], *TIME_COLUMNS))
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
        SELECT 1 FROM {HELD} x WHERE x.name = %(name)s::text AND x.owner <> %(owner)s::text
        AND x.expires_at > clock_timestamp())
    ON CONFLICT (name) DO UPDATE SET {SET_ALL}
    WHERE h.expires_at <= clock_timestamp() OR h.owner = EXCLUDED.owner
    RETURNING h.name, h.owner
"""

CLAIM = f"""
WITH {LIMITS}, h AS ({_CLAIM_ROW})
INSERT INTO {FENCE} AS f (name, token, owner) SELECT h.name, 1, h.owner FROM h
ON CONFLICT (name) DO UPDATE SET {DRAW}, owner = EXCLUDED.owner
RETURNING f.token
"""

ENTER = f"WITH {LIMITS} {_CLAIM_ROW}"

#: True if the name is live at another lock service.
CONFLICT = f"""EXISTS (
    SELECT 1 FROM {HELD} x WHERE x.name = %(name)s::text AND x.expires_at > clock_timestamp()
    AND (x.alias <> %(alias)s::text OR x.backend <> %(backend)s::text))"""

# The fence comes first: whether its token rises decides everything.
RECORD = f"""
WITH {LIMITS}, f AS (
    INSERT INTO {FENCE} AS f (name, token, owner)
    SELECT %(name)s::text, %(token)s::bigint, %(owner)s::text FROM s WHERE NOT {CONFLICT}
    ON CONFLICT (name) DO UPDATE SET token = EXCLUDED.token, owner = EXCLUDED.owner
    WHERE f.token < EXCLUDED.token AND (
        %(seen)s::bigint IS NULL OR f.token = %(seen)s::bigint AND f.owner = %(writer)s::text)
    RETURNING f.token)
{INTO_HELD}
SELECT {VALUES}, {TIMES} FROM f, (SELECT clock_timestamp() AS now) c
ON CONFLICT (name) DO UPDATE SET {SET_ALL}
RETURNING h.name
"""

# An owner holds one name only, so no wrong pair is ever found.
CLEAR_MANY = f"""
DELETE FROM {HELD} WHERE name = ANY(%(names)s::text[]) AND owner = ANY(%(owners)s::text[])
"""

#: With how the rows are locked.
RENEW = f"""
WITH {LAZY_LIMITS},
w AS MATERIALIZED (
    SELECT name, owner, ttl FROM s, unnest(%(names)s::text[], %(owners)s::text[],
        %(ttls)s::double precision[]) AS w(name, owner, ttl)),
p AS MATERIALIZED (
    SELECT h.name, w.ttl FROM {HELD} h JOIN w ON h.name = w.name AND h.owner = w.owner
    {{}})
UPDATE {HELD} h SET renewed_at = c.now, expires_at = c.now + p.ttl * interval '1 second'
FROM p, (SELECT clock_timestamp() AS now) c WHERE h.name = p.name RETURNING h.owner
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


class PostgresLedger(Ledger):
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
            cursor.execute(RECORD, given)
            return cursor.fetchone() is not None

    def clear(self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed]) -> int:
        if len(leases) == 1:
            return super().clear(connection, leases)
        with self.cursor(connection, prepare=False) as cursor:
            cursor.execute(CLEAR_MANY, _arrays(leases))
            return int(cursor.rowcount)

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


def _arrays(leases: Sequence[Claimed]) -> dict[str, list[Any]]:
    return {
        "names": [lease.name for lease in leases],
        "owners": [lease.owner for lease in leases],
        "ttls": [lease.ttl for lease in leases],
    }
