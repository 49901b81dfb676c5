"""What `check --database` and a doctor ask of the servers of the Redis backend."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.runtime import clock
from ..problems import Problem, clock_problem, error, note, ok, warning
from .redis_client import Client, RedisError, is_cluster

Info = Mapping[str, Any]

#: The oldest server whose commands the scripts know.
OLDEST = (6, 2)
#: The part of maxmemory that may be in use.
FULL = 0.9


# Asked by the checks


def problems(client: Client, alias: str) -> Iterator[Problem]:
    """What is wrong with the servers themselves."""
    for node, server, memory in _infos(client):
        where = f"The Redis of FENCEDLOCK[{alias!r}]" + (f", node {node}," if node else "")
        yield from _version_problems(where, server)
        yield from _eviction_problems(where, memory)


def _infos(client: Client) -> Iterator[tuple[str, Info, Info]]:
    if not is_cluster(client):
        yield "", client.info("server"), client.info("memory")
        return
    for node in client.get_primaries():
        name = {"target_nodes": node}
        yield node.name, client.info("server", **name), client.info("memory", **name)


def _version_problems(where: str, server: Info) -> Iterator[Problem]:
    # Valkey calls itself a Redis 7.2 there, beside its own name.
    version = str(server.get("redis_version", ""))
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST and "valkey_version" not in server:
        yield Problem(
            "E014",
            f"{where} has version {version or 'unknown'}.",
            "Use Redis 6.2 or newer, or Valkey.",
        )


def _eviction_problems(where: str, memory: Info) -> Iterator[Problem]:
    policy = memory.get("maxmemory_policy", "noeviction")
    if memory.get("maxmemory") and policy != "noeviction":
        yield Problem(
            "W002",
            f"{where} drops keys when it is full (maxmemory-policy {policy}): a dropped lock is "
            "free for the next one. Tokens stay right.",
            "Set maxmemory-policy to noeviction, or keep locks on a server of their own.",
        )


# Asked by the doctor


def diagnose(client: Client) -> Iterator[Problem]:
    """Look at persistence, memory, replicas and clocks, node by node."""
    if not is_cluster(client):
        yield from _of_node("", client, {})
        yield from _lone_node(client)
        return
    for node in client.get_primaries():
        yield from _of_node(f"node {node.name}: ", client, {"target_nodes": node})


def _lone_node(client: Client) -> Iterator[Problem]:
    if client.info("cluster").get("cluster_enabled"):
        yield error(
            "is a node of a cluster, and the client knows it alone: locks of other nodes fail",
            "Give a function that returns a redis.RedisCluster as OPTIONS['CLIENT_FACTORY'].",
        )


def _of_node(where: str, client: Client, target: dict[str, Any]) -> Iterator[Problem]:
    info = {
        section: client.info(section, **target)
        for section in ("server", "persistence", "memory", "replication")
    }
    server = info["server"]
    name = "Valkey" if "valkey_version" in server else "Redis"
    version = server.get("valkey_version") or server.get("redis_version", "unknown")
    yield ok(f"{where}{name} {version}")
    yield _clock(where, client, target)
    yield from _persistence(where, info["persistence"], _saves(client, target))
    yield from _memory(where, info["memory"])
    yield from _replication(where, info["replication"])


def _clock(where: str, client: Client, target: dict[str, Any]) -> Problem:
    before, began = time.time(), clock()
    seconds, micros = client.time(**target)
    ahead = seconds + micros / 1e6 - before - (clock() - began) / 2
    return clock_problem(ahead, where)


def _saves(client: Client, target: dict[str, Any]) -> bool | None:
    """Whether snapshots are made; None where nobody may ask."""
    with contextlib.suppress(*RedisError):
        return bool(client.config_get("save", **target).get("save"))
    return None


def _persistence(where: str, info: Info, saves: bool | None) -> Iterator[Problem]:
    for key, remedy in (
        ("rdb_last_bgsave_status", "It may refuse every write: look at its log and its disk."),
        ("aof_last_write_status", "It refuses every write: look at its log and its disk."),
    ):
        if info.get(key, "ok") != "ok":
            yield warning(f"{where}{key} is {info[key]}", remedy)
    if info.get("aof_enabled"):
        yield ok(f"{where}keeps an append-only file")
    elif saves is False:
        yield note(
            f"{where}keeps nothing on disk: after a restart locks are free while their holders "
            "still run. Tokens go on rising, and fenced writes are refused as ever.",
            "Set appendonly to yes, if that is too much work done twice.",
        )
    else:
        yield note(
            f"{where}keeps snapshots at most: after a crash locks taken since the last one are "
            "free while their holders still run. Tokens go on rising, and fenced writes are "
            "refused as ever.",
            "Set appendonly to yes, if that is too much work done twice.",
        )


def _memory(where: str, info: Info) -> Iterator[Problem]:
    most, used = info.get("maxmemory", 0), info.get("used_memory", 0)
    policy = info.get("maxmemory_policy", "noeviction")
    if not most:
        yield ok(f"{where}drops no keys: it has no maxmemory")
    elif policy == "noeviction":
        yield ok(f"{where}drops no keys: its policy is noeviction")
        if used > FULL * most:
            yield warning(
                f"{where}uses {used / most:.0%} of its maxmemory, and refuses writes when it is "
                "full",
                "Raise maxmemory, or keep locks on a server of their own.",
            )


def _replication(where: str, info: Info) -> Iterator[Problem]:
    if info.get("role") == "slave":
        yield warning(f"{where}is a replica", "Name the primary, or a Sentinel that knows it.")
    elif info.get("connected_slaves"):
        count = info["connected_slaves"]
        replicas = "a replica, which lags" if count == 1 else f"{count} replicas, which lag"
        yield note(
            f"{where}has {replicas}: after a failover a lock "
            "can be granted again while its holder still runs. Tokens go on rising, and fenced "
            "writes are refused as ever."
        )
