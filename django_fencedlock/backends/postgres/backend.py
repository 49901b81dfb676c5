"""Session locks of PostgreSQL: the server excludes, and records the grant in the same statement."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ...conf import AliasConfig, Problem
from ...core import runtime
from ...core.identity import Owner, Process, is_process_gone
from ...core.jobs import Job, NoAnswer
from ...core.runtime import clock
from ...exceptions import BackendUnavailable
from ...storage.connections import pool
from ...storage.dialect import Entry
from ...storage.postgresql import sqlstate
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
from .sessions import LOCKED, PoolsTransactions, Session, read_application_name

T = TypeVar("T")

#: Locks that one process may hold. At default settings some 12,800 fill the server's lock table,
#: and then no client can connect any more, to any database.
MAX_LOCKS = 1000
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

    A lock that was waited for stays on the session that waited.
    """

    label = "postgres"
    records_grants = True
    supports_waiting = True
    supports_ttl = False
    option_names = frozenset({"TIMEOUT", "MAX_LOCKS", "MAX_WAITERS", "DATABASE"})

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        options = config.options
        self._timeout = config.timeout
        self._max_locks: int = options.get("MAX_LOCKS", MAX_LOCKS)
        self._max_waiters: int = options.get("MAX_WAITERS", MAX_WAITERS)
        self._route: str = options.get("DATABASE", config.fence_database)
        self._local = SessionLocks(self._route, self._timeout)

    # Acquire

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        key = self._key(claim.name)
        held = self._try(claim, key)
        if isinstance(held, Granted) or held.alias:
            return held
        if wait.left:
            wait.refused(held)
            with self._local.turn(key, wait, partial(wait.refused, held)) as is_first:
                while is_first and wait.left:
                    answer = self._wait_in_server(claim, key, wait)
                    if answer is None:
                        # MAX_WAITERS sessions are in use.
                        time.sleep(min(wait.left, random.uniform(*PAUSE)))
                        answer = self._try(claim, key)
                        if isinstance(answer, Held):
                            wait.refused(answer)
                    if isinstance(answer, Granted) or answer.alias:
                        return answer
                    held = answer if answer.owner else held
        return held if held.owner else self._look(claim.name)

    def _look(self, name: str) -> Held:
        """Look up a holder that isn't in the registry: an unfenced lock, or another program's."""
        with contextlib.suppress(BackendUnavailable):
            return self.holders([name]).get(name, Held())
        return Held()

    def _try(self, claim: Claim, key: int) -> Granted | Held:
        # Without the thread first: many may ask for a lock that this process holds.
        if hold := self._local.by_key.get(key):
            return hold.answer(claim)
        work = partial(self._try_on_session, claim, key)
        return self._ask("acquire", work, claim.name, undo=self._undo)

    def _undo(self, answer: Granted | Held | None) -> None:
        """Release a grant whose caller has left, and no later one of the same owner."""
        if isinstance(answer, Granted):
            self._local.submit(partial(self._release, answer.handle), first=True)

    def _try_on_session(self, claim: Claim, key: int) -> Granted | Held:
        # By the thread alone, so that no try overlaps another.
        if hold := self._local.by_key.get(key):
            return hold.answer(claim)
        if len(self._local.by_key) >= self._max_locks:
            raise BackendUnavailable(
                f"Lock {claim.name!r} would be one more than the {self._max_locks} that a process "
                f"may hold through {self.config.where()}. Hold fewer at once, or raise "
                "OPTIONS['MAX_LOCKS'] and the server's max_locks_per_transaction with it.",
                name=claim.name,
                alias=self.config.alias,
            )
        statement = sql.TRY if claim.fenced else sql.TRY_UNFENCED
        return self._send(self._local.session(claim.ttl), claim, key, statement)

    def _send(
        self, session: Session, claim: Claim, key: int, statement: str, wait: float = 0.0
    ) -> Granted | Held:
        """Send a claim. Unless it is granted, the session doesn't have the key afterwards."""
        since = clock()
        try:
            given = self._values(session, claim, key, wait)
            free, token, pid, _, *row = session.one(statement, given, wait=wait)
        except Error as exc:
            # An error undoes the records, but not the lock.
            if not session.closed:
                session.unlock(key)
            if sqlstate(exc) in LOCKED:
                # The time is up; or the key was free, but a transaction has a row locked.
                return Held()
            raise
        if pid != session.pid:
            session.close()
            raise PoolsTransactions(self._route)
        held = _read_holder(row) if row and row[0] else Held()
        if not free:
            return held
        if token is None and claim.fenced:
            session.unlock(key)
            # After a wait, it is the row from before the wait: the next try sees the present one.
            elsewhere = held.owner and (row[10], row[11]) != (self.config.alias, self.label)
            return held._replace(alias=row[10], label=row[11]) if elsewhere else Held()
        hold = Hold(claim, key, session, claim.ttl)
        hold.granted = Granted(token, since, hold)
        self._local.add(hold)
        return hold.granted

    def _values(self, session: Session, claim: Claim, key: int, wait: float) -> dict[str, Any]:
        given: dict[str, Any] = {"session_key": key, "idle": _idle(max(session.ttl, claim.ttl))}
        # Zero would mean no limit.
        given["wait"] = f"{max(1, round(wait * 1000))}ms"
        if claim.fenced:
            owner = Owner.read(claim.owner, claim.identity)
            place = session.pid, session.started, key
            label, alias = self.label, self.config.alias
            entry = Entry(claim.name, alias, label, owner, claim.ttl, True, *place)
            entry.permits = claim.permits
            given |= entry.values()
            given["ttl"] = claim.ttl
        return given

    def _key(self, name: str) -> int:
        """Return the lock's key: 64 bits, so two names in use never share one in practice."""
        text = f"{self.config.key_prefix}\0{name}".encode()
        digest = hashlib.blake2b(text, digest_size=8, person=b"fencedlock").digest()
        return int.from_bytes(digest, "big", signed=True)

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
                    wait.refused(self._look(claim.name))
                answered = True
                return job.answer(0.0)
        finally:
            # Also in a killed greenlet.
            if not answered:
                self._leave(job, used)
                self._local.submit(partial(self._release_owner, claim, key), first=True)

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
            statement = sql.WAIT if claim.fenced else sql.WAIT_UNFENCED
            answer = self._send(session, claim, key, statement, max(0.0, deadline - clock()))
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
        answers = self._ask("renew locks", partial(self._renew, holds), first=True) if holds else {}
        return [answers.get(grant.owner, Renewal.LOST) for grant in grants]

    def _hold_of(self, grant: Grant) -> Hold | None:
        key = grant.handle.key if grant.handle else self._key(grant.name)
        return self._local.find(key, grant.owner)

    def _renew(self, holds: Iterable[Hold]) -> dict[str, Renewal]:
        """Renew locks by one statement for each session, which also keeps it from being idle."""
        answers: dict[str, Renewal] = {}
        for session in {hold.session for hold in holds}:
            each = {hold.claim.owner: hold for hold in holds if hold.session is session}
            session.ttl = max([hold.ttl for hold in session.holds], default=0.0)
            given = {
                "names": [hold.claim.name for hold in each.values()],
                "owners": list(each),
                "ttls": [hold.ttl for hold in each.values()],
                "keys": [hold.key for hold in each.values()],
                "idle": _idle(session.ttl),
            }
            try:
                rows = session.all(sql.RENEW, given, prepare=False)
            except Error:
                failed = Renewal.UNKNOWN if session.is_usable() else Renewal.LOST
                answers |= dict.fromkeys(each, failed)
            else:
                answers |= {owner: self._renewal(each[owner], *facts) for owner, *facts in rows}
        return answers

    def _renewal(self, hold: Hold, held: bool, renewed: bool, found: bool, forced: bool) -> Renewal:
        if held and not forced and (renewed or not hold.claim.fenced):
            return Renewal.KEPT
        if held and found:
            # A transaction has the row locked.
            return Renewal.UNKNOWN
        with contextlib.suppress(Error):
            self._release(hold)
        return Renewal.LOST

    def verify(self, grant: Grant) -> bool:
        hold = self._hold_of(grant)
        if hold is None:
            return False
        return self._ask("verify", partial(self._verify, hold), grant.name)

    def _verify(self, hold: Hold) -> bool:
        given = {**hold.values(), "fenced": hold.claim.fenced}
        try:
            return bool(hold.session.one(sql.VERIFY, given)[0])
        except Error:
            if hold.session.closed:
                return False
            raise

    def release(self, grant: Grant) -> bool:
        if grant.handle is not None:
            return self._ask("release", partial(self._release, grant.handle), grant.name)
        # By the thread, after what it was asked before: maybe to acquire this very lock.
        work = partial(self._release_owner, grant, self._key(grant.name))
        if self._ask("release", work, grant.name):
            return True
        return grant.fenced and self._evict(grant)

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

    def _release_owner(self, of: Claim | Grant, key: int) -> bool:
        """Release the lock of an owner in this process; return whether there was one."""
        hold = self._local.find(key, of.owner)
        if hold is None:
            return False
        # The forced release that it answers finds its own note.
        self._release(hold)
        return True

    def _release(self, hold: Hold) -> bool:
        if not self._local.remove(hold):
            return False
        session = hold.session
        statement = sql.RELEASE if hold.claim.fenced else sql.RELEASE_UNFENCED
        try:
            given = {**hold.values(), "idle": _idle(session.ttl)}
            unlocked, forced, _ = session.one(statement, given)
            return bool(unlocked) and not forced
        except Error as exc:
            if session.closed:
                # It isn't known when it ended: others may have had the lock since.
                return False
            session.unlock(hold.key)
            if sqlstate(exc) in LOCKED:
                # The key is free. The transaction that has the row locked is about to take it.
                return True
            raise
        finally:
            if session.waits:
                self._local.give_back(session)

    # Look

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        given = {"names": list(names), "keys": [self._key(name) for name in names]}
        holders = {}
        found = self._query("look up locks", None, sql.HOLDERS, given)
        for name, pid, application, waiting, *row in found:
            held = Held(identity=read_application_name(application))
            if row[0]:
                held = _read_holder(row)
            holders[name] = held._replace(session_pid=pid, waiting=waiting)
        return holders

    # Housekeeping

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from checks.settings_problems(config)

    def check(self) -> Iterator[Problem]:
        try:
            yield from checks.server_problems(self.config, self._route, self._max_locks, Session)
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


def _idle(seconds: float) -> str:
    """Return a value of idle_session_timeout, which is a 32-bit number of milliseconds."""
    return f"{min(round(seconds * 1000), 2**31 - 1)}ms"


def _read_holder(row: Sequence[Any]) -> Held:
    """Read the columns of `statements.HOLDER`."""
    session_pid, _, _, expires_in, held_for, token = row[9:]
    held = Held(row[0], Owner(*row[:9]).identity, token, expires_in)
    return held._replace(held_for=held_for, session_pid=session_pid)
