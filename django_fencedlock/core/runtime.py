"""Threads, forks and time limits, below whatever greenlets replace in the standard library."""

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
import weakref
from _queue import Empty as Empty
from _queue import SimpleQueue as SimpleQueue
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from django.db import close_old_connections

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds without a job after which a worker's thread ends, and until a failed tick is repeated.
IDLE_SECONDS, RETRY_AFTER = 10.0, 1.0
#: Seconds that the interpreter's exit waits for the notifier.
EXIT_TIMEOUT = 2.0
#: Limit of queued notifications; with more, renewals aren't reported.
MAX_QUEUED = 1000

# SimpleQueue is the C type itself: gevent doesn't patch it, so it blocks the real thread.

#: Seconds on a monotonic clock. On Linux it includes the time that a machine was suspended: leases
#: expire meanwhile.
clock: Callable[[], float] = time.monotonic
if hasattr(time, "CLOCK_BOOTTIME"):
    clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


def is_patched(module: str) -> bool:
    """Return whether gevent patched a module of the standard library."""
    gevent: Any = sys.modules.get("gevent.monkey")
    return bool(gevent and gevent.is_module_patched(module))


def original(module: str, name: str) -> Any:
    """Return an attribute of a module of the standard library as it was before patching."""
    if is_patched(module):
        return sys.modules["gevent.monkey"].get_original(module, name)
    return getattr(sys.modules.get(module) or importlib.import_module(module), name)


#: Makes a lock that blocks the real thread. Hold it for microseconds only.
allocate_lock = original("_thread", "allocate_lock")


class PerHub(Generic[T]):
    """
    One object for the whole process; under gevent, one for each hub.

    A socket of gevent belongs to one hub. The keeper's thread has a hub of its own, and a later
    thread may have the id of a thread that has ended.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._found: dict[int, tuple[object, T]] = {}

    def get(self) -> T:
        """Return the object that this code can use."""
        thread, hub = 0, None
        if is_patched("socket"):
            thread = original("_thread", "get_ident")()
            hub = sys.modules["gevent"].get_hub()
        found = self._found.get(thread)
        if found is None or found[0] is not hub:
            # If two threads come here, one has an object of its own for one request.
            found = self._found[thread] = hub, self._make()
        return found[1]

    def all(self) -> list[T]:
        return [each for _, each in [*self._found.values()]]


def start(target: Callable[[], object]) -> None:
    """Run `target` in a real daemon thread: a busy greenlet would keep others from renewals."""
    original("_thread", "start_new_thread")(target, ())


def _do_nothing() -> None:
    pass


class Forks:
    """
    Calls objects at each fork, in order: `after_fork()` in the child, and in the parent
    `before_fork()` and `after_fork_in_parent()`, if they have these. Refers to them weakly.
    """

    def __init__(self) -> None:
        self._objects: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        os.register_at_fork(
            before=partial(self._call, "before_fork"),
            after_in_parent=partial(self._call, "after_fork_in_parent"),
            after_in_child=partial(self._call, "after_fork"),
        )

    def register(self, listener: T) -> T:
        """Call the methods of `listener` at each fork from now on. Return it."""
        self._objects[listener] = None
        return listener

    def _call(self, method: str) -> None:
        for each in list(self._objects):
            try:
                getattr(each, method, _do_nothing)()
            except Exception:
                # os.register_at_fork() would skip all that follow.
                logger.exception("%s() of %r failed", method, each)


forks = Forks()


class Worker:
    """
    Runs jobs in order in a daemon thread, which ends when it is idle.

    Calls `tick` after each job, and again after the seconds that it returned; None ends that.
    """

    def __init__(self, name: str, tick: Callable[[], float | None] = _do_nothing) -> None:
        self._name = name
        self._tick = tick
        self.after_fork()
        forks.register(self)

    def after_fork(self) -> None:
        """Drop the jobs: the parent's thread runs them."""
        self._lock = allocate_lock()
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        #: Returns None if no thread runs. Only a running thread refers to what it returns, so that
        #: no thread that an exception has ended counts as running.
        self.thread: Callable[[], object] = _do_nothing

    @property
    def waiting(self) -> int:
        """The number of jobs that haven't begun."""
        return self._jobs.qsize()

    def put(self, job: Callable[[], object]) -> bool:
        """Queue `job`. Return whether a thread runs it; if none can be started, it waits."""
        # Before the thread is looked for: one that ends looks for jobs after it said so.
        self._jobs.put(job)
        return self.start()

    def wake(self) -> bool:
        """Call `tick` soon. Return whether a thread does."""
        return self.put(_do_nothing) if self._jobs.empty() else self.start()

    def start(self) -> bool:
        """Start the thread, unless it runs. Return whether it runs."""
        if self.thread() is None:
            # RuntimeError: too many threads, or the interpreter exits.
            with self._lock, contextlib.suppress(RuntimeError):
                if self.thread() is None:
                    self._start(partial(self._run))
        return self.thread() is not None

    def _start(self, target: Callable[[], object]) -> None:
        self.thread = weakref.ref(target)
        start(target)

    def finish(self, seconds: float) -> None:
        """Wait until the queued jobs are done, at most `seconds`."""
        if self.thread() is not None:
            done = allocate_lock()
            done.acquire()
            self.put(done.release)
            done.acquire(timeout=seconds)

    def _run(self) -> None:
        threading.current_thread().name = self._name
        wait: Any = None
        while True:
            try:
                # The job isn't kept: an abandoned lease that it refers to is released at once.
                self._call(self._jobs.get(timeout=IDLE_SECONDS if wait is None else wait))
            except Empty:
                if wait is None and self._may_end():
                    return
            wait = self._call(self._tick)

    def _call(self, job: Callable[[], object]) -> object:
        try:
            return job()
        # A callback's sys.exit() must not end the thread: no lease would be renewed.
        except BaseException as exc:
            # Handlers of log records may be slow; the notifier runs them.
            tell = logger.error if self is worker else partial(notify, logger.error)
            tell("A job of thread %r failed", self._name, exc_info=exc)
            return RETRY_AFTER

    def _may_end(self) -> bool:
        with self._lock:
            mine, self.thread = self.thread, _do_nothing
            if not self._jobs.empty():
                self.thread = mine
                return False
            return True


class Watchdog:
    """One thread that calls a function for each block that exceeds its time limit."""

    def __init__(self) -> None:
        self._worker = Worker("fencedlock-watchdog", self._call_overdue)
        self.after_fork()
        forks.register(self)

    def after_fork(self) -> None:
        # Reentrant: a finalizer that the garbage collector runs inside may set a limit, too.
        self._lock = original("_thread", "RLock")()
        self._ids = itertools.count()
        self._watched: dict[int, tuple[float, Callable[[], object]]] = {}
        self._wakes_at = math.inf

    @contextlib.contextmanager
    def limit(self, seconds: float, on_timeout: Callable[[], object]) -> Iterator[None]:
        """Call `on_timeout` from another thread if the block takes longer than `seconds`."""
        watch = self.begin(seconds, on_timeout)
        try:
            yield
        finally:
            self.end(watch)

    def begin(self, seconds: float, on_timeout: Callable[[], object]) -> int:
        """Call `on_timeout` from another thread unless `end()` is called within `seconds`."""
        watch, deadline = next(self._ids), clock() + seconds
        # In this order: the thread forgets when it wakes, and then looks for watches. Only it sets
        # _wakes_at: this may be a finalizer inside that very thread.
        self._watched[watch] = (deadline, on_timeout)
        will_wake = self._wakes_at <= deadline and self._worker.thread() is not None
        if not will_wake and not self._worker.wake():
            self.end(watch)
            raise RuntimeError("can't start new thread")
        return watch

    def end(self, watch: int) -> None:
        """Remove a time limit. Its function is not running when this returns."""
        with self._lock:
            self._watched.pop(watch, None)

    def _call_overdue(self) -> float | None:
        with self._lock:
            now, self._wakes_at = clock(), math.inf
            # Both go over a copy: a finalizer in this thread may add or remove a watch.
            for watch, (deadline, on_timeout) in self._watched.copy().items():
                if deadline <= now and watch in self._watched:
                    del self._watched[watch]
                    on_timeout()
            self._wakes_at = min((at for at, _ in self._watched.copy().values()), default=math.inf)
            return None if self._wakes_at == math.inf else max(0.0, self._wakes_at - clock())


watchdog = Watchdog()


def cut(fileno: int) -> None:
    """Shut a socket down, so that the driver that waits for it gets an error."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fileno)) as twin:
        twin.shutdown(socket.SHUT_RDWR)


#: Runs the user's code: callbacks, signal receivers, log handlers.
worker = Worker("fencedlock-notifier")


def notify(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Call `function` from the notifier's thread."""
    worker.put(partial(_call, partial(function, *args, **kwargs)))


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    finally:
        # No request ends in this thread.
        close_old_connections()
