"""Code that runs in another thread, which is another holder."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connections

from django_fencedlock.core.keeper import Keeper


def without_threads(keeper: Keeper) -> Keeper:
    """Let no thread of a keeper run: the test calls what they would call."""
    for worker in (keeper._thread, keeper._registry, keeper._releaser):
        worker.start = lambda: True  # type: ignore[method-assign]
    return keeper


def elsewhere(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return or raise what a function does in another thread, with connections of its own."""

    def run() -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
