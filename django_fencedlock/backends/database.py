"""The default backend: a row of the fence database is the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import AliasConfig, Problem, location_problems
from ..core.runtime import clock
from ..exceptions import BackendUnavailable
from ..storage.connections import is_of_test, is_open, pool
from ..storage.dialect import Entry, Ledger, entry_of
from ..storage.rows import Row
from ..storage.text import is_table_missing
from ..storage.vendors import ledger_for
from .interface import Backend, Claim, Grant, Granted, Held, Renewal, Wait

T = TypeVar("T")
Work = Callable[[Ledger, BaseDatabaseWrapper], T]

#: Seconds to wait for SQLite's file where waiting long has no use, or delays others; and for a
#: look-up of a holder.
BRIEFLY, LOOKING = 0.25, 1.0


class DatabaseBackend(Backend):
    """
    Rows on SQLite, PostgreSQL, MariaDB or MySQL, which expire by the server's clock.

    A request takes at most two timeouts: one on a connection that died while idle, and one on a
    new connection.
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

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        # On SQLite the keeper can't renew while the caller's own transaction has the file.
        home = _Home(connections[self.config.fence_database])
        # A try that doesn't wait for a holder does wait for SQLite's file: that is no holder.
        patience = min(wait.seconds or self._timeout, self._timeout)
        if wait.held is not None:
            # The core repeats it.
            patience = BRIEFLY
        since = clock()
        entry = entry_of(claim, self.config.alias, self.label)
        try:
            work = partial(self._claim, home.connection, wait, entry)
            found = self._run(work, patience)
        except Error as exc:
            self._raise_unless_held(claim, exc)
            return Held()
        if isinstance(found, Row):
            return self._held(found)
        taken, token = found
        return Granted(token, since, home) if taken else Held()

    def _claim(
        self,
        home: BaseDatabaseWrapper,
        wait: Wait,
        entry: Entry,
        ledger: Ledger,
        connection: BaseDatabaseWrapper,
    ) -> tuple[bool, int | None] | Row:
        # A refused claim writes to the row, and locks SQLite's file for all other writers. If the
        # caller's own transaction has the file, that is an error, even if the lock is held.
        if not is_open(home) if self._one_writer else wait.held is not None:
            row = ledger.look(connection, entry.name)
            if row is not None and row.live and row.owner.id != entry.owner.id:
                return row
        taken, token = ledger.claim(connection, entry)
        if taken:
            return taken, token
        return ledger.look(connection, entry.name) or (False, None)

    def _held(self, row: Row) -> Held:
        foreign = (row.alias, row.backend) != (self.config.alias, self.label)
        return Held(
            row.owner.id,
            row.owner.identity,
            row.token,
            (row.expires_at - row.read_at).total_seconds(),
            held_for=(row.read_at - row.acquired_at).total_seconds(),
            alias=row.alias if foreign else "",
            label=row.backend if foreign else "",
        )

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        # No other process sees what is recorded in a test's own transaction.
        ours = [grant for grant in grants if not _is_of_test(grant)]
        kept: set[str] = set()
        gone: set[str] = set()
        try:
            if ours:
                # The keeper repeats it soon: a longer wait would delay all leases.
                kept, gone = self._run(partial(self._renew, ours), BRIEFLY, renews=True)
        except Error as exc:
            return [self._not_renewed(grant, exc) for grant in grants]
        return [
            Renewal.LOST
            if grant.owner in gone
            else Renewal.KEPT
            if grant.owner in kept or _is_of_test(grant)
            else Renewal.UNKNOWN
            for grant in grants
        ]

    def _renew(
        self, grants: Sequence[Grant], ledger: Ledger, connection: BaseDatabaseWrapper
    ) -> tuple[set[str], set[str]]:
        """Renew all rows that no other session has locked, then the rest; (kept, gone) owners."""
        kept = ledger.renew(connection, grants)
        rest = [grant for grant in grants if grant.owner not in kept]
        gone = ledger.missing(connection, rest) if rest else set()
        return kept, gone

    def _not_renewed(self, grant: Grant, error: Error) -> Renewal:
        """No other owner can get the lock while its holder's transaction has SQLite's file."""
        home = grant.handle.connection if isinstance(grant.handle, _Home) else None
        ours = _is_of_test(grant) or (self._one_writer and home and home.in_atomic_block)
        return Renewal.KEPT if ours and self._ledger.is_row_locked(error) else Renewal.UNKNOWN

    def verify(self, grant: Grant) -> bool:
        row = self._look([grant.name]).get(grant.name)
        return row is not None and row.owner.id == grant.owner

    def release(self, grant: Grant) -> bool:
        try:
            return self._run(lambda ledger, used: ledger.clear(used, [grant])) == 1
        except Error as exc:
            raise self.unavailable("release", exc, grant.name) from exc

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        rows = self._look(names, LOOKING)
        return {name: self._held(row) for name, row in rows.items() if row.live}

    def check(self) -> Iterator[Problem]:
        try:
            self._look(["django_fencedlock.check"])
        except BackendUnavailable as exc:
            # `migrate` runs this check too, before it makes the tables.
            if not is_table_missing(exc):
                yield Problem("E013", str(exc), "Start the database, or correct its settings.")

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from location_problems(config)

    def close(self) -> None:
        self._sessions.close()

    def _look(self, names: Sequence[str], patience: float | None = None) -> Mapping[str, Row]:
        try:
            return self._run(lambda ledger, used: ledger.look_at(used, names), patience)
        except Error as exc:
            raise self.unavailable("look", exc, names[0] if len(names) == 1 else None) from exc

    def _raise_unless_held(self, claim: Claim, error: Error) -> None:
        """Return if `error` says no more than that another session has the row locked."""
        if not self._ledger.is_row_locked(error):
            raise self.unavailable("acquiring", error, claim.name) from error
        if not self._one_writer:
            return
        if is_open(connections[self.config.fence_database]):
            # The caller's own transaction has the file: waiting for it would never end.
            raise self.inside_transaction(claim.name) from error
        if is_of_test(connections[self.config.fence_database]):
            raise self.unavailable("acquiring", error, claim.name) from error

    def _run(self, work: Work[T], patience: float | None = None, renews: bool = False) -> T:
        """Do `work`, which waits at most `patience` for SQLite's file."""
        run = partial(work, self._ledger)
        return self._sessions.run(run, renews=renews, busy_timeout=patience)


class _Home:
    """The handle of a grant: the caller's own connection, and whether a test's transaction is."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.is_of_test = connection.in_atomic_block and is_of_test(connection)


def _is_of_test(grant: Grant) -> bool:
    return isinstance(grant.handle, _Home) and grant.handle.is_of_test
