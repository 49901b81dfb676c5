"""Taking session locks of Postgres, at once or after a wait, and giving them back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.db import Error, OperationalError

from ..conf import AliasConfig
from ..core.runtime import clock, watchdog
from ..exceptions import BackendUnavailable
from ..storage.postgresql import sqlstate
from ..storage.vendors import Entry, Row, ledger_for
from . import postgres_statements as sql
from .base import Backend, Grant, Request
from .postgres_home import Hold, home
from .postgres_hung import end_hung_holders
from .postgres_sessions import (
    CANCELLED,
    LOCKED,
    OUT_OF_MEMORY,
    PoolsTransactions,
    Session,
)
from .postgres_threads import Unanswered
from .postgres_waiting import SLICE, pause, room, wait_in_server

T = TypeVar("T")

#: Locks that one process may hold. At default settings some 12,800 fill the server's lock table,
#: and then nobody can connect any more, to any database.
MAX_LOCKS = 1000
#: Sessions of one process that wait in the server, or hold a lock that was waited for.
MAX_WAITERS = 10
#: The part of its ttl that a lease may lose to the wait before it: the keeper renews it at a third.
SHORT_WAIT = 1 / 6
#: Seconds to go on trying after a hung holder's session was ended; it takes milliseconds.
AFTER_END = 0.25


class _Answer(NamedTuple):
    """What the server says to a try or a wait."""

    granted: bool
    token: int | None = None
    #: The holder is past his time.
    overdue: bool = False
    pid: int = 0
    #: The key was free, but somebody's transaction has a row locked.
    pinned: bool = False


class TakesSessionLocks(Backend):
    """The part of the backend that takes locks and gives them back."""

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        options = config.options
        self._timeout = config.timeout
        self._max_locks: int = options.get("MAX_LOCKS", MAX_LOCKS)
        self._max_waiters: int = options.get("MAX_WAITERS", MAX_WAITERS)
        self._route: str = options.get("DATABASE", config.fence_database)
        self._home = home(self._route, self._timeout)
        self._room = room(self._route, self._timeout)

    def _key(self, name: str) -> int:
        """The lock's key: 64 bits, of which no two names in use will ever share all."""
        text = f"{self.config.key_prefix}\0{name}".encode()
        digest = hashlib.blake2b(text, digest_size=8, person=b"fencedlock").digest()
        return int.from_bytes(digest, "big", signed=True)

    # Acquiring

    def acquire(self, request: Request) -> Grant | None:
        key = self._key(request.name)
        # Asked first: the server lets a session have its own lock twice.
        if held := self._home.holding(key):
            return held.grant if held.owner == request.owner.id else None
        if request.will_wait and self._room.is_better_than_a_try(key):
            # Says that nothing was asked for him yet.
            request.place[:] = [key]
            return None
        return self._ask_for(request, key)

    def _ask_for(self, request: Request, key: int) -> Grant | None:
        request.place.clear()
        try_it = partial(self._try, request, key, clock())
        grant = self._ask("acquiring", try_it, request.name, self._undo)
        if grant is None or request.connection is None:
            return grant
        return self._record_in_test(request, grant)

    def _try(self, request: Request, key: int, since: float) -> Grant | None:
        """Try on the shared session. Its one thread does this, so no try overlaps another."""
        if self._home.holding(key):
            return None
        self._refuse_beyond_cap(request)
        session = self._home.session()
        answer = self._try_once(session, request, key)
        if answer.overdue and end_hung_holders(session, [request.name]):
            until = clock() + AFTER_END
            while not answer.granted and clock() < until:
                answer = self._try_once(session, request, key)
        if not answer.granted:
            if request.will_wait:
                self._room.note_refusal(key)
            return None
        return self._hold(session, request, key, answer.token, since)

    def _try_once(self, session: Session, request: Request, key: int) -> _Answer:
        statement = sql.TRY if is_recorded(request) else sql.TRY_UNFENCED
        given = self._values(session, request, key)
        return self._granted(session, request, key, partial(session.one, statement, given))

    def _granted(
        self, session: Session, request: Request, key: int, send: Callable[[], Any]
    ) -> _Answer:
        """Send for a grant. Unless it is answered as granted, the session doesn't have the key."""
        try:
            answer = _Answer(*send())
        except Error as exc:
            # An error takes the grant back, but not the key.
            had_key = not session.closed and session.unlock(key)
            if sqlstate(exc) in LOCKED:
                return _Answer(False, pinned=had_key)
            if sqlstate(exc) == OUT_OF_MEMORY:
                raise self._full(request) from exc
            raise
        if answer.pid != session.pid:
            session.close()
            raise PoolsTransactions(
                "a pooler changed the session between two statements; session locks need a "
                "direct connection, or a pooler in session mode"
            )
        if answer.granted and answer.token is None and is_recorded(request):
            session.unlock(key)
            self._refuse_conflict(session, request)
            return _Answer(False)
        return answer

    def _values(self, session: Session, request: Request, key: int) -> Mapping[str, Any]:
        if not is_recorded(request):
            return {"session_key": key}
        return {**self._entry(session, request, key).values(), "ttl": request.ttl}

    def _entry(self, session: Session, request: Request, key: int) -> Entry:
        entry = self.entry_for(request)
        entry.session_pid, entry.session_started = session.pid, session.started
        entry.session_key = key
        return entry

    def _hold(
        self, session: Session, request: Request, key: int, token: int | None, since: float
    ) -> Grant:
        hold = Hold(
            name=request.name,
            key=key,
            owner=request.owner.id,
            recorded=is_recorded(request),
            session=session,
            tell=self._tell_lost,
            lent=request.connection if request.fenced else None,
        )
        hold.grant = Grant(token, since, hold)
        self._home.add(hold)
        return hold.grant

    def abandon(self, request: Request) -> None:
        # By the thread that did or does what was asked for, and after that.
        self._home.do(partial(self._release_of, request))

    def _release_of(self, request: Request) -> None:
        hold = self._home.holding(self._key(request.name))
        if hold is not None and hold.owner == request.owner.id:
            self._release(hold)

    def _undo(self, grant: Grant | None) -> None:
        if grant is not None:
            self._release(grant.handle)

    def _record_in_test(self, request: Request, grant: Grant) -> Grant | None:
        """Record a grant in the test's own transaction, which no other session can see into."""
        connection, hold = request.connection, grant.handle
        if connection is None or not request.fenced:
            return grant
        ledger = ledger_for(connection)
        taken = False
        try:
            entry = self._entry(hold.session, request, hold.key)
            taken, token = ledger.claim(connection, entry)
            if not taken and (row := ledger.look(connection, request.name)):
                self._refuse_row(request, row)
        except Error as exc:
            raise self.unavailable("acquiring", exc, request.name) from exc
        finally:
            if not taken:
                self._ask("release", partial(self._release, hold), request.name)
        hold.grant = recorded = Grant(token, grant.since, hold)
        return recorded

    def _refuse_conflict(self, session: Session, request: Request) -> None:
        row = ledger_for(session.wrapper).look(session.wrapper, request.name)
        if row is not None:
            self._refuse_row(request, row)

    def _refuse_row(self, request: Request, row: Row) -> None:
        if row.conflicts_with(self.config.alias, self.label):
            raise self.conflict(request, row.alias, row.backend, row.holder())

    def _refuse_beyond_cap(self, request: Request) -> None:
        if self._home.held >= self._max_locks:
            raise BackendUnavailable(
                f"Lock {request.name!r} would be one more than the {self._max_locks} that one "
                f"process may hold through {self.config.where()}. Hold fewer at once, or raise "
                "OPTIONS['MAX_LOCKS'] and the server's max_locks_per_transaction with it.",
                name=request.name,
                alias=self.config.alias,
            )

    def _full(self, request: Request) -> BackendUnavailable:
        return BackendUnavailable(
            f"Lock {request.name!r} can't be taken: the lock table of the database server is "
            "full, for all its databases. Hold fewer locks at once, or raise "
            "max_locks_per_transaction, which takes a restart of the server.",
            name=request.name,
            alias=self.config.alias,
        )

    # Waiting

    def wait(self, request: Request, timeout: float) -> Grant | None:
        deadline = clock() + timeout
        key = self._key(request.name)
        grant = None
        with self._room.turn(key, timeout, request.cancel) as first:
            if first:
                with self._home.awaiting(key, request.name):
                    grant = self._wait_first(request, key, deadline)
        if request.place and not request.cancel:
            # His time was up before anything was asked.
            return self._ask_for(request, key)
        return grant

    def _wait_first(self, request: Request, key: int, deadline: float) -> Grant | None:
        while not request.cancel and clock() < deadline:
            self._refuse_beyond_cap(request)
            if session := self._session_to_wait_on(request):
                return self._wait_on(session, request, key, deadline)
            if grant := self._ask_for(request, key):
                return grant
            pause(deadline, request.cancel)
        return None

    def _session_to_wait_on(self, request: Request) -> Session | None:
        if request.connection is not None:
            return None
        try:
            return self._room.take(self._max_waiters)
        except Error as exc:
            raise self.unavailable("wait", exc, request.name) from exc

    def _wait_on(
        self, session: Session, request: Request, key: int, deadline: float
    ) -> Grant | None:
        try:
            grant = self._stand_in_line(session, request, key, deadline)
        except BaseException as exc:
            # Also a killed greenlet: the key goes with the session, and the row after it.
            session.abandon()
            if is_recorded(request):
                self._home.do(partial(self._clear, request))
            if isinstance(exc, Error):
                raise self.unavailable("wait", exc, request.name) from exc
            raise
        if grant is None:
            self._room.give_back(session)
        return grant

    def _stand_in_line(
        self, session: Session, request: Request, key: int, deadline: float
    ) -> Grant | None:
        statement = sql.WAIT if is_recorded(request) else sql.WAIT_UNFENCED
        given = self._values(session, request, key)
        while not request.cancel and (left := deadline - clock()) > 0:
            send = partial(
                wait_in_server,
                session,
                statement,
                given,
                seconds=min(left, SLICE),
                grace=self._timeout,
                cancel=request.cancel,
            )
            asked = clock()
            request.place.clear()
            try:
                answer = self._granted(session, request, key, send)
            except Error as exc:
                if sqlstate(exc) == CANCELLED and request.cancel:
                    return None
                raise
            if answer.granted:
                return self._take_up(session, request, key, answer.token, asked)
            if answer.pinned:
                pause(deadline, request.cancel)
        return None

    def _take_up(
        self, session: Session, request: Request, key: int, token: int | None, asked: float
    ) -> Grant | None:
        """
        Begin the lease that a wait ended with.

        How long ago the server granted it can't be known here, where the caller may have been
        paused. After a short wait its time is counted from before that wait. After a longer one it
        is renewed once, and its time counted from before the renewal.
        """
        since = clock()
        if since - asked < request.ttl * SHORT_WAIT and not request.cancel:
            return self._hold(session, request, key, token, asked)
        given = {"name": request.name, "owner": request.owner.id, "key": key}
        with watchdog.limit(self._timeout, session.cut):
            if request.cancel:
                statement = sql.RELEASE if is_recorded(request) else sql.UNLOCK
                session.one(statement, given)
                return None
            extend = sql.EXTEND if is_recorded(request) else sql.VERIFY_UNFENCED
            if not session.all(extend, {**given, "ttl": request.ttl}):
                raise OperationalError("the grant was overtaken before it was taken up")
        return self._hold(session, request, key, token, since)

    def _clear(self, request: Request) -> None:
        given = {"name": request.name, "owner": request.owner.id}
        self._home.session().all(sql.CLEAR, given)

    # Giving back

    def _release(self, hold: Hold) -> bool:
        if not self._home.remove(hold):
            return False
        session = hold.session
        try:
            unfenced = sql.UNLOCK_LISTED if hold.listed else sql.UNLOCK
            statement = sql.RELEASE if hold.recorded else unfenced
            unlocked, *forced = session.one(statement, hold.values())
            return bool(unlocked) and not any(forced)
        except Error as exc:
            if session.closed:
                # When it ended can't be told: others may have had the lock by now.
                return False
            session.unlock(hold.key)
            if sqlstate(exc) in LOCKED:
                # The key is free. Whoever has the row locked is about to make it his own.
                return True
            raise
        finally:
            if not self._home.is_shared(session):
                self._home.unwatch(session)
                self._room.give_back(session)

    def _tell_lost(self, owners: Sequence[str]) -> None:
        if self.lost_hook is not None:
            self.lost_hook(owners)

    def _ask(
        self,
        doing: str,
        work: Callable[[], T],
        name: str | None = None,
        undo: Callable[[T], object] | None = None,
        *,
        renews: bool = False,
    ) -> T:
        try:
            return self._home.ask(work, undo, renews=renews)
        except (Error, Unanswered) as exc:
            raise self.unavailable(doing, exc, name) from exc


def is_recorded(request: Request) -> bool:
    """Whether the grant is recorded by the statement that takes the lock."""
    return request.fenced and request.connection is None
