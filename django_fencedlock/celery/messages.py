"""The messages that carry a task: what they are known by, and the next one of the same task."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from celery import Signature, _state, current_app
from celery.signals import before_task_publish

from .tasks import single_of

if TYPE_CHECKING:
    from .naming import AnyTask
    from .tasks import Single

#: Headers of ours. A message is known by DELIVERY, which all its deliveries share: a task's id
#: is shared by retries, and may be chosen by users.
DELIVERY = "fencedlock_delivery"
CONFLICTS = "fencedlock_conflicts"

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


def number(request: Any, header: str) -> int:
    """What a header of ours counts; zero if the message has none."""
    found = (request.headers or {}).get(header, 0)
    return found if isinstance(found, int) else 0


def _name_delivery(sender: str = "", headers: Any = None, body: Any = None, **kwargs: Any) -> None:
    if headers is not None and (found := _single_task(sender)) is not None:
        # Anew for each message: a retry carries the headers of the one before.
        given = headers.get(DELIVERY)
        headers[DELIVERY] = str(given) if isinstance(given, _Copied) else uuid.uuid4().hex
        published, single = found
        single.hide_in_message(published, headers, body)


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
