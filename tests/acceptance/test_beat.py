"""Tasks that beat sends."""

from tests.workers.tasks import task


def test_periodic_tasks_dont_overlap(worker, make_beat, journal, key):
    entry = {"task": "tests.skip", "schedule": 0.3, "args": [key], "kwargs": {"gate": True}}
    make_beat(worker, {"often": entry})
    (first,) = journal.wait_for_begun(key)
    for _ in range(2):
        task("plain").delay(f"{key}-plain", seconds=0.5).get(timeout=20)
    assert len(journal.spans(key)) == 1
    journal.open_gate(key)
    journal.wait_for_ended(key, 3)
    spans = journal.assert_no_overlap(key)
    assert {span.lock for span in spans} == {key}
    assert first.outcome is None


def test_two_beats_make_no_two_runs(worker, make_beat, journal, key):
    entry = {"task": "tests.skip", "schedule": 0.3, "args": [key], "kwargs": {"seconds": 0.2}}
    make_beat(worker, {"often": entry})
    make_beat(worker, {"often": entry})
    journal.wait_for_ended(key, 5)
    journal.assert_no_overlap(key)
