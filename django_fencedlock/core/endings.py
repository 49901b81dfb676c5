"""How leases end: released, abandoned, or lost."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Sequence
from functools import partial

from asgiref.sync import sync_to_async
from django.db import Error

from .. import conf, logs
from ..backends.interface import Backend
from ..exceptions import BackendUnavailable
from ..lease import Lease, Leases
from ..storage import unfenced
from ..storage.connections import open_connections, when_all_ended
from ..storage.fences import told
from . import aio, runtime
from .events import Kind, emit
from .grants import Grants
from .identity import LocalHolder, current_holder
from .keeper import Keeper
from .paths import leave_above

logger = logging.getLogger(__name__)


class Endings:
    """The part of a `Service` that ends leases. Those of a set end together."""

    config: conf.AliasConfig
    backend: Backend
    keeper: Keeper
    grants: Grants

    def _forget(self, lease: Lease) -> None:
        """Take a lease from its holder."""
        raise NotImplementedError

    def release(self, leases: Leases, who: LocalHolder | None = None) -> bool:
        left = [lease for lease in leases if self._is_left(lease, who)]
        if not left:
            return True
        if open_now := open_connections():
            # The next holder would read what isn't committed yet, and couldn't write meanwhile.
            if put_off := [lease for lease in left if not lease.put_off]:
                when_all_ended(open_now, partial(self._finish_if_left, put_off))
                for lease in put_off:
                    # Only now: after an interrupt, give_back_left_over() passes over these.
                    lease.put_off = True
            return True
        return self._finish(left)

    def _is_left(self, lease: Lease, who: LocalHolder | None) -> bool:
        """Leave a lease once; return whether that was the last time."""
        # No variable refers to the holder: a call of asyncio.to_thread() has ended when none does.
        if lease._who is None or lease._who() is not (who or current_holder()):
            if not lease.wait_until_left():
                raise lease.not_the_holder()
            lease.entries = 1
        # None are left of one whose release was put off to the end of a transaction.
        lease.entries = max(0, lease.entries - 1)
        return lease.entries == 0

    def give_back(self, leases: Leases, who: LocalHolder | None) -> None:
        """Release leases whose work is done: without an answer, the locks expire by themselves."""
        try:
            self.release(leases, who)
        except BackendUnavailable as exc:
            for lease in leases:
                logs.left_to_run_out(logger, lease.name, exc, logs.about(lease))

    def _finish_if_left(self, leases: Leases) -> None:
        for lease in leases:
            lease.put_off = False
        left = [lease for lease in leases if lease.entries <= 0 and lease.is_open()]
        if not left or self._finish(left):
            return
        for lease in left:
            if lease.why_lost:
                logger.warning(
                    "Lock %r was lost before the transaction under it ended; fenced writes of that "
                    "transaction were rejected, if there was a newer grant",
                    lease.name,
                    extra=logs.about(lease, held_for=lease.held_for()),
                )

    def _finish(self, leases: Leases) -> bool:
        if any(lease.above for lease in leases):
            leases = [*leases, *leave_above(leases)]
        kept = self.let_go(leases)
        for lease, was_kept in zip(leases, kept, strict=True):
            # Before the loss of one: it would be that of them all.
            lease.released = was_kept
        for lease, was_kept in zip(leases, kept, strict=True):
            if not was_kept:
                self.lose(lease, "the lock service no longer knew this holder at the release")
                lease.released = True
            if not lease.why_lost:
                emit(Kind.RELEASED, self.backend, lease.name, lease)
        return not any(lease.why_lost for lease in leases)

    def let_go(self, leases: Leases) -> list[bool]:
        """Release leases at the service; return of each whether its holder still had the lock."""
        grants = [lease.grant for lease in leases]
        try:
            for lease in leases:
                lease.is_ending = True
                self.keeper.drop(lease)
            if len(grants) == 1:
                return [self.backend.release(grants[0])]
            return self.backend.release_all(grants)
        except BaseException:
            # No answer, or an interrupt, maybe before the request was sent.
            for lease in leases:
                self.keeper.doubt(lease.grant)
                lease.released = True
                unfenced.rows.ended(lease)
            raise
        finally:
            # Only now: give_back_left_over() finds them until then.
            for lease in leases:
                self._forget(lease)
                if not lease.lent:
                    self.keeper.clear_row(lease.grant)
            lent = [lease.grant for lease in leases if lease.lent and lease.fenced]
            if lent and not self.backend.records_unfenced:
                # The test's transaction, if it is broken, takes the rows along.
                with contextlib.suppress(Error):
                    self.grants.fences.clear(lent)

    def abandon(self, lease: Lease) -> None:
        """Release a lease whose holder has ended, and to which nothing refers any more."""
        # In a thread of its own: what collects garbage may be in anything, and have any lock.
        with contextlib.suppress(RuntimeError):
            runtime.start(partial(self._release_abandoned, lease))

    def _release_abandoned(self, lease: Lease) -> None:
        words = (
            f"Lock {lease.name!r} was never released: its holder ({lease.holder}) has ended, and "
            "nothing refers to the lease any more. It is released now. "
            f"Use `with lock({lease.name!r})`, or keep the lease and release it."
        )
        logger.warning("%s", words, extra=logs.about(lease, held_for=lease.held_for()))
        try:
            self._finish([lease])
        except Exception as exc:
            logs.left_to_run_out(logger, lease.name, exc, logs.about(lease))
        lease.released = True
        warnings.warn(words, ResourceWarning, stacklevel=1)

    async def arelease(self, leases: Leases, who: LocalHolder | None = None) -> bool:
        who = who or current_holder()
        if leases[0].lent:
            return await sync_to_async(self.release)(leases, who)
        # Not by in_thread(): a cancellation before the release begins would leave the locks.
        return await aio.run(aio.RELEASE, self.config.alias, self.release, leases, who)

    def explain(self, leases: Sequence[Lease]) -> None:
        """Ask the database who released these leases by force."""
        guessed = [lease for lease in leases if lease.loss_is_guessed]
        if guessed:
            reasons = told(self.config.fence_database, [lease.owner_id for lease in guessed])
            for lease in guessed:
                lease.why_lost = reasons.get(lease.owner_id) or lease.why_lost
                lease.loss_is_guessed = False

    def lose(self, lease: Lease, why: str) -> None:
        """Note a loss that the caller's thread noticed, and report it from there."""
        self.keeper.forget(lease)
        if lease.mark_lost(why, guessed=True):
            self.report_losses([lease])
        else:
            # The keeper was faster; what is raised next is to say the reason.
            self.explain([lease])

    def lose_with(self, leases: Leases, why: str) -> None:
        """Mark leases as lost, and report them from the notifier's thread."""
        for lease in leases:
            self.keeper.forget(lease)
        if lost := [lease for lease in leases if lease.mark_lost(why)]:
            runtime.notify(self.report_losses, lost)
            for lease in lost:
                runtime.notify(self.keeper.free, lease)

    def report_losses(self, leases: Sequence[Lease]) -> None:
        """Run the user's code for leases that were marked as lost."""
        try:
            self.explain(leases)
        finally:
            for lease in leases:
                lease.run_callbacks()
                emit(Kind.LOST, self.backend, lease.name, lease, reason=lease.why_lost)
