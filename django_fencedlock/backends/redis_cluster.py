"""Batches of commands for the nodes of a Redis Cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)

Command = tuple[object, ...]

#: Answers of a node that hasn't, or hasn't yet, what it was asked for.
_ASTRAY = (AskError, ClusterDownError, TryAgainError)


def ask_nodes(cluster: Any, commands: Sequence[Command]) -> list[Any]:
    """
    Execute commands in one batch for each node; an answer may be an exception.

    The driver's own pipelines fail as a whole with one node, and ask the default node about each
    script, which keys it has: were that one dead, nothing at all could be renewed.
    """
    batches: dict[str, tuple[Any, list[int]]] = {}
    for place, command in enumerate(commands):
        node = _node(cluster, command)
        # Nodes themselves are no keys with every driver.
        batches.setdefault(node.name if node else "", (node, []))[1].append(place)
    answers: list[Any] = [None] * len(commands)
    for node, those in batches.values():
        found = _ask_node(cluster, node, [commands[place] for place in those])
        for place, answer in zip(those, found, strict=True):
            answers[place] = answer
    return answers


def _node(cluster: Any, command: Command) -> Any:
    """The node of a command's first key; None if the client knows of none."""
    key = command[3] if command[0] in ("EVAL", "EVALSHA") else command[1]
    try:
        return cluster.get_node_from_key(key)
    except RedisClusterException:
        return None


def _ask_node(cluster: Any, node: Any, commands: Sequence[Command]) -> list[Any]:
    if node is None:
        return _one_by_one(cluster, commands)
    try:
        with cluster.get_redis_connection(node).pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
    except RedisError:
        return _one_by_one(cluster, commands)
    astray = [place for place, answer in enumerate(answers) if isinstance(answer, _ASTRAY)]
    again = _one_by_one(cluster, [commands[place] for place in astray])
    for place, answer in zip(astray, again, strict=True):
        answers[place] = answer
    return answers


def _one_by_one(cluster: Any, commands: Sequence[Command]) -> list[Any]:
    """As the client does it, which looks where the slots are by now; up to one that fails."""
    answers: list[Any] = []
    for place, command in enumerate(commands):
        try:
            answers.append(cluster.execute_command(*command))
        except (RedisError, RedisClusterException) as exc:
            if isinstance(exc, ResponseError) and not isinstance(exc, _ASTRAY):
                answers.append(exc)
                continue
            # Each further one might take as long.
            return answers + [exc] * (len(commands) - place)
    return answers
