"""The history of locks: events that a background thread writes to the fence database."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from django.apps import apps
from django.db import connections
from django.db.models import F, Window
from django.db.models.functions import RowNumber

from .. import conf, signals
from ..core.events import Kind, LockEvent
from ..core.identity import new_owner
from ..core.runtime import clock, forks
from ..exceptions import StaleObject
from ..lease import Lease
from .background_writer import BATCH, MAX_QUEUED, writer
from .text import MAX_NOTE, escape_control, fit_column
from .vendors import LEDGERS

#: The values of `LockEvent.Kind`. Models can't be imported here.
GRANTED, LOST, REJECTED, FORCED = "granted", "lost", "rejected", "forced"

#: Limit of rows of each kind, and by how many it may be exceeded.
MAX_ROWS = 10_000
SLACK = 1_000
#: Seconds that a lock is held before its grant gets a row. Most are held for milliseconds.
MIN_HELD = 1.0


class Event(NamedTuple):
    """Something that happened to a lock."""

    kind: str
    name: str
    alias: str
    token: int | None
    #: Where the holder runs, for people.
    holder: str
    note: str = ""


def write(database: str, happened: Sequence[tuple[float, Event]]) -> None:
    """Write events, each with its time by `clock()`; delete the oldest beyond the limits."""
    model: Any = apps.get_model("django_fencedlock", "LockEvent")
    events, connection = model.objects.using(database), connections[database]
    now = LEDGERS[connection.vendor].now(connection) - timedelta(seconds=clock())

    def fit(text: str) -> str:
        return fit_column(connection, escape_control(text), MAX_NOTE)

    # Equal events are one row: a writer that is rejected may try again and again.
    times = Counter(event for _, event in happened)
    last = {event: at for at, event in happened}
    rows = [
        model(
            **event._replace(holder=fit(event.holder), note=fit(event.note))._asdict(),
            happened_at=now + timedelta(seconds=at),
            times=times[event],
        )
        for event, at in last.items()
    ]
    events.bulk_create(rows)
    place = Window(RowNumber(), partition_by=[F("name"), F("kind")], order_by=F("id").desc())
    ranked = events.filter(name__in={event.name for event in last}).annotate(place=place)
    # Read first: MySQL can't delete from a table that a subquery reads.
    extra = list(ranked.filter(place__gt=conf.history()).values_list("id", flat=True)[:BATCH])
    if extra:
        events.filter(id__in=extra).delete()
    for kind in {event.kind for event in last}:
        # It reads the whole index. All processes together do it once for SLACK rows.
        if random.random() < len(rows) / SLACK:
            of_kind = events.filter(kind=kind)
            oldest = of_kind.order_by("-id").values_list("id", flat=True)[MAX_ROWS : MAX_ROWS + 1]
            of_kind.filter(id__lte=max(oldest, default=0)).delete()


class History:
    """Notes what happens to locks in this process."""

    def __init__(self) -> None:
        writer.sources.append(self._add_grants)
        self.after_fork()
        forks.register(self)

    def after_fork(self) -> None:
        #: Leases whose grant has no row yet, in order.
        self.granted: dict[Lease, None] = {}

    def connect(self) -> None:
        """Connect the signals of rejected writes and forced releases."""
        for signal, receiver in (
            (signals.stale_write_rejected, self._write_rejected),
            (signals.stale_transaction_rejected, self._transaction_rejected),
            (signals.lock_force_released, self._forced),
        ):
            signal.connect(receiver, weak=False, dispatch_uid=f"{__name__}.{receiver.__name__}")

    def on_event(self, event: LockEvent) -> None:
        """Note a loss; and a grant, unless the lock is released within `MIN_HELD` seconds."""
        lease = event.lease
        if event.kind is Kind.RELEASED:
            self.granted.pop(lease, None)
        elif event.kind is Kind.EVICTED:
            self.add(death(event.name, event.alias, event.facts["pid"]))
        elif event.kind is Kind.LOST:
            self._add_grant(lease)
            self._add_about(LOST, lease, event.facts["reason"])
        # A writer that is due already isn't off.
        elif len(self.granted) < MAX_QUEUED and (writer.is_due or self._is_on()):
            self.granted[lease] = None
            # Asked last: a write that has begun by then may have missed the grant.
            if not writer.is_due:
                writer.start()

    def add(self, event: Event, age: float = 0.0) -> None:
        """Note an event that happened `age` seconds ago."""
        if self._is_on():
            writer.put(conf.config(event.alias).fence_database, write, (clock() - age, event))

    def _is_on(self) -> bool:
        return bool(conf.history()) and not writer.is_off()

    def _add_grants(self) -> bool:
        """Add the grants that have lasted; return whether others may."""
        for lease in list(self.granted):
            if not lease.is_open():
                self.granted.pop(lease, None)
            elif lease.held_for() >= MIN_HELD:
                self._add_grant(lease)
        return bool(self.granted)

    def _add_grant(self, lease: Lease) -> None:
        if self.granted.pop(lease, False) is None:
            self._add_about(GRANTED, lease, age=lease.held_for())

    def _add_about(self, kind: str, lease: Lease, note: str = "", age: float = 0.0) -> None:
        token = lease.token if lease.fenced else None
        self.add(Event(kind, lease.name, lease.alias, token, str(lease.holder), note), age)

    def _write_rejected(
        self,
        sender: Any,
        name: str,
        alias: str,
        pk: Any,
        token: int,
        holder: object,
        reason: str,
        **facts: Any,
    ) -> None:
        row = sender._meta.label if pk is None else f"{sender._meta.label} pk={pk!r}"
        if reason == StaleObject.reason:
            row += "; it was read before the lock was acquired"
        self.add(Event(REJECTED, name, alias, token, str(new_owner()), _by(row, holder)))

    def _transaction_rejected(self, lease: Lease, holder: object, **facts: Any) -> None:
        self._add_about(REJECTED, lease, _by("lease.atomic()", holder))

    def _forced(
        self, name: str, alias: str, token: int | None, holder: Any, by: Any, **facts: Any
    ) -> None:
        self.add(Event(FORCED, name, alias, token, str(holder or ""), f"by {by}"))


def death(name: str, alias: str, pid: int) -> Event:
    """Return the event of a lock that was freed after its holder's process ended."""
    place = f"{new_owner().host}, pid {pid}"
    return Event(LOST, name, alias, None, place, "its process is gone; the lock was freed")


def _by(what: str, holder: object) -> str:
    return what if holder is None else f"{what}; the newest grant is that of {holder}"


history = History()
