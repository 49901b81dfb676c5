"""
The Celery app of the workers: ``celery -A tests.workers.app worker``.

Its settings come from the environment, as JSON. The test that started the worker has an app with
the same settings in its own process, from ``make()``.
"""

import json
import os
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import beat_init, task_prerun, worker_ready

from .journal import VARIABLE as JOURNAL
from .journal import Journal

MAIN = "tests.workers"
VARIABLE = "FENCEDLOCK_TEST_CELERY"
READY = "FENCEDLOCK_TEST_CELERY_READY"


def make(settings: dict[str, Any]) -> Celery:
    made = Celery(MAIN, set_as_current=False)
    made.conf.update(settings, include=["tests.workers.tasks"])
    return made


@worker_ready.connect
@beat_init.connect
def _tell(**kwargs: Any) -> None:
    if ready := os.environ.get(READY):
        Path(ready).touch()


@task_prerun.connect
def _write_down_triggers(task: Any, args: Any, **kwargs: Any) -> None:
    # Before the lock is asked for: whatever serves this trigger begins later.
    if "coalesce" in task.name and JOURNAL in os.environ:
        key, *value = args
        Journal().write(event="arrived", key=key, value=value[0] if value else None)


app = make(json.loads(os.environ.get(VARIABLE, "{}")))
if VARIABLE in os.environ:
    app.set_default()
    app.set_current()
