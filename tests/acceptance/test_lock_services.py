"""Prefork workers whose locks are on a lock service: the tasks of the alias "redis" run there."""

import json
import os
import signal
import uuid

import pytest
from django.test import override_settings

from django_fencedlock.backends.dynamodb import create_table
from tests.backends import CONSUL, DYNAMODB, ETCD, REDLOCK, ZOOKEEPER
from tests.servers import DynamoDB
from tests.servers.process import wait_until
from tests.workers.journal import now
from tests.workers.looks import is_free, was_skipped
from tests.workers.tasks import task

ALIAS = "redis"


def at_dynamodb(server):
    options = {"REGION": server.region, "ENDPOINT": server.url}
    return {"LOCATION": f"prefork-{uuid.uuid4().hex}", "OPTIONS": options}


#: The backend, the fixture of the server, and where it is.
SERVICES = {
    "etcd": (ETCD, "shared_etcd", lambda server: {"LOCATION": server.url}),
    "zookeeper": (ZOOKEEPER, "shared_zookeeper", lambda server: {"LOCATION": server.hosts}),
    "consul": (
        CONSUL,
        "shared_consul",
        lambda server: {"LOCATION": server.url, "OPTIONS": {"SESSION_TTL_MIN": 1}},
    ),
    "redlock": (REDLOCK, "shared_redlock", lambda nodes: {"LOCATION": [n.url for n in nodes]}),
    "dynamodb": (DYNAMODB, "shared_dynamodb", at_dynamodb),
}


@pytest.fixture(params=SERVICES)
def locks(request, locks, monkeypatch):
    backend, server, place = SERVICES[request.param]
    prefix = {"FENCE_DATABASE": "postgres", "KEY_PREFIX": f"{uuid.uuid4().hex}/"}
    entry = {"BACKEND": backend, **prefix, **place(request.getfixturevalue(server))}
    if backend == DYNAMODB:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", DynamoDB.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", DynamoDB.secret_key)
        with override_settings(FENCEDLOCK={"default": entry}):
            create_table()
    return {**locks, ALIAS: entry}


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
