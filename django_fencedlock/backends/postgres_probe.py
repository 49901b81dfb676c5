"""What `check --database` asks of a Postgres server before session locks are trusted to it."""

from __future__ import annotations

from collections.abc import Iterator

from django.db import Error

from ..conf import AliasConfig, Problem
from . import postgres_statements as sql
from .postgres_sessions import Session, connect, pools_transactions


def probe(config: AliasConfig, route: str, timeout: float, most: int) -> Iterator[Problem]:
    """Look for a pooler, for another database than the fence's, and for too small a lock table."""
    try:
        session = connect(route, timeout)
    except Error as exc:
        yield Problem(
            "E013",
            f"Database {route!r}, where {config.where()} keeps its session locks, can't be "
            f"reached: {str(exc).strip()}.",
            "Start the database, or mend its settings.",
        )
        return
    try:
        yield from _pooler(session, config, route, timeout)
        yield from _other_database(session, config, route, timeout)
        yield from _lock_table(session, config, most)
    finally:
        session.close()


def _pooler(session: Session, config: AliasConfig, route: str, timeout: float) -> Iterator[Problem]:
    # Other pids alone are no sign: a pooler in session mode has them too, and will do.
    if session.is_behind_pooler and pools_transactions(session, route, timeout):
        yield Problem(
            "E011",
            f"Database {route!r} is reached through a pooler that gives each transaction another "
            "session. Session locks don't work there: two clients get the same lock.",
            f"Add a direct connection to DATABASES, and name its alias in "
            f"{config.where('OPTIONS')}['DATABASE']; or let the pooler pool sessions.",
        )


def _other_database(
    session: Session, config: AliasConfig, route: str, timeout: float
) -> Iterator[Problem]:
    if route == config.fence_database:
        return
    other = connect(config.fence_database, timeout)
    try:
        here, there = (each.one(sql.DATABASE, {}, prepare=False) for each in (session, other))
    finally:
        other.close()
    if here != there:
        yield Problem(
            "E008",
            f"{config.where('OPTIONS')}['DATABASE'] is {route!r}, which is another database than "
            f"that of FENCE_DATABASE {config.fence_database!r}.",
            "Name another way to the same database.",
        )


def _lock_table(session: Session, config: AliasConfig, most: int) -> Iterator[Problem]:
    connections, locks = session.one(sql.LOCK_TABLE, {}, prepare=False)
    room = connections * locks
    if most > room / 10:
        yield Problem(
            "W001",
            f"One process may hold {most} locks ({config.where('OPTIONS')}['MAX_LOCKS']), more "
            f"than a tenth of what the server's lock table is made for: max_connections "
            f"{connections} times max_locks_per_transaction {locks} is {room}. When it is full, "
            "nobody can connect any more.",
            f"Set MAX_LOCKS to {room // 10} or less, or raise max_locks_per_transaction.",
        )
