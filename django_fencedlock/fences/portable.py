"""The ledger in several plain statements within one transaction, for SQLite and MySQL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ..lease import Lease
from .ledger import COLUMNS, HELD, TAKEN_OVER, TIMES, Entry, Ledger, batches

VALUES = ", ".join(f"%({column})s" for column in COLUMNS)
INTO_HELD = f"{HELD} ({', '.join((*COLUMNS, *TIMES))})"


class PortableLedger(Ledger):
    """What is alike on databases that take a statement for each step."""

    #: The server's time plus the parameter ``ttl``, as an expression.
    expiry: str

    def enter(self, connection: BaseDatabaseWrapper, entry: Entry) -> bool:
        with self.transaction(connection) as cursor:
            given = {**self.values(connection, entry), **self.times(connection, entry.ttl)}
            return self._insert(cursor, given) or self._take_over(cursor, given)

    def record(self, connection: BaseDatabaseWrapper, entry: Entry, token: int) -> bool:
        with self.transaction(connection) as cursor:
            given = {
                **self.values(connection, entry),
                **self.times(connection, entry.ttl),
                "token": token,
            }
            if self._conflicts(cursor, given) or not self._raise_fence(cursor, given):
                return False
            if not self._insert(cursor, given):
                self._overwrite(cursor, given, "")
            return True

    def renew(self, connection: BaseDatabaseWrapper, leases: Sequence[Lease]) -> set[str]:
        kept = self._renew(connection, leases, self.lock_free_rows)
        locked = [lease for lease in leases if lease.owner not in kept]
        if locked and self.lock_rows:
            # Or gone. A lock on a row lasts for a moment, most likely.
            try:
                kept |= self._renew(connection, locked, self.lock_rows)
            except Error as exc:
                if not self.is_row_locked(exc):
                    raise
        return kept

    def _renew(
        self, connection: BaseDatabaseWrapper, leases: Sequence[Lease], lock: str
    ) -> set[str]:
        kept: set[str] = set()
        with self.transaction(connection) as cursor:
            for ttl, group in groupby(sorted(leases, key=_ttl), key=_ttl):
                mine = list(group)
                free = self._lock_rows(cursor, mine, lock)
                times = self.times(connection, ttl)
                for names, owners, given in batches([each for each in mine if each.owner in free]):
                    cursor.execute(
                        f"UPDATE {HELD} SET renewed_at = {self.clock}, expires_at = {self.expiry} "
                        f"WHERE name IN ({names}) AND owner IN ({owners})",
                        {**given, **times},
                    )
                kept |= free
        return kept

    def values(self, connection: BaseDatabaseWrapper, entry: Entry) -> dict[str, Any]:
        """The values of a row, as the columns can have them."""
        return entry.values()

    @abstractmethod
    def times(self, connection: BaseDatabaseWrapper, ttl: float) -> dict[str, Any]:
        """The parameters of `clock` and `expiry`."""

    @abstractmethod
    def _raise_fence(self, cursor: Any, given: dict[str, Any]) -> bool:
        """Make the proposed token the newest; False if a newer one, or the same, was there."""

    def _lock_rows(self, cursor: Any, leases: Sequence[Lease], lock: str) -> set[str]:
        """Lock rows, by the end of a SELECT that does so; returns their owners."""
        found: set[str] = set()
        for names, owners, given in batches(leases):
            cursor.execute(
                f"SELECT owner FROM {HELD} WHERE name IN ({names}) AND owner IN ({owners}){lock}",
                given,
            )
            found.update(owner for (owner,) in cursor.fetchall())
        return found

    #: An INSERT that does nothing if the name is there.
    insert_or_ignore: str
    #: Its values.
    if_absent = "VALUES ({})"
    #: What makes a SELECT lock its rows; and pass over those that are locked.
    lock_rows = lock_free_rows = ""

    def _insert(self, cursor: Any, given: dict[str, Any]) -> bool:
        cursor.execute(self._insertion, given)
        return bool(cursor.rowcount)

    @cached_property
    def _insertion(self) -> str:
        values = f"{VALUES}, {self.clock}, {self.clock}, {self.expiry}"
        return f"{self.insert_or_ignore} INTO {INTO_HELD} {self.if_absent.format(values)}"

    def _take_over(self, cursor: Any, given: dict[str, Any]) -> bool:
        return self._overwrite(
            cursor, given, f" AND (expires_at <= {self.clock} OR owner = %(owner)s)"
        )

    def _overwrite(self, cursor: Any, given: dict[str, Any], condition: str) -> bool:
        columns = ", ".join(f"{column} = {self._value(column)}" for column in TAKEN_OVER)
        cursor.execute(f"UPDATE {HELD} SET {columns} WHERE name = %(name)s{condition}", given)
        return bool(cursor.rowcount)

    def _value(self, column: str) -> str:
        if column == "expires_at":
            return self.expiry
        return self.clock if column.endswith("_at") else f"%({column})s"

    def _conflicts(self, cursor: Any, given: dict[str, Any]) -> bool:
        cursor.execute(
            f"SELECT 1 FROM {HELD} WHERE name = %(name)s AND expires_at > {self.clock} "
            "AND (alias <> %(alias)s OR backend <> %(backend)s)",
            given,
        )
        return cursor.fetchone() is not None


def _ttl(lease: Lease) -> float:
    return lease.ttl
