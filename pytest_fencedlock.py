"""
Pytest fixtures. Pytest imports this module in each project, before its conftest.py.

So it imports nothing of Django, which gevent has to patch first and which needs settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from django_fencedlock import Lease


@pytest.fixture
def disable_locking() -> Iterator[None]:
    """Grant every lock to every caller at once, for the whole test."""
    from django_fencedlock import test

    with test.disable_locking():
        yield


@pytest.fixture
def eager_tasks() -> Iterator[None]:
    """Run Celery tasks in ``.delay()``, with their locks, for the whole test."""
    from django_fencedlock import test

    with test.eager_tasks():
        yield


@pytest.fixture
def hold_lock(request: pytest.FixtureRequest) -> Iterator[Callable[..., Lease]]:
    """Return a function that holds a lock until the end of the test."""
    from django_fencedlock import test

    # The database of a fixture that comes first is closed last, after the locks were released.
    for database in {"db", "transactional_db"}.intersection(request.fixturenames):
        request.getfixturevalue(database)
    with contextlib.ExitStack() as stack:
        yield lambda name, **terms: stack.enter_context(test.hold_lock(name, **terms))
