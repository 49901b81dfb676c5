"""
How a real thread answers threads, and greenlets, of the application.

A greenlet that is killed inside a statement would ruin the session, and every lock on it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from ...core import runtime
from ...core.runtime import Empty, SimpleQueue

T = TypeVar("T")


class NoAnswer(Exception):
    """The thread did not answer in time."""


class Bell:
    """Wakes one waiting thread. It may ring any number of times."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        self._rings.put(None)

    def wait(self, timeout: float) -> bool:
        try:
            self._rings.get(timeout=timeout)
        except Empty:
            return False
        return True

    def close(self) -> None:
        pass


class GreenBell(Bell):
    """Wakes one waiting greenlet, whose hub serves other greenlets meanwhile."""

    def __init__(self) -> None:
        # The patched kind: waiting for it switches to other greenlets.
        self._ear, self._clapper = socket.socketpair()

    def ring(self) -> None:
        # By a real thread, which has no hub.
        os.write(self._clapper.fileno(), b"!")

    def wait(self, timeout: float) -> bool:
        self._ear.settimeout(timeout)
        try:
            return bool(self._ear.recv(1))
        except (TimeoutError, BlockingIOError):
            return False

    def close(self) -> None:
        self._ear.close()
        self._clapper.close()


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
        self._bell: Bell | None = GreenBell() if runtime.is_patched("socket") else Bell()
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
            if self._left and self._undo is not None:
                self.done = True
                return
        try:
            self._value = self._work()
        except BaseException as exc:
            self._error = exc
        with self._mutex:
            self.done = True
            left = self._left
        if left:
            self._undo_work()
        self.wake()

    def wake(self) -> None:
        """Wake the caller, from any thread."""
        # Within the mutex: the bell is closed once the caller has left.
        with self._mutex:
            if self._bell is not None:
                self._bell.ring()

    def wait(self, timeout: float) -> bool:
        """Return whether the job is done, after `timeout` seconds or an earlier `wake()`."""
        assert self._bell is not None
        # A deadline that passed while the process was paused leaves a negative timeout, which
        # raises ValueError; -1 would wait forever.
        return self.done or (self._bell.wait(max(0.0, timeout)) and self.done)

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

    def close(self) -> None:
        """Close the bell; called by the waiting thread."""
        with self._mutex:
            bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()

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
        job.close()
