"""A backend without a lock service, for tests that ignore locks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.creation import TEST_DATABASE_PREFIX

from ..backends.base import Backend, Grant, Renewal, Request
from ..conf import AliasConfig
from ..core.identity import Holder
from ..core.runtime import clock
from ..lease import Lease
from ..storage.connections import under_test

PATH = f"{__name__}.NoService"


class NoService(Backend):
    """
    Grants every lock to every caller at once.

    If the test has a database, grants are recorded on its connection, where fenced writes look.
    """

    label = "off"
    excludes = False
    records_grants = True
    records_unfenced = True

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._mutex = threading.Lock()
        self._tokens: Counter[str] = Counter()
        self._gone: set[str] = set()

    def acquire(self, request: Request) -> Grant:
        since = clock()
        if not request.fenced:
            return Grant(None, since)
        recorded = _record(request, self.config.fence_database)
        with self._mutex:
            self._tokens[request.name] = recorded or self._tokens[request.name] + 1
            return Grant(self._tokens[request.name], since)

    def is_free(self, name: str) -> bool:
        return True

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        return [Renewal.KEPT if self.verify(lease) else Renewal.LOST for lease in leases]

    def verify(self, lease: Lease) -> bool:
        return lease.owner_id not in self._gone

    def release(self, lease: Lease) -> bool:
        held = self.verify(lease)
        self._gone.add(lease.owner_id)
        return held

    def evict(self, name: str, owner: str, *, fenced: bool = True) -> bool:
        return False

    def holder(self, name: str) -> Holder | None:
        return None


def _record(request: Request, using: str) -> int | None:
    """Raise the fence by one and return the token; None if the test can't write fences."""
    connection = request.connection or connections[using]
    if connection is not request.connection and not _is_made_for_tests(connection):
        return None
    opened_here = connection.connection is None
    try:
        return _next_token(request, connection)
    # The test may not use the database, there is no table, the transaction is broken, or another
    # one locks the row. Fenced writes would fail as well.
    except (AssertionError, Error, RuntimeError):
        return None
    finally:
        if opened_here and not connection.in_atomic_block:
            # Django may never close the connections of this thread.
            connection.close()


def _next_token(request: Request, connection: BaseDatabaseWrapper) -> int:
    # Models can't be imported before Django is ready.
    from ..storage.tables import Fence

    fences = Fence.objects.using(connection.alias)
    with transaction.atomic(using=connection.alias):
        fences.get_or_create(name=request.name, defaults={"token": 0, "owner": ""})
        nowait = connection.features.has_select_for_update_nowait
        fence = fences.select_for_update(nowait=nowait).get(name=request.name)
        fence.token += 1
        fence.owner = request.owner.id
        fence.save()
        return fence.token


def _is_made_for_tests(connection: BaseDatabaseWrapper) -> bool:
    """Return whether this is the test runner's database, and not the real one."""
    given = connection.settings_dict
    name = str(given["NAME"])
    made = str(given["TEST"].get("NAME") or TEST_DATABASE_PREFIX)
    in_memory = connection.vendor == "sqlite" and connection.is_in_memory_db()  # type: ignore[attr-defined]
    return under_test() and (in_memory or name.startswith(made))
