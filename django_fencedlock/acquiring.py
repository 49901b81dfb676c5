"""What `lock()` and `lock_all()` share: options, blocks, and how a coroutine waits."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from asgiref.sync import sync_to_async

from . import conf
from .backends.interface import Wait
from .conf import UNSET, Unset
from .core import aio
from .core.grants import FIRST_PAUSE, LONGEST_PAUSE
from .core.identity import OfHolder, current_holder
from .core.manager import Service, service
from .core.runtime import clock
from .exceptions import NotTheHolder
from .lease import Duration, Error, ErrorType, Holding

T = TypeVar("T", bound=Holding)

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Acquiring:
    """A lock, or a set of locks: its options, and the blocks of it that are open."""

    # repr() shows them, also of an object whose __init__() has failed.
    name = backend = ""

    def __init__(
        self,
        ttl: Duration | None,
        blocking_timeout: Duration | Unset | None,
        backend: str,
        fenced: bool,
        required: bool,
    ) -> None:
        self.backend = backend
        self.fenced = fenced
        self.required = required
        #: The template that the name was made of, if it was made of one.
        self.pattern = ""
        self._ttl = None if ttl is None else conf.seconds(ttl, "ttl")
        self._blocking_timeout = (
            None if blocking_timeout is UNSET else conf.patience(blocking_timeout)
        )
        # Of each block that is open now, its generator or coroutine, and what it holds: one object
        # may serve several threads.
        self._entered: list[tuple[object, OfHolder]] = []

    @property
    def ttl(self) -> float:
        """How long it lasts unless it is renewed, in seconds."""
        return self._ttl or self._service.config.ttl

    @property
    def blocking_timeout(self) -> float:
        """How long to wait for it, in seconds; infinite for no limit."""
        given = self._blocking_timeout
        return self._service.config.blocking_timeout if given is None else given

    @property
    def _service(self) -> Service:
        return service(self.backend)

    @property
    def _title(self) -> str:
        return f"lock {self.name!r}"

    def __exit__(self, kind: ErrorType, error: Error, trace: object) -> None:
        held = self._leave_block(suspended_block(), kind, OfHolder.wait_until_left)
        if held is not None:
            held.end_block(kind, error, current_holder())

    async def __aexit__(self, kind: ErrorType, error: Error, trace: object) -> None:
        if (held := self._leave_block(suspended_block(), kind, OfHolder.is_left)) is not None:
            await held.aend_block(kind, error, held.who)

    def _wait(
        self,
        control: Service,
        blocking: bool,
        blocking_timeout: Duration | Unset | None,
        cancel: threading.Event | None = None,
    ) -> Wait:
        """Return how long an acquire waits."""
        if not blocking:
            if blocking_timeout is not UNSET:
                raise ValueError("Use either blocking=False or blocking_timeout=, not both.")
            blocking_timeout = 0.0
        if cancel is not None and not hasattr(cancel, "is_set"):
            raise TypeError(f"cancel is {cancel!r}; it has to be a threading.Event.")
        if blocking_timeout is not UNSET:
            timeout = conf.patience(blocking_timeout)
        elif (given := self._blocking_timeout) is not None:
            timeout = given
        else:
            timeout = control.config.blocking_timeout
        return Wait(timeout, cancelled_by=cancel, required=self.required)

    async def _wait_async(
        self,
        name: str,
        wait: Wait,
        acquire: Callable[..., T | None],
        tell_refused: Callable[[float], object],
    ) -> T | None:
        """Ask in threads: the first waiter of a lock waits in one, or tries if there is none."""
        service, pause = self._service, FIRST_PAUSE
        if await service.is_lent():
            return await sync_to_async(acquire)(wait=wait)
        acquire_waiting = functools.partial(acquire, wait=wait)
        if wait.left <= 0:
            return await self._hand_over(aio.submit(aio.TRY, self.backend, acquire_waiting), wait)
        async with aio.turn((self.backend, name), wait.left):
            while (left := wait.left) > 0:
                waiting = aio.wait_in_thread(acquire_waiting)
                if waiting is not None:
                    return await self._hand_over(waiting, wait)
                once = Wait(since=wait.since)
                trying = functools.partial(acquire, wait=once, tells=False)
                tried = aio.submit(aio.TRY, self.backend, trying)
                if (held := await self._hand_over(tried, wait)) is not None:
                    return held
                wait.held, wait.asked = once.held or wait.held, once.asked or wait.asked
                await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.5)))
                pause = min(LONGEST_PAUSE, pause * 1.5)
        await service.in_thread(tell_refused, clock() - wait.since, kind=aio.TRY)
        return None

    async def _hand_over(self, acquired: Future[T | None], wait: Wait) -> T | None:
        """Return what a thread acquires; release it if the coroutine is cancelled meanwhile."""
        try:
            return await aio.answer(acquired)
        except BaseException:
            wait.cancel()
            # Not by the event loop, which may end with the cancellation.
            acquired.add_done_callback(self._give_back_acquired)
            raise

    def _give_back_acquired(self, acquired: Future[T | None]) -> None:
        if acquired.exception() is None and (held := acquired.result()) is not None:
            give_back = held._control.give_back
            aio.submit(aio.RELEASE, self.backend, give_back, held._open(), held.who)

    def _leave_block(
        self, block: object, kind: ErrorType, is_left: Callable[[OfHolder], bool]
    ) -> Holding | None:
        """Return what the innermost block that this code may leave holds, if it holds anything."""
        entered, who = self._entered, current_holder()
        # Any code may close a generator or a coroutine, also within a block of its own.
        found = [each for each in entered if block is not None and each[0] is block]
        found = found or [each for each in entered if each[1].who is who]
        if not found and kind is GeneratorExit and len(entered) == 1:
            found = entered
        if not found:
            found = [each for each in entered if is_left(each[1])]
            # It isn't known which of them: a lock that is released late does no harm.
            found.sort(key=lambda each: not isinstance(each[1], Holding))
        if not found:
            raise NotTheHolder(
                f"The block of {self._title} was entered by another thread, greenlet or "
                "task. Only that one may leave it until it has ended.",
                name=self.name,
            )
        self._entered.remove(left := found[-1])
        return left[1] if isinstance(left[1], Holding) else None


def suspended_block() -> object:
    """Return the frame of the generator or coroutine whose block the caller begins or ends."""
    # A frame that is suspended keeps nothing else alive.
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__") == "contextlib":
        frame = frame.f_back
    return frame if frame is not None and frame.f_code.co_flags & _SUSPENDS else None
