"""
What a lock costs at each further lock service, as ratios to the bare commands of that service.

Run from the top of the checkout: ``python -m benchmarks.services``, or with the names of some
services. The backend alone is measured, without the fence database. Other packages take part if
they are installed. A service without a server is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Any, NamedTuple
from uuid import uuid4

from benchmarks.report import OURS, Report, options
from tests import servers
from tests.servers import ServerMissing, finding

Once = Callable[[str], object]
NAMES = 50
TTL = 30.0


class Service(NamedTuple):
    """A lock service: its alias in FENCEDLOCK, its bare commands, and other packages' locks."""

    entry: dict[str, Any]
    bare: Once
    #: How many times the bare commands a lock may cost.
    aim: float
    peers: dict[str, Once]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("services", nargs="*", metavar="service", help=", ".join(SERVICES))
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    given.rounds = 1 if given.short else given.rounds
    report = Report(given)
    _set_up()
    print(f"load {os.getloadavg()[0]:.1f}, {given.rounds} rounds of {NAMES}")
    for name in given.services or SERVICES:
        with ExitStack() as stack:
            try:
                service = SERVICES[name](stack)
            except (ServerMissing, ImportError) as exc:
                print(f"\n{name}: left out. {exc}")
                continue
            _measure(name, service, stack, given, report)


def _set_up() -> None:
    import django
    import pymysql
    from django.conf import settings

    pymysql.install_as_MySQLdb()
    settings.configure(
        INSTALLED_APPS=["django_fencedlock"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        USE_TZ=True,
    )
    django.setup()


def _measure(
    name: str, service: Service, stack: ExitStack, given: argparse.Namespace, report: Report
) -> None:
    from django_fencedlock import conf

    entry = {"TTL": TTL, "BACKEND": conf.BACKENDS[name], **service.entry}

    def make() -> Any:
        config = conf._read("default", entry)
        return stack.enter_context(closing(conf.backend_class(entry["BACKEND"])(config)))

    backend = make()
    contestants = {"bare commands": service.bare, OURS: _ours(backend), **service.peers}
    found: dict[str, list[float]] = {who: [] for who in contestants}
    names = [f"{name}:{number}" for number in range(NAMES)]
    for once in contestants.values():
        once(names[0])
    for turn in range(given.rounds):
        for who in list(contestants)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            for each in names:
                contestants[who](each)
            found[who].append((time.perf_counter() - began) / NAMES)
    print(f"\n{name:30}  time     ms")
    for who, each in found.items():
        ratio = statistics.median(
            ours / bare for ours, bare in zip(each, found["bare commands"], strict=True)
        )
        print(f"  {who:28} {ratio:5.2f} {statistics.median(each) * 1e3:6.2f}", flush=True)
        report.add(name, who, "time", ratio, aim=service.aim if who == OURS else None)
    report.add(name, OURS, "renewal of 1,000 leases", _renew_many(backend), "ms")
    if backend.supports_waiting:
        report.add(name, OURS, "hand-off to 8 waiters", _hand_off(make), "ms")
    for figure in report.figures[-2:]:
        if figure.unit == "ms":
            print(f"  {figure.measure:28} {figure.value:12.1f} ms")


def _claim(name: str) -> Any:
    from django_fencedlock.backends.interface import Claim
    from django_fencedlock.core.identity import new_owner

    owner = new_owner()
    return Claim(name, owner.id, TTL, owner.identity)


def _take(backend: Any, name: str, seconds: float = 0.0) -> Any:
    from django_fencedlock.backends.interface import Granted, Wait, grant_of

    claim = _claim(name)
    answer = backend.acquire(claim, Wait(seconds))
    assert isinstance(answer, Granted), answer
    return grant_of(claim, answer)


def _ours(backend: Any) -> Once:
    def once(name: str) -> None:
        # As lock() does by default: it would wait.
        assert backend.release(_take(backend, name, 10.0))

    return once


def _renew_many(backend: Any) -> float:
    """Return the milliseconds of one renewal of 1,000 leases."""
    grants = [_take(backend, f"many:{number}") for number in range(1000)]
    took = []
    for _ in range(5):
        began = time.perf_counter()
        answers = backend.renew(grants)
        took.append(time.perf_counter() - began)
        assert {answer.name for answer in answers} == {"KEPT"}
    for grant in grants:
        backend.release(grant)
    return statistics.median(took) * 1e3


def _hand_off(make: Callable[[], Any]) -> float:
    """Return the milliseconds from a release until the last of 8 waiters had the lock."""
    backends = [make() for _ in range(9)]
    took = []
    for number in range(5):
        name, served, order = f"hand-off:{number}", list[tuple[float, int]](), list[int]()

        def wait(place: int, name: str = name, served: Any = served) -> None:
            grant = _take(backends[place], name, 60.0)
            served.append((time.perf_counter(), place))
            backends[place].release(grant)

        first = _take(backends[8], name)
        threads = [threading.Thread(target=wait, args=(place,)) for place in range(8)]
        for queued, thread in enumerate(threads, 1):
            thread.start()
            while (backends[8].holders([name])[name].waiting or 0) < queued:
                time.sleep(0.005)
        began = time.perf_counter()
        backends[8].release(first)
        for thread in threads:
            thread.join()
        took.append(served[-1][0] - began)
        order = [place for _, place in served]
        assert order == sorted(order), order
    return statistics.median(took) * 1e3


# Services


def _etcd(stack: ExitStack) -> Service:
    from django_fencedlock.backends.etcd_json import encode
    from django_fencedlock.backends.http import HttpNodes

    server = stack.enter_context(closing(servers.Etcd.launch(finding.etcd())))
    nodes = HttpNodes(_config(server.url), 0)
    value = encode("x" * 100)

    def bare(name: str) -> None:
        key = encode(name)
        assert nodes.ask("POST", "/v3/kv/put", {"key": key, "value": value}).status == 200
        assert nodes.ask("POST", "/v3/kv/deleterange", {"key": key}).status == 200

    peers: dict[str, Once] = {}
    with suppress(ImportError):
        import etcd3gw

        client = etcd3gw.client(server.host, server.port, api_path="/v3/")

        def by_etcd3gw(name: str) -> None:
            lock = client.lock(f"peer:{name}", ttl=30)
            assert lock.acquire()
            assert lock.release()

        peers["etcd3gw's Lock"] = by_etcd3gw
    return Service({"LOCATION": server.url}, bare, 1.25, peers)


def _zookeeper(stack: ExitStack) -> Service:
    from kazoo.client import KazooClient

    server = stack.enter_context(closing(servers.ZooKeeper.launch(finding.zookeeper(), tick=2000)))
    client = KazooClient(server.url)
    client.start()
    stack.callback(client.stop)
    client.ensure_path("/bare")

    def bare(name: str) -> None:
        path = client.create(f"/bare/{name}_", b"x" * 100, ephemeral=True, sequence=True)
        assert client.get_children("/bare")
        client.delete(path)

    def by_kazoo(name: str) -> None:
        lock = client.Lock(f"/peer/{name}")
        assert lock.acquire()
        assert lock.release()

    return Service({"LOCATION": server.url}, bare, 1.25, {"kazoo's Lock": by_kazoo})


def _consul(stack: ExitStack) -> Service:
    from django_fencedlock.backends.http import HttpNodes

    server = stack.enter_context(closing(servers.Consul.launch(finding.consul())))
    nodes = HttpNodes(_config(server.url), 0)

    def bare(name: str) -> None:
        assert nodes.ask("PUT", f"/v1/kv/bare/{name}", "x" * 100).status == 200
        assert nodes.ask("DELETE", f"/v1/kv/bare/{name}").status == 200

    peers: dict[str, Once] = {}
    with suppress(ImportError):
        import consul

        client = consul.Consul(server.host, server.port)
        session = client.session.create(ttl=30, behavior="delete", lock_delay=0)

        def by_consul(name: str) -> None:
            key = f"peer/{name}"
            assert client.kv.put(key, "x", acquire=session)
            assert client.kv.put(key, "", release=session)

        peers["py-consul's kv.put(acquire)"] = by_consul
    return Service({"LOCATION": server.url}, bare, 1.25, peers)


def _redlock(stack: ExitStack) -> Service:
    found = finding.redis()
    nodes = [stack.enter_context(closing(servers.Redis.launch(found))) for _ in range(5)]
    urls = [node.url for node in nodes]
    pools = [node.client().connection_pool.make_connection() for node in nodes]
    release = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end"

    def everywhere(*command: object) -> None:
        for connection in pools:
            connection.send_command(*command)
        for connection in pools:
            assert connection.read_response()

    def bare(name: str) -> None:
        owner = uuid4().hex
        everywhere("SET", f"bare:{name}", owner, "NX", "PX", 30000)
        everywhere("EVAL", release, 1, f"bare:{name}", owner)

    peers: dict[str, Once] = {}
    with suppress(ImportError):
        import redlock

        manager = redlock.Redlock(urls)

        def by_redlock(name: str) -> None:
            lock = manager.lock(f"peer:{name}", 30000)
            assert lock
            manager.unlock(lock)

        peers["redlock-py"] = by_redlock
    with suppress(ImportError):
        import pottery

        masters = {node.client(decode_responses=False) for node in nodes}

        def by_pottery(name: str) -> None:
            with pottery.Redlock(key=name, masters=masters, auto_release_time=30):
                pass

        peers["pottery's Redlock"] = by_pottery
    return Service({"LOCATION": urls}, bare, 1.5, peers)


def _dynamodb(stack: ExitStack) -> Service:
    import boto3

    from django_fencedlock.backends import dynamodb

    server = stack.enter_context(closing(servers.DynamoDB.launch(finding.dynamodb())))
    os.environ |= {"AWS_ACCESS_KEY_ID": server.access_key}
    os.environ |= {"AWS_SECRET_ACCESS_KEY": server.secret_key}
    at = {"endpoint_url": server.url, "region_name": server.region}
    client = boto3.client("dynamodb", **at)
    for table, key in (("bare", "name"), ("fencedlock", "name")):
        client.create_table(
            TableName=table,
            KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )

    def bare(name: str) -> None:
        key = {"TableName": "bare", "Key": {"name": {"S": name}}}
        values = {":o": {"S": "x" * 100}, ":e": {"N": "1"}}
        client.update_item(
            **key, UpdateExpression="SET o = :o, e = :e", ExpressionAttributeValues=values
        )
        client.update_item(**key, UpdateExpression="REMOVE o, e")

    peers: dict[str, Once] = {}
    with suppress(ImportError):
        from python_dynamodb_lock.python_dynamodb_lock import DynamoDBLockClient

        resource = boto3.resource("dynamodb", **at)
        DynamoDBLockClient.create_dynamodb_table(client, table_name="peer")
        locks = DynamoDBLockClient(resource, table_name="peer")
        stack.callback(locks.close)

        def by_lock_client(name: str) -> None:
            locks.acquire_lock(name).release(best_effort=False)

        peers["python-dynamodb-lock"] = by_lock_client
    options = {"REGION": server.region, "ENDPOINT": server.url}
    assert dynamodb.__name__
    return Service({"LOCATION": "fencedlock", "OPTIONS": options}, bare, 1.25, peers)


def _config(location: str) -> Any:
    from django_fencedlock import conf

    return conf._read("bare", {"LOCATION": location})


SERVICES: dict[str, Callable[[ExitStack], Service]] = {
    "etcd": _etcd,
    "zookeeper": _zookeeper,
    "consul": _consul,
    "redlock": _redlock,
    "dynamodb": _dynamodb,
}


if __name__ == "__main__":
    main()
