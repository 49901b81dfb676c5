"""The public way to acquire a lock: `lock()`."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, cast, overload

from asgiref.sync import iscoroutinefunction

from . import conf
from .acquiring import Acquiring, suspended_block
from .backends.interface import Claim, Wait
from .conf import UNSET, Unset
from .core import aio, names, paths
from .core.grants import new_claim
from .core.identity import Holder, LocalHolder, OfHolder, current_holder
from .core.manager import Service, service, services
from .exceptions import FencedLockError
from .lease import (
    Duration,
    Lease,
    forbid_in_event_loop,
    require_finished,
)
from .lease_context import enter

if TYPE_CHECKING:
    # At run time, a type variable has a default from Python 3.13 on.
    from typing_extensions import TypeVar

    #: What a block is given: a lease, or with ``required=False`` maybe None.
    L = TypeVar("L", bound=Lease | None, default=Lease, covariant=True)
else:
    from typing import TypeVar

    L = TypeVar("L")
F = TypeVar("F", bound=Callable[..., Any])
#: How many holders a lock may have at a time; None for a lock with one holder.
Limit = int | Callable[[], int] | None

_INSIDE = "Put @lock directly above its `async def`, or acquire the lock inside of it."

#: What makes a task of a function, or stands for it, by its class. No task runner is imported.
_TASKS = {"celery.app.task.Task", "celery.local.Proxy", "django.tasks.base.Task"}

#: As the default of a parameter, it makes inspect show none.
_NO_NAME: Any = inspect.Parameter.empty
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_validate = functools.lru_cache(1024)(names.validate)


class Lock(Acquiring, Generic[L]):
    """
    A lock by name, for ``with``, ``async with``, ``acquire()``, ``aacquire()``, or as a decorator.

    It doesn't promise that no other holder is running: see `Lease`.

    Args:
        name: The protected resource; as a decorator it may name parameters, ``"report:{user_id}"``.
        ttl: How long the lock lasts unless it is renewed, which happens by itself. Seconds or a
            timedelta; without one, the setting TTL.
        blocking_timeout: How long to wait for it, None for no limit; without one, the setting
            BLOCKING_TIMEOUT.
        backend: The alias in ``FENCEDLOCK``.
        fenced: False for a lock that only saves work: no token, and no record in the database.
        shared: True for a reader's lock: readers share it, and exclude only an exclusive holder. A
            waiting exclusive holder stops new readers. Its lease covers no write of a fenced row.
        path: True for a name of parts with slashes between, ``"warehouse/7/shelf/3"``. It excludes
            the holders of all paths above and beneath: it shares a lock of its own for each
            ancestor, ``"warehouse"`` and so on, and ``lease.atomic()`` checks the tokens of all. A
            lock of the same name without ``path=True`` is another one.
        required: False for a block that runs without the lock, with None as its lease, if another
            holder has it. Else ``with`` raises `LockNotAcquired`.
        limit: How many holders may have it at a time, 1 to 1000, each by one of so many permits; or
            a callable without arguments that returns the number. A permit has a lock name, a token
            and a fence of its own, and covers no fenced row. ``limit=1`` isn't the lock without a
            limit: they don't exclude each other. Of callers with different limits, the largest one
            counts. A lower one removes no permit that was granted: see ``fencedlock trim``.
    """

    #: repr() shows them, also of an object whose __init__() has failed.
    shared = path = False
    limit: Limit = None

    @overload
    def __init__(
        self: Lock[Lease],
        name: str,
        *,
        ttl: Duration | None = ...,
        blocking_timeout: Duration | Unset | None = ...,
        backend: str = ...,
        fenced: bool = ...,
        shared: bool = ...,
        path: bool = ...,
        required: Literal[True] = ...,
        limit: Limit = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Lock[Lease | None],
        name: str,
        *,
        ttl: Duration | None = ...,
        blocking_timeout: Duration | Unset | None = ...,
        backend: str = ...,
        fenced: bool = ...,
        shared: bool = ...,
        path: bool = ...,
        required: bool,
        limit: Limit = ...,
    ) -> None: ...
    def __init__(
        self,
        name: str = _NO_NAME,
        *extra: Any,
        ttl: Duration | None = None,
        blocking_timeout: Duration | Unset | None = UNSET,
        backend: str = conf.DEFAULT_ALIAS,
        fenced: bool = True,
        shared: bool = False,
        path: bool = False,
        required: bool = True,
        limit: Limit = None,
        # A type checker rejects any other argument; at run time the error names it.
        **unknown: Never,
    ) -> None:
        if extra:
            instead = f"ttl={extra[0]!r} or blocking_timeout={extra[0]!r}"
            raise TypeError(f"lock() takes its name alone by position. Write {instead}.")
        if unknown:
            raise _unknown_argument("lock", _ARGUMENTS, *unknown)
        if type(name) is not str:
            _forbid_bare(name)
        self.name = _validate(name) if type(name) is str else names.validate(name)
        super().__init__(ttl, blocking_timeout, backend, fenced, required)
        self.shared, self.path = shared, path
        self.limit = limit
        self._check_kind()

    def _check_kind(self) -> None:
        """Raise for arguments that no kind of lock has, or that are of two kinds."""
        if self.path and (self.shared or self.limit is not None):
            other = "shared" if self.shared else "limit"
            raise TypeError(
                f"lock({self.name!r}) has path= and {other}=, which are two kinds of locks. Use "
                "path=True for one holder that excludes others above and beneath, or "
                f"{other}= for a plain name."
            )
        if self.path:
            names.path_names(self.name)
        if self.limit is None:
            return
        if self.shared:
            raise TypeError(
                f"lock({self.name!r}) has limit= and shared=, which are two kinds of locks. Use "
                "limit= for a number of holders, or shared=True for any number of readers."
            )
        if not callable(self.limit):
            names.count_permits(self.name, self.limit)

    def acquire(
        self,
        blocking: bool = True,
        *,
        blocking_timeout: Duration | Unset | None = UNSET,
        cancel: threading.Event | None = None,
        **unknown: Never,
    ) -> Lease | None:
        """
        Acquire the lock, or enter it once more if this thread or task holds it.

        Returns None if another holder had the lock until the time was over, or until `cancel` was
        set, which ends the wait within two seconds.
        """
        if unknown:
            raise _unknown_argument("acquire", ("blocking", "blocking_timeout", "cancel"), *unknown)
        forbid_in_event_loop(f"lock({self.name!r})", "await {}.aacquire()")
        control = self._service
        claim, who, wait = self._ask(control, blocking, blocking_timeout, cancel)
        try:
            lease = control.acquire(claim, wait, who, pattern=self.pattern)
            if lease is not None:
                enter(lease)
                # In one go, and in this order, as far as signals are concerned.
                lease.entered_by, lease.to_release = wait, lease.to_release + 1
            return lease
        except FencedLockError:
            raise
        except BaseException:
            # Ctrl-C, or a signal's handler: the caller doesn't get the lease.
            control.interrupted([claim], wait)
            raise

    async def aacquire(
        self, blocking: bool = True, *, blocking_timeout: Duration | Unset | None = UNSET
    ) -> Lease | None:
        """See acquire(). Release it with ``await lease.arelease()``."""
        lease = await self._aacquire(*self._ask(self._service, blocking, blocking_timeout))
        if lease is not None:
            lease.to_release += 1
        return lease

    def holder(self) -> Holder | None:
        """
        Ask the lock service which holder has the lock; None if it is free.

        With a limit: one of the holders if all permits are held; None if a permit is free. Of a
        path: the holder of it, or of a path above or beneath it.
        """
        forbid_in_event_loop(f"lock({self.name!r})", "await {}.aholder()")
        return self._look_up()

    async def aholder(self) -> Holder | None:
        """See holder()."""
        return await self._service.in_thread(self._look_up, kind=aio.TRY)

    def _look_up(self) -> Holder | None:
        if self.limit is None and not self.path:
            return self._service.holder(self.name)
        claim = self._ask(self._service, False, UNSET)[0]
        if self.path:
            return paths.holder(self._service.grants, claim)
        return self._service.permits.holder(claim)

    def __enter__(self) -> L:
        forbid_in_event_loop(f"lock({self.name!r})", "async with {}")
        block, control = suspended_block(), services.get(self.backend) or service(self.backend)
        claim, who, wait = self._ask(control, True, UNSET)
        try:
            lease = control.acquire(claim, wait, who, pattern=self.pattern)
            if lease is not None:
                enter(lease)
            elif self.required:
                raise control.refusal(claim, wait)
            self._entered.append((block, lease or OfHolder(who)))
            return cast(L, lease)
        except FencedLockError:
            raise
        except BaseException:
            # As in acquire(): a block that was never entered is never left.
            control.interrupted([claim], wait)
            raise

    async def __aenter__(self) -> L:
        block = suspended_block()
        claim, who, wait = self._ask(self._service, True, UNSET)
        lease = await self._aacquire(claim, who, wait)
        if lease is None and self.required:
            raise await self._service.in_thread(self._service.refusal, claim, wait, kind=aio.TRY)
        self._entered.append((block, lease or OfHolder(who)))
        return cast(L, lease)

    def __call__(self: Lock[Lease], function: F) -> F:
        """
        Run `function` under the lock, whose name may use its parameters in braces.

        Wraps plain functions and coroutine functions; each call acquires the lock.
        """
        self._require_function(function)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"@lock can't wrap the generator {function.__qualname__}(): its body would run "
                "after the lock was released. Acquire the lock inside of it."
            )
        template = names.Template(self.name, function)
        if iscoroutinefunction(function):

            @functools.wraps(function)
            async def arun(*args: Any, **kwargs: Any) -> Any:
                async with self._renamed(template.render(args, kwargs)):
                    return await function(*args, **kwargs)

            return cast(F, arun)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._renamed(template.render(args, kwargs)):
                return require_finished(function(*args, **kwargs), function, "@lock", _INSIDE)

        return cast(F, run)

    def __repr__(self) -> str:
        limit = "" if self.limit is None else f", limit={self.limit!r}"
        kind = ", shared=True" if self.shared else ", path=True" if self.path else ""
        return f"lock({self.name!r}{limit}, backend={self.backend!r}{kind})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            # copy() asks for special methods before the copy has a name.
            hint = "" if name.startswith("_") else _about_attribute(self.name, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def _require_function(self, function: Any) -> None:
        """Raise if the lock can't decorate it: what it makes would be unprotected, or unusable."""
        shown = f"@lock({self.name!r})"
        if _is_task(function):
            task = "task" if type(function).__module__.startswith("django.") else "shared_task"
            raise TypeError(
                f"Put {shown} below @{task}, directly above the function:\n"
                f"    @{task}\n    {shown}\n    def my_task(...):"
            )
        named = getattr(function, "__name__", "f")
        if not self.required:
            raise TypeError(
                f"@lock(required=False) would run {named}() without the lock. Remove "
                f"required=False, or write in {named}(): "
                f"with lock({self.name!r}, required=False) as lease."
            )
        if isinstance(function, type):
            raise TypeError(
                f"{shown} decorates functions, not the class {named}: its methods would run "
                "without the lock. Decorate them, such as run() of a task."
            )

    def _renamed(self: Lock[Lease], name: str) -> Lock[Lease]:
        if self.path:
            names.require_parts(name, self.name)
        found = copy.copy(self)
        found.name, found.pattern, found._entered = name, self.name, []
        return found

    def _ask(
        self,
        control: Service,
        blocking: bool,
        blocking_timeout: Duration | Unset | None,
        cancel: threading.Event | None = None,
    ) -> tuple[Claim, LocalHolder, Wait]:
        """Return a new claim of the code that runs here, its holder, and how long it waits."""
        wait = self._wait(control, blocking, blocking_timeout, cancel)
        ttl = self._ttl or control.config.ttl
        name = names.path_name(self.name) if self.path else self.name
        claim = new_claim(name, ttl, self.fenced, shared=self.shared)
        if self.limit is not None:
            claim = claim._replace(permits=names.count_permits(self.name, self.limit))
        return claim, current_holder(), wait

    async def _aacquire(self, claim: Claim, who: LocalHolder, wait: Wait) -> Lease | None:
        """Acquire the lock, or enter it once more, and make it the context's innermost lease."""
        control = self._service
        lease = control.enter_again(claim, who)
        if lease is None:
            acquire = functools.partial(control.acquire, claim, who=who, pattern=self.pattern)

            def tell_refused(waited: float) -> None:
                control.tell_refused(claim.name, self.pattern, waited, wait.held)

            lease = await self._wait_async(claim.name, wait, acquire, tell_refused)
        if lease is not None:
            enter(lease)
        return lease


#: Names a lock, for ``with``, ``async with``, ``acquire()``, ``aacquire()``, or as a decorator.
lock = Lock


def _unknown_argument(method: str, known: Sequence[str], given: str, *more: str) -> TypeError:
    """Return the error of an argument that a method doesn't have, with what to write instead."""
    hint = conf.unknown(given, known)
    of = "" if method == "lock" else " of lock()"
    if given == "timeout" or (of and given == "ttl"):
        hint = f"Use ttl={of} (when the lock expires) or blocking_timeout= (how long to wait)."
    elif given == "blocking":
        hint = "Use blocking_timeout=0, or lock(...).acquire(blocking=False)."
    elif given in ("pk", "id"):
        hint = 'Write a name, as in lock("invoice:42"), or Invoice.fencing.lock(pk=42).'
    return TypeError(f"{method}() has no argument {given}. {hint}")


_ARGUMENTS = (
    *("ttl", "blocking_timeout", "backend", "fenced", "shared", "path", "required", "limit"),
)


def _about_attribute(name: str, given: str) -> str:
    """Return what to write instead of an attribute that a lock doesn't have."""
    if given in ("locked", "owned", "is_held", "is_locked"):
        return f". Use lock({name!r}).holder(): it is None if the lock is free."
    if hasattr(Lease, given):
        call = "()" if callable(getattr(Lease, given)) else ""
        return f"; its lease has: `lease = lock({name!r}).acquire()`, then `lease.{given}{call}`."
    return ""


def _is_task(given: object) -> bool:
    # By type(): isinstance() would make Celery create the task of a proxy.
    bases = type(given).__mro__
    return any(f"{each.__module__}.{each.__name__}" in _TASKS for each in bases)


def _forbid_bare(given: object) -> None:
    """Raise if `given` is what ``@lock`` decorates, rather than a name."""
    if callable(given) or _is_task(given):
        named = given.__name__ if inspect.isfunction(given) else "name"
        raise TypeError(f'Use @lock("name"), with a name, such as @lock("{named}").')
