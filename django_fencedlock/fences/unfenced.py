"""The SQL of registry rows for unfenced locks, which no grant writes: the background does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .characters import words_storable
from .ledger import COLUMNS, HELD, TIMES, Entry, listed
from .postgresql import array, unnested
from .records import Statements

#: Rows that are written by one statement. SQLite's limit was 999 parameters for long.
BATCH = 40

#: On PostgreSQL all rows are one statement, which is prepared.
MAKE_ROOM = f"""
DELETE FROM {HELD} WHERE name = ANY(%(name)s::text[]) AND alias = %(alias)s
AND backend = %(backend)s AND expires_at <= clock_timestamp()
"""
INSERT_ALL = f"""
INSERT INTO {HELD} ({", ".join((*COLUMNS, *TIMES))})
SELECT {", ".join(f"w.{column}" for column in COLUMNS)}, c.now - w.age * interval '1 second',
c.now, c.now + w.ttl * interval '1 second'
FROM (SELECT clock_timestamp() AS now) c, {unnested((*COLUMNS, "age", "ttl"))}
ON CONFLICT (name) DO NOTHING
"""


def enter(statements: Statements, entries: Sequence[tuple[Entry, float]]) -> None:
    """
    Add rows, each with its lock's age in seconds; none where another lock service has the name.

    The row of a former holder of the same service has to go first, once its time is over.
    """
    with statements.cursor(atomic=True) as cursor:
        if statements.connection.vendor == "postgresql":
            _enter_all(statements, entries)
            return
        for start in range(0, len(entries), BATCH):
            part = entries[start : start + BATCH]
            cursor.execute(*_make_room(statements, [entry for entry, _ in part]))
            cursor.execute(*_insert(statements, part))


def _enter_all(statements: Statements, entries: Sequence[tuple[Entry, float]]) -> None:
    rows = [words_storable(statements.connection, entry.values()) for entry, _ in entries]
    given = {column: array([row[column] for row in rows]) for column in COLUMNS}
    given["age"] = array([age for _, age in entries])
    given["ttl"] = array([entry.ttl for entry, _ in entries])
    first = {"alias": rows[0]["alias"], "backend": rows[0]["backend"]}
    with statements.reading() as cursor:
        cursor.execute(MAKE_ROOM, {**first, "name": given["name"]})
        cursor.execute(INSERT_ALL, given)


def _make_room(statements: Statements, entries: Sequence[Entry]) -> tuple[str, dict[str, Any]]:
    names, given = listed("n", [entry.name for entry in entries])
    first = entries[0]
    return (
        f"DELETE FROM {HELD} WHERE name IN ({names}) AND alias = %(alias)s "
        f"AND backend = %(backend)s AND expires_at <= {statements.now}",
        {**given, **statements.times(), "alias": first.alias, "backend": first.backend},
    )


def _insert(
    statements: Statements, entries: Sequence[tuple[Entry, float]]
) -> tuple[str, dict[str, Any]]:
    times = {f"age{place}": -age for place, (_, age) in enumerate(entries)}
    times |= {f"ttl{place}": entry.ttl for place, (entry, _) in enumerate(entries)}
    given = statements.times(**times)
    rows = []
    for place, (entry, _) in enumerate(entries):
        values = words_storable(statements.connection, entry.values())
        given |= {f"{column}{place}": value for column, value in values.items()}
        marks = [f"%({column}{place})s" for column in COLUMNS]
        ends = [statements.later(f"age{place}"), statements.now, statements.later(f"ttl{place}")]
        rows.append(f"({', '.join(marks + ends)})")
    columns = ", ".join((*COLUMNS, *TIMES))
    mysql = statements.connection.vendor == "mysql"
    return (
        f"INSERT {'IGNORE ' if mysql else ''}INTO {HELD} ({columns}) VALUES {', '.join(rows)}"
        f"{'' if mysql else ' ON CONFLICT (name) DO NOTHING'}",
        given,
    )
