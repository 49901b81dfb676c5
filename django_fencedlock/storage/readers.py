"""
Readers and writers of one name, for the database backend.

Each reader has a row of its own, and all share the row with slot '', which is a writer's otherwise:
the anchor. Readers lock it as they come. A writer can't take it before `settle()` has found that no
reader is left, while none could come. So a writer's claim compares this one row, as it does without
readers, and a reader's renewal touches no row but its own.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..backends.interface import SHARED
from ..core.identity import Owner
from .dialect import CLEAR, FENCE, HELD, Claimed, Entry
from .sets import SetLedger

#: Seconds for which a writer that was refused stops new readers. It tries more often than that.
NOTED = 2.0
#: Seconds after which an anchor would expire: never. `settle()` frees it.
FOREVER = 7000 * 365 * 24 * 3600.0

#: The anchor of a name, if it is the readers'.
ANCHOR = f"name = %(name)s AND slot = '' AND owner = '{SHARED}'"


class SharedLedger(SetLedger):
    """Claims of readers on SQLite; the base of the other dialects."""

    def claim_shared(
        self, connection: BaseDatabaseWrapper, entry: Entry
    ) -> tuple[bool, int | None]:
        """
        Take a row for a reader, unless a writer has the name or waits for it.

        Return whether the row was taken, and the readers' token if the entry is fenced.
        """
        with self.transaction(connection) as cursor:
            given = self.parameters(connection, anchor_of(entry))
            row = self.parameters(connection, entry)
            is_open = (
                f" AND (owner = '{SHARED}' AND (no_readers_until IS NULL "
                f"OR no_readers_until <= {self.clock}) "
                f"OR owner <> '{SHARED}' AND expires_at <= {self.clock})"
            )
            if not self._insert(cursor, given) and not self._overwrite(cursor, given, is_open):
                # A claim that comes twice has its row.
                if not self._overwrite(cursor, row):
                    return False, None
            elif not self._insert(cursor, row):
                self._overwrite(cursor, row)
            return True, self._draw_shared(cursor, entry.name) if entry.fenced else None

    def _draw_shared(self, cursor: Any, name: str) -> int:
        """Raise the fence, unless readers have the newest grant: one may have it locked."""
        newest = self.read_fences(cursor, [name]).get(name)
        if newest is None or newest[1] != SHARED:
            owner = self.rejected.format(column="owner")
            self._insert_fences(
                cursor,
                [(name, 1, SHARED)],
                f"token = {FENCE}.token + ({FENCE}.owner <> {owner}), owner = {owner}",
            )
            newest = self.read_fences(cursor, [name])[name]
        return newest[0]

    def note_writer(self, connection: BaseDatabaseWrapper, name: str) -> None:
        """Stop new readers for a while: a writer waits for those that are there."""
        with self.cursor(connection) as cursor:
            cursor.execute(
                f"UPDATE {HELD} SET no_readers_until = {self.expiry} WHERE {ANCHOR}",
                {"name": name, **self.times(NOTED)},
            )

    def settle(self, connection: BaseDatabaseWrapper, name: str) -> bool:
        """Delete the expired readers, and let a writer take the row if none is left."""
        return self._settle(connection, name)[1]

    def leave(self, connection: BaseDatabaseWrapper, lease: Claimed) -> bool:
        """Delete a reader's row, and the anchor after the last one; return whether it was there."""
        return self._settle(connection, lease.name, lease.owner)[0]

    def _settle(
        self, connection: BaseDatabaseWrapper, name: str, leaving: str = ""
    ) -> tuple[bool, bool]:
        given = {"name": name, "owner": leaving, **self.times()}
        with self.transaction(connection) as cursor:
            cursor.execute(f"SELECT 1 FROM {HELD} WHERE {ANCHOR}{self.lock_rows}", given)
            is_anchored, was_there = cursor.fetchone() is not None, False
            if leaving:
                cursor.execute(CLEAR, given)
                was_there = bool(cursor.rowcount)
            if not is_anchored:
                return was_there, False
            readers = "name = %(name)s AND slot <> ''"
            cursor.execute(
                f"DELETE FROM {HELD} WHERE {readers} AND expires_at <= {self.clock}", given
            )
            cursor.execute(f"SELECT 1 FROM {HELD} WHERE {readers}", given)
            if cursor.fetchall():
                return was_there, False
            if leaving:
                # While a writer waits, the anchor keeps new readers out.
                cursor.execute(
                    f"DELETE FROM {HELD} WHERE {ANCHOR} AND (no_readers_until IS NULL "
                    f"OR no_readers_until <= {self.clock})",
                    given,
                )
            else:
                cursor.execute(f"UPDATE {HELD} SET expires_at = {self.clock} WHERE {ANCHOR}", given)
            return was_there, True


def anchor_of(entry: Entry) -> Entry:
    """Return the row that all readers of a name share. It has no process that may be gone."""
    nobody = Owner(SHARED, "", "", "", 0, 0, "")
    return Entry(entry.name, entry.alias, entry.backend, nobody, FOREVER, entry.fenced)
