"""Cuts a connection whose server doesn't answer in time, where its driver has no limit."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator

from .lease import clock


class Watchdog:
    """One thread that calls back for each block that outlives its limit."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # One that a thread may take twice: what the garbage collector calls within may lock, too.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ids = itertools.count()
        self._watched: dict[int, tuple[float, Callable[[], object]]] = {}
        self._wakes_at = math.inf
        self._runs = False

    @contextlib.contextmanager
    def limit(self, seconds: float, bite: Callable[[], object]) -> Iterator[None]:
        """Call `bite` from another thread if the block isn't left within `seconds`."""
        watch = self.begin(seconds, bite)
        try:
            yield
        finally:
            self.end(watch)

    def begin(self, seconds: float, bite: Callable[[], object]) -> int:
        """Call `bite` from another thread unless `end()` is called within `seconds`."""
        watch = next(self._ids)
        deadline = clock() + seconds
        with self._lock:
            if not self._runs:
                threading.Thread(target=self._run, name="fencedlock-watchdog", daemon=True).start()
                # Not before: where there are too many threads, the next statement tries again.
                self._runs = True
            self._watched[watch] = (deadline, bite)
            # When it wakes the thread alone says: it may be this one, which isn't asleep yet.
            if deadline < self._wakes_at:
                self._changed.notify()
        return watch

    def end(self, watch: int) -> None:
        """Don't call any more what `begin()` was given."""
        # Under the lock: a bite that has begun is over before this returns, so it never hits a
        # connection that was handed on.
        with self._lock:
            self._watched.pop(watch, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._bite_those_overdue()
                self._wakes_at = math.inf
                for deadline, _ in self._watched.copy().values():
                    if deadline < self._wakes_at:
                        self._wakes_at = deadline
                wait = self._wakes_at - clock()
                self._changed.wait(None if math.isinf(wait) else max(0.0, wait))

    # Copies are looked through: what the garbage collector calls meanwhile, in this very thread,
    # may begin or end a watch.
    def _bite_those_overdue(self) -> None:
        now = clock()
        for watch, (deadline, bite) in self._watched.copy().items():
            if deadline <= now and watch in self._watched:
                del self._watched[watch]
                bite()


watchdog = Watchdog()


def cut(fileno: int) -> None:
    """Shut a socket down under its driver, which then gets an error instead of waiting on."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fileno)) as twin:
        twin.shutdown(socket.SHUT_RDWR)
