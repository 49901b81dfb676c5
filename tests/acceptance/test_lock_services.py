"""Prefork workers whose locks are on a lock service: the tasks of the alias "redis" run there."""

import json
import os
import signal
import uuid

import pytest

from tests.backends import ETCD
from tests.servers.process import wait_until
from tests.workers.journal import now
from tests.workers.looks import is_free, was_skipped
from tests.workers.tasks import task

ALIAS = "redis"
#: The backend, and the fixture of the server.
SERVICES = {"etcd": (ETCD, "shared_etcd")}


@pytest.fixture(params=SERVICES)
def locks(request, locks):
    backend, server = SERVICES[request.param]
    location = request.getfixturevalue(server).url
    prefix = {"FENCE_DATABASE": "postgres", "KEY_PREFIX": f"{uuid.uuid4().hex}/"}
    return {**locks, ALIAS: {"BACKEND": backend, "LOCATION": location, **prefix}}


@pytest.fixture
def worker_environment(locks, postgres, child_environment):
    settings = {"DJANGO_SETTINGS_MODULE": "tests.workers.settings"}
    return {**child_environment(), **settings, "FENCEDLOCK_TEST_LOCKS": json.dumps(locks)}


def test_a_prefork_worker(make_worker, journal, key):
    worker = make_worker("--concurrency=3")
    results = [task("wait", ALIAS).delay(key, number, seconds=0.05) for number in range(6)]
    assert [result.get(timeout=60) for result in results] == list(range(6))
    spans = journal.assert_no_overlap(key)
    assert [span.token for span in spans] == sorted({span.token for span in spans})
    assert len({span.pid for span in spans}) > 1
    assert is_free(key, ALIAS)

    # A child is killed: its lock is free at once.
    dying = f"{key}-dying"
    lost = task("late", ALIAS).delay(dying, 42, gate=True)
    (span,) = journal.wait_for_begun(dying)
    assert was_skipped(task("skip", ALIAS).delay(dying))
    os.kill(span.pid, signal.SIGKILL)
    killed = now()
    journal.wait_for_begun(dying, 2)
    journal.open_gate(dying)
    assert lost.get(timeout=30) == 42
    second = journal.assert_no_overlap(dying, {span.run: killed})[1]
    assert second.token > span.token
    assert second.begun - killed < 15
    wait_until(lambda: is_free(dying, ALIAS), "the lock to be released")
    assert worker.process.running
