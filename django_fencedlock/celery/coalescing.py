"""
While one runs, any number of triggers become one further run, with the latest arguments.

A trigger that finds the lock taken counts itself, and tries once more; whoever gives the lock back
looks for what was counted meanwhile, and publishes a message that serves it. `fences.duties` tells
why none is lost so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .. import logs
from ..core.transactions import open_connections, when_all_ended
from ..exceptions import BackendUnavailable
from ..storage.pending_runs import Former, Open, Parcel, PendingRuns, Place, Turn
from .messages import number
from .parcels import NUMBER, SERVE, pack, put_on, send, unpack
from .skipped import COALESCED, GIVEN_UP, SERVED
from .tasks import single_of

if TYPE_CHECKING:
    from celery import Celery

    from ..storage.message_records import Message
    from .redelivery import Redelivery
    from .runs import Run

logger = logging.getLogger(__name__)

#: A duty is given up when so many runs began it and none of them ended.
MOST_TRIES = 10
#: Seconds for which the living leave a new duty to those whose business it is.
GRACE = 2.0
#: The shortest time, in seconds, that a message has to come through its queue.
IN_QUEUE = 5.0


class Coalescing:
    """
    What a run under ``on_conflict="coalesce"`` does before, between and after.

    Each step that returns a text tells by it why there is nothing to run; with None one goes on.
    """

    def __init__(self, run: Run, redelivery: Redelivery) -> None:
        self._run = run
        self._redelivery = redelivery
        self._duties = PendingRuns(run.service.config)
        self._place = Place(run.name, run.title)
        self._turn: Turn | None = None
        #: Everything of this run's own is counted already, so it only does what is there.
        self._is_counted = number(run.request, SERVE) > 0
        self._is_last_try = self._is_counted
        #: The run that this one retries.
        self._retried = _retried(run.request)

    def before(self) -> str | None:
        """Look whether there is a need for the lock at all."""
        if self._is_counted:
            numbers = self._duties.numbers(self._place)
            return None if numbers is not None and numbers.is_open else SERVED
        if self._retried is None:
            return None
        numbers = self._duties.numbers(self._place)
        if numbers is None or numbers.wanted <= self._retried.number:
            return None
        # Triggers came after the run that this one retries, so their arguments are the latest.
        self._is_counted = self._is_last_try = True
        return None if numbers.is_open else SERVED

    def lost(self) -> str | None:
        """Leave the work to the next run; None if the lock is to be tried once more."""
        if self._is_last_try:
            return COALESCED
        # Counted first and tried afterwards: the holder may have looked before it was counted.
        if why := self._count():
            return why
        self._is_last_try = True
        return None

    def won(self) -> str | None:
        """Take on all there is, with the latest arguments. To be called with the lock."""
        why, turn = self._begin()
        if turn is None:
            return why
        if turn.tries > MOST_TRIES:
            return self._given_up(turn)
        self._turn = turn
        self._remember(turn)
        if turn.parcel is not None:
            put_on(self._run, unpack(self._run.task, turn.parcel))
        return None

    def ended(self, outcome: str) -> None:
        """Strike off what the run covered. To be called before the lock is given back."""
        if self._turn is None or not outcome:
            return
        try:
            self._duties.settle(
                self._place, self._run.owner.id, self._turn.number, in_queue(self._ttl)
            )
        except BackendUnavailable as exc:
            logger.warning(
                "The end of a run wasn't recorded, so another will follow: %s",
                exc,
                extra=self._run.facts(reason=str(exc)),
            )

    def released(self) -> None:
        """
        Have what was counted meanwhile served. To be called after the lock was given back.

        Whoever counts from now on finds the lock free.
        """
        lease = self._run.lease
        if lease is not None and lease.put_off:
            when_all_ended(open_connections(), self._serve)
        else:
            self._serve()

    @property
    def _message(self) -> Message | None:
        return self._redelivery.message

    @property
    def _ttl(self) -> float:
        return self._run.policy.ttl or self._run.service.config.ttl

    def _count(self) -> str | None:
        """Count the run's own trigger; that of a retry only if no newer one was counted since."""
        parcel = pack(self._run)
        begun = self._duties.count(self._place, parcel, GRACE, self._message, self._retried)
        if begun is not None and begun.outcome:
            if why := self._redelivery.judge(begun):
                return why
            self._count_failed(parcel)
        self._is_counted = True
        return None

    def _count_failed(self, parcel: Parcel) -> None:
        """Count the trigger of a run that failed, and whose result wasn't stored, once more."""
        failed = Former(owner=self._redelivery.newest_owner())
        self._duties.count(self._place, parcel, GRACE, unless_newer=failed)

    def _begin(self) -> tuple[str, Turn | None]:
        me = self._run.owner.id
        if self._retried and not self._is_counted and (why := self._count()):
            return why, None
        if self._is_counted:
            return SERVED, self._duties.take_on(self._place, me, GRACE)
        parcel = pack(self._run)
        begun, turn = self._duties.begin(self._place, me, parcel, GRACE, self._message)
        if begun is None:
            return SERVED, turn
        why = self._redelivery.judge(begun)
        if begun.outcome and why is None:
            self._count_failed(parcel)
            turn = self._duties.take_on(self._place, me, GRACE)
        return why or SERVED, turn

    def _remember(self, turn: Turn) -> None:
        """Have a retry of this run know which triggers it covers."""
        request = self._run.request
        if request is not None and not self._run.is_called_directly:
            headers = {**(request.headers or {}), NUMBER: turn.number}
            headers.pop(SERVE, None)
            request.headers = headers

    def _given_up(self, turn: Turn) -> str:
        if self._duties.give_up_turn(self._place, turn.number):
            tell_given_up(self._place, turn.tries - 1)
        return GIVEN_UP

    def _serve(self) -> None:
        try:
            for duty in self._duties.waiting(self._run.name):
                serve(self._run.task.app, duty)
        except Exception as exc:
            # The task has ended, whatever becomes of the next one.
            logger.warning(
                "Triggers under lock %r have to wait: %s",
                self._run.name,
                exc,
                extra=self._run.facts(reason=str(exc)),
            )


def _retried(request: Any) -> Former | None:
    taken_on = number(request, NUMBER) if request is not None and request.retries else 0
    # As large as the column; whoever sends a message may write any number.
    return Former(number=min(taken_on, 2**63 - 1)) if taken_on > 0 else None


def serve(app: Celery, duty: Open, **options: Any) -> bool:
    """Publish a message for a duty, if it is of a task of this app; `options` say how."""
    task: Any = app.tasks.get(duty.place.task_name)
    single = None if task is None else single_of(task)
    if single is None or single.policy.on_conflict != "coalesce":
        return False
    send(task, duty, **options)
    return True


def in_queue(ttl: float) -> float:
    """For how many seconds a message that serves may be on its way before another is sent."""
    return max(ttl, IN_QUEUE)


def tell_given_up(place: Place, tries: int) -> None:
    """Tell once of a duty that nobody looks after any more."""
    logger.error(
        "Gave up task %s under lock %r: %d runs began and none ended, so its worker seems to be "
        "killed each time. Look for what kills it (memory, time limits), and call the task again.",
        place.task_name,
        place.name,
        tries,
        extra=logs.facts(name=place.name, task=place.task_name),
    )
