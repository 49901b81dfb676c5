"""Leases of backends that are asked directly, with no service in between."""

from typing import Any

from django_fencedlock.backends.base import Grant, Request
from django_fencedlock.lease import Lease


def lease_of(request: Request, grant: Grant | None) -> Lease:
    """Return the lease that a service would make of a grant."""
    assert grant is not None
    # What asks nobody needs no control.
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
