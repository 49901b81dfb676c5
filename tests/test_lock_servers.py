"""The servers of tests/servers/ that run lock services: each starts, answers, and stops."""

from urllib.error import HTTPError

import pytest

from tests.servers import DURABLE, Authority
from tests.servers.etcd import encode
from tests.servers.process import wait_until

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
        wait_until(lambda: sum(node.is_leader() for node in nodes) == 1, "one leader")

    def test_clients_need_a_certificate_and_a_password(self, make_etcd):
        etcd = make_etcd(tls=Authority())
        etcd.enable_login("user", "password")
        assert not has_value(etcd)
        etcd.login = None
        with pytest.raises(OSError, match="HTTP Error 40"):
            has_value(etcd)
        etcd.tls = Authority()
        assert not etcd.answers()


def names(node, timeout=20, **options):
    """Return what the root of ZooKeeper's tree has, as a client sees it."""
    pytest.importorskip("kazoo.client")
    client = node.client(**options)
    try:
        client.start(timeout)
        return set(client.get_children("/")) - {"zookeeper"}
    finally:
        client.stop()
        client.close()


def create(node, path):
    client = node.client()
    client.start(timeout=20)
    client.create(path)
    client.stop()
    client.close()


class TestZooKeeper:
    def test_it_keeps_its_data_until_it_starts_empty(self, make_zookeeper):
        zookeeper = make_zookeeper()
        assert not names(zookeeper)
        create(zookeeper, "/key")
        zookeeper.kill()
        assert not zookeeper.answers()
        zookeeper.start()
        assert zookeeper.is_leader()
        assert names(zookeeper) == {"key"}
        zookeeper.stop()
        zookeeper.start(empty=True)
        assert not names(zookeeper)

    def test_the_shared_one_can_be_emptied(self, shared_zookeeper):
        pytest.importorskip("kazoo.client")
        create(shared_zookeeper, "/key")
        shared_zookeeper.empty()
        assert not names(shared_zookeeper)

    def test_a_node_that_lost_its_data_gets_it_from_the_others(self, make_zookeeper_cluster):
        nodes = make_zookeeper_cluster()
        assert not names(nodes[0])
        create(nodes[0], "/key")
        leader = next(node for node in nodes if node.is_leader())
        leader.kill()
        leader.start(empty=True)
        assert names(leader, hosts=leader.url) == {"key"}
        wait_until(lambda: sum(node.is_leader() for node in nodes) == 1, "one leader")

    def test_clients_need_a_certificate(self, make_zookeeper):
        zookeeper = make_zookeeper(tls=Authority())
        assert not names(zookeeper)
        zookeeper.tls = Authority()
        with pytest.raises(Exception, match="time-out"):
            names(zookeeper, timeout=3)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_clients_need_a_password(self, make_zookeeper):
        pytest.importorskip("puresasl")
        exceptions = pytest.importorskip("kazoo.exceptions")
        zookeeper = make_zookeeper(login=("user", "password"))
        assert not names(zookeeper)
        zookeeper.login = ("user", "wrong")
        with pytest.raises(exceptions.KazooException):
            names(zookeeper)


def has_key(node, mode="consistent"):
    try:
        return node.request(f"/v1/kv/key?raw&{mode}") == "value"
    except HTTPError as exc:
        if exc.code != 404:
            raise
        return False


class TestConsul:
    def test_it_keeps_its_data_until_it_starts_empty(self, make_consul):
        consul = make_consul()
        assert consul.request("/v1/kv/key", "value") is True
        consul.kill()
        assert not consul.answers()
        consul.start()
        assert consul.is_leader()
        assert has_key(consul)
        consul.stop()
        consul.start(empty=True)
        assert not has_key(consul)

    def test_the_shared_one_can_be_emptied(self, shared_consul):
        shared_consul.request("/v1/kv/key", "value")
        shared_consul.request("/v1/session/create", {"TTL": "2s"})
        shared_consul.empty()
        assert not has_key(shared_consul)
        assert shared_consul.request("/v1/session/list") == []

    def test_a_node_that_lost_its_data_gets_it_from_the_others(self, make_consul_cluster):
        nodes = make_consul_cluster()
        nodes[0].request("/v1/kv/key", "value")
        leader = next(node for node in nodes if node.is_leader())
        leader.kill()
        leader.start(empty=True)
        wait_until(lambda: has_key(leader, "stale"), "its data")
        wait_until(lambda: sum(node.is_leader() for node in nodes) == 1, "one leader")

    def test_clients_need_a_certificate_and_a_token(self, make_consul):
        consul = make_consul(tls=Authority(), token="b1a2c3d4-0000-0000-0000-000000000000")
        assert not has_key(consul)
        consul.token = None
        with pytest.raises(HTTPError, match="403"):
            has_key(consul)
        consul.tls = Authority()
        assert not consul.answers()


TABLE = {
    "TableName": "locks",
    "KeySchema": [{"AttributeName": "name", "KeyType": "HASH"}],
    "AttributeDefinitions": [{"AttributeName": "name", "AttributeType": "S"}],
    "BillingMode": "PAY_PER_REQUEST",
}


def tables(server):
    return server.request("ListTables")["TableNames"]


class TestDynamoDB:
    @pytest.mark.parametrize("durable", [False, True])
    def test_it_keeps_its_data_if_it_is_durable(self, make_dynamodb, durable):
        dynamodb = make_dynamodb(durable=durable)
        dynamodb.request("CreateTable", TABLE)
        assert tables(dynamodb) == ["locks"]
        dynamodb.kill()
        assert not dynamodb.answers()
        dynamodb.start()
        assert tables(dynamodb) == (["locks"] if durable else [])

    def test_the_shared_one_can_be_emptied(self, shared_dynamodb):
        shared_dynamodb.empty()
        shared_dynamodb.request("CreateTable", TABLE)
        shared_dynamodb.empty()
        assert tables(shared_dynamodb) == []

    def test_a_refused_condition_tells_what_the_item_is(self, shared_dynamodb):
        shared_dynamodb.empty()
        shared_dynamodb.request("CreateTable", TABLE)
        put = {"TableName": "locks", "Item": {"name": {"S": "x"}}}
        put["ConditionExpression"] = "attribute_not_exists(#n)"
        put["ExpressionAttributeNames"] = {"#n": "name"}
        put["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
        shared_dynamodb.request("PutItem", put)
        with pytest.raises(HTTPError) as refused:
            shared_dynamodb.request("PutItem", put)
        assert b'"Item"' in refused.value.read()


class TestMySQL:
    def test_it_keeps_its_data(self, make_mysql):
        mysql = make_mysql()
        mysql.execute("CREATE DATABASE fencedlock")
        mysql.kill()
        assert not mysql.answers()
        mysql.start()
        ((version,),) = mysql.execute("SELECT VERSION()")
        assert "MariaDB" not in version
        assert mysql.execute("SHOW DATABASES LIKE 'fencedlock'")

    def test_the_shared_one_can_be_emptied(self, shared_mysql):
        shared_mysql.execute("CREATE DATABASE fencedlock")
        shared_mysql.empty()
        assert not shared_mysql.execute("SHOW DATABASES LIKE 'fencedlock'")

    def test_its_statements_can_be_counted(self, shared_mysql):
        with shared_mysql.statements() as statements:
            shared_mysql.execute("SELECT GET_LOCK('x', 0)")
        assert statements["SELECT GET_LOCK('x', 0)"] == 1


class TestRedlock:
    def test_its_nodes_keep_their_data_until_they_start_empty(self, make_redis):
        node = make_redis(*DURABLE)
        node.execute("SET", "key", "value")
        node.kill()
        node.start()
        assert node.execute("GET", "key") == "value"
        node.stop()
        node.start(empty=True)
        assert node.execute("GET", "key") is None

    def test_there_are_three(self, shared_redlock):
        assert len({node.url for node in shared_redlock}) == 3
        for node in shared_redlock:
            assert node.info("persistence")["aof_enabled"] == 1

    def test_a_child_process_gets_their_addresses(self, shared_redlock, child_environment):
        addresses = child_environment()["FENCEDLOCK_TEST_REDLOCK_URL"].split(",")
        assert addresses == [node.url for node in shared_redlock]
