"""The name of the lock of one call of a task."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django.db.models import Model

from .. import conf
from ..core import names
from .canonical import canonical
from .policy import TERMS

if TYPE_CHECKING:
    from celery import Task

    AnyTask = Task[Any, Any]

Arguments = Mapping[str, Any]

#: Characters of a name's end that tell a long call from every other.
_DIGEST = 32


class Naming(ABC):
    """Makes the lock's name of a task and the arguments of a call, defaults among them."""

    @abstractmethod
    def name(self, task: AnyTask | None, title: str, arguments: Arguments) -> str:
        """
        Make the name, the same in every process.

        Args:
            task: The task; None if the function under it was called by itself.
            title: The task's name, or the function's.
            arguments: What was given and what is the default, by parameter.
        """

    def pattern(self, title: str) -> str:
        """What all the names have in common, for metrics."""
        return title


class ByCall(Naming):
    """``app.tasks.charge(invoice_id=1, currency="EUR")``: a name for each call that differs."""

    def name(self, task: AnyTask | None, title: str, arguments: Arguments) -> str:
        told = ", ".join(f"{key}={canonical(value)}" for key, value in arguments.items())
        return names.validate(_shortened(f"{title}({told})"))


class ByTemplate(Naming):
    """``invoice:{invoice_id}``, over the parameters."""

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        self._template = names.Template(text, function)
        self._parameters = inspect.signature(function).parameters

    def pattern(self, title: str) -> str:
        return self._template.text

    def name(self, task: AnyTask | None, title: str, arguments: Arguments) -> str:
        try:
            return self._template.fill(arguments)
        except KeyError as exc:
            if exc.args[0] in arguments or exc.args[0] not in self._parameters:
                raise
            raise TypeError(
                f"Lock name {self._template.text!r} names {{{exc.args[0]}}}, which is the task "
                "itself. To name a lock by the task, give a callable (task, arguments) -> name."
            ) from None


class ByCallable(Naming):
    """Whatever ``callable(task, arguments)`` says."""

    def __init__(self, function: Callable[[Any, dict[str, Any]], str]) -> None:
        self._function = function

    def name(self, task: AnyTask | None, title: str, arguments: Arguments) -> str:
        return names.validate(self._function(task, dict(arguments)))


class ByModel(Naming):
    """The lock of a fenced model's row, made of parameters of the task."""

    def __init__(
        self, model: type[Model], parameters: Mapping[str, object], function: Callable[..., Any]
    ) -> None:
        self._model: Any = model
        self._parameters = parameters
        known = inspect.signature(function).parameters
        for key, parameter in parameters.items():
            if parameter not in known:
                raise TypeError(
                    f"@single_instance({model.__name__}, {key}={parameter!r}): {parameter!r} is no "
                    f"parameter of {function.__qualname__}(); it has {', '.join(known) or 'none'}."
                )
        # Tells at once whether these are what the model's lock is named by.
        columns = self._model.fencing.columns  # type: ignore[attr-defined]
        if columns is None or self._columns() != set(columns):
            raise TypeError(
                f"@single_instance({model.__name__}) needs to know which parameters of "
                f"{function.__qualname__}() name the row: write "
                f"@single_instance({model.__name__}, {_example(columns, known)})."
                if columns is not None
                else f"@single_instance({model.__name__}): its lock is named by a callable, which "
                "needs a row. Give a callable (task, arguments) -> name instead of the model."
            )

    def pattern(self, title: str) -> str:
        return str(self._model.fencing.pattern)

    def _columns(self) -> set[str]:
        """The columns that the parameters give."""
        pk = [field.attname for field in self._model.fencing.pk]
        fields = self._model._meta.concrete_fields
        by_name = {"pk": pk, **{field.name: [field.attname] for field in fields}}
        return {column for key in self._parameters for column in by_name.get(key, [key])}

    def name(self, task: AnyTask | None, title: str, arguments: Arguments) -> str:
        values = {key: arguments[str(given)] for key, given in self._parameters.items()}
        return str(self._model.fencing.lock(**values).name)


def naming(given: object, parameters: Mapping[str, object], function: Callable[..., Any]) -> Naming:
    """Find how a decorator wants its locks named."""
    if isinstance(given, type) and issubclass(given, Model):
        if not hasattr(given, "fencing"):
            raise TypeError(
                f"@single_instance({given.__name__}): {given.__name__} is no FencedModel, so it "
                'has no lock. Give a template, such as "invoice:{invoice_id}".'
            )
        for key in parameters:
            if not _is_column(given, key):
                raise _unknown(given.__name__, key)
        return ByModel(given, parameters, function)
    for key in parameters:
        raise _unknown("", key)
    if given is None:
        return ByCall()
    if isinstance(given, str):
        return ByTemplate(given, function)
    if callable(given):
        return ByCallable(given)
    raise TypeError(
        f"@single_instance({given!r}): the name has to be a template, a callable "
        "(task, arguments) -> name, or a fenced model."
    )


def _is_column(model: type[Model], key: str) -> bool:
    fields = model._meta.concrete_fields
    return key == "pk" or any(key in (field.name, field.attname) for field in fields)


def _example(columns: Iterable[str], parameters: Iterable[str]) -> str:
    """Each column, with a parameter that is likely to be the one that gives it."""
    likely = {
        column: next((each for each in parameters if each.endswith(column)), "...")
        for column in columns
    }
    return ", ".join(f'{column}="{parameter}"' for column, parameter in likely.items())


def _unknown(given: str, key: str) -> TypeError:
    return TypeError(
        f"@single_instance({given}) has no argument {key!r}. {conf.unknown(key, TERMS)} (The name "
        "of a parameter can be given with a fenced model: @single_instance(Invoice, pk=...).)"
    )


def _shortened(name: str) -> str:
    """Cut a long name, and let the digest of the whole tell it from others with the same start."""
    if len(name) <= names.MAX_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
    return f"{name[: names.MAX_LENGTH - _DIGEST - 2]}…#{digest}"
