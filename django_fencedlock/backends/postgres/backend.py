"""Session locks of PostgreSQL: the server excludes, and records the grant in the same statement."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from ...conf import AliasConfig, Problem
from ...core import runtime
from ...core.identity import Owner, Process, is_process_gone
from ...core.runtime import clock
from ...exceptions import BackendUnavailable
from ...storage.connections import pool
from ...storage.errors import describe_error, is_table_missing
from ...storage.postgresql import array, sqlstate
from ...storage.vendors import Entry
from ..interface import Backend, Claim, Grant, Granted, Held, Renewal, Wait

try:
    import psycopg  # noqa: F401
except ImportError as exc:
    raise ImproperlyConfigured(
        f"The postgres backend needs psycopg 3, and psycopg2 won't do ({exc}). "
        "Run: pip install 'django-fencedlock[postgres]'"
    ) from exc

from . import checks
from . import statements as sql
from .holding import TICK, Hold, session_locks
from .jobs import Job, NoAnswer
from .sessions import LOCKED, OUT_OF_MEMORY, PoolsTransactions, Session, read_application_name

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
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.25
#: The part of its ttl that a lease may lose to the wait before it: the keeper renews it at a third.
SHORT_WAIT = 1 / 6
#: Seconds that the server may take to end a session whose client is gone.
ENDS_WITHIN = 0.25
#: Seconds that a cancelled waiter may take to leave the server's queue.
LEAVES_WITHIN = 2.0
#: The longest idle_session_timeout, in milliseconds.
LONGEST_IDLE = 2**31 - 1

#: The answer to a claim whose key was free, but a transaction has a row locked.
_PINNED = Held()

_sleep = runtime.original("time", "sleep")


class PostgresBackend(Backend):
    """
    Advisory locks of private sessions: one session for all locks that were free when asked for.

    A lock that was waited for stays on the session that waited. A lock lives as long as its
    session. The server ends a session whose process was silent for the longest ttl of its locks.
    """

    label = "postgres"
    records_grants = True
    supports_waiting = True
    supports_ttl = False
    option_names = checks.OPTIONS

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        options = config.options
        self._timeout = config.timeout
        self._max_locks: int = options.get("MAX_LOCKS", MAX_LOCKS)
        self._max_waiters: int = options.get("MAX_WAITERS", MAX_WAITERS)
        self._route: str = options.get("DATABASE", config.fence_database)
        self._local = session_locks(self._route, self._timeout)

    # Acquire

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        key = self._key(claim.name)
        answer = self._try(claim, key)
        if isinstance(answer, Granted) or answer.alias or not wait.left:
            return answer
        wait.refused(answer)
        return self._wait(claim, key, wait, answer)

    def _try(self, claim: Claim, key: int) -> Granted | Held:
        answer = self._of_this_process(claim, key)
        if answer is None:
            work = partial(self._try_on_session, claim, key)
            answer = self._ask("acquiring", work, claim.name, self._undo)
        if isinstance(answer, Held) and not answer.owner:
            # It isn't in the registry: an unfenced lock, or another application's.
            answer = self.holders([claim.name]).get(claim.name, answer)
        return answer

    def _of_this_process(self, claim: Claim, key: int) -> Granted | Held | None:
        hold = self._local.hold_on(key)
        if hold is None:
            return None
        return hold.granted if hold.claim.owner == claim.owner else hold.held()

    def _try_on_session(self, claim: Claim, key: int) -> Granted | Held:
        # By the thread alone, so that no try overlaps another.
        if answer := self._of_this_process(claim, key):
            return answer
        self._refuse_beyond_cap(claim)
        return self._ask_for_grant(
            self._local.session(), claim, key, sql.TRY if claim.fenced else sql.TRY_UNFENCED
        )

    def _ask_for_grant(
        self, session: Session, claim: Claim, key: int, statement: str, wait: float = 0.0
    ) -> Granted | Held:
        """Send a claim. Unless it is granted, the session doesn't have the key afterwards."""
        since = clock()
        try:
            granted, token, pid, _, *row = session.one(
                statement, self._values(session, claim, key, wait), wait=wait
            )
        except Error as exc:
            # An error undoes the records, but not the lock.
            pinned = not session.closed and session.unlock(key)
            if sqlstate(exc) in LOCKED:
                return _PINNED if pinned else Held()
            if sqlstate(exc) == OUT_OF_MEMORY:
                raise self._full(claim) from exc
            raise
        if pid != session.pid:
            session.close()
            raise PoolsTransactions(
                "a pooler changed the session between two statements; session locks need a "
                "direct connection, or a pooler in session mode"
            )
        if granted and (token is not None or not claim.fenced):
            return self._hold(session, claim, key, token, since)
        if not granted:
            return _read_holder(row) if row and row[0] else Held()
        session.unlock(key)
        for found in session.all(sql.ROW, {"name": claim.name}):
            return replace(_read_holder(found), alias=found[10], label=found[11])
        return Held()

    def _values(self, session: Session, claim: Claim, key: int, wait: float) -> Mapping[str, Any]:
        given = {
            "session_key": key,
            "idle": _idle(max(session.ttl, claim.ttl)),
            # Zero would mean no limit.
            "wait": f"{max(1, round(wait * 1000))}ms",
        }
        if not claim.fenced:
            return given
        entry = Entry(
            name=claim.name,
            alias=self.config.alias,
            backend=self.label,
            owner=Owner.read(claim.owner, claim.identity),
            ttl=claim.ttl,
            session_pid=session.pid,
            session_started=session.started,
        )
        return {**entry.values(), **given, "ttl": claim.ttl}

    def _hold(
        self, session: Session, claim: Claim, key: int, token: int | None, since: float
    ) -> Granted:
        hold = Hold(claim, key, session, self._report_lost, claim.ttl)
        hold.granted = Granted(token, since, hold)
        self._local.add(hold)
        return hold.granted

    def _undo(self, answer: Granted | Held | None) -> None:
        """Release a grant whose caller has left."""
        if isinstance(answer, Granted):
            self._local.submit(partial(self._release, answer.handle))

    def _report_lost(self, owners: Sequence[str]) -> None:
        if self.lost is not None:
            self.lost(owners)

    def _key(self, name: str) -> int:
        """Return the lock's key: 64 bits, so two names in use never share one in practice."""
        text = f"{self.config.key_prefix}\0{name}".encode()
        digest = hashlib.blake2b(text, digest_size=8, person=b"fencedlock").digest()
        return int.from_bytes(digest, "big", signed=True)

    # Wait

    def _wait(self, claim: Claim, key: int, wait: Wait, held: Held) -> Granted | Held:
        with self._local.turn(key, wait, lambda: wait.refused(held)) as is_first:
            while is_first and wait.left:
                answer = self._wait_in_server(claim, key, wait)
                if answer is None:
                    # MAX_WAITERS sessions are in use.
                    self._pause(wait)
                    answer = self._try(claim, key)
                    if isinstance(answer, Held) and wait.left:
                        wait.refused(answer)
                elif answer is _PINNED:
                    self._pause(wait)
                if isinstance(answer, Granted) or answer.alias:
                    return answer
                held = answer if answer.owner else held
        return held

    def _pause(self, wait: Wait) -> None:
        time.sleep(min(wait.left, random.uniform(SHORTEST_PAUSE, LONGEST_PAUSE)))

    def _wait_in_server(self, claim: Claim, key: int, wait: Wait) -> Granted | Held | None:
        """Wait in the server's queue; None if this process may use no further session."""
        seconds = min(wait.left, SLICE)
        used: list[Session] = []
        job = Job(partial(self._wait_on_session, claim, key, seconds, used), self._undo)
        answered = False
        try:
            wait.on_cancel(job.wake)
            runtime.start(job.run)
            answered = self._await(job, claim, wait, clock() + seconds + self._timeout)
            if answered:
                return self._translate("wait", claim.name, job.result)
            self._leave_queue(job, used)
            return Held()
        except Exception:
            if not answered:
                self._leave_queue(job, used)
            raise
        finally:
            # Also in a killed greenlet.
            if not answered:
                self._interrupt(job, used)
            job.close()

    def _await(self, job: Job[Any], claim: Claim, wait: Wait, limit: float) -> bool:
        """Return whether the job was done before the wait was cancelled."""
        while not job.wait(TICK):
            if wait.cancelled:
                return False
            if not job.begun:
                # CPython may raise an asynchronous exception of this thread in the new one.
                runtime.start(job.run)
            if clock() > limit:
                error = NoAnswer(f"no answer within {self._timeout:g} s")
                raise self._unavailable("wait", error, claim.name)
            held = Held()
            with contextlib.suppress(BackendUnavailable):
                held = self.holders([claim.name]).get(claim.name, held)
            wait.refused(held)
        return True

    def _leave_queue(self, job: Job[Any], used: list[Session]) -> None:
        """Cancel a wait, and stay until the server's queue is left."""
        self._interrupt(job, used)
        until = clock() + LEAVES_WITHIN
        while job.begun and not job.wait(until - clock()) and clock() < until:
            pass

    def _interrupt(self, job: Job[Any], used: list[Session]) -> None:
        """Cancel a wait, without waiting for the server's answer."""

        def interrupt() -> None:
            until = clock() + self._timeout
            # Repeated: the statement may not have reached the server yet.
            while not job.done:
                for session in used:
                    session.interrupted = True
                    session.cancel() if clock() < until else session.cut()
                _sleep(0.02)

        job.leave()
        if job.begun and not job.done:
            with contextlib.suppress(RuntimeError):
                runtime.start(interrupt)

    def _wait_on_session(
        self, claim: Claim, key: int, seconds: float, used: list[Session]
    ) -> Granted | Held | None:
        """Wait for the lock on a session of its own, in a thread of its own."""
        deadline = clock() + seconds
        self._refuse_beyond_cap(claim)
        session = self._local.take_waiter(self._max_waiters)
        if session is None:
            return None
        used.append(session)
        try:
            statement = sql.WAIT if claim.fenced else sql.WAIT_UNFENCED
            wait = deadline - clock()
            answer = self._ask_for_grant(session, claim, key, statement, max(0.0, wait))
            if isinstance(answer, Granted):
                return self._take_up(answer.handle)
        except BaseException:
            # The key goes with the session, and the row after it.
            session.close()
            if claim.fenced:
                self._local.submit(partial(self._clear, claim))
            raise
        self._local.give_back(session)
        return answer

    def _take_up(self, hold: Hold) -> Granted:
        """
        Begin the lease that a wait ended with.

        The process may have been paused since the server granted it. After a short wait the lease
        counts from before the wait. After a longer wait it is renewed once, and counts from before
        the renewal.
        """
        since = clock()
        if since - hold.granted.since >= hold.ttl * SHORT_WAIT:
            owner = hold.claim.owner
            if self._renew_on(hold.session, {owner: hold}).get(owner) is not Renewal.KEPT:
                raise OperationalError("a newer grant was recorded before this one was answered")
            hold.granted = replace(hold.granted, since=since)
        return hold.granted

    def _clear(self, claim: Claim) -> None:
        given = {"name": claim.name, "owner": claim.owner}
        self._local.session().all(sql.CLEAR, given)

    # Renew, verify, release

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        held = {}
        for grant in grants:
            if hold := self._local.hold_of(grant.owner):
                held[grant.owner] = hold
                hold.ttl = grant.ttl
        answers: Mapping[str, Renewal] = {}
        if held:
            try:
                answers = self._ask("renewal", partial(self._renew, held.values()), first=True)
            except BackendUnavailable:
                # Those whose session ended with it are lost by now.
                answers = {
                    owner: Renewal.UNKNOWN
                    for owner, hold in held.items()
                    if self._local.is_held(hold)
                }
        return [answers.get(grant.owner, Renewal.LOST) for grant in grants]

    def _renew(self, holds: Iterable[Hold]) -> dict[str, Renewal]:
        by_session: dict[Session, dict[str, Hold]] = {}
        for hold in holds:
            by_session.setdefault(hold.session, {})[hold.claim.owner] = hold
        answers: dict[str, Renewal] = {}
        for session, each in by_session.items():
            answers |= self._renew_on(session, each)
        return answers

    def _renew_on(self, session: Session, holds: Mapping[str, Hold]) -> dict[str, Renewal]:
        """Renew the locks of one session in one statement, which also keeps it from idling."""
        given = {
            "names": array([hold.claim.name for hold in holds.values()]),
            "owners": array(list(holds)),
            "ttls": array([hold.ttl for hold in holds.values()]),
            "keys": array([hold.key for hold in holds.values()]),
            "idle": _idle(self._local.longest_ttl(session)),
        }
        try:
            rows = session.all(sql.RENEW, given, prepare=False)
        except Error:
            if session.closed or not session.is_usable():
                return {}
            return dict.fromkeys(holds, Renewal.UNKNOWN)
        return {owner: self._renewal(holds[owner], *facts) for owner, *facts in rows}

    def _renewal(
        self, hold: Hold, held: bool, renewed: bool, recorded: bool, forced: bool
    ) -> Renewal:
        fenced = hold.claim.fenced
        if held and not forced and (renewed or not fenced):
            hold.renewed = True
            return Renewal.KEPT
        if held and recorded:
            # A transaction has the row locked.
            return Renewal.UNKNOWN
        with contextlib.suppress(Error):
            self._release(hold)
        return Renewal.LOST

    def verify(self, grant: Grant) -> bool:
        hold = self._local.hold_of(grant.owner)
        if hold is None:
            return False
        unfenced = sql.VERIFY_RENEWED if hold.renewed else sql.VERIFY_UNFENCED
        statement = sql.VERIFY if hold.claim.fenced else unfenced
        ask = partial(hold.session.one, statement, hold.values())
        try:
            return bool(self._ask("verification", ask, grant.name)[0])
        except BackendUnavailable:
            if self._local.is_held(hold):
                raise
            # The session had ended.
            return False

    def release(self, grant: Grant) -> bool:
        if hold := self._local.hold_of(grant.owner):
            released = self._ask("release", partial(self._release, hold), grant.name)
            # A forced release in the holder's own process finds its own note.
            return released or grant.handle is None
        # A lock of this process that is gone already has a handle.
        return grant.handle is None and self._release_of_other(grant)

    def _release(self, hold: Hold) -> bool:
        is_last = self._local.holds_nothing_but(hold)
        if not self._local.remove(hold):
            return False
        session = hold.session
        unfenced = sql.RELEASE_RENEWED if hold.renewed else sql.RELEASE_UNFENCED
        statement = sql.RELEASE if hold.claim.fenced else unfenced
        idle = _idle(0.0 if is_last else session.ttl)
        try:
            unlocked, forced, _ = session.one(statement, {**hold.values(), "idle": idle})
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
            self._local.give_back(session)

    def _release_of_other(self, grant: Grant) -> bool:
        """
        Clear the row of another process's lock once its session is gone.

        No other session can unlock an advisory lock. A live holder unlocks it at its next renewal,
        if the lock was released by force. The session of a dead holder ends within milliseconds,
        unless a child process inherited it: then it is terminated here.
        """
        given = {"name": grant.name, "owner": grant.owner}

        def clear(private: BaseDatabaseWrapper) -> bool:
            with private.cursor() as cursor:
                began = clock()
                while True:
                    cursor.execute(sql.EVICT, given)
                    cleared, session, *process = cursor.fetchone()
                    waited = clock() - began
                    if session is None or waited > 2 * ENDS_WITHIN:
                        return bool(cleared)
                    if not is_process_gone(Process(*process)):
                        return False
                    if waited > ENDS_WITHIN:
                        cursor.execute(sql.END_ORPHAN, given)
                    time.sleep(0.005)

        return grant.fenced and self._on_pool("eviction", grant.name, clear)

    # Look

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        given = {
            "names": array(list(names)),
            "keys": array([self._key(name) for name in names]),
        }

        def look(statement: str, private: BaseDatabaseWrapper) -> list[tuple[Any, ...]]:
            with private.cursor() as cursor:
                cursor.execute(statement, given)
                found: list[tuple[Any, ...]] = cursor.fetchall()
                return found

        try:
            rows = self._on_pool("look", None, partial(look, sql.HOLDERS))
        except BackendUnavailable as exc:
            if not is_table_missing(exc):
                raise
            # Unfenced locks need no tables.
            rows = self._on_pool("look", None, partial(look, sql.HOLDERS_UNRECORDED))
        holders = {}
        for name, pid, application, waiting, *row in rows:
            held = Held(identity=read_application_name(application))
            if row and row[0]:
                held = _read_holder(row)
            holders[name] = replace(held, session_pid=pid, waiting=waiting)
        return holders

    # Housekeeping

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from checks.settings_problems(config)

    def check(self) -> Iterator[Problem]:
        yield from checks.server_problems(self.config, self._route, self._timeout, self._max_locks)

    def close(self) -> None:
        self._local.close()

    def _ask(
        self,
        action: str,
        work: Callable[[], T],
        name: str | None = None,
        undo: Callable[[T], object] | None = None,
        *,
        first: bool = False,
    ) -> T:
        return self._translate(action, name, lambda: self._local.ask(work, undo, first=first))

    def _on_pool(
        self, action: str, name: str | None, work: Callable[[BaseDatabaseWrapper], T]
    ) -> T:
        # Not on the session for locks: this process may hold none.
        sessions = pool(self.config.fence_database, self._timeout)
        return self._translate(action, name, lambda: sessions.run(work))

    def _translate(self, action: str, name: str | None, work: Callable[[], T]) -> T:
        try:
            return work()
        except (Error, NoAnswer) as exc:
            raise self._unavailable(action, exc, name) from exc

    def _unavailable(self, action: str, exc: BaseException, name: str | None) -> BackendUnavailable:
        about = f" of lock {name!r}" if name is not None else ""
        return BackendUnavailable(
            f"Lock service {self.config.alias!r} ({self.label}) failed at the {action}{about}: "
            f"{type(exc).__name__}: {describe_error(exc, self.config.fence_database)}",
            name=name,
            alias=self.config.alias,
        )

    def _refuse_beyond_cap(self, claim: Claim) -> None:
        if self._local.count >= self._max_locks:
            raise BackendUnavailable(
                f"Lock {claim.name!r} would be one more than the {self._max_locks} that one "
                f"process may hold through {self.config.where()}. Hold fewer at once, or raise "
                "OPTIONS['MAX_LOCKS'] and the server's max_locks_per_transaction with it.",
                name=claim.name,
                alias=self.config.alias,
            )

    def _full(self, claim: Claim) -> BackendUnavailable:
        return BackendUnavailable(
            f"Lock {claim.name!r} can't be acquired: the lock table of the database server is "
            "full, for all its databases. Hold fewer locks at once, or raise "
            "max_locks_per_transaction, which takes a restart of the server.",
            name=claim.name,
            alias=self.config.alias,
        )


def _idle(seconds: float) -> str:
    """Return a value of idle_session_timeout; 0 turns it off."""
    return f"{min(round(seconds * 1000), LONGEST_IDLE)}ms"


def _read_holder(row: Sequence[Any]) -> Held:
    owner, host, boot_id, namespace, pid, started, thread, task_name, task_id, *more = row
    session_pid, _, _, expires_in, token = more
    place = Owner(owner, host, boot_id, namespace, pid, started, thread, task_name, task_id)
    return Held(owner, place.identity, token, expires_in, session_pid=session_pid)
