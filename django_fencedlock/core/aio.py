"""Threads for the blocking work of coroutines, and their queue at a lock."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from .runtime import forks

T = TypeVar("T")

#: Limit of threads that wait for locks, per process. Further waiters try from the event loop.
WAITERS = 16
#: Threads for each kind of short work of one alias. The kinds are separate: a try may wait for a
#: release, and one service that doesn't answer must not delay another.
SHORT = 8
TRY, RELEASE = "try", "release"


class _Threads:
    """The thread pools of this process."""

    def __init__(self) -> None:
        self.after_fork()
        forks.register(self)

    def after_fork(self) -> None:
        self.pools: dict[str, ThreadPoolExecutor] = {}
        self.may_wait = threading.BoundedSemaphore(WAITERS)

    def pool(self, name: str, size: int) -> ThreadPoolExecutor:
        if name not in self.pools:
            self.pools.setdefault(name, ThreadPoolExecutor(size, f"fencedlock-{name}"))
        return self.pools[name]


_threads = _Threads()


def submit(kind: str, alias: str, function: Callable[..., T], *args: Any) -> Future[T]:
    """Run `function` in a thread, even if the event loop ends."""
    return _threads.pool(f"{kind}-{alias}", SHORT).submit(function, *args)


async def run(kind: str, alias: str, function: Callable[..., T], *args: Any) -> T:
    """Run `function` in a thread. It goes on if the coroutine is cancelled."""
    return await answer(submit(kind, alias, function, *args))


async def answer(future: Future[T]) -> T:
    return await asyncio.shield(asyncio.wrap_future(future))


def wait_in_thread(function: Callable[[], T]) -> Future[T] | None:
    """Run `function`, which waits for a lock, in a thread; None if `WAITERS` threads wait."""
    may_wait = _threads.may_wait
    if not may_wait.acquire(blocking=False):
        return None
    try:
        future = _threads.pool("wait", WAITERS).submit(function)
    except BaseException:
        may_wait.release()
        raise
    future.add_done_callback(lambda done: may_wait.release())
    return future


#: Of each event loop: the coroutines that wait for a lock, by alias and name.
_queues: WeakKeyDictionary[AbstractEventLoop, dict[tuple[str, str], deque[asyncio.Future[None]]]]
_queues = WeakKeyDictionary()


@contextlib.asynccontextmanager
async def turn(lock: tuple[str, str], timeout: float) -> AsyncIterator[None]:
    """Wait until earlier waiters for the same lock have ended their wait, or for `timeout`."""
    loop = asyncio.get_running_loop()
    queues = _queues.setdefault(loop, {})
    queue = queues.setdefault(lock, deque())
    mine: asyncio.Future[None] = loop.create_future()
    queue.append(mine)
    try:
        if queue[0] is not mine:
            await asyncio.wait([mine], timeout=None if math.isinf(timeout) else timeout)
        yield
    finally:
        was_first = queue[0] is mine
        queue.remove(mine)
        if not queue:
            del queues[lock]
        elif was_first and not queue[0].done():
            # RuntimeError: the coroutine is discarded after the end of its event loop.
            with contextlib.suppress(RuntimeError):
                queue[0].set_result(None)
