"""Which ledger speaks a database's dialect; and the one of MariaDB and MySQL."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from django.db import Error, IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper

from .dialect import CLEAR, FENCE, HELD, Claimed, Entry, find_pin
from .postgresql import PostgresLedger
from .readers import SharedLedger
from .text import fit_column

T = TypeVar("T")

#: How often a transaction is tried that loses a deadlock, and the longest pause before the next
#: try, in seconds: without one, the same transactions meet again.
TRIES, PAUSE = 12, 0.01
#: MariaDB answers NOWAIT with the first, MySQL with the last.
LOCK_WAIT_TIMEOUT, DEADLOCK, NOWAIT = 1205, 1213, 3572
#: Columns with texts that the database may be unable to store.
_TEXTS = ("host", "thread", "task_name", "task_id")


class MySQLLedger(SharedLedger):
    """The ledger on MariaDB and MySQL."""

    clock = "UTC_TIMESTAMP(6)"
    expiry = "UTC_TIMESTAMP(6) + INTERVAL %(micros)s MICROSECOND"
    begin = "BEGIN"
    insert_or_ignore = "INSERT IGNORE"
    # IGNORE alone locks a live row, and the renewals of that row leave it out.
    if_absent = (
        f"SELECT {{}} FROM DUAL WHERE NOT EXISTS (SELECT 1 FROM {HELD} x "
        "WHERE x.name = %(name)s AND x.slot = %(slot)s)"
    )
    lock_rows = " FOR UPDATE"
    lock_free_rows = " FOR UPDATE SKIP LOCKED"
    on_conflict, rejected = "ON DUPLICATE KEY UPDATE", "VALUES({column})"

    def claim_all(
        self, connection: BaseDatabaseWrapper, entries: Sequence[Entry]
    ) -> list[int | None] | None:
        try:
            return self._repeat(super().claim_all, connection, entries)
        except IntegrityError:
            # Another session inserted a row at this very moment.
            return None

    def record_all(
        self, connection: BaseDatabaseWrapper, grants: Sequence[tuple[Entry, int]]
    ) -> set[str]:
        return self._repeat(super().record_all, connection, grants)

    def clear(self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed]) -> int:
        return len(self.clear_all(connection, leases))

    def clear_all(self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed]) -> set[str]:
        return self._repeat(super().clear_all, connection, leases)

    def claim_shared(
        self, connection: BaseDatabaseWrapper, entry: Entry
    ) -> tuple[bool, int | None]:
        return self._repeat(super().claim_shared, connection, entry)

    def _settle(
        self, connection: BaseDatabaseWrapper, name: str, leaving: str = ""
    ) -> tuple[bool, bool]:
        return self._repeat(super()._settle, connection, name, leaving)

    def _repeat(self, work: Callable[..., T], connection: BaseDatabaseWrapper, *given: Any) -> T:
        # InnoDB also locks what was deleted just now, so two sets may lose a deadlock in spite of
        # their order. The transaction was rolled back.
        for left in reversed(range(TRIES)):
            try:
                return work(connection, *given)
            except Error as exc:
                if not left or connection.in_atomic_block or exc.args[:1] != (DEADLOCK,):
                    raise
            time.sleep(random.uniform(0, PAUSE))
        raise AssertionError("unreachable")

    def _overwrite(self, cursor: Any, given: dict[str, Any], condition: str = "") -> bool:
        if condition:
            # The UPDATE finds the row by a second index, and keeps it locked until the transaction
            # ends, also if it changes nothing: the holder's renewal would wait.
            where = f"name = %(name)s AND slot = %(slot)s{condition}"
            cursor.execute(f"SELECT 1 FROM {HELD} WHERE {where}", given)
            if cursor.fetchone() is None:
                return False
        return super()._overwrite(cursor, given, condition)

    def values(self, connection: BaseDatabaseWrapper, entry: Entry) -> dict[str, Any]:
        values = entry.values()
        return values | {each: fit_column(connection, values[each]) for each in _TEXTS}

    def times(self, ttl: float = 0.0) -> dict[str, Any]:
        return {"micros": round(ttl * 1_000_000)}

    def claiming(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[Any]:
        # No transaction: the statements commit by themselves, for half the round trips, and because
        # INSERT IGNORE followed by UPDATE in one would make concurrent claims deadlock.
        return self.cursor(connection)

    def _draw(
        self, connection: BaseDatabaseWrapper, cursor: Any, given: dict[str, Any]
    ) -> int | None:
        """Raise the fence for the row's owner; return the token, None for another owner's row."""
        try:
            # The row is locked meanwhile, so tokens rise in the order in which it was taken.
            # LAST_INSERT_ID(x) brings x back with the answer, on the insert's path as well.
            # Assignments take effect from left to right: the owner is compared before it is set.
            cursor.execute(
                f"INSERT INTO {FENCE} (name, token, owner) "
                f"SELECT h.name, LAST_INSERT_ID(1), h.owner FROM {HELD} h "
                "WHERE h.name = %(name)s AND h.slot = '' AND h.owner = %(owner)s FOR UPDATE "
                f"ON DUPLICATE KEY UPDATE token = "
                f"LAST_INSERT_ID({FENCE}.token + ({FENCE}.owner <> VALUES(owner))), "
                "owner = VALUES(owner)",
                given,
            )
            if not cursor.rowcount:
                return None
            # A trigger on the fences that fills an AUTO_INCREMENT has the answer bring 0.
            return cursor.lastrowid or self._token_of(cursor, given)
        except BaseException:
            # The row is committed already, and would exclude all others for a whole ttl.
            with contextlib.suppress(Error):
                cursor.execute(CLEAR, given)
            raise

    def _token_of(self, cursor: Any, given: dict[str, Any]) -> int | None:
        cursor.execute(
            f"SELECT token FROM {FENCE} WHERE name = %(name)s AND owner = %(owner)s", given
        )
        row = cursor.fetchone()
        return row[0] if row else None

    def pinned_by(self, connection: BaseDatabaseWrapper, name: str) -> str | None:
        return find_pin(self, connection, name)

    def is_row_locked(self, error: Error) -> bool:
        return bool(error.args) and error.args[0] in (LOCK_WAIT_TIMEOUT, DEADLOCK, NOWAIT)

    def rolls_back(self, connection: BaseDatabaseWrapper, error: Error) -> bool:
        # A deadlock does; waiting too long does only if innodb_rollback_on_timeout is set.
        return self.is_row_locked(error)


#: By the vendor of a connection: the ledger that speaks its dialect.
LEDGERS: dict[str, SharedLedger] = {
    "postgresql": PostgresLedger(),
    "sqlite": SharedLedger(),
    "mysql": MySQLLedger(),
}
