"""
Release the locks of a worker's children that have ended.

A child announces itself to the main process before it runs a task. The main process watches it by a
pidfd, which becomes readable when the whole process has ended, for whatever reason. Celery's own
signals come too early (the child still runs) or too late (up to 5 s after a SIGKILL). Then the main
process looks up the child's rows in the registry, which has one for each fenced lock, and evicts
their owners.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import conf, logs
from ..backends.base import Backend
from ..core import runtime
from ..core.identity import PidFd, Process, this_process
from ..core.runtime import clock
from ..exceptions import BackendUnavailable, SettingsError
from ..storage import connections, history
from ..storage.errors import is_table_missing
from ..storage.history import EventRow
from ..storage.vendors import ledger_for
from .forks import no_fork

logger = logging.getLogger(__name__)

#: Tells children that are spawned, not forked, where to announce themselves.
VARIABLE = "FENCEDLOCK_WORKER"
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


def can_be_watched() -> bool:
    """Return whether this system tells a process of another one's end."""
    try:
        with contextlib.closing(PidFd(os.getpid())):
            return bool(this_process().started)
    except OSError:
        return False


# In the main process


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
        pause = runtime.original("time", "sleep")
        while True:
            try:
                self.look()
            except Exception:
                # Without this thread the locks of killed children are held until they expire.
                logger.exception("Watching the worker's children failed")
                pause(AFTER_ERROR)

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


@dataclass(frozen=True, slots=True)
class _Look:
    """A planned look at what an ended child has left, and when to give up."""

    at: float
    child: Process
    until: float


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
            if alias not in self._aliases:
                self._aliases[alias] = _Alias(alias)
            self._aliases[alias].add(child)


class _Alias:
    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._changed = threading.Condition()
        self._looks: list[_Look] = []
        self._runs = False

    def add(self, child: Process) -> None:
        now = clock()
        until = now + conf.config(self._alias).ttl
        self._plan(_Look(now + seconds, child, until) for seconds in LOOK_AFTER)

    def _plan(self, looks: Iterable[_Look]) -> None:
        with self._changed:
            self._looks += looks
            self._changed.notify()
            if self._looks and not self._runs:
                runtime.start(self._run)
                self._runs = True

    def _run(self) -> None:
        threading.current_thread().name = f"fencedlock-children-{self._alias}"
        while due := self._wait():
            if not self._release(list({look.child for look in due})):
                at = clock() + RETRY_AFTER
                self._plan(_Look(at, each.child, each.until) for each in due if at < each.until)

    def _wait(self) -> list[_Look]:
        """Wait until looks are due, and take them; an empty list if none is planned."""
        with self._changed:
            while self._looks:
                now = clock()
                due = [look for look in self._looks if look.at <= now]
                if due:
                    self._looks = [look for look in self._looks if look.at > now]
                    return due
                self._changed.wait(min(look.at for look in self._looks) - now)
            self._runs = False
            return []

    def _release(self, children: Sequence[Process]) -> bool:
        """Return whether there is nothing more to do now."""
        try:
            release_locks_of(children, self._alias)
        except (BackendUnavailable, Error, SettingsError) as exc:
            if is_table_missing(exc):
                # A project that uses unfenced locks alone needs no tables.
                return True
            logger.warning(
                "The locks that ended children held through alias %r couldn't be released: %s",
                self._alias,
                exc,
                extra=logs.facts(alias=self._alias, reason=str(exc)),
            )
        except Exception:
            logger.exception("Releasing the locks of ended children failed")
        else:
            return True
        return False


def release_locks_of(children: Sequence[Process], alias: str) -> None:
    """
    Release what the registry says that these processes hold through an alias.

    Connections are opened for it and closed again: a child that is forked later would inherit them.
    """
    config = conf.config(alias)
    with no_fork():
        try:
            for child, held in _held_by(children, config):
                backend = conf.backend_class(config.backend)(config)
                try:
                    released = [name for name, owner in held if _evict(backend, child, name, owner)]
                    _write_history(config, child, released)
                finally:
                    with contextlib.suppress(BackendUnavailable, Error):
                        backend.close()
        finally:
            connections.close_all()


def _held_by(
    children: Sequence[Process], config: conf.AliasConfig
) -> list[tuple[Process, list[tuple[str, str]]]]:
    """Return the names and owners of each child's rows; nothing for a child without rows."""

    def look(private: BaseDatabaseWrapper) -> list[tuple[Process, list[tuple[str, str]]]]:
        ledger = ledger_for(private)
        found = [(child, ledger.left_by(private, config.alias, child)) for child in children]
        return [(child, rows) for child, rows in found if rows]

    return connections.pool(config.fence_database, TIMEOUT).run(look)


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


# In a child

#: Where to announce oneself: the main process makes it, and forked children inherit it.
_pipe: int | None = None


def is_watched() -> bool:
    """Return whether a main process watches this one."""
    return VARIABLE in os.environ


def forget_watch() -> None:
    """Don't announce this process to the worker that a task of it was started by."""
    global _pipe
    _pipe = None
    os.environ.pop(VARIABLE, None)


def announce() -> None:
    """Tell the main process of this one. The line is short: no other mixes with it."""
    try:
        pipe = _open_pipe() if _pipe is None else _pipe
        os.write(pipe, f"{this_process()}\n".encode())
    except OSError as exc:
        logger.warning(
            "Process %d couldn't announce itself to its worker (%s). If it is killed, its locks "
            "are held until they expire.",
            os.getpid(),
            exc,
        )


def _open_pipe() -> int:
    """Open the pipe of a main process that spawned this one."""
    pid, _, file = os.environ[VARIABLE].partition(":")
    return os.open(f"/proc/{pid}/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
