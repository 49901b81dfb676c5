"""
Locks of others, as far as they are installed: see ``benchmarks/README.md``.

Each is a function of a name that returns a context manager, which waits for a minute at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

Take = Callable[[str], AbstractContextManager[object]]

#: By module: the package that has it.
PACKAGES = {
    "redis": "redis",
    "django_redis": "django-redis",
    "redis_lock": "python-redis-lock",
    "pottery": "pottery",
    "sherlock": "sherlock",
    "portalocker": "portalocker",
    "pglock": "django-pglock",
    "celery_once": "celery-once",
    "celery_singleton": "celery-singleton",
    "concurrency": "django-concurrency",
}
PATIENCE = 60


def missing() -> list[str]:
    """The packages that aren't there, and so are left out."""
    return [package for module, package in PACKAGES.items() if not find_spec(module)]


def versions() -> dict[str, str]:
    """The packages that are there."""
    found = {}
    for module, package in PACKAGES.items():
        if find_spec(module):
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                found[package] = "unknown version"
    return found


def on_redis(url: str) -> Mapping[str, Take]:
    import redis

    client = redis.Redis.from_url(url)
    found: dict[str, Take] = {
        "redis-py's Lock": lambda name: client.lock(
            f"redis-py:{name}", timeout=30, blocking_timeout=PATIENCE
        )
    }
    for module, make in _ON_REDIS.items():
        if find_spec(module):
            found.update(make(client))
    return found


def _django_redis(client: Any) -> Mapping[str, Take]:
    from django.core.cache import cache

    return {
        "django-redis' cache.lock": lambda name: cache.lock(
            f"django-redis:{name}", timeout=30, blocking_timeout=PATIENCE
        )
    }


def _python_redis_lock(client: Any) -> Mapping[str, Take]:
    import redis_lock

    return {"python-redis-lock": lambda name: redis_lock.Lock(client, name, expire=30)}


def _pottery(client: Any) -> Mapping[str, Take]:
    from pottery import Redlock

    return {
        "pottery's Redlock, one server": lambda name: Redlock(
            key=name, masters={client}, auto_release_time=30, context_manager_timeout=PATIENCE
        )
    }


def _sherlock(client: Any) -> Mapping[str, Take]:
    import sherlock

    return {
        "sherlock": lambda name: sherlock.RedisLock(
            f"sherlock:{name}", client=client, expire=30, timeout=PATIENCE
        )
    }


def _portalocker(client: Any) -> Mapping[str, Take]:
    import portalocker

    return {
        "portalocker's RedisLock, fencing": lambda name: portalocker.RedisLock(
            f"portalocker:{name}",
            connection=client,
            timeout=PATIENCE,
            fencing=True,
            interrupt_on_lost=False,
        )
    }


_ON_REDIS: Mapping[str, Callable[[Any], Mapping[str, Take]]] = {
    "django_redis": _django_redis,
    "redis_lock": _python_redis_lock,
    "pottery": _pottery,
    "sherlock": _sherlock,
    "portalocker": _portalocker,
}


def on_postgres() -> Mapping[str, Take]:
    if not find_spec("pglock"):
        return {}
    import pglock

    return {"django-pglock": lambda name: pglock.advisory(f"pglock:{name}")}


def of_rows(alias: str) -> Mapping[str, Take]:
    from django.db import connections, transaction

    from django_fencedlock.models import Fence

    if not connections[alias].features.has_select_for_update:
        return {}
    rows = Fence.objects.using(alias)
    seen: set[str] = set()

    @contextmanager
    def select_for_update(name: str) -> Iterator[None]:
        if name not in seen:
            rows.get_or_create(name=f"peer:{name}", defaults={"token": 1, "owner": ""})
            seen.add(name)
        with transaction.atomic(using=alias):
            assert rows.select_for_update().get(name=f"peer:{name}")
            yield

    return {"select_for_update()": select_for_update}
