"""The lease itself: its clock, its states and the leases of a context."""

import contextvars
import pickle
import time
from datetime import UTC, datetime, timedelta

import pytest

from django_fencedlock import LeaseLost, current_lease
from django_fencedlock.backends.interface import Grant
from django_fencedlock.core.identity import new_owner
from django_fencedlock.core.runtime import clock
from django_fencedlock.lease import Lease
from django_fencedlock.lease_context import enter, leave


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def make(now):
    def make(name="invoice:42"):
        grant = Grant(name, new_owner().id, 30.0, token=7)
        return Lease(grant, None, since=now[0], clock=lambda: now[0])

    return make


@pytest.fixture
def lease(make):
    return make()


def test_check_says_why_an_expired_lease_is_no_good(now, lease):
    now[0] += 31.5
    with pytest.raises(LeaseLost, match=r"ttl of 30 s ended 1\.5 s ago.*verify\(\)"):
        lease.check()


def test_check_says_why_a_lost_lease_was_lost(lease):
    lease.mark_lost("another holder came")
    assert lease.lost
    assert lease.remaining() == 0
    with pytest.raises(LeaseLost, match=r"invoice:42.*token 7.*another holder came") as caught:
        lease.check()
    assert (caught.value.name, caught.value.token) == ("invoice:42", 7)


def test_the_holder_of_a_lease_is_described_without_its_service(now):
    owner, began = new_owner(), datetime.now(UTC)
    lease = Lease(Grant("x", owner.id, 30.0, 7, identity=owner.identity), None, since=now[0])
    lease._clock = lambda: now[0] + 20
    holder = lease.holder
    assert (holder.owner_id, str(holder), holder.alias) == (owner.id, str(owner), "default")
    assert (holder.token, holder.session_pid) == (7, None)
    assert holder.expires_at - holder.acquired_at == timedelta(seconds=30)
    assert -1 < (began - holder.acquired_at).total_seconds() - 20 < 1


def test_callbacks_run_once_and_in_order(make):
    seen, lease = [], make()
    lease.on_lost(lambda lost: seen.append(("first", lost)))
    lease.on_lost(lambda lost: seen.append(("second", lost)))
    assert lease.mark_lost("gone")
    lease.run_callbacks()
    assert not lease.mark_lost("again")
    lease.run_callbacks()
    assert seen == [("first", lease), ("second", lease)]


def test_a_callback_that_fails_stops_no_other(make):
    seen, lease = [], make()
    lease.on_lost(lambda lost: 1 / 0)
    lease.on_lost(seen.append)
    lease.mark_lost("gone")
    lease.run_callbacks()
    assert seen == [lease]


def test_a_callback_that_is_taken_back_at_that_moment_is_not_missed(make):
    seen, lease = [], make()

    class Callbacks(list):
        def pop(self, *place):
            lease.off_lost(seen.append)
            return super().pop(*place)

    lease._callbacks = Callbacks()
    lease.on_lost(seen.append)
    assert lease.mark_lost("gone")
    lease.run_callbacks()
    assert seen == []


def test_the_body_is_interrupted_before_any_callback_runs(make):
    seen, lease = [], make()
    lease.on_lost(lambda lost: seen.append("callback"))
    lease.interrupt_by(lambda lost: seen.append("interrupt"))
    lease.interrupt_by(taken_back := lambda lost: 1 / 0)
    lease.off_lost(taken_back)
    lease.mark_lost("gone")
    assert seen == ["interrupt"]
    lease.interrupt_by(lambda lost: seen.append("late interrupt"))
    lease.run_callbacks()
    assert seen == ["interrupt", "late interrupt", "callback"]


def test_a_lease_refuses_to_be_pickled_and_says_what_to_pass(make):
    with pytest.raises(TypeError, match=r"lease\.token"):
        pickle.dumps(make())


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
def test_the_clock_counts_a_machines_sleep_and_is_never_set():
    assert clock.func is time.clock_gettime
    assert clock.args == (time.CLOCK_BOOTTIME,)


class TestCurrentLease:
    @pytest.mark.parametrize("out_of_turn", [False, True])
    def test_the_innermost_lease_is_found_first(self, make, out_of_turn):
        outer, inner = make(name="outer"), make(name="inner")
        enter(outer)
        enter(inner)
        assert current_lease() is inner
        assert current_lease("outer") is outer
        assert current_lease("other") is None
        gone, left = (outer, inner) if out_of_turn else (inner, outer)
        leave(gone)
        assert current_lease(gone.name) is None
        assert current_lease() is left

    def test_a_lease_entered_twice_is_left_twice(self, lease):
        enter(lease)
        enter(lease)
        leave(lease)
        assert current_lease() is lease
        leave(lease)
        assert current_lease() is None

    def test_a_copied_context_sees_it_until_it_is_released(self, lease):
        enter(lease)
        copy = contextvars.copy_context()
        assert copy.run(current_lease) is lease
        lease.released = True
        assert copy.run(current_lease) is None

    def test_a_lost_lease_is_still_found(self, lease):
        """A write under it has to be refused as stale, not passed as without_lock."""

        enter(lease)
        lease.mark_lost("gone")
        assert current_lease() is lease

    def test_leases_that_another_context_released_do_not_pile_up(self, make):
        def body():
            kept = make(name="kept")
            enter(kept)
            for _ in range(1000):
                lease = make()
                enter(lease)
                lease.released = True
            assert current_lease() is kept
            held = [each for each in contextvars.copy_context().values() if kept in each]
            assert [len(each) for each in held] < [10]

        contextvars.Context().run(body)

    def test_the_leases_of_a_context_are_seldom_looked_at(self, make, monkeypatch):
        looks, is_open = [], Lease.is_open
        monkeypatch.setattr(Lease, "is_open", lambda lease: looks.append(1) or is_open(lease))
        kept = []

        def body():
            for number in range(1000):
                kept.append(make(name=f"many:{number}"))
                enter(kept[-1])
            assert len(looks) < 2000

        contextvars.Context().run(body)
