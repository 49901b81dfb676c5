"""The caller's open transactions, and what runs when they end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger(__name__)


def test_connection(using: str) -> BaseDatabaseWrapper | None:
    """
    Return the caller's connection if a ``TestCase`` wraps it in a transaction.

    Other connections don't see the test's rows, and their writes would outlive the test.
    """
    connection = connections[using]
    return connection if is_of_test(connection) else None


def is_of_test(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a ``TestCase`` wraps the connection in a transaction."""
    blocks = connection.atomic_blocks
    return bool(blocks) and bool(blocks[0]._from_testcase)  # type: ignore[attr-defined]


def test_has_ended(connection: BaseDatabaseWrapper) -> Callable[[], bool]:
    """Return a function that says whether the present test's transaction has ended."""
    block = [each for each in connection.atomic_blocks if each._from_testcase][-1]  # type: ignore[attr-defined]
    return lambda: block not in connection.atomic_blocks


def has_own_block(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the code under test opened an ``atomic()`` of its own."""
    return any(not block._from_testcase for block in connection.atomic_blocks)  # type: ignore[attr-defined]


def is_open(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a connection has an open transaction, other than a test's."""
    return connection.in_atomic_block and not is_of_test(connection)


def in_transaction(using: str) -> bool:
    """Return whether the caller has an open transaction on database `using`."""
    return is_open(connections[using])


def open_connections() -> list[BaseDatabaseWrapper]:
    """Return the caller's connections with an open transaction."""
    return [each for each in connections.all(initialized_only=True) if is_open(each)]


def when_all_ended(open_now: Sequence[BaseDatabaseWrapper], callback: Callable[[], object]) -> None:
    """Call `callback` once, when the last of these transactions is committed or rolled back."""
    ending = _Ending(len(open_now), callback)
    for connection in open_now:
        # on_commit() would bind the hook to the innermost savepoint. Django has no hook for a
        # rollback, but drops this list then, and with it the only reference to the hook.
        connection.run_on_commit.append((set(), _Hook(ending), True))  # type: ignore[arg-type]


class _Ending:
    def __init__(self, left: int, callback: Callable[[], object]) -> None:
        self._left = left
        self._callback = callback
        self._lock = threading.Lock()

    def one_ended(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            try:
                self._callback()
            except Exception:
                # It would replace the result of the user's commit or rollback.
                logger.exception("A callback at the end of a transaction failed")


class _Hook:
    def __init__(self, ending: _Ending) -> None:
        self._ending: _Ending | None = ending

    def __call__(self) -> None:
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.one_ended()

    __del__ = __call__
