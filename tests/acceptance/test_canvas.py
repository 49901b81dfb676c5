"""Chains, groups and chords go on, whatever a conflict does to one of their tasks."""

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError

from django_fencedlock import lock
from django_fencedlock.celery import SkippedRun
from tests.workers.looks import failure
from tests.workers.tasks import task


def told(results):
    return ["skipped" if SkippedRun.of(value) else value for value in results]


def test_a_group_has_a_result_for_what_was_skipped(any_worker, key):
    with lock(key):
        result = group(task("skip").s(key), task("skip").s(f"{key}-other", 2)).delay()
        assert told(result.get(timeout=20)) == ["skipped", 2]


def test_a_chord_ends_with_what_was_skipped(any_worker, journal, key):
    header = [task("skip").s(key), task("skip").s(f"{key}-other", 2)]
    with lock(key):
        result = chord(header)(task("total").s(key=key))
        assert sorted(told(result.get(timeout=20)), key=str) == [2, "skipped"]


def test_a_chord_fails_with_what_raised(any_worker, journal, key):
    header = [task("raise").s(key), task("raise").s(f"{key}-other", 2)]
    with lock(key):
        result = chord(header)(task("total").s(key=key))
        assert isinstance(failure(result), ChordError)
    assert journal.spans(f"{key}-total") == []


@pytest.mark.parametrize("policy", ["wait", "retry"])
def test_a_chord_has_all_results_of_one_name(any_worker, journal, key, policy):
    header = [task(policy).s(key, number, seconds=0.05) for number in range(5)]
    result = chord(header)(task("total").s(key=key))
    assert sorted(result.get(timeout=30)) == list(range(5))
    assert len(journal.assert_no_overlap(key)) == 5
    assert len(journal.spans(f"{key}-total")) == 1


def test_a_chain_goes_on_after_a_skip(worker, journal, key):
    steps = chain(task("skip").si(key), task("skip").si(f"{key}-tail", 2))
    with lock(key):
        assert steps.delay().get(timeout=20) == 2
    assert journal.spans(key) == []


def test_a_chain_ends_with_what_raised(worker, journal, key):
    steps = chain(task("raise").si(key), task("skip").si(f"{key}-tail", 2))
    with lock(key):
        result = steps.delay()
        assert type(failure(result.parent)).__name__ == "LockNotAcquired"
    assert journal.spans(f"{key}-tail") == []


def test_a_chain_waits_for_a_retry_and_goes_on_once(any_worker, journal, key):
    held = task("retry").delay(key, gate=True)
    journal.wait_for_begun(key)
    result = chain(task("retry").s(key, 2), task("total").s(key=key)).delay()
    journal.open_gate(key)
    assert result.get(timeout=20) == 2
    held.get(timeout=20)
    assert len(journal.spans(key)) == 2
    assert len(journal.spans(f"{key}-total")) == 1
