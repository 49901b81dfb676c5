"""The caller's own transactions: which are open, and what is done when they end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger(__name__)


def lent_by_test(using: str) -> BaseDatabaseWrapper | None:
    """
    The caller's connection, if a ``TestCase`` wraps it in a transaction that is never committed.

    Only there are the test's tables and rows to be seen, and nothing may outlive the test.
    """
    connection = connections[using]
    return connection if is_tests_own(connection) else None


def test_has_ended(connection: BaseDatabaseWrapper) -> Callable[[], bool]:
    """Tells whether the test whose transaction is the innermost now has ended."""
    block = [each for each in connection.atomic_blocks if each._from_testcase][-1]  # type: ignore[attr-defined]
    return lambda: block not in connection.atomic_blocks


def in_transaction(using: str) -> bool:
    """Whether the caller has a transaction of his own open on database `using`."""
    return is_open(connections[using])


def is_open(connection: BaseDatabaseWrapper) -> bool:
    """Whether the caller has a transaction of his own open on one of his connections."""
    return connection.in_atomic_block and not is_tests_own(connection)


def open_ones() -> list[BaseDatabaseWrapper]:
    """The caller's connections that have a transaction of his own open."""
    return [
        connection for connection in connections.all(initialized_only=True) if is_open(connection)
    ]


def is_tests_own(connection: BaseDatabaseWrapper) -> bool:
    """Whether a ``TestCase`` has wrapped the connection in a transaction that it rolls back."""
    blocks = connection.atomic_blocks
    return bool(blocks) and bool(blocks[0]._from_testcase)  # type: ignore[attr-defined]


def has_own_block(connection: BaseDatabaseWrapper) -> bool:
    """Whether code under test has an ``atomic()`` of its own open inside a ``TestCase``'s."""
    return any(not block._from_testcase for block in connection.atomic_blocks)  # type: ignore[attr-defined]


def when_all_ended(open_now: Sequence[BaseDatabaseWrapper], callback: Callable[[], object]) -> None:
    """Call `callback` once, when the last of the transactions was committed or rolled back."""
    ending = _Ending(len(open_now), callback)
    for connection in open_now:
        # on_commit() would tie the hook to the savepoint that happens to be open, and Django has
        # no hook for a rollback: but that drops this list, and with it the only reference.
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
                # Raised into a commit or a rollback it would help nobody.
                logger.exception("What was put off to the end of a transaction failed")


class _Hook:
    def __init__(self, ending: _Ending) -> None:
        self._ending: _Ending | None = ending

    def __call__(self) -> None:
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.one_ended()

    __del__ = __call__
