"""However a body ends, its lock is given back with it."""

import pytest
from celery.exceptions import MaxRetriesExceededError

from django_fencedlock.celery import SkippedRun
from tests.models import Invoice
from tests.workers.looks import failure, is_free, wait_until_free
from tests.workers.tasks import ALIASES, Mishap, task


def test_a_result_comes_back(any_worker, journal, key):
    assert task("skip").delay(key, 42).get(timeout=10) == 42
    assert [span.outcome for span in journal.spans(key)] == ["returned"]
    assert is_free(key)


def test_an_exception_comes_back(any_worker, journal, key):
    result = task("skip").delay(key, outcome="raise")
    assert isinstance(failure(result), Mishap)
    assert [span.outcome for span in journal.spans(key)] == ["Mishap"]
    assert is_free(key)


@pytest.mark.parametrize("alias", ALIASES)
def test_the_body_runs_under_its_lock(worker, journal, key, alias):
    result = task("skip", alias).delay(key, 42, gate=True)
    (span,) = journal.wait_for_begun(key)
    assert not is_free(key, alias)
    assert span.lock == key
    assert (span.token is None) == (alias == "unfenced")
    journal.open_gate(key)
    assert result.get(timeout=10) == 42
    assert is_free(key, alias)


def test_each_retry_has_a_new_token(any_worker, journal, key):
    assert task("skip").delay(key, 42, outcome="retry, retry, return").get(timeout=10) == 42
    spans = journal.assert_no_overlap(key)
    assert [span.outcome for span in spans] == ["Retry", "Retry", "returned"]
    assert [span.retries for span in spans] == [0, 1, 2]
    assert len({span.id for span in spans}) == 1
    assert len({span.token for span in spans}) == 3
    assert is_free(key)


def test_retries_come_to_an_end(worker, journal, key):
    result = task("skip").delay(key, outcome="retry")
    assert isinstance(failure(result), MaxRetriesExceededError)
    assert len(journal.spans(key)) == 4
    assert is_free(key)


def test_a_run_before_is_no_conflict_for_its_own_automatic_retry(worker, journal, key):
    """Its policy is to fail at any conflict."""
    assert task("autoretry").delay(key, 42, outcome="raise, raise, return").get(timeout=10) == 42
    spans = journal.assert_no_overlap(key)
    assert [span.outcome for span in spans] == ["Mishap", "Mishap", "returned"]
    assert len({span.token for span in spans}) == 3


def test_automatic_retries_come_to_an_end(worker, journal, key):
    result = task("autoretry").delay(key, outcome="raise")
    assert isinstance(failure(result), Mishap)
    assert len(journal.spans(key)) == 3
    assert is_free(key)


@pytest.mark.parametrize("outcome", ["ignore", "reject"])
def test_what_leaves_no_result_gives_the_lock_back(any_worker, journal, key, outcome):
    task("skip").delay(key, outcome=outcome)
    (span,) = journal.wait_for_ended(key)
    assert span.outcome == outcome.capitalize()
    wait_until_free(key)


def test_a_hundred_names_leave_nothing_behind(worker, journal, key):
    results = [task("skip", "redis").delay(f"{key}-{n}", n) for n in range(100)]
    assert [result.get(timeout=20) for result in results] == list(range(100))
    assert all(is_free(f"{key}-{n}", "redis") for n in range(100))


def test_rate_limits_hold(worker, journal, key):
    results = [task("limited").delay(f"{key}-{n}", n) for n in range(5)]
    assert [result.get(timeout=10) for result in results] == list(range(5))
    begun = [journal.spans(f"{key}-{n}")[0].begun for n in range(5)]
    assert max(begun) - min(begun) > 0.6


def test_the_lock_covers_fenced_rows(worker, key):
    invoice = Invoice.objects.create(amount=1)
    token = task("pay").delay(invoice.pk, amount=41).get(timeout=10)
    invoice.refresh_from_db()
    assert invoice.amount == 42
    assert invoice.fence == token


def test_a_fenced_row_is_written_by_one_at_a_time(worker, key):
    invoice = Invoice.objects.create()
    results = [task("pay").delay(invoice_id=invoice.pk, amount=1) for _ in range(10)]
    ran = [SkippedRun.of(result.get(timeout=10)) is None for result in results]
    invoice.refresh_from_db()
    assert invoice.amount == sum(ran) >= 1


# Without a worker


def test_apply_runs_under_the_lock(worker, journal, key):
    assert task("skip").apply((key, 42)).get() == 42
    (span,) = journal.spans(key)
    assert span.lock == key
    assert is_free(key)


def test_apply_meets_a_run_of_a_worker(worker, journal, key):
    result = task("skip").delay(key, gate=True)
    journal.wait_for_begun(key)
    assert SkippedRun.of(task("skip").apply((key,)).get())
    journal.open_gate(key)
    result.get(timeout=10)


def test_eager_tasks_run_under_the_lock(worker, journal, key):
    worker.app.conf.task_always_eager = True
    try:
        assert task("skip").delay(key, 42, outcome="retry, return").get() == 42
    finally:
        worker.app.conf.task_always_eager = False
    spans = journal.assert_no_overlap(key)
    assert [span.lock for span in spans] == [key, key]
    assert all(span.eager for span in spans)


def test_a_plain_call_takes_the_lock(worker, journal, key):
    result = task("skip").delay(key, gate=True)
    journal.wait_for_begun(key)
    assert SkippedRun.of(task("skip")(key))
    journal.open_gate(key)
    result.get(timeout=10)
    assert task("skip")(key, 42) == 42
    assert journal.spans(key)[-1].lock == key
    assert is_free(key)


@pytest.mark.parametrize("how", ["apply", "call"])
def test_a_task_run_here_raises_here(worker, journal, key, how):
    with pytest.raises(Mishap):
        if how == "apply":
            task("skip").apply((key,), {"outcome": "raise"}, throw=True)
        else:
            task("skip")(key, outcome="raise")
    assert is_free(key)


def test_a_call_that_is_told_to_exit_gives_the_lock_back(worker, journal, key):
    """What no ``except Exception`` sees, in a process that lives on."""
    with pytest.raises(SystemExit):
        task("skip")(key, outcome="exit")
    assert is_free(key)


# The lock service is down


def test_a_service_that_is_down_fails_the_task(worker, journal, key):
    assert type(failure(task("skip", "down").delay(key))).__name__ == "BackendUnavailable"
    assert journal.spans(key) == []


def test_a_service_that_is_down_may_be_retried(worker, journal, key):
    result = task("autoretry", "down").delay(key)
    assert type(failure(result)).__name__ == "BackendUnavailable"
    assert journal.spans(key) == []
    assert worker.new_log.count("Retry in") == 1


def test_a_task_may_run_without_a_service(worker, journal, key):
    assert task("run", "down").delay(key, 42).get(timeout=20) == 42
    assert "runs without its lock" in worker.new_log
