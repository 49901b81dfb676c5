"""Waiting for a session lock in the server's queue, on sessions of their own."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from ..core import runtime
from ..core.runtime import clock, watchdog
from ..storage.connections import MAX_IDLE, under_test
from .base import Cancel
from .postgres_sessions import Session, open_session

#: Seconds of one wait in the server. While it waits it holds back vacuum; when it ends, the place
#: in the queue is lost.
SLICE = 60.0
#: Bounds of the pause before another try where one can't wait in the server.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.25
#: Seconds for which a key that was refused is taken to be wanted by others, and so many keys.
WANTED, MOST_WANTED = 1.0, 1000

_of_parents: list[Any] = []


class Room:
    """The sessions that wait, and the lines of this process's threads before each key."""

    def __init__(self, route: str, timeout: float) -> None:
        self._route = route
        self._timeout = timeout
        self._reset()

    def _reset(self) -> None:
        # Held for moments, never while a server is asked.
        self._mutex = runtime.allocate_lock()
        self._open: set[Session] = set()
        self._free: list[Session] = []
        self._opening = 0
        self._lines: dict[int, deque[threading.Event]] = {}
        #: The keys that were refused lately, and until when that counts.
        self._wanted: dict[int, float] = {}

    def forget_after_fork(self) -> None:
        _of_parents.append(self._open)
        self._reset()

    @contextlib.contextmanager
    def turn(self, key: int, timeout: float, cancel: Cancel) -> Iterator[bool]:
        """Stand behind the threads that came before; whether one's turn came in time."""
        mine = threading.Event()
        with self._mutex:
            line = self._lines.setdefault(key, deque())
            line.append(mine)
            if line[0] is mine:
                mine.set()
        try:
            cancel.on_cancel(mine.set)
            yield _wait(mine, timeout) and not cancel
        finally:
            with self._mutex:
                line.remove(mine)
                if line:
                    line[0].set()
                else:
                    del self._lines[key]

    def note_refusal(self, key: int) -> None:
        """Note that others want a key."""
        if len(self._wanted) >= MOST_WANTED:
            self._wanted.clear()
        self._wanted[key] = clock() + WANTED

    def is_better_than_a_try(self, key: int) -> bool:
        """Whether a key is likely to be refused, and a session is at hand to wait on."""
        until = self._wanted.get(key)
        return until is not None and clock() < until and bool(self._free)

    def take(self, most: int) -> Session | None:
        """A session to wait on; None if this process has `most` of them in use."""
        while (idle := self._idle_one()) is not None:
            if idle.is_quiet():
                return idle
            idle.close()
        with self._mutex:
            self._open = {session for session in self._open if not session.closed}
            if len(self._open) + self._opening >= most:
                return None
            self._opening += 1
        try:
            session = open_session(self._route, self._timeout, waits=True)
            with self._mutex:
                self._open.add(session)
        finally:
            with self._mutex:
                self._opening -= 1
        return session

    def give_back(self, session: Session) -> None:
        """Put back a session that holds nothing."""
        with self._mutex:
            keep = not session.closed and len(self._free) < MAX_IDLE and not under_test()
            if keep:
                self._free.append(session)
        if not keep:
            session.close()

    def close(self) -> None:
        """Close what is idle."""
        while (idle := self._idle_one()) is not None:
            idle.close()

    def _idle_one(self) -> Session | None:
        with self._mutex:
            return self._free.pop() if self._free else None


def wait_in_server(
    session: Session,
    statement: str,
    given: Mapping[str, Any],
    *,
    seconds: float,
    grace: float,
    cancel: Cancel,
) -> Any:
    """Run a statement that waits, for up to `seconds`; cut off a server silent beyond `grace`."""
    interrupt = _Interrupt(session)
    # Zero would mean no limit.
    limit = {"wait": f"{max(1, round(seconds * 1000))}ms"}
    try:
        cancel.on_cancel(interrupt)
        with watchdog.limit(seconds + grace, session.cut):
            return session.one(statement, {**given, **limit})
    finally:
        interrupt.finish()


class _Interrupt:
    """Cancels a statement, and none that follows it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._mutex = threading.Lock()
        self._over = threading.Event()

    def __call__(self) -> None:
        # Not here: who cancels may be an event loop, and the server may be slow.
        threading.Thread(target=self._cancel, daemon=True).start()

    def _cancel(self) -> None:
        # Again until it hits: the statement may not have reached the server yet.
        while not self._over.is_set():
            with self._mutex:
                if not self._over.is_set():
                    self._session.cancel()
            self._over.wait(0.05)

    def finish(self) -> None:
        with self._mutex:
            self._over.set()


def pause(deadline: float, cancel: Cancel) -> None:
    """Let a moment pass before the next try."""
    moment = random.uniform(SHORTEST_PAUSE, LONGEST_PAUSE)
    if not cancel:
        time.sleep(max(0.0, min(moment, deadline - clock())))


def _wait(event: threading.Event, timeout: float) -> bool:
    return event.wait(None if math.isinf(timeout) else max(0.0, timeout))


_rooms: dict[tuple[str, float], Room] = {}


def room(route: str, timeout: float) -> Room:
    """The process's waiting sessions to the database of alias `route`."""
    return _rooms.setdefault((route, timeout), Room(route, timeout))


def _forget_after_fork() -> None:
    for each in _rooms.values():
        each.forget_after_fork()


def _close_at_exit() -> None:
    for each in _rooms.values():
        each.close()


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_forget_after_fork)
