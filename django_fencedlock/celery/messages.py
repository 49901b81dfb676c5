"""The messages that carry a task: what they are known by, and the next one of the same task."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from celery import Signature, _state, current_app
from celery.signals import before_task_publish

from .tasks import single_of

if TYPE_CHECKING:
    from .tasks import AnyTask

#: Headers of ours. A message is known by DELIVERY, which all its deliveries share: a task's id
#: is shared by retries, and may be chosen by users.
DELIVERY = "fencedlock_delivery"
CONFLICTS = "fencedlock_conflicts"


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


def _name_delivery(sender: str = "", headers: Any = None, **kwargs: Any) -> None:
    if headers is not None and _is_single(sender):
        # Anew for each message: a retry carries the headers of the one before.
        given = headers.get(DELIVERY)
        headers[DELIVERY] = str(given) if isinstance(given, _Copied) else uuid.uuid4().hex


def _is_single(name: str) -> bool:
    """Whether a task of that name, of any app, is under `single_instance`."""
    # Nobody says which app publishes. Most processes have one.
    task = current_app.tasks.get(name) or next(_found_elsewhere(name), None)
    return task is not None and single_of(task) is not None


def _found_elsewhere(name: str) -> Iterator[Any]:
    state: Any = _state
    # Not by `app.tasks`, which would have each app make all of its tasks.
    return (app._tasks[name] for app in state._get_active_apps() if name in app._tasks)


before_task_publish.connect(_name_delivery, dispatch_uid="django_fencedlock.celery.messages")
