"""
The condition that a grant is still the newest of its name, and stays so until the writer commits.

The locking clause is what makes a fenced write airtight. Without it a newer grant could commit
between the check and the writer's commit, and the writer wouldn't see it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from django.db import Error, IntegrityError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, Expression
from django.db.models.sql.compiler import SQLCompiler

from ..conf import AliasConfig
from ..core.identity import Holder
from .connections import (
    SQLITE_BUSY_TIMEOUT,
    NoAnswer,
    pool,
    query_once,
    query_outside,
)
from .dialect import BATCH, FENCE, HELD, Entry, Ledger, entry_of, listed
from .records import Records
from .rows import Claimed, Newest, Row, as_time
from .text import fit_column
from .vendors import ledger_for

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Fences:
    """The fences and the registry of one alias, for locks that another service excludes."""

    def __init__(self, config: AliasConfig, label: str, timeout: float | None = None) -> None:
        self._config, self._label = config, label
        self._timeout = config.timeout if timeout is None else timeout

    def entry(self, claim: Claimed) -> Entry:
        """Return the row of the registry that a claim's grant has."""
        return entry_of(claim, self._config.alias, self._label)

    def record(self, claim: Claimed, token: int, seen: Newest | None = None) -> bool:
        """Record a grant; see `Ledger.record()`."""
        entry = self.entry(claim)
        return self._run(lambda ledger, used: ledger.record(used, entry, token, seen))

    def read(self, name: str) -> tuple[Row | None, Newest]:
        """Read a name's row of the registry, and its fence."""
        return self._run(
            lambda ledger, used: (ledger.look(used, name), ledger.newest(used, name) or (0, ""))
        )

    def renew(self, grants: Sequence[Any]) -> list[Any]:
        """Renew the rows of grants; return those that a newer grant came after."""

        def renew(ledger: Ledger, used: BaseDatabaseWrapper) -> list[Any]:
            kept = ledger.renew(used, grants)
            rest = [grant for grant in grants if grant.owner not in kept]
            gone = ledger.missing(used, rest) if rest else set()
            return [
                grant
                for grant in rest
                if grant.owner in gone and not self._put_back(ledger, used, grant)
            ]

        return self._run(renew, SQLITE_BUSY_TIMEOUT)

    def _put_back(self, ledger: Ledger, used: BaseDatabaseWrapper, grant: Any) -> bool:
        """Write a missing row again, unless a newer grant came."""
        if ledger.newest(used, grant.name) != (grant.token, grant.owner):
            return False
        ledger.enter(used, self.entry(grant))
        return True

    def clear(self, held: Sequence[Claimed]) -> None:
        """Delete rows by their owners."""
        self._run(lambda ledger, used: ledger.clear(used, held))

    def is_row_locked(self, error: Error) -> bool:
        """Return whether a statement gave up because another session has a row locked."""
        return ledger_for(connections[self._config.fence_database]).is_row_locked(error)

    def _run(
        self, work: Callable[[Ledger, BaseDatabaseWrapper], T], patience: float | None = None
    ) -> T:
        sessions = pool(self._config.fence_database, self._timeout)
        return sessions.run(lambda used: work(ledger_for(used), used), busy_timeout=patience)


#: How each vendor locks a row that it reads, so that others may read and lock it, but not write.
SHARE = {"postgresql": " FOR SHARE", "mysql": " LOCK IN SHARE MODE", "sqlite": ""}

# Ends the session of a transaction that fell silent. Set until the transaction's end, at the cost
# of no round trip, unless a smaller limit is there already. Always true: compared with NULL, and
# read as a value, since the planner would weigh a condition first. No arithmetic, which would cost
# more than all the rest.
_PATIENCE = "'idle_in_transaction_session_timeout'"
_BE_PATIENT = (
    f"(nullif(current_setting({_PATIENCE}), '0')::interval <= %s"
    f" OR set_config({_PATIENCE}, %s, true) IS NOT NULL)"
)
#: The longest that it can be set to, in milliseconds.
_LONGEST = 2**31 - 1


class WriteGrant(NamedTuple):
    """The grant that a write is made under."""

    name: str
    token: int
    owner: str
    alias: str
    #: For how long a silent transaction may keep the next grant waiting, in seconds.
    patience: float


def pin_sql(connection: BaseDatabaseWrapper, grant: WriteGrant) -> tuple[str, list[Any]]:
    """A SELECT that locks the fence's row and is true, if `grant` is the newest of its name."""
    value = "true"
    given: list[Any] = []
    if connection.vendor == "postgresql" and not connection.get_autocommit():
        value = _BE_PATIENT
        given = [f"{min(max(1, round(grant.patience * 1000)), _LONGEST)}ms"] * 2
    given += grant[:3]
    where = f"name = %s AND token = %s AND owner = %s{SHARE[connection.vendor]}"
    return f"SELECT {value} FROM {FENCE} WHERE {where}", given


class Pin(Expression):
    """The condition as an expression, for WHERE, SET and VALUES."""

    output_field = BooleanField()
    conditional = True
    allowed_default = True

    def __init__(self, grant: WriteGrant) -> None:
        super().__init__()
        self.grant = grant

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, tuple[Any, ...]]:
        select, given = pin_sql(connection, self.grant)
        return f"({select})", tuple(given)

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.__class__, self.grant)


def is_newest(using: str, grant: WriteGrant) -> bool:
    """Lock the fence's row until the transaction ends; False if `grant` isn't the newest."""
    connection = connections[using]
    select, given = pin_sql(connection, grant)
    with connection.cursor() as cursor:
        cursor.execute(select, given)
        return cursor.fetchone() is not None


FORCED = "django_fencedlock_forcedrelease"

#: Seconds that a note is kept, and longer while its holder still has a row.
KEPT = 14 * 24 * 3600.0
#: Seconds that one try waits for a fence that a transaction has locked. (On MySQL, one.)
PATIENCE = 0.5
#: Seconds to find out whether a lock was released by force.
EXPLAINED = 2.0

# No owner is "": no lease has the newest grant then. A proposed token above the fence's is one that
# the holder is about to record. Without a proposal, the holder is about to record the number that
# follows the fence that it has read.
_RAISE = f"""
UPDATE {FENCE}
SET token = CASE WHEN token < %(proposed)s THEN %(proposed)s ELSE token END + 1, owner = ''
WHERE name = %(name)s AND (owner = %(owner)s OR token < %(proposed)s
OR token = %(token)s AND owner = %(writer)s)
"""
_MAKE = f"INSERT INTO {FENCE} (name, token, owner) VALUES (%(name)s, %(proposed)s + 1, '')"

# How a transaction that raises a fence begins on PostgreSQL. It is reported once it has committed,
# so a crash must not undo it, whatever the server's setting is.
_DURABLE = (
    "SELECT set_config('lock_timeout', '{}s', true), set_config('synchronous_commit', 'on', true)"
)

#: Whether a lock was released by force, as a condition on its owner id.
IS_FORCED = f"EXISTS (SELECT 1 FROM {FORCED} r WHERE r.owner = {{owner}})"


@dataclass(frozen=True, slots=True)
class Note:
    """Who released a lock by force, and when."""

    by: str
    at: datetime

    def __str__(self) -> str:
        return f"it was released by force, by {self.by}, at {self.at:%Y-%m-%d %H:%M:%S %Z}"


@dataclass(frozen=True, slots=True)
class Revoked:
    """What became of a holder's grant."""

    #: The fence's, which is above the holder's; None if the lock wasn't fenced.
    token: int | None
    note: Note
    #: Whether it was done by this call.
    is_new: bool


class Revoking(Records):
    """The forced releases of one alias."""

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        # A person waits for a page or a command.
        self._patience = min(self._timeout, 2.0)

    def revoke(
        self,
        name: str,
        owner: str,
        by: str,
        *,
        fenced: bool,
        proposed: int | None,
        seen: Newest | None = None,
        again: bool = False,
    ) -> Revoked:
        """
        Raise the fence above every grant of `owner`, and note who did it.

        `BackendUnavailable` is raised, in time, if a transaction has the fence locked.

        Args:
            proposed: The owner's token, as far as its service knows.
            seen: The fence that was read before the service said who the owner is, or that the
                first raise has set. The owner may be about to record the number that follows it.
            again: This is the second raise of one forced release.
        """
        token, writer = seen or (-1, "")
        given = {"name": name, "owner": owner, "fenced": fenced, "by": by, "again": again}
        given |= {"proposed": proposed or 0, "token": token, "writer": writer}

        def work(connection: BaseDatabaseWrapper) -> Revoked:
            try:
                return _revoke(connection, given)
            except IntegrityError:
                # The fence, or the note, was made at this very moment.
                return _revoke(connection, given)

        return self.run("forced release", name, work)

    def forget(self) -> int:
        """Delete some of the notes that are no longer needed."""
        return self.run("tidying up of forced releases", None, _forget)


def notes(connection: BaseDatabaseWrapper, owners: Sequence[str]) -> dict[str, Note]:
    """Return the notes, by owner id, of the owners whose lock was released by force."""
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
    """Return, by owner id, who released the lock by force, as far as it is known."""
    try:
        found = query_once(using, EXPLAINED, lambda private: notes(private, owners))
    except Error:
        # The loss itself is known; and projects with unfenced locks alone need no tables.
        logger.debug("It is unknown whether locks were released by force", exc_info=True)
        return {}
    return {owner: str(note) for owner, note in found.items()}


def _revoke(connection: BaseDatabaseWrapper, given: dict[str, Any]) -> Revoked:
    ledger, own = ledger_for(connection), not connection.in_atomic_block
    with ledger.transaction(connection) as cursor:
        if own and connection.vendor == "postgresql":
            cursor.execute(_DURABLE.format(PATIENCE))
        note = notes(connection, [given["owner"]]).get(given["owner"])
        if note is not None and not given["again"]:
            # Done before: a second forced release raises nothing, unless the holder came back.
            given["token"] = -1
        raised, token = _raise(connection, cursor, given)
        if note is not None:
            return Revoked(token, note, is_new=raised)
        cursor.execute(
            f"INSERT INTO {FORCED} (owner, name, released_by, released_at) "
            f"VALUES (%(owner)s, %(name)s, %(by)s, {ledger.clock})",
            {**given, **ledger.times(), "by": fit_column(connection, given["by"], 200)},
        )
        return Revoked(token, notes(connection, [given["owner"]])[given["owner"]], is_new=True)


def _raise(
    connection: BaseDatabaseWrapper, cursor: Any, given: dict[str, Any]
) -> tuple[bool, int | None]:
    """Raise the fence, unless it is above the holder; return whether that was done, and it."""
    if not given["fenced"]:
        return False, None
    cursor.execute(_RAISE, given)
    raised = bool(cursor.rowcount)
    newest = ledger_for(connection).newest(connection, given["name"])
    if newest is None and given["proposed"]:
        cursor.execute(_MAKE, given)
        return True, given["proposed"] + 1
    return raised, newest and newest[0]


def _forget(connection: BaseDatabaseWrapper) -> int:
    ledger = ledger_for(connection)
    with ledger.transaction(connection) as cursor:
        # Not while its holder may return: only the note ends a session lock.
        cursor.execute(
            f"SELECT owner FROM {FORCED} WHERE released_at < {ledger.expiry} AND NOT EXISTS "
            f"(SELECT 1 FROM {HELD} h WHERE h.owner = {FORCED}.owner) LIMIT {BATCH}",
            ledger.times(-KEPT),
        )
        found = [owner for (owner,) in cursor.fetchall()]
        if found:
            inside, given = listed("o", found)
            cursor.execute(f"DELETE FROM {FORCED} WHERE owner IN ({inside})", given)
    return len(found)


class Overtaken(NamedTuple):
    """Why nothing is written under a grant any more."""

    #: In words that go on after "was rejected:".
    why: str
    #: Who has the lock now, if known.
    holder: Holder | None = None


def overtaken(connection: BaseDatabaseWrapper, grant: WriteGrant) -> Overtaken | None:
    """Tell by what `grant` was overtaken; None if it is the newest still."""
    ledger = ledger_for(connection)
    newest = ledger.newest(connection, grant.name)
    if newest == (grant.token, grant.owner):
        return None
    if newest is None:
        return Overtaken("its fence is gone")
    token, owner = newest
    why = f"the newest token is {token}"
    row = ledger.look(connection, grant.name)
    if row is not None and row.owner == owner:
        holder = row.holder()
        return Overtaken(f"{why}, granted to {holder}", holder)
    note = notes(connection, [grant.owner]).get(grant.owner)
    return Overtaken(f"{why}: {note}" if note else why)


#: Seconds to wait for a fence that a transaction has locked. (On MySQL, one.)
RESYNC_PATIENCE = 2

# No lease has the owner "", so none has the newest grant any more, whatever its
# token. A grant in between has raised the token by itself, and isn't touched if that was enough.
_LIFT = f"""
UPDATE {FENCE} SET token = %(token)s, owner = '' WHERE name = %(name)s AND token < %(highest)s
"""
_MAKE_WITH_TOKEN = f"INSERT INTO {FENCE} (name, token, owner) VALUES (%(name)s, %(token)s, '')"


def too_low(connection: BaseDatabaseWrapper, highest: Mapping[str, int]) -> dict[str, int | None]:
    """The names whose fence is below the token given for it, with its own; None if it is gone."""
    tokens = _tokens(connection, list(highest))
    return {
        name: tokens.get(name)
        for name in highest
        if name not in tokens or tokens[name] < highest[name]
    }


def _tokens(connection: BaseDatabaseWrapper, names: Sequence[str]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    with connection.cursor() as cursor:
        for start in range(0, len(names), BATCH):
            inside, given = listed("n", names[start:][:BATCH])
            cursor.execute(f"SELECT name, token FROM {FENCE} WHERE name IN ({inside})", given)
            tokens |= dict(cursor.fetchall())
    return tokens


def lift(connection: BaseDatabaseWrapper, highest: Mapping[str, int]) -> None:
    """
    Raise the fences of some names above the tokens given, unless they are by now.

    All of them or none. Raises an ``IntegrityError`` if one that was gone was made meanwhile, and
    what `Ledger.is_row_locked()` knows if one is locked.
    """
    low = too_low(connection, highest)
    ledger = ledger_for(connection)
    with ledger.transaction(connection) as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_DURABLE.format(RESYNC_PATIENCE))
        # In the order of their names: two processes would wait for each other otherwise.
        for name in sorted(low):
            given = {"name": name, "highest": highest[name], "token": highest[name] + 1}
            cursor.execute(_MAKE_WITH_TOKEN if low[name] is None else _LIFT, given)


#: Seconds for finding it out.
BRIEFLY = 2.0


def tables_locked_by(using: str) -> str:
    """Describe the session that has a table locked; empty if none has, or if it is unknown."""
    return _described(using, lambda own: ledger_for(own).tables_locked_by(own))


def pinned_by(using: str, name: str) -> str:
    """Describe the open transaction that has a fence locked; empty if none, or if unknown."""
    return _described(using, lambda own: ledger_for(own).pinned_by(own, name))


def _described(using: str, ask: Callable[[BaseDatabaseWrapper], str | None]) -> str:
    try:
        return query_outside(using, BRIEFLY, ask) or ""
    except Error:
        logger.debug("It is unknown which session is in the way", exc_info=True)
        return ""


def named(error: Error, using: str) -> Error:
    """The same error, with who is to blame for it, if it is about an answer that didn't come."""
    if isinstance(error, NoAnswer) and (blocker := tables_locked_by(using)):
        return NoAnswer(error.seconds, blocker)
    return error
