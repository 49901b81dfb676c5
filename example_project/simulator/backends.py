"""
The lock services of the simulator: what each needs, and the settings of its processes.

To add a service, add a class and its entry in `BACKENDS`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from .. import environment, servers

#: Seconds until a request of a client times out.
TIMEOUT = 1.0


@dataclass(frozen=True)
class World:
    """The files and the name prefix of one simulation."""

    name: str
    directory: Path
    #: The server of the lock service; empty for a file.
    server: str = ""


class Backend:
    """Base class of the lock services."""

    key: str
    label: str
    #: Whether there is a network between a client and the service.
    has_network = True
    #: The reason if there is none.
    why_no_network = ""
    #: Whether the service can lose its data.
    can_be_emptied = False
    #: The name of a service that keeps an expired lock until it has ended the holder's session.
    ends_sessions = ""
    #: Such a session ends with its process.
    ends_with_process = False

    def missing(self) -> str:
        """Return what is missing and how to install it; empty if nothing is."""
        return ""

    def start(self) -> str:
        """Return the URL of its server; start the server if necessary."""
        return ""

    def address(self, server: str) -> tuple[str, int] | None:
        """Return the service's address for a proxy, or None."""
        return None

    def settings(self, world: World, at: tuple[str, int] | None = None) -> dict[str, Any]:
        """Return the settings of a process that connects to the service at `at` or directly."""
        raise NotImplementedError


class Database(Backend):
    key = "database"
    label = "Database row (SQLite)"
    has_network = False
    why_no_network = (
        "The lease is a row of the SQLite file with the counter: there is no network between a "
        "client and a file."
    )

    def settings(self, world: World, at: tuple[str, int] | None = None) -> dict[str, Any]:
        return _settings(
            {"default": _sqlite(world)},
            {"BACKEND": "django_fencedlock.backends.database.DatabaseBackend"},
        )


class Redis(Backend):
    key = "redis"
    label = "Redis"
    can_be_emptied = True
    why_no_network = "This Redis uses a Unix socket or TLS, which the simulator can't proxy."

    def missing(self) -> str:
        return _missing(servers.redis_wants())

    def start(self) -> str:
        return servers.redis()

    def address(self, server: str) -> tuple[str, int] | None:
        parts = urlsplit(server)
        return (parts.hostname or "127.0.0.1", parts.port or 6379) if _is_plain(parts) else None

    def settings(self, world: World, at: tuple[str, int] | None = None) -> dict[str, Any]:
        location = world.server if at is None else _moved(world.server, *at)
        service = {
            "BACKEND": "django_fencedlock.backends.redis.RedisBackend",
            "LOCATION": location,
            "KEY_PREFIX": world.name,
            "OPTIONS": {"TIMEOUT": TIMEOUT},
        }
        return _settings({"default": _sqlite(world)}, service, redis_url=world.server)


class Postgres(Backend):
    key = "postgres"
    label = "PostgreSQL advisory lock"
    ends_sessions = "PostgreSQL"
    ends_with_process = True
    why_no_network = "This PostgreSQL uses a Unix socket, which the simulator can't proxy."

    def missing(self) -> str:
        return _missing(servers.postgres_wants())

    def start(self) -> str:
        return servers.postgres()

    def address(self, server: str) -> tuple[str, int] | None:
        parts = urlsplit(server)
        return (parts.hostname, parts.port or 5432) if parts.hostname else None

    def settings(self, world: World, at: tuple[str, int] | None = None) -> dict[str, Any]:
        direct = _postgres(world)
        databases = {"default": direct}
        options: dict[str, Any] = {"TIMEOUT": TIMEOUT}
        if at is not None:
            # The session with the locks uses the proxy, the writes don't.
            databases["service"] = direct | {"HOST": at[0], "PORT": str(at[1])}
            options["DATABASE"] = "service"
        service = {
            "BACKEND": "django_fencedlock.backends.postgres.PostgresBackend",
            "OPTIONS": options,
        }
        return _settings(databases, service, schema=world.name)


class Service(Backend):
    """
    A lock service beside the counter's SQLite file, named by a URL in the form of EXAMPLE_LOCKS.

    Args:
        key: Its scheme and key.
        label: Its name on the page.
        ends_sessions: Whether it frees an expired lock by ending the holder's session.
        why_no_network: Why the simulator can't proxy it; empty if it can.
    """

    def __init__(
        self, key: str, label: str, *, ends_sessions: bool = False, why_no_network: str = ""
    ) -> None:
        self.key, self.label = key, label
        self.ends_sessions = label * ends_sessions
        self.has_network = not why_no_network
        self.why_no_network = why_no_network or (
            f"This {label} uses TLS or several servers, which the simulator can't proxy."
        )

    def missing(self) -> str:
        return servers.service_missing(self.key)

    def start(self) -> str:
        return servers.redlock() if self.key == "redlock" else servers.service(self.key)

    def address(self, server: str) -> tuple[str, int] | None:
        parts = urlsplit(server)
        if not self.has_network or parts.scheme != self.key or "," in parts.netloc:
            return None
        return parts.hostname or "127.0.0.1", parts.port or PORTS[self.key]

    def settings(self, world: World, at: tuple[str, int] | None = None) -> dict[str, Any]:
        url = world.server if at is None else _moved(world.server, *at)
        # Nothing has to be removed: the name of the lock is new in each simulation.
        service = environment.lock_service(url, prefix="simulator")
        service["OPTIONS"] = {**service.get("OPTIONS", {}), "TIMEOUT": TIMEOUT}
        # The clients have a ttl of their own. A ZooKeeper for tests may allow no longer one.
        return _settings({"default": _sqlite(world)}, {**service, "TTL": 10})


class MySQL(Backend):
    key = "mysql"
    label = "MySQL GET_LOCK"
    has_network = False
    why_no_network = (
        "The lock is held by a session with the database of the counter: a client that is cut off "
        "can't write either."
    )
    ends_sessions = "MySQL"
    ends_with_process = True

    def missing(self) -> str:
        return servers.service_missing(self.key)

    def start(self) -> str:
        return os.environ["EXAMPLE_MYSQL_URL"]

    def settings(self, world: World, at: tuple[str, int] | None = None) -> dict[str, Any]:
        parts = urlsplit(world.server)
        database = {
            "ENGINE": "django.db.backends.mysql",
            "NAME": world.name,
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            "HOST": parts.hostname or "",
            "PORT": str(parts.port or ""),
        }
        service = {"BACKEND": environment.BACKENDS["mysql"], "OPTIONS": {"TIMEOUT": TIMEOUT}}
        return _settings({"default": database}, service, schema=world.name)


#: The default ports.
PORTS = {"etcd": 2379, "zookeeper": 2181, "consul": 8500}
BACKENDS: dict[str, Backend] = {
    each.key: each
    for each in (
        Database(),
        Redis(),
        Postgres(),
        MySQL(),
        Service("etcd", "etcd", ends_sessions=True),
        Service("zookeeper", "ZooKeeper", ends_sessions=True),
        Service("consul", "Consul", ends_sessions=True),
        Service(
            "redlock",
            "Redlock",
            why_no_network="The clients use several servers, and the simulator proxies only one.",
        ),
        Service(
            "dynamodb",
            "DynamoDB",
            why_no_network="Requests to DynamoDB are signed for its host, so no proxy can be used.",
        ),
    )
}


# The page shows what they would log.
_QUIET = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"none": {"class": "logging.NullHandler"}},
    "loggers": {"django_fencedlock": {"handlers": ["none"], "propagate": False}},
}


def _settings(
    databases: Mapping[str, Any], service: Mapping[str, Any], schema: str = "", redis_url: str = ""
) -> dict[str, Any]:
    return {
        "SECRET_KEY": "a simulation has no secrets",
        "USE_TZ": True,
        "DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField",
        "INSTALLED_APPS": ["django_fencedlock", "example_project.simulator"],
        "DATABASES": databases,
        "FENCEDLOCK": {"default": service},
        "LOGGING": _QUIET,
        "SIMULATOR_SCHEMA": schema,
        "SIMULATOR_REDIS_URL": redis_url,
    }


def _sqlite(world: World) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(world.directory / "world.sqlite3"),
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 10,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }


def _postgres(world: World) -> dict[str, Any]:
    parts = urlsplit(world.server)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/") or "postgres",
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "OPTIONS": dict(parse_qsl(parts.query)) | {"options": f"-c search_path={world.name}"},
    }


def _missing(wants: list[str]) -> str:
    if not wants:
        return ""
    return f"A driver or a program is missing. {servers.how_to_get(wants)}"


def _is_plain(parts: Any) -> bool:
    return parts.scheme == "redis"


def _moved(url: str, host: str, port: int) -> str:
    parts = urlsplit(url)
    secret, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{secret}{at}{host}:{port}"))
