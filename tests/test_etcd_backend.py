"""The etcd backend on real servers."""

import uuid

import pytest

from django_fencedlock.backends.etcd import EtcdBackend
from django_fencedlock.conf import AliasConfig
from tests.backends import ETCD
from tests.services import ServiceAcceptance
from tests.test_backend_interface import BackendInterface


def config_of(*urls, prefix=None, **options):
    terms = {"ttl": 30.0, "blocking_timeout": 10.0, "fence_database": "default"}
    terms["key_prefix"] = prefix or f"{uuid.uuid4().hex}/"
    location = ",".join(urls)
    return AliasConfig("default", ETCD, location, options={"TIMEOUT": 2, **options}, **terms)


class TestInterface(BackendInterface):
    @pytest.fixture
    def make(self, shared_etcd, closing):
        config = config_of(shared_etcd.url)
        return lambda: closing(EtcdBackend(config))


class TestAcceptance(ServiceAcceptance):
    backend = ETCD

    def location(self, *addresses):
        return [f"http://{each.host}:{each.port}" for each in addresses]

    @pytest.fixture
    def servers(self, shared_etcd):
        return [shared_etcd]

    @pytest.fixture
    def cluster(self, make_etcd_cluster):
        return make_etcd_cluster()
