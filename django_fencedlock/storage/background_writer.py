"""One thread that writes what may be dropped: the history, and rows of unfenced locks."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from django.db import Error, connections

from ..core.runtime import Worker, allocate_lock, forks, original
from .connections import ConnectionPool, under_test
from .text import is_table_missing
from .vendors import LEDGERS

logger = logging.getLogger(__name__)

#: Seconds between two writes.
INTERVAL = 1.0
#: Limit of items that one function has queued for a database, and of those written at once.
MAX_QUEUED, BATCH = 10_000, 400
#: Seconds for one write. The interpreter's exit waits as long.
WRITE_TIMEOUT = 2.0
#: Seconds to wait for SQLite's file: grants and releases go first.
SQLITE_BUSY_TIMEOUT = 0.1
#: Seconds that a fork waits for a write to end; longer than a write waits for SQLite's file.
FORK_TIMEOUT = 0.2

#: Called with a database and queued items. It uses Django's ORM, on a private connection.
Write = Callable[[str, list[Any]], object]


class BackgroundWriter:
    """Writes queued items about once a second; no lock waits for it, or fails with it."""

    def __init__(self) -> None:
        self._worker = Worker("fencedlock-writer")
        self._pools: dict[str, ConnectionPool] = {}
        #: Called before each write. They may queue items, and return whether to call them again.
        self.sources: list[Callable[[], bool]] = []
        self.after_fork()
        forks.register(self)
        atexit.register(self.finish)

    def after_fork(self) -> None:
        """Leave the parent's items to the parent."""
        self._queues: dict[tuple[str, Write], deque[Any]] = {}
        self._failing: set[str] = set()
        self._writing = allocate_lock()
        self._forking_thread: int | None = None
        self._disabled = False
        #: Whether the thread will write what is queued now.
        self.is_due = False

    def disable(self) -> None:
        """Write nothing in this process: it may fork at any time. Its children do write."""
        self._disabled = True

    def is_off(self) -> bool:
        """Return whether nothing may be queued: after `disable()`, and in tests."""
        return self._disabled or under_test()

    def put(self, database: str, write: Write, item: Any) -> None:
        """Queue an item for `write`. With too many, the oldest is dropped."""
        key = (database, write)
        queue = self._queues.get(key) or self._queues.setdefault(key, deque(maxlen=MAX_QUEUED))
        queue.append(item)
        self.start()

    def start(self) -> None:
        """Make the thread write within about a second."""
        if not self.is_due:
            # Set before: the thread may write, and reset it, at once.
            self.is_due = True
            worker = self._worker
            if not (worker.start() if worker.waiting else worker.put(self._write_soon)):
                self.is_due = False

    def flush(self) -> bool:
        """Write a batch of each function's items. Return whether some are left."""
        more = [source() for source in self.sources]
        for (database, write), queue in list(self._queues.items()):
            items = [queue.popleft() for _ in range(min(BATCH, len(queue)))]
            if items and not self._write(database, partial(write, database, items)):
                queue.extendleft(reversed(items))
        return any(more) or any(self._queues.values())

    def finish(self) -> None:
        """Write once more at the interpreter's exit."""
        if not self.is_off() and self._writing.acquire(timeout=WRITE_TIMEOUT):
            with contextlib.suppress(Exception):
                self.flush()
            self.close()

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
            # Before the items are read: those that are added from now on start the thread again.
            self.is_due = False
            more = self.flush()
            if not more:
                self.close()
        if more:
            self.start()

    def _write(self, database: str, write: Callable[[], object]) -> bool:
        """Return whether the items were written or dropped; False to try again."""
        # A connection of the writer's own, so that no lock waits for it.
        if (pool := self._pools.get(database)) is None:
            pool = self._pools[database] = ConnectionPool(database, WRITE_TIMEOUT)
        try:
            pool.run_orm(write, SQLITE_BUSY_TIMEOUT)
        except (Error, LookupError) as exc:
            if isinstance(exc, Error) and LEDGERS[connections[database].vendor].is_row_locked(exc):
                return False
            if database not in self._failing:
                self._failing.add(database)
                # Projects with unfenced locks alone need no tables.
                logger.log(
                    logging.INFO if is_table_missing(exc) else logging.WARNING,
                    "The history of locks and the rows of unfenced locks can't be written to %r "
                    "(%s: %s). They are dropped. Locks still work.",
                    database,
                    type(exc).__name__,
                    str(exc).strip(),
                )
        except Exception:
            logger.exception("A background write to %r failed", database)
        else:
            if database in self._failing:
                self._failing.discard(database)
                logger.info("Background writes to %r succeed again", database)
        return True


writer = BackgroundWriter()
