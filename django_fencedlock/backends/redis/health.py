"""What `check --database` and the doctor ask the servers of the Redis backend."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.runtime import clock
from ...problems import Problem, clock_problem, ok
from .client import Client, RedisError, is_cluster

Info = Mapping[str, Any]

#: The oldest version whose commands the scripts use.
OLDEST = (6, 2)
#: The part of maxmemory that may be used.
FULL = 0.9

_FENCED = "still runs. Tokens still rise, and fenced writes are still rejected."
_APPEND_ONLY = "Set appendonly to yes if tasks that run twice cost too much."
_OWN_SERVER = "or use a separate server for locks."


def problems(client: Client, alias: str) -> Iterator[Problem]:
    """Look at version, memory, persistence, replicas and clock of each server."""
    where = f"The Redis of FENCEDLOCK[{alias!r}]"
    if is_cluster(client):
        for node in client.get_primaries():
            yield from _problems(f"{where} (node {node.name})", client, {"target_nodes": node})
        return
    yield from _problems(where, client, {})
    if client.info("cluster").get("cluster_enabled"):
        what = f"{where} is one node of a Cluster: locks of the other nodes fail."
        remedy = "Give a function that returns a redis.RedisCluster as OPTIONS['CLIENT_FACTORY']."
        yield Problem("E017", what, remedy)


def _problems(where: str, client: Client, target: dict[str, Any]) -> Iterator[Problem]:
    info = client.info(**target)
    yield _version(where, info)
    yield _clock(where, client, target)
    yield from _memory(where, info)
    yield from _persistence(where, info, _saves(client, target))
    if info.get("role") == "slave":
        remedy = "Name the primary, or a Sentinel that knows it."
        yield Problem("W008", f"{where} is a replica.", remedy)
    elif count := info.get("connected_slaves"):
        what = f"{where} has replicas ({count}), which can lag: after a failover a lock can be"
        yield Problem("I003", f"{what} granted again while its holder {_FENCED}")


def _version(where: str, info: Info) -> Problem:
    # Valkey reports that it is Redis 7.2, beside its own version.
    if "valkey_version" in info:
        return ok(f"{where} is Valkey {info['valkey_version']}.")
    version = str(info.get("redis_version", "unknown"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= OLDEST:
        return ok(f"{where} is Redis {version}.")
    return Problem("E014", f"{where} has version {version}.", "Use Redis 6.2 or newer, or Valkey.")


def _clock(where: str, client: Client, target: dict[str, Any]) -> Problem:
    before, began = time.time(), clock()
    seconds, micros = client.time(**target)
    ahead = seconds + micros / 1e6 - before - (clock() - began) / 2
    found = clock_problem(ahead, f"{where.removesuffix(',')}: ")
    return Problem("W005", found.message, found.hint) if found.id else found


def _memory(where: str, info: Info) -> Iterator[Problem]:
    limit, used = info.get("maxmemory", 0), info.get("used_memory", 0)
    policy = info.get("maxmemory_policy", "noeviction")
    if limit and policy != "noeviction":
        what = f"{where} drops keys when it is full (maxmemory-policy {policy}): a dropped lock is"
        yield Problem(
            "W002",
            f"{what} free for the next owner. Tokens stay right.",
            f"Set maxmemory-policy to noeviction, {_OWN_SERVER}",
        )
        return
    yield ok(f"{where} drops no keys.")
    if limit and used > FULL * limit:
        what = f"{where} uses {used / limit:.0%} of its maxmemory, and refuses writes at 100%."
        yield Problem("W006", what, f"Raise maxmemory, {_OWN_SERVER}")


def _saves(client: Client, target: dict[str, Any]) -> bool | None:
    """Return whether the server makes snapshots; None if this user may not ask."""
    with contextlib.suppress(*RedisError):
        return bool(client.config_get("save", **target).get("save"))
    return None


def _persistence(where: str, info: Info, saves: bool | None) -> Iterator[Problem]:
    for key, effect in (
        ("rdb_last_bgsave_status", "It may refuse every write"),
        ("aof_last_write_status", "It refuses every write"),
    ):
        if info.get(key, "ok") != "ok":
            found = f"{where} reports that {key} is {info[key]}."
            yield Problem("W007", found, f"{effect}: look at its log and its disk.")
    if info.get("aof_enabled"):
        yield ok(f"{where} keeps an append-only file.")
    elif saves is False:
        what = f"{where} keeps nothing on disk: after a restart every lock is free while its holder"
        yield Problem("I001", f"{what} {_FENCED}", _APPEND_ONLY)
    else:
        what = f"{where} keeps snapshots at most: after a crash a new lock is free while its holder"
        yield Problem("I002", f"{what} {_FENCED}", _APPEND_ONLY)
