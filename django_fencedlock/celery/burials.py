"""Freeing what dead processes held, until it is done or has run out by itself."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import conf, history, logs, sessions, threads
from ..backends.base import Backend
from ..exceptions import BackendUnavailable, SettingsError
from ..fences import events, ledger_for
from ..fences.events import EventRow
from ..fences.records import Statements
from ..journal import Found, JournalEntry
from ..lease import clock
from ..processes import Process
from .forks import no_fork

logger = logging.getLogger(__name__)

#: Seconds from a death to each time that its locks are freed. More than once, since the dead may
#: have sent a request that the service comes to later; it waits a quarter of a second for a row.
PASSES = (0.0, 0.4, 2.0)
#: Seconds between tries to reach a service that doesn't answer: at first, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
#: Seconds for a question to the registry.
TIMEOUT = 5.0
#: Seconds for SQLite's file, when only the history is to be written.
BRIEFLY = 0.1


@dataclass(frozen=True, slots=True)
class Dead:
    """One process, and what is to be freed of it through one alias."""

    process: Process
    entries: Sequence[JournalEntry]
    #: There may be more, which the registry knows.
    complete: bool

    def ttl(self, alias: str) -> float:
        """Seconds after which nothing of it is held any more, whatever is done."""
        ttls = [entry.ttl for entry in self.entries]
        return max(ttls if self.complete else [*ttls, conf.config(alias).ttl], default=0.0)


class Burials:
    """Hands each alias what is to be done. An alias that doesn't answer delays no other."""

    def __init__(self, free: Callable[[str, Dead], object] | None = None) -> None:
        self._free = free or free_all
        self._aliases: dict[str, _Alias] = {}

    def add(self, process: Process, found: Found) -> None:
        """Free what a process held that is gone."""
        entries: dict[str, list[JournalEntry]] = defaultdict(list)
        for entry in found.entries:
            entries[entry.alias].append(entry)
        for alias in set(entries) | (set() if found.complete else set(conf.aliases())):
            if alias not in self._aliases:
                self._aliases[alias] = _Alias(alias, self._free)
            self._aliases[alias].add(Dead(process, entries[alias], found.complete))


class _Alias:
    """What is to be freed through one alias, and a thread while there is something."""

    def __init__(self, alias: str, free: Callable[[str, Dead], object]) -> None:
        self._alias = alias
        self._free = free
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._runs = False

    def add(self, dead: Dead) -> None:
        until = clock() + dead.ttl(self._alias)
        for seconds in PASSES:
            self._plan(seconds, lambda: self._try(dead, until))

    def _plan(self, seconds: float, work: Callable[[], object]) -> None:
        with self._changed:
            heapq.heappush(self._due, (clock() + seconds, next(self._numbers), work))
            self._changed.notify()
            if not self._runs:
                threads.start(self._run)
                self._runs = True

    def _run(self) -> None:
        threading.current_thread().name = f"fencedlock-burials-{self._alias}"
        while work := self._next():
            work()

    def _next(self) -> Callable[[], object] | None:
        """The next thing to do, when its time has come; None if there is nothing."""
        with self._changed:
            while self._due:
                left = self._due[0][0] - clock()
                if left <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left)
            self._runs = False
            return None

    def _try(self, dead: Dead, until: float, pause: float = FIRST_PAUSE) -> None:
        try:
            self._free(self._alias, dead)
        except (BackendUnavailable, Error, SettingsError) as exc:
            logger.warning(
                "What process %d held through alias %r couldn't be freed yet: %s",
                dead.process.pid,
                self._alias,
                exc,
                extra=logs.facts(alias=self._alias, reason=str(exc)),
            )
        except Exception:
            logger.exception("Freeing what process %d held failed", dead.process.pid)
        else:
            return
        if clock() < until:
            longer = min(LONGEST_PAUSE, pause * 2)
            self._plan(pause, lambda: self._try(dead, until, longer))


def free_all(alias: str, dead: Dead) -> None:
    """
    Free what a dead process held through an alias.

    By connections that are opened for it and closed again: a child that is forked meanwhile would
    inherit them.
    """
    config = conf.config(alias)
    with no_fork():
        backend = conf.backend_class(config.backend)(config)
        try:
            held = [(entry.name, entry.owner, entry.fenced) for entry in dead.entries]
            freed = _evict(backend, dead.process, held)
            if not dead.complete:
                freed += _evict(backend, dead.process, _registered(config, dead.process))
            _tell(config, dead.process, freed)
        finally:
            with contextlib.suppress(BackendUnavailable, Error):
                backend.close()
            sessions.close_all()


def _evict(backend: Backend, process: Process, held: Iterable[tuple[str, str, bool]]) -> list[str]:
    freed = []
    for name, owner, fenced in held:
        if backend.evict(name, owner, fenced=fenced):
            logger.warning(
                "Freed lock %r (alias %r): the process that held it is gone",
                name,
                backend.config.alias,
                extra=logs.facts(name=name, alias=backend.config.alias, owner=owner),
            )
            backend.tell_evicted(name, owner, process)
            freed.append(name)
    return freed


def _tell(config: conf.AliasConfig, process: Process, names: Sequence[str]) -> None:
    """Write to the history what the scribe may not: it would have files open at the next fork."""
    rows = [EventRow(history.death(name, config.alias, process.pid), 0.0) for name in names]
    if not rows or not conf.history() or sessions.under_test():
        return

    def write(private: BaseDatabaseWrapper) -> None:
        ledger_for(private).patience(private, BRIEFLY)
        events.write(Statements(private), rows, conf.history())

    try:
        sessions.sessions(config.fence_database, TIMEOUT).run(write)
    except Error as exc:
        logger.info("The history of alias %r wasn't written: %s", config.alias, exc)


def _registered(config: conf.AliasConfig, process: Process) -> list[tuple[str, str, bool]]:
    found = sessions.sessions(config.fence_database, TIMEOUT).run(
        lambda private: ledger_for(private).left_by(private, config.alias, process)
    )
    return [(name, owner, True) for name, owner in found]
