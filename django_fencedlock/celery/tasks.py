"""What is known of a task under `single_instance`, and how it is found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from celery import Task, current_app, current_task

from ..core.names import Parameters
from . import hiding
from .naming import naming
from .policy import Policy

if TYPE_CHECKING:
    from .naming import AnyTask

#: The attribute of a wrapped function that leads to its Single.
_MARK = "_fencedlock_single"


class Single:
    """A task's function under `single_instance`: its policy, and the names of its locks."""

    def __init__(
        self, function: Callable[..., Any], policy: Policy, name: object, parameters: Any
    ) -> None:
        self.function = function
        self.policy = policy
        self._parameters = Parameters(function)
        self.signature = self._parameters.signature
        hiding.check(policy.sensitive, self.signature, function.__qualname__)
        if hidden := {*map(str, parameters.values())} & {*policy.sensitive}:
            raise TypeError(
                f"@single_instance(sensitive={min(hidden)!r}): it names a row, whose lock has that "
                "name for all. Leave it out."
            )
        self._naming = naming(name, parameters, function)

    def title(self, task: AnyTask | None) -> str:
        """What people call it."""
        function = self.function
        return task.name if task is not None else f"{function.__module__}.{function.__qualname__}"

    def name(self, task: AnyTask | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The name of the lock of a call; `args` don't have the task itself."""
        bound_to_task = task is not None and is_bound(task)
        arguments = self._parameters.bind((task, *args) if bound_to_task else args, kwargs)
        if bound_to_task:
            del arguments[next(iter(self.signature.parameters))]
        if self.policy.sensitive:
            arguments = hiding.hidden(arguments, self.policy.sensitive)
        return self._naming.name(task, self.title(task), arguments)

    def hide_in_message(self, task: AnyTask, headers: dict[str, Any], body: Any) -> None:
        """Have a message of the task tell no sensitive argument in what Celery shows of it."""
        if self.policy.sensitive:
            known = list(self.signature.parameters.values())[int(is_bound(task)) :]
            hiding.hide_in_message(headers, body, known, self.policy.sensitive)

    def pattern(self, task: AnyTask | None) -> str:
        """What the names of its locks have in common, for metrics."""
        return self._naming.pattern(self.title(task))

    def task_of(self, args: tuple[Any, ...]) -> tuple[AnyTask | None, tuple[Any, ...]]:
        """Find the task whose function runs here, and the arguments less the task itself."""
        if args and isinstance(args[0], Task) and single_of(args[0]) is self:
            return args[0], args[1:]
        # A function may be called by itself, in the body of another task.
        running: Any = current_task._get_current_object()  # type: ignore[attr-defined]
        if running is not None and single_of(running) is self:
            return running, args
        return next((task for task in _registered() if single_of(task) is self), None), args


def _registered() -> list[AnyTask]:
    return list(current_app.tasks.values())


def mark(function: Callable[..., Any], single: Single) -> None:
    """Note whose function it is."""
    setattr(function, _MARK, single)


def single_of(task: Any) -> Single | None:
    """The `Single` of a task; None if it isn't under `single_instance`."""
    found: Single | None = getattr(getattr(task, "run", None), _MARK, None)
    return found


def is_bound(task: Any) -> bool:
    """Whether the task's function gets the task as its first argument."""
    # autoretry_for puts a function of its own in the method's place.
    return inspect.ismethod(getattr(task, "_orig_run", task.run))
