"""Taking a lease of a lock service: asking, waiting, and giving back what isn't good."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import logs
from ..backends.base import Backend, Grant, Renewal, Request
from ..exceptions import BackendUnavailable, InsideTransaction
from ..lease import Lease
from ..storage.vendors import ledger_for
from . import transactions
from .runtime import clock

if TYPE_CHECKING:
    from ..conf import AliasConfig
    from ..lease import Control


logger = logging.getLogger(__name__)

#: Where a backend can't wait in its service, one looks again after 10 ms, then ever later, but at
#: least every 250 ms; each pause is drawn from half of that to one and a half.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25


class TakesLeases:
    """The part of a service that gets leases of its backend, and knows nothing of those it gave."""

    config: AliasConfig
    backend: Backend

    def _obtain(self, request: Request, home: BaseDatabaseWrapper, deadline: float) -> Lease | None:
        while True:
            grant = self._grant(request, deadline)
            if grant is None:
                return None
            lease = self._lease(request, grant, home)
            try:
                # Once more before the caller's code runs: it may have been paused since.
                if not lease.expired or self._revive(lease):
                    self._require_visible(request, lease, home)
                    return lease
            except BaseException:
                self._give_back(lease)
                raise
            self._give_back(lease)
            if clock() >= deadline:
                return None

    def _grant(self, request: Request, deadline: float) -> Grant | None:
        if grant := self.backend.acquire(request):
            return grant
        if request.on_refusal is not None:
            request.on_refusal(request.seen)
        left = deadline - clock()
        if left <= 0 and not request.place:
            return None
        if request.connection is not None:
            # In a test's own transaction this very thread would have to give the lock back.
            return None
        request.seen.clear()
        if self.backend.supports_waiting:
            return self.backend.wait(request, left)
        return self._poll(request, deadline)

    def _poll(self, request: Request, deadline: float) -> Grant | None:
        pause = FIRST_PAUSE
        while not request.cancel and (left := deadline - clock()) > 0:
            time.sleep(min(left, pause * random.uniform(0.5, 1.5)))
            pause = min(LONGEST_PAUSE, pause * 1.5)
            if self.backend.is_free(request.name):
                again = replace(request, timeout=max(FIRST_PAUSE, deadline - clock()))
                if grant := self.backend.acquire(again):
                    return grant
        return None

    def _lease(self, request: Request, grant: Grant, home: BaseDatabaseWrapper) -> Lease:
        lease = Lease(
            name=request.name,
            alias=self.config.alias,
            owner=request.owner,
            token=grant.token,
            ttl=request.ttl,
            since=grant.since,
            control=cast("Control", self),
            database=self.config.fence_database,
            handle=grant.handle,
        )
        lease.home = home
        if request.connection is not None:
            lease.lent = True
            lease.is_over = transactions.test_has_ended(request.connection)
        return lease

    def _revive(self, lease: Lease) -> bool:
        since = clock()
        if self._renew(lease) is not Renewal.KEPT:
            return False
        lease.extend_from(since)
        return not lease.expired

    def _renew(self, lease: Lease) -> Renewal:
        """Renew a lease for its holder, who waits for the answer of the fence database too."""
        (answer,) = self.backend.renew([lease])
        if answer is Renewal.KEPT and self.backend.renew_rows([lease]):
            return Renewal.LOST
        return answer

    def _require_visible(
        self, request: Request, lease: Lease, connection: BaseDatabaseWrapper
    ) -> None:
        """Refuse a grant that the caller's transaction can't see: its snapshot is older."""
        if not (request.in_transaction and request.fenced):
            return
        if ledger_for(connection).newest(connection, lease.name) != (lease.token, lease.owner_id):
            raise InsideTransaction(
                f"Lock {lease.name!r} was granted with token {lease.token}, but this transaction "
                "has an older snapshot and can't see the grant. Acquire the lock first, and open "
                "the transaction inside of it (or use READ COMMITTED, where the database has it).",
                name=lease.name,
                alias=lease.alias,
            )

    def _give_back(self, lease: Lease) -> None:
        """Give back a grant that the caller never got."""
        lease.released = True
        try:
            self.backend.release(lease)
        except BackendUnavailable as exc:
            logs.left_to_run_out(logger, lease.name, exc, logs.about(lease))

    def _abandon(self, request: Request) -> None:
        """Give back what a request may have got whose caller was struck, and won't know of it."""
        try:
            self.backend.abandon(request)
        except (BackendUnavailable, RuntimeError) as exc:
            # If it was granted at all.
            known = logs.facts(name=request.name, alias=self.config.alias, owner=request.owner.id)
            logs.left_to_run_out(logger, request.name, exc, known)
