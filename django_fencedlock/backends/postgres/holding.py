"""What session locks of one database share in a process: the holds, and the sessions."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db import Error, OperationalError

from ...core import runtime
from ...core.runtime import clock, forks
from ...storage.connections import MAX_IDLE, NoAnswer, under_test
from ..interface import Claim, Granted, Held, Wait
from .sessions import Session, open_session

T = TypeVar("T")

_get_ident = runtime.original("_thread", "get_ident")

#: Seconds between two calls of `Wait.refused()`.
TICK = 1.5

#: What a parent process has, with its sessions. Closing one would end it for the parent.
_of_parents: list[Any] = []


@dataclass(eq=False)
class Hold:
    """One lock of this process, and the session that holds it."""

    claim: Claim
    key: int
    session: Session
    #: Called with the owner ids of holds whose session ended.
    lost: Callable[[Sequence[str]], object]
    ttl: float
    granted: Granted = field(init=False, repr=False)

    @property
    def session_columns(self) -> dict[str, Any]:
        """Return the columns of a registry row that say which session has the lock."""
        session = self.session
        return {
            "session_pid": session.pid,
            "session_started": session.started,
            "session_key": self.key,
        }

    def held(self) -> Held:
        claim, token = self.claim, self.granted.token
        return Held(claim.owner, claim.identity, token, session_pid=self.session.pid)


class _Place:
    """
    The place of a thread in a queue, which has a weak reference to it.

    An exception from outside may interrupt the thread as it leaves: the next one looks each `TICK`.
    """

    def __init__(self) -> None:
        # An Event that was interrupted may stay locked, and then the next set() never returns.
        self._bell = threading.Lock()
        self._bell.acquire()

    def wait(self, seconds: float) -> bool:
        return self._bell.acquire(timeout=seconds)

    def wake(self) -> None:
        """Wake the thread, from any thread, any number of times."""
        with contextlib.suppress(RuntimeError):
            self._bell.release()


class SessionLocks:
    """
    The session locks that this process holds in one database.

    Locks are tried on a shared session for each ttl. A lock that was waited for stays on the
    session that waited. The server lets a session have its own lock twice, so a table of keys
    excludes the threads of this process.
    """

    def __init__(self, route: str, timeout: float) -> None:
        self._route = route
        self._timeout = timeout
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        # Held for microseconds, never while a server is asked.
        self._mutex = runtime.allocate_lock()
        self.by_key: dict[int, Hold] = {}
        #: By ttl: the server ends a session for all of its locks at once.
        self._shared: dict[float, Session] = {}
        #: Sessions that wait, or hold a lock that was waited for: weak, so that a thread that is
        #: interrupted keeps none. And those of them without a use.
        self._waiters: weakref.WeakSet[Session] = weakref.WeakSet()
        self._opening = 0
        self._idle: list[Session] = []
        self._queues: dict[Hashable, deque[weakref.ref[_Place]]] = {}

    def after_fork(self) -> None:
        _of_parents.append((vars(self).copy(), list(self._waiters)))
        self._reset()

    # Holds

    def hold_at(self, key: int) -> Hold | None:
        """Return who holds a lock in this process, unless the session has ended."""
        hold = self.by_key.get(key)
        if hold is not None and hold.session.closed:
            self.drop(hold.session)
            return None
        return hold

    def hold_of(self, key: int, owner: str) -> Hold | None:
        """Return the owner's hold of a lock."""
        hold = self.hold_at(key)
        return hold if hold is not None and hold.claim.owner == owner else None

    def add(self, hold: Hold) -> None:
        """Note a lock that was granted."""
        session = hold.session
        session.ttl = max(session.ttl, hold.ttl) if session.holds else hold.ttl
        self.by_key[hold.key] = session.holds[hold.key] = hold
        session.doubts.pop(hold.key, None)

    def release(self, hold: Hold) -> bool:
        """Release a lock on its session; return whether it was held until now."""
        if self.by_key.get(hold.key) is not hold:
            return False
        session = hold.session
        session.doubts[hold.key] = hold.claim
        self.by_key.pop(hold.key, None)
        session.holds.pop(hold.key, None)
        try:
            held = session.unlock(hold.key, hold.claim)
            session.doubts.pop(hold.key, None)
            return held
        finally:
            self.give_back(session)

    def drop(self, session: Session) -> None:
        """Note that a session has ended, and its locks are lost."""
        for key, hold in list(session.holds.items()):
            if self.by_key.get(key) == hold:
                self.by_key.pop(key, None)
                hold.lost([hold.claim.owner])
        session.holds.clear()

    # Requests to a session

    def run(self, session: Session, work: Callable[[], T], *, first: bool = False) -> T:
        """Run `work`, which uses a session, in turn with other threads, or `first`."""
        if session.user == _get_ident() and session.lock.locked():
            raise OperationalError(
                "this thread is within another request to the session: a signal handler, or a "
                "finalizer, has interrupted it"
            )
        if first or not (session.lock.locked() or session in self._queues):
            return self._run(session, work)
        # A lock alone goes to the thread that had it last, and the others wait for long.
        with self.turn(session, Wait(TICK), lambda: None):
            return self._run(session, work)

    def _run(self, session: Session, work: Callable[[], T]) -> T:
        try:
            with session.lock:
                return self._use(session, work)
        finally:
            # Before the answer: the caller finds that a lock is lost as soon as it has the answer.
            if not session.holds and under_test():
                # The test runner is going to drop the database.
                session.close()
            if session.closed:
                self.drop(session)

    def _use(self, session: Session, work: Callable[[], T]) -> T:
        session.user = _get_ident()
        try:
            self._settle(session)
            return work()
        finally:
            if session.doubts:
                with contextlib.suppress(Error):
                    self._settle(session)
            session.user = 0

    def _settle(self, session: Session) -> None:
        """Read an answer that was left, and release what no caller got."""
        try:
            session.read_left()
        except NoAnswer:
            # Until then, a lease may be good whose renewal the server is late to answer.
            ttl = session.ttl if session.holds else 0.0
            if clock() > (session.asked or 0.0) + max(self._timeout, ttl):
                session.close()
            raise
        for key, claim in list(session.doubts.items()):
            granted = self.by_key.get(key)
            if granted is None or granted.session is not session:
                session.holds.pop(key, None)
                session.unlock(key, claim)
            session.doubts.pop(key, None)

    def settle(self) -> None:
        """Release what no caller got, on every session."""
        for session in self._sessions():
            # One that waits is used by its thread, without the lock.
            if session.doubts and session.wait is None:
                self.run(session, lambda: None)

    @contextlib.contextmanager
    def turn(self, key: Hashable, wait: Wait, refused: Callable[[], object]) -> Iterator[bool]:
        """Queue behind earlier threads of this process; yield whether the turn came in time."""
        mine = _Place()
        place = weakref.ref(mine)
        try:
            with self._mutex:
                self._queues.setdefault(key, deque()).append(place)
            wait.on_cancel(mine.wake)
            while not (is_first := self._first(key) is mine) and wait.left:
                if not mine.wait(min(TICK, wait.left)) and wait.left:
                    refused()
            yield is_first and not wait.cancelled
        finally:
            with self._mutex, contextlib.suppress(KeyError, ValueError):
                self._queues[key].remove(place)
            if (following := self._first(key)) is not None:
                following.wake()

    def _first(self, key: Hashable) -> _Place | None:
        with self._mutex:
            queue = self._queues.get(key, ())
            while queue:
                if (first := queue[0]()) is not None:
                    return first
                queue.popleft()
            self._queues.pop(key, None)
        return None

    # Sessions

    def session(self, ttl: float) -> Session:
        """Return the session on which locks of a ttl are tried."""
        session = self._shared.get(ttl)
        if session is None or session.closed:
            self._close_idle(MAX_IDLE)
            opened = open_session(self._route, self._timeout, ttl)
            with self._mutex:
                session = self._shared.get(ttl)
                if session is None or session.closed:
                    self._shared[ttl] = session = opened
            if session is not opened:
                # Another thread was faster.
                opened.close()
        return session

    def close(self) -> None:
        """Close the sessions that hold nothing."""
        while (idle := self._take_idle()) is not None:
            idle.close()
        self._close_idle(0)

    def _close_idle(self, most: int) -> None:
        """Close sessions that hold nothing, except for `most` of them."""

        def close_if_idle() -> None:
            if not session.holds:
                session.close()

        every = list(self._shared.items())
        for ttl, session in [each for each in every if not each[1].holds][most:]:
            with contextlib.suppress(OperationalError):
                self.run(session, close_if_idle)
            if session.closed and self._shared.get(ttl) is session:
                del self._shared[ttl]

    def close_all(self) -> None:
        """Close every session that runs no statement, at the interpreter's exit."""
        for session in self._sessions():
            if session.asked is None:
                session.close()

    def _sessions(self) -> list[Session]:
        with self._mutex:
            return [*self._waiters, *self._shared.values()]

    # Sessions that wait

    def take_waiter(self, wait: Wait, most: int) -> Session | None:
        """Return a session to wait on; None if this process uses `most` of them."""
        session = self._take_idle()
        while session is not None and not session.is_usable():
            session = self._take_idle()
        if session is None:
            with self._mutex:
                in_use = [each for each in self._waiters if not each.closed]
                if len(in_use) + self._opening >= most:
                    return None
                self._opening += 1
            try:
                session = open_session(self._route, self._timeout)
                with self._mutex:
                    self._waiters.add(session)
            finally:
                with self._mutex:
                    self._opening -= 1
        session.wait = wait
        return session

    def interrupt(self, session: Session, wait: Wait) -> None:
        """Cancel a wait, if the session is still used for it; it isn't used for another one."""
        with self._mutex:
            if session.wait is not wait:
                return
            session.interrupted = True
        with contextlib.suppress(RuntimeError):
            runtime.start(session.cancel)

    def abandon(self, session: Session) -> None:
        """Leave the server's queue, from another thread; a lock that was granted goes as well."""

        def leave() -> None:
            session.cancel()
            session.close()
            self.drop(session)

        session.interrupted = True
        with contextlib.suppress(RuntimeError):
            runtime.start(leave)

    def give_back(self, session: Session) -> None:
        """Put back a session that waited, and holds nothing."""
        with self._mutex:
            session.wait = None
            if session not in self._waiters:
                return
            in_doubt = bool(session.doubts) or session.asked is not None
            keep = not (session.closed or session.interrupted or in_doubt or under_test())
            keep = keep and len(self._idle) < MAX_IDLE
            if keep:
                self._idle.append(session)
        if not keep:
            session.close()

    def _take_idle(self) -> Session | None:
        with self._mutex:
            return self._idle.pop() if self._idle else None


_all: dict[tuple[str, float], SessionLocks] = {}


def session_locks(route: str, timeout: float) -> SessionLocks:
    """Return this process's session locks that are reached by database alias `route`."""
    found = _all.get((route, timeout))
    return found or _all.setdefault((route, timeout), SessionLocks(route, timeout))


@atexit.register
def _close_at_exit() -> None:
    # The sessions would end with the process anyway, but with a warning of each of them.
    for each in _all.values():
        each.close_all()
