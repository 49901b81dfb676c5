"""Cuts a connection whose server doesn't answer in time; drivers have no limit of their own."""

from __future__ import annotations

import contextlib
import heapq
import itertools
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
        self._changed = threading.Condition()
        self._ids = itertools.count()
        self._waiting: list[tuple[float, int]] = []
        self._bites: dict[int, Callable[[], object]] = {}
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def limit(self, seconds: float, bite: Callable[[], object]) -> Iterator[None]:
        """Call `bite` from another thread if the block isn't left within `seconds`."""
        watch = next(self._ids)
        with self._changed:
            self._bites[watch] = bite
            heapq.heappush(self._waiting, (clock() + seconds, watch))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="fencedlock-watchdog", daemon=True
                )
                self._thread.start()
            elif self._waiting[0][1] == watch:
                self._changed.notify()
        try:
            yield
        finally:
            # Under the lock: a bite that has begun is over before the block is left, so it
            # never hits a connection that was handed on.
            with self._changed:
                self._bites.pop(watch, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting and self._waiting[0][1] not in self._bites:
                    heapq.heappop(self._waiting)
                if not self._waiting:
                    self._changed.wait()
                elif (left := self._waiting[0][0] - clock()) > 0:
                    self._changed.wait(left)
                else:
                    self._bites.pop(heapq.heappop(self._waiting)[1])()


watchdog = Watchdog()


def cut(fileno: int) -> None:
    """Shut a socket down under its driver, which then gets an error instead of waiting on."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fileno)) as twin:
        twin.shutdown(socket.SHUT_RDWR)
