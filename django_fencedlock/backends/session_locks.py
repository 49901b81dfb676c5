"""
What backends have in common whose locks live as long as a session that only its client can close.

One session for all locks of a ttl that were free; a lock that was waited for stays on the session
that waited. Each session has a real thread of its own: an interrupt of a caller ruins no statement.
"""

from __future__ import annotations

import contextlib
import random
import time
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from django.db import Error, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import AliasConfig, Problem, location_problems
from ..core import runtime
from ..core.jobs import Job, NoAnswer
from ..core.runtime import clock, forks
from ..exceptions import BackendUnavailable
from ..storage.connections import CURSOR, MAX_IDLE, pool
from ..storage.dialect import Row
from ..storage.fences import FORCED
from .interface import Backend, Claim, Grant, Granted, Held, Renewal, Wait

T = TypeVar("T")

#: Sessions of one process that wait in the server, or hold a lock that was waited for.
MAX_WAITERS = 10
#: Shared sessions of one process, each for the locks of one ttl; more are closed if they are idle.
MAX_SHARED = 8
#: Seconds of one wait in the server, and between two calls of `Wait.refused()`.
SLICE, TICK = 60.0, 1.5
#: Seconds that a cancelled waiter may take to leave the server's queue.
LEAVES_WITHIN = 2.0
#: Bounds of the pause before another try if all sessions that may wait are in use.
PAUSE = 0.05, 0.25

#: What a parent process has, with its sessions. Some drivers end a session that is collected.
_of_parents: list[Any] = []


@dataclass(eq=False)
class Hold:
    """One lock of this process, and the session that holds it."""

    claim: Claim
    key: str
    session: Session
    ttl: float
    granted: Granted = field(init=False, repr=False)

    @property
    def session_columns(self) -> dict[str, Any]:
        """Return the column of a registry row that says which session has the lock."""
        return {"session_pid": self.session.id}

    def answer(self, claim: Claim) -> Granted | Held:
        """Return the answer to a claim of this process."""
        mine, token = self.claim, self.granted.token
        if mine.owner == claim.owner:
            return self.granted
        return Held(mine.owner, mine.identity, token, session_pid=self.session.id)


class Session:
    """One private session, opened and used by a thread of its own. It never reconnects."""

    def __init__(self, backend: SessionBackend, ttl: float, *, waits: bool = False) -> None:
        self._backend, self.ttl, self.waits = backend, ttl, waits
        #: It gets no other lock, and is closed once it has none.
        self.retired = False
        self._jobs: deque[Job[Any]] = deque()
        self.worker = runtime.Worker("fencedlock-session")
        self.connection: Any = None
        #: The server's number of the session; 0 until it is open.
        self.id, self.closed = 0, False
        self.holds: set[Hold] = set()
        #: Seconds of silence after which the server ends it.
        self.silence = 0

    def submit(
        self, work: Callable[[], T], undo: Callable[[T], object] | None = None, first: bool = False
    ) -> Job[T]:
        """Run `work` in the thread, before all other work or after it; `Job` explains `undo`."""
        job: Job[T] = Job(lambda job: self._do(work), undo)
        # Renewals come first: each grant may wait for a row that a transaction has locked.
        self._jobs.appendleft(job) if first else self._jobs.append(job)
        self.worker.put(self._run)
        return job

    # Called by the thread

    def _run(self) -> None:
        while self._jobs:
            self._jobs.popleft().run()

    def _do(self, work: Callable[[], T]) -> T:
        if self.closed:
            raise OperationalError("the session has ended")
        try:
            if self.connection is None:
                self.connection = self._backend._connect(self)
            return work()
        except Error:
            if not self._is_alive():
                self.close()
            raise
        except BaseException:
            # Maybe in the middle of a statement.
            self.close()
            raise

    def _is_alive(self) -> bool:
        # Not is_usable(): a driver's ping may connect again, as another session.
        try:
            self.one("SELECT 1")
        except Exception:
            return False
        return True

    def one(self, statement: str, *given: Any) -> Any:
        """Execute a statement, and return its first row."""
        cursor = getattr(self.connection, CURSOR)
        cursor.execute(statement, given)
        return cursor.fetchone()

    def do(self, statement: str, *given: Any) -> None:
        """Execute a statement that must not fail: otherwise close the session."""
        try:
            self.one(statement, *given)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.closed = True
        for hold in [*self.holds]:
            self._backend._remove(hold)
        if self.connection is not None:
            with contextlib.suppress(Exception):
                self.connection.close()


class SessionBackend(Backend):
    """A session may have its own lock twice, so a table excludes the threads of this process."""

    records_grants = True
    supports_waiting = True
    supports_ttl = False
    option_names = frozenset({"TIMEOUT", "MAX_WAITERS"})

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._timeout = config.timeout
        self._max_waiters: int = config.options.get("MAX_WAITERS", MAX_WAITERS)
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        # Held for microseconds, never while the server is asked.
        self._mutex = runtime.allocate_lock()
        self._holds: dict[str, Hold] = {}
        #: By ttl: the server ends a session that was silent for the ttl of its locks.
        self._shared: dict[float, Session] = {}
        # Weak: an exception from outside may interrupt a thread that has just made one.
        self._waiters: WeakSet[Session] = WeakSet()
        #: Those of the waiters that have nothing to do.
        self._idle: list[Session] = []

    def after_fork(self) -> None:
        _of_parents.append(vars(self).copy())
        self._reset()

    # The requests, called by a session's thread

    @abstractmethod
    def _connect(self, session: Session) -> BaseDatabaseWrapper:
        """Open a session and set its id; the wrapper keeps a cursor."""

    @abstractmethod
    def _claim(self, session: Session, claim: Claim, key: str, seconds: float) -> Granted | Held:
        """Take the lock, and record and `_add()` it, or release it. Wait for it if `seconds`."""

    @abstractmethod
    def _renew(self, session: Session, holds: Mapping[str, Hold]) -> dict[str, Renewal]:
        """Renew locks by their owners; release what was released by force."""

    @abstractmethod
    def _verify(self, hold: Hold) -> bool: ...

    @abstractmethod
    def _unlock(self, hold: Hold) -> bool:
        """Clear its row and release the lock; close the session if that fails."""

    # The requests, called by any thread

    @abstractmethod
    def _key(self, name: str) -> str: ...

    @abstractmethod
    def _evict(self, grant: Grant) -> bool:
        """Clear the row of another process's lock if its session is gone."""

    @abstractmethod
    def _cancel(self, session: Session) -> None:
        """Interrupt the statement of a session that waits."""

    # Acquire

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        key = self._key(claim.name)
        answer = self._try(claim, key)
        while isinstance(answer, Held) and not answer.alias and wait.left:
            wait.refused(answer)
            answer = self._wait(claim, key, wait)
        return answer

    def _try(self, claim: Claim, key: str) -> Granted | Held:
        while True:
            # Without the thread first: many may ask for a lock that this process holds.
            if hold := self._holds.get(key):
                return hold.answer(claim)
            session = self._session(claim.ttl)
            was_open = bool(session.id)
            try:
                with self._errors("acquire", claim.name):
                    work = partial(self._try_on_session, session, claim, key)
                    return session.submit(work, self._undo).answer(self._timeout)
            except BackendUnavailable as exc:
                if isinstance(exc.__cause__, NoAnswer):
                    self._retire(session)
                    raise
                # It may have ended while it was idle, and nothing was granted on it.
                if not (was_open and session.closed):
                    raise

    def _retire(self, session: Session) -> None:
        """Use another session for the next claims: this one is busy, or its server is away."""
        with self._mutex:
            if self._shared.get(session.ttl) is session:
                del self._shared[session.ttl]
            session.retired = True
        # By the thread, after its work: what is granted at this moment may have another caller.
        session.worker.put(partial(_close_idle, session))

    def _try_on_session(self, session: Session, claim: Claim, key: str) -> Granted | Held:
        # By the thread alone, so that no try of this session overlaps another.
        hold = self._holds.get(key)
        return hold.answer(claim) if hold else self._claim(session, claim, key, 0)

    def _undo(self, answer: Granted | Held) -> None:
        """Release a grant whose caller has left."""
        if isinstance(answer, Granted):
            self._release(answer.handle)

    def _session(self, ttl: float) -> Session:
        """Return the shared session of a ttl."""
        with self._mutex:
            session = self._shared.get(ttl)
            if session is None or session.closed:
                if len(self._shared) >= MAX_SHARED:
                    self._close_idle()
                session = self._shared[ttl] = Session(self, ttl)
            return session

    # Wait

    def _wait(self, claim: Claim, key: str, wait: Wait) -> Granted | Held:
        """Wait in the server's queue, for a slice of the time."""
        session = self._waiter(claim.ttl)
        if session is None:
            time.sleep(min(wait.left, random.uniform(*PAUSE)))
            return self._try(claim, key)
        was_open, left = bool(session.id), min(wait.left, SLICE)
        deadline = clock() + left
        job = session.submit(partial(self._claim, session, claim, key, left), self._undo)
        answer: Granted | Held = Held()
        try:
            wait.on_cancel(job.wake)
            while not job.wait(min(TICK, deadline - clock())):
                if wait.cancelled or clock() >= deadline:
                    return answer
                # CPython may raise an asynchronous exception of this thread in the one it started.
                session.worker.start()
                wait.refused(self._look(claim.name))
            try:
                answer = job.answer(0.0)
            except Error as exc:
                # It may have ended while it was idle.
                if not (was_open and session.closed):
                    raise self.unavailable("wait for", exc, claim.name) from exc
            return answer
        finally:
            # Also in a killed greenlet. First: it must be closed, not kept for another wait.
            session.retired = isinstance(answer, Held)
            if not job.done:
                self._leave(session, job)
            if session.retired:
                session.worker.put(session.close)

    def _waiter(self, ttl: float) -> Session | None:
        """Return a session to wait on; None if this process uses all that it may."""
        with self._mutex:
            for session in self._idle:
                if session.ttl == ttl:
                    self._idle.remove(session)
                    return session
            busy = sum(not each.closed for each in self._waiters) - len(self._idle)
            if busy >= self._max_waiters:
                return None
            session = Session(self, ttl, waits=True)
            self._waiters.add(session)
            return session

    def _leave(self, session: Session, job: Job[Any]) -> None:
        """Leave the server's queue, and stay until that is done, but at most some seconds."""
        job.left = True
        until = clock() + LEAVES_WITHIN
        while not job.done and clock() < until:
            # Repeated: the statement may not have reached the server yet.
            if session.id:
                with contextlib.suppress(BackendUnavailable):
                    self._cancel(session)
            job.wait(0.02)

    def _look(self, name: str) -> Held:
        with contextlib.suppress(BackendUnavailable):
            return self.holders([name]).get(name, Held())
        return Held()

    # Renew, verify, release

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        batches: defaultdict[Session, dict[str, Hold]] = defaultdict(dict)
        for grant in grants:
            if hold := self._hold_of(grant):
                hold.ttl = grant.ttl
                batches[hold.session][grant.owner] = hold
        jobs = [
            (session, holds, session.submit(partial(self._renew, session, holds), first=True))
            for session, holds in batches.items()
        ]
        answers: dict[str, Renewal] = {}
        until = clock() + self._timeout
        for session, holds, job in jobs:
            try:
                answers |= job.answer(until - clock())
            except Error:
                answers |= dict.fromkeys(holds, Renewal.UNKNOWN)
            if session.closed:
                # Its locks are free.
                answers |= dict.fromkeys(holds, Renewal.LOST)
        return [answers.get(grant.owner, Renewal.LOST) for grant in grants]

    def verify(self, grant: Grant) -> bool:
        hold = self._hold_of(grant)
        return hold is not None and self._ask(
            hold.session, partial(self._verify, hold), "verify", grant.name
        )

    def release(self, grant: Grant) -> bool:
        hold = self._hold_of(grant)
        # By the thread, after what it was asked before: maybe to acquire this very lock.
        session = hold.session if hold else self._shared.get(grant.ttl)
        if session is not None and not (hold is None and grant.handle):
            done = self._ask(session, partial(self._release_owner, grant), "release", grant.name)
            if done or hold:
                return done
        return grant.fenced and not grant.handle and self._evict(grant)

    def _release_owner(self, grant: Grant) -> bool:
        hold = self._hold_of(grant)
        # A forced release, which has no handle, finds its own note.
        return hold is not None and (self._release(hold) or not grant.handle)

    def _release(self, hold: Hold) -> bool:
        if not self._remove(hold):
            return False
        try:
            return self._unlock(hold)
        finally:
            self._put_back(hold.session)

    def _put_back(self, session: Session) -> None:
        """Keep a session that waited for the next wait; close one that gets no other lock."""
        with self._mutex:
            is_over = session.retired or session.closed or len(self._idle) >= MAX_IDLE
            if session.waits and not is_over:
                self._idle.append(session)
                return
        if (session.waits or session.retired) and not session.holds:
            session.close()

    def _ask(self, session: Session, work: Callable[[], bool], action: str, name: str) -> bool:
        """Run `work` in the thread; False if the session has ended: others may have the lock."""
        with self._errors(action, name):
            try:
                return session.submit(work).answer(self._timeout)
            except Error:
                if session.closed:
                    return False
                raise

    # The locks of this process

    def _add(self, hold: Hold, granted: Granted) -> Granted:
        """Note a lock that was granted."""
        hold.granted = granted
        with self._mutex:
            self._holds[hold.key] = hold
            hold.session.holds.add(hold)
        return granted

    def _hold_of(self, grant: Grant) -> Hold | None:
        hold = self._holds.get(grant.handle.key if grant.handle else self._key(grant.name))
        return hold if hold is not None and hold.claim.owner == grant.owner else None

    def _remove(self, hold: Hold) -> bool:
        """Note that a lock is released or lost; return whether it was held until now."""
        with self._mutex:
            hold.session.holds.discard(hold)
            # After the end of its session the key may be another hold's by now.
            if was_held := self._holds.get(hold.key) is hold:
                del self._holds[hold.key]
            return was_held

    # Housekeeping

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from location_problems(config)
        count = config.options.get("MAX_WAITERS", MAX_WAITERS)
        if not isinstance(count, int) or isinstance(count, bool) or count <= 0:
            what = f"{config.where('OPTIONS')}['MAX_WAITERS'] is {count!r}."
            yield Problem("E008", what, "Make it an int above 0.")

    def close(self) -> None:
        with self._mutex:
            self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            session = self._idle.pop()
            session.worker.put(session.close)
        for ttl, session in [*self._shared.items()]:
            if not session.holds:
                del self._shared[ttl]
                session.worker.put(partial(_close_idle, session))

    def _query(
        self, action: str, work: Callable[[BaseDatabaseWrapper], T], name: str | None = None
    ) -> T:
        """Ask the fence database on a connection that holds no lock."""
        with self._errors(action, name):
            return pool(self.config.fence_database, self._timeout).run(work)

    @contextlib.contextmanager
    def _errors(self, action: str, name: str | None) -> Iterator[None]:
        try:
            yield
        except Error as exc:
            raise self.unavailable(action, exc, name) from exc


def _close_idle(session: Session) -> None:
    # A claim may have come before this.
    if not session.holds:
        session.close()


def execute(statement: str, given: Sequence[Any], used: BaseDatabaseWrapper) -> Any:
    with used.cursor() as cursor:
        cursor.execute(statement, given)
        return cursor.fetchall()


def forced(used: BaseDatabaseWrapper, owners: Sequence[str]) -> set[str]:
    """Return those of the owners whose lock was released by force."""
    inside = ", ".join(["%s"] * len(owners))
    rows = execute(f"SELECT owner FROM {FORCED} WHERE owner IN ({inside})", owners, used)
    return {owner for (owner,) in rows}


def describe(row: Row | None, session: int | None = None) -> Held:
    """Describe a holder by its row of the registry, or by its session."""
    if row is None:
        return Held(identity=f"session {session} of the database", session_pid=session)
    held = Held(row.owner.id, row.owner.identity, row.token, session_pid=session)
    left, age = row.expires_at - row.read_at, row.read_at - row.acquired_at
    return held._replace(expires_in=left.total_seconds(), held_for=age.total_seconds())
