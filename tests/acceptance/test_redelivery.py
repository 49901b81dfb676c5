"""A message delivered twice: its bodies don't overlap, and what is done isn't done again."""

import time

import pytest
from kombu.transport.redis import Channel

from tests.servers.process import wait_until
from tests.workers.tasks import task

pytestmark = pytest.mark.skipif(
    not hasattr(Channel, "unacked_restore_throttle"),
    reason="this kombu looks every 100 s or so for messages that nobody acknowledged",
)

VISIBLE = 2
SHORT = {"transport": {"visibility_timeout": VISIBLE}}


@pytest.fixture
def workers(make_worker):
    first = make_worker(concurrency=6, **SHORT)
    make_worker(broker=first.broker, concurrency=6, **SHORT)
    return first


def settle(worker):
    def is_empty():
        return not worker.broker.depth() and not worker.broker.unacknowledged()

    wait_until(is_empty, "an empty queue", 60)
    time.sleep(VISIBLE + 1.5)
    wait_until(is_empty, "an empty queue", 40)


# Each sends a message, and looks, when no message is left, what became of it.


def a_plain_task_runs_again_beside_itself(journal, key):
    """Otherwise the others prove nothing."""
    task("plain_late").delay(key, seconds=VISIBLE + 8)
    yield
    first, second, *_ = journal.spans(key)
    assert first.overlaps(second)


def outlasts(kind, alias):
    def a_run_outlasts_the_visibility_timeout(journal, key):
        result = task(kind, alias).delay(key, 42, seconds=VISIBLE * 2 + 1)
        yield
        assert result.get(timeout=20) == 42
        assert [span.outcome for span in journal.spans(key)] == ["returned"]

    a_run_outlasts_the_visibility_timeout.__name__ += f"_{kind}_{alias}"
    return a_run_outlasts_the_visibility_timeout


def a_task_is_due_after_the_visibility_timeout(journal, key):
    result = task("late_skip").apply_async((key, 42), countdown=VISIBLE * 2 + 1)
    yield
    assert len(journal.spans(key)) == 1
    assert result.get(timeout=20) == 42


def a_task_runs_again_if_that_is_wanted_but_not_beside_itself(journal, key):
    task("any_delivery").delay(key, 42, seconds=VISIBLE + 2)
    yield
    assert len(journal.assert_no_overlap(key)) >= 1


def a_failure_is_final_too(journal, key):
    result = task("late").delay(key, outcome="raise", seconds=VISIBLE * 2)
    yield
    assert len(journal.spans(key)) == 1
    assert result.state == "FAILURE"


def a_retry_is_another_message(journal, key):
    result = task("late").delay(key, 42, outcome="retry, return", seconds=VISIBLE + 1)
    yield
    assert result.get(timeout=20) == 42
    spans = journal.assert_no_overlap(key)
    assert [span.outcome for span in spans] == ["Retry", "returned"]


def a_conflict_makes_no_second_message(journal, key):
    """The first to come waits behind another run, and so does what is delivered again."""
    task("late_retry").delay(key, "first", seconds=VISIBLE * 2)
    journal.wait_for_begun(key)
    result = task("late_retry").delay(key, 42)
    yield
    assert result.get(timeout=20) == 42
    assert [span.value for span in journal.assert_no_overlap(key)] == ["first", 42]


STORIES = [
    a_plain_task_runs_again_beside_itself,
    *[outlasts(kind, alias) for kind in ("late", "late_skip") for alias in ("default", "redis")],
    a_task_is_due_after_the_visibility_timeout,
    a_task_runs_again_if_that_is_wanted_but_not_beside_itself,
    a_failure_is_final_too,
    a_retry_is_another_message,
    a_conflict_makes_no_second_message,
]


def test_messages_that_are_delivered_again(workers, journal, key):
    """All stories at once: each takes a while, most of which is waiting."""
    stories = {tell.__name__: tell(journal, f"{key}-{tell.__name__}") for tell in STORIES}
    for story in stories.values():
        next(story)
    settle(workers)
    failed = []
    for name, story in stories.items():
        try:
            assert next(story, "told") == "told"
        except Exception as exc:
            exc.add_note(f"In the story that {name}, of key {key}-{name}.")
            failed.append(exc)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(STORIES)} stories went wrong", failed)


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
