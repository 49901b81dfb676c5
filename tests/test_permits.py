"""Permits: locks with ``limit=``, on the database, PostgreSQL and Redis."""

import asyncio
import contextlib
import io
import json
import random
import threading
import time
import weakref

import pytest
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.db import transaction

from django_fencedlock import (
    LeaseLost,
    LockNotAcquired,
    LockRequired,
    StaleFence,
    conf,
    current_lease,
    lock,
)
from django_fencedlock.backends.interface import Grant, Granted, Held, Wait
from django_fencedlock.core import aio
from django_fencedlock.core import permits as permits_module
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.identity import LocalHolder
from django_fencedlock.core.manager import Service, service
from django_fencedlock.core.names import MAX_PERMITS, permit_name
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.ops.force_release import force_release
from django_fencedlock.ops.trim import trim
from django_fencedlock.storage.dialect import Ledger
from django_fencedlock.test.contract import acts
from django_fencedlock.test.processes import TIMEOUT, Processes, another_thread, wait_until
from tests.backends import POSTGRES, REDIS
from tests.models import Account, Invoice
from tests.stub_backend import StubBackend, StubService
from tests.threads import at_once, beside, elsewhere, without_threads

DATABASES = ["default", "postgres"]
pytestmark = pytest.mark.django_db(transaction=True, databases=DATABASES)


@pytest.fixture
def on(settings, keep_connections, redis_server, postgres):
    """Use a backend whose fences are in PostgreSQL, or in SQLite."""

    def use(name):
        redis_server.empty()
        terms = {
            "sqlite": {},
            "database": {"FENCE_DATABASE": "postgres"},
            "postgres": {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"},
            "redis": {
                "BACKEND": REDIS,
                "LOCATION": redis_server.url,
                "FENCE_DATABASE": "postgres",
            },
        }
        settings.FENCEDLOCK = {"default": terms[name]}
        return service("default")

    return use


@pytest.fixture
def processes():
    with contextlib.closing(Processes()) as processes:
        yield processes


def try_permit(name="gpu", limit=1, **terms):
    """Acquire and release a permit; return its name, or None."""
    lease = lock(name, limit=limit, **terms).acquire(blocking=False)
    if lease is None:
        return None
    lease.release()
    return lease.name


@contextlib.contextmanager
def all_held(name="gpu", limit=2, **terms):
    """Hold all permits in threads; yield the pairs of thread and lease."""
    with contextlib.ExitStack() as stack:
        threads = [stack.enter_context(another_thread()) for _ in range(limit)]
        take = lock(name, limit=limit, **terms).acquire
        held = [(each, each.call(take, blocking=False)) for each in threads]
        assert all(lease for _, lease in held)
        yield held
        for thread, lease in held:
            thread.call(lease.release)


class TestArguments:
    @pytest.mark.parametrize(
        ("limit", "error", "message"),
        [
            (0, ValueError, "The limit of lock 'gpu' is 0. It must be from 1 to 1000."),
            (-1, ValueError, "The limit of lock 'gpu' is -1. It must be from 1 to 1000."),
            (1001, ValueError, "The limit of lock 'gpu' is 1001. It must be from 1 to 1000."),
            (
                True,
                TypeError,
                "The limit of lock 'gpu' is True. It must be a whole number from 1 to 1000.",
            ),
            (
                2.0,
                TypeError,
                "The limit of lock 'gpu' is 2.0. It must be a whole number from 1 to 1000.",
            ),
            (
                "4",
                TypeError,
                "The limit of lock 'gpu' is '4'. It must be a whole number from 1 to 1000.",
            ),
        ],
    )
    def test_a_wrong_limit_is_an_error_at_once(self, limit, error, message):
        with pytest.raises(error) as caught:
            lock("gpu", limit=limit)
        assert str(caught.value) == message

    @pytest.mark.parametrize("found", [0, True, None, "3", 1001])
    def test_a_callable_that_returns_a_wrong_limit_is_an_error_at_each_acquire(self, found):
        def workers():
            return found

        wanted = lock("gpu", limit=workers)
        with pytest.raises((TypeError, ValueError), match=r"workers\(\) returned"), wanted:
            pytest.fail("entered")
        with pytest.raises((TypeError, ValueError), match=r"workers\(\) returned"):
            asyncio.run(wanted.aacquire())

    def test_a_callable_is_called_at_each_acquire(self):
        limits = iter([1, 2])
        wanted = lock("gpu", limit=lambda: next(limits))
        with elsewhere_held("gpu", 1):
            assert wanted.acquire(blocking=False) is None
            assert wanted.acquire(blocking=False).name == permit_name("gpu", 2)

    def test_a_name_that_is_too_long_for_a_permit_is_an_error(self):
        lock("x" * 186, limit=2)
        with pytest.raises(ValueError, match="187 characters; with limit=, 186 are allowed"):
            lock("x" * 187, limit=2)

    @pytest.mark.parametrize("name", ["gpu [permit 2]", "gpu [permit 0]", "gpu [permit 12345]"])
    def test_the_name_of_a_permit_is_no_lock_name(self, name):
        with pytest.raises(ValueError, match=r"Acquire a permit by lock\('gpu', limit=\.\.\.\)"):
            lock(name)

    @pytest.mark.parametrize("name", ["gpu [permit]", "gpu [permit 2] x", "gpu[permit 2]"])
    def test_other_names_are_lock_names(self, name):
        assert lock(name).name == name

    def test_repr(self):
        assert repr(lock("gpu", limit=4)) == "lock('gpu', limit=4, backend='default')"

    def test_a_model_lock_takes_no_limit(self):
        with pytest.raises(TypeError, match="limit"):
            Invoice.fencing.lock(pk=42, limit=2)


@contextlib.contextmanager
def elsewhere_held(name, limit):
    with another_thread() as thread:
        lease = thread.call(lock(name, limit=limit).acquire, blocking=False)
        yield lease
        thread.call(lease.release)


@pytest.mark.usefixtures("backend")
class TestAcquiring:
    def test_a_callers_own_permit_is_entered_again_also_with_another_limit(self):
        with lock("gpu", limit=2) as lease, lock("gpu", limit=1) as inner:
            assert inner is lease
            assert lock("gpu", limit=7).acquire() is lease
            lease.release()
        assert lease.released

    def test_the_current_lease_is_found_by_the_permit(self):
        with lock("gpu", limit=2) as lease:
            assert current_lease("gpu") is None
            assert current_lease(lease.name) is lease
            assert current_lease() is lease

    def test_a_limit_of_one_is_not_the_lock_without_a_limit(self):
        with elsewhere_held("gpu", 1):
            assert lock("gpu", limit=1).acquire(blocking=False) is None
            with lock("gpu", blocking_timeout=0) as lease:
                assert lease.name == "gpu"

    def test_without_a_permit_the_block_of_an_optional_one_runs(self):
        with all_held("gpu", 2):
            with lock("gpu", limit=2, required=False, blocking_timeout=0) as lease:
                assert lease is None

            async def main():
                async with lock("gpu", limit=2, required=False, blocking_timeout=0.1) as lease:
                    assert lease is None

            asyncio.run(main())

    def test_a_refusal_names_the_holders_and_the_time(self):
        with all_held("gpu", 2) as held:
            with (
                pytest.raises(LockNotAcquired) as caught,
                lock("gpu", limit=2, blocking_timeout=0.2),
            ):
                pytest.fail("entered")
            holders = {str(lease.holder).partition(",")[2].rpartition(",")[0] for _, lease in held}
        text = str(caught.value)
        assert text.startswith("All 2 permits of lock 'gpu' are held, by ")
        assert all(each in text for each in holders)
        assert "Waited 0." in text or "Waited 1." in text
        error = caught.value
        assert (error.name, error.alias) == ("gpu", "default")
        owners = {lease.name: lease.owner_id for _, lease in held}
        assert error.holder.owner_id in owners.values()
        assert {name: holder.owner_id for name, holder in error.holders.items()} == owners

    def test_an_async_refusal_names_the_holders(self):
        async def main():
            async with lock("gpu", limit=2, blocking_timeout=0.1):
                pytest.fail("entered")

        with all_held("gpu", 2), pytest.raises(LockNotAcquired, match="All 2 permits of lock"):
            asyncio.run(main())

    def test_the_holder_is_none_if_a_permit_is_free(self):
        assert lock("gpu", limit=2).holder() is None
        with elsewhere_held("gpu", 2):
            assert lock("gpu", limit=2).holder() is None
            assert lock("gpu", limit=3).holder() is None
        with all_held("gpu", 2) as held:
            holder = lock("gpu", limit=2).holder()
            assert holder.owner_id in {lease.owner_id for _, lease in held}
            assert asyncio.run(lock("gpu", limit=2).aholder()) is not None
            assert lock("gpu", limit=3).holder() is None

    def test_a_decorated_function_runs_under_a_permit(self):
        @lock("gpu:{number}", limit=2)
        def compute(number):
            return current_lease().name

        with elsewhere_held("gpu:7", 2) as lease:
            assert compute(7) in {permit_name("gpu:7", n) for n in (1, 2)} - {lease.name}
        assert compute(8).startswith("gpu:8 [permit ")

    def test_a_decorated_coroutine_function_runs_under_a_permit(self):
        @lock("gpu", limit=2)
        async def compute():
            return current_lease().name

        assert asyncio.run(compute()).startswith("gpu [permit ")

    def test_a_cancelled_wait_ends_soon(self):
        cancel = threading.Event()
        with all_held("gpu", 2):
            waiting = beside(lock("gpu", limit=2).acquire, blocking_timeout=None, cancel=cancel)
            time.sleep(0.2)
            cancelled = time.monotonic()
            cancel.set()
            assert waiting.result(TIMEOUT) is None
        assert time.monotonic() - cancelled < 5

    def test_a_cancelled_coroutine_leaves_no_permit(self):
        async def main():
            waiting = asyncio.create_task(lock("gpu", limit=2).aacquire(blocking_timeout=None))
            await asyncio.sleep(0.3)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        with all_held("gpu", 2):
            asyncio.run(main())
        wait_until(lambda: aio._threads.may_wait._value == aio.WAITERS, "the thread to end")
        wait_until(lambda: not service("default").grants.look_up(names("gpu", 2)), "no holder")

    def test_more_coroutines_than_threads_get_their_permits(self):
        inside = []

        async def work():
            async with lock("gpu", limit=3, blocking_timeout=TIMEOUT):
                inside.append(1)
                assert len(inside) <= 3
                await asyncio.sleep(0.001)
                inside.pop()
                return 1

        async def main():
            return await asyncio.gather(*(work() for _ in range(40)))

        assert asyncio.run(main()) == [1] * 40

    def test_waiting_for_the_permit_of_the_calling_coroutine_is_an_error(self):
        @sync_to_async
        def call(required):
            with lock("gpu", limit=1, required=required, blocking_timeout=TIMEOUT) as lease:
                return lease

        async def main():
            async with lock("gpu", limit=1):
                assert await call(False) is None
                with pytest.raises(LockNotAcquired, match="held by the code that called"):
                    await call(True)

        began = time.monotonic()
        asyncio.run(main())
        assert time.monotonic() - began < TIMEOUT / 2

    def test_the_call_of_a_coroutine_waits_for_another_holders_permit(self):
        @sync_to_async
        def call():
            with lock("gpu", limit=2, blocking_timeout=TIMEOUT) as lease:
                return lease.name

        async def main(thread, lease):
            async with lock("gpu", limit=2):
                called = asyncio.create_task(call())
                await asyncio.sleep(0.3)
                assert not called.done()
                thread.call(lease.release)
                assert await called == lease.name

        with another_thread() as thread:
            lease = thread.call(lock("gpu", limit=2).acquire, blocking=False)
            asyncio.run(main(thread, lease))

    def test_an_interrupt_leaves_no_permit(self, monkeypatch):
        backend = service("default").backend
        acquire = type(backend).acquire

        def interrupted(self, claim, wait):
            acquire(self, claim, wait)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(type(backend), "acquire", interrupted)
            with pytest.raises(KeyboardInterrupt):
                lock("gpu", limit=3).acquire()
        assert not service("default").grants.look_up(names("gpu", 3))

    def test_a_fenced_row_needs_the_lock_and_no_permit(self):
        using = service("default").config.fence_database
        row = Invoice.objects.using(using).create(pk=42)
        name = row.fencing.name()
        with lock(name, limit=2) as lease:
            with pytest.raises(LockRequired) as caught:
                row.save(using=using)
            with pytest.raises(LockRequired, match="a permit covers no row"):
                row.save(using=using, lease=lease)
        assert str(caught.value).endswith(
            f"needs lock {name!r}; held here: {lease.name!r} (a permit covers no row). "
            "Acquire it: with Invoice.fencing.lock(pk=42):"
        )


def test_a_permit_whose_fence_is_locked_is_passed_over(on):
    on("database")
    locked = try_permit("gpu", 2)
    fences = Fence.objects.using("postgres").filter(name=locked)
    with transaction.atomic(using="postgres"):
        list(fences.select_for_update())
        with another_thread() as thread:
            lease = thread.call(lock("gpu", limit=2).acquire, blocking_timeout=10)
            assert lease.name != locked
            refused = elsewhere(refusal_of, "gpu", 2)
            thread.call(lease.release)
    assert refused.startswith("1 of 2 permits of lock 'gpu' are held, by ")
    assert f"The next grant of {locked!r} has to wait for " in refused


def refusal_of(name, limit):
    with pytest.raises(LockNotAcquired) as caught, lock(name, limit=limit, blocking_timeout=0.3):
        pytest.fail("entered")
    return str(caught.value)


def names(name, limit):
    return [permit_name(name, number + 1) for number in range(limit)]


class TestCost:
    @pytest.mark.parametrize("name", ["database", "postgres"])
    def test_a_free_permit_takes_the_statements_of_a_lock(self, on, postgres, name):
        on(name)
        counts = []
        for terms in ({}, {"limit": 4}):
            lock("warm", **terms).acquire().release()
            with postgres.statements() as seen:
                for _ in range(5):
                    lock("x", **terms).acquire().release()
            counts.append(sum(seen.values()))
        assert counts[0] == counts[1] > 0

    def test_a_free_permit_takes_the_looks_and_claims_of_a_lock_on_sqlite(self, on, monkeypatch):
        on("sqlite")
        counts = []
        for call in ("claim", "look", "look_at", "newest", "clear"):
            monkeypatch.setattr(Ledger, call, counting(getattr(Ledger, call), call, counts))
        found = []
        for terms in ({}, {"limit": 4}):
            counts.clear()
            lock("x", **terms).acquire().release()
            found.append(list(counts))
        assert found[0] == found[1] == ["claim", "clear"]

    def test_a_free_permit_takes_the_requests_of_a_lock(self, on, redis_server):
        on("redis")
        counts = []
        for terms in ({}, {"limit": 4}):
            lock("warm", **terms).acquire().release()
            with redis_server.monitor() as seen:
                lock("x", **terms).acquire().release()
            counts.append([each.name for each in seen if not each.lua])
        assert counts[0] == counts[1] == ["EVALSHA", "EVALSHA"]

    def test_the_permit_that_was_released_last_is_tried_first(self, on, postgres):
        on("database")
        with elsewhere_held("gpu", 1):
            own = try_permit("gpu", 100)
            with postgres.statements() as seen:
                assert {try_permit("gpu", 100) for _ in range(10)} == {own}
        assert sum(seen.values()) == 20

    def test_released_permits_of_many_names_are_forgotten(self, on, monkeypatch):
        on("sqlite")
        monkeypatch.setattr(permits_module, "MAX_NAMES", 3)
        for number in range(10):
            assert try_permit(f"gpu:{number}", 2)
        assert len(service("default").permits._released) <= 3

    def test_a_permit_above_a_lowered_limit_is_not_tried(self, on):
        on("sqlite")
        control = service("default")
        control.permits._released["gpu"] = 7
        assert try_permit("gpu", 1) == permit_name("gpu", 1)


def counting(function, name, counts):
    def call(*args, **kwargs):
        counts.append(name)
        return function(*args, **kwargs)

    return call


class Counted:
    """Counts the threads that are inside, and their largest number."""

    def __init__(self):
        self.inside, self.most, self._mutex = 0, 0, threading.Lock()

    def pass_through(self, seconds):
        with self._mutex:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(seconds)
        with self._mutex:
            self.inside -= 1


@pytest.mark.parametrize("name", ["sqlite", "database", "postgres", "redis"])
def test_a_limit_that_is_raised_and_lowered_under_load(on, name):
    on(name)
    limit, counted, ends = [2], Counted(), threading.Event()
    asked = dict.fromkeys(range(7), 2)

    def work(number):
        def ask():
            asked[number] = limit[0]
            return asked[number]

        while not ends.is_set():
            with lock("gpu", limit=ask, blocking_timeout=None, ttl=20):
                counted.pass_through(random.uniform(0.05, 0.15))
            # Else this thread acquires its permit again before one that polls.
            time.sleep(random.uniform(0, 0.05))

    workers = [beside(work, number) for number in asked]
    try:
        for now in (2, 5, 1, 3):
            former, limit[0] = limit[0], now
            # Lowering takes nothing from those that hold, or are about to.
            wait_until(lambda most=now: max(asked.values()) <= most, "those above it to leave")
            counted.most = counted.inside
            time.sleep(0.3)
            assert counted.most <= now, (former, now)
            wait_until(lambda most=now: counted.most == most, "as many holders as permits")
    finally:
        ends.set()
        for each in workers:
            each.result(TIMEOUT)


# Called in other processes


def write_late(pk, lock_name):
    """Write a row within the lease's transaction; return the name of the error."""
    lease = acts._held[lock_name]
    try:
        with lease.atomic():
            Account.objects.using(lease.database).filter(pk=pk).update(name="late")
    except (StaleFence, LeaseLost) as exc:
        return type(exc).__name__
    return ""


@pytest.mark.parametrize("name", ["database", "redis"])
def test_the_late_writes_of_stopped_holders_are_rejected(on, name, processes):
    on(name)
    row = Account.objects.using("postgres").create(name="first")
    terms = {"ttl": 4, "limit": 4}
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(processes.borrow()) for _ in range(4)]
        for each in first:
            each.call(acts.hold, "default", "gpu", **terms)
        for each in first[:2]:
            each.pause()
        others = [stack.enter_context(processes.borrow()) for _ in range(2)]
        for each in others:
            each.call(acts.hold, "default", "gpu", wait=TIMEOUT, **terms)
        for each in first[:2]:
            each.resume()
            assert each.call(write_late, row.pk, "gpu") in ("StaleFence", "LeaseLost")
        row.refresh_from_db(using="postgres")
        assert row.name == "first"
        for each in (*first[2:], *others):
            assert each.call(write_late, row.pk, "gpu") == ""
            assert each.call(acts.let_go, "gpu")


@pytest.mark.parametrize("name", ["sqlite", "database", "postgres", "redis"])
def test_a_waiter_gets_a_permit_soon_after_a_release(on, name):
    on(name)
    waits = []
    for _ in range(3):
        with all_held("gpu", 4) as held:
            waiting = beside(timed_acquire)
            time.sleep(0.5)
            assert not waiting.done()
            thread, lease = random.choice(held)
            released = time.monotonic()
            thread.call(lease.release)
            waits.append(waiting.result(TIMEOUT) - released)
    # On PostgreSQL, a waiter looks at the other permits once a second.
    assert max(waits) < 5


def timed_acquire():
    with lock("gpu", limit=4, blocking_timeout=TIMEOUT):
        return time.monotonic()


@pytest.mark.parametrize("name", ["sqlite", "database", "postgres", "redis"])
def test_a_permit_of_a_killed_process_is_free_and_no_other(on, name, processes):
    on(name)
    with processes.borrow() as killed, elsewhere_held("gpu", 2) as kept:
        killed.call(acts.hold, "default", "gpu", limit=2)
        killed.kill()
        with lock("gpu", limit=2, blocking_timeout=10) as lease:
            assert lease.name != kept.name
            assert kept.verify()


class AnyBackend(StubBackend):
    """Finds a free one of several locks by itself."""

    supports_any = True
    asked: list = []

    def acquire_any(self, claims, wait):
        self.asked.append(claims)
        while True:
            for claim in claims:
                answer = self.acquire(claim, Wait())
                if isinstance(answer, Granted):
                    return claim, answer
            wait.refused(answer)
            if not wait.left:
                return answer
            time.sleep(0.01)


class TestServiceThatFindsAPermit:
    @pytest.fixture
    def control(self, monkeypatch):
        monkeypatch.setattr(StubBackend, "service", StubService())
        monkeypatch.setattr(AnyBackend, "asked", [])
        control = Service("default", AnyBackend(conf.config("default")))
        without_threads(control.keeper)
        yield control
        control.keeper.doubts.clear()

    @staticmethod
    def acquire(control, limit=3, seconds=0.0, **terms):
        claim = new_claim("gpu", 30, **terms)._replace(permits=limit)
        return control.permits.acquire(claim, Wait(seconds))

    def test_it_is_asked_only_if_the_first_permit_is_held(self, control, monkeypatch):
        monkeypatch.setattr(random, "randint", lambda low, high: 2)
        assert self.acquire(control)[0].name == permit_name("gpu", 2)
        assert not control.backend.asked
        grants = [self.acquire(control)[0] for _ in range(2)]
        assert {each.name for each in grants} == {permit_name("gpu", 1), permit_name("gpu", 3)}
        assert [len(each) for each in control.backend.asked] == [3, 3]
        assert isinstance(self.acquire(control), Held)

    def test_each_grant_is_recorded(self, control):
        grants = [self.acquire(control)[0] for _ in range(3)]
        for each in grants:
            assert Fence.objects.get(name=each.name).owner == each.owner

    def test_a_waiter_gets_a_dead_holders_permit(self, control, monkeypatch):
        monkeypatch.setattr("django_fencedlock.core.grants.is_process_gone", lambda process: True)
        for _ in range(5):
            assert not isinstance(self.acquire(control, 1), Held)

    def test_the_refusal_is_noted_once(self, control):
        told = []
        self.acquire(control, 1)
        claim = new_claim("gpu", 30)._replace(permits=1)
        wait = Wait(0.1, told.append)
        assert isinstance(control.permits.acquire(claim, wait), Held)
        assert len(told) == 1
        assert wait.held.owner

    def test_without_an_answer_every_permit_is_doubtful(self, control, monkeypatch):
        self.acquire(control, 1)

        def fail(self, claims, wait):
            raise BackendUnavailable("no answer", name="gpu", alias="default")

        monkeypatch.setattr(AnyBackend, "acquire_any", fail)
        monkeypatch.setattr(random, "randint", lambda low, high: 1)
        with pytest.raises(BackendUnavailable):
            self.acquire(control, 3)
        ((asked, _),) = control.keeper.doubts.values()
        assert set(asked) == {*names("gpu", 3)}

    def test_an_interrupted_acquire_of_any_permit_is_released_in_one_request(
        self, control, monkeypatch
    ):
        self.acquire(control, 1)
        released = []

        def interrupt(self, claims, wait):
            assert isinstance(self.acquire(claims[1], Wait()), Granted)
            raise KeyboardInterrupt

        def release_all(self, grants):
            released.append([each.name for each in grants])
            return [self.release(each) for each in grants]

        monkeypatch.setattr(AnyBackend, "acquire_any", interrupt)
        monkeypatch.setattr(AnyBackend, "release_all", release_all)
        monkeypatch.setattr(random, "randint", lambda low, high: 1)
        with pytest.raises(KeyboardInterrupt):
            control.acquire(new_claim("gpu", 30)._replace(permits=3))
        assert released == [names("gpu", 3)]
        assert not control.backend.holders([permit_name("gpu", 2)])
        assert len(control.keeper.doubts) == 1


def test_a_wait_does_not_keep_the_holder_alive(on, monkeypatch):
    control = on("sqlite")
    monkeypatch.setattr(random, "randint", lambda low, high: 1)
    first, wait, who = new_claim("gpu", 30)._replace(permits=1), Wait(), LocalHolder()
    held = control.permits.acquire(first, Wait())
    alive = weakref.ref(who)
    second = new_claim("gpu", 30)._replace(permits=2)
    answer = control.permits.acquire(second, wait, who)
    del who
    # A call of asyncio.to_thread() has ended when nothing refers to its holder.
    assert alive() is None
    for grant, _ in (held, answer):
        control.grants.release(grant)


def test_one_owners_doubts_of_two_permits_are_both_released(on):
    control = on("sqlite")
    without_threads(control.keeper)
    control.keeper.doubt(Grant(permit_name("gpu", 1), "owner"))
    control.keeper.doubt(Grant(permit_name("gpu", 2), "owner"))
    assert list(control.keeper.doubts["owner"][0]) == names("gpu", 2)
    control.keeper.doubts.clear()


@pytest.mark.django_db
def test_in_a_testcase_a_refusal_comes_at_once():
    claim = new_claim("gpu", 30)._replace(permits=1)
    held = service("default").permits.acquire(claim, Wait())
    assert not isinstance(held, Held)
    began = time.monotonic()
    again = new_claim("gpu", 30)._replace(permits=1)
    assert isinstance(service("default").permits.acquire(again, Wait(TIMEOUT)), Held)
    assert time.monotonic() - began < 5
    service("default").grants.release(held[0])


class TestTrim:
    @pytest.fixture(params=["sqlite", "database", "postgres", "redis"])
    def using(self, on, request):
        return on(request.param).config.fence_database

    def fences(self, using):
        return dict(Fence.objects.using(using).values_list("name", "owner"))

    def test_the_fences_of_free_permits_above_the_limit_are_raised(self, using):
        with all_held("gpu", 4):
            before = self.fences(using)
        assert len(before) == 4
        done = trim("gpu", 2, by="the boss")
        assert done.raised == [permit_name("gpu", 3), permit_name("gpu", 4)]
        assert done.is_done
        after = self.fences(using)
        assert [after[each] for each in done.raised] == ["", ""]
        assert [after[each] for each in names("gpu", 2)] == [
            before[each] for each in names("gpu", 2)
        ]
        # Nothing is left to raise.
        assert trim("gpu", 2, by="the boss").raised == []
        # And a limit that is raised again uses them.
        with all_held("gpu", 4) as held:
            assert len({lease.name for _, lease in held}) == 4

    def test_the_permits_that_are_held_are_listed_and_kept(self, using):
        with all_held("gpu", 3) as held:
            done = trim("gpu", 1, by="the boss")
            assert {each.name for each in done.held} == {*names("gpu", 3)[1:]}
            assert not done.is_done
            assert all(lease.verify() for _, lease in held)
            for each in done.held:
                assert force_release(each.name, by="the boss", owner_id=each.owner_id).done
            assert trim("gpu", 1, by="the boss").is_done
            for _, lease in held:
                lease.why_lost = lease.why_lost or "released by force"

    def test_the_command_says_how_to_release_what_is_held(self, using):
        with all_held("gpu", 2):
            out = io.StringIO()
            with pytest.raises(SystemExit):
                call_command("fencedlock", "trim", "gpu", "1", stdout=out)
        lines = out.getvalue().splitlines()
        assert lines[0] == "Lock 'gpu': 0 of the permits above 1 had a fence to raise."
        assert lines[1].startswith("'gpu [permit 2]' is held by ")
        assert lines[1].endswith("manage.py fencedlock release 'gpu [permit 2]'")
        out = io.StringIO()
        call_command("fencedlock", "trim", "gpu", "1", "--format", "json", stdout=out)
        assert json.loads(out.getvalue())["raised"] == ["gpu [permit 2]"]

    @pytest.mark.parametrize("limit", ["-1", "1001"])
    def test_a_wrong_limit_is_an_error(self, limit):
        with pytest.raises(ValueError, match="it must be from 0 to 1000"):
            trim("gpu", int(limit), by="the boss")


def test_an_expired_holder_above_the_limit_can_no_longer_write(on):
    on("database")
    control = service("default")
    with all_held("gpu", 2, ttl=2) as held:
        _, paused = next(each for each in held if each[1].name == permit_name("gpu", 2))
        control.keeper.forget(paused)
        wait_until(lambda: paused.expired, "the end of the lease")
        # The server counts from a little later on.
        time.sleep(0.5)
        done = trim("gpu", 1, by="the boss")
        assert done.raised == [paused.name]
        with pytest.raises((StaleFence, LeaseLost), match="the boss"), paused.atomic():
            pytest.fail("entered")


def test_a_fence_that_a_transaction_locks_is_reported(on):
    on("database")
    with all_held("gpu", 2):
        pass
    fences = Fence.objects.using("postgres").filter(name=permit_name("gpu", 2))
    with transaction.atomic(using="postgres"):
        list(fences.select_for_update())
        done = elsewhere(trim, "gpu", 1, by="the boss")
    assert list(done.locked) == [permit_name("gpu", 2)]
    assert not done.is_done


@pytest.mark.usefixtures("backend")
def test_force_release_and_show_accept_a_permit():
    with another_thread() as thread:
        lease = thread.call(lock("gpu", limit=1).acquire)
        out = io.StringIO()
        call_command("fencedlock", "show", lease.name, stdout=out)
        assert lease.owner_id in out.getvalue()
        call_command("fencedlock", "release", lease.name, "--yes", stdout=out)
        assert "was released by force" in out.getvalue() or "was taken from" in out.getvalue()


@pytest.mark.usefixtures("backend")
def test_a_permit_has_its_own_row_of_the_registry():
    using = service("default").config.fence_database
    with lock("gpu", limit=MAX_PERMITS) as lease:
        assert HeldLock.objects.using(using).get().name == lease.name


@pytest.mark.usefixtures("backend")
def test_a_burst_of_threads_gets_all_permits():
    def take(barrier):
        with lock("gpu", limit=6, blocking_timeout=TIMEOUT) as lease:
            barrier.wait(TIMEOUT)
            return lease.name

    barrier = threading.Barrier(6)
    assert len({*at_once([lambda: take(barrier)] * 6)}) == 6
