"""Rows of the registry for unfenced locks that are held for long: no grant writes any."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from .backends.base import Backend, Renewal
from .fences import NameAndOwner, unfenced
from .fences.records import Statements
from .lease import Lease
from .scribe import Page, Scribe, scribe

#: So many rows wait to be written, and so many are written at once.
MOST, AT_ONCE = 10_000, 1000


class UnfencedRows:
    """
    The unfenced leases of one process, for the registry.

    One gets a row when it is renewed for the first time, so that a short one costs nothing.
    """

    def __init__(self, scribe: Scribe) -> None:
        self._scribe = scribe
        self.forget()

    def forget(self) -> None:
        #: By owner, as what was renewed lately.
        self._renewed: dict[str, tuple[Lease, Backend]] = {}
        #: Owners that have a row.
        self._entered: set[str] = set()
        self._over: deque[Lease] = deque(maxlen=MOST)

    def is_empty(self) -> bool:
        return not self._renewed and not self._over

    def renewed(
        self, backend: Backend, leases: Sequence[Lease], answers: Sequence[Renewal]
    ) -> None:
        """Note leases that were renewed."""
        if self._scribe.is_quiet() or backend.records_unfenced:
            return
        for lease, answer in zip(leases, answers, strict=True):
            worth_it = not lease.fenced and not lease.lent and len(self._renewed) < MOST
            if answer is Renewal.KEPT and worth_it:
                self._renewed[lease.owner] = lease, backend
        if self._renewed:
            self._scribe.rouse()

    def ended(self, lease: Lease) -> None:
        """Note that a lease was given back, or lost."""
        if lease.owner in self._entered:
            self._entered.discard(lease.owner)
            self._over.append(lease)
            self._scribe.rouse()

    def pages(self) -> Iterator[Page]:
        over = [self._over.popleft() for _ in range(min(AT_ONCE, len(self._over)))]
        for database in {lease.database for lease in over}:
            ended = [
                NameAndOwner(each.name, each.owner) for each in over if each.database == database
            ]
            yield Page(database, partial(_clear, ended))
        renewed = [self._renewed.pop(owner) for owner in list(self._renewed)[:AT_ONCE]]
        for backend in {backend for _, backend in renewed}:
            mine = [lease for lease, its in renewed if its is backend and _lives(lease)]
            if mine:
                yield Page(mine[0].database, partial(self._enter, backend, mine))

    def _enter(self, backend: Backend, leases: Sequence[Lease], statements: Statements) -> None:
        kept = statements.ledger.renew(statements.connection, leases)
        new = [(backend.entry(each), each.held_for()) for each in leases if each.owner not in kept]
        if new:
            unfenced.enter(statements, new)
        self._entered.update(lease.owner for lease in leases)
        for lease in leases:
            if not _lives(lease):
                # It ended meanwhile.
                self.ended(lease)


def _lives(lease: Lease) -> bool:
    return lease.is_open() and not lease.lost


def _clear(leases: Sequence[NameAndOwner], statements: Statements) -> None:
    statements.ledger.clear(statements.connection, leases)


rows = UnfencedRows(scribe)
scribe.books.append(rows)
