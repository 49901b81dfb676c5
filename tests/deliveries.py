"""Messages that are delivered to tasks here, as a worker would, with no worker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from celery import Celery, current_app
from celery.app.trace import build_tracer
from celery.signals import after_task_publish

QUEUE = "deliveries"

app = Celery(
    "tests.deliveries", broker="memory://", backend="cache+memory://", set_as_current=False
)
app.conf.task_default_queue = QUEUE


@dataclass(frozen=True)
class Sent:
    task: str
    args: Any
    kwargs: Any
    headers: dict[str, Any]
    queue: str

    @property
    def id(self) -> str:
        return str(self.headers["id"])


@dataclass(frozen=True)
class Done:
    result: Any
    #: Celery's word; SUCCESS if it has none.
    state: str


def deliver(
    task: Any,
    *args: Any,
    headers: dict[str, Any] | None = None,
    redelivered: bool = False,
    **request: Any,
) -> Done:
    route = {"exchange": "", "routing_key": QUEUE, "priority": 3, "redelivered": redelivered}
    request = {
        "id": uuid.uuid4().hex,
        "is_eager": False,
        "delivery_info": route,
        "headers": dict(headers or {}),
        "retries": 0,
        **request,
    }
    found = build_tracer(task.name, task, app=task.app)(request["id"], args, {}, request)
    return Done(found.retval, found.info.state if found.info else "SUCCESS")


def deliver_sent(sent: Sent, **more: Any) -> Done:
    ours = {key: value for key, value in sent.headers.items() if key.startswith("fencedlock_")}
    facts = {"retries": sent.headers["retries"], "eta": sent.headers["eta"], "id": sent.id}
    return deliver(app.tasks[sent.task], *sent.args, headers=ours, **{**facts, **more})


@contextmanager
def as_current_app(*cleared: Any) -> Iterator[None]:
    """Make the app the current one, and empty what bodies note."""
    before = current_app._get_current_object()
    app.set_current()
    for each in cleared:
        each.clear()
    yield
    before.set_current()


@contextmanager
def sending() -> Iterator[list[Sent]]:
    found: list[Sent] = []

    def note(sender: str, headers: Any, body: Any, routing_key: str, **kwargs: Any) -> None:
        found.append(Sent(sender, body[0], body[1], dict(headers), routing_key))

    after_task_publish.connect(note, weak=False)
    try:
        yield found
    finally:
        after_task_publish.disconnect(note)
