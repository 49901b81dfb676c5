"""The fences: recorded, checked by writers, raised by forced releases and `resync`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, Exists, Expression, F, OuterRef, Q, Value
from django.db.models.functions import Greatest
from django.db.models.sql.compiler import SQLCompiler

from ..backends.interface import SHARED, Grant
from ..conf import AliasConfig
from ..core.identity import Holder
from .connections import SQLITE_BUSY_TIMEOUT, pool, test_connection, time_limited
from .dialect import BATCH, FENCE, Claimed, Newest, Row, as_time, entry_of
from .readers import SharedLedger
from .records import Records, ServerTime, durable, fetch, insert, private_query, rows_of
from .text import fit_column
from .vendors import LEDGERS

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Fences:
    """The fences and the registry of one alias, for locks that another service excludes."""

    def __init__(self, config: AliasConfig, label: str, timeout: float | None = None) -> None:
        self._config, self._label = config, label
        self._timeout = config.timeout if timeout is None else timeout

    def record(self, claim: Claimed, token: int, seen: Newest | None = None) -> bool:
        """Record a grant; see `Ledger.record()`."""
        entry = entry_of(claim, self._config.alias, self._label)
        return self._run(lambda ledger, used: ledger.record(used, entry, token, seen))

    def record_all(self, grants: Sequence[Grant]) -> set[str]:
        """Record a set of grants, each with its own token; see `SetLedger.record_all()`."""
        known = [
            (entry_of(grant, self._config.alias, self._label), grant.token)
            for grant in grants
            if grant.token is not None and not grant.shared
        ]
        return self._run(lambda ledger, used: ledger.record_all(used, known)) if known else set()

    def read(self, name: str) -> tuple[Row | None, Newest]:
        """Read a name's row of the registry, and its fence."""
        return self._run(
            lambda ledger, used: (ledger.look(used, name), ledger.newest(used, name) or (0, ""))
        )

    def read_all(self, name: str) -> tuple[list[Row], Newest]:
        """Read all rows of a name, of which each reader has one, and its fence."""
        return self._run(
            lambda ledger, used: (
                ledger.all_rows(used, [name]).get(name, []),
                ledger.newest(used, name) or (0, ""),
            )
        )

    def renew(self, grants: Sequence[Grant]) -> list[Grant]:
        """Renew the rows of grants; return those that a newer grant came after."""

        def renew(ledger: SharedLedger, used: BaseDatabaseWrapper) -> list[Grant]:
            kept = ledger.renew(used, grants)
            gone = ledger.missing(used, grants, kept)
            with ledger.cursor(used) as cursor:
                newest = ledger.read_fences(cursor, [grant.name for grant in grants])
            overtaken = []
            for grant in grants:
                found = newest.get(grant.name, (0, ""))
                is_newest = found == (grant.token, grant.fence_owner)
                # A writer's grant leaves the rows of readers, and theirs that of a writer. Without
                # an owner it was raised, as by the forced release of another reader.
                other_kind = found[1] not in ("", grant.fence_owner)
                if other_kind or (grant.owner in gone and not is_newest):
                    overtaken.append(grant)
                elif grant.owner in gone:
                    # Only its row is missing.
                    entry = entry_of(grant, self._config.alias, self._label)
                    ledger.claim(used, entry, draw=False)
            return overtaken

        return self._run(renew, SQLITE_BUSY_TIMEOUT)

    def clear(self, held: Sequence[Claimed]) -> None:
        """Delete rows by their owners."""
        self._run(lambda ledger, used: ledger.clear(used, held))

    def is_row_locked(self, error: Error) -> bool:
        """Return whether a statement gave up because another session has a row locked."""
        return LEDGERS[connections[self._config.fence_database].vendor].is_row_locked(error)

    def _run(
        self, work: Callable[[SharedLedger, BaseDatabaseWrapper], T], patience: float | None = None
    ) -> T:
        sessions = pool(self._config.fence_database, self._timeout)
        return sessions.run(lambda used: work(LEDGERS[used.vendor], used), busy_timeout=patience)


#: How each vendor locks a row that it reads, so that others may read and lock it, but not write.
#: Without it a newer grant could commit between the check and the writer's commit.
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
    #: In the fence: see `Grant.fence_owner`.
    owner: str
    alias: str
    #: For how long a silent transaction may keep the next grant waiting, in seconds.
    patience: float


def pin_sql(connection: BaseDatabaseWrapper, grant: WriteGrant) -> tuple[str, list[Any]]:
    """A SELECT that locks the fence's row and is true, if `grant` is the newest of its name."""
    value, given = _patience(connection, grant.patience)
    where = f"name = %s AND token = %s AND owner = %s{SHARE[connection.vendor]}"
    return f"SELECT {value} FROM {FENCE} WHERE {where}", [*given, *grant[:3]]


def pins_sql(
    connection: BaseDatabaseWrapper, grants: Sequence[WriteGrant]
) -> Iterator[tuple[str, list[Any]]]:
    """SELECTs that lock the fences' rows in the order of their names, and return the grants."""
    value, given = _patience(connection, min(grant.patience for grant in grants))
    for start in range(0, len(grants), BATCH):
        part = grants[start : start + BATCH]
        marks = ", ".join(["%s"] * len(part))
        where = f"name IN ({marks}) AND owner IN ({marks})"
        yield (
            f"SELECT name, token, owner, {value} FROM {FENCE} WHERE {where} "
            f"ORDER BY name{SHARE[connection.vendor]}",
            [*given, *(each.name for each in part), *(each.owner for each in part)],
        )


def _patience(connection: BaseDatabaseWrapper, seconds: float) -> tuple[str, list[str]]:
    """Return an expression that limits how long the open transaction may be silent."""
    if connection.vendor != "postgresql" or connection.get_autocommit():
        return "true", []
    return _BE_PATIENT, [f"{min(max(1, round(seconds * 1000)), _LONGEST)}ms"] * 2


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
    return not not_newest(using, [grant])


def not_newest(using: str, grants: Sequence[WriteGrant]) -> list[WriteGrant]:
    """Lock the fences of grants until the transaction ends; return those that aren't the newest."""
    connection = connections[using]
    found: set[tuple[str, int, str]] = set()
    with connection.cursor() as cursor:
        # In one order: a grant waits for one of these fences while it has locked others.
        for select, given in pins_sql(connection, sorted(grants)):
            cursor.execute(select, given)
            found.update(row[:3] for row in cursor.fetchall())
    return [grant for grant in grants if grant[:3] not in found]


#: Seconds that a note is kept, and longer while its holder still has a row.
KEPT = 14 * 24 * 3600.0
#: Seconds that a forced release and a resync wait for a fence that is locked. (On MySQL, one.)
PATIENCE, RESYNC_PATIENCE = 0.5, 2.0
#: Seconds to find out whether a lock was released by force, or which session is in the way.
BRIEFLY = 2.0

FORCED = "django_fencedlock_forcedrelease"
#: Whether a lock was released by force, as a condition on its owner id.
IS_FORCED = f"EXISTS (SELECT 1 FROM {FORCED} r WHERE r.owner = {{owner}})"


class Note(NamedTuple):
    """Who released a lock by force, and when."""

    by: str
    at: datetime

    def __str__(self) -> str:
        return f"it was released by force, by {self.by}, at {self.at:%Y-%m-%d %H:%M:%S %Z}"


class Revoked(NamedTuple):
    """What became of a holder's grant."""

    #: The fence's, which is above the holder's; None if the lock wasn't fenced.
    token: int | None
    note: Note
    #: Whether it was done by this call.
    is_new: bool
    #: Another grant was recorded since the fence was read, so it wasn't raised.
    is_overtaken: bool = False


class Revoking(Records):
    """The forced releases of one alias."""

    @private_query("force the release")
    def revoke(
        self,
        held: Grant,
        by: str,
        *,
        proposed: int | None,
        seen: Newest | None = None,
        again: bool = False,
        others: Sequence[str] = (),
    ) -> Revoked:
        """
        Raise the fence above every grant of the owner, and note who did it; twice, if `again`.

        The owner may be about to record the token `proposed` by its service, or the number after
        the fence `seen`: read before the service named the owner, or set by the first raise.
        `others` are the owner ids of further readers, which share the first one's grant.
        """
        with durable(self.using, PATIENCE):
            noted = notes(self.using, [held.owner, *others])
            note = noted.get(held.owner)
            # Done before: a second forced release raises nothing, unless the holder came back.
            last = seen if note is None or again else None
            is_raised = held.fenced and self._raise(held, proposed or 0, last or (-1, ""))
            is_new = is_raised
            by = fit_column(connections[self.using], by, 200)
            values = {"name": held.name, "released_by": by, "released_at": ServerTime()}
            for owner in {held.owner, *others}.difference(noted):
                added = insert(self.using, "ForcedRelease", owner=owner, **values)
                is_new = is_new or added is not None
            note = note or notes(self.using, [held.owner])[held.owner]
            fences = rows_of("Fence", self.using).filter(name=held.name)
            found = fetch(fences, "token", "owner") if held.fenced else []
            newest = (found[0].token, found[0].owner) if found else None
            is_overtaken = not is_raised and newest not in (None, seen)
            return Revoked(newest and newest[0], note, is_new, is_overtaken)

    def _raise(self, held: Grant, proposed: int, last: Newest) -> bool:
        below = Q(owner=held.fence_owner) | Q(token__lt=proposed) | Q(token=last[0], owner=last[1])
        token = Greatest("token", Value(proposed)) + 1
        return _raise_or_make(self.using, held.name, below, token, proposed and proposed + 1)

    def forget(self) -> int:
        """Delete some of the notes that are no longer needed; return how many."""
        # Not while its holder may return: only the note ends a session lock.
        held = self.rows("HeldLock").filter(owner=OuterRef("owner"))
        old = self.rows("ForcedRelease").filter(~Exists(held), released_at__lt=ServerTime(-KEPT))
        return self.delete("delete old forced releases", old, 1)


def _raise_or_make(using: str, name: str, below: Q, token: Any, first: int) -> bool:
    """Raise a fence that is `below`, or make a missing one with token `first`, unless that is 0."""
    # No lease has the owner "", so none has the newest grant any more, whatever its token.
    low = rows_of("Fence", using).filter(below, name=name)
    return bool(
        low.update(token=token, owner="")
        or (first and insert(using, "Fence", name=name, token=first, owner=""))
        # Another transaction may have made it at this very moment.
        or (first and low.update(token=token, owner=""))
    )


def notes(using: str, owners: Sequence[str]) -> dict[str, Note]:
    """Return the notes, by owner id, of the owners whose lock was released by force."""
    rows = rows_of("ForcedRelease", using).filter(owner__in=owners)
    found = fetch(rows, "owner", "released_by", "released_at") if owners else []
    connection = connections[using]
    return {row.owner: Note(row.released_by, as_time(row.released_at, connection)) for row in found}


def told(using: str, owners: Sequence[str]) -> dict[str, str]:
    """Return, by owner id, who released the lock by force, as far as it is known."""
    try:
        with time_limited(using, BRIEFLY):
            found = notes(using, owners)
    except (Error, LookupError):
        # The loss itself is known; and projects with unfenced locks alone need no tables.
        logger.debug("It is unknown whether locks were released by force", exc_info=True)
        return {}
    return {owner: str(note) for owner, note in found.items()}


def overtaken(
    connection: BaseDatabaseWrapper, grant: WriteGrant, owner_id: str = ""
) -> tuple[str, Holder | None] | None:
    """
    Return why `grant` isn't the newest, and the holder of the newest; None if it is.

    Args:
        owner_id: The holder's: in the fence, all readers have the same owner.
    """
    ledger = LEDGERS[connection.vendor]
    newest = ledger.newest(connection, grant.name)
    if newest == (grant.token, grant.owner):
        return None
    if newest is None:
        return "its fence is gone", None
    token, owner = newest
    why = f"the newest token is {token}"
    row = ledger.look(connection, grant.name)
    if row is not None and row.token == token:
        holder = row.holder()
        return f"{why}, granted to {holder}", holder
    released = owner_id or grant.owner
    note = notes(connection.alias, [released]).get(released)
    if note is None and grant.owner == SHARED and not owner:
        return f"{why}: it was raised, as by the forced release of another reader", None
    return f"{why}: {note}" if note else why, None


def too_low(using: str, highest: Mapping[str, int]) -> dict[str, int]:
    """Return those of the given tokens, by name, that are above the name's fence."""
    tokens = rows_of("Fence", using).filter(name__in=list(highest))
    found = {row.name: row.token for row in fetch(tokens, "name", "token")}
    return {name: token for name, token in highest.items() if found.get(name, -1) < token}


def lift(using: str, highest: Mapping[str, int]) -> None:
    """Raise all the names' fences above the tokens given, unless they are by now; or none."""
    with durable(using, RESYNC_PATIENCE):
        # In the order of their names: two processes would wait for each other otherwise.
        for name, token in sorted(highest.items()):
            _raise_or_make(using, name, Q(token__lt=token), token + 1, token + 1)


def raise_fence(using: str, name: str, seen: Newest) -> bool:
    """Raise a fence if the newest grant is still the one that was read; return whether it was."""
    with durable(using, RESYNC_PATIENCE):
        rows = rows_of("Fence", using).filter(name=name, token=seen[0], owner=seen[1])
        return bool(rows.update(token=F("token") + 1, owner=""))


def pinned_by(using: str, name: str, seconds: float = BRIEFLY) -> str:
    """Describe the transaction that a name's next grant waits for; empty if none, or unknown."""
    # A test's own transaction would seem to be one.
    if test_connection(using) is not None:
        return ""
    try:
        with time_limited(using, seconds):
            own = connections[using]
            ledger = LEDGERS[own.vendor]
            if (blocker := ledger.pinned_by(own, name)) is None:
                return ""
            row = ledger.look(own, name)
    except Error:
        logger.debug("It is unknown which session is in the way", exc_info=True)
        return ""
    return blocker if row is None or row.live else f"{blocker}; its last holder was {row.holder()}"
