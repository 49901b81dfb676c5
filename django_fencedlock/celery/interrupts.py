"""
Interrupt a body whose lock is lost, and clean up after interrupts.

`on_lost="abort"` raises an exception in a running body, from another thread. That thread can't see
where the body is. So each run has an `Interruptible`, which says whether its body is running, and
the exception is meant for that run alone: when it arrives, the thread may be in another run.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar

from billiard import pool
from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import conf
from ..backends.interface import Wait
from ..core import runtime
from ..core.manager import give_back_left_over
from ..core.runtime import clock
from ..exceptions import SettingsError
from ..lease import Lease
from ..lock_sets import LeaseSet
from ..storage.connections import is_of_test

T = TypeVar("T")

#: Seconds for code that noticed the loss in the body itself to finish.
SOON = 0.01
#: Values of libpq's transaction status.
IDLE, ACTIVE, IN_TRANSACTION = 0, 1, (2, 3)
#: Seconds for the server to cancel a statement, and for a test's statement to end by itself.
CANCEL_TIMEOUT = 2.0
#: The signal of a soft time limit; other pools than prefork, and Windows, have none.
_SOFT_LIMIT: Any = getattr(pool, "SIG_SOFT_TIMEOUT", None)


class Abort(BaseException):
    """Raised in a body whose lock was lost. Bodies would swallow an ``Exception``."""


def run_interruptible(
    lease: Lease | LeaseSet | None,
    body: Callable[..., T],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    limit: AbstractContextManager[object],
) -> T:
    """
    Call `body` under a time limit; if `lease` is lost, interrupt it and raise `LeaseLost`.

    This is best effort. A call of C, a bare ``except:`` or a callback of a driver may delay or
    swallow the interrupt. Fenced writes under the lost lock are rejected in any case.
    """
    began, blocks = clock(), open_blocks()
    try:
        if lease is None:
            with limit:
                return body(*args, **kwargs)
        target = Interruptible()
        try:
            target.open()
            lease.interrupt_by(target.lost)
            # The next block outwards catches an interrupt between two of these lines. The first
            # block disarms; so does the last, since a time limit may have kept the first from it.
            try:
                try:
                    target.arm()
                    with limit:
                        return body(*args, **kwargs)
                finally:
                    target.disarm()
            except (Abort, Error) as exc:
                # As a block ends, Django may raise an error of the interrupted connection instead.
                # An abort may be meant for a run whose body called this one.
                if target.is_lost and _came_of(exc, (Abort,)):
                    lease.explain()
                    raise lease.loss() from exc
                raise
        finally:
            target.close()
            lease.off_lost(target.lost)
            target.pass_on()
    except BaseException as exc:
        if not isinstance(exc, Exception) or _came_of(exc, (Abort, SoftTimeLimitExceeded)):
            close_broken(blocks)
            give_back_left_over(began)
        raise


def _came_of(exc: BaseException | None, kinds: tuple[type[BaseException], ...]) -> bool:
    """Return whether the error is of these kinds, or replaced one."""
    while exc is not None and not isinstance(exc, kinds):
        exc = exc.__context__
    return exc is not None


class Interruptible:
    """
    One run of the present thread that may be interrupted, once, while it is armed.

    A signal interrupts the main thread, since only that ends most system calls; an exception that
    stays pending during a call of C interrupts any other.
    """

    def __init__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        by_signal = is_main and hasattr(signal, "pthread_kill")
        self.signal = _install_handler() if by_signal else None
        self.armed = self.is_lost = self.interrupted = False
        self.thread = _thread_id()
        # Re-entrant: code inside of it may be interrupted.
        self._mutex = runtime.original("_thread", "RLock")()
        #: The run whose body called this one.
        self._outer = _innermost.get(self.thread)

    def open(self) -> None:
        _innermost[self.thread] = self

    def close(self) -> None:
        self.disarm()
        if self._outer is None:
            _innermost.pop(self.thread, None)
        else:
            _innermost[self.thread] = self._outer

    def arm(self) -> None:
        """Allow the interrupt from now on."""
        with self._mutex:
            self.armed = True
        if self.is_lost:
            raise Abort

    def disarm(self) -> None:
        with self._mutex:
            self.armed = False
        if self.interrupted:
            # An asynchronous exception arrives here at the latest: Python looks for it at each
            # iteration. To take it back (by NULL) makes Python 3.11 hang under a tracer.
            for _ in range(3):
                pass

    def lost(self, lease: Lease) -> None:
        """Note the loss and interrupt the body, without waiting. From any thread."""
        self.is_lost = True
        # If it isn't armed, arm() sees the loss.
        if self.armed and self.thread == _thread_id():
            # The body itself noticed the loss, and is still reporting it.
            runtime.start(self._interrupt_soon)
        elif self.armed:
            self.interrupt()

    def interrupt(self) -> None:
        """Raise `Abort` in the body, if it is still armed, from another thread."""
        if self.signal is not None:
            # Without its handler the signal would end the process.
            if signal.getsignal(self.signal) is on_signal:
                signal.pthread_kill(self.thread, self.signal)
        # Don't wait: this thread renews leases. `arm()` looks for a loss after it has unlocked,
        # and with `disarm()` the body is over.
        elif self._mutex.acquire(blocking=False):
            try:
                if self.is_due():
                    self.interrupted = True
                    _raise_in(self.thread, Abort)
            finally:
                self._mutex.release()

    def is_due(self) -> bool:
        return self.armed and self.is_lost and not self.interrupted

    def with_callers(self) -> Iterator[Interruptible]:
        """Return this run and those whose bodies called it, the innermost first."""
        run: Interruptible | None = self
        while run is not None:
            yield run
            run = run._outer

    def pass_on(self) -> None:
        """Raise `Abort` again if a run that called this one lost its lock."""
        for outer in self.with_callers():
            if outer is not self and outer.armed and outer.is_lost:
                outer.interrupted = True
                raise Abort

    def _interrupt_soon(self) -> None:
        runtime.original("time", "sleep")(SOON)
        self.interrupt()


_innermost: dict[int, Interruptible] = {}
_thread_id = threading.get_ident


def _install_handler() -> int:
    number = conf.abort_signal()
    found = signal.getsignal(number)
    if found is signal.SIG_DFL:
        signal.signal(number, on_signal)
    elif found is not on_signal:
        raise SettingsError(
            f'on_lost="abort" interrupts a body by signal {number}, which already has the handler '
            f"{found!r} in this process. Set FENCEDLOCK_ABORT_SIGNAL to an unused signal."
        )
    return number


def on_signal(number: int, frame: FrameType | None) -> None:
    """Raise `Abort` if the signal is meant for a run of this thread."""
    # It may come late: Python handles two signals at once one after the other.
    if (innermost := _innermost.get(_thread_id())) is None:
        return
    for run in innermost.with_callers():
        if run.is_due():
            run.interrupted = True
            cancel_statements()
            raise Abort


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


# Connections that an interrupt left in the middle of a statement


def open_blocks() -> set[str]:
    """Return the databases in whose ``atomic()`` blocks this thread is."""
    return {each.alias for each in connections.all(initialized_only=True) if each.in_atomic_block}


def close_broken(before: set[str]) -> None:
    """
    Close the connections of this thread, which an interrupt may have broken.

    Django wouldn't notice: the next task's commands would fail, or never be committed. Those in a
    block of the caller stay open, unless they are in the middle of a statement.
    """
    for connection in connections.all(initialized_only=True):
        if connection.connection is None:
            continue
        if connection.alias not in before:
            # It may have been interrupted between the entry into a block, or its exit, and the note
            # of it. Django would never connect again.
            connection.in_atomic_block = False
        elif _is_quiet(connection):
            continue
        with contextlib.suppress(Exception):
            _cancel(connection.connection)
        with contextlib.suppress(Exception):
            connection.close()


def cancel_statements() -> None:
    """
    Cancel the statements that connections of this thread wait for, before an interrupt.

    ``atomic()`` closes a connection that it can't roll back, and the server would continue the
    statement, with all its locks.
    """
    for connection in connections.all(initialized_only=True):
        raw: Any = connection.connection
        # Other drivers than those of PostgreSQL have no such state.
        with contextlib.suppress(Exception):
            # Closing its connection would lose the transaction of a test, with all its rows.
            if is_of_test(connection):
                _wait_for_end(raw)
            if raw.info.transaction_status == ACTIVE:
                _cancel(raw)


def _wait_for_end(raw: Any) -> None:
    """Give a statement of PostgreSQL some time to end."""
    session, until = raw.pgconn, time.monotonic() + CANCEL_TIMEOUT
    while session.transaction_status == ACTIVE and time.monotonic() < until:
        session.consume_input()
        if session.is_busy():
            time.sleep(0.01)
        else:
            session.get_result()


def _cancel(raw: Any) -> None:
    # psycopg2 has no cancel_safe().
    raw.cancel_safe(timeout=CANCEL_TIMEOUT) if hasattr(raw, "cancel_safe") else raw.cancel()


def _is_quiet(connection: BaseDatabaseWrapper) -> bool:
    raw: Any = connection.connection
    if connection.vendor == "postgresql":
        # Idle: the caller's block has sent no statement yet, which begins the transaction.
        return raw.info.transaction_status in (IDLE, *IN_TRANSACTION)
    # The other drivers have no such state.
    return connection.vendor == "sqlite"


# Soft time limits


class DeferredTimeLimit:
    """
    Context manager that defers Celery's soft time limit to its end.

    The limit is a signal whose handler raises wherever the main thread is, for instance between a
    grant and the note of it. The body runs in `allowed()`, where the limit isn't deferred.
    """

    def __init__(self) -> None:
        #: A limit that is deferred ends a wait for the lock.
        self.wait: Wait | None = None
        self.deferred: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        # Only Celery's own handler is replaced, which the prefork pool alone installs.
        if (
            _SOFT_LIMIT is not None
            and signal.getsignal(_SOFT_LIMIT) is pool.soft_timeout_sighandler
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(_SOFT_LIMIT, self._note)

    def __exit__(self, *error: object) -> None:
        # The installed handler is the only state: an abort, which isn't deferred, may come between
        # any two lines, and a flag could be wrong then.
        if _SOFT_LIMIT is None or signal.getsignal(_SOFT_LIMIT) != self._note:
            return
        signal.signal(_SOFT_LIMIT, pool.soft_timeout_sighandler)
        if self.deferred is not None:
            deferred, self.deferred = self.deferred, None
            pool.soft_timeout_sighandler(*deferred)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let the limit interrupt this block."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.deferred = number, frame
        # In another thread: this one may be inside of the wait that is to be cancelled.
        if self.wait is not None:
            runtime.start(self.wait.cancel)
