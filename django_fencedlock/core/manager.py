"""One lock service of this process: its backend, its keeper, and the leases that it gave."""

from __future__ import annotations

import atexit
import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import Error, connections

from .. import conf, logs
from ..backends.interface import Backend, Claim, Held, Renewal, Wait, grant_of
from ..exceptions import (
    BackendUnavailable,
    FencedLockError,
    LeaseLost,
    LockNotAcquired,
)
from ..lease import Duration, Lease
from ..storage import history, unfenced
from ..storage.connections import (
    open_connections,
    test_connection,
    test_has_ended,
    under_test,
    when_all_ended,
)
from ..storage.fenced_atomic import pinned_atomic
from ..storage.fences import Fences, told
from . import aio, runtime
from .events import Kind, emit, subscribe
from .grants import Grants, holder_of
from .identity import LocalHolder, current_holder
from .keeper import REFUSED, Keeper
from .permits import Permits, held_as
from .runtime import clock

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Service:
    """What an alias of ``FENCEDLOCK`` is in one process."""

    def __init__(
        self,
        alias: str,
        backend: Backend | None = None,
        clock: Callable[[], float] = clock,
    ) -> None:
        self.config = conf.config(alias)
        self.backend: Backend = backend or conf.backend_class(self.config.backend)(self.config)
        self._clock = clock
        fences = Fences(self.config, self.backend.label)
        self.keeper = Keeper(
            self.backend, self.report_losses, clock, None if self.backend.records_grants else fences
        )
        self.grants = Grants(self.backend, fences, self.keeper, clock, is_free)
        self.permits = Permits(self.grants)
        self.holder = self.grants.holder
        _living.add(runtime.forks.register(self))

    def after_fork(self) -> None:
        self.backend.after_fork()
        self.keeper.after_fork()

    def acquire(
        self,
        claim: Claim,
        wait: Wait | None = None,
        who: LocalHolder | None = None,
        *,
        pattern: str = "",
        max_hold: float | None = None,
        tells: bool = True,
        of_another_process: bool = False,
    ) -> Lease | None:
        """
        Acquire the lock before the wait is over, or enter it again if `who` holds it; else None.

        Args:
            tells: Whether a refusal is an event: not if the caller tries again.
            of_another_process: In a test, the claim stands for one of another process, which isn't
                inside the transaction of the code under test.
        """
        wait = wait or Wait(now=self._clock, since=self._clock())
        who = who or current_holder()
        if lease := self.enter_again(claim, who):
            return lease
        try:
            found = self.permits if claim.permits else self.grants
            answer = found.acquire(claim, wait, who, of_another_process)
            if not isinstance(answer, Held):
                grant, since = answer
                lease = Lease(
                    grant,
                    cast(Any, self),
                    since=since,
                    alias=self.config.alias,
                    database=self.config.fence_database,
                    who=who,
                    pattern=pattern,
                    max_hold=max_hold,
                    lent=test_has_ended(connections[self.config.fence_database]),
                    clock=self._clock,
                )
                who.leases[self, held_as(claim)] = lease
                self.keeper.keep(lease)
        except FencedLockError:
            raise
        except BaseException:
            # No thread renews it, or an exception from outside keeps it from the caller.
            if lease is not None:
                lease.released = True
                self._forget(lease)
                self.keeper.forget(lease)
            for grant in [lease.grant] if lease else map(grant_of, wait.asked or [claim]):
                self.grants.drop(grant)
            raise
        waited = self._clock() - wait.since
        if lease is not None:
            emit(Kind.ACQUIRED, self.backend, lease.name, lease, waited=waited)
        elif tells:
            self.tell_refused(claim.name, pattern, waited, wait.held)
        return lease

    def tell_refused(self, name: str, pattern: str, waited: float, held: Held | None) -> None:
        holder = holder_of(held, self.config.alias) if held and held.owner else None
        emit(Kind.REFUSED, self.backend, name, pattern=pattern, waited=waited, holder=holder)

    def _forget(self, lease: Lease) -> None:
        key = self, held_as(lease.grant)
        if (who := lease.who) is not None and who.leases.get(key) is lease:
            del who.leases[key]
        if lease.grant.permits:
            self.permits.note_free(lease.grant)

    def refusal(self, claim: Claim, waited: float, held: Held | None) -> LockNotAcquired:
        """Return the error that says who has the lock, or its permits."""
        if claim.permits:
            return self.permits.refusal(claim, waited)
        return self.grants.refusal(claim.name, waited, claim.fenced, held)

    def lease_of(self, name: str, who: LocalHolder) -> Lease | None:
        """The lease of lock `name` that `who` has in this process; of any permit: `held_as()`."""
        lease = who.leases.get((self, name))
        if lease is not None and not lease.is_open():
            # Left behind by a test, with whose transaction it ended, or by the parent process.
            self._forget(lease)
            lease = None
        return lease

    def enter_again(self, claim: Claim, who: LocalHolder) -> Lease | None:
        """Return the lease that `who` has already, entered once more; else None."""
        lease = self.lease_of(held_as(claim), who)
        if lease is None or lease.is_ending:
            return None
        if lease.lost:
            raise lease.loss()
        if claim.fenced and not lease.fenced:
            raise LockNotAcquired(
                f"Lock {lease.name!r} is already held here with fenced=False, so it can't be "
                "entered as a fenced one. Take it fenced the first time.",
                name=lease.name,
                alias=self.config.alias,
            )
        # In one go, as far as signals are concerned.
        lease.entries, lease.entered_by = lease.entries + 1, claim
        return lease

    def interrupted(self, claim: Claim, wait: Wait) -> None:
        """Undo what a claim has got in its wait: an exception interrupted its code."""
        lease = self.lease_of(held_as(claim), current_holder())
        if lease is not None and (lease.entered_by is claim or lease.entered_by is wait):
            # acquire() has counted its lease.
            lease.to_release -= lease.entered_by is wait
            lease.entries, lease.entered_by = lease.entries - 1, None
        give_back_left_over(wait.since)

    def verify(self, lease: Lease) -> bool:
        if self.backend.verify(lease.grant):
            return not lease.lost
        self.lose(lease, "the lock service no longer knows this holder")
        return False

    def renew(self, lease: Lease, ttl: Duration | None) -> None:
        if lease.held_too_long:
            self.keeper.end(lease)
            raise lease.loss()
        since, asked = self._clock(), lease.ttl if ttl is None else conf.seconds(ttl, "ttl")
        grant = lease.grant._replace(ttl=asked)
        # The service may count a shorter ttl from now on, whether or not its answer comes.
        lease.ttl = min(asked, lease.ttl)
        lease.deadline = min(lease.deadline, since + asked)
        self.keeper.renewed(lease)
        (answer,) = self.backend.renew([grant])
        if answer is Renewal.KEPT:
            lease.ttl = asked
            if lease.fenced and self.keeper.compare([lease]):
                answer = Renewal.LOST
            else:
                lease.deadline = since + asked
                self.keeper.renewed(lease)
        emit(Kind.RENEWED, self.backend, "", leases=[lease], answers=[answer])
        if answer is Renewal.LOST:
            self.lose(lease, REFUSED)
            raise lease.loss()
        if answer is Renewal.UNKNOWN:
            raise BackendUnavailable(
                f"The lease of lock {lease.name!r} couldn't be renewed: lock service "
                f"{lease.alias!r} didn't answer. {lease.remaining():.1f} s of it are left.",
                name=lease.name,
                alias=lease.alias,
            )

    def atomic(self, lease: Lease, using: str | None) -> contextlib.AbstractContextManager[None]:
        return pinned_atomic(lease, using)

    def release(self, lease: Lease, who: LocalHolder | None = None) -> bool:
        # No variable refers to the holder: a call of asyncio.to_thread() has ended when none does.
        if lease._who is None or lease._who() is not (who or current_holder()):
            if not lease.wait_until_left():
                raise lease.not_the_holder()
            lease.entries = 1
        # None are left of one whose release was put off to the end of a transaction.
        lease.entries = max(0, lease.entries - 1)
        if lease.entries > 0:
            return True
        if open_now := open_connections():
            # The next holder would read what isn't committed yet, and couldn't write meanwhile.
            if not lease.put_off:
                when_all_ended(open_now, partial(self._finish_if_left, lease))
                # Only now: after an interrupt, give_back_left_over() passes over what is put off.
                lease.put_off = True
            return True
        return self._finish(lease)

    def give_back(self, lease: Lease, who: LocalHolder | None) -> None:
        """Release a lease whose work is done: without an answer, the lock expires by itself."""
        try:
            self.release(lease, who)
        except BackendUnavailable as exc:
            logs.left_to_run_out(logger, lease.name, exc, logs.about(lease))

    def _finish_if_left(self, lease: Lease) -> None:
        lease.put_off = False
        if lease.entries <= 0 and lease.is_open() and not self._finish(lease):
            logger.warning(
                "Lock %r was lost before the transaction under it ended; fenced writes of that "
                "transaction were rejected, if there was a newer grant",
                lease.name,
                extra=logs.about(lease, held_for=lease.held_for()),
            )

    def _finish(self, lease: Lease) -> bool:
        grant = lease.grant
        try:
            lease.is_ending = True
            self.keeper.drop(lease)
            kept = self.backend.release(grant)
        except BaseException:
            # No answer, or an interrupt, maybe before the request was sent.
            self.keeper.doubt(grant)
            lease.released = True
            unfenced.rows.ended(lease)
            raise
        finally:
            # Only now: give_back_left_over() finds it until then.
            self._forget(lease)
            if not lease.lent:
                self.keeper.clear_row(grant)
            elif grant.fenced and not self.backend.records_unfenced:
                # The test's transaction, if it is broken, takes the row along.
                with contextlib.suppress(Error):
                    self.grants.fences.clear([grant])
        if not kept:
            self.lose(lease, "the lock service no longer knew this holder at the release")
        lease.released = True
        if lease.why_lost:
            return False
        emit(Kind.RELEASED, self.backend, lease.name, lease)
        return True

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
            self._finish(lease)
        except Exception as exc:
            logs.left_to_run_out(logger, lease.name, exc, logs.about(lease))
        lease.released = True
        warnings.warn(words, ResourceWarning, stacklevel=1)

    async def in_thread(self, function: Callable[..., T], *args: Any, kind: str = aio.RELEASE) -> T:
        """Call `function` for a coroutine that waits for it."""
        if await self.is_lent():
            return await sync_to_async(function)(*args)
        return await aio.run(kind, self.config.alias, function, *args)

    async def is_lent(self) -> bool:
        """Whether a test's transaction is on the connection of the thread that runs sync code."""
        if not under_test():
            return False
        return await sync_to_async(test_connection)(self.config.fence_database) is not None

    async def arelease(self, lease: Lease, who: LocalHolder | None = None) -> bool:
        who = who or current_holder()
        if lease.lent:
            return await sync_to_async(self.release)(lease, who)
        # Not by in_thread(): a cancellation before the release begins would leave the lock.
        return await aio.run(aio.RELEASE, self.config.alias, self.release, lease, who)

    def drop_all(self) -> None:
        """Release whatever is held, as far as possible. For the end of a test."""
        # The test may have taken the service itself away.
        mine = [lease for lease in current_holder().leases.values() if lease._control is self]
        for lease in {*mine, *self.keeper.leases()}:
            self._forget(lease)
            if lease.is_open():
                self.keeper.forget(lease)
                lease.released = True
                with contextlib.suppress(Exception):
                    self.grants.release(lease.grant)
        with contextlib.suppress(Exception):
            self.keeper.doubts.clear()
            self.keeper.clear()
            self.backend.close()

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

    def report_losses(self, leases: Sequence[Lease]) -> None:
        """Run the user's code for leases that were marked as lost."""
        try:
            self.explain(leases)
        finally:
            for lease in leases:
                lease.run_callbacks()
                emit(Kind.LOST, self.backend, lease.name, lease, reason=lease.why_lost)


services: dict[str, Service] = {}
#: Those of former settings too, which may have leases out.
_living: weakref.WeakSet[Service] = weakref.WeakSet()


def service(alias: str) -> Service:
    """The service of an alias, made when it is first asked for."""
    return services.get(alias) or services.setdefault(alias, Service(alias))


def is_free(alias: str, label: str, database: str, name: str) -> bool:
    """Whether the service of an alias says that a lock is free; False if it can't be asked."""
    # ImproperlyConfigured: another process's settings have the alias, or this one has no driver.
    with contextlib.suppress(BackendUnavailable, ImproperlyConfigured):
        asked = service(alias)
        if (asked.backend.label, asked.config.fence_database) == (label, database):
            return name not in asked.backend.holders([name])
    return False


def give_back_left_over(since: float) -> None:
    """Release every lease that this thread, greenlet or task has acquired since then."""
    # An exception that is thrown into a block as it begins or ends may skip the release.
    who = current_holder()
    for lease in list(who.leases.values()):
        if lease.granted_at < since or lease.put_off or not lease.is_open():
            continue
        lease.entries = 1
        lease._control.give_back(lease, who)


def drop_leases_of_test(**kwargs: object) -> None:
    """Forget what a test left behind, when the runner has emptied the database after it."""
    if under_test():
        for each in list(_living):
            each.drop_all()


def _forget_settings(*, setting: str, **kwargs: object) -> None:
    # Leases that are out go on with the service that gave them.
    if setting in ("FENCEDLOCK", "DATABASES", "CACHES"):
        services.clear()


def tidy_at_exit() -> None:
    """Do what releases have put off: the process ends."""
    runtime.worker.finish(runtime.EXIT_TIMEOUT)
    for each in list(_living):
        with contextlib.suppress(Error, BackendUnavailable, LeaseLost):
            each.keeper.clear()
            each.backend.close()


subscribe(history.history.on_event, Kind.ACQUIRED, Kind.RELEASED, Kind.LOST, Kind.EVICTED)
subscribe(unfenced.rows.on_event, Kind.RENEWED)
setting_changed.connect(_forget_settings, dispatch_uid="django_fencedlock.core.manager")
atexit.register(tidy_at_exit)
