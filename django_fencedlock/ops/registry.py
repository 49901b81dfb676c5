"""The held locks of the registry, each with what its lock service says of it now."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from django.db import Error, connections
from django.db.models import F, Sum

from .. import conf
from ..backends.interface import Held
from ..core.identity import Holder, describe_place
from ..core.manager import service
from ..exceptions import BackendUnavailable, SettingsError
from ..storage.connections import time_limited
from ..storage.fences import pinned_by
from ..storage.tables import HeldLock, LockEvent
from ..storage.text import describe_error
from ..storage.vendors import LEDGERS
from .permits import Permits, by_number, granted_numbers, permits_of

#: Locks in one request.
BATCH = 10_000
#: Seconds for one query of the pages and commands that list locks.
ANSWERED = 5.0
#: Limit of events that are shown.
MOST_EVENTS = 100


class State(StrEnum):
    """The state of a lock of the registry; docs/reference/operations.md explains each."""

    HELD = "held"
    EXPIRING = "expiring"
    EXPIRED = "expired"
    LOST = "lost"
    FREE = "free"
    UNKNOWN = "unknown"


class Kind(StrEnum):
    """How a lock of the registry is held."""

    EXCLUSIVE = "exclusive"
    PERMIT = "permit"
    READER = "reader"


@dataclass(frozen=True)
class ListedLock:
    """A lock of the registry: columns of its row, and what its service says."""

    name: str
    alias: str
    backend: str
    token: int | None
    fenced: bool
    owner: str
    host: str
    pid: int
    thread: str
    task_name: str
    task_id: str
    acquired_at: datetime
    renewed_at: datetime
    expires_at: datetime
    state: State
    holder: str
    #: Seconds, by the clock of the database.
    held_for: float
    remaining: float
    #: The number of waiters, where its lock service has a queue.
    waiting: int
    #: The number of rejected writes under former grants in the history.
    rejected: int
    kind: Kind
    #: Of a permit: its number, and how many its name had at the time of the grant.
    permit: int | None
    permits: int | None
    #: Of a permit, if all locks were read: how many of its name are held.
    used: int | None = None

    @property
    def is_held(self) -> bool:
        return self.state not in (State.FREE, State.EXPIRED)

    @property
    def of_kind(self) -> str:
        """The kind for people; empty for an exclusive lock."""
        if self.kind is Kind.PERMIT:
            used = "" if self.used is None else f", {self.used} used"
            return f"permit {self.permit} of {self.permits}{used}"
        return "" if self.kind is Kind.EXCLUSIVE else self.kind


def kind_of(row: HeldLock) -> Kind:
    if row.permits is not None:
        return Kind.PERMIT
    return Kind.READER if row.slot else Kind.EXCLUSIVE


class Listing(NamedTuple):
    """The locks of the registry, and the error of each unavailable alias."""

    entries: list[ListedLock]
    unanswered: dict[str, str]


def listing(aliases: Sequence[str] = ()) -> Listing:
    """Read the registries of all aliases, or of some."""
    found = Listing([], {})
    away: dict[str, str] = {}
    wanted = aliases or conf.aliases()
    for database in fence_databases(wanted):
        rows = HeldLock.objects.using(database).order_by("acquired_at")
        if aliases:
            rows = rows.filter(alias__in=aliases)
        with _reading(database, away):
            ordered = sorted(rows, key=lambda row: by_number(row.name))
            found.entries.extend(_counted(entries(database, ordered, found.unanswered)))
    for alias in wanted:
        if why := away.get(database := conf.config(alias).fence_database):
            why = f"its fence database {database!r} could not be read: {why}"
            found.unanswered.setdefault(alias, why)
    return found


def _counted(locks: list[ListedLock]) -> list[ListedLock]:
    """Add to each permit how many of its name are held."""
    used = Counter(
        (lock.alias, by_number(lock.name)[0])
        for lock in locks
        if lock.kind is Kind.PERMIT and lock.is_held
    )
    return [
        replace(lock, used=used[lock.alias, by_number(lock.name)[0]])
        if lock.kind is Kind.PERMIT
        else lock
        for lock in locks
    ]


@contextlib.contextmanager
def _reading(database: str, away: dict[str, str]) -> Iterator[None]:
    """Limit the time of each query; note in `away` why the database can't be read."""
    try:
        with time_limited(database, ANSWERED):
            yield
    except Error as exc:
        away[database] = describe_error(exc, database)


def fence_databases(aliases: Sequence[str]) -> list[str]:
    """Return the databases that have the fences of these aliases, each once."""
    return list(dict.fromkeys(conf.config(alias).fence_database for alias in aliases))


def entries(
    database: str, rows: Sequence[HeldLock], unanswered: dict[str, str]
) -> list[ListedLock]:
    """
    Return `rows` with their states, in their order; each service is asked once.

    Aliases in `unanswered` aren't asked; those that are unavailable now are added to it.
    """
    connection = connections[database]
    now = LEDGERS[connection.vendor].now(connection)
    holders = _holders(rows, unanswered)
    events = LockEvent.objects.using(database).filter(kind=LockEvent.Kind.REJECTED)
    # The history is bounded, so there are few.
    rejected = dict(events.values_list("name").annotate(Sum("times")))
    found = []
    for row in rows:
        columns = {each.name for each in fields(ListedLock)} & vars(row).keys()
        held = holders.get(row.alias, {}).get(row.name)
        if held is not None:
            # Of several readers, the one that has this row. Others don't take a lock from it.
            others = None if held.shared and row.slot else held
            mine = (each for each in (held, *held.others) if each.owner == row.owner)
            held = next(mine, others)
        remaining = (row.expires_at - now).total_seconds()
        state = _state(row, held, remaining) if row.alias in holders else State.UNKNOWN
        found.append(
            ListedLock(
                **{column: getattr(row, column) for column in columns},
                state=state,
                holder=describe_place(row.host, row.pid, row.thread, row.task_name, row.task_id),
                held_for=(now - row.acquired_at).total_seconds(),
                remaining=remaining,
                waiting=(held.waiting if held else None) or 0,
                rejected=rejected.get(row.name, 0),
                kind=kind_of(row),
                permit=None if row.permits is None else by_number(row.name)[1],
            )
        )
    return found


def _holders(rows: Sequence[HeldLock], unanswered: dict[str, str]) -> dict[str, dict[str, Held]]:
    """Return the holders by alias and name, without the services that are unavailable."""
    found: dict[str, dict[str, Held]] = {}
    for alias in {row.alias for row in rows}.difference(unanswered):
        names = [row.name for row in rows if row.alias == alias]
        try:
            ask = service(alias).backend.holders
            parts = [ask(names[start:][:BATCH]) for start in range(0, len(names), BATCH)]
            found[alias] = {name: held for part in parts for name, held in part.items()}
        except (BackendUnavailable, SettingsError) as exc:
            unanswered[alias] = str(exc)
    return found


def _state(row: HeldLock, held: Held | None, remaining: float) -> State:
    if held is None:
        return State.FREE if remaining > 0 else State.EXPIRED
    if held.owner != row.owner:
        return State.LOST
    if remaining > 0:
        ttl = (row.expires_at - row.renewed_at).total_seconds()
        return State.EXPIRING if remaining < ttl / 3 else State.HELD
    # A session lock outlives its ttl. A lease can't: only its registry row wasn't renewed.
    return State.HELD if service(row.alias).backend.supports_ttl else State.EXPIRED


@dataclass
class KnownFence:
    """The fence of a lock name in one database."""

    database: str
    token: int
    owner: str
    #: Whose open transaction keeps the next grant waiting.
    pinned_by: str


@dataclass
class Asked:
    """What one lock service says of a lock name."""

    alias: str
    backend: str = ""
    holder: Holder | None = None
    #: The further readers.
    others: list[Holder] = field(default_factory=list)
    error: str = ""


@dataclass
class Portrait:
    """All that is known of a lock name."""

    name: str
    fences: list[KnownFence] = field(default_factory=list)
    entries: list[ListedLock] = field(default_factory=list)
    services: list[Asked] = field(default_factory=list)
    #: Its permits by alias, if the registry has some.
    permits: list[Permits] = field(default_factory=list)
    #: The numbers of the permits that were ever granted as fenced locks.
    granted_permits: list[int] = field(default_factory=list)
    #: The newest first.
    history: list[dict[str, Any]] = field(default_factory=list)
    #: The error of each unavailable database.
    away: dict[str, str] = field(default_factory=dict)

    @property
    def is_held(self) -> bool:
        return any(each.holder for each in self.services)

    @property
    def only_permits(self) -> bool:
        """Whether there is no lock of this name, but there are permits of it."""
        has_lock = self.fences or self.entries or self.is_held
        return not has_lock and bool(self.permits or self.granted_permits)

    @property
    def unanswered(self) -> bool:
        return bool(self.away) or any(each.error for each in self.services)


def portrait(name: str) -> Portrait:
    """Gather all that is known of a lock name."""
    found = Portrait(name)
    silent: dict[str, str] = {}
    for database in fence_databases(conf.aliases()):
        with _reading(database, found.away):
            connection = connections[database]
            if newest := LEDGERS[connection.vendor].newest(connection, name):
                found.fences.append(KnownFence(database, *newest, pinned_by(database, name)))
            rows = HeldLock.objects.using(database).filter(name=name).order_by("acquired_at")
            found.entries += entries(database, list(rows), silent)
            found.granted_permits += granted_numbers(database, name)
            found.permits += permits_of(database, name, silent)
            found.history += history(database, name)
    found.services += [_asked(alias, name, silent) for alias in conf.aliases()]
    return found


def history(database: str, name: str) -> list[dict[str, Any]]:
    """Return the events of a lock, each with its time as "at"; the newest first."""
    rows = LockEvent.objects.using(database).filter(name=name).order_by("-happened_at", "-id")
    columns = ("kind", "alias", "token", "holder", "note", "times")
    return list(rows.values(*columns, at=F("happened_at"))[:MOST_EVENTS])


def _asked(alias: str, name: str, silent: dict[str, str]) -> Asked:
    if alias in silent:
        return Asked(alias, error=silent[alias])
    try:
        holders = service(alias).holders(name)
    except (BackendUnavailable, SettingsError) as exc:
        return Asked(alias, error=str(exc))
    # The database backend reads the rows of other aliases, too.
    mine = [each for each in holders if each.alias == alias]
    return Asked(alias, service(alias).backend.label, mine[0] if mine else None, mine[1:])


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if hours < 1:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if days < 1 else f"{days} d {hours % 24} h"
