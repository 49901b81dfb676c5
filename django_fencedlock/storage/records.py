"""Queries on the other tables, beside the caller's transaction."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

from django.apps import apps
from django.db import Error, IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DateTimeField, Expression, Model, QuerySet
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery

from ..conf import AliasConfig
from ..exceptions import BackendUnavailable
from .connections import SQLITE_BUSY_TIMEOUT, in_transaction, pool, test_connection
from .dialect import BATCH
from .text import describe_error
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
        now = datetime.now(UTC).replace(tzinfo=None)
        return "%s", [str(now + timedelta(seconds=self.plus))]


class Records:
    """A table in the fence database of an alias, on private connections."""

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
        Call `work`, whose ORM queries use a private connection.

        It may be called twice: a lost answer doesn't show whether the query took effect.
        """
        return self._repeat(doing, name, lambda: pool(self.using, self._timeout).run_orm(work))

    def fetch(self, rows: QuerySet[Any], *columns: str) -> list[Any]:
        """
        Return these columns of the rows, as attributes, within `query()`.

        The queryset itself may be given old rows by django-cachalot or django-cacheops.
        """
        sql, params = rows.values_list(*columns).query.get_compiler(self.using).as_sql()
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, params)
            found = cursor.fetchall()
        return [SimpleNamespace(**dict(zip(columns, values, strict=True))) for values in found]

    def add(self, row: Model) -> bool:
        """
        Insert a row within `query()`, unless its key is there; return whether it was inserted.

        One statement that needs no transaction, and sends no signals.
        """
        # MySQL's INSERT IGNORE would store a value that its column rejects, cut or empty. An error
        # of a plain INSERT undoes that statement alone there.
        is_mysql = connections[self.using].vendor == "mysql"
        query = InsertQuery(type(row), on_conflict=None if is_mysql else OnConflict.IGNORE)
        columns = row._meta.local_concrete_fields
        query.insert_values([each for each in columns if each is not row._meta.auto_field], [row])
        ((sql, params),) = query.get_compiler(self.using).as_sql()
        with connections[self.using].cursor() as cursor:
            try:
                cursor.execute(sql, params)
            except IntegrityError:
                if not is_mysql:
                    raise
                return False
            return bool(cursor.rowcount == 1)

    def run(self, doing: str, name: str | None, work: Callable[[BaseDatabaseWrapper], T]) -> T:
        """Call `work` with a private connection; see `query()`."""
        patience = SQLITE_BUSY_TIMEOUT if in_transaction(self.using) else self._patience

        def once() -> T:
            private = pool(self.using, self._timeout)
            return private.run(work, busy_timeout=patience)

        return self._repeat(doing, name, once)

    def delete(self, doing: str, old: QuerySet[Any], batches: int) -> int:
        """Delete these rows, at most so many batches of them; return how many."""

        def work() -> int:
            with transaction.atomic(using=self.using):
                # Locked, so that none is changed between the two statements.
                found = old.select_for_update().values_list("pk", flat=True)
                keys = list(found[:BATCH])
                # delete() would send signals, to receivers for every model as well.
                self.rows(old.model.__name__).filter(pk__in=keys)._raw_delete(self.using)
            return len(keys)

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
                connection = connections[self.using]
                # SQLite has waited already; in a test, the transaction has failed.
                is_final = connection.vendor == "sqlite" or test_connection(self.using)
                if not left or is_final or not ledger_for(connection).is_row_locked(exc):
                    about = "" if name is None else f" of lock {name!r}"
                    raise BackendUnavailable(
                        f"Fence database {self.using!r} failed at the {doing}{about}: "
                        f"{type(exc).__name__}: {describe_error(exc, self.using)}",
                        name=name,
                        alias=self.config.alias,
                    ) from exc
                time.sleep(random.uniform(0.005, 0.05))
        raise AssertionError  # pragma: no cover
