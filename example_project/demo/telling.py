"""Send events of Celery and of the locks around the body of the demonstration's task."""

import logging
from typing import Any

from celery.signals import task_failure, task_prerun, task_success, worker_ready

from django_fencedlock import lock

from . import stage
from .tasks import book


class _Logged(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        stage.tell("log", message=record.getMessage())


def begin() -> None:
    """Send all events from now on."""
    # The task sends its errors itself. The keeper's thread logs a lost lease as a warning.
    handler = _Logged(logging.WARNING)
    handler.addFilter(lambda record: record.levelno == logging.WARNING)
    logging.getLogger("django_fencedlock").addHandler(handler)
    worker_ready.connect(_ready, weak=False)
    task_prerun.connect(_begins, sender=book, weak=False)
    task_failure.connect(_fails, sender=book, weak=False)
    task_success.connect(_ends, sender=book, weak=False)


def _ready(**_: Any) -> None:
    stage.tell("ready")


def _begins(task: Any, args: Any, **_: Any) -> None:
    holder = lock(f"account:{args[0]}", backend="demo").holder()
    # Redlock has no tokens: the fence numbers its grants.
    held = holder and (f"with token {holder.token}" if holder.token else "by A")
    stage.tell("begins", holder=held, again=bool(task.request.retries))


def _fails(exception: BaseException, **_: Any) -> None:
    stage.tell("fails", error=type(exception).__name__, message=str(exception))


def _ends(**_: Any) -> None:
    stage.tell("ends")
