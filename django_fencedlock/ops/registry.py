"""The registry as people read it: each held lock with what its lock service says of it now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from django.db import Error, connections
from django.db.models import F, Sum

from .. import conf
from ..backends.interface import Held
from ..core.grants import holder_of
from ..core.identity import Holder, describe_place
from ..core.manager import service
from ..exceptions import BackendUnavailable, SettingsError
from ..storage.connections import time_limited
from ..storage.fences import named, pinned_by
from ..storage.tables import HeldLock, LockEvent
from ..storage.text import describe_error
from ..storage.vendors import ledger_for

T = TypeVar("T")
#: By alias and name, as far as the services could be asked.
Holders = dict[str, dict[str, Held]]

#: So many locks are asked of in one request.
BATCH = 10_000
#: Seconds for one query of the pages and commands that list locks.
ANSWERED = 5.0


class State(StrEnum):
    """What is the matter with a lock of the registry."""

    #: The service says that the holder of the registry has it.
    HELD = "held"
    #: So it does, and less than a third of its ttl is left: renewals fail, or are overdue.
    EXPIRING = "expiring"
    #: Its time is over, without a new holder: the process may be dead, or paused and come back.
    EXPIRED = "expired"
    #: The service says that another holder has it.
    LOST = "lost"
    #: Its time isn't over, and the service says that it is free: released a moment ago, or
    #: its session ended, or the service forgot it.
    FREE = "free"
    #: The service couldn't be asked.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ListedLock:
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
    #: How many wait for it, where its lock service has a queue.
    waiting: int = 0
    #: How many writes under former grants were refused, as far as the history goes back.
    refused: int = 0
    #: Who has it instead, if it is lost.
    taken_by: str = ""


@dataclass
class Listing:
    """The locks of the registry, and the lock services that couldn't be asked."""

    entries: list[ListedLock] = field(default_factory=list)
    #: By alias.
    unanswered: dict[str, str] = field(default_factory=dict)


def listing(aliases: Sequence[str] = ()) -> Listing:
    """Read the registries of all aliases, or of some."""
    found = Listing()
    wanted = aliases or conf.aliases()
    for database in fence_databases(wanted):
        rows = HeldLock.objects.using(database).order_by("name")
        if aliases:
            rows = rows.filter(alias__in=aliases)
        try:
            with time_limited(database, ANSWERED):
                found.entries += list(entries(database, list(rows), found.unanswered))
        except Error as exc:
            why = f"its fence database {database!r} can't be asked: {words_of(exc, database)}"
            for alias in wanted:
                if conf.config(alias).fence_database == database:
                    found.unanswered.setdefault(alias, why)
    return found


def words_of(error: Error, database: str) -> str:
    """What is the matter with a database, and what to do about it."""
    return describe_error(named(error, database), database)


def fence_databases(aliases: Sequence[str]) -> list[str]:
    """The databases that have the fences of these aliases, each once."""
    return list(dict.fromkeys(conf.config(alias).fence_database for alias in aliases))


def entries(
    database: str, rows: Sequence[HeldLock], unanswered: dict[str, str]
) -> Iterator[ListedLock]:
    """
    Tell how things stand with `rows`, in their order; each service is asked once.

    `unanswered` has the aliases that weren't reached before, and gets those that aren't now.
    """
    connection = connections[database]
    now = ledger_for(connection).now(connection)
    holders = _holders(rows, unanswered)
    refused = _asked_of(partial(_refused, database), [row.name for row in rows])
    for row in rows:
        yield _entry(row, now, holders, refused=refused.get(row.name, 0))


def states(database: str, rows: Sequence[HeldLock], unanswered: dict[str, str]) -> list[State]:
    """Tell the states of `rows`, in their order, and no more; each service is asked once."""
    connection = connections[database]
    now = ledger_for(connection).now(connection)
    holders = _holders(rows, unanswered)
    return [_state(row, now, holders) for row in rows]


def _holders(rows: Sequence[HeldLock], unanswered: dict[str, str]) -> Holders:
    found: Holders = {}
    # Wait only once for a service that doesn't answer.
    for alias in {row.alias for row in rows} - set(unanswered):
        names = [row.name for row in rows if row.alias == alias]
        try:
            found[alias] = _asked_of(service(alias).backend.holders, names)
        except (BackendUnavailable, SettingsError) as exc:
            unanswered[alias] = str(exc)
    return found


def _asked_of(
    ask: Callable[[Sequence[str]], Mapping[str, T]], names: Sequence[str]
) -> dict[str, T]:
    found: dict[str, T] = {}
    for start in range(0, len(names), BATCH):
        found |= ask(names[start : start + BATCH])
    return found


def _refused(database: str, names: Sequence[str]) -> dict[str, int]:
    found = LockEvent.objects.using(database).filter(kind=LockEvent.Kind.REJECTED, name__in=names)
    return dict(found.values_list("name").annotate(Sum("times")))


#: What a listed lock has from its row.
_COLUMNS = (
    *("name", "alias", "backend", "token", "fenced", "owner"),
    *("host", "pid", "thread", "task_name", "task_id"),
    *("acquired_at", "renewed_at", "expires_at"),
)


def _entry(row: HeldLock, now: datetime, holders: Holders, *, refused: int) -> ListedLock:
    remaining, ttl = _left(row, now)
    state = _state(row, now, holders)
    held = holders.get(row.alias, {}).get(row.name)
    return ListedLock(
        **{column: getattr(row, column) for column in _COLUMNS},
        state=state,
        holder=describe_place(row.host, row.pid, row.thread, row.task_name, row.task_id),
        held_for=(now - row.acquired_at).total_seconds(),
        remaining=remaining,
        part_left=max(0.0, min(1.0, remaining / ttl)) if ttl > 0 else 0.0,
        waiting=(held.waiting if held else None) or 0,
        refused=refused,
        taken_by=str(holder_of(held, row.alias)) if held and state is State.LOST else "",
    )


def _state(row: HeldLock, now: datetime, holders: Holders) -> State:
    if row.alias not in holders:
        return State.UNKNOWN
    remaining, ttl = _left(row, now)
    holder = holders[row.alias].get(row.name)
    if holder is None:
        return State.FREE if remaining > 0 else State.EXPIRED
    if holder.owner != row.owner:
        return State.LOST
    if remaining <= 0:
        # A session lock lives on past its time. A lease that does was renewed, and only the
        # registry wasn't.
        return State.HELD if service(row.alias).backend.supports_ttl else State.EXPIRED
    return State.EXPIRING if remaining < ttl / 3 else State.HELD


def _left(row: HeldLock, now: datetime) -> tuple[float, float]:
    """The seconds that are left, and those of the whole ttl."""
    ttl = row.expires_at - row.renewed_at
    return (row.expires_at - now).total_seconds(), ttl.total_seconds()


#: Limit of events that are shown.
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
class Portrait:
    """All that is known of a lock name."""

    name: str
    fences: list[KnownFence] = field(default_factory=list)
    entries: list[ListedLock] = field(default_factory=list)
    services: list[Asked] = field(default_factory=list)
    #: The newest first.
    history: list[dict[str, Any]] = field(default_factory=list)
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
            with time_limited(database, ANSWERED):
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


def history(database: str, name: str) -> list[dict[str, Any]]:
    """Return the events of a lock, each with its time as "at"; the newest first."""
    rows = LockEvent.objects.using(database).filter(name=name).order_by("-happened_at", "-id")
    columns = ("kind", "alias", "token", "holder", "note", "times")
    return list(rows.values(*columns, at=F("happened_at"))[:MOST_EVENTS])


def _asked(alias: str, name: str, silent: dict[str, str]) -> Asked:
    if alias in silent:
        return Asked(alias, "", error=silent[alias])
    try:
        asked = service(alias)
        holder = asked.holder(name)
        # The database backend reads the rows that others have recorded, too.
        mine = holder is not None and holder.alias == alias
        return Asked(alias, asked.backend.label, holder if mine else None)
    except (BackendUnavailable, SettingsError) as exc:
        return Asked(alias, "", error=str(exc))
