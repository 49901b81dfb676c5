"""Redlock: a majority of Redis servers."""

import contextlib

import pytest

from django_fencedlock import conf
from django_fencedlock.backends.redlock import RedlockBackend
from tests.servers import Redis, finding
from tests.test_backend_interface import BackendInterface

BACKEND = "django_fencedlock.backends.redlock.RedlockBackend"
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture(scope="module")
def launched():
    with contextlib.ExitStack() as stack:
        nodes = [Redis.launch(finding.redis(), *DURABLE) for _ in range(5)]
        for node in nodes:
            stack.enter_context(contextlib.closing(node))
        yield nodes


@pytest.fixture
def nodes(launched):
    for node in launched:
        if node._process.running:
            node.resume()
        else:
            node.start()
        node.empty()
    return launched


def backend_on(settings, nodes, **terms):
    location = [each if isinstance(each, str) else each.url for each in nodes]
    options = {"TIMEOUT": 2, **terms}
    settings.FENCEDLOCK = {
        "default": {"BACKEND": BACKEND, "LOCATION": location, "OPTIONS": options}
    }
    return RedlockBackend(conf.config("default"))


class TestInterface(BackendInterface):
    @pytest.fixture
    def make(self, settings, nodes):
        return lambda: backend_on(settings, nodes)
