"""The servers that all tests of a process share, each started when first asked for."""

import os
import threading
from collections.abc import Callable
from typing import Any

from . import finding
from .consul import Consul
from .dynamodb import DynamoDB
from .etcd import Etcd
from .finding import ServerMissing
from .mariadb import MariaDB
from .mysql import MySQL
from .pgbouncer import PgBouncer
from .postgres import Postgres
from .rabbitmq import RabbitMQ
from .redis import DURABLE, Redis
from .zookeeper import ZooKeeper

_lock = threading.RLock()
_servers: dict[str, Any] = {}


def url(name: str) -> str | None:
    """Return the address of a server that the environment names."""
    return os.environ.get(f"FENCEDLOCK_TEST_{name.upper()}_URL")


def available(name: str) -> bool:
    try:
        return bool(url(name) or finding.FINDERS[name]())
    except ServerMissing:
        return False


def started() -> dict[str, Any]:
    return dict(_servers)


def report() -> list[str]:
    """Return a line per server that says which one is used, or how to get one."""
    return [_line(name) for name in finding.FINDERS]


def postgres() -> Postgres:
    return _shared("postgres", Postgres, lambda: Postgres.launch(finding.postgres()))


def redis() -> Redis:
    return _shared("redis", Redis, lambda: Redis.launch(finding.redis()))


def valkey() -> Redis:
    return _shared(
        "valkey", lambda url: Redis(url, flavour="valkey"), lambda: Redis.launch(finding.valkey())
    )


def mariadb() -> MariaDB:
    return _shared("mariadb", MariaDB, lambda: MariaDB.launch(finding.mariadb()))


def pgbouncer() -> PgBouncer:
    found = finding.pgbouncer()
    return _shared("pgbouncer", None, lambda: PgBouncer.launch(found, postgres()))


def rabbitmq() -> RabbitMQ:
    return _shared("rabbitmq", RabbitMQ, lambda: RabbitMQ.launch(finding.rabbitmq()))


def etcd() -> Etcd:
    return _shared("etcd", Etcd, lambda: Etcd.launch(finding.etcd()))


def zookeeper() -> ZooKeeper:
    # Locks of the tests have a ttl of up to a minute.
    line = "maxSessionTimeout=60000"
    return _shared("zookeeper", ZooKeeper, lambda: ZooKeeper.launch(finding.zookeeper(), line))


def consul() -> Consul:
    return _shared("consul", Consul, lambda: Consul.launch(finding.consul()))


def dynamodb() -> DynamoDB:
    return _shared("dynamodb", DynamoDB, lambda: DynamoDB.launch(finding.dynamodb()))


def mysql() -> MySQL:
    return _shared("mysql", MySQL, lambda: MySQL.launch(finding.mysql()))


def redlock() -> list[Redis]:
    """Return three servers for one lock service, which lose no data."""
    return _shared(
        "redlock",
        lambda urls: [Redis(url) for url in urls.split(",")],
        # Not those of wheels: the README's command leaves the further services to CI.
        lambda: [Redis.launch(finding.redis_of_system(), *DURABLE) for _ in range(3)],
    )


def _shared(name: str, at: Callable[[str], Any] | None, launch: Callable[[], Any]) -> Any:
    with _lock:
        if name not in _servers:
            address = url(name)
            _servers[name] = at(address) if at and address else launch()
        return _servers[name]


def _line(name: str) -> str:
    if url(name):
        return f"{name}: the one that FENCEDLOCK_TEST_{name.upper()}_URL names"
    try:
        return str(finding.FINDERS[name]())
    except ServerMissing as exc:
        return f"{name}: none. To get it: {exc.remedy}"
