"""Aids for tests of code that takes locks: plain functions and context managers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast
from unittest import mock

from django.core.exceptions import SynchronousOnlyOperation
from django.test import override_settings

from .. import conf
from ..backends.base import Grant, Request
from ..core import names, transactions
from ..core.identity import Holder, LocalHolder, new_owner
from ..core.manager import Service, service
from ..core.runtime import clock
from ..lease import Lease
from ..storage.vendors import ledger_for
from . import off


class hold_lock:  # noqa: N801
    """
    Hold lock `name` as somebody else, so that the code under test doesn't get it.

    For ``with``, and in coroutines for ``async with``.

    Args:
        let_wait: Without it, whoever asks for the lock is refused at once, however long he would
            wait for it: this test alone could give it back.
    """

    def __init__(
        self,
        name: str,
        *,
        backend: str = conf.DEFAULT_ALIAS,
        fenced: bool = True,
        let_wait: bool = False,
    ) -> None:
        self._service = service(backend)
        self._held = _held(self._service, names.validate(name), fenced, let_wait)

    def __enter__(self) -> Lease:
        _forbid_in_event_loop()
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
    Grant every lock at once and to everybody; asks no lock service.

    Where the test may use the fence database, grants are recorded there on the test's own
    connection, so that fenced models can be written. Whoever got a lock last may write then, as in
    earnest. Elsewhere tokens rise from 1, and no database is asked.
    """
    everything = {alias: _switched_off(conf.config(alias)) for alias in conf.aliases()}
    with (
        override_settings(FENCEDLOCK=everything),
        # There may be no grant that a transaction could see.
        mock.patch.object(Service, "_require_visible"),
    ):
        yield


def expire_lease(lease: Lease) -> None:
    """
    Let `lease` run out, as if its process had been paused. Nobody has taken the lock yet.

    Nothing renews it by itself any more. Where locks live as long as a session (the ``postgres``
    backend), nobody else gets it; `lose_lease()` works everywhere.
    """
    ttl = lease.ttl
    lease.ttl = _SOON
    try:
        _renew_for_a_moment(lease)
    finally:
        lease.extend_from(clock() - ttl, ttl)
    time.sleep(2 * _SOON)


def lose_lease(lease: Lease) -> None:
    """
    Let somebody else take the lock of `lease` away, use it, and give it back.

    So the lease is lost as in earnest: callbacks, the signal, a newer token on record, and
    `LeaseLost` at the end of its block.
    """
    control = _service_of(lease)
    control.keeper.forget(lease)
    control.backend.release(lease)
    with _held(control, lease.name, lease.fenced, let_wait=False):
        control.verify(lease)


def assert_locked(name: str, *, backend: str = conf.DEFAULT_ALIAS) -> Holder:
    """Fail unless somebody, no matter who, has lock `name`; returns who."""
    holder = _holder(name, service(backend))
    assert holder is not None, f"Lock {name!r} is free; it was expected to be held."
    return holder


def assert_not_locked(name: str, *, backend: str = conf.DEFAULT_ALIAS) -> None:
    """Fail if anybody, this very code included, has lock `name`."""
    holder = _holder(name, service(backend))
    assert holder is None, f"Lock {name!r} is held by {holder}; it was expected to be free."


#: Seconds that an expiring lease still has.
_SOON = 0.01


@contextlib.contextmanager
def _held(control: Service, name: str, fenced: bool, let_wait: bool) -> Iterator[Lease]:
    # Not this thread nor this task, but on the test's connection all the same.
    somebody_else = LocalHolder()
    owner = replace(new_owner(), thread="hold_lock")
    request = Request(name, owner, control.config.ttl, fenced, of_another_process=True)
    lease = control.acquire(request, somebody_else)
    if lease is None:
        raise control.refusal(name, 0)
    try:
        with contextlib.nullcontext() if let_wait else _refused_at_once(control, name):
            yield lease
    finally:
        control.release(lease, somebody_else)


@contextlib.contextmanager
def _refused_at_once(control: Service, name: str) -> Iterator[None]:
    grant = control._grant

    def try_once(request: Request, deadline: float) -> Grant | None:
        return grant(request, min(deadline, clock()) if request.name == name else deadline)

    with mock.patch.object(control, "_grant", try_once):
        yield


def _switched_off(config: conf.AliasConfig) -> dict[str, object]:
    return {
        "BACKEND": off.PATH,
        "TTL": config.ttl,
        "BLOCKING_TIMEOUT": config.blocking_timeout,
        "FENCE_DATABASE": config.fence_database,
    }


def _service_of(lease: Lease) -> Service:
    # Not its alias' service of now: the settings may have changed.
    return cast(Service, lease._control)


def _renew_for_a_moment(lease: Lease) -> None:
    control = _service_of(lease)
    control.keeper.forget(lease)
    connection = transactions.test_connection(control.config.fence_database) if lease.lent else None
    if connection is not None:
        ledger_for(connection).renew(connection, [lease])
    if connection is None or control.backend.label != "database":
        control.backend.renew([lease])


def _holder(name: str, control: Service) -> Holder | None:
    connection = transactions.test_connection(control.config.fence_database)
    if connection is not None:
        # Another connection wouldn't see what is in the test's transaction.
        row = ledger_for(connection).look(connection, name)
        if row is not None and row.live:
            return row.holder()
        if control.backend.label == "database":
            return None
    return control.holder(name)


def _forbid_in_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SynchronousOnlyOperation(
        "hold_lock() would block the event loop; write `async with hold_lock(...)`."
    )
