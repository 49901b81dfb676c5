"""
Forced release: takes a lock away from a holder who lives.

The fence is lifted first: from that moment on nothing that the holder writes under it is accepted,
whether he has noticed or not. Then the lock is freed, and whoever waits for it gets it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from enum import StrEnum

from django.db import Error, connections

from .. import conf, logs, signals
from ..backends.base import Taken
from ..core import names
from ..core.identity import Holder
from ..core.manager import Service, service
from ..core.runtime import clock
from ..core.transactions import test_connection
from ..exceptions import BackendUnavailable, ReleaseBlocked
from ..storage.connections import pool
from ..storage.dialect import whose
from ..storage.errors import is_table_missing
from ..storage.fences import Revoked, Revoking, named, pinned_by, tables_locked_by
from ..storage.text import escape_control
from ..storage.vendors import Row, ledger_for

logger = logging.getLogger(__name__)

#: Seconds for a look at the registry.
BRIEFLY = 2.0
#: Seconds within which a session that got a lock has recorded it, if it is fenced.
RECORDED = 0.4


class Outcome(StrEnum):
    """What became of a forced release."""

    #: The lock is free, or whoever waited for it has it.
    FREED = "freed"
    #: The holder's writes are refused; his process gives the lock back when it next renews it.
    LEFT_TO_HOLDER = "left to its holder"
    #: Nobody has it.
    NOT_HELD = "not held"
    #: Somebody else has it than was meant: nothing was done to him.
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
    #: Its lease is over, and nobody has come since.
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
    #: By whom, if not by this call, the lock had been taken away already.
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
            return "The lock isn't fenced, so no write of his is refused."
        return f"His writes are refused: the fence is at {self.token}."


_WORDS = {
    Outcome.FREED: "{lock} of {holder} was released by force. {fence}",
    Outcome.LEFT_TO_HOLDER: "{lock} was taken from {holder}, whose process gives it back when it "
    "next renews it, within a third of its ttl. {fence}{end}",
    Outcome.NOT_HELD: "{lock} is free: there is nothing to release.",
    Outcome.CHANGED_HANDS: "{lock} has changed hands, and was left alone: now {holder} has it.",
    Outcome.NEEDS_END_OF_SESSION: "{lock} of {holder} isn't in the registry, so it ends with its "
    "session alone. Nothing was done.{end}",
}


def end_of_session(holder: Holder | None) -> str:
    """How to end the server session that a lock lives on; empty if it lives on none."""
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
    Tell who would lose lock `name` to a forced release through an alias; None if nobody would.

    Also of a holder whose lease is over: he may be paused, and come back.
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
    row = _row(asked, name)
    now = asked.backend.holder(name)
    if now is not None and now.alias != backend:
        # The database backend reads the rows that others have recorded, too.
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


def _row(asked: Service, name: str) -> Row | None:
    using = asked.config.fence_database
    try:
        if (lent := test_connection(using)) is not None:
            row = ledger_for(lent).look(lent, name)
        else:
            # One that is kept: pages and commands ask for one lock after the other.
            row = pool(using, BRIEFLY).run(lambda own: ledger_for(own).look(own, name))
    except Error as exc:
        if is_table_missing(exc):
            # Whoever uses unfenced locks alone needs no tables.
            return None
        raise asked.backend.unavailable("look", named(exc, using), name) from exc
    return row if row is not None and row.alias == asked.config.alias else None


def force_release(
    name: str,
    *,
    by: str,
    backend: str = conf.DEFAULT_ALIAS,
    owner: str | None = None,
) -> Release:
    """
    Take lock `name` away from whoever has it, and let the next one have it.

    Done twice it does no more than once; and it never frees the lock of anybody else than the
    holder that it found, or `owner`.

    Args:
        by: Who does it, for the holder, the log and the signal to tell.
        backend: The alias that the lock is taken through.
        owner: The holder that is meant, by `HeldBy.owner` or `Lease.owner`; a lock that has
            changed hands since is left alone.

    Raises:
        ReleaseBlocked: Somebody's open transaction has the fence locked. Nothing was done.
        BackendUnavailable: The lock service, or the fence's database, doesn't answer.
    """
    names.validate(name)
    if not by.strip():
        raise ValueError("by= has to tell who releases the lock: its holder and the log say so.")
    by = escape_control(by)
    found = held_by(name, backend)
    if found is None:
        return Release(name, backend, Outcome.NOT_HELD)
    if not found.owner:
        return Release(name, backend, Outcome.NEEDS_END_OF_SESSION, found.holder)
    if owner is not None and owner != found.owner:
        return Release(name, backend, Outcome.CHANGED_HANDS, found.holder)
    revoked, taken = _take(found, by)
    if taken is Taken.NOT_HIS:
        again = _held_by(name, backend)
        if again is not None and again.owner == found.owner:
            # He was recording his grant meanwhile, and so got a token above the lifted fence.
            found = again
            revoked, taken = _take(found, by)
    return _concluded(found, by, revoked, taken)


def _take(found: HeldBy, by: str) -> tuple[Revoked | None, Taken]:
    """Lift the fence, then free the lock."""
    revoked = _revoke(found, by)
    taken = service(found.alias).backend.take_away(
        found.name, found.owner, token=revoked.token if revoked else None
    )
    if revoked is not None and found.fenced and taken is Taken.FREED:
        revoked = _revoked_again(found, by, revoked)
    return revoked, taken


def _revoked_again(found: HeldBy, by: str, revoked: Revoked) -> Revoked:
    """
    Lift the fence once more, if it is the former holder's again.

    A claim of his that reached the database twice, the second time between the lift and now, has
    drawn a newer token for him.
    """
    try:
        again = _revoke(found, by)
    except (BackendUnavailable, ReleaseBlocked):
        logger.warning(
            "Whether lock %r was claimed as it was released by force can't be told",
            found.name,
            exc_info=True,
            extra=logs.facts(name=found.name, alias=found.alias, owner=found.owner),
        )
        return revoked
    return replace(revoked, token=again.token) if again and again.is_new else revoked


def _revoke(found: HeldBy, by: str) -> Revoked | None:
    """Lift the fence and note who did it; None if that can't be had for an unfenced lock."""
    holder, config = found.holder, service(found.alias).config
    try:
        return Revoking(config).revoke(
            found.name, holder.owner, by, fenced=found.fenced, seen=holder.token
        )
    except BackendUnavailable as exc:
        cause = exc.__cause__
        connection = connections[config.fence_database]
        if isinstance(cause, Error) and ledger_for(connection).is_row_locked(cause):
            raise _blocked(found, config.fence_database) from exc
        if found.fenced or not is_table_missing(cause):
            raise
        # Nothing is lost but the words for the holder.
        logger.debug("Lock %r is released without a note", found.name, exc_info=True)
        return None


def _blocked(found: HeldBy, using: str) -> ReleaseBlocked:
    obstacle = ledger_for(connections[using]).obstacle.format(using=using)
    blocker = pinned_by(using, found.name)
    if not blocker and (blocker := tables_locked_by(using)):
        obstacle = f"a table of locks is locked in {using!r}"
    return ReleaseBlocked(
        f"Lock {found.name!r} of {found.holder} wasn't released by force, since its fence can't be "
        f"lifted: {obstacle}{whose(blocker)}. Try again when that has ended, or end it.",
        name=found.name,
        alias=found.alias,
        holder=found.holder,
        blocker=blocker or None,
    )


def _concluded(found: HeldBy, by: str, revoked: Revoked | None, taken: Taken) -> Release:
    token = revoked.token if revoked else None
    if taken is Taken.NOT_HIS:
        # Given back a moment ago, or taken over.
        now = service(found.alias).holder(found.name)
        outcome = Outcome.NOT_HELD if now is None else Outcome.CHANGED_HANDS
        return Release(found.name, found.alias, outcome, now)
    freed = taken is Taken.FREED
    is_new = revoked is None or revoked.is_new
    if freed or is_new:
        _tell(found, by, token, freed)
        _tidy(found)
    return Release(
        found.name,
        found.alias,
        Outcome.FREED if freed else Outcome.LEFT_TO_HOLDER,
        found.holder,
        token,
        before="" if revoked is None or is_new else revoked.note.by,
    )


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
        "" if freed else ", who gives it back when he next renews it",
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
