"""Findings of the system checks, as the doctor tells them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader

from .. import checks, conf
from ..core.runtime import clock
from ..findings import Finding, Level, error, note, of_clock, ok, warning
from ..models.checks import has_tables, table_problems
from ..storage.connections import query_once, time_limited
from ..storage.dialect import FENCE, HELD
from ..storage.fences import FORCED
from ..storage.history import EVENTS
from ..storage.message_records import DELIVERY
from ..storage.pending_runs import DUTY
from ..storage.vendors import ledger_for
from . import probe
from .probe import of_problems

#: The most that a connection may take, whatever the limit is.
CONNECTING = 5.0

APP = "django_fencedlock"
_ALL = ("SELECT", "INSERT", "UPDATE", "DELETE")
_NEEDED = {
    FENCE: ("SELECT", "INSERT", "UPDATE"),
    HELD: _ALL,
    # Whoever loses a lease looks there why, and whoever renews session locks.
    FORCED: ("SELECT",),
}
#: What locks do without; and what is missing then.
_WANTED = {
    FORCED: (("INSERT", "DELETE"), "it can't take a lock from its holder by force"),
    EVENTS: (("SELECT", "INSERT", "DELETE"), "the history of locks is left out"),
    DELIVERY: (_ALL, "its workers may run a message again that was run before"),
    DUTY: (_ALL, 'its tasks with on_conflict="coalesce" fail'),
}


def examine_database(database: str, limit: float) -> Iterator[Finding]:
    """Examine a database of fences, within `limit` seconds."""
    try:
        # On a connection with limits of its own: the project's may have none.
        yield from query_once(database, min(limit, CONNECTING), _server)
    except Error as exc:
        yield error(
            f"can't be asked: {str(exc).strip()}", "Start the database, or mend its settings."
        )
        return
    with time_limited(database, limit):
        found = [*_tables(database), *of_problems(table_problems([database]))]
    yield from found


def examine_rows(database: str, limit: float) -> Iterator[Finding]:
    """Look at the fenced tables of a database that has no fences; nothing if it has none."""
    try:
        with time_limited(database, min(limit, CONNECTING)):
            if not has_tables(database):
                return
            found = list(of_problems(table_problems([database])))
    except Error as exc:
        yield warning(
            f"can't be asked whether its fenced tables are as they should be: {str(exc).strip()}",
            "Start the database, or mend its settings, if fenced models have rows there.",
        )
        return
    yield from found or [ok("its fenced tables are as the models and the migrations say")]


def _server(connection: BaseDatabaseWrapper) -> list[Finding]:
    connection.ensure_connection()
    return [
        _clock(connection),
        *_durability(connection),
        *_pooler(connection),
        *_locked(connection),
    ]


def _locked(connection: BaseDatabaseWrapper) -> Iterator[Finding]:
    if who := ledger_for(connection).tables_locked_by(connection):
        yield warning(
            f"somebody keeps locks from being taken and renewed: {who}",
            "Wait until that has ended, or end it.",
        )


def _clock(connection: BaseDatabaseWrapper) -> Finding:
    before, began = datetime.now(UTC), clock()
    theirs = ledger_for(connection).now(connection)
    seconds = clock() - began
    ahead = (theirs - before).total_seconds() - seconds / 2
    return of_clock(ahead, f"answers in {seconds * 1000:.1f} ms; ")


# Tables


def _tables(database: str) -> Iterator[Finding]:
    connection = connections[database]
    loader = MigrationLoader(connection)
    applied = loader.applied_migrations or {}
    missing = sorted(
        name for app, name in loader.graph.nodes if app == APP and (app, name) not in applied
    )
    if missing:
        yield error(
            f"migrations of {APP} aren't applied: {', '.join(missing)}",
            f"Run: manage.py migrate {APP} --database {database}",
        )
        return
    if without := _missing(connection):
        yield error(
            f"has no {', '.join(without)}, though the migrations count as applied there: a router "
            "keeps the tables out",
            f"Have DATABASE_ROUTERS allow {APP} in {database!r}, and run: manage.py migrate {APP} "
            f"zero --fake --database {database}, then without zero --fake",
        )
        return
    yield ok("its migrations are applied")
    yield from _privileges(connection)


def _missing(connection: BaseDatabaseWrapper) -> list[str]:
    with connection.cursor() as cursor:
        present = connection.introspection.table_names(cursor)
    return sorted({*_NEEDED, *_WANTED}.difference(present))


def _privileges(connection: BaseDatabaseWrapper) -> Iterator[Finding]:
    if connection.vendor != "postgresql":
        return  # There, the probe finds out.
    for table, needed in _NEEDED.items():
        if found := _lacking(connection, table, needed):
            yield error(*found)
    for table, (wanted, harm) in _WANTED.items():
        if found := _lacking(connection, table, wanted):
            what, remedy = found
            yield warning(f"{what}: {harm}", remedy)


def _lacking(
    connection: BaseDatabaseWrapper, table: str, needed: Sequence[str]
) -> tuple[str, str] | None:
    """What privileges a role hasn't got, and the statement that gives them."""
    without = ", ".join(each for each in needed if not _may(connection, table, each))
    if not without:
        return None
    user = _one(connection, "SELECT current_user")
    to = connection.ops.quote_name(user)
    return f"the role {user!r} lacks {without} on {table}", f"GRANT {without} ON {table} TO {to};"


def _may(connection: BaseDatabaseWrapper, table: str, privilege: str) -> bool:
    return bool(_one(connection, "SELECT has_table_privilege(%s, %s)", table, privilege))


# Durability


def _durability(connection: BaseDatabaseWrapper) -> Iterator[Finding]:
    look = {"postgresql": _of_postgres, "mysql": _of_mysql, "sqlite": _of_sqlite}
    found = list(look[connection.vendor](connection))
    yield from found or [ok("keeps what it has committed, by its settings")]


def _of_postgres(connection: BaseDatabaseWrapper) -> Iterator[Finding]:
    if _one(connection, "SELECT pg_is_in_recovery()"):
        yield error("is a standby, which takes no writes", "Name the primary.")
    for setting, harm in (
        ("fsync", "a crash of the machine can damage it, and lose grants that were answered"),
        ("full_page_writes", "a crash of the machine can damage it"),
    ):
        if _one(connection, "SELECT current_setting(%s)", setting) != "on":
            yield warning(f"{setting} is off: {harm}", f"Set {setting} = on on the server.")
    level = _one(connection, "SELECT current_setting('synchronous_commit')")
    if level == "off":
        yield note(
            "synchronous_commit is off: a crash can undo the last commits of your own writes. "
            "Grants set it on for themselves, so tokens stay unique."
        )


def _of_mysql(connection: BaseDatabaseWrapper) -> Iterator[Finding]:
    if _one(connection, "SELECT @@read_only"):
        yield note("read_only is set: only privileged users write")
    flush = _one(connection, "SELECT @@innodb_flush_log_at_trx_commit")
    if int(flush) != 1:
        yield warning(
            f"innodb_flush_log_at_trx_commit is {flush}: a crash can lose grants that were "
            "answered, and hand their tokens out again",
            "Set innodb_flush_log_at_trx_commit = 1 on the server.",
        )


def _of_sqlite(connection: BaseDatabaseWrapper) -> Iterator[Finding]:
    # Of this very connection; the project's has the same settings.
    level = int(_one(connection, "PRAGMA synchronous"))
    if level == 0:
        yield warning(
            "PRAGMA synchronous is OFF: a crash of the machine can damage the file",
            "Set it to NORMAL with journal_mode=WAL, or to FULL.",
        )
    if _one(connection, "PRAGMA journal_mode") != "wal":
        yield note(
            "journal_mode isn't WAL: readers and the one writer wait for each other",
            'Add "init_command": "PRAGMA journal_mode=WAL" to OPTIONS.',
        )


def _pooler(connection: BaseDatabaseWrapper) -> Iterator[Finding]:
    if connection.vendor != "postgresql":
        return
    raw: Any = connection.connection
    info = getattr(raw, "info", None)
    # psycopg 3 and 2 call it alike; a pooler tells a number of its own.
    if info is not None and info.backend_pid != _one(connection, "SELECT pg_backend_pid()"):
        yield note(
            "is reached through a pooler, which is fine for grants and fenced writes. Session "
            "locks (the postgres backend) need a direct connection, or a pooler of sessions."
        )


def _one(connection: BaseDatabaseWrapper, sql: str, *given: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql, given or None)
        return cursor.fetchone()[0]


__all__ = ["LIMIT", "Report", "examine"]

#: Seconds for each alias and each database.
LIMIT = 20.0


@dataclass
class Report:
    """What was found about one thing."""

    about: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def level(self) -> Level:
        return max((finding.level for finding in self.findings), default=Level.OK)


def examine(aliases: Sequence[str] = (), limit: float = LIMIT) -> Iterator[Report]:
    """
    Examine settings, models and tasks, then the fences' databases, then each alias.

    Where no alias is named, the other databases that have fenced tables, too.
    """
    yield Report("settings, models and tasks", list(_code()))
    if any(problem.is_error for problem in conf.problems()):
        return
    broken = set()
    configs = [conf.config(alias) for alias in aliases or conf.aliases()]
    with_fences = list(dict.fromkeys(config.fence_database for config in configs))
    for database in with_fences:
        report = Report(f"database {database!r}", list(examine_database(database, limit)))
        yield report
        if report.level is Level.ERROR:
            broken.add(database)
    for database in [] if aliases else connections:
        if database not in with_fences:
            found = list(examine_rows(database, limit))
            if found:
                yield Report(f"database {database!r} (rows alone)", found)
    for config in configs:
        label = conf.backend_class(config.backend).label
        report = Report(f"alias {config.alias!r} ({label})")
        if config.fence_database in broken:
            report.findings.append(_untried(config.fence_database))
        else:
            report.findings += probe.examine(config, clock() + limit)
        yield report


def _code() -> Iterator[Finding]:
    found = checks.problems()
    yield from of_problems(found)
    if not found:
        yield ok("this package's checks of settings, models and Celery tasks found nothing")


def _untried(database: str) -> Finding:
    return error(
        f"not tried: its grants are recorded in database {database!r}",
        "See to that database first.",
    )
