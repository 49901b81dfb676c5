"""Runs blocking work for coroutines in threads of the package's own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

#: Kinds of work. What waits for a lock has threads apart from what gives one back: waiters that
#: had taken every thread would wait for a release that waits for them.
WAITING, SHORT = "waiting", "short"
_SIZES = {WAITING: 64, SHORT: 8}
_pools: dict[str, ThreadPoolExecutor] = {}


def submit(kind: str, function: Callable[..., T], *args: Any) -> Future[T]:
    """Have `function` run in a thread from now on, whatever becomes of the event loop."""
    return _pool(kind).submit(function, *args)


async def run(kind: str, function: Callable[..., T], *args: Any) -> T:
    """Run `function` in a thread and await its answer; it goes on if the wait is cancelled."""
    return await asyncio.shield(asyncio.wrap_future(submit(kind, function, *args)))


def _pool(kind: str) -> ThreadPoolExecutor:
    pool = _pools.get(kind)
    if pool is None:
        pool = ThreadPoolExecutor(_SIZES[kind], thread_name_prefix=f"fencedlock-{kind}")
        pool = _pools.setdefault(kind, pool)
    return pool


# A child after fork has none of the threads.
os.register_at_fork(after_in_child=_pools.clear)
