"""While one runs, any number of triggers become one further run, and none is lost."""

import contextlib
import os
import random
import signal
import time
from functools import partial

import pytest

from django_fencedlock.celery import SkippedRun
from tests.servers.process import _alive, wait_until
from tests.workers.journal import now
from tests.workers.looks import was_skipped
from tests.workers.tasks import task

ALIASES = ["default", "rows", "sessions", "redis"]


def check(journal, key, alias="default"):
    first = task("coalesce", alias).delay(key, 0, gate=True)
    journal.wait_for_begun(key)
    triggers = [task("coalesce", alias).delay(key, number) for number in range(1, 5)]
    assert {was_skipped(trigger).reason for trigger in triggers} == {"coalesced"}
    last = task("coalesce", alias).delay(key, 5)
    assert was_skipped(last).reason == "coalesced"
    journal.open_gate(key)
    assert first.get(timeout=20) == 0
    journal.wait_for_ended(key, 2)
    # Whatever else would come is there by now.
    task("coalesce", alias).delay(key, 6).get(timeout=20)
    # It may have been coalesced, if the run before had not released the lock yet.
    journal.wait_for_ended(key, 3)
    spans = journal.assert_no_overlap(key)
    assert [span.value for span in spans][:2] == [0, 5]
    assert [span.value for span in spans][2:] in ([6], [5, 6])
    return spans


def test_many_triggers_become_one_run_with_the_latest_arguments(any_worker, journal, key):
    assert len(check(journal, key)) == 3


@pytest.mark.parametrize("alias", ALIASES)
def test_every_backend_coalesces(worker, journal, key, alias):
    assert len(check(journal, key, alias)) == 3


@pytest.mark.parametrize("outcome", ["raise", "retry, return", "ignore"])
def test_however_the_first_ends_the_second_runs(worker, journal, key, outcome):
    task("coalesce").delay(key, "first", gate=True, outcome=outcome)
    journal.wait_for_begun(key)
    assert was_skipped(task("coalesce").delay(key, "second"))
    journal.open_gate(key)
    wait_until(lambda: "second" in values_done(journal, key), "the second run")
    journal.assert_no_overlap(key)


@pytest.mark.parametrize("alias", ALIASES)
def test_the_second_runs_though_the_first_was_killed(worker, journal, key, alias):
    task("coalesce", alias).delay(key, "first", gate=True)
    (span,) = journal.wait_for_begun(key)
    assert was_skipped(task("coalesce", alias).delay(key, "second"))
    os.kill(span.pid, signal.SIGKILL)
    journal.open_gate(key)
    wait_until(lambda: "second" in values_done(journal, key), "the second run", 40)


def test_the_second_runs_though_the_whole_worker_was_killed(make_worker, journal, key):
    worker = make_worker(concurrency=2)
    task("late_coalesce").delay(key, "first", gate=True)
    journal.wait_for_begun(key)
    assert was_skipped(task("late_coalesce").delay(key, "second"))
    worker.kill()
    journal.open_gate(key)
    make_worker(broker=worker.broker, concurrency=2)
    wait_until(lambda: "second" in values_done(journal, key), "the second run", 30)


#: How many bodies are killed, and how many children besides, wherever they are.
AIMED, BLIND = 8, 6


@pytest.mark.parametrize("alias", ["rows", "redis"])
def test_no_trigger_is_lost_while_children_are_killed(make_worker, journal, key, alias):
    """A few triggers per name and then silence, so that a lost last one shows."""
    worker = make_worker(concurrency=4)
    triggers = {f"{key}-{number}": [] for number in range(12)}
    killed = trigger_and_kill(worker, journal, triggers, alias)

    def unserved():
        return {
            name: len(results) - 1
            for name, results in triggers.items()
            if not is_served(journal, name, len(results) - 1)
        }

    # By then, whoever waits for a lease to run out, or sweeps, did so several times.
    try:
        wait_until(lambda: not unserved(), "every trigger to be served", 60)
    except TimeoutError:
        pytest.fail(f"{len(unserved())} of {len(triggers)} names were left: {unserved()}")
    told = [SkippedRun.of(result.result) for results in triggers.values() for result in results]
    assert sum(skip is not None and skip.reason == "coalesced" for skip in told) > 2
    spans = {span.run: span for name in triggers for span in journal.spans(name)}
    assert [spans[run].outcome for run in killed] == [None] * AIMED


def trigger_and_kill(worker, journal, triggers, alias):
    chance = random.Random()
    killed = []
    orders = [*["aimed"] * AIMED, *["blind"] * BLIND, *["none"] * 30]
    chance.shuffle(orders)

    def trigger(place):
        # First the one half of the names, and then the other, so that each comes to an end.
        name = chance.choice([*triggers][place * 2 // len(orders) :: 2])
        made = task("late_coalesce", alias).s(name, len(triggers[name]), seconds=0.4)
        triggers[name].append(made.delay())

    for place, order in enumerate(orders):
        trigger(place)
        time.sleep(0.08)
        if order == "aimed":
            killed.append(kill_a_body(journal, triggers, killed, partial(trigger, place)))
        elif order == "blind" and (children := worker.children()):
            os.kill(chance.choice(children), signal.SIGKILL)
    for name, results in triggers.items():
        if not results:
            results.append(task("late_coalesce", alias).delay(name, 0))
    return killed


def kill_a_body(journal, names, killed, trigger):
    """Kill a child in a body of these names; return the run. Trigger more if all have ended."""
    hit = []
    more_at = now() + 1

    def kill_one():
        nonlocal more_at
        for span in [span for name in names for span in journal.spans(name)][::-1]:
            # One that has just begun is likely not to end before it is killed.
            if span.ended is None and now() - span.begun < 0.2 and span.run not in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(span.pid, signal.SIGKILL)
                wait_until(lambda span=span: not _alive([span.pid]), "a child to die")
                (same,) = [each for each in journal.spans(span.key) if each.run == span.run]
                if same.ended is None:
                    hit.append(span.run)
                    return True
        if now() > more_at:
            more_at = now() + 1
            trigger()
        return False

    wait_until(kill_one, "a body to be killed", 30)
    return hit[0]


def is_served(journal, name, number):
    """
    Tell whether a run ended that began after the trigger came, or was made by it.

    Not by its arguments alone: messages overtake one another when they are delivered again. And not
    by when it came last: it may have been counted and served before it was delivered again.
    """
    came = [line["at"] for line in journal.notes(name, "arrived") if line["value"] == number]
    ended = [span for span in journal.spans(name) if span.outcome is not None]
    return any(span.value == number or (came and span.begun > min(came)) for span in ended)


def values_done(journal, key):
    return [span.value for span in journal.spans(key) if span.outcome is not None]
