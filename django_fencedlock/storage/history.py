"""The SQL of the history: what happened to locks is written in bulk, and the oldest deleted."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import conf, signals
from ..core.identity import new_owner
from ..core.runtime import clock
from ..exceptions import FencedLockError
from ..lease import Lease
from .background_writer import Page, Scribe, scribe
from .dialect import listed
from .postgresql import array, unnested
from .records import Statements
from .text import MAX_NOTE, escape_control, fit_column

if TYPE_CHECKING:
    from ..core.identity import Holder


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
    return fit_column(statements.connection, escape_control(text), MAX_NOTE)


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


#: Seconds that a lock is held before its grant is worth a row. Most are held for milliseconds:
#: there would be thousands, and the tokens tell how many.
WORTH = 1.0
#: So many events wait to be written, and so many rows are written at once.
MOST_WAITING, AT_ONCE = 2000, 100


class History:
    """The events of one process that aren't written yet."""

    def __init__(self, scribe: Scribe) -> None:
        self._scribe = scribe
        #: Leases whose grant has no row yet, by owner.
        self._granted: dict[str, Lease] = {}
        self._happened: deque[tuple[float, str, Event]] = deque()

    def forget(self) -> None:
        self._granted.clear()
        self._happened.clear()

    def is_empty(self) -> bool:
        return not self._happened and not self._granted

    # In the way of those who take and release locks: an entry in a dict, and no more

    def granted(self, lease: Lease) -> None:
        """Note a grant."""
        if not conf.history() or self._scribe.is_quiet():
            return
        if len(self._granted) < MOST_WAITING:
            self._granted[lease.owner_id] = lease
        else:
            self._scribe.leave_out()
        self._scribe.rouse()

    def released(self, lease: Lease) -> None:
        """Note that a lease was given back: its grant is worth no row if it has none yet."""
        self._granted.pop(lease.owner_id, None)

    # Seldom

    def connect(self) -> None:
        """Hear of losses, refusals and forced releases from now on."""
        for signal, receiver in self._receivers():
            signal.connect(receiver, weak=False, dispatch_uid=f"{__name__}.{receiver.__name__}")

    def _receivers(self) -> Iterator[tuple[Any, Any]]:
        yield signals.lock_lost, self._lost
        yield signals.lock_evicted, self._evicted
        yield signals.stale_write_rejected, self._write_refused
        yield signals.stale_transaction_rejected, self._transaction_refused
        yield signals.lock_force_released, self._forced

    def _lost(self, lease: Lease, reason: str, **kwargs: Any) -> None:
        if lease.lent:
            return
        if self._is_untold(lease):
            # However short it was: so that it is told who had it.
            self._add(_grant(lease), age=lease.held_for())
        self._add(Event(LOST, **_about(lease), note=reason))

    def _evicted(self, name: str, alias: str, pid: int, **kwargs: Any) -> None:
        self._add(death(name, alias, pid))

    def _write_refused(
        self,
        sender: Any,
        *,
        name: str,
        alias: str,
        pk: Any,
        token: int,
        holder: Holder | None,
        **kwargs: Any,
    ) -> None:
        row = sender._meta.label if pk is None else f"{sender._meta.label} pk={pk!r}"
        note = row if holder is None else f"{row}; the newest grant is that of {holder}"
        self._add(Event(REFUSED, name, alias, token, str(new_owner()), note))

    def _transaction_refused(self, lease: Lease, holder: Holder | None, **kwargs: Any) -> None:
        by = "" if holder is None else f"; the newest grant is that of {holder}"
        self._add(Event(REFUSED, **_about(lease), note=f"lease.atomic(){by}"))

    def _forced(
        self, name: str, alias: str, token: int | None, holder: Any, by: Any, **kwargs: Any
    ) -> None:
        self._add(Event(FORCED, name, alias, token, str(holder or ""), f"by {by}"))

    def _add(self, event: Event, age: float = 0.0) -> None:
        if not conf.history() or self._scribe.is_quiet():
            return
        try:
            database = conf.config(event.alias).fence_database
        except FencedLockError:
            return
        if len(self._happened) < MOST_WAITING:
            self._happened.append((clock() - age, database, event))
        else:
            self._scribe.leave_out()
        self._scribe.rouse()

    # What the scribe asks for

    def pages(self) -> Iterator[Page]:
        for owner, lease in list(self._granted.items()):
            if not lease.is_open() or lease.lent:
                self._granted.pop(owner, None)
            elif lease.held_for() >= WORTH and self._is_untold(lease):
                self._add(_grant(lease), age=lease.held_for())
        rows: dict[str, list[EventRow]] = {}
        for (database, _), row in self._take().items():
            rows.setdefault(database, []).append(row)
        for database, found in rows.items():
            size = sum(row.times for row in found)
            yield Page(database, partial(_write, found), size)

    def _is_untold(self, lease: Lease) -> bool:
        """Whether its grant has no row yet; from now on it has."""
        return self._granted.pop(lease.owner_id, None) is not None

    def _take(self) -> dict[tuple[str, Event], EventRow]:
        """What happened, each event once; a writer that doesn't give up is refused again."""
        now = clock()
        found: dict[tuple[str, Event], EventRow] = {}
        while self._happened and len(found) < AT_ONCE:
            at, database, event = self._happened.popleft()
            row = found.setdefault((database, event), EventRow(event, 0.0, times=0))
            row.age, row.times = now - at, row.times + 1
        return found


def death(name: str, alias: str, pid: int) -> Event:
    """The event of a lock that was freed, since its holder's process on this machine is gone."""
    place = f"{new_owner().host}, pid {pid}"
    return Event(LOST, name, alias, None, place, "its process is gone; the lock was freed")


def _write(rows: list[EventRow], statements: Statements) -> None:
    write(statements, rows, conf.history())


def _grant(lease: Lease) -> Event:
    return Event(GRANTED, **_about(lease))


def _about(lease: Lease) -> Mapping[str, Any]:
    return {
        "name": lease.name,
        "alias": lease.alias,
        "token": lease.token if lease.fenced else None,
        "holder": str(lease.holder),
    }


history = History(scribe)
scribe.books.append(history)
