"""The default backend: a row of the fence database is the lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import AliasConfig, Problem, location_problems
from ..core.runtime import clock
from ..storage.connections import is_of_test, is_open, pool
from ..storage.dialect import Row, entry_of
from ..storage.vendors import LEDGERS
from .interface import Backend, Claim, Grant, Granted, Held, Renewal, Wait

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
    supports_shared = True
    option_names = frozenset({"TIMEOUT"})

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._timeout = config.timeout
        self._sessions = pool(config.fence_database, self._timeout)
        self._ledger = LEDGERS[connections[config.fence_database].vendor]
        self._one_writer = connections[config.fence_database].vendor == "sqlite"

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        # A try that doesn't wait for a holder does wait for SQLite's file: that is no holder.
        patience = min(wait.seconds or self._timeout, self._timeout)
        if wait.held is not None:
            # The core repeats it.
            patience = BRIEFLY
        work = partial(self._claim, claim, wait, clock())
        try:
            return self._sessions.run(work, busy_timeout=patience)
        except Error as exc:
            self._raise_unless_held(claim, exc)
            return Held()

    def _claim(
        self, claim: Claim, wait: Wait, since: float, connection: BaseDatabaseWrapper
    ) -> Granted | Held:
        # A refused claim locks SQLite's file for all other writers: tries that don't wait may be
        # many. Further tries are likely to be refused.
        if wait.held is not None or (self._one_writer and not wait.seconds):
            row = self._in_the_way(claim, wait, connection)
            if row is not None and not (claim.shared and row.shared):
                return self._held(row)
        entry = entry_of(claim, self.config.alias, self.label)
        claim_row = self._ledger.claim_shared if claim.shared else self._ledger.claim
        taken, token = claim_row(connection, entry)
        if not taken:
            if row := self._in_the_way(claim, wait, connection):
                return self._held(row)
            # Readers may have left the row that they lock.
            if not claim.shared and self._ledger.settle(connection, claim.name):
                taken, token = claim_row(connection, entry)
        if not taken:
            return Held()
        # The keeper looks at the transaction that is open on the caller's own connection.
        using = self.config.fence_database
        return Granted(token, since, connections[using] if self._one_writer else connection)

    def _in_the_way(self, claim: Claim, wait: Wait, connection: BaseDatabaseWrapper) -> Row | None:
        """Return the live row of another holder. If a writer waits for readers, note it."""
        row = self._ledger.look(connection, claim.name)
        if row is None or not row.live or row.owner.id == claim.owner:
            return None
        if row.shared and not claim.shared and wait.left:
            self._ledger.note_writer(connection, claim.name)
        return row

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
            shared=row.shared,
        )

    def acquire_all(self, claims: Sequence[Claim]) -> list[Granted] | dict[str, Held]:
        kinds = {(claim.identity, claim.ttl, claim.fenced, claim.shared) for claim in claims}
        if len(kinds) > 1 or claims[0].shared:
            return super().acquire_all(claims)
        try:
            return self._sessions.run(partial(self._claim_all, claims, clock()))
        except Error as exc:
            self._raise_unless_held(claims[0], exc)
            return {claims[0].name: Held()}

    def _claim_all(
        self, claims: Sequence[Claim], since: float, connection: BaseDatabaseWrapper
    ) -> list[Granted] | dict[str, Held]:
        # As in _claim(): on SQLite, a refused set only reads.
        if self._one_writer and (held := self._holders_of(claims, connection)):
            return held
        entries = [entry_of(claim, self.config.alias, self.label) for claim in claims]
        tokens = self._ledger.claim_all(connection, entries)
        if tokens is None:
            if held := self._holders_of(claims, connection):
                return held
            # As in _claim().
            settled = [self._ledger.settle(connection, claim.name) for claim in claims]
            if any(settled):
                tokens = self._ledger.claim_all(connection, entries)
        if tokens is None:
            # None is held by now: the core waits for the first.
            return {claims[0].name: Held()}
        used = connections[self.config.fence_database] if self._one_writer else connection
        return [Granted(token, since, used) for token in tokens]

    def _holders_of(
        self, claims: Sequence[Claim], connection: BaseDatabaseWrapper
    ) -> dict[str, Held]:
        """Return who holds each of the names that aren't free for the claims."""
        rows = self._ledger.look_at(connection, [claim.name for claim in claims])
        return {
            claim.name: self._held(row)
            for claim in claims
            if (row := rows.get(claim.name)) and row.live and row.owner.id != claim.owner
        }

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        # No other thread sees what is recorded in a test's own transaction.
        lent = [grant.owner for grant in grants if grant.handle and is_of_test(grant.handle)]
        answers = dict.fromkeys(lent, Renewal.KEPT)
        if asked := [grant for grant in grants if grant.owner not in answers]:
            try:
                # The keeper repeats it soon: a longer wait would delay all leases.
                work = partial(self._renew, asked)
                answers |= self._sessions.run(work, renews=True, busy_timeout=BRIEFLY)
            except Error as exc:
                if self._one_writer and self._ledger.is_row_locked(exc):
                    # No other owner can get the lock while its holder's transaction has the file.
                    writing = [
                        each for each in asked if each.handle and each.handle.in_atomic_block
                    ]
                    answers |= {each.owner: Renewal.KEPT for each in writing}
        return [answers.get(grant.owner, Renewal.UNKNOWN) for grant in grants]

    def _renew(
        self, grants: Sequence[Grant], connection: BaseDatabaseWrapper
    ) -> dict[str, Renewal]:
        """Renew all rows that no other session has locked, then the rest; answers by owner."""
        kept = self._ledger.renew(connection, grants)
        gone = self._ledger.missing(connection, grants, kept)
        return dict.fromkeys(kept, Renewal.KEPT) | dict.fromkeys(gone, Renewal.LOST)

    def verify(self, grant: Grant) -> bool:
        rows = self._look([grant.name]).get(grant.name, ())
        return any(row.owner.id == grant.owner for row in rows)

    def release(self, grant: Grant) -> bool:
        try:
            if grant.shared:
                return self._sessions.run(lambda used: self._ledger.leave(used, grant))
            return self._sessions.run(lambda used: self._ledger.clear(used, [grant])) == 1
        except Error as exc:
            raise self.unavailable("release", exc, grant.name) from exc

    def release_all(self, grants: Sequence[Grant]) -> list[bool]:
        if any(grant.shared for grant in grants):
            return super().release_all(grants)
        try:
            cleared = self._sessions.run(lambda used: self._ledger.clear_all(used, grants))
        except Error as exc:
            raise self.unavailable("release locks", exc) from exc
        answers = []
        for grant in grants:
            answers.append(grant.owner in cleared)
            # One that is there twice is released once.
            cleared.discard(grant.owner)
        return answers

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        found: dict[str, Held] = {}
        for name, rows in self._look(names, LOOKING).items():
            if held := [self._held(row) for row in rows if row.live]:
                found[name] = held[0]._replace(others=tuple(held[1:]))
        return found

    def check(self) -> Iterator[Problem]:
        try:
            # `migrate` runs this check too, before it makes or changes the tables.
            self._sessions.run(lambda used: used.introspection.table_names())
        except Error as exc:
            remedy = "Start the database, or correct its settings."
            yield Problem("E013", str(self.unavailable("answer", exc)), remedy)

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from location_problems(config)

    def close(self) -> None:
        self._sessions.close()

    def _look(self, names: Sequence[str], patience: float | None = None) -> Mapping[str, list[Row]]:
        try:
            work = partial(self._ledger.all_rows, names=names)
            return self._sessions.run(work, busy_timeout=patience)
        except Error as exc:
            one = names[0] if len(names) == 1 else None
            raise self.unavailable("look up" if one else "look up locks", exc, one) from exc

    def _raise_unless_held(self, claim: Claim, error: Error) -> None:
        """Return if `error` says no more than that another session has the row locked."""
        is_locked, home = self._ledger.is_row_locked(error), connections[self.config.fence_database]
        if is_locked and self._one_writer and is_open(home):
            # The caller's own transaction has the file: waiting for it would never end.
            raise self.inside_transaction(claim.name) from error
        if not is_locked or (self._one_writer and is_of_test(home)):
            raise self.unavailable("acquire", error, claim.name) from error
