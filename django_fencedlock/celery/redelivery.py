"""
One message, delivered more than once.

Brokers deliver a message again if it wasn't acknowledged in time, or if they lost the worker. What
is known of a message is in the database: whether a delivery of it began, and how it ended.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import random
import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore
from celery.states import READY_STATES

from ..core.identity import Holder, shorten_task_id
from ..exceptions import BackendUnavailable
from ..storage.message_records import Begun, Message, MessageRecords
from .messages import DELIVERY, again, number, postpone
from .outcomes import FAILURE, IGNORED, RETRY
from .parcels import SERVE
from .skipped import FINISHED

if TYPE_CHECKING:
    from .runs import Run

logger = logging.getLogger(__name__)

#: Seconds for which a record is kept at least.
KEPT = 86400.0
#: What kombu's transports have if the settings don't say; brokers without one have nothing longer.
VISIBILITY_TIMEOUT = 3600.0
#: The shortest time, in seconds, after which a message that was put off comes again.
SHORTEST = 5.0
#: Seconds for another delivery, which has the lock already, to say that it has.
UNDECIDED = 1.0


class Conflict(enum.Enum):
    """What to do about a lock that somebody holds."""

    ORDINARY = "it is another message's"
    GONE = "try again: the holder has just gone"


class Redelivery:
    """What a run does lest its message be run twice. Does nothing where that can't be."""

    def __init__(self, run: Run) -> None:
        self._run = run
        #: The delivery that this run is; None if it needs no record.
        self.message = self._message() if self._applies() else None
        self._began = False

    @cached_property
    def _deliveries(self) -> MessageRecords:
        return MessageRecords(self._run.service.config)

    def _applies(self) -> bool:
        run = self._run
        if run.policy.redelivery != "defer" or run.is_called_directly or run.request.is_eager:
            return False
        if number(run.request, SERVE):
            # The duty itself tells whether there is something to do.
            return False
        # Acknowledged before its body begins, a message doesn't come again. One that waits for
        # its time in a worker does: it may be two of them that are due at the same moment.
        info = run.request.delivery_info or {}
        return bool(run.task.acks_late or info.get("redelivered") or run.request.eta)

    def _message(self) -> Message:
        run = self._run
        return Message(
            nonce=nonce(run.request, run.title),
            name=run.name,
            owner=run.owner.id,
            task_id=run.request.id or "",
            kept=kept(run.task.app),
        )

    def before_waiting(self, seen: Sequence[Holder]) -> None:
        """
        Don't wait in line for another delivery of the same message.

        It would have the lock a moment before a worker has told how the other one ended.
        """
        found = None if self.message is None else self._newest(self.message)
        if self.message is None or found is None or found[1].outcome:
            return
        holder = seen[0] if seen else self._run.service.holder(self.message.name)
        if holder is not None and holder.owner == found[0]:
            self._come_later("runs")

    def conflict(self, holder: Holder | None) -> Conflict | str:
        """
        Look whether it is another delivery of the same message that has the lock.

        If so, a copy is published that comes later, and `Ignore` is raised: the first delivery
        does what there is to do, and the copy sees to it if that one dies. A text tells why there
        is nothing to run any more.
        """
        if self.message is None or holder is None:
            return Conflict.ORDINARY
        deadline = time.monotonic() + UNDECIDED
        while True:
            found = self._newest(self.message)
            if found is not None:
                return self._known(holder, *found)
            if not self._may_be_the_same(holder) or time.monotonic() >= deadline:
                return Conflict.ORDINARY
            # It got the lock, and hasn't recorded it yet; or it is the run that this one retries.
            time.sleep(random.uniform(0.02, 0.1))
            now = self._run.service.holder(self.message.name)
            if now is None or now.owner != holder.owner:
                return Conflict.GONE

    def _known(self, holder: Holder, owner: str, begun: Begun) -> Conflict | str:
        """What to do about a message that was begun before."""
        if begun.outcome:
            return self.judge(begun) or Conflict.ORDINARY
        if owner == holder.owner or self._may_be_the_same(holder):
            self._come_later("runs")
        return Conflict.ORDINARY

    def begin(self) -> str | None:
        """
        Record that the run begins. To be called with the lock.

        Returns:
            Why there is nothing to run, or None if there is.
        """
        if self.message is None:
            return None
        try:
            begun = self._deliveries.begin(self.message)
        except BackendUnavailable as exc:
            self._fail_open(exc)
            return None
        return self.judge(begun)

    def judge(self, begun: Begun) -> str | None:
        """Tell why a message is not to be run that `begun` is known of; None if it is."""
        self._began = not begun.outcome
        if self._began:
            return None
        logger.info(
            "Lock %r: a message of %s was delivered again after its end (%s)",
            self._run.name,
            self._run.title,
            begun.outcome,
            extra=self._run.facts(),
        )
        if self._is_told(begun.outcome):
            raise Ignore(f"an earlier delivery of the message ended: {begun.outcome}")
        if not begun.is_past:
            # A worker stores the result after the lock was given back: it may be about to.
            self._come_later("has just ended")
        # Its worker died before it could tell. A failure may as well be tried again.
        return None if begun.outcome == FAILURE else FINISHED

    def ended(self, outcome: str) -> None:
        """Record the outcome. To be called before the lock is given back."""
        if self.message is None or not outcome or not self._began:
            return
        try:
            self._deliveries.finish(self.message, outcome)
        except BackendUnavailable as exc:
            # The work is done. At the worst a delivery that comes again does it again.
            logger.warning(
                "The end of a message wasn't recorded: %s", exc, extra=self._run.facts(str(exc))
            )

    def newest_owner(self) -> str:
        """The owner id of the run that the newest delivery of the message became."""
        found = None if self.message is None else self._newest(self.message)
        return "" if found is None else found[0]

    def _newest(self, message: Message) -> tuple[str, Begun] | None:
        try:
            return self._deliveries.newest(message.nonce, message.name)
        except BackendUnavailable as exc:
            self._fail_open(exc)
            return None

    def _fail_open(self, error: BackendUnavailable) -> None:
        """Go on without the record, if that is what the policy wants."""
        if self._run.policy.on_backend_error != "run":
            raise error
        logger.error(
            "%s runs without a record of its message: %s",
            self._run.title,
            error,
            extra=self._run.facts(reason=str(error)),
        )

    def _may_be_the_same(self, holder: Holder) -> bool:
        return f"[{shorten_task_id(str(self._run.request.id))}]" in holder.description

    def _come_later(self, why: str) -> None:
        run = self._run
        assert self.message is not None
        longest = max(2 * SHORTEST, (run.policy.ttl or run.service.config.ttl) / 3)
        countdown = random.uniform(SHORTEST, longest)
        copy = again(run.task, run.request, countdown=countdown, headers={})
        postpone(run.task, copy, self.message.nonce, f"an earlier delivery of the message {why}")

    def _is_told(self, outcome: str) -> bool:
        """Whether the earlier delivery did all that a worker does after the body."""
        task, request = self._run.task, self._run.request
        if outcome in (RETRY, IGNORED):
            return True
        ignored = request.ignore_result or task.ignore_result
        if ignored or not getattr(task.backend, "persistent", False):
            # Nobody can tell. Nearly always it did; and to say it again would send the next
            # task of a chain twice.
            return True
        try:
            return task.AsyncResult(request.id).state in READY_STATES
        except Exception as exc:
            logger.warning("The result backend couldn't be asked for %s: %s", request.id, exc)
            return True


def nonce(request: Any, task_name: str) -> str:
    """What all deliveries of a message share, and no other message has."""
    found = (request.headers or {}).get(DELIVERY)
    if isinstance(found, str) and 0 < len(found) <= 36 and found.isascii() and found.isprintable():
        return found
    # Published by somebody without our code.
    told = f"{found or ''}\0{task_name}\0{request.id}\0{request.retries}"
    return hashlib.blake2b(told.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def kept(app: Any) -> float:
    """For how many seconds a record is kept: twice as long as a message may be out, or longer."""
    given = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    timeout = given if isinstance(given, int | float) else VISIBILITY_TIMEOUT
    return max(KEPT, 2.0 * timeout)
