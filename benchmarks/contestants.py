"""Who contends for one lock: this package, bare commands that queue, and peers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks import peers
from benchmarks.peers import PATIENCE, Take
from benchmarks.project import Given
from benchmarks.report import OURS

REDIS, REDIS_UNFENCED = f"{OURS}, redis", f"{OURS}, redis, unfenced"
POSTGRES, ROWS = f"{OURS}, postgres", f"{OURS}, database"
#: What is as little as a hand-off can be made of; neither has a lease or a token.
BATON, ADVISORY = "bare BLPOP baton", "bare pg_advisory_lock"


def place_of(who: str) -> str:
    """A part of a lock's name: two lock services on one name exclude nobody, and are refused."""
    return re.sub(r"\W+", "-", who)


def contestants(given: Given) -> Mapping[str, Take]:
    """All that there are, by the names that figures carry."""
    return {
        **_ours(),
        BATON: _baton(given["redis"]),
        ADVISORY: _advisory(),
        **peers.on_redis(given["redis"]),
        **peers.on_postgres(),
        **peers.of_rows("default"),
    }


def _ours() -> Mapping[str, Take]:
    from django_fencedlock import lock

    def take(alias: str, fenced: bool = True) -> Take:
        return lambda name: lock(
            name, backend=alias, fenced=fenced, blocking_timeout=PATIENCE, ttl=30
        )

    return {
        REDIS: take("redis"),
        REDIS_UNFENCED: take("redis", fenced=False),
        POSTGRES: take("postgres"),
        ROWS: take("default"),
    }


def _baton(url: str) -> Take:
    """One element of a list, which whoever has it puts back. Lost with its holder."""
    import redis

    client: Any = redis.Redis.from_url(url, socket_timeout=PATIENCE + 1)
    # The same for all processes, and once.
    lay = client.register_script(
        "if redis.call('SET', KEYS[1] .. ':laid', 1, 'NX') then redis.call('LPUSH', KEYS[1], 1) end"
    )
    laid: set[str] = set()

    @contextmanager
    def baton(name: str) -> Iterator[None]:
        key = f"baton:{name}"
        if key not in laid:
            lay(keys=[key])
            laid.add(key)
        assert client.blpop(key, timeout=PATIENCE)
        try:
            yield
        finally:
            client.lpush(key, 1)

    return baton


def _advisory() -> Take:
    from zlib import crc32

    from django.db import connection

    @contextmanager
    def advisory(name: str) -> Iterator[None]:
        key = [crc32(name.encode())]
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", key)
            try:
                yield
            finally:
                cursor.execute("SELECT pg_advisory_unlock(%s)", key)

    return advisory
