"""
How a real thread answers threads, and greenlets, of the application.

A greenlet that is killed inside a statement would ruin the session, and every lock on it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from ...core import runtime
from ...core.runtime import Empty, SimpleQueue, clock

T = TypeVar("T")

#: Bounds of the pauses between two looks of a greenlet, which can't wait for a real thread.
SHORTEST_LOOK, LONGEST_LOOK = 0.0005, 0.01


class NoAnswer(Exception):
    """The thread did not answer in time."""


class Job(Generic[T]):
    """
    Work for another thread, and its answer.

    With an `undo`, the work is skipped once the caller has left, and its result undone if it was
    done by then. Without one it is done in any case.
    """

    def __init__(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> None:
        self._work = work
        self._undo = undo
        self._mutex = runtime.allocate_lock()
        self._rings: SimpleQueue[None] = SimpleQueue()
        self._left = False
        self.begun = self.done = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work; called by the other thread."""
        with self._mutex:
            if self.begun:
                return
            self.begun = True
            skip = self._left and self._undo is not None
        if not skip:
            try:
                self._value = self._work()
            except BaseException as exc:
                self._error = exc
        with self._mutex:
            self.done = True
            undo = self._left and not skip
        if undo:
            self._undo_work()
        self.wake()

    def wake(self) -> None:
        """Wake the caller, from any thread, any number of times."""
        self._rings.put(None)

    def wait(self, timeout: float) -> bool:
        """Return whether the job is done, after `timeout` seconds or an earlier `wake()`."""
        # The deadline may have passed while the process was paused.
        until = clock() + max(0.0, timeout)
        green, pause = runtime.is_patched("threading"), SHORTEST_LOOK
        while not self.done:
            left = max(0.0, until - clock())
            with contextlib.suppress(Empty):
                self._rings.get(timeout=0.0 if green else left)
                break
            if not green or left <= 0:
                break
            time.sleep(min(left, pause))
            pause = min(LONGEST_LOOK, pause * 1.5)
        return self.done

    def result(self) -> T:
        """Return what the work returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def leave(self) -> None:
        """Leave without the answer: after a timeout, a cancellation, in a killed greenlet."""
        with self._mutex:
            undo = self.done and not self._left
            self._left = True
        if undo:
            self._undo_work()

    def _undo_work(self) -> None:
        if self._undo is not None and self._error is None:
            with contextlib.suppress(Exception):
                self._undo(cast(T, self._value))


def ask(job: Job[T], timeout: float, send: Callable[[Job[Any]], object]) -> T:
    """Send a job, and wait for its answer."""
    answered = False
    try:
        send(job)
        answered = job.wait(timeout)
        if not answered:
            raise NoAnswer
        return job.result()
    finally:
        if not answered:
            job.leave()
