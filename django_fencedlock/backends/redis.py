"""Locks on Redis or Valkey, whose grants the fence database records."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import logs
from ..conf import AliasConfig, Problem
from ..core.identity import Holder
from ..core.runtime import clock, notify
from ..core.transactions import test_connection
from ..lease import Lease
from ..storage.errors import shorten_error
from ..storage.vendors import Held, Ledger, NameAndOwner
from . import redis_client, redis_health
from .base import Grant, Renewal, Request, Taken
from .redis_client import RedisError
from .redis_recording import BRIEFLY, RecordsGrants
from .redis_store import InLine, Told

logger = logging.getLogger(__name__)

#: Seconds after which a waiter tries again whose grant couldn't be recorded.
PINNED = 0.25
#: Rows of the registry that wait to be cleared; those beyond it are left to run out.
MOST_PENDING = 10_000


class RedisBackend(RecordsGrants):
    """
    Leases on Redis or Valkey; who waits is served in order of arrival.

    Redis decides who has a lock, and proposes the token; the fence database refuses a token that
    isn't newer than all before. So Redis may forget everything, and tokens still rise.

    An uncontended lock takes one request to Redis and one statement, and one request to give back;
    the registry's rows are cleared later, in batches.

    With T for OPTIONS["TIMEOUT"]: a server that doesn't answer is given up after T, by one who
    waits in line after T, a beat and a second. The statement has a limit of T as well, and if it
    fails, giving the lock back takes T at most. With a client from CACHE or CLIENT_FACTORY, T is
    what that client's own time-outs and retries make it. A request that was cut off may still have
    taken the lock, for one ttl.

    A waiter who died or was paused delays those behind him for a few milliseconds; if it happened
    just as the lock was handed to him, for three seconds at most (`redis_scripts.CLAIM`).
    """

    label = "redis"
    supports_waiting = True
    option_names = frozenset({"CACHE", "CLIENT_FACTORY", "TIMEOUT"})

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._pending: deque[Held] = deque(maxlen=MOST_PENDING)

    # Acquiring

    def acquire(self, request: Request) -> Grant | None:
        try:
            answer = self._claim(request, "0" if request.will_wait else None)
        except BaseException as exc:
            self._give_back_after(request, exc)
            raise
        if not isinstance(answer, InLine):
            return answer
        if request.will_wait:
            request.place[:] = [answer]
        return None

    def _claim(self, request: Request, arrival: str | None) -> Grant | InLine | None:
        """Claim the lock; None if a grant of it couldn't be recorded, and was given back."""
        while True:
            since = clock()
            answer = self._store.claim(request, arrival)
            if not isinstance(answer, InLine):
                return self._granted(request, answer, since)
            if not self._evict_dead(request, answer):
                return answer
            arrival = arrival and answer.arrival

    def _evict_dead(self, request: Request, refused: InLine) -> bool:
        """Free the lock if the process is gone of him who was in the way."""
        held = refused.held
        fenced = bool(held.token)
        return self.evict_if_gone(request.name, held.owner, held.process, fenced=fenced)

    def wait(self, request: Request, timeout: float) -> Grant | None:
        deadline = clock() + timeout
        pause, arrival = 0.0, "0"
        if request.place:
            pause, arrival, _ = request.place.pop()
        with self._given_back_on_error(request), self._store.mailbox(request) as mailbox:
            while not request.cancel:
                if pause:
                    left = deadline - clock()
                    if left <= 0:
                        return self._leave(request)
                    mailbox.wait(min(pause, left))
                answer = self._claim(request, arrival)
                if isinstance(answer, InLine):
                    pause, arrival, _ = answer
                elif answer is not None:
                    return answer
                else:
                    pause = PINNED
            self._give_back(request)
            return None

    def _leave(self, request: Request) -> Grant | None:
        since = clock()
        token = self._store.leave(request)
        return None if token is None else self._granted(request, token, since)

    @contextlib.contextmanager
    def _given_back_on_error(self, request: Request) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            self._give_back_after(request, exc)
            raise

    def _give_back_after(self, request: Request, exc: BaseException) -> None:
        if isinstance(exc, RedisError):
            raise self.unavailable("acquiring", exc, request.name) from exc
        self._give_back(request)

    # Keeping

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        try:
            answers = self._store.renew(leases)
        except RedisError as exc:
            answers = [exc] * len(leases)
        if failed := [answer for answer in answers if isinstance(answer, Exception)]:
            notify(
                logger.warning,
                "Redis of alias %r failed at the renewal of %d of %d leases: %s",
                self.config.alias,
                len(failed),
                len(leases),
                shorten_error(failed[0]),
                extra=logs.facts(alias=self.config.alias, reason=shorten_error(failed[0])),
            )
        return list(map(_renewal, answers))

    def renew_rows(self, leases: Sequence[Lease]) -> list[Lease]:
        # What a test lent its connection for can't be seen from here.
        rows = [lease for lease in leases if lease.fenced and lease.handle is None]
        if not rows:
            return []
        # A failover to a replica that lags gives an old owner the key back.
        try:
            overtaken = self._run(lambda ledger, private: self._overtaken(ledger, private, rows))
        except Error as exc:
            # Redis has renewed the leases, and the fence rejects the writes of those overtaken.
            logger.warning(
                "The registry of alias %r wasn't renewed: %s",
                self.config.alias,
                exc,
                extra=logs.facts(alias=self.config.alias, reason=str(exc)),
            )
            return []
        for lease in overtaken:
            with contextlib.suppress(*RedisError):
                self._store.release(lease)
        return overtaken

    def _overtaken(
        self, ledger: Ledger, connection: BaseDatabaseWrapper, leases: Sequence[Lease]
    ) -> list[Lease]:
        ledger.patience(connection, BRIEFLY)
        kept = ledger.renew(connection, leases)
        rest = [lease for lease in leases if lease.owner_id not in kept]
        gone = ledger.missing(connection, rest) if rest else set()
        return [
            lease
            for lease in rest
            if lease.owner_id in gone and not self._put_row_back(ledger, connection, lease)
        ]

    def _put_row_back(self, ledger: Ledger, connection: BaseDatabaseWrapper, lease: Lease) -> bool:
        """Mend the registry, unless a newer grant came."""
        newest = ledger.newest(connection, lease.name)
        if newest != (lease.token, lease.owner_id):
            return False
        ledger.enter(connection, self.entry(lease))
        return True

    def verify(self, lease: Lease) -> bool:
        with self._asked("verification", lease.name):
            return self._store.verify(lease)

    def release(self, lease: Lease) -> bool:
        try:
            return self._store.release(lease)
        except RedisError as exc:
            raise self.unavailable("release", exc, lease.name) from exc
        finally:
            # Nobody else would ever clear it, unless the name is locked again.
            if lease.fenced:
                self._clear_row(lease)

    def _clear_row(self, lease: Lease) -> None:
        if lease.handle is None:
            self._pending.append(lease)
            return
        try:
            self._run(lambda ledger, lent: ledger.clear(lent, [lease]), lease.handle)
        except Error:
            # The test's transaction is broken, and takes the row along.
            logger.debug("The row of lock %r wasn't cleared", lease.name, exc_info=True)

    def evict(self, name: str, owner: str, *, fenced: bool = True) -> bool:
        with self._asked("eviction", name):
            had = self._store.give_back(name, owner)
        if fenced:
            self._pending.append(NameAndOwner(name, owner))
        return had

    def take_away(
        self, name: str, owner: str, *, token: int | None = None, session: str = ""
    ) -> Taken:
        with self._asked("forced release", name):
            had = self._store.take_away(name, owner, token or 0)
        if had and token is not None:
            # At once: whoever did it looks at the registry next.
            self._pending.append(NameAndOwner(name, owner))
            self._clear_rows(test_connection(self.config.fence_database))
        return Taken.FREED if had else Taken.NOT_HIS

    def tidy(self) -> None:
        self._clear_rows()
        self._store.close_idle_mailboxes()

    def _clear_rows(self, lent: BaseDatabaseWrapper | None = None) -> None:
        leases = []
        while self._pending:
            leases.append(self._pending.popleft())
        if not leases:
            return
        try:
            self._run(lambda ledger, used: ledger.clear(used, leases), lent)
        except Error as exc:
            logger.warning(
                "Rows of alias %r weren't cleared: %s",
                self.config.alias,
                exc,
                extra=logs.facts(alias=self.config.alias, reason=str(exc)),
            )
            self._pending.extend(leases)

    # Telling

    def is_free(self, name: str) -> bool:
        with self._asked("look", name):
            return self._store.is_free(name)

    def holder(self, name: str) -> Holder | None:
        with self._asked("look", name):
            return self._holder(self._store.held(name))

    def holders(self, names: Sequence[str]) -> dict[str, Holder | None]:
        with self._asked("look"):
            found = self._store.held_by(names)
        return {name: self._holder(told) for name, told in found.items()}

    def waiting(self, names: Sequence[str]) -> dict[str, int]:
        with self._asked("look"):
            return self._store.waiting(names)

    def _holder(self, told: Told | None) -> Holder | None:
        if told is None:
            return None
        found, milliseconds = told
        return Holder(
            owner=found.owner,
            description=found.words,
            alias=self.config.alias,
            token=found.token or None,
            expires_at=datetime.now(UTC) + timedelta(milliseconds=max(0, milliseconds)),
        )

    def close(self) -> None:
        self._clear_rows()
        self._store.close()

    def forget_after_fork(self) -> None:
        self._pending.clear()
        self._store.forget_after_fork()

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from redis_client.problems(config)

    def live_problems(self) -> Iterator[Problem]:
        try:
            yield from redis_health.problems(self._store.client, self.config.alias)
        except RedisError as exc:
            yield Problem(
                "E013",
                str(self.unavailable("check", exc)),
                "Start the server, or mend the alias's settings.",
            )

    def diagnose(self) -> Iterator[Problem]:
        with self._asked("examination"):
            yield from redis_health.diagnose(self._store.client)

    # Tools

    @contextlib.contextmanager
    def _asked(self, doing: str, name: str | None = None) -> Iterator[None]:
        try:
            yield
        except RedisError as exc:
            raise self.unavailable(doing, exc, name) from exc


def _renewal(answer: bool | Exception) -> Renewal:
    if isinstance(answer, Exception):
        return Renewal.UNKNOWN
    return Renewal.KEPT if answer else Renewal.LOST
