"""What the session locks of one alias share in a process: the holds, the sessions, one thread."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ...core import runtime
from ...core.jobs import Job, NoAnswer
from ...core.runtime import clock, forks
from ...storage.connections import MAX_IDLE, under_test
from ..interface import Claim, Granted, Held, Wait
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
    ttl: float
    granted: Granted = field(init=False, repr=False)

    def values(self) -> dict[str, Any]:
        """Return the parameters of a statement about it."""
        return {"name": self.claim.name, "key": self.key, "owner": self.claim.owner}

    @property
    def session_columns(self) -> dict[str, Any]:
        """Return the columns of a registry row that say which session has the lock."""
        pid, started = self.session.pid, self.session.started
        return {"session_pid": pid, "session_started": started, "session_key": self.key}

    def refusal(self) -> Held:
        """Return what refuses another claim of this process."""
        mine, token, pid = self.claim, self.granted.token, self.session.pid
        return Held(mine.owner, mine.identity, token, session_pid=pid, shared=mine.shared)


class _Place:
    """A thread's place in the queue of a key, and the lock that it sleeps on."""

    # A lock, since an Event that was interrupted may stay locked, and then the next set() never
    # returns.
    def __init__(self, shared: bool) -> None:
        self.shared, self.lock = shared, threading.Lock()
        self.lock.acquire()

    def wake(self) -> None:
        """Wake the thread, from any thread, any number of times."""
        with contextlib.suppress(RuntimeError):
            self.lock.release()


class SessionLocks:
    """
    The session locks that this process holds through one alias.

    One real thread uses the sessions that hold locks: the shared session of each ttl, on which
    locks are tried, and each session that waited for a lock. The server lets a session have its
    own lock twice, so a table of keys excludes the threads of this process.
    """

    def __init__(self, route: str, timeout: float) -> None:
        self.route, self._timeout = route, timeout
        self._worker = runtime.Worker("fencedlock-postgres")
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        # Held for microseconds, never while a server is asked.
        self._mutex = runtime.allocate_lock()
        self._jobs: deque[Job[Any]] = deque()
        #: By key and owner: readers of one process have a key together.
        self.by_key: dict[int, dict[str, Hold]] = {}
        self._sessions: set[Session] = set()
        #: By ttl: the server ends a session that was silent for the ttl of its locks.
        self._shared: dict[float, Session] = {}
        # Held while a session is opened, by threads that wait alone.
        self._opening = runtime.allocate_lock()
        self._queues: dict[int, deque[weakref.ref[_Place]]] = {}

    def after_fork(self) -> None:
        _of_parents.append(vars(self).copy())
        self._reset()

    # Called by any thread

    def ask(self, work: Callable[[], T], **how: Any) -> T:
        """Run `work` in the thread, and return its answer; see `submit()`."""
        job: Job[T] = self.submit(work, **how)
        try:
            return job.answer(self._timeout)
        except NoAnswer:
            for session in self._opened():
                overdue = session.busy_until
                if overdue is not None and clock() > overdue:
                    session.cut()
            raise

    def submit(
        self,
        work: Callable[[], T],
        undo: Callable[[T], object] | None = None,
        *,
        first: bool = False,
    ) -> Job[T]:
        """Run `work` in the thread, before all other work or after it; `Job` explains `undo`."""
        job: Job[T] = Job(partial(self._do, work), undo)
        # Renewals come first: each grant may wait 0.25 s for a row that a transaction has locked.
        self._jobs.appendleft(job) if first else self._jobs.append(job)
        self._worker.put(self._run)
        return job

    def find(self, key: int, owner: str) -> Hold | None:
        """Return the lock of an owner in this process."""
        return self.by_key.get(key, {}).get(owner)

    def decide(self, claim: Claim, key: int, *, in_turn: bool = False) -> Granted | Held | None:
        """
        Answer a claim by the locks and the queue of this process; None if the server decides.

        A waiting writer stops new readers, but not the reader whose turn it is.
        """
        if mine := self.find(key, claim.owner):
            return mine.granted
        with self._mutex:
            hold = next(iter(self.by_key.get(key, {}).values()), None)
            places = [place() for place in self._queues.get(key, ())]
        stops = not in_turn and any(place and not place.shared for place in places)
        if claim.shared and stops:
            return hold.refusal() if hold else Held()
        return None if hold is None or (claim.shared and hold.claim.shared) else hold.refusal()

    def has(self, session: Session, key: int) -> bool:
        """Return whether a session has a key."""
        with self._mutex:
            return any(hold.session is session for hold in self.by_key.get(key, {}).values())

    def add(self, hold: Hold) -> None:
        """Note a lock that was granted."""
        session = hold.session
        with self._mutex:
            self.by_key.setdefault(hold.key, {})[hold.claim.owner] = hold
            session.holds.add(hold)
            session.ttl = max(session.ttl, hold.ttl)

    def remove(self, hold: Hold) -> bool:
        """Note that a lock is released or lost; return whether it was held until now."""
        session = hold.session
        with self._mutex:
            session.holds.discard(hold)
            if not session.holds:
                session.ttl = 0.0
            # After the end of its session the key may be another hold's by now.
            holds = self.by_key.get(hold.key, {})
            if was_held := holds.get(hold.claim.owner) is hold:
                del holds[hold.claim.owner]
            if not holds:
                self.by_key.pop(hold.key, None)
            return was_held

    @contextlib.contextmanager
    def turn(
        self, key: int, wait: Wait, refused: Callable[[], object], shared: bool = False
    ) -> Iterator[bool]:
        """Queue behind earlier threads of this process; yield whether the turn came in time."""
        # An exception from outside may interrupt a thread as it leaves: so the queue has weak
        # references, and the next one looks each `TICK`.
        mine = _Place(shared)
        place = weakref.ref(mine)
        try:
            with self._mutex:
                self._queues.setdefault(key, deque()).append(place)
            wait.on_cancel(mine.wake)
            while not (is_first := self._first(key) is mine) and wait.left:
                if not mine.lock.acquire(timeout=min(TICK, wait.left)) and wait.left:
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
        with self._mutex:
            idle = [each for each in self._sessions if each.idle]
            for session in idle:
                session.idle = False
        for session in idle:
            session.close()
        if self._shared:
            # At the interpreter's exit no thread can be started; then none uses them either.
            with contextlib.suppress(NoAnswer):
                self.ask(self._close_unused) if self._worker.start() else self._close_unused()

    def _opened(self) -> list[Session]:
        with self._mutex:
            return [*self._sessions]

    def _open(self, ttl: float | None) -> Session:
        session = open_session(self.route, self._timeout, ttl)
        with self._mutex:
            self._sessions.add(session)
        return session

    # Called by the thread

    def _run(self) -> None:
        while self._jobs:
            self._jobs.popleft().run()
            if under_test() and not self.by_key:
                # The test runner is going to drop the database.
                self._close_unused()

    def _do(self, work: Callable[[], T], job: Job[T]) -> T:
        try:
            return work()
        finally:
            # Before the answer: the caller finds that a lock is lost as soon as it has the answer.
            self._drop_closed()

    def session(self, ttl: float) -> Session:
        """Return the shared session of a ttl; open it if there is none, or if it has ended."""
        session = self._shared.get(ttl)
        if session is None or not session.is_usable():
            self._drop_closed()
            self._close_unused(MAX_IDLE)
            session = self._shared[ttl] = self._open(ttl)
        return session

    def _drop_closed(self) -> None:
        for session in self._opened():
            if session.closed:
                with self._mutex:
                    self._sessions.discard(session)
                for hold in [*session.holds]:
                    self.remove(hold)

    def _close_unused(self, keep: int = 0) -> None:
        """Close the shared sessions that hold nothing. Keep `keep` of them."""
        unused = [ttl for ttl, session in self._shared.items() if not session.holds]
        for ttl in unused[keep:]:
            self._shared.pop(ttl).close()

    # Called by the threads that wait

    def take_waiter(self, most: int) -> Session | None:
        """Return a session to wait on; None if this process uses `most` of them."""
        with self._opening:
            while True:
                with self._mutex:
                    waiters = [each for each in self._sessions if each.waits and not each.closed]
                    session = next((each for each in waiters if each.idle), None)
                    if session is None:
                        break
                    session.idle = False
                if session.is_usable():
                    return session
            return self._open(None) if len(waiters) < most else None

    def give_back(self, session: Session, *, keep: bool = True) -> None:
        """Put back a session that waited, and holds nothing."""
        with self._mutex:
            idle = sum(each.idle for each in self._sessions)
            is_over = session.closed or session.may_be_cancelled
            keep = keep and idle < MAX_IDLE and not (is_over or under_test())
            session.idle = keep
        if not keep:
            session.close()
