"""What session locks of one database share in a process: the holds, the sessions, one thread."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ...core import runtime
from ...core.runtime import forks
from ...storage.connections import MAX_IDLE, under_test
from ..interface import Claim, Granted, Held, Wait
from . import jobs
from .jobs import Job, NoAnswer
from .sessions import Session, open_session

T = TypeVar("T")

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
    #: The tables exist, and a registry row may exist by now; of an unfenced lock.
    renewed: bool = False
    granted: Granted = field(init=False, repr=False)

    def values(self) -> dict[str, Any]:
        """Return the parameters of a statement about it."""
        return {"name": self.claim.name, "key": self.key, "owner": self.claim.owner}

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

    One real thread uses the sessions that hold locks: the shared session of each ttl, on which
    locks are tried, and each session that waited for a lock. The server lets a session have its
    own lock twice, so a table of keys excludes the threads of this process.
    """

    def __init__(self, route: str, timeout: float) -> None:
        self._route = route
        self._timeout = timeout
        self._worker = runtime.Worker("fencedlock-postgres")
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        # Held for microseconds, never while a server is asked.
        self._mutex = runtime.allocate_lock()
        self._jobs: deque[Job[Any]] = deque()
        self.by_owner: dict[str, Hold] = {}
        self.by_key: dict[int, Hold] = {}
        #: By ttl: the server ends a session that was silent for the ttl of its locks.
        self._shared: dict[float, Session] = {}
        #: Sessions that wait, or hold a lock that was waited for; and those of them without a use.
        self._waiters: set[Session] = set()
        self._opening = 0
        self._idle: list[Session] = []
        self._queues: dict[int, deque[weakref.ref[_Place]]] = {}

    def after_fork(self) -> None:
        _of_parents.append(vars(self).copy())
        self._reset()

    # Called by any thread

    def ask(
        self,
        work: Callable[[], T],
        undo: Callable[[T], object] | None = None,
        *,
        first: bool = False,
    ) -> T:
        """Run `work` in the thread, before all other work or after it; `Job` explains `undo`."""
        try:
            job = Job(partial(self._do, work), undo)
            return jobs.ask(job, self._timeout, partial(self._send, first=first))
        except NoAnswer:
            for session in self._sessions():
                session.cut_if_overdue()
            raise NoAnswer(f"no answer within {self._timeout:g} s") from None

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` in the thread next, without waiting for it."""
        self._send(Job(partial(self._do, work)), first=True)

    def _send(self, job: Job[Any], *, first: bool = False) -> None:
        # Renewals come first: each grant may wait 0.25 s for a row that a transaction has locked.
        self._jobs.appendleft(job) if first else self._jobs.append(job)
        self._worker.put(self._run)

    def hold_of(self, owner: str) -> Hold | None:
        return self.by_owner.get(owner)

    def is_held(self, hold: Hold) -> bool:
        return self.by_owner.get(hold.claim.owner) is hold

    def add(self, hold: Hold) -> None:
        """Note a lock that was granted."""
        session, owner = hold.session, hold.claim.owner
        with self._mutex:
            self.by_owner[owner] = self.by_key[hold.key] = session.holds[owner] = hold
            session.ttl = max(session.ttl, hold.ttl)

    def remove(self, hold: Hold) -> bool:
        """Note that a lock is released or lost; return whether it was held until now."""
        session, owner = hold.session, hold.claim.owner
        with self._mutex:
            if self.by_owner.get(owner) is not hold:
                return False
            del self.by_owner[owner], session.holds[owner]
            # After the end of its session the key may be another hold's by now.
            if self.by_key.get(hold.key) is hold:
                del self.by_key[hold.key]
            if not session.holds:
                session.ttl = 0.0
            return True

    @contextlib.contextmanager
    def turn(self, key: int, wait: Wait, refused: Callable[[], object]) -> Iterator[bool]:
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

    def _first(self, key: int) -> _Place | None:
        with self._mutex:
            queue = self._queues.get(key, ())
            while queue:
                if (first := queue[0]()) is not None:
                    return first
                queue.popleft()
            self._queues.pop(key, None)
        return None

    def close(self) -> None:
        """Close the sessions that hold nothing."""
        while (idle := self._take_idle()) is not None:
            idle.close()
        if self._shared:
            with contextlib.suppress(NoAnswer):
                self.ask(self._close_unused)

    def close_all(self) -> None:
        """Close every session that runs no statement, at the interpreter's exit."""
        for session in self._sessions():
            if session.busy_until is None:
                session.close()

    def _sessions(self) -> list[Session]:
        with self._mutex:
            return [*self._waiters, *self._shared.values()]

    # Called by the thread

    def _run(self) -> None:
        while self._jobs:
            self._jobs.popleft().run()
            if under_test() and not self.by_owner:
                # The test runner is going to drop the database.
                self._close_unused()

    def _do(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            # Before the answer: the caller finds that a lock is lost as soon as it has the answer.
            self._drop_closed()

    def session(self, ttl: float) -> Session:
        """Return the shared session of a ttl; open it if there is none, or if it has ended."""
        session = self._shared.get(ttl)
        if session is not None and not session.is_usable():
            self._drop_closed()
        if ttl not in self._shared:
            self._close_unused(MAX_IDLE)
            session = open_session(self._route, self._timeout, waits=False)
            with self._mutex:
                self._shared[ttl] = session
        return self._shared[ttl]

    def longest_ttl(self, session: Session) -> float:
        """Return the longest ttl of the locks that a session holds."""
        with self._mutex:
            session.ttl = max([hold.ttl for hold in session.holds.values()], default=0.0)
        return session.ttl

    def _drop_closed(self) -> None:
        for session in self._sessions():
            if session.closed:
                with self._mutex:
                    self._shared = {
                        ttl: each for ttl, each in self._shared.items() if each is not session
                    }
                for hold in list(session.holds.values()):
                    if self.remove(hold):
                        hold.lost([hold.claim.owner])

    def _close_unused(self, keep: int = 0) -> None:
        """Close the shared sessions that hold nothing. Keep `keep` of them."""
        unused = [ttl for ttl, session in self._shared.items() if not session.holds]
        for ttl in unused[: max(0, len(unused) - keep)]:
            with self._mutex:
                session = self._shared.pop(ttl)
            session.close()

    # Called by the threads that wait

    def take_waiter(self, most: int) -> Session | None:
        """Return a session to wait on; None if this process uses `most` of them."""
        while (idle := self._take_idle()) is not None:
            if idle.is_usable():
                return idle
        with self._mutex:
            # A closed session that has holds is yet to be dropped.
            self._waiters = {each for each in self._waiters if not each.closed or each.holds}
            if len(self._waiters) + self._opening >= most:
                return None
            self._opening += 1
        try:
            session = open_session(self._route, self._timeout, waits=True)
            with self._mutex:
                self._waiters.add(session)
        finally:
            with self._mutex:
                self._opening -= 1
        return session

    def interrupt(self, used: Sequence[Session]) -> Sequence[Session]:
        """Return the sessions that a wait still uses; no other wait will use them."""
        with self._mutex:
            for session in used:
                session.interrupted = True
            return [*used]

    def give_back(self, session: Session, used: list[Session] | None = None) -> None:
        """Put back a session that waited, and holds nothing; `used` is cleared."""
        with self._mutex:
            if session in self._shared.values():
                return
            if used is not None:
                used.clear()
            keep = not (session.closed or session.interrupted or under_test())
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
