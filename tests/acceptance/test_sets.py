"""Tasks under a set of locks: transfers between accounts, in both directions at once."""

import os
import signal

import pytest

from tests.models import Invoice
from tests.servers.process import wait_until
from tests.workers.looks import is_free
from tests.workers.tasks import ALIASES, task

#: Pairs of accounts, by number, that make circles; and one transfer to the account itself.
PAIRS = [(0, 1), (1, 0), (1, 2), (2, 0), (0, 2), (2, 1), (0, 0)]
START = 1000


@pytest.fixture
def alias():
    return "default"


@pytest.fixture
def accounts(alias):
    rows = Invoice.objects.using("default" if alias == "default" else "postgres")
    return [rows.create(amount=START) for _ in range(3)]


def send(transfers, key, accounts, count):
    """Send transfers of 1, 2, 3 and so on; return them, and the balances at their end."""
    expected, results = [START] * 3, []
    for amount in range(1, count + 1):
        source, target = PAIRS[amount % len(PAIRS)]
        expected[source] -= amount
        expected[target] += amount
        pks = accounts[source].pk, accounts[target].pk
        results.append(transfers.delay(key, *pks, amount))
    return results, expected


def assert_moved(journal, key, accounts, expected, count):
    for row in accounts:
        row.refresh_from_db()
    assert [row.amount for row in accounts] == expected
    assert sum(expected) == 3 * START
    ended = [span.amount for span in journal.spans(key) if span.outcome == "returned"]
    assert sorted(ended) == [*range(1, count + 1)]


@pytest.mark.parametrize("alias", ALIASES[:-1])
def test_none_of_many_transfers_waits_forever_or_is_lost(worker, journal, key, accounts, alias):
    results, expected = send(task("transfer", alias), key, accounts, 50)
    for result in results:
        result.get(timeout=60)
    assert_moved(journal, key, accounts, expected, 50)
    assert all(is_free(f"tests.invoice:{row.pk}", alias) for row in accounts)


def test_retries_lose_none(worker, journal, key, accounts):
    results, expected = send(task("transfer_retry"), key, accounts, 30)
    for result in results:
        result.get(timeout=120)
    assert_moved(journal, key, accounts, expected, 30)


@pytest.mark.parametrize("alias", ["rows", "redis"])
def test_a_killed_child_loses_none(make_worker, journal, key, accounts, alias):
    worker = make_worker()
    results, _ = send(task("transfer", alias), key, accounts, 30)
    for count in (4, 12):
        pid = journal.wait_for_begun(key, count)[-1].pid
        os.kill(pid, signal.SIGKILL)
    for result in results:
        result.get(timeout=60)
    wait_until(
        lambda: all(is_free(f"tests.invoice:{row.pk}", alias) for row in accounts), "the locks"
    )
    for row in accounts:
        row.refresh_from_db()
    # The body of a killed run may have been committed, so that its repetition moves it twice.
    assert sum(row.amount for row in accounts) == 3 * START
    assert {span.amount for span in journal.spans(key) if span.ended} == {*range(1, 31)}
    assert worker.process.running
