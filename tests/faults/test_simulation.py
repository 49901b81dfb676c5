"""
The logic of leases under every kind of weather, without sockets and clocks.

Services, keepers and leases are the package's own, in three processes that share a lock service in
memory. FENCEDLOCK_TEST_SIMULATED_SECONDS makes it go on for longer than the seconds it takes here,
and FENCEDLOCK_TEST_SEED begins elsewhere.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest
from django.db import connections
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from django_fencedlock.core import endings, grants, keeper
from django_fencedlock.core.identity import new_owner
from django_fencedlock.storage.dialect import Entry
from django_fencedlock.storage.vendors import LEDGERS
from tests.clocks import Clock
from tests.faults.simulation.server import Fault, Tables
from tests.faults.simulation.world import (
    ACTS,
    NAMES,
    PROCESSES,
    SECONDS,
    Broken,
    Step,
    drawn,
    run,
    simulated_time,
)

#: Seconds of schedules at random.
LASTS = float(os.environ.get("FENCEDLOCK_TEST_SIMULATED_SECONDS", "10"))

steps = st.builds(
    Step,
    act=st.sampled_from(list(ACTS)),
    process=st.integers(0, PROCESSES - 1),
    name=st.integers(0, len(NAMES) - 1),
    seconds=st.sampled_from(SECONDS),
    faults=st.lists(st.sampled_from(Fault), max_size=2).map(tuple),
)


@pytest.fixture
def now(monkeypatch):
    for module in (endings, grants, keeper):
        monkeypatch.setattr(module.logger, "disabled", True)
    with simulated_time() as found:
        yield found


def test_every_promise_is_kept_at_random(now, capsys):
    seed = int(os.environ.get("FENCEDLOCK_TEST_SEED", random.randrange(2**32)))
    source, seen = random.Random(seed), Counter()
    began, used = time.monotonic(), time.process_time()
    schedules = 0
    while time.monotonic() < began + LASTS:
        schedule = drawn(source)
        try:
            run(schedule, now, seen)
        except Broken as exc:
            pytest.fail(f"FENCEDLOCK_TEST_SEED={seed}: {exc}\nas an example: {schedule!r}")
        schedules += 1
    used = time.process_time() - used
    with capsys.disabled():
        print(f"\n{schedules} schedules (seed {seed}), {schedules / used:.0f} a second: {seen}")
    for event in ("takeovers", "refused", "unknown", "late", "stale", "lost", "written"):
        assert seen[event] > schedules / 50, f"{event}: {seen}"
    for event in ("crashes", "evicted", "forced", "entered again"):
        assert seen[event] > 0, f"{event}: {seen}"


ACTS_OF_TABLES = st.sampled_from(["claim", "renew", "clear", "expire"])
NO_REPLY, LATE, SLOW = Fault.NO_REPLY, Fault.LATE, Fault.SLOW


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, max_size=25))
# These broke a promise once.
@example([Step("acquire"), Step("renew", seconds=1.0, faults=(NO_REPLY,))])
@example([Step("acquire", faults=(LATE,)), Step("acquire"), Step("late")])
def test_every_promise_is_kept(now, schedule):
    run(schedule, now, Counter())


@pytest.mark.django_db
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(ACTS_OF_TABLES, st.integers(0, 2), st.sampled_from(NAMES)), max_size=20))
def test_the_tables_in_memory_answer_as_the_real_ones(acts):
    connection = connections["default"]
    ledger = LEDGERS[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_fencedlock_heldlock")
        cursor.execute("DELETE FROM django_fencedlock_fence")
    clock = Clock()
    tables = Tables(clock)
    owners = {(number, name): new_owner() for number in range(3) for name in NAMES}
    for act, number, name in acts:
        owner = owners[number, name]
        held = _Held(name, owner.id, 300.0)
        if act == "claim":
            entry = Entry(name, "default", "database", owner, 300.0)
            assert ledger.claim(connection, entry)[1] == tables.claim(name, owner.id, 300.0)
        elif act == "renew":
            given = [(name, owner.id, 300.0)]
            assert ledger.renew(connection, [held]) == tables.renew(given)
        elif act == "clear":
            assert (ledger.clear(connection, [held]) == 1) is tables.clear(name, owner.id)
        else:
            with connection.cursor() as cursor:
                cursor.execute("UPDATE django_fencedlock_heldlock SET expires_at = acquired_at")
            clock.now += 301
        found = ledger.look(connection, name)
        assert (found.owner.id if found else "") == tables.holder(name)
        assert bool(found and found.live) is tables.is_live(name)
        assert ledger.newest(connection, name) == tables.fences.get(name)


class _Held:
    def __init__(self, name, owner, ttl):
        self.name, self.owner, self.ttl = name, owner, ttl
