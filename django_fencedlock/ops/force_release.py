"""Forced release of a living holder's lock: raise the fence, release, and raise it again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
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

#: How often one forced release begins again, since another grant was recorded meanwhile.
ATTEMPTS = 4
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
_OTHERS = _("Further readers that lost it: %(others)d.")
_READERS_REJECTED = _("So are transactions under the leases that other readers have now.")
_UNFENCED = _("The lock isn't fenced: the holder's writes are not rejected.")
_LEFT = _("The holder's process releases it at its next renewal, within a third of its ttl.")
_END_SESSION = _(
    "If its process hangs, end its session, and with it every other lock of that session: "
    "SELECT pg_terminate_backend(%(pid)d), or on MySQL: KILL %(pid)d"
)
_RAISED_FIRST = _("The fence is raised first: the holder's writes are rejected from then on.")
_RAISED_FOR_READERS = _(
    "The fence is raised first: transactions under the leases of all readers are rejected from "
    "then on, also of those that keep the lock."
)
_RELEASED_THEN = _("Then the lock is released. The holder notices at its next renewal.")


def consequences(
    fenced: bool,
    session_pid: int | None,
    translate: Callable[[str], str] = str,
    *,
    shared: bool = False,
) -> list[str]:
    """Return what a forced release will do, step by step."""
    raised = _RAISED_FOR_READERS if shared else _RAISED_FIRST
    texts = [raised if fenced else _UNFENCED]
    texts += [_RELEASED_THEN] if session_pid is None else [_LEFT, _END_SESSION]
    return [translate(each) % {"pid": session_pid} for each in texts]


@dataclass(frozen=True, slots=True)
class HeldBy:
    """The holder that would lose a lock to a forced release; of readers, all of them."""

    name: str
    alias: str
    backend: str
    holder: Holder
    fenced: bool
    #: Its lease has expired, and there is no new holder.
    expired: bool = False
    #: The further readers.
    others: tuple[Holder, ...] = ()

    @property
    def owner_id(self) -> str:
        """The owner id; empty if it isn't in the registry."""
        return self.holder.owner_id

    @property
    def holders(self) -> list[Holder]:
        """The holder, or all readers, as far as their owner ids are known."""
        return [each for each in (self.holder, *self.others) if each.owner_id]

    def only(self, owner_ids: Collection[str]) -> HeldBy | None:
        """Leave out all holders but these; None if none of them has the lock."""
        kept = [each for each in self.holders if each.owner_id in owner_ids]
        return replace(self, holder=kept[0], others=tuple(kept[1:])) if kept else None


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
    #: The further readers that have lost the lock.
    others: tuple[Holder, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the holder has lost the lock, at least as far as writes are concerned."""
        return self.outcome in (Outcome.FREED, Outcome.LEFT_TO_HOLDER)

    def describe(self, translate: Callable[[str], str] = str) -> str:
        """Return what was done, and what to do."""
        pid = self.holder.session_pid if self.holder else None
        texts = [_RESULTS[self.outcome]]
        if self.others:
            texts.append(_OTHERS)
        if self.outcome is Outcome.LEFT_TO_HOLDER:
            texts.append(_LEFT)
        if self.done:
            texts.append(_UNFENCED if self.token is None else _REJECTED)
        if self.done and self.token is not None and self.holder and self.holder.shared:
            texts.append(_READERS_REJECTED)
        if pid and self.outcome in (Outcome.LEFT_TO_HOLDER, Outcome.NEEDS_END_OF_SESSION):
            texts.append(_END_SESSION)
        facts: dict[str, object] = {"name": self.name, "alias": self.alias, "pid": pid}
        facts |= {"holder": self.holder, "token": self.token, "others": len(self.others)}
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
    rows: list[Row] = []
    seen: Newest | None = None
    try:
        rows, seen = Fences(asked.config, asked.backend.label, READ_TIMEOUT).read_all(name)
    except Error as exc:
        # A project with unfenced locks alone needs no tables.
        if not is_table_missing(exc):
            raise asked.backend.unavailable("look up", exc, name) from exc
    rows = [row for row in rows if row.alias == backend]
    # The database backend reads the rows of other aliases, too.
    now = [each for each in asked.holders(name) if each.alias == backend]
    # The newest first: a row of a former holder may be left.
    by_age = sorted(rows, key=lambda row: row.expires_at, reverse=True)
    found = now or [row.holder() for row in by_age[:1]]
    if not found:
        return None, seen
    holder = found[0]
    if holder.shared:
        known = {each.owner_id for each in found}
        found += [row.holder() for row in rows if row.shared and row.owner.id not in known]
    # A service without tokens doesn't tell: the holder may be about to record its grant. A name
    # that was never fenced has no fence.
    fenced = holder.token is not None or (
        seen not in (None, (0, "")) and not asked.backend.records_grants
    )
    for row in rows:
        if row.owner.id == holder.owner_id:
            fenced = row.fenced
    label, others = asked.backend.label, tuple(found[1:])
    return HeldBy(name, backend, label, holder, fenced, not now, others), seen


def force_release(
    name: str,
    *,
    by: str,
    backend: str = conf.DEFAULT_ALIAS,
    owner_id: str | Collection[str] | None = None,
) -> Release:
    """
    Take lock `name` from its holder, or from all its readers. The next waiter acquires it.

    It is idempotent, and releases only the lock of the holders that it found, or of `owner_id`:
    of one reader, for example. Transactions under the leases of the other readers are rejected
    from then on, too: all readers have one token. The holder's error, the log and the signal name
    the author, `by`.

    Raises:
        ReleaseBlocked: An open transaction has the fence locked. Nothing was done.
        BackendUnavailable: The lock service, or the fence's database, doesn't answer.
    """
    names.validate_any(name)
    if not by.strip():
        raise ValueError("by= has to say who releases the lock: its holder and the log name them.")
    by = escape_control(by)
    owners = [owner_id] if isinstance(owner_id, str) else owner_id
    attempts = 0
    while True:
        # The fence is read before the service is asked: see `Revoking.revoke()`.
        held, seen = _look(name, backend)
        found = held if held is None or owners is None else held.only(owners)
        if held is None or found is None or not held.holders:
            return _untouched(name, backend, held)
        owners = [each.owner_id for each in found.holders]
        revoked = _revoke(found, by, seen, again=attempts > 0)
        attempts += 1
        if revoked is None or not revoked.is_overtaken or attempts == ATTEMPTS:
            break
    asked = service(backend).backend
    freed = [each for each in found.holders if asked.release(_grant_of(found, each))]
    if revoked is not None and found.fenced:
        revoked = _revoke_again(found, by, revoked, seen)
        with contextlib.suppress(BackendUnavailable):
            # A hint only: the next grant has a token above the fence at once.
            asked.suggest(name, revoked.token or 0)
    return _conclude(found, by, revoked, freed)


def _untouched(name: str, backend: str, held: HeldBy | None) -> Release:
    """Return the result for a lock whose present holder, if it has one, keeps it."""
    if held is None:
        return Release(name, backend, Outcome.NOT_HELD)
    outcome = Outcome.CHANGED_HANDS if held.holders else Outcome.NEEDS_END_OF_SESSION
    return Release(name, backend, outcome, held.holder)


def _grant_of(found: HeldBy, holder: Holder) -> Grant:
    return Grant(found.name, holder.owner_id, fenced=found.fenced, shared=holder.shared)


def _revoke_again(found: HeldBy, by: str, revoked: Revoked, seen: Newest | None) -> Revoked:
    """Raise the fence again, if a holder may have recorded its grant since the first time."""
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
        first, *others = (_grant_of(found, each) for each in found.holders)
        more = [each.owner for each in others]
        proposed = None if first.shared else found.holder.token
        return Revoking(config).revoke(
            first, by, proposed=proposed, seen=seen, again=again, others=more
        )
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


def _conclude(found: HeldBy, by: str, revoked: Revoked | None, freed: list[Holder]) -> Release:
    asked, left = service(found.alias), list[Holder]()
    with_rows = freed if found.fenced else []
    if len(freed) < len(found.holders):
        now = held_by(found.name, found.alias)
        still = {each.owner_id for each in now.holders} if now else set()
        left = [each for each in found.holders if each not in freed and each.owner_id in still]
        if not freed and not left:
            # It was released a moment ago, or another holder has acquired it.
            outcome = Outcome.NOT_HELD if now is None else Outcome.CHANGED_HANDS
            return Release(found.name, found.alias, outcome, now.holder if now else None)
        # Only its own process can release a session's lock.
        with_rows = [*with_rows, *(left if now and now.expired else [])]
    if with_rows:
        with contextlib.suppress(Error):
            rows = [Grant(found.name, each.owner_id) for each in with_rows]
            Fences(asked.config, asked.backend.label).clear(rows)
            left = [each for each in left if each not in with_rows]
    token = revoked.token if revoked else None
    is_new = revoked is None or revoked.is_new
    lost = [each for each in found.holders if each in freed or each in left or each in with_rows]
    for each in lost:
        if is_new or each not in left:
            _announce(found, each, by, token, freed=each not in left)
    if is_new or not left:
        with contextlib.suppress(BackendUnavailable, SettingsError):
            Revoking(asked.config).forget()
    outcome = Outcome.LEFT_TO_HOLDER if left else Outcome.FREED
    before = "" if revoked is None or is_new else revoked.note.by
    first, *others = lost
    return Release(found.name, found.alias, outcome, first, token, before, tuple(others))


def _announce(found: HeldBy, holder: Holder, by: str, token: int | None, freed: bool) -> None:
    name, alias = found.name, found.alias
    logger.warning(
        "Lock %r (alias %r) was released by force, by %s; it was held by %s%s",
        *(name, alias, by, holder, "" if freed else ", which releases it at its next renewal"),
        extra=logs.facts(
            name=name, alias=alias, owner=holder.owner_id, holder=str(holder), token=token, by=by
        ),
    )
    backend = service(alias).backend
    emit(Kind.FORCED, backend, name, token=token, holder=holder, by=by, freed=freed)
