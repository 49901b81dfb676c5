"""
Statements that a Postgres server plans once, and not anew each time.

Planning takes most of a grant's time. Django gives the server the text of each statement anew, for
the sake of poolers, where the next one may meet another session. A private connection that leads
straight to the server needn't care.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

#: The attribute of a connection that keeps its cursor, or None.
_CURSOR = "_fencedlock_cursor"
#: How often a statement is executed before the server is told to keep its plan.
AFTER = 5
# invalid_sql_statement_name, duplicate_prepared_statement
_ANOTHER_SESSION = ("26000", "42P05")


def allow(connection: BaseDatabaseWrapper) -> None:
    """Have a private connection's statements prepared, if it is seen to be direct."""
    if connection.vendor == "postgresql" and not hasattr(connection, _CURSOR):
        with connection.wrap_database_errors:
            setattr(connection, _CURSOR, _cursor_of(connection.connection))


@contextlib.contextmanager
def cursor(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """A cursor for a statement that is executed again and again, with named parameters."""
    found = getattr(connection, _CURSOR, None)
    if found is None:
        with connection.cursor() as plain:
            yield plain
    else:
        # Its parameters go apart from the text, so their types have to be clear from that.
        with connection.wrap_database_errors:
            yield found


def met_another_session(connection: BaseDatabaseWrapper, error: Error) -> bool:
    """Whether a statement failed, undone, since it was prepared in another session."""
    prepares = getattr(connection, _CURSOR, None) is not None
    return prepares and getattr(error.__cause__, "sqlstate", None) in _ANOTHER_SESSION


def _cursor_of(raw: Any) -> Any:
    """A cursor that prepares; None if this isn't psycopg 3, or the connection isn't direct."""
    if not hasattr(raw, "prepare_threshold") or not _is_direct(raw):
        return None
    from psycopg import Cursor

    raw.prepare_threshold = AFTER
    return Cursor(raw)


def _is_direct(raw: Any) -> bool:
    # A pooler tells its clients a number of its own.
    (pid,) = raw.execute("SELECT pg_backend_pid()").fetchone()
    return bool(pid == raw.info.backend_pid)
