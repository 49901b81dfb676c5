"""Taking a session lock away from a holder who lives: by his own keeper, or with his session."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import logs
from ..lease import clock
from ..owners import Owner
from . import postgres_statements as sql
from .base import HoldingSession, Taken
from .postgres_hung import ENDS_WITHIN
from .postgres_sessions import read_application_name

logger = logging.getLogger(__name__)


def holding_session(connection: BaseDatabaseWrapper, name: str, key: int) -> HoldingSession | None:
    """The session that has the key, and what else falls with it."""
    with connection.cursor() as cursor:
        cursor.execute(sql.HOLDING_SESSION, {"key": key})
        found = cursor.fetchone()
        if found is None:
            return None
        pid, started, application, role, locks = found
        cursor.execute(sql.RECORDED_ON, {"pid": pid, "started": started})
        recorded = [
            (row[0], str(Owner(row[1], row[2], "", "", row[3], 0, *row[4:])))
            for row in cursor.fetchall()
        ]
    words = f"server session {pid} of role {role!r}, {read_application_name(application)}"
    others = tuple(each for each in recorded if each[0] != name)
    # Its own lock has a row, unless it isn't fenced.
    unlisted = max(0, locks - 1 - len(others))
    return HoldingSession(f"{pid}.{started}" if started else "", words, others, unlisted)


def take_away(
    connection: BaseDatabaseWrapper,
    name: str,
    owner: str,
    key: int,
    session: str,
    end_hung: Callable[[], bool],
) -> Taken:
    """
    Free the lock of a holder who lives, as far as that can be done from outside.

    Args:
        session: The id of the session to end; empty to leave it to its holder, unless all that
            it holds is past its time.
        end_hung: Ends the session if so, and tells whether that was done.
    """
    if not _is_held(connection, name, owner, key, session):
        return Taken.FREED if _clear(connection, name, owner) else Taken.NOT_HIS
    if session:
        pid, _, started = session.partition(".")
        given = {"key": key, "pid": int(pid), "started": int(started)}
        with connection.cursor() as cursor:
            cursor.execute(sql.END_SESSION, given)
            ended = bool(cursor.fetchall())
        if ended:
            logger.warning(
                "Ended server session %s, and with it lock %r, by force",
                pid,
                name,
                extra=logs.facts(name=name, owner=owner),
            )
    else:
        ended = end_hung()
    until = clock() + ENDS_WITHIN * 8
    while ended and clock() < until:
        if not _is_held(connection, name, owner, key, session):
            _clear(connection, name, owner)
            return Taken.FREED
        time.sleep(0.005)
    return Taken.LEFT_TO_HOLDER


def _is_held(
    connection: BaseDatabaseWrapper, name: str, owner: str, key: int, session: str
) -> bool:
    """Whether the owner's session has the key; of an unrecorded owner, the session itself."""
    with connection.cursor() as cursor:
        if not owner:
            cursor.execute(sql.HOLDING_SESSION, {"key": key})
            found = cursor.fetchone()
            return found is not None and session in ("", f"{found[0]}.{found[1]}")
        cursor.execute(sql.HAS_KEY, {"name": name, "owner": owner})
        return cursor.fetchone() is not None


def _clear(connection: BaseDatabaseWrapper, name: str, owner: str) -> bool:
    if not owner:
        return False
    with connection.cursor() as cursor:
        cursor.execute(sql.EVICT, {"name": name, "owner": owner})
        return bool(cursor.fetchone()[1])
