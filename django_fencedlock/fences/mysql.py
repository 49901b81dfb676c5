"""The ledger on MariaDB and MySQL."""

from __future__ import annotations

import contextlib
from typing import Any

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from .ledger import FENCE, HELD, Entry
from .portable import PortableLedger

LOCK_WAIT_TIMEOUT, DEADLOCK = 1205, 1213


class MySQLLedger(PortableLedger):
    clock = "UTC_TIMESTAMP(6)"
    expiry = "UTC_TIMESTAMP(6) + INTERVAL %(micros)s MICROSECOND"
    insert_or_ignore = "INSERT IGNORE"
    lock_free_rows = " FOR UPDATE SKIP LOCKED"

    def times(self, connection: BaseDatabaseWrapper, ttl: float) -> dict[str, Any]:
        return {"micros": round(ttl * 1_000_000)}

    def claim(self, connection: BaseDatabaseWrapper, entry: Entry) -> tuple[bool, int | None]:
        # Two statements that commit by themselves, for half the round trips of a transaction, and
        # because INSERT IGNORE followed by UPDATE in one would make contenders deadlock.
        given = {**entry.values(), **self.times(connection, entry.ttl)}
        with connection.cursor() as cursor:
            if not self._insert(cursor, given) and not self._take_over(cursor, given):
                return False, None
            if not entry.fenced:
                return True, None
            try:
                token = self._draw(cursor, given)
            except BaseException:
                # The row is committed already, and would keep everybody out for a whole ttl.
                with contextlib.suppress(Error):
                    cursor.execute(
                        f"DELETE FROM {HELD} WHERE name = %(name)s AND owner = %(owner)s", given
                    )
                raise
            return token is not None, token

    def _draw(self, cursor: Any, given: dict[str, Any]) -> int | None:
        """
        Raise the fence by one for the row's owner; None if the row went to somebody else.

        The row is locked meanwhile, so tokens rise in the order in which the row was taken.
        """
        # LAST_INSERT_ID(x) brings x back with the answer, on the insert's path as well.
        cursor.execute(
            f"INSERT INTO {FENCE} (name, token, owner) "
            f"SELECT h.name, LAST_INSERT_ID(1), h.owner FROM {HELD} h "
            "WHERE h.name = %(name)s AND h.owner = %(owner)s FOR UPDATE "
            f"ON DUPLICATE KEY UPDATE token = LAST_INSERT_ID({FENCE}.token + 1), "
            "owner = VALUES(owner)",
            given,
        )
        return cursor.lastrowid if cursor.rowcount else None

    def _raise_fence(self, cursor: Any, given: dict[str, Any]) -> bool:
        # Assignments take effect from left to right: owner goes by the token that was there.
        cursor.execute(
            f"INSERT INTO {FENCE} (name, token, owner) VALUES (%(name)s, %(token)s, %(owner)s) "
            "ON DUPLICATE KEY UPDATE owner = IF(token < VALUES(token), VALUES(owner), owner), "
            "token = GREATEST(token, VALUES(token))",
            given,
        )
        # The count of rows doesn't tell an insert from a row left as it was.
        cursor.execute(f"SELECT token, owner FROM {FENCE} WHERE name = %(name)s", given)
        return bool(cursor.fetchone() == (given["token"], given["owner"]))

    def is_row_locked(self, error: Error) -> bool:
        return bool(error.args) and error.args[0] in (LOCK_WAIT_TIMEOUT, DEADLOCK)
