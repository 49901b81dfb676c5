"""Connections that the Redis backend keeps to itself, for the few requests of every lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from redis import ConnectionPool, RedisCluster
from redis.exceptions import ReadOnlyError, ResponseError
from redis.sentinel import SentinelConnectionPool

from .redis_cluster import Command, ask_nodes

T = TypeVar("T")


class Lines:
    """
    Asks a server on connections that are nobody else's.

    The driver's pool examines a connection each time before it lends it, and counts it for its
    metrics; its packer looks at each argument four times. That takes longer than the request.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._idle: deque[Any] = deque()

    def execute_command(self, *command: object) -> Any:
        """Execute one command, as a client's method of this name does."""
        return self._talk(_packed(command), _answer)

    def ask_many(self, commands: Sequence[Command]) -> list[Any]:
        """Execute commands that are sent at once; an answer may be an exception."""
        read = partial(_answers, count=len(commands))
        answers = self._talk(b"".join(map(_packed, commands)), read)
        for answer in answers:
            if isinstance(answer, ResponseError) and self._leads_astray(answer):
                break
        return answers

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().disconnect()

    def _talk(self, packed: bytes, read: Callable[[Any], T]) -> T:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._pool.make_connection()

        def once() -> T:
            connection.send_packed_command([packed])
            return read(connection)

        done = False
        try:
            answer: T = connection.retry.call_with_retry(once, lambda _: connection.disconnect())
            done = True
        except ResponseError as exc:
            done = not self._leads_astray(exc)
            raise
        finally:
            # Whatever strikes before the answer is read would leave it to the next who asks.
            if not done:
                connection.disconnect()
            self._idle.append(connection)
        return answer

    def _leads_astray(self, error: object) -> bool:
        """
        Whether the server has become a replica; what leads there is closed.

        After a failover its name, or its address, may lead to another one.
        """
        if not isinstance(unwrapped(error), ReadOnlyError):
            return False
        self.close()
        self._pool.disconnect(inuse_connections=False)
        return True


def lines(client: Any) -> Lines | None:
    """Lines to the server of a client; None if they can't do all that its own pool does."""
    pool = client.connection_pool
    # Sentinels' pool drops what led to a former primary.
    plain = type(pool) is ConnectionPool
    utf8 = pool.connection_kwargs.get("encoding", "utf-8") == "utf-8"
    return Lines(pool) if plain and utf8 else None


def ask_many(asked: Any, commands: Sequence[Command]) -> list[Any]:
    """Have a client, or lines, execute commands that are sent at once; see Lines.ask_many()."""
    if not commands:
        return []
    if isinstance(asked, Lines):
        return asked.ask_many(commands)
    if isinstance(asked, RedisCluster):
        return ask_nodes(asked, commands)
    with asked.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers


def unwrapped(error: object) -> object:
    """
    Return the ReadOnlyError that Redis before 7 wraps in the error of a script.

    Any other answer is returned as it is.
    """
    if isinstance(error, ResponseError) and "-READONLY " in str(error):
        return ReadOnlyError(str(error).partition("-READONLY ")[2])
    return error


def drop_former_primary(client: Any) -> None:
    """
    Close a client's idle connections if Sentinels choose its server.

    The driver does so by itself, but not for an error that Redis before 7 wrapped.
    """
    pool = getattr(client, "connection_pool", None)
    if isinstance(pool, SentinelConnectionPool):
        pool.disconnect(inuse_connections=False)


def _answer(connection: Any) -> Any:
    return connection.read_response()


def _answers(connection: Any, count: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(count):
        try:
            found.append(connection.read_response())
        except ResponseError as exc:
            found.append(exc)
    return found


def _packed(command: Command) -> bytes:
    """A command as it goes over the wire."""
    texts = [str(argument) for argument in command]
    if not "".join(texts).isascii():
        # With a character for each byte, as lengths are those of bytes.
        texts = [text.encode().decode("latin-1") for text in texts]
    parts = [f"${len(text)}\r\n{text}\r\n" for text in texts]
    return f"*{len(command)}\r\n{''.join(parts)}".encode("latin-1")
