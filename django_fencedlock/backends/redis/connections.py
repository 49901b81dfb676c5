"""Requests to Redis: single ones, batches, and the blocking pops of waiters."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis
from redis.exceptions import ClusterError, NoScriptError, ReadOnlyError, ResponseError

from ..interface import Wait
from .client import Client, RedisError, copy_pool, is_cluster, never_retry
from .scripts import BEAT, WAKE, Script

Command = Sequence[object]

#: Calls that one script serves, while no other client is served.
AT_ONCE = 100
#: Seconds between a failed blocking pop and the next try.
PAUSE = 0.1


class Spare:
    """
    Connections that callers use in turn.

    The driver's pool checks a connection each time before it hands it out, and its clients measure
    each request, which takes about as long as the request itself.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._idle: deque[Any] = deque()

    def execute(self, *command: object) -> Any:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._pool.make_connection()

        def ask() -> Any:
            connection.send_command(*command)
            return connection.read_response()

        done = False
        try:
            answer = connection.retry.call_with_retry(ask, lambda error: connection.disconnect())
            done = True
            return answer
        except ResponseError:
            done = True
            raise
        finally:
            if not done:
                # The next request would read this answer.
                connection.disconnect()
            self._idle.append(connection)

    def close(self, keep: int = 0) -> None:
        """Close all idle connections but `keep`."""
        with contextlib.suppress(IndexError):
            while len(self._idle) > keep:
                self._idle.pop().disconnect()


class Connections:
    """The connections of one client, which nothing else uses unless it is a Cluster's."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._pool = getattr(client, "connection_pool", None)
        # A Sentinel's pool drops the connections to a former primary, so it must know them all.
        self._spare = Spare(self._pool) if type(self._pool) is redis.ConnectionPool else None
        self._spare_to_wait: dict[Any, Spare] = {}
        self.waiters: set[Mailbox] = set()

    def execute(self, *command: object) -> Any:
        """Execute one command. Raise `RedisError`."""
        try:
            if self._spare is None:
                return self.client.execute_command(*command)
            return self._spare.execute(*command)
        except ResponseError as exc:
            found = self._checked(exc)
            if found is exc:
                raise
            raise found from exc

    def run(self, script: Script, keys: Sequence[str], *args: str) -> Any:
        """Run a script. Raise `RedisError`."""
        # The driver packs text much faster than numbers.
        given = (str(len(keys)), *keys, *args)
        try:
            return self.execute("EVALSHA", script.sha, *given)
        except NoScriptError:
            return self.execute("EVAL", script.text, *given)

    def batch(self, commands: Sequence[Command]) -> list[Any]:
        """Execute commands in one batch; an answer may be an exception."""
        if is_cluster(self.client):
            return _one_by_one(self.client, commands)
        return [self._checked(each) for each in _pipeline(self.client, commands)]

    def run_batch(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str]]]
    ) -> list[Any]:
        """
        Run a script that takes many calls at once, and returns a list of their answers.

        An answer may be an exception.
        """
        size = 1 if is_cluster(self.client) else AT_ONCE
        parts = [calls[start : start + size] for start in range(0, len(calls), size)]
        answers = self.batch([("EVALSHA", script.sha, *_join(part)) for part in parts])
        found: list[Any] = []
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, ResponseError) and not isinstance(answer, ReadOnlyError):
                # It may be about one of the calls, or the server doesn't have the script.
                each = self.batch([("EVAL", script.text, *_join([call])) for call in part])
                found += [one if isinstance(one, Exception) else one[0] for one in each]
            else:
                found += [answer] * len(part) if isinstance(answer, Exception) else answer
        return found

    def spare_to_wait(self, key: str) -> Spare:
        """Return connections for blocking pops of a key. None of them serves requests."""
        client = self.client
        if is_cluster(client):
            client = client.get_redis_connection(client.get_node_from_key(key))
        pool = client.connection_pool
        if pool not in self._spare_to_wait:
            made = Spare(copy_pool(client, socket_timeout=BEAT + 1, **never_retry()))
            self._spare_to_wait.setdefault(pool, made)
        return self._spare_to_wait[pool]

    def close_spare_to_wait(self, keep: int = 0) -> None:
        for spare in list(self._spare_to_wait.values()):
            spare.close(keep)

    def close(self) -> None:
        """Close idle connections."""
        self.close_spare_to_wait()
        if self._spare is not None:
            self._spare.close()
        if self._pool is not None:
            self._pool.disconnect(inuse_connections=False)

    def _checked(self, answer: Any) -> Any:
        """
        Return an answer. If the server has become a replica, close what leads to it.

        After a failover its name or address may lead to another server. Redis before 7 reports
        READONLY from a script as an error that the driver doesn't know.
        """
        if isinstance(answer, ResponseError) and "-READONLY " in str(answer):
            answer = ReadOnlyError(str(answer).partition("-READONLY ")[2])
        if isinstance(answer, ReadOnlyError):
            self.close()
        return answer


class Mailbox:
    """The list whose messages wake one waiter. Cancelling the wait sends a message too."""

    def __init__(self, connections: Connections, key: str, wait: Wait) -> None:
        self._connections = connections
        self._key = key
        self._wait = wait
        connections.waiters.add(self)
        wait.on_cancel(self._wake)

    def sleep(self, seconds: float) -> None:
        """
        Wait for a message, at most `seconds`.

        An error ends it as a message does: after both, the waiter asks for the lock again.
        """
        # Zero, and what the server rounds to zero, blocks without a limit.
        limit = max(0.001, round(min(seconds, self._wait.left), 3))
        try:
            if not self._wait.cancelled:
                self._connections.spare_to_wait(self._key).execute("BLPOP", self._key, limit)
        except RedisError:
            time.sleep(min(PAUSE, limit))

    def close(self) -> None:
        waiters = self._connections.waiters
        waiters.discard(self)
        self._connections.close_spare_to_wait(keep=max(1, len(waiters)))

    def _wake(self) -> None:
        # The thread that cancels may run an event loop, which a request would block.
        if self in self._connections.waiters:
            # RuntimeError: the interpreter exits. The waiter notices after a beat.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._push, daemon=True).start()

    def _push(self) -> None:
        with contextlib.suppress(*RedisError):
            self._connections.run(WAKE, [self._key])


def _join(calls: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    keys = [key for keys, _ in calls for key in keys]
    return [str(len(keys)), *keys, *(arg for _, args in calls for arg in args)]


def _pipeline(client: Client, commands: Sequence[Command]) -> list[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers


def _one_by_one(cluster: Client, commands: Sequence[Command]) -> list[Any]:
    """
    Execute commands on the nodes of a Cluster; an answer may be an exception.

    The driver's pipeline would fail as a whole if one node fails.
    """
    answers: list[Any] = []
    failures: dict[object, BaseException] = {}
    for command in commands:
        node = _node_name(cluster, command)
        try:
            # Each further command to such a node might take as long.
            answers.append(failures.get(node) or cluster.execute_command(*command))
        except RedisError as exc:
            answers.append(exc)
            if isinstance(exc, ClusterError) or not isinstance(exc, ResponseError):
                failures[node] = exc
    return answers


def _node_name(cluster: Client, command: Command) -> object:
    """Return the node of a command's first key; None if the client doesn't know one."""
    key = command[3] if command[0] in ("EVAL", "EVALSHA") else command[1]
    with contextlib.suppress(*RedisError):
        return cluster.get_node_from_key(key).name
    return None
