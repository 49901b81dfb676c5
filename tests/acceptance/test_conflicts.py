"""What a run does that finds its lock held."""

import os
import signal

import pytest
from celery.result import AsyncResult

from tests.servers.process import wait_until
from tests.workers.looks import failure, is_free, was_skipped
from tests.workers.tasks import ALIASES, task


@pytest.fixture
def held(journal, key):
    def hold(kind, alias="default", **arguments):
        result = task(kind, alias).delay(key, "first", gate=True, **arguments)
        journal.wait_for_begun(key)
        return result

    yield hold
    journal.open_gate(key)


def check_skip(worker, journal, key, held, alias="default"):
    first = held("skip", alias)
    (span,) = journal.spans(key)
    skipped = was_skipped(task("skip", alias).delay(key, "second"))
    assert (skipped.lock, skipped.reason, skipped.token) == (key, "held", span.token)
    journal.open_gate(key)
    assert first.get(timeout=20) == "first"
    assert len(journal.spans(key)) == 1
    assert task("skip", alias).delay(key, "third").get(timeout=20) == "third"


def test_a_skipped_run_succeeds_and_says_who_has_the_lock(any_worker, journal, key, held):
    check_skip(any_worker, journal, key, held)


@pytest.mark.parametrize("alias", ALIASES)
def test_every_backend_skips(worker, journal, key, held, alias):
    check_skip(worker, journal, key, held, alias)


@pytest.mark.parametrize("alias", ["default", "redis"])
def test_raise_fails(any_worker, journal, key, held, alias):
    held("raise", alias)
    exc = failure(task("raise", alias).delay(key))
    assert type(exc).__name__ == "LockNotAcquired"
    assert key in str(exc)
    assert len(journal.spans(key)) == 1


@pytest.mark.parametrize("alias", ALIASES)
def test_wait_waits_for_the_end(worker, journal, key, held, alias):
    first = held("wait", alias)
    others = [task("wait", alias).delay(key, number) for number in range(3)]
    journal.open_gate(key)
    assert first.get(timeout=20) == "first"
    assert [other.get(timeout=20) for other in others] == [0, 1, 2]
    assert len(journal.assert_no_overlap(key)) == 4
    assert is_free(key, alias)


@pytest.mark.parametrize("alias", ["default", "sessions", "redis"])
def test_retry_comes_again(any_worker, journal, key, held, alias):
    held("retry", alias)
    second = task("retry", alias).delay(key, "second")
    wait_until(lambda: second.state == "RETRY", "a retry")
    journal.open_gate(key)
    assert second.get(timeout=20) == "second"
    spans = journal.assert_no_overlap(key)
    assert [span.value for span in spans] == ["first", "second"]
    assert [span.retries for span in spans] == [0, 0]


@pytest.mark.parametrize("kind", ["skip", "raise", "wait", "retry", "late_skip", "coalesce"])
def test_a_retry_is_no_conflict_with_its_own_run(worker, journal, key, kind):
    result = task(kind).delay(key, 42, outcome="retry, return", tidy=1)
    assert result.get(timeout=20) == 42
    spans = journal.assert_no_overlap(key)
    assert [span.retries for span in spans] == [0, 1]
    assert "wasn't acquired" not in worker.new_log


@pytest.mark.parametrize("kind", ["skip", "late_skip"])
@pytest.mark.parametrize("outcome", ["replace", "chain"])
def test_what_a_body_publishes_to_go_on_waits_for_its_end(worker, journal, key, kind, outcome):
    result = task(kind).delay(key, 42, outcome=outcome, tidy=1)
    if outcome == "chain":
        result = AsyncResult(result.get(timeout=20))
    assert result.get(timeout=20) == 42
    spans = journal.assert_no_overlap(key)
    assert [span.value for span in spans] == [42, 42]


def test_a_retry_runs_though_its_own_run_was_killed(make_worker, journal, key):
    worker = make_worker()
    result = task("skip").delay(key, 42, outcome="retry, return", tidy=60)
    first = journal.wait_for_begun(key)[0]
    received = f"[{result.id}] received"
    wait_until(lambda: worker.log.count(received) >= 2, "the retry to be published")
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: len(journal.spans(key)) == 2, "the retry")
    wait_until(lambda: is_free(key), "the end of the retry")
