"""The ledger on MariaDB and MySQL."""

from __future__ import annotations

from typing import Any

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from .ledger import FENCE
from .portable import PortableLedger

LOCK_WAIT_TIMEOUT, DEADLOCK = 1205, 1213


class MySQLLedger(PortableLedger):
    clock = "UTC_TIMESTAMP(6)"
    expiry = "UTC_TIMESTAMP(6) + INTERVAL %(micros)s MICROSECOND"
    insert_or_ignore = "INSERT IGNORE"
    lock_free_rows = " FOR UPDATE SKIP LOCKED"

    def times(self, connection: BaseDatabaseWrapper, ttl: float) -> dict[str, Any]:
        return {"micros": round(ttl * 1_000_000)}

    def draw(self, cursor: Any, given: dict[str, Any]) -> int:
        # LAST_INSERT_ID(x) brings x back with the answer, on the insert's path as well.
        cursor.execute(
            f"INSERT INTO {FENCE} (name, token, owner) "
            "VALUES (%(name)s, LAST_INSERT_ID(1), %(owner)s) "
            "ON DUPLICATE KEY UPDATE token = LAST_INSERT_ID(token + 1), owner = %(owner)s",
            given,
        )
        token: int = cursor.lastrowid
        return token

    def is_row_locked(self, error: Error) -> bool:
        return bool(error.args) and error.args[0] in (LOCK_WAIT_TIMEOUT, DEADLOCK)
