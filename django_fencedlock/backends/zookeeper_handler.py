"""The log and the connections of kazoo's client, as a session of locks needs them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from kazoo.handlers.threading import SequentialThreadingHandler

from ..core import runtime
from ..core.runtime import clock

#: Seconds in which a warning is logged once.
QUIET = 10.0


class KazooLog(logging.LoggerAdapter[logging.Logger]):
    """kazoo's log: only there does it say why it can't connect."""

    last = "the server stays silent"
    #: By message: when it may be logged again.
    _quiet: ClassVar[dict[str, float]] = {}

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        text, now = str(msg) % args, clock()
        # Two warnings follow the reason, and tell nothing.
        if level >= logging.WARNING and not text.startswith(("Transition", "Failed")):
            self.last = repr(sys.exception()) if kwargs.get("exc_info") else text
        # Without a server, kazoo logs each of its tries: ten lines per second.
        if level >= logging.WARNING:
            if now < self._quiet.get(text, 0.0):
                return
            later = {each: until for each, until in self._quiet.items() if now < until}
            type(self)._quiet = {**later, text: now + QUIET}
        # At DEBUG, kazoo logs the password.
        if level > logging.DEBUG:
            super().log(level, msg, *args, **kwargs)


class _Socket:
    """A connection that notes the session's timeout: the server cuts it, and kazoo hides that."""

    def __init__(self, sock: Any, note: Callable[[int], object]) -> None:
        self._sock, self._note, self._answer = sock, note, b""

    @property
    def is_new(self) -> bool:
        # The first answer: its length, the version of the protocol, the timeout.
        return len(self._answer) < 12

    def recv(self, count: int) -> bytes:
        data: bytes = self._sock.recv(count)
        if self.is_new:
            self._answer += data
            if not self.is_new:
                self._note(int.from_bytes(self._answer[8:12]))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class KazooHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """Makes kazoo's connections: each is bounded in time, and tells the session's timeout."""

    #: Seconds for a host's first answer. One that starts or hangs accepts connections as well, and
    #: kazoo would wait for it until the session is over.
    limit = 1.0
    #: Milliseconds after which the server ends the session; 0 if it has ended.
    timeout = 0

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["timeout"] = min(kwargs["timeout"], self.limit)
        note = partial(setattr, self, "timeout")
        return _Socket(super().create_connection(*args, **kwargs), note)

    def select(self, readers: Any, writers: Any, others: Any, timeout: float) -> Any:
        if any(isinstance(each, _Socket) and each.is_new for each in readers):
            timeout = min(timeout, self.limit)
        return super().select(readers, writers, others, timeout)

    def create_socket_pair(self) -> Any:
        # Any thread wakes kazoo by it. A socket of gevent would belong to one.
        real, pair = runtime.original("socket", "socket"), super().create_socket_pair()
        return [real(fileno=each.detach()) for each in pair]
