"""What came after a grant that isn't the newest of its name any more."""

from __future__ import annotations

from typing import NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper

from ..owners import Holder
from . import ledger_for
from .pins import WriteGrant
from .revoking import notes


class Overtaken(NamedTuple):
    """Why nothing is written under a grant any more."""

    #: In words that go on after "was refused:".
    why: str
    #: Who has the lock now, if known.
    holder: Holder | None = None


def overtaken(connection: BaseDatabaseWrapper, grant: WriteGrant) -> Overtaken | None:
    """Tell by what `grant` was overtaken; None if it is the newest still."""
    ledger = ledger_for(connection)
    newest = ledger.newest(connection, grant.name)
    if newest == (grant.token, grant.owner):
        return None
    if newest is None:
        return Overtaken("its fence is gone")
    token, owner = newest
    why = f"the newest token is {token}"
    row = ledger.look(connection, grant.name)
    if row is not None and row.owner == owner:
        holder = row.holder()
        return Overtaken(f"{why}, granted to {holder}", holder)
    note = notes(connection, [grant.owner]).get(grant.owner)
    return Overtaken(f"{why}: {note}" if note else why)
