"""Requests to Redis: scripts, many calls of a script, and the blocking pops of waiters."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError
from redis.retry import Retry

from .client import Client, RedisError, copy_pool, is_cluster
from .scripts import BEAT, Script

#: The keys and arguments of a script.
Call = tuple[Sequence[str], Sequence[str]]

#: Calls that one script serves, while no other client is served.
AT_ONCE = 250
#: Seconds between a failed blocking pop and the next try.
PAUSE = 0.1
#: Idle connections that are kept, of those for requests and of those for waiters.
MAX_IDLE = 10


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

        try:
            return connection.retry.call_with_retry(ask, lambda error: connection.disconnect())
        except BaseException as exc:
            if not isinstance(exc, ResponseError):
                # The next request would read this answer.
                connection.disconnect()
            raise
        finally:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.disconnect()

    def close(self) -> None:
        """Close all idle connections."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().disconnect()


class Connections:
    """The connections of one client, which nothing else uses unless it is a Cluster's."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._pool = getattr(client, "connection_pool", None)
        # A Sentinel's pool drops the connections to a former primary, so it must know them all.
        self._spare = Spare(self._pool) if type(self._pool) is redis.ConnectionPool else None
        #: Those of waiters, by the server's pool. None of them serves requests.
        self._waiting: dict[Any, Spare] = {}

    def execute(self, *command: object) -> Any:
        """Execute one command. Raise `RedisError`."""
        try:
            if self._spare is None:
                return self.client.execute_command(*command)
            return self._spare.execute(*command)
        except ResponseError as exc:
            # Of Redis before 7, the driver doesn't know READONLY in the error of a script.
            if not isinstance(exc, ReadOnlyError) and "-READONLY " not in str(exc):
                raise
            # After a failover the server's name or address may lead to another server.
            self.close()
            raise ReadOnlyError(str(exc)) from exc

    def run(self, script: Script, keys: Sequence[str], *args: str) -> Any:
        """Run a script. Raise `RedisError`."""
        # The driver packs text much faster than numbers.
        number = str(len(keys))
        try:
            return self.execute("EVALSHA", script.sha, number, *keys, *args)
        except NoScriptError:
            return self.execute("EVAL", script.text, number, *keys, *args)

    def run_batch(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Run a script that takes many calls at once; an answer may be an exception."""
        answers: list[Any] = []
        # By node: each further request to one that failed might take as long.
        failures: dict[object, BaseException] = {}
        size = 1 if is_cluster(self.client) else AT_ONCE
        for start in range(0, len(calls), size):
            part = calls[start : start + size]
            keys = [key for keys, _ in part for key in keys]
            node = self._node_of(keys[0])
            if node not in failures:
                try:
                    answers += self.run(script, keys, *(arg for _, args in part for arg in args))
                    continue
                except RedisError as exc:
                    failures[node] = exc
            answers += [failures[node]] * len(part)
        return answers

    def _node_of(self, key: str) -> object:
        """Return a key's node in a Cluster; None if the client knows none."""
        if is_cluster(self.client):
            with contextlib.suppress(*RedisError):
                return self.client.get_node_from_key(key)
        return None

    def pop(self, key: str, seconds: float) -> None:
        """Wait for a message in a mailbox. An error ends the wait as a message does."""
        client = self.client
        # Zero, and what the server rounds to zero, blocks without a limit.
        limit = max(0.001, round(seconds, 3))
        try:
            if is_cluster(client):
                client = client.get_redis_connection(client.get_node_from_key(key))
            pool = client.connection_pool
            if pool not in self._waiting:
                never = Retry(NoBackoff(), 0)
                made = Spare(copy_pool(client, socket_timeout=BEAT + 1, retry=never))
                self._waiting.setdefault(pool, made)
            self._waiting[pool].execute("BLPOP", key, limit)
        except RedisError:
            time.sleep(min(PAUSE, limit))

    def close(self) -> None:
        """Close idle connections."""
        for spare in [self._spare, *self._waiting.values()]:
            if spare is not None:
                spare.close()
        if self._pool is not None:
            self._pool.disconnect(inuse_connections=False)
