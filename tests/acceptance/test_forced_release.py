"""Forced release of a run's lock: the run, its triggers and its message."""

import os
import signal

import pytest

from django_fencedlock import force_release
from django_fencedlock.exceptions import LeaseLost
from django_fencedlock.models import MessageRecord, PendingRun
from django_fencedlock.ops.force_release import Outcome
from tests.servers.process import wait_until
from tests.workers.looks import was_skipped
from tests.workers.tasks import task

ALIASES = ["default", "rows", "sessions", "redis"]


def force(key, alias="default"):
    done = force_release(key, by="the boss", backend=alias)
    expected = Outcome.LEFT_TO_HOLDER if alias == "sessions" else Outcome.FREED
    assert done.outcome is expected


def database(alias):
    return "default" if alias == "default" else "postgres"


def test_the_body_is_interrupted_and_its_error_names_the_author(worker, journal, key):
    result = task("abort").delay(key, gate=True)
    journal.wait_for_begun(key)
    force(key)
    with pytest.raises(LeaseLost, match="released by force, by the boss"):
        result.get(timeout=20)
    (span,) = journal.spans(key)
    assert span.outcome == "Abort"


@pytest.mark.parametrize("alias", ALIASES)
def test_triggers_that_coalesced_are_run(worker, journal, key, alias):
    first = task("coalesce", alias).delay(key, "first", gate=True)
    journal.wait_for_begun(key)
    assert was_skipped(task("coalesce", alias).delay(key, "second"))
    force(key, alias)
    journal.open_gate(key)
    with pytest.raises(LeaseLost, match="by the boss"):
        first.get(timeout=20)
    wait_until(lambda: "second" in values(journal, key), "the second run")
    wait_until(lambda: is_settled(key, alias), "the pending run to be done")
    tokens = [span.token for span in journal.spans(key)]
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("alias", ["rows", "redis"])
def test_triggers_are_run_though_the_former_run_hangs(worker, journal, key, alias):
    task("coalesce", alias).delay(key, "first", gate=True)
    journal.wait_for_begun(key)
    assert was_skipped(task("coalesce", alias).delay(key, "second"))
    force(key, alias)
    wait_until(lambda: "second" in values(journal, key), "the second run", 30)
    assert "first" not in values(journal, key)
    journal.open_gate(key)
    journal.wait_for_ended(key, 2)


@pytest.mark.parametrize("alias", ["rows", "redis"])
def test_a_trigger_after_it_runs_at_once_whatever_the_former_run_does(worker, journal, key, alias):
    first = task("coalesce", alias).delay(key, "first", gate=True)
    journal.wait_for_begun(key)
    force(key, alias)
    second = task("coalesce", alias).delay(key, "second", gate=True)
    journal.wait_for_begun(key, 2)
    assert was_skipped(task("coalesce", alias).delay(key, "third"))
    journal.open_gate(key)
    with pytest.raises(LeaseLost, match="by the boss"):
        first.get(timeout=20)
    assert second.get(timeout=20) == "second"
    wait_until(lambda: "third" in values(journal, key), "the third run")
    wait_until(lambda: is_settled(key, alias), "the pending run to be done")


@pytest.mark.parametrize("alias", ["rows", "redis"])
def test_a_message_whose_child_dies_after_it_is_run_again(worker, journal, key, alias):
    result = task("late", alias).delay(key, 42, gate=True)
    (span,) = journal.wait_for_begun(key)
    force(key, alias)
    os.kill(span.pid, signal.SIGKILL)
    journal.open_gate(key)
    assert result.get(timeout=30) == 42
    first, again = journal.spans(key)
    assert again.token > first.token + 1
    found = MessageRecord.objects.using(database(alias)).get(name=key)
    assert (found.outcome, found.tries) == ("success", 2)


def values(journal, key):
    return [span.value for span in journal.spans(key) if span.outcome == "returned"]


def is_settled(key, alias):
    row = PendingRun.objects.using(database(alias)).get(name=key)
    return row.wanted == row.done
