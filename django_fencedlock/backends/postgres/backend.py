"""Session locks of PostgreSQL: the server excludes, and records the grant in the same statement."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from ...conf import AliasConfig, Problem
from ...core.identity import Owner, Process, is_process_gone
from ...core.runtime import clock
from ...exceptions import BackendUnavailable
from ...storage.connections import NoAnswer, pool
from ...storage.dialect import Entry
from ...storage.postgresql import sqlstate
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
from .sessions import (
    LOCKED,
    OUT_OF_MEMORY,
    PoolsTransactions,
    Session,
    idle_limit,
    read_application_name,
)

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
#: The part of its ttl that a lease may lose to the wait before it: the keeper renews it at a third.
SHORT_WAIT = 1 / 6
#: Seconds that the server may take to end a session whose client is gone.
ENDS_WITHIN = 0.25
#: Seconds that a cancelled waiter may take to leave the server's queue.
LEAVES_WITHIN = 2.0
#: How many sessions a try may find ended.
ATTEMPTS = 3


class PostgresBackend(Backend):
    """
    Advisory locks of private sessions: one session for all locks of a ttl that were free.

    A lock that was waited for stays on the session that waited. A lock lives as long as its
    session. The server ends a session whose process was silent for the ttl of its locks.
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
        self._local = session_locks(self._route, self._timeout)

    # Acquire

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        key = self._key(claim.name)
        held = self._try(claim, key)
        if isinstance(held, Granted) or held.alias:
            return held
        if not wait.left:
            return held if held.owner else self._look(claim.name)
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
        if answer := self._of_this_process(claim, key):
            return answer
        with self._errors("acquiring", claim.name):
            for left in reversed(range(ATTEMPTS)):
                session = self._local.session(claim.ttl)
                work = partial(self._try_on_session, session, claim, key)
                try:
                    return self._local.run(session, work)
                except (NoAnswer, PoolsTransactions):
                    raise
                except Error:
                    # It may have ended while it was idle. No lock of it is left.
                    if not (session.closed and left):
                        raise
        raise AssertionError

    def _of_this_process(self, claim: Claim, key: int) -> Granted | Held | None:
        hold = self._local.hold_at(key)
        if hold is None:
            return None
        return hold.granted if hold.claim.owner == claim.owner else hold.held()

    def _try_on_session(self, session: Session, claim: Claim, key: int) -> Granted | Held:
        # While this thread has the session, so that no try overlaps another.
        if answer := self._of_this_process(claim, key):
            return answer
        if len(self._local.by_key) >= self._max_locks:
            raise self._refusal(
                claim,
                f"would be one more than the {self._max_locks} that one process may hold through "
                f"{self.config.where()}. Hold fewer at once, or raise OPTIONS['MAX_LOCKS'] and "
                "the server's max_locks_per_transaction with it.",
            )
        statement = sql.TRY if claim.fenced else sql.TRY_UNFENCED
        return self._claim(session, claim, key, partial(session.one, statement))

    def _claim(
        self,
        session: Session,
        claim: Claim,
        key: int,
        send: Callable[[dict[str, Any]], Sequence[Any]],
        wait: float = 0.0,
    ) -> Granted | Held:
        """Send a claim. Until its outcome is known, the session is in doubt about the key."""
        session.doubts[key] = claim
        since = clock()
        try:
            free, token, pid, _, *row = send(self._values(session, claim, key, wait))
        except Error as exc:
            # An error undoes the records, but not the lock.
            if sqlstate(exc) in LOCKED:
                # The time is up; or the key was free, but a transaction has a row locked.
                return Held()
            if sqlstate(exc) == OUT_OF_MEMORY:
                raise self._refusal(
                    claim,
                    "can't be acquired: the lock table of the database server is full, for all "
                    "its databases. Hold fewer locks at once, or raise max_locks_per_transaction, "
                    "which takes a restart of the server.",
                ) from exc
            raise
        if pid != session.pid:
            session.close()
            raise PoolsTransactions(
                "a pooler changed the session between two statements; session locks need a "
                "direct connection, or a pooler in session mode"
            )
        if not free:
            del session.doubts[key]
            return _read_holder(row) if row and row[0] else Held()
        if token is None and claim.fenced:
            rows = session.all(sql.ROW, {"name": claim.name})
            alias, label = rows[0][10:12] if rows else ("", "")
            return _read_holder(rows[0])._replace(alias=alias, label=label) if rows else Held()
        hold = Hold(claim, key, session, self.lost or (lambda owners: None), claim.ttl)
        hold.granted = Granted(token, since, hold)
        self._local.add(hold)
        return hold.granted

    def _values(self, session: Session, claim: Claim, key: int, wait: float) -> dict[str, Any]:
        given: dict[str, Any] = {
            "session_key": key,
            "idle": idle_limit(max(session.ttl, claim.ttl) if session.holds else claim.ttl),
            # Zero would mean no limit.
            "wait": f"{max(1, round(wait * 1000))}ms",
        }
        if not claim.fenced:
            return given
        owner = Owner.read(claim.owner, claim.identity)
        entry = Entry(claim.name, self.config.alias, self.label, owner, claim.ttl)
        entry.session_pid, entry.session_started = session.pid, session.started
        return {**entry.values(), **given, "ttl": claim.ttl}

    def _key(self, name: str) -> int:
        """Return the lock's key: 64 bits, so two names in use never share one in practice."""
        text = f"{self.config.key_prefix}\0{name}".encode()
        digest = hashlib.blake2b(text, digest_size=8, person=b"fencedlock").digest()
        return int.from_bytes(digest, "big", signed=True)

    def _refusal(self, claim: Claim, reason: str) -> BackendUnavailable:
        message = f"Lock {claim.name!r} {reason}"
        return BackendUnavailable(message, name=claim.name, alias=self.config.alias)

    # Wait

    def _wait_in_server(self, claim: Claim, key: int, wait: Wait) -> Granted | Held | None:
        """Wait in the server's queue; None if this process may use no further session."""
        seconds = min(wait.left, SLICE)
        local = self._local
        with self._errors("wait", claim.name):
            session = local.take_waiter(wait, self._max_waiters)
            if session is None:
                return None
            answered = False
            try:
                wait.on_cancel(partial(local.interrupt, session, wait))
                send = partial(self._wait_on_session, session, claim, wait, clock() + seconds)
                answer = self._claim(session, claim, key, send, seconds)
                if isinstance(answer, Granted):
                    answer = self._renew_after_wait(claim, answer)
                else:
                    local.run(session, lambda: None)
                    local.give_back(session)
                answered = True
                return answer
            except _Cancelled:
                return Held()
            finally:
                if not answered:
                    # The key goes with the session. The core releases what was recorded.
                    local.abandon(session)

    def _wait_on_session(
        self, session: Session, claim: Claim, wait: Wait, until: float, given: dict[str, Any]
    ) -> Sequence[Any]:
        session.send(sql.WAIT if claim.fenced else sql.WAIT_UNFENCED, given)
        limit = until + self._timeout
        while not wait.cancelled and not session.has_answer(min(TICK, max(0.0, limit - clock()))):
            if clock() > limit:
                raise NoAnswer(self._timeout)
            wait.refused(self._look(claim.name))
        limit = clock() + LEAVES_WITHIN
        while wait.cancelled and not session.has_answer(0.02):
            if clock() > limit:
                raise _Cancelled
            # Again: an earlier one may have reached the server before the statement did.
            session.cancel()
        return session.read()[0]

    def _renew_after_wait(self, claim: Claim, granted: Granted) -> Granted:
        """
        Renew a lock that was waited for, so that its ttl doesn't count from before a long wait.

        The process may have been paused since the server granted the lock, so the lease counts
        from before a short wait, or from before a renewal.
        """
        since = clock()
        hold: Hold = granted.handle
        if since - granted.since >= claim.ttl * SHORT_WAIT:
            renew = partial(self._renew, hold.session, [hold])
            if self._local.run(hold.session, renew)[claim.owner] is not Renewal.KEPT:
                raise OperationalError("a newer grant was recorded before the answer")
            hold.granted = granted._replace(since=since)
        hold.session.wait = None
        return hold.granted

    # Renew, verify, release

    def _hold_of(self, grant: Grant) -> Hold | None:
        key = self._key(grant.name) if grant.handle is None else grant.handle.key
        return self._local.hold_of(key, grant.owner)

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        holds: dict[Session, list[Hold]] = {}
        for grant in grants:
            if hold := self._hold_of(grant):
                hold.ttl = grant.ttl
                holds.setdefault(hold.session, []).append(hold)
        answers: dict[str, Renewal] = {}
        until = clock() + self._timeout
        for session, mine in holds.items():
            unknown = {hold.claim.owner: Renewal.UNKNOWN for hold in mine}
            try:
                # A server that doesn't answer on one session seldom does on the next one.
                late = clock() > until
                work = partial(self._renew, session, mine)
                answers |= unknown if late else self._local.run(session, work, first=True)
            except Error:
                answers |= {} if session.closed else unknown
        return [answers.get(grant.owner, Renewal.LOST) for grant in grants]

    def _renew(self, session: Session, holds: Sequence[Hold]) -> dict[str, Renewal]:
        """Renew locks of one session, which also keeps it from being idle."""
        session.ttl = max([hold.ttl for hold in session.holds.values()], default=0.0)
        by_owner = {hold.claim.owner: hold for hold in holds}
        given = {
            "names": [hold.claim.name for hold in holds],
            "owners": list(by_owner),
            "ttls": [hold.ttl for hold in holds],
            "keys": [hold.key for hold in holds],
            "idle": idle_limit(session.ttl),
        }
        rows = session.all(sql.RENEW, given, prepare=False)
        return {owner: self._renewal(by_owner[owner], *facts) for owner, *facts in rows}

    def _renewal(
        self, hold: Hold, held: bool, renewed: bool, recorded: bool, forced: bool
    ) -> Renewal:
        if held and not forced and (renewed or not hold.claim.fenced):
            return Renewal.KEPT
        if held and recorded:
            # A transaction has the row locked.
            return Renewal.UNKNOWN
        with contextlib.suppress(Error):
            self._local.release(hold)
        return Renewal.LOST

    def verify(self, grant: Grant) -> bool:
        hold = self._hold_of(grant)
        if hold is None:
            return False
        statement = sql.VERIFY if grant.fenced else sql.VERIFY_UNFENCED
        given = {"name": grant.name, "key": hold.key, "owner": grant.owner}
        ask = partial(hold.session.one, statement, given)
        with self._errors("verification", grant.name):
            try:
                return bool(self._local.run(hold.session, ask)[0])
            except Error:
                if hold.session.closed:
                    return False
                raise

    def release(self, grant: Grant) -> bool:
        with self._errors("release", grant.name):
            if hold := self._hold_of(grant):
                released = self._local.run(hold.session, partial(self._local.release, hold))
                # A forced release in the holder's own process finds its own note.
                return released or grant.handle is None
            # It may be in doubt: the caller of a request of its owner was interrupted.
            self._local.settle()
        # A lock of this process that is gone already has a handle.
        if grant.handle is not None or not grant.fenced:
            return False
        return self._on_pool("eviction", grant.name, partial(_clear_row, grant))

    # Look

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        keys = [self._key(name) for name in names]
        given = {"names": list(names), "keys": keys}
        rows = self._on_pool("look", None, partial(_fetch, sql.HOLDERS, given))
        holders = {}
        for name, pid, application, waiting, *row in rows:
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
        yield from checks.server_problems(self.config, self._route, self._max_locks)

    def close(self) -> None:
        self._local.close()

    def _on_pool(
        self, action: str, name: str | None, work: Callable[[BaseDatabaseWrapper], T]
    ) -> T:
        # Not on the session for locks: this process may hold none.
        with self._errors(action, name):
            return pool(self.config.fence_database, self._timeout).run(work)

    @contextlib.contextmanager
    def _errors(self, action: str, name: str | None) -> Iterator[None]:
        try:
            yield
        except Error as exc:
            raise self.unavailable(action, exc, name) from exc


class _Cancelled(Exception):
    """The wait was cancelled."""


def _fetch(
    statement: str, given: Mapping[str, Any], private: BaseDatabaseWrapper
) -> list[tuple[Any, ...]]:
    with private.cursor() as cursor:
        cursor.execute(statement, given)
        return list(cursor.fetchall())


def _clear_row(grant: Grant, private: BaseDatabaseWrapper) -> bool:
    """
    Clear the row of another process's lock once its session is gone.

    No other session can unlock an advisory lock. A live holder unlocks it at its next renewal, if
    the lock was released by force. The session of a dead holder ends within milliseconds, unless a
    child process inherited it: then it is terminated here.
    """
    given = {"name": grant.name, "owner": grant.owner}
    began = clock()
    while True:
        ((cleared, session, *process),) = _fetch(sql.EVICT, given, private)
        waited = clock() - began
        if session is None or waited > 2 * ENDS_WITHIN or not is_process_gone(Process(*process)):
            return bool(cleared)
        if waited > ENDS_WITHIN:
            _fetch(sql.END_ORPHAN, given, private)
        time.sleep(0.005)


def _read_holder(row: Sequence[Any]) -> Held:
    """Read the columns of `statements.HOLDER`."""
    session_pid, _, _, expires_in, held_for, token = row[9:]
    held = Held(row[0], Owner(*row[:9]).identity, token, expires_in)
    return held._replace(held_for=held_for, session_pid=session_pid)
