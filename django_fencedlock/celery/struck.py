"""Connections to databases that something thrown into a task left in the middle of a statement."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Mapping
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core.transactions import is_of_test

#: What libpq calls idle, at work, and a transaction that waits for its next statement or its end.
IDLE, ACTIVE, IN_TRANSACTION = 0, 1, (2, 3)
#: Seconds for the server to cancel a statement, and for one of a test to end by itself.
PATIENCE = 2.0


def open_blocks() -> dict[str, int]:
    """How many blocks of ``atomic()`` are open here, for each database that has one."""
    return {
        connection.alias: len(connection.atomic_blocks)
        for connection in connections.all(initialized_only=True)
        if connection.in_atomic_block
    }


def close_struck(before: Mapping[str, int]) -> None:
    """
    Close every connection of this thread that isn't as a body leaves it which ends by itself.

    Django doesn't notice: the next task would get a connection that is "already in progress" of
    another command, or a transaction that nobody ever commits.

    Args:
        before: What `open_blocks()` said before the body.
    """
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None:
            blocks = before.get(connection.alias, 0)
            if blocks == 0 and connection.in_atomic_block:
                _forget_blocks(connection)
            if not _is_quiet(connection):
                _close(connection)


def cancel_statements() -> None:
    """
    Have the server end the statements that connections of this thread wait for.

    To be called before something is thrown into them. A block of ``atomic()`` closes what it can't
    roll back, and the server would go on, with all its locks, until it has an answer for nobody.
    """
    for connection in connections.all(initialized_only=True):
        raw: Any = connection.connection
        with contextlib.suppress(Exception):
            if connection.vendor != "postgresql" or raw.info.transaction_status != ACTIVE:
                continue
            # With its connection a test would lose its transaction, and all that is in it.
            if not (is_of_test(connection) and _ends(raw)):
                _cancel(raw)
                if is_of_test(connection):
                    _ends(raw)


def _ends(raw: Any) -> bool:
    """Wait for the end of a statement whose caller won't; whether there was one, in time."""
    # psycopg2 comes here when it has ended.
    session = raw.pgconn
    ear = select.poll()
    ear.register(session.socket, select.POLLIN)
    until = time.monotonic() + PATIENCE
    while (left := until - time.monotonic()) > 0:
        if not session.is_busy():
            if session.get_result() is None:
                return True
        elif ear.poll(left * 1000):
            session.consume_input()
    return False


def _cancel(raw: Any) -> None:
    # psycopg2 knows the short word only.
    raw.cancel_safe(timeout=PATIENCE) if hasattr(raw, "cancel_safe") else raw.cancel()


def _forget_blocks(connection: BaseDatabaseWrapper) -> None:
    """Close what was struck between its entry into a block, or its exit, and the note of it."""
    connection.in_atomic_block = False
    connection.needs_rollback = False
    connection.savepoint_ids = []
    connection.atomic_blocks = []
    _close(connection)


def _is_quiet(connection: BaseDatabaseWrapper) -> bool:
    raw: Any = connection.connection
    if raw is None:
        return True
    if connection.vendor == "postgresql":
        status = raw.info.transaction_status
        return status == IDLE or (connection.in_atomic_block and status in IN_TRANSACTION)
    if connection.vendor == "sqlite":
        return connection.in_atomic_block or not raw.in_transaction
    # The other drivers can't tell.
    return False


def _close(connection: BaseDatabaseWrapper) -> None:
    raw: Any = connection.connection
    with contextlib.suppress(Exception):
        if connection.vendor == "postgresql":
            _cancel(raw)
        elif connection.vendor == "sqlite":
            # One in memory isn't closed.
            raw.rollback()
    try:
        connection.close()
    except Exception:
        if not connection.in_atomic_block:
            connection.connection = None
