"""Paths: a lock that shares every lock above its own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ..backends.interface import Claim
from ..exceptions import LockUpgrade
from ..lease import Lease, Leases
from .grants import Grants, holder_of
from .identity import Holder, new_owner_id
from .names import path_names, read_path


def claims_of(claim: Claim) -> list[Claim]:
    """Return the claims of a path by that of its end: shared ones of its ancestors, root first."""
    *above, _ = path_names(read_path(claim.name))
    shared = [claim._replace(name=name, owner=new_owner_id(), shared=True) for name in above]
    return [*shared, claim]


def put_beneath(leaf: Lease, above: Sequence[Lease]) -> None:
    """Make the leases of a path one: that of its end loses and releases those above it."""
    end = _EndOf(weakref.ref(leaf))
    for each in above:
        each.interrupt_by(end)
    # The innermost first, as they are released: from now on, at the end of this lease.
    leaf.above = tuple(reversed(above))


def leave_above(leases: Leases) -> list[Lease]:
    """Take leases that end from those above them; return those that no other path needs."""
    left = []
    for leaf in leases:
        for each in leaf.above:
            # A path beside it may need it for longer.
            each.off_lost(_EndOf(weakref.ref(leaf)))
            each.entries -= 1
            if each.entries <= 0 and each.is_open():
                left.append(each)
    return left


@dataclass(frozen=True)
class _EndOf:
    """Marks the lease of a path as lost once one above it is."""

    #: Weak: an abandoned lease is released when nothing else refers to it.
    _leaf: weakref.ref[Lease]

    def __call__(self, lost: Lease) -> None:
        if (leaf := self._leaf()) is not None:
            why = f"lock {lost.name!r}, which it shares, was lost"
            leaf._control.lose_with([leaf], why)


def holder(grants: Grants, claim: Claim) -> Holder | None:
    """Ask the service who excludes the holder of a path: it has the lock, or one above it."""
    names = path_names(read_path(claim.name))
    found = grants.look_up(names)
    for name in names:
        held = found.get(name)
        if held is not None and (name == claim.name or not held.shared):
            return holder_of(held, grants.backend.config.alias)
    return None


def no_upgrade(claim: Claim, alias: str) -> LockUpgrade:
    """Return the error of a path that is above or beneath one that its own holder has."""
    path = read_path(claim.name)
    if claim.shared:
        text = (
            f"Path {path!r} is held here, and excludes every path beneath it, so none of those can "
            "be acquired as well. Acquire the longer path instead, or release this one first."
        )
    else:
        text = (
            f"A path beneath {path!r} is held here, so {path!r} can't be acquired as well: it "
            "would wait for that one. Acquire the shorter path first and alone, or release the "
            "longer one first."
        )
    return LockUpgrade(text, name=claim.name, alias=alias)
