"""What tests ask about a lock, from outside."""

from typing import Any

from celery.result import AsyncResult

from django_fencedlock import lock
from django_fencedlock.celery import SkippedRun
from tests.servers.process import wait_until

from .journal import now


def is_free(key: str, alias: str = "default") -> bool:
    backend = "redis" if alias == "unfenced" else alias
    return lock(key, backend=backend, fenced=alias != "unfenced").holder() is None


def wait_until_free(key: str, alias: str = "default", timeout: float = 15) -> float:
    wait_until(lambda: is_free(key, alias), f"lock {key!r} to be free", timeout)
    return now()


def was_skipped(result: AsyncResult) -> SkippedRun | None:
    return SkippedRun.of(result.get(timeout=20))


def failure(result: AsyncResult) -> Any:
    exc = result.get(timeout=20, propagate=False)
    assert isinstance(exc, BaseException), (result.state, exc)
    return exc
