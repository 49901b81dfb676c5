"""The SQL of the fences and the registry, in the dialect of SQLite; others change parts of it."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from ..backends.interface import SHARED, Claim, Grant
from ..core.identity import Holder, Owner
from .connections import CURSOR, set_busy_timeout

#: Milliseconds that a recording waits for a row that another transaction has locked.
LOCK_WAIT = 250

#: The token and the owner of a name's newest grant; (0, "") if there is none.
Newest = tuple[int, str]
#: What the registry has a row of.
Claimed = Claim | Grant

# The tables of models, which can't be imported here: Django may not have loaded its apps yet.
FENCE, HELD = "django_fencedlock_fence", "django_fencedlock_heldlock"


def new_id() -> int:
    """Return the key of a new row, at random."""
    # MariaDB's AUTO_INCREMENT locks the table until the end of an INSERT ... SELECT, which may wait
    # for a row. And a program may seed `random` alike in each of its processes.
    return int.from_bytes(os.urandom(8), "big") >> 1


# Each lock makes one, and a frozen one takes five times as long to make.
@dataclass(slots=True)
class Entry:
    """A row of the registry, less its times, which are the server's."""

    name: str
    alias: str
    backend: str
    owner: Owner
    ttl: float
    fenced: bool = True
    session_pid: int | None = None
    session_started: datetime | None = None
    session_key: int | None = None
    permits: int | None = None
    shared: bool = False

    @property
    def slot(self) -> str:
        """Which of the rows of the name: each reader has one of its own."""
        return self.owner.id if self.shared else ""

    @property
    def fence_owner(self) -> str:
        """The owner in the fence: all readers have one."""
        return SHARED if self.shared else self.owner.id

    def values(self) -> dict[str, Any]:
        """The values of `COLUMNS`, by column."""
        lock = (new_id(), self.name, self.slot, self.alias, self.backend, self.fenced)
        session = (self.session_pid, self.session_started, self.session_key)
        return dict(zip(COLUMNS, (*lock, *self.owner, *session, self.permits), strict=True))


_LOCK = ("name", "alias", "backend", "fenced", "owner", *Owner._fields[1:])
#: What an update of a row leaves as it is.
KEY = ("id", "name", "slot")
COLUMNS = (*KEY, *_LOCK[1:], "session_pid", "session_started", "session_key", "permits")
TIME_COLUMNS = ("acquired_at", "renewed_at", "expires_at")
#: The columns that an update of a row sets.
UPDATED = (*COLUMNS[len(KEY) :], *TIME_COLUMNS)
CLEAR = f"DELETE FROM {HELD} WHERE name = %(name)s AND owner = %(owner)s"
VALUES = ", ".join(f"%({column})s" for column in COLUMNS)
INTO_HELD = f"{HELD} ({', '.join((*COLUMNS, *TIME_COLUMNS))})"


class Row(NamedTuple):
    """What the registry says of a name."""

    alias: str
    backend: str
    fenced: bool
    owner: Owner
    token: int | None
    acquired_at: datetime
    expires_at: datetime
    #: The time of the database when the row was read.
    read_at: datetime
    #: Whether it is a reader's; the name may have several then.
    shared: bool = False

    @property
    def live(self) -> bool:
        return self.expires_at > self.read_at

    def holder(self) -> Holder:
        return Holder(
            owner_id=self.owner.id,
            description=str(self.owner),
            alias=self.alias,
            token=self.token,
            acquired_at=self.acquired_at,
            expires_at=self.expires_at,
            shared=self.shared,
        )

    def conflicts_with(self, alias: str, backend: str) -> bool:
        """Whether the name is live at another lock service."""
        return self.live and (self.alias, self.backend) != (alias, backend)


def entry_of(claim: Claimed, alias: str, label: str) -> Entry:
    """Return the row of the registry that a claim's grant has."""
    owner = Owner.read(claim.owner, claim.identity)
    entry = Entry(claim.name, alias, label, owner, claim.ttl, claim.fenced)
    entry.permits, entry.shared = claim.permits, claim.shared
    return entry


def machine_time() -> datetime:
    """The time by which rows expire on SQLite, which has no clock of its own."""
    return datetime.now(UTC)


def utc_text(moment: datetime) -> str:
    """A time as SQLite, MariaDB and MySQL store it: in UTC, since local time repeats an hour."""
    return str(moment.astimezone(UTC).replace(tzinfo=None))


def as_time(value: Any, connection: BaseDatabaseWrapper) -> datetime:
    """The time, in UTC, that a driver or Django read from a table."""
    found = parse_datetime(value) if isinstance(value, str) else value
    assert isinstance(found, datetime)
    if connection.vendor != "postgresql":
        # It is stored in UTC. Django takes it for local time if the database has a TIME_ZONE.
        return found.replace(tzinfo=UTC)
    if timezone.is_naive(found):
        # With USE_TZ = False, Django cuts the zone off.
        found = found.replace(tzinfo=ZoneInfo(connection.timezone_name))
    return found.astimezone(UTC)


class Ledger:
    """
    Reads and writes the fences and the registry on SQLite; the base of the other dialects.

    Each call is one short transaction of its own, or a part of the one that a test lends.
    """

    #: The server's time in UTC, as an expression; and that time plus a ttl. See `times()`.
    clock, expiry = "%(now)s", "%(expiry)s"
    #: How a transaction of our own begins.
    begin = "BEGIN IMMEDIATE"
    #: An INSERT that does nothing if the name is there, and its values.
    insert_or_ignore, if_absent = "INSERT OR IGNORE", "VALUES ({})"
    #: What makes a SELECT lock its rows; and pass over those that are locked.
    lock_rows = lock_free_rows = ""

    def claim(
        self, connection: BaseDatabaseWrapper, entry: Entry, *, draw: bool = True
    ) -> tuple[bool, int | None]:
        """
        Take the name's row if it is free, expired or this owner's, and draw a token if fenced.

        Return whether the row was taken, and the token. Without `draw`, the fence is left alone.
        """
        with self.claiming(connection) as cursor:
            given = self.parameters(connection, entry)
            # An expired row, or one of this owner.
            mine = f" AND (expires_at <= {self.clock} OR owner = %(owner)s)"
            if not self._insert(cursor, given) and not self._overwrite(cursor, given, mine):
                return False, None
            if not (entry.fenced and draw):
                return True, None
            token = self._draw(connection, cursor, given)
            return token is not None, token

    def claiming(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[Any]:
        """A cursor for the statements of a claim."""
        return self.transaction(connection)

    def _draw(
        self, connection: BaseDatabaseWrapper, cursor: Any, given: dict[str, Any]
    ) -> int | None:
        # Raises the fence by one, unless this owner did so before.
        draw = (
            f"INSERT INTO {FENCE} (name, token, owner) VALUES (%(name)s, 1, %(owner)s) "
            "ON CONFLICT (name) DO UPDATE SET token = token + (owner <> excluded.owner), "
            "owner = excluded.owner"
        )
        # RETURNING came with SQLite 3.35.
        if connection.features.can_return_columns_from_insert:
            cursor.execute(f"{draw} RETURNING token", given)
        else:
            cursor.execute(draw, given)
            cursor.execute(f"SELECT token FROM {FENCE} WHERE name = %(name)s", given)
        return int(cursor.fetchone()[0])

    def is_row_locked(self, error: Error) -> bool:
        """Return whether a statement failed because a row (or SQLite's file) is locked."""
        # "database is locked", or "database table is locked" with a shared cache.
        return "is locked" in str(error)

    def rolls_back(self, connection: BaseDatabaseWrapper, error: Error) -> bool:
        """Whether the database rolled the whole transaction back because of a statement."""
        # A full disk, an interrupt, or OR ROLLBACK in a statement.
        return not connection.connection.in_transaction

    def pinned_by(self, connection: BaseDatabaseWrapper, name: str) -> str | None:
        """Describe the transaction that the next grant of a name has to wait for; None if none."""
        row = self.look(connection, name)
        if row is not None and row.live:
            return None
        set_busy_timeout(connection, 0)
        try:
            with self.transaction(connection):
                return None
        except Error as exc:
            if self.is_row_locked(exc):
                # Maybe under another lock: SQLite has one writer at a time.
                return "a transaction that writes to SQLite's file"
            raise

    def tables_locked_by(self, connection: BaseDatabaseWrapper) -> str | None:
        """Describe the session that has a table of the package locked, if it is known."""
        return None

    @contextlib.contextmanager
    def transaction(self, connection: BaseDatabaseWrapper) -> Iterator[Any]:
        """Open a transaction; within a test's own, a part of that."""
        with self.cursor(connection) as cursor:
            if connection.in_atomic_block:
                yield cursor
                return
            cursor.execute(self.begin)
            try:
                yield cursor
                cursor.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(Error):
                    cursor.execute("ROLLBACK")
                raise

    def cursor(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[Any]:
        """A cursor for the statements of each lock, which name their parameters."""
        kept = getattr(connection, CURSOR, None)
        return connection.cursor() if kept is None else contextlib.nullcontext(kept)

    def look(self, connection: BaseDatabaseWrapper, name: str) -> Row | None:
        """Read the name's row and the token of its owner."""
        return self.look_at(connection, [name]).get(name)

    def look_at(self, connection: BaseDatabaseWrapper, names: Sequence[str]) -> dict[str, Row]:
        """Read a row of each of many names: of several, one that is live."""
        found = self.all_rows(connection, names)
        return {name: max(rows, key=lambda row: row.live) for name, rows in found.items()}

    def all_rows(
        self, connection: BaseDatabaseWrapper, names: Sequence[str]
    ) -> dict[str, list[Row]]:
        """Read all rows of many names: each reader has one of its own."""
        rows: defaultdict[str, list[Row]] = defaultdict(list)
        with self.cursor(connection) as cursor:
            for start in range(0, len(names), BATCH):
                inside, given = listed("n", names[start:][:BATCH])
                cursor.execute(
                    f"SELECT {', '.join(f'h.{column}' for column in _LOCK)}, "
                    f"h.slot, f.token, h.acquired_at, h.expires_at, {self.clock} FROM {HELD} h "
                    f"LEFT JOIN {FENCE} f ON f.name = h.name "
                    f"AND f.owner = CASE WHEN h.slot = '' THEN h.owner ELSE '{SHARED}' END "
                    f"WHERE h.name IN ({inside}) AND h.owner <> '{SHARED}' "
                    "ORDER BY h.acquired_at, h.owner",
                    {**given, **self.times()},
                )
                for name, *lock, slot, token, acquired, expires, now in cursor.fetchall():
                    times = (as_time(each, connection) for each in (acquired, expires, now))
                    found = (*lock[:3], Owner(*lock[3:]), token, *times, slot != "")
                    rows[name].append(Row._make(found))
        return rows

    def now(self, connection: BaseDatabaseWrapper) -> datetime:
        """The time by which rows of the registry expire."""
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {self.clock}", self.times())
            return as_time(cursor.fetchone()[0], connection)

    def newest(self, connection: BaseDatabaseWrapper, name: str) -> tuple[int, str] | None:
        """The token and owner of the newest grant."""
        with self.cursor(connection) as cursor:
            cursor.execute(
                f"SELECT token, owner FROM {FENCE} WHERE name = %(name)s", {"name": name}
            )
            found = cursor.fetchone()
        return found and tuple(found)

    def clear(self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed]) -> int:
        """Delete rows by their owners; return how many there were."""
        with self.cursor(connection) as cursor:
            if len(leases) == 1:
                cursor.execute(CLEAR, {"name": leases[0].name, "owner": leases[0].owner})
                return int(cursor.rowcount)
            cleared = 0
            for where, given in batches(leases):
                cursor.execute(f"DELETE FROM {HELD} WHERE {where}", given)
                cleared += cursor.rowcount
            return cleared

    def missing(
        self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed], kept: Collection[str] = ()
    ) -> set[str]:
        """Return the owners, other than those `kept`, whose rows are gone or another owner's."""
        rest = [lease for lease in leases if lease.owner not in kept]
        if not rest:
            return set()
        with self.cursor(connection) as cursor:
            return {lease.owner for lease in rest} - self._owners(cursor, rest)

    def record(
        self, connection: BaseDatabaseWrapper, entry: Entry, token: int, seen: Newest | None = None
    ) -> bool:
        """
        Record a grant and its row of the registry, if the token is newer than the fence's.

        False too if the name is live at another service, or the fence isn't the one `seen`.
        """
        with self.transaction(connection) as cursor:
            given = {**self.parameters(connection, entry), "token": token, **seen_values(seen)}
            cursor.execute(
                f"SELECT 1 FROM {HELD} WHERE name = %(name)s AND expires_at > {self.clock} "
                f"AND (alias <> %(alias)s OR backend <> %(backend)s) AND owner <> '{SHARED}'",
                given,
            )
            if cursor.fetchone() is not None:
                return False
            if seen == (token, SHARED):
                if self.newest(connection, entry.name) != seen:
                    return False
            elif not self._raise_fence(cursor, given):
                return False
            if not self._insert(cursor, given):
                self._overwrite(cursor, given)
            return True

    def renew(self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed]) -> set[str]:
        """Renew rows by their owners, except locked ones. Return the owners."""
        # At first without the rows that another session has locked: it may be waiting as well.
        kept = self._renew(connection, leases, self.lock_free_rows)
        locked = [lease for lease in leases if lease.owner not in kept]
        if locked and self.lock_rows:
            # Or gone. A lock on a row lasts for a moment, most likely.
            try:
                kept |= self._renew(connection, locked, self.lock_rows)
            except Error as exc:
                if not self.is_row_locked(exc):
                    raise
                kept |= self._renew(connection, locked, self.lock_free_rows)
        return kept

    def _renew(
        self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed], lock: str
    ) -> set[str]:
        kept: set[str] = set()
        with self.transaction(connection) as cursor:
            for ttl in {lease.ttl for lease in leases}:
                mine = [lease for lease in leases if lease.ttl == ttl]
                free = self._owners(cursor, mine, lock)
                times = self.times(ttl)
                for where, given in batches([each for each in mine if each.owner in free]):
                    cursor.execute(
                        f"UPDATE {HELD} SET renewed_at = {self.clock}, expires_at = {self.expiry} "
                        f"WHERE {where}",
                        {**given, **times},
                    )
                kept |= free
        return kept

    def values(self, connection: BaseDatabaseWrapper, entry: Entry) -> dict[str, Any]:
        """The values of a row, as the columns can store them."""
        return entry.values()

    def times(self, ttl: float = 0.0) -> dict[str, Any]:
        """The parameters of `clock` and `expiry`. SQLite's are read after BEGIN, which may wait."""
        now = machine_time()
        return {"now": utc_text(now), "expiry": utc_text(now + timedelta(seconds=ttl))}

    def parameters(self, connection: BaseDatabaseWrapper, entry: Entry) -> dict[str, Any]:
        given = self.values(connection, entry)
        given.update(self.times(entry.ttl), fence_owner=entry.fence_owner)
        return given

    def _raise_fence(self, cursor: Any, given: dict[str, Any]) -> bool:
        """Make the proposed token the newest; False if it isn't newer, or the fence has changed."""
        # Two statements: MySQL can't tell an inserted row from one that was left as it was.
        as_seen = "" if given["seen"] is None else " AND token = %(seen)s AND owner = %(writer)s"
        cursor.execute(
            f"UPDATE {FENCE} SET token = %(token)s, owner = %(fence_owner)s "
            f"WHERE name = %(name)s AND token < %(token)s{as_seen}",
            given,
        )
        if cursor.rowcount:
            return True
        cursor.execute(
            f"{self.insert_or_ignore} INTO {FENCE} (name, token, owner) "
            "VALUES (%(name)s, %(token)s, %(fence_owner)s)",
            given,
        )
        return bool(cursor.rowcount)

    def _owners(self, cursor: Any, leases: Sequence[Claimed], lock: str = "") -> set[str]:
        """Return the owners of those whose rows are there, and lock these rows with `lock`."""
        found: set[str] = set()
        for where, given in batches(leases):
            cursor.execute(f"SELECT owner FROM {HELD} WHERE {where}{lock}", given)
            found.update(owner for (owner,) in cursor.fetchall())
        return found

    def _insert(self, cursor: Any, given: dict[str, Any]) -> bool:
        cursor.execute(self._insertion, given)
        return bool(cursor.rowcount)

    @cached_property
    def _insertion(self) -> str:
        values = f"{VALUES}, {self.clock}, {self.clock}, {self.expiry}"
        return f"{self.insert_or_ignore} INTO {INTO_HELD} {self.if_absent.format(values)}"

    def _overwrite(self, cursor: Any, given: dict[str, Any], condition: str = "") -> bool:
        columns = ", ".join(f"{column} = %({column})s" for column in COLUMNS[len(KEY) :])
        cursor.execute(
            f"UPDATE {HELD} SET {columns}, acquired_at = {self.clock}, renewed_at = {self.clock}, "
            f"expires_at = {self.expiry} WHERE name = %(name)s AND slot = %(slot)s{condition}",
            given,
        )
        return bool(cursor.rowcount)


def find_pin(ledger: Ledger, connection: BaseDatabaseWrapper, name: str) -> str | None:
    """Do what `Ledger.pinned_by()` does, on a server that doesn't name the session."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT 1 FROM {FENCE} WHERE name = %s FOR UPDATE NOWAIT", [name])
    except Error as exc:
        if ledger.is_row_locked(exc):
            return "an open transaction"
        raise
    return None


#: Rows of one statement. Databases limit its parameters; SQLite's limit was 999 for long.
BATCH = 400


def listed(prefix: str, values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """The inside of an IN (...), and its parameters."""
    given = {f"{prefix}{place}": value for place, value in enumerate(values)}
    return ", ".join(f"%({key})s" for key in given), given


def batches(leases: Sequence[Claimed]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cut `leases` into conditions of statements, with their parameters."""
    # An owner holds one name only, so no wrong pair of the two lists is ever found.
    for start in range(0, len(leases), BATCH):
        part = leases[start : start + BATCH]
        names, given = listed("n", [lease.name for lease in part])
        owners, more = listed("o", [lease.owner for lease in part])
        # The slots, because InnoDB locks the rows that an index leads to, other readers' as well.
        yield f"name IN ({names}) AND slot IN ('', {owners}) AND owner IN ({owners})", given | more


def seen_values(seen: Newest | None) -> dict[str, Any]:
    """The parameters that a record compares the fence with."""
    token, owner = seen or (None, None)
    return {"seen": token, "writer": owner}
