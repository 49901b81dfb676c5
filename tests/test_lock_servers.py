"""The servers of tests/servers/ that run lock services: each starts, answers, and stops."""

import pytest

from tests.servers import Authority
from tests.servers.etcd import encode

KEY, VALUE = encode("key"), encode("value")


def has_value(node):
    return "kvs" in node.request("/v3/kv/range", {"key": KEY})


class TestEtcd:
    def test_it_keeps_its_data_until_it_starts_empty(self, make_etcd):
        etcd = make_etcd()
        etcd.request("/v3/kv/put", {"key": KEY, "value": VALUE})
        etcd.kill()
        assert not etcd.answers()
        etcd.start()
        assert etcd.is_leader()
        assert has_value(etcd)
        etcd.stop()
        etcd.start(empty=True)
        assert not has_value(etcd)

    def test_the_shared_one_can_be_emptied(self, shared_etcd):
        shared_etcd.request("/v3/kv/put", {"key": KEY, "value": VALUE})
        shared_etcd.request("/v3/lease/grant", {"ID": "7", "TTL": "60"})
        shared_etcd.empty()
        assert not has_value(shared_etcd)
        assert "leases" not in shared_etcd.request("/v3/lease/leases")

    def test_a_cluster_replaces_a_node_that_lost_its_data(self, make_etcd_cluster):
        nodes = make_etcd_cluster()
        nodes[0].request("/v3/kv/put", {"key": KEY, "value": VALUE})
        leader = next(node for node in nodes if node.is_leader())
        leader.kill()
        leader.start(empty=True)
        assert has_value(leader)
        assert sum(node.is_leader() for node in nodes) == 1

    def test_clients_need_a_certificate_and_a_password(self, make_etcd):
        etcd = make_etcd(tls=Authority())
        etcd.enable_login("user", "password")
        assert not has_value(etcd)
        etcd.login = None
        with pytest.raises(OSError, match="HTTP Error 40"):
            has_value(etcd)
        etcd.tls = Authority()
        assert not etcd.answers()
