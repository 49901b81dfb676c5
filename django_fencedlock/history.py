"""What happened to locks lately: noted as it happens, and written by the scribe."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from . import conf, signals
from .exceptions import FencedLockError
from .fences import events
from .fences.events import FORCED, GRANTED, LOST, REFUSED, Event, EventRow
from .fences.records import Statements
from .lease import Lease, clock
from .owners import new_owner
from .scribe import Page, Scribe, scribe

if TYPE_CHECKING:
    from .owners import Holder

#: Seconds that a lock is held before its grant is worth a row. Most are held for milliseconds:
#: there would be thousands, and the tokens tell how many.
WORTH = 1.0
#: So many events wait to be written, and so many rows are written at once.
MOST, AT_ONCE = 2000, 100


class History:
    """The events of one process that aren't written yet."""

    def __init__(self, scribe: Scribe) -> None:
        self._scribe = scribe
        #: Leases whose grant has no row yet, by owner.
        self._granted: dict[str, Lease] = {}
        self._happened: deque[tuple[float, str, Event]] = deque()

    def forget(self) -> None:
        self._granted.clear()
        self._happened.clear()

    def is_empty(self) -> bool:
        return not self._happened and not self._granted

    # In the way of those who take and release locks: an entry in a dict, and no more

    def granted(self, lease: Lease) -> None:
        """Note a grant."""
        if not conf.history() or self._scribe.is_quiet():
            return
        if len(self._granted) < MOST:
            self._granted[lease.owner] = lease
        else:
            self._scribe.leave_out()
        self._scribe.rouse()

    def released(self, lease: Lease) -> None:
        """Note that a lease was given back: its grant is worth no row if it has none yet."""
        self._granted.pop(lease.owner, None)

    # Seldom

    def connect(self) -> None:
        """Hear of losses, refusals and forced releases from now on."""
        for signal, receiver in self._receivers():
            signal.connect(receiver, weak=False, dispatch_uid=f"{__name__}.{receiver.__name__}")

    def _receivers(self) -> Iterator[tuple[Any, Any]]:
        yield signals.lock_lost, self._lost
        yield signals.lock_evicted, self._evicted
        yield signals.stale_write_rejected, self._write_refused
        yield signals.stale_transaction_rejected, self._transaction_refused
        yield signals.lock_force_released, self._forced

    def _lost(self, lease: Lease, reason: str, **kwargs: Any) -> None:
        if lease.lent:
            return
        if self._is_untold(lease):
            # However short it was: so that it is told who had it.
            self._add(_grant(lease), age=lease.held_for())
        self._add(Event(LOST, **_about(lease), note=reason))

    def _evicted(self, name: str, alias: str, pid: int, **kwargs: Any) -> None:
        self._add(death(name, alias, pid))

    def _write_refused(
        self,
        sender: Any,
        *,
        name: str,
        alias: str,
        pk: Any,
        token: int,
        holder: Holder | None,
        **kwargs: Any,
    ) -> None:
        row = sender._meta.label if pk is None else f"{sender._meta.label} pk={pk!r}"
        note = row if holder is None else f"{row}; the newest grant is that of {holder}"
        self._add(Event(REFUSED, name, alias, token, str(new_owner()), note))

    def _transaction_refused(self, lease: Lease, holder: Holder | None, **kwargs: Any) -> None:
        by = "" if holder is None else f"; the newest grant is that of {holder}"
        self._add(Event(REFUSED, **_about(lease), note=f"lease.atomic(){by}"))

    def _forced(
        self, name: str, alias: str, token: int | None, holder: Any, by: Any, **kwargs: Any
    ) -> None:
        self._add(Event(FORCED, name, alias, token, str(holder or ""), f"by {by}"))

    def _add(self, event: Event, age: float = 0.0) -> None:
        if not conf.history() or self._scribe.is_quiet():
            return
        try:
            database = conf.config(event.alias).fence_database
        except FencedLockError:
            return
        if len(self._happened) < MOST:
            self._happened.append((clock() - age, database, event))
        else:
            self._scribe.leave_out()
        self._scribe.rouse()

    # What the scribe asks for

    def pages(self) -> Iterator[Page]:
        for owner, lease in list(self._granted.items()):
            if not lease.is_open() or lease.lent:
                self._granted.pop(owner, None)
            elif lease.held_for() >= WORTH and self._is_untold(lease):
                self._add(_grant(lease), age=lease.held_for())
        rows: dict[str, list[EventRow]] = {}
        for (database, _), row in self._take().items():
            rows.setdefault(database, []).append(row)
        for database, found in rows.items():
            size = sum(row.times for row in found)
            yield Page(database, partial(_write, found), size)

    def _is_untold(self, lease: Lease) -> bool:
        """Whether its grant has no row yet; from now on it has."""
        return self._granted.pop(lease.owner, None) is not None

    def _take(self) -> dict[tuple[str, Event], EventRow]:
        """What happened, each event once; a writer that doesn't give up is refused again."""
        now = clock()
        found: dict[tuple[str, Event], EventRow] = {}
        while self._happened and len(found) < AT_ONCE:
            at, database, event = self._happened.popleft()
            row = found.setdefault((database, event), EventRow(event, 0.0, times=0))
            row.age, row.times = now - at, row.times + 1
        return found


def death(name: str, alias: str, pid: int) -> Event:
    """The event of a lock that was freed, since its holder's process on this machine is gone."""
    place = f"{new_owner().host}, pid {pid}"
    return Event(LOST, name, alias, None, place, "its process is gone; the lock was freed")


def _write(rows: list[EventRow], statements: Statements) -> None:
    events.write(statements, rows, conf.history())


def _grant(lease: Lease) -> Event:
    return Event(GRANTED, **_about(lease))


def _about(lease: Lease) -> Mapping[str, Any]:
    return {
        "name": lease.name,
        "alias": lease.alias,
        "token": lease.token if lease.fenced else None,
        "holder": str(lease.holder),
    }


history = History(scribe)
scribe.books.append(history)
