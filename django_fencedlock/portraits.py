"""All that is known of one lock: its fences and rows, its services, its history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from django.db import Error, connections

from . import conf
from .exceptions import BackendUnavailable, SettingsError
from .fences import ledger_for
from .fences.blocking import pinned_by
from .models.tables import HeldLock, LockEvent
from .owners import Holder
from .registry import ANSWERED, ListedLock, entries, fence_databases, words_of
from .services import service
from .sessions import bounded

#: So many are told of.
MOST_EVENTS = 100


@dataclass
class KnownFence:
    """What one database knows of a lock name."""

    database: str
    token: int
    owner: str
    #: Whose open transaction keeps the next grant waiting.
    pinned_by: str = ""


@dataclass
class Asked:
    """What one lock service says of a lock name."""

    alias: str
    backend: str
    holder: Holder | None = None
    error: str = ""


@dataclass
class Happened:
    """An event of a lock's history."""

    at: datetime
    kind: str
    alias: str
    token: int | None
    #: Whom it happened to.
    holder: str
    note: str
    #: So often within about a second.
    times: int


@dataclass
class Portrait:
    """All that is known of a lock name."""

    name: str
    fences: list[KnownFence] = field(default_factory=list)
    entries: list[ListedLock] = field(default_factory=list)
    services: list[Asked] = field(default_factory=list)
    #: The newest first.
    history: list[Happened] = field(default_factory=list)
    #: Why a database couldn't be asked, by its alias.
    away: dict[str, str] = field(default_factory=dict)

    @property
    def is_held(self) -> bool:
        return any(each.holder for each in self.services)

    @property
    def unanswered(self) -> bool:
        return bool(self.away) or any(each.error for each in self.services)


def portrait(name: str) -> Portrait:
    """Gather all that is known of a lock name."""
    found = Portrait(name)
    silent: dict[str, str] = {}
    for database in fence_databases(conf.aliases()):
        try:
            with bounded(database, ANSWERED):
                _draw(found, database, silent)
        except Error as exc:
            found.away[database] = words_of(exc, database)
    found.services += [_asked(alias, name, silent) for alias in conf.aliases()]
    return found


def _draw(found: Portrait, database: str, silent: dict[str, str]) -> None:
    """Add what one database knows; `silent` gets the aliases that don't answer, and why."""
    connection, name = connections[database], found.name
    newest = ledger_for(connection).newest(connection, name)
    if newest is not None:
        found.fences.append(KnownFence(database, *newest, pinned_by=pinned_by(database, name)))
    rows = list(HeldLock.objects.using(database).filter(name=name))
    found.entries += entries(database, rows, silent)
    found.history += history(database, name)


def history(database: str, name: str) -> Iterator[Happened]:
    """Tell what happened to a lock lately; the newest first."""
    rows = LockEvent.objects.using(database).filter(name=name)
    for row in rows.order_by("-happened_at", "-id")[:MOST_EVENTS]:
        yield Happened(
            at=row.happened_at,
            kind=row.kind,
            alias=row.alias,
            token=row.token,
            holder=row.holder,
            note=row.note,
            times=row.times,
        )


def _asked(alias: str, name: str, silent: dict[str, str]) -> Asked:
    if alias in silent:
        return Asked(alias, "", error=silent[alias])
    try:
        backend = service(alias).backend
        holder = backend.holder(name)
        # The database backend reads the rows that others have recorded, too.
        mine = holder is not None and holder.alias == alias
        return Asked(alias, backend.label, holder if mine else None)
    except (BackendUnavailable, SettingsError) as exc:
        return Asked(alias, "", error=str(exc))
