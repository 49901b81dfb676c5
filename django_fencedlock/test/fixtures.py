"""Pytest fixtures. Pytest loads this module in each project, so it needs no settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from ..lease import Lease
from . import aids


@pytest.fixture
def disable_locking() -> Iterator[None]:
    """Grant every lock to every caller at once, for the whole test."""
    with aids.disable_locking():
        yield


@pytest.fixture
def eager_tasks() -> Iterator[None]:
    """Run Celery tasks in ``.delay()``, with their locks, for the whole test."""
    with aids.eager_tasks():
        yield


@pytest.fixture
def hold_lock(request: pytest.FixtureRequest) -> Iterator[Callable[..., Lease]]:
    """Return a function that holds a lock until the end of the test."""
    # The database of a fixture that comes first is closed last, after the locks were released.
    for database in {"db", "transactional_db"}.intersection(request.fixturenames):
        request.getfixturevalue(database)
    with contextlib.ExitStack() as stack:
        yield lambda name, **terms: stack.enter_context(aids.hold_lock(name, **terms))
