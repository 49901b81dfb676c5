"""
Coalesce any number of triggers into one run, after the active one.

A trigger that finds the lock held counts itself in the table of pending runs, and tries once more.
A run that releases the lock looks for triggers that were counted meanwhile, and publishes a message
that serves them. `storage.pending_runs` says why no trigger is lost.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from kombu.exceptions import OperationalError
from kombu.utils import json

from .. import logs
from ..conf import AliasConfig
from ..core.names import MAX_LENGTH
from ..exceptions import BackendUnavailable, FencedLockError, SettingsError
from ..storage.connections import open_connections, when_all_ended
from ..storage.message_records import Begun
from ..storage.pending_runs import Claimed, Pending, PendingRuns, Place, StoredMessage
from .duplicates import NUMBER, REPRS, SERVE, Delivery, number, route
from .names import Call, single_of
from .policy import Policy, Skip

if TYPE_CHECKING:
    from celery import Celery


logger = logging.getLogger(__name__)

#: A pending run is given up after this many runs that began and didn't end.
MOST_TRIES = 10
#: Seconds for which workers leave a new pending run to the holder that will release the lock.
GRACE = 2.0
#: The shortest time, in seconds, that a message has to come through its queue.
IN_QUEUE = 5.0
#: Pending runs that a worker serves in one look.
MOST_SERVED = 100
#: The pause after each message for a pending run doubles, up to this: the queue may be long.
LONGEST_PAUSE = 3600.0

Arguments = tuple[list[Any], dict[str, Any]]

_OURS = "fencedlock_"
#: Headers that a message has from Celery itself.
_CELERYS = frozenset({*vars(Context), *REPRS, "lang", "task", "compression"})
#: The options of a trigger's message that are stored.
_OPTIONS = frozenset(
    {
        *("exchange", "headers", "priority", "queue", "retries", "routing_key", "shadow"),
        *("soft_time_limit", "time_limit", *REPRS),
    }
)


class Coalescing:
    """What a run that coalesces does before, with and after its lock."""

    def __init__(self, call: Call, delivery: Delivery | None) -> None:
        self._call = call
        self._delivery = delivery
        self._message = None if delivery is None else delivery.message
        self._pending = PendingRuns(call.service.config)
        self._place = Place(call.name, call.title)
        self._claimed: Claimed | None = None
        #: The run's own trigger is counted already, so it only does what is pending.
        self._is_counted = number(call.request, SERVE) > 0
        # A sender may write any number; the column has a limit.
        claimed = min(number(call.request, NUMBER), 2**63 - 1) if call.request.retries else 0
        #: The number that the run claimed which this one retries.
        self._retried = claimed if claimed > 0 else None

    def before(self) -> Skip | None:
        """Return why the run doesn't need the lock at all; None if it does."""
        if not self._is_counted and self._retried is None:
            return None
        wanted, done = self._pending.numbers(self._place)
        if self._retried is not None and wanted > self._retried:
            # Triggers came after the run that this one retries, so their arguments are the latest.
            self._is_counted = True
        return Skip.SERVED if self._is_counted and wanted <= done else None

    def refused(self) -> Skip | None:
        """Leave the work to the next run; None to try the lock once more."""
        # First count, then try: the holder may have looked before this trigger was counted.
        return Skip.COALESCED if self._is_counted else self._count()

    def begin(self) -> tuple[Skip | None, Arguments | None]:
        """
        Claim all that is pending, with the lock.

        Return why there is nothing to run; and the arguments, unless they are the run's own.
        """
        skip, claimed = self._claim()
        if claimed is None:
            return skip or Skip.SERVED, None
        if claimed.tries > MOST_TRIES:
            if self._pending.give_up(self._place, claimed.number):
                report_given_up(self._place, claimed.tries - 1)
            return Skip.GIVEN_UP, None
        self._claimed = claimed
        self._remember(claimed)
        if claimed.message is None:
            return None, None
        latest = unpack(claimed.message)
        # A run's own arguments stay as they are: code above the function may have converted them.
        return None, None if latest == arguments(self._call) else latest

    def ended(self, outcome: str) -> None:
        """Record that the claimed work is done, before the lock is released."""
        if self._claimed is None or not outcome:
            return
        call, grace = self._call, max(self._call.ttl, IN_QUEUE)
        try:
            self._pending.end(self._place, call.owner.id, self._claimed.number, grace)
        except (BackendUnavailable, SettingsError) as exc:
            text, extra = "The end of a run wasn't recorded, so another will follow: %s", str(exc)
            logger.warning(text, exc, extra=call.facts(extra))

    def released(self) -> None:
        """Publish messages for the triggers that were counted before the release."""
        if any(lease.put_off for lease in self._call.leases):
            when_all_ended(open_connections(), self._serve)
        else:
            self._serve()

    def _count(self) -> Skip | None:
        """Count the run's own trigger; a retry's only if no newer one came."""
        message = pack(self._call)
        begun = self._pending.count(self._place, message, GRACE, self._message, self._retried)
        skip = self._judge(begun, message)
        self._is_counted = skip is None
        return skip

    def _judge(self, begun: Begun | None, message: StoredMessage) -> Skip | None:
        """Return why the message isn't run; count it again if its run failed."""
        if self._delivery is None or begun is None:
            return None
        skip = self._delivery.judge(begun)
        if begun.outcome and skip is None:
            self._pending.count(self._place, message, GRACE, unless_newer=begun.owner)
        return skip

    def _claim(self) -> tuple[Skip | None, Claimed | None]:
        owner, skip = self._call.owner.id, None
        if self._retried and not self._is_counted:
            skip = self._count()
        elif not self._is_counted:
            message = pack(self._call)
            begun, claimed = self._pending.begin(self._place, owner, message, GRACE, self._message)
            skip = self._judge(begun, message)
            if begun is None or not begun.outcome:
                return skip, claimed
        return skip, None if skip else self._pending.claim(self._place, owner, GRACE)

    def _remember(self, claimed: Claimed) -> None:
        """Store in the request which triggers the run covers, for a retry of it."""
        request = self._call.request
        if not self._call.is_called_directly:
            headers = {**(request.headers or {}), NUMBER: claimed.number}
            headers.pop(SERVE, None)
            request.headers = headers

    def _serve(self) -> None:
        try:
            for pending in self._pending.waiting(self._call.name):
                serve(self._call.task.app, pending)
        except Exception as exc:
            # This task has ended, whatever happens to the next one.
            name, extra = self._call.name, self._call.facts(str(exc))
            logger.warning("Triggers under lock %r have to wait: %s", name, exc, extra=extra)


# Messages for pending runs


def serve(app: Celery, pending: Pending, **more: Any) -> bool:
    """Publish a message for a pending run, without chain and chord, if this app has the task."""
    task: Any = app.tasks.get(pending.place.task_name)
    single = single_of(task)
    if single is None or single.policy.on_conflict != "coalesce":
        return False
    args, kwargs = unpack(pending.message)
    # Only what pack() stores: in a row from elsewhere, a header may name another task.
    given = json.loads(pending.message.options)
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    headers = {**_headers(options.pop("headers", {})), SERVE: pending.number}
    task.apply_async(tuple(args), kwargs, headers=headers, **options, **more)
    return True


def serve_overdue(app: Celery, config: AliasConfig, policies: dict[str, Policy]) -> int:
    """Publish messages for these tasks' pending runs whose holder died; return how many."""
    runs = PendingRuns(config)
    # Only of the queues of this worker: another one's tasks may even have another broker.
    found = runs.overdue(list(policies), list(app.amqp.queues.consume_from), MOST_SERVED)
    served = 0
    try:
        # A connection of its own, which is closed: a child that is forked later would inherit it.
        with app.connection_for_write() as broker:
            for pending in found:
                ttl = policies[pending.place.task_name].ttl or config.ttl
                if _reserve(runs, pending, ttl):
                    served += _serve_one(app, pending, broker)
    except FencedLockError:
        raise
    except Exception as exc:
        logger.warning("Left-over triggers wait for the broker: %s", exc)
    return served


def _serve_one(app: Celery, pending: Pending, broker: Any) -> bool:
    """Serve a pending run; fail only if the broker does, as it would for all others."""
    try:
        # No caller has the id of this message; a result would only be waited for.
        return serve(app, pending, connection=broker, retry=False, ignore_result=True)
    except (OSError, OperationalError, *broker.connection_errors, *broker.channel_errors):
        raise
    except Exception as exc:
        # The task may have other parameters by now.
        (name, task), text = pending.place, "A run of task %s under lock %r can't be published: %s"
        logger.warning(text, task, name, exc, extra=logs.facts(name=name, task=task))
        return False


def _reserve(runs: PendingRuns, pending: Pending, ttl: float) -> bool:
    """Reserve a pending run for a while; give it up after many tries."""
    if pending.tries >= MOST_TRIES:
        if runs.give_up(pending.place, pending.number):
            report_given_up(pending.place, pending.tries)
        return False
    # Reserved first: if this process dies now, another worker looks again after the pause.
    pause = min(LONGEST_PAUSE, max(ttl, IN_QUEUE) * 2.0 ** min(pending.rescues, 16))
    return runs.reserve(pending.place, pause)


def report_given_up(place: Place, tries: int) -> None:
    """Log once that workers no longer look after a pending run."""
    logger.error(
        "Gave up task %s under lock %r: %d runs began and none ended. See what kills its worker "
        "(memory, time limits), then call the task again.",
        place.task_name,
        place.name,
        tries,
        extra=logs.facts(name=place.name, task=place.task_name),
    )


def pack(call: Call) -> StoredMessage:
    try:
        body = json.dumps(arguments(call))
    except Exception as exc:
        raise TypeError(
            f'on_conflict="coalesce" stores the arguments of {call.title} in the database as JSON, '
            f"which can't represent them: {exc}. Pass plain values, such as primary keys."
        ) from exc
    options = _options(call.request)
    queue = options.get("queue", "")
    return StoredMessage(body, json.dumps(options), queue if len(queue) <= MAX_LENGTH else "")


def unpack(message: StoredMessage) -> Arguments:
    args, kwargs = json.loads(message.body)
    return list(args), dict(kwargs)


def arguments(call: Call) -> Arguments:
    """Return the arguments of a call, as they are in a message."""
    if call.is_called_directly:
        return list(call.args), dict(call.kwargs)
    return list(call.request.args or ()), dict(call.request.kwargs or {})


def _options(request: Any) -> dict[str, Any]:
    """Return the options of a trigger's message that the next one has as well."""
    if request.called_directly:
        return {}
    hard, soft = request.timelimit or (None, None)
    options = {
        **route(request.delivery_info or {}),
        "headers": _headers(request.headers or {}),
        "time_limit": hard,
        "soft_time_limit": soft,
        "shadow": request.shadow,
        # Otherwise a task that always fails would be retried without end.
        "retries": request.retries,
        **{each: getattr(request, each, None) for each in REPRS},
    }
    return {name: value for name, value in options.items() if value}


def _headers(headers: dict[str, Any]) -> dict[str, Any]:
    """Return the headers of the user's own, without values that JSON doesn't have."""
    own = {
        name: value
        for name, value in headers.items()
        if not name.startswith((_OURS, "x-")) and name not in _CELERYS
    }
    plain = json.loads(json.dumps(own, default=lambda value: None))
    return {name: value for name, value in plain.items() if value is not None}
