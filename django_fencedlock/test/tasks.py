"""Celery tasks in tests. Importing this imports Celery."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from celery import current_app


@contextlib.contextmanager
def eager_tasks(app: Any = None) -> Iterator[None]:
    """
    Run tasks in ``.delay()``, with their locks and policies, and without a broker.

    ``.delay()`` never raises the task's error; ``.get()`` of its result does. Retries, also those
    of a conflict, run at once.

    Args:
        app: The Celery app (default: the current app).
    """
    app = app or current_app
    # Propagation would raise Celery's Retry out of delay() instead of running the next try.
    eager = {"task_always_eager": True, "task_eager_propagates": False}
    _ = app.conf.task_always_eager  # Loads the settings; before that, `changes` isn't used.
    with mock.patch.dict(app.conf.changes, eager):
        yield
