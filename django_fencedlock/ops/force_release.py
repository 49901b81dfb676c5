"""Forced release of a living holder's lock: raise the fence, release, and raise it again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from django.db import Error, connections

from .. import conf, logs
from ..backends.interface import Grant
from ..core import names
from ..core.events import Kind, emit
from ..core.identity import Holder
from ..core.manager import service
from ..exceptions import BackendUnavailable, ReleaseBlocked, SettingsError
from ..storage.dialect import Newest, Row
from ..storage.fences import Fences, Revoked, Revoking, pinned_by
from ..storage.text import escape_control, is_table_missing
from ..storage.vendors import LEDGERS

logger = logging.getLogger(__name__)

#: Seconds for reading the registry.
READ_TIMEOUT = 2.0


class Outcome(StrEnum):
    """The result of a forced release; docs/reference/api.md explains each."""

    FREED = "freed"
    LEFT_TO_HOLDER = "left to its holder"
    NOT_HELD = "not held"
    CHANGED_HANDS = "changed hands"
    NEEDS_END_OF_SESSION = "needs the end of its session"


def _(text: str) -> str:
    """Mark a text for translation by the admin. `gettext_noop()` needs settings."""
    return text


_RESULTS = {
    Outcome.FREED: _("Lock %(name)r (alias %(alias)r) of %(holder)s was released by force."),
    Outcome.LEFT_TO_HOLDER: _("Lock %(name)r (alias %(alias)r) was taken from %(holder)s."),
    Outcome.NOT_HELD: _("Lock %(name)r is free: there is nothing to release."),
    Outcome.CHANGED_HANDS: _(
        "Lock %(name)r (alias %(alias)r) has changed hands, to %(holder)s. Nothing was released."
    ),
    Outcome.NEEDS_END_OF_SESSION: _(
        "Lock %(name)r (alias %(alias)r) of %(holder)s isn't in the registry: it wasn't released."
    ),
}
_REJECTED = _("The holder's writes are rejected: the fence is at %(token)d.")
_UNFENCED = _("The lock isn't fenced: the holder's writes are not rejected.")
_LEFT = _("The holder's process releases it at its next renewal, within a third of its ttl.")
_END_SESSION = _(
    "If its process hangs, end its session, and with it every other lock of that session: "
    "SELECT pg_terminate_backend(%(pid)d), or on MySQL: KILL %(pid)d"
)
_RAISED_FIRST = _("The fence is raised first: the holder's writes are rejected from then on.")
_RELEASED_THEN = _("Then the lock is released. The holder notices at its next renewal.")


def consequences(
    fenced: bool, session_pid: int | None, translate: Callable[[str], str] = str
) -> list[str]:
    """Return what a forced release will do, step by step."""
    texts = [_RAISED_FIRST if fenced else _UNFENCED]
    texts += [_RELEASED_THEN] if session_pid is None else [_LEFT, _END_SESSION]
    return [translate(each) % {"pid": session_pid} for each in texts]


@dataclass(frozen=True, slots=True)
class HeldBy:
    """The holder who would lose a lock to a forced release."""

    name: str
    alias: str
    backend: str
    holder: Holder
    fenced: bool
    #: Its lease has expired, and there is no new holder.
    expired: bool = False

    @property
    def owner_id(self) -> str:
        """The owner id; empty if it isn't in the registry."""
        return self.holder.owner_id


@dataclass(frozen=True, slots=True)
class Release:
    """The result of a forced release."""

    name: str
    alias: str
    outcome: Outcome
    #: The former holder; of a lock that has changed hands, the present one.
    holder: Holder | None = None
    #: The raised fence; None if the lock isn't fenced.
    token: int | None = None
    #: The author of an earlier forced release.
    before: str = ""

    @property
    def done(self) -> bool:
        """Whether the holder has lost the lock, at least as far as writes are concerned."""
        return self.outcome in (Outcome.FREED, Outcome.LEFT_TO_HOLDER)

    def describe(self, translate: Callable[[str], str] = str) -> str:
        """Return what was done, and what to do."""
        pid = self.holder.session_pid if self.holder else None
        texts = [_RESULTS[self.outcome]]
        if self.outcome is Outcome.LEFT_TO_HOLDER:
            texts.append(_LEFT)
        if self.done:
            texts.append(_UNFENCED if self.token is None else _REJECTED)
        if pid and self.outcome in (Outcome.LEFT_TO_HOLDER, Outcome.NEEDS_END_OF_SESSION):
            texts.append(_END_SESSION)
        facts: dict[str, object] = {"name": self.name, "alias": self.alias, "pid": pid}
        facts |= {"holder": self.holder, "token": self.token}
        return " ".join(translate(each) % facts for each in texts)

    __str__ = describe


def held_by(name: str, backend: str = conf.DEFAULT_ALIAS) -> HeldBy | None:
    """
    Return who would lose lock `name` to a forced release; None if it is free.

    A holder whose lease has expired counts too: it may be paused, and continue.
    """
    return _look(name, backend)[0]


def _look(name: str, backend: str) -> tuple[HeldBy | None, Newest | None]:
    """Return who holds the lock, and the fence as it was before the service was asked."""
    asked = service(backend)
    row: Row | None = None
    seen: Newest | None = None
    try:
        row, seen = Fences(asked.config, asked.backend.label, READ_TIMEOUT).read(name)
    except Error as exc:
        # A project with unfenced locks alone needs no tables.
        if not is_table_missing(exc):
            raise asked.backend.unavailable("look up", exc, name) from exc
    if row and row.alias != backend:
        row = None
    now = asked.holder(name)
    if now and now.alias != backend:
        # The database backend reads the rows of other aliases, too.
        now = None
    holder = now or (row.holder() if row else None)
    if holder is None:
        return None, seen
    # A service without tokens doesn't tell: the holder may be about to record its grant. A name
    # that was never fenced has no fence.
    fenced = holder.token is not None or (
        seen not in (None, (0, "")) and not asked.backend.records_grants
    )
    if row and row.owner.id == holder.owner_id:
        fenced = row.fenced
    return HeldBy(name, backend, asked.backend.label, holder, fenced, expired=now is None), seen


def force_release(
    name: str, *, by: str, backend: str = conf.DEFAULT_ALIAS, owner_id: str | None = None
) -> Release:
    """
    Take lock `name` from its holder. The next waiter acquires it.

    It is idempotent, and releases only the lock of the holder that it found, or of `owner_id`.
    The holder's error, the log and the signal name the author, `by`.

    Raises:
        ReleaseBlocked: An open transaction has the fence locked. Nothing was done.
        BackendUnavailable: The lock service, or the fence's database, doesn't answer.
    """
    names.validate_any(name)
    if not by.strip():
        raise ValueError("by= has to say who releases the lock: its holder and the log name them.")
    by = escape_control(by)
    # The fence is read before the service is asked: see `Revoking.revoke()`.
    found, seen = _look(name, backend)
    if found is None:
        return Release(name, backend, Outcome.NOT_HELD)
    if not found.owner_id:
        return Release(name, backend, Outcome.NEEDS_END_OF_SESSION, found.holder)
    if owner_id is not None and owner_id != found.owner_id:
        return Release(name, backend, Outcome.CHANGED_HANDS, found.holder)
    revoked = _revoke(found, by, seen)
    held = Grant(name, found.owner_id, fenced=found.fenced)
    released = service(backend).backend.release(held)
    if revoked is not None and found.fenced:
        revoked = _revoke_again(found, by, revoked, seen)
        with contextlib.suppress(BackendUnavailable):
            # A hint only: the next grant has a token above the fence at once.
            service(backend).backend.suggest(name, revoked.token or 0)
    return _conclude(found, by, revoked, released)


def _revoke_again(found: HeldBy, by: str, revoked: Revoked, seen: Newest | None) -> Revoked:
    """Raise the fence again, if the holder may have recorded its grant since the first time."""
    was_recorded = seen is not None and seen[1] == found.owner_id
    last = None if was_recorded or revoked.token is None else (revoked.token, "")
    try:
        again = _revoke(found, by, last, again=True)
    except (BackendUnavailable, ReleaseBlocked):
        text = "It is unknown whether lock %r was acquired while it was released by force"
        known = logs.facts(name=found.name, alias=found.alias)
        logger.warning(text, found.name, exc_info=True, extra=known)
        return revoked
    return revoked._replace(token=again.token) if again and again.is_new else revoked


def _revoke(found: HeldBy, by: str, seen: Newest | None, *, again: bool = False) -> Revoked | None:
    """Raise the fence and note the author; None for an unfenced lock without tables."""
    config = service(found.alias).config
    try:
        held = Grant(found.name, found.owner_id, fenced=found.fenced)
        proposed = found.holder.token
        return Revoking(config).revoke(held, by, proposed=proposed, seen=seen, again=again)
    except (BackendUnavailable, SettingsError) as exc:
        cause, using = exc.__cause__, config.fence_database
        if isinstance(cause, Error) and LEDGERS[connections[using].vendor].is_row_locked(cause):
            blocker = pinned_by(using, found.name)
            obstacle = (
                blocker or "a transaction that has it or a table locked: see fencedlock doctor"
            )
            raise ReleaseBlocked(
                f"Lock {found.name!r} of {found.holder} wasn't released by force: its fence in "
                f"{using!r} can't be raised before the end of {obstacle}. Wait for it, or end it.",
                name=found.name,
                alias=found.alias,
                holder=found.holder,
                blocker=blocker or None,
            ) from exc
        if found.fenced or not is_table_missing(cause):
            raise
        # The holder's error doesn't name the author.
        return None


def _conclude(found: HeldBy, by: str, revoked: Revoked | None, released: bool) -> Release:
    has_row, asked = found.fenced, service(found.alias)
    if not released:
        now = held_by(found.name, found.alias)
        if now is None or now.owner_id != found.owner_id:
            # It was released a moment ago, or another holder has acquired it.
            outcome = Outcome.NOT_HELD if now is None else Outcome.CHANGED_HANDS
            return Release(found.name, found.alias, outcome, now.holder if now else None)
        # Only its own process can release a session's lock.
        has_row = now.expired
    if has_row:
        with contextlib.suppress(Error):
            Fences(asked.config, asked.backend.label).clear([Grant(found.name, found.owner_id)])
            released = True
    token = revoked.token if revoked else None
    is_new = revoked is None or revoked.is_new
    if released or is_new:
        _announce(found, by, token, released)
        with contextlib.suppress(BackendUnavailable, SettingsError):
            Revoking(asked.config).forget()
    outcome = Outcome.FREED if released else Outcome.LEFT_TO_HOLDER
    before = "" if revoked is None or is_new else revoked.note.by
    return Release(found.name, found.alias, outcome, found.holder, token, before)


def _announce(found: HeldBy, by: str, token: int | None, freed: bool) -> None:
    name, alias, holder = found.name, found.alias, found.holder
    logger.warning(
        "Lock %r (alias %r) was released by force, by %s; it was held by %s%s",
        *(name, alias, by, holder, "" if freed else ", which releases it at its next renewal"),
        extra=logs.facts(
            name=name, alias=alias, owner=found.owner_id, holder=str(holder), token=token, by=by
        ),
    )
    backend = service(alias).backend
    emit(Kind.FORCED, backend, name, token=token, holder=holder, by=by, freed=freed)
