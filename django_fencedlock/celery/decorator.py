"""`single_instance`: the functions it wraps, and what Celery sees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, TypeVar, overload

from celery import Task
from celery.local import Proxy
from django.db.models import Model

from .. import conf
from ..core.names import read_path
from ..lease import Duration
from ..locks import Limit
from .names import MARK, Single, single_of
from .policy import (
    MAX_CONFLICT_RETRIES,
    TERMS,
    OnBackendError,
    OnConflict,
    OnLost,
    OnRedelivery,
    Policy,
    policy,
)
from .run import wrap

F = TypeVar("F", bound=Callable[..., Any])
Names = list[str] | tuple[str, ...]
Name = str | Names | type[Model] | Callable[[Any, dict[str, Any]], str | Names] | None


def lock_name(task: Any, *args: Any, **kwargs: Any) -> str:
    """
    Return the name of the lock of a call of `task` with these arguments.

    ``with lock(lock_name(charge, 42)):`` keeps the task from running meanwhile. For a task with
    ``limit=5``, ``lock(name, limit=5)`` acquires one of its permits; for one with ``path=True``,
    write ``lock(name, path=True)``.
    """
    name = _named(task, args, kwargs)
    if not isinstance(name, str):
        raise TypeError(
            f"A call of {task.name} has a set of locks, not one. Write `lock_names()`, such as in "
            "`with lock_all(*lock_names(task, ...)):`."
        )
    return name


def lock_names(task: Any, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """
    Return the names of the locks of a call of `task` with these arguments, sorted.

    ``with lock_all(*lock_names(transfer, 1, 2)):`` keeps the task from running meanwhile. Works for
    tasks with one lock, too.
    """
    name = _named(task, args, kwargs)
    return (name,) if isinstance(name, str) else name


def _named(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | tuple[str, ...]:
    single = single_of(task)
    if single is None:
        raise TypeError(
            f"{getattr(task, 'name', task)!r} isn't under @single_instance, so its calls have no "
            "lock."
        )
    name, _, _ = single.name(task, args, kwargs)
    return read_path(name) if isinstance(name, str) else name


@overload
def single_instance(name: F, /) -> F: ...
@overload
def single_instance(
    name: Name = None,
    *,
    backend: str = conf.DEFAULT_ALIAS,
    ttl: Duration | None = None,
    fenced: bool = True,
    limit: Limit = None,
    path: bool = False,
    on_conflict: OnConflict = "skip",
    blocking_timeout: Duration | conf.Unset | None = conf.UNSET,
    retry_countdown: Duration = 5,
    max_conflict_retries: int = MAX_CONFLICT_RETRIES,
    on_lost: OnLost = "raise",
    max_hold: Duration | None = None,
    redelivery: OnRedelivery = "defer",
    on_backend_error: OnBackendError = "raise",
    sensitive: str | Iterable[str] = (),
    columns: Mapping[str, str] | None = None,
    **row: str,
) -> Callable[[F], F]: ...
def single_instance(name: Any = None, **terms: Any) -> Any:
    """
    Run a Celery task once at a time for each lock name. Put it below ``@shared_task``.

    Args:
        name: A template over the task's parameters, ``"invoice:{invoice_id}"``; a list of them,
            ``["account:{source}", "account:{target}"]``, to run under all of these locks; a fenced
            model or its label, ``single_instance(Invoice, pk="{invoice_id}")``; or a callable
            ``(task, arguments) -> name``, or a list of names. Without one, the task's name and its
            arguments.
        backend: The alias in ``FENCEDLOCK``; for a model, the one that its fencing names.
        ttl: How long the lock lasts unless it is renewed, which happens by itself.
        fenced: False for a lock that only saves work: no token, and no record in the database.
        limit: How many runs of a name there may be at a time, or a callable that returns the
            number; see `lock()`. Not for a model, nor with ``"coalesce"``.
        path: True for a name of parts, ``"warehouse/{warehouse_id}/shelf/{shelf_id}"``, that
            excludes those above and beneath; see `lock()`. A model's fencing says it by itself. Not
            with ``"coalesce"``, nor for a list of names.
        on_conflict: If another holder has the lock, ``"skip"`` succeeds with a `SkippedRun`,
            ``"retry"`` tries again later, ``"wait"`` blocks the worker, ``"raise"`` fails with
            `LockNotAcquired`, and ``"coalesce"`` leaves the work to one further run.
        blocking_timeout: How long ``"wait"`` waits, None for no limit; without one, the setting
            BLOCKING_TIMEOUT.
        retry_countdown: The first pause of ``"retry"``; they grow up to twelvefold.
        max_conflict_retries: How often ``"retry"`` tries, beside the task's own ``max_retries``.
        on_lost: ``"raise"`` fails the task, ``"abort"`` also interrupts its body; or ``"ignore"``.
        max_hold: The lock is no longer renewed once it was held this long.
        redelivery: ``"defer"`` runs a message once that is delivered again; ``"run"`` each time.
        on_backend_error: ``"raise"``, or, with ``fenced=False`` alone, ``"run"`` without a lock.
        sensitive: The parameters whose arguments neither names nor messages show.
        columns: For a model: a template for each column of its lock that has the name of one of
            these arguments, ``columns={"ttl": "{ttl}"}``.
        **row: For a model: a template for each column of its lock.
    """
    # By type(): isinstance() would make Celery create the task of a proxy.
    if issubclass(type(name), type) and not issubclass(name, Model):
        raise _class_error(name)
    if _is_bare(name, terms):
        return _decorate(name, None, policy(), {}, True)
    given = terms.pop("columns", None)
    if not isinstance(given, Mapping | NoneType):
        raise TypeError(f'columns is {given!r}; write columns={{"column": "{{parameter}}"}}.')
    columns, given = {key: terms.pop(key) for key in [*terms] if key not in TERMS}, given or {}
    if twice := [key for key in given if key in columns]:
        raise TypeError(f"@single_instance has {twice[0]!r} twice: remove it from columns=.")
    columns |= given
    checked, has_alias = policy(**terms), "backend" in terms
    return lambda function: _decorate(function, name, checked, columns, has_alias)


def _is_bare(given: object, terms: Mapping[str, object]) -> bool:
    """Return whether `given` is what is decorated, rather than a name."""
    if _is_task(given):
        return True
    if terms or not inspect.isfunction(given) or given.__name__ == "<lambda>":
        return False
    return tuple(inspect.signature(given).parameters) != ("task", "arguments")


def _is_task(given: object) -> bool:
    # By type(), as above.
    return issubclass(type(given), Proxy | Task)


def _decorate(
    function: Any, name: object, checked: Policy, columns: Mapping[str, object], has_alias: bool
) -> Callable[..., Any]:
    if _is_task(function):
        raise TypeError(
            "Put @single_instance below @shared_task, directly above the function:\n"
            "    @shared_task\n"
            "    @single_instance(...)\n"
            "    def my_task(...):"
        )
    if isinstance(function, type):
        raise _class_error(function)
    if not callable(function):
        raise TypeError(f"@single_instance decorates a function, not {function!r}.")
    title = getattr(function, "__qualname__", repr(function))
    # A decorator between that uses functools.wraps() has copied the mark.
    if hasattr(function, MARK):
        raise TypeError(
            f"{title}() is under @single_instance already, and a run has one lock of it. Remove "
            "one of them. For a further lock, write `with lock(...):` in the body."
        )
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"@single_instance can't wrap {title}(): Celery doesn't run coroutines. Make it a "
            "plain function that calls async_to_sync() of asgiref.sync on the coroutine function."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"@single_instance can't wrap {title}(): Celery doesn't run generators. Make it a "
            "plain function that consumes the generator."
        )
    return wrap(Single(function, checked, name, columns, has_alias=has_alias))


def _class_error(given: type) -> TypeError:
    return TypeError(
        "@single_instance decorates functions. For a class-based task, decorate its run() method: "
        f"put @single_instance above def run(self, ...) in {given.__name__}."
    )
