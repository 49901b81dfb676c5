"""Lost leases."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

from ... import signals
from ...backends.interface import Renewal
from ...core.grants import new_claim
from ...core.runtime import clock
from ...exceptions import LeaseLost
from ...lease import Lease, current_lease
from ...ops.force_release import force_release
from ..processes import TIMEOUT, AnotherProcess, AnotherThread, wait_until
from . import acts
from .acts import LONG
from .base import SHORT, Contract, connected, listening


class LossContract(Contract):
    """The lease was lost, and another holder has the lock."""

    def test_a_lost_lease_does_not_hold_the_lock(self, name: str, thread: AnotherThread) -> None:
        former, successor = self.lost_lease(name, thread)
        assert self.is_next(successor.token, former.token)
        assert not former.verify()
        assert former.lost
        assert former.remaining() == 0
        with pytest.raises(LeaseLost):
            former.check()

    def test_a_former_holder_frees_nothing(self, name: str, thread: AnotherThread) -> None:
        former, successor = self.lost_lease(name, thread)
        assert former.release() is False
        assert successor.verify()
        holder = self.lock(name).holder()
        assert holder is not None
        assert holder.owner_id == successor.owner_id
        assert not self.is_free(name)

    def test_a_former_holder_renews_nothing(self, name: str, thread: AnotherThread) -> None:
        former, successor = self.lost_lease(name, thread)
        with pytest.raises(LeaseLost) as caught:
            former.renew()
        assert (caught.value.name, caught.value.token) == (name, former.token)
        assert former.lost
        assert successor.verify()

    @pytest.mark.parametrize("waits", [True, False], ids=["waits", "tries"])
    def test_a_lease_is_lost_to_an_unfenced_holder_that_has_come_and_gone(
        self, name: str, thread: AnotherThread, waits: bool
    ) -> None:
        former = self.take(name, ttl=SHORT)
        self.interrupt_holder(former)
        unfenced = self.lock(name, fenced=False)
        if waits:
            assert thread.call(unfenced.acquire, blocking_timeout=TIMEOUT)
        else:
            wait_until(lambda: thread.call(unfenced.acquire, blocking=False), "the lock to be free")
        successor = thread.call(current_lease, name)
        assert successor is not None
        assert thread.call(successor.release)
        backend = self.service.backend
        assert not backend.verify(former.grant)
        assert backend.renew([former.grant]) == [Renewal.LOST]
        assert not backend.release(former.grant)
        assert self.is_free(name)

    def test_the_keeper_notices_the_loss_and_reports_it_once(
        self, name: str, thread: AnotherThread
    ) -> None:
        called: list[Lease] = []
        heard: list[str] = []
        with listening(signals.lock_lost, name, "lost", heard):
            former = self.take(name, ttl=SHORT)
            former.on_lost(called.append)
            self.interrupt_holder(former)
            thread.call(self.take_when_free, name)
            self.wake_holder(former)
            wait_until(lambda: heard, "the loss to be noticed")
            assert not former.verify()
            assert former.lost
            former.release()
        assert called == [former]
        assert heard == ["lost"]

    @pytest.mark.parametrize("code", ["on_lost", "lock_lost", "leases_renewed"])
    def test_slow_code_of_the_user_delays_no_renewal_and_no_loss(
        self, name: str, code: str
    ) -> None:
        began, go_on = threading.Event(), threading.Event()
        called: list[Lease] = []

        def take_long(*args: Any, **facts: Any) -> None:
            about = facts.get("leases", [facts.get("lease", *args)])
            if any(lease.name == name for lease in about) and not began.is_set():
                began.set()
                go_on.wait(3 * TIMEOUT)

        with contextlib.ExitStack() as stack:
            if code != "on_lost":
                stack.enter_context(connected(getattr(signals, code), take_long))
            stack.callback(go_on.set)
            first = self.take(name, ttl=SHORT)
            first.on_lost(take_long)
            if code != "leases_renewed":
                force_release(name, by="the boss", backend=self.alias)
            assert began.wait(TIMEOUT)
            kept, lost = (self.take(f"{name}:{each}", ttl=SHORT) for each in ("kept", "lost"))
            lost.on_lost(called.append)
            granted_until = kept.deadline
            wait_until(lambda: kept.deadline > granted_until + SHORT, "renewals of another lease")
            force_release(lost.name, by="the boss", backend=self.alias)
            wait_until(lambda: lost.lost, "the loss of another lease")
            with pytest.raises(LeaseLost):
                lost.check()
            assert kept.verify()
            assert not kept.lost
            go_on.set()
            wait_until(lambda: called == [lost], "the callback for the other lease")

    def test_a_callback_that_is_added_after_the_loss_is_called_at_once(
        self, name: str, thread: AnotherThread
    ) -> None:
        former, _ = self.lost_lease(name, thread)
        former.verify()
        called: list[Lease] = []
        former.on_lost(called.append)
        assert called == [former]

    def test_a_clean_block_whose_lease_was_lost_raises(
        self, name: str, thread: AnotherThread
    ) -> None:
        with pytest.raises(LeaseLost) as caught, self.lock(name, ttl=SHORT) as lease:
            self.interrupt_holder(lease)
            thread.call(self.take_when_free, name)
        assert f"token {lease.token}" in str(caught.value)
        assert not self.is_free(name)

    def test_a_loss_does_not_hide_the_bodys_own_error(
        self, name: str, thread: AnotherThread
    ) -> None:
        with pytest.raises(ZeroDivisionError), self.lock(name, ttl=SHORT) as lease:
            self.interrupt_holder(lease)
            thread.call(self.take_when_free, name)
            raise ZeroDivisionError

    def test_an_async_block_whose_lease_was_lost_raises(
        self, name: str, thread: AnotherThread
    ) -> None:
        async def main() -> None:
            async with self.lock(name, ttl=SHORT) as lease:
                self.interrupt_holder(lease)
                await asyncio.wrap_future(thread.start(self.take_when_free, name))

        with pytest.raises(LeaseLost):
            asyncio.run(main())

    def test_a_lost_lease_is_not_entered_again(self, name: str, thread: AnotherThread) -> None:
        former, _ = self.lost_lease(name, thread)
        former.verify()
        with pytest.raises(LeaseLost):
            self.lock(name).acquire(blocking=False)

    def test_a_lease_held_for_too_long_frees_its_lock_and_no_other(
        self, name: str, thread: AnotherThread
    ) -> None:
        beside = self.take(f"{name}:beside", ttl=SHORT)
        lease = self.take_bounded(name)
        lease.renew()
        wait_until(lambda: lease.lost, "the lease to be lost")
        assert lease.renewed_until < clock()
        successor = thread.call(self.take_when_free, name)
        with pytest.raises(LeaseLost, match=r"held for longer than max_hold=0\.2 s"):
            lease.check()
        assert lease.release() is False
        assert successor.verify()
        assert beside.verify()

    def test_a_lease_held_for_too_long_is_lost_when_it_is_renewed(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = self.take_bounded(name)
        wait_until(lambda: lease.held_too_long, "max_hold to be over")
        with pytest.raises(LeaseLost, match=r"held for longer than max_hold=0\.2 s"):
            lease.renew(ttl=LONG)
        assert lease.lost
        assert self.is_next(thread.call(self.take_when_free, name).token, lease.token)

    def take_bounded(self, name: str) -> Lease:
        """Acquire a free lock with a max_hold of 0.2 seconds."""
        lease = self.service.acquire(new_claim(name, SHORT), max_hold=0.2)
        assert lease is not None
        return lease

    def test_a_paused_process_loses_its_lease_and_notices(
        self, name: str, process: AnotherProcess
    ) -> None:
        token = process.call(acts.hold, self.alias, name, 0.0, SHORT)
        process.pause()
        successor = self.take_when_free(name)
        assert self.is_next(successor.token, token)
        process.resume()
        process.call(acts.wait_for_the_loss, name)
        assert process.call(acts.let_go, name) is False
        assert successor.verify()
        assert not self.is_free(name)
        process.healthy = True

    def test_a_killed_process_is_succeeded(self, name: str, process: AnotherProcess) -> None:
        token = process.call(acts.hold, self.alias, name, 0.0, SHORT)
        process.kill()
        assert self.is_next(self.take_when_free(name).token, token)


class ExpiryContract(Contract):
    """For backends with ``supports_ttl``: leases expire."""

    def test_another_holder_acquires_the_lock_only_after_the_lease_expired(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = self.take(name, ttl=SHORT)
        self.pause_holder(lease)
        thread.call(self.take_when_free, name)
        # The service counts from a later moment than the holder, and its clock may run faster.
        assert lease.remaining() < 0.05

    def test_a_paused_holder_keeps_a_lock_that_no_other_holder_acquired(self, name: str) -> None:
        with self.lock(name, ttl=SHORT) as lease:
            self.pause_holder(lease)
            time.sleep(SHORT + 0.2)
            assert lease.expired
            assert not lease.lost
            lease.renew(ttl=LONG)
            lease.check()
            assert lease.verify()
            assert self.recorded(name) == (lease.token, lease.owner_id)
            assert not self.is_free(name)

    def test_a_question_does_not_make_an_expired_lease_lost(self, name: str) -> None:
        with self.lock(name, ttl=SHORT) as lease:
            self.pause_holder(lease)
            time.sleep(SHORT + 0.2)
            lease.verify()
            assert not lease.lost
            lease.renew()

    def test_a_block_whose_lease_expired_ends_without_an_error_if_the_lock_is_free(
        self, name: str
    ) -> None:
        with self.lock(name, ttl=SHORT) as lease:
            self.pause_holder(lease)
            time.sleep(SHORT + 0.2)
        assert not lease.lost
        assert self.is_free(name)

    def test_the_keeper_renews_an_expired_lease_if_the_lock_is_free(
        self, name: str, thread: AnotherThread
    ) -> None:
        with self.lock(name, ttl=1) as lease:
            self.pause_holder(lease)
            time.sleep(1.2)
            assert lease.expired
            self.wake_holder(lease)
            wait_until(lambda: not lease.expired, "the lease to be renewed")
            assert not lease.lost
            lease.renew(ttl=LONG)
            assert not self.is_free_for(thread, name)
