"""The public way to acquire a lock: `lock()`."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import os
import random
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Never, TypeVar, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation

from . import conf
from .backends.interface import Claim, Wait
from .core import aio, names, runtime
from .core.grants import FIRST_PAUSE, LONGEST_PAUSE, new_claim
from .core.identity import Holder, LocalHolder, current_holder
from .core.manager import Service, service, services
from .core.runtime import clock
from .exceptions import BackendUnavailable, FencedLockError, NotTheHolder
from .lease import Duration, Lease, enter, leave
from .logs import about, left_to_run_out

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

_validate = functools.lru_cache(1024)(names.validate)


class Lock:
    """
    A lock by name, for ``with``, ``async with``, ``acquire()``, ``aacquire()``, or as a decorator.

    It doesn't promise that no other holder is running: see `Lease`.

    Args:
        name: The protected resource; as a decorator it may name parameters, ``"report:{user_id}"``.
        ttl: How long the lock lasts unless it is renewed, which happens by itself. Seconds or a
            timedelta; without one, the setting TTL.
        blocking_timeout: How long to wait for it, ``float("inf")`` for no limit; without one, the
            setting BLOCKING_TIMEOUT.
        backend: The alias in ``FENCEDLOCK``.
        fenced: False for a lock that only saves work: no token, and no record in the database.
    """

    def __init__(
        self,
        name: str,
        *,
        ttl: Duration | None = None,
        blocking_timeout: Duration | None = None,
        backend: str = conf.DEFAULT_ALIAS,
        fenced: bool = True,
        # A type checker rejects any other argument; at run time the error names it.
        **unknown: Never,
    ) -> None:
        if unknown:
            raise TypeError(
                f"lock({name!r}) has no argument {', '.join(sorted(unknown))}; it has ttl, "
                "blocking_timeout, backend and fenced. ttl= is how long the lock lasts unless it "
                "is renewed, blocking_timeout= how long to wait for it."
            )
        self.name = _validate(name) if type(name) is str else names.validate(name)
        self.backend = backend
        self.fenced = fenced
        #: The template that the name was made of, if it was made of one.
        self.pattern = ""
        self._ttl = None if ttl is None else conf.seconds(ttl, "ttl")
        self._blocking_timeout = None if blocking_timeout is None else _seconds(blocking_timeout)
        # The leases of the blocks that are open now: one object may serve several threads.
        self._entered: list[Lease] = []

    @property
    def ttl(self) -> float:
        """How long the lock lasts unless it is renewed, in seconds."""
        return self._ttl or self._service.config.ttl

    @property
    def blocking_timeout(self) -> float:
        """How long to wait for the lock, in seconds."""
        given = self._blocking_timeout
        return self._service.config.blocking_timeout if given is None else given

    def acquire(
        self, blocking: bool = True, *, blocking_timeout: Duration | None = None
    ) -> Lease | None:
        """
        Acquire the lock, or enter it once more if this thread or task holds it.

        Returns None if another holder had the lock until the time was over.
        """
        forbid_in_event_loop(f"lock({self.name!r})", "await {}.aacquire()")
        control = self._service
        claim, who, wait = self._ask(control, blocking, blocking_timeout)
        try:
            lease = control.acquire(claim, wait, who, pattern=self.pattern)
            if lease is not None:
                enter(lease)
            return lease
        except FencedLockError:
            raise
        except BaseException:
            # Ctrl-C, or a signal's handler: the caller doesn't get the lease.
            control.interrupted(claim, wait.since)
            raise

    async def aacquire(
        self, blocking: bool = True, *, blocking_timeout: Duration | None = None
    ) -> Lease | None:
        """See acquire(). Release it with ``await lease.arelease()``."""
        claim, who, wait = self._ask(self._service, blocking, blocking_timeout)
        lease = self._service.enter_again(claim, who)
        if lease is None:
            acquire = functools.partial(self._service.acquire, claim, who=who, pattern=self.pattern)
            lease = await self._aacquire(wait, acquire)
        if lease is not None:
            enter(lease)
        return lease

    def holder(self) -> Holder | None:
        """Ask the lock service which holder has the lock; None if it is free."""
        return self._service.holder(self.name)

    async def aholder(self) -> Holder | None:
        """See holder()."""
        return await self._service.in_thread(self._service.holder, self.name, kind=aio.TRY)

    def __enter__(self) -> Lease:
        forbid_in_event_loop(f"lock({self.name!r})", "async with {}")
        control = services.get(self.backend) or service(self.backend)
        claim, who, wait = self._ask(control, True, None)
        try:
            lease = control.acquire(claim, wait, who, pattern=self.pattern)
            if lease is None:
                waited = clock() - wait.since
                raise control.grants.refusal(self.name, waited, self.fenced, wait.held)
            enter(lease)
            self._entered.append(lease)
            return lease
        except FencedLockError:
            raise
        except BaseException:
            # As in acquire(): a block that was never entered is never left.
            control.interrupted(claim, wait.since)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        who = current_holder()
        lease = self._leave_block(kind, who)
        if kind is GeneratorExit and lease.who is not who:
            self._throw_away(lease)
            return
        try:
            if lease.is_open():
                lease._control.give_back(lease, who)
        finally:
            leave(lease)
        if error is None and lease.why_lost:
            raise lease.loss()

    async def __aenter__(self) -> Lease:
        started = clock()
        lease = await self.aacquire()
        if lease is None:
            waited = clock() - started
            refusal = self._service.grants.refusal
            raise await self._service.in_thread(refusal, self.name, waited, kind=aio.TRY)
        self._entered.append(lease)
        return lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lease = self._leave_block(kind, current_holder())
        if kind is GeneratorExit:
            # The coroutine is being closed, and can't await any more.
            self._throw_away(lease)
            return
        try:
            await self._service.arelease(lease, lease.who)
        except BackendUnavailable as exc:
            left_to_run_out(logger, lease.name, exc, about(lease))
        finally:
            leave(lease)
        if error is None and lease.why_lost:
            raise lease.loss()

    def __call__(self, function: F) -> F:
        """
        Run `function` under the lock, whose name may use its parameters in braces.

        Wraps plain functions and coroutine functions; each call acquires the lock.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"@lock can't wrap the generator {function.__qualname__}(): its body would run "
                "after the lock was released. Acquire the lock inside of it."
            )
        template = names.Template(self.name, function)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def arun(*args: Any, **kwargs: Any) -> Any:
                async with self._renamed(template.render(args, kwargs)):
                    return await function(*args, **kwargs)

            return cast(F, arun)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._renamed(template.render(args, kwargs)):
                return function(*args, **kwargs)

        return cast(F, run)

    def __repr__(self) -> str:
        return f"lock({self.name!r}, backend={self.backend!r})"

    @property
    def _service(self) -> Service:
        return service(self.backend)

    def _renamed(self, name: str) -> Lock:
        found = copy.copy(self)
        found.name, found.pattern, found._entered = name, self.name, []
        return found

    def _ask(
        self, control: Service, blocking: bool, blocking_timeout: Duration | None
    ) -> tuple[Claim, LocalHolder, Wait]:
        """Return a new claim of the code that runs here, its holder, and how long it waits."""
        if not blocking:
            if blocking_timeout is not None:
                raise ValueError("blocking=False and a blocking_timeout exclude each other.")
            blocking_timeout = 0.0
        timeout = self._blocking_timeout if blocking_timeout is None else _seconds(blocking_timeout)
        if timeout is None:
            timeout = control.config.blocking_timeout
        claim = new_claim(self.name, self._ttl or control.config.ttl, self.fenced)
        return claim, current_holder(), Wait(timeout)

    async def _aacquire(self, wait: Wait, acquire: Callable[..., Lease | None]) -> Lease | None:
        """Ask in threads: the first waiter of a lock waits in one, or tries if there is none."""
        service, pause = self._service, FIRST_PAUSE
        if await service.is_lent():
            return await sync_to_async(acquire)(wait=wait)
        acquire_waiting = functools.partial(acquire, wait=wait)
        if wait.left <= 0:
            return await self._hand_over(aio.submit(aio.TRY, self.backend, acquire_waiting), wait)
        async with aio.turn((self.backend, self.name), wait.left):
            while (left := wait.left) > 0:
                waiting = aio.wait_in_thread(acquire_waiting)
                if waiting is not None:
                    return await self._hand_over(waiting, wait)
                once = functools.partial(acquire, wait=Wait(since=wait.since), tells=False)
                trying = aio.submit(aio.TRY, self.backend, once)
                if lease := await self._hand_over(trying, wait):
                    return lease
                await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.5)))
                pause = min(LONGEST_PAUSE, pause * 1.5)
        waited = clock() - wait.since
        await service.in_thread(service.tell_refused, self.name, self.pattern, waited, kind=aio.TRY)
        return None

    async def _hand_over(self, acquired: Future[Lease | None], wait: Wait) -> Lease | None:
        """Return what a thread acquires; release it if the coroutine is cancelled meanwhile."""
        try:
            return await aio.answer(acquired)
        except BaseException:
            wait.cancel()
            # Not by the event loop, which may end with the cancellation.
            acquired.add_done_callback(self._give_back_acquired)
            raise

    def _give_back_acquired(self, acquired: Future[Lease | None]) -> None:
        if acquired.exception() is None and (lease := acquired.result()) is not None:
            aio.submit(aio.RELEASE, self.backend, lease._control.give_back, lease, lease.who)

    def _leave_block(self, kind: type[BaseException] | None, who: LocalHolder) -> Lease:
        """Return the lease of the innermost block that this code may leave."""
        found = [lease for lease in self._entered if lease.who is who]
        if not found and kind is GeneratorExit and len(self._entered) == 1:
            # Any code may close a generator or a coroutine.
            found = self._entered
        found = found or [lease for lease in self._entered if lease.wait_until_left()]
        if not found:
            raise NotTheHolder(
                f"The block of lock {self.name!r} was entered by another thread, greenlet or "
                "task. Only that one may leave it until it has ended.",
                name=self.name,
            )
        lease = found[-1]
        self._entered.remove(lease)
        return lease

    def _throw_away(self, lease: Lease) -> None:
        """Release in another thread: the garbage collector may run inside any code."""
        runtime.start(functools.partial(lease._control.give_back, lease, lease.who))


#: Names a lock, for ``with``, ``async with``, ``acquire()``, ``aacquire()``, or as a decorator.
lock = Lock


def _seconds(blocking_timeout: Duration) -> float:
    return conf.seconds(blocking_timeout, "blocking_timeout", zero=True, endless=True)


def forbid_in_event_loop(call: str, instead: str) -> None:
    """Raise an error in a coroutine, with what to write instead of `call`."""
    if running_loop() is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise SynchronousOnlyOperation(
            f"{call} would block the event loop; write `{instead.format(call)}`."
        )
