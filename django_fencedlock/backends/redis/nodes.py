"""Requests to several Redis servers at once, in one round trip, of which a majority decides."""

from __future__ import annotations

import contextlib
import math
import queue
import select
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.exceptions import AuthenticationError, ResponseError

from ...core.runtime import clock
from .client import Client, RedisError, pool_of_url
from .connections import MAX_IDLE

#: Seconds that the other nodes have at least, once a majority has answered.
GRACE = 0.02
#: Seconds without an answer after which a node isn't asked, and for how long: a write to a disk
#: takes 20 ms now and then.
SILENCE, MUTE = 0.1, 1.0
#: Late answers for which a connection is kept.
MAX_LATE = 100


class NoMajority(Exception):
    """Too few nodes answered, or their answers decide nothing."""


class Line:
    """
    A connection to a node, which may still have to send late answers.

    It is used all the same: a node carries out the requests of one connection in their order. On
    another connection, a release could overtake the acquire that it undoes.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        #: Requests without an answer.
        self.open = 0

    @property
    def number(self) -> int:
        """The number of its file, for `poll()`."""
        # redis-py 5.2 to 8 has no other way to wait for several connections.
        return int(self.connection._sock.fileno())

    def send(self, packed: Any) -> None:
        self.open += 1
        self.connection.send_packed_command(packed, check_health=False)

    def read(self) -> Any:
        self.open -= 1
        return self.connection.read_response(disable_decoding=True)

    def is_answered(self) -> bool:
        """Return whether the answer to the last request has come. Something has."""
        if self.open > 1:
            self._skip(1)
            return self.open == 1 and bool(self.connection.can_read(0))
        return True

    def is_usable(self) -> bool:
        """Return whether the server hasn't closed it: one that closed one has often closed all."""
        poll = select.poll()
        poll.register(self.number, select.POLLIN)
        # Fast, but what TLS sends besides answers looks like one.
        if not poll.poll(0):
            return True
        try:
            self._skip(0)
            return self.open > 0 or not self.connection.can_read(0)
        except RedisError:
            return False

    def _skip(self, kept: int) -> None:
        while self.open > kept and self.connection.can_read(0):
            with contextlib.suppress(ResponseError):
                self.read()

    def close(self) -> None:
        self.connection.disconnect()


class Node:
    """One server, with idle connections to it."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        #: Its address, without user and password.
        self.label = parts.netloc.rpartition("@")[2] or parts.path
        self.pool = pool_of_url(url, timeout)
        self.idle: deque[Line] = deque()
        self.hear()

    def connect(self, done: queue.SimpleQueue[Node]) -> None:
        """
        Add an idle connection, in another thread.

        The driver blocks: in the name's look-up, TCP, TLS and the login. The connection may come
        too late for the request that needs it, or another request may get it.
        """
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._connect, args=[done], daemon=True).start()
            return
        # Too many threads, or the interpreter exits.
        self._connect(done)

    def _connect(self, done: queue.SimpleQueue[Node]) -> None:
        try:
            connection = self.pool.make_connection()
            connection.connect()
            self.put(Line(connection))
            self.fault = ""
        except Exception as exc:
            self.mute(exc)
        finally:
            done.put(self)

    def client(self) -> Client:
        """Return a client for commands to this node alone."""
        return redis.Redis.from_pool(self.pool)

    def put(self, line: Line) -> None:
        if len(self.idle) < MAX_IDLE and line.open <= MAX_LATE:
            self.idle.append(line)
        else:
            line.close()

    def get(self) -> Line | None:
        """Return an idle connection that can be used, if there is one."""
        with contextlib.suppress(IndexError):
            while True:
                line = self.idle.pop()
                if line.is_usable():
                    return line
                line.close()
        return None

    def close(self) -> None:
        while (line := self.get()) is not None:
            line.close()

    def hear(self) -> None:
        """Note that it answered."""
        self.silent_since, self.is_mute_until, self.fault = math.inf, 0.0, ""

    def miss(self, what: str, since: float) -> None:
        """Note that it didn't answer a request in time."""
        self.silent_since = min(since, self.silent_since)
        if clock() >= self.silent_since + SILENCE:
            self.mute(f"no {what} in time")
        else:
            self.is_mute_until, self.fault = 0.0, f"no {what} in time"

    def mute(self, why: Exception | str) -> None:
        """Don't ask this node for a while."""
        self.is_mute_until = clock() + MUTE
        # The driver repeats the address.
        cause = why.__context__ if isinstance(why, Exception) else None
        self.fault = getattr(cause, "strerror", None) or str(why).rstrip(".")
        if isinstance(why, AuthenticationError):
            # Redis answers with a manual of 180 characters, for each node.
            self.fault = "the password in its URL is wrong or missing"


class Nodes:
    """All nodes. Each request goes to all at once, and takes one round trip."""

    def __init__(self, urls: Sequence[str], timeout: float) -> None:
        self.all = [Node(url, timeout) for url in urls]
        self.majority = len(urls) // 2 + 1
        self._timeout = timeout

    def ask(
        self, *command: str, needed: int | None = None, undoes: bool = False
    ) -> dict[Node, Any]:
        """
        Send a command to all nodes, and return the answers that came in time.

        Once a majority has answered, the others have twice as long as it took. A node that stays
        silent isn't asked for a second, unless without it no majority answered last time.

        Args:
            needed: How many answers to wait for; by default a majority.
            undoes: Also send it to silent nodes, which may carry out an earlier request yet.
        """
        began = clock()
        needed = self.majority if needed is None else needed
        asked = self._choose(needed, began)
        # The rest is for the answers of those that can be reached.
        lines = self._connect(asked, needed, began, began + self._timeout / 2)
        silent = {node for node in self.all if undoes and node not in lines}
        lines |= {node: line for node in silent if (line := node.get()) is not None}
        end = began + self._timeout
        answers: dict[Node, Any] = {}
        poll = select.poll()
        pending: dict[int, Node] = {}
        try:
            for node in _send(command, lines).difference(silent):
                poll.register(lines[node].number, select.POLLIN)
                pending[lines[node].number] = node
            sent = clock()
            while pending:
                left = end - clock()
                for number, _ in poll.poll(max(0, math.ceil(left * 1000))):
                    node = pending[number]
                    try:
                        if not lines[node].is_answered():
                            continue
                        answers[node] = lines[node].read()
                        node.hear()
                    except ResponseError as exc:
                        # The rest is the line of a script.
                        node.fault = str(exc).partition(" script: ")[0]
                    except RedisError as exc:
                        node.mute(exc)
                        lines.pop(node).close()
                    del pending[number]
                    poll.unregister(number)
                # Only now: this process may have been paused, and the answers be there.
                if left <= 0:
                    break
                end = _cut(end, sent, len(answers), len(pending), needed)
        except BaseException:
            # Interrupted: it isn't known what was read.
            for line in lines.values():
                line.close()
            raise
        for node in pending.values():
            node.miss("answer", sent)
        for node, line in lines.items():
            node.put(line)
        return answers

    def _choose(self, needed: int, began: float) -> Collection[Node]:
        """Return the nodes to ask: without those that stay silent, if enough others are left."""
        asked = [node for node in self.all if node.is_mute_until <= began]
        if sum(not node.is_mute_until for node in asked) < needed:
            asked = list(self.all)
        for node in asked:
            if node.is_mute_until:
                # One request at a time finds out whether it is back, on a new connection.
                node.is_mute_until = began + MUTE
                node.close()
        return asked

    def _connect(
        self, asked: Collection[Node], needed: int, began: float, end: float
    ) -> dict[Node, Line]:
        """Return a connection to each node that can be reached in time."""
        lines = {node: line for node in asked if (line := node.get()) is not None}
        missing = {node for node in asked if node not in lines}
        done: queue.SimpleQueue[Node] = queue.SimpleQueue()
        for node in missing:
            node.connect(done)
        repeats = 2 * len(missing)
        while missing:
            end = _cut(end, began, len(lines), len(missing), needed)
            try:
                node = done.get(timeout=max(0.0, end - clock()))
            except queue.Empty:
                break
            if (line := node.get()) is not None:
                lines[node] = line
            elif not node.fault and repeats:
                repeats -= 1
                node.connect(done)
                continue
            elif not node.fault:
                node.mute("it closes each connection")
            missing.discard(node)
        for node in missing:
            node.miss("connection", began)
        return lines

    def failure(self, answers: Mapping[Node, Any]) -> NoMajority | None:
        return self.undecided(answers) if len(answers) < self.majority else None

    def undecided(self, answers: Mapping[Node, Any]) -> NoMajority:
        """Return the error for a request that too few nodes answered alike."""
        faults = defaultdict(list)
        for node in self.all:
            if node not in answers:
                faults[node.fault or "not asked"].append(node.label)
        why = "; ".join(f"{fault}: {', '.join(labels)}" for fault, labels in faults.items())
        of = f"{len(answers)} of {len(self.all)} nodes answered"
        return NoMajority(f"{of}, {self.majority} must agree. {why}")


def _send(command: Collection[str], lines: dict[Node, Line]) -> set[Node]:
    """Send a command on each line; remove those that fail, and return the nodes of the others."""
    packed = None
    for node, line in list(lines.items()):
        packed = packed or line.connection.pack_command(*command)
        try:
            line.send(packed)
        except RedisError as exc:
            node.mute(exc)
            lines.pop(node).close()
    return set(lines)


def _cut(end: float, began: float, come: int, missing: int, needed: int) -> float:
    """Return until when to wait for the missing: not long if they can't change the outcome."""
    if needed - missing <= come < needed:
        return end
    now = clock()
    return min(end, now + max(GRACE, 2 * (now - began)))
