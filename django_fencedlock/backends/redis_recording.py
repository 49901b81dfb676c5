"""Recording what Redis granted in the fence database, and mending a Redis that is behind it."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import TypeVar

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import logs
from ..conf import AliasConfig
from ..storage.connections import pool
from ..storage.vendors import Ledger, Row, ledger_for
from .base import Backend, Grant, Request
from .redis_client import RedisError
from .redis_store import Store

T = TypeVar("T")
Work = Callable[[Ledger, BaseDatabaseWrapper], T]
Newest = tuple[int, str]

logger = logging.getLogger(__name__)

#: How often in a row Redis may turn out to be behind the database, until the lock is given back.
REPAIRS = 3
#: Seconds to wait for SQLite's file where waiting long would be in vain, or harm others.
BRIEFLY = 0.25


class _Outcome(enum.Enum):
    """What became of the recording of a grant."""

    RECORDED = enum.auto()
    #: The fence has a token as new.
    REFUSED = enum.auto()
    #: Somebody's open transaction has the fence locked.
    PINNED = enum.auto()


class RecordsGrants(Backend):
    """The part of the backend that records grants, and knows the fence database."""

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._timeout = config.timeout
        self._store = Store(config, self._timeout)

    def _granted(self, request: Request, token: int, since: float) -> Grant | None:
        """Record what Redis granted; or give it back, and None."""
        if not request.fenced:
            return Grant(None, since, handle=request.connection)
        for _ in range(REPAIRS + 1):
            outcome = self._record(request, token)
            if outcome is _Outcome.RECORDED:
                return Grant(token, since, handle=request.connection)
            if outcome is _Outcome.PINNED:
                break
            newer = self._repair(request)
            if newer is None:
                return None
            token = newer
        self._give_back(request)
        return None

    def _give_back(self, request: Request) -> None:
        try:
            self._store.give_back(request.name, request.owner.id)
        except RedisError as exc:
            known = logs.facts(name=request.name, alias=self.config.alias, owner=request.owner.id)
            logs.left_to_run_out(logger, request.name, exc, known)

    def _record(self, request: Request, token: int) -> _Outcome:
        entry = self.entry_for(request)

        def record(ledger: Ledger, connection: BaseDatabaseWrapper) -> _Outcome:
            # If the caller's own transaction has the file, waiting is in vain.
            ledger.patience(connection, BRIEFLY if request.in_transaction else self._timeout)
            try:
                done = ledger.record(connection, entry, token)
            except Error as exc:
                if not ledger.is_row_locked(exc):
                    raise
                self._refuse_one_writer(request, connection, exc)
                return _Outcome.PINNED
            return _Outcome.RECORDED if done else _Outcome.REFUSED

        try:
            return self._run(record, request.connection)
        except Error as exc:
            raise self.unavailable("recording of the grant", exc, request.name) from exc

    def _refuse_one_writer(
        self, request: Request, connection: BaseDatabaseWrapper, error: Error
    ) -> None:
        """On SQLite it isn't the fence's row that is locked, but the file."""
        if connection.vendor != "sqlite":
            return
        if not request.in_transaction:
            raise error
        raise self.in_the_way(request) from error

    def _repair(self, request: Request) -> int | None:
        """Get a token newer than the recorded one; None if somebody else has the lock by now."""
        row, newest = self._read(request)
        if row is not None and row.conflicts_with(self.config.alias, self.label):
            raise self.conflict(request, row.alias, row.backend, row.holder())
        recorded = newest[0] if newest else 0
        token = self._store.repair(request, recorded)
        # Who was too slow, and has lost the lock by now, is refused in the same way.
        if token is not None:
            logger.warning(
                "Redis of alias %r had forgotten the tokens of lock %r, which go on from %d",
                self.config.alias,
                request.name,
                recorded,
                extra=logs.facts(name=request.name, alias=self.config.alias, token=recorded),
            )
        return token

    def _read(self, request: Request) -> tuple[Row | None, Newest | None]:
        def read(
            ledger: Ledger, connection: BaseDatabaseWrapper
        ) -> tuple[Row | None, Newest | None]:
            return ledger.look(connection, request.name), ledger.newest(connection, request.name)

        try:
            return self._run(read, request.connection)
        except Error as exc:
            raise self.unavailable("look at the fence", exc, request.name) from exc

    def _run(self, work: Work[T], connection: BaseDatabaseWrapper | None = None) -> T:
        if connection is not None:
            return work(ledger_for(connection), connection)
        # Not made before it is needed: a lock that isn't fenced needs no database.
        private = pool(self.config.fence_database, self._timeout)
        return private.run(lambda found: work(ledger_for(found), found))
