"""
Messages of tasks, and the ones that are delivered more than once.

A broker delivers a message again if it wasn't acknowledged in time, or if the worker died. The
database has a record of each message: whether a delivery of it began, and how it ended.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from celery import Signature, _state, current_app
from celery.exceptions import Ignore, Reject
from celery.signals import before_task_publish
from celery.states import READY_STATES

from ..backends.interface import Held
from ..core.identity import Holder, shorten_task_id
from ..exceptions import BackendUnavailable, SettingsError
from ..storage.message_records import Begun, Message, MessageRecords
from .names import Call, single_of
from .policy import Skip

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Headers of ours.
#: Identifies a message: all its deliveries share it. Retries share a task's id, and users may
#: choose it.
DELIVERY = "fencedlock_delivery"
CONFLICTS = "fencedlock_conflicts"
#: The owner ids of the run that published the message as its own continuation: a retry, a
#: replacement, a step of a workflow. Until that run has ended, its locks are no conflict.
FOLLOWS = "fencedlock_follows"
#: How often the message was postponed because that run still held the lock.
POSTPONED = "fencedlock_postponed"
#: On a message that a pending run needs, and on a retry of such a run; each with its number.
SERVE, NUMBER = "fencedlock_serve", "fencedlock_number"

#: The attribute of Celery's request that has the owner ids of its run, one for each lock.
RUN = "fencedlock_run"
#: What Celery shows of a message's arguments, in logs and events.
REPRS = ("argsrepr", "kwargsrepr")

#: Seconds for which a record is kept at least.
KEPT = 86400.0
#: The default of kombu's transports; a broker without this limit has no longer one.
VISIBILITY_TIMEOUT = 3600.0
#: The shortest pause, in seconds, before a deferred message comes again.
SHORTEST = 5.0
#: Seconds for another delivery, which has the lock already, to record that.
UNDECIDED = 1.0
#: Seconds until a postponed message comes again: at first, and at most. They double each time.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0


class HolderGone(Exception):
    """The holder of the lock has just gone: try again."""


class Delivery:
    """A delivery of a message that may come again, and the message's record."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._began = False
        self._records = MessageRecords(call.service.config)

    @property
    def message(self) -> Message:
        """The message; of a set of locks, with the first name, and the owner of its lease."""
        call = self._call
        return Message(
            nonce=nonce(call.request, call.title),
            name=call.names[0],
            owner=call.owner.id,
            task_id=call.request.id or "",
            kept=kept(call.task.app),
        )

    def conflict(self, holders: Sequence[Holder]) -> Skip | None:
        """
        Come later if another delivery of the same message has the locks.

        That delivery does the work; if it dies, the copy does. Raise `HolderGone` if it isn't known
        whether it was, and the holder has gone meanwhile.
        """
        deadline, task_id = time.monotonic() + UNDECIDED, shorten_task_id(self.message.task_id)
        maybe_the_same = {h.owner_id for h in holders if f"[{task_id}]" in h.description}
        while True:
            begun = self._ask(self._records.newest)
            if begun is not None and begun.outcome:
                return self.judge(begun)
            if begun and (maybe_the_same or self._runs(begun, holders)):
                self._come_later("runs")
            if begun is not None or not maybe_the_same or time.monotonic() >= deadline:
                return None
            # It has the lock but no record yet; or it is the run that this one retries.
            time.sleep(random.uniform(0.02, 0.1))
            if not maybe_the_same <= owners(self._call):
                raise HolderGone

    def begin(self) -> Skip | None:
        """Record that the run begins. Call it with the lock."""
        if self._call.permits is not None:
            return self._begin_with_permit()
        begun = self._ask(self._records.begin)
        return None if begun is None else self.judge(begun)

    def _begin_with_permit(self) -> Skip | None:
        """As `begin()`: another delivery of the message may run at this time."""
        before = self._ask(self._records.newest)
        if before is not None and self._runs(before):
            self._come_later("runs")
        former = before.owner if before is not None else ""
        begun = self._ask(partial(self._records.begin, former=former))
        if begun is not None and not begun.outcome and begun.owner != self.message.owner:
            self._come_later("has just begun")
        return None if begun is None else self.judge(begun)

    def _runs(self, begun: Begun, holders: Sequence[Holder] = ()) -> bool:
        """Return whether an earlier delivery has the locks, or one of the permits."""
        if begun.owner in {holder.owner_id for holder in holders}:
            return True
        is_other = not begun.outcome and begun.owner != self.message.owner
        return self._call.permits is not None and is_other and begun.owner in owners(self._call)

    def judge(self, begun: Begun) -> Skip | None:
        """Return why a message with the record `begun` isn't run; None if it is."""
        self._began = not begun.outcome
        if self._began:
            return None
        text = "Lock %r: a message of %s was delivered again after its end (%s)"
        name, title, extra = self._call.name, self._call.title, self._call.facts()
        logger.info(text, name, title, begun.outcome, extra=extra)
        if self._is_result_stored(begun.outcome):
            raise Ignore(f"an earlier delivery of the message ended: {begun.outcome}")
        if not begun.is_past:
            # A worker stores the result after the lock was released: it may be about to.
            self._come_later("has just ended")
        # Its worker died before it stored the result. A failure may be tried again.
        return None if begun.outcome == "failure" else Skip.FINISHED

    def ended(self, outcome: str) -> None:
        """Record the outcome. Call it before the lock is released."""
        if not outcome or not self._began:
            return
        try:
            self._records.finish(self.message, outcome)
        except (BackendUnavailable, SettingsError) as exc:
            # The work is done. At worst, a further delivery repeats it.
            logger.warning(
                "The end of a message wasn't recorded: %s", exc, extra=self._call.facts(str(exc))
            )

    def _ask(self, question: Callable[[Message], T]) -> T | None:
        """Ask the database; without an answer, go on if the policy allows that."""
        call = self._call
        try:
            return question(self.message)
        except (BackendUnavailable, SettingsError) as exc:
            if call.policy.on_backend_error != "run":
                if call.policy.fenced:
                    raise
                hint = 'A task with fenced=False needs no database with redelivery="run"'
                # Skipped, the message of a worker that died would be lost.
                is_lost = call.policy.on_conflict == "skip" and call.task.acks_late
                hint += ' and on_conflict="retry".' if is_lost else "."
                facts = {each: getattr(exc, each) for each in exc.fields}
                raise type(exc)(f"{exc} {hint}", **facts) from exc
            text, extra = "%s runs without a record of its message: %s", call.facts(str(exc))
            logger.error(text, call.title, exc, extra=extra)
            return None

    def _come_later(self, why: str) -> NoReturn:
        countdown = random.uniform(SHORTEST, max(2 * SHORTEST, self._call.ttl / 3))
        postpone(self._call, countdown, {}, f"an earlier delivery of the message {why}")

    def _is_result_stored(self, outcome: str) -> bool:
        """Return whether a worker stored the result of the earlier delivery."""
        task, request = self._call.task, self._call.request
        if outcome in ("retry", "ignored"):
            return True
        ignored = request.ignore_result or task.ignore_result
        if ignored or not getattr(task.backend, "persistent", False):
            # Unknown. Nearly always it did; a second result would send the next task of a chain
            # twice.
            return True
        try:
            return task.AsyncResult(request.id).state in READY_STATES
        except Exception as exc:
            logger.warning("Asking the result backend for %s failed: %s", request.id, exc)
            return True


def delivery_of(call: Call) -> Delivery | None:
    """Return the delivery of a call; None if its message can't come again."""
    request = call.request
    if call.policy.redelivery != "defer" or call.is_called_directly or request.is_eager:
        return None
    if number(request, SERVE):
        # The pending run itself shows whether there is something to do.
        return None
    # A message that is acknowledged before its body begins doesn't come again. One with an ETA
    # may, while it waits in a worker; then two of them are due at the same moment.
    info = request.delivery_info or {}
    may_come_again = call.task.acks_late or info.get("redelivered") or request.eta
    return Delivery(call) if may_come_again else None


def nonce(request: Any, task_name: str) -> str:
    """Return what all deliveries of a message share, and no other message has."""
    found = (request.headers or {}).get(DELIVERY)
    if isinstance(found, str) and 0 < len(found) <= 36 and found.isascii() and found.isprintable():
        return found
    # Published by a process without this package.
    text = f"{found or ''}\0{task_name}\0{request.id}\0{request.retries}"
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def kept(app: Any) -> float:
    given = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    timeout = given if isinstance(given, int | float) else VISIBILITY_TIMEOUT
    return max(KEPT, 2.0 * timeout)


def owners(call: Call) -> set[str]:
    """Ask the service which owners have the call's locks now, as far as it knows them."""
    found = call.service.grants.look_up(call.all_names()).values()
    return {held.owner for held in found if held.owner}


def postpone_until_publisher_ends(call: Call, held: Held) -> None:
    """
    Postpone the message if the run that published it still holds the lock.

    A body publishes its retry, its replacement and the steps of a workflow while it holds its
    lock, and an idle worker may get them at once. ``on_conflict`` would skip that work.
    """
    if call.is_called_directly or call.request.is_eager:
        return
    publisher = (call.request.headers or {}).get(FOLLOWS)
    if not publisher:
        return
    found = {held.owner} if held.owner else owners(call)
    # Without a known holder, it may have been the publisher. A publisher that has released the
    # lock never holds it again, so another holder is an ordinary conflict.
    if found and found.isdisjoint(publisher.split()):
        return
    times = max(0, number(call.request, POSTPONED))
    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(times, 16))
    why = f"the run that published the message still holds lock {call.name!r}"
    postpone(call, pause * random.uniform(0.5, 1.0), {POSTPONED: times + 1}, why)


# Publishing a message again


class _Copied(str):
    """The value of DELIVERY of a copy; other messages get a new value."""

    __slots__ = ()


def again(call: Call, countdown: float, headers: dict[str, Any]) -> Signature[Any]:
    """Make a copy of a call's message, with the same identity, chain, chord and group."""
    task, request, identity = call.task, call.request, nonce(call.request, call.title)
    # Celery 5.5 drops this option.
    more: dict[str, Any] = {"ignore_result": True} if request.ignore_result else {}
    # Celery doesn't copy these, which may hide an argument.
    more |= {each: text for each in REPRS if (text := getattr(request, each, None))}
    # Celery copies the queue only if the message came through the default exchange.
    more |= {each: value for each, value in route(request.delivery_info or {}).items() if value}
    made: Signature[Any] = task.signature_from_request(
        request,
        countdown=countdown,
        retries=request.retries,
        headers={**(request.headers or {}), **headers, DELIVERY: _Copied(identity)},
        **more,
    )
    return made


def postpone(call: Call, countdown: float, headers: dict[str, Any], why: str) -> NoReturn:
    """Publish a copy of a message that comes later, and raise `Ignore`."""
    try:
        again(call, countdown, headers).apply_async()
    except Exception as exc:
        if call.task.acks_late:
            raise Reject(exc, requeue=True) from exc
        # The broker has no copy any more: only a failure of the task shows it.
        raise
    raise Ignore(f"{why}; comes again in {countdown:.1f} s")


def route(info: dict[str, Any]) -> dict[str, Any]:
    """Return the options that send a message where another came from."""
    options: dict[str, Any] = {"priority": info.get("priority")}
    exchange, key = info.get("exchange"), info.get("routing_key")
    if exchange:
        return {**options, "exchange": exchange, "routing_key": key}
    # The default exchange sends it to the queue that the key names.
    return {**options, "queue": key}


def number(request: Any, header: str) -> int:
    """Return the number in a header of ours; zero if the message has none."""
    found = (request.headers or {}).get(header, 0)
    return found if isinstance(found, int) else 0


def _identify(sender: str = "", headers: Any = None, body: Any = None, **kwargs: Any) -> None:
    """Give each message of our tasks an identity, as it is published."""
    task = _task_of_any_app(sender)
    if headers is None or (single := single_of(task)) is None:
        return
    given = headers.get(DELIVERY)
    if isinstance(given, _Copied):
        headers[DELIVERY] = str(given)
    else:
        # A retry has the headers of the message before.
        headers[DELIVERY] = uuid.uuid4().hex
        for each in (FOLLOWS, POSTPONED):
            headers.pop(each, None)
        if publisher := _followed_run(sender, headers, body):
            headers[FOLLOWS] = publisher
    single.redact_message(task, headers, body)


def _followed_run(name: str, headers: Any, body: Any) -> str:
    """Return the owner ids of the run that a message continues, if any."""
    task: Any = _state.get_current_worker_task()
    owner = "" if task is None else getattr(task.request, RUN, "")
    if not owner:
        return ""
    facts = {**headers, **(body if isinstance(body, dict) else body[2])}
    # A retry and a replacement have the task's own id.
    is_step = any(facts.get(each) for each in ("chain", "chord", "group", "taskset"))
    return owner if name != task.name or facts.get("id") == task.request.id or is_step else ""


def _task_of_any_app(name: str) -> Any:
    if (task := current_app.tasks.get(name)) is not None:
        return task
    # `app.tasks` would make each app create all its tasks.
    apps = _state._get_active_apps()  # type: ignore[attr-defined]
    return next((app._tasks[name] for app in apps if name in app._tasks), None)


before_task_publish.connect(_identify, dispatch_uid="django_fencedlock.celery.duplicates")
