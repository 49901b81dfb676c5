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
from ..storage.dialect import Newest
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
    for alias, newest in fences.items():
        with contextlib.closing(
            ConnectionPool(service(alias).config.fence_database, TIMEOUT)
        ) as pool:
            for permit, seen in newest.items():
                if permit not in held and permit not in done.raised:
                    _raise(done, permit, seen, alias, pool)
    done.raised.sort(key=above.index)
    return done


def _fences(above: list[str], aliases: list[str]) -> dict[str, dict[str, Newest]]:
    """Return the permits that were granted, by an alias of each fence database."""
    by_database = {service(alias).config.fence_database: alias for alias in aliases}
    found = {}
    for using, alias in by_database.items():
        # No lease has an empty owner: such a fence was raised before.
        rows = Fence.objects.using(using).filter(name__in=above).exclude(owner="")
        found[alias] = {row.name: (row.token, row.owner) for row in rows.order_by("name")}
    return found


def _release_expired(done: Trimmed, above: list[str], alias: str, by: str) -> None:
    """Note the permits that are held through an alias; release those that have expired."""
    asked = service(alias)
    rows = HeldLock.objects.using(asked.config.fence_database).filter(name__in=above, alias=alias)
    known = {*rows.values_list("name", flat=True), *asked.grants.look_up(above)}
    for permit in sorted(known, key=above.index):
        found = held_by(permit, alias)
        if found is not None and found.expired:
            released = force_release(permit, by=by, backend=alias, owner_id=found.owner_id)
            found = None if released.done else held_by(permit, alias)
            if released.done:
                done.raised.append(permit)
        if found is not None:
            done.held.append(found)


def _raise(done: Trimmed, permit: str, seen: Newest, alias: str, pool: ConnectionPool) -> None:
    """Raise a fence, unless the permit was granted since it was read."""
    try:
        is_raised = pool.run_orm(partial(raise_fence, pool.using, permit, seen), RESYNC_PATIENCE)
    except Error as exc:
        if not LEDGERS[connections[pool.using].vendor].is_row_locked(exc):
            raise
        done.locked[permit] = pinned_by(pool.using, permit) or "an open transaction"
        return
    if is_raised:
        done.raised.append(permit)
        with contextlib.suppress(BackendUnavailable):
            # A hint only: the next grant has a token above the fence at once.
            service(alias).backend.suggest(permit, seen[0] + 1)
    elif found := held_by(permit, alias):
        done.held.append(found)
