"""
Database connections: the caller's, a test's, and private ones.

Locks are recorded on private connections, apart from the caller's transactions and pools. Within a
``TestCase``, `ConnectionPool.run()` uses the test's own: no other one sees the test's rows.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from django.db import Error, InterfaceError, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core.runtime import Empty, SimpleQueue, clock, cut, forks, is_patched, watchdog

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Connections that one pool uses at once, and keeps while idle.
MAX_CONNECTIONS, MAX_IDLE = 10, 2
#: Seconds between two looks of a greenlet for room in a pool.
LOOK = 0.005
#: Executions after which PostgreSQL prepares a statement.
PREPARE_THRESHOLD = 5
#: Seconds to wait for SQLite's file if the caller's own transaction may have it locked.
SQLITE_BUSY_TIMEOUT = 0.25

#: Attributes of private connections; the first is a cursor for the statements of each lock.
CURSOR, _BUSY_TIMEOUT = "_fencedlock_cursor", "_fencedlock_busy_timeout"
# SQLSTATEs of a statement that another session prepared, behind a pooler; and of one that was
# prepared before a migration ("cached plan must not change result type").
_ANOTHER_SESSION, _OUTDATED = ("26000", "42P05"), ("0A000",)

#: A parent's connections, kept: some drivers end a session when its connection is collected.
_of_parents: list[Any] = []


# The caller's connections


def under_test() -> bool:
    """Return whether a test runner is active: it drops the database in the end."""
    # Imported, it would bring all of django.test into every process that locks.
    utils: Any = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")


def is_of_test(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a ``TestCase`` wraps the connection in a transaction."""
    # A copy: the connection's own thread may leave the block meanwhile.
    outermost = connection.atomic_blocks[:1]
    return bool(outermost) and bool(outermost[0]._from_testcase)  # type: ignore[attr-defined]


def test_connection(using: str) -> BaseDatabaseWrapper | None:
    """Return the caller's connection if a ``TestCase`` wraps it in a transaction."""
    connection = connections[using]
    return connection if is_of_test(connection) else None


def test_has_ended(connection: BaseDatabaseWrapper) -> Callable[[], bool] | None:
    """Return a function that says whether the present test's transaction has ended, if any."""
    for block in reversed(connection.atomic_blocks):
        if block._from_testcase:  # type: ignore[attr-defined]
            return lambda: block not in connection.atomic_blocks
    return None


def has_own_block(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the code under test opened an ``atomic()`` of its own."""
    return any(not block._from_testcase for block in connection.atomic_blocks)  # type: ignore[attr-defined]


def is_open(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a connection has an open transaction, other than a test's."""
    return connection.in_atomic_block and not is_of_test(connection)


def open_connections() -> list[BaseDatabaseWrapper]:
    """Return the caller's connections with an open transaction."""
    return [each for each in connections.all(initialized_only=True) if is_open(each)]


def when_all_ended(open_now: Sequence[BaseDatabaseWrapper], callback: Callable[[], object]) -> None:
    """Call `callback` once, when the last of these transactions is committed or rolled back."""
    left = len(open_now)

    def committed() -> None:
        nonlocal left
        left -= 1
        if not left:
            # Not left to the collection, which would swallow an interrupt.
            end()

    def call() -> None:
        try:
            callback()
        except Exception:
            # It would replace the result of the user's commit or rollback.
            logger.exception("A callback at the end of a transaction failed")

    # Django has no hook for a rollback, but drops its list of callbacks then.
    end = weakref.finalize(committed, call)
    end.atexit = False
    for connection in open_now:
        # on_commit() would bind it to the innermost savepoint.
        connection.run_on_commit.append((set(), committed, True))  # type: ignore[arg-type]


# Private connections


def private(using: str, timeout: float) -> BaseDatabaseWrapper:
    """
    Copy the connection `using`: the same server and user, with time limits of its own.

    Neither ``close_old_connections()`` nor Celery's clean-up closes it.
    """
    copy = connections[using].copy()
    settings, options = copy.settings_dict, copy.settings_dict["OPTIONS"]
    settings.update(
        ATOMIC_REQUESTS=False, AUTOCOMMIT=True, CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False
    )
    options.pop("pool", None)
    if copy.vendor == "postgresql":
        # Under a stricter level, a grant that waited for a row would fail with 40001.
        options.pop("isolation_level", None)
        options.setdefault("application_name", "fencedlock")
        options.setdefault("connect_timeout", max(2, math.ceil(timeout)))
        options.setdefault("tcp_user_timeout", int(timeout * 1000))
    elif copy.vendor == "mysql":
        options["isolation_level"] = "read committed"
        for key in ("connect_timeout", "read_timeout", "write_timeout"):
            options.setdefault(key, math.ceil(timeout))
        _limit_row_waits(copy)
    else:
        # A transaction that reads before it writes fails at once in SQLite's default mode, if
        # another writer comes in between.
        options["transaction_mode"] = "IMMEDIATE"
        options["timeout"] = timeout
    # One thread at a time uses it, though not always the one that opened it.
    copy.inc_thread_sharing()
    return copy


def _limit_row_waits(connection: BaseDatabaseWrapper) -> None:
    """Wait for a locked row for one second, MySQL's minimum, instead of its default of 50."""
    init = connection.init_connection_state

    def init_and_limit() -> None:
        init()
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")

    connection.init_connection_state = init_and_limit  # type: ignore[method-assign]


class _DeadWhileIdle(Exception):
    """An idle connection was of no use; the work is repeated on a new one."""


class ConnectionPool:
    """A few private connections to one database, each used for a statement or two."""

    def __init__(self, using: str, timeout: float) -> None:
        self.using = using
        self.timeout = timeout
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._idle: list[BaseDatabaseWrapper] = []
        # Each place is taken and returned by one call of C, so that an exception that a signal
        # handler raises in between doesn't lose it.
        self._room: SimpleQueue[Any] = SimpleQueue()
        #: One more, for renewals: claims that wait for locked rows may use all others.
        self._spare: SimpleQueue[Any] = SimpleQueue()
        for room in (*[self._room] * MAX_CONNECTIONS, self._spare):
            room.put(room)
        self._prepares = True
        #: Places that wait for the end of a fork.
        self._stopped: list[SimpleQueue[Any]] = []

    def run(
        self,
        work: Callable[[BaseDatabaseWrapper], T],
        *,
        renews: bool = False,
        busy_timeout: float | None = None,
    ) -> T:
        """
        Run `work` with a private connection; with the test's own inside a ``TestCase``.

        It runs twice if an idle connection turns out to be dead, so it must be idempotent. Work
        that `renews` leases has one place more.
        """
        home = connections[self.using]
        limit = self.timeout if busy_timeout is None else busy_timeout
        if home.in_atomic_block:
            if is_of_test(home):
                return work(home)
            limit = min(limit, SQLITE_BUSY_TIMEOUT)
        place: list[SimpleQueue[Any]] = []
        try:
            if not (
                _take(self._room, place)
                or (renews and _take(self._spare, place))
                or _take(self._room, place, self.timeout)
            ):
                raise OperationalError(
                    f"all {MAX_CONNECTIONS} private connections to {self.using!r} were busy for "
                    f"{self.timeout:g} s"
                )
            try:
                if idle := self._idle_one():
                    return self._run(work, idle, limit)
            except _DeadWhileIdle:
                pass
            return self._run(work, private(self.using, self.timeout), limit)
        finally:
            for room in place:
                room.put(room)

    def run_orm(self, work: Callable[[], T], busy_timeout: float | None = None) -> T:
        """Like `run()`, for `work` that uses Django's ORM."""

        def run(connection: BaseDatabaseWrapper) -> T:
            with _replace(self.using, connection):
                return work()

        return self.run(run, busy_timeout=busy_timeout)

    def close(self) -> None:
        """Close the idle connections."""
        while connection := self._idle_one():
            connection.close()

    def before_fork(self) -> None:
        """
        Close SQLite's connections.

        SQLite's locks on a file belong to a process. A child that inherits a connection takes them
        for its own. The last other process that closes the file then deletes the log that the
        child goes on to write to, and the child's commits are lost: a token could be granted twice.
        """
        if connections[self.using].vendor != "sqlite":
            return
        until = clock() + self.timeout
        for room in (*[self._room] * MAX_CONNECTIONS, self._spare):
            # One that is in use for longer is inherited.
            _take(room, self._stopped, max(0.0, until - clock()))
        self.close()

    def after_fork_in_parent(self) -> None:
        while self._stopped:
            room = self._stopped.pop()
            room.put(room)

    def after_fork(self) -> None:
        _of_parents.extend(self._idle)
        self._reset()

    def _idle_one(self) -> BaseDatabaseWrapper | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _run(
        self, work: Callable[[BaseDatabaseWrapper], T], connection: Any, busy_timeout: float
    ) -> T:
        late: list[bool] = []
        keep, watch, was_idle = False, None, connection.connection is not None
        try:
            try:
                # SQLite waits for its file only, and limits that wait itself.
                if connection.vendor == "sqlite":
                    set_busy_timeout(connection, busy_timeout)
                else:
                    watch = watchdog.begin(self.timeout, partial(_cut, connection, late))
                # Not for a connection that is closed after use: it costs a round trip.
                if self._prepares and not was_idle and not under_test():
                    _keep_cursor(connection)
                result = work(connection)
            finally:
                if watch is not None:
                    watchdog.end(watch)
            keep = True
            return result
        except Error as exc:
            state = getattr(exc.__cause__, "sqlstate", None)
            is_dead = isinstance(exc, OperationalError | InterfaceError) and (
                connection.connection is None or not connection.is_usable()
            )
            if state in _ANOTHER_SESSION:
                self._prepares = False
            if was_idle and (is_dead or state in _ANOTHER_SESSION + _OUTDATED):
                raise _DeadWhileIdle from exc
            keep = not is_dead
            if late:
                raise _no_answer(self.timeout) from exc
            raise
        finally:
            # Any other exception (a killed greenlet, a signal handler's) may have interrupted a
            # statement; the connection can't be used again.
            if keep and len(self._idle) < MAX_IDLE and not under_test():
                self._idle.append(connection)
            else:
                if (cursor := getattr(connection, CURSOR, None)) is not None:
                    # SQLite's file would stay locked by a statement that was interrupted.
                    with contextlib.suppress(Error):
                        cursor.close()
                with contextlib.suppress(Error):
                    connection.close()


def _no_answer(timeout: float) -> OperationalError:
    return OperationalError(f"no answer within {timeout:g} s")


def _take(room: SimpleQueue[Any], place: list[Any], timeout: float = 0.0) -> bool:
    """Move an item from `room` to `place`, if there is one in time."""
    until, green = clock() + timeout, timeout > 0 and is_patched("threading")
    wait = 0.0 if green else timeout
    while True:
        try:
            # One call of C: an interrupted caller has the item in the list that it returns.
            place.extend(map(room.get, (wait > 0,), (wait,)))
            return True
        except Empty:
            if not green or clock() >= until:
                return False
        # A real thread may return it, which wakes no greenlet.
        time.sleep(LOOK)


def _cut(connection: BaseDatabaseWrapper, late: list[bool]) -> None:
    late.append(True)
    raw = connection.connection
    # MySQL's drivers have timeouts of their own.
    if raw is not None and connection.vendor == "postgresql":
        with contextlib.suppress(Exception):
            cut(raw.fileno())


_pools: dict[tuple[str, float], ConnectionPool] = {}


def pool(using: str, timeout: float) -> ConnectionPool:
    """Return this process's pool of private connections to database `using`."""
    found = _pools.get((using, timeout))
    return found or _pools.setdefault((using, timeout), ConnectionPool(using, timeout))


def close_all() -> None:
    """Close every idle private connection of this process."""
    for each in _pools.values():
        each.close()


@contextlib.contextmanager
def time_limited(using: str, timeout: float) -> Iterator[None]:
    """Limit each of this thread's queries to a database, on a private connection of the block."""
    # A test's rows are visible on the test's own connection alone.
    if test_connection(using) is not None:
        yield
        return
    own = private(using, timeout)
    try:
        with _replace(using, own), own.execute_wrapper(partial(_in_time, timeout)):
            yield
    finally:
        with contextlib.suppress(Error):
            own.close()


@contextlib.contextmanager
def _replace(using: str, connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Make `connection` the one that this thread's ORM uses for database `using`."""
    original = connections[using]
    try:
        connections[using] = connection
        yield
    finally:
        connections[using] = original


def _in_time(timeout: float, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    late: list[bool] = []
    try:
        with watchdog.limit(timeout, partial(_cut, context["connection"], late)):
            return execute(sql, params, many, context)
    except Error as exc:
        if late:
            raise _no_answer(timeout) from exc
        raise


def set_busy_timeout(connection: BaseDatabaseWrapper, seconds: float) -> None:
    """Limit the wait for SQLite's file, which is locked while another connection writes."""
    if getattr(connection, _BUSY_TIMEOUT, None) != seconds:
        with connection.cursor() as cursor:
            cursor.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")
        setattr(connection, _BUSY_TIMEOUT, seconds)


# Prepared statements. Planning takes most of a grant's time on PostgreSQL: 389 us, against 140.


def _keep_cursor(connection: BaseDatabaseWrapper) -> None:
    """Keep a cursor of a new connection; one that prepares if it is psycopg's, without a pooler."""
    # A cursor of Django's: an engine may set up the session as it makes one (search_path).
    first = connection.cursor()
    if connection.vendor != "postgresql":
        setattr(connection, CURSOR, first)
        return
    with first:
        raw: Any = connection.connection
        if not hasattr(raw, "prepare_threshold"):
            return
        first.execute("SELECT pg_backend_pid()")
        # A pooler invents a pid for its clients.
        if first.fetchone()[0] == raw.info.backend_pid:
            raw.prepare_threshold = PREPARE_THRESHOLD
            from psycopg import Cursor

            setattr(connection, CURSOR, Cursor(raw))
