"""What fences rest on in their database: tables, privileges, durability, clock, constraints."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader

from .. import model_checks
from ..fences import ledger_for
from ..fences.ledger import FENCE, HELD
from ..fences.revoking import FORCED
from ..findings import Finding, error, note, ok, warning
from ..lease import clock
from ..sessions import ask
from .problems import of_problems

#: Seconds by which two clocks may differ without a word.
CLOCKS = 2.0
#: The most that a connection may take, whatever the limit is.
CONNECTING = 5.0

APP = "django_fencedlock"
_NEEDED = {
    FENCE: ("SELECT", "INSERT", "UPDATE"),
    HELD: ("SELECT", "INSERT", "UPDATE", "DELETE"),
    # Whoever loses a lease looks there why, and whoever renews session locks.
    FORCED: ("SELECT",),
}


def examine(database: str, limit: float) -> Iterator[Finding]:
    """Examine a database of fences, within `limit` seconds."""
    try:
        # On a connection with limits of its own: the project's may have none.
        yield from ask(database, min(limit, CONNECTING), _server)
    except Error as exc:
        yield error(
            f"can't be asked: {str(exc).strip()}", "Start the database, or mend its settings."
        )
        return
    yield from _tables(database)
    yield from of_problems(model_checks.database_problems([database]))


def _server(connection: BaseDatabaseWrapper) -> list[Finding]:
    connection.ensure_connection()
    return [_clock(connection), *_durability(connection), *_pooler(connection)]


def _clock(connection: BaseDatabaseWrapper) -> Finding:
    before, began = datetime.now(UTC), clock()
    theirs = ledger_for(connection).now(connection)
    seconds = clock() - began
    ahead = (theirs - before).total_seconds() - seconds / 2
    what = f"answers in {seconds * 1000:.1f} ms; its clock differs by {abs(ahead):.1f} s"
    if abs(ahead) <= CLOCKS:
        return ok(what)
    return warning(
        f"{what} ({'ahead' if ahead > 0 else 'behind'})",
        "Locks are right all the same, since leases go by one clock each; times in logs and lists "
        "can't be compared. Keep both by NTP.",
    )


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
    yield ok("its migrations are applied")
    yield from _privileges(connection)


def _privileges(connection: BaseDatabaseWrapper) -> Iterator[Finding]:
    if connection.vendor != "postgresql":
        return  # There, the probe finds out.
    for table, needed in _NEEDED.items():
        without = [each for each in needed if not _may(connection, table, each)]
        if without:
            user = _one(connection, "SELECT current_user")
            yield error(
                f"the role {user!r} lacks {', '.join(without)} on {table}",
                f"GRANT {', '.join(without)} ON {table} TO {user};",
            )


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
