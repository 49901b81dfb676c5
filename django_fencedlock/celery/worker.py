"""
In a worker's main process: release the locks of children that ended, and look after rows.

A child announces itself to the main process before it runs a task. The main process watches it by a
pidfd, which becomes readable when the whole process has ended. Celery's own signals come too early
(the child still runs) or too late (up to 5 s after a SIGKILL). Then the main process looks up the
child's rows in the registry, which has one for each fenced lock, and evicts their owners.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

from celery import bootsteps, signals
from django.db import Error
from django.db import connections as django_connections

from .. import conf, logs
from ..backends.interface import Backend, Grant
from ..core import runtime
from ..core.events import Kind, emit
from ..core.identity import PidFd, Process, this_process
from ..core.manager import tidy_at_exit
from ..core.runtime import clock
from ..exceptions import BackendUnavailable, FencedLockError
from ..storage import connections, history
from ..storage.background_writer import writer
from ..storage.dialect import BATCH
from ..storage.fences import Fences
from ..storage.message_records import MessageRecords
from ..storage.pending_runs import PendingRuns
from ..storage.records import Records, fetch
from ..storage.text import is_table_missing
from ..storage.unfenced import ExpiredRows
from .coalesce import serve_overdue
from .names import single_of
from .policy import Policy

logger = logging.getLogger(__name__)

#: Tells children that are spawned, not forked, where to announce themselves.
VARIABLE = "FENCEDLOCK_WORKER"
#: Seconds that a fork waits at most for the threads of the main process.
FORK_TIMEOUT = 0.2
#: Seconds from a child's end to each look at the registry. The service may carry out a request of
#: the child after its end; that request waits up to 0.25 s for a row.
LOOK_AFTER = (0.0, 0.4, 2.0)
#: Seconds to pause after an error.
AFTER_ERROR = 1.0
#: Seconds between two looks for pending runs, at least and at most.
OFTEN, SELDOM = 1.0, 15.0
#: Seconds between two deletions of old rows, and between two counts of message records.
DELETE_EACH, COUNT_EACH = 60.0, 600.0
#: Batches of old rows that are deleted at a time: no child is forked meanwhile.
BATCHES = 50
#: Limit of message records in a fence database.
MOST_RECORDS = 1_000_000
#: Seconds to pause after a failed look.
AFTER_FAILURE = 5.0


class ForkGate:
    """
    Keeps forks and the threads of the main process apart.

    A child inherits every open connection, and every mutex that a thread has just locked. A fork
    doesn't wait long for a server that doesn't answer.
    """

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Let no process be forked in this block, if it is short."""
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def before_fork(self) -> None:
        self._changed.acquire()
        self._changed.wait_for(lambda: not self._inside, FORK_TIMEOUT)

    def after_fork_in_parent(self) -> None:
        self._changed.release()


_gate = runtime.forks.register(ForkGate())


# In a child

#: Where to announce oneself: the main process makes it, and forked children inherit it.
_pipe: int | None = None


def forget_watch() -> None:
    """Don't announce this process to a worker whose task started it."""
    global _pipe
    _pipe = None
    os.environ.pop(VARIABLE, None)


def announce() -> None:
    """Announce this process to the main process, if that watches it."""
    if VARIABLE not in os.environ:
        return
    try:
        if (pipe := _pipe) is None:
            # A spawned process opens the pipe of its main process.
            pid, _, file = os.environ[VARIABLE].partition(":")
            pipe = os.open(f"/proc/{pid}/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # A short line isn't mixed with others.
        os.write(pipe, f"{this_process()}\n".encode())
    except OSError as exc:
        logger.warning(
            "Process %d couldn't announce itself to its worker (%s). If it is killed, its locks "
            "are held until they expire.",
            os.getpid(),
            exc,
        )


# In the main process: watch the children


def can_watch() -> bool:
    """Return whether this system has pidfds."""
    try:
        with contextlib.closing(PidFd(os.getpid())):
            return bool(this_process().started)
    except OSError:
        return False


class ChildWatch:
    """
    Calls `ended` with each child that has ended, in a thread that sleeps until then.

    Create it before the first child, so that each child can announce itself.
    """

    def __init__(self, ended: Callable[[Process], object]) -> None:
        global _pipe
        self._ended = ended
        self._announcements, _pipe = os.pipe()
        for end in (self._announcements, _pipe):
            os.set_blocking(end, False)
        os.environ[VARIABLE] = f"{os.getpid()}:{_pipe}"
        self._unread = b""
        self._children: dict[int, tuple[Process, PidFd]] = {}
        self._poll = select.poll()
        self._poll.register(self._announcements, select.POLLIN)

    def start(self) -> None:
        runtime.start(self._run)

    def _run(self) -> None:
        threading.current_thread().name = "fencedlock-children"
        while True:
            try:
                self.look()
            except Exception:
                # Without this thread the locks of killed children are held until they expire.
                logger.exception("Watching the worker's children failed")
                runtime.original("time", "sleep")(AFTER_ERROR)

    def look(self, timeout: float | None = None) -> None:
        """Wait until a child begins or ends."""
        for ready, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            if ready == self._announcements:
                with contextlib.suppress(BlockingIOError):
                    self._unread += os.read(self._announcements, 65536)
                *lines, self._unread = self._unread.split(b"\n")
                for line in lines:
                    self._watch(Process.read(line.decode(errors="replace")))
            else:
                child, opened = self._children.pop(ready)
                self._poll.unregister(ready)
                opened.close()
                self._ended(child)

    def _watch(self, child: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            opened = PidFd(child.pid)
            # Another process may have the pid by now.
            if not opened.is_gone(child.started):
                self._children[opened.fileno()] = child, opened
                self._poll.register(opened, select.POLLIN)
                return
            opened.close()
        self._ended(child)


class LeftLocks:
    """
    Releases what ended children have left.

    Each alias has a thread while there is something to do: a service that doesn't answer delays no
    other alias.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: The planned looks of each active thread: when, at which child, and when to give up.
        self.looks: dict[str, list[tuple[float, Process, float]]] = {}

    def release(self, child: Process) -> None:
        """Release the locks of a child that has ended."""
        for alias in conf.aliases():
            now = clock()
            until = now + conf.config(alias).ttl
            with self._changed:
                if alias not in self.looks:
                    self.looks[alias] = []
                    runtime.start(partial(self._run, alias))
                self.looks[alias] += [(now + seconds, child, until) for seconds in LOOK_AFTER]
                self._changed.notify_all()

    def _run(self, alias: str) -> None:
        threading.current_thread().name = f"fencedlock-children-{alias}"
        while due := self._wait(alias):
            try:
                release_locks_of({child for _, child, _ in due}, alias)
            except Exception as exc:
                # A project that uses unfenced locks alone needs no tables.
                if is_table_missing(exc):
                    continue
                logger.warning(
                    "The locks that ended children held through alias %r couldn't be released: %s",
                    alias,
                    exc,
                    extra=logs.facts(alias=alias, reason=str(exc)),
                    exc_info=not isinstance(exc, FencedLockError),
                )
                at = clock() + AFTER_ERROR
                with self._changed:
                    self.looks[alias] += [(at, *look[1:]) for look in due if at < look[2]]

    def _wait(self, alias: str) -> list[tuple[float, Process, float]]:
        """Wait until looks are due, and take them; return [] if none is planned."""
        with self._changed:
            while looks := self.looks[alias]:
                now = clock()
                if due := [look for look in looks if look[0] <= now]:
                    self.looks[alias] = [look for look in looks if look[0] > now]
                    return due
                self._changed.wait(min(at for at, _, _ in looks) - now)
            del self.looks[alias]
            return []


def release_locks_of(children: Collection[Process], alias: str) -> None:
    """
    Release what these processes hold, according to the registry.

    Connections are opened for it and closed again: a child that is forked later would inherit them.
    """
    records = Records(conf.config(alias))

    def look() -> list[Any]:
        pids = [child.pid for child in children]
        rows = records.rows("HeldLock").filter(alias=alias, pid__in=pids)
        return fetch(rows, "name", "owner", "boot_id", "pid_namespace", "pid", "pid_started")

    with _gate.closed():
        try:
            held = [
                row
                for row in records.query("look for ended children", None, look)
                if Process(row.boot_id, row.pid_namespace, row.pid, row.pid_started) in children
            ]
            if held:
                _release(records, held)
        finally:
            connections.close_all()


def _release(records: Records, held: list[Any]) -> None:
    config, rows = records.config, []
    backend: Backend = conf.backend_class(config.backend)(config)
    try:
        for row in held:
            grant = Grant(row.name, row.owner)
            released = backend.release(grant)
            if not backend.records_grants:
                Fences(config, backend.label).clear([grant])
            if released:
                emit(Kind.EVICTED, backend, row.name, owner=row.owner, pid=row.pid)
                rows.append((clock(), history.death(row.name, config.alias, row.pid)))
    finally:
        with contextlib.suppress(BackendUnavailable, Error):
            backend.close()
    # The background writer is off: it would have connections open at the next fork.
    if rows and conf.history() and not connections.under_test():
        records.query("history", None, partial(history.write, records.using, rows))


# In the main process: pending runs and old rows


class Maintenance:
    """
    Serves pending runs whose holder died, and deletes old rows.

    If the worker forks, it closes all connections after each look: a child that is forked later
    would inherit them. Otherwise its tasks use the same private connections.
    """

    def __init__(
        self, app: Any, *, forks: bool = False, clock: Callable[[], float] = clock
    ) -> None:
        self._app = app
        self._forks = forks
        self._clock = clock
        self._end = runtime.SimpleQueue[None]()
        self._delete_at = self._count_at = -math.inf
        #: Whether there were more old rows than one look deletes.
        self._is_behind = False
        self._failing: set[str] = set()

    def start(self) -> None:
        runtime.start(self._run)

    def stop(self) -> None:
        self._end.put(None)

    def _run(self) -> None:
        threading.current_thread().name = "fencedlock-maintenance"
        while True:
            with _gate.closed():
                try:
                    self.look()
                    pause = self.period()
                except Exception:
                    logger.exception("The worker's look for pending runs and old rows failed")
                    pause = AFTER_FAILURE
                django_connections.close_all()
                if self._forks:
                    connections.close_all()
            with contextlib.suppress(runtime.Empty):
                self._end.get(timeout=pause)
                return

    def period(self) -> float:
        """Return the seconds from one look to the next."""
        if self._is_behind:
            return OFTEN
        ttls = [
            policy.ttl or config.ttl
            for config, policies in self._databases()
            for policy in policies.values()
        ]
        return min(SELDOM, max(OFTEN, min(ttls) / 2)) if ttls else DELETE_EACH

    def look(self) -> int:
        """Serve pending runs, and delete old rows; return how many were served."""
        served, is_behind = 0, False
        deletes, counts = self._clock() >= self._delete_at, self._clock() >= self._count_at
        for config, policies in self._databases():
            try:
                if policies:
                    served += serve_overdue(self._app, config, policies)
                if deletes:
                    is_behind |= self._delete(config, counts)
                self._failing.discard(config.fence_database)
            except FencedLockError as exc:
                # A project that uses unfenced locks alone needs no tables.
                if config.fence_database not in self._failing and not is_table_missing(exc):
                    logger.warning("Pending runs and old rows can't be looked after: %s", exc)
                self._failing.add(config.fence_database)
        if deletes:
            self._is_behind = is_behind
            self._delete_at = self._clock() + (OFTEN if is_behind else DELETE_EACH)
            if counts and not is_behind:
                self._count_at = self._clock() + COUNT_EACH
        return served

    def _delete(self, config: conf.AliasConfig, counts: bool) -> bool:
        """Return whether there may be more to delete."""
        records = MessageRecords(config)
        until = records.limit(MOST_RECORDS) if counts else None
        if until is not None and not self._is_behind:
            text = "More than %d messages of tasks are on record; the oldest are deleted early."
            logger.warning(text, MOST_RECORDS)
        deleted = (
            records.sweep(BATCHES, until),
            PendingRuns(config).forget(BATCHES),
            ExpiredRows(config).sweep(BATCHES),
        )
        return max(deleted) >= BATCHES * BATCH

    def _databases(self) -> Iterable[tuple[conf.AliasConfig, dict[str, Policy]]]:
        """Return an alias of each fence database, and the tasks that coalesce there."""
        found: dict[str, tuple[conf.AliasConfig, dict[str, Policy]]] = {}
        singles = {name: single_of(task) for name, task in dict(self._app.tasks).items()}
        coalescing = {
            name: single.policy
            for name, single in singles.items()
            if single is not None and single.policy.on_conflict == "coalesce"
        }
        for alias in conf.aliases():
            # One whose settings are wrong fails by itself, and delays no other.
            with contextlib.suppress(FencedLockError):
                config = conf.config(alias)
                _, policies = found.setdefault(config.fence_database, (config, {}))
                policies |= {n: each for n, each in coalescing.items() if each.backend == alias}
        return found.values()


class Housekeeping(bootsteps.StartStopStep):
    """The part of a worker that starts all of this."""

    name = "fencedlock"
    # Created before the first child, and started after the pool.
    requires = ("celery.worker.components:Pool",)

    def create(self, worker: Any) -> Any:
        forks = any(
            each.__module__ == "celery.concurrency.prefork" for each in worker.pool_cls.__mro__
        )
        self._watch: ChildWatch | None = None
        if forks:
            writer.disable()
            if can_watch():
                self._watch = ChildWatch(LeftLocks().release)
            else:
                logger.info(
                    "This system has no pidfd_open() (Linux 5.3), which shows the end of another "
                    "process: the locks of children that are killed are held until they expire"
                )
        return Maintenance(worker.app, forks=forks)

    def start(self, worker: Any) -> None:
        if self._watch:
            self._watch.start()
        # The worker stops it too. The watch continues: children may be killed until the pool stops.
        super().start(worker)


@signals.celeryd_init.connect(weak=False, dispatch_uid="django_fencedlock.worker")
def _install(instance: Any, **kwargs: object) -> None:
    forget_watch()
    instance.app.steps["worker"].add(Housekeeping)


@signals.worker_process_init.connect(weak=False, dispatch_uid="django_fencedlock.worker_process")
def _announce(**kwargs: object) -> None:
    # The solo pool sends this signal too, in the main process, which no process watches.
    announce()


@signals.worker_process_shutdown.connect(weak=False, dispatch_uid="django_fencedlock.worker_tidy")
def _tidy(**kwargs: object) -> None:
    # A child ends by os._exit(), without atexit. Rows of the registry whose locks it released in
    # its last second would stay.
    tidy_at_exit()
