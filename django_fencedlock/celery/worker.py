"""
What a worker's main process does besides its tasks: release the locks of children that ended, serve
pending runs whose holder died, and delete old rows.

A child announces itself to the main process before it runs a task. The main process watches it by a
pidfd, which becomes readable when the whole process has ended, for whatever reason. Celery's own
signals come too early (the child still runs) or too late (up to 5 s after a SIGKILL). Then the main
process looks up the child's rows in the registry, which has one for each fenced lock, and evicts
their owners.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from celery import bootsteps, signals
from django.db import Error
from django.db import connections as django_connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import conf, logs
from ..backends.base import Backend
from ..core import runtime
from ..core.identity import PidFd, Process, this_process
from ..core.manager import tidy_at_exit
from ..core.runtime import clock
from ..exceptions import BackendUnavailable, FencedLockError, SettingsError
from ..storage import connections, history
from ..storage.background_writer import writer
from ..storage.dialect import BATCH
from ..storage.errors import is_table_missing
from ..storage.expired import ExpiredRows
from ..storage.history import EventRow
from ..storage.message_records import MessageRecords
from ..storage.pending_runs import PendingRuns
from ..storage.vendors import ledger_for
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
#: Seconds until a service that didn't answer is asked again.
RETRY_AFTER = 1.0
#: Seconds for a question to the registry.
TIMEOUT = 5.0
#: Seconds to wait for SQLite's file when only the history is written.
SQLITE_BUSY_TIMEOUT = 0.1
#: Seconds to pause after an unexpected error.
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


# Forks wait for threads


class ForkGate:
    """
    Keeps forks and the threads of the main process apart.

    A child inherits every open connection, and every mutex that a thread has just locked. So a fork
    waits until the threads that use a server are done, and they until it is done. A fork doesn't
    wait long for a server that doesn't answer.
    """

    def __init__(self) -> None:
        self.after_in_child()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Let no process be forked in this block, if it is short."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        with self._mutex:
            self._inside += 1

    def leave(self) -> None:
        with self._mutex:
            self._inside -= 1

    def before_fork(self) -> None:
        until = clock() + FORK_TIMEOUT
        self._mutex.acquire()
        while self._inside and clock() < until:
            self._mutex.release()
            runtime.original("time", "sleep")(0.001)
            self._mutex.acquire()

    def after_in_parent(self) -> None:
        self._mutex.release()

    def after_in_child(self) -> None:
        self._mutex = runtime.allocate_lock()
        self._inside = 0


_gate = ForkGate()
os.register_at_fork(
    before=_gate.before_fork,
    after_in_parent=_gate.after_in_parent,
    after_in_child=_gate.after_in_child,
)


# In a child

#: Where to announce oneself: the main process makes it, and forked children inherit it.
_pipe: int | None = None


def is_watched() -> bool:
    """Return whether a main process watches this one."""
    return VARIABLE in os.environ


def forget_watch() -> None:
    """Don't announce this process to a worker whose task started it."""
    global _pipe
    _pipe = None
    os.environ.pop(VARIABLE, None)


def announce() -> None:
    """Announce this process to the main process. A short line isn't mixed with others."""
    try:
        if (pipe := _pipe) is None:
            # A spawned process opens the pipe of its main process.
            pid, _, file = os.environ[VARIABLE].partition(":")
            pipe = os.open(f"/proc/{pid}/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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
    Watches the children, in a thread that sleeps until one begins or ends.

    Create it before the first child, so that each child can announce itself.

    Args:
        ended: Called with each child that has ended, in the thread.
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
                self._read_announcements()
            else:
                child, opened = self._children.pop(ready)
                self._poll.unregister(ready)
                opened.close()
                self._ended(child)

    def _read_announcements(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._unread += os.read(self._announcements, 65536)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._watch(Process.read(line.decode(errors="replace")))

    def _watch(self, child: Process) -> None:
        try:
            opened = PidFd(child.pid)
        except ProcessLookupError:
            self._ended(child)
            return
        if opened.is_gone(child.started):
            # Another process may have the pid by now.
            opened.close()
            self._ended(child)
            return
        self._children[opened.fileno()] = child, opened
        self._poll.register(opened, select.POLLIN)


class LeftLocks:
    """
    Releases what ended children have left.

    Each alias has a thread while there is something to do: a service that doesn't answer delays no
    other alias.
    """

    def __init__(self) -> None:
        self._aliases: dict[str, _Alias] = {}

    def release(self, child: Process) -> None:
        """Release the locks of a child that has ended."""
        for alias in conf.aliases():
            self._aliases.setdefault(alias, _Alias(alias)).add(child)


class _Alias:
    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._changed = threading.Condition()
        #: Planned looks: when, at which child, and when to give up.
        self._looks: list[tuple[float, Process, float]] = []
        self._runs = False

    def add(self, child: Process) -> None:
        now = clock()
        until = now + conf.config(self._alias).ttl
        with self._changed:
            self._looks += [(now + seconds, child, until) for seconds in LOOK_AFTER]
            self._changed.notify()
            if not self._runs:
                runtime.start(self._run)
                self._runs = True

    def _run(self) -> None:
        threading.current_thread().name = f"fencedlock-children-{self._alias}"
        while due := self._wait():
            if not _try_to_release({child for _, child, _ in due}, self._alias):
                at = clock() + RETRY_AFTER
                with self._changed:
                    self._looks += [(at, child, until) for _, child, until in due if at < until]

    def _wait(self) -> list[tuple[float, Process, float]]:
        """Wait until looks are due, and take them; an empty list if none is planned."""
        with self._changed:
            while self._looks:
                now = clock()
                due = [look for look in self._looks if look[0] <= now]
                if due:
                    self._looks = [look for look in self._looks if look[0] > now]
                    return due
                self._changed.wait(min(at for at, _, _ in self._looks) - now)
            self._runs = False
            return []


def _try_to_release(children: Collection[Process], alias: str) -> bool:
    """Return whether there is nothing more to do now."""
    try:
        release_locks_of(children, alias)
    except (BackendUnavailable, Error, SettingsError) as exc:
        # A project that uses unfenced locks alone needs no tables.
        if not is_table_missing(exc):
            logger.warning(
                "The locks that ended children held through alias %r couldn't be released: %s",
                alias,
                exc,
                extra=logs.facts(alias=alias, reason=str(exc)),
            )
            return False
    except Exception:
        logger.exception("Releasing the locks of ended children failed")
        return False
    return True


def release_locks_of(children: Collection[Process], alias: str) -> None:
    """
    Release what the registry says that these processes hold through an alias.

    Connections are opened for it and closed again: a child that is forked later would inherit them.
    """
    config = conf.config(alias)

    def look(private: BaseDatabaseWrapper) -> list[tuple[Process, list[tuple[str, str]]]]:
        ledger = ledger_for(private)
        return [(child, ledger.left_by(private, alias, child)) for child in children]

    with _gate.closed():
        try:
            for child, held in connections.pool(config.fence_database, TIMEOUT).run(look):
                if not held:
                    continue
                backend = conf.backend_class(config.backend)(config)
                try:
                    released = [name for name, owner in held if _evict(backend, child, name, owner)]
                    _write_history(config, child, released)
                finally:
                    with contextlib.suppress(BackendUnavailable, Error):
                        backend.close()
        finally:
            connections.close_all()


def _evict(backend: Backend, child: Process, name: str, owner: str) -> bool:
    if not backend.evict(name, owner):
        return False
    logger.warning(
        "Released lock %r (alias %r): the process that held it has ended",
        name,
        backend.config.alias,
        extra=logs.facts(name=name, alias=backend.config.alias, owner=owner),
    )
    backend.tell_evicted(name, owner, child)
    return True


def _write_history(config: conf.AliasConfig, child: Process, names: Sequence[str]) -> None:
    # Not by the background writer: it would have connections open at the next fork.
    rows = [EventRow(history.death(name, config.alias, child.pid)) for name in names]
    if not rows or not conf.history() or connections.under_test():
        return
    database = config.fence_database
    try:
        connections.pool(database, TIMEOUT).run_orm(
            lambda: history.write(database, rows), SQLITE_BUSY_TIMEOUT
        )
    except Error as exc:
        logger.info("The history of alias %r wasn't written: %s", config.alias, exc)


# In the main process: pending runs and old rows


class Maintenance:
    """Serves pending runs of an app's tasks whose holder died, and deletes old rows."""

    def __init__(self, app: Any, clock: Callable[[], float] = clock) -> None:
        self._app = app
        self._clock = clock
        self._delete_at = self._count_at = -math.inf
        #: The fence databases with more old rows than one look deletes.
        self._behind: set[str] = set()
        #: By fence database: records that are kept until then are deleted now.
        self._surplus: dict[str, Any] = {}
        self._failing: set[str] = set()

    def period(self) -> float:
        """Return the seconds from one look to the next."""
        if self._behind:
            return OFTEN
        ttls = [
            policy.ttl or conf.config(policy.backend).ttl
            for policy in self._policies().values()
            if policy.on_conflict == "coalesce"
        ]
        return min(SELDOM, max(OFTEN, min(ttls) / 2)) if ttls else DELETE_EACH

    def look(self) -> int:
        """Serve pending runs, and delete old rows if it is time; return how many were served."""
        served = 0
        deletes, counts = self._clock() >= self._delete_at, self._clock() >= self._count_at
        for alias, policies in self._databases().items():
            config = conf.config(alias)
            pending = {n: each for n, each in policies.items() if each.on_conflict == "coalesce"}
            try:
                if pending:
                    served += serve_overdue(self._app, config, pending)
                if deletes:
                    self._delete(config, bool(pending), counts)
                self._failing.discard(alias)
            except FencedLockError as exc:
                if alias not in self._failing:
                    logger.warning("Pending runs and old rows can't be looked after: %s", exc)
                self._failing.add(alias)
        if deletes:
            _delete_expired_rows()
            self._delete_at = self._clock() + (OFTEN if self._behind else DELETE_EACH)
            if counts:
                self._count_at = self._clock() + COUNT_EACH
        return served

    def _delete(self, config: conf.AliasConfig, pending: bool, counts: bool) -> None:
        most, database = BATCHES * BATCH, config.fence_database
        self._behind.discard(database)
        records = MessageRecords(config)
        left = records.sweep(BATCHES) >= most
        if pending:
            left |= PendingRuns(config).forget(BATCHES) >= most
        if counts and (until := records.limit(MOST_RECORDS)) is not None:
            self._surplus[database] = until
            text = "More than %d messages of tasks are on record; the oldest are deleted early."
            logger.warning(text, MOST_RECORDS)
        if database in self._surplus:
            if records.sweep(BATCHES, until=self._surplus[database]) >= most:
                left = True
            else:
                del self._surplus[database]
        if left:
            self._behind.add(database)

    def _databases(self) -> dict[str, dict[str, Policy]]:
        """Return the policies by task, by one alias of each fence database."""
        aliases: dict[str, str] = {}
        found: dict[str, dict[str, Policy]] = {}
        for name, policy in self._policies().items():
            alias = aliases.setdefault(conf.config(policy.backend).fence_database, policy.backend)
            found.setdefault(alias, {})[name] = policy
        return found

    def _policies(self) -> dict[str, Policy]:
        """Return the policies of the tasks that leave rows, by task."""
        # A task whose alias is unknown fails by itself, and delays no other.
        aliases, tasks = conf.aliases(), dict(self._app.tasks)
        found = {name: single.policy for name, task in tasks.items() if (single := single_of(task))}
        return {
            name: policy
            for name, policy in found.items()
            if policy.backend in aliases
            and (policy.on_conflict == "coalesce" or policy.redelivery == "defer")
        }


def _delete_expired_rows() -> None:
    """Delete what dead processes left in the registry, of every alias."""
    configs = []
    for alias in conf.aliases():
        with contextlib.suppress(FencedLockError):
            configs.append(conf.config(alias))
    for config in {each.fence_database: each for each in configs}.values():
        try:
            ExpiredRows(config).sweep(BATCHES)
        except FencedLockError as exc:
            # Unfenced locks alone need no tables.
            logger.debug("Expired rows of the registry stay: %s", exc)


class Rounds:
    """
    The thread of the main process that calls a `Maintenance`, whatever the pool.

    Connections are closed after each look: a child that is forked later would inherit them.
    """

    def __init__(self, maintenance: Maintenance, *, forks: bool) -> None:
        self._maintenance = maintenance
        self._forks = forks
        self._end = runtime.SimpleQueue[None]()

    def start(self) -> None:
        runtime.start(self._run)

    def stop(self) -> None:
        self._end.put(None)

    def _run(self) -> None:
        threading.current_thread().name = "fencedlock-rounds"
        while True:
            pause = self._look()
            with contextlib.suppress(runtime.Empty):
                self._end.get(timeout=pause)
                return

    def _look(self) -> float:
        """Return the seconds until the next look."""
        with _gate.closed():
            try:
                self._maintenance.look()
                return self._maintenance.period()
            except Exception:
                logger.exception("The worker's look for pending runs and old rows failed")
                return AFTER_FAILURE
            finally:
                django_connections.close_all()
                if self._forks:
                    # Without children, the tasks use these too.
                    connections.close_all()


class Housekeeping(bootsteps.StartStopStep):
    """The part of a worker that starts all of this."""

    name = "fencedlock"
    # Created before the first child, and started after the pool.
    requires = ("celery.worker.components:Pool",)

    def create(self, worker: Any) -> None:
        forks = any(
            each.__module__ == "celery.concurrency.prefork" for each in worker.pool_cls.__mro__
        )
        if forks:
            writer.disable()
        self._watch = _child_watch() if forks else None
        self._rounds = Rounds(Maintenance(worker.app), forks=forks)

    def start(self, worker: Any) -> None:
        if self._watch:
            self._watch.start()
        self._rounds.start()

    def stop(self, worker: Any) -> None:
        # The watch continues: the pool stops later, and its children may be killed until then.
        self._rounds.stop()

    def terminate(self, worker: Any) -> None:
        self.stop(worker)


def _child_watch() -> ChildWatch | None:
    if can_watch():
        return ChildWatch(LeftLocks().release)
    logger.info(
        "This system has no pidfd_open() (Linux 5.3), which shows the end of another process: the "
        "locks of children that are killed are held until they expire"
    )
    return None


@signals.celeryd_init.connect(weak=False, dispatch_uid="django_fencedlock.worker")
def _install(instance: Any, **kwargs: object) -> None:
    forget_watch()
    instance.app.steps["worker"].add(Housekeeping)


@signals.worker_process_init.connect(weak=False, dispatch_uid="django_fencedlock.worker_process")
def _announce(**kwargs: object) -> None:
    # The solo pool sends this signal too, in the main process, which no process watches.
    if is_watched():
        announce()


@signals.worker_process_shutdown.connect(weak=False, dispatch_uid="django_fencedlock.worker_tidy")
def _tidy(**kwargs: object) -> None:
    # A child ends by os._exit(), without atexit. Rows of the registry whose locks it released in
    # its last second would stay.
    tidy_at_exit()
