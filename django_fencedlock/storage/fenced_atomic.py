"""`lease.atomic()`: a transaction in which everything is fenced by one lease."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic

from .. import logs, signals
from ..exceptions import InsideTransaction, OutcomeUnknown, StaleFence, WrongDatabase
from ..lease import Lease
from .fences import Overtaken, WriteGrant, is_newest, overtaken
from .postgresql import sqlstate
from .vendors import ledger_for

logger = logging.getLogger(__name__)

#: SQLSTATE of a session that was ended since its transaction did nothing: nothing was committed.
IDLE_TOO_LONG = "25P03"


def grant_of(lease: Lease) -> WriteGrant:
    """What of a lease a database can check."""
    return WriteGrant(lease.name, lease.token, lease.owner_id, lease.alias, patience=lease.ttl)


def is_pinned(connection: BaseDatabaseWrapper, grant: WriteGrant) -> bool:
    """Whether the transaction that is open has the grant's fence locked already."""
    return any(block.pins(grant) for block in _pinned_blocks(connection))


@contextlib.contextmanager
def pinned_atomic(lease: Lease, using: str | None = None) -> Iterator[None]:
    """
    Open a transaction that lasts only under `lease`.

    The next grant of the lock's name waits until it has ended, so nothing in it is ever written
    by a former holder: not by plain models, raw SQL, many-to-many tables or cascades either.
    """
    grant = grant_of(lease)
    using = using or lease.database
    _require_database(lease, using)
    if lease.lost or lease.released:
        lease.check()
    connection = connections[using]
    _refuse_inside(lease, connection)
    nested = bool(_pinned_blocks(connection))
    block = PinnedBlock(lease, connection, savepoint=not nested)
    with block, connection.execute_wrapper(_notice_rollback):
        if not is_newest(using, grant):
            raise _stale(lease, overtaken(connection, grant))
        block.grant = grant
        yield


class PinnedBlock(Atomic):
    """An atomic block that has a fence locked from its beginning to its end."""

    #: What is locked, as soon as it is.
    grant: WriteGrant | None = None
    #: How many savepoints there were at the beginning.
    depth = 0

    def __init__(self, lease: Lease, connection: BaseDatabaseWrapper, savepoint: bool) -> None:
        super().__init__(connection.alias, savepoint, durable=False)
        self._lease = lease
        self._connection = connection

    def pins(self, grant: WriteGrant) -> bool:
        return self.grant is not None and self.grant.owner == grant.owner

    def __enter__(self) -> None:
        with _writing_from_the_start(self._connection):
            super().__enter__()
        self.depth = len(self._connection.savepoint_ids)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        session = self._connection.connection
        try:
            super().__exit__(kind, error, trace)
        except Error as exc:
            # A server that answers COMMIT with an error has rolled back. If the session is gone,
            # the answer is missing.
            if kind is None and _is_gone(self._connection, session) and not _idled(exc):
                raise self._outcome_unknown(exc) from exc
            raise

    def _outcome_unknown(self, error: Error) -> OutcomeUnknown:
        lease = self._lease
        return OutcomeUnknown(
            f"The COMMIT of a transaction under lock {lease.name!r} failed: {error}. It may have "
            "been committed or not: read again before anything is written again.",
            name=lease.name,
            owner=lease.owner_id,
            token=lease.token,
        )


def _pinned_blocks(connection: BaseDatabaseWrapper) -> list[PinnedBlock]:
    # Kept on the connection, which belongs to one thread, and forgets its blocks when it
    # reconnects. A context variable would outlive both in a task that inherits it.
    return [block for block in connection.atomic_blocks if isinstance(block, PinnedBlock)]


def _require_database(lease: Lease, using: str) -> None:
    if using != lease.database:
        raise WrongDatabase(
            f"lease.atomic(using={using!r}): the fences of lock {lease.name!r} are in database "
            f"{lease.database!r}, and only a transaction there can be fenced by them.",
            name=lease.name,
            database=using,
        )


def _refuse_inside(lease: Lease, connection: BaseDatabaseWrapper) -> None:
    """Refuse to pin within a savepoint: Postgres lets the row go at ROLLBACK TO."""
    if connection.get_autocommit():
        return
    blocks: list[Any] = connection.atomic_blocks
    outer = [block for block in blocks if not block._from_testcase][:1]
    if outer:
        first = outer[0]
        if isinstance(first, PinnedBlock) and not any(connection.savepoint_ids[first.depth :]):
            return
    elif blocks:
        return
    raise InsideTransaction(
        f"lease.atomic() of lock {lease.name!r} was called inside a transaction on "
        f"{connection.alias!r}, and has to be the outermost block there. Open it first, and "
        "transaction.atomic() inside of it; a view under ATOMIC_REQUESTS wants "
        "@transaction.non_atomic_requests for that.",
        name=lease.name,
        alias=lease.alias,
    )


@contextlib.contextmanager
def _writing_from_the_start(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """
    Make SQLite lock the file at BEGIN.

    A deferred transaction would read the fence first, and fail at its first write if another
    connection wrote to the file in between, even for a renewal of this lease.
    """
    mode = getattr(connection, "transaction_mode", None)
    if connection.vendor != "sqlite" or mode == "EXCLUSIVE":
        yield
        return
    connection.transaction_mode = "IMMEDIATE"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        connection.transaction_mode = mode  # type: ignore[attr-defined]


def _notice_rollback(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    """
    Spoil the block if the database rolled all of it back because of one statement.

    Code that caught the error would go on in a new transaction, which has nothing locked.
    """
    try:
        return execute(sql, params, many, context)
    except Error as exc:
        connection = context["connection"]
        if ledger_for(connection).rolls_back(connection, exc):
            connection.needs_rollback = True
        raise


def _stale(lease: Lease, found: Overtaken | None) -> StaleFence:
    # Where a snapshot hides what the locking read has seen, no more is known.
    why, holder = found or Overtaken("a newer grant exists")
    logger.error(
        "Refused a stale transaction: lock=%r writer_token=%s holder=%s",
        lease.name,
        lease.token,
        holder or "unknown",
        extra=logs.about(lease, holder=holder and str(holder)),
    )
    signals.send(
        signals.stale_transaction_rejected,
        type(lease),
        name=lease.name,
        alias=lease.alias,
        lease=lease,
        holder=holder,
    )
    return StaleFence(
        f"lease.atomic() of lock {lease.name!r} under token {lease.token} was refused: {why}.",
        name=lease.name,
        owner=lease.owner_id,
        token=lease.token,
        holder=holder,
    )


def _is_gone(connection: BaseDatabaseWrapper, session: Any) -> bool:
    # Django may have reconnected by now.
    return connection.connection is not session or not connection.is_usable()


def _idled(error: Error) -> bool:
    return sqlstate(error) == IDLE_TOO_LONG
