"""
The condition that a grant is still the newest of its name, and stays so until the writer commits.

The locking clause is what makes a fenced write airtight. Without it a newer grant could commit
between the check and the writer's commit, and the writer wouldn't see it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, Expression
from django.db.models.sql.compiler import SQLCompiler

from .ledger import FENCE

#: How each vendor locks a row that it reads, so that others may read and lock it, and nobody write.
SHARE = {"postgresql": " FOR SHARE", "mysql": " LOCK IN SHARE MODE", "sqlite": ""}

# Ends the session of a transaction that fell silent. Set until the transaction's end, at the cost
# of no round trip, unless a smaller limit is there already. Always true: compared with NULL, and
# read as a value, since the planner would weigh a condition first. No arithmetic, which would cost
# more than all the rest.
_PATIENCE = "'idle_in_transaction_session_timeout'"
_BE_PATIENT = (
    f"(nullif(current_setting({_PATIENCE}), '0')::interval <= %s"
    f" OR set_config({_PATIENCE}, %s, true) IS NOT NULL)"
)
#: The longest that it can be set to, in milliseconds.
_LONGEST = 2**31 - 1


class WriteGrant(NamedTuple):
    """The grant that a write is made under."""

    name: str
    token: int
    owner: str
    alias: str
    #: For how long a silent transaction may keep the next grant waiting, in seconds.
    patience: float


def pin_sql(connection: BaseDatabaseWrapper, grant: WriteGrant) -> tuple[str, list[Any]]:
    """A SELECT that locks the fence's row and is true, if `grant` is the newest of its name."""
    value = "true"
    given: list[Any] = []
    if connection.vendor == "postgresql" and not connection.get_autocommit():
        value = _BE_PATIENT
        given = [f"{min(max(1, round(grant.patience * 1000)), _LONGEST)}ms"] * 2
    given += grant[:3]
    where = f"name = %s AND token = %s AND owner = %s{SHARE[connection.vendor]}"
    return f"SELECT {value} FROM {FENCE} WHERE {where}", given


class Pin(Expression):
    """The condition as an expression, for WHERE, SET and VALUES."""

    output_field = BooleanField()
    conditional = True
    allowed_default = True

    def __init__(self, grant: WriteGrant) -> None:
        super().__init__()
        self.grant = grant

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, tuple[Any, ...]]:
        select, given = pin_sql(connection, self.grant)
        return f"({select})", tuple(given)

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.__class__, self.grant)


def is_newest(using: str, grant: WriteGrant) -> bool:
    """Lock the fence's row until the transaction ends; False if `grant` isn't the newest."""
    connection = connections[using]
    select, given = pin_sql(connection, grant)
    with connection.cursor() as cursor:
        cursor.execute(select, given)
        return cursor.fetchone() is not None
