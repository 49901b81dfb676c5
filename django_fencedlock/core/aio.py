"""What coroutines wait for: blocking work in threads, and their turn at a lock."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

#: So many threads of the process wait for locks. Further waiters try from the event loop.
WAITERS = 16
#: Threads for each kind of short work at one lock service. They are apart, since tries may wait for
#: a release, and one service that doesn't answer mustn't hold up another.
SHORT = 8
TRY, RELEASE = "try", "release"
_WAIT = "wait"


def _reset() -> None:
    global _pools, _may_wait
    _pools = {}
    _may_wait = threading.BoundedSemaphore(WAITERS)


_pools: dict[str, ThreadPoolExecutor]
_may_wait: threading.BoundedSemaphore
_reset()
# A child after fork has none of the threads.
os.register_at_fork(after_in_child=_reset)


def submit(kind: str, alias: str, function: Callable[..., T], *args: Any) -> Future[T]:
    """Run `function` in a thread from now on, whatever becomes of the event loop."""
    return _pool(f"{kind}-{alias}", SHORT).submit(function, *args)


async def run(kind: str, alias: str, function: Callable[..., T], *args: Any) -> T:
    """Run `function` in a thread and await its answer; it goes on if the wait is cancelled."""
    return await answer(submit(kind, alias, function, *args))


async def answer(future: Future[T]) -> T:
    return await asyncio.shield(asyncio.wrap_future(future))


def wait_in_thread(function: Callable[[], T]) -> Future[T] | None:
    """Run `function`, which waits for a lock, in a thread; None if `WAITERS` threads wait."""
    if not _may_wait.acquire(blocking=False):
        return None
    may_wait = _may_wait
    try:
        future = _pool(_WAIT, WAITERS).submit(function)
    except BaseException:
        may_wait.release()
        raise
    future.add_done_callback(lambda done: may_wait.release())
    return future


def _pool(name: str, size: int) -> ThreadPoolExecutor:
    pool = _pools.get(name)
    if pool is None:
        pool = ThreadPoolExecutor(size, thread_name_prefix=f"fencedlock-{name}")
        pool = _pools.setdefault(name, pool)
    return pool


#: Of each event loop: the coroutines that wait for a lock, by alias and name.
_queues: WeakKeyDictionary[AbstractEventLoop, dict[tuple[str, str], deque[asyncio.Future[None]]]]
_queues = WeakKeyDictionary()


@contextlib.asynccontextmanager
async def turn(lock: tuple[str, str], timeout: float) -> AsyncIterator[None]:
    """
    Wait until every coroutine that asked for the same lock before has ended its wait.

    The wait ends after `timeout`, too.
    """
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
            # A coroutine may be thrown away after the end of its event loop.
            with contextlib.suppress(RuntimeError):
                queue[0].set_result(None)
