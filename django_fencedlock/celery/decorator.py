"""`single_instance`: the functions it wraps, and what Celery sees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from celery import Task
from celery.local import Proxy

from .. import conf
from ..lease import Duration
from .names import Single, single_of
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

if TYPE_CHECKING:
    from django.db.models import Model

F = TypeVar("F", bound=Callable[..., Any])
Name = str | type["Model"] | Callable[[Any, dict[str, Any]], str] | None


def lock_name(task: Any, *args: Any, **kwargs: Any) -> str:
    """
    Return the name of the lock of a call of `task` with these arguments.

    ``with lock(lock_name(charge, 42)):`` keeps the task from running meanwhile.
    """
    single = single_of(task)
    if single is None:
        raise TypeError(
            f"{getattr(task, 'name', task)!r} isn't under @single_instance, so its calls have no "
            "lock."
        )
    name, _, _ = single.name(task, args, kwargs)
    return name


@overload
def single_instance(name: F, /) -> F: ...
@overload
def single_instance(
    name: Name = None,
    *,
    backend: str = conf.DEFAULT_ALIAS,
    ttl: Duration | None = None,
    fenced: bool = True,
    on_conflict: OnConflict = "skip",
    blocking_timeout: Duration | None = None,
    retry_countdown: Duration = 5,
    max_conflict_retries: int = MAX_CONFLICT_RETRIES,
    on_lost: OnLost = "raise",
    max_hold: Duration | None = None,
    redelivery: OnRedelivery = "defer",
    on_backend_error: OnBackendError = "raise",
    sensitive: str | Iterable[str] = (),
    **arguments: str,
) -> Callable[[F], F]: ...
def single_instance(name: Any = None, **terms: Any) -> Any:
    """
    Run a Celery task once at a time for each lock name. Put it below ``@shared_task``.

    Args:
        name: A template over the task's parameters, ``"invoice:{invoice_id}"``; a fenced model,
            ``single_instance(Invoice, pk="invoice_id")``; or a callable ``(task, arguments) ->
            name``. Without one, the task's name and its arguments.
        backend: The alias in ``FENCEDLOCK``; for a model, the one that its fencing names.
        ttl: How long the lock lasts unless it is renewed, which happens by itself.
        fenced: False for a lock that only saves work: no token, and no record in the database.
        on_conflict: If another holder has the lock, ``"skip"`` succeeds with a `SkippedRun`,
            ``"retry"`` tries again later, ``"wait"`` blocks the worker, ``"raise"`` fails with
            `LockNotAcquired`, and ``"coalesce"`` leaves the work to one further run.
        blocking_timeout: How long ``"wait"`` waits; without one, the setting BLOCKING_TIMEOUT.
        retry_countdown: The first pause of ``"retry"``; they grow up to twelvefold.
        max_conflict_retries: How often ``"retry"`` tries, beside the task's own ``max_retries``.
        on_lost: ``"raise"`` fails the task, ``"abort"`` also interrupts its body; or ``"ignore"``.
        max_hold: The lock is no longer renewed once it was held this long.
        redelivery: ``"defer"`` runs a message once that is delivered again; ``"run"`` each time.
        on_backend_error: ``"raise"``, or, with ``fenced=False`` alone, ``"run"`` without a lock.
        sensitive: The parameters whose arguments neither names nor messages show.
        **arguments: For a model: which parameter names which column of its lock.
    """
    if _is_bare(name, terms):
        return _decorate(name, policy(), None, {})
    arguments = {key: terms.pop(key) for key in list(terms) if key not in TERMS}
    if isinstance(name, type) and hasattr(name, "fencing"):
        terms.setdefault("backend", name.fencing.spec.backend)
    checked = policy(**terms)
    return lambda function: _decorate(function, checked, name, arguments)


def _is_bare(given: object, terms: Mapping[str, object]) -> bool:
    """Return whether `given` is what is decorated, rather than a name."""
    if _is_task(given):
        return True
    if terms or not inspect.isfunction(given) or given.__name__ == "<lambda>":
        return False
    return tuple(inspect.signature(given).parameters) != ("task", "arguments")


def _is_task(given: object) -> bool:
    # By type(): isinstance() would make Celery create the task of a proxy.
    return issubclass(type(given), Proxy | Task)


def _decorate(
    function: Callable[..., Any], checked: Policy, name: object, arguments: Mapping[str, object]
) -> Callable[..., Any]:
    if _is_task(function):
        raise TypeError(
            "@single_instance stands above the task decorator; it must stand below, next to the "
            "function:\n"
            "    @shared_task\n"
            "    @single_instance(...)\n"
            "    def my_task(...):"
        )
    if not callable(function):
        raise TypeError(f"@single_instance decorates a function, not {function!r}.")
    never = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in never):
        raise TypeError(
            f"@single_instance can't wrap {function.__qualname__}(): the body of a coroutine "
            "function or a generator would run after the lock was released, and Celery runs none."
        )
    return wrap(Single(function, checked, name, arguments))
