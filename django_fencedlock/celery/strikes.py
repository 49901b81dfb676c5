"""
How running code is struck: thrown out of its body from another thread, once its lock was lost.

The one who strikes can't see where the body is. So each run has a cell of its own, which says
whether its body is running, and what is thrown is meant for that cell alone: by the time it
arrives, the thread may be at another run, or at nobody's.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from types import FrameType
from typing import Any

from .. import conf
from ..core import runtime
from ..core.identity import running_greenlet
from ..exceptions import SettingsError
from ..lease import Lease
from .struck import cancel_statements

#: Seconds for whoever noticed the loss in the body itself to finish what he was at.
SOON = 0.01


class Abort(BaseException):
    """
    Thrown into a body whose lock was lost. It never leaves the run: that raises `LeaseLost`.

    No ``Exception``, since bodies swallow those.
    """


class Cell:
    """
    One run that may be struck, once, while it is armed.

    Made in the thread of the run; `lost()` is called from any.
    """

    def __init__(self) -> None:
        self.armed = False
        self.is_lost = False
        self.struck = False
        self._place = _place()
        #: The run whose body called this one.
        self._outer = _innermost.get(self._place)

    def open(self) -> None:
        """Be the innermost run of this place."""
        _innermost[self._place] = self

    def close(self) -> None:
        self.disarm()
        if self._outer is None:
            _innermost.pop(self._place, None)
        else:
            _innermost[self._place] = self._outer

    def arm(self) -> None:
        """Let it be struck from now on."""
        self.armed = True
        if self.is_lost:
            raise Abort

    def disarm(self) -> None:
        """Let nothing strike it any more."""
        self.armed = False

    def lost(self, lease: Lease) -> None:
        """Note the loss and strike, from the thread that noticed it. It never waits."""
        self.is_lost = True
        if not self.armed:
            # It looks for itself when it is armed, if it ever will be.
            return
        if self._place == _place():
            # The loss is still being told of, here in the body.
            runtime.start(self._strike_soon)
        else:
            self.strike()

    def strike(self) -> None:
        """Have `Abort` raised in the body, if it is armed by then. From any thread but its own."""
        raise NotImplementedError

    def may_be_struck(self) -> bool:
        return self.armed and self.is_lost and not self.struck

    def innermost_lost(self) -> Cell | None:
        """Of this run and those it was called by, one that may be struck."""
        cell: Cell | None = self
        while cell is not None and not cell.may_be_struck():
            cell = cell._outer
        return cell

    def pass_on(self) -> None:
        """Raise `Abort` once more if a run is lost by which this one was called."""
        outer = self._outer
        while outer is not None:
            if outer.armed and outer.is_lost:
                outer.struck = True
                raise Abort
            outer = outer._outer

    def _strike_soon(self) -> None:
        runtime.original("time", "sleep")(SOON)
        self.strike()


Place = tuple[int, Any]

_innermost: dict[Place, Cell] = {}


def _place() -> Place:
    """The thread, and the greenlet if it isn't the thread itself."""
    return runtime.original("_thread", "get_ident")(), running_greenlet()


def new_cell() -> Cell:
    """A cell for a run of this thread, to be struck as can be done here."""
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "pthread_kill"):
        return _BySignal()
    return _ByException()


# The main thread, of prefork and solo pools among others


class _BySignal(Cell):
    """
    A signal ends most of what a thread waits for in the system; nothing else does.

    The handler runs in the main thread, within the very code that is to be struck.
    """

    def __init__(self) -> None:
        super().__init__()
        self._number = _install()

    def strike(self) -> None:
        # Without its handler the signal would end the process.
        if signal.getsignal(self._number) is on_signal:
            signal.pthread_kill(self._place[0], self._number)


def _install() -> int:
    number = conf.abort_signal()
    found = signal.getsignal(number)
    if found is signal.SIG_DFL:
        signal.signal(number, on_signal)
    elif found is not on_signal:
        raise SettingsError(
            f'on_lost="abort" interrupts a body by signal {number}, which already has the handler '
            f"{found!r} in this process. Set FENCEDLOCK_ABORT_SIGNAL to one that nobody uses."
        )
    return number


def on_signal(number: int, frame: FrameType | None) -> None:
    """The handler of our signal: raise `Abort` if a run of this very place is meant."""
    # It may come late: two signals at once are handled one after the other.
    innermost = _innermost.get(_place())
    cell = innermost and innermost.innermost_lost()
    if cell is not None:
        cell.struck = True
        cancel_statements()
        raise Abort


# Other threads


class _ByException(Cell):
    """
    An exception that Python raises in another thread between two of its instructions.

    It stays pending while the thread is in a call of the system or of C, and must have arrived
    before what comes after the body.
    """

    def __init__(self) -> None:
        super().__init__()
        # Entered again by whoever was struck inside of it.
        self._mutex = runtime.original("_thread", "RLock")()

    def arm(self) -> None:
        with self._mutex:
            self.armed = True
        super().arm()

    def disarm(self) -> None:
        with self._mutex:
            self.armed = False
        if self.struck:
            # Arrives here at the latest: Python looks before it goes round. To take it back, by
            # NULL, would have this interpreter look for one ever after (3.11 hangs if traced).
            for _ in range(3):
                pass

    def strike(self) -> None:
        # Never waited for: this thread renews leases. `arm()` looks for a loss after it has let go,
        # and with `disarm()` the body is over.
        if not self._mutex.acquire(blocking=False):
            return
        try:
            if self.may_be_struck():
                self.struck = True
                _raise_in(self._place[0], Abort)
        finally:
            self._mutex.release()


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
