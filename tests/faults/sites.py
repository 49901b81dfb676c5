"""Where a run takes place: a lock service, the database of its fences, and the ways to both."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from tests.backends import (
    CONSUL,
    DATABASE,
    DYNAMODB,
    ETCD,
    MYSQL,
    POSTGRES,
    REDIS,
    REDLOCK,
    ZOOKEEPER,
)
from tests.servers import (
    Clock,
    Consul,
    DynamoDB,
    Etcd,
    MariaDB,
    PgBouncer,
    Postgres,
    Proxy,
    Redis,
    Server,
    ZooKeeper,
    finding,
)

TIMEOUT = 1.0


class Site:
    """The servers of one backend, which clients reach directly or through proxies that can fail."""

    name = ""
    backend = DATABASE

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.proxies: list[Proxy] = []
        self._clock: Clock | None = None
        self._going_by_it: Server | None = None
        self.start()

    def start(self) -> None:
        """Start the servers."""

    def renew(self, directory: Path) -> None:
        raise NotImplementedError

    def database(self, far: bool) -> dict[str, Any]:
        raise NotImplementedError

    def lab(self, far: bool = False) -> dict[str, Any]:
        lock = {
            "BACKEND": self.backend,
            "OPTIONS": {"TIMEOUT": TIMEOUT, **self.options()},
            **self.location(far),
        }
        databases = {"default": self.database(far)}
        return {"databases": databases, "locks": {"default": lock}, "using": "default"}

    def options(self) -> dict[str, Any]:
        return {}

    def location(self, far: bool) -> dict[str, Any]:
        return {}

    @property
    def server(self) -> Server:
        """Return what decides who has a lock."""
        raise NotImplementedError

    def clock(self) -> Clock:
        """Return the wall clock of the lock service, which may be set."""
        self._clock = self._clock or Clock()
        # After a fail-over it is another server.
        if self._going_by_it is not self.server:
            self._going_by_it = self.server
            self.server.go_by(self._clock)
        return self._clock

    def heal(self) -> None:
        for proxy in self.proxies:
            proxy.pass_through()

    def versions(self) -> list[str]:
        return []

    def close(self) -> None:
        self._stack.close()

    def _keep(self, thing: Any) -> Any:
        return self._stack.enter_context(contextlib.closing(thing))

    def _proxy(self, host: str, port: int) -> Proxy:
        proxy: Proxy = self._keep(Proxy(host, port))
        self.proxies.append(proxy)
        return proxy


class SQLite(Site):
    """Leases as rows of a file."""

    name = "sqlite"

    def renew(self, directory: Path) -> None:
        self._file = directory / "db.sqlite3"

    def database(self, far: bool) -> dict[str, Any]:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(self._file),
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 5,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            },
        }

    def versions(self) -> list[str]:
        import sqlite3

        return [f"SQLite {sqlite3.sqlite_version}"]


class OnPostgres(Site):
    """Fences in a PostgreSQL."""

    settings: ClassVar[dict[str, str]] = {}

    def start(self) -> None:
        server = Postgres.launch(finding.postgres(), **self.settings)
        self.postgres: Postgres = self._keep(server)
        self.postgres_proxy = self._proxy(self.postgres.host, self.postgres.port)

    @property
    def server(self) -> Server:
        return self.postgres

    def renew(self, directory: Path) -> None:
        self.postgres.empty()
        self.database_name = self.postgres.create_database()

    def database(self, far: bool) -> dict[str, Any]:
        entry = self.postgres.django(self.database_name, self.postgres_proxy if far else None)
        # Who would hang for ever on a connection that has gone silent learns nothing.
        return entry | {"OPTIONS": {"connect_timeout": 5, "tcp_user_timeout": 8000}}

    def versions(self) -> list[str]:
        return [str(finding.postgres())]


class PostgresRows(OnPostgres):
    """Leases as rows of a PostgreSQL."""

    name = "rows"


class Forgetful(OnPostgres):
    """Leases as rows of a PostgreSQL whose last commits a crash undoes."""

    name = "forgetful"
    settings: ClassVar[dict[str, str]] = {"synchronous_commit": "off", "wal_writer_delay": "2000ms"}


class PostgresSessions(OnPostgres):
    """Leases as advisory locks of sessions."""

    name = "postgres"
    backend = POSTGRES


class Pooled(OnPostgres):
    """Leases as rows of a PostgreSQL behind a pooler of transactions."""

    name = "pgbouncer"

    def start(self) -> None:
        super().start()
        found = finding.pgbouncer()
        self.pgbouncer: PgBouncer = self._keep(PgBouncer.launch(found, self.postgres, pool_size=8))

    def renew(self, directory: Path) -> None:
        # It keeps sessions open, of databases that are gone as well.
        self.pgbouncer.restart()
        super().renew(directory)

    def database(self, far: bool) -> dict[str, Any]:
        entry = self.pgbouncer.django(self.database_name)
        # A cursor or a prepared statement belongs to a session; here the next may be another.
        options = {"connect_timeout": 5, "prepare_threshold": None}
        return entry | {"DISABLE_SERVER_SIDE_CURSORS": True, "OPTIONS": options}

    def versions(self) -> list[str]:
        return [*super().versions(), str(finding.pgbouncer())]


class OnRedis(OnPostgres):
    """Leases as keys of a Redis, fences in a PostgreSQL."""

    name = "redis"
    backend = REDIS
    _find: Callable[[], finding.Found] = staticmethod(finding.redis)

    def start(self) -> None:
        super().start()
        self.redis: Redis = self.launch()
        self.redis_proxy = self._proxy(self.redis.host, self.redis.port)

    @property
    def server(self) -> Server:
        return self.redis

    def launch(self, *arguments: str, replica_of: Redis | None = None) -> Redis:
        found = self._find()
        server: Redis = self._keep(Redis.launch(found, *arguments, replica_of=replica_of))
        return server

    def renew(self, directory: Path) -> None:
        super().renew(directory)
        self.redis.empty()

    def location(self, far: bool) -> dict[str, str]:
        at = self.redis_proxy if far else self.redis
        return {"LOCATION": f"redis://{at.host}:{at.port}/0"}

    def versions(self) -> list[str]:
        return [*super().versions(), str(self._find())]


class OnValkey(OnRedis):
    """The same on a Valkey."""

    name = "valkey"
    _find = staticmethod(finding.valkey)


class OnNodes(OnPostgres):
    """Leases at a service of three nodes, fences in a PostgreSQL."""

    _find: Callable[[], finding.Found]

    def start(self) -> None:
        super().start()
        self.nodes: list[Any] = [self._keep(node) for node in self.launch()]
        self.ways = [self._proxy(node.host, node.port) for node in self.nodes]

    def launch(self) -> list[Any]:
        raise NotImplementedError

    @property
    def leader(self) -> Any:
        return next((node for node in self.nodes if node.is_leader()), self.nodes[0])

    def location(self, far: bool) -> dict[str, Any]:
        at = [self.address(each) for each in (self.ways if far else self.nodes)]
        return {"LOCATION": at, "KEY_PREFIX": self.database_name}

    def address(self, at: Any) -> str:
        return f"http://{at.host}:{at.port}"

    def versions(self) -> list[str]:
        return [*super().versions(), str(self._find())]


class OnEtcd(OnNodes):
    """Leases as keys of etcd."""

    name = "etcd"
    backend = ETCD
    _find = staticmethod(finding.etcd)

    def launch(self) -> list[Any]:
        return Etcd.launch_cluster(self._find())


class OnZooKeeper(OnNodes):
    """Leases as nodes of ZooKeeper."""

    name = "zookeeper"
    backend = ZOOKEEPER
    _find = staticmethod(finding.zookeeper)

    def launch(self) -> list[Any]:
        return ZooKeeper.launch_cluster(self._find())

    def address(self, at: Any) -> str:
        return f"{at.host}:{at.port}"


class OnConsul(OnNodes):
    """Leases as keys of Consul."""

    name = "consul"
    backend = CONSUL
    _find = staticmethod(finding.consul)

    def launch(self) -> list[Any]:
        return Consul.launch_cluster(self._find())

    def options(self) -> dict[str, Any]:
        return {"SESSION_TTL_MIN": 1}


class OnRedlock(OnNodes):
    """Leases as keys of most of three Redis."""

    name = "redlock"
    backend = REDLOCK
    _find = staticmethod(finding.redis)

    def launch(self) -> list[Any]:
        kept = ("--appendonly", "yes", "--appendfsync", "always")
        return [Redis.launch(self._find(), *kept) for _ in range(3)]

    def address(self, at: Any) -> str:
        return f"redis://{at.host}:{at.port}/0"


class OnDynamoDB(OnNodes):
    """Leases as items of DynamoDB: an emulator, which is one node."""

    name = "dynamodb"
    backend = DYNAMODB
    _find = staticmethod(finding.dynamodb)

    def launch(self) -> list[Any]:
        server = DynamoDB.launch(self._find(), durable=True)
        os.environ["AWS_ACCESS_KEY_ID"] = server.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = server.secret_key
        return [server]

    def renew(self, directory: Path) -> None:
        super().renew(directory)
        self.nodes[0].empty()
        types = [{"AttributeName": "name", "AttributeType": "S"}]
        key = [{"AttributeName": "name", "KeyType": "HASH"}]
        table = {"TableName": "locks", "KeySchema": key, "AttributeDefinitions": types}
        self.nodes[0].request("CreateTable", {**table, "BillingMode": "PAY_PER_REQUEST"})

    def location(self, far: bool) -> dict[str, Any]:
        at = (self.ways if far else self.nodes)[0]
        options = {"TIMEOUT": TIMEOUT, "REGION": self.nodes[0].region, "ENDPOINT": self.address(at)}
        return {"LOCATION": "locks", "OPTIONS": options}


class OnMariaDB(Site):
    """Leases as rows of a MariaDB."""

    name = "mariadb"
    _numbers = 0

    def start(self) -> None:
        self.mariadb: MariaDB = self._keep(MariaDB.launch(finding.mariadb()))
        self.mariadb_proxy = self._proxy(self.mariadb.host, self.mariadb.port)

    @property
    def server(self) -> Server:
        return self.mariadb

    def renew(self, directory: Path) -> None:
        self.mariadb.empty()
        type(self)._numbers += 1
        self._database_name = f"lab_{self._numbers}"
        self.mariadb.execute(f"CREATE DATABASE {self._database_name}")

    def database(self, far: bool) -> dict[str, Any]:
        return self.mariadb.django(self._database_name, self.mariadb_proxy if far else None)

    def versions(self) -> list[str]:
        return [str(finding.mariadb())]


class MariaDBSessions(OnMariaDB):
    """Leases as locks of MariaDB's sessions."""

    name = "mysql"
    backend = MYSQL


_ALL: tuple[type[Site], ...] = (
    *(SQLite, PostgresRows, Pooled, OnMariaDB),
    *(PostgresSessions, OnRedis, OnValkey, Forgetful, MariaDBSessions),
    *(OnEtcd, OnZooKeeper, OnConsul, OnRedlock, OnDynamoDB),
)
SITES = {site.name: site for site in _ALL}
