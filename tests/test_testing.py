"""Locks in tests, and the helpers of ``django_fencedlock.test``."""

import os
import textwrap
import time
from configparser import ConfigParser
from unittest import mock

import pytest
from celery import Celery
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, transaction
from django.test import SimpleTestCase, TestCase, TransactionTestCase, override_settings

from django_fencedlock import (
    LeaseLost,
    LockNotAcquired,
    LockRequired,
    StaleFence,
    current_lease,
    lock,
)
from django_fencedlock.celery import single_instance
from django_fencedlock.exceptions import InsideTransaction
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.signals import lock_lost
from django_fencedlock.test import (
    assert_locked,
    assert_not_locked,
    disable_locking,
    eager_tasks,
    expire_lease,
    hold_lock,
    lose_lease,
)
from django_fencedlock.test.processes import another_thread
from tests.backends import POSTGRES, REDIS
from tests.models import Invoice
from tests.scripts import run_python
from tests.servers import shared

pytest_plugins = ["pytest_fencedlock"]

ON_POSTGRES = {"default": {"FENCE_DATABASE": "postgres"}}
SESSION_LOCKS = {"default": {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"}}


class Grants:
    """What has to work in any test case, without ceremony."""

    using = "default"

    def test_tokens_begin_at_one_in_each_test(self):
        for token in (1, 2):
            with lock("invoice:42") as lease:
                assert lease.token == token
                assert lease.verify()

    def test_tokens_begin_at_one_in_each_test_again(self):
        self.test_tokens_begin_at_one_in_each_test()

    def test_rows_are_there_for_the_orm(self):
        with lock("invoice:42") as lease:
            fence = Fence.objects.using(self.using).get()
            assert (fence.token, fence.owner) == (lease.token, lease.owner_id)
            assert HeldLock.objects.using(self.using).get().token == 1
        assert not HeldLock.objects.using(self.using).exists()

    def test_a_lock_inside_atomic(self):
        with transaction.atomic(using=self.using):
            Fence.objects.using(self.using).create(name="other", token=7, owner="x")
            if self.using == "default":
                with pytest.raises(InsideTransaction, match="Lock 'invoice:42' can't be acquired"):
                    lock("invoice:42").acquire()
            else:
                assert lock("invoice:42").acquire().release()

    def test_a_lock_outside_of_atomic(self):
        with lock("invoice:42") as lease, transaction.atomic(using=self.using):
            with lock("invoice:42") as again:
                assert again is current_lease("invoice:42") is lease
            assert lease.verify()

    def test_a_lock_after_a_write(self):
        Fence.objects.using(self.using).create(name="other", token=7, owner="x")
        with lock("invoice:42", blocking_timeout=0) as lease:
            lease.renew(ttl=5)
            assert lease.verify()
            lease.check()

    async def test_locks_in_a_coroutine(self):
        for token in (1, 2):
            async with lock("invoice:42") as lease:
                assert lease.token == token
                assert await lease.averify()
        assert await Fence.objects.using(self.using).acount() == 1
        lease = await lock("invoice:42").aacquire(blocking=False)
        await lease.arenew(ttl=5)
        assert await lease.arelease()
        assert not await HeldLock.objects.using(self.using).aexists()

    def test_acquire_fails_at_once_during_hold_lock(self):
        started = time.monotonic()
        with hold_lock("invoice:42") as held:
            with pytest.raises(LockNotAcquired) as caught:
                lock("invoice:42", blocking_timeout=60).__enter__()
            assert assert_locked("invoice:42").owner_id == held.owner_id
            assert lock("invoice:42").acquire(blocking=False) is None
            with lock("invoice:43"):
                pass
        # The postgres backend alone can't see the thread, which is in the test's transaction.
        place, _, thread = str(held.holder).partition(", thread ")
        assert f"'invoice:42' is held by {place}" in str(caught.value)
        assert thread == "hold_lock"
        assert time.monotonic() - started < 30
        with lock("invoice:42") as lease:
            assert lease.token == held.token + 1

    async def test_hold_lock_in_a_coroutine(self):
        with pytest.raises(SynchronousOnlyOperation, match="async with hold_lock"):
            hold_lock("invoice:42").__enter__()
        async with hold_lock("invoice:42") as held:
            with pytest.raises(LockNotAcquired):
                await lock("invoice:42", blocking_timeout=60).__aenter__()
        async with lock("invoice:42") as lease:
            assert lease.token == held.token + 1

    def test_acquire_fails_at_once_if_hold_lock_has_all_permits(self):
        started = time.monotonic()
        with hold_lock("gpu", limit=2) as held:
            with lock("gpu", limit=2) as lease:
                assert {held.name, lease.name} == {"gpu [permit 1]", "gpu [permit 2]"}
            with hold_lock("gpu", limit=lambda: 2) as other:
                with pytest.raises(LockNotAcquired, match="All 2 permits") as caught:
                    lock("gpu", limit=2, blocking_timeout=60).__enter__()
                assert set(caught.value.holders) == {held.name, other.name}
                with pytest.raises(LockNotAcquired, match="All 2 permits"):
                    hold_lock("gpu", limit=2).__enter__()
                with lock("gpu"):
                    pass
        assert time.monotonic() - started < 30

    def test_hold_lock_rejects_what_lock_rejects(self):
        with pytest.raises(TypeError, match="two kinds of locks"):
            hold_lock("gpu", limit=2, shared=True)
        with pytest.raises(ValueError, match="It must be from 1 to 1000"):
            hold_lock("gpu", limit=0)

    def test_hold_lock_fails_if_the_lock_is_held(self):
        with lock("invoice:42"), pytest.raises(LockNotAcquired):
            hold_lock("invoice:42").__enter__()

    def test_locked_or_not(self):
        assert_not_locked("invoice:42")
        with pytest.raises(AssertionError, match="is free"):
            assert_locked("invoice:42")
        with lock("invoice:42"):
            assert_locked("invoice:42")
            with pytest.raises(AssertionError, match="is held by"):
                assert_not_locked("invoice:42")
        assert_not_locked("invoice:42")

    def test_an_expired_lease_may_be_renewed(self):
        with lock("invoice:42") as lease:
            expire_lease(lease)
            assert lease.expired
            assert not lease.lost
            with pytest.raises(LeaseLost):
                lease.check()
            lease.renew()
            lease.check()

    def test_an_expired_lease_is_taken_over(self):
        lease = lock("invoice:42").acquire()
        expire_lease(lease)
        with hold_lock("invoice:42") as successor:
            assert successor.token == lease.token + 1
            assert not lease.verify()
        assert lease.lost
        lease.release()

    def test_a_lost_lease_is_lost_in_every_way(self):
        told, heard = [], []

        def receive(lease, **kwargs):
            heard.append(lease)

        lock_lost.connect(receive)
        try:
            with pytest.raises(LeaseLost), lock("invoice:42") as lease:
                lease.on_lost(told.append)
                lose_lease(lease)
                assert lease.lost
                assert told == heard == [lease]
                assert Fence.objects.using(self.using).get().token == 2
        finally:
            lock_lost.disconnect(receive)
        assert_not_locked("invoice:42")
        with pytest.raises(LeaseLost), lock("cache", fenced=False) as lease:
            lose_lease(lease)

    def test_locks_off(self):
        with disable_locking():
            for token in (1, 2):
                with lock("invoice:42") as lease, transaction.atomic(using=self.using):
                    assert lease.token == token
                    lease.renew()
                    assert lease.verify()
            assert not HeldLock.objects.using(self.using).exists()
        with lock("invoice:42") as lease:
            assert lease.token == 3


class LeftBehind:
    """A lease that a test forgot is gone with the test's transaction."""

    def test_a_lease_of_a_former_test_is_gone(self):
        assert current_lease() is None
        assert lock("invoice:42").acquire(blocking=False).token == 1

    def test_a_lease_of_a_former_test_is_gone_again(self):
        assert current_lease() is None
        lease = lock("invoice:42").acquire(blocking=False)
        assert lease.token == 1
        lose_lease(lease)


class SwitchedOff:
    using = "default"

    def setUp(self):
        super().setUp()
        self.enterContext(disable_locking())
        self.invoices = Invoice.objects.using(self.using)
        self.pk = self.invoices.create().pk

    def write(self, note):
        with Invoice.fencing.lock(pk=self.pk) as lease:
            invoice = self.invoices.get(pk=self.pk)
            invoice.note = note
            invoice.save()
            assert self.invoices.filter(pk=self.pk).update(amount=5) == 1
            invoice.refresh_from_db()
            assert (invoice.note, invoice.amount, invoice.fence) == (note, 5, lease.token)
            return lease

    def test_fenced_rows_are_written(self):
        assert self.write("a").token == 1
        assert self.write("b").token == 2

    def test_a_transaction_is_fenced(self):
        with Invoice.fencing.lock(pk=self.pk) as lease, lease.atomic():
            assert self.invoices.filter(pk=self.pk).update(amount=5) == 1

    def test_tokens_continue_those_of_real_leases(self):
        real = {"default": {"FENCE_DATABASE": self.using}}
        self.enterContext(override_settings(FENCEDLOCK=real))
        assert self.write("a").token == 1
        with disable_locking():
            assert self.write("b").token == 2
        assert self.write("c").token == 3

    def test_a_former_holder_is_stale(self):
        stale = self.write("a")
        self.write("b")
        with pytest.raises(LockRequired):
            self.invoices.using_lease(stale).filter(pk=self.pk).update(amount=6)
        former = Invoice.fencing.lock(pk=self.pk)
        with former as lease:
            with hold_lock(lease.name):
                pass
            with pytest.raises(StaleFence), transaction.atomic(using=self.using):
                self.invoices.filter(pk=self.pk).update(amount=6)

    def test_writes_need_no_lock(self):
        for policy in ("reject", None):
            with mock.patch.object(Invoice.fencing.spec, "_without_lock", policy):
                invoice = self.invoices.create(note="made")
                invoice.save()
                assert self.invoices.filter(pk=invoice.pk).update(amount=6) == 1
                self.invoices.bulk_update([invoice], ["note"])
                with Invoice.fencing.lock(pk=invoice.pk) as lease:
                    invoice.refresh_from_db()
                    invoice.save()
                    assert invoice.fence == lease.token
                invoice.save()
                invoice.delete()
                assert self.invoices.filter(pk=self.pk).delete()[0] == 1
                self.pk = self.invoices.create().pk

    def test_writes_need_a_lock_again_afterwards(self):
        with disable_locking(), disable_locking():
            pass
        assert self.invoices.filter(pk=self.pk).update(amount=6) == 1
        self.doCleanups()
        with pytest.raises(LockRequired):
            Invoice.objects.using(self.using).update(amount=6)

    def test_a_lock_within_a_transaction_that_is_rolled_back(self):
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=self.using):
            self.write("a")
            raise ZeroDivisionError
        self.write("b")

    def test_a_broken_transaction_is_not_made_worse(self):
        with transaction.atomic(using=self.using):
            transaction.set_rollback(True, using=self.using)
            with lock("invoice:42"):
                pass

    async def test_a_coroutine(self):
        async with Invoice.fencing.lock(pk=self.pk):
            assert await self.invoices.filter(pk=self.pk).aupdate(amount=5) == 1


class OnPostgres:
    databases = {"default", "postgres"}
    using = "postgres"

    def setUp(self):
        self.enterContext(override_settings(FENCEDLOCK=ON_POSTGRES))
        super().setUp()


class SwitchedOffInATestCase(SwitchedOff, TestCase):
    pass


class SwitchedOffInATestCaseOnPostgres(OnPostgres, SwitchedOff, TestCase):
    pass


class SwitchedOffInATransactionTestCase(SwitchedOff, TransactionTestCase):
    pass


class SwitchedOffInATransactionTestCaseOnPostgres(OnPostgres, SwitchedOff, TransactionTestCase):
    def test_a_locked_fence_delays_no_grant(self):
        with Invoice.fencing.lock(pk=self.pk) as lease, lease.atomic(), another_thread() as thread:
            assert thread.call(self.take, lease.name) == lease.token + 1

    def take(self, name):
        with lock(name) as lease:
            return lease.token


class InATestCase(Grants, LeftBehind, TestCase):
    pass


class InATestCaseOnPostgres(OnPostgres, Grants, LeftBehind, TestCase):
    pass


class InATransactionTestCase(Grants, TransactionTestCase):
    available_apps = ["django_fencedlock"]


class InATransactionTestCaseOnPostgres(OnPostgres, InATransactionTestCase):
    pass


@override_settings(FENCEDLOCK=SESSION_LOCKS)
class SessionLocksInATestCase(Grants, TestCase):
    databases = {"default", "postgres"}
    using = "postgres"

    # Such a lock ends with its session, and not before.
    test_an_expired_lease_is_taken_over = None


class RedisInATestCase(Grants, TestCase):
    def setUp(self):
        redis = shared.redis()
        # Its tokens outlive a test's transaction.
        redis.empty()
        entry = {"BACKEND": REDIS, "LOCATION": redis.url, "FENCE_DATABASE": self.using}
        self.enterContext(override_settings(FENCEDLOCK={"default": entry}))
        super().setUp()


class RedisInATestCaseOnPostgres(RedisInATestCase):
    databases = {"default", "postgres"}
    using = "postgres"


class WithoutADatabase(SimpleTestCase):
    def test_locks_off_asks_none(self):
        with disable_locking(), lock("invoice:42") as lease:
            assert lease.token == 1

    @disable_locking()
    def test_locks_off_as_a_decorator(self):
        with lock("invoice:42"), lock("invoice:43") as lease:
            assert lease.token == 1

    async def test_locks_off_in_a_coroutine(self):
        with disable_locking():
            async with lock("invoice:42") as lease:
                assert lease.token == 1


_app = Celery("testing", set_as_current=False)


@_app.task(shared=False)
@single_instance("invoice:{pk}")
def _charge(pk):
    return current_lease().token


class InsideAtomicInATestCase(TestCase):
    """On SQLite, where production has another connection write the grant, and can't."""

    def test_an_unfenced_lock_is_refused(self):
        with transaction.atomic(), pytest.raises(InsideTransaction):
            lock("invoice:42", fenced=False).acquire()

    def test_a_plain_call_of_a_task_is_refused(self):
        with transaction.atomic(), pytest.raises(InsideTransaction):
            _charge(42)

    def test_a_task_that_a_worker_would_run_is_allowed(self):
        with eager_tasks(_app), transaction.atomic():
            assert _charge.delay(42).get() == 1

    def test_helpers_that_act_as_another_process_are_allowed(self):
        lease = lock("invoice:42").acquire()
        with transaction.atomic(), hold_lock("invoice:43"):
            lose_lease(lease)
        assert lease.lost

    def test_a_lock_after_the_commit_is_allowed(self):
        got = []
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            transaction.on_commit(lambda: got.append(lock("invoice:42").acquire()))
        assert got[0].release()


@pytest.mark.django_db
class TestDbFixture:
    @pytest.mark.parametrize("_", range(2))
    def test_tokens_begin_at_one_in_each_test(self, _):
        with lock("invoice:42") as lease:
            assert lease.token == 1
        assert connection.in_atomic_block

    def test_hold_lock(self, hold_lock):
        held = hold_lock("invoice:42")
        assert assert_locked("invoice:42").owner_id == held.owner_id
        assert lock("invoice:42", blocking_timeout=60).acquire() is None


@pytest.mark.parametrize("_", range(2))
def test_hold_lock_releases_before_the_database_is_closed(hold_lock, db, _):
    hold_lock("invoice:42")


def test_hold_lock_releases_before_the_database_is_flushed(hold_lock, transactional_db):
    hold_lock("invoice:42")


def test_the_fixture_locks_off_asks_no_database(disable_locking):
    with lock("invoice:42") as lease:
        assert lease.token == 1


@pytest.mark.django_db(transaction=True, available_apps=["django_fencedlock"])
def test_waiters_may_wait_for_hold_lock():
    with hold_lock("invoice:42", let_wait=True):
        started = time.monotonic()
        assert lock("invoice:42").acquire(blocking_timeout=0.3) is None
        assert time.monotonic() - started > 0.2


# Another project

PLUGIN = "pytest_fencedlock"
PLAIN = """
    import sys
    from django.conf import settings

    pytest_plugins = ["pytest_fencedlock"]

    def test_nothing_is_set_up():
        assert not settings.configured
        assert not {"django.db", "django_fencedlock"}.intersection(sys.modules)

    def test_the_fixtures_are_there(request):
        for name in ("disable_locking", "eager_tasks", "hold_lock"):
            assert request._fixturemanager.getfixturedefs(name, request.node)
"""


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_the_fixtures_need_no_settings_and_import_nothing_that_gevent_patches(tmp_path, named):
    config = ConfigParser(interpolation=None)
    config.read("setup.cfg")
    # pytest refuses a plugin that is named twice, except under its own name.
    assert config["options.entry_points"]["pytest11"].strip() == f"{PLUGIN} = {PLUGIN}"
    given = textwrap.dedent(PLAIN) if named else textwrap.dedent(PLAIN).replace("pytest_p", "p")
    tmp_path.joinpath("test_plain.py").write_text(given)
    tmp_path.joinpath("conftest.py").write_text("from gevent import monkey; monkey.patch_all()")
    words = ("-p", "no:django", "-p", PLUGIN, "-q")
    told = run_python("-m", "pytest", *words, cwd=tmp_path, DJANGO_SETTINGS_MODULE=None).stdout
    assert "2 passed" in told


SETTINGS = """
    SECRET_KEY = "only for tests"
    INSTALLED_APPS = ["django_fencedlock"]
    USE_TZ = True
    DATABASES = {{"default": {database!r}}}
    FENCEDLOCK = {fencedlock!r}
"""

TESTS = """
    from django.test import TestCase, TransactionTestCase
    from django_fencedlock import LeaseLost, lock
    from django_fencedlock.test import assert_locked, assert_not_locked, hold_lock, lose_lease

    class First(TestCase):
        def test_helpers(self):
            with hold_lock("a") as held:
                self.assertEqual(held.token, 1)
                self.assertIsNone(lock("a").acquire(blocking_timeout=60))
            with self.assertRaises(LeaseLost), lock("a") as lease:
                assert_locked("a")
                lose_lease(lease)
            assert_not_locked("a")

        async def test_coroutine(self):
            async with lock("a") as lease:
                self.assertEqual(lease.token, 1)
"""

REAL_TRANSACTIONS = """
    class Second(TransactionTestCase):
        def test_private_connections(self):
            for token in (1, 2):
                with lock("b") as lease:
                    self.assertEqual(lease.token, token)
"""


def run_tests(directory, tests, database, **fencedlock):
    settings = SETTINGS.format(database=database, fencedlock={"default": fencedlock})
    directory.joinpath("their_settings.py").write_text(textwrap.dedent(settings))
    directory.joinpath("test_theirs.py").write_text(textwrap.dedent(tests))
    return run_python(
        *("-m", "django", "test", "--verbosity=2"),
        cwd=directory,
        DJANGO_SETTINGS_MODULE="their_settings",
        PYTHONPATH=os.pathsep.join([str(directory), os.getcwd()]),
    ).stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [":memory:", "db.sqlite3"])
def test_a_test_case_on_an_in_memory_sqlite(tmp_path, name):
    told = run_tests(tmp_path, TESTS, {"ENGINE": "django.db.backends.sqlite3", "NAME": name})
    assert "Ran 2 tests" in told


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["database.DatabaseBackend", "postgres.PostgresBackend"])
def test_a_test_database_can_be_destroyed_afterwards(tmp_path, postgres, backend):
    test_name = f"test_theirs_{os.getpid()}"
    entry = {**postgres.django(), "TEST": {"NAME": test_name}}
    tests = textwrap.dedent(TESTS) + textwrap.dedent(REAL_TRANSACTIONS)
    told = run_tests(tmp_path, tests, entry, BACKEND=f"django_fencedlock.backends.{backend}")
    assert "Ran 3 tests" in told
    found = postgres.execute("SELECT 1 FROM pg_database WHERE datname = %s", test_name)
    assert not found
