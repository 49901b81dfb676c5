"""
How a real thread answers threads, and greenlets, of the application.

A greenlet that is killed inside a statement would ruin the session, and every lock on it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from django.db import OperationalError

from . import runtime
from .runtime import Empty, SimpleQueue, clock

T = TypeVar("T")

#: Bounds of the pauses between two looks of a greenlet, which can't wait for a real thread.
SHORTEST_LOOK, LONGEST_LOOK = 0.0005, 0.01


class NoAnswer(OperationalError):
    """The thread did not answer in time."""

    def __init__(self, timeout: float) -> None:
        super().__init__(f"no answer within {timeout:g} s")


class Job(Generic[T]):
    """
    Work for another thread, and its answer.

    With an `undo`, work whose caller has left is skipped, or undone. A caller that leaves at the
    very end is unnoticed: its claim is released by the owner's id, by work that comes after this.
    """

    def __init__(
        self, work: Callable[[Job[T]], T], undo: Callable[[T], object] | None = None
    ) -> None:
        self._work = work
        self._undo = undo
        self._rings: SimpleQueue[None] = SimpleQueue()
        #: Locked once a thread has begun.
        self.begun = runtime.allocate_lock()
        self.left = self.done = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, once; called by the other thread."""
        if not self.begun.acquire(blocking=False):
            return
        try:
            if not (self.left and self._undo):
                self._value = self._work(self)
                if self.left and self._undo:
                    self._undo(self._value)
        except BaseException as exc:
            self._error = exc
        self.done = True
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

    def answer(self, timeout: float) -> T:
        """Return what the work returned, or raise what it raised; leave after `timeout` seconds."""
        try:
            if not self.wait(timeout):
                raise NoAnswer(timeout)
            if self._error is not None:
                raise self._error
            return cast(T, self._value)
        finally:
            self.left = True
