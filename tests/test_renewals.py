"""Renewals of leases while the fence database hangs, or rows of it are locked."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import transaction

from django_fencedlock import LeaseLost, lock
from django_fencedlock.backends.redis.scripts import Keys
from django_fencedlock.core.keeper import CLEAR_AFTER
from django_fencedlock.core.manager import service
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.storage import connections
from django_fencedlock.test.processes import another_thread
from tests.backends import DATABASE, POSTGRES, REDIS
from tests.servers.process import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

#: A request to a database that hangs may take twice the time-out, which is longer than the ttl.
TTL, TIMEOUT = 6.0, 5


@pytest.fixture
def database(settings, redis_server, postgres, make_proxy, make_alias):
    """The alias of the fence database of locks on Redis, and the network on the way to it."""

    proxy = make_proxy(postgres.host, postgres.port)
    alias = make_alias(postgres.django(postgres.create_database(), by=proxy))
    terms = {"BACKEND": REDIS, "LOCATION": redis_server.url, "OPTIONS": {"TIMEOUT": TIMEOUT}}
    settings.FENCEDLOCK = {"default": {**terms, "FENCE_DATABASE": alias}}
    redis_server.empty()
    yield alias, proxy
    proxy.pass_through()


def renewed_beyond(moment, *leases):
    wait_until(lambda: all(lease.deadline > moment for lease in leases), "renewals", 60)


def test_a_database_that_hangs_delays_no_renewal(database):
    alias, proxy = database
    fenced, unfenced = lock("fenced", ttl=TTL).acquire(), lock("u", ttl=TTL, fenced=False).acquire()
    proxy.black_hole()
    renewed_beyond(clock() + 2.5 * TTL, fenced, unfenced)
    assert fenced.verify()
    assert unfenced.verify()
    assert not fenced.lost
    assert not unfenced.lost
    proxy.pass_through()
    row = HeldLock.objects.using(alias).get(name="fenced")
    renewed = HeldLock.objects.using(alias).filter(expires_at__gt=row.expires_at)
    wait_until(renewed.exists, "the registry to be renewed again", 60)
    assert fenced.release()
    assert unfenced.release()


def test_a_row_that_can_not_be_cleared_delays_no_renewal(database):
    alias, proxy = database
    released, kept = lock("released", ttl=TTL).acquire(), lock("u", ttl=TTL, fenced=False).acquire()
    proxy.black_hole()
    assert released.release()
    renewed_beyond(clock() + CLEAR_AFTER + 2 * TTL, kept)
    assert kept.verify()
    assert not kept.lost
    proxy.pass_through()
    rows = HeldLock.objects.using(alias)
    lock("next").acquire().release()
    wait_until(lambda: not rows.exists(), "the registry to be cleared", 60)


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.parametrize("renewed_by", ["keeper", "holder"])
def test_a_lease_that_was_overtaken_at_a_failover_is_lost(settings, redis_server, renewed_by):
    """A replica that lags gives the key back to an old holder; the fence tells."""
    settings.FENCEDLOCK = {
        "default": {"BACKEND": REDIS, "LOCATION": redis_server.url, "FENCE_DATABASE": "postgres"}
    }
    redis_server.empty()
    told = []
    old = lock("x", ttl=TTL).acquire()
    old.on_lost(told.append)
    keeper = service("default").keeper
    keeper.forget(old)
    keys = Keys.of("", "x")
    before = redis_server.execute("MGET", keys.lock, keys.counter)
    redis_server.execute("DEL", keys.lock)
    with another_thread() as thread:
        new = thread.call(lock("x").acquire)
        assert new.token == old.token + 1
        redis_server.execute("MSET", keys.lock, before[0], keys.counter, before[1])
        assert old.verify()
        if renewed_by == "keeper":
            keeper.keep(old)
        else:
            with pytest.raises(LeaseLost):
                old.renew()
        wait_until(lambda: told, "the loss", 60)
        assert old.lost
        wait_until(lambda: lock("x").holder() is None, "the key to be given back", 60)
        assert HeldLock.objects.using("postgres").get().owner == new.owner_id
        thread.call(new.release)


# Transactions in the way


def real(database):
    return pytest.mark.django_db(transaction=True, databases=["default", database])


@pytest.mark.parametrize(
    ("backend", "database"),
    [
        pytest.param(DATABASE, "postgres", marks=real("postgres")),
        pytest.param(DATABASE, "mariadb", marks=real("mariadb")),
        pytest.param(POSTGRES, "postgres", marks=real("postgres")),
    ],
)
def test_grants_that_wait_delay_no_renewal(request, settings, monkeypatch, backend, database):
    """Each waits for a locked fence: 0.25 s on PostgreSQL, 1 s on MariaDB."""
    # As outside of tests: private connections stay open.
    monkeypatch.setattr(connections, "under_test", lambda: False)
    request.addfinalizer(connections.close_all)
    terms = {"FENCE_DATABASE": database, "OPTIONS": {"TIMEOUT": 1}}
    settings.FENCEDLOCK = {"default": {"BACKEND": backend, **terms}}
    names, stop, tries = [f"pinned{number}" for number in range(30)], threading.Event(), []
    for name in names:
        lock(name).acquire().release()
    kept = lock("kept", ttl=TTL).acquire()

    def insist(name):
        while not stop.is_set():
            with contextlib.suppress(BackendUnavailable):
                assert lock(name).acquire(blocking=False) is None
            tries.append(name)

    with transaction.atomic(using=database), ThreadPoolExecutor(len(names)) as pool:
        assert len(Fence.objects.using(database).filter(name__in=names).select_for_update()) == 30
        trying = [pool.submit(insist, name) for name in names]
        try:
            wait_until(lambda: len(tries) > len(names), "tries", 60)
            enough = clock() + 1.5 * TTL
            wait_until(lambda: kept.lost or kept.deadline > enough, "renewals", 60)
            assert not kept.lost
        finally:
            stop.set()
        for each in trying:
            each.result(60)
    assert kept.release()
