"""
Forced release of a lock whose holder is alive.

The fence is raised first: from then on no write of the holder is accepted, whether the holder has
noticed or not. Then the lock is released, by the holder's owner id, and a waiter gets it. Then the
fence is raised once more: the holder may have recorded its grant in between.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from enum import StrEnum

from django.db import Error, connections

from .. import conf, logs, signals
from ..backends.interface import Grant
from ..core import names
from ..core.identity import Holder
from ..core.manager import Service, service
from ..core.runtime import clock
from ..exceptions import BackendUnavailable, ReleaseBlocked
from ..storage.dialect import whose
from ..storage.fences import (
    Fences,
    Revoked,
    Revoking,
    named,
    pinned_by,
    tables_locked_by,
)
from ..storage.rows import Newest, Row
from ..storage.text import escape_control, is_table_missing
from ..storage.vendors import ledger_for

logger = logging.getLogger(__name__)

#: Seconds for a look at the registry.
BRIEFLY = 2.0
#: Seconds within which a session that got a lock has recorded it, if it is fenced.
RECORDED = 0.4


class Outcome(StrEnum):
    """What became of a forced release."""

    #: The lock is free, or a waiter has it.
    FREED = "freed"
    #: The holder's writes are rejected; its process releases the lock at its next renewal.
    LEFT_TO_HOLDER = "left to its holder"
    #: The lock is free.
    NOT_HELD = "not held"
    #: Another holder has it than was meant, and keeps it.
    CHANGED_HANDS = "changed hands"
    #: It has no row, and ends with its server session alone: nothing was done.
    NEEDS_END_OF_SESSION = "needs the end of its session"


@dataclass(frozen=True, slots=True)
class HeldBy:
    """Who would lose a lock to a forced release."""

    name: str
    alias: str
    backend: str
    holder: Holder
    fenced: bool
    #: Its lease is over, and there is no new holder.
    expired: bool = False

    @property
    def owner(self) -> str:
        """What tells this holder from any other; empty if it isn't in the registry."""
        return self.holder.owner


@dataclass(frozen=True, slots=True)
class Release:
    """What was done."""

    name: str
    alias: str
    outcome: Outcome
    #: Who had it; of a lock that has changed hands, who has it.
    holder: Holder | None = None
    #: The fence's, which is above that of the former holder; None if the lock isn't fenced.
    token: int | None = None
    #: Who had released the lock by force before this call.
    before: str = ""

    @property
    def done(self) -> bool:
        """Whether the holder has lost it, at least as far as writes are concerned."""
        return self.outcome in (Outcome.FREED, Outcome.LEFT_TO_HOLDER)

    def __str__(self) -> str:
        lock = f"Lock {self.name!r}"
        lock += f" (alias {self.alias!r})" if self.alias else ""
        return _WORDS[self.outcome].format(
            lock=lock, holder=self.holder, fence=self._fence(), end=end_of_session(self.holder)
        )

    def _fence(self) -> str:
        if self.token is None:
            return "The lock isn't fenced, so no write of the holder is rejected."
        return f"The holder's writes are rejected: the fence is at {self.token}."


_WORDS = {
    Outcome.FREED: "{lock} of {holder} was released by force. {fence}",
    Outcome.LEFT_TO_HOLDER: "{lock} was taken from {holder}, whose process releases it at its "
    "next renewal, within a third of its ttl. {fence}{end}",
    Outcome.NOT_HELD: "{lock} is free: there is nothing to release.",
    Outcome.CHANGED_HANDS: "{lock} has changed hands, and was left alone: now {holder} has it.",
    Outcome.NEEDS_END_OF_SESSION: "{lock} of {holder} isn't in the registry, so it ends with its "
    "session alone. Nothing was done.{end}",
}


def end_of_session(holder: Holder | None) -> str:
    """Return how to end the session that holds a lock; empty if no session does."""
    if holder is None or holder.session_pid is None:
        return ""
    return (
        " If its process hangs, end its session, and with it every other lock of that session: "
        f"{end_session_sql(holder.session_pid)}"
    )


def end_session_sql(pid: int) -> str:
    return f"SELECT pg_terminate_backend({pid})"


def held_by(name: str, backend: str = conf.DEFAULT_ALIAS) -> HeldBy | None:
    """
    Return who would lose lock `name` to a forced release through an alias; None if it is free.

    A holder whose lease is over counts too: it may be paused, and come back.
    """
    until = clock() + RECORDED
    found = _held_by(name, backend)
    while found is not None and not found.holder.owner and clock() < until:
        # A session that has just got the lock, and is about to record it.
        time.sleep(0.02)
        found = _held_by(name, backend)
    return found


def _held_by(name: str, backend: str) -> HeldBy | None:
    asked = service(backend)
    row, _ = _look(asked, name)
    now = asked.holder(name)
    if now is not None and now.alias != backend:
        # The database backend reads the rows of other aliases, too.
        now = None
    holder = now or (row.holder() if row else None)
    if holder is None:
        return None
    is_recorded = row is not None and row.owner == holder.owner
    return HeldBy(
        name=name,
        alias=backend,
        backend=asked.backend.label,
        holder=holder,
        fenced=row.fenced if row and is_recorded else holder.token is not None,
        expired=now is None,
    )


def _look(asked: Service, name: str) -> tuple[Row | None, Newest | None]:
    """Return the name's row of the registry under this alias, and its fence."""
    try:
        row, newest = Fences(asked.config, asked.backend.label, BRIEFLY).read(name)
    except Error as exc:
        if is_table_missing(exc):
            # A project with unfenced locks alone needs no tables.
            return None, None
        using = asked.config.fence_database
        raise asked.backend.unavailable("look", named(exc, using), name) from exc
    return row if row is not None and row.alias == asked.config.alias else None, newest


def force_release(
    name: str,
    *,
    by: str,
    backend: str = conf.DEFAULT_ALIAS,
    owner: str | None = None,
) -> Release:
    """
    Take lock `name` away from its holder, and let the next one have it.

    Done twice it does no more than once. It never releases the lock of another holder than the one
    that it found, or `owner`.

    Args:
        by: Who does it; the holder's error, the log and the signal say so.
        backend: The alias that the lock is taken through.
        owner: The holder that is meant, by `HeldBy.owner` or `Lease.owner`; a lock that has
            changed hands since is left alone.

    Raises:
        ReleaseBlocked: An open transaction has the fence locked. Nothing was done.
        BackendUnavailable: The lock service, or the fence's database, doesn't answer.
    """
    names.validate(name)
    if not by.strip():
        raise ValueError("by= has to say who releases the lock: its holder and the log name them.")
    by = escape_control(by)
    # The fence is read before the service is asked: see `Revoking.revoke()`.
    _, seen = _look(service(backend), name)
    found = held_by(name, backend)
    if found is None:
        return Release(name, backend, Outcome.NOT_HELD)
    if not found.owner:
        return Release(name, backend, Outcome.NEEDS_END_OF_SESSION, found.holder)
    if owner is not None and owner != found.owner:
        return Release(name, backend, Outcome.CHANGED_HANDS, found.holder)
    revoked = _revoke(found, by, seen)
    released = service(backend).backend.release(Grant(name, found.owner, fenced=found.fenced))
    if revoked is not None and found.fenced:
        revoked = _revoked_again(found, by, revoked, seen)
        with contextlib.suppress(BackendUnavailable):
            # A hint only: the next grant has a token above the fence at once.
            service(backend).backend.suggest(name, revoked.token or 0)
    return _concluded(found, by, revoked, released)


def _revoked_again(found: HeldBy, by: str, revoked: Revoked, seen: Newest | None) -> Revoked:
    """Raise the fence once more, if the holder may have recorded its grant since the first time."""
    was_recorded = seen is not None and seen[1] == found.owner
    last = None if was_recorded or revoked.token is None else (revoked.token, "")
    try:
        again = _revoke(found, by, last, again=True)
    except (BackendUnavailable, ReleaseBlocked):
        logger.warning(
            "Whether lock %r was claimed as it was released by force isn't known",
            found.name,
            exc_info=True,
            extra=logs.facts(name=found.name, alias=found.alias, owner=found.owner),
        )
        return revoked
    return revoked._replace(token=again.token) if again and again.is_new else revoked


def _revoke(found: HeldBy, by: str, seen: Newest | None, *, again: bool = False) -> Revoked | None:
    """Raise the fence and note who did it; None for an unfenced lock without tables."""
    holder, config = found.holder, service(found.alias).config
    try:
        held = Grant(found.name, found.owner, fenced=found.fenced)
        return Revoking(config).revoke(held, by, proposed=holder.token, seen=seen, again=again)
    except BackendUnavailable as exc:
        cause = exc.__cause__
        connection = connections[config.fence_database]
        if isinstance(cause, Error) and ledger_for(connection).is_row_locked(cause):
            raise _blocked(found, config.fence_database) from exc
        if found.fenced or not is_table_missing(cause):
            raise
        # Only the holder's error says less.
        logger.debug("Lock %r is released without a note", found.name, exc_info=True)
        return None


def _blocked(found: HeldBy, using: str) -> ReleaseBlocked:
    obstacle = ledger_for(connections[using]).obstacle.format(using=using)
    blocker = pinned_by(using, found.name)
    if not blocker and (blocker := tables_locked_by(using)):
        obstacle = f"a table of locks is locked in {using!r}"
    return ReleaseBlocked(
        f"Lock {found.name!r} of {found.holder} wasn't released by force, since its fence can't be "
        f"raised: {obstacle}{whose(blocker)}. Try again when that has ended, or end it.",
        name=found.name,
        alias=found.alias,
        holder=found.holder,
        blocker=blocker or None,
    )


def _concluded(found: HeldBy, by: str, revoked: Revoked | None, released: bool) -> Release:
    token = revoked.token if revoked else None
    if not released:
        now = _held_by(found.name, found.alias)
        if now is None or now.owner != found.owner:
            # It was released a moment ago, or another holder has it.
            outcome = Outcome.NOT_HELD if now is None else Outcome.CHANGED_HANDS
            return Release(found.name, found.alias, outcome, now.holder if now else None)
        # Only its own process can end a session's lock.
        released = now.expired and _clear_row(found)
    elif found.fenced:
        _clear_row(found)
    is_new = revoked is None or revoked.is_new
    if released or is_new:
        _tell(found, by, token, released)
        _tidy(found)
    return Release(
        found.name,
        found.alias,
        Outcome.FREED if released else Outcome.LEFT_TO_HOLDER,
        found.holder,
        token,
        before="" if revoked is None or is_new else revoked.note.by,
    )


def _clear_row(found: HeldBy) -> bool:
    """Delete the row of a holder that has no lock: pages look at the registry next."""
    asked = service(found.alias)
    try:
        Fences(asked.config, asked.backend.label).clear([Grant(found.name, found.owner)])
    except Error:
        logger.debug("The row of lock %r wasn't deleted", found.name, exc_info=True)
        return False
    return True


def _tidy(found: HeldBy) -> None:
    try:
        Revoking(service(found.alias).config).forget()
    except BackendUnavailable:
        logger.debug("Old forced releases weren't deleted", exc_info=True)


def _tell(found: HeldBy, by: str, token: int | None, freed: bool) -> None:
    logger.warning(
        "Lock %r (alias %r) was released by force, by %s; it was held by %s%s",
        found.name,
        found.alias,
        by,
        found.holder,
        "" if freed else ", which releases it at its next renewal",
        extra=logs.facts(
            name=found.name,
            alias=found.alias,
            token=token,
            owner=found.holder.owner,
            holder=str(found.holder),
            by=by,
        ),
    )
    signals.send(
        signals.lock_force_released,
        type(service(found.alias).backend),
        name=found.name,
        alias=found.alias,
        token=token,
        holder=found.holder,
        by=by,
        freed=freed,
    )
