"""The ledger on MariaDB and MySQL."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ..sessions import private
from .characters import words_storable
from .ledger import CLEAR, FENCE, HELD, Entry, session_words
from .portable import PortableLedger

LOCK_WAIT_TIMEOUT, DEADLOCK = 1205, 1213

#: Seconds to look for whoever has a fence locked, and between two looks. The server brings its
#: tables of transactions up to date only if nobody has read them for a tenth of a second.
LOOK, BETWEEN_LOOKS = 0.35, 0.12

# MariaDB tells who has a row locked only while somebody waits for it.
PINNED_BY = """
SELECT t.trx_mysql_thread_id, p.user, IF(p.command = 'Sleep', 'idle in transaction', p.state),
TIMESTAMPDIFF(MICROSECOND, t.trx_started, NOW(6)) / 1000000
FROM information_schema.innodb_lock_waits w
JOIN information_schema.innodb_trx r ON r.trx_id = w.requesting_trx_id
JOIN information_schema.innodb_trx t ON t.trx_id = w.blocking_trx_id
LEFT JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE r.trx_mysql_thread_id = %s
"""
UNKNOWN_SESSION = "a session that this user may not look at (it takes the privilege PROCESS)"


class MySQLLedger(PortableLedger):
    clock = "UTC_TIMESTAMP(6)"
    expiry = "UTC_TIMESTAMP(6) + INTERVAL %(micros)s MICROSECOND"
    insert_or_ignore = "INSERT IGNORE"
    lock_free_rows = " FOR UPDATE SKIP LOCKED"

    def values(self, connection: BaseDatabaseWrapper, entry: Entry) -> dict[str, Any]:
        return words_storable(connection, entry.values())

    def times(self, connection: BaseDatabaseWrapper, ttl: float) -> dict[str, Any]:
        return {"micros": round(ttl * 1_000_000)}

    def claim(self, connection: BaseDatabaseWrapper, entry: Entry) -> tuple[bool, int | None]:
        # Two statements that commit by themselves, for half the round trips of a transaction, and
        # because INSERT IGNORE followed by UPDATE in one would make contenders deadlock.
        given = {**self.values(connection, entry), **self.times(connection, entry.ttl)}
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
                    cursor.execute(CLEAR, given)
                raise
            return token is not None, token

    def _draw(self, cursor: Any, given: dict[str, Any]) -> int | None:
        """
        Raise the fence by one for the row's owner, unless he did so before; returns his token.

        None if the row went to somebody else.

        The row is locked meanwhile, so tokens rise in the order in which the row was taken.
        """
        # LAST_INSERT_ID(x) brings x back with the answer, on the insert's path as well. Assignments
        # take effect from left to right: the owner who is compared is the one that was there.
        cursor.execute(
            f"INSERT INTO {FENCE} (name, token, owner) "
            f"SELECT h.name, LAST_INSERT_ID(1), h.owner FROM {HELD} h "
            "WHERE h.name = %(name)s AND h.owner = %(owner)s FOR UPDATE "
            f"ON DUPLICATE KEY UPDATE token = "
            f"LAST_INSERT_ID({FENCE}.token + ({FENCE}.owner <> VALUES(owner))), "
            "owner = VALUES(owner)",
            given,
        )
        if not cursor.rowcount:
            return None
        # A trigger on the fences that fills an AUTO_INCREMENT has the answer bring 0.
        return cursor.lastrowid or self._token_of(cursor, given)

    def _token_of(self, cursor: Any, given: dict[str, Any]) -> int | None:
        cursor.execute(
            f"SELECT token FROM {FENCE} WHERE name = %(name)s AND owner = %(owner)s", given
        )
        row = cursor.fetchone()
        return row[0] if row else None

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

    def rolls_back(self, connection: BaseDatabaseWrapper, error: Error) -> bool:
        # A deadlock does; waiting too long does only if innodb_rollback_on_timeout is set.
        return self.is_row_locked(error)

    def pinned_by(self, connection: BaseDatabaseWrapper, name: str) -> str | None:
        with contextlib.closing(_Probe(connection, name)) as probe:
            until = time.monotonic() + LOOK
            while probe.waits() and time.monotonic() < until:
                with contextlib.suppress(Error), connection.cursor() as cursor:
                    cursor.execute(PINNED_BY, [probe.session])
                    if found := cursor.fetchall():
                        return " and ".join(session_words(*facts) for facts in found)
            return UNKNOWN_SESSION if probe.waits() else None


class _Probe:
    """A session that waits for a fence's row until it is told to stop."""

    def __init__(self, asking: BaseDatabaseWrapper, name: str) -> None:
        self._asking = asking
        self._connection = private(asking.alias, 1)
        with self._connection.cursor() as cursor:
            cursor.execute("SELECT CONNECTION_ID()")
            self.session: int = cursor.fetchone()[0]
        self._name = name
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        with contextlib.suppress(Error), self._connection.cursor() as cursor:
            cursor.execute(f"SELECT 1 FROM {FENCE} WHERE name = %s FOR UPDATE", [self._name])

    def waits(self) -> bool:
        self._thread.join(BETWEEN_LOOKS)
        return self._thread.is_alive()

    def close(self) -> None:
        with contextlib.suppress(Error):
            if self.waits():
                with self._asking.cursor() as cursor:
                    cursor.execute(f"KILL QUERY {self.session}")
                self._thread.join()
            self._connection.close()
