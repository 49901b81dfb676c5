"""Queries of Django's ORM on the package's tables, beside the caller's transaction."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from django.apps import apps
from django.db import Error, IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DateTimeField, Expression, Model, QuerySet
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery

from ..conf import AliasConfig
from ..exceptions import BackendUnavailable, SettingsError
from .connections import is_of_test, pool
from .dialect import BATCH
from .postgresql import DURABLE
from .text import is_table_missing, missing_tables, shorten_error
from .vendors import LEDGERS

P = ParamSpec("P")
T = TypeVar("T")

#: How often a transaction is tried that lost a deadlock, or waited for a row for too long.
TRIES = 4
#: After how long PostgreSQL ends the transaction of a process that paused, which has a row locked.
_NOT_PAUSED = "set_config('idle_in_transaction_session_timeout', '2s', true)"


class ServerTime(Expression):
    """The server's time, `plus` seconds. Rows expire by it."""

    def __init__(self, plus: float = 0.0) -> None:
        super().__init__(output_field=DateTimeField())
        self.plus = plus

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> Any:
        ledger = LEDGERS[connection.vendor]
        given = ledger.times(self.plus)
        # Without names, which the ORM's parameters don't have. The last one is that of `expiry`.
        return f"({ledger.expiry % dict.fromkeys(given, '%s')})", [*given.values()][-1:]


class MessageTime(ServerTime):
    """The server's time, for a row that represents a message, which is acknowledged then."""

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> Any:
        sql, params = super().as_sql(compiler, connection)
        # The transaction outlasts a crash, at the cost of no further statement. A test's would keep
        # the limit, and may pause.
        if connection.vendor == "postgresql" and not is_of_test(connection):
            sql = f"CASE WHEN ({DURABLE} || {_NOT_PAUSED}) IS NOT NULL THEN {sql} END"
        return sql, params


def rows_of(model: str, using: str) -> QuerySet[Any]:
    """Return the rows of a model of the package in a database."""
    found: type[Model] = apps.get_model("django_fencedlock", model)
    return found._base_manager.using(using)


def fetch(rows: QuerySet[Any], *columns: str) -> list[Any]:
    """Return these columns of the rows, as attributes."""
    # The queryset itself may be given old rows by django-cachalot or django-cacheops.
    sql, params = rows.values_list(*columns).query.get_compiler(rows.db).as_sql()
    with connections[rows.db].cursor() as cursor:
        cursor.execute(sql, params)
        found = cursor.fetchall()
    return [SimpleNamespace(**dict(zip(columns, values, strict=True))) for values in found]


def insert(using: str, model: str, **values: Any) -> Model | None:
    """Insert a row and return it, without signals; None if its key is there."""
    row: Model = rows_of(model, using).model(**values)
    # MySQL's INSERT IGNORE would store a value that its column rejects, cut or empty. An error of
    # a plain INSERT undoes that statement alone there.
    is_mysql = connections[using].vendor == "mysql"
    query = InsertQuery(type(row), on_conflict=None if is_mysql else OnConflict.IGNORE)
    columns = row._meta.local_concrete_fields
    query.insert_values([each for each in columns if each is not row._meta.auto_field], [row])
    ((sql, params),) = query.get_compiler(using).as_sql()
    with connections[using].cursor() as cursor:
        try:
            cursor.execute(sql, params)
        except IntegrityError:
            if not is_mysql:
                raise
            return None
        return row if cursor.rowcount == 1 else None


def raise_if_tables_missing(exc: BaseException, database: str) -> None:
    """Raise `SettingsError`: a retry for an unavailable service would be repeated without end."""
    if is_table_missing(exc):
        raise SettingsError(missing_tables(database)) from exc


@contextlib.contextmanager
def durable(using: str, lock_timeout: float) -> Iterator[None]:
    """Open a transaction that raises fences. It is reported then, so a crash must not undo it."""
    connection = connections[using]
    limits = connection.vendor == "postgresql" and not connection.in_atomic_block
    with transaction.atomic(using=using):
        if limits:
            with connection.cursor() as cursor:
                cursor.execute(
                    f"SELECT set_config('lock_timeout', '{lock_timeout}s', true), {DURABLE}"
                )
        yield


class Records:
    """A table in the fence database of an alias, on private connections."""

    def __init__(self, config: AliasConfig) -> None:
        self.config = config
        self.using = config.fence_database

    def rows(self, model: str) -> QuerySet[Any]:
        """Return the rows of a model, for use within `query()`."""
        return rows_of(model, self.using)

    def query(self, doing: str, name: str | None, work: Callable[[], T]) -> T:
        """Call `work`, whose ORM queries use a private connection; again if rows are locked."""
        tries = 0
        while True:
            tries += 1
            try:
                return pool(self.using, self.config.timeout).run_orm(work)
            except (Error, LookupError) as exc:
                connection = connections[self.using]
                # SQLite has waited already; in a test, the transaction has failed.
                is_final = connection.vendor == "sqlite" or is_of_test(connection)
                is_locked = isinstance(exc, Error) and LEDGERS[connection.vendor].is_row_locked(exc)
                if tries == TRIES or is_final or not is_locked:
                    raise_if_tables_missing(exc, self.using)
                    about = "" if name is None else f" of lock {name!r}"
                    raise BackendUnavailable(
                        f"Fence database {self.using!r} could not {doing}{about}: "
                        f"{type(exc).__name__}: {shorten_error(exc)}",
                        name=name,
                        alias=self.config.alias,
                    ) from exc
                time.sleep(random.uniform(0.005, 0.05))

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


def private_query(
    doing: str, *, atomic: bool = False
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Run a method of `Records` as a `query()`, about the lock that its first argument names."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            records: Any = args[0]
            name = getattr(args[1], "name", None) if len(args) > 1 else None
            work = functools.partial(method, *args, **kwargs)
            if atomic:
                work = transaction.atomic(using=records.using)(work)
            return records.query(doing, name, work)  # type: ignore[no-any-return]

        return run

    return decorate
