"""
Forced releases: lifts a fence above its holder's token, and notes by whom the lock was taken away.

The note is how the former holder learns it, whoever has the lock by then. With session locks it
does more: the keeper of a holder whose owner is noted gives the lock back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import Error, IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import AliasConfig
from ..sessions import ask
from ..transactions import lent_by_test
from .characters import storable
from .ledger import BATCH, FENCE, HELD, as_time, listed
from .records import Records, Statements

logger = logging.getLogger(__name__)

FORCED = "django_fencedlock_forcedrelease"

#: Seconds that a note is kept, and longer while its holder still has a row.
KEPT = 14 * 24 * 3600.0
#: Seconds that one try waits for a fence that somebody's transaction has locked. (On MySQL, one.)
PATIENCE = 0.5
#: Seconds for finding out whether a lock was taken away.
EXPLAINED = 2.0

# As after a lift, nobody is the owner: no lease that is out has the newest grant. The token that
# the lock service told may be newer than the fence's: then the holder is just about to record it.
_RAISE = f"""
UPDATE {FENCE} SET token = CASE WHEN token < %(seen)s THEN %(seen)s ELSE token END + 1, owner = ''
WHERE name = %(name)s AND (owner = %(owner)s OR token < %(seen)s)
"""
_MAKE = f"INSERT INTO {FENCE} (name, token, owner) VALUES (%(name)s, %(seen)s + 1, '')"

#: Whether somebody's lock was taken away, as a condition on his owner's id.
IS_FORCED = f"EXISTS (SELECT 1 FROM {FORCED} r WHERE r.owner = {{owner}})"


@dataclass(frozen=True, slots=True)
class Note:
    """Who took a lock away, and when."""

    by: str
    at: datetime

    def __str__(self) -> str:
        return f"it was released by force, by {self.by}, at {self.at:%Y-%m-%d %H:%M:%S %Z}"


@dataclass(frozen=True, slots=True)
class Revoked:
    """What became of a holder's grant."""

    #: The fence's, which is above the holder's; None if his lock wasn't fenced.
    token: int | None
    note: Note
    #: Whether it was done by this call.
    is_new: bool


class Revoking(Records):
    """The forced releases of one alias."""

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        # Somebody sits before a page, or a terminal.
        self._patience = min(self._timeout, 2.0)

    def revoke(self, name: str, owner: str, by: str, *, fenced: bool, seen: int | None) -> Revoked:
        """
        Refuse every further write of `owner`, whose token is `seen` as far as that is known.

        Raises `BackendUnavailable`, in time, when somebody's transaction has the fence locked.
        """
        given = {"name": name, "owner": owner, "fenced": fenced, "seen": seen or 0, "by": by}

        def work(statements: Statements) -> Revoked:
            try:
                return _revoke(statements, given)
            except IntegrityError:
                # The fence, or the note, was made at this very moment.
                return _revoke(statements, given)

        return self.run("forced release", name, work)

    def forget(self) -> int:
        """Delete some of the notes that nobody will ask for any more."""

        def work(statements: Statements) -> int:
            with statements.cursor(atomic=True) as cursor:
                return _forget(statements, cursor)

        return self.run("tidying up of forced releases", None, work)


def notes(connection: BaseDatabaseWrapper, owners: Sequence[str]) -> dict[str, Note]:
    """The notes about those of these owners whose lock was taken away."""
    found: dict[str, Note] = {}
    with connection.cursor() as cursor:
        for start in range(0, len(owners), BATCH):
            inside, given = listed("o", owners[start:][:BATCH])
            cursor.execute(
                f"SELECT owner, released_by, released_at FROM {FORCED} WHERE owner IN ({inside})",
                given,
            )
            for owner, by, at in cursor.fetchall():
                found[owner] = Note(by, as_time(at, connection))
    return found


def told(using: str, owners: Sequence[str]) -> dict[str, str]:
    """Tell, by owner, by whom a lock was taken away from these; as far as that can be known."""
    try:
        lent = lent_by_test(using)
        if lent is not None:
            found = notes(lent, owners)
        else:
            found = ask(using, EXPLAINED, lambda private: notes(private, owners))
    except Error:
        # It is the loss that counts; and whoever uses unfenced locks alone needs no tables.
        logger.debug("Whether locks were taken away can't be told", exc_info=True)
        return {}
    return {owner: str(note) for owner, note in found.items()}


def _revoke(statements: Statements, given: dict[str, Any]) -> Revoked:
    connection = statements.connection
    own = not connection.in_atomic_block
    with statements.cursor(atomic=True) as cursor:
        if own and connection.vendor == "postgresql":
            cursor.execute(f"SELECT set_config('lock_timeout', '{PATIENCE}s', true)")
        raised, token = _raise(cursor, given)
        note = notes(connection, [given["owner"]]).get(given["owner"])
        if note is not None:
            return Revoked(token, note, is_new=raised)
        cursor.execute(
            f"INSERT INTO {FORCED} (owner, name, released_by, released_at) "
            f"VALUES (%(owner)s, %(name)s, %(by)s, {statements.now})",
            {**given, **statements.times(), "by": storable(connection, given["by"], 200)},
        )
        return Revoked(token, notes(connection, [given["owner"]])[given["owner"]], is_new=True)


def _raise(cursor: Any, given: dict[str, Any]) -> tuple[bool, int | None]:
    """Lift the fence, unless it is above the holder; whether that was done, and its token."""
    if not given["fenced"]:
        return False, None
    cursor.execute(_RAISE, given)
    raised = bool(cursor.rowcount)
    found = _newest(cursor, given)
    if found is None and given["seen"]:
        cursor.execute(_MAKE, given)
        return True, given["seen"] + 1
    return raised, found


def _newest(cursor: Any, given: dict[str, Any]) -> int | None:
    cursor.execute(f"SELECT token FROM {FENCE} WHERE name = %(name)s", given)
    found = cursor.fetchone()
    return None if found is None else int(found[0])


def _forget(statements: Statements, cursor: Any) -> int:
    # Not while its holder may come back: a session lock is taken away by the note alone.
    over = (
        f"released_at < {statements.later('ago')} AND NOT EXISTS "
        f"(SELECT 1 FROM {HELD} h WHERE h.owner = {FORCED}.owner)"
    )
    cursor.execute(
        f"SELECT owner FROM {FORCED} WHERE {over} LIMIT {BATCH}", statements.times(ago=-KEPT)
    )
    found = [owner for (owner,) in cursor.fetchall()]
    if found:
        inside, given = listed("o", found)
        cursor.execute(f"DELETE FROM {FORCED} WHERE owner IN ({inside})", given)
    return len(found)
