"""Examine settings, databases and lock services for ``manage.py fencedlock doctor``."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

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
from ..storage.vendors import LEDGERS
from .registry import fence_databases

#: Seconds for each alias, and for one query of a database.
LIMIT, QUERY_TIMEOUT = 20.0, 5.0
#: The name of the test lock, always the same: its fence is never deleted. So are those of a permit
#: and of readers.
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


class Report(NamedTuple):
    """The results for one database, one alias, or the project's code."""

    about: str
    problems: list[Problem]

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
    wanted = aliases or conf.aliases()
    with_fences = fence_databases(wanted)
    for database in with_fences:
        yield (report := Report(f"database {database!r}", list(_database(database, limit))))
        if report.level is Level.ERROR:
            broken.add(database)
    for database in [] if aliases else set(connections).difference(with_fences):
        if found := list(_database(database, limit, has_fences=False)):
            yield Report(f"database {database!r} (only fenced tables)", found)
    for config in map(conf.config, wanted):
        about = f"alias {config.alias!r} ({conf.backend_class(config.backend).label})"
        if config.fence_database in broken:
            what = f"Not tried: it records its grants in database {config.fence_database!r}."
            yield Report(about, [error(what, "Fix that database first.")])
        else:
            yield Report(about, list(_alias(config, clock() + limit)))


# Databases


def _database(database: str, limit: float, has_fences: bool = True) -> Iterator[Problem]:
    """Examine a database; yield nothing if it has neither fences nor fenced tables."""
    try:
        # The project's own connection may have no time limits.
        with time_limited(database, min(limit, QUERY_TIMEOUT)):
            if has_fences:
                yield from _server(connections[database])
                yield from _tables(database)
                yield from table_problems([database])
            elif has_tables(database):
                healthy = ok("Its fenced tables match the models and the migrations.")
                yield from list(table_problems([database])) or [healthy]
    except Error as exc:
        report = error if has_fences else warning
        yield report(f"Unavailable: {str(exc).strip()}", "Start the database, or fix its settings.")


def _server(connection: BaseDatabaseWrapper) -> Iterator[Problem]:
    connection.ensure_connection()
    ledger, before, began = LEDGERS[connection.vendor], datetime.now(UTC), clock()
    ahead = (ledger.now(connection) - before).total_seconds()
    seconds = clock() - began
    yield clock_problem(ahead - seconds / 2, f"Answers in {_ms(seconds)}; ")
    query, safe = DURABILITY[connection.vendor]
    for setting, values in safe.items():
        found = str(_value(connection, query.format(setting)))
        if found not in values:
            yield warning(
                f"{setting} is {found}: a crash can damage the data, or lose grants, whose tokens "
                "would be granted again.",
                f"Set {setting} = {values[0]}.",
            )
    if who := ledger.tables_locked_by(connection):
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
            f"Its migrations are applied, but a database router keeps the tables out: {without}.",
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


class TestOwner:
    """An owner of the test lock, with a client of its own."""

    grant: Any = None

    def __init__(self, config: AliasConfig) -> None:
        self.service = Service(config.alias, conf.backend_class(config.backend)(config))
        self.backend: Backend = self.service.backend
        self.name = LOCK_NAME.format(alias=config.alias)

    def acquire(self, timeout: float = 0.0) -> bool:
        if (grant := self.take(timeout)) is None:
            return False
        self.grant = grant
        return True

    def take(self, timeout: float = 0.0, **kind: Any) -> Grant | None:
        """Acquire the test lock, or one of another kind."""
        claim = new_claim(self.name, TTL, owner=new_owner()._replace(thread="doctor"))
        claim = claim._replace(**kind)
        found = self.service.permits if claim.permits else self.service.grants
        answer = found.acquire(claim, Wait(timeout))
        return None if isinstance(answer, Held) else answer[0]

    def release(self, grant: Grant) -> None:
        self.backend.release(grant)
        self.service.keeper.clear_row(grant)

    def answers(self) -> set[bool]:
        """Return whether the grant is verified, and whether it is renewed."""
        kept = self.backend.renew([self.grant]) == [Renewal.KEPT]
        return {self.backend.verify(self.grant), kept}

    def close(self) -> None:
        """Release the lock; only the fence of its name remains."""
        with contextlib.suppress(FencedLockError):
            if self.grant is not None:
                self.backend.release(self.grant)
        with contextlib.suppress(FencedLockError):
            self.service.keeper.clear()
            self.backend.close()


def _alias(config: AliasConfig, until: float) -> Iterator[Problem]:
    """Try one alias with two owners; end soon after `until`, on the clock of leases."""
    first, second = TestOwner(config), TestOwner(_apart(config))
    try:
        for problem in _trial(first, second):
            if clock() > until:
                hint = "The service is slow: look at its load and the network, or raise --timeout."
                raise _Failed("The examination took too long.", hint)
            yield problem
    except _Failed as exc:
        yield error(*exc.args)
    except FencedLockError as exc:
        yield error(str(exc), "Start the service, or fix the settings of the alias.")
    finally:
        first.close()
        second.close()


def _apart(config: AliasConfig) -> AliasConfig:
    """Return settings whose backend shares no session with the one for `config`."""
    if "TIMEOUT" not in conf.backend_class(config.backend).option_names:
        return config
    # Backends with the same timeout share a session. It would refuse the second owner itself,
    # without asking the server.
    return replace(config, options={**config.options, "TIMEOUT": config.timeout + 0.001})


def _trial(first: TestOwner, second: TestOwner) -> Iterator[Problem]:
    """Let the first owner acquire, renew and hand over the test lock, and the second release it."""
    problems = list(first.backend.check())
    yield from problems
    if any(problem.id == UNREACHABLE for problem in problems):
        return
    yield _round_trip(first)
    began = clock()
    if not first.acquire(OTHER_DOCTOR_TIMEOUT):
        yield warning(
            f"The test lock {first.name!r} is held by {first.service.holder(first.name)}.",
            "Another doctor may be running. Try again later.",
        )
        return
    yield ok(f"Acquires a lock: {_ms(clock() - began)}, token {first.grant.token}.")
    if second.acquire():
        tokens = f"{first.grant.token} and {second.grant.token}"
        raise _Failed(f"Two owners hold one lock (tokens {tokens}).", _DISTRUST)
    yield ok("Rejects a second owner.")
    began = clock()
    if first.answers() != {True}:
        raise _Failed("The service doesn't know the owner that holds the lock.", _DISTRUST)
    yield ok(f"Verifies and renews: {_ms(clock() - began)}.")
    yield from _try_permit(first, second)
    if first.backend.supports_shared:
        yield from _try_readers(first, second)
    yield _hand_over(first, second)
    if not second.backend.supports_waiting:
        yield note("Waiters poll, so they acquire the lock in no particular order.")
    if first.answers() != {False}:
        raise _Failed("The service still accepts the former owner as the holder.", _DISTRUST)
    began = clock()
    released = second.backend.release(second.grant)
    took = clock() - began
    second.service.keeper.clear_row(second.grant)
    if not released or second.service.holder(second.name):
        raise _Failed("The lock isn't free after its release.", _DISTRUST)
    yield ok(f"Rejects the former owner, and releases: {_ms(took)}.")


def _try_permit(first: TestOwner, second: TestOwner) -> Iterator[Problem]:
    began = clock()
    # Of a doctor that was killed, the permit may be left.
    if not (permit := first.take(OTHER_DOCTOR_TIMEOUT, permits=1)):
        raise _Failed("A free permit (limit=) can't be acquired.", _DISTRUST)
    try:
        if other := second.take(permits=1):
            second.release(other)
            raise _Failed("Two owners hold one permit (limit=).", _DISTRUST)
    finally:
        first.release(permit)
    yield ok(f"Acquires a permit, and rejects a second owner: {_ms(clock() - began)}.")


def _try_readers(first: TestOwner, second: TestOwner) -> Iterator[Problem]:
    if reader := second.take(shared=True):
        second.release(reader)
        raise _Failed("A reader (shared=True) got a lock that is held exclusively.", _DISTRUST)
    began, name = clock(), f"{first.name}:readers"
    readers = [(each, each.take(name=name, shared=True)) for each in (first, second)]
    for owner, grant in readers:
        if grant:
            owner.release(grant)
    if not all(grant for _, grant in readers):
        raise _Failed("Two readers (shared=True) can't share a free lock.", _DISTRUST)
    yield ok(f"Lets two readers share a lock: {_ms(clock() - began)}.")


def _round_trip(owner: TestOwner) -> Problem:
    times = []
    for _ in range(ROUND_TRIPS):
        began = clock()
        owner.backend.holders([owner.name])
        times.append(clock() - began)
    median = statistics.median(times)
    what = f"Round trip {_ms(median)} (slowest of {ROUND_TRIPS}: {_ms(max(times))})."
    if median < SLOW:
        return ok(what)
    return warning(what, "Move the lock service closer, or reduce its load.")


def _hand_over(first: TestOwner, second: TestOwner) -> Problem:
    with ThreadPoolExecutor(1, thread_name_prefix="fencedlock-doctor") as thread:
        waiter = thread.submit(second.acquire, HAND_OVER_TIMEOUT)
        # If it doesn't wait by then, it acquires the lock all the same.
        time.sleep(QUEUE_DELAY)
        began = clock()
        first.backend.release(first.grant)
        if not waiter.result():
            raise _Failed(
                "The lock was released, but the second owner could not acquire it.",
                "Look for an open transaction that locks the fence: manage.py fencedlock show "
                f"{for_shell(first.name)}",
            )
    tokens = f"token {second.grant.token} after {first.grant.token}"
    if (second.grant.token or 0) <= (first.grant.token or 0):
        hint = "Restore the fences: see docs/guides/troubleshooting.md."
        raise _Failed(f"The second owner got {tokens}: tokens must rise.", hint)
    return ok(f"Hands over to a waiter: {_ms(clock() - began)}, {tokens}.")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
