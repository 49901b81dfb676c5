"""
What goes on in a worker besides its tasks. Nothing else in the package hooks into the worker.

Other parts say by `every()` what is to be done regularly.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from celery import bootsteps, signals
from django.db import connections

from ..core import runtime
from ..core.manager import tidy_at_exit
from ..core.runtime import clock
from ..storage import connections as sessions
from ..storage.background_writer import writer
from . import children
from .forks import no_fork

logger = logging.getLogger(__name__)

#: Seconds from a failed round to the next.
AFTER_FAILURE = 5.0

_regular: list[tuple[Callable[[], float], Callable[[], object]]] = []


def every(seconds: Callable[[], float], function: Callable[[], object]) -> None:
    """
    Call `function` in the main process of each worker, whatever its pool, every `seconds()`.

    From a thread of the system, first when the worker has started. Django's connections, and ours,
    are closed after each call; it has to close whatever else it opens, or the next child that is
    forked has it too. It should be short: for a moment no child is forked meanwhile.
    """
    _regular.append((seconds, function))


class Rounds:
    """The thread that does what is to be done regularly."""

    def __init__(self, *, forks: bool) -> None:
        self._forks = forks
        self._end = runtime.SimpleQueue[None]()

    def start(self) -> None:
        if _regular:
            runtime.start(self._run)

    def stop(self) -> None:
        self._end.put(None)

    def _run(self) -> None:
        threading.current_thread().name = "fencedlock-rounds"
        due = [clock()] * len(_regular)
        while True:
            for place, (seconds, function) in enumerate(_regular[: len(due)]):
                if due[place] <= clock():
                    due[place] = clock() + self._do(seconds, function)
            with contextlib.suppress(runtime.Empty):
                self._end.get(timeout=max(0.0, min(due) - clock()))
                return

    def _do(self, seconds: Callable[[], float], function: Callable[[], object]) -> float:
        with no_fork():
            try:
                function()
                return seconds()
            except Exception:
                logger.exception("What the worker does regularly failed")
                return AFTER_FAILURE
            finally:
                connections.close_all()
                if self._forks:
                    # Without children these are those of the tasks too.
                    sessions.close_all()


class Housekeeping(bootsteps.StartStopStep):
    """The part of a worker that all of this hangs on."""

    name = "fencedlock"
    # So it is made before the first child, and started after the pool.
    requires = ("celery.worker.components:Pool",)

    def create(self, worker: Any) -> None:
        forks = _has_children(worker.pool_cls)
        if forks:
            writer.disable()
        self._watch = _child_watch() if forks else None
        self._rounds = Rounds(forks=forks)

    def start(self, worker: Any) -> None:
        if self._watch:
            self._watch.start()
        self._rounds.start()

    def stop(self, worker: Any) -> None:
        # The watch goes on: the pool stops later, and its children may be killed until then.
        self._rounds.stop()

    def terminate(self, worker: Any) -> None:
        self.stop(worker)


def _child_watch() -> children.ChildWatch | None:
    if children.can_be_watched():
        return children.ChildWatch(children.LeftLocks().release)
    logger.info(
        "This system doesn't tell a process of another one's end (pidfd_open(), Linux 5.3): the "
        "locks of children that are killed are held until they expire"
    )
    return None


def _has_children(pool: type) -> bool:
    return any(each.__module__ == "celery.concurrency.prefork" for each in pool.__mro__)


@signals.celeryd_init.connect(weak=False, dispatch_uid="django_fencedlock.worker")
def _install(instance: Any, **kwargs: object) -> None:
    children.forget_watch()
    instance.app.steps["worker"].add(Housekeeping)


@signals.worker_process_init.connect(weak=False, dispatch_uid="django_fencedlock.worker_process")
def _announce(**kwargs: object) -> None:
    # The solo pool sends this signal too, in the main process, which nobody watches.
    if children.is_watched():
        children.announce()


@signals.worker_process_shutdown.connect(weak=False, dispatch_uid="django_fencedlock.worker_tidy")
def _tidy(**kwargs: object) -> None:
    # A child ends by os._exit(), which calls nothing of atexit. Rows of the registry whose locks
    # it released in its last second would stay.
    tidy_at_exit()
