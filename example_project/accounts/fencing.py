"""The check that keeps a stale holder from writing, in a few lines of the ORM."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction

from django_fencedlock import Lease, StaleFence
from django_fencedlock.models import Fence


@contextmanager
def fenced(lease: Lease) -> Iterator[None]:
    """
    Open a transaction that writes only if `lease` still has the newest grant of its name.

    The fence's row stays locked to the end of the transaction, so no newer grant can come between
    the check and the commit. SQLite locks the whole file instead, by its transaction_mode.
    """
    with transaction.atomic():
        newest = Fence.objects.select_for_update().get(name=lease.name)
        # The owner as well: a restored backup may hand a number out a second time.
        if (newest.token, newest.owner) != (lease.token, lease.owner):
            raise StaleFence(
                f"This write carries token {lease.token} of lock {lease.name!r}; the newest is "
                f"{newest.token}.",
                name=lease.name,
                owner=lease.owner,
                token=lease.token,
            )
        yield
