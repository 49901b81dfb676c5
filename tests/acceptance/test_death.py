"""Children and workers that are killed: their locks are free at once, and not before."""

import os
import signal

import pytest

from django_fencedlock import lock
from tests.servers.process import wait_until
from tests.workers.journal import now
from tests.workers.looks import is_free, was_skipped
from tests.workers.tasks import task

ALIASES = ["default", "rows", "sessions", "redis", "unfenced"]


def kill(span):
    os.kill(span.pid, signal.SIGKILL)
    return now()


def test_an_unfenced_lock_of_a_killed_child_is_free_on_the_host(worker, journal, key):
    """Redis alone knows of it, and a process that is refused looks at its holder's process."""
    task("skip", "unfenced").delay(key, seconds=60)
    (span,) = journal.wait_for_begun(key)
    os.kill(span.pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{span.pid}/exe"), "the end of the child")
    assert not is_free(key, "unfenced")
    with lock(key, backend="redis", fenced=False, blocking_timeout=15):
        pass


@pytest.mark.parametrize("alias", ["default", "redis"])
def test_one_that_waits_is_next(worker, journal, key, alias):
    task("wait", alias).delay(key, seconds=60)
    (span,) = journal.wait_for_begun(key)
    waiting = task("wait", alias).delay(key, 42)
    wait_until(lambda: waiting.id in str(active(worker)), "the second run to begin")
    killed = kill(span)
    assert waiting.get(timeout=20) == 42
    second = journal.spans(key)[1]
    assert 0 < second.begun - killed < 15


def test_a_paused_child_keeps_its_lock(make_worker, journal, key):
    worker = make_worker()
    result = task("skip").delay(key, 42, gate=True)
    (span,) = journal.wait_for_begun(key)
    os.kill(span.pid, signal.SIGSTOP)
    try:
        assert was_skipped(task("skip").delay(key)).token == span.token
        assert worker.children()
        assert not lock(key, blocking_timeout=1).acquire(blocking=True)
    finally:
        os.kill(span.pid, signal.SIGCONT)
    journal.open_gate(key)
    assert result.get(timeout=20) == 42


@pytest.mark.parametrize(
    ("kind", "alias"), [("late", "default"), ("late", "redis"), ("late_skip", "default")]
)
def test_a_lost_run_is_delivered_again_and_runs(worker, journal, key, kind, alias):
    """Late acknowledgement, rejected when the worker is lost: delivered at once, no conflict."""
    result = task(kind, alias).delay(key, 42, gate=True)
    (span,) = journal.wait_for_begun(key)
    killed = kill(span)
    journal.wait_for_begun(key, 2)
    journal.open_gate(key)
    assert result.get(timeout=20) == 42
    spans = journal.assert_no_overlap(key, {span.run: killed})
    assert len(spans) == 2
    assert spans[1].token > spans[0].token


@pytest.mark.parametrize(
    ("pool", "alias"),
    [
        *(("prefork", alias) for alias in ALIASES),
        *((pool, "default") for pool in ("threads", "solo", "gevent")),
    ],
)
def test_a_killed_worker_is_found_dead_by_the_next_waiter(make_worker, journal, key, pool, alias):
    """No process of the worker is left to watch, but a process of the same host looks."""
    worker = make_worker(concurrency=2, pool=pool)
    task("skip", alias).delay(key, seconds=60)
    (span,) = journal.wait_for_begun(key)
    assert not is_free(key, alias)
    worker.kill()
    killed = now()
    name = "redis" if alias == "unfenced" else alias
    with lock(key, backend=name, fenced=alias != "unfenced", blocking_timeout=15) as lease:
        # A waiter at Redis looks every two seconds; the ttl is 30 s.
        assert now() - killed < 15
        assert alias == "unfenced" or lease.token > span.token


def test_a_killed_main_process_takes_its_children_along(make_worker, journal, key):
    worker = make_worker(concurrency=2)
    task("skip").delay(key, seconds=60)
    (span,) = journal.wait_for_begun(key)
    worker.send(signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{span.pid}"), "the end of the child")
    with lock(key, blocking_timeout=15):
        pass


def active(worker):
    return worker.app.control.inspect(destination=[worker.name], timeout=2).active()
