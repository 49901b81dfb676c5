"""Session locks of PostgreSQL: the server excludes, and records the grant in the same statement."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ...conf import AliasConfig, Problem
from ...core import runtime
from ...core.identity import Process, is_process_gone
from ...core.jobs import Job, NoAnswer
from ...core.runtime import clock
from ...exceptions import BackendUnavailable
from ...storage.connections import pool
from ..interface import Backend, Claim, Grant, Granted, Held, Renewal, Wait

try:
    import psycopg  # noqa: F401
except ImportError as exc:
    raise ImproperlyConfigured(
        "The postgres backend needs psycopg 3 (psycopg2 is not supported). Run: pip install "
        "'django-fencedlock[postgres]'"
        if isinstance(exc, ModuleNotFoundError)
        else "psycopg found no libpq. Run: pip install 'psycopg[binary]'"
    ) from exc

from . import checks
from . import statements as sql
from .holding import TICK, Hold, SessionLocks
from .requests import Requests, read_holder
from .sessions import Session, read_application_name

T = TypeVar("T")

#: Sessions of one process that wait in the server, or hold a lock that was waited for.
MAX_WAITERS = 10
#: Seconds of one wait in the server. While it waits it holds back vacuum; when it ends, the place
#: in the queue is lost.
SLICE = 60.0
#: Bounds of the pause before another try where a process can't wait in the server.
PAUSE = 0.05, 0.25
#: Seconds that the server may take to end a session whose client is gone.
ENDS_WITHIN = 0.25
#: Seconds that a cancelled waiter may take to leave the server's queue.
LEAVES_WITHIN = 2.0


class PostgresBackend(Backend):
    """
    Advisory locks of private sessions: one session for all locks of a ttl that were free.

    A lock that was waited for stays on the session that waited. A session takes the lock of its
    readers once, and releases it with the last of them.
    """

    label = "postgres"
    records_grants = True
    supports_waiting = True
    supports_ttl = False
    supports_shared = True
    option_names = frozenset({"TIMEOUT", "MAX_LOCKS", "MAX_WAITERS", "DATABASE"})

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        options = config.options
        self._timeout = config.timeout
        self._max_waiters: int = options.get("MAX_WAITERS", MAX_WAITERS)
        self._route: str = options.get("DATABASE", config.fence_database)
        self._local = SessionLocks(self._route, self._timeout)
        self._requests = Requests(config, self.label, self._local)

    # Acquire

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        key = self._requests.key(claim.name)
        held = self._try(claim, key)
        if isinstance(held, Granted) or held.alias:
            return held
        if wait.left:
            wait.refused(held)
            refused = partial(wait.refused, held)
            with self._local.turn(key, wait, refused, claim.shared) as is_first:
                while is_first and wait.left:
                    # A reader shares what the reader before it may have waited for.
                    answer = self._try(claim, key, in_turn=True) if claim.shared else None
                    if not isinstance(answer, Granted):
                        answer = self._wait_in_server(claim, key, wait)
                    if answer is None:
                        # MAX_WAITERS sessions are in use.
                        time.sleep(min(wait.left, random.uniform(*PAUSE)))
                        answer = self._try(claim, key, in_turn=True)
                        if isinstance(answer, Held):
                            wait.refused(answer)
                    if isinstance(answer, Granted) or answer.alias:
                        return answer
                    held = answer if answer.owner else held
        return held if held.owner else self._look([claim.name]).get(claim.name, Held())

    def acquire_all(self, claims: Sequence[Claim]) -> list[Granted] | dict[str, Held]:
        if len({claim[2:] for claim in claims}) > 1 or claims[0].shared:
            # The locks of a path, with readers.
            return super().acquire_all(claims)
        work = partial(self._requests.acquire_all, claims)
        answer = self._ask("acquire", work, claims[0].name, undo=self._undo)
        if isinstance(answer, dict):
            answer |= self._look([name for name, held in answer.items() if not held.owner])
        return answer

    def _look(self, names: Sequence[str]) -> Mapping[str, Held]:
        """Look up holders that aren't in the registry: unfenced locks, or another program's."""
        with contextlib.suppress(BackendUnavailable):
            return self.holders(names)
        return {}

    def _try(self, claim: Claim, key: int, *, in_turn: bool = False) -> Granted | Held:
        # Without the thread first: many may ask for a lock that this process holds.
        if answer := self._local.decide(claim, key, in_turn=in_turn):
            return answer
        work = partial(self._requests.acquire, claim, key, in_turn=in_turn)
        return self._ask("acquire", work, claim.name, undo=self._undo)

    def _undo(self, answer: Granted | Held | list[Granted] | dict[str, Held] | None) -> None:
        """Release grants whose caller has left, and no later one of the same owner."""
        granted = [answer] if isinstance(answer, Granted) else answer
        if isinstance(granted, list):
            holds = [each.handle for each in granted]
            self._local.submit(partial(self._requests.release_all, holds), first=True)

    # Wait

    def _wait_in_server(self, claim: Claim, key: int, wait: Wait) -> Granted | Held | None:
        """Wait in the server's queue; None if this process may use no further session."""
        deadline, answered = clock() + min(wait.left, SLICE), False
        used: list[Session] = []
        work = partial(self._wait_on_session, claim, key, deadline, used)
        job: Job[Granted | Held | None] = Job(work, self._undo)
        try:
            wait.on_cancel(job.wake)
            runtime.start(job.run)
            with self._errors("wait for", claim.name):
                while not job.wait(TICK):
                    if wait.cancelled:
                        return Held()
                    if not job.begun.locked():
                        # CPython may raise an asynchronous exception of this thread in the new one.
                        runtime.start(job.run)
                    if clock() > deadline + self._timeout:
                        raise NoAnswer(self._timeout)
                    wait.refused(self._look([claim.name]).get(claim.name, Held()))
                answered = True
                return job.answer(0.0)
        finally:
            # Also in a killed greenlet.
            if not answered:
                self._leave(job, used)
                self._local.submit(partial(self._requests.release_owner, claim), first=True)

    def _leave(self, job: Job[Any], used: list[Session]) -> None:
        """Cancel a wait, and stay until the server's queue is left, but at most some seconds."""
        job.left = True
        end, sleep = clock() + self._timeout, runtime.original("time", "sleep")

        def cancel() -> None:
            # Repeated: the statement may not have reached the server yet.
            while not job.done and clock() < end:
                for session in [*used]:
                    session.cancel()
                sleep(0.02)
            if not job.done:
                for session in [*used]:
                    session.cut()

        with contextlib.suppress(RuntimeError):
            runtime.start(cancel)
        until = clock() + LEAVES_WITHIN
        while not job.wait(until - clock()) and clock() < until:
            pass

    def _wait_on_session(
        self, claim: Claim, key: int, deadline: float, used: list[Session], job: Job[Any]
    ) -> Granted | Held | None:
        """Wait for the lock on a session of its own, in a thread of its own."""
        session = self._local.take_waiter(self._max_waiters)
        if session is None:
            return None
        used.append(session)
        answer: Granted | Held | None = None
        try:
            answer = self._requests.wait(session, claim, key, max(0.0, deadline - clock()))
            return answer
        finally:
            # In this order: a caller that cancels notes first that it left, and then looks for the
            # session. So none that is used again is cancelled.
            used.clear()
            session.may_be_cancelled = job.left
            if not isinstance(answer, Granted):
                self._local.give_back(session, keep=answer is not None)

    # Renew, verify, release

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        holds = [hold for grant in grants if (hold := self._hold_of(grant))]
        ttls = {grant.owner: grant.ttl for grant in grants}
        for hold in holds:
            hold.ttl = ttls[hold.claim.owner]
        answers = (
            self._ask("renew locks", partial(self._requests.renew, holds), first=True)
            if holds
            else {}
        )
        return [answers.get(grant.owner, Renewal.LOST) for grant in grants]

    def _hold_of(self, grant: Grant) -> Hold | None:
        key = grant.handle.key if grant.handle else self._requests.key(grant.name)
        return self._local.find(key, grant.owner)

    def verify(self, grant: Grant) -> bool:
        hold = self._hold_of(grant)
        if hold is None:
            return False
        return self._ask("verify", partial(self._requests.verify, hold), grant.name)

    def release(self, grant: Grant) -> bool:
        if grant.handle is not None:
            return self._ask("release", partial(self._requests.release, grant.handle), grant.name)
        # By the thread, after what it was asked before: maybe to acquire this very lock.
        work = partial(self._requests.release_owner, grant)
        if self._ask("release", work, grant.name):
            return True
        return grant.fenced and self._evict(grant)

    def release_all(self, grants: Sequence[Grant]) -> list[bool]:
        def work() -> list[bool]:
            return self._requests.release_all([g.handle or self._hold_of(g) for g in grants])

        return self._ask("release", work, grants[0].name) if grants else []

    def _evict(self, grant: Grant) -> bool:
        """
        Clear the row of another process's lock once its session is gone.

        The session of a dead holder ends within milliseconds, unless a child process inherited it:
        then it is terminated here. A live holder unlocks at its next renewal what was forced.
        """
        began = clock()
        while True:
            waited = clock() - began
            given = {"name": grant.name, "owner": grant.owner, "ends": waited > ENDS_WITHIN}
            rows = self._query("evict the holder of", grant.name, sql.EVICT, given)
            ((cleared, session, *process, _),) = rows
            late = waited > 2 * ENDS_WITHIN
            if session is None or late or not is_process_gone(Process(*process)):
                return bool(cleared)
            time.sleep(0.005)

    # Look

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        given = {"names": list(names), "keys": [self._requests.key(name) for name in names]}
        holders: dict[str, Held] = {}
        found = self._query("look up locks", None, sql.HOLDERS, given) if names else ()
        for name, pid, shared, application, waiting, *row in found:
            held = Held(identity=read_application_name(application), shared=shared)
            if row[0]:
                held = read_holder(row)
            held = held._replace(session_pid=pid, waiting=waiting)
            first = holders.setdefault(name, held)
            if first is not held:
                holders[name] = first._replace(others=(*first.others, held))
        return holders

    # Housekeeping

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from checks.settings_problems(config)

    def check(self) -> Iterator[Problem]:
        try:
            yield from checks.server_problems(
                self.config, self._route, self._requests.max_locks, Session
            )
        except Error as exc:
            remedy = "Start the database, or correct its settings."
            yield Problem("E013", str(self.unavailable("answer", exc)), remedy)

    def close(self) -> None:
        self._local.close()

    def _ask(self, action: str, work: Callable[[], T], name: str | None = None, **how: Any) -> T:
        with self._errors(action, name):
            return self._local.ask(work, **how)

    def _query(
        self, action: str, name: str | None, statement: str, given: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        """Ask the fence database, without the thread: this process may hold no lock."""

        def fetch(private: BaseDatabaseWrapper) -> list[tuple[Any, ...]]:
            with private.cursor() as cursor:
                cursor.execute(statement, given)
                return list(cursor.fetchall())

        with self._errors(action, name):
            return pool(self.config.fence_database, self._timeout).run(fetch)

    @contextlib.contextmanager
    def _errors(self, action: str, name: str | None) -> Iterator[None]:
        try:
            yield
        except Error as exc:
            raise self.unavailable(action, exc, name) from exc
