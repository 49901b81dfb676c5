"""Requests to Redis: scripts, many calls of a script, and the blocking pops of waiters."""

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

#: The keys and arguments of a script.
Call = tuple[Sequence[str], Sequence[str]]

#: Calls that one script serves, while no other client is served.
AT_ONCE = 250
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
            # Of Redis before 7, the driver doesn't know READONLY in the error of a script.
            if not isinstance(exc, ReadOnlyError) and "-READONLY " not in str(exc):
                raise
            # After a failover the server's name or address may lead to another server.
            self.close()
            raise ReadOnlyError(str(exc)) from exc

    def run(self, script: Script, keys: Sequence[str], *args: str) -> Any:
        """Run a script. Raise `RedisError`."""
        # The driver packs text much faster than numbers.
        given = (str(len(keys)), *keys, *args)
        try:
            return self.execute("EVALSHA", script.sha, *given)
        except NoScriptError:
            return self.execute("EVAL", script.text, *given)

    def run_batch(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Run a script that takes many calls at once; an answer may be an exception."""
        # The nodes of a Cluster that failed: each further request to one might take as long.
        failures: dict[object, BaseException] = {}
        size = 1 if is_cluster(self.client) else AT_ONCE
        parts = [calls[start : start + size] for start in range(0, len(calls), size)]
        return [answer for part in parts for answer in self._run_part(script, part, failures)]

    def _run_part(
        self, script: Script, part: Sequence[Call], failures: dict[object, BaseException]
    ) -> list[Any]:
        keys = [key for keys, _ in part for key in keys]
        node = self._node_of(keys[0])
        if node not in failures:
            try:
                return list(self.run(script, keys, *(arg for _, args in part for arg in args)))
            except RedisError as exc:
                if len(part) > 1 and isinstance(exc, ResponseError):
                    # It may be about one of the calls.
                    return [self._run_part(script, [call], failures)[0] for call in part]
                if isinstance(exc, ClusterError) or not isinstance(exc, ResponseError):
                    failures[node] = exc
                return [exc] * len(part)
        return [failures[node]] * len(part)

    def _node_of(self, key: str) -> object:
        """Return a key's node in a Cluster; None if the client knows none."""
        if is_cluster(self.client):
            with contextlib.suppress(*RedisError):
                return self.client.get_node_from_key(key)
        return None

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


class Mailbox:
    """The list whose messages wake one waiter. Cancelling the wait sends a message too."""

    def __init__(self, connections: Connections, key: str, wait: Wait) -> None:
        self._connections, self._key, self._wait = connections, key, wait
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
