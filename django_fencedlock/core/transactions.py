"""The caller's open transactions, and what runs when they end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..storage.connections import is_open

logger = logging.getLogger(__name__)


def open_connections() -> list[BaseDatabaseWrapper]:
    """Return the caller's connections with an open transaction."""
    every = connections.all(initialized_only=True)
    return [each for each in every if each.in_atomic_block and is_open(each)]


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
