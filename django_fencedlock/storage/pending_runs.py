"""
`PendingRun`: the run that coalesced triggers still need.

A trigger that is refused counts itself, then tries the lock again; a holder releases the lock, then
looks for triggers. So the trigger finds the lock free, or the holder finds the trigger. If one of
them dies, a worker finds the row: nothing is done before a run that covers it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.db import IntegrityError
from django.db.models import Case, Exists, F, OuterRef, QuerySet, When

from ..backends.interface import SHARED
from . import message_records
from .message_records import Begun
from .records import MessageTime, Records, ServerTime, fetch, insert, private_query

#: Seconds for which a row without a pending run is kept.
KEPT = 86400.0


class Place(NamedTuple):
    """What a pending run belongs to: a task, and a lock."""

    name: str
    task_name: str


class StoredMessage(NamedTuple):
    """The message of a trigger, for the table. All of it is plain ASCII."""

    body: str
    options: str
    #: Empty if it is unknown.
    queue: str = ""

    @classmethod
    def of(cls, row: Any) -> StoredMessage:
        return cls(*(getattr(row, column) for column in cls._fields))


class Claimed(NamedTuple):
    """What a run claimed: all triggers up to a number, with the newest one's message."""

    number: int
    tries: int
    #: None if it is the run's own.
    message: StoredMessage | None = None


class Pending(NamedTuple):
    """A pending run that no holder is known to look after."""

    place: Place
    number: int
    tries: int
    rescues: int
    message: StoredMessage


class PendingRuns(Records):
    """The pending runs of one alias."""

    @private_query("count a trigger", atomic=True)
    def count(
        self,
        place: Place,
        message: StoredMessage,
        grace: float,
        delivery: message_records.Message | None = None,
        unless_newer: int | str | None = None,
    ) -> Begun | None:
        """
        Count a trigger that didn't get the lock, unless an earlier delivery was counted.

        One that a former run claimed, known by the number that it claimed or by its owner id, isn't
        counted again if newer ones came since, whose arguments would be lost.
        """
        begun = None if delivery is None else message_records.begin(self.using, delivery)
        if begun is None or begun.is_first:
            row = self._locked(place) or self._insert(place, message)
            if not row.wanted or unless_newer is None or _is_newest(row, unless_newer):
                self._count(row, message, grace)
        return begun

    @private_query("begin a run", atomic=True)
    def begin(
        self,
        place: Place,
        owner: str,
        message: StoredMessage,
        grace: float,
        delivery: message_records.Message | None = None,
    ) -> tuple[Begun | None, Claimed | None]:
        """Count a trigger that got the lock, unless it was counted; claim all that is pending."""
        begun = None if delivery is None else message_records.begin(self.using, delivery)
        if begun is not None and begun.outcome:
            return begun, None
        row = self._locked(place)
        # Counted before, unless that was under another policy of the task.
        if begun is not None and not begun.is_first and row is not None:
            return begun, self._claim(row, owner, grace)
        row = row or self._insert(place, message)
        number = row.wanted + 1
        self._count(row, message, grace, started=number, tries=1, owner=owner)
        return begun, Claimed(number, 1)

    @private_query("begin a run", atomic=True)
    def claim(self, place: Place, owner: str, grace: float) -> Claimed | None:
        """Claim all that is pending; None if nothing is."""
        row = self._locked(place)
        return None if row is None else self._claim(row, owner, grace)

    @private_query("end a run")
    def end(self, place: Place, owner: str, number: int, grace: float) -> bool:
        """Record that a run ended; False if another run claimed since."""
        mine = self._at(place).filter(owner=owner, done__lt=number)
        due_at = Case(When(wanted__gt=number, then=ServerTime(grace)), default=ServerTime(KEPT))
        return bool(mine.update(due_at=due_at, done=number, updated_at=MessageTime()))

    @private_query("look for pending runs")
    def waiting(self, name: str) -> list[Pending]:
        """Return what is pending under a lock and that no run has begun."""
        return _pending(self.rows("PendingRun").filter(name=name, wanted__gt=F("started")))

    @private_query("look for pending runs")
    def numbers(self, place: Place) -> tuple[int, int]:
        """Return the numbers of the newest trigger, and of the newest that is done, or 0."""
        found = fetch(self._at(place), "wanted", "done")
        return (found[0].wanted, found[0].done) if found else (0, 0)

    @private_query("look for pending runs")
    def overdue(self, task_names: Sequence[str], queues: Sequence[str], most: int) -> list[Pending]:
        """Return what is due of these tasks and queues, and has no holder."""
        held = self.rows("HeldLock").exclude(owner=SHARED)
        live = held.filter(name=OuterRef("name"), expires_at__gt=ServerTime())
        due = self.rows("PendingRun").filter(
            ~Exists(live),
            due_at__lte=ServerTime(),
            wanted__gt=F("done"),
            task_name__in=task_names,
            queue__in=("", *queues),
        )
        return _pending(due.order_by("due_at")[:most])

    @private_query("look for pending runs")
    def reserve(self, place: Place, pause: float) -> bool:
        """Keep other workers from a pending run; False if it isn't due."""
        due = self._at(place).filter(wanted__gt=F("done"), due_at__lte=ServerTime())
        return bool(due.update(due_at=MessageTime(pause), rescues=F("rescues") + 1))

    @private_query("look for pending runs")
    def give_up(self, place: Place, number: int) -> bool:
        """Stop looking after a pending run until a new trigger comes."""
        rows = self._at(place).filter(wanted=number, done__lt=number, due_at__isnull=False)
        return bool(rows.update(due_at=None))

    def sweep(self, batches: int) -> int:
        """Delete rows that had no pending run for long; return how many."""
        rows = self.rows("PendingRun").filter(wanted=F("done"), due_at__lte=ServerTime())
        return self.delete("delete old pending runs", rows.order_by("due_at"), batches)

    def _at(self, place: Any) -> QuerySet[Any]:
        return self.rows("PendingRun").filter(name=place.name, task_name=place.task_name)

    def _locked(self, place: Place) -> Any:
        rows = self._at(place).annotate(now=MessageTime())
        return next(iter(rows.select_for_update()), None)

    def _insert(self, place: Place, message: StoredMessage) -> Any:
        """Return a new row, or the one that another transaction inserted."""
        row = insert(
            self.using,
            "PendingRun",
            **place._asdict(),
            **message._asdict(),
            alias=self.config.alias,
            **dict.fromkeys(("wanted", "started", "done", "tries", "rescues"), 0),
            updated_at=MessageTime(),
        )
        if (found := row or self._locked(place)) is None:
            raise IntegrityError(f"lock {place.name!r} has a pending run that can't be read")
        return found

    def _count(self, row: Any, message: StoredMessage, grace: float, **values: Any) -> None:
        """Store one more trigger."""
        values |= message._asdict()
        self._update(row, grace, **values, alias=self.config.alias, wanted=row.wanted + 1)

    def _claim(self, row: Any, owner: str, grace: float) -> Claimed | None:
        if row.wanted <= row.done:
            return None
        tries = row.tries if row.started == row.wanted else 0
        # The same run may come twice, if an answer was lost.
        if not tries or row.owner != owner:
            tries += 1
        self._update(row, grace, tries=tries, rescues=0, started=row.wanted, owner=owner)
        return Claimed(row.wanted, tries, StoredMessage.of(row))

    def _update(self, row: Any, grace: float, **values: Any) -> None:
        """Change a row; after `grace`, workers look after its run, unless they do already."""
        if row.wanted <= row.done or row.due_at is None:
            values |= {"rescues": 0, "due_at": MessageTime(grace)}
        self._at(row).update(**values, updated_at=MessageTime())


def _is_newest(row: Any, run: int | str) -> bool:
    """Return whether no trigger was counted since a run claimed them all."""
    if isinstance(run, int):
        return bool(row.wanted <= run)
    return bool(row.owner == run and row.wanted == row.started)


def _pending(rows: QuerySet[Any]) -> list[Pending]:
    columns = ("name", "task_name", "wanted", "started", "tries", "rescues")
    return [
        Pending(
            Place(row.name, row.task_name),
            row.wanted,
            # What was tried is the number that was begun last.
            row.tries if row.started == row.wanted else 0,
            row.rescues,
            StoredMessage.of(row),
        )
        for row in fetch(rows, *columns, *StoredMessage._fields)
    ]
