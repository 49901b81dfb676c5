"""One private session of a PostgreSQL server. The locks that it holds live as long as it does."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

import psycopg
from django.db import Error, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import DiagnosticField, ExecStatus

from ...core import runtime
from ...core.runtime import clock
from ...storage.connections import NoAnswer, private
from ...storage.dialect import LOCK_WAIT
from ...storage.postgresql import sqlstate
from ...storage.text import escape_control
from ..interface import Claim, Wait
from . import statements as sql

#: SQLSTATEs that don't mean that the server failed: lock_not_available, deadlock_detected,
#: query_canceled.
LOCKED = ("55P03", "40P01", "57014")
OUT_OF_MEMORY = "53200"
_OUTDATED = "0A000"  # feature_not_supported: "cached plan must not change result type"

#: Seconds after which the server drops a dead waiter from its queue, where it delays all others.
DEAD_WAITER = 3
#: How often two sessions are compared to find out whether a pooler shares them.
ROUNDS = 20

_PARAMETER = re.compile(r"%\((\w+)\)s")
#: Readers of values, by the type's number. Any other is text.
_READERS: dict[int, Callable[[bytes], Any]] = {
    16: b"t".__eq__,  # boolean
    20: int,  # bigint
    23: int,  # integer
    701: float,  # double precision
}


@cache
def _numbered(statement: str) -> tuple[bytes, Sequence[str]]:
    """Return a statement with numbered parameters, and their names in that order."""
    names = list(dict.fromkeys(_PARAMETER.findall(statement)))
    return _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", statement).encode(), names


def _text(value: Any) -> str:
    """Return a parameter as the server reads it; the statement casts an array."""
    if not isinstance(value, list):
        return str(value)
    items = [str(item).replace("\\", r"\\").replace('"', r"\"") for item in value]
    return "{" + ",".join(f'"{item}"' for item in items) + "}"


class Session:
    """
    One session, which one thread uses at a time and which never reconnects.

    It uses libpq directly, where an interrupt of the thread that waits for an answer does no harm:
    the next thread reads the answer that was left. A statement of psycopg's cursor that is
    interrupted leaves the session useless, and with it every lock on it.
    """

    def __init__(self, wrapper: BaseDatabaseWrapper, timeout: float) -> None:
        self.wrapper = wrapper
        self.raw: psycopg.Connection[Any] = wrapper.connection
        self._timeout = timeout
        #: Held by the thread that uses it, by `with` alone: otherwise an interrupt may leave it
        #: locked. It blocks real threads: no greenlet is switched, or killed, while it is held.
        self.lock = runtime.allocate_lock()
        self.user = 0
        #: The locks that it holds, by key; and those that it may hold although none was granted.
        self.holds: dict[int, Any] = {}
        self.doubts: dict[int, Claim] = {}
        #: The longest ttl of its locks.
        self.ttl = 0.0
        #: What it is used to wait for; whether a late cancellation may still reach the server.
        self.wait: Wait | None = None
        self.interrupted = False
        #: When the statement was sent whose answer hasn't been read.
        self.asked: float | None = None
        self._prepared: dict[str, bytes] = {}
        self._numbers = itertools.count()
        self.pid, started = self.one(sql.IDENTITY, {}, prepare=False)
        self.started = datetime.fromisoformat(started)

    @property
    def closed(self) -> bool:
        return self.raw.closed

    def one(self, statement: str, given: Mapping[str, Any], *, prepare: bool = True) -> Any:
        """Execute a statement that returns one row."""
        return self.all(statement, given, prepare=prepare)[0]

    def all(
        self, statement: str, given: Mapping[str, Any], *, prepare: bool = True
    ) -> list[tuple[Any, ...]]:
        try:
            if prepare and statement not in self._prepared:
                # A name of its own each time: an interrupted one may exist on the server.
                name = b"fencedlock_%d" % next(self._numbers)
                self._send(self.raw.pgconn.send_prepare, name, _numbered(statement)[0])
                self.read()
                self._prepared[statement] = name
            self.send(statement, given)
            return self.read()
        except Error as exc:
            if not prepare or sqlstate(exc) != _OUTDATED:
                raise
            # Its tables have changed since it was prepared. It did nothing.
            self._prepared.clear()
            return self.all(statement, given, prepare=False)

    def send(self, statement: str, given: Mapping[str, Any]) -> None:
        """Send a statement, whose answer `read()` returns."""
        text, names = _numbered(statement)
        values = [None if given[name] is None else _text(given[name]).encode() for name in names]
        pgconn, name = self.raw.pgconn, self._prepared.get(statement)
        if name is None:
            self._send(pgconn.send_query_params, text, values)
        else:
            self._send(pgconn.send_query_prepared, name, values)

    def _send(self, send: Callable[..., None], *args: Any) -> None:
        self.asked = clock()
        with self.wrapper.wrap_database_errors:
            send(*args)

    def read(self) -> list[tuple[Any, ...]]:
        """Return the rows of the answer, once it has been read to its end."""
        result = None
        with self.wrapper.wrap_database_errors:
            pgconn = self.raw.pgconn
            while pgconn.flush():
                self._wait(select.POLLOUT)
            while True:
                while pgconn.is_busy():
                    self._wait(select.POLLIN)
                    pgconn.consume_input()
                if (following := pgconn.get_result()) is None:
                    break
                result = following
            self.asked = None
            if result is None:
                return []
            if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
                state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
                error: type[Exception] = psycopg.OperationalError
                with contextlib.suppress(KeyError):
                    error = psycopg.errors.lookup(state)
                raise error(result.error_message.decode(errors="replace").strip())
        columns = range(result.nfields)
        readers = [_READERS.get(result.ftype(column), bytes.decode) for column in columns]
        return [
            tuple(
                None if (value := result.get_value(row, column)) is None else readers[column](value)
                for column in columns
            )
            for row in range(result.ntuples)
        ]

    def _wait(self, event: int) -> None:
        until = (self.asked or 0.0) + self._timeout
        if not is_ready(self.raw.fileno(), event, until - clock(), runtime.original):
            raise NoAnswer(self._timeout)

    def has_answer(self, seconds: float) -> bool:
        """Wait for an answer; other greenlets run meanwhile."""
        if not is_ready(self.raw.fileno(), select.POLLIN, seconds):
            return False
        self.asked = clock()
        return True

    def read_left(self) -> None:
        """Read the answer to a statement whose thread was interrupted, or has given it up."""
        if self.asked is not None:
            try:
                self.read()
            except Error:
                if self.asked is not None:
                    raise

    def unlock(self, key: int, claim: Claim) -> bool:
        """Unlock a key and delete the owner's row; return whether the lock was held until now."""
        idle = idle_limit(self.ttl if self.holds else 0.0)
        given = {"name": claim.name, "key": key, "owner": claim.owner, "idle": idle}
        try:
            statement = sql.RELEASE if claim.fenced else sql.RELEASE_UNFENCED
            unlocked, forced, _ = self.one(statement, given)
            return bool(unlocked) and not forced
        except NoAnswer:
            raise
        except Error:
            # It isn't known when a session ended: others may have had the lock since. Otherwise a
            # transaction has the row locked, and is about to take it.
            if not self.closed:
                self.one(sql.UNLOCK, given)
            return not self.closed

    def is_usable(self) -> bool:
        """Return whether an idle session is still open."""
        if is_ready(self.raw.fileno(), select.POLLIN, 0):
            # It sent something: most likely the error that ended it. A notice is harmless.
            try:
                self.one("SELECT 1", {}, prepare=False)
            except Error:
                self.close()
        return not self.closed

    def cancel(self) -> None:
        """Cancel the present statement, from another thread."""
        with contextlib.suppress(Exception):
            self.raw.cancel_safe(timeout=2)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.wrapper.close()
        with contextlib.suppress(Exception):
            self.raw.close()

    def pools_transactions(self, route: str) -> bool:
        """
        Find out whether a pooler shares this session with other clients that are connected.

        Then two connected clients have one server process, or the first one's changes. A pooler
        in session mode has another pid as well, and is fine.
        """
        if self.raw.info.backend_pid == self.pid:
            return False
        other = connect(route, self._timeout)
        try:
            for _ in range(ROUNDS):
                mine, its = (each.one(sql.PID, {}, prepare=False)[0] for each in (self, other))
                if mine != self.pid or its == self.pid:
                    return True
            return False
        finally:
            other.close()


def is_ready(
    fileno: int, event: int, seconds: float, find: Callable[[str, str], Any] | None = None
) -> bool:
    """Wait for a socket; block the real thread if `find` is `runtime.original`."""
    poll = (find("select", "poll") if find else select.poll)()
    poll.register(fileno, event)
    # The deadline may have passed while the process was paused.
    return bool(poll.poll(max(0.0, seconds) * 1000))


def idle_limit(seconds: float) -> str:
    """Return a value of idle_session_timeout, which is a 32-bit number of milliseconds."""
    return f"{min(round(seconds * 1000), 2**31 - 1)}ms"


class PoolsTransactions(OperationalError):
    """The sessions behind this connection change from one transaction to the next."""


def open_session(route: str, timeout: float, ttl: float | None = None) -> Session:
    """Connect; to try locks of a ttl, or else to wait in the server's queues."""
    session = connect(route, timeout)
    try:
        # Before the settings are made: such a pooler would apply them to other clients.
        if session.pools_transactions(route):
            raise PoolsTransactions(
                f"database {route!r} is reached through a pooler that gives each transaction "
                "another session, so a session lock holds nothing there"
            )
        wanted = _settings(ttl)
        given = {"names": list(wanted), "values": list(wanted.values())}
        session.all(sql.CONFIGURE, given, prepare=False)
    except BaseException:
        session.close()
        raise
    return session


def connect(route: str, timeout: float) -> Session:
    """Connect, and set nothing."""
    wrapper = private(route, timeout)
    try:
        with wrapper.wrap_database_errors:
            wrapper.connect()
        return Session(wrapper, timeout)
    except BaseException:
        with contextlib.suppress(Exception):
            wrapper.close()
        raise


def _settings(ttl: float | None) -> dict[str, str]:
    """
    Return every setting that could end a session or a wait too soon, or a dead client's too late.

    Keepalives find a peer that is gone while idle, tcp_user_timeout a peer that takes no answer;
    either alone left a lock held for more than 50 s.
    """
    within = DEAD_WAITER if ttl is None else ttl
    return {
        "application_name": _application_name(),
        "lock_timeout": f"{LOCK_WAIT}ms",
        "statement_timeout": "0",
        "transaction_timeout": "0",
        # The statements that acquire, renew and release set it.
        "idle_session_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "default_transaction_isolation": "read committed",
        "synchronous_commit": "on",
        "tcp_keepalives_idle": str(max(1, round(within / 3))),
        "tcp_keepalives_interval": str(max(1, round(within / 6))),
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": str(int(max(1.0, within * 0.9) * 1000)),
        # Looks for the client within a statement as well; only a waiter stays in one.
        "client_connection_check_interval": "2s" if ttl is None else "0",
    }


#: Shows in ``pg_stat_activity`` who holds a lock that isn't recorded in a table.
NAME = "fencedlock"


def _application_name() -> str:
    # The server keeps 63 bytes.
    pid = str(os.getpid())
    host = escape_control(socket.gethostname()).encode("ascii", "replace").decode()
    return f"{NAME} {pid} {host[: 63 - len(NAME) - len(pid) - 2]}"


def read_application_name(name: str | None) -> str:
    """Describe the owner of a session by the name that it gave itself."""
    words = (name or "").split(" ", 2)
    if len(words) == 3 and words[0] == NAME:
        return f"{words[2]}, pid {words[1]}"
    return f"a session of application {name!r}" if name else "a session that this role can't see"
