"""However a body ends, its lock is released with it."""

import pytest

from django_fencedlock.celery import SkippedRun
from tests.models import Invoice
from tests.workers.looks import failure, is_free, wait_until_free
from tests.workers.tasks import ALIASES, Mishap, task


@pytest.mark.parametrize("outcome", ["return", "raise"])
def test_a_result_or_an_exception_comes_back(any_worker, journal, key, outcome):
    result = task("skip").delay(key, 42, outcome=outcome)
    assert (
        isinstance(failure(result), Mishap) if outcome == "raise" else result.get(timeout=20) == 42
    )
    ended = {"return": "returned", "raise": "Mishap"}[outcome]
    assert [span.outcome for span in journal.spans(key)] == [ended]
    assert is_free(key)


@pytest.mark.parametrize("alias", ALIASES)
def test_the_body_runs_under_its_lock(worker, journal, key, alias):
    result = task("skip", alias).delay(key, 42, gate=True)
    (span,) = journal.wait_for_begun(key)
    assert not is_free(key, alias)
    assert span.lock == key
    assert (span.token is None) == (alias == "unfenced")
    journal.open_gate(key)
    assert result.get(timeout=20) == 42
    assert is_free(key, alias)


def test_each_retry_has_a_new_token(any_worker, journal, key):
    assert task("skip").delay(key, 42, outcome="retry, retry, return").get(timeout=20) == 42
    spans = journal.assert_no_overlap(key)
    assert [span.outcome for span in spans] == ["Retry", "Retry", "returned"]
    assert [span.retries for span in spans] == [0, 1, 2]
    assert len({span.id for span in spans}) == 1
    assert len({span.token for span in spans}) == 3
    assert is_free(key)


def test_a_run_before_is_no_conflict_for_its_own_automatic_retry(worker, journal, key):
    assert task("autoretry").delay(key, 42, outcome="raise, raise, return").get(timeout=20) == 42
    spans = journal.assert_no_overlap(key)
    assert [span.outcome for span in spans] == ["Mishap", "Mishap", "returned"]
    assert len({span.token for span in spans}) == 3


@pytest.mark.parametrize("outcome", ["ignore", "reject"])
def test_what_leaves_no_result_releases_the_lock(any_worker, journal, key, outcome):
    task("skip").delay(key, outcome=outcome)
    (span,) = journal.wait_for_ended(key)
    assert span.outcome == outcome.capitalize()
    wait_until_free(key)


def test_a_fenced_row_is_written_by_one_at_a_time(worker, key):
    invoice = Invoice.objects.create()
    results = [task("pay").delay(invoice_id=invoice.pk, amount=1) for _ in range(10)]
    ran = [SkippedRun.of(result.get(timeout=20)) is None for result in results]
    invoice.refresh_from_db()
    assert invoice.amount == sum(ran) >= 1


def test_a_service_that_is_down_fails_the_task(worker, journal, key):
    assert type(failure(task("skip", "down").delay(key))).__name__ == "BackendUnavailable"
    assert journal.spans(key) == []
