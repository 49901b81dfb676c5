"""How a thread of the system answers threads, and greenlets, of the application."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from ..core import runtime

T = TypeVar("T")


def poller() -> Any:
    """A ``select.poll()`` that waits in the system, also where greenlets took its place."""
    return runtime.original("select", "poll")()


def is_readable(fileno: int) -> bool:
    """Whether something, or the end, has come in on a socket."""
    poll = poller()
    poll.register(fileno, select.POLLIN)
    return bool(poll.poll(0))


class Unanswered(Exception):
    """The thread did not answer in time."""


class Bell:
    """Wakes one waiting thread."""

    def __init__(self) -> None:
        self._lock = runtime.allocate_lock()
        self._lock.acquire()

    def ring(self) -> None:
        self._lock.release()

    def wait(self, timeout: float) -> bool:
        return cast(bool, self._lock.acquire(timeout=timeout))

    def close(self) -> None:
        pass


class GreenBell(Bell):
    """Wakes one waiting greenlet, whose hub serves others meanwhile."""

    def __init__(self) -> None:
        # The patched kind: who waits for it gives way to other greenlets.
        self._ear, self._clapper = socket.socketpair()

    def ring(self) -> None:
        # By a thread of the system, which has no hub.
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


def _bell() -> Bell:
    return GreenBell() if runtime.is_patched("socket") else Bell()


class Job(Generic[T]):
    """
    Work for another thread, and its answer.

    With an `undo`, the work is skipped if nobody waits for it any more, and undone if it was done
    by then. Without one it is done in any case.
    """

    def __init__(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> None:
        self._work = work
        self._undo = undo
        self._mutex = runtime.allocate_lock()
        self._bell = _bell()
        self._done = self._abandoned = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work; called by the thread that does."""
        if self._abandoned and self._undo is not None:
            return
        try:
            self._value = self._work()
        except BaseException as exc:
            self._error = exc
        with self._mutex:
            self._done = True
            if not self._abandoned:
                # Within the mutex: the bell is gone once the job is abandoned.
                self._bell.ring()
                return
        self.undo()

    def undo(self) -> None:
        """Take back what was done for nobody; called by the thread that did it."""
        if self._undo is not None and self._error is None:
            with contextlib.suppress(Exception):
                self._undo(cast(T, self._value))

    def result(self, timeout: float, leave: Callable[[Job[T]], object]) -> T:
        """
        Wait for the answer.

        Whoever is thrown out of here (by a time-out, a killed greenlet) leaves the job behind:
        `leave` gets it if it is done already, and has to see to it that it is undone.
        """
        answered = False
        try:
            # A deadline that passed while the process was paused leaves a negative timeout, which
            # raises ValueError; -1 would wait forever.
            answered = self._bell.wait(max(0.0, timeout))
            if not answered:
                raise Unanswered
        finally:
            if not answered:
                self._abandon(leave)
            self._bell.close()
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def _abandon(self, leave: Callable[[Job[T]], object]) -> None:
        with self._mutex:
            self._abandoned = True
            done = self._done
        if done:
            leave(self)
