"""Holders that are connected and do nothing: their locks would last as long as their sessions."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from . import postgres_statements as sql
from .postgres_sessions import Session

logger = logging.getLogger(__name__)

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
        logger.warning("Ended the hung session %s, past its time, for locks %r", pid, overdue)
    if not ended:
        _tell_of_hidden(session, overdue)
    return bool(ended)


def _tell_of_hidden(session: Session, overdue: Sequence[str]) -> None:
    hidden = session.all(sql.HIDDEN, {"names": list(overdue)}, prepare=False)
    for pid, role in hidden:
        if pid in _told:
            continue
        _told.add(pid)
        logger.warning(
            "Locks %r are held past their time by session %s of role %r, which this role may "
            "neither see nor end. Connect as the same role everywhere, or GRANT %s to this one.",
            overdue,
            pid,
            role,
            role,
        )
