"""Leases for tests that call a backend directly."""

from typing import Any

from django_fencedlock.backends.base import Grant, Request
from django_fencedlock.lease import Lease


def lease_of(request: Request, grant: Grant | None) -> Lease:
    """Return the lease that the lock manager would make for a grant."""
    assert grant is not None
    # The lease makes no requests, so it needs no lock manager.
    nobody: Any = None
    return Lease(
        name=request.name,
        alias="default",
        owner=request.owner,
        token=grant.token,
        ttl=request.ttl,
        since=grant.since,
        control=nobody,
        handle=grant.handle,
    )
