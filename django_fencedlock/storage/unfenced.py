"""The SQL of registry rows for unfenced locks, which no grant writes: the background does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..backends.base import Backend, Renewal
from ..lease import Lease
from .background_writer import Page, Scribe, scribe
from .dialect import COLUMNS, HELD, TIMES, Entry, listed
from .postgresql import array, unnested
from .records import Statements
from .text import fit_holder
from .vendors import NameAndOwner

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
    rows = [fit_holder(statements.connection, entry.values()) for entry, _ in entries]
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
        values = fit_holder(statements.connection, entry.values())
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


#: So many rows wait to be written, and so many are written at once.
MOST, AT_ONCE = 10_000, 1000


class UnfencedRows:
    """
    The unfenced leases of one process, for the registry.

    One gets a row when it is renewed for the first time, so that a short one costs nothing.
    """

    def __init__(self, scribe: Scribe) -> None:
        self._scribe = scribe
        self.forget()

    def forget(self) -> None:
        #: By owner, as what was renewed lately.
        self._renewed: dict[str, tuple[Lease, Backend]] = {}
        #: Owners that have a row.
        self._entered: set[str] = set()
        self._over: deque[Lease] = deque(maxlen=MOST)

    def is_empty(self) -> bool:
        return not self._renewed and not self._over

    def renewed(
        self, backend: Backend, leases: Sequence[Lease], answers: Sequence[Renewal]
    ) -> None:
        """Note leases that were renewed."""
        if self._scribe.is_quiet() or backend.records_unfenced:
            return
        for lease, answer in zip(leases, answers, strict=True):
            worth_it = not lease.fenced and not lease.lent and len(self._renewed) < MOST
            if answer is Renewal.KEPT and worth_it:
                self._renewed[lease.owner_id] = lease, backend
        if self._renewed:
            self._scribe.rouse()

    def ended(self, lease: Lease) -> None:
        """Note that a lease was given back, or lost."""
        if lease.owner_id in self._entered:
            self._entered.discard(lease.owner_id)
            self._over.append(lease)
            self._scribe.rouse()

    def pages(self) -> Iterator[Page]:
        over = [self._over.popleft() for _ in range(min(AT_ONCE, len(self._over)))]
        for database in {lease.database for lease in over}:
            ended = [
                NameAndOwner(each.name, each.owner_id) for each in over if each.database == database
            ]
            yield Page(database, partial(_clear, ended))
        renewed = [self._renewed.pop(owner) for owner in list(self._renewed)[:AT_ONCE]]
        for backend in {backend for _, backend in renewed}:
            mine = [lease for lease, its in renewed if its is backend and _lives(lease)]
            if mine:
                yield Page(mine[0].database, partial(self._enter, backend, mine))

    def _enter(self, backend: Backend, leases: Sequence[Lease], statements: Statements) -> None:
        kept = statements.ledger.renew(statements.connection, leases)
        new = [
            (backend.entry(each), each.held_for()) for each in leases if each.owner_id not in kept
        ]
        if new:
            enter(statements, new)
        self._entered.update(lease.owner_id for lease in leases)
        for lease in leases:
            if not _lives(lease):
                # It ended meanwhile.
                self.ended(lease)


def _lives(lease: Lease) -> bool:
    return lease.is_open() and not lease.lost


def _clear(leases: Sequence[NameAndOwner], statements: Statements) -> None:
    statements.ledger.clear(statements.connection, leases)


rows = UnfencedRows(scribe)
scribe.books.append(rows)
