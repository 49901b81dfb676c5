"""The bare commands that a lock is made of, without anything around them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from tests.servers import Postgres, Redis

Once = Callable[[str], object]

_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end"
_ACQUIRE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return redis.call('INCR', KEYS[2])
end
"""
_UPSERT = """
INSERT INTO bench_fence AS f (name, token, owner) VALUES (%(name)s, %(token)s, %(owner)s)
ON CONFLICT (name) DO UPDATE SET token = EXCLUDED.token, owner = EXCLUDED.owner
WHERE f.token < EXCLUDED.token RETURNING token
"""


def redis_unfenced(redis: Redis) -> Once:
    client = redis.client()
    release = client.script_load(_RELEASE)

    def once(name: str) -> None:
        owner = uuid4().hex
        assert client.set(f"raw:{name}", owner, nx=True, px=30000)
        assert client.evalsha(release, 1, f"raw:{name}", owner)

    return once


def redis_fenced(redis: Redis, postgres: Postgres) -> Once:
    cursor = _cursor(postgres)
    cursor.execute("CREATE TABLE bench_fence (name text PRIMARY KEY, token bigint, owner text)")

    def record(name: str, token: int, owner: str) -> None:
        cursor.execute(_UPSERT, {"name": name, "token": token, "owner": owner}, prepare=True)

    return _redis_fenced(redis, cursor, record)


def redis_registered(redis: Redis, postgres: Postgres) -> Once:
    """The same, with the row of the registry; rows are deleted by the hundred."""
    from django_fencedlock.storage.dialect import seen_values
    from django_fencedlock.storage.postgresql import CLEAR_MANY, RECORD

    cursor = _cursor(postgres)
    names: list[str] = []
    owners: list[str] = []

    def record(name: str, token: int, owner: str) -> None:
        given = {**_row(name, "raw-redis"), **seen_values(None), "token": token}
        given.update(owner=owner, fence_owner=owner)
        cursor.execute(RECORD, given, prepare=True)
        names.append(given["name"])
        owners.append(owner)

    once = _redis_fenced(redis, cursor, record, "registered")

    def once_or_clear(name: str) -> None:
        once(name)
        if len(names) == 100:
            cursor.execute(CLEAR_MANY, {"names": names, "owners": owners})
            names.clear()
            owners.clear()

    return once_or_clear


def _redis_fenced(
    redis: Redis, cursor: Any, record: Callable[[str, int, str], None], prefix: str = "raw"
) -> Once:
    client = redis.client()
    acquire, release = client.script_load(_ACQUIRE), client.script_load(_RELEASE)

    def once(name: str) -> None:
        owner = uuid4().hex
        key = f"{prefix}:{{{name}}}"
        token = client.evalsha(acquire, 2, key, f"{key}:seq", owner, 30000)
        record(name, token, owner)
        assert cursor.fetchone()
        assert client.evalsha(release, 1, key, owner)

    return once


def advisory(postgres: Postgres) -> Once:
    from django_fencedlock.backends.postgres import statements as sql

    cursor = _cursor(postgres)
    _keys: dict[str, int] = {}

    def once(name: str) -> None:
        given = _row(name, "raw-postgres")
        key = given["session_key"] = _keys.setdefault(name, hash(name))
        given["idle"] = "30000ms"
        cursor.execute(sql.TRY, given, prepare=True)
        assert cursor.fetchone()[1]
        release = {"name": f"raw:{name}", "owner": given["owner"], "key": key, "idle": "0"}
        cursor.execute(sql.RELEASE, release, prepare=True)
        assert cursor.fetchone()[0]

    return once


def advisory_pair(postgres: Postgres) -> Once:
    """No fence, no registry, no token: what a lock without fencing is made of."""
    cursor = _cursor(postgres)

    def once(name: str) -> None:
        given = (hash(name),)
        cursor.execute("SELECT pg_advisory_lock(%s)", given, prepare=True)
        cursor.execute("SELECT pg_advisory_unlock(%s)", given, prepare=True)

    return once


def rows_on_postgres(postgres: Postgres) -> Once:
    from django_fencedlock.storage.dialect import HELD
    from django_fencedlock.storage.postgresql import CLAIM

    cursor = _cursor(postgres)
    delete = f"DELETE FROM {HELD} WHERE name = %(name)s AND owner = %(owner)s"

    def once(name: str) -> None:
        given = _row(name, "raw-rows")
        cursor.execute(CLAIM, given, prepare=True)
        assert cursor.fetchone()
        cursor.execute(delete, {"name": given["name"], "owner": given["owner"]}, prepare=True)
        assert cursor.rowcount

    return once


def rows_on_sqlite() -> Once:
    from django.db import connections

    from django_fencedlock.storage.dialect import COLUMNS, FENCE, HELD

    raw = sqlite3.connect(connections["sqlite"].settings_dict["NAME"], isolation_level=None)
    raw.execute("PRAGMA synchronous=NORMAL")
    columns = (*COLUMNS, "acquired_at", "renewed_at", "expires_at")
    insert = (
        f"INSERT OR IGNORE INTO {HELD} ({', '.join(columns)}) "
        f"VALUES ({', '.join(f':{column}' for column in columns)})"
    )
    draw = (
        f"INSERT INTO {FENCE} (name, token, owner) VALUES (:name, 1, :owner) "
        "ON CONFLICT (name) DO UPDATE SET token = token + 1, owner = excluded.owner"
    )
    read = f"SELECT token FROM {FENCE} WHERE name = :name"
    delete = f"DELETE FROM {HELD} WHERE name = :name AND owner = :owner"
    times = {
        "acquired_at": "2030-01-01 00:00:00.000000",
        "renewed_at": "2030-01-01 00:00:00.000000",
        "expires_at": "2030-01-01 00:00:30.000000",
    }

    def once(name: str) -> None:
        given = {**_row(name, "raw-rows"), **times}
        raw.execute("BEGIN IMMEDIATE")
        assert raw.execute(insert, given).rowcount
        raw.execute(draw, given)
        assert raw.execute(read, given).fetchone()
        raw.execute("COMMIT")
        assert raw.execute(delete, given).rowcount

    return once


def _cursor(postgres: Postgres) -> Any:
    connection = postgres.connect(prepare_threshold=0)
    connection.execute("SET synchronous_commit = on")
    return connection.cursor()


def _row(name: str, alias: str) -> dict[str, Any]:
    from django_fencedlock.core.identity import new_owner
    from django_fencedlock.storage.dialect import Entry, new_id

    if not _rows:
        entry = Entry(name="", alias="", backend="raw", owner=new_owner(), ttl=30)
        _rows.update(entry.values(), ttl=30.0)
    owner = uuid4().hex
    lock = {"name": f"raw:{name}", "alias": alias, "owner": owner, "fence_owner": owner}
    return {**_rows, "id": new_id(), **lock}


_rows: dict[str, Any] = {}
