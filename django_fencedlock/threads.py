"""Real threads of the system, also where gevent put greenlets in their place."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from _queue import Empty, SimpleQueue
from collections.abc import Callable
from typing import Any

__all__ = [
    "Empty",
    "SimpleQueue",
    "Worker",
    "allocate_lock",
    "is_patched",
    "original",
    "start",
]

logger = logging.getLogger(__name__)

#: Seconds for which a worker's thread waits for another job before it ends.
LINGER = 10.0

# SimpleQueue above is the C type itself: what waits on it waits in the system, whatever is patched.


def start(target: Callable[[], object]) -> None:
    """
    Run `target` in a daemon thread that no hub of greenlets can starve.

    A greenlet for a thread would only beat while the others leave it room: never, while one of
    them computes or sits in a blocking call.
    """
    original("_thread", "start_new_thread")(target, ())


class Worker:
    """Does jobs in order in a daemon thread, which ends when it has none for a while."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reset()

    def _reset(self) -> None:
        self._lock = allocate_lock()
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._runs = False

    def forget_after_fork(self) -> None:
        """Keep nothing of the parent's; its thread does the jobs there."""
        self._reset()

    @property
    def waiting(self) -> int:
        """The number of jobs that haven't begun."""
        return self._jobs.qsize()

    def put(self, job: Callable[[], object]) -> None:
        """Have `job` done. Without a thread to be had it is done after a later call."""
        # In this order: a thread that is about to end looks for jobs after it has cleared the flag.
        self._jobs.put(job)
        if not self._runs:
            # A thread can't be started where there are too many, or at the interpreter's end.
            with self._lock, contextlib.suppress(RuntimeError):
                if not self._runs:
                    start(self._run)
                    self._runs = True

    def finish(self, seconds: float) -> None:
        """Wait until the jobs that were put are done, for some seconds at most."""
        if self._runs:
            done = allocate_lock()
            done.acquire()
            self.put(done.release)
            done.acquire(timeout=seconds)

    def _run(self) -> None:
        threading.current_thread().name = self._name
        while True:
            try:
                job = self._jobs.get(timeout=LINGER)
            except Empty:
                if self._may_end():
                    return
                continue
            try:
                job()
            # Nor does the user's sys.exit() end the thread: nothing would start another.
            except BaseException:
                logger.exception("A job of thread %r failed", self._name)
            # A lease that it refers to wouldn't be released by itself until the next job.
            del job

    def _may_end(self) -> bool:
        with self._lock:
            self._runs = False
            self._runs = not self._jobs.empty()
            return not self._runs


def is_patched(module: str) -> bool:
    """Whether greenlets took the place of what a module of the standard library has."""
    gevent: Any = sys.modules.get("gevent.monkey")
    return bool(gevent and gevent.is_module_patched(module))


def original(module: str, name: str) -> Any:
    """What a module of the standard library has, without greenlets."""
    if is_patched(module):
        return sys.modules["gevent.monkey"].get_original(module, name)
    return getattr(sys.modules.get(module) or importlib.import_module(module), name)


#: Makes a lock that knows nothing of greenlets: to be held for moments only.
allocate_lock = original("_thread", "allocate_lock")
