"""Queries on the other tables, beside the caller's transaction."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from django.apps import apps
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DateTimeField, Expression, Model, QuerySet

from ..conf import AliasConfig
from ..exceptions import BackendUnavailable
from .connections import SQLITE_BUSY_TIMEOUT, in_transaction, pool, test_connection
from .dialect import BATCH, utc_text
from .errors import describe_error
from .sqlite import machine_time
from .vendors import ledger_for

T = TypeVar("T")

#: How often a transaction is tried that lost a deadlock, or waited for a row for too long.
TRIES = 4


class ServerTime(Expression):
    """The server's time, `plus` seconds. Rows expire by it."""

    def __init__(self, plus: float = 0.0) -> None:
        super().__init__(output_field=DateTimeField())
        self.plus = plus

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> Any:
        if connection.vendor == "postgresql":
            return "(clock_timestamp() + %s * interval '1 second')", [float(self.plus)]
        if connection.vendor == "mysql":
            return "(UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND)", [round(self.plus * 1_000_000)]
        # SQLite has no clock of its own. This is read after BEGIN IMMEDIATE, which may wait.
        return "%s", [utc_text(machine_time() + timedelta(seconds=self.plus))]


class Statements:
    """Runs statements in the dialect of one connection."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.ledger = ledger_for(connection)
        self.returns_rows = connection.vendor == "postgresql"

    @contextlib.contextmanager
    def cursor(self, *, atomic: bool) -> Iterator[Any]:
        """
        Return a cursor; in a transaction of its own if its statements belong together.

        SQLite always has one: to lock its file for each statement would cost more.
        """
        if atomic or self.connection.vendor == "sqlite":
            with self.ledger.transaction(self.connection) as cursor:
                yield cursor
        else:
            with self.connection.cursor() as cursor:
                yield cursor

    @property
    def now(self) -> str:
        """The server's time as an expression, which needs the parameters of `times()`."""
        return self.ledger.clock

    def later(self, key: str) -> str:
        """Return the server's time plus the seconds that `times()` gets by this key."""
        vendor = self.connection.vendor
        if vendor == "postgresql":
            return f"clock_timestamp() + %({key})s * interval '1 second'"
        if vendor == "mysql":
            return f"UTC_TIMESTAMP(6) + INTERVAL %({key})s MICROSECOND"
        return f"%({key})s"

    def times(self, **later: float) -> dict[str, Any]:
        """Return the parameters of `now` and `later()`. Call it after a transaction has begun."""
        vendor = self.connection.vendor
        if vendor == "postgresql":
            return dict(later)
        if vendor == "mysql":
            return {key: round(wait * 1_000_000) for key, wait in later.items()}
        now = machine_time()
        moments = {key: utc_text(now + timedelta(seconds=wait)) for key, wait in later.items()}
        return {"now": utc_text(now), **moments}


class Records:
    """A table in the fence database of an alias, used through private connections."""

    def __init__(self, config: AliasConfig) -> None:
        self.config = config
        self.using = config.fence_database
        self._timeout = config.timeout
        #: Seconds to wait for SQLite's file.
        self._patience = self._timeout

    def rows(self, model: str) -> QuerySet[Any]:
        """Return the rows of a model, for use within `query()`."""
        found: type[Model] = apps.get_model("django_fencedlock", model)
        return found._base_manager.using(self.using)

    def query(self, doing: str, name: str | None, work: Callable[[], T]) -> T:
        """
        Call `work`, whose queries through Django's ORM use a private connection.

        It may be called twice: a lost answer doesn't show whether the query took effect.
        """
        return self._repeat(doing, name, lambda: pool(self.using, self._timeout).run_orm(work))

    def run(self, doing: str, name: str | None, work: Callable[[Statements], T]) -> T:
        """Call `work` with the statements of a private connection; see `query()`."""
        return self._repeat(doing, name, lambda: self._once(work))

    def in_batches(self, doing: str, batches: int, work: Callable[[], int]) -> int:
        """Call `work`, which deletes up to `BATCH` rows, while there are; return how many."""
        deleted = 0
        for _ in range(batches):
            part = self.query(doing, None, work)
            deleted += part
            if part < BATCH:
                break
        return deleted

    def _repeat(self, doing: str, name: str | None, once: Callable[[], T]) -> T:
        for left in reversed(range(TRIES)):
            try:
                return once()
            except Error as exc:
                if not left or not self._is_worth_another_try(exc):
                    raise self._unavailable(doing, name, exc) from exc
                time.sleep(random.uniform(0.005, 0.05))
        raise AssertionError  # pragma: no cover

    def _once(self, work: Callable[[Statements], T]) -> T:
        patience = SQLITE_BUSY_TIMEOUT if in_transaction(self.using) else self._patience
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
