"""One thread that writes what may be dropped: the history, and rows of unfenced locks."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from django.db import Error, connections

from ..core.runtime import Worker, allocate_lock, clock, forks, original
from .connections import ConnectionPool, under_test
from .text import is_table_missing
from .vendors import ledger_for

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds between two writes.
INTERVAL = 1.0
#: Seconds until a job is tried again after an error.
RETRY_AFTER = 60.0
#: Seconds for one write. The interpreter's exit waits as long.
WRITE_TIMEOUT = 2.0
#: Seconds to wait for SQLite's file: grants and releases go first.
SQLITE_BUSY_TIMEOUT = 0.1
#: Seconds that a fork waits for a write to end; longer than a write waits for SQLite's file.
FORK_TIMEOUT = 0.2


class Job(Protocol):
    """A bounded amount of data for one database."""

    database: str

    def write(self) -> bool:
        """Write a part of the data, by Django's ORM. Return whether more is left."""

    def forget(self) -> None:
        """Drop the data."""


class BackgroundWriter:
    """Writes queued jobs about once a second; no lock waits for it, or fails with it."""

    def __init__(self) -> None:
        self._worker = Worker("fencedlock-writer")
        self._pools: dict[str, ConnectionPool] = {}
        #: With the time before which a job isn't tried.
        self._jobs: dict[Job, float] = {}
        self.after_fork()
        forks.register(self)
        atexit.register(self.finish)

    def after_fork(self) -> None:
        """Leave the parent's jobs to the parent."""
        self.forget()
        self._failing: set[Job] = set()
        self._writing = allocate_lock()
        self._forking_thread: int | None = None
        self._disabled = False

    def disable(self) -> None:
        """Write nothing in this process: it may fork at any time. Its children do write."""
        self._disabled = True

    def is_off(self) -> bool:
        """Return whether nothing may be queued: after `disable()`, and in tests."""
        return self._disabled or under_test()

    def put(self, job: Job) -> bool:
        """Queue `job`, unless it is queued already. Return whether a thread will write it."""
        self._jobs.setdefault(job, 0.0)
        if self._worker.waiting:
            return self._worker.start()
        return self._worker.put(self._write_soon)

    def forget(self) -> None:
        """Drop all jobs."""
        for job in list(self._jobs):
            job.forget()
        self._jobs.clear()

    def flush(self) -> bool:
        """Write all jobs that are due. Return whether some are left."""
        for job, due in list(self._jobs.items()):
            if due <= clock():
                self._jobs.pop(job, None)
                self._write(job)
        return bool(self._jobs)

    def finish(self) -> None:
        """Write once more at the interpreter's exit."""
        if self._jobs and not self.is_off() and self._writing.acquire(timeout=WRITE_TIMEOUT):
            with contextlib.suppress(Exception):
                self.flush()
            self.close()

    def run(self, database: str, work: Callable[[], T]) -> T:
        """Run `work` on a connection of the writer's own, so that no lock waits for it."""
        pool = self._pools.get(database)
        if pool is None:
            pool = self._pools.setdefault(database, ConnectionPool(database, WRITE_TIMEOUT))
        return pool.run_orm(work, SQLITE_BUSY_TIMEOUT)

    def close(self) -> None:
        """Close idle connections."""
        for each in self._pools.values():
            each.close()

    def before_fork(self) -> None:
        # A child must not inherit SQLite's file locks.
        if self._writing.acquire(timeout=FORK_TIMEOUT):
            self._forking_thread = threading.get_ident()
            self.close()

    def after_fork_in_parent(self) -> None:
        if self._forking_thread == threading.get_ident():
            self._forking_thread = None
            self._writing.release()

    def _write_soon(self) -> None:
        original("time", "sleep")(INTERVAL)
        with self._writing:
            more = self.flush()
            if not more:
                self.close()
        if more:
            self._worker.put(self._write_soon)

    def _write(self, job: Job) -> None:
        try:
            if job.write():
                self._jobs.setdefault(job, 0.0)
        except Error as exc:
            locked = ledger_for(connections[job.database]).is_row_locked(exc)
            self._jobs[job] = 0.0 if locked else clock() + RETRY_AFTER
            if not locked and job not in self._failing:
                self._failing.add(job)
                self._log(job, exc)
        except Exception:
            logger.exception("A background write to %r failed", job.database)
        else:
            if job in self._failing:
                self._failing.discard(job)
                logger.info("Background writes to %r succeed again", job.database)

    def _log(self, job: Job, exc: Error) -> None:
        # Projects with unfenced locks alone need no tables.
        logger.log(
            logging.INFO if is_table_missing(exc) else logging.WARNING,
            "The history of locks and the rows of unfenced locks can't be written to %r (%s: %s). "
            "Locks still work. The next try is in %d s.",
            job.database,
            type(exc).__name__,
            str(exc).strip(),
            RETRY_AFTER,
        )


writer = BackgroundWriter()
