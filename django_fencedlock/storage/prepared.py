"""
Statements that are executed again and again on private connections, and prepared once.

Planning takes most of a grant's time on Postgres. Django gives the server the text of each
statement anew, for the sake of poolers, where the next one may meet another session. A private
connection that leads straight to the server needn't care. On SQLite most of the time goes into
Django's own preparations for each statement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

#: The attribute of a connection that keeps its cursor, which no block closes, or None.
_CURSOR = "_fencedlock_cursor"
# invalid_sql_statement_name, duplicate_prepared_statement
_ANOTHER_SESSION = ("26000", "42P05")
# feature_not_supported: "cached plan must not change result type"
_ANOTHER_TYPE = "0A000"


def allow(connection: BaseDatabaseWrapper) -> None:
    """Have a new private connection's statements prepared, if it is seen to be direct."""
    make = _CURSORS.get(connection.vendor)
    if make:
        connection.ensure_connection()
        with connection.wrap_database_errors:
            made = make(connection)
            setattr(connection, _CURSOR, made and contextlib.nullcontext(made))


def cursor(
    connection: BaseDatabaseWrapper, *, plan_once: bool = True
) -> AbstractContextManager[Any]:
    """
    A cursor for a statement that is executed again and again, with named parameters.

    They may go apart from its text, so their types have to be clear from that. One that isn't
    planned once and for all may have few rows at one time and thousands at another.
    """
    found = getattr(connection, _CURSOR, None)
    if found is None:
        return connection.cursor()
    return found if plan_once else contextlib.nullcontext(found.enter_result.planning)


def met_another_session(connection: BaseDatabaseWrapper, error: Error) -> bool:
    """Whether a statement failed, undone, since it was prepared in another session."""
    return _is_of_a_prepared_one(connection, error, *_ANOTHER_SESSION)


def is_outdated(connection: BaseDatabaseWrapper, error: Error) -> bool:
    """Whether a statement failed, undone, since its tables have changed since it was prepared."""
    return _is_of_a_prepared_one(connection, error, _ANOTHER_TYPE)


def _is_of_a_prepared_one(connection: BaseDatabaseWrapper, error: Error, *states: str) -> bool:
    prepares = getattr(connection, _CURSOR, None) is not None
    return prepares and getattr(error.__cause__, "sqlstate", None) in states


def _on_postgres(connection: BaseDatabaseWrapper) -> Any:
    """A cursor that prepares; None if this isn't psycopg 3, or the connection isn't direct."""
    # By a cursor of Django's, since an engine may do to the session what it needs as it makes one:
    # those that have a schema for each tenant set its search_path.
    with connection.cursor() as first:
        raw: Any = connection.connection
        if not hasattr(raw, "prepare_threshold") or not _is_direct(first, raw):
            return None
    from .libpq import Executor

    return Executor(raw, connection.wrap_database_errors, brief=True)


def _is_direct(cursor: Any, raw: Any) -> bool:
    # A pooler tells its clients a number of its own.
    cursor.execute("SELECT pg_backend_pid()")
    (pid,) = cursor.fetchone()
    return bool(pid == raw.info.backend_pid)


class _OnSQLite:
    """A cursor of the driver's own, whose statements may name parameters as other drivers want."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._errors = connection.wrap_database_errors
        self._cursor: Any = connection.connection.cursor()
        self.fetchone = self._errors(self._cursor.fetchone)
        self.fetchall = self._errors(self._cursor.fetchall)

    def execute(self, statement: str, given: Mapping[str, Any] | None = None) -> None:
        try:
            if given is None:
                self._cursor.execute(statement)
            else:
                self._cursor.execute(_in_sqlites_words(statement), given)
        except Exception:
            # Not around all of it: that takes two calls of Python's for each statement.
            with self._errors:
                raise

    @property
    def rowcount(self) -> int:
        return int(self._cursor.rowcount)


class _Names:
    def __getitem__(self, name: str) -> str:
        return f":{name}"


@lru_cache(maxsize=200)
def _in_sqlites_words(statement: str) -> str:
    return statement % _Names()


_CURSORS: dict[str, Callable[[BaseDatabaseWrapper], Any]] = {
    "postgresql": _on_postgres,
    "sqlite": _OnSQLite,
}
