"""JSON over HTTP to the nodes of a service: bounded in time, and repeated where a node fails."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..conf import AliasConfig
from ..core import runtime
from ..core.runtime import clock
from .http_settings import Node, read_nodes, tls_context

#: Idle connections that are kept.
MAX_IDLE = 10
#: Seconds of the first pause once every node has failed; each is longer, up to the last.
PAUSES = 0.05, 0.3
#: What to do about a failure, by a part of its text.
REMEDIES = {
    "unable to get|self.signed": "Set OPTIONS['CA'] to the PEM file of its authority",
    "certificate required|bad certificate": "Set OPTIONS['CERT'] and ['KEY']",
    "timed out": "Check that a majority of the nodes runs",
}

Errors = (OSError, http.client.HTTPException)


class NodesFailed(OSError):
    """No node answered in time, or each answered that it can't serve now."""


class Hidden(str):
    """A secret: reports of errors show local variables."""

    def __repr__(self) -> str:
        return "'***'"


class Answer(NamedTuple):
    status: int
    #: Parsed JSON; text if it is none.
    body: Any
    headers: Mapping[str, str]
    #: An earlier try of the same request may have been carried out, or may be later.
    is_repeated: bool = False


class HttpNodes:
    """
    The nodes of one service. Any thread may ask.

    The node that answered last is asked first. A request may reach the service twice, or long
    after it was sent: each has to be safe then.
    """

    def __init__(self, config: AliasConfig, port: int) -> None:
        self.timeout = config.timeout
        #: Sent with each request.
        self.headers: dict[str, str] = {"Content-Type": "application/json"}
        self._nodes = deque(read_nodes(config.locations, port))
        self._tls = tls_context(config) if any(node.tls for node in self._nodes) else None
        self.after_fork()

    def after_fork(self) -> None:
        # The parent's sockets stay open, and are not used here.
        self._idle = runtime.PerHub(deque[http.client.HTTPConnection])

    def close(self) -> None:
        for idle in self._idle.all():
            while idle:
                idle.pop().close()

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """Send a request to one node after the other; raise `NodesFailed` after the timeout."""
        data = None if body is None else json.dumps(body).encode()
        end, tries, is_repeated = clock() + self.timeout, 0, False
        while True:
            node = self._nodes[0]
            try:
                # Every step ends in time for another node to be asked.
                until = min(end, clock() + self.timeout / min(2, len(self._nodes)))
                connection = self._connect(node, until)
                try:
                    request = method, path, data, self.headers
                    status, text, headers = _exchange(connection, *request, until)
                except BaseException:
                    # The next request would read this answer.
                    connection.close()
                    is_repeated = True
                    raise
                self._keep(connection)
                if status < 500 and status != 429:
                    return Answer(status, _parsed(text), headers, is_repeated)
                # Not if there were too many requests: that one wasn't carried out.
                is_repeated |= status != 429
                what = f"status {status}, {_shortened(text)}"
                failed: tuple[Exception, Node] = OSError(what), node
            except Errors as exc:
                # The last try may have time for a timeout only: an earlier reason says more.
                if not (tries and isinstance(exc, TimeoutError)):
                    failed = exc, node
            tries += 1
            if self._nodes[0] is node:
                self._nodes.rotate(-1)
            if tries >= len(self._nodes):
                time.sleep(max(0.0, min(PAUSES[0] * tries, PAUSES[1], end - clock())))
            if clock() >= end:
                raise NodesFailed(f"{failed[1]}: {_describe(*failed)}") from failed[0]

    def _connect(self, node: Node, until: float) -> http.client.HTTPConnection:
        idle = self._idle.get()
        with contextlib.suppress(IndexError):
            while True:
                connection = idle.pop()
                if (connection.host, connection.port) == node[:2] and not _is_closed(connection):
                    return connection
                connection.close()
        return self._open(node, _left(until))

    def _open(self, node: Node, limit: float) -> http.client.HTTPConnection:
        sock = _connect(node, limit)
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=node.host)
            connection = http.client.HTTPConnection(node.host, node.port)
            connection.sock = sock
            # It would connect again by itself, without TLS.
            connection.auto_open = 0
            return connection
        except BaseException:
            sock.close()
            raise

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        idle = self._idle.get()
        # Closed by the server's wish, or one too many.
        if connection.sock is None or len(idle) >= MAX_IDLE:
            connection.close()
        else:
            idle.append(connection)

    def stream(
        self,
        method: str,
        path: str,
        body: object,
        seconds: float,
        on_open: Callable[[Callable[[], object]], object],
    ) -> Iterator[str]:
        """
        Yield the lines of one long answer as they come, until it ends or `seconds` are over.

        It has a connection of its own. `on_open` gets a function that ends it from any thread.
        """
        # 0 would be no timeout at all: nothing would wait for the connection.
        end, seconds = clock() + seconds, max(0.05, seconds)
        data = None if body is None else json.dumps(body).encode()
        node = self._nodes[0]
        try:
            with contextlib.closing(self._open(node, min(self.timeout, seconds))) as connection:
                sock = connection.sock
                # With TLS as well: shutdown() of the socket below ends any read.
                on_open(lambda: runtime.cut(sock.fileno()) if sock.fileno() >= 0 else None)
                sock.settimeout(seconds)
                connection.request(method, path, data, self.headers)
                response = connection.getresponse()
                if response.status == 404:
                    # The watched key is gone.
                    return
                if response.status != 200:
                    raise http.client.HTTPException(f"status {response.status}")
                while (left := end - clock()) > 0:
                    sock.settimeout(left)
                    if not (line := response.readline()):
                        return
                    yield line.decode()
        except TimeoutError:
            return
        except Errors:
            # Only a hint is lost. The next request asks another node.
            if self._nodes[0] is node:
                self._nodes.rotate(-1)
            time.sleep(PAUSES[0])


def _connect(node: Node, limit: float) -> socket.socket:
    """Connect to one of a node's addresses. The driver would give each of them the whole limit."""
    end, failure = clock() + limit, OSError("its name has no address")
    addresses = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM)
    for place, (*_, address) in enumerate(addresses):
        try:
            share = _left(end) / (len(addresses) - place)
            sock = socket.create_connection((str(address[0]), int(address[1])), share)
        except OSError as exc:
            failure = exc
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_left(end))
            return sock
    raise failure


def _left(until: float) -> float:
    """Return the seconds left for a step: some, so that it isn't an endless one."""
    return max(0.05, until - clock())


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    data: bytes | None,
    headers: Mapping[str, str],
    until: float,
) -> tuple[int, bytes, Mapping[str, str]]:
    sock = connection.sock
    sock.settimeout(_left(until))
    connection.request(method, path, data, headers)
    response = connection.getresponse()
    text = b""
    sock.settimeout(_left(until))
    while part := response.read1():
        # A server that sends it in parts would have the whole time for each.
        if clock() > until:
            raise TimeoutError("the answer was too slow")
        text += part
        sock.settimeout(_left(until))
    if response.length:
        raise http.client.IncompleteRead(text, response.length)
    # The connection takes no other request before this.
    response.read()
    return response.status, text, dict(response.headers.items())


def _is_closed(connection: http.client.HTTPConnection) -> bool:
    """Return whether the server has closed an idle connection: a request would be sent twice."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text.decode(errors="replace")


def _describe(failure: Exception, node: Node) -> str:
    what = re.sub(r"\[SSL: \w+\] | \(_ssl\.c:\d+\)", "", str(failure)) or type(failure).__name__
    remedies = [remedy for part, remedy in REMEDIES.items() if re.search(part, what)]
    if (
        node.tls
        and isinstance(failure, ssl.SSLError | ConnectionError)
        and "certificate" not in what
    ):
        remedies = ["If it has no TLS, write http://. If it asks for a certificate, set CERT"]
    if not node.tls and isinstance(failure, http.client.RemoteDisconnected | ConnectionResetError):
        remedies = ["If it has TLS, write https://"]
    return ". ".join([what, *remedies])


def _shortened(text: bytes) -> str:
    body = _parsed(text)
    if isinstance(body, dict):
        body = body.get("message") or body.get("error") or body
    # A proxy's page may be long.
    return " ".join(str(body).split())[:120]
