"""Examine settings, databases and lock services for ``manage.py fencedlock doctor``."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from django.apps import apps
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader

from .. import checks, conf
from ..backends.interface import Backend, Grant, Held, Renewal, Wait
from ..conf import AliasConfig
from ..core.grants import new_claim
from ..core.identity import new_owner
from ..core.manager import Service
from ..core.runtime import clock
from ..exceptions import FencedLockError
from ..models.checks import has_tables, table_problems
from ..problems import Level, Problem, clock_problem, error, note, ok, warning
from ..storage.connections import time_limited
from ..storage.tables import Fence, HeldLock
from ..storage.text import for_shell
from ..storage.vendors import ledger_for

T = TypeVar("T")

#: Seconds for each alias and each database.
LIMIT = 20.0
#: Seconds for a connection to a database.
CONNECT_TIMEOUT = 5.0
#: The name of the test lock, always the same: its fence is never deleted.
LOCK_NAME = "django_fencedlock.doctor:{alias}"
#: Seconds until the test lock expires if the doctor is killed.
TTL = 10.0
#: Seconds to wait for the test lock of another doctor.
OTHER_DOCTOR_TIMEOUT = 5.0
#: Seconds for the second owner to enter the queue, and to acquire the lock.
QUEUE_DELAY, HAND_OVER_TIMEOUT = 0.1, 5.0
#: The number of measured round trips, and the seconds above which their median is a warning.
ROUND_TRIPS, SLOW = 7, 0.1
#: The problem of an unreachable service. Waiting for it a second time would reveal nothing more.
UNREACHABLE = "E013"

APP = "django_fencedlock"
#: How to read a setting of a server, and the values by which committed grants survive a crash.
DURABILITY: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "postgresql": ("SHOW {}", {"fsync": ("on",), "full_page_writes": ("on",)}),
    "mysql": ("SELECT @@{}", {"innodb_flush_log_at_trx_commit": ("1",)}),
    "sqlite": ("PRAGMA {}", {"synchronous": ("2", "1", "3")}),
}


@dataclass
class Report:
    """The results for one database, one alias, or the project's code."""

    about: str
    problems: list[Problem] = field(default_factory=list)

    @property
    def level(self) -> Level:
        return max((problem.level for problem in self.problems), default=Level.OK)


def examine(aliases: Sequence[str] = (), limit: float = LIMIT) -> Iterator[Report]:
    """
    Examine settings, models and tasks, then the fence databases, then each alias.

    Without `aliases`, also examine the other databases that have fenced tables.
    """
    found = checks.problems()
    healthy = ok("The checks of settings, models and Celery tasks found no problem.")
    yield Report("settings, models and tasks", found or [healthy])
    if any(problem.is_error for problem in conf.problems()):
        return
    broken = set()
    configs = [conf.config(alias) for alias in aliases or conf.aliases()]
    with_fences = list(dict.fromkeys(config.fence_database for config in configs))
    for database in with_fences:
        yield (report := Report(f"database {database!r}", list(_database(database, limit))))
        if report.level is Level.ERROR:
            broken.add(database)
    for database in [] if aliases else set(connections).difference(with_fences):
        if found := list(_database(database, limit, has_fences=False)):
            yield Report(f"database {database!r} (only fenced tables)", found)
    for config in configs:
        about = f"alias {config.alias!r} ({conf.backend_class(config.backend).label})"
        if config.fence_database in broken:
            what = f"Not tried: it records its grants in database {config.fence_database!r}."
            yield Report(about, [error(what, "Fix that database first.")])
        else:
            yield Report(about, list(_alias(config, clock() + limit)))


# Databases


def _database(database: str, limit: float, has_fences: bool = True) -> Iterator[Problem]:
    """Examine a database; yield nothing if it has neither fences nor fenced tables."""
    brief, found = min(limit, CONNECT_TIMEOUT), []
    try:
        if has_fences:
            # The project's own connection may have no time limits.
            with time_limited(database, brief):
                facts = _server(connections[database])
            yield from facts
        with time_limited(database, limit if has_fences else brief):
            if has_fences:
                found = [*_tables(database), *table_problems([database])]
            elif has_tables(database):
                healthy = ok("Its fenced tables match the models and the migrations.")
                found = list(table_problems([database])) or [healthy]
    except Error as exc:
        report = error if has_fences else warning
        yield report(f"Unavailable: {str(exc).strip()}", "Start the database, or fix its settings.")
    yield from found


def _server(connection: BaseDatabaseWrapper) -> list[Problem]:
    connection.ensure_connection()
    before, began = datetime.now(UTC), clock()
    theirs = ledger_for(connection).now(connection)
    seconds = clock() - began
    ahead = (theirs - before).total_seconds() - seconds / 2
    return [
        clock_problem(ahead, f"Answers in {_ms(seconds)}; "),
        *(list(_durability(connection)) or [ok("Its settings keep committed data after a crash.")]),
        *_obstacles(connection),
    ]


def _durability(connection: BaseDatabaseWrapper) -> Iterator[Problem]:
    query, safe = DURABILITY[connection.vendor]
    for setting, values in safe.items():
        found = str(_value(connection, query.format(setting)))
        if found not in values:
            yield warning(
                f"{setting} is {found}: a crash can damage the data, or lose grants, whose tokens "
                "would be granted again.",
                f"Set {setting} = {values[0]}.",
            )


def _obstacles(connection: BaseDatabaseWrapper) -> Iterator[Problem]:
    if who := ledger_for(connection).tables_locked_by(connection):
        hint = "Wait until that has ended, or end it."
        yield warning(f"Locks can't be acquired or renewed: {who}", hint)
    # A pooler reports a process id of its own. psycopg 2 and 3 have the same attribute.
    info = getattr(cast(Any, connection.connection), "info", None)
    if info is not None and info.backend_pid != _value(connection, "SELECT pg_backend_pid()"):
        yield note(
            "The connection goes through a pooler. Grants and fenced writes work. The postgres "
            "backend needs a direct connection, or a session pooler."
        )


def _tables(database: str) -> Iterator[Problem]:
    connection = connections[database]
    loader = MigrationLoader(connection)
    unapplied = set(loader.graph.nodes).difference(loader.applied_migrations or ())
    if missing := ", ".join(sorted(name for app, name in unapplied if app == APP)):
        hint = f"Run: manage.py migrate {APP} --database {database}"
        yield error(f"Migrations of {APP} aren't applied: {missing}", hint)
        return
    tables = {model._meta.db_table for model in apps.get_app_config(APP).get_models()}
    if without := ", ".join(sorted(tables.difference(connection.introspection.table_names()))):
        yield error(
            f"The migrations are applied, but there is no {without}: a database router keeps the "
            "tables out.",
            f"Change DATABASE_ROUTERS to allow {APP} in {database!r}. Run: manage.py migrate {APP} "
            f"zero --fake --database {database}, then the same without zero --fake",
        )
        return
    yield ok("Its migrations are applied.")
    if connection.vendor == "postgresql":  # Elsewhere, the test lock's statements fail.
        yield from _privileges(connection)


def _privileges(connection: BaseDatabaseWrapper) -> Iterator[Problem]:
    user = _value(connection, "SELECT current_user")
    for model in apps.get_app_config(APP).get_models():
        table, asked = model._meta.db_table, "SELECT has_table_privilege(%s, %s)"
        # A fence is never deleted.
        needed = ["SELECT", "INSERT", "UPDATE", *(["DELETE"] if model is not Fence else [])]
        lacking = [each for each in needed if not _value(connection, asked, table, each)]
        if missing := ", ".join(lacking):
            report = error if model in (Fence, HeldLock) else warning
            yield report(
                f"The role {user!r} lacks {missing} on {table}; what uses this table fails.",
                f"GRANT {missing} ON {table} TO {connection.ops.quote_name(user)};",
            )


def _value(connection: BaseDatabaseWrapper, sql: str, *parameters: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters or None)
        return cursor.fetchone()[0]


# Lock services

_DISTRUST = (
    "Don't use this alias. Look for a proxy or a pooler in between, and for two servers behind one "
    "address."
)


class _Failed(Exception):
    """Ends the examination of an alias, with a message and a hint."""


def _alias(config: AliasConfig, until: float) -> Iterator[Problem]:
    """Try one alias; end soon after `until`, on the clock of leases."""
    trial = Trial(config, until)
    try:
        yield from trial.run()
    except _Failed as exc:
        yield error(*exc.args)
    except FencedLockError as exc:
        yield error(str(exc), "Start the service, or fix the settings of the alias.")
    finally:
        trial.close()


class Trial:
    """Two owners with a backend each acquire, renew, hand over and release one lock."""

    def __init__(self, config: AliasConfig, until: float) -> None:
        self._until = until
        self._name = LOCK_NAME.format(alias=config.alias)
        make: Callable[[AliasConfig], Backend] = conf.backend_class(config.backend)
        self._first = Service(config.alias, make(config))
        self._second = Service(config.alias, make(_apart(config)))
        self._held: list[tuple[Backend, Grant]] = []
        #: Seconds of the last step.
        self._took = 0.0

    def run(self) -> Iterator[Problem]:
        problems = self._do(lambda: list(self._first.backend.check()))
        yield from problems
        if any(problem.id == UNREACHABLE for problem in problems):
            return
        yield self._round_trip()
        first = self._do(lambda: self._acquire(self._first, OTHER_DOCTOR_TIMEOUT))
        if first is None:
            yield warning(
                f"The test lock {self._name!r} is held by {self._first.holder(self._name)}.",
                "Another doctor may be running. Try again later.",
            )
            return
        yield ok(f"Acquires a lock: {_ms(self._took)}, token {first.token}.")
        yield from self._hold(first)
        second = yield from self._hand_over(first)
        yield from self._release(first, second)

    def close(self) -> None:
        """Release the lock; only the fence of its name remains."""
        for backend, grant in self._held:
            with contextlib.suppress(FencedLockError):
                backend.release(grant)
        for service in (self._first, self._second):
            with contextlib.suppress(FencedLockError):
                service.keeper.clear()
                service.backend.close()

    def _round_trip(self) -> Problem:
        times = []
        for _ in range(ROUND_TRIPS):
            self._do(lambda: self._first.backend.holders([self._name]))
            times.append(self._took)
        median = statistics.median(times)
        what = f"Round trip {_ms(median)} (slowest of {ROUND_TRIPS}: {_ms(max(times))})."
        if median < SLOW:
            return ok(what)
        return warning(what, "Move the lock service closer, or reduce its load.")

    def _hold(self, first: Grant) -> Iterator[Problem]:
        second = self._do(lambda: self._acquire(self._second))
        if second is not None:
            tokens = f"{first.token} and {second.token}"
            raise _Failed(f"Two owners hold one lock (tokens {tokens}).", _DISTRUST)
        yield ok("Rejects a second owner.")
        if self._answers(first) != {True}:
            raise _Failed("The service doesn't know the owner that holds the lock.", _DISTRUST)
        yield ok(f"Verifies and renews: {_ms(self._took)}.")

    def _hand_over(self, first: Grant) -> Generator[Problem, None, Grant]:
        with ThreadPoolExecutor(1, thread_name_prefix="fencedlock-doctor") as thread:
            waiter = thread.submit(self._acquire, self._second, HAND_OVER_TIMEOUT)
            # If it doesn't wait by then, it acquires the lock all the same.
            time.sleep(QUEUE_DELAY)
            began = clock()
            self._do(lambda: self._first.backend.release(first))
            second = waiter.result()
        if second is None:
            raise _Failed(
                "The lock was released, but the second owner could not acquire it.",
                "Look for an open transaction that locks the fence: manage.py fencedlock show "
                f"{for_shell(self._name)}",
            )
        tokens = f"token {second.token} after {first.token}"
        if (second.token or 0) <= (first.token or 0):
            hint = "Restore the fences: see docs/restore.md."
            raise _Failed(f"The second owner got {tokens}: tokens must rise.", hint)
        yield ok(f"Hands over to a waiter: {_ms(clock() - began)}, {tokens}.")
        if not self._second.backend.supports_waiting:
            yield note("Waiters poll, so they acquire the lock in no particular order.")
        return second

    def _release(self, first: Grant, second: Grant) -> Iterator[Problem]:
        if self._answers(first) != {False}:
            raise _Failed("The service still accepts the former owner as the holder.", _DISTRUST)
        released = self._do(lambda: self._second.backend.release(second))
        took = self._took
        self._held.clear()
        self._second.keeper.clear_row(second)
        if not released or self._do(lambda: self._second.holder(self._name)):
            raise _Failed("The lock isn't free after its release.", _DISTRUST)
        yield ok(f"Rejects the former owner, and releases: {_ms(took)}.")

    def _answers(self, grant: Grant) -> set[bool]:
        """Return whether the first owner's grant is verified, and whether it is renewed."""
        backend = self._first.backend
        kept = [Renewal.KEPT]
        return self._do(lambda: {backend.verify(grant), backend.renew([grant]) == kept})

    def _acquire(self, service: Service, timeout: float = 0.0) -> Grant | None:
        claim = new_claim(self._name, TTL, owner=new_owner()._replace(thread="doctor"))
        answer = service.grants.acquire(claim, Wait(timeout))
        if isinstance(answer, Held):
            return None
        self._held.append((service.backend, answer[0]))
        return answer[0]

    def _do(self, step: Callable[[], T]) -> T:
        """Do a step, which the backend limits in time, and measure it."""
        began = clock()
        if began > self._until:
            hint = "The service is slow: look at its load and the network, or raise --timeout."
            raise _Failed("The examination took too long.", hint)
        result = step()
        self._took = clock() - began
        return result


def _apart(config: AliasConfig) -> AliasConfig:
    """Return settings whose backend shares no session with the one for `config`."""
    if "TIMEOUT" not in conf.backend_class(config.backend).option_names:
        return config
    # Backends with the same timeout share a session. It would refuse the second owner itself,
    # without asking the server.
    return replace(config, options={**config.options, "TIMEOUT": config.timeout + 0.001})


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
