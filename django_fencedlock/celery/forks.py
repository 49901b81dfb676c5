"""Keeps the threads of a worker's main process and its forks apart."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..core import runtime
from ..core.runtime import clock

#: Seconds that a fork waits at most: it may hold up all of a worker.
PATIENCE = 0.2
_STEP = 0.001


class _Gate:
    """
    A child inherits whatever is open, and every mutex that another thread has just locked.

    So a fork waits until the threads that talk to a server are done, and they until it is done; but
    a thread whose server doesn't answer isn't waited for.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._mutex = runtime.allocate_lock()
        self._inside = 0

    def enter(self) -> None:
        with self._mutex:
            self._inside += 1

    def leave(self) -> None:
        with self._mutex:
            self._inside -= 1

    def before_fork(self) -> None:
        sleep = runtime.original("time", "sleep")
        until = clock() + PATIENCE
        self._mutex.acquire()
        while self._inside and clock() < until:
            self._mutex.release()
            sleep(_STEP)
            self._mutex.acquire()

    def after_in_parent(self) -> None:
        self._mutex.release()

    def after_in_child(self) -> None:
        self._reset()


_gate = _Gate()


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Let no process be forked within this block, if it is short."""
    _gate.enter()
    try:
        yield
    finally:
        _gate.leave()


os.register_at_fork(
    before=_gate.before_fork,
    after_in_parent=_gate.after_in_parent,
    after_in_child=_gate.after_in_child,
)
