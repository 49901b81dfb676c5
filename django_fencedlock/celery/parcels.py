"""The message of a trigger, packed for the database, and sent from there."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from kombu.exceptions import ContentDisallowed
from kombu.serialization import dumps, loads, prepare_accept_content

from ..core.names import MAX_LENGTH
from ..storage.pending_runs import Open, Parcel
from .messages import REPRS, route

if TYPE_CHECKING:
    from .naming import AnyTask
    from .runs import Run

#: Headers of ours: on a message that serves a duty, and on what a run publishes for its task
#: anew, which is a retry; each with the duty's number.
SERVE, NUMBER = "fencedlock_serve", "fencedlock_number"

Arguments = tuple[list[Any], dict[str, Any]]

#: By name and by content type.
PICKLES = frozenset({"pickle", "application/x-python-serialize"})

_OURS = "fencedlock_"
#: Headers that a message has from Celery itself.
_CELERYS = frozenset({*vars(Context), *REPRS, "lang", "task", "compression"})
#: What of a trigger's message is kept.
_OPTIONS = frozenset(
    {
        *("exchange", "headers", "priority", "queue", "retries", "routing_key", "shadow"),
        *("soft_time_limit", "time_limit", *REPRS),
    }
)
#: Marks a body that isn't plain ASCII. A table may be of a character set that lacks most others.
_BASE64 = "base64,"


def pack(run: Run) -> Parcel:
    """Pack a run's arguments, and where its message came from."""
    serializer = serializer_of(run.task)
    if serializer in PICKLES:
        raise TypeError(
            f'on_conflict="coalesce" keeps the arguments of {run.title} in the database, and no '
            f"pickles: whoever can write there could run anything. Give the task another "
            'serializer, such as "json".'
        )
    try:
        content_type, encoding, body = dumps(arguments(run), serializer=serializer)
    except Exception as exc:
        raise TypeError(
            f'on_conflict="coalesce" keeps the arguments of {run.title} in the database, and '
            f"{serializer!r} can't serialise them: {exc}. Pass plain values, such as primary keys."
        ) from exc
    if not (isinstance(body, str) and body.isascii()):
        raw = body.encode() if isinstance(body, str) else bytes(body)
        encoding, body = _BASE64 + encoding, base64.b64encode(raw).decode()
    options = _options(run.request)
    queue = options.get("queue", "")
    queue = queue if len(queue) <= MAX_LENGTH else ""
    return Parcel(content_type, encoding, body, json.dumps(options), queue)


def serializer_of(task: Any) -> str:
    """What a task's messages are written by."""
    return str(task.serializer or task.app.conf.task_serializer)


def arguments(run: Run) -> Arguments:
    """The arguments of a run, as they are in a message."""
    if run.is_called_directly:
        # Less the task itself, which a bound function gets first.
        return list(run.args[_bound(run) :]), dict(run.kwargs)
    return list(run.request.args or ()), dict(run.request.kwargs or {})


def unpack(task: AnyTask, parcel: Parcel) -> Arguments:
    """The arguments that were packed."""
    if parcel.content_type in PICKLES:
        raise ContentDisallowed(f"A pickle is kept for {task.name}, and none is ever loaded.")
    encoding, body = parcel.content_encoding, parcel.body
    raw: Any = body
    if encoding.startswith(_BASE64):
        encoding, raw = encoding.removeprefix(_BASE64), base64.b64decode(body)
    accept = prepare_accept_content(task.app.conf.accept_content)
    args, kwargs = loads(raw, parcel.content_type, encoding, accept=accept)
    return list(args), dict(kwargs)


def put_on(run: Run, given: Arguments) -> None:
    """Have a run's body get these arguments."""
    if given == arguments(run):
        # As they are: whatever stands between Celery and the function may have converted them.
        return
    args, kwargs = given
    run.args = (*run.args[: _bound(run)], *args)
    run.kwargs = kwargs
    run.is_raw = True


def send(task: AnyTask, duty: Open, **more: Any) -> None:
    """Publish a message that serves a duty: the task itself, out of any chain, chord and group."""
    args, kwargs = unpack(task, duty.parcel)
    # As they were packed, whoever has written there since: a message's header may name a task.
    given = json.loads(duty.parcel.options)
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    headers = {**_headers(options.pop("headers", {})), SERVE: duty.number}
    task.apply_async(tuple(args), kwargs, headers=headers, **options, **more)


def _bound(run: Run) -> int:
    return int(bool(run.args) and run.args[0] is run.task)


def _options(request: Any) -> dict[str, Any]:
    """What of a trigger's message the next one is to have as well."""
    if request is None or request.called_directly:
        return {}
    hard, soft = request.timelimit or (None, None)
    options = {
        **route(request.delivery_info or {}),
        "headers": _headers(request.headers or {}),
        "time_limit": hard,
        "soft_time_limit": soft,
        "shadow": request.shadow,
        # Lest a task that always fails, and is retried by itself, begin from zero.
        "retries": request.retries,
        **{each: getattr(request, each, None) for each in REPRS},
    }
    return {name: value for name, value in options.items() if value}


def _headers(headers: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in headers.items()
        if not name.startswith((_OURS, "x-")) and name not in _CELERYS and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
