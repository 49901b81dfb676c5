"""Calls of tasks under `single_instance`, and the names of their locks."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Set
from datetime import UTC, date, datetime, time, timedelta
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery import Task, current_app, current_task
from celery.utils.saferepr import saferepr
from django.db.models import Model
from django.utils.crypto import salted_hmac

from .. import conf, logs
from ..core import names
from ..core.identity import new_owner
from ..core.manager import Service, service
from ..lease import Lease
from ..storage.text import HIDDEN
from .policy import TERMS, Policy

if TYPE_CHECKING:
    AnyTask = Task[Any, Any]

#: The attribute of a wrapped function that leads to its `Single`.
MARK = "_fencedlock_single"
#: Hexadecimal digits of a digest in a name.
_DIGEST = 32
_SALT = "django_fencedlock.sensitive"
#: Rounds no decimal.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
#: Powers of ten beyond which a decimal may be written with an E.
_READABLE = 20


class Single:
    """A task's function under `single_instance`, and its policy."""

    def __init__(
        self, function: Callable[..., Any], policy: Policy, name: object, parameters: Any
    ) -> None:
        self.function = function
        self.policy = policy
        self._parameters = names.Parameters(function)
        self.signature = self._parameters.signature
        for each in policy.sensitive:
            if each not in self.signature.parameters:
                raise TypeError(
                    f"@single_instance(sensitive={each!r}): {function.__qualname__}() has no such "
                    f"parameter; it has {', '.join(self.signature.parameters) or 'none'}."
                )
        if hidden := {*map(str, parameters.values())} & {*policy.sensitive}:
            raise TypeError(
                f"@single_instance(sensitive={min(hidden)!r}): the parameter names a row, and the "
                "row's lock has the same name for every caller. Leave it out."
            )
        self._name, self._pattern = naming(name, parameters, function)

    def name(
        self, task: AnyTask | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, str, str]:
        """
        Return the name of a call's lock; `args` don't have the task itself.

        Beside it, the name of the task, or of the function; and the pattern of the lock's name.
        """
        function, pattern = self.function, self._pattern()
        title = task.name if task is not None else f"{function.__module__}.{function.__qualname__}"
        bound_to_task = task is not None and is_bound(task)
        arguments = self._parameters.bind((task, *args) if bound_to_task else args, kwargs)
        if bound_to_task:
            del arguments[next(iter(self.signature.parameters))]
        for key in self.policy.sensitive:
            if key in arguments:
                arguments[key] = _digest(key, arguments[key])
        return self._name(task, title, arguments), title, pattern or title

    def redact_message(self, task: AnyTask, headers: dict[str, Any], body: Any) -> None:
        """Replace sensitive arguments in what Celery logs and sends in events."""
        sensitive = self.policy.sensitive
        if not (sensitive and isinstance(body, tuple) and len(body) == 3):
            return
        args, kwargs, _ = body
        known = list(self.signature.parameters.values())[int(is_bound(task)) :]
        by_kind = {each.kind: each.name for each in known}
        places = [each.name for each in known if each.kind <= each.POSITIONAL_OR_KEYWORD]
        places += [by_kind.get(inspect.Parameter.VAR_POSITIONAL, "")] * len(args)
        more = by_kind.get(inspect.Parameter.VAR_KEYWORD, "")

        def shown(name: str, value: object) -> object:
            return HIDDEN if name in sensitive else value

        headers["argsrepr"] = saferepr(tuple(map(shown, places, args)))
        headers["kwargsrepr"] = saferepr(
            {
                key: shown(key if key in self.signature.parameters else more, value)
                for key, value in kwargs.items()
            }
        )

    def task_of(self, args: tuple[Any, ...]) -> tuple[AnyTask | None, tuple[Any, ...]]:
        """Return the task of this call, and the arguments without the task."""
        if args and isinstance(args[0], Task) and single_of(args[0]) is self:
            return args[0], args[1:]
        running: Any = current_task._get_current_object()  # type: ignore[attr-defined]
        if single_of(running) is self:
            return running, args
        # A plain call of the function.
        tasks: list[AnyTask] = list(current_app.tasks.values())
        return next((task for task in tasks if single_of(task) is self), None), args


def single_of(task: Any) -> Single | None:
    """Return the `Single` of a task; None if it isn't under `single_instance`."""
    found: Single | None = getattr(getattr(task, "run", None), MARK, None)
    return found


def is_bound(task: Any) -> bool:
    """Return whether the task's function gets the task as its first argument."""
    # autoretry_for replaces the method by a function.
    return inspect.ismethod(getattr(task, "_orig_run", task.run))


class Call:
    """A call of a task: a delivery, a retry or a direct call, with its own owner."""

    def __init__(
        self,
        single: Single,
        task: AnyTask | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        request: Any,
    ) -> None:
        self.single = single
        self.policy = single.policy
        self.task: Any = task
        #: The arguments, without the task itself.
        self.args, self.kwargs = args, kwargs
        self.name, self.title, self.pattern = single.name(task, args, kwargs)
        #: Celery's request. Other threads can't look it up.
        self.request = request
        #: Whether neither a message nor ``apply()`` caused the call.
        self.is_called_directly = request is None or bool(request.called_directly)
        self.task_id = "" if request is None else request.id or ""
        # Made before the lock is asked for: a time limit may come between grant and return.
        self.owner = new_owner((self.title, self.task_id))
        self.service: Service = service(self.policy.backend)
        self.ttl = self.policy.ttl or self.service.config.ttl
        self.lease: Lease | None = None

    def facts(self, reason: str | None = None) -> dict[str, Any]:
        """Return the ``extra`` of a log record about this call."""
        return logs.facts(
            name=self.name,
            alias=self.policy.backend,
            token=self.lease.token if self.lease and self.lease.fenced else None,
            owner=self.owner.id,
            task=self.title,
            reason=reason,
        )


# The four ways to name a lock

#: Makes the name of a task (None if its function was called by itself), its title, and the
#: arguments with their defaults, by parameter.
Naming = Callable[["AnyTask | None", str, Mapping[str, Any]], str]


def naming(
    given: object, parameters: Mapping[str, object], function: Callable[..., Any]
) -> tuple[Naming, Callable[[], str]]:
    if isinstance(given, type) and issubclass(given, Model):
        return _by_model(given, parameters, function)
    for key in parameters:
        raise _unknown("", key)
    if given is None:
        return _name_by_call, str
    if isinstance(given, str):
        template = names.Template(given, function)
        # A bound task's first parameter is the task, which isn't among the arguments.
        first = next(iter(inspect.signature(function).parameters), "")
        return lambda task, _, arguments: template.fill({first: task, **arguments}), lambda: given
    if callable(given):
        return lambda task, _, arguments: names.validate(given(task, dict(arguments))), str
    raise TypeError(
        f"@single_instance({given!r}): the name must be a template, a callable "
        "(task, arguments) -> name, or a fenced model."
    )


def _name_by_call(task: AnyTask | None, title: str, arguments: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{key}={canonical(value)}" for key, value in arguments.items())
    name = f"{title}({shown})"
    if len(name) > names.MAX_LENGTH:
        digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
        name = f"{name[: names.MAX_LENGTH - _DIGEST - 2]}…#{digest}"
    return names.validate(name)


def _by_model(
    model: Any, parameters: Mapping[str, object], function: Callable[..., Any]
) -> tuple[Naming, Callable[[], str]]:
    start = f"@single_instance({model.__name__}"
    if not hasattr(model, "fencing"):
        raise TypeError(
            f"{start}): {model.__name__} is no FencedModel, so it has no lock. Give a template, "
            'such as "invoice:{invoice_id}".'
        )
    fields, fencing = model._meta.concrete_fields, model.fencing
    columns = {"pk": [field.attname for field in fencing.pk]}
    columns |= {key: [field.attname] for field in fields for key in (field.name, field.attname)}
    for key in parameters:
        if key not in columns:
            raise _unknown(model.__name__, key)
    if fencing.columns is None:
        raise TypeError(
            f"{start}): its lock is named by a callable, which needs a row. Give a callable "
            "(task, arguments) -> name instead of the model."
        )
    given = {column for key in parameters for column in columns[key]}
    known = inspect.signature(function).parameters
    if given != {*fencing.columns} or not {*parameters.values()} <= {*known}:
        example = ", ".join(f'{column}="..."' for column in fencing.columns)
        raise TypeError(
            f"{start}, {example}) has to name parameters of {function.__qualname__}(), which are "
            f"{', '.join(known)}."
        )

    def name(task: AnyTask | None, title: str, arguments: Mapping[str, Any]) -> str:
        values = {key: arguments[str(parameter)] for key, parameter in parameters.items()}
        return str(fencing.lock(**values).name)

    return name, lambda: str(fencing.pattern)


def _unknown(given: str, key: str) -> TypeError:
    return TypeError(
        f"@single_instance({given}) has no argument {key!r}. {conf.unknown(key, TERMS)} (The name "
        "of a parameter can be given with a fenced model: @single_instance(Invoice, pk=...).)"
    )


# The text of a value in a name


def canonical(value: Any) -> str:
    """
    Return a readable text of `value`, which no other value has.

    Values that a serialiser makes equal have the same text: a worker gets a list for a tuple, the
    value for an enum's member, and text for a number that was a dict's key.
    """
    if isinstance(value, Enum):
        return canonical(value.value)
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return repr(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, str):
        # A lone surrogate can't be encoded.
        text = json.dumps(value, ensure_ascii=False)
        return text.encode(errors="backslashreplace").decode()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(canonical, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_key(key)}: {canonical(value[key])}' for key in value))}}}"
    if isinstance(value, Set):
        return f"set({', '.join(sorted(map(canonical, value)))})"
    if isinstance(value, Model):
        return _row(value)
    if hasattr(type(value), "model_dump"):  # pydantic, which Celery converts to and from a dict
        return canonical(value.model_dump())
    return _scalar(value)


def _key(key: Any) -> str:
    # As in JSON, whose keys are texts.
    is_json = key is None or isinstance(key, bool | int | float)
    return canonical(json.dumps(key) if is_json else key)


def _row(row: Model) -> str:
    if row.pk is None or row._state.adding:
        raise TypeError(
            f"A lock name can't be made of {row!r}: it isn't saved, so it has no lasting primary "
            "key. Save it first, or name a plain value of it."
        )
    return f"{row._meta.concrete_model._meta.label_lower}:{canonical(row.pk)}"  # type: ignore[union-attr]


def _scalar(value: Any) -> str:
    if isinstance(value, UUID | timedelta):
        return f"{type(value).__name__}({value})"
    if isinstance(value, Decimal):
        number = value.normalize(_EXACT) or Decimal()
        is_readable = abs(number.adjusted()) <= _READABLE
        return f"Decimal({number:f})" if is_readable else f"Decimal({number})"
    if isinstance(value, datetime):
        # One moment has one name in every time zone.
        moment = value if value.tzinfo is None else value.astimezone(UTC)
        return f"datetime({moment.isoformat()})"
    if isinstance(value, date | time):
        return f"{type(value).__name__}({value.isoformat()})"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes({base64.b64encode(bytes(value)).decode()})"
    raise TypeError(
        f"A lock name can't be made of {value!r}: the text of a {type(value).__name__} isn't the "
        "same everywhere. Name the lock by a template over plain arguments, or by a callable "
        "(task, arguments) -> name."
    )


# Sensitive arguments


def _digest(key: str, value: Any) -> str:
    with contextlib.suppress(TypeError):
        # With the project's secret key: a plain digest of a card's number can be found by trial.
        digest = salted_hmac(_SALT, canonical(value), algorithm="sha256").hexdigest()
        return f"#{digest[:_DIGEST]}"
    # Outside the block: the suppressed error shows the value.
    raise TypeError(
        f"A lock name can't be made of {key!r}, a {type(value).__name__}: its text isn't the same "
        "everywhere. Pass a plain value."
    )
