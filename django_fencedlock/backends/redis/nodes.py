"""Requests to several Redis servers at once, in one round trip, of which a majority decides."""

from __future__ import annotations

import math
import queue
import select
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import ResponseError

from ...core.runtime import clock
from .client import RedisError, pool_of_url
from .connections import MAX_IDLE

#: Seconds that the other nodes have at least, once a majority has answered.
GRACE = 0.02
#: Seconds for which a node that failed isn't asked.
MUTE = 1.0


class NoMajority(Exception):
    """Too few nodes answered, or their answers decide nothing."""


class Node:
    """One server, with idle connections to it."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        #: Its address, without user and password.
        self.label = parts.netloc.rpartition("@")[2] or parts.path
        self.pool = pool_of_url(url, timeout)
        self.idle: deque[Any] = deque()
        self.is_mute_until, self.fault = 0.0, ""

    def connect(self, done: queue.SimpleQueue[Node]) -> None:
        """Add an idle connection. It may come too late for the request that needs it."""
        try:
            connection = self.pool.make_connection()
            connection.connect()
            self.put(connection)
        except Exception as exc:
            self.mute(exc)
        finally:
            done.put(self)

    def put(self, connection: Any) -> None:
        if len(self.idle) < MAX_IDLE:
            self.idle.append(connection)
        else:
            connection.disconnect()

    def get(self) -> Any:
        """Return an idle connection that the server hasn't closed; None if there is none."""
        while self.idle:
            try:
                connection = self.idle.pop()
                # A server that closed one has often closed all. An answer would be another's.
                if not _is_readable(connection):
                    return connection
            except IndexError:
                break
            except RedisError:
                pass
            connection.disconnect()
        return None

    def hear(self) -> None:
        """Note that it answered."""
        self.is_mute_until, self.fault = 0.0, ""

    def mute(self, why: Exception | str) -> None:
        """Don't ask this node for a while."""
        self.is_mute_until = clock() + MUTE
        # The driver repeats the address.
        cause = why.__context__ if isinstance(why, Exception) else None
        self.fault = getattr(cause, "strerror", None) or str(why)


class Nodes:
    """All nodes. Each request goes to all at once, and takes one round trip."""

    def __init__(self, urls: Sequence[str], timeout: float) -> None:
        self.all = [Node(url, timeout) for url in urls]
        self.majority = len(urls) // 2 + 1
        self._timeout = timeout

    def ask(self, *command: str, among: Collection[Node] | None = None) -> dict[Node, Any]:
        """
        Send a command to all nodes, and return the answers that came in time.

        Once a majority has answered, the others have twice as long as it took. A node without an
        answer isn't asked for a second, unless that leaves no majority.
        """
        began = clock()
        asked = among or [node for node in self.all if node.is_mute_until <= began]
        if not among and len(asked) < self.majority:
            asked = self.all
        for node in asked:
            if node.fault:
                # One request at a time finds out whether it is back, and may wait for it.
                node.is_mute_until = began + MUTE
        needed = min(self.majority, len(asked))
        end = began + self._timeout
        lines = self._connect(asked, needed, began, end)
        answers: dict[Node, Any] = {}
        poll = select.poll()
        pending: dict[int, Node] = {}
        try:
            packed = None
            for node, connection in list(lines.items()):
                packed = packed or connection.pack_command(*command)
                try:
                    connection.send_packed_command(packed, check_health=False)
                except RedisError as exc:
                    node.mute(exc)
                    lines.pop(node).disconnect()
                else:
                    number = _file_number(connection)
                    pending[number] = node
                    poll.register(number, select.POLLIN)
            while pending:
                left = end - clock()
                for number, _ in poll.poll(max(0, math.ceil(left * 1000))):
                    poll.unregister(number)
                    node = pending.pop(number)
                    try:
                        answers[node] = lines[node].read_response(disable_decoding=True)
                        node.hear()
                    except ResponseError as exc:
                        node.fault = str(exc)
                    except RedisError as exc:
                        node.mute(exc)
                        lines.pop(node).disconnect()
                        continue
                    node.put(lines.pop(node))
                # Only now: this process may have been paused, and the answers be there.
                if left <= 0:
                    break
                end = _cut(end, began, len(answers), len(pending), needed)
        finally:
            # The next request would read this answer.
            for connection in lines.values():
                connection.disconnect()
        for node in pending.values():
            node.mute("no answer in time")
        return answers

    def _connect(
        self, asked: Collection[Node], needed: int, began: float, end: float
    ) -> dict[Node, Any]:
        """Return a connection to each node that can be reached in time."""
        lines = {node: line for node in asked if (line := node.get()) is not None}
        missing = {node for node in asked if node not in lines}
        done: queue.SimpleQueue[Node] = queue.SimpleQueue()
        # Threads, since the driver blocks: in the name's look-up, TCP, TLS and the login.
        for node in missing:
            try:
                threading.Thread(target=node.connect, args=[done], daemon=True).start()
            except RuntimeError:
                # Too many threads, or the interpreter exits.
                node.connect(done)
        while missing:
            end = _cut(end, began, len(lines), len(missing), needed)
            try:
                node = done.get(timeout=max(0.0, end - clock()))
            except queue.Empty:
                break
            missing.discard(node)
            if (line := node.get()) is not None:
                lines[node] = line
        for node in missing:
            node.mute("no connection in time")
        return lines

    def require_majority(self, answers: Mapping[Node, Any]) -> None:
        if len(answers) < self.majority:
            raise self.undecided(answers)

    def undecided(self, answers: Mapping[Node, Any]) -> NoMajority:
        """Return the error for a request that too few nodes answered alike."""
        faults = defaultdict(list)
        for node in self.all:
            if node not in answers:
                faults[node.fault or "not asked"].append(node.label)
        why = "; ".join(f"{fault}: {', '.join(labels)}" for fault, labels in faults.items())
        of = f"{len(answers)} of {len(self.all)} nodes answered"
        return NoMajority(f"{of}, {self.majority} must agree. {why}")


def _cut(end: float, began: float, come: int, missing: int, needed: int) -> float:
    """Return until when to wait for the missing: not long if they can't change the outcome."""
    if needed - missing <= come < needed:
        return end
    now = clock()
    return min(end, now + max(GRACE, 2 * (now - began)))


def _is_readable(connection: Any) -> bool:
    poll = select.poll()
    poll.register(_file_number(connection), select.POLLIN)
    # The driver's own look is slow, but knows what TLS sends besides answers.
    return bool(poll.poll(0)) and connection.can_read(0)


def _file_number(connection: Any) -> int:
    # redis-py 5.2 to 8 has no other way to wait for several connections.
    return int(connection._sock.fileno())
