"""
The SQL of the tables; here that of the fences and the registry, in each dialect.

A `Ledger` speaks the dialect of one database. Each call is one short transaction of its own on a
private connection, or a part of the caller's on the connection that a test lends.
"""

from __future__ import annotations

from functools import cache

from django.db.backends.base.base import BaseDatabaseWrapper

from .dialect import Entry, Ledger, Row
from .mysql import MySQLLedger
from .postgresql import PostgresLedger
from .sqlite import SQLiteLedger

__all__ = ["Entry", "Ledger", "Row", "ledger_for"]

_LEDGERS: dict[str, type[Ledger]] = {
    "postgresql": PostgresLedger,
    "sqlite": SQLiteLedger,
    "mysql": MySQLLedger,
}


@cache
def _ledger(vendor: str) -> Ledger:
    return _LEDGERS[vendor]()


def ledger_for(connection: BaseDatabaseWrapper) -> Ledger:
    """The ledger that speaks this connection's dialect."""
    return _ledger(connection.vendor)
