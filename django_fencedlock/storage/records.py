"""How statements on the other tables are written, for each dialect, and run beside the caller."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import AliasConfig
from ..core.transactions import in_transaction, test_connection
from ..exceptions import BackendUnavailable
from .connections import pool, preparing_cursor
from .dialect import BATCH, utc_text
from .errors import describe_error
from .sqlite import machine_time
from .vendors import ledger_for

T = TypeVar("T")

#: Seconds to wait for SQLite's file where waiting long would be in vain.
BRIEFLY = 0.25
#: How often a transaction is tried that lost a deadlock, or waited for a row for too long.
TRIES = 4


class Statements:
    """Writes statements in the dialect of one connection, and runs them there."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.ledger = ledger_for(connection)
        self.returns_rows = connection.vendor == "postgresql"

    @contextlib.contextmanager
    def cursor(self, *, atomic: bool, often: bool = False) -> Iterator[Any]:
        """
        A cursor; in a transaction of our own if what it does belongs together.

        SQLite always has one: a lock on its file for each statement would cost more. A statement
        that comes `often` has to have the same text each time.
        """
        if atomic or self.connection.vendor == "sqlite":
            with self.ledger.transaction(self.connection) as cursor:
                yield cursor
        else:
            make = self.reading if often else self.connection.cursor
            with make() as cursor:
                yield cursor

    def reading(self) -> AbstractContextManager[Any]:
        """A cursor for a question that comes often, with the same text each time."""
        return preparing_cursor(self.connection)

    @property
    def now(self) -> str:
        """The server's time as an expression; wants the parameters of `times()`."""
        return self.ledger.clock

    def later(self, key: str) -> str:
        """The server's time and so many seconds, which `times()` is given by this key."""
        vendor = self.connection.vendor
        if vendor == "postgresql":
            return f"clock_timestamp() + %({key})s * interval '1 second'"
        if vendor == "mysql":
            return f"UTC_TIMESTAMP(6) + INTERVAL %({key})s MICROSECOND"
        return f"%({key})s"

    def times(self, **later: float) -> dict[str, Any]:
        """The parameters of `now` and `later()`. To be asked after a transaction has begun."""
        vendor = self.connection.vendor
        if vendor == "postgresql":
            return dict(later)
        if vendor == "mysql":
            return {key: round(wait * 1_000_000) for key, wait in later.items()}
        now = machine_time()
        moments = {key: utc_text(now + timedelta(seconds=wait)) for key, wait in later.items()}
        return {"now": utc_text(now), **moments}

    def upsert(
        self, table: str, values: Mapping[str, str], key: Sequence[str], sets: Mapping[str, str]
    ) -> str:
        """
        An INSERT that changes the row by `sets` if there is one with the same `key`.

        MySQL makes the assignments one by one, in their order, and the later ones see what the
        earlier ones did. So a column that others are reckoned from has to come after them.
        """
        mysql = self.connection.vendor == "mysql"
        conflict = (
            "ON DUPLICATE KEY UPDATE" if mysql else f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET"
        )
        return (
            f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join(values.values())}) "
            f"{conflict} {_assignments(sets)}"
        )

    def written(
        self, cursor: Any, change: str, given: Mapping[str, Any], columns: str, read: str
    ) -> tuple[Any, ...] | None:
        """
        Make a change, and bring `columns` of the changed row back.

        Args:
            read: The FROM and WHERE that find it afterwards, where the change itself can't.
        """
        if self.returns_rows:
            cursor.execute(f"{change} RETURNING {columns}", given)
        else:
            cursor.execute(change, given)
            if not cursor.rowcount:
                return None
            cursor.execute(f"SELECT {columns} {read}", given)
        found: tuple[Any, ...] | None = cursor.fetchone()
        return found


def update(table: str, sets: Mapping[str, str], condition: str) -> str:
    """An UPDATE. The order of `sets` counts as in `Statements.upsert()`."""
    return f"UPDATE {table} SET {_assignments(sets)} WHERE {condition}"


def _assignments(sets: Mapping[str, str]) -> str:
    return ", ".join(f"{column} = {value}" for column, value in sets.items())


class Records:
    """A table in the fence database of an alias, used on private sessions."""

    def __init__(self, config: AliasConfig) -> None:
        self.config = config
        self.using = config.fence_database
        self._timeout = config.timeout
        #: Seconds to wait for SQLite's file.
        self._patience = self._timeout

    def run(self, doing: str, name: str | None, work: Callable[[Statements], T]) -> T:
        """
        Have `work` done, apart from any transaction of the caller's.

        It may be done twice: an answer that was lost doesn't tell whether it took effect.
        """
        for left in reversed(range(TRIES)):
            try:
                return self._once(work)
            except Error as exc:
                if not left or not self._is_worth_another_try(exc):
                    raise self._unavailable(doing, name, exc) from exc
                time.sleep(random.uniform(0.005, 0.05))
        raise AssertionError  # pragma: no cover

    def in_batches(self, doing: str, batches: int, work: Callable[[Statements], int]) -> int:
        """Have `work` delete rows, `BATCH` of them each time, while there are; returns how many."""
        deleted = 0
        for _ in range(batches):
            part = self.run(doing, None, work)
            deleted += part
            if part < BATCH:
                break
        return deleted

    def _once(self, work: Callable[[Statements], T]) -> T:
        patience = BRIEFLY if in_transaction(self.using) else self._patience
        return pool(self.using, self._timeout).run(
            lambda private: work(Statements(private)), busy_timeout=patience
        )

    def _is_worth_another_try(self, error: Error) -> bool:
        connection = connections[self.using]
        # SQLite has waited already.
        return (
            connection.vendor != "sqlite"
            and test_connection(self.using) is None
            and ledger_for(connection).is_row_locked(error)
        )

    def _unavailable(self, doing: str, name: str | None, exc: Error) -> BackendUnavailable:
        about = "" if name is None else f" of lock {name!r}"
        return BackendUnavailable(
            f"Fence database {self.using!r} failed at the {doing}{about}: "
            f"{type(exc).__name__}: {describe_error(exc, self.using)}",
            name=name,
            alias=self.config.alias,
        )
