"""`lease.atomic()`: a transaction in which everything is fenced by a lease, or by several."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic

from .. import logs, signals
from ..core.identity import Holder
from ..exceptions import InsideTransaction, OutcomeUnknown, StaleFence, WrongDatabase
from ..lease import Lease, Leases
from .fences import WriteGrant, not_newest, overtaken
from .postgresql import sqlstate
from .vendors import LEDGERS

logger = logging.getLogger(__name__)

#: SQLSTATE of a session that the server ended for an idle transaction. It committed nothing.
IDLE_TOO_LONG = "25P03"


def grant_of(lease: Lease) -> WriteGrant:
    """Return the part of a lease that a database can check."""
    owner = lease.grant.fence_owner
    return WriteGrant(lease.name, lease.token, owner, lease.alias, patience=lease.ttl)


def is_pinned(connection: BaseDatabaseWrapper, grant: WriteGrant) -> bool:
    """Whether the open transaction has locked the grant's fence."""
    blocks = _pinned_blocks(connection)
    return any(grant.owner in block.owners for block in blocks)


@contextlib.contextmanager
def pinned_atomic(leases: Leases, using: str | None = None) -> Iterator[None]:
    """Open a transaction that commits only under `leases`: the next grants wait for its end."""
    grants = [grant_of(lease) for lease in leases]
    lease = leases[0]
    using = using or lease.database
    if using != lease.database:
        raise WrongDatabase(
            f"lease.atomic(using={using!r}): the fences of lock {lease.name!r} are in database "
            f"{lease.database!r}, and only a transaction there can be fenced by them.",
            name=lease.name,
            database=using,
        )
    for each in leases:
        if each.lost or each.released:
            each.check()
    connection = connections[using]
    _require_outermost(lease, connection)
    block = PinnedBlock(lease, connection, savepoint=not _pinned_blocks(connection))
    with block, connection.execute_wrapper(_notice_rollback):
        for grant in not_newest(using, grants):
            stale = leases[grants.index(grant)]
            raise _stale(stale, overtaken(connection, grant, stale.owner_id))
        block.owners = {grant.owner for grant in grants}
        yield


class PinnedBlock(Atomic):
    """An atomic block that locks fences from its beginning to its end."""

    #: The owner ids of the grants whose fences are locked.
    owners: Collection[str] = ()
    #: The number of savepoints at the beginning.
    depth = 0

    def __init__(self, lease: Lease, connection: BaseDatabaseWrapper, savepoint: bool) -> None:
        super().__init__(connection.alias, savepoint, durable=False)
        self._lease = lease
        self._connection = connection

    def __enter__(self) -> None:
        connection: Any = self._connection
        mode = getattr(connection, "transaction_mode", None)
        if connection.vendor == "sqlite" and mode != "EXCLUSIVE":
            # A deferred transaction would read the fence first, and its first write would fail if
            # another session, such as that of a renewal, wrote in between.
            connection.transaction_mode = "IMMEDIATE"
        try:
            super().__enter__()
        finally:
            if connection.vendor == "sqlite":
                connection.transaction_mode = mode
        self.depth = len(self._connection.savepoint_ids)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        connection, lease = self._connection, self._lease
        session = connection.connection
        try:
            super().__exit__(kind, error, trace)
        except Error as exc:
            # A server that answers a COMMIT with an error has rolled back. If the session is gone,
            # there was no answer. Django may have connected again by now.
            if (
                kind is not None
                or sqlstate(exc) == IDLE_TOO_LONG
                or (connection.connection is session and connection.is_usable())
            ):
                raise
            raise OutcomeUnknown(
                f"The COMMIT of a transaction under lock {lease.name!r} failed: {exc}. It may have "
                "been committed or not: read again before anything is written again.",
                name=lease.name,
                owner_id=lease.owner_id,
                token=lease.token,
            ) from exc


def _pinned_blocks(connection: BaseDatabaseWrapper) -> list[PinnedBlock]:
    # The connection has them: it belongs to one thread, and drops its blocks when it connects
    # again. A context variable would outlive both in a task that inherits it.
    return [block for block in connection.atomic_blocks if isinstance(block, PinnedBlock)]


def _require_outermost(lease: Lease, connection: BaseDatabaseWrapper) -> None:
    """Raise within a savepoint: Postgres unlocks the fence at ROLLBACK TO."""
    blocks: list[Any] = connection.atomic_blocks
    first = next((block for block in blocks if not block._from_testcase), None)
    if isinstance(first, PinnedBlock) and not any(connection.savepoint_ids[first.depth :]):
        return
    if first is None and (blocks or connection.get_autocommit()):
        return
    raise InsideTransaction(
        f"lease.atomic() of lock {lease.name!r} is inside a transaction on {connection.alias!r}, "
        "and has to be the outermost block. Open it first; a view under ATOMIC_REQUESTS needs "
        "@transaction.non_atomic_requests.",
        name=lease.name,
        alias=lease.alias,
    )


def _notice_rollback(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    """Mark the block for rollback if the database rolled it back because of one statement."""
    # Code that caught the error would go on in a new transaction, which locks no fence.
    try:
        return execute(sql, params, many, context)
    except Error as exc:
        connection = context["connection"]
        if LEDGERS[connection.vendor].rolls_back(connection, exc):
            connection.needs_rollback = True
        raise


def _stale(lease: Lease, found: tuple[str, Holder | None] | None) -> StaleFence:
    # A snapshot may hide what the locking read has seen: then no more is known.
    why, holder = found or ("a newer grant exists", None)
    logger.error(
        "Rejected a stale transaction: lock=%r writer_token=%s holder=%s",
        lease.name,
        lease.token,
        holder or "unknown",
        extra=logs.about(lease, holder=holder and str(holder)),
    )
    facts = {"name": lease.name, "alias": lease.alias, "lease": lease, "holder": holder}
    signals.send(signals.stale_transaction_rejected, type(lease), **facts)
    return StaleFence(
        f"lease.atomic() of lock {lease.name!r} under token {lease.token} was rejected: {why}.",
        name=lease.name,
        owner_id=lease.owner_id,
        token=lease.token,
        holder=holder,
    )
