"""The ledger on SQLite, whose file has one writer at a time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from .connections import set_busy_timeout
from .dialect import FENCE, Entry, PortableLedger

DRAW = (
    f"INSERT INTO {FENCE} (name, token, owner) VALUES (%(name)s, 1, %(owner)s) "
    "ON CONFLICT (name) DO UPDATE SET token = token + (owner <> excluded.owner), "
    "owner = excluded.owner"
)
DRAWN = f"SELECT token FROM {FENCE} WHERE name = %(name)s"


def machine_time() -> datetime:
    """The time by which rows expire: that of this machine, as SQLite has no other."""
    return datetime.now(UTC)


def _text(moment: datetime) -> str:
    """Return a time in UTC as its column has it."""
    return str(moment.replace(tzinfo=None))


class SQLiteLedger(PortableLedger):
    # The server's clock is this machine's. It is read after BEGIN IMMEDIATE, which may wait.
    clock = "%(now)s"
    expiry = "%(expiry)s"
    begin = "BEGIN IMMEDIATE"
    insert_or_ignore = "INSERT OR IGNORE"
    # Not of this lock's holder, maybe: every writer keeps all others out.
    obstacle = "another transaction is writing to {using!r}, which has one writer at a time"

    def parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        return {"now": _text(machine_time())}

    def times(self, connection: BaseDatabaseWrapper, ttl: float) -> dict[str, Any]:
        now = machine_time()
        return {"now": _text(now), "expiry": _text(now + timedelta(seconds=ttl))}

    def patience(self, connection: BaseDatabaseWrapper, seconds: float) -> None:
        set_busy_timeout(connection, seconds)

    def claim(self, connection: BaseDatabaseWrapper, entry: Entry) -> tuple[bool, int | None]:
        with self.transaction(connection) as cursor:
            given = entry.values() | self.times(connection, entry.ttl)
            cursor.execute(self._insertion, given)
            if not cursor.rowcount and not self._take_over(cursor, given):
                return False, None
            return True, self._draw(cursor, given) if entry.fenced else None

    def _draw(self, cursor: Any, given: dict[str, Any]) -> int:
        """Raise the fence by one, unless this owner did so before, and return its token."""
        cursor.execute(DRAW, given)
        cursor.execute(DRAWN, given)
        token: int = cursor.fetchone()[0]
        return token

    def is_row_locked(self, error: Error) -> bool:
        # "database is locked", or "database table is locked" with a shared cache.
        return "is locked" in str(error)

    def pinned_by(self, connection: BaseDatabaseWrapper, name: str) -> str | None:
        row = self.look(connection, name)
        if row is not None and row.live:
            return None
        self.patience(connection, 0)
        try:
            with self.transaction(connection):
                return None
        except Error as exc:
            if self.is_row_locked(exc):
                return "SQLite doesn't tell whose it is"
            raise

    def rolls_back(self, connection: BaseDatabaseWrapper, error: Error) -> bool:
        # A full disk, an interrupt, or OR ROLLBACK in a statement.
        return not connection.connection.in_transaction
