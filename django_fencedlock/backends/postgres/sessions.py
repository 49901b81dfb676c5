"""One private session of a PostgreSQL server. The locks that it holds live as long as it does."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import psycopg
from django.db import Error, OperationalError

from ...core import runtime
from ...core.runtime import clock
from ...storage.connections import PREPARE_THRESHOLD, private
from ...storage.dialect import LOCK_WAIT
from ...storage.postgresql import sqlstate
from ...storage.text import escape_control
from . import statements as sql

#: SQLSTATEs that don't mean that the server failed: lock_not_available, deadlock_detected.
LOCKED = ("55P03", "40P01")
_OUTDATED = "0A000"  # feature_not_supported: "cached plan must not change result type"

#: Seconds after which the server drops a dead waiter from its queue, where it delays all others.
DEAD_WAITER = 3.0
#: Seconds after which the server looks for a silent client at the latest, however long the ttl is.
LONGEST_SILENCE = 3600.0
#: How the client finds a server that is gone: one that waits in its queues sends nothing.
KEEPALIVES = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
#: How often two sessions are compared to find out whether a pooler shares them.
ROUNDS = 20


class Session:
    """One session. One thread uses it at a time, and it never reconnects."""

    def __init__(self, route: str, timeout: float) -> None:
        self.wrapper = private(route, timeout)
        settings = self.wrapper.settings_dict
        settings["OPTIONS"] = KEEPALIVES | settings["OPTIONS"]
        with self.wrapper.wrap_database_errors:
            self.wrapper.connect()
        self.raw: psycopg.Connection[Any] = self.wrapper.connection
        self.raw.prepare_threshold = PREPARE_THRESHOLD
        self._cursor = psycopg.Cursor(self.raw)
        self._route, self._timeout = route, timeout
        self._poll = runtime.original("select", "poll")()
        self._poll.register(self.raw.fileno(), select.POLLIN)
        #: When the present statement is overdue.
        self.busy_until: float | None = None
        #: It waits in the server's queues, and later holds at most the lock that it waited for; it
        #: has nothing to do.
        self.waits = self.idle = False
        #: A cancellation of its wait may still come; it isn't used again.
        self.may_be_cancelled = False
        #: The locks that it holds, and their longest ttl; 0 without a lock.
        self.holds: set[Any] = set()
        self.ttl = 0.0
        try:
            self.pid, started = self.one(sql.IDENTITY, {}, prepare=False)
            self.started: datetime = started.replace(tzinfo=UTC)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self.raw.closed

    def all(
        self, statement: str, given: Mapping[str, Any], *, prepare: bool = True, wait: float = 0.0
    ) -> list[tuple[Any, ...]]:
        """Execute one statement, which may wait for a lock for `wait` seconds."""
        # Until then, a lease may be good whose renewal the server is late to answer.
        self.busy_until = clock() + wait + max(self._timeout, self.ttl)
        try:
            with self.wrapper.wrap_database_errors:
                asked = None if prepare else False
                return self._cursor.execute(statement, given, prepare=asked).fetchall()
        except Error as exc:
            if sqlstate(exc) == _OUTDATED and prepare:
                # Its tables have changed since it was prepared. It did nothing.
                self._cursor.execute("DEALLOCATE ALL")
                return self.all(statement, given, prepare=False, wait=wait)
            raise
        finally:
            self.busy_until = None

    def one(self, statement: str, given: Mapping[str, Any], **how: Any) -> Any:
        """Execute a statement that returns one row."""
        return self.all(statement, given, **how)[0]

    def unlock(self, keys: Iterable[int], *, shared: bool = False) -> None:
        """Unlock keys that this session may have; close the session if that fails."""
        statement = sql.UNLOCK_SHARED if shared else sql.UNLOCK_ALL
        try:
            self.all(statement, {"keys": [*keys]}, prepare=False)
        except BaseException:
            self.close()
            raise

    def is_usable(self) -> bool:
        """Return whether an idle session is still open."""
        if not self.closed and self._poll.poll(0):
            # It sent something: most likely the error that ended it. A notice is harmless.
            try:
                self.one(sql.PID, {}, prepare=False)
            except Error:
                self.close()
        return not self.closed

    def cancel(self) -> None:
        """Cancel the present statement, from another thread."""
        with contextlib.suppress(Exception):
            self.raw.cancel_safe(timeout=2)

    def cut(self) -> None:
        """End the wait for an answer, from another thread."""
        with contextlib.suppress(Exception):
            runtime.cut(self.raw.fileno())

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.wrapper.close()
        with contextlib.suppress(Exception):
            self.raw.close()

    def pools_transactions(self) -> bool:
        """Find out whether a pooler shares this session with other clients that are connected."""
        # A pooler of sessions has another pid as well, and is fine: only one that pools
        # transactions gives two clients one server process, or changes that of the first.
        if self.raw.info.backend_pid == self.pid:
            return False
        with contextlib.closing(Session(self._route, self._timeout)) as other:
            for _ in range(ROUNDS):
                mine, its = (each.one(sql.PID, {}, prepare=False)[0] for each in (self, other))
                if mine != self.pid or its == self.pid:
                    return True
        return False


class PoolsTransactions(OperationalError):
    """The sessions behind a connection change from one transaction to the next."""

    def __init__(self, route: str) -> None:
        super().__init__(
            f"database {route!r} is reached through a pooler that gives each transaction another "
            "session, so a session lock holds nothing there"
        )


def open_session(route: str, timeout: float, ttl: float | None) -> Session:
    """Open the session of a ttl; without one, a session that waits in the server's queues."""
    session = Session(route, timeout)
    session.waits = ttl is None
    try:
        # Before the settings are made: such a pooler would apply them to other clients.
        if session.pools_transactions():
            raise PoolsTransactions(route)
        wanted = _settings(ttl)
        given = {"names": list(wanted), "values": list(wanted.values())}
        session.all(sql.CONFIGURE, given, prepare=False)
    except BaseException:
        session.close()
        raise
    return session


def _settings(ttl: float | None) -> dict[str, str]:
    """Return the settings that could end a session too soon, or a dead client's too late."""
    # Keepalives find a peer that is gone while idle, tcp_user_timeout a peer that takes no answer;
    # either alone left a lock held for more than 50 s.
    silence = min(ttl or DEAD_WAITER, LONGEST_SILENCE)
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
        "tcp_keepalives_idle": str(max(1, round(silence / 3))),
        "tcp_keepalives_interval": str(max(1, round(silence / 6))),
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": str(int(max(1.0, silence * 0.9) * 1000)),
        # Looks for the client within a statement as well; only a waiter stays in one.
        "client_connection_check_interval": "0" if ttl else "2s",
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
