"""
In a worker's main process: release the locks of children that ended, and look after rows.

A child announces itself to the main process before it runs a task. The main process waits for its
end by a pidfd, which becomes readable when the whole process has ended. Celery's own signals come
too early (the child still runs) or too late (up to 5 s after a SIGKILL). Then the main process
looks up the child's rows in the registry, which has one for each fenced lock, and evicts their
owners.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
#: Seconds from one look at the registry to the next, and from a child's end to the last. The
#: service may carry out a request of the child after its end, which waits up to 0.25 s for a row.
LOOK_EACH, LOOK_FOR = 0.8, 1.5
#: Seconds between two looks for pending runs, at least and at most; and after one that failed.
OFTEN, SELDOM, AFTER_FAILURE = 1.0, 15.0, 5.0
#: Seconds between two deletions of old rows, and how many batches of each kind are deleted then.
DELETE_EACH, BATCHES = 60.0, 250

#: The errors of the last look, by alias or database. One of another kind is logged too.
Failed = dict[str, type[Exception]]


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


# Children that ended

#: Where children announce themselves: the main process makes it, and forked children inherit it.
_pipe: int | None = None


@signals.worker_process_init.connect(weak=False, dispatch_uid="django_fencedlock.worker_process")
def announce(**kwargs: object) -> None:
    """Announce this process to the main process, if that watches it."""
    pid, _, file = os.environ.get(VARIABLE, "").partition(":")
    # A worker that a task started has the variable too, and isn't a child.
    if pid != str(os.getppid()):
        return
    try:
        if (pipe := _pipe) is None:
            # A spawned process opens the pipe of its main process.
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


def can_watch() -> bool:
    """Return whether this system has pidfds."""
    try:
        PidFd(os.getpid()).close()
    except OSError:
        return False
    return bool(this_process().started)


class ChildWatch:
    """
    Puts each child that has ended into some queues. A thread for each child waits for its end.

    Create it before the first child, so that each child can announce itself.
    """

    def __init__(self, queues: Sequence[runtime.SimpleQueue[Process]]) -> None:
        global _pipe
        self._queues = queues
        self._announcements, _pipe = os.pipe()
        os.set_blocking(_pipe, False)
        os.environ[VARIABLE] = f"{os.getpid()}:{_pipe}"

    def run(self) -> None:
        threading.current_thread().name = "fencedlock-children"
        with open(self._announcements, errors="replace") as lines:
            for line in lines:
                self._watch(Process.read(line.strip()))

    def _watch(self, child: Process) -> None:
        try:
            runtime.start(partial(self._wait, child, PidFd(child.pid)))
        except ProcessLookupError:
            self._ended(child)
        except (OSError, RuntimeError) as exc:
            logger.warning(
                "Process %d can't be watched (%s). If it is killed, its locks are held until they "
                "expire.",
                child.pid,
                exc,
            )

    def _wait(self, child: Process, opened: PidFd) -> None:
        with contextlib.closing(opened):
            # Another process may have the pid by now.
            if not opened.is_gone(child.started):
                poll = select.poll()
                poll.register(opened, select.POLLIN)
                poll.poll()
        self._ended(child)

    def _ended(self, child: Process) -> None:
        for queue in self._queues:
            queue.put(child)


def _report(failed: Failed, what: str, exc: Exception, text: str, alias: str) -> bool:
    """Log once that `what` failed; return whether it is to be tried again."""
    # A project that uses unfenced locks alone needs no tables.
    if is_table_missing(exc):
        return False
    level = logging.DEBUG if failed.get(what) is type(exc) else logging.WARNING
    failed[what] = type(exc)
    is_bug, extra = not isinstance(exc, FencedLockError), logs.facts(alias=alias, reason=str(exc))
    logger.log(level, f"{text} This is logged once.", what, exc, extra=extra, exc_info=is_bug)
    return True


class LeftLocks:
    """
    Releases what ended children left, with a thread for each alias.

    So a service that doesn't answer delays no other alias.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self.ended = runtime.SimpleQueue[Process]()
        #: When each of the children ended that are still looked at.
        self.children: dict[Process, float] = {}
        self._failed: Failed = {}

    def run(self) -> None:
        threading.current_thread().name = f"fencedlock-children-{self._alias}"
        while True:
            self.look()

    def look(self) -> None:
        """Wait for the next look, and look at all children that ended lately."""
        timeout = LOOK_EACH if self.children else None
        with contextlib.suppress(runtime.Empty):
            while True:
                child = self.ended.get(timeout=timeout)
                # Read after the wait, which may have taken hours.
                self.children[child], timeout = clock(), 0.0
        look_for = LOOK_FOR
        try:
            release_locks_of(self.children, self._alias)
        except Exception as exc:
            text = (
                "The locks that ended children held through alias %r couldn't be released: %s. "
                "It is tried again for a while; then they expire."
            )
            if _report(self._failed, self._alias, exc, text, self._alias):
                look_for = conf.config(self._alias).ttl
        else:
            self._failed.clear()
        now = clock()
        self.children = {child: at for child, at in self.children.items() if now - at < look_for}


def release_locks_of(children: Collection[Process], alias: str) -> None:
    """
    Release what these processes hold, according to the registry.

    Connections are opened for it and closed again: a child that is forked later would inherit them.
    """
    records = Records(conf.config(alias))

    def find() -> list[Any]:
        pids = [child.pid for child in children]
        rows = records.rows("HeldLock").filter(alias=alias, pid__in=pids)
        found = fetch(rows, "name", "owner", "boot_id", "pid_namespace", "pid", "pid_started")
        return [
            row
            for row in found
            if Process(row.boot_id, row.pid_namespace, row.pid, row.pid_started) in children
        ]

    with _gate.closed():
        try:
            if held := records.query("look for ended children", None, find):
                _release(records, held)
        finally:
            connections.close_all()


def _release(records: Records, held: list[Any]) -> None:
    config, deaths = records.config, []
    backend: Backend = conf.backend_class(config.backend)(config)
    try:
        for row in held:
            grant = Grant(row.name, row.owner)
            released = backend.release(grant)
            if not backend.records_grants:
                Fences(config, backend.label).clear([grant])
            if released:
                emit(Kind.EVICTED, backend, row.name, owner=row.owner, pid=row.pid)
                deaths.append((clock(), history.death(row.name, config.alias, row.pid)))
    finally:
        with contextlib.suppress(BackendUnavailable, Error):
            backend.close()
    # The background writer is off: it would have connections open at the next fork.
    if deaths and conf.history() and not connections.under_test():
        records.query("write the history", None, partial(history.write, records.using, deaths))


# Pending runs and old rows


class Maintenance:
    """
    Serves pending runs whose holder died, and deletes old rows.

    If the worker forks, it closes all connections after each look: a child that is forked later
    would inherit them. Otherwise its tasks use the same private connections.
    """

    def __init__(self, app: Any, *, forks: bool = False) -> None:
        self._app, self._forks = app, forks
        self._end = runtime.SimpleQueue[None]()
        self._delete_at = 0.0
        self._failed: Failed = {}

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
        """Return the seconds from one look to the next: half of the shortest ttl."""
        ttls = [
            policy.ttl or config.ttl
            for config, policies in self._databases()
            for policy in policies.values()
        ]
        return max(OFTEN, min([2 * SELDOM, *ttls]) / 2)

    def look(self) -> int:
        """Serve pending runs, and delete old rows each minute; return how many were served."""
        served, deletes = 0, clock() >= self._delete_at
        for config, policies in self._databases():
            try:
                if policies:
                    served += serve_overdue(self._app, config, policies)
                if deletes:
                    for table in (MessageRecords, PendingRuns, ExpiredRows):
                        table(config).sweep(BATCHES)
            except FencedLockError as exc:
                text = (
                    "Database %r can't be used: %s. Until it can, stored triggers wait and old "
                    'rows stay; tasks with fenced=False and redelivery="run" do without it.'
                )
                _report(self._failed, config.fence_database, exc, text, config.alias)
            else:
                self._failed.pop(config.fence_database, None)
        if deletes:
            self._delete_at = clock() + DELETE_EACH
        return served

    def _databases(self) -> Iterable[tuple[conf.AliasConfig, dict[str, Policy]]]:
        """Return an alias of each fence database, and the tasks that coalesce there."""
        found: dict[str, tuple[conf.AliasConfig, dict[str, Policy]]] = {}
        singles = {name: single_of(task) for name, task in dict(self._app.tasks).items()}
        coalescing = {}
        for name, single in singles.items():
            # One whose model doesn't exist fails by itself, too.
            with contextlib.suppress(FencedLockError):
                if single and single.policy.on_conflict == "coalesce":
                    coalescing[name] = single.policy
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
        self._threads: list[Callable[[], object]] = []
        if forks:
            writer.disable()
            if can_watch():
                left = [LeftLocks(alias) for alias in conf.aliases()]
                watch = ChildWatch([each.ended for each in left])
                self._threads = [watch.run, *(each.run for each in left)]
            else:
                logger.info(
                    "This system has no pidfd_open() (Linux 5.3), which shows the end of another "
                    "process: the locks of children that are killed are held until they expire"
                )
        return Maintenance(worker.app, forks=forks)

    def start(self, worker: Any) -> None:
        for thread in self._threads:
            runtime.start(thread)
        # The worker stops it too. The watch continues: children may be killed until the pool stops.
        super().start(worker)


@signals.celeryd_init.connect(weak=False, dispatch_uid="django_fencedlock.worker")
def _install(instance: Any, **kwargs: object) -> None:
    instance.app.steps["worker"].add(Housekeeping)


@signals.worker_process_shutdown.connect(weak=False, dispatch_uid="django_fencedlock.worker_tidy")
def _tidy(**kwargs: object) -> None:
    # A child ends by os._exit(), without atexit. Rows of the registry whose locks it released in
    # its last second would stay.
    tidy_at_exit()
