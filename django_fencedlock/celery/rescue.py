"""
What the living do for the dead: serve duties that are left over, and delete old rows.

Each worker's main process does it now and then; one of them is enough.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from celery import current_app

from .. import conf, logs
from ..core.runtime import clock
from ..exceptions import FencedLockError
from ..storage.dialect import BATCH
from ..storage.expired import ExpiredRows
from ..storage.message_records import MessageRecords
from ..storage.pending_runs import Open, PendingRuns
from .coalescing import MOST_TRIES, in_queue, serve, tell_given_up
from .tasks import Single, single_of
from .worker import every

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: Seconds between two looks for duties, at the least and at the most.
OFTEN, SELDOM = 1.0, 15.0
#: Seconds between two deletions of what is old.
DELETED_EACH = 60.0
#: PendingRuns that are served in one look, and batches of old rows that are deleted at a time.
MOST, BATCHES = 100, 50
#: The pause after each message for a duty doubles, up to so many seconds: the queue may be long.
LONGEST_PAUSE = 3600.0
#: So many messages for a duty, of which no run began, are enough.
MOST_RESCUES = 24
#: Records of messages that are kept at the most, for each fence database.
MOST_DELIVERIES = 1_000_000
#: Seconds between two countings of them, which aren't free.
COUNTED_EACH = 600.0


class Rescue:
    """The looks of one process after the duties and records of an app's tasks."""

    def __init__(self, app: Celery, clock: Callable[[], float] = clock) -> None:
        self._app = app
        self._clock = clock
        self._delete_at = self._count_at = -math.inf
        #: The aliases in whose databases a look has left something that is old.
        self._behind: set[str] = set()
        #: By alias: what is to be kept until then at the longest is deleted now.
        self._surplus: dict[str, Any] = {}
        self._failing: set[str] = set()

    def period(self) -> float:
        """Seconds from one look to the next."""
        if self._behind:
            return OFTEN
        coalescing = [_ttl(single) for _, single in self._singles() if _coalesces(single)]
        return min(SELDOM, max(OFTEN, min(coalescing) / 2)) if coalescing else DELETED_EACH

    def look(self) -> int:
        """Serve what nobody serves, and delete what is old; returns how many were served."""
        served = 0
        deletes = self._clock() >= self._delete_at
        counts = self._clock() >= self._count_at
        for alias, singles in self._databases().items():
            names = [name for name, single in singles.items() if _coalesces(single)]
            try:
                if names:
                    served += self._serve(PendingRuns(conf.config(alias)), names)
                if deletes:
                    self._behind.discard(alias)
                    self._delete(alias, names, counts)
                self._failing.discard(alias)
            except FencedLockError as exc:
                # Asked again soon; whoever asks has other things to do as well.
                if alias not in self._failing:
                    logger.warning("What tasks left behind can't be looked after: %s", exc)
                self._failing.add(alias)
        if deletes:
            self._delete_expired_rows()
            self._delete_at = self._clock() + (OFTEN if self._behind else DELETED_EACH)
            if counts:
                self._count_at = self._clock() + COUNTED_EACH
        return served

    def _serve(self, duties: PendingRuns, names: list[str]) -> int:
        # Others' messages would be in vain: their workers may even have another broker.
        found = duties.overdue(names, list(self._app.amqp.queues.consume_from), MOST)
        if not found:
            return 0
        served = 0
        # Of its own, and closed: a child that is forked later would have the app's connection too.
        with self._app.connection_for_write() as connection:
            for duty in found:
                try:
                    served += self._rescue(duties, duty, connection)
                except FencedLockError:
                    raise
                except Exception as exc:
                    # The rest would fail as well, each after a while.
                    logger.warning("Left-over triggers wait for the broker: %s", exc)
                    break
        return served

    def _rescue(self, duties: PendingRuns, duty: Open, connection: Any) -> bool:
        if duty.tries >= MOST_TRIES or duty.rescues >= MOST_RESCUES:
            if duties.give_up(duty):
                self._tell(duty)
            return False
        single = single_of(self._app.tasks[duty.place.task_name])
        assert single is not None
        pause = min(LONGEST_PAUSE, in_queue(_ttl(single)) * 2.0**duty.rescues)
        # Claimed first: should this process die now, another looks again after the pause.
        if not duties.claim(duty, pause):
            return False
        # Nobody has the id of this message. To keep its result is to listen for it here.
        return serve(self._app, duty, connection=connection, retry=False, ignore_result=True)

    def _tell(self, duty: Open) -> None:
        if duty.tries >= MOST_TRIES:
            tell_given_up(duty.place, duty.tries)
            return
        logger.error(
            "Gave up task %s under lock %r: %d messages were sent and no run began. See whether "
            "workers take from its queue, and whether its lock has another name now; then call it "
            "again.",
            duty.place.task_name,
            duty.place.name,
            duty.rescues,
            extra=logs.facts(name=duty.place.name, task=duty.place.task_name),
        )

    def _delete(self, alias: str, names: list[str], counts: bool) -> None:
        # No more at once: no child is forked meanwhile.
        most = BATCHES * BATCH
        deliveries = MessageRecords(conf.config(alias))
        left = deliveries.sweep(BATCHES) >= most
        if names:
            left |= PendingRuns(conf.config(alias)).forget(BATCHES) >= most
        if counts:
            self._count(alias, deliveries)
        if alias in self._surplus:
            surplus = deliveries.sweep(BATCHES, until=self._surplus[alias]) >= most
            if not surplus:
                del self._surplus[alias]
            left |= surplus
        if left:
            self._behind.add(alias)

    def _delete_expired_rows(self) -> None:
        """Delete what dead processes left in the registry, of every alias."""
        done = set()
        for alias in conf.aliases():
            try:
                config = conf.config(alias)
                if config.fence_database not in done:
                    done.add(config.fence_database)
                    ExpiredRows(config).sweep(BATCHES)
            except FencedLockError as exc:
                # Unfenced locks alone need no tables.
                logger.debug("Expired rows of the registry stay: %s", exc)

    def _count(self, alias: str, deliveries: MessageRecords) -> None:
        over = deliveries.limit(MOST_DELIVERIES)
        if over is not None:
            self._surplus[alias] = over
            logger.warning(
                "More than %d messages of tasks are on record; the oldest are deleted early.",
                MOST_DELIVERIES,
            )

    def _databases(self) -> dict[str, dict[str, Single]]:
        """The tasks by an alias; one alias for each fence database."""
        aliases: dict[str, str] = {}
        found: dict[str, dict[str, Single]] = {}
        for name, single in self._singles():
            alias = single.policy.backend
            first = aliases.setdefault(conf.config(alias).fence_database, alias)
            found.setdefault(first, {})[name] = single
        return found

    def _singles(self) -> Iterator[tuple[str, Single]]:
        tasks: dict[str, Any] = dict(self._app.tasks)
        # A task without a lock service fails by itself, and is no reason to leave the others alone.
        aliases = conf.aliases()
        for name, task in tasks.items():
            single = single_of(task)
            if single is None or single.policy.backend not in aliases:
                continue
            if _coalesces(single) or single.policy.redelivery == "defer":
                yield name, single


def _coalesces(single: Single) -> bool:
    return single.policy.on_conflict == "coalesce"


def _ttl(single: Single) -> float:
    return single.policy.ttl or conf.config(single.policy.backend).ttl


@cache
def _of_worker() -> Rescue:
    """The looks of a worker's main process. Only once it runs is it known which app it is for."""
    return Rescue(current_app._get_current_object())  # type: ignore[attr-defined]


every(lambda: _of_worker().period(), lambda: _of_worker().look())
