"""Problems of the settings of session locks, and of the server behind them."""

from __future__ import annotations

from collections.abc import Iterator

from django.conf import settings
from django.db import Error, connections

from ...conf import AliasConfig, Problem, location_problems
from . import statements as sql
from .sessions import Session, connect


def settings_problems(config: AliasConfig) -> Iterator[Problem]:
    """Find problems of the settings without asking a server."""
    options, where = config.options, config.where("OPTIONS")
    yield from location_problems(config)
    for option in ("MAX_LOCKS", "MAX_WAITERS"):
        count = options.get(option, 1)
        if not isinstance(count, int) or isinstance(count, bool) or count <= 0:
            yield Problem("E008", f"{where}[{option!r}] is {count!r}.", "Make it an int above 0.")
    yield from _route_problems(config)


def _route_problems(config: AliasConfig) -> Iterator[Problem]:
    option = f"{config.where('OPTIONS')}['DATABASE']"
    route = config.options.get("DATABASE", config.fence_database)
    if route not in settings.DATABASES:
        yield Problem(
            "E008",
            f"{option} is {route!r}, which DATABASES doesn't have.",
            f"Use one of {', '.join(map(repr, settings.DATABASES))}, or leave it out.",
        )
        return
    for where, alias in ((config.where("FENCE_DATABASE"), config.fence_database), (option, route)):
        if (vendor := connections[alias].vendor) != "postgresql":
            yield Problem(
                "E010",
                f"{where} is {alias!r}, a database of vendor {vendor!r}.",
                "Session locks need PostgreSQL. Name such a database, or use the backend "
                "'django_fencedlock.backends.database.DatabaseBackend'.",
            )
            return


def server_problems(config: AliasConfig, route: str, max_locks: int) -> Iterator[Problem]:
    """Look for a pooler, for another database than the fence's, and for a small lock table."""
    try:
        session = connect(route, config.timeout)
    except Error as exc:
        yield Problem(
            "E013",
            f"Database {route!r}, where {config.where()} keeps its session locks, can't be "
            f"reached: {str(exc).strip()}.",
            "Start the database, or correct its settings.",
        )
        return
    try:
        if session.pools_transactions(route):
            yield Problem(
                "E011",
                f"Database {route!r} is reached through a pooler that gives each transaction "
                "another session. Session locks don't work there: two clients get the same lock.",
                f"Add a direct connection to DATABASES, and name its alias in "
                f"{config.where('OPTIONS')}['DATABASE']; or let the pooler pool sessions.",
            )
        yield from _other_database(session, config, route)
        yield from _lock_table(session, config, max_locks)
    finally:
        session.close()


def _other_database(session: Session, config: AliasConfig, route: str) -> Iterator[Problem]:
    if route == config.fence_database:
        return
    other = connect(config.fence_database, config.timeout)
    try:
        here, there = (each.one(sql.DATABASE, {}, prepare=False) for each in (session, other))
    finally:
        other.close()
    if here != there:
        yield Problem(
            "E008",
            f"{config.where('OPTIONS')}['DATABASE'] is {route!r}, which is another database than "
            f"that of FENCE_DATABASE {config.fence_database!r}.",
            "Name another route to the same database.",
        )


def _lock_table(session: Session, config: AliasConfig, max_locks: int) -> Iterator[Problem]:
    connections, locks = session.one(sql.LOCK_TABLE, {}, prepare=False)
    room = connections * locks
    if max_locks > room / 10:
        yield Problem(
            "W001",
            f"One process may hold {max_locks} locks ({config.where('OPTIONS')}['MAX_LOCKS']), "
            f"more than a tenth of the server's lock table: max_connections {connections} times "
            f"max_locks_per_transaction {locks} is {room}. When it is full, no client can connect "
            "any more.",
            f"Set MAX_LOCKS to {room // 10} or less, or raise max_locks_per_transaction.",
        )
