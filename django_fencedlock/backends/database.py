"""The default backend: a row of the fence database is the lease."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import AliasConfig, Problem, location_problems, timeout_problems
from ..core.identity import Holder
from ..core.runtime import clock
from ..core.transactions import test_connection
from ..exceptions import BackendUnavailable
from ..lease import Lease
from ..storage.connections import pool
from ..storage.errors import is_table_missing
from ..storage.vendors import Entry, Ledger, NameAndOwner, Row, ledger_for
from .base import Backend, Grant, Renewal, Request, Taken

T = TypeVar("T")
Work = Callable[[Ledger, BaseDatabaseWrapper], T]

#: Seconds to wait for SQLite's file where waiting long would be in vain, or harm others; and where
#: somebody wants to know who has a lock.
BRIEFLY, LOOKING = 0.25, 1.0


class DatabaseBackend(Backend):
    """
    Row leases on SQLite, Postgres, MariaDB or MySQL, judged by the server's clock.

    A request takes at most two time-outs: one on a connection that went dead while idle, one anew.
    Whoever waits looks at the row again and again; there is no line to stand in.
    """

    label = "database"
    records_grants = True
    records_unfenced = True
    option_names = frozenset({"TIMEOUT"})

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._timeout = config.timeout
        self._sessions = pool(config.fence_database, self._timeout)
        self._ledger = ledger_for(connections[config.fence_database])
        self._one_writer = connections[config.fence_database].vendor == "sqlite"

    def acquire(self, request: Request) -> Grant | None:
        # A try that doesn't wait for a holder does wait for SQLite's file: that is no holder.
        patience = min(self._timeout, request.timeout or self._timeout)
        first = min(patience, BRIEFLY)
        for seconds in (first, patience - first):
            # Another owner may have been granted the lock meanwhile: a claim looks first.
            with contextlib.suppress(_FileLocked):
                if seconds > 0:
                    return self._try(request, seconds)
        return None

    def _try(self, request: Request, patience: float) -> Grant | None:
        since = clock()
        entry = self.entry_for(request)
        try:
            claim = partial(self._run, partial(self._claim, request, entry))
            taken, token = claim(request.connection, patience)
            if not taken and self._evict_dead(request):
                since = clock()
                taken, token = claim(request.connection, patience)
        except Error as exc:
            self._refused(request, exc)
            return None
        return Grant(token, since, handle=request.connection) if taken else None

    def _claim(
        self, request: Request, entry: Entry, ledger: Ledger, connection: BaseDatabaseWrapper
    ) -> tuple[bool, int | None]:
        # A claim has SQLite's file for itself, also one that is refused: renewals and all other
        # writers would wait for it. If the caller's own transaction has the file, that is an error,
        # whoever holds the lock.
        look = self._one_writer and not request.in_transaction
        if look and ledger.is_held(connection, entry):
            return False, None
        return ledger.claim(connection, entry)

    def _evict_dead(self, request: Request) -> bool:
        """Look who is in the way, and free the lock if his process is gone."""
        row = self._look(request.name)
        if row is None:
            return False
        if row.conflicts_with(self.config.alias, self.label):
            raise self.conflict(request, row.alias, row.backend, row.holder())
        if self.evict_if_gone(request.name, row.owner, row.process):
            return True
        if row.live:
            request.seen[:] = [row.holder()]
        return False

    def is_free(self, name: str) -> bool:
        try:
            row = self._look(name, BRIEFLY)
        except BackendUnavailable as exc:
            if isinstance(exc.__cause__, Error) and self._ledger.is_row_locked(exc.__cause__):
                return True  # Nobody can look, and a try has its own time-out.
            raise
        # Whoever waits sees the row again and again, and so the death of its owner.
        return row is None or not row.live or self.evict_if_gone(name, row.owner, row.process)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        # Nobody can see, let alone take, what is recorded in a test's own transaction.
        ours = [lease for lease in leases if not lease.lent]
        try:
            # The keeper comes again soon: better than to keep all leases waiting for the file.
            kept, gone = (
                self._run(partial(self._renew, ours), patience=BRIEFLY, renews=True)
                if ours
                else (set(), set())
            )
        except Error as exc:
            return [self._not_renewed(lease, exc) for lease in leases]
        return [
            Renewal.LOST
            if lease.owner_id in gone
            else Renewal.KEPT
            if lease.owner_id in kept or lease.lent
            else Renewal.UNKNOWN
            for lease in leases
        ]

    def verify(self, lease: Lease) -> bool:
        row = self._look(lease.name)
        return row is not None and row.owner == lease.owner_id

    def release(self, lease: Lease) -> bool:
        clear = partial(self._run, lambda ledger, used: ledger.clear(used, [lease]), lease.handle)
        try:
            try:
                # As patient as a grant's first try, since it takes a statement to change that.
                cleared = clear(BRIEFLY)
            except Error as exc:
                if not self._ledger.is_row_locked(exc):
                    raise
                cleared = clear(self._timeout)
        except Error as exc:
            raise self.unavailable("release", exc, lease.name) from exc
        return cleared == 1

    def evict(self, name: str, owner: str, *, fenced: bool = True) -> bool:
        lent = test_connection(self.config.fence_database)
        try:
            cleared = self._run(
                lambda ledger, used: ledger.clear(used, [NameAndOwner(name, owner)]), lent, BRIEFLY
            )
            return cleared == 1
        except Error as exc:
            if self._ledger.is_row_locked(exc):
                # Somebody else is just taking it over.
                return False
            raise self.unavailable("eviction", exc, name) from exc

    def take_away(
        self, name: str, owner: str, *, token: int | None = None, session: str = ""
    ) -> Taken:
        lent = test_connection(self.config.fence_database)
        try:
            # A row that a renewal has locked is free in a moment, as SQLite's file is.
            cleared = self._run(
                lambda ledger, used: ledger.clear(used, [NameAndOwner(name, owner)]), lent
            )
        except Error as exc:
            raise self.unavailable("forced release", exc, name) from exc
        return Taken.FREED if cleared else Taken.NOT_HIS

    def holder(self, name: str) -> Holder | None:
        row = self._look(name, LOOKING)
        return row.holder() if row is not None and row.live else None

    def holders(self, names: Sequence[str]) -> dict[str, Holder | None]:
        lent = test_connection(self.config.fence_database)
        try:
            found = self._run(lambda ledger, used: ledger.look_at(used, names), lent)
        except Error as exc:
            raise self.unavailable("look", exc) from exc
        holders: dict[str, Holder | None] = dict.fromkeys(names)
        return holders | {name: row.holder() for name, row in found.items() if row.live}

    def close(self) -> None:
        self._sessions.close()

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from location_problems(config)
        yield from timeout_problems(config)

    def live_problems(self) -> Iterator[Problem]:
        try:
            self._look("django_fencedlock.check")
        except BackendUnavailable as exc:
            # `migrate` runs this check too, and is about to make the tables.
            if not is_table_missing(exc):
                yield Problem("E013", str(exc), "Start the database, or mend its settings.")

    def _renew(
        self, leases: Sequence[Lease], ledger: Ledger, connection: BaseDatabaseWrapper
    ) -> tuple[set[str], set[str]]:
        """Renew all that nobody has locked, then those few alone; (kept, gone) owners."""
        kept = ledger.renew(connection, leases)
        rest = [lease for lease in leases if lease.owner_id not in kept]
        gone = ledger.missing(connection, rest) if rest else set()
        return kept, gone

    def _not_renewed(self, lease: Lease, error: Error) -> Renewal:
        """Nobody can take the lock while its holder's own transaction has SQLite's one file."""
        home = lease.home
        ours = lease.lent or (self._one_writer and home is not None and home.in_atomic_block)
        return Renewal.KEPT if ours and self._ledger.is_row_locked(error) else Renewal.UNKNOWN

    def _look(self, name: str, patience: float | None = None) -> Row | None:
        # What a test recorded within its own transaction is to be seen there alone.
        lent = test_connection(self.config.fence_database)
        try:
            return self._run(lambda ledger, used: ledger.look(used, name), lent, patience)
        except Error as exc:
            raise self.unavailable("look", exc, name) from exc

    def _refused(self, request: Request, error: Error) -> None:
        """Return if `error` says no more than that somebody else holds a row."""
        if not self._ledger.is_row_locked(error):
            raise self.unavailable("acquiring", error, request.name) from error
        if not self._one_writer:
            return
        # If the caller's own transaction has the file, waiting is in vain.
        if request.in_transaction:
            raise self.in_the_way(request) from error
        if request.connection is not None:
            raise self.unavailable("acquiring", error, request.name) from error
        raise _FileLocked from error

    def _run(
        self,
        work: Work[T],
        connection: BaseDatabaseWrapper | None = None,
        patience: float | None = None,
        renews: bool = False,
    ) -> T:
        """Do `work`, waiting no longer than `patience` for SQLite's file."""
        if connection is not None:
            return work(ledger_for(connection), connection)
        return self._sessions.run(
            partial(work, self._ledger),
            renews=renews,
            busy_timeout=self._timeout if patience is None else patience,
        )


class _FileLocked(Exception):
    """Another transaction is writing to SQLite's file."""
