"""The registry as people read it: each held lock with what its lock service says of it now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar

from django.db import Error, connections

from . import conf
from .exceptions import BackendUnavailable, SettingsError
from .fences import ledger_for
from .models.tables import HeldLock
from .owners import Holder, Owner
from .services import service
from .sessions import Sessions

T = TypeVar("T")

#: So many locks are asked of in one request.
BATCH = 10_000
#: Seconds for finding out who keeps a fence locked.
BRIEFLY = 2.0


class State(StrEnum):
    """What is the matter with a lock of the registry."""

    #: The service says that the holder of the registry has it.
    HELD = "held"
    #: So it does, and less than a third of its ttl is left: renewals fail, or are overdue.
    EXPIRING = "expiring"
    #: Its time is over, and nobody came: the holder may be dead, or paused and come back.
    EXPIRED = "expired"
    #: The service says that somebody else has it.
    LOST = "lost"
    #: Its time isn't over, and the service says that nobody has it: released a moment ago, or
    #: its session ended, or the service forgot it.
    FREE = "free"
    #: The service couldn't be asked.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Entry:
    """A lock of the registry."""

    name: str
    alias: str
    backend: str
    state: State
    token: int | None
    fenced: bool
    owner: str
    holder: str
    host: str
    pid: int
    thread: str
    task_name: str
    task_id: str
    acquired_at: datetime
    renewed_at: datetime
    expires_at: datetime
    #: Seconds, by the clock of the database.
    held_for: float
    remaining: float
    #: What part of the ttl that is.
    part_left: float
    #: How many stand in line for it.
    waiting: int = 0
    #: Who has it instead, if it is lost.
    taken_by: str = ""


@dataclass
class Listing:
    """The locks of the registry, and the lock services that couldn't be asked."""

    entries: list[Entry] = field(default_factory=list)
    #: By alias.
    unanswered: dict[str, str] = field(default_factory=dict)


def listing(aliases: Sequence[str] = ()) -> Listing:
    """Read the registries of all aliases, or of some."""
    found = Listing()
    for database in fence_databases(aliases or conf.aliases()):
        rows = HeldLock.objects.using(database).order_by("name")
        if aliases:
            rows = rows.filter(alias__in=aliases)
        found.entries += entries(database, list(rows), found.unanswered)
    return found


def fence_databases(aliases: Sequence[str]) -> list[str]:
    """The databases that have the fences of these aliases, each once."""
    return list(dict.fromkeys(conf.config(alias).fence_database for alias in aliases))


def entries(database: str, rows: Sequence[HeldLock], unanswered: dict[str, str]) -> Iterator[Entry]:
    """Tell how things stand with `rows`, in their order; each service is asked once."""
    connection = connections[database]
    now = ledger_for(connection).now(connection)
    holders: dict[str, dict[str, Holder | None]] = {}
    waiting: dict[str, int] = {}
    for alias in {row.alias for row in rows}:
        names = [row.name for row in rows if row.alias == alias]
        try:
            holders[alias] = _asked_of(service(alias).backend.holders, names)
            waiting |= _asked_of(service(alias).backend.waiting, names)
        except (BackendUnavailable, SettingsError) as exc:
            unanswered[alias] = str(exc)
    for row in rows:
        asked = holders.get(row.alias)
        holder = None if asked is None else asked.get(row.name)
        yield _entry(row, now, asked is not None, holder, waiting.get(row.name, 0))


def _asked_of(ask: Callable[[Sequence[str]], dict[str, T]], names: Sequence[str]) -> dict[str, T]:
    found: dict[str, T] = {}
    for start in range(0, len(names), BATCH):
        found |= ask(names[start : start + BATCH])
    return found


def _entry(row: HeldLock, now: datetime, asked: bool, holder: Holder | None, waiting: int) -> Entry:
    acquired, renewed, expires = map(_aware, (row.acquired_at, row.renewed_at, row.expires_at))
    remaining, ttl = (expires - now).total_seconds(), (expires - renewed).total_seconds()
    state = _state(row, remaining, ttl, holder) if asked else State.UNKNOWN
    words = Owner(row.owner, row.host, "", "", row.pid, 0, row.thread, row.task_name, row.task_id)
    return Entry(
        name=row.name,
        alias=row.alias,
        backend=row.backend,
        state=state,
        token=row.token,  # type: ignore[attr-defined]
        fenced=row.fenced,
        owner=row.owner,
        holder=str(words),
        host=row.host,
        pid=row.pid,
        thread=row.thread,
        task_name=row.task_name,
        task_id=row.task_id,
        acquired_at=acquired,
        renewed_at=renewed,
        expires_at=expires,
        held_for=(now - acquired).total_seconds(),
        remaining=remaining,
        part_left=max(0.0, min(1.0, remaining / ttl)) if ttl > 0 else 0.0,
        waiting=waiting,
        taken_by=str(holder) if state is State.LOST else "",
    )


def _state(row: HeldLock, remaining: float, ttl: float, holder: Holder | None) -> State:
    if holder is None:
        return State.FREE if remaining > 0 else State.EXPIRED
    if holder.owner != row.owner:
        return State.LOST
    if remaining <= 0:
        # A session lock lives on past its time. A lease that does was renewed, and only the
        # registry wasn't.
        return State.HELD if service(row.alias).backend.supports_ttl else State.EXPIRED
    return State.EXPIRING if remaining < ttl / 3 else State.HELD


def _aware(value: datetime) -> datetime:
    # Naive with USE_TZ = False, and in UTC all the same.
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


# One lock


@dataclass
class Fenced:
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
class Portrait:
    """All that is known of a lock name."""

    name: str
    fences: list[Fenced] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    services: list[Asked] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        return any(each.holder for each in self.services)

    @property
    def unanswered(self) -> bool:
        return any(each.error for each in self.services)


def portrait(name: str) -> Portrait:
    """Gather all that is known of a lock name."""
    found = Portrait(name)
    for database in fence_databases(conf.aliases()):
        connection = connections[database]
        newest = ledger_for(connection).newest(connection, name)
        if newest is not None:
            found.fences.append(Fenced(database, *newest, pinned_by=_pinned_by(database, name)))
        rows = list(HeldLock.objects.using(database).filter(name=name))
        found.entries += entries(database, rows, {})
    found.services += [_asked(alias, name) for alias in conf.aliases()]
    return found


def _pinned_by(database: str, name: str) -> str:
    asking = Sessions(database, BRIEFLY)
    try:
        return asking.run(lambda private: ledger_for(private).pinned_by(private, name)) or ""
    except Error:
        return ""
    finally:
        asking.close()


def _asked(alias: str, name: str) -> Asked:
    try:
        backend = service(alias).backend
        holder = backend.holder(name)
        # The database backend reads the rows that others have recorded, too.
        mine = holder is not None and holder.alias == alias
        return Asked(alias, backend.label, holder if mine else None)
    except (BackendUnavailable, SettingsError) as exc:
        return Asked(alias, "", error=str(exc))
