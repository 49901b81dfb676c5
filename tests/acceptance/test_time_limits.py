"""Time limits, revokes, and locks that are lost: what stops a body from outside."""

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

from django_fencedlock.celery import lock_name
from django_fencedlock.storage.tables import HeldLock
from tests.models import Invoice
from tests.servers.process import wait_until
from tests.workers.journal import now
from tests.workers.looks import failure, is_free, wait_until_free
from tests.workers.tasks import task

LONG = 20_000_000


@pytest.fixture
def revoke(worker):
    def send(result, number):
        worker.app.control.revoke(
            result.id, terminate=True, signal=number, destination=[worker.name]
        )

    return send


def test_a_soft_limit_releases_the_lock(worker, journal, key):
    result = task("soft").delay(key, seconds=20)
    assert isinstance(failure(result), SoftTimeLimitExceeded)
    assert [span.outcome for span in journal.spans(key)] == ["SoftTimeLimitExceeded"]
    assert is_free(key)


@pytest.mark.parametrize("body", [{"seconds": 20}, {"grind": LONG}])
def test_a_hard_limit_releases_the_lock(worker, journal, key, body):
    """Within a call of C, the child sees no signal until the call ends, and is killed."""
    result = task("hard").delay(key, **body)
    assert isinstance(failure(result), TimeLimitExceeded)
    wait_until_free(key)
    (span,) = journal.spans(key)
    assert "seconds" in body or span.ended is None


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_a_revoked_body_releases_the_lock(worker, journal, key, revoke, number):
    result = task("skip").delay(key, seconds=30)
    journal.wait_for_begun(key)
    revoke(result, number)
    journal.wait_for_ended(key)
    wait_until_free(key)
    # Celery writes REVOKED at once, and the child may write what became of it after that.
    assert isinstance(failure(result), TaskRevokedError | SoftTimeLimitExceeded)


def test_a_revoked_greenlet_releases_the_lock(shared_worker, journal, key):
    """Its process lives on, so there is no death to be noticed."""
    worker = shared_worker(pool="gevent")
    result = task("skip").delay(key, seconds=30)
    journal.wait_for_begun(key)
    worker.app.control.revoke(result.id, terminate=True, destination=[worker.name])
    (span,) = journal.wait_for_ended(key)
    assert span.outcome == "GreenletExit"
    wait_until_free(key)


def test_a_hard_limit_of_a_greenlet_releases_the_lock(shared_worker, journal, key):
    shared_worker(pool="gevent")
    result = task("hard").delay(key, seconds=20)
    assert isinstance(failure(result), TimeLimitExceeded)
    (span,) = journal.wait_for_ended(key)
    assert span.ended - span.begun < 15
    wait_until_free(key)


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_limits_that_the_pool_ignores_end_no_lock(shared_worker, journal, key, pool):
    shared_worker(pool=pool)
    result = task("hard").delay(key, 42, gate=True)
    (span,) = journal.wait_for_begun(key)
    wait_until(lambda: now() - span.begun > 1.5, "the limit to be past")
    assert not is_free(key)
    journal.open_gate(key)
    assert result.get(timeout=20) == 42


def test_a_task_that_is_revoked_before_it_begins_takes_no_lock(worker, journal, key):
    result = task("skip").apply_async((key,), countdown=5)
    worker.app.control.revoke(result.id, destination=[worker.name])
    assert isinstance(failure(result), TaskRevokedError)
    assert journal.spans(key) == []
    assert is_free(key)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_lost_lock_ends_the_body(shared_worker, journal, key, pool):
    """But for a sleeping thread, which nothing can wake."""
    worker = shared_worker(pool=pool)
    arguments = {"gate": True} if pool == "threads" else {"seconds": 20}
    result = task("abort").delay(key, **arguments)
    journal.wait_for_begun(key)
    HeldLock.objects.filter(name=key).delete()
    assert type(failure(result)).__name__ == "LeaseLost"
    (span,) = journal.wait_for_ended(key)
    assert span.ended - span.begun < 15
    assert task("skip").delay(key, 42).get(timeout=20) == 42
    assert worker.process.running


def test_under_gevent_a_lost_lock_fails_the_task_when_its_body_ends(shared_worker, journal, key):
    worker = shared_worker(pool="gevent")
    result = task("abort").delay(key, gate=True)
    journal.wait_for_begun(key)
    HeldLock.objects.filter(name=key).delete()
    wait_until(lambda: f"Lost lock {key!r}" in worker.log, "the worker to log the loss")
    journal.open_gate(key)
    assert type(failure(result)).__name__ == "LeaseLost"
    (span,) = journal.wait_for_ended(key)
    assert span.outcome == "returned"


def test_a_fenced_write_under_a_lost_lock_is_refused(worker, journal, key):
    invoice = Invoice.objects.create()
    result = task("pay").delay(invoice.pk, amount=41, gate=key)
    journal.wait_for_begun(key)
    HeldLock.objects.filter(name=lock_name(task("pay"), invoice.pk, 0)).delete()
    with Invoice.fencing.lock(pk=invoice.pk):
        journal.open_gate(key)
        assert type(failure(result)).__name__ == "StaleFence"
    invoice.refresh_from_db()
    assert invoice.amount == 0


def test_max_hold_ends_the_lease(worker, journal, key):
    result = task("max_hold").delay(key, seconds=20)
    assert type(failure(result)).__name__ == "LeaseLost"
    (span,) = journal.wait_for_ended(key)
    assert 1 < span.ended - span.begun < 15
    wait_until(lambda: is_free(key), "the lock to be free")


def test_a_terminated_child_leaves_no_row_of_a_released_lock(worker, journal, key, revoke):
    """As at a hard limit, its body's ``finally`` runs; but nothing kills it while it ends."""
    result = task("skip", "redis").delay(key, seconds=30)
    journal.wait_for_begun(key)
    rows = HeldLock.objects.using("postgres").filter(name=key)
    assert rows.exists()
    revoke(result, "SIGTERM")
    wait_until(lambda: not rows.exists(), "no row of the lock")
