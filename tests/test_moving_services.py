"""A lock whose alias is moved from one service to another: tokens rise, stale writes don't pass."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import pairwise

import pytest
from django.db import connections
from django.db.models import F

from django_fencedlock import LeaseLost, StaleFence, conf, lock
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import AliasConflict
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.test.processes import wait_until
from tests.models import Invoice
from tests.stub_backend import StubBackend, StubService

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres"]),
    pytest.mark.slow,
]

#: Each route begins and ends with services that every machine has. All record in one database.
ROUTES = [
    ("redis", "database", "stub", "valkey"),
    ("valkey", "postgres", "redis"),
    ("database", "etcd", "redis"),
    ("redis", "etcd", "postgres", "etcd"),
    ("database", "zookeeper", "etcd"),
    ("redis", "consul", "zookeeper"),
    ("redis", "redlock", "etcd"),
    ("database", "dynamodb", "redlock"),
]


@pytest.fixture
def move(request, settings, monkeypatch):
    """Return a function that gives the alias another lock service, as a deployment does."""
    monkeypatch.setattr(StubBackend, "service", StubService())
    made = {}

    def entry(kind):
        if kind == "stub":
            return {"BACKEND": "tests.stub_backend.StubBackend"}
        entry = {"BACKEND": conf.BACKENDS.get(kind, conf.BACKENDS["redis"])}
        if kind in ("redis", "valkey"):
            server = request.getfixturevalue(f"{kind}_server")
            server.empty()
            return {**entry, "LOCATION": server.url}
        if kind == "redlock":
            servers = [request.getfixturevalue("make_redis")() for _ in range(3)]
            return {**entry, "LOCATION": [each.url for each in servers]}
        if kind in ("database", "postgres"):
            return entry
        server = request.getfixturevalue(f"shared_{kind}")
        server.empty()
        location = server.url
        if kind == "consul":
            entry["OPTIONS"] = {"SESSION_TTL_MIN": 1}
        elif kind == "dynamodb":
            location = "locks"
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
            entry["OPTIONS"] = {"REGION": server.region, "ENDPOINT": server.url}
        return {**entry, "LOCATION": location, "TTL": 10}

    def change(kind):
        if is_new := kind not in made:
            made[kind] = entry(kind)
        settings.FENCEDLOCK = {"default": {**made[kind], "FENCE_DATABASE": "postgres"}}
        if kind == "dynamodb" and is_new:
            from django_fencedlock.backends.dynamodb import create_table

            create_table()

    return change


ROWS = Invoice.objects.using("postgres")


@pytest.fixture
def paused():
    """Return a function that runs code as another holder, which renews nothing."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda act: thread.submit(act).result(20)
        thread.submit(connections.close_all).result(20)


def acquire():
    lease = lock("tests.invoice:1").acquire(blocking=False)
    service("default").keeper.forget(lease)
    row, _ = ROWS.get_or_create(pk=1)
    return lease, row


def wait_for_the_row_to_go():
    # A row of the registry may outlive the release by a second.
    wait_until(lambda: not HeldLock.objects.using("postgres").exists(), "the row to go")


def save(row):
    row.amount += 1
    row.save()


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_tokens_rise_over_all_services(route, move):
    tokens = []
    for kind in (*route, *reversed(route)):
        move(kind)
        for _ in range(3):
            with lock("x") as lease:
                tokens.append(lease.token)
                assert Fence.objects.using("postgres").get(name="x").token == lease.token
        wait_for_the_row_to_go()
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_a_paused_holder_of_the_former_service_writes_nothing(route, move, paused):
    for former, new in pairwise(route):
        move(former)
        lease, row = paused(acquire)
        move(new)
        with pytest.raises(AliasConflict, match="before the alias was changed"):
            lock("tests.invoice:1").acquire(blocking=False)
        # Its ttl is over.
        HeldLock.objects.using("postgres").update(expires_at=F("expires_at") - timedelta(hours=1))
        with lock("tests.invoice:1", blocking_timeout=5) as newer:
            assert newer.token > lease.token
            save(ROWS.get(pk=1))
        with pytest.raises(StaleFence):
            paused(partial(save, row))
        with contextlib.suppress(LeaseLost):
            paused(lease.release)
        wait_for_the_row_to_go()


def test_two_servers_of_one_kind_grant_a_name_at_once_but_one_holder_writes(move, paused):
    move("redis")
    lease, row = paused(acquire)
    move("valkey")
    with lock("tests.invoice:1") as newer:
        assert newer.token > lease.token
        save(ROWS.get(pk=1))
    with pytest.raises(StaleFence):
        paused(partial(save, row))
    with contextlib.suppress(LeaseLost):
        paused(lease.release)
    wait_for_the_row_to_go()
