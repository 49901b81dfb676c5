"""
The SQL of `PendingRun`: what of coalesced triggers is still to be run.

Lock and row may be in two services, so the order carries the proof. A loser counts its trigger,
and then tries the lock again; a holder gives the lock back, and then looks for triggers. Either
the loser finds the lock free, or the holder finds the trigger; and where one of them dies, the row
tells it to the living, for nothing is struck off before a run that covers it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from . import message_records
from .dialect import BATCH, HELD, listed
from .message_records import Begun
from .records import Records, Statements, update

DUTY = "django_fencedlock_pendingrun"

#: Seconds for which a row without a duty is kept.
KEPT = 86400.0


@dataclass(frozen=True, slots=True)
class Place:
    """What a duty belongs to: a task, and a lock."""

    name: str
    task_name: str


@dataclass(frozen=True, slots=True)
class Parcel:
    """The message of a trigger, packed for the table. All of it is plain ASCII."""

    content_type: str
    content_encoding: str
    body: str
    options: str
    #: Empty if it can't be told.
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a run took on: all triggers up to a number."""

    number: int
    tries: int
    #: The newest trigger's; None if that is the run's own.
    parcel: Parcel | None = None


@dataclass(frozen=True, slots=True)
class Former:
    """A run that took on a trigger, and ended without the work being done."""

    #: The number that it took on, if it is known; else its owner id.
    number: int = 0
    owner: str = ""

    @property
    def is_newest(self) -> str:
        """The condition that no trigger was counted since that run took on."""
        if self.number:
            return f"{_OLD}wanted <= %(former_number)s"
        return f"{_OLD}owner = %(former_owner)s AND {_OLD}wanted = {_OLD}started"

    def given(self) -> dict[str, Any]:
        return {"former_number": self.number, "former_owner": self.owner}


@dataclass(frozen=True, slots=True)
class Open:
    """A duty that nobody is known to see to."""

    id: int
    place: Place
    number: int
    tries: int
    rescues: int
    parcel: Parcel


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a row."""

    wanted: int
    done: int

    @property
    def is_open(self) -> bool:
        return self.wanted > self.done


_PARCEL = tuple(each.name for each in fields(Parcel))
_PARCELS = ", ".join(_PARCEL)
_PLACE = "name = %(name)s AND task_name = %(task_name)s"
_READ = f"FROM {DUTY} WHERE {_PLACE} AND owner = %(owner)s"
#: What was tried is that of the number that was begun last.
_TRIES = "CASE WHEN started = wanted THEN tries ELSE 0 END"
_OPEN = f"id, name, task_name, wanted, {_TRIES}, rescues, {_PARCELS}"
#: A name in an assignment is the row's old value on every database only if it is said whose.
_OLD = f"{DUTY}."
_FREE = f"""NOT EXISTS (
    SELECT 1 FROM {HELD} h WHERE h.name = {DUTY}.name AND h.expires_at > {{now}})"""


class PendingRuns(Records):
    """The duties that have to do with one alias."""

    def count(
        self,
        place: Place,
        parcel: Parcel,
        grace: float,
        delivery: message_records.Message | None = None,
        unless_newer: Former | None = None,
    ) -> Begun | None:
        """
        Count a trigger that didn't get the lock; its arguments are the latest now.

        Args:
            unless_newer: Of a trigger that was counted before: the run of it. It isn't counted
                again if newer ones came since, whose arguments would be lost.

        Returns:
            What is known of its message. One that was counted at an earlier delivery isn't again.
        """

        def work(statements: Statements) -> Begun | None:
            with statements.cursor(atomic=delivery is not None, often=True) as cursor:
                begun = None
                if delivery is not None:
                    begun = message_records.begin(statements, cursor, delivery)
                if begun is None or begun.is_first:
                    given = self._given(statements, place, parcel, grace=grace, owner="")
                    sql = self._upsert(statements, {"started": "0", "tries": "0"}, {}, unless_newer)
                    former = {} if unless_newer is None else unless_newer.given()
                    cursor.execute(sql, {**given, **former})
                return begun

        return self.run("count of a trigger", place.name, work)

    def begin(
        self,
        place: Place,
        owner: str,
        parcel: Parcel,
        grace: float,
        delivery: message_records.Message | None = None,
    ) -> tuple[Begun | None, Turn | None]:
        """
        Count a trigger that got the lock, and take on all there is, with its arguments.

        One that was counted at an earlier delivery takes on what there is, if anything.
        """

        def work(statements: Statements) -> tuple[Begun | None, Turn | None]:
            with statements.cursor(atomic=delivery is not None, often=True) as cursor:
                begun = None
                if delivery is not None:
                    begun = message_records.begin(statements, cursor, delivery)
                    if begun.outcome:
                        return begun, None
                    # Counted before, unless that was under another policy of the task.
                    if not begun.is_first and _numbers(cursor, place) is not None:
                        return begun, self._take_on(statements, cursor, place, owner, grace)
                return begun, self._begin(statements, cursor, place, owner, parcel, grace)

        return self.run("beginning of a run", place.name, work)

    def take_on(self, place: Place, owner: str, grace: float) -> Turn | None:
        """Take on all there is, with the latest arguments; None if there is no duty."""

        def work(statements: Statements) -> Turn | None:
            with statements.cursor(atomic=False, often=True) as cursor:
                return self._take_on(statements, cursor, place, owner, grace)

        return self.run("beginning of a run", place.name, work)

    def settle(self, place: Place, owner: str, number: int, grace: float) -> bool:
        """Note that a run ended. False if another took on later: then that one covers it."""

        def work(statements: Statements) -> bool:
            with statements.cursor(atomic=False, often=True) as cursor:
                sets = {
                    "due_at": f"CASE WHEN wanted > %(number)s THEN {statements.later('grace')} "
                    f"ELSE {statements.later('kept')} END",
                    "done": "%(number)s",
                    "updated_at": statements.now,
                }
                given = self._where(place, owner=owner, number=number)
                mine = f"{_PLACE} AND owner = %(owner)s AND done < %(number)s"
                times = statements.times(grace=grace, kept=KEPT)
                cursor.execute(update(DUTY, sets, mine), {**given, **times})
                return bool(cursor.rowcount)

        return self.run("end of a run", place.name, work)

    def waiting(self, name: str) -> list[Open]:
        """
        The duties under a lock that no run has begun, of every task that shares it.

        To be asked after the lock was given back. What was begun is the business of that run or,
        if it died, of `overdue()`.
        """
        return self._found("look for duties", name, "name = %(name)s AND wanted > started", {})

    def numbers(self, place: Place) -> Numbers | None:
        """The numbers of a duty; None if there never was one, or long ago."""

        def work(statements: Statements) -> Numbers | None:
            with statements.reading() as cursor:
                return _numbers(cursor, place)

        return self.run("look for duties", place.name, work)

    def overdue(self, task_names: Sequence[str], queues: Sequence[str], most: int) -> list[Open]:
        """
        PendingRuns of these tasks that are due, and whose lock nobody has by the registry.

        Those of other queues than these are left out.
        """
        tasks, given = listed("t", task_names)
        known, more = listed("q", ("", *queues))
        return self._found(
            "look for duties",
            None,
            f"due_at <= {{now}} AND wanted > done AND task_name IN ({tasks}) "
            f"AND queue IN ({known}) AND {_FREE} ORDER BY due_at LIMIT {int(most)}",
            {**given, **more},
        )

    def claim(self, duty: Open, pause: float) -> bool:
        """Have one of the living look after a duty, and nobody else for `pause` seconds."""
        sets = {"due_at": "{later}", "rescues": "rescues + 1"}
        return self._change(duty, sets, "due_at <= {now}", pause)

    def give_up(self, duty: Open) -> bool:
        """Look after a duty no more, until a new trigger comes; whether this call did that."""
        return self._change(duty, {"due_at": "NULL"}, "due_at IS NOT NULL")

    def give_up_turn(self, place: Place, number: int) -> bool:
        """See `give_up()`; for a run that took on a number that too many others had."""

        def work(statements: Statements) -> bool:
            with statements.cursor(atomic=False) as cursor:
                condition = f"{_PLACE} AND wanted = %(number)s AND due_at IS NOT NULL"
                sql = update(DUTY, {"due_at": "NULL"}, condition)
                cursor.execute(sql, self._where(place, number=number))
                return bool(cursor.rowcount)

        return self.run("end of a run", place.name, work)

    def forget(self, batches: int) -> int:
        """Delete rows that had no duty for long; returns how many."""
        return self.in_batches("sweeping of duties", batches, _forget)

    def _begin(
        self,
        statements: Statements,
        cursor: Any,
        place: Place,
        owner: str,
        parcel: Parcel,
        grace: float,
    ) -> Turn:
        given = self._given(statements, place, parcel, grace=grace, owner=owner)
        sets = {"tries": "1", "started": f"{_OLD}wanted + 1", "owner": "%(owner)s"}
        sql = self._upsert(statements, {"started": "1", "tries": "1"}, sets)
        found = statements.written(cursor, sql, given, "started, tries", _READ)
        if found is None:
            # Somebody has taken on since, so this lease is past, and so is its turn.
            return Turn(0, 1)
        return Turn(*found)

    def _take_on(
        self, statements: Statements, cursor: Any, place: Place, owner: str, grace: float
    ) -> Turn | None:
        sets = {
            # The same run may come twice, if an answer was lost.
            "tries": "CASE WHEN started < wanted THEN 1 WHEN owner = %(owner)s THEN tries "
            "ELSE tries + 1 END",
            "rescues": "0",
            "due_at": f"COALESCE(due_at, {statements.later('grace')})",
            # After what is reckoned from it.
            "started": "wanted",
            "owner": "%(owner)s",
            "updated_at": statements.now,
        }
        given = {**self._where(place, owner=owner), **statements.times(grace=grace)}
        sql = update(DUTY, sets, f"{_PLACE} AND wanted > done")
        # The number and the arguments of one moment: a trigger may come between two statements.
        found = statements.written(cursor, sql, given, f"wanted, tries, {_PARCELS}", _READ)
        if found is None:
            return None
        number, tries, *parcel = found
        return Turn(number, tries, Parcel(*parcel))

    def _upsert(
        self,
        statements: Statements,
        new: dict[str, str],
        old: dict[str, str],
        unless_newer: Former | None = None,
    ) -> str:
        """Count a trigger, whose arguments are the latest from now on."""
        later = statements.later("grace")
        had = f"{_OLD}wanted > {_OLD}done AND {_OLD}due_at IS NOT NULL"
        columns = {name: f"%({name})s" for name in ("alias", *_PARCEL)}
        values = {
            "name": "%(name)s",
            "task_name": "%(task_name)s",
            "owner": "%(owner)s",
            "wanted": "1",
            "done": "0",
            "rescues": "0",
            "due_at": later,
            "updated_at": statements.now,
            **columns,
            **new,
        }
        sets = {
            **old,
            "rescues": f"CASE WHEN {had} THEN {_OLD}rescues ELSE 0 END",
            "due_at": f"CASE WHEN {had} THEN {_OLD}due_at ELSE {later} END",
            "updated_at": statements.now,
            **columns,
            # After what is reckoned from it.
            "wanted": f"{_OLD}wanted + 1",
        }
        if unless_newer is not None:
            newest = unless_newer.is_newest
            sets = {
                column: f"CASE WHEN {newest} THEN {value} ELSE {_OLD}{column} END"
                for column, value in sets.items()
            }
        return statements.upsert(DUTY, values, ["name", "task_name"], sets)

    def _given(
        self, statements: Statements, place: Place, parcel: Parcel, *, grace: float, owner: str
    ) -> dict[str, Any]:
        return {
            **self._where(place, owner=owner),
            "alias": self.config.alias,
            **dict(zip(_PARCEL, astuple(parcel), strict=True)),
            **statements.times(grace=grace),
        }

    def _where(self, place: Place, **more: Any) -> dict[str, Any]:
        return {"name": place.name, "task_name": place.task_name, **more}

    def _found(
        self, doing: str, name: str | None, condition: str, given: dict[str, Any]
    ) -> list[Open]:
        def work(statements: Statements) -> list[Open]:
            with statements.reading() as cursor:
                where = condition.format(now=statements.now)
                cursor.execute(
                    f"SELECT {_OPEN} FROM {DUTY} WHERE {where}",
                    {"name": name, **given, **statements.times()},
                )
                return [_open(row) for row in cursor.fetchall()]

        return self.run(doing, name, work)

    def _change(self, duty: Open, sets: dict[str, str], condition: str, pause: float = 0.0) -> bool:
        def work(statements: Statements) -> bool:
            with statements.cursor(atomic=False) as cursor:
                words = {"now": statements.now, "later": statements.later("pause")}
                sql = update(DUTY, sets, f"id = %(id)s AND wanted > done AND {condition}")
                cursor.execute(
                    sql.format(**words), {"id": duty.id, **statements.times(pause=pause)}
                )
                return bool(cursor.rowcount)

        return self.run("sweeping of duties", duty.place.name, work)


def _open(row: tuple[Any, ...]) -> Open:
    number, name, task_name, wanted, tries, rescues, *parcel = row
    return Open(number, Place(name, task_name), wanted, tries, rescues, Parcel(*parcel))


def _numbers(cursor: Any, place: Place) -> Numbers | None:
    cursor.execute(
        f"SELECT wanted, done FROM {DUTY} WHERE {_PLACE}",
        {"name": place.name, "task_name": place.task_name},
    )
    found = cursor.fetchone()
    return None if found is None else Numbers(*found)


def _forget(statements: Statements) -> int:
    with statements.cursor(atomic=False) as cursor:
        over = f"wanted = done AND due_at <= {statements.now}"
        cursor.execute(
            f"SELECT id FROM {DUTY} WHERE {over} ORDER BY due_at LIMIT {BATCH}", statements.times()
        )
        found = [number for (number,) in cursor.fetchall()]
        if not found:
            return 0
        inside, given = listed("i", found)
        # Once more: a trigger may have come since.
        cursor.execute(
            f"DELETE FROM {DUTY} WHERE id IN ({inside}) AND {over}",
            {**given, **statements.times()},
        )
        return len(found)
