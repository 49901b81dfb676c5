"""Calls of tasks under `single_instance`, and the names of their locks."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery import Task, _state, current_app, current_task
from celery.utils.saferepr import saferepr
from django.apps import apps
from django.core.exceptions import AppRegistryNotReady, ImproperlyConfigured
from django.db.models import Model

from .. import logs
from ..backends.interface import Claim
from ..core import names
from ..core.grants import new_claim
from ..core.identity import new_owner
from ..core.manager import Service, service
from ..core.permits import names_of
from ..exceptions import SettingsError
from ..lease import Lease, Leases
from ..lock_sets import LeaseSet, sort_names
from ..locks import Lock
from ..storage.text import HIDDEN
from .policy import OTHERS, TERMS, Policy, nearest, unknown
from .values import DIGEST, canonical, digest

if TYPE_CHECKING:
    AnyTask = Task[Any, Any]

#: The attribute of a wrapped function that leads to its `Single`.
MARK = "_fencedlock_single"
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
            if policy.path and not (isinstance(name, str) or callable(name)):
                raise TypeError(
                    "@single_instance(path=True) needs one name of parts, such as "
                    f'"{function.__name__}/{{{names.example_of(function)}}}".'
                )
            if policy.path:
                self._forbid_coalesce()
            if policy.path and isinstance(name, str):
                names.path_names(name)
            if isinstance(name, list | tuple):
                self._require_set_allowed()
        elif hidden := self.row.parameters & {*policy.sensitive}:
            raise TypeError(
                f"@single_instance(sensitive={min(hidden)!r}): the parameter names a row, and the "
                "row's lock has the same name for every caller. Leave it out."
            )
        elif policy.path:
            raise TypeError(
                "@single_instance(path=True): a model's fencing says whether its locks are paths. "
                "Remove path=True, and write Fencing(..., path=True) in the model."
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
    ) -> tuple[str | tuple[str, ...], str, str]:
        """
        Return the name of a call's lock, or the sorted names of its set of locks.

        Beside it, the name of the task, or of the function; and the pattern of the lock's name.
        `args` don't have the task itself.
        """
        function, pattern = self.function, self.pattern()
        title = task.name if task is not None else f"{function.__module__}.{function.__qualname__}"
        bound_to_task = task is not None and is_bound(task)
        arguments = self._parameters.bind((task, *args) if bound_to_task else args, kwargs)
        if bound_to_task:
            del arguments[self._parameters.first]
        for key in self.sensitive:
            if key in arguments:
                arguments[key] = digest(key, arguments[key])
        found, pattern = self._name(task, title, arguments), pattern or title
        if isinstance(found, str):
            return self._as_path(found), title, pattern
        if self._policy.path:
            raise TypeError(f"{title}: path=True is for one lock name, not for a list.")
        self._require_set_allowed()
        return tuple(sort_names(found, f"@single_instance of {title}")), title, pattern

    def _as_path(self, name: str) -> str:
        """Return the name of a call's lock: that of a path, if it is one."""
        if self._policy.path and self.row is None:
            template = self.pattern()
            name = names.path_name(names.require_parts(name, template) if template else name)
        if names.is_path(name):
            self._forbid_coalesce()
        return name

    def _forbid_coalesce(self) -> None:
        if self._policy.on_conflict == "coalesce":
            raise ValueError(
                f'{self.function.__qualname__}(): on_conflict="coalesce" leaves the work to the '
                "holder of the same lock, and that of a path above or beneath wouldn't do it. Use "
                'on_conflict="skip", "retry", "wait" or "raise".'
            )

    def _require_set_allowed(self) -> None:
        if self._policy.limit is not None:
            raise TypeError(
                f"{self.function.__qualname__}(): limit= is for one lock name, not for a list: it "
                "would not say which of the names has so many holders. Leave limit= out, or give "
                "one name."
            )
        if self._policy.on_conflict == "coalesce":
            raise ValueError(
                f'{self.function.__qualname__}(): on_conflict="coalesce" is for one lock name, not '
                "for a list: a run would miss triggers of other lists that share a name. Use "
                '"skip", "retry", "wait" or "raise".'
            )

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
        name, self.title, self.pattern = single.name(task, args, kwargs)
        self.is_set = not isinstance(name, str)
        #: The names of its locks, in the order of their bytes.
        self.names = (name,) if isinstance(name, str) else name
        #: The name of its lock; of a set, the names as a message lists them.
        self.name = names.shown(self.names)
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
        self.lease: Lease | LeaseSet | None = None
        self.leases: Leases = ()

    def all_names(self) -> Sequence[str]:
        """Return the names of the locks that its run may hold."""
        return self.names if self.permits is None else names_of(self.claim())

    def claim(self) -> Claim:
        """Return the claim of the call's lock, or of one of its permits."""
        claim = new_claim(self.name, self.ttl, self.policy.fenced, owner=self.owner)
        return claim._replace(permits=self.permits)

    def facts(self, reason: str | None = None) -> dict[str, Any]:
        """Return the ``extra`` of a log record about this call."""
        lease = self.lease
        return logs.facts(
            name=self.name,
            alias=self.policy.backend,
            token=lease.token if isinstance(lease, Lease) and lease.fenced else None,
            owner=self.owner.id,
            task=self.title,
            reason=reason,
        )


def _is_mapped(task: AnyTask | None) -> bool:
    """Return whether ``map()``, ``starmap()`` or ``chunks()`` of Celery makes this direct call."""
    above, running = [None, None, *_state._task_stack.stack][-2:]  # type: ignore[attr-defined]
    # The body of a mapped task may call another one, and needs its value.
    return running is task and getattr(above, "name", "") in ("celery.map", "celery.starmap")


# The ways to name a lock

#: Makes the name, or a list of names, of a task (None if its function was called by itself), its
#: title, and the arguments with their defaults, by parameter.
Naming = Callable[["AnyTask | None", str, Mapping[str, Any]], str | list[str]]


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
    if isinstance(given, list | tuple):
        return _naming_of_set(given, function, sensitive)
    if callable(given):
        return lambda task, _, arguments: _called(given, task, arguments), str
    raise TypeError(
        f"@single_instance({given!r}): the name must be a template, a list of templates, a "
        "callable (task, arguments) -> name, or a fenced model."
    )


def _naming_of_set(
    given: Sequence[object], function: Callable[..., Any], sensitive: Collection[str]
) -> tuple[Naming, Callable[[], str]]:
    """Return what names the locks of a call by several templates, and the pattern of the set."""
    _require_names(given, f"@single_instance({given!r})")
    for each in given:
        if not isinstance(each, str) or _LABEL.fullmatch(each):
            shown = each.__name__ if isinstance(each, type) else repr(each)
            raise TypeError(
                f"@single_instance: a list of lock names has templates alone, not {shown}. For the "
                "lock of a model's row, write the template of its name, such as "
                f'"billing.invoice:{{{names.example_of(function)}}}".'
            )
    texts = [str(each) for each in given]
    templates = [names.Template(each, function, hidden=sensitive) for each in texts]
    return (
        lambda task, _, arguments: [each.fill(arguments, task) for each in templates],
        lambda: " + ".join(texts),
    )


def _called(given: Callable[..., Any], task: AnyTask | None, arguments: Any) -> str | list[str]:
    """Return what a callable names."""
    found = given(task, dict(arguments))
    if not isinstance(found, list | tuple):
        return names.validate(found)
    _require_names(found, f"{getattr(given, '__qualname__', given)}() returned {found!r}, which")
    return [*found]


def _require_names(found: Sequence[object], what: str) -> None:
    if not found:
        raise ValueError(f"{what} names no lock, so runs would not exclude each other.")


def _name_by_call(task: AnyTask | None, title: str, arguments: Mapping[str, Any]) -> str:
    shown = []
    for key, value in arguments.items():
        try:
            shown.append(f"{key}={canonical(value)}")
        except TypeError as exc:
            raise TypeError(f"Parameter {key!r} of {title}: {exc}") from exc
    name = f"{title}({', '.join(shown)})"
    if len(name) > names.MAX_LENGTH:
        short = hashlib.sha256(name.encode()).hexdigest()[:DIGEST]
        name = f"{name[: names.MAX_LENGTH - DIGEST - 2]}…#{short}"
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
        found: Lock = self.fencing.lock(columns=values)
        return names.path_name(found.name) if found.path else found.name

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
