"""
The scribe writes, once a second and behind everybody's back, what may wait or be left out.

It has one thread in a process, which ends when there is nothing to write. What it can't write it
counts and leaves out: no lock ever waits for it, or fails with it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..backends.base import is_table_missing
from ..core import runtime
from ..core.runtime import clock
from .connections import ConnectionPool, under_test
from .records import Statements
from .vendors import ledger_for

logger = logging.getLogger(__name__)

#: Seconds between two writings.
EVERY = 1.0
#: Seconds for which the thread waits for more before it ends.
LINGER = 10.0
#: Seconds until a database is tried again that failed, and between two complaints.
REST = 60.0
#: Seconds for one writing, and at the interpreter's exit.
TIMEOUT, AT_EXIT = 5.0, 2.0
#: Seconds to wait for SQLite's file: whoever has it does something that matters more.
BRIEFLY = 0.1
#: Seconds that a fork waits for the end of a writing, at most: longer than that waits for a file.
PATIENCE = 0.2
#: So many pages are kept for another try, after somebody else had a row locked.
AGAIN = 5


@dataclass(frozen=True)
class Page:
    """What is written to one database at once."""

    database: str
    write: Callable[[Statements], object]
    #: So much is left out if it can't be written.
    events: int = 0


class Book(Protocol):
    """Something that has pages to write."""

    def pages(self) -> Iterator[Page]:
        """Take what is to be written now: a bounded part of what there is."""

    def is_empty(self) -> bool:
        """Whether nothing is left to be written."""

    def forget(self) -> None:
        """Leave out what there is."""


class Scribe:
    """Writes the books of one process. `flush()` does the work; the thread calls it."""

    def __init__(self) -> None:
        #: Nothing is written behind a test's back.
        self.is_testing: Callable[[], bool] = under_test
        self.start: Callable[[Callable[[], object]], object] = runtime.start
        self.books: list[Book] = []
        self._sessions: dict[str, ConnectionPool] = {}
        self._reset()

    def _reset(self) -> None:
        self._lock = runtime.allocate_lock()
        self._writing = runtime.allocate_lock()
        self._runs = self._noted = self._hushed = False
        self._again: list[Page] = []
        self._rests_until: dict[str, float] = {}
        self._left_out = 0
        self._told_at = clock()
        self._forks: int | None = None

    def is_quiet(self) -> bool:
        """Whether nothing is to be noted."""
        return self._hushed or self.is_testing()

    def hush(self) -> None:
        """Note nothing in this process: its children do, that are forked from it at any time."""
        self._hushed = True

    def before_fork(self) -> None:
        """Have nothing open that a child would inherit: SQLite's locks don't bear that."""
        if self._writing.acquire(timeout=PATIENCE):
            self._forks = threading.get_ident()
            self.close()

    def after_fork(self) -> None:
        """Go on, in the parent."""
        if self._forks == threading.get_ident():
            self._forks = None
            self._writing.release()

    def forget_after_fork(self) -> None:
        """Keep nothing of the parent's, which writes it; the thread stayed there."""
        self._reset()
        for book in self.books:
            book.forget()

    def forget(self) -> None:
        """Leave out what is still to be written. For the end of a test."""
        self._again.clear()
        for book in self.books:
            book.forget()

    def leave_out(self, events: int = 1) -> None:
        """Count what isn't written."""
        self._left_out += events

    def rouse(self) -> None:
        """See to it that somebody writes."""
        # In this order: a thread that is about to end looks at the one after it set the other.
        self._noted = True
        if not self._runs:
            with self._lock:
                start, self._runs = not self._runs, True
            if start:
                try:
                    self.start(self._run)
                except RuntimeError:
                    # There are too many threads, or the interpreter ends: no lock fails with it.
                    self._runs = False

    def flush(self, timeout: float = TIMEOUT) -> bool:
        """Write a bounded part of what there is; whether something is left for the next time."""
        again, self._again = self._again, []
        for page in again:
            self._write(page, timeout)
        for book in self.books:
            for page in book.pages():
                self._write(page, timeout)
        self._tell_left_out()
        return bool(self._again) or not all(book.is_empty() for book in self.books)

    def finish(self) -> None:
        """Write once more, if that is soon done, at the interpreter's exit."""
        # What the thread is writing would be cut off, too.
        if self.is_quiet() or not self._writing.acquire(timeout=AT_EXIT):
            return
        self.close()
        if not all(book.is_empty() for book in self.books):
            self._sessions.clear()
            with contextlib.suppress(Exception):
                self.flush(AT_EXIT)
            self.close()

    def close(self) -> None:
        """Close what is idle."""
        for each in self._sessions.values():
            each.close()

    def _write(self, page: Page, timeout: float) -> None:
        database = page.database
        if self._rests_until.get(database, 0.0) > clock():
            self.leave_out(page.events)
            return
        try:
            self._session(database, timeout).run(lambda private: _write(page, private))
        except Error as exc:
            if ledger_for(connections[database]).is_row_locked(exc) and len(self._again) < AGAIN:
                self._again.append(page)
                return
            self.leave_out(page.events)
            self._rest(database, exc)
        else:
            if self._rests_until.pop(database, None):
                logger.info("The scribe writes to %r again", database)

    def _session(self, database: str, timeout: float) -> ConnectionPool:
        # Of its own, so that a lock never has to wait for a connection that the scribe has.
        return self._sessions.setdefault(database, ConnectionPool(database, timeout))

    def _rest(self, database: str, error: Error) -> None:
        if database not in self._rests_until:
            # Whoever uses unfenced locks alone needs no tables.
            level = logging.INFO if is_table_missing(error) else logging.WARNING
            logger.log(
                level,
                "What the scribe has to write (the history of locks, unfenced locks) "
                "can't be written to %r (%s: %s); locks aren't touched by that. It is tried again "
                "every %d s.",
                database,
                type(error).__name__,
                str(error).strip(),
                REST,
            )
        self._rests_until[database] = clock() + REST

    def _tell_left_out(self) -> None:
        if self._left_out and clock() >= self._told_at + REST:
            logger.warning("%d events were left out of the history of locks", self._left_out)
            self._left_out, self._told_at = 0, clock()

    def _run(self) -> None:
        threading.current_thread().name = "fencedlock-scribe"
        sleep = runtime.original("time", "sleep")
        last = clock()
        while True:
            sleep(EVERY)
            self._noted, noted = False, self._noted
            try:
                with self._writing:
                    more = self.flush()
            except Exception:
                logger.exception("What the scribe has to write isn't written")
                more = False
            if noted or more:
                last = clock()
            elif clock() >= last + LINGER and self._may_end():
                return

    def _may_end(self) -> bool:
        with self._lock:
            self._runs = False
            if self._noted:
                self._runs = True
                return False
        self.close()
        return True


def _write(page: Page, private: BaseDatabaseWrapper) -> None:
    ledger_for(private).patience(private, BRIEFLY)
    page.write(Statements(private))


scribe = Scribe()

os.register_at_fork(
    before=scribe.before_fork,
    after_in_parent=scribe.after_fork,
    after_in_child=scribe.forget_after_fork,
)
atexit.register(scribe.finish)
