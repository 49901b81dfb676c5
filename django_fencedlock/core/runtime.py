"""Real threads of the system, also where gevent put greenlets in their place."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import math
import os
import socket
import sys
import threading
import time
from _queue import Empty, SimpleQueue
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from django.db import close_old_connections

__all__ = [
    "Empty",
    "SimpleQueue",
    "Worker",
    "allocate_lock",
    "clock",
    "is_patched",
    "original",
    "start",
]

logger = logging.getLogger(__name__)

#: Seconds for which a worker's thread waits for another job before it ends.
LINGER = 10.0

# SimpleQueue above is the C type itself: what waits on it waits in the system, whatever is patched.


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


#: Seconds on a clock that no one sets. Where there is one, it counts a suspended machine's sleep,
#: which ``time.monotonic()`` leaves out on Linux: a lease goes on ageing while its holder sleeps.
clock: Callable[[], float] = _boot_time if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


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


class Watchdog:
    """One thread that calls back for each block that outlives its limit."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # One that a thread may take twice: what the garbage collector calls within may lock, too.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ids = itertools.count()
        self._watched: dict[int, tuple[float, Callable[[], object]]] = {}
        self._wakes_at = math.inf
        self._runs = False

    @contextlib.contextmanager
    def limit(self, seconds: float, bite: Callable[[], object]) -> Iterator[None]:
        """Call `bite` from another thread if the block isn't left within `seconds`."""
        watch = self.begin(seconds, bite)
        try:
            yield
        finally:
            self.end(watch)

    def begin(self, seconds: float, bite: Callable[[], object]) -> int:
        """Call `bite` from another thread unless `end()` is called within `seconds`."""
        watch = next(self._ids)
        deadline = clock() + seconds
        with self._lock:
            if not self._runs:
                threading.Thread(target=self._run, name="fencedlock-watchdog", daemon=True).start()
                # Not before: where there are too many threads, the next statement tries again.
                self._runs = True
            self._watched[watch] = (deadline, bite)
            # When it wakes the thread alone says: it may be this one, which isn't asleep yet.
            if deadline < self._wakes_at:
                self._changed.notify()
        return watch

    def end(self, watch: int) -> None:
        """Don't call any more what `begin()` was given."""
        # Under the lock: a bite that has begun is over before this returns, so it never hits a
        # connection that was handed on.
        with self._lock:
            self._watched.pop(watch, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._bite_those_overdue()
                self._wakes_at = math.inf
                for deadline, _ in self._watched.copy().values():
                    if deadline < self._wakes_at:
                        self._wakes_at = deadline
                wait = self._wakes_at - clock()
                self._changed.wait(None if math.isinf(wait) else max(0.0, wait))

    # Copies are looked through: what the garbage collector calls meanwhile, in this very thread,
    # may begin or end a watch.
    def _bite_those_overdue(self) -> None:
        now = clock()
        for watch, (deadline, bite) in self._watched.copy().items():
            if deadline <= now and watch in self._watched:
                del self._watched[watch]
                bite()


watchdog = Watchdog()


def cut(fileno: int) -> None:
    """Shut a socket down under its driver, which then gets an error instead of waiting on."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fileno)) as twin:
        twin.shutdown(socket.SHUT_RDWR)


#: Batches of renewals wait here while a receiver is slow; those beyond it aren't reported.
MOST_RENEWALS = 1000
#: Seconds that the end of the interpreter waits for code that is due to run.
AT_EXIT = 2.0

worker = Worker("fencedlock-notifier")


def notify(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Call `function` from the notifier's thread, after what it was given before."""
    worker.put(partial(_call, partial(function, *args, **kwargs)))


def is_behind() -> bool:
    """Whether so much is due to run that renewals aren't worth a report."""
    return worker.waiting > MOST_RENEWALS


def finish() -> None:
    """Wait a moment for what is due to run, at the interpreter's exit."""
    worker.finish(AT_EXIT)


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    finally:
        # What a receiver opened. No request ends in this thread.
        close_old_connections()


os.register_at_fork(after_in_child=worker.forget_after_fork)
