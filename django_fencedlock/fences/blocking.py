"""Who keeps a question to the tables, or the next grant, waiting: for people to be told."""

from __future__ import annotations

import logging

from django.db import Error

from ..sessions import NoAnswer, ask
from ..transactions import lent_by_test
from . import ledger_for

logger = logging.getLogger(__name__)

#: Seconds for finding it out.
BRIEFLY = 2.0


def tables_locked_by(using: str) -> str:
    """Say who has one of the tables locked as a whole; empty if nobody, or if it can't be told."""
    if lent_by_test(using) is not None:
        return ""
    try:
        return ask(using, BRIEFLY, lambda own: ledger_for(own).tables_locked_by(own)) or ""
    except Error:
        logger.debug("Who has a table locked can't be told", exc_info=True)
        return ""


def pinned_by(using: str, name: str) -> str:
    """Say whose open transaction has a fence locked; empty if nobody's, or if it can't be told."""
    if lent_by_test(using) is not None:
        # From outside, the test's own transaction would seem to be in the way.
        return ""
    try:
        return ask(using, BRIEFLY, lambda own: ledger_for(own).pinned_by(own, name)) or ""
    except Error:
        logger.debug("Who has a fence locked can't be told", exc_info=True)
        return ""


def named(error: Error, using: str) -> Error:
    """The same error, with who is to blame for it, if it is about an answer that didn't come."""
    if isinstance(error, NoAnswer) and (blocker := tables_locked_by(using)):
        return NoAnswer(error.seconds, blocker)
    return error
