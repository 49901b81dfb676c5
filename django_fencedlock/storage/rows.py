"""What is read from the tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from ..backends.interface import Claim, Grant
from ..core.identity import Holder, Owner

#: The token and the owner of a name's newest grant; (0, "") if there is none.
Newest = tuple[int, str]


#: What the registry has a row of.
Claimed = Claim | Grant


class Row(NamedTuple):
    """What the registry says of a name."""

    alias: str
    backend: str
    fenced: bool
    owner: Owner
    token: int | None
    acquired_at: datetime
    expires_at: datetime
    #: The time of the database when the row was read.
    read_at: datetime

    @property
    def live(self) -> bool:
        return self.expires_at > self.read_at

    def holder(self) -> Holder:
        return Holder(
            owner=self.owner.id,
            description=str(self.owner),
            alias=self.alias,
            token=self.token,
            acquired_at=self.acquired_at,
            expires_at=self.expires_at,
        )

    def conflicts_with(self, alias: str, backend: str) -> bool:
        """Whether the name is live at another lock service."""
        return self.live and (self.alias, self.backend) != (alias, backend)


def as_time(value: Any, connection: BaseDatabaseWrapper) -> datetime:
    """The time, in UTC, that a driver or Django read from a table."""
    found = parse_datetime(value) if isinstance(value, str) else value
    assert isinstance(found, datetime)
    if connection.vendor != "postgresql":
        # It is stored in UTC. Django takes it for local time if the database has a TIME_ZONE.
        return found.replace(tzinfo=UTC)
    if timezone.is_naive(found):
        # With USE_TZ = False, Django cuts the zone off.
        found = found.replace(tzinfo=ZoneInfo(connection.timezone_name))
    return found.astimezone(UTC)
