"""Code that runs in another thread, which is another holder."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from django.db import connections, transaction

from django_fencedlock import Lease, lock
from django_fencedlock.core.keeper import Keeper
from django_fencedlock.core.manager import service
from django_fencedlock.locks import Lock
from django_fencedlock.models import Fence
from django_fencedlock.test.processes import another_thread


def elsewhere(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_apart, function, *args, **kwargs).result()


class Holders:
    """Holders of locks, each in a thread of its own."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Holders:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()

    def acquire(self, wanted: Lock) -> Lease:
        thread = self._stack.enter_context(another_thread())
        lease = thread.call(wanted.acquire)
        assert lease is not None
        self._stack.callback(thread.call, lease.release)
        return lease

    def permit(self, name: str, number: int, limit: int, alias: str = "default") -> Lease:
        """Acquire a certain permit, which has to be free; otherwise it is a random one."""
        service(alias).permits._released[name] = number
        return self.acquire(lock(name, limit=limit, backend=alias))

    def leave(self) -> None:
        """Release all of them."""
        self._stack.close()


def beside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    thread = ThreadPoolExecutor(1)
    called = thread.submit(_apart, function, *args, **kwargs)
    thread.shutdown(wait=False)
    return called


@contextlib.contextmanager
def sqlite_written_to(seconds: float = 60) -> Iterator[None]:
    """Hold SQLite's write lock in another thread's transaction, at most for so long."""
    holds, done = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            Fence.objects.create(name="other", token=1, owner="o")
            holds.set()
            done.wait(seconds)
            transaction.set_rollback(True)

    holding = beside(hold)
    assert holds.wait(60)
    try:
        yield
    finally:
        done.set()
        holding.result(60)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    start = threading.Barrier(len(calls))

    def make(call: Callable[[], Any]) -> Any:
        start.wait()
        return _apart(call)

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(make, calls))


def _apart(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    finally:
        connections.close_all()


def without_threads(keeper: Keeper) -> Keeper:
    for worker in (keeper._thread, keeper._tending):
        worker.start = lambda: True  # type: ignore[method-assign]
    return keeper
