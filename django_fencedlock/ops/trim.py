"""After a lower `limit=`: raise the fences of the permits above it that no holder has."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial

from django.db import Error, connections

from .. import conf
from ..core import names
from ..core.manager import service
from ..exceptions import BackendUnavailable
from ..models import Fence, HeldLock
from ..storage.connections import ConnectionPool
from ..storage.fences import RESYNC_PATIENCE, pinned_by, raise_fence
from ..storage.vendors import LEDGERS
from .force_release import HeldBy, force_release, held_by
from .resync import TIMEOUT


@dataclass
class Trimmed:
    """The result for the permits above a limit."""

    name: str
    limit: int
    #: Permits whose former holders can't write any more.
    raised: list[str] = field(default_factory=list)
    #: Permits that are still held.
    held: list[HeldBy] = field(default_factory=list)
    #: Permits whose fence an open transaction locks, and that transaction.
    locked: dict[str, str] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether at most `limit` holders can write."""
        return not self.held and not self.locked


def trim(name: str, limit: int, *, by: str, aliases: list[str] | None = None) -> Trimmed:
    """
    Let no more than `limit` holders of a lock's permits write, as far as the permits are free.

    A limit that is lowered removes no permit, and a paused holder of a permit above it may still
    write. This raises the fences of those that are free or whose lease has expired. It releases no
    permit that is held: `force_release()` does.

    Args:
        by: Who does it: a holder whose lease has expired gets it in its error.
        aliases: Only these of ``FENCEDLOCK``, if the service of another one is away.
    """
    names.validate(name)
    if not 0 <= limit <= names.MAX_PERMITS:
        raise ValueError(f"The limit is {limit}; it must be from 0 to {names.MAX_PERMITS}.")
    done = Trimmed(name, limit)
    above = [names.permit_name(name, n) for n in range(limit + 1, names.MAX_PERMITS + 1)]
    asked = aliases or [*conf.aliases()]
    # In this order: a permit that is granted after the look has another fence then.
    fences = _fences(above, asked)
    for alias in asked:
        _release_expired(done, above, alias, by)
    held = {each.name for each in done.held}
    for permit, alias, token, owner in fences:
        # No lease has an empty owner: such a fence was raised before.
        if owner and permit not in held and permit not in done.raised:
            _raise(done, permit, alias, token, owner)
    done.raised.sort(key=above.index)
    return done


def _fences(above: list[str], aliases: list[str]) -> list[tuple[str, str, int, str]]:
    """Return the fences of the permits: name, an alias of the database, token and owner."""
    by_database = {service(alias).config.fence_database: alias for alias in aliases}
    return [
        (row.name, alias, row.token, row.owner)
        for using, alias in by_database.items()
        for row in Fence.objects.using(using).filter(name__in=above).order_by("name")
    ]


def _release_expired(done: Trimmed, above: list[str], alias: str, by: str) -> None:
    """Note the permits that are held through an alias; release those that have expired."""
    asked = service(alias)
    rows = HeldLock.objects.using(asked.config.fence_database).filter(name__in=above, alias=alias)
    known = {*rows.values_list("name", flat=True), *asked.grants.holders(above)}
    for permit in sorted(known, key=above.index):
        found = held_by(permit, alias)
        if found is not None and found.expired:
            released = force_release(permit, by=by, backend=alias, owner_id=found.owner_id)
            found = None if released.done else held_by(permit, alias)
            if released.done:
                done.raised.append(permit)
        if found is not None:
            done.held.append(found)


def _raise(done: Trimmed, permit: str, alias: str, token: int, owner: str) -> None:
    """Raise a fence, unless the permit was granted since it was read."""
    asked = service(alias)
    using = asked.config.fence_database
    with contextlib.closing(ConnectionPool(using, TIMEOUT)) as pool:
        try:
            work = partial(raise_fence, using, permit, (token, owner))
            is_raised = pool.run_orm(work, RESYNC_PATIENCE)
        except Error as exc:
            if not LEDGERS[connections[using].vendor].is_row_locked(exc):
                raise
            done.locked[permit] = pinned_by(using, permit) or "an open transaction"
            return
    if is_raised:
        done.raised.append(permit)
        with contextlib.suppress(BackendUnavailable):
            # A hint only: the next grant has a token above the fence at once.
            asked.backend.suggest(permit, token + 1)
    elif found := held_by(permit, alias):
        done.held.append(found)
