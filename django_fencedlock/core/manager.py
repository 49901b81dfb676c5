"""One lock service of this process: its backend, its keeper, and the leases that it gave."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.core.signals import setting_changed
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.dispatch import Signal

from .. import conf, logs, signals
from ..backends.base import Backend, Renewal, Request
from ..exceptions import (
    BackendUnavailable,
    FencedLockError,
    LeaseLost,
    LockNotAcquired,
    NotTheHolder,
)
from ..lease import Duration, Lease, current_lease
from ..storage.background_writer import writer
from ..storage.connections import query_once, under_test
from ..storage.dialect import whose
from ..storage.fenced_atomic import pinned_atomic
from ..storage.fences import told
from ..storage.history import history
from ..storage.unfenced import rows as unfenced_rows
from ..storage.vendors import Ledger, Row, ledger_for
from . import aio, runtime, transactions
from .acquiring import TakesLeases
from .identity import Holder, LocalHolder, current_holder, is_in_call
from .keeper import REFUSED, Keeper
from .runtime import clock

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds for finding out what was in the way, after a wait that was in vain.
BRIEFLY = 0.5


class Service(TakesLeases):
    """What an alias of ``FENCEDLOCK`` is in one process."""

    def __init__(self, alias: str) -> None:
        self.config = conf.config(alias)
        self.backend: Backend = conf.backend_class(self.config.backend)(self.config)
        self.keeper = Keeper(self.backend, self.report_losses)
        _living.add(self)

    def forget_after_fork(self) -> None:
        """Own nothing of the parent's."""
        self.backend.forget_after_fork()
        self.keeper.forget_after_fork()

    # Acquiring

    def acquire(
        self,
        request: Request,
        who: LocalHolder | None = None,
        *,
        pattern: str = "",
        max_hold: float | None = None,
        since: float | None = None,
        tells: bool = True,
    ) -> Lease | None:
        """
        Take the lock within the request's time, or again if `who` has it; else None.

        Once it was held for `max_hold` seconds nothing renews it any more. What is entered again
        keeps the bound that it has.

        Args:
            since: When the caller began to wait, on the local clock; without it, now.
            tells: Whether a refusal is logged and sent as a signal: not if the caller tries again.
        """
        who = who or current_holder()
        if lease := self.enter_again(request, who):
            return lease
        self._refuse_to_wait_for_caller(request, who)
        started = clock()
        home = connections[self.config.fence_database]
        if transactions.is_of_test(home):
            request.connection = home
            self._refuse_as_in_production(request, home)
        else:
            request.in_transaction = home.in_atomic_block
        try:
            lease = self._obtain(request, home, started + request.timeout)
            if lease is not None:
                lease.pattern, lease.max_hold = pattern, max_hold
                who.leases[self, lease.name] = lease
                lease.belongs_to(who)
        except FencedLockError:
            raise
        except BaseException:
            # Something struck, maybe between the grant and the note of it.
            if (lease := who.leases.pop((self, request.name), None)) is not None:
                lease.released = True
            self._abandon(request)
            raise
        waited = clock() - (started if since is None else since)
        if lease is None:
            if tells:
                self.tell_refused(request.name, pattern, waited)
            return None
        self._keep(lease)
        history.granted(lease)
        self._signal(signals.lock_acquired, name=lease.name, lease=lease, waited=waited)
        return lease

    def _refuse_as_in_production(self, request: Request, home: BaseDatabaseWrapper) -> None:
        """
        Refuse a lock inside the code's own ``atomic()`` on SQLite, though a test could grant it.

        Outside of a ``TestCase`` the grant is written by another connection, which has to wait for
        that transaction.
        """
        writes = request.fenced or self.backend.records_unfenced
        if (
            home.vendor == "sqlite"
            and writes
            and self.backend.excludes
            and not request.of_another_process
            and transactions.has_own_block(home)
        ):
            raise self.backend.in_the_way(request)

    def tell_refused(self, name: str, pattern: str, waited: float) -> None:
        logger.info(
            "Lock %r (alias %r) wasn't acquired in %.1f s: somebody else has it",
            name,
            self.config.alias,
            waited,
            extra=logs.facts(name=name, alias=self.config.alias, waited=waited),
        )
        self._signal(signals.lock_not_acquired, name=name, pattern=pattern, waited=waited)

    def _keep(self, lease: Lease) -> None:
        try:
            self.keeper.keep(lease)
        except BaseException:
            # Nobody would renew it, nor give it back: the caller doesn't get it.
            self._forget(lease)
            self.keeper.forget(lease)
            self._give_back(lease)
            raise

    def _forget(self, lease: Lease) -> None:
        who = lease.who
        if who is not None and who.leases.get((self, lease.name)) is lease:
            del who.leases[self, lease.name]

    def lease_of(self, name: str, who: LocalHolder) -> Lease | None:
        """The lease of lock `name` that `who` has in this process."""
        lease = who.leases.get((self, name))
        if lease is not None and not lease.is_open():
            # Left behind by a test, with whose transaction it ended, or by the parent process.
            self._forget(lease)
            lease = None
        return lease

    def _refuse_to_wait_for_caller(self, request: Request, who: LocalHolder) -> None:
        """
        Raise if the holder of the lock waits for this very call.

        The context of the call has the lease. A child task that the holder started has it as well,
        and can't be told apart here.
        """
        lease = current_lease(request.name) if request.timeout > 0 else None
        if lease is None or lease._control is not self or lease.lost:
            return
        holder = lease.who
        if holder is None or holder is who or holder.has_ended():
            return
        if holder.is_task() or is_in_call():
            raise LockNotAcquired(
                f"Lock {lease.name!r} is held by the code that called this function by "
                "sync_to_async, so waiting for it might never end. Use the caller's lease, "
                f"current_lease({lease.name!r}), or release it before the call.",
                name=lease.name,
                alias=self.config.alias,
            )

    def enter_again(self, request: Request, who: LocalHolder) -> Lease | None:
        """Return the lease that `who` has already, entered once more; else None."""
        lease = self.lease_of(request.name, who)
        if lease is None:
            return None
        if lease.lost:
            raise lease.loss()
        if request.fenced and not lease.fenced:
            raise LockNotAcquired(
                f"Lock {lease.name!r} is already held here with fenced=False, so it can't be "
                "entered as a fenced one. Take it fenced the first time.",
                name=lease.name,
                alias=self.config.alias,
            )
        # In one go, as far as signals are concerned.
        lease.entries, lease.entered_by = lease.entries + 1, request
        return lease

    def leave_again(self, request: Request) -> None:
        """Undo the entering again of one who was struck, and won't leave: if it was the last."""
        lease = self.lease_of(request.name, current_holder())
        if lease is not None and lease.entered_by is request:
            lease.entries, lease.entered_by = lease.entries - 1, None

    # What a lease asks for

    def verify(self, lease: Lease) -> bool:
        if self.backend.verify(lease):
            return not lease.lost
        self.lose(lease, "the lock service no longer knows this holder")
        return False

    def renew(self, lease: Lease, ttl: Duration | None) -> None:
        if lease.held_too_long:
            self.keeper.end(lease)
            raise lease.loss()
        before = lease.ttl
        if ttl is not None:
            lease.ttl = conf.seconds(ttl, "ttl")
        since = clock()
        try:
            answer = self._renew(lease)
        except BaseException:
            self._leave_open(lease, since, before)
            raise
        self._signal(signals.leases_renewed, leases=[lease], answers=[answer])
        unfenced_rows.renewed(self.backend, [lease], [answer])
        if answer is Renewal.KEPT:
            lease.extend_from(since)
            self.keeper.postpone(lease)
            return
        if answer is Renewal.LOST:
            lease.ttl = before
            self.lose(lease, REFUSED)
            raise lease.loss()
        self._leave_open(lease, since, before)
        raise BackendUnavailable(
            f"The lease of lock {lease.name!r} couldn't be renewed: lock service "
            f"{lease.alias!r} didn't answer. {lease.remaining():.1f} s of it are left.",
            name=lease.name,
            alias=lease.alias,
        )

    def _leave_open(self, lease: Lease, since: float, before: float) -> None:
        """Reckon with a renewal that was asked for at `since` and may have been done, or not."""
        asked, lease.ttl = lease.ttl, before
        # It may have taken effect, with a ttl shorter than the one that was left.
        lease.end_by(since + asked)
        if asked < before:
            # Or it does so later, after the keeper's next renewal.
            lease.extend_from(lease.deadline - asked, asked)
        self.keeper.postpone(lease)

    def atomic(self, lease: Lease, using: str | None) -> contextlib.AbstractContextManager[None]:
        return pinned_atomic(lease, using)

    def release(self, lease: Lease, who: LocalHolder | None = None) -> bool:
        if lease.who is not (who or current_holder()):
            if not lease.wait_until_left():
                raise NotTheHolder(
                    f"Lock {lease.name!r} was acquired by another thread, greenlet or task. Only "
                    "that one may release it until it has ended.",
                    name=lease.name,
                )
            lease.entries = 1
        # None are left of one whose release was put off to the end of a transaction.
        lease.entries = max(0, lease.entries - 1)
        if lease.entries > 0:
            return True
        open_now = [] if lease.lent else transactions.open_connections()
        if open_now:
            self._put_off(lease, open_now)
            return True
        return self._finish(lease)

    def _put_off(self, lease: Lease, open_now: list[BaseDatabaseWrapper]) -> None:
        """
        Release when the caller's transactions have ended.

        The next holder would read what isn't committed yet; and a transaction that wrote under
        the lease pins the fence, so that this very code couldn't take the lock again.
        """
        if not lease.put_off:
            lease.put_off = True
            transactions.when_all_ended(open_now, lambda: self._finish_if_left(lease))

    def _finish_if_left(self, lease: Lease) -> None:
        lease.put_off = False
        if lease.entries <= 0 and lease.is_of_this_process() and not self._finish(lease):
            logger.warning(
                "Lock %r was lost before the transaction under it ended; fenced writes of that "
                "transaction were refused, if somebody else had come",
                lease.name,
                extra=logs.about(lease, held_for=lease.held_for()),
            )

    def _finish(self, lease: Lease) -> bool:
        self._forget(lease)
        self.keeper.drop(lease)
        try:
            kept = self.backend.release(lease)
        except BackendUnavailable:
            lease.released = True
            unfenced_rows.ended(lease)
            raise
        if not kept:
            self.lose(lease, "the lock service no longer knew this holder at the release")
        lease.released = True
        history.released(lease)
        unfenced_rows.ended(lease)
        if lease.lost:
            return False
        self._signal(signals.lock_released, name=lease.name, lease=lease)
        return True

    def abandon(self, lease: Lease) -> None:
        """Release a lease whose holder has ended, and to which nothing refers any more."""
        # In a thread of its own: what collects garbage may be in anything, and have any lock.
        with contextlib.suppress(RuntimeError):
            runtime.start(partial(self._release_abandoned, lease))

    def _release_abandoned(self, lease: Lease) -> None:
        words = (
            f"Lock {lease.name!r} was never released: its holder ({lease.holder}) has ended, and "
            "nothing refers to the lease any more. It is released now."
        )
        logger.warning("%s", words, extra=logs.about(lease, held_for=lease.held_for()))
        try:
            self.release(lease)
        except Exception as exc:
            # Nothing would catch it in this thread.
            logs.left_to_run_out(logger, lease.name, exc, logs.about(lease))
        lease.released = True
        warnings.warn(
            f"{words} Use `with lock({lease.name!r})`, or keep the lease and release it.",
            ResourceWarning,
            stacklevel=1,
        )

    async def in_thread(self, function: Callable[..., T], *args: Any, kind: str = aio.RELEASE) -> T:
        """Do something for a coroutine that waits for it."""
        if await self.is_lent():
            return await sync_to_async(function)(*args)
        return await aio.run(kind, self.config.alias, function, *args)

    async def is_lent(self) -> bool:
        """Whether a test's transaction is on the connection of the thread that runs sync code."""
        return under_test() and await sync_to_async(self._is_lent)()

    async def arelease(self, lease: Lease, who: LocalHolder | None = None) -> bool:
        """See release()."""
        who = who or current_holder()
        if lease.lent:
            return await sync_to_async(self.release)(lease, who)
        return await aio.run(aio.RELEASE, self.config.alias, self.release, lease, who)

    def _is_lent(self) -> bool:
        return transactions.test_connection(self.config.fence_database) is not None

    def drop_all(self) -> None:
        """Release whatever is held, as far as possible. For the end of a test."""
        mine = [lease for lease in current_holder().leases.values() if lease._control is self]
        for lease in {*mine, *self.keeper.leases()}:
            self._forget(lease)
            if not lease.is_open():
                continue
            self.keeper.forget(lease)
            # The test may have taken the service itself away.
            with contextlib.suppress(Exception):
                self._give_back(lease)
        with contextlib.suppress(Exception):
            self.backend.close()

    # Telling

    def holder(self, name: str) -> Holder | None:
        """Who has lock `name` now, by the service's word."""
        return self.backend.holder(name)

    def refusal(
        self, name: str, waited: float, fenced: bool = True, seen: Sequence[Holder] = ()
    ) -> LockNotAcquired:
        """The error that tells who has the lock that wasn't got; `seen` is what `acquire()` saw."""
        try:
            holder = seen[0] if seen else self.holder(name)
        except BackendUnavailable:
            holder = None
        by = f"held by {holder}" if holder else "taken; its holder has just gone, or can't be told"
        if fenced and (holder is None or holder.token is None):
            # Somebody whose grant isn't recorded: it may be what he waits for as well.
            by = self._pinned(name) or by
        return LockNotAcquired(
            f"Lock {name!r} is {by}. Waited {waited:.1f} s for it.",
            name=name,
            alias=self.config.alias,
            holder=holder,
        )

    def _pinned(self, name: str) -> str | None:
        """Tell of an open transaction that keeps a grant from being recorded."""
        using = self.config.fence_database
        if transactions.test_connection(using) is not None:
            return None  # From outside, the test's own transaction would seem to be in the way.

        def look(private: BaseDatabaseWrapper) -> tuple[Ledger, str | None, Row | None]:
            ledger = ledger_for(private)
            return ledger, ledger.pinned_by(private, name), ledger.look(private, name)

        try:
            ledger, blocker, row = query_once(using, BRIEFLY, look)
        except Error:
            return None
        if blocker is None:
            return None
        last = f"; its last holder was {row.holder()}" if row and not row.live else ""
        return (
            f"free, but {ledger.obstacle.format(using=using)}, and the next grant has to wait for "
            f"its end{whose(blocker)}{last}"
        )

    def explain(self, leases: Sequence[Lease]) -> None:
        """Ask the database who has taken these leases away, if anybody has."""
        guessed = [lease for lease in leases if lease.loss_is_guessed]
        if guessed:
            reasons = told(self.config.fence_database, [lease.owner_id for lease in guessed])
            for lease in guessed:
                lease.explain_loss(reasons.get(lease.owner_id))

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
        for lease in leases:
            unfenced_rows.ended(lease)
        try:
            self.explain(leases)
        finally:
            for lease in leases:
                self._report_loss(lease, lease.why_lost)

    def _report_loss(self, lease: Lease, why: str) -> None:
        lease.run_callbacks()
        facts = logs.about(lease, reason=why, held_for=lease.held_for())
        logger.warning("Lost lock %r (alias %r): %s", lease.name, lease.alias, why, extra=facts)
        self._signal(signals.lock_lost, name=lease.name, lease=lease, reason=why)

    def _signal(self, signal: Signal, **facts: object) -> None:
        if signal.receivers:
            signals.send(signal, type(self.backend), alias=self.config.alias, **facts)


_services: dict[str, Service] = {}
#: Those of former settings too, which may have leases out.
_living: weakref.WeakSet[Service] = weakref.WeakSet()
_making = runtime.allocate_lock()


def service(alias: str) -> Service:
    """The service of an alias, made when it is first asked for."""
    found = _services.get(alias)
    if found is None:
        with _making:
            found = _services.get(alias) or Service(alias)
            _services[alias] = found
    return found


def give_back_left_over(since: float) -> None:
    """
    Release every lease that this thread, greenlet or task has acquired since then.

    An exception that is thrown into a block as it begins or ends may skip the release of its lock.
    The lease would then be renewed as long as the process lives.
    """
    who = current_holder()
    for lease in list(who.leases.values()):
        if lease.granted_at < since or lease.put_off or not lease.is_open():
            continue
        lease.entries = 1
        try:
            lease._control.release(lease, who)
        except BackendUnavailable as exc:
            logs.left_to_run_out(logger, lease.name, exc, logs.about(lease))


def drop_leases_of_test(**kwargs: object) -> None:
    """
    Forget what a test left behind, when the runner has emptied the database after it.

    Its leases would go on being renewed, and hold sessions that keep the database from being
    dropped in the end.
    """
    if under_test():
        for each in list(_living):
            each.drop_all()
        writer.forget()


def _forget_settings(*, setting: str, **kwargs: object) -> None:
    # Leases that are out go on with the service that gave them.
    if setting in ("FENCEDLOCK", "DATABASES", "CACHES"):
        _services.clear()


def _forget_after_fork() -> None:
    global _making
    _making = runtime.allocate_lock()
    for each in list(_living):
        each.forget_after_fork()


def tidy_at_exit() -> None:
    """Do what releases have put off: the process ends."""
    runtime.finish()
    for each in list(_living):
        with contextlib.suppress(Error, BackendUnavailable, LeaseLost):
            each.backend.tidy()
            each.backend.close()


setting_changed.connect(_forget_settings, dispatch_uid="django_fencedlock.core.manager")
os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(tidy_at_exit)
