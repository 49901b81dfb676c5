"""Private database connections, which no transaction, request or pool of the caller touches."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from django.db import Error, InterfaceError, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core.runtime import cut, watchdog
from ..core.transactions import test_connection
from . import prepared

T = TypeVar("T")

#: How many connections one `Sessions` may use at once, and keep.
MOST = 10
KEPT = 2

#: Connections of a parent process. Never closed: closing says good-bye to the server in the
#: parent's name; never collected, since some drivers close when they are.
_of_parents: list[Any] = []


def private(using: str, timeout: float) -> BaseDatabaseWrapper:
    """
    Copy the connection `using`: same server and user, nothing else shared.

    It isn't registered in ``connections``, so neither ``close_old_connections()`` nor Celery's
    clean-up closes it, and Django's pool never lends its session to anybody.
    """
    original = connections[using]
    copy = original.copy()
    settings = copy.settings_dict
    settings.update(
        ATOMIC_REQUESTS=False, AUTOCOMMIT=True, CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False
    )
    options = settings["OPTIONS"]
    options.pop("pool", None)
    prepare = {"postgresql": _postgres, "mysql": _mysql, "sqlite": _sqlite}
    prepare[original.vendor](options, timeout)
    if original.vendor == "mysql":
        _bound_row_waits(copy)
    # Checked out by one thread at a time, though not always by the one that opened it.
    copy.inc_thread_sharing()
    return copy


def _postgres(options: dict[str, Any], timeout: float) -> None:
    # Under a stricter level a grant that waited for a row would fail with 40001.
    options.pop("isolation_level", None)
    options.setdefault("connect_timeout", max(2, math.ceil(timeout)))
    options.setdefault("keepalives", 1)
    options.setdefault("tcp_user_timeout", int(timeout * 1000))


def _mysql(options: dict[str, Any], timeout: float) -> None:
    options["isolation_level"] = "read committed"
    for key in ("connect_timeout", "read_timeout", "write_timeout"):
        options.setdefault(key, math.ceil(timeout))


def _bound_row_waits(connection: BaseDatabaseWrapper) -> None:
    """Let a statement wait a second for a row, the least that MySQL knows, and not fifty."""
    init = connection.init_connection_state

    def init_and_bound() -> None:
        init()
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")

    connection.init_connection_state = init_and_bound  # type: ignore[method-assign]


def _sqlite(options: dict[str, Any], timeout: float) -> None:
    # Transactions are begun by the statements themselves.
    options.pop("transaction_mode", None)
    options.setdefault("timeout", timeout)


def under_test() -> bool:
    """Whether a test runner is about, which will want to drop the database in the end."""
    # Not imported for it: that would bring all of django.test into every process that locks.
    utils: Any = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")


class Sessions:
    """A few private connections to one database, lent out for a statement or two at a time."""

    def __init__(self, using: str, timeout: float) -> None:
        self.using = using
        self.timeout = timeout
        self._reset()

    def _reset(self) -> None:
        self._idle: list[BaseDatabaseWrapper] = []
        # Taken and given back by one call each, of C; a semaphore of Python's makes a dozen.
        self._room = [True] * MOST
        #: One more, for renewals: claims that wait for locked rows may have taken all others.
        self._spare = [True]
        self._waiting = 0
        self._left = threading.Condition()
        self._prepares = True

    def run(self, work: Callable[[BaseDatabaseWrapper], T], *, renews: bool = False) -> T:
        """
        Do `work` with a connection, again with a fresh one if an idle one turned out dead.

        So `work` may be done twice: it has to be idempotent. If it `renews` leases, there is one
        place more for it.
        """
        place: list[bool] = []
        spare: list[bool] = []
        try:
            if not (
                _take(self._room, place)
                or (renews and _take(self._spare, spare))
                or self._wait_for_room(place)
            ):
                raise OperationalError(
                    f"all {MOST} private connections to {self.using!r} were busy for "
                    f"{self.timeout:g} s"
                )
            if idle := self._idle_one():
                try:
                    return self._do(work, idle, was_idle=True)
                except _DeadWhileIdle:
                    pass  # Its successor is asked instead.
            return self._do(work, private(self.using, self.timeout), was_idle=False)
        finally:
            try:
                self._room.extend(place)
            finally:
                self._spare.extend(spare)
            # In this order: whoever is about to wait looks at the one after he set the other.
            if self._waiting:
                with self._left:
                    self._left.notify()

    def close(self) -> None:
        """Close what is idle."""
        while connection := self._idle_one():
            connection.close()

    def forget_after_fork(self) -> None:
        _of_parents.extend(self._idle)
        self._reset()

    def _wait_for_room(self, place: list[bool]) -> bool:
        with self._left:
            self._waiting += 1
            try:
                return self._left.wait_for(partial(_take, self._room, place), self.timeout)
            finally:
                self._waiting -= 1

    def _idle_one(self) -> BaseDatabaseWrapper | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _do(
        self,
        work: Callable[[BaseDatabaseWrapper], T],
        connection: BaseDatabaseWrapper,
        *,
        was_idle: bool,
    ) -> T:
        late: list[bool] = []
        keep = False
        watch = None
        # SQLite has nobody to wait for but another writer, and a time-out of its own for that.
        if connection.vendor != "sqlite":
            watch = watchdog.begin(self.timeout, partial(_cut, connection, late))
        try:
            try:
                if self._prepares and not was_idle and not under_test():
                    # Not for one that is closed after its use: it takes a round trip to know.
                    prepared.allow(connection)
                done = work(connection)
            finally:
                if watch is not None:
                    watchdog.end(watch)
            keep = True
            return done
        except Error as exc:
            if prepared.met_another_session(connection, exc):
                # Through a pooler that passed for the server.
                self._prepares = False
                raise _DeadWhileIdle from exc
            if was_idle and prepared.is_outdated(connection, exc):
                raise _DeadWhileIdle from exc
            keep = not isinstance(exc, OperationalError | InterfaceError) or _usable(connection)
            if was_idle and not keep:
                raise _DeadWhileIdle from exc
            if late:
                raise NoAnswer(self.timeout) from exc
            raise
        finally:
            # Any other exception (a killed greenlet, a timer in the thread) may have struck
            # in mid-statement; such a session can't be used again.
            self._take_back(connection, keep)

    def _take_back(self, connection: BaseDatabaseWrapper, keep: bool) -> None:
        if keep and len(self._idle) < KEPT and not under_test():
            self._idle.append(connection)
        else:
            with contextlib.suppress(Error):
                connection.close()


def _take(room: list[bool], place: list[bool]) -> bool:
    """Move a place from `room` to `place`, if there is one."""
    try:
        # By one call of C: who is struck after it has the place where it is given back from.
        place.extend(map(list.pop, (room,)))
    except IndexError:
        return False
    return True


class _DeadWhileIdle(Exception):
    """An idle connection turned out to be of no use: the work is to be done on a fresh one."""


def _usable(connection: BaseDatabaseWrapper) -> bool:
    return connection.connection is not None and connection.is_usable()


class NoAnswer(OperationalError):
    """A server didn't answer in time, and was cut off. Its driver says that the server was it."""

    def __init__(self, seconds: float, blocker: str = "") -> None:
        super().__init__(f"no answer within {seconds:g} s" + (f": {blocker}" if blocker else ""))
        self.seconds = seconds
        self.blocker = blocker

    def __reduce__(self) -> Any:
        return type(self), (self.seconds, self.blocker)


def _cut(connection: BaseDatabaseWrapper, late: list[bool]) -> None:
    late.append(True)
    raw = connection.connection
    # MySQL's drivers have time-outs of their own.
    if raw is not None and connection.vendor == "postgresql":
        with contextlib.suppress(Exception):
            cut(raw.fileno())


def ask(using: str, timeout: float, work: Callable[[BaseDatabaseWrapper], T]) -> T:
    """Do `work` within `timeout` seconds, with a connection of its own that isn't kept."""
    asking = Sessions(using, timeout)
    try:
        return asking.run(work)
    finally:
        asking.close()


@contextlib.contextmanager
def bounded(using: str, timeout: float) -> Iterator[None]:
    """
    Have whatever this thread asks database `using` be answered within `timeout` seconds, or fail.

    The project's own connection, which may have no limit at all, is put aside meanwhile. SQLite
    has nobody to wait for; and what a test has in its transaction is to be seen there alone.
    """
    original = connections[using]
    if original.vendor == "sqlite" or test_connection(using) is not None:
        yield
        return
    own = connections[using] = private(using, timeout)
    try:
        with own.execute_wrapper(partial(_in_time, timeout)):
            yield
    finally:
        connections[using] = original
        with contextlib.suppress(Error):
            own.close()


def _in_time(timeout: float, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    late: list[bool] = []
    try:
        with watchdog.limit(timeout, partial(_cut, context["connection"], late)):
            return execute(sql, params, many, context)
    except Error as exc:
        if late:
            raise NoAnswer(timeout) from exc
        raise


_all: dict[tuple[str, float], Sessions] = {}


def sessions(using: str, timeout: float) -> Sessions:
    """The process's private connections to database `using`."""
    found = _all.get((using, timeout))
    return found or _all.setdefault((using, timeout), Sessions(using, timeout))


def close_all() -> None:
    """Close every idle private connection of this process."""
    for each in _all.values():
        each.close()


def _forget_after_fork() -> None:
    for each in _all.values():
        each.forget_after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)
