"""
Registry rows without a live fenced lock.

Those of unfenced locks are written in the background after the first renewal. Those whose locks
expired long ago are deleted: a process that is killed deletes no row, and one whose name is never
locked again would stay for ever.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.db import connections

from .. import conf
from ..backends.interface import Renewal
from ..core.events import Kind, LockEvent, subscribe
from ..core.runtime import forks
from ..lease import Lease
from .background_writer import BackgroundWriter, writer
from .dialect import Entry
from .records import Records, ServerTime
from .vendors import ledger_for

#: Limit of rows that wait to be written, and of rows that are written at once.
MAX_QUEUED, BATCH = 10_000, 400
#: Seconds for which an expired row is kept, so that the admin can show it.
KEPT = 3600.0

#: A session lock lives as long as its session, whatever its row says.
_NO_SESSION = "NOT EXISTS (SELECT 1 FROM pg_stat_activity a WHERE a.pid = session_pid)"


class ExpiredRows(Records):
    """The expired rows of one fence database, of every alias."""

    def sweep(self, batches: int) -> int:
        """Delete those that expired `KEPT` seconds ago; return how many."""
        old = self.rows("HeldLock").filter(expires_at__lte=ServerTime(-KEPT))
        if connections[self.using].vendor == "postgresql":
            old = old.extra(where=[_NO_SESSION])
        return self.delete("sweeping of held locks", old, batches)


class _Alias:
    """The unfenced leases of one alias."""

    def __init__(self, writer: BackgroundWriter, alias: str, label: str) -> None:
        self._writer = writer
        self._alias, self._label = alias, label
        self.database = conf.config(alias).fence_database
        self.forget()

    def forget(self) -> None:
        #: By owner id, as renewed lately.
        self.renewed: dict[str, Lease] = {}
        self.ended: deque[Lease] = deque(maxlen=MAX_QUEUED)
        #: Owner ids that have a row.
        self.entered: set[str] = set()

    def write(self) -> bool:
        ended = [self.ended.popleft() for _ in range(min(BATCH, len(self.ended)))]
        renewed = [self.renewed.pop(owner_id) for owner_id in list(self.renewed)[:BATCH]]
        renewed = [lease for lease in renewed if _is_held(lease)]
        if ended or renewed:
            self._writer.run(self.database, lambda: self._write(ended, renewed))
        self.entered.update(lease.owner_id for lease in renewed)
        for lease in renewed:
            if not _is_held(lease):
                # It ended meanwhile.
                self.end(lease)
        return bool(self.renewed or self.ended)

    def end(self, lease: Lease) -> None:
        """Delete the row of a lease, if it has one."""
        if lease.owner_id in self.entered:
            self.entered.discard(lease.owner_id)
            self.ended.append(lease)
            self._writer.put(self)

    def _write(self, ended: Sequence[Lease], renewed: Sequence[Lease]) -> None:
        model: Any = apps.get_model("django_fencedlock", "HeldLock")
        rows, connection = model._base_manager.using(self.database), connections[self.database]
        if ended:
            self._of(rows, ended).delete()
        ledger = ledger_for(connection)
        now = ledger.now(connection)
        known = set(self._of(rows, renewed).values_list("owner", flat=True))
        by_ttl: defaultdict[float, list[Lease]] = defaultdict(list)
        for lease in renewed:
            if lease.owner_id in known:
                by_ttl[lease.ttl].append(lease)
        for ttl, leases in by_ttl.items():
            expires_at = now + timedelta(seconds=ttl)
            self._of(rows, leases).update(renewed_at=now, expires_at=expires_at)
        new = [lease for lease in renewed if lease.owner_id not in known]
        # Rows of former holders. Another alias keeps its row of a name.
        former = rows.filter(name__in=[lease.name for lease in new], expires_at__lte=now)
        former.filter(alias=self._alias, backend=self._label).delete()
        rows.bulk_create(
            [
                model(
                    **ledger.values(connection, self._entry(lease)),
                    acquired_at=now - timedelta(seconds=lease.held_for()),
                    renewed_at=now,
                    expires_at=now + timedelta(seconds=lease.ttl),
                )
                for lease in new
            ],
            ignore_conflicts=True,
        )

    def _entry(self, lease: Lease) -> Entry:
        session = getattr(lease.handle, "session_columns", {})
        entry = Entry(lease.name, self._alias, self._label, lease.holder, lease.ttl, False)
        return replace(entry, **session)

    def _of(self, rows: Any, leases: Sequence[Lease]) -> Any:
        names, owners = zip(*((each.name, each.owner_id) for each in leases), strict=True)
        return rows.filter(name__in=names, owner__in=owners)


class UnfencedRows:
    """The unfenced leases of this process that the registry shows."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer = writer
        self.aliases: dict[tuple[str, str], _Alias] = {}
        forks.register(self)

    def after_fork(self) -> None:
        self.aliases.clear()

    def renewed(self, event: LockEvent) -> None:
        """Write the rows of renewed leases."""
        if self._writer.is_off() or event.sender.records_unfenced:  # type: ignore[attr-defined]
            return
        key = (event.alias, event.sender.label)  # type: ignore[attr-defined]
        for lease, answer in zip(event.facts["leases"], event.facts["answers"], strict=True):
            if answer is Renewal.KEPT and not lease.fenced and not lease.lent:
                if not self.aliases:
                    # Not before: most processes have no such rows.
                    subscribe(on_event, Kind.RELEASED, Kind.LOST)
                rows = self.aliases.get(key) or self.aliases.setdefault(
                    key, _Alias(self._writer, *key)
                )
                if len(rows.renewed) < MAX_QUEUED:
                    rows.renewed[lease.owner_id] = lease
                self._writer.put(rows)

    def ended(self, lease: Lease) -> None:
        """Delete the row of a lease that was released or lost."""
        for rows in list(self.aliases.values()):
            rows.end(lease)


def _is_held(lease: Lease) -> bool:
    return lease.is_open() and not lease.lost


rows = UnfencedRows(writer)


def on_event(event: LockEvent) -> None:
    """Write or delete the rows of unfenced leases that were renewed, released or lost."""
    if event.kind is Kind.RENEWED:
        rows.renewed(event)
    else:
        rows.ended(event.lease)
