"""The project that takes the locks: its settings, on servers that somebody started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.servers import Postgres, Redis, finding

#: What a process has to know to take the locks; goes from one to the other as JSON.
Given = Mapping[str, Any]

_BACKENDS = "django_fencedlock.backends"


class Servers(NamedTuple):
    redis: Redis
    postgres: Postgres
    given: Given

    @property
    def pids(self) -> list[int]:
        return [self.redis.process.pid, self.postgres.process.pid]


@contextmanager
def started(
    *,
    cpus: int | None = None,
    postgres: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Servers]:
    """
    Start servers, and configure this process to take locks on them.

    Args:
        cpus: How many CPUs this process and all that it starts share.
        postgres: Settings of the server.
        settings: More of Django's.
        options: Options of the postgres backend.
    """
    with ExitStack() as stack:
        if cpus:
            os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cpus]))
        redis = stack.enter_context(closing(Redis.launch(finding.redis())))
        server = stack.enter_context(closing(Postgres.launch(finding.postgres(), **postgres or {})))
        folder = stack.enter_context(TemporaryDirectory())
        given = {
            "redis": redis.url,
            "postgres": server.django(),
            "sqlite": str(Path(folder) / "db.sqlite3"),
            "options": options,
            "settings": settings or {},
        }
        configure(given)
        migrate()
        stack.callback(give_back_all)
        yield Servers(redis, server, given)


def configure(given: Given) -> None:
    """Have an alias for each backend."""
    import django
    from django.conf import settings

    peers = {
        "django_redis": {
            "CACHES": {
                "default": {
                    "BACKEND": "django_redis.cache.RedisCache",
                    "LOCATION": given["redis"],
                }
            }
        }
    }
    settings.configure(
        INSTALLED_APPS=["django_fencedlock", *given["settings"].get("INSTALLED_APPS", ())],
        DATABASES={"default": given["postgres"], "sqlite": sqlite(given["sqlite"])},
        FENCEDLOCK={
            "default": {},
            "sqlite": {"FENCE_DATABASE": "sqlite"},
            "postgres": {
                "BACKEND": f"{_BACKENDS}.postgres.PostgresBackend",
                "OPTIONS": given["options"],
            },
            "redis": {"BACKEND": f"{_BACKENDS}.redis.RedisBackend", "LOCATION": given["redis"]},
        },
        USE_TZ=True,
        **{key: value for peer in peers if find_spec(peer) for key, value in peers[peer].items()},
        **{key: value for key, value in given["settings"].items() if key != "INSTALLED_APPS"},
    )
    django.setup()


def sqlite(path: str) -> dict[str, Any]:
    """The entry for DATABASES, as SQLite is best used."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }


def migrate() -> None:
    from django.core.management import call_command
    from django.db import connections

    for alias in connections:
        call_command("migrate", database=alias, verbosity=0)


def give_back_all() -> None:
    """Leave nothing to be done when the servers are gone."""
    from django_fencedlock import conf
    from django_fencedlock.core.manager import service
    from django_fencedlock.storage.background_writer import writer

    for alias in conf.aliases():
        service(alias).drop_all()
    writer.finish()
    writer.disable()
