"""Calls of tasks under `single_instance`, and the names of their locks."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery import Task, _state, current_app, current_task
from celery.utils.saferepr import saferepr
from django.apps import apps
from django.core.exceptions import AppRegistryNotReady, ImproperlyConfigured
from django.db.models import Model
from django.utils.crypto import salted_hmac

from .. import logs
from ..backends.interface import Claim
from ..core import names
from ..core.grants import new_claim
from ..core.identity import new_owner
from ..core.manager import Service, service
from ..exceptions import SettingsError
from ..lease import Lease
from ..storage.text import HIDDEN
from .policy import OTHERS, TERMS, Policy, nearest, unknown

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
#: A model as Django writes it in text, such as ``"billing.Invoice"``.
_LABEL = re.compile(r"\w+\.[A-Z]\w*")
#: The arguments of `single_instance` that name no column.
_RESERVED = {*TERMS, "columns", "name"}


class Single:
    """A task's function under `single_instance`, and its policy."""

    def __init__(
        self,
        function: Callable[..., Any],
        policy: Policy,
        name: object,
        columns: Mapping[str, object],
        *,
        has_alias: bool = True,
    ) -> None:
        self.function = function
        #: What Celery calls instead of the function.
        self.wrapper: Callable[..., Any] = function
        self.sensitive, self._policy = policy.sensitive, policy
        self._parameters = names.Parameters(function)
        self.signature = self._parameters.signature
        for each in policy.sensitive:
            if each not in self.signature.parameters:
                raise TypeError(
                    f"@single_instance(sensitive={each!r}): {function.__qualname__}() has no such "
                    f"parameter. Parameters: {names.shown(self.signature.parameters)}."
                )
        is_label = columns and isinstance(name, str) and _is_label(name, *columns.values())
        is_model = isinstance(name, type) and issubclass(name, Model)
        #: The lock of a model's row, if a model names it.
        self.row = RowLock(name, columns, function) if is_label or is_model else None
        if self.row is None:
            self._name, self.pattern = naming(name, columns, function, policy.sensitive)
        elif hidden := self.row.parameters & {*policy.sensitive}:
            raise TypeError(
                f"@single_instance(sensitive={min(hidden)!r}): the parameter names a row, and the "
                "row's lock has the same name for every caller. Leave it out."
            )
        elif policy.limit is not None:
            example = f'"{function.__name__}:{{{names.example_of(function)}}}"'
            raise TypeError(
                "@single_instance(limit=...): a model names the lock of a row, which has one "
                "holder, and a permit covers no row. Leave limit= out, or write a template instead "
                f"of the model: @single_instance({example}, limit=...)."
            )
        else:
            self._name, self.pattern = self.row.name, self.row.pattern
        #: Whether the alias of the policy is the right one.
        self._has_alias = has_alias or self.row is None

    @property
    def policy(self) -> Policy:
        """The policy. Without a backend of its own, a model's fencing names the alias."""
        if not self._has_alias and self.row is not None:
            self._policy = replace(self._policy, backend=self.row.fencing.spec.backend)
            self._has_alias = True
        return self._policy

    def name(
        self, task: AnyTask | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, str, str]:
        """
        Return the name of a call's lock; `args` don't have the task itself.

        Beside it, the name of the task, or of the function; and the pattern of the lock's name.
        """
        function, pattern = self.function, self.pattern()
        title = task.name if task is not None else f"{function.__module__}.{function.__qualname__}"
        bound_to_task = task is not None and is_bound(task)
        arguments = self._parameters.bind((task, *args) if bound_to_task else args, kwargs)
        if bound_to_task:
            del arguments[self._parameters.first]
        for key in self.sensitive:
            if key in arguments:
                arguments[key] = _digest(key, arguments[key])
        return self._name(task, title, arguments), title, pattern or title

    def redact_message(self, task: AnyTask, headers: dict[str, Any], body: Any) -> None:
        """Replace sensitive arguments in what Celery logs and sends in events."""
        sensitive = self.sensitive
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
        if args and isinstance(args[0], Task) and self._is_run_of(args[0]):
            return args[0], args[1:]
        running: Any = current_task._get_current_object()  # type: ignore[attr-defined]
        if single_of(running) is self:
            return running, args
        # A plain call of the function.
        tasks: list[AnyTask] = list(current_app.tasks.values())
        return next((task for task in tasks if single_of(task) is self), None), args

    def _is_run_of(self, task: AnyTask) -> bool:
        # Or of a parent: a subclass may call this run() from its own.
        return any(single_of(each) is self for each in (task, *type(task).__mro__))


def single_of(task: Any) -> Single | None:
    """Return the `Single` of a task; None if it isn't under `single_instance`."""
    found: Single | None = getattr(getattr(task, "run", None), MARK, None)
    return found


def _is_label(name: str, *columns: object) -> bool:
    """Return whether a name is a model's label, as far as it and the model's columns show that."""
    has_template = any(isinstance(each, str) and "{" in each for each in columns)
    return bool(re.fullmatch(r"\w+\.\w+" if has_template else _LABEL, name))


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
        #: Whether the caller can do without a result: it isn't code that uses a return value.
        self.may_skip = not self.is_called_directly or _is_mapped(task)
        self.task_id = "" if request is None else request.id or ""
        # Made before the lock is asked for: a time limit may come between grant and return.
        self.owner = new_owner((self.title, self.task_id))
        self.service: Service = service(self.policy.backend)
        self.ttl = self.policy.ttl or self.service.config.ttl
        #: The limit of `single_instance`, as it is now.
        limit = self.policy.limit
        self.permits = None if limit is None else names.count_permits(self.name, limit)
        self.lease: Lease | None = None

    def claim(self) -> Claim:
        """Return the claim of the call's lock, or of one of its permits."""
        claim = new_claim(self.name, self.ttl, self.policy.fenced, owner=self.owner)
        return claim._replace(permits=self.permits)

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


def _is_mapped(task: AnyTask | None) -> bool:
    """Return whether ``map()``, ``starmap()`` or ``chunks()`` of Celery makes this direct call."""
    above, running = [None, None, *_state._task_stack.stack][-2:]  # type: ignore[attr-defined]
    # The body of a mapped task may call another one, and needs its value.
    return running is task and getattr(above, "name", "") in ("celery.map", "celery.starmap")


# The four ways to name a lock

#: Makes the name of a task (None if its function was called by itself), its title, and the
#: arguments with their defaults, by parameter.
Naming = Callable[["AnyTask | None", str, Mapping[str, Any]], str]


def naming(
    given: object,
    columns: Mapping[str, object],
    function: Callable[..., Any],
    sensitive: Collection[str],
) -> tuple[Naming, Callable[[], str]]:
    """Return what names the lock of a call, and the pattern of these names."""
    for key, value in columns.items():
        raise unknown("@single_instance", key, value, function)
    if given is None:
        return _name_by_call, str
    if isinstance(given, str):
        if _LABEL.fullmatch(given):
            raise TypeError(
                f'"{given}" names a model and no row. Write @single_instance("{given}", '
                f'pk="{{{names.example_of(function)}}}"), or another lock name.'
            )
        template = names.Template(given, function, hidden=sensitive)
        return lambda task, _, arguments: template.fill(arguments, task), lambda: given
    if callable(given):
        return lambda task, _, arguments: names.validate(given(task, dict(arguments))), str
    raise TypeError(
        f"@single_instance({given!r}): the name must be a template, a callable "
        "(task, arguments) -> name, or a fenced model."
    )


def _name_by_call(task: AnyTask | None, title: str, arguments: Mapping[str, Any]) -> str:
    shown = []
    for key, value in arguments.items():
        try:
            shown.append(f"{key}={canonical(value)}")
        except TypeError as exc:
            raise TypeError(f"Parameter {key!r} of {title}: {exc}") from exc
    name = f"{title}({', '.join(shown)})"
    if len(name) > names.MAX_LENGTH:
        digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
        name = f"{name[: names.MAX_LENGTH - _DIGEST - 2]}…#{digest}"
    return names.validate(name)


class RowLock:
    """The lock of a model's row, named by templates of its columns over a task's parameters."""

    def __init__(
        self, model: Any, columns: Mapping[str, object], function: Callable[..., Any]
    ) -> None:
        self._model, self._function = model, function
        label = f'"{model}"' if isinstance(model, str) else model.__name__
        self._start = f"@single_instance({label}"
        if not isinstance(model, str):
            # A mistake is an error at once. A label's model may not be there yet.
            self._require_columns(model, columns)
        self._templates: dict[str, names.Template] = {}
        for key, text in columns.items():
            if not (isinstance(text, str) and "{" in text):
                if isinstance(model, str) and (key in OTHERS or nearest(key)):
                    raise unknown(f"{self._start})", key, text, function)
                field = names.example_of(function, str(text), key)
                raise TypeError(
                    f"{self._start}, {key}={text!r}): it must be a template. Write "
                    f'{key}="{{{field}}}".'
                )
            self._templates[key] = names.Template(
                text, function, what=f"{self._start}): {key}", keeps_value=True
            )
        #: The parameters that name the row.
        self.parameters = {each for t in self._templates.values() for each in t.names}

    @cached_property
    def fencing(self) -> Any:
        """The fencing of the model. A label's model is looked up at the first use."""
        if not isinstance(self._model, str):
            return self._model.fencing
        try:
            model: Any = apps.get_model(self._model)
            self._require_columns(model, self._templates)
        except AppRegistryNotReady as exc:
            raise SettingsError(
                f"{self._start}): {exc} Call django.setup() first, or use the task where the apps "
                "are ready, as in a function."
            ) from exc
        except (LookupError, TypeError, ImproperlyConfigured) as exc:
            raise SettingsError(f"{self._start}): {exc}") from exc
        return model.fencing

    def name(self, task: AnyTask | None, title: str, arguments: Mapping[str, Any]) -> str:
        values = {key: each.value(arguments, task) for key, each in self._templates.items()}
        return str(self.fencing.lock(columns=values).name)

    def pattern(self) -> str:
        return str(self.fencing.pattern)

    def _require_columns(self, model: Any, given: Mapping[str, object]) -> None:
        """Raise an error unless these columns name the model's lock."""
        label = model.__name__
        if not hasattr(model, "fencing"):
            raise TypeError(
                f"{label} is not a FencedModel, so it has no lock. Write a template: "
                f'@single_instance("{label.lower()}:{{{names.example_of(self._function)}}}").'
            )
        fencing, fields = model.fencing, model._meta.concrete_fields
        columns = {"pk": [field.attname for field in fencing.pk]}
        columns |= {key: [field.attname] for field in fields for key in (field.name, field.attname)}
        for key in given:
            if key not in columns:
                known, more = {*TERMS, *columns}, f", and {label} has no such column"
                raise unknown(f"{self._start})", key, given[key], self._function, known, more)
        if fencing.columns is None:
            raise TypeError(
                f"{self._start}): its lock is named by a callable, which needs a row. Give a "
                "callable (task, arguments) -> name instead of the model."
            )
        if {column for key in given for column in columns[key]} != {*fencing.columns}:
            by_pk = {*fencing.columns} == {*columns["pk"]}
            example = {
                key: f"{{{names.example_of(self._function, key)}}}"
                for key in (("pk",) if by_pk else fencing.columns)
            }
            shown = [f"{key}={json.dumps(text)}" for key, text in _apart(example).items()]
            raise TypeError(
                f"The lock of {label} is named by {', '.join(fencing.columns)}. Write "
                f"{self._start}, {', '.join(shown)})."
            )


def _apart(columns: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a lock by columns; those with the name of an option in ``columns``."""
    clash = {key: columns[key] for key in columns if key in _RESERVED}
    others = {key: value for key, value in columns.items() if key not in _RESERVED}
    return {**others, "columns": clash} if clash else others


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
            f"a lock name can't contain {row!r}, which isn't saved. Save it first, or pass a plain "
            "value of it."
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
        f"a lock name can't contain {names.a_value_of(type(value))}, which has no fixed text. "
        "Write a template of plain values, or a callable (task, arguments) -> name."
    )


# Sensitive arguments


def _digest(key: str, value: Any) -> str:
    with contextlib.suppress(TypeError):
        # With the project's secret key: a plain digest of a card's number can be found by trial.
        digest = salted_hmac(_SALT, canonical(value), algorithm="sha256").hexdigest()
        return f"#{digest[:_DIGEST]}"
    # Outside the block: the suppressed error shows the value.
    raise TypeError(
        f"Sensitive parameter {key!r} is {names.a_value_of(type(value))}, which has no fixed text "
        "for a lock name. Pass a plain value."
    )
