"""Functions and context managers for tests of code that uses locks."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.creation import TEST_DATABASE_PREFIX
from django.test import override_settings

from .. import conf
from ..backends.interface import (
    SHARED,
    Backend,
    Claim,
    Grant,
    Granted,
    Held,
    Renewal,
    Wait,
    grant_of,
)
from ..core import names
from ..core.grants import new_claim
from ..core.identity import Holder, LocalHolder, new_owner
from ..core.manager import Service, service
from ..core.runtime import clock
from ..lease import Lease, forbid_in_event_loop
from ..locks import Limit, Lock
from ..storage.connections import is_of_test, test_connection, under_test
from ..storage.vendors import LEDGERS


class hold_lock:  # noqa: N801
    """
    Hold lock `name` as another holder than the tested code.

    Use it with ``with``, or ``async with`` in coroutines.

    Args:
        let_wait: Let the tested code wait for the lock as long as it asks to. By default its
            acquire fails at once, since only the test itself could release the lock.
        shared: Hold it as a reader.
        limit: Hold one of so many permits. The tested code gets another one that is free.
        path: Hold the path `name`, as ``lock(name, path=True)`` does.
    """

    def __init__(
        self,
        name: str,
        *,
        backend: str = conf.DEFAULT_ALIAS,
        fenced: bool = True,
        let_wait: bool = False,
        shared: bool = False,
        limit: Limit = None,
        path: bool = False,
    ) -> None:
        self._service = service(backend)
        asked = Lock(name, fenced=fenced, shared=shared, limit=limit, path=path)
        name = names.path_name(name) if path else asked.name
        self._held = _held(self._service, name, fenced, let_wait, shared, limit)

    def __enter__(self) -> Lease:
        forbid_in_event_loop("hold_lock(...)", "async with {}")
        return self._held.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._held.__exit__(*error)

    async def __aenter__(self) -> Lease:
        return await self._service.in_thread(self.__enter__)

    async def __aexit__(self, *error: Any) -> None:
        await self._service.in_thread(self.__exit__, *error)


@contextlib.contextmanager
def disable_locking() -> Iterator[None]:
    """
    Grant every lock to every caller at once, without a lock service; let writes go without a lock.

    If the test may use the fence database, grants are recorded on its connection: of two holders
    of a lock, only the later one can write fenced rows. Otherwise tokens rise from 1, in memory.
    """
    everything = {alias: _switched_off(conf.config(alias)) for alias in conf.aliases()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(override_settings(FENCEDLOCK=everything))
        # Models can't be imported before Django is ready; a project without fenced ones needs none.
        if fencing := sys.modules.get("django_fencedlock.models.fencing"):
            stack.enter_context(mock.patch.object(fencing.Fencing, "without_lock", "allow"))
        yield


def expire_lease(lease: Lease) -> None:
    """
    Let `lease` expire, as if its process had been paused. The lock is free.

    It isn't renewed automatically any more. With the ``postgres`` backend, where a lock lives as
    long as its session, no other holder can acquire it; `lose_lease()` works with every backend.
    """
    control = cast(Service, lease._control)
    control.keeper.forget(lease)
    connection = test_connection(control.config.fence_database) if lease.lent else None
    ttl, lease.ttl = lease.ttl, _SHORT
    try:
        if connection is not None:
            LEDGERS[connection.vendor].renew(connection, [lease.grant])
        recorded = connection is not None and control.backend.records_grants
        # The server would end a session whose only lock has so short a ttl.
        if control.backend.supports_ttl and not recorded:
            control.backend.renew([lease.grant])
    finally:
        lease.ttl, lease.deadline = ttl, clock()
    time.sleep(2 * _SHORT)


def lose_lease(lease: Lease) -> None:
    """
    Let another holder acquire and release the lock of `lease`.

    This has all effects of a real loss: callbacks, the signal, a newer recorded token, and
    `LeaseLost` at the end of the block.
    """
    control = cast(Service, lease._control)
    control.keeper.forget(lease)
    control.backend.release(lease.grant)
    with _held(control, lease.name, lease.fenced, let_wait=False):
        control.verify(lease)


def assert_locked(name: str, *, backend: str = conf.DEFAULT_ALIAS) -> Holder:
    """Fail if lock `name` is free; return its holder."""
    holder = _holder(name, service(backend))
    assert holder is not None, f"Lock {name!r} is free; it was expected to be held."
    return holder


def assert_not_locked(name: str, *, backend: str = conf.DEFAULT_ALIAS) -> None:
    """Fail if lock `name` is held, even by the calling code."""
    holder = _holder(name, service(backend))
    assert holder is None, f"Lock {name!r} is held by {holder}; it was expected to be free."


@contextlib.contextmanager
def eager_tasks(app: Any = None) -> Iterator[None]:
    """
    Run tasks in ``.delay()``, with their locks, without a broker.

    ``.delay()`` never raises the task's error; ``.get()`` of its result does. Retries, also those
    of a conflict, run at once.

    Args:
        app: The Celery app (default: the current app).
    """
    # Projects without Celery use the other helpers.
    from celery import current_app

    app = app or current_app
    # Propagation would raise Celery's Retry out of delay() instead of running the next try.
    eager = {"task_always_eager": True, "task_eager_propagates": False}
    _ = app.conf.task_always_eager  # Loads the settings; before that, `changes` isn't used.
    with mock.patch.dict(app.conf.changes, eager):
        yield


#: Seconds until an expiring lease expires.
_SHORT = 0.01


@contextlib.contextmanager
def _held(
    control: Service,
    name: str,
    fenced: bool,
    let_wait: bool,
    shared: bool = False,
    limit: Limit = None,
) -> Iterator[Lease]:
    # Another holder than this thread and task, but on the test's connection.
    other = LocalHolder()
    owner = new_owner()._replace(thread="hold_lock")
    claim = new_claim(name, control.config.ttl, fenced, owner=owner, shared=shared)
    if limit is not None:
        claim = claim._replace(permits=names.count_permits(name, limit))
    lease = control.acquire(claim, who=other, of_another_process=True)
    if lease is None:
        raise control.refusal(claim, Wait())
    try:
        with contextlib.nullcontext() if let_wait else _fail_at_once(control, claim):
            yield lease
    finally:
        control.release([lease], other)


@contextlib.contextmanager
def _fail_at_once(control: Service, claim: Claim) -> Iterator[None]:
    kind, name = control.permits if claim.permits else control.grants, claim.name
    acquire = kind.acquire
    held = names.path_names(names.read_path(name)) if names.is_path(name) else (name,)

    def try_once(claim: Claim, wait: Wait, *more: Any) -> tuple[Grant, float] | Held:
        if claim.name in held:
            wait.seconds = 0.0
        return acquire(claim, wait, *more)

    with mock.patch.object(kind, "acquire", try_once):
        yield


def _switched_off(config: conf.AliasConfig) -> dict[str, object]:
    return {
        "BACKEND": f"{__name__}.NoService",
        "TTL": config.ttl,
        "BLOCKING_TIMEOUT": config.blocking_timeout,
        "FENCE_DATABASE": config.fence_database,
    }


def _holder(name: str, control: Service) -> Holder | None:
    connection = test_connection(control.config.fence_database)
    if connection is not None:
        # Another connection wouldn't see the rows of the test's transaction.
        row = LEDGERS[connection.vendor].look(connection, name)
        if row is not None and row.live:
            return row.holder()
        if control.backend.label == "database":
            return None
    return control.holder(name)


# Disabled locks


class NoService(Backend):
    """
    Grants every lock to every caller at once.

    If the test has a database, grants are recorded on its connection, where fenced writes look.
    """

    label = "off"
    excludes = False
    supports_shared = True
    records_grants = True
    records_unfenced = True

    def __init__(self, config: conf.AliasConfig) -> None:
        super().__init__(config)
        self._mutex = threading.Lock()
        self._tokens: Counter[str] = Counter()
        self._gone: set[str] = set()

    def acquire(self, claim: Claim, wait: Wait) -> Granted:
        since = clock()
        if not claim.fenced:
            return Granted(None, since)
        recorded = _record(claim, self.config.fence_database)
        with self._mutex:
            self._tokens[claim.name] = recorded or self._tokens[claim.name] + 1
            return Granted(self._tokens[claim.name], since)

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        return [Renewal.KEPT if self.verify(grant) else Renewal.LOST for grant in grants]

    def verify(self, grant: Grant) -> bool:
        return grant.owner not in self._gone

    def release(self, grant: Grant) -> bool:
        held = self.verify(grant)
        self._gone.add(grant.owner)
        return held

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        return {}


def _record(claim: Claim, using: str) -> int | None:
    """Raise the fence by one and return the token; None if the test can't write fences."""
    connection = connections[using]
    if not is_of_test(connection) and not _is_made_for_tests(connection):
        return None
    opened_here = connection.connection is None
    # Models can't be imported before Django is ready.
    from ..storage.tables import Fence

    fences = Fence.objects.using(using)
    nowait = connection.features.has_select_for_update_nowait
    try:
        with transaction.atomic(using=using):
            fences.get_or_create(name=claim.name, defaults={"token": 0, "owner": ""})
            fence = fences.select_for_update(nowait=nowait).get(name=claim.name)
            if not claim.shared or fence.owner != SHARED:
                fence.token, fence.owner = fence.token + 1, grant_of(claim).fence_owner
                fence.save()
            return fence.token
    # The test may not use the database, there is no table, the transaction is broken, or another
    # one locks the row. Fenced writes would fail as well.
    except (AssertionError, Error, RuntimeError):
        return None
    finally:
        if opened_here and not connection.in_atomic_block:
            # Django may never close the connections of this thread.
            connection.close()


def _is_made_for_tests(connection: BaseDatabaseWrapper) -> bool:
    """Return whether this is the test runner's database, and not the real one."""
    given = connection.settings_dict
    name = str(given["NAME"])
    made = str(given["TEST"].get("NAME") or TEST_DATABASE_PREFIX)
    in_memory = connection.vendor == "sqlite" and connection.is_in_memory_db()  # type: ignore[attr-defined]
    return under_test() and (in_memory or name.startswith(made))
