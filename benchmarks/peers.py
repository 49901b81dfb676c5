"""Locks of others, as far as they are installed: see ``benchmarks/README.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from tests.servers import Redis

Once = Callable[[str], object]


def on_redis(redis: Redis) -> Mapping[str, Once]:
    client = redis.client(decode_responses=False)

    def redis_py(name: str) -> None:
        with client.lock(f"redis-py:{name}", timeout=30, blocking_timeout=10):
            pass

    found = {"redis-py's Lock": redis_py}
    if find_spec("redis_lock"):
        import redis_lock

        def python_redis_lock(name: str) -> None:
            with redis_lock.Lock(client, name, expire=30):
                pass

        found["python-redis-lock"] = python_redis_lock
    return found


def on_postgres() -> Mapping[str, Once]:
    if not find_spec("pglock"):
        return {}
    import pglock

    def django_pglock(name: str) -> None:
        with pglock.advisory(f"pglock:{name}"):
            pass

    return {"django-pglock": django_pglock}


def of_rows(alias: str) -> Mapping[str, Once]:
    from django.db import connections, transaction

    from django_fencedlock.models import Fence

    if not connections[alias].features.has_select_for_update:
        return {}
    rows = Fence.objects.using(alias)
    seen: set[str] = set()

    def select_for_update(name: str) -> None:
        if name not in seen:
            rows.create(name=f"peer:{name}", token=1, owner="")
            seen.add(name)
        with transaction.atomic(using=alias):
            assert rows.select_for_update().get(name=f"peer:{name}")

    return {"select_for_update()": select_for_update}
