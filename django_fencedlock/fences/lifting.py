"""Lifts fences above tokens that rows have already, when the fences are older than the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from . import ledger_for
from .ledger import BATCH, FENCE, listed

#: Seconds that a lift waits for a fence that somebody's transaction has locked. (On MySQL, one.)
PATIENCE = 2

# Nobody is the owner "": so no lease that is out has the newest grant any more, whatever its
# token. A grant in between has raised the token by itself, and isn't touched if that was enough.
_LIFT = f"""
UPDATE {FENCE} SET token = %(token)s, owner = '' WHERE name = %(name)s AND token < %(highest)s
"""
_MAKE = f"INSERT INTO {FENCE} (name, token, owner) VALUES (%(name)s, %(token)s, '')"


def too_low(connection: BaseDatabaseWrapper, highest: Mapping[str, int]) -> dict[str, int | None]:
    """The names whose fence is below the token given for it, with its own; None if it is gone."""
    tokens = _tokens(connection, list(highest))
    return {
        name: tokens.get(name)
        for name in highest
        if name not in tokens or tokens[name] < highest[name]
    }


def _tokens(connection: BaseDatabaseWrapper, names: Sequence[str]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    with connection.cursor() as cursor:
        for start in range(0, len(names), BATCH):
            inside, given = listed("n", names[start:][:BATCH])
            cursor.execute(f"SELECT name, token FROM {FENCE} WHERE name IN ({inside})", given)
            tokens |= dict(cursor.fetchall())
    return tokens


def lift(connection: BaseDatabaseWrapper, highest: Mapping[str, int]) -> None:
    """
    Lift the fences of some names above the tokens given, unless they are by now.

    All of them or none. Raises an ``IntegrityError`` if one that was gone was made meanwhile, and
    what `Ledger.is_row_locked()` knows if somebody has one locked.
    """
    low = too_low(connection, highest)
    ledger = ledger_for(connection)
    ledger.patience(connection, PATIENCE)
    with ledger.transaction(connection) as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"SELECT set_config('lock_timeout', '{PATIENCE}s', true)")
        # In the order of their names, lest two who lift wait for each other.
        for name in sorted(low):
            given = {"name": name, "highest": highest[name], "token": highest[name] + 1}
            cursor.execute(_MAKE if low[name] is None else _LIFT, given)
