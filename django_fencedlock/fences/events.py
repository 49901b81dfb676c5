"""The SQL of the history: what happened to locks is written in bulk, and the oldest deleted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..texts import visible
from .characters import LONGEST, storable
from .ledger import listed
from .records import Statements

EVENTS = "django_fencedlock_lockevent"

#: The kinds, as `LockEvent.Kind` has them. The models can't be imported here.
GRANTED, LOST, REFUSED, FORCED = "granted", "lost", "refused", "forced"

#: So many events of each kind are kept in all, and up to `SLACK` more.
MOST = 10_000
SLACK = 1_000
#: Rows that are written by one statement. SQLite's limit was 999 parameters for long.
BATCH = 100

COLUMNS = ("name", "kind", "alias", "token", "holder", "note", "times")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a lock."""

    kind: str
    name: str
    alias: str
    token: int | None
    #: Whom it happened to, in words.
    holder: str
    note: str = ""


@dataclass(slots=True)
class EventRow:
    """An event of the table: what happened `times` times, the last time `age` seconds ago."""

    event: Event
    age: float
    times: int = 1


def write(statements: Statements, rows: Sequence[EventRow], keep: int) -> None:
    """Write events, and keep no more than `keep` of each kind of the names that they are about."""
    with statements.cursor(atomic=True) as cursor:
        if statements.connection.vendor == "postgresql":
            # Nothing is lost with the newest events that a crash of the server takes.
            cursor.execute("SELECT set_config('synchronous_commit', 'off', true)")
        for start in range(0, len(rows), BATCH):
            cursor.execute(*_insert(statements, rows[start : start + BATCH]))
        for statement, given in _deletions(rows, keep):
            cursor.execute(statement, given)


def _insert(statements: Statements, rows: Sequence[EventRow]) -> tuple[str, dict[str, Any]]:
    ages = {f"age{place}": -row.age for place, row in enumerate(rows)}
    given = statements.times(**ages)
    values = []
    for place, row in enumerate(rows):
        event = row.event
        facts = {
            **{column: getattr(event, column) for column in ("name", "kind", "alias", "token")},
            **{each: _told(statements, getattr(event, each)) for each in ("holder", "note")},
            "times": row.times,
        }
        given |= {f"{column}{place}": value for column, value in facts.items()}
        marks = ", ".join(f"%({column}{place})s" for column in COLUMNS)
        values.append(f"({statements.later(f'age{place}')}, {marks})")
    columns = ", ".join(("happened_at", *COLUMNS))
    return f"INSERT INTO {EVENTS} ({columns}) VALUES {', '.join(values)}", given


def _told(statements: Statements, text: str) -> str:
    return storable(statements.connection, visible(text), LONGEST)


def _deletions(rows: Sequence[EventRow], keep: int) -> Iterator[tuple[str, dict[str, Any]]]:
    names, given = listed("n", sorted({row.event.name for row in rows}))
    # The innermost SELECT is there for MySQL, which reads no table that it deletes from.
    yield (
        f"DELETE FROM {EVENTS} WHERE id IN (SELECT id FROM ("
        "SELECT id, row_number() OVER (PARTITION BY name, kind ORDER BY id DESC) AS place "
        f"FROM {EVENTS} WHERE name IN ({names})) newest WHERE newest.place > %(keep)s)",
        {**given, "keep": keep},
    )
    # Looks at all that are kept: so not each time, but for as many rows, however many processes
    # write them, and however short they live.
    for kind in sorted({row.event.kind for row in rows}):
        if random.random() < len(rows) / SLACK:
            yield (
                f"DELETE FROM {EVENTS} WHERE kind = %(kind)s AND id <= (SELECT id FROM ("
                f"SELECT id FROM {EVENTS} WHERE kind = %(kind)s ORDER BY id DESC "
                "LIMIT 1 OFFSET %(most)s) oldest)",
                {"kind": kind, "most": MOST},
            )
