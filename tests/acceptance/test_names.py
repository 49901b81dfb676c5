"""The name of a lock is the same wherever it is made, and wrong calls fail where they are made."""

import datetime
import uuid
from decimal import Decimal

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
