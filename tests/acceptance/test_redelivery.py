"""A message delivered twice: its bodies don't overlap, and what is done isn't done again."""

import contextlib
import time

import pytest
from kombu.transport.redis import Channel

from tests.servers.process import wait_until
from tests.workers import Worker
from tests.workers.tasks import task

pytestmark = pytest.mark.skipif(
    not hasattr(Channel, "unacked_restore_throttle"),
    reason="this kombu looks every 100 s or so for messages that nobody acknowledged",
)

VISIBLE = 2
SHORT = {"transport": {"visibility_timeout": VISIBLE}}


def settle(worker):
    """
    Wait until no message is left, and none comes back.
    """

    def is_empty():
        return not worker.broker.depth() and not worker.broker.unacknowledged()

    wait_until(is_empty, "an empty queue", 40)
    time.sleep(VISIBLE + 1.5)
    wait_until(is_empty, "an empty queue", 40)


@pytest.fixture(scope="module")
def pair(make_broker, worker_environment, journal):
    broker = make_broker("redis")
    with contextlib.ExitStack() as stack:
        workers = [
            Worker(broker, journal, worker_environment, concurrency=2, **SHORT) for _ in "ab"
        ]
        for worker in workers:
            stack.enter_context(contextlib.closing(worker)).start()
        yield workers


@pytest.fixture
def workers(pair, use):
    """
    Two workers on one queue, whose messages are delivered again before their bodies end.
    """
    for worker in reversed(pair):
        use(worker)
    return pair[0]


def test_a_plain_task_does_run_again_at_once(workers, journal, key):
    """Otherwise the others prove nothing."""
    task("plain_late").delay(key, seconds=VISIBLE + 3)
    first, second, *_ = journal.wait_for_begun(key, 2)
    assert first.overlaps(second)


@pytest.mark.parametrize("alias", ["default", "redis"])
@pytest.mark.parametrize("kind", ["late", "late_skip"])
def test_a_run_that_outlasts_the_visibility_timeout_runs_once(workers, journal, key, kind, alias):
    result = task(kind, alias).delay(key, 42, seconds=VISIBLE * 2 + 1)
    assert result.get(timeout=30) == 42
    settle(workers)
    assert [span.outcome for span in journal.spans(key)] == ["returned"]
    assert result.get(timeout=1) == 42


def test_a_task_that_is_due_after_the_visibility_timeout_runs_once(workers, journal, key):
    result = task("late_skip").apply_async((key, 42), countdown=VISIBLE * 2 + 1)
    assert result.get(timeout=30) == 42
    settle(workers)
    assert len(journal.spans(key)) == 1
    # What was skipped since it was done must not replace what was done.
    assert result.get(timeout=1) == 42


def test_runs_again_if_that_is_wanted_but_one_by_one(workers, journal, key):
    task("any_delivery").delay(key, 42, seconds=VISIBLE + 2)
    journal.wait_for_ended(key, 1)
    settle(workers)
    assert len(journal.assert_no_overlap(key)) >= 1


def test_a_killed_worker_leaves_its_message_to_another(make_worker, journal, key):
    first = make_worker(concurrency=2, **SHORT)
    result = task("late").delay(key, 42, gate=True)
    journal.wait_for_begun(key)
    first.kill()
    make_worker(broker=first.broker, concurrency=2, **SHORT)
    journal.wait_for_begun(key, 2, timeout=30)
    journal.open_gate(key)
    assert result.get(timeout=20) == 42
    assert len(journal.spans(key)) == 2


def test_a_failure_is_final_too(workers, journal, key):
    result = task("late").delay(key, outcome="raise", seconds=VISIBLE * 2)
    result.get(timeout=30, propagate=False)
    settle(workers)
    assert len(journal.spans(key)) == 1
    assert result.state == "FAILURE"


def test_a_retry_is_another_message(workers, journal, key):
    result = task("late").delay(key, 42, outcome="retry, return", seconds=VISIBLE + 1)
    assert result.get(timeout=30) == 42
    settle(workers)
    spans = journal.assert_no_overlap(key)
    assert [span.outcome for span in spans] == ["Retry", "returned"]
