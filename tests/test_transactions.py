"""Locks taken and released inside the caller's own transactions."""

import contextlib

import pytest
from django.db import connections, transaction

from django_fencedlock import lock
from django_fencedlock.exceptions import InsideTransaction, LockNotAcquired
from django_fencedlock.models import Fence

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


@pytest.fixture(params=["default", "postgres"])
def database(request, settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": request.param}}
    # In deferred mode SQLite's file isn't taken before the first write.
    if request.param == "default":
        connections["default"].ensure_connection()
        before = connections["default"].transaction_mode
        connections["default"].transaction_mode = None
        yield request.param
        connections["default"].transaction_mode = before
    else:
        yield request.param


def is_held(name):
    return lock(name).holder() is not None


def test_a_connection_closed_within_the_transaction_releases_the_lock(database):
    with pytest.raises(Exception, match=r"."), transaction.atomic(using=database):
        with lock("x"):
            pass
        connections[database].close()
        assert not is_held("x")
        raise ValueError("done")


def test_a_release_too_many_before_that_takes_nothing_from_the_next_block(database):
    with transaction.atomic(using=database):
        lease = lock("x").acquire()
        lease.release()
        lease.release()
        again = lock("x").acquire()
        assert again is lease
    assert is_held("x")
    assert again.release()
    assert not is_held("x")


def test_a_block_that_outlives_the_transaction_keeps_the_lock(database):
    with transaction.atomic(using=database):
        with lock("x") as first:
            pass
        lease = lock("x").acquire()
        assert lease is first
    assert is_held("x")
    assert lease.verify()
    lease.release()
    assert not is_held("x")


def test_a_transaction_inside_of_the_lock_ends_first_and_costs_no_waiting(database):
    with lock("x") as lease, transaction.atomic(using=database):
        pass
    assert lease.released
    assert not is_held("x")


@pytest.fixture
def on_postgres(settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}


@pytest.mark.parametrize("within", [False, True])
def test_the_lock_waits_for_the_last_of_several_transactions(on_postgres, within):
    """The next holder would read what isn't committed yet, wherever it is."""
    with transaction.atomic(using="default"):
        with contextlib.nullcontext() if within else lock("x"):
            pass
        with (
            transaction.atomic(using="postgres"),
            lock("x") if within else contextlib.nullcontext(),
        ):
            pass
        assert is_held("x")
    assert not is_held("x")


def test_sqlite_refuses_at_once_after_a_write_and_says_what_to_do(settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "default"}}
    with transaction.atomic():
        Fence.objects.create(name="other", token=1, owner="o")
        with pytest.raises(InsideTransaction, match="Acquire the lock first"):
            lock("x").acquire()
    assert not Fence.objects.filter(name="x").exists()
    assert lock("x").acquire(blocking=False).release()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_older_than_the_grant_is_refused_and_the_lock_released(on_postgres, level):
    with transaction.atomic(using="postgres"), connections["postgres"].cursor() as cursor:
        cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        cursor.execute("SELECT 1 FROM django_fencedlock_fence")
        with pytest.raises(InsideTransaction, match="older snapshot"):
            lock("x").acquire()
        assert not is_held("x")


def test_a_snapshot_that_sees_the_grant_is_fine(on_postgres):
    with transaction.atomic(using="postgres"), connections["postgres"].cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with lock("x") as lease:
            assert lease.token == 1


def test_a_fence_pinned_by_an_open_transaction_is_a_lock_that_is_held(on_postgres):
    """A former holder that is still writing delays its successor, within bounds."""
    lock("x").acquire().release()
    with transaction.atomic(using="postgres"):
        Fence.objects.using("postgres").select_for_update().get(name="x")
        assert lock("x").acquire(blocking=False) is None
        with pytest.raises(LockNotAcquired):
            lock("x", blocking_timeout=0.1).__enter__()
    with lock("x") as lease:
        assert lease.token == 2
