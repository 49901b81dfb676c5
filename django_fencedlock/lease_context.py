"""The leases of the running context: those that its writes are made under."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any

# Weak: any task or timer may have a copy of the context, and would keep an abandoned lease.
_leases: ContextVar[tuple[weakref.ref[Any], ...]] = ContextVar("fencedlock_leases", default=())


def find(name: str | None = None) -> Any:
    """Return the innermost lease, or the innermost of lock `name`; see `lease.current_lease()`."""
    for found in reversed(_leases.get()):
        lease = found()
        if lease and (name is None or lease.name == name) and lease.is_open():
            return lease
        for above in lease.above if lease and name else ():
            if above.name == name and above.is_open():
                return above
    return None


def held_names() -> tuple[str, ...]:
    """The names of the running context's leases, the innermost first."""
    leases = (found() for found in reversed(_leases.get()))
    return tuple(dict.fromkeys(lease.name for lease in leases if lease and lease.is_open()))


def held_owners() -> tuple[str, ...]:
    """The owner ids of the running context's leases; one that is over among them does no harm."""
    return tuple(lease.owner_id for found in _leases.get() if (lease := found()))


def enter(lease: Any) -> None:
    """Make `lease` the innermost one of the running context."""
    leases = _leases.get()
    # Entries stay of leases that another context released. They are looked for at each doubling
    # alone: with thousands of leases, a look at all of them takes longer than the lock.
    if leases and len(leases) & (len(leases) - 1) == 0:
        leases = tuple(each for each in leases if (found := each()) and found.is_open())
    _leases.set((*leases, weakref.ref(lease)))


def leave(lease: Any) -> None:
    """Take the innermost entry of `lease` out of the running context."""
    leases = _leases.get()
    for place in reversed(range(len(leases))):
        if leases[place]() is lease:
            _leases.set(leases[:place] + leases[place + 1 :])
            return
