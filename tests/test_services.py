"""What comes between a lock service and the caller's code: pauses, slow answers and none."""

import asyncio
import threading
from concurrent.futures import Future, wait
from functools import partial
from types import SimpleNamespace

import pytest

from django_fencedlock import LeaseLost, conf, lock
from django_fencedlock.backends import database
from django_fencedlock.backends.database import DatabaseBackend
from django_fencedlock.backends.interface import Granted, Held, Renewal, Wait
from django_fencedlock.core import grants, manager, runtime
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.identity import current_holder
from django_fencedlock.core.keeper import Keeper
from django_fencedlock.core.manager import service
from django_fencedlock.core.runtime import Worker
from django_fencedlock.exceptions import BackendUnavailable
from tests.clocks import Clock
from tests.failing import raising
from tests.servers.process import wait_until
from tests.threads import beside, elsewhere, without_threads

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_row_is_the_holders_from_before_it_was_asked_for(monkeypatch):
    clock, backend = Clock(), service("default").backend
    ledger = type(backend._ledger)
    claim = ledger.claim

    def slow(*args):
        clock.now += 4
        return claim(*args)

    monkeypatch.setattr(database, "clock", clock)
    monkeypatch.setattr(ledger, "claim", slow)
    grant = backend.acquire(new_claim("x", 30), Wait())
    assert (grant.since, clock.now) == (1000, 1004)


class TestAThreadThatCannotBeStarted:
    @pytest.fixture
    def no_threads(self, monkeypatch):
        keeper = Keeper(service("default").backend, service("default").lose)
        monkeypatch.setattr(service("default"), "keeper", keeper)
        monkeypatch.setattr(runtime, "start", raising(RuntimeError("can't start new thread")))
        return monkeypatch.undo

    def test_a_lock_that_would_not_be_renewed_is_released(self, no_threads):
        with pytest.raises(RuntimeError, match="new thread"):
            lock("x").acquire()
        assert lock("x").holder() is None

    def test_the_next_one_tries_again(self, no_threads):
        keeper = service("default").keeper
        with pytest.raises(RuntimeError):
            lock("x").acquire()
        no_threads()
        service("default").keeper = keeper
        with lock("x", ttl=6) as lease:
            deadline = lease.deadline
            wait_until(lambda: lease.deadline > deadline, "a renewal")

    def test_a_lock_is_released_all_the_same(self, no_threads, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "start", lambda target: threading._start_new_thread(target, ()))
            lease = lock("x").acquire()
        assert lease.release()
        assert lock("x").holder() is None

    def test_no_lock_fails_if_its_history_cannot_be_written(self, no_threads, writing, monkeypatch):
        without_threads(service("default").keeper)
        monkeypatch.setattr(writing._worker, "start", partial(Worker.start, writing._worker))
        with lock("x"):
            pass
        started = []
        monkeypatch.setattr(runtime, "start", started.append)
        with lock("x"):
            pass
        assert writing._worker._run in [target.func for target in started]


class Scripted(DatabaseBackend):
    def __init__(self, config, clock):
        super().__init__(config)
        self.clock = clock
        self.took = {"acquire": 0.0, "renew": 0.0}
        self.renewal = Renewal.KEPT
        self.free = True
        self.fails = False
        self.calls = []

    def acquire(self, claim, wait):
        self.calls.append("acquire")
        since = self.clock()
        self.clock.now += self.took["acquire"]
        return Granted(7, since) if self.free else Held()

    def renew(self, leases):
        self.calls.append("renew")
        self.clock.now += self.took["renew"]
        return [self.renewal for _ in leases]

    def release(self, lease):
        self.calls.append("release")
        if self.fails:
            raise BackendUnavailable("no answer", name=lease.name, alias="default")
        return True


@pytest.fixture
def now():
    return Clock()


@pytest.fixture
def scripted(now):
    found = manager.Service("default", Scripted(conf.config("default"), now), now)
    without_threads(found.keeper)
    return found


class TestASlowAnswer:
    def take(self, service, ttl=30.0):
        return service.acquire(new_claim("x", ttl))

    @pytest.fixture
    def lease(self, scripted):
        return self.take(scripted)

    def test_the_ttl_counts_from_before_the_request(self, scripted, now):
        scripted.backend.took["acquire"] = 4
        assert self.take(scripted).remaining() == 26

    def test_what_ran_out_meanwhile_is_renewed_and_counts_from_then(self, scripted, now):
        scripted.backend.took = {"acquire": 31, "renew": 4}
        assert self.take(scripted).remaining() == 26
        assert scripted.backend.calls == ["acquire", "renew"]

    @pytest.mark.parametrize(
        ("answer", "took"), [(Renewal.LOST, 0), (Renewal.UNKNOWN, 0), (Renewal.KEPT, 31)]
    )
    def test_an_expired_lock_that_is_not_renewed_in_time_is_released(self, scripted, answer, took):
        scripted.backend.took = {"acquire": 31, "renew": took}
        scripted.backend.renewal = answer
        assert self.take(scripted) is None
        assert scripted.backend.calls == ["acquire", "renew", "release"]
        assert not current_holder().leases

    def test_a_renewal_by_the_holder_counts_from_before_the_request(self, scripted, now, lease):
        now.now += 10
        scripted.backend.took["renew"] = 4
        lease.renew()
        assert lease.remaining() == 26

    def test_a_renewal_without_an_answer_changes_nothing(self, scripted, now, lease):
        scripted.backend.renewal = Renewal.UNKNOWN
        now.now += 10
        with pytest.raises(BackendUnavailable, match=r"20\.0 s of it are left"):
            lease.renew(ttl=60)
        assert (lease.ttl, lease.remaining()) == (30, 20)

    @pytest.mark.parametrize(("ttl", "left"), [(60, 20), (5, 5)])
    def test_an_interrupted_renewal_may_have_been_done(
        self, scripted, now, monkeypatch, ttl, left, lease
    ):

        monkeypatch.setattr(scripted.backend, "renew", raising(KeyboardInterrupt))
        now.now += 10
        with pytest.raises(KeyboardInterrupt):
            lease.renew(ttl=ttl)
        assert lease.remaining() == left

    def test_a_renewal_that_is_refused_is_a_loss_for_everybody(self, scripted, now, lease):
        scripted.backend.renewal = Renewal.LOST
        with pytest.raises(LeaseLost):
            lease.renew(ttl=60)
        assert lease.lost
        with pytest.raises(LeaseLost):
            self.take(scripted)

    def test_a_release_without_an_answer_ends_the_lease_all_the_same(self, scripted, now, lease):
        scripted.backend.fails = True
        with pytest.raises(BackendUnavailable):
            lease.release()
        assert lease.released
        assert lease.remaining() == 0
        with pytest.raises(LeaseLost, match="it was released"):
            lease.check()

    @pytest.mark.parametrize("forked", [False, True])
    def test_nothing_is_remembered_of_what_was_released_or_is_the_parents(
        self, scripted, forked, lease
    ):
        if forked:
            scripted.after_fork()
        else:
            lease.release()
            assert not current_holder().leases
        assert not scripted.keeper._due

    def test_a_release_waits_for_a_renewal_that_is_under_way(self, scripted, now, lease):
        backend = scripted.backend
        under_way, go_on = threading.Event(), threading.Event()
        renew = backend.renew

        def slow(leases):
            under_way.set()
            assert go_on.wait(20)
            return renew(leases)

        backend.renew = slow
        now.now += 10
        keeping = beside(scripted.keeper.tick)
        assert under_way.wait(20)
        releasing = beside(scripted.release, [lease], lease.who)
        # It may not have come as far as that, and then this says less; it never fails for nothing.
        wait([releasing], 0.1)
        assert "release" not in backend.calls
        go_on.set()
        keeping.result(20)
        releasing.result(20)
        # The other way about, the renewal would have taken the lock again, for nobody.
        assert backend.calls == ["acquire", "renew", "release"]

    def test_a_waiter_that_is_cancelled_while_it_polls_gives_up(self, scripted, now, monkeypatch):
        wait, backend = Wait(10.0), scripted.backend
        backend.free = False
        monkeypatch.setattr(grants, "time", SimpleNamespace(sleep=lambda seconds: wait.cancel()))
        assert scripted.acquire(new_claim("x", 30.0), wait) is None
        assert backend.calls == ["acquire", "acquire"]

    def test_a_shorter_ttl_without_an_answer_may_have_been_granted(self, scripted, now, lease):
        scripted.backend.renewal = Renewal.UNKNOWN
        scripted.backend.took["renew"] = 4
        with pytest.raises(BackendUnavailable):
            lease.renew(ttl=5)
        # Where it was, others get the lock then.
        assert (lease.ttl, lease.remaining()) == (5, 1)
        # The keeper comes at once, and as often as a ttl wants that may yet take effect.
        scripted.backend.renewal = Renewal.KEPT
        scripted.keeper.tick()
        assert (lease.ttl, lease.remaining()) == (5, 1)

    def test_a_shorter_ttl_without_an_answer_ends_nothing_sooner_than_it_would(
        self, scripted, now, lease
    ):
        now.now += 10
        scripted.backend.renewal = Renewal.UNKNOWN
        with pytest.raises(BackendUnavailable):
            lease.renew(ttl=5)
        assert lease.remaining() == 5


def test_a_grant_of_a_cancelled_coroutine_is_released():
    found, acquired = service("default"), Future()

    async def main():
        handing = asyncio.ensure_future(lock("x")._hand_over(acquired, Wait()))
        await asyncio.sleep(0)
        acquired.set_result(elsewhere(found.acquire, new_claim("x", 30)))
        handing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handing

    asyncio.run(main())
    wait_until(lambda: found.holder("x") is None, "the lock to be given back")
