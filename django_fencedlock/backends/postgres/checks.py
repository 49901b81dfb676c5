"""Problems of the settings of session locks, and of the server behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import connections

from ...conf import AliasConfig, Problem, location_problems
from . import statements as sql

if TYPE_CHECKING:
    from .sessions import Session


def settings_problems(config: AliasConfig) -> Iterator[Problem]:
    """Find problems of the settings without asking a server."""
    options, where = config.options, config.where("OPTIONS")
    yield from location_problems(config)
    for option in ("MAX_LOCKS", "MAX_WAITERS"):
        count = options.get(option, 1)
        if not isinstance(count, int) or isinstance(count, bool) or count <= 0:
            yield Problem("E008", f"{where}[{option!r}] is {count!r}.", "Make it an int above 0.")
    named = {config.where("FENCE_DATABASE"): config.fence_database}
    if "DATABASE" in options:
        named[f"{where}['DATABASE']"] = options["DATABASE"]
    for option, alias in named.items():
        if alias not in settings.DATABASES:
            yield Problem(
                "E008",
                f"{option} is {alias!r}, which DATABASES doesn't have.",
                f"Use one of {', '.join(map(repr, settings.DATABASES))}, or leave it out.",
            )
        elif (vendor := connections[alias].vendor) != "postgresql":
            yield Problem(
                "E010",
                f"{option} is {alias!r}, a database of vendor {vendor!r}.",
                "Session locks need PostgreSQL. Name such a database, or use the backend "
                "'django_fencedlock.backends.database.DatabaseBackend'.",
            )


def without_driver(why: str) -> Any:
    """Return what stands for the backend without psycopg: another database is reported first."""

    def problems(config: AliasConfig) -> Iterator[Problem]:
        missing = Problem("E005", f"{config.where('BACKEND')}: {why}")
        yield from list(settings_problems(config)) or [missing]

    return type("PostgresBackend", (), {"supports_waiting": True, "problems": problems})


def server_problems(
    config: AliasConfig, route: str, max_locks: int, open_session: Callable[[str, float], Session]
) -> Iterator[Problem]:
    """Look for a pooler, for another database than the fence's, and for a small lock table."""
    option = f"{config.where('OPTIONS')}['DATABASE']"
    with contextlib.ExitStack() as opened:
        session, fences = (
            opened.enter_context(contextlib.closing(open_session(alias, config.timeout)))
            for alias in (route, config.fence_database)
        )
        if session.pools_transactions():
            yield Problem(
                "E011",
                f"Database {route!r} is reached through a pooler that gives each transaction "
                "another session. Session locks don't work there: two clients get the same lock.",
                f"Add a direct connection to DATABASES, and name its alias in {option}; or let "
                "the pooler pool sessions.",
            )
        here, there = (each.one(sql.SERVER, {}, prepare=False) for each in (session, fences))
        if here != there:
            yield Problem(
                "E008",
                f"{option} is {route!r}, which is another database than that of FENCE_DATABASE "
                f"{config.fence_database!r}.",
                "Name another route to the same database.",
            )
        *_, clients, locks = here
        room = clients * locks
        if max_locks > room / 10:
            yield Problem(
                "W001",
                f"One process may hold {max_locks} locks ({config.where('OPTIONS')}['MAX_LOCKS']), "
                f"more than a tenth of the server's lock table: max_connections {clients} times "
                f"max_locks_per_transaction {locks} is {room}. When it is full, no client can "
                "connect any more.",
                f"Set MAX_LOCKS to {room // 10} or less, or raise max_locks_per_transaction.",
            )
