"""One lock service of this process: its backend, its keeper, and the leases that it gave."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import Error, connections

from .. import conf
from ..backends.interface import Backend, Claim, Grant, Held, Renewal, Wait, grant_of
from ..exceptions import (
    BackendUnavailable,
    FencedLockError,
    LeaseLost,
    LockNotAcquired,
    LockUpgrade,
)
from ..lease import Duration, Lease, Leases
from ..storage import history, unfenced
from ..storage.connections import test_connection, test_has_ended, under_test
from ..storage.fenced_atomic import pinned_atomic
from ..storage.fences import Fences
from . import aio, paths, runtime
from .endings import Endings
from .events import Kind, emit, subscribe
from .grants import Grants, holder_of
from .identity import LocalHolder, current_holder
from .keeper import REFUSED, Keeper
from .names import held_as, is_path
from .permits import Permits
from .runtime import clock
from .set_grants import SetAcquire

T = TypeVar("T")


class Service(Endings):
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
        self.holder, self.holders = self.grants.holder, self.grants.holders
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
        if is_path(claim.name):
            options: dict[str, Any] = {"pattern": pattern, "max_hold": max_hold, "tells": tells}
            return self._acquire_path(claim, wait, who, of_another_process, **options)
        try:
            found = self.permits if claim.permits else self.grants
            answer = found.acquire(claim, wait, who, of_another_process)
            if not isinstance(answer, Held):
                lease = self.hold(*answer, who, pattern, max_hold)
        except FencedLockError:
            raise
        except BaseException:
            # No thread renews it, or an exception from outside keeps it from the caller.
            if lease := self.lease_of(held_as(claim.name, claim.permits), who):
                lease.released = True
                self._forget(lease)
                self.keeper.forget(lease)
            self.grants.drop(*[lease.grant] if lease else map(grant_of, wait.asked or [claim]))
            raise
        waited = self._clock() - wait.since
        if lease is not None:
            emit(Kind.ACQUIRED, self.backend, lease.name, lease, waited=waited)
        elif tells:
            self.tell_refused(claim.name, pattern, waited, wait.held)
        return lease

    def _acquire_path(
        self,
        claim: Claim,
        wait: Wait,
        who: LocalHolder,
        of_another_process: bool,
        **options: Any,
    ) -> Lease | None:
        claims = paths.claims_of(claim)
        wait.asked = claims[:-1]
        answer = self.acquire_all(
            claims, wait, who, of_another_process=of_another_process, **options
        )
        if isinstance(answer, dict):
            name = next(iter(answer))
            wait.asked, wait.held = [each for each in claims if each.name == name], answer[name]
            return None
        *above, lease = answer
        paths.put_beneath(lease, above)
        return lease

    def acquire_all(
        self,
        claims: Sequence[Claim],
        wait: Wait | None = None,
        who: LocalHolder | None = None,
        *,
        pattern: str = "",
        max_hold: float | None = None,
        tells: bool = True,
        of_another_process: bool = False,
    ) -> list[Lease] | dict[str, Held]:
        """
        Acquire all locks or none; return the leases, or who holds each lock that was refused.

        The claims have different names, sorted by their bytes. Names that `who` holds already are
        entered again. For the arguments, see acquire().
        """
        wait = wait or Wait(now=self._clock, since=self._clock())
        who = who or current_holder()
        refused: dict[str, Held] = {}
        try:
            leases = {claim.name: self.enter_again(claim, who) for claim in claims}
            if missing := [claim for claim in claims if leases[claim.name] is None]:
                hold = partial(self.hold, who=who, pattern=pattern, max_hold=max_hold)
                acquiring = SetAcquire(self, missing, wait, who, hold, of_another_process)
                refused = acquiring.run()
                leases.update(acquiring.held)
        except BaseException:
            self._undo_entering(claims, who)
            raise
        waited = self._clock() - wait.since
        if refused:
            self._undo_entering(claims, who)
            for name in refused if tells else ():
                self.tell_refused(name, pattern, waited, refused[name])
            return refused
        for claim in missing:
            emit(Kind.ACQUIRED, self.backend, claim.name, leases[claim.name], waited=waited)
        return [lease for lease in leases.values() if lease]

    def hold(
        self,
        grant: Grant,
        since: float,
        who: LocalHolder,
        pattern: str = "",
        max_hold: float | None = None,
    ) -> Lease:
        """Make the lease of a grant, and renew it from now on."""
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
        who.leases[self, held_as(grant.name, grant.permits)] = lease
        self.keeper.keep(lease)
        return lease

    def tell_refused(self, name: str, pattern: str, waited: float, held: Held | None) -> None:
        holder = holder_of(held, self.config.alias) if held and held.owner else None
        emit(Kind.REFUSED, self.backend, name, pattern=pattern, waited=waited, holder=holder)

    def _forget(self, lease: Lease) -> None:
        key = self, held_as(lease.grant.name, lease.grant.permits)
        if (who := lease.who) is not None and who.leases.get(key) is lease:
            del who.leases[key]
        if lease.grant.permits:
            self.permits.note_free(lease.grant)

    def refusal(self, claim: Claim, wait: Wait) -> LockNotAcquired:
        """Return the error that says who has the lock, or its permits."""
        waited = wait.now() - wait.since
        if claim.permits:
            return self.permits.refusal(claim, waited)
        if is_path(claim.name) and wait.asked:
            # It may be one of the locks above it.
            claim = wait.asked[0]
        return self.grants.refusal(claim.name, waited, claim.fenced, wait.held, claim.shared)

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
        lease = self.lease_of(held_as(claim.name, claim.permits), who)
        if lease is None or lease.is_ending:
            return None
        if lease.lost:
            raise lease.loss()
        if claim.shared != lease.shared and is_path(claim.name):
            raise paths.no_upgrade(claim, self.config.alias)
        if claim.shared != lease.shared:
            held, wanted = ("shared", "exclusively") if lease.shared else ("exclusively", "shared")
            raise LockUpgrade(
                f"Lock {lease.name!r} is held {held} here, so it can't be acquired {wanted} as "
                "well: a lease can't be upgraded or downgraded. Two readers that upgrade would "
                "wait for each other for ever. Release it first, or acquire it exclusively from "
                "the beginning.",
                name=lease.name,
                alias=self.config.alias,
            )
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

    def interrupted(self, claims: Sequence[Claim], wait: Wait) -> None:
        """Undo what claims have got in their wait: an exception interrupted their code."""
        who = current_holder()
        found = [
            lease
            for each in claims
            if (lease := self.lease_of(held_as(each.name, each.permits), who))
        ]
        # The lease of a path, once it is made, releases those above it.
        above = () if any(lease.above for lease in found) else wait.asked
        self._undo_entering([*claims, *above], who, wait)
        give_back_left_over(wait.since)

    def _undo_entering(
        self, claims: Sequence[Claim], who: LocalHolder, wait: Wait | None = None
    ) -> None:
        for claim in claims:
            lease = self.lease_of(held_as(claim.name, claim.permits), who)
            if lease is None or lease.entered_by is None:
                continue
            if lease.entered_by is claim or lease.entered_by is wait:
                # acquire() has counted its lease.
                lease.to_release -= lease.entered_by is wait
                lease.entries, lease.entered_by = lease.entries - 1, None

    def verify(self, lease: Lease) -> bool:
        if self.backend.verify(lease.grant):
            return not lease.lost
        self.lose(lease, "the lock service no longer knows this holder")
        return False

    def renew(self, leases: Leases, ttl: Duration | None) -> None:
        for lease in leases:
            if lease.held_too_long:
                self.keeper.end(lease)
                raise lease.loss()
        since, grants = self._clock(), []
        for lease in leases:
            asked = lease.ttl if ttl is None else conf.seconds(ttl, "ttl")
            grants.append(lease.grant._replace(ttl=asked))
            # The service may count a shorter ttl from now on, whether or not its answer comes.
            lease.ttl = min(asked, lease.ttl)
            lease.deadline = min(lease.deadline, since + asked)
            self.keeper.renewed(lease)
        answers = dict(zip(leases, self.backend.renew(grants), strict=True))
        for lease, grant in zip(leases, grants, strict=True):
            if answers[lease] is Renewal.KEPT:
                lease.ttl = grant.ttl
        kept = [lease for lease in leases if answers[lease] is Renewal.KEPT and lease.fenced]
        answers.update(dict.fromkeys(self.keeper.compare(kept), Renewal.LOST))
        for lease in leases:
            if answers[lease] is Renewal.KEPT:
                lease.deadline = since + lease.ttl
                self.keeper.renewed(lease)
        given = list(answers.values())
        emit(Kind.RENEWED, self.backend, "", leases=list(leases), answers=given)
        for lease, answer in answers.items():
            if answer is Renewal.LOST:
                self.lose(lease, REFUSED)
                raise lease.loss()
        for lease, answer in answers.items():
            if answer is Renewal.UNKNOWN:
                raise BackendUnavailable(
                    f"The lease of lock {lease.name!r} couldn't be renewed: lock service "
                    f"{lease.alias!r} didn't answer. {lease.remaining():.1f} s of it are left.",
                    name=lease.name,
                    alias=lease.alias,
                )

    def atomic(self, leases: Leases, using: str | None) -> contextlib.AbstractContextManager[None]:
        return pinned_atomic(leases, using)

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
        lease._control.give_back([lease], who)


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
