"""Workers that end by a signal."""

import signal
from datetime import UTC, datetime, timedelta

import pytest

from django_fencedlock.models import HeldLock
from tests.servers.process import wait_until
from tests.workers.looks import is_free, wait_until_free
from tests.workers.tasks import task


def test_a_warm_shutdown_waits_and_keeps_the_lease(make_worker, journal, key):
    """The body takes longer than its lease would last."""
    worker = make_worker(concurrency=2)
    result = task("short").delay(key, 42, seconds=6)
    journal.wait_for_begun(key)
    worker.send(signal.SIGTERM)
    worker.wait_for_end()
    assert [span.outcome for span in journal.spans(key)] == ["returned"]
    assert result.get(timeout=20) == 42
    assert is_free(key)


def quit_by_signal(worker):
    """Send SIGQUIT once the main process has noted the run: it waits for all others."""
    inspect = worker.app.control.inspect(destination=[worker.name], timeout=2)
    wait_until(lambda: any((inspect.active() or {}).values()), "the run to be noted")
    worker.send(signal.SIGQUIT)


@pytest.mark.parametrize("kind", ["skip", "late_skip"])
def test_a_cold_shutdown_releases_the_lock(make_worker, journal, key, kind):
    worker = make_worker(concurrency=2)
    task(kind).delay(key, seconds=30)
    journal.wait_for_begun(key)
    quit_by_signal(worker)
    worker.wait_for_end()
    wait_until_free(key)


def test_what_a_cold_shutdown_ended_is_run_by_another(make_worker, journal, key):
    worker = make_worker(concurrency=2)
    result = task("late").delay(key, 42, gate=True)
    journal.wait_for_begun(key)
    quit_by_signal(worker)
    worker.wait_for_end()
    journal.open_gate(key)
    make_worker(broker=worker.broker, concurrency=2)
    assert result.get(timeout=20) == 42
    spans = journal.spans(key)
    assert [span.outcome for span in spans] == ["SystemExit", "returned"]
    assert spans[0].token < spans[1].token


def test_a_soft_shutdown_releases_the_lock(make_worker, journal, key):
    worker = make_worker(concurrency=2, worker_soft_shutdown_timeout=1)
    task("late").delay(key, seconds=30)
    (span,) = journal.wait_for_begun(key)
    quit_by_signal(worker)
    worker.wait_for_end()
    wait_until_free(key)
    assert journal.spans(key)[0].ended - span.begun > 0.9


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_a_warm_shutdown_waits_on_every_pool(make_worker, journal, key, pool):
    worker = make_worker(pool=pool)
    task("skip").delay(key, 42, seconds=1)
    journal.wait_for_begun(key)
    worker.send(signal.SIGTERM)
    worker.wait_for_end()
    assert [span.outcome for span in journal.spans(key)] == ["returned"]
    assert is_free(key)


def test_children_that_end_leave_no_row_behind_and_old_ones_are_deleted(make_worker, key):
    """Redis has no row of its own; that of the registry is cleared a while after the release."""
    rows = HeldLock.objects.using("postgres").filter(name__startswith=key)
    long_ago = datetime.now(UTC) - timedelta(days=1)
    times = dict.fromkeys(("acquired_at", "renewed_at", "expires_at"), long_ago)
    HeldLock.objects.using("postgres").create(
        name=f"{key}-old", fenced=True, pid=1, pid_started=1, **times
    )
    make_worker("--max-tasks-per-child=1", concurrency=2)
    results = [task("skip", "redis").delay(f"{key}-{number}", number) for number in range(4)]
    assert [result.get(timeout=30) for result in results] == list(range(4))
    wait_until(lambda: not rows.exists(), "no rows")
