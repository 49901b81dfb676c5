"""The SQL of the table of those who wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .characters import LONGEST, storable
from .ledger import listed
from .records import Statements

CONTENDERS = "django_fencedlock_contender"

#: Seconds after which a row is no more believed that wasn't written again.
STALE = 30.0
#: Rows that are written by one statement. SQLite's limit was 999 parameters for long.
BATCH = 100


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody who waits for a lock, for so many seconds by now."""

    owner: str
    name: str
    alias: str
    words: str
    waited: float


def write(statements: Statements, waits: Sequence[Wait]) -> None:
    """Write who waits, and take out whom nobody has written for long."""
    with statements.cursor(atomic=True) as cursor:
        for start in range(0, len(waits), BATCH):
            part = waits[start : start + BATCH]
            owners, given = listed("o", [wait.owner for wait in part])
            cursor.execute(
                f"DELETE FROM {CONTENDERS} WHERE owner IN ({owners}) "
                f"OR seen_at <= {statements.later('stale')}",
                {**given, **statements.times(stale=-STALE)},
            )
            since = {f"since{place}": -wait.waited for place, wait in enumerate(part)}
            given, rows = statements.times(**since), []
            for place, wait in enumerate(part):
                words = storable(statements.connection, wait.words, LONGEST)
                given |= {f"owner{place}": wait.owner, f"name{place}": wait.name}
                given |= {f"alias{place}": wait.alias, f"words{place}": words}
                marks = ", ".join(f"%({key}{place})s" for key in ("owner", "name", "alias"))
                times = f"{statements.later(f'since{place}')}, {statements.now}"
                rows.append(f"({marks}, %(words{place})s, {times})")
            cursor.execute(
                f"INSERT INTO {CONTENDERS} (owner, name, alias, words, since, seen_at) "
                f"VALUES {', '.join(rows)}",
                given,
            )


def clear(statements: Statements, owners: Sequence[str]) -> None:
    """Take out those who wait no more."""
    with statements.cursor(atomic=False) as cursor:
        for start in range(0, len(owners), BATCH):
            marks, given = listed("o", owners[start : start + BATCH])
            cursor.execute(f"DELETE FROM {CONTENDERS} WHERE owner IN ({marks})", given)
