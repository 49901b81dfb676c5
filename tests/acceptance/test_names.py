"""The name of a lock is the same wherever it is made, and wrong calls fail where they are made."""

import datetime
import uuid
from decimal import Decimal

import pytest

from django_fencedlock.celery import lock_name
from tests.workers.tasks import task

VALUES = [
    1,
    "1",
    1.0,
    True,
    None,
    [1, "a", None],
    (1, 2),
    {"b": 1, "a": [2]},
    {1: "number", "x": 2},
    uuid.UUID(int=7),
    Decimal("1.50"),
    datetime.date(2026, 11, 18),
    datetime.datetime(2026, 11, 18, 12, tzinfo=datetime.UTC),
    b"bytes",
    "ü\N{SNOWMAN}\n",
]


def test_a_worker_makes_the_same_name(worker, journal, key):
    calls = [(key, value) for value in VALUES]
    results = [task("unnamed").delay(*call) for call in calls]
    for result in results:
        result.get(timeout=10)
    made = {span.id: span.lock for span in journal.spans(key)}
    expected = {
        result.id: lock_name(task("unnamed"), *call)
        for result, call in zip(results, calls, strict=True)
    }
    assert made == expected
    assert len(set(expected.values())) == len(VALUES)


def test_a_name_is_one_however_the_call_is_written(worker, journal, key):
    calls = [((key,), {}), ((), {"key": key}), ((key, None), {}), ((key,), {"gate": False})]
    for args, kwargs in calls:
        task("unnamed").apply_async(args, kwargs).get(timeout=10)
    assert len({span.lock for span in journal.spans(key)}) == 1


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), (("k", 1, 2), {}), (("k",), {"no": 1})])
def test_wrong_arguments_fail_at_delay(worker, args, kwargs):
    with pytest.raises(TypeError):
        task("unnamed").delay(*args, **kwargs)
    assert worker.broker.depth() == 0


def test_what_is_sent_by_name_takes_the_lock(worker, journal, key):
    held = worker.app.send_task("tests.skip", (key,), {"gate": True})
    (span,) = journal.wait_for_begun(key)
    assert span.lock == key
    other = worker.app.send_task("tests.skip", (key,))
    assert other.get(timeout=10)["reason"] == "held"
    journal.open_gate(key)
    held.get(timeout=10)


def test_a_name_may_be_made_of_the_task_id(worker, journal, key):
    first = task("by_id").delay(key, gate=True)
    second = task("by_id").delay(key, gate=True)
    journal.wait_for_begun(key, 2)
    journal.open_gate(key)
    first.get(timeout=10)
    second.get(timeout=10)
    locks = {span.lock for span in journal.spans(key)}
    assert locks == {f"{key}-{first.id}", f"{key}-{second.id}"}
