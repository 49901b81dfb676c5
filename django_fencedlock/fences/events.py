"""The SQL of the history: what happened to locks is written in bulk, and the oldest deleted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..texts import visible
from .characters import LONGEST, storable
from .ledger import listed
from .postgresql import array, unnested
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

#: On PostgreSQL all rows are one statement, which is prepared. Nothing is lost with the newest
#: events that a crash of the server takes.
INSERT_ALL = f"""
WITH s AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
INSERT INTO {EVENTS} (happened_at, {", ".join(COLUMNS)})
SELECT clock_timestamp() - w.age * interval '1 second', {", ".join(f"w.{c}" for c in COLUMNS)}
FROM s, {unnested(("age", *COLUMNS))}
"""


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
            with statements.reading() as often:
                often.execute(INSERT_ALL, _arrays(statements, rows))
                often.execute(_trimming("= ANY(%(names)s::text[])"), _names(rows, keep))
        else:
            for start in range(0, len(rows), BATCH):
                cursor.execute(*_insert(statements, rows[start : start + BATCH]))
            names, given = listed("n", sorted({row.event.name for row in rows}))
            cursor.execute(_trimming(f"IN ({names})"), {**given, "keep": keep})
        for statement, given in _deletions(rows):
            cursor.execute(statement, given)


def _arrays(statements: Statements, rows: Sequence[EventRow]) -> dict[str, str]:
    columns = zip(*(_values(statements, row) for row in rows), strict=True)
    given = {column: array(values) for column, values in zip(COLUMNS, columns, strict=True)}
    return {**given, "age": array([row.age for row in rows])}


def _names(rows: Sequence[EventRow], keep: int) -> dict[str, Any]:
    return {"names": array(sorted({row.event.name for row in rows})), "keep": keep}


def _values(statements: Statements, row: EventRow) -> tuple[object, ...]:
    """The values of `COLUMNS`."""
    event = row.event
    holder, note = _told(statements, event.holder), _told(statements, event.note)
    return event.name, event.kind, event.alias, event.token, holder, note, row.times


def _insert(statements: Statements, rows: Sequence[EventRow]) -> tuple[str, dict[str, Any]]:
    ages = {f"age{place}": -row.age for place, row in enumerate(rows)}
    given = statements.times(**ages)
    values = []
    for place, row in enumerate(rows):
        facts = zip(COLUMNS, _values(statements, row), strict=True)
        given |= {f"{column}{place}": value for column, value in facts}
        marks = ", ".join(f"%({column}{place})s" for column in COLUMNS)
        values.append(f"({statements.later(f'age{place}')}, {marks})")
    columns = ", ".join(("happened_at", *COLUMNS))
    return f"INSERT INTO {EVENTS} ({columns}) VALUES {', '.join(values)}", given


def _told(statements: Statements, text: str) -> str:
    return storable(statements.connection, visible(text), LONGEST)


def _trimming(among: str) -> str:
    """Delete what is too much of the events of some names."""
    # The innermost SELECT is there for MySQL, which reads no table that it deletes from.
    return (
        f"DELETE FROM {EVENTS} WHERE id IN (SELECT id FROM ("
        "SELECT id, row_number() OVER (PARTITION BY name, kind ORDER BY id DESC) AS place "
        f"FROM {EVENTS} WHERE name {among}) newest WHERE newest.place > %(keep)s)"
    )


def _deletions(rows: Sequence[EventRow]) -> Iterator[tuple[str, dict[str, Any]]]:
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
