"""The messages that carry a task: what they are known by, and the next one of the same task."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from celery import Signature, _state, current_app
from celery.exceptions import Ignore, Reject
from celery.signals import before_task_publish

from .tasks import single_of

if TYPE_CHECKING:
    from .naming import AnyTask
    from .tasks import Single

#: Headers of ours. A message is known by DELIVERY, which all its deliveries share: a task's id
#: is shared by retries, and may be chosen by users.
DELIVERY = "fencedlock_delivery"
CONFLICTS = "fencedlock_conflicts"
#: The owner id of the run that published the message as its own continuation: a retry, a
#: replacement, a step of a workflow. Until that run has ended, its lock is no conflict.
FOLLOWS = "fencedlock_follows"
#: How often the message was postponed since that run still held the lock.
POSTPONED = "fencedlock_postponed"
#: The attribute of Celery's request that has the owner id of its run.
RUN = "fencedlock_run"

#: What Celery tells of a message's arguments, in logs and events.
REPRS = ("argsrepr", "kwargsrepr")


class _Copied(str):
    """What a copy is known by, until it is published: all other messages are named anew."""

    __slots__ = ()


class Again(Signature[Any]):
    """The next message of a task that didn't get its lock."""

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        # In eager mode Celery counts every Retry against max_retries; a conflict is none.
        options["retries"] = self.options.get("retries", 0)
        return super().apply(args, kwargs, **options)


def again(task: AnyTask, request: Any, *, countdown: float, headers: dict[str, Any]) -> Again:
    """Make the task's next message: in the same chain, chord and group, with as many retries."""
    # Celery 5.5 forgets that.
    more: dict[str, Any] = {"ignore_result": True} if request.ignore_result else {}
    # Nor are these copied: who hid an argument by them would see it told after all.
    more |= {each: told for each in REPRS if (told := getattr(request, each, None))}
    # Celery copies the queue only if the message came through the nameless exchange.
    more |= {each: told for each, told in route(request.delivery_info or {}).items() if told}
    made: Any = task.signature_from_request(
        request,
        countdown=countdown,
        retries=request.retries,
        headers={**(request.headers or {}), **headers},
        **more,
    )
    # Which it was made for isn't copied along.
    return Again(made, app=task.app)


def publish_copy(signature: Signature[Any], delivery: str) -> None:
    """Publish a message that stands for one that was delivered before, and is known as that."""
    signature.options["headers"][DELIVERY] = _Copied(delivery)
    signature.apply_async()


def postpone(task: AnyTask, copy: Signature[Any], delivery: str, why: str) -> NoReturn:
    """Publish a copy of a message, which comes later, and be done with this delivery of it."""
    try:
        publish_copy(copy, delivery)
    except Exception as exc:
        if task.acks_late:
            raise Reject(exc, requeue=True) from exc
        # The broker has no copy any more: the task has to fail, or nobody learns of it.
        raise
    raise Ignore(f"{why}; comes again in {copy.options['countdown']:.1f} s")


def route(info: dict[str, Any]) -> dict[str, Any]:
    """The options that send a message the way that one with this delivery_info came."""
    options: dict[str, Any] = {"priority": info.get("priority")}
    exchange, key = info.get("exchange"), info.get("routing_key")
    if exchange:
        return {**options, "exchange": exchange, "routing_key": key}
    # The nameless exchange leads to the queue that the key names.
    return {**options, "queue": key}


def number(request: Any, header: str) -> int:
    """What a header of ours counts; zero if the message has none."""
    found = (request.headers or {}).get(header, 0)
    return found if isinstance(found, int) else 0


def _name_delivery(sender: str = "", headers: Any = None, body: Any = None, **kwargs: Any) -> None:
    if headers is not None and (found := _single_task(sender)) is not None:
        given = headers.get(DELIVERY)
        if isinstance(given, _Copied):
            headers[DELIVERY] = str(given)
        else:
            # A retry carries the headers of the message before.
            headers[DELIVERY] = uuid.uuid4().hex
            for each in (FOLLOWS, POSTPONED):
                headers.pop(each, None)
            if publisher := _followed_run(sender, headers, body):
                headers[FOLLOWS] = publisher
        published, single = found
        single.hide_in_message(published, headers, body)


def _followed_run(name: str, headers: Any, body: Any) -> str:
    """The owner id of the run that a message continues; empty if it is a message of its own."""
    task: Any = _state.get_current_worker_task()
    owner = "" if task is None else getattr(task.request, RUN, "")
    if not owner:
        return ""
    facts = {**headers, **(body if isinstance(body, dict) else body[2])}
    # A retry and a replacement have the task's own id.
    is_step = any(facts.get(each) for each in ("chain", "chord", "group", "taskset"))
    return owner if name != task.name or facts.get("id") == task.request.id or is_step else ""


def _single_task(name: str) -> tuple[AnyTask, Single] | None:
    """The task of that name, of any app, if it is under `single_instance`."""
    # Nobody says which app publishes. Most processes have one.
    task: Any = current_app.tasks.get(name) or next(_found_elsewhere(name), None)
    single = None if task is None else single_of(task)
    return None if single is None else (task, single)


def _found_elsewhere(name: str) -> Iterator[Any]:
    state: Any = _state
    # Not by `app.tasks`, which would have each app make all of its tasks.
    return (app._tasks[name] for app in state._get_active_apps() if name in app._tasks)


before_task_publish.connect(_name_delivery, dispatch_uid="django_fencedlock.celery.messages")
