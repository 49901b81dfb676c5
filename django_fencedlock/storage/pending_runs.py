"""
`PendingRun`: the run that coalesced triggers still need.

Lock and row may be in two services, so the order matters. A trigger that is refused counts itself,
then tries the lock again; a holder releases the lock, then looks for triggers. Either the trigger
finds the lock free, or the holder finds the trigger. If one of them dies, a worker finds the row:
nothing is done before a run that covers it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from django.db import IntegrityError, transaction
from django.db.models import Case, Exists, F, OuterRef, QuerySet, When

from . import message_records
from .message_records import Begun, MessageRecords
from .records import Records, ServerTime

T = TypeVar("T")

#: Seconds for which a row without a pending run is kept.
KEPT = 86400.0


@dataclass(frozen=True, slots=True)
class Place:
    """What a pending run belongs to: a task, and a lock."""

    name: str
    task_name: str


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """The message of a trigger, for the table. All of it is plain ASCII."""

    content_type: str
    content_encoding: str
    body: str
    options: str
    #: Empty if it is unknown.
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a run claimed: all triggers up to a number."""

    number: int
    tries: int
    #: The newest trigger's; None if that is the run's own.
    message: StoredMessage | None = None


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run that claimed a trigger, and ended without the work being done."""

    #: The number that it claimed, if it is known; else its owner id.
    number: int = 0
    owner: str = ""

    def claimed_newest(self, row: Any) -> bool:
        """Return whether no trigger was counted since."""
        if self.number:
            return bool(row.wanted <= self.number)
        return bool(row.owner == self.owner and row.wanted == row.started)


@dataclass(frozen=True, slots=True)
class Pending:
    """A pending run that no holder is known to look after."""

    id: int
    place: Place
    number: int
    tries: int
    rescues: int
    message: StoredMessage


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a row."""

    wanted: int
    done: int

    @property
    def is_open(self) -> bool:
        return self.wanted > self.done


_MESSAGE = tuple(each.name for each in fields(StoredMessage))
#: What `Pending` needs.
_COLUMNS = ("id", "name", "task_name", "wanted", "started", "tries", "rescues", *_MESSAGE)


class PendingRuns(Records):
    """The pending runs of one alias."""

    def count(
        self,
        place: Place,
        message: StoredMessage,
        grace: float,
        delivery: message_records.Message | None = None,
        unless_newer: EarlierRun | None = None,
    ) -> Begun | None:
        """
        Count a trigger that didn't get the lock.

        Args:
            unless_newer: The run of a trigger that was counted before. It isn't counted again if
                newer ones came since, whose arguments would be lost.

        Returns:
            What is known of its message. One that was counted at an earlier delivery isn't again.
        """

        def work() -> Begun | None:
            begun = None if delivery is None else MessageRecords(self.config).insert(delivery)
            if begun is None or begun.is_first:
                row = self._locked(place) or self._insert(place, message)
                if not row.wanted or unless_newer is None or unless_newer.claimed_newest(row):
                    self._update(row, **self._counted(row, message, grace))
            return begun

        return self._in_transaction("count of a trigger", place, work)

    def begin(
        self,
        place: Place,
        owner: str,
        message: StoredMessage,
        grace: float,
        delivery: message_records.Message | None = None,
    ) -> tuple[Begun | None, Claimed | None]:
        """
        Count a trigger that got the lock, and claim all that is pending.

        One that was counted at an earlier delivery claims what is pending, if anything is.
        """

        def work() -> tuple[Begun | None, Claimed | None]:
            begun = None if delivery is None else MessageRecords(self.config).insert(delivery)
            if begun is not None and begun.outcome:
                return begun, None
            row = self._locked(place)
            # Counted before, unless that was under another policy of the task.
            if begun is not None and not begun.is_first and row is not None:
                return begun, self._claim(row, owner, grace)
            row = row or self._insert(place, message)
            number = row.wanted + 1
            values = self._counted(row, message, grace)
            self._update(row, **values, started=number, tries=1, owner=owner)
            return begun, Claimed(number, 1)

        return self._in_transaction("beginning of a run", place, work)

    def claim(self, place: Place, owner: str, grace: float) -> Claimed | None:
        """Claim all that is pending; None if nothing is."""

        def work() -> Claimed | None:
            row = self._locked(place)
            return None if row is None else self._claim(row, owner, grace)

        return self._in_transaction("beginning of a run", place, work)

    def end(self, place: Place, owner: str, number: int, grace: float) -> bool:
        """Record that a run ended; False if another run claimed since."""

        def work() -> bool:
            mine = self._at(place).filter(owner=owner, done__lt=number)
            due_at = Case(When(wanted__gt=number, then=ServerTime(grace)), default=ServerTime(KEPT))
            return bool(mine.update(due_at=due_at, done=number, updated_at=ServerTime()))

        return self.query("end of a run", place.name, work)

    def waiting(self, name: str) -> list[Pending]:
        """Return what is pending under a lock and that no run has begun."""
        rows = self.rows("PendingRun").filter(name=name, wanted__gt=F("started"))
        return self.query("look for pending runs", name, lambda: self._pending(rows))

    def numbers(self, place: Place) -> Numbers | None:
        """Return the numbers of a row; None if there is none, or none any more."""

        def work() -> Numbers | None:
            found = self.fetch(self._at(place), "wanted", "done")
            return next((Numbers(row.wanted, row.done) for row in found), None)

        return self.query("look for pending runs", place.name, work)

    def overdue(self, task_names: Sequence[str], queues: Sequence[str], most: int) -> list[Pending]:
        """Return what is due of these tasks and queues, and has no holder."""

        def work() -> list[Pending]:
            live = self.rows("HeldLock").filter(name=OuterRef("name"), expires_at__gt=ServerTime())
            due = self.rows("PendingRun").filter(
                ~Exists(live),
                due_at__lte=ServerTime(),
                wanted__gt=F("done"),
                task_name__in=task_names,
                queue__in=("", *queues),
            )
            return self._pending(due.order_by("due_at")[:most])

        return self.query("look for pending runs", None, work)

    def reserve(self, pending: Pending, pause: float) -> bool:
        """Keep other workers from a pending run; False if it isn't due."""

        def work() -> bool:
            due = self._open(pending).filter(due_at__lte=ServerTime())
            return bool(due.update(due_at=ServerTime(pause), rescues=F("rescues") + 1))

        return self.query("look for pending runs", pending.place.name, work)

    def give_up(self, pending: Pending) -> bool:
        """Stop looking after a pending run until a new trigger comes."""

        rows, name = self._open(pending).filter(due_at__isnull=False), pending.place.name
        return self.query("look for pending runs", name, lambda: bool(rows.update(due_at=None)))

    def give_up_claimed(self, place: Place, number: int) -> bool:
        """Do what `give_up()` does, for a run that claimed it."""
        rows = self._at(place).filter(wanted=number, due_at__isnull=False)
        return self.query("end of a run", place.name, lambda: bool(rows.update(due_at=None)))

    def forget(self, batches: int) -> int:
        """Delete rows that had no pending run for long; return how many."""

        rows = self.rows("PendingRun").filter(wanted=F("done"), due_at__lte=ServerTime())
        return self.delete("sweeping of pending runs", rows.order_by("due_at"), batches)

    def _in_transaction(self, doing: str, place: Place, work: Callable[[], T]) -> T:
        def atomically() -> T:
            with transaction.atomic(using=self.using):
                return work()

        return self.query(doing, place.name, atomically)

    def _at(self, place: Place) -> Any:
        return self.rows("PendingRun").filter(name=place.name, task_name=place.task_name)

    def _pending(self, rows: QuerySet[Any]) -> list[Pending]:
        return list(map(_pending, self.fetch(rows, *_COLUMNS)))

    def _open(self, pending: Pending) -> Any:
        return self.rows("PendingRun").filter(pk=pending.id, wanted__gt=F("done"))

    def _locked(self, place: Place) -> Any:
        return next(iter(self._at(place).select_for_update()), None)

    def _insert(self, place: Place, message: StoredMessage) -> Any:
        """Return a new row, or the one that another transaction inserted."""
        rows = self.rows("PendingRun")
        row = rows.model(
            name=place.name,
            task_name=place.task_name,
            alias=self.config.alias,
            **dict.fromkeys(("wanted", "started", "done", "tries", "rescues"), 0),
            **asdict(message),
            updated_at=ServerTime(),
        )
        if self.add(row):
            return row
        if (found := self._locked(place)) is None:
            raise IntegrityError(f"lock {place.name!r} has a pending run that can't be read")
        return found

    def _update(self, row: Any, **values: Any) -> None:
        self.rows("PendingRun").filter(name=row.name, task_name=row.task_name).update(**values)

    def _counted(self, row: Any, message: StoredMessage, grace: float) -> dict[str, Any]:
        """Return the values of a row with one more trigger."""
        is_looked_after = row.wanted > row.done and row.due_at is not None
        values = {} if is_looked_after else {"rescues": 0, "due_at": ServerTime(grace)}
        return {
            **values,
            **asdict(message),
            "alias": self.config.alias,
            "wanted": row.wanted + 1,
            "updated_at": ServerTime(),
        }

    def _claim(self, row: Any, owner: str, grace: float) -> Claimed | None:
        if row.wanted <= row.done:
            return None
        if row.started < row.wanted:
            tries = 1
        else:
            # The same run may come twice, if an answer was lost.
            tries = row.tries if row.owner == owner else row.tries + 1
        values: dict[str, Any] = {} if row.due_at is not None else {"due_at": ServerTime(grace)}
        values |= {"tries": tries, "rescues": 0, "started": row.wanted, "owner": owner}
        self._update(row, **values, updated_at=ServerTime())
        return Claimed(row.wanted, tries, _message(row))


def _message(row: Any) -> StoredMessage:
    return StoredMessage(*(getattr(row, name) for name in _MESSAGE))


def _pending(row: Any) -> Pending:
    place = Place(row.name, row.task_name)
    # What was tried is the number that was begun last.
    tries = row.tries if row.started == row.wanted else 0
    return Pending(row.id, place, row.wanted, tries, row.rescues, _message(row))
