"""Holders that hang, or are gone and their sessions aren't: their locks would last as long."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import logs
from ..core.runtime import clock, notify
from . import postgres_statements as sql
from .postgres_sessions import Session

logger = logging.getLogger(__name__)

#: Seconds that the server may take to end a session whose client is gone.
ENDS_WITHIN = 0.25

#: Sessions that were complained of already.
_told: set[int] = set()


def end_hung_holders(session: Session, names: Sequence[str]) -> bool:
    """
    End the sessions that hold these locks and are past the time of everything they hold.

    A holder that wakes at this very moment loses its locks although it lives; the fence keeps
    the data right.
    """
    given = {"names": list(names)}
    overdue = [name for (name,) in session.all(sql.OVERDUE, given, prepare=False)]
    if not overdue:
        return False
    given = {"names": overdue}
    ended = [pid for pid, done in session.all(sql.TERMINATE, given, prepare=False) if done]
    for pid in ended:
        # Not from here: this is the thread that renews leases.
        notify(
            logger.warning,
            "Ended the hung session %s, past its time, for locks %r",
            pid,
            overdue,
        )
    if not ended:
        _tell_of_hidden(session, overdue)
    return bool(ended)


def end_orphan(connection: BaseDatabaseWrapper, name: str, owner: str) -> bool:
    """
    Clear the row of a holder whose process is gone, once his session is; whether there was one.

    The server ends the session by itself, within milliseconds, unless somebody inherited it.
    """
    given = {"name": name, "owner": owner}
    with connection.cursor() as cursor:
        for end in (False, True):
            if end:
                cursor.execute(sql.END_ORPHAN, given)
                if cursor.fetchall():
                    logger.warning(
                        "Ended the session of lock %r, whose process is gone",
                        name,
                        extra=logs.facts(name=name, owner=owner),
                    )
            until = clock() + ENDS_WITHIN
            while clock() < until:
                cursor.execute(sql.EVICT, given)
                session, cleared = cursor.fetchone()
                if session is None:
                    return bool(cleared)
                time.sleep(0.005)
    return False


def _tell_of_hidden(session: Session, overdue: Sequence[str]) -> None:
    hidden = session.all(sql.HIDDEN, {"names": list(overdue)}, prepare=False)
    for pid, role in hidden:
        if pid in _told:
            continue
        _told.add(pid)
        notify(
            logger.warning,
            "Locks %r are held past their time by session %s of role %r, which this role may "
            "neither see nor end. Connect as the same role everywhere, or GRANT %s to this one.",
            overdue,
            pid,
            role,
            role,
        )
