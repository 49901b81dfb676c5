"""A session with ZooKeeper, by the client of kazoo: every request is bounded in time."""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kazoo import exceptions
from kazoo.client import KazooClient
from kazoo.exceptions import AuthFailedError, NoAuthError, SessionClosedRequireSaslError
from kazoo.handlers.threading import KazooTimeoutError

from ..conf import AliasConfig
from ..core import runtime
from ..core.runtime import clock
from .places import SessionGone
from .zookeeper_handler import KazooHandler, KazooLog
from .zookeeper_settings import client_options, read_location

logger = logging.getLogger(__name__)

#: Seconds between two tries of a request whose connection broke.
PAUSE = 0.02
#: Requests that are sent at once. Under gevent, the socket that wakes kazoo doesn't take many more.
BATCH = 100

#: The connection broke: the request may have been carried out.
Broken = exceptions.ConnectionLoss, exceptions.SessionMovedError, exceptions.OperationTimeoutError
_Missing = exceptions.NoNodeError, exceptions.NodeExistsError
_Refused = NoAuthError, AuthFailedError, SessionClosedRequireSaslError
_HINTS = {
    "(?i)auth|sasl": "check USERNAME, PASSWORD and SASL",
    "(?i)broken|reset": "the server has no quorum, or this host maxClientCnxns (60) connections, "
    "or the port needs TLS",
    "VERIFY_FAILED": "check CA",
    "(?i)alert.*certificate": "set CERT and KEY",
    "SSL.*(EOF|VERSION)": "if the port has no TLS, leave out CA, CERT and KEY",
}


class RequestFailed(Exception):
    """No server answered in time, or it refused the request."""


class TimeoutIsShort(RequestFailed):
    """The servers end a session before its ttl is over."""


Errors = (RequestFailed, exceptions.KazooException, SessionGone)


def wait_for(event: Any, seconds: float) -> bool:
    """Wait for an event or an answer of kazoo."""
    is_ready = getattr(event, "ready", None) or event.is_set
    if not runtime.is_patched("threading"):
        return bool(is_ready() or event.wait(seconds))
    # The keeper has a hub of its own, and an event of gevent can be waited for in one hub only.
    end, pause = clock() + seconds, PAUSE / 50
    while not is_ready() and clock() < end:
        time.sleep(pause)
        pause = min(PAUSE, pause * 1.5)
    return bool(is_ready())


class _NodeWatch:
    """A watch on a node that exists, and what it wakes."""

    def __init__(self, on_event: Callable[[_NodeWatch], object]) -> None:
        self._on_event = on_event
        self.woken: set[threading.Event] = set()
        self.answer: Any = None

    def __call__(self, event: object) -> None:
        self._on_event(self)
        for each in [*self.woken]:
            each.set()

    def __bool__(self) -> bool:
        # kazoo asks before it keeps a watch. That of a missing node would stay.
        return not (self.answer and isinstance(self.answer.exception, exceptions.NoNodeError))


class KazooSession:
    """
    A session with ZooKeeper. When it has ended, it stays so: kazoo would silently open another.

    Raises `RequestFailed` or an error of kazoo within the alias's TIMEOUT, or `SessionGone`.
    """

    def __init__(self, config: AliasConfig, ttl: float) -> None:
        self._timeout, self._ttl = config.timeout, ttl
        self.is_gone = self._is_stopping = False
        self._online = threading.Event()
        #: By path: the nodes that exist, as far as the servers told.
        self.watched: dict[str, _NodeWatch] = {}
        self._log = KazooLog(logger, {})
        hosts, _ = read_location(config)
        self._handler = KazooHandler()
        self._handler.limit = max(0.3, config.timeout / len(hosts))
        self.kazoo = KazooClient(
            config.location.partition("/")[0],
            timeout=ttl,
            handler=self._handler,
            logger=self._log,
            # Without a connection for its ttl, the session and its leases have ended.
            connection_retry={"max_tries": -1, "delay": 0.05, "max_delay": 0.5, "deadline": ttl},
            **client_options(config),
        )
        self.kazoo.add_listener(self._note_state)

    def open(self) -> None:
        # Not start(): it would wait for ten seconds more.
        self.kazoo.start_async()
        if not wait_for(self._online, self._timeout) or self.is_gone:
            raise self.no_answer()

    def _note_state(self, state: str) -> None:
        # In the thread of the connection: a request would wait for itself.
        if state == "CONNECTED":
            self._log.last = KazooLog.last
        if state == "LOST":
            self.is_gone = True
            self.stop()
        (self._online.clear if state == "SUSPENDED" else self._online.set)()

    def stop(self) -> Any:
        """End the session, in a thread of its own: a server that is away delays it for long."""
        return self._handler.spawn(self._stop)

    def _stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            with contextlib.suppress(exceptions.WriterNotClosedException):
                self.kazoo.stop()
                self.kazoo.close()

    def forget(self) -> None:
        # At its exit a child would wait for locks that the parent's threads had at the fork.
        atexit.unregister(self._handler.stop)

    def no_answer(self) -> RequestFailed:
        why = re.sub(r"socket connection error: | \(_ssl\.c:\d+\)", "", self._log.last)
        why += "".join(f"; {hint}" for each, hint in _HINTS.items() if re.search(each, why))
        return RequestFailed(f"no answer within {self._timeout:g} s: {why}")

    # Requests

    def send(self, *requests: Callable[[], Any], missing: Any = None) -> list[Any]:
        """Send requests at once; answers in order, `missing` for a node that isn't there."""
        end = clock() + self._timeout
        # kazoo would queue a request now, and send it when nothing waits for it any more.
        if not wait_for(self._online, self._timeout):
            raise self.no_answer()
        if self.is_gone:
            raise SessionGone("the session has ended")
        if 0 < self._handler.timeout < int(self._ttl * 1000):
            raise TimeoutIsShort(
                f"the servers end a session after {self._handler.timeout / 1000:g} s, but the "
                f"ttl is {self._ttl:g} s. Use a shorter ttl, or raise maxSessionTimeout (20 ticks)"
            )
        answers: list[Any] = []
        try:
            for each in [request() for request in requests]:
                try:
                    wait_for(each, end - clock())
                    answers.append(each.get_nowait())
                except _Missing:
                    answers.append(missing)
        except exceptions.SessionExpiredError:
            raise SessionGone("the session has ended") from None
        except KazooTimeoutError:
            raise self.no_answer() from None
        except _Refused as exc:
            why = "USERNAME or PASSWORD is wrong, or another user made the nodes"
            raise RequestFailed(f"the servers refused the user: {why}") from exc
        if self.is_gone:
            # Another session may have answered.
            raise SessionGone("the session has ended")
        return answers

    def ask(self, *requests: Callable[[], Any], missing: Any = None) -> list[Any]:
        """Send requests, and again if the connection breaks; None is for `missing` then."""
        end, answers = clock() + self._timeout, list[Any]()
        while True:
            try:
                while len(answers) < len(requests):
                    some = requests[len(answers) : len(answers) + BATCH]
                    answers += self.send(*some, missing=missing)
                return answers
            except Broken:
                if clock() >= end:
                    raise
                missing = None
                time.sleep(PAUSE)

    def get(self, *paths: str) -> list[Any]:
        """Return text and facts of nodes."""
        return self.ask(*(partial(self.kazoo.get_async, path) for path in paths))

    def children(self, path: str) -> Any:
        return self.kazoo.get_children_async(path)

    def check(self, path: str) -> Any:
        """Ask a quorum whether a node exists; a server answers a read or a sync() alone."""
        transaction = self.kazoo.transaction()
        transaction.check(path, -1)
        return transaction.commit_async()

    def delete(self, path: str) -> bool | None:
        """Delete a node; return False if it was missing, None if it was for a repeated request."""
        was_there: bool | None = self.ask(partial(self.kazoo.delete_async, path), missing=False)[0]
        return was_there

    # Watches

    def watch(self, *paths: str) -> set[str]:
        """Watch nodes, and return which of them exist."""

        def get(path: str) -> Any:
            made[path].answer = self.kazoo.get_async(path, watch=made[path])
            return made[path].answer

        made = {path: _NodeWatch(partial(self._forget_watch, path)) for path in paths}
        self.watched |= made
        found: set[str] = set()
        try:
            answers = self.ask(*(partial(get, path) for path in paths))
            found = {path for path, answer in zip(paths, answers, strict=True) if answer}
            return found
        finally:
            for path in made.keys() - found:
                # Another thread may wait for it.
                made[path](None)

    def is_there(self, path: str) -> bool:
        """Return whether a watch told that a node exists, and not yet that it was deleted."""
        watch = self.watched.get(path)
        # Another thread may be about to watch it.
        return watch is not None and watch.answer is not None and watch.answer.successful()

    def _forget_watch(self, path: str, watch: _NodeWatch) -> None:
        if self.watched.get(path) is watch:
            self.watched.pop(path, None)

    def wait(self, path: str, woken: threading.Event, seconds: float) -> None:
        """Wait until a node may be gone, or `woken` is set."""
        if path not in self.watched:
            self.watch(path)
        if watch := self.watched.get(path):
            watch.woken.add(woken)
            # Unless it has gone in between.
            if self.watched.get(path) is watch:
                wait_for(woken, seconds)
            watch.woken.discard(woken)
