"""The history of locks: events that a background thread writes to the fence database."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.db import Error, connections
from django.db.models import F, Window
from django.db.models.functions import RowNumber

from .. import conf, signals
from ..core.events import Kind, LockEvent
from ..core.identity import new_owner
from ..core.runtime import clock
from ..exceptions import FencedLockError
from ..lease import Lease
from .background_writer import BackgroundWriter, writer
from .text import MAX_NOTE, escape_control, fit_column
from .vendors import ledger_for

if TYPE_CHECKING:
    from ..core.identity import Holder

logger = logging.getLogger(__name__)

TABLE = "django_fencedlock_lockevent"

#: The values of `LockEvent.Kind`. Models can't be imported here.
GRANTED, LOST, REJECTED, FORCED = "granted", "lost", "rejected", "forced"

#: Limit of rows of each kind, and by how many it may be exceeded.
MAX_ROWS = 10_000
SLACK = 1_000
#: Limit of events that wait to be written, and of rows that are written at once.
MAX_QUEUED = 2_000
BATCH = 100
#: Seconds that a lock is held before its grant gets a row. Most are held for milliseconds.
MIN_HELD = 1.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a lock."""

    kind: str
    name: str
    alias: str
    token: int | None
    #: Where the holder runs, for people.
    holder: str
    note: str = ""


@dataclass(slots=True)
class EventRow:
    """An event that happened `times` times, the last time `age` seconds ago."""

    event: Event
    age: float = 0.0
    times: int = 1


def write(database: str, rows: Sequence[EventRow]) -> None:
    """Write events, and delete the oldest ones beyond the limits."""
    model: Any = apps.get_model("django_fencedlock", "LockEvent")
    events, connection = model.objects.using(database), connections[database]
    now = ledger_for(connection).now(connection)

    def fit(text: str) -> str:
        return fit_column(connection, escape_control(text), MAX_NOTE)

    events.bulk_create(
        model(
            happened_at=now - timedelta(seconds=row.age),
            name=row.event.name,
            kind=row.event.kind,
            alias=row.event.alias,
            token=row.event.token,
            holder=fit(row.event.holder),
            note=fit(row.event.note),
            times=row.times,
        )
        for row in rows
    )
    place = Window(RowNumber(), partition_by=[F("name"), F("kind")], order_by=F("id").desc())
    ranked = events.filter(name__in={row.event.name for row in rows}).annotate(place=place)
    # Read first: MySQL can't delete from a table that a subquery reads.
    extra = list(ranked.filter(place__gt=conf.history()).values_list("id", flat=True)[:BATCH])
    if extra:
        events.filter(id__in=extra).delete()
    for kind in {row.event.kind for row in rows}:
        # It reads the whole index. All processes together do it once for SLACK rows.
        if random.random() < len(rows) / SLACK:
            of_kind = events.filter(kind=kind)
            oldest = of_kind.order_by("-id").values_list("id", flat=True)[MAX_ROWS : MAX_ROWS + 1]
            for last in list(oldest):
                of_kind.filter(id__lte=last).delete()


class _Log:
    """The events of this process for one database, until they are written."""

    def __init__(self, writer: BackgroundWriter, database: str) -> None:
        self._writer = writer
        self.database = database
        self.forget()

    def forget(self) -> None:
        self.events: deque[tuple[float, Event]] = deque()
        #: Leases whose grant has no row yet, in order. All values are None.
        self.granted: dict[Lease, None] = {}
        self.dropped = 0
        #: Whether the writer's thread will write this log. A grant then costs nothing more.
        self.is_queued = False

    def add(self, event: Event, age: float = 0.0) -> None:
        if len(self.events) < MAX_QUEUED:
            self.events.append((clock() - age, event))
        else:
            self.dropped += 1
        self._queue()

    def expect(self, lease: Lease) -> None:
        """Add the grant of a lease once it has been held for a while."""
        if len(self.granted) < MAX_QUEUED:
            self.granted[lease] = None
        else:
            self.dropped += 1
        if not self.is_queued:
            self._queue()

    def add_grant(self, lease: Lease) -> None:
        """Add the grant of a lease, unless it has been added."""
        if self.granted.pop(lease, False) is None:
            self.add(Event(GRANTED, **_about(lease)), age=lease.held_for())

    def _queue(self) -> None:
        # Set before: the thread may write, and reset it, at once.
        self.is_queued = True
        if not self._writer.put(self):
            self.is_queued = False

    def write(self) -> bool:
        # Before the events are read: those that are added from now on queue this log again.
        self.is_queued = False
        for lease in list(self.granted):
            if not lease.is_open():
                self.granted.pop(lease, None)
            elif lease.held_for() >= MIN_HELD:
                self.add_grant(lease)
        taken = [self.events.popleft() for _ in range(min(BATCH, len(self.events)))]
        if taken:
            try:
                rows = list(_merged(taken).values())
                self._writer.run(self.database, partial(write, self.database, rows))
            except Error:
                self.events.extendleft(reversed(taken))
                raise
        if self.dropped:
            logger.warning("%d events were left out of the history of locks", self.dropped)
            self.dropped = 0
        return bool(self.events or self.granted)


def _merged(taken: Sequence[tuple[float, Event]]) -> Mapping[Event, EventRow]:
    """Merge equal events: a writer that is rejected may try again and again."""
    rows: dict[Event, EventRow] = {}
    for at, event in taken:
        row = rows.setdefault(event, EventRow(event, times=0))
        row.age, row.times = clock() - at, row.times + 1
    return rows


class History:
    """Notes what happens to locks in this process."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self.logs: dict[str, _Log] = {}

    def log(self, database: str) -> _Log:
        """Return the log of a database."""
        return self.logs.get(database) or self.logs.setdefault(
            database, _Log(self._writer, database)
        )

    def granted(self, lease: Lease) -> None:
        """Note a grant, unless the lock is released within `MIN_HELD` seconds."""
        if lease.lent:
            return
        log = self.logs.get(lease.database)
        if log is not None and log.is_queued:
            log.expect(lease)
        elif self._is_on():
            self.log(lease.database).expect(lease)

    def released(self, lease: Lease) -> None:
        if (log := self.logs.get(lease.database)) is not None:
            log.granted.pop(lease, None)

    def _is_on(self) -> bool:
        return bool(conf.history()) and not self._writer.is_off()

    def connect(self) -> None:
        """Connect the signals of losses, rejected writes and forced releases."""
        for signal, receiver in (
            (signals.lock_lost, self._lost),
            (signals.lock_evicted, self._evicted),
            (signals.stale_write_rejected, self._write_rejected),
            (signals.stale_transaction_rejected, self._transaction_rejected),
            (signals.lock_force_released, self._forced),
        ):
            signal.connect(receiver, weak=False, dispatch_uid=f"{__name__}.{receiver.__name__}")

    def _lost(self, lease: Lease, reason: str, **kwargs: Any) -> None:
        if lease.lent:
            return
        if (log := self.logs.get(lease.database)) is not None:
            log.add_grant(lease)
        self.add(Event(LOST, **_about(lease), note=reason))

    def _evicted(self, name: str, alias: str, pid: int, **kwargs: Any) -> None:
        self.add(death(name, alias, pid))

    def _write_rejected(
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
        self.add(Event(REJECTED, name, alias, token, str(new_owner()), _by(row, holder)))

    def _transaction_rejected(self, lease: Lease, holder: Holder | None, **kwargs: Any) -> None:
        self.add(Event(REJECTED, **_about(lease), note=_by("lease.atomic()", holder)))

    def _forced(
        self, name: str, alias: str, token: int | None, holder: Any, by: Any, **kwargs: Any
    ) -> None:
        self.add(Event(FORCED, name, alias, token, str(holder or ""), f"by {by}"))

    def add(self, event: Event) -> None:
        """Note an event."""
        if not self._is_on():
            return
        try:
            database = conf.config(event.alias).fence_database
        except FencedLockError:
            return
        self.log(database).add(event)


def death(name: str, alias: str, pid: int) -> Event:
    """Return the event of a lock that was freed after its holder's process ended."""
    place = f"{new_owner().host}, pid {pid}"
    return Event(LOST, name, alias, None, place, "its process is gone; the lock was freed")


def _by(what: str, holder: Holder | None) -> str:
    return what if holder is None else f"{what}; the newest grant is that of {holder}"


def _about(lease: Lease) -> Mapping[str, Any]:
    return {
        "name": lease.name,
        "alias": lease.alias,
        "token": lease.token if lease.fenced else None,
        "holder": str(lease.holder),
    }


history = History(writer)


def on_event(event: LockEvent) -> None:
    """Note a grant, and forget it once it is released."""
    if event.kind is Kind.ACQUIRED:
        history.granted(event.lease)
    else:
        history.released(event.lease)
