"""`lock_all()`: several names at once, all of them or none."""

import asyncio
import contextlib
import gc
import itertools
import random
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from django_fencedlock import (
    InsideTransaction,
    LeaseLost,
    LeaseSet,
    LockNotAcquired,
    NotTheHolder,
    StaleFence,
    Unfenced,
    WrongDatabase,
    current_lease,
    lock,
    lock_all,
    signals,
)
from django_fencedlock.core import aio, keeper
from django_fencedlock.core.manager import service
from django_fencedlock.lease import Lease
from django_fencedlock.lease_context import held_names
from django_fencedlock.storage.fences import Fences
from django_fencedlock.test import (
    assert_locked,
    assert_not_locked,
    disable_locking,
    hold_lock,
    lose_lease,
)
from django_fencedlock.test.contract.base import connected
from tests.backends import BACKENDS
from tests.failing import unavailable
from tests.models import Account, Invoice
from tests.servers.process import wait_until
from tests.stub_backend import StubBackend, StubService
from tests.threads import beside

databases = ["default", "postgres"]
pytestmark = pytest.mark.django_db(transaction=True, databases=databases)

#: In the order of their bytes.
NAMES = ["a", "b", "c", "d", "é"]


@pytest.fixture
def other():
    with ThreadPoolExecutor(1) as thread:
        yield thread
        thread.submit(connections.close_all).result()


def held_elsewhere(thread, *names):
    return thread.submit(lock_all(names).acquire, blocking=False).result()


def find_leases(name):
    """Return this process's leases, of all threads."""
    found = [each for each in gc.get_objects() if type(each) is Lease]
    return [lease for lease in found if lease.name == name]


def assert_free(*names):
    for name in names:
        assert_not_locked(name)


class TestNames:
    @pytest.mark.parametrize(
        "given",
        [("é", "b", "a", "d", "c", "b"), (NAMES[::-1],), (set(NAMES),), (iter(NAMES * 2),)],
    )
    def test_they_are_sorted_by_bytes_and_each_is_locked_once(self, given):
        with lock_all(*given) as leases:
            assert list(leases) == NAMES
            assert [lease.name for lease in leases.values()] == NAMES
            assert len({lease.owner_id for lease in leases.values()}) == len(NAMES)
        assert_free(*NAMES)

    def test_a_string_is_one_name(self):
        assert list(lock_all("abc").acquire()) == ["abc"]

    @pytest.mark.parametrize(
        ("call", "error", "text"),
        [
            (lambda: lock_all(), ValueError, "lock_all() was given no names, so it would lock"),
            (lambda: lock_all([]), ValueError, "given no names"),
            (lambda: lock_all(x for x in ()), ValueError, "given no names"),
            (lambda: lock_all("a", ""), ValueError, "can't be empty"),
            (lambda: lock_all(b"abc"), TypeError, "A lock name is a str, not bytes"),
            (lambda: lock_all(5), TypeError, "A lock name is a str, not int"),
            (lambda: lock_all(["a"], "b"), TypeError, "A lock name is a str, not list"),
            (lambda: lock_all(lock("a"), "b"), TypeError, "A lock name is a str, not Lock"),
            (lambda: lock_all(map(str, range(1001))), ValueError, "given 1001 names; 1000 are"),
            (lambda: lock_all("a", timeout=3), TypeError, "lock_all() has no argument timeout."),
            (lambda: lock_all("a", ttl=0), ValueError, "ttl is 0"),
            (lambda: lock_all("a").acquire(cancel=3), TypeError, "cancel is 3"),
            (
                lambda: lock_all("a").acquire(blocking=False, blocking_timeout=3),
                ValueError,
                "either blocking=False or blocking_timeout=",
            ),
        ],
    )
    def test_what_is_wrong_is_said(self, call, error, text):
        with pytest.raises(error, match=re.escape(text)):
            call()

    def test_as_text(self):
        assert repr(lock_all("b", "a")) == "lock_all('a', 'b', backend='default')"
        with lock_all("b", "a") as leases:
            assert re.match(
                r"<LeaseSet \[<Lease 'a' token 1 held, .*<Lease 'b' token", repr(leases)
            )


class TestAcquiring:
    def test_acquire_returns_the_leases_and_release_releases_them_all(self, other):
        leases = lock_all("a", "b", ttl=7).acquire()
        assert isinstance(leases, LeaseSet)
        assert {lease.ttl for lease in leases.values()} == {7}
        assert 6 < leases.remaining() <= 7
        assert not leases.lost
        assert leases.verify()
        leases.check()
        assert current_lease("a") is leases["a"]
        assert current_lease("b") is leases["b"]
        assert held_elsewhere(other, "b") is None
        leases.renew(20)
        assert 19 < leases.remaining() <= 20
        assert leases.release() is True
        assert held_names() == ()
        assert not leases.verify()
        with pytest.raises(LeaseLost, match="it was released"):
            leases.check()
        assert leases.release() is False
        assert_free("a", "b")

    def test_a_block_may_end_what_acquire_began(self):
        with lock_all("a", "b").acquire():
            assert_locked("b")
        assert_free("a", "b")
        with lock_all("a") as leases, pytest.raises(RuntimeError, match="too early"):
            leases.__enter__()

    def test_without_waiting_it_leaves_nothing(self, other):
        held_elsewhere(other, "b")
        assert lock_all("a", "b", "c").acquire(blocking=False) is None
        assert held_names() == ()
        assert_free("a", "c")

    def test_a_block_without_the_locks_if_they_are_not_required(self, other):
        locks = lock_all("a", "b", required=False, blocking_timeout=0)
        held = held_elsewhere(other, "b")
        with locks as leases:
            assert leases is None
            assert_not_locked("a")
        other.submit(held.release).result()
        with locks as leases:
            assert list(leases) == ["a", "b"]

    def test_the_error_names_the_holders_of_all_names_that_are_taken(self, other):
        with ThreadPoolExecutor(1) as third:
            held = held_elsewhere(other, "b")
            more = held_elsewhere(third, "d", "é")
            with (
                pytest.raises(LockNotAcquired) as caught,
                lock_all(NAMES, blocking_timeout=0.05),
            ):
                pytest.fail("the block was entered")
            assert (caught.value.name, caught.value.alias) == ("b", "default")
            assert list(caught.value.holders) == ["b", "d", "é"]
            owners = [holder.owner_id for holder in caught.value.holders.values()]
            assert owners == [held["b"].owner_id, more["d"].owner_id, more["é"].owner_id]
            assert str(caught.value.holder) == str(held["b"].holder)
            text = str(caught.value)
            assert text.startswith("3 locks of a set of 5 are held: 'b' by ")
            assert f"'é' by {more['é'].holder}" in text
            assert re.search(r"Waited 0\.\d s for them\.$", text)
            third.submit(more.release).result()
            third.submit(connections.close_all).result()
        assert_free("a", "c", "d")
        with pytest.raises(LockNotAcquired, match=r"^Lock 'b' is held by .*thread") as caught:
            lock_all(NAMES, blocking_timeout=0).__enter__()
        assert list(caught.value.holders) == ["b"]

    def test_the_error_names_four_holders_at_most(self, other):
        names = [f"name{number}" for number in range(8)]
        held_elsewhere(other, *names)
        with pytest.raises(LockNotAcquired, match=r"'name3' by [^;]*; 4 more\.") as caught:
            lock_all(names, blocking_timeout=0).__enter__()
        assert list(caught.value.holders) == names

    def test_it_waits_for_one_after_the_other(self, other):
        held = held_elsewhere(other, "b", "d")
        with ThreadPoolExecutor(1) as waiting:
            waiter = waiting.submit(lock_all("a", "b", "c", "d", blocking_timeout=30).acquire)
            # While it waits for "b", it has nothing above.
            wait_until(lambda: lock("a").holder() is not None, "a held by the waiter")
            assert_not_locked("c")
            other.submit(held["b"].release).result()
            wait_until(lambda: lock("c").holder() is not None, "c held by the waiter")
            assert not waiter.done()
            other.submit(held["d"].release).result()
            leases = waiter.result(20)
            waiting.submit(leases.release).result()
            waiting.submit(connections.close_all).result()
        assert_free("a", "b", "c", "d")

    def test_one_deadline_for_all(self, other):
        held_elsewhere(other, "b", "c", "d")
        began = time.monotonic()
        assert lock_all(NAMES).acquire(blocking_timeout=1.5) is None
        # Less than two deadlines.
        assert 1.5 <= time.monotonic() - began < 3
        assert_free("a", "é")

    def test_cancel_ends_the_wait(self, other):
        held_elsewhere(other, "b")
        cancel = threading.Event()
        cancel.set()
        assert lock_all("a", "b").acquire(blocking_timeout=60, cancel=cancel) is None
        assert_free("a")

    def test_events_for_each_lease(self, other):
        heard = []

        def receive(signal, name, **facts):
            heard.append((signal, name))

        with (
            connected(signals.lock_acquired, receive),
            connected(signals.lock_released, receive),
            connected(signals.lock_not_acquired, receive),
            lock_all("a", "b"),
        ):
            assert held_elsewhere(other, "b") is None
        names = {signals.lock_acquired: "+", signals.lock_released: "-"}
        shown = [f"{names.get(signal, '!')}{name}" for signal, name in heard]
        assert shown == ["+a", "+b", "!b", "-a", "-b"]

    def test_an_unfenced_set(self):
        with lock_all("a", "b", fenced=False) as leases:
            assert not leases["a"].fenced
            with pytest.raises(Unfenced), leases.atomic():
                pass

    def test_the_lock_of_a_dead_process_is_evicted(self, monkeypatch, other):
        held = held_elsewhere(other, "a", "b")
        monkeypatch.setattr("django_fencedlock.core.grants.is_process_gone", lambda process: True)
        with lock_all("a", "b", "c", blocking_timeout=0) as leases:
            assert leases["a"].token == held["a"].token + 1


class TestEnteringAgain:
    def test_names_that_are_held_are_entered_again_and_the_rest_is_acquired(self):
        with lock("b") as outer:
            with lock_all("a", "b", "c") as leases:
                assert leases["b"] is outer
                assert outer.entries == 2
                with lock_all("c", "a") as inner:
                    assert inner["a"] is leases["a"]
            assert_free("a", "c")
            assert outer.entries == 1
            assert outer.verify()
        assert_free("b")

    @pytest.mark.parametrize("ends_by", ["refusal", "error"])
    def test_what_was_entered_again_is_left_if_the_rest_is_not_acquired(
        self, other, monkeypatch, ends_by
    ):
        held_elsewhere(other, "c")
        with lock("a") as outer:
            if ends_by == "error":
                monkeypatch.setattr(service("default").backend, "acquire_all", unavailable)
                with pytest.raises(Exception, match="no answer"):
                    lock_all("a", "c").acquire()
                monkeypatch.undo()
            else:
                assert lock_all("a", "c").acquire(blocking=False) is None
            assert outer.entries == 1
        assert_free("a")

    def test_a_fenced_set_does_not_enter_an_unfenced_lock(self):
        with lock("a", fenced=False) as outer, pytest.raises(LockNotAcquired, match="fenced=False"):
            lock_all("0", "a", "b").acquire()
        assert outer.released
        assert_free("0", "a", "b")

    def test_another_thread_may_not_end_the_block(self, other):
        locks = lock_all("a", "b")
        with locks:
            with pytest.raises(NotTheHolder, match=r"The block of lock_all\('a', 'b'\) was ent"):
                other.submit(locks.__exit__, None, None, None).result()
            assert_locked("a")


class TestLosing:
    def test_the_loss_of_one_is_the_loss_of_all(self):
        lost, reasons, told = [], {}, threading.Event()

        def receive(name, reason, **facts):
            reasons[name] = reason
            if len(reasons) == 3:
                told.set()

        with (
            connected(signals.lock_lost, receive),
            pytest.raises(LeaseLost, match=r"lock 'b' .* is gone: the lock service no longer"),
            lock_all("a", "b", "c") as leases,
        ):
            leases.on_lost(lost.append)
            lose_lease(leases["b"])
            assert leases.lost
            assert leases["a"].lost
            with pytest.raises(LeaseLost, match=r"lock 'b' .* is gone"):
                leases.check()
            with pytest.raises(LeaseLost, match=r"'a' .*: lock 'b', which was acquired with it"):
                leases["a"].check()
            assert not leases.verify()
            assert told.wait(10)
        assert lost == [leases]
        assert reasons["a"] == reasons["c"] != reasons["b"]
        # It is called at once if they are lost already.
        leases.on_lost(lost.append)
        assert len(lost) == 2
        assert_free("a", "b", "c")

    def test_the_renewal_of_a_set_that_lost_one_marks_all(self):
        leases = lock_all("a", "b").acquire()
        service("default").backend.release(leases["b"].grant)
        with pytest.raises(LeaseLost, match="'b'"):
            leases.renew()
        assert leases["a"].lost
        leases.release()
        assert_free("a", "b")

    def test_a_lease_that_the_release_finds_lost_is_no_loss_of_the_others(self):
        with pytest.raises(LeaseLost, match="'b'"), lock_all("a", "b", "c") as leases:
            service("default").backend.release(leases["b"].grant)
        assert not leases["a"].why_lost
        assert_free("a", "b", "c")

    def test_after_the_set_was_released_an_outer_lease_is_on_its_own(self):
        with lock("a") as outer:
            for _ in range(3):
                with lock_all("a", "b"):
                    pass
            assert not outer._interrupts

    def waiters_lease(self, control, name):
        # Not the one that it has for a moment, in its first try.
        found = [lease for lease in control.keeper.leases() if lease.name == name]
        return next(iter(found), None)

    def test_while_it_waits_what_was_lost_is_acquired_again(self, other, monkeypatch):
        held = held_elsewhere(other, "b")
        control = service("default")
        with ThreadPoolExecutor(1) as waiting:
            waiter = waiting.submit(lock_all("a", "b").acquire, blocking_timeout=30)
            wait_until(lambda: self.waiters_lease(control, "a"), "a held by the waiter")
            first = self.waiters_lease(control, "a")
            lose_lease(first)
            other.submit(held.release).result()
            leases = waiter.result(20)
            assert leases["a"] is not first
            assert leases["a"].token > first.token
            assert leases["a"].owner_id != first.owner_id
            assert leases.verify()
            waiting.submit(leases.release).result()
            waiting.submit(connections.close_all).result()

    def test_it_does_not_begin_with_a_lease_that_has_expired(self, other, monkeypatch):
        """The whole process may have been paused while it waited."""
        held, control = held_elsewhere(other, "b"), service("default")
        monkeypatch.setattr(control.keeper, "keep", lambda lease: None)
        with ThreadPoolExecutor(1) as waiting:
            waiter = waiting.submit(lock_all("a", "b", ttl=10).acquire, blocking_timeout=30)
            wait_until(lambda: lock("a").holder() is not None, "a held by the waiter")
            first = lock("a").holder().owner_id
            (lease,) = (each for each in find_leases("a") if each.owner_id == first)
            lease.deadline = 0.0
            other.submit(held.release).result()
            leases = waiter.result(20)
            assert leases["a"].owner_id != first
            assert leases.remaining() > 0
            waiting.submit(leases.release).result()
            waiting.submit(connections.close_all).result()

    def test_it_gives_up_in_time_if_its_leases_expire_at_once(self, monkeypatch):
        control = service("default")
        hold = control.hold

        def hold_too_late(*given, **more):
            lease = hold(*given, **more)
            lease.deadline = 0.0
            return lease

        monkeypatch.setattr(control, "hold", hold_too_late)
        assert lock_all("a", "b").acquire(blocking=False) is None
        assert lock_all("a", "b").acquire(blocking_timeout=0.2) is None
        assert_free("a", "b")

    def test_its_locks_on_a_session_are_released_as_it_is_lost(self, settings, postgres):
        """They would stay until the end of the block, which may hang."""
        settings.FENCEDLOCK = {"default": dict(BACKENDS["postgres"])}
        leases = lock_all("a", "b").acquire()
        control = service("default")
        control.lose(leases["a"], "for a test")
        wait_until(lambda: not control.backend.holders(["b"]), "a free lock")
        assert not leases.release()

    def test_while_it_waits_what_it_has_is_renewed(self, other):
        held = held_elsewhere(other, "b")
        with ThreadPoolExecutor(1) as waiting:
            waiter = waiting.submit(lock_all("a", "b", ttl=2).acquire, blocking_timeout=30)
            wait_until(lambda: lock("a").holder() is not None, "a held by the waiter")
            owner = lock("a").holder().owner_id
            time.sleep(2.5)
            assert lock("a").holder().owner_id == owner
            other.submit(held.release).result()
            leases = waiter.result(20)
            assert leases["a"].owner_id == owner
            waiting.submit(leases.release).result()
            waiting.submit(connections.close_all).result()

    def test_an_abandoned_set_is_released(self, caplog):
        def acquire_and_end():
            leases = lock_all("a", "b").acquire()
            connections.close_all()
            return weakref.ref(leases)

        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(acquire_and_end).result()
        gc.collect()
        assert found() is None
        wait_until(lambda: not service("default").backend.holders(["a", "b"]), "free locks")
        assert "was never released" in caplog.text


class TestCost:
    @pytest.fixture
    def on_postgres(self, settings, keep_connections, postgres):
        def use(**entry):
            settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres", **entry}}
            lock_all("warm", "warmer").acquire().release()
            return service("default")

        return use

    def test_a_free_set_is_one_statement_and_its_release_another(self, on_postgres, postgres):
        on_postgres()
        with postgres.statements() as seen:
            leases = lock_all(NAMES).acquire()
        assert sum(seen.values()) == 1
        with postgres.statements() as seen:
            leases.release()
        assert sum(seen.values()) == 1

    def test_a_pin_is_one_statement(self, on_postgres, postgres):
        on_postgres()
        with lock_all(NAMES) as leases:
            with leases.atomic():
                pass
            with postgres.statements() as seen, leases.atomic():
                pass
        assert sum(seen.values()) == 3, seen  # With BEGIN and COMMIT.

    def test_the_grants_of_another_service_are_recorded_by_one_statement(
        self, on_postgres, postgres, monkeypatch
    ):
        monkeypatch.setattr(StubBackend, "service", StubService())
        on_postgres(BACKEND="tests.stub_backend.StubBackend")
        with postgres.statements() as seen:
            leases = lock_all(NAMES).acquire()
        assert sum(seen.values()) == 1
        leases.release()

    @pytest.mark.parametrize("names", [NAMES, [*NAMES, "held"]])
    def test_the_service_is_asked_once_in_each_direction(self, monkeypatch, other, names):
        held_elsewhere(other, "held")
        backend, asked = service("default").backend, []
        for method in ("acquire", "acquire_all", "release", "release_all", "verify"):
            real = getattr(backend, method)

            def note(*given, method=method, real=real):
                asked.append(method)
                return real(*given)

            monkeypatch.setattr(backend, method, note)
        leases = lock_all(names).acquire(blocking=False)
        if leases is not None:
            leases.release()
        assert asked == (["acquire_all"] if "held" in names else ["acquire_all", "release_all"])


class TestAtomic:
    @pytest.fixture(params=databases)
    def database(self, request, settings):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": request.param}}
        return request.param

    def overtake(self, lease):
        """Let another holder be recorded, unnoticed by the lease's holder."""
        backend = service("default").backend
        service("default").keeper.forget(lease)
        backend.release(lease.grant)
        with hold_lock(lease.name):
            pass

    def test_all_names_are_pinned_by_one_statement_in_their_order(self, database):
        with lock_all(NAMES) as leases:
            with CaptureQueriesContext(connections[database]) as queries, leases.atomic():
                pass
            (select,) = [each["sql"] for each in queries if "SELECT" in each["sql"]]
            assert "ORDER BY name" in select
            with leases.atomic(), leases.atomic():
                Account.objects.using(database).create()
        assert Account.objects.using(database).count() == 1

    @pytest.mark.parametrize("place", range(3))
    def test_if_one_was_overtaken_no_write_commits(self, database, place):
        leases = lock_all("a", "b", "c").acquire()
        overtaken = list(leases.values())[place]
        self.overtake(overtaken)
        assert not leases.lost
        with pytest.raises(StaleFence, match=f"lock '{overtaken.name}'") as caught, leases.atomic():
            pytest.fail("the block was entered")
        assert caught.value.name == overtaken.name
        leases.release()

    def test_one_that_is_lost_in_the_middle(self, database):
        """No other grant of any name can be recorded before the end of the transaction."""
        leases = lock_all("a", "b").acquire()
        if database == "default":
            lose_lease(leases["b"])
            with pytest.raises(LeaseLost), leases.atomic():
                pytest.fail("the block was entered")
            leases.release()
            return
        account = Account.objects.using(database).create(balance=1)
        with leases.atomic():
            service("default").keeper.forget(leases["b"])
            service("default").backend.release(leases["b"].grant)
            successor = beside(lambda: lock("b").acquire(blocking_timeout=0.3))
            assert successor.result(20) is None
            account.balance = 2
            account.save()
        account.refresh_from_db()
        assert account.balance == 2
        leases.release()

    def test_each_row_is_covered_by_its_own_lease(self, database):
        one, two = (Invoice.objects.using(database).create() for _ in range(2))
        with Invoice.fencing.lock_all([one, two]) as leases, leases.atomic():
            one.save()
            two.save()

    def test_another_database_is_an_error(self, database):
        wrong = next(each for each in databases if each != database)
        with lock_all("a", "b") as leases, pytest.raises(WrongDatabase), leases.atomic(wrong):
            pytest.fail("the block was entered")

    def test_many_names_in_parts(self, database):
        names = [f"name{number:04}" for number in range(410)]
        with lock_all(names) as leases:
            with leases.atomic():
                pass
            self.overtake(leases["name0405"])
            with pytest.raises(StaleFence, match="name0405"), leases.atomic():
                pass
            service("default").keeper.keep(leases["name0405"])
            leases["name0405"].why_lost = ""
            leases["name0405"].released = True

    def test_an_empty_set_has_a_transaction_too(self, database):
        with Invoice.fencing.lock_all([]) as leases:
            with leases.atomic():
                assert connections[database].in_atomic_block
            assert not leases.lost
            assert leases.remaining() == 0


class TestInTransactions:
    @pytest.fixture
    def on_postgres(self, settings):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}

    def test_it_is_released_at_the_end_of_the_transaction(self, on_postgres):
        with transaction.atomic(using="postgres"):
            with lock_all("a", "b"):
                pass
            assert_locked("a")
            assert_locked("b")
            # Meanwhile it can be entered again.
            with lock_all("b", "c"):
                pass
        assert_free("a", "b", "c")

    def test_inside_a_transaction_of_sqlite_it_is_refused(self):
        with transaction.atomic():
            Account.objects.create()
            with pytest.raises(InsideTransaction):
                lock_all("a", "b").acquire()


class TestWithinATestCase(TestCase):
    databases = {"default"}

    def test_a_set(self):
        with lock_all("a", "b") as leases:
            with leases.atomic():
                Account.objects.create()
            with hold_lock("c"), pytest.raises(LockNotAcquired, match="'c'"):
                lock_all("b", "c", "d").__enter__()
            assert leases.verify()
        assert_free("a", "b", "d")

    def test_coroutines(self):
        async def main():
            async with lock_all("a", "b") as leases:
                assert await leases.averify()

        async_to_sync(main)()
        assert_free("a", "b")

    def test_disabled_locks(self):
        with disable_locking(), lock_all("a", "b") as leases, leases.atomic():
            Account.objects.create()


class TestCoroutines:
    def test_a_coroutine_holds_a_set(self):
        async def main():
            async with lock_all("a", "b") as leases:
                assert held_names() == ("b", "a")
                assert await leases.averify()
                await leases.arenew(20)
                assert leases.remaining() > 15
                with pytest.raises(SynchronousOnlyOperation, match=r"await leases\.arelease"):
                    leases.release()
                async with lock_all("b", "c") as inner:
                    assert inner["b"] is leases["b"]
                async with lock_all("a", "b") as same:
                    assert dict(same) == dict(leases)
            acquired = await lock_all("a", "b").aacquire()
            assert await acquired.arelease()
            async with await lock_all("a", "b").aacquire() as acquired:
                assert acquired.remaining() > 0
            assert held_names() == ()
            with pytest.raises(SynchronousOnlyOperation, match=r"async with lock_all\('a'\)"):
                lock_all("a").__enter__()

        async_to_sync(main)()
        assert_free("a", "b", "c")

    def test_it_is_refused(self, other):
        held_elsewhere(other, "b", "c")

        async def main():
            assert await lock_all("a", "b").aacquire(blocking=False) is None
            with pytest.raises(LockNotAcquired, match="2 locks of a set of 3") as caught:
                await lock_all("a", "b", "c", blocking_timeout=0.1).__aenter__()
            assert list(caught.value.holders) == ["b", "c"]

        async_to_sync(main)()
        assert_free("a")

    def test_it_is_refused_if_its_turn_does_not_come(self, other, monkeypatch):
        held, backend = held_elsewhere(other, "a"), service("default").backend

        async def main():
            first = asyncio.create_task(lock("a").aacquire(blocking_timeout=60))
            await asyncio.sleep(0)
            with monkeypatch.context() as patch, pytest.raises(LockNotAcquired, match="Lock 'a'"):
                # It is released at this moment.
                patch.setattr(type(backend), "holders", lambda self, names: {})
                refused = lock_all("a", "b", blocking_timeout=0.1).__aenter__()
                await asyncio.wait_for(refused, 20)
            other.submit(held.release).result()
            assert await (await first).arelease()

        async_to_sync(main)()

    @pytest.mark.parametrize("threads", [1, 16])
    def test_a_hundred_sets_of_coroutines_take_turns(self, monkeypatch, threads):
        may_wait = threading.BoundedSemaphore(threads)
        monkeypatch.setattr(aio._threads, "may_wait", may_wait)
        inside, done = set(), []

        async def take(pair):
            async with lock_all(pair, blocking_timeout=60):
                assert not inside & set(pair)
                inside.update(pair)
                await asyncio.sleep(0)
                inside.difference_update(pair)
                done.append(pair)

        async def main():
            pairs = itertools.permutations("abcde", 2)
            await asyncio.gather(*(take(pair) for pair in [*pairs] * 2))

        asyncio.run(main())
        assert len(done) == 40
        assert_free(*"abcde")

    def test_a_cancelled_coroutine_leaves_nothing(self, other):
        held, backend = held_elsewhere(other, "b"), service("default").backend

        async def main():
            task = asyncio.create_task(lock_all("a", "b").aacquire(blocking_timeout=60))
            await asyncio.to_thread(wait_until, lambda: backend.holders(["a"]), "a held")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            other.submit(held.release).result()
            await asyncio.to_thread(wait_until, lambda: not backend.holders(["a", "b"]), "free")

        asyncio.run(main())

    def test_a_set_that_waits_stops_no_waiter_of_a_free_lock(self, other):
        held = held_elsewhere(other, "a")

        async def main():
            task = asyncio.create_task(lock_all("a", "b").aacquire(blocking_timeout=60))
            await asyncio.sleep(0.05)
            async with lock("b", blocking_timeout=5):
                assert not task.done()
            other.submit(held.release).result()
            assert await (await task).arelease()

        asyncio.run(main())


class TestDeadlocks:
    @pytest.mark.parametrize("database", databases)
    def test_none_with_random_pairs_of_eight_names(self, settings, database):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": database}}
        names = [f"name{number}" for number in range(8)]
        held = {name: threading.Lock() for name in names}
        threads, rounds = (32, 6) if database == "postgres" else (8, 3)

        def take_turns(seed):
            chance = random.Random(seed)
            for _ in range(rounds):
                pair = chance.sample(names, 2)
                with lock_all(pair, blocking_timeout=120), contextlib.ExitStack() as stack:
                    for name in pair:
                        assert held[name].acquire(blocking=False)
                        stack.callback(held[name].release)
            connections.close_all()
            return rounds

        with ThreadPoolExecutor(threads) as executor:
            assert sum(executor.map(take_turns, range(threads))) == threads * rounds
        assert_free(*names)


class TestAnswers:
    """What the service or the fence database may answer."""

    @pytest.fixture
    def stub(self, settings, monkeypatch):
        settings.FENCEDLOCK = {"default": {"BACKEND": "tests.stub_backend.StubBackend"}}
        monkeypatch.setattr(StubBackend, "service", StubService())
        monkeypatch.setattr(keeper, "FIRST_DOUBT", 0.01)
        return service("default")

    def test_the_whole_set_is_recorded_at_once(self, stub, monkeypatch):
        calls = []
        record_all = Fences.record_all

        def record(fences, grants):
            calls.append([grant.name for grant in grants])
            return record_all(fences, grants)

        monkeypatch.setattr(Fences, "record_all", record)
        with lock_all("b", "a", "c") as leases, leases.atomic():
            assert [lease.token for lease in leases.values()] == [1, 1, 1]
        assert calls == [["a", "b", "c"]]

    def test_a_grant_with_an_old_token_is_given_the_next_number(self, stub):
        with lock_all("a", "b"):
            pass
        StubBackend.service.tokens.clear()
        with lock("b"), lock("b"):
            pass
        StubBackend.service.tokens.clear()
        with lock_all("a", "b") as leases, leases.atomic():
            assert [lease.token for lease in leases.values()] == [2, 3]
        assert StubBackend.service.tokens == {"a": 2, "b": 3}

    def test_the_first_that_is_not_recorded_ends_the_try(self, stub, monkeypatch):
        """Each of the rest might wait for a transaction as well."""
        record, asked = stub.grants._record, []

        def refuse(grant, since):
            asked.append(grant.name)
            return None if grant.name == "b" else record(grant, since)

        monkeypatch.setattr(stub.grants.fences, "record_all", lambda grants: set())
        monkeypatch.setattr(stub.grants, "_record", refuse)
        assert lock_all("a", "b", "c", "d").acquire(blocking=False) is None
        assert asked == ["a", "b"]
        assert not stub.backend.holders(["a", "b", "c", "d"])

    def test_what_took_long_is_renewed_before_it_is_recorded(self, stub, monkeypatch):
        acquire_all, renewed = StubBackend.acquire_all, []
        renew = StubBackend.renew

        def acquire_late(backend, claims):
            return [each._replace(since=each.since - 15) for each in acquire_all(backend, claims)]

        def note(backend, grants):
            renewed.extend(grant.name for grant in grants)
            return renew(backend, grants)

        monkeypatch.setattr(StubBackend, "acquire_all", acquire_late)
        monkeypatch.setattr(StubBackend, "renew", note)
        with lock_all("a", "b", ttl=30) as leases:
            assert renewed[:2] == ["a", "b"]
            assert leases.remaining() > 29

    @pytest.mark.parametrize("fails", ["acquire_all", "record_all", "confirm", "hold"])
    @pytest.mark.parametrize("error", [None, KeyboardInterrupt])
    def test_whatever_fails_leaves_no_lock(self, stub, monkeypatch, fails, error):
        def fail(*args, **kwargs):
            if fails == "acquire_all":
                # The request arrived.
                acquire_all(*args, **kwargs)
            if error:
                raise error
            return unavailable()

        if fails == "hold":
            monkeypatch.setattr(stub.keeper, "keep", fail)
        elif fails == "confirm":
            confirm, calls = stub.grants.confirm, itertools.count()
            monkeypatch.setattr(
                stub.grants,
                "confirm",
                lambda *given: (fail if next(calls) == 1 else confirm)(*given),
            )
        elif fails == "record_all":
            monkeypatch.setattr(stub.grants.fences, "record_all", fail)
        else:
            acquire_all = stub.backend.acquire_all
            monkeypatch.setattr(stub.backend, "acquire_all", fail)
        with pytest.raises((Exception, KeyboardInterrupt)):
            lock_all("a", "b", "c").acquire()
        wait_until(lambda: not stub.backend.holders(["a", "b", "c"]), "free locks")
        assert held_names() == ()
        assert not stub.keeper.leases()
