"""The same on every pool."""

from importlib.util import find_spec

import pytest

from django_fencedlock import lock
from django_fencedlock.storage.tables import HeldLock
from tests.servers.process import wait_until
from tests.workers.journal import now
from tests.workers.looks import is_free, was_skipped
from tests.workers.tasks import task

POOLS = ["prefork", "threads", "solo", "gevent"]


@pytest.fixture(params=POOLS)
def pool_worker(request, shared_worker):
    if request.param == "gevent" and not find_spec("gevent"):
        pytest.skip("gevent isn't installed")
    return shared_worker(pool=request.param)


def test_a_retry_comes_again_until_its_own_run_has_ended(pool_worker, journal, key):
    """The body's ``finally`` outlasts the countdown, and another thread or process is idle."""
    aliases = ["default", "sessions", "redis"]
    results = [
        task("skip", alias).delay(f"{key}-{alias}", 42, outcome="retry, return", tidy=1)
        for alias in aliases
    ]
    assert [result.get(timeout=30) for result in results] == [42, 42, 42]
    for alias in aliases:
        spans = journal.assert_no_overlap(f"{key}-{alias}")
        assert [span.retries for span in spans] == [0, 1]
        assert is_free(f"{key}-{alias}", alias)


def test_a_conflict_is_skipped(pool_worker, journal, key):
    with lock(key):
        assert was_skipped(task("skip").delay(key))
        results = [task("skip").delay(f"{key}-{number}", number) for number in range(4)]
        assert [result.get(timeout=20) for result in results] == list(range(4))


@pytest.mark.parametrize("policy", ["wait", "retry"])
@pytest.mark.parametrize("alias", ["default", "sessions", "redis"])
def test_bodies_run_one_by_one(pool_worker, journal, key, policy, alias):
    results = [task(policy, alias).delay(key, number, seconds=0.02) for number in range(5)]
    assert [result.get(timeout=30) for result in results] == list(range(5))
    assert len(journal.assert_no_overlap(key)) == 5
    assert is_free(key, alias)


@pytest.mark.parametrize("pool_worker", ["threads", "gevent"], indirect=True)
@pytest.mark.parametrize("alias", ["default", "rows", "sessions", "redis"])
def test_connections_that_celery_closes_are_none_of_the_lock(pool_worker, journal, key, alias):
    """It closes all of Django's before and after each task; other tasks run beside this one."""
    held = task("skip", alias).delay(key, 42, gate=True)
    (span,) = journal.wait_for_begun(key)
    for number in range(8):
        task("plain").delay(f"{key}-plain", number).get(timeout=20)
    assert was_skipped(task("skip", alias).delay(key)).token == span.token
    journal.open_gate(key)
    assert held.get(timeout=20) == 42
    assert is_free(key, alias)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_lease_outlives_its_ttl_while_its_body_runs(shared_worker, journal, key, pool):
    shared_worker(pool=pool)
    held = task("short").delay(key, 42, gate=True)
    (span,) = journal.wait_for_begun(key)
    before = HeldLock.objects.get(name=key).expires_at
    until = now() + 5.5
    wait_until(lambda: HeldLock.objects.get(name=key).expires_at > before, "a renewal")
    wait_until(lambda: now() > until, "the end of the first ttl")
    assert was_skipped(task("skip").delay(key)).token == span.token
    journal.open_gate(key)
    assert held.get(timeout=20) == 42
