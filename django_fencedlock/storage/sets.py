"""The statements for a set of locks: all rows of it are written by a few statements, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..backends.interface import SHARED
from .dialect import (
    COLUMNS,
    FENCE,
    HELD,
    TIME_COLUMNS,
    UPDATED,
    Claimed,
    Entry,
    Ledger,
    Newest,
    batches,
    listed,
)

#: The columns that differ within a set. An entry has further ones, which the whole set shares:
#: one call has one holder.
OF_EACH = ("id", "name", "owner", "permits")
#: Rows of one statement: more would exceed the number of parameters of older SQLite.
PART = 200


class SetLedger(Ledger):
    """
    Claims and records several names at once, on SQLite; the base of the other dialects.

    The entries of a set have different names, in the order of their bytes, and one holder. Rows
    are locked in that order, those of the registry first: two sets don't wait for each other.
    """

    #: The part of an upsert before its assignments, and the value that was rejected.
    on_conflict, rejected = "ON CONFLICT ({key}) DO UPDATE SET", "excluded.{column}"

    def claim_all(
        self, connection: BaseDatabaseWrapper, entries: Sequence[Entry]
    ) -> list[int | None] | None:
        """
        Take the rows of all names, and draw a token for each if fenced; or take none.

        Return the tokens, in the order of the entries; None if a name isn't free. A statement that
        is repeated gives the same tokens.
        """
        # The transaction is rolled back if another session inserts a row after the look.
        with self.transaction(connection) as cursor:
            rows = self._lock_rows(cursor, entries)
            own = {entry.name: entry.owner.id for entry in entries}
            if any(live and owner != own[name] for name, (owner, live) in rows.items()):
                return None
            new = [entry for entry in entries if entry.name not in rows]
            self._write_rows(connection, cursor, new)
            old = [entry for entry in entries if entry.name in rows]
            self._write_rows(connection, cursor, old, overwrite=True)
            if not entries[0].fenced:
                return [None] * len(entries)
            tokens = self._draw_all(cursor, entries)
            return [tokens[entry.name] for entry in entries]

    def record_all(
        self, connection: BaseDatabaseWrapper, grants: Sequence[tuple[Entry, int]]
    ) -> set[str]:
        """
        Record those of many grants whose token is newer than their fence's; return their names.

        Those that are live at another service are left out as well.
        """
        with self.transaction(connection) as cursor:
            entries = [entry for entry, _ in grants]
            elsewhere = self._live_elsewhere(cursor, entries)
            wanted = [(entry, token) for entry, token in grants if entry.name not in elsewhere]
            self._raise_fences(cursor, wanted)
            newest = self.read_fences(cursor, [entry.name for entry, _ in wanted])
            done = [
                entry for entry, token in wanted if newest[entry.name] == (token, entry.owner.id)
            ]
            self._write_rows(connection, cursor, done, overwrite=True)
            return {entry.name for entry in done}

    def clear_all(self, connection: BaseDatabaseWrapper, leases: Sequence[Claimed]) -> set[str]:
        """Delete rows by their owners; return the owners of those that were there."""
        cleared: set[str] = set()
        # MySQL can't return the rows that it deletes.
        returns = connection.features.can_return_columns_from_insert
        with self.cursor(connection) if returns else self.transaction(connection) as cursor:
            for where, given in batches(leases):
                if not returns:
                    cleared |= self._owners(cursor, leases, self.lock_rows)
                cursor.execute(
                    f"DELETE FROM {HELD} WHERE {where}{' RETURNING owner' if returns else ''}",
                    given,
                )
                if returns:
                    cleared.update(owner for (owner,) in cursor.fetchall())
        return cleared

    def _lock_rows(self, cursor: Any, entries: Sequence[Entry]) -> dict[str, tuple[str, bool]]:
        """Lock the rows that are there; return the owner of each, and whether it is live."""
        found: dict[str, tuple[str, bool]] = {}
        for part in parts(entries):
            inside, given = listed("n", [entry.name for entry in part])
            cursor.execute(
                f"SELECT name, owner, expires_at > {self.clock} FROM {HELD} "
                f"WHERE name IN ({inside}) AND slot = '' ORDER BY name{self.lock_rows}",
                {**given, **self.times()},
            )
            found.update((name, (owner, bool(live))) for name, owner, live in cursor.fetchall())
        return found

    def _live_elsewhere(self, cursor: Any, entries: Sequence[Entry]) -> set[str]:
        found: set[str] = set()
        for part in parts(entries):
            inside, given = listed("n", [entry.name for entry in part])
            cursor.execute(
                f"SELECT name FROM {HELD} WHERE name IN ({inside}) AND expires_at > {self.clock} "
                f"AND (alias <> %(alias)s OR backend <> %(backend)s) AND owner <> '{SHARED}'",
                {**given, **self.times(), "alias": part[0].alias, "backend": part[0].backend},
            )
            found.update(name for (name,) in cursor.fetchall())
        return found

    def read_fences(self, cursor: Any, names: Sequence[str]) -> dict[str, Newest]:
        """Read the token and owner of the newest grant of each name that was ever granted."""
        found: dict[str, Newest] = {}
        for part in parts(names):
            inside, given = listed("n", part)
            cursor.execute(
                f"SELECT name, token, owner FROM {FENCE} WHERE name IN ({inside})", given
            )
            found.update((name, (token, owner)) for name, token, owner in cursor.fetchall())
        return found

    def _write_rows(
        self,
        connection: BaseDatabaseWrapper,
        cursor: Any,
        entries: Sequence[Entry],
        *,
        overwrite: bool = False,
    ) -> None:
        for part in parts(entries):
            given, rows = self.parameters(connection, part[0]), []
            for place, entry in enumerate(part):
                values = entry.values()
                given |= {f"{column}{place}": values[column] for column in OF_EACH}
                row = [f"%({each}{place if each in OF_EACH else ''})s" for each in COLUMNS]
                rows.append(f"({', '.join((*row, self.clock, self.clock, self.expiry))})")
            columns = (*COLUMNS, *TIME_COLUMNS)
            sql = f"INSERT INTO {HELD} ({', '.join(columns)}) VALUES {', '.join(rows)}"
            if overwrite:
                values_ = (f"{each} = {self.rejected.format(column=each)}" for each in UPDATED)
                sql += f" {self.on_conflict.format(key='name, slot')} {', '.join(values_)}"
            cursor.execute(sql, given)

    def _draw_all(self, cursor: Any, entries: Sequence[Entry]) -> dict[str, int]:
        """Raise the fences by one, except those that their owners raised before."""
        owner = self.rejected.format(column="owner")
        for part in parts(entries):
            # MariaDB assigns from left to right: the owner is compared before it is set.
            self._insert_fences(
                cursor,
                [(entry.name, 1, entry.owner.id) for entry in part],
                f"token = {FENCE}.token + ({FENCE}.owner <> {owner}), owner = {owner}",
            )
        newest = self.read_fences(cursor, [entry.name for entry in entries])
        return {name: token for name, (token, _) in newest.items()}

    def _raise_fences(self, cursor: Any, grants: Sequence[tuple[Entry, int]]) -> None:
        """Make each proposed token the newest, unless it isn't newer."""
        token, owner = (self.rejected.format(column=each) for each in ("token", "owner"))
        newer = f"{FENCE}.token < {token}"
        for part in parts(grants):
            self._insert_fences(
                cursor,
                [(entry.name, proposed, entry.owner.id) for entry, proposed in part],
                f"owner = CASE WHEN {newer} THEN {owner} ELSE {FENCE}.owner END, "
                f"token = CASE WHEN {newer} THEN {token} ELSE {FENCE}.token END",
            )

    def _insert_fences(
        self, cursor: Any, rows: Sequence[tuple[str, int, str]], otherwise: str
    ) -> None:
        given: dict[str, Any] = {}
        for place, (name, token, owner) in enumerate(rows):
            given |= {f"n{place}": name, f"t{place}": token, f"o{place}": owner}
        values = ", ".join(
            f"(%(n{place})s, %(t{place})s, %(o{place})s)" for place in range(len(rows))
        )
        cursor.execute(
            f"INSERT INTO {FENCE} (name, token, owner) VALUES {values} "
            f"{self.on_conflict.format(key='name')} {otherwise}",
            given,
        )


def parts(values: Sequence[Any]) -> list[Sequence[Any]]:
    """Cut a sequence into parts of one statement each."""
    return [values[start : start + PART] for start in range(0, len(values), PART)]
