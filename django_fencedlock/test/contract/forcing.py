"""Forced release of a lock whose holder is alive."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ... import signals
from ...backends.interface import Renewal
from ...core.runtime import clock
from ...exceptions import LeaseLost, LockNotAcquired, ReleaseBlocked, StaleFence
from ...lease import Lease
from ...ops.force_release import Outcome, Release, force_release, held_by
from ...storage.tables import HeldLock
from ..processes import AnotherProcess, AnotherThread, wait_until
from . import acts
from .base import Contract, connected, listening

#: Seconds within which a forced release fails if the fence can't be raised.
BOUND = 10.0


class ForcedReleaseContract(Contract):
    """The lock was released by force, and its holder may not have noticed yet."""

    def force(self, name: str, **terms: Any) -> Release:
        return force_release(name, by="the boss", backend=self.alias, **terms)

    def notice(self, lease: Lease) -> None:
        """Renew, so that the holder notices."""
        with pytest.raises(LeaseLost, match="released by force, by the boss, at 2"):
            lease.renew()

    @property
    def left_to_holder(self) -> bool:
        """Whether only the process that holds a lock can release it."""
        return not self.service.backend.supports_ttl

    def test_writes_of_the_former_holder_are_rejected_before_it_notices(self, name: str) -> None:
        lease = self.take(name)
        done = self.force(name)
        assert done.outcome is Outcome.FREED
        assert done.token == lease.token + 1
        assert self.recorded(name) == (done.token, "")
        assert not lease.lost
        with pytest.raises(StaleFence, match="the boss"), lease.atomic(self.database):
            pass
        self.notice(lease)
        assert lease.lost

    def test_a_renewal_does_not_undo_it(self, name: str, thread: AnotherThread) -> None:
        lease = self.take(name)
        self.force(name)
        assert self.service.backend.renew([lease.grant]) == [Renewal.LOST]
        assert not lease.lost
        assert self.is_free_for(thread, name)
        assert self.service.backend.renew([lease.grant]) == [Renewal.LOST]
        assert lease.release() is False
        assert self.is_free_for(thread, name)

    def test_the_keeper_reports_the_author_to_the_holder(self, name: str) -> None:
        reasons: list[str] = []

        def receive(name: str, reason: str, **kwargs: Any) -> None:
            reasons.append(reason)

        lost: list[Lease] = []
        with connected(signals.lock_lost, receive):
            lease = self.take(name, ttl=1.0)
            lease.on_lost(lost.append)
            self.force(name)
            wait_until(lambda: reasons, "the loss to be noticed")
        assert lost == [lease]
        assert "by the boss" in reasons[0]
        with pytest.raises(LeaseLost, match="by the boss"):
            lease.check()
        assert self.is_free(name)

    def test_the_end_of_the_block_reports_the_author(self, name: str) -> None:
        with pytest.raises(LeaseLost, match="by the boss"), self.lock(name):
            self.force(name)
        assert self.is_free(name)

    def test_verify_reports_the_author(self, name: str) -> None:
        lease = self.take(name)
        self.force(name)
        assert not lease.verify()
        with pytest.raises(LeaseLost, match="by the boss"):
            lease.check()

    def test_the_waiter_acquires_it_next(self, name: str, thread: AnotherThread) -> None:
        lease = self.take(name)
        waiting = thread.start(self.take_when_free, name)
        wait_until(lambda: self.sees_waiter(name), "a waiter")
        token = self.force(name).token
        successor = waiting.result()
        assert token is not None
        assert successor.token > token
        assert self.recorded(name) == (successor.token, successor.owner_id)
        with pytest.raises(LeaseLost):
            lease.renew()
        assert successor.verify()
        thread.call(successor.release)

    def sees_waiter(self, name: str) -> bool:
        """Return whether there is a waiter; true if the service can't count them."""
        held = self.service.backend.holders([name])[name]
        return held.waiting is None or held.waiting > 0

    def test_a_lock_that_is_not_fenced(self, name: str, thread: AnotherThread) -> None:
        lease = self.take(name, fenced=False)
        found = held_by(name, self.alias)
        assert found is not None
        assert not found.fenced
        done = self.force(name)
        if self.left_to_holder:
            # It has no row that could inform its holder.
            assert done.outcome is Outcome.NEEDS_END_OF_SESSION
            assert lease.verify()
            assert lease.release()
            return
        assert done.outcome is Outcome.FREED
        assert done.token is None
        assert "isn't fenced" in str(done)
        assert self.recorded(name) is None
        assert not lease.verify()
        assert self.is_free_for(thread, name)

    def test_a_free_lock(self, name: str) -> None:
        with self.lock(name):
            pass
        self.service.keeper.clear()
        before = self.recorded(name)
        assert self.force(name).outcome is Outcome.NOT_HELD
        assert self.recorded(name) == before

    def test_a_lock_that_another_holder_has_acquired_is_not_released(
        self, name: str, thread: AnotherThread
    ) -> None:
        former = self.take(name)
        former.release()
        successor = thread.call(self.take, name)
        before = self.recorded(name)
        done = self.force(name, owner_id=former.owner_id)
        assert done.outcome is Outcome.CHANGED_HANDS
        assert done.holder is not None
        assert done.holder.owner_id == successor.owner_id
        assert self.recorded(name) == before
        assert successor.verify()
        successor_ends(thread, successor)

    def test_a_lock_that_another_holder_acquires_meanwhile_is_not_released(
        self, name: str, thread: AnotherThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        former = self.take(name)
        release = self.service.backend.release
        taken: list[Lease] = []

        def after_another_came(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.undo()
            former.release()
            taken.append(thread.call(self.take, name))
            return release(*args, **kwargs)

        monkeypatch.setattr(self.service.backend, "release", after_another_came)
        assert self.force(name).outcome is Outcome.CHANGED_HANDS
        (successor,) = taken
        assert successor.verify()
        assert self.recorded(name) == (successor.token, successor.owner_id)
        successor_ends(thread, successor)

    def test_a_second_call_changes_nothing(self, name: str) -> None:
        heard: list[str] = []
        lease = self.take(name)
        with listening(signals.lock_force_released, name, "released", heard):
            token = self.force(name).token
            again = self.force(name, owner_id=lease.owner_id)
        assert heard == ["released"]
        assert self.recorded(name) == (token, "")
        assert again.outcome is Outcome.NOT_HELD
        self.notice(lease)

    def test_the_signal_and_the_log_report_it(
        self, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard: list[dict[str, Any]] = []
        lost: list[str] = []

        def receive(**facts: Any) -> None:
            heard.append(facts)

        with (
            connected(signals.lock_force_released, receive),
            listening(signals.lock_lost, name, "lost", lost),
            caplog.at_level(logging.WARNING, "django_fencedlock.ops.force_release"),
        ):
            lease = self.take(name)
            self.force(name)
            self.notice(lease)
        (facts,) = heard
        assert facts["sender"] is type(self.service.backend)
        assert (facts["name"], facts["alias"], facts["by"]) == (name, self.alias, "the boss")
        assert facts["token"] == lease.token + 1
        assert facts["holder"].owner_id == lease.owner_id
        assert facts["freed"] is True
        assert lost == ["lost"]
        (record,) = [each for each in caplog.records if each.name.endswith(".force_release")]
        assert record.levelno == logging.WARNING
        assert "by the boss" in record.getMessage()
        assert record.lock_by == "the boss"  # type: ignore[attr-defined]
        assert record.lock_name == name  # type: ignore[attr-defined]

    def test_an_open_transaction_under_the_lease_blocks_it_and_is_named(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = thread.call(self.take, name)
        block = lease.atomic(self.database)
        thread.call(block.__enter__)
        started = clock()
        try:
            with pytest.raises(ReleaseBlocked) as caught:
                self.force(name)
        finally:
            thread.call(block.__exit__, None, None, None)
        assert clock() - started < BOUND + self.slack
        assert caught.value.holder.owner_id == lease.owner_id  # type: ignore[union-attr]
        assert "can't be raised" in str(caught.value)
        if not self.one_writer:
            assert caught.value.blocker is not None
            assert "session" in caught.value.blocker or "transaction" in caught.value.blocker
        assert lease.verify()
        assert self.recorded(name) == (lease.token, lease.owner_id)
        assert self.force(name).done
        assert not thread.call(lease.verify)
        thread.call(lease.release)

    def test_a_stopped_process_notices_when_it_continues(
        self, name: str, process: AnotherProcess, thread: AnotherThread
    ) -> None:
        process.call(acts.hold, self.alias, name, 0.0, 3.0)
        found = held_by(name, self.alias)
        assert found is not None
        process.pause()
        done = self.force(name, owner_id=found.owner_id)
        if self.left_to_holder:
            assert done.outcome is Outcome.LEFT_TO_HOLDER
        else:
            assert done.outcome is Outcome.FREED
            assert self.is_free_for(thread, name)
        process.resume()
        process.call(acts.wait_for_the_loss, name)
        assert "by the boss" in process.call(acts.why_lost, name)
        assert process.call(acts.let_go, name) is False
        assert self.is_free_for(thread, name)
        process.healthy = True

    def test_the_registry_row_is_deleted_too(self, name: str) -> None:
        lease = self.take(name)
        self.force(name)
        self.notice(lease)
        assert not HeldLock.objects.using(self.database).filter(name=name).exists()

    def test_the_former_holder_may_acquire_it_again(self, name: str) -> None:
        lease = self.take(name)
        self.force(name)
        self.notice(lease)
        lease.release()
        again = self.take(name)
        assert again.token > lease.token + 1
        assert self.service.backend.renew([again.grant]) == [Renewal.KEPT]
        with pytest.raises(LockNotAcquired):
            self.refused(name)
        assert again.release()

    def refused(self, name: str) -> None:
        raise self.service.grants.refusal(name, 0.0)


def successor_ends(thread: AnotherThread, successor: Lease) -> None:
    assert thread.call(successor.release)
