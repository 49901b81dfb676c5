"""One private session of a Postgres server, whose life is that of the locks that it holds."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import psycopg
from django.db import Error, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import conf
from ..core.runtime import clock, cut
from ..exceptions import SettingsError
from ..storage.connections import PREPARE_THRESHOLD, private
from ..storage.dialect import LOCK_WAIT
from ..storage.postgresql import sqlstate
from ..storage.text import escape_control
from . import postgres_statements as sql
from .postgres_threads import is_readable

#: SQLSTATEs that are no failure of the server.
LOCKED = ("55P03", "40P01")  # lock_not_available, deadlock_detected
CANCELLED = "57014"
OUT_OF_MEMORY = "53200"
OUTDATED = "0A000"  # feature_not_supported: "cached plan must not change result type"

#: Seconds after which a dead waiter is out of the server's queue: it stalls all behind it.
DEAD_WAITER = 3
#: How often two sessions are compared to find out that a pooler shares them.
ROUNDS = 20


class Session:
    """
    One session, which prepares the statements of every lock. One thread uses it at a time.

    It never reconnects: that would look as if it still held its locks.
    """

    def __init__(self, wrapper: BaseDatabaseWrapper, *, waits: bool = False) -> None:
        self.wrapper = wrapper
        self.raw: psycopg.Connection[Any] = wrapper.connection
        self._cursor = psycopg.Cursor(self.raw)
        self.raw.prepare_threshold = PREPARE_THRESHOLD
        self.busy_since: float | None = None
        pid, started = self.one(sql.IDENTITY, {}, prepare=False)
        self.pid: int = pid
        self.started: datetime = started.replace(tzinfo=UTC)
        self.fileno = self.raw.fileno()

    @property
    def closed(self) -> bool:
        return self.raw.closed

    @property
    def is_behind_pooler(self) -> bool:
        return self.raw.info.backend_pid != self.pid

    def all(
        self, statement: str, given: Mapping[str, Any], prepare: bool = True
    ) -> list[tuple[Any, ...]]:
        """Execute one statement. What is thrown into the middle of it ends the session."""
        self.busy_since = clock()
        try:
            with self.wrapper.wrap_database_errors:
                asked = None if prepare else False
                return self._cursor.execute(statement, given, prepare=asked).fetchall()
        except Error as exc:
            if sqlstate(exc) == OUTDATED and prepare:
                # Its tables have changed since it was prepared. It did nothing.
                self._cursor.execute("DEALLOCATE ALL")
                return self.all(statement, given, prepare=False)
            raise
        except BaseException:
            self.abandon()
            raise
        finally:
            self.busy_since = None

    def one(self, statement: str, given: Mapping[str, Any], prepare: bool = True) -> Any:
        """Execute a statement that returns one row."""
        return self.all(statement, given, prepare)[0]

    def unlock(self, key: int) -> bool:
        """Let go of a key that this session may have; if even that fails, of the session."""
        try:
            return bool(self.one(sql.UNLOCK, {"key": key})[0])
        except BaseException:
            self.close()
            raise

    def is_quiet(self) -> bool:
        """Whether nothing came in on the idle session; its end would have."""
        return not self.closed and not is_readable(self.fileno)

    def cancel(self) -> None:
        """Cancel the statement that is running, from another thread."""
        with contextlib.suppress(Exception):
            self.raw.cancel_safe(timeout=2)

    def cut(self) -> None:
        """Give up waiting for an answer, from another thread."""
        with contextlib.suppress(Exception):
            cut(self.raw.fileno())

    def abandon(self) -> None:
        """End the session in the middle of a statement, and with it whatever it was granted."""
        if not self.closed:
            # Else the server would notice only when it grants the lock, or looks after its client.
            self.cancel()
        self.close()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.wrapper.close()
        with contextlib.suppress(Exception):
            self.raw.close()


class PoolsTransactions(OperationalError):
    """The sessions behind this connection change from one transaction to the next."""


def open_session(route: str, timeout: float, *, waits: bool) -> Session:
    """Connect; `waits` says whether it will stand in the server's queues."""
    session = connect(route, timeout, waits=waits)
    try:
        # Before the settings are made: through such a pooler they would hit other clients.
        if session.is_behind_pooler and pools_transactions(session, route, timeout):
            raise PoolsTransactions(
                f"database {route!r} is reached through a pooler that gives each transaction "
                "another session, so a session lock holds nothing there"
            )
        wanted = _settings(waits)
        given = {"names": list(wanted), "values": list(wanted.values())}
        session.all(sql.CONFIGURE, given, prepare=False)
    except BaseException:
        session.close()
        raise
    return session


def connect(route: str, timeout: float, *, waits: bool = False) -> Session:
    """Connect, and set nothing."""
    wrapper = private(route, timeout)
    options = wrapper.settings_dict["OPTIONS"]
    ttl = smallest_ttl()
    options.setdefault("keepalives_idle", _at_least_one(ttl / 3))
    options.setdefault("keepalives_interval", _at_least_one(ttl / 6))
    options.setdefault("keepalives_count", 3)
    try:
        with wrapper.wrap_database_errors:
            wrapper.connect()
        return Session(wrapper, waits=waits)
    except BaseException:
        with contextlib.suppress(Exception):
            wrapper.close()
        raise


def pools_transactions(session: Session, route: str, timeout: float) -> bool:
    """
    Find out whether a pooler shares sessions between clients that are connected.

    Two clients that are both connected have one server process, or the first one's changes. A try
    for the other's advisory lock, as it is often advised, misses one in ten when the pool is busy.
    """
    other = connect(route, timeout)
    try:
        return any(
            _pid(session) != session.pid or _pid(other) == session.pid for _ in range(ROUNDS)
        )
    finally:
        other.close()


def _pid(session: Session) -> int:
    pid: int = session.one("SELECT pg_backend_pid()", {}, prepare=False)[0]
    return pid


def smallest_ttl() -> float:
    """The smallest ttl of the settings; a session may serve locks of several aliases."""
    ttls = []
    for alias in conf.aliases():
        with contextlib.suppress(SettingsError):
            ttls.append(conf.config(alias).ttl)
    return min(ttls, default=float(conf.DEFAULTS["TTL"]))


def _settings(waits: bool) -> dict[str, str]:
    """
    Every setting that could end a session or a wait too soon, or a dead client's too late.

    Keepalives find a peer that is gone while idle, tcp_user_timeout one that takes no answer;
    either alone left a lock held for a minute and more.
    """
    ttl = DEAD_WAITER if waits else smallest_ttl()
    return {
        "application_name": _application_name(),
        "lock_timeout": f"{LOCK_WAIT}ms",
        "statement_timeout": "0",
        "transaction_timeout": "0",
        "idle_session_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "default_transaction_isolation": "read committed",
        "synchronous_commit": "on",
        "tcp_keepalives_idle": str(_at_least_one(ttl / 3)),
        "tcp_keepalives_interval": str(_at_least_one(ttl / 6)),
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": str(int(max(1.0, ttl * 0.9) * 1000)),
        # Looks after the client within a statement as well, which only a waiter stays in.
        "client_connection_check_interval": "2s" if waits else "0",
    }


def _at_least_one(seconds: float) -> int:
    return max(1, round(seconds))


#: Tells in ``pg_stat_activity`` who holds a lock that isn't recorded in a table.
NAME = "fencedlock"


def _application_name() -> str:
    # The server keeps 63 bytes.
    pid = str(os.getpid())
    host = escape_control(socket.gethostname()).encode("ascii", "replace").decode()
    return f"{NAME} {pid} {host[: 63 - len(NAME) - len(pid) - 2]}"


def read_application_name(name: str | None) -> str:
    """Tell people who has a session, by what it calls itself."""
    words = (name or "").split(" ", 2)
    if len(words) == 3 and words[0] == NAME:
        return f"{words[2]}, pid {words[1]}"
    return f"a session of application {name!r}" if name else "a session that this role can't see"
