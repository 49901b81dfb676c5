"""
Registry rows without a live fenced lock.

Those of unfenced locks are written in the background after the first renewal. Those that expired
long ago are deleted: a killed process deletes no row.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from datetime import timedelta

from django.db import IntegrityError, connections
from django.db.models import Exists, OuterRef, Q

from .. import conf
from ..backends.interface import SHARED, Renewal
from ..core.events import Kind, LockEvent, subscribe
from ..core.identity import Owner
from ..core.runtime import forks
from ..lease import Lease
from .background_writer import writer
from .dialect import Entry
from .records import Records, ServerTime, rows_of
from .vendors import LEDGERS

#: Seconds for which an expired row is kept, so that the admin can show it.
KEPT = 3600.0

#: A session lock lives as long as its session, whatever its row says.
_NO_SESSION = "NOT EXISTS (SELECT 1 FROM pg_stat_activity a WHERE a.pid = session_pid)"


class ExpiredRows(Records):
    """The expired rows of one fence database, of every alias."""

    def sweep(self, batches: int) -> int:
        """Delete those that expired `KEPT` seconds ago; return how many."""
        readers = self.rows("HeldLock").filter(name=OuterRef("name")).exclude(slot="")
        # The anchor of readers never expires, and is left behind if the last ones were killed.
        unused = Q(owner=SHARED, renewed_at__lte=ServerTime(-KEPT)) & ~Exists(readers)
        old = self.rows("HeldLock").filter(Q(expires_at__lte=ServerTime(-KEPT)) | unused)
        if connections[self.using].vendor == "postgresql":
            old = old.extra(where=[_NO_SESSION])
        return self.delete("delete expired rows", old, batches)


def write(database: str, items: list[tuple[Lease, str]]) -> None:
    """Write the rows of leases, each with its backend's label; delete those of ended leases."""
    connection = connections[database]
    ledger = LEDGERS[connection.vendor]
    now = ledger.now(connection)
    rows = rows_of("HeldLock", database).filter(name__in={lease.name for lease, _ in items})
    known = {(row.name, row.slot): row for row in rows}
    kept: defaultdict[float, list[str]] = defaultdict(list)
    old, new = [], []
    for lease, label in dict(items).items():
        is_held = lease.is_open() and not lease.lost
        if row := known.get((lease.name, lease.owner_id if lease.shared else "")):
            is_own = row.owner == lease.owner_id
            if is_own and is_held:
                kept[lease.ttl].append(row.owner)
                continue
            # Another alias keeps its row of a name.
            is_of_alias = (row.alias, row.backend) == (lease.alias, label)
            if not is_own and (row.expires_at > now or not is_of_alias):
                continue
            old.append(row.owner)
        if is_held:
            session = getattr(lease.grant.handle, "session_columns", {})
            owner = Owner.read(lease.owner_id, lease.grant.identity)
            session = {**session, "permits": lease.grant.permits, "shared": lease.shared}
            entry = Entry(lease.name, lease.alias, label, owner, lease.ttl, False, **session)
            new.append(
                rows.model(
                    **ledger.values(connection, entry),
                    acquired_at=now - timedelta(seconds=lease.held_for()),
                    renewed_at=now,
                    expires_at=now + timedelta(seconds=lease.ttl),
                )
            )
    for ttl, owners in kept.items():
        expires_at = now + timedelta(seconds=ttl)
        rows.filter(owner__in=owners).update(renewed_at=now, expires_at=expires_at)
    rows.filter(owner__in=old).delete()
    # Another process may have inserted a row of the same name: the next renewal tries again.
    # Not ignore_conflicts, with which MariaDB and MySQL store a rejected value, cut or empty.
    with contextlib.suppress(IntegrityError):
        rows.bulk_create(new)


class UnfencedRows:
    """The unfenced leases of this process that the registry shows."""

    def __init__(self) -> None:
        self.after_fork()
        forks.register(self)

    def after_fork(self) -> None:
        #: By owner id, the label of the backend of each lease whose row was written or is queued.
        self.labels: dict[str, str] = {}

    def on_event(self, event: LockEvent) -> None:
        """Queue the rows of leases that were renewed, released or lost."""
        if event.kind is not Kind.RENEWED:
            self.ended(event.lease)
        elif not writer.is_off() and not event.sender.records_unfenced:  # type: ignore[attr-defined]
            label: str = event.sender.label  # type: ignore[attr-defined]
            for lease, answer in zip(event.facts["leases"], event.facts["answers"], strict=True):
                if answer is Renewal.KEPT and not lease.fenced and not lease.lent:
                    # Not before: most processes have no such rows.
                    subscribe(self.on_event, Kind.RELEASED, Kind.LOST)
                    self.labels[lease.owner_id] = label
                    writer.put(conf.config(lease.alias).fence_database, write, (lease, label))

    def ended(self, lease: Lease) -> None:
        """Delete the row of a lease that was released or lost, if it has one."""
        if (label := self.labels.pop(lease.owner_id, None)) is not None:
            writer.put(conf.config(lease.alias).fence_database, write, (lease, label))


rows = UnfencedRows()
