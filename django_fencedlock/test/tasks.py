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
    Run each task at once where it is called, with its lock and its policy, and without a broker.

    ``.delay()`` returns a result that tells how the task ended, and raises nothing; ``.get()``
    does. A retry, be it for a conflict or the task's own, comes at once as well.

    Args:
        app: The Celery app; without one, the current one.
    """
    app = app or current_app
    # Were errors raised by delay(), so were Celery's Retry, instead of the next try.
    eager = {"task_always_eager": True, "task_eager_propagates": False}
    _ = app.conf.task_always_eager  # Until they are first asked for, settings are elsewhere.
    with mock.patch.dict(app.conf.changes, eager):
        yield
