"""The session that a process shares for the locks it holds, and the one thread that uses it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import random
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from django.db import Error, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core import runtime
from ..core.runtime import clock, notify
from ..storage.connections import under_test
from .base import Grant
from .postgres_hung import end_hung_holders
from .postgres_sessions import Session, open_session, smallest_ttl
from .postgres_threads import Job, Unanswered, poller

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds between tries to reach a server that didn't answer.
FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
#: Seconds between looks for a hung holder while somebody waits.
LOOK_EVERY = 1.0

#: Sessions and pipes of a parent process. Never closed: that would end them for the parent.
_of_parents: list[Any] = []


@dataclass(eq=False)
class Hold:
    """One lock of this process: where it is held, and by whom."""

    name: str
    key: int
    owner: str
    #: The registry has a row of it, which its sessions can see.
    recorded: bool
    session: Session
    #: Called with the owners of holds whose session died. It must not wait.
    tell: Callable[[Sequence[str]], object]
    #: An unfenced one that was renewed: there are tables, and there may be a row of it by now.
    listed: bool = False
    lent: BaseDatabaseWrapper | None = None
    grant: Grant | None = field(default=None, repr=False)

    def values(self) -> dict[str, Any]:
        """The parameters of a statement about it."""
        return {"name": self.name, "key": self.key, "owner": self.owner}


class TooSoon(OperationalError):
    """The server couldn't be reached a moment ago; `wait` seconds from now it is tried again."""

    def __init__(self, message: str, wait: float) -> None:
        super().__init__(message)
        self.wait = wait


class Home:
    """
    Everything that session locks of one database share in this process.

    All that is asked of a session that holds locks is asked by one thread of the system: a
    greenlet that was killed within a statement would ruin the session, and every lock on it.
    """

    def __init__(self, route: str, timeout: float) -> None:
        self.route = route
        self.timeout = timeout
        self._reset()

    def _reset(self) -> None:
        self._mutex = runtime.allocate_lock()
        self._jobs: deque[Job[Any]] = deque()
        self._holds: dict[str, Hold] = {}
        self._by_key: dict[int, Hold] = {}
        #: The names that threads of this process wait for, by key.
        self.awaited: dict[int, str] = {}
        self._session: Session | None = None
        self._watched: dict[int, Session] = {}
        self._wake: tuple[int, int] | None = None
        self._poll: Any = None
        self._next_look = math.inf
        self._delay = 0.0
        self._not_before = -math.inf
        self._last_error = ""

    def forget_after_fork(self) -> None:
        """Keep what is the parent's from being closed, and begin anew."""
        _of_parents.append((self._session, self._watched, self._holds, self._wake))
        self._reset()

    # Asked by any thread

    def ask(
        self,
        work: Callable[[], T],
        undo: Callable[[T], object] | None = None,
        *,
        renews: bool = False,
    ) -> T:
        """Have the thread do `work`, at once if it `renews` leases; see `Job` for `undo`."""
        deadline = clock() + self.timeout
        while True:
            job = Job(partial(self._do, work), undo)
            self.submit(job, first=renews)
            try:
                return job.result(deadline - clock(), self._leave)
            except TooSoon as exc:
                # Nothing was sent. Nor does the server's absence a moment ago say much.
                if clock() + exc.wait >= deadline:
                    raise
                time.sleep(exc.wait)
            except Unanswered:
                self._cut_if_stuck()
                raise Unanswered(f"no answer within {self.timeout:g} s") from None

    def submit(self, job: Job[Any], *, first: bool = False) -> None:
        """Have the thread run `job`, after all others or `first`, without waiting for it."""
        # Each grant may wait a quarter of a second for a row that a transaction has locked.
        self._jobs.appendleft(job) if first else self._jobs.append(job)
        try:
            self.rouse()
        except RuntimeError:
            # Nobody waits for it any more when there is a thread.
            self._jobs.remove(job)
            raise

    def rouse(self) -> None:
        """Wake the thread, or start it."""
        with self._mutex:
            if self._wake is None:
                self._wake = os.pipe()
                for end in self._wake:
                    os.set_blocking(end, False)
                self._start()
            hand = self._wake[1]
        with contextlib.suppress(BlockingIOError):
            os.write(hand, b"!")

    def _start(self) -> None:
        try:
            runtime.start(self._run)
        except RuntimeError:
            # There are too many, or the interpreter ends: whoever comes next tries again.
            assert self._wake is not None
            for end in self._wake:
                os.close(end)
            self._wake = None
            raise

    def do(self, work: Callable[[], object]) -> None:
        """Have the thread do `work`, whatever comes of it."""
        self.submit(Job(work))

    @contextlib.contextmanager
    def awaiting(self, key: int, name: str) -> Iterator[None]:
        """Within this block, look now and then whether the holder hangs."""
        self.awaited[key] = name
        try:
            # Where a look is due anyhow, the thread finds by itself that somebody waits.
            if math.isinf(self._next_look):
                self.rouse()
            yield
        finally:
            self.awaited.pop(key, None)

    def close(self) -> None:
        """Close the shared session if it holds nothing."""
        if self._wake is not None:
            with contextlib.suppress(Unanswered):
                self.ask(self.close_if_idle)

    def end(self) -> None:
        """Close every session, whatever it holds."""
        if self._wake is not None:
            with contextlib.suppress(Unanswered):
                self.ask(self._end_all)

    def holding(self, key: int) -> Hold | None:
        """The hold that this process has on a key."""
        return self._by_key.get(key)

    def is_held(self, hold: Hold) -> bool:
        return self._holds.get(hold.owner) is hold

    @property
    def held(self) -> int:
        """How many locks this process holds."""
        return len(self._holds)

    def add(self, hold: Hold) -> None:
        """Note a lock that was granted, and watch its session."""
        with self._mutex:
            self._holds[hold.owner] = hold
            self._by_key[hold.key] = hold
        if hold.session is not self._session:
            self.do(lambda: self._watch(hold.session))

    def remove(self, hold: Hold) -> bool:
        """Note that a lock is given back, or lost; whether it was held until now."""
        with self._mutex:
            if self._by_key.get(hold.key) is hold:
                del self._by_key[hold.key]
            return self._holds.pop(hold.owner, None) is not None

    def _leave(self, job: Job[Any]) -> None:
        self.do(job.undo)

    def _cut_if_stuck(self) -> None:
        """
        Give up a session that answers nobody, once no lease on it can be good any more.

        Not sooner: a server that only stalls gives its answers in the end, and keeps the locks.
        """
        session = self._session
        since = session.busy_since if session else None
        if session and since and clock() - since > max(self.timeout, smallest_ttl()):
            session.cut()

    # Done by the thread alone

    def session(self) -> Session:
        """The shared session; opened when there is none, but not again and again."""
        if self._session is None:
            if (wait := self._not_before - clock()) > 0:
                raise TooSoon(self._last_error, wait)
            try:
                self._session = open_session(self.route, self.timeout, waits=False)
            except Exception as exc:
                self._delay = min(LONGEST_DELAY, self._delay * 2 or FIRST_DELAY)
                self._not_before = clock() + self._delay * random.uniform(0.5, 1)
                self._last_error = f"{exc} (from the last try, a moment ago)"
                raise
            self._delay = 0.0
            self._watch(self._session)
        return self._session

    def _do(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            # Whoever asked finds that a lock is lost as soon as he has the answer.
            self._bury_dead()

    def is_shared(self, session: Session) -> bool:
        return session is self._session

    def unwatch(self, session: Session) -> None:
        if self._watched.get(session.fileno) is session:
            del self._watched[session.fileno]
            self._poll.unregister(session.fileno)

    def close_if_idle(self) -> None:
        """Close the shared session if it holds nothing."""
        session = self._session
        if session is None or any(hold.session is session for hold in self._all_holds()):
            return
        self._session = None
        self.unwatch(session)
        session.close()

    def _end_all(self) -> None:
        for hold in self._all_holds():
            self.remove(hold)
        for session in [*self._watched.values()]:
            session.close()

    def _all_holds(self) -> list[Hold]:
        with self._mutex:
            return list(self._holds.values())

    def _watch(self, session: Session) -> None:
        # The number may have been a dead session's, whose locks have to be given up first.
        self._bury_dead()
        if not session.closed:
            self._watched[session.fileno] = session
            self._poll.register(session.fileno, select.POLLIN)

    def _run(self) -> None:
        # The pipe is this thread's as long as it lives; after a fork another home has another.
        assert self._wake is not None
        ear = self._wake[0]
        self._poll = poller()
        self._poll.register(ear, select.POLLIN)
        while True:
            try:
                ready = self._sleep(ear)
                self._work_off()
                for session in ready:
                    self._examine(session)
                self._bury_dead()
                self._look_if_due()
            except Exception as exc:
                notify(
                    logger.error,
                    "The thread of database %r's session locks failed",
                    self.route,
                    exc_info=exc,
                )

    def _sleep(self, ear: int) -> list[Session]:
        """Wait for work, or for a session that has something to say: most likely its end."""
        if self.awaited and math.isinf(self._next_look):
            self._next_look = clock() + LOOK_EVERY
        left = self._next_look - clock()
        found = self._poll.poll(None if math.isinf(left) else max(0.0, left) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(ear, 4096)
        return [self._watched[fileno] for fileno, _ in found if fileno != ear]

    def _work_off(self) -> None:
        while self._jobs:
            self._jobs.popleft().run()
            self._bury_dead()
            if under_test() and not self._holds:
                # A test runner will want to drop the database.
                self.close_if_idle()

    def _examine(self, session: Session) -> None:
        """Find out why an idle session has something to read. A bare notice is harmless."""
        if self._watched.get(session.fileno) is session and not session.closed:
            with contextlib.suppress(Error):
                session.one("SELECT 1", {}, prepare=False)

    def _bury_dead(self) -> None:
        for session in [each for each in self._watched.values() if each.closed]:
            self.unwatch(session)
            if session is self._session:
                self._session = None
            session.close()
            self._lose(hold for hold in self._all_holds() if hold.session is session)

    def _lose(self, holds: Iterable[Hold]) -> None:
        told: dict[Callable[[Sequence[str]], object], list[str]] = {}
        for hold in holds:
            if self.remove(hold):
                told.setdefault(hold.tell, []).append(hold.owner)
        for tell, owners in told.items():
            tell(owners)

    def _look_if_due(self) -> None:
        if clock() >= self._next_look:
            # Before those are read who wait: whoever comes later sees that he has to rouse.
            self._next_look = math.inf
            try:
                # Not for what this process holds itself: its keeper knows better.
                names = [name for key, name in [*self.awaited.items()] if key not in self._by_key]
                if names:
                    end_hung_holders(self.session(), names)
            except Error as exc:
                notify(logger.debug, "Looking for hung holders failed", exc_info=exc)


_homes: dict[tuple[str, float], Home] = {}


def home(route: str, timeout: float) -> Home:
    """The process's home for session locks that are reached by alias `route`."""
    return _homes.setdefault((route, timeout), Home(route, timeout))


def _forget_after_fork() -> None:
    for each in _homes.values():
        each.forget_after_fork()


def _end_at_exit() -> None:
    for each in _homes.values():
        each.end()


# The sessions would end with the process anyway, but with a warning from each of them.
atexit.register(_end_at_exit)
os.register_at_fork(after_in_child=_forget_after_fork)
