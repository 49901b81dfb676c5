"""Compares texts by every character, also where a column's collation takes some for equal."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Func, Q, Value
from django.db.models.lookups import Exact
from django.db.models.sql.compiler import SQLCompiler

#: What makes a text of one that equals no other.
_EXACT = {
    "postgresql": '({})::text COLLATE "C"',
    "sqlite": "({}) COLLATE BINARY",
    "mysql": "CAST(CONVERT({} USING utf8mb4) AS BINARY)",
}
#: Texts that differ, and that collations often take for each other.
_PAIRS = (("a", "A"), ("e", "é"), ("a", "a "))


def target_of(field: Any) -> Any:
    """The field that a foreign key has the values of, or the field itself."""
    while field.remote_field is not None:
        field = field.target_field
    return field


def is_text(field: Any) -> bool:
    """Whether a column's values are texts."""
    kinds = (models.CharField, models.TextField, models.FileField, models.FilePathField)
    return isinstance(target_of(field), kinds)


def exactly(connection: BaseDatabaseWrapper, sql: str) -> str:
    """The SQL of a text that equals no other."""
    return _EXACT[connection.vendor].replace("{}", sql)


class Exactly(Func):
    """A text that equals no other."""

    arity = 1
    output_field = models.TextField()

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *args: Any, **extra: Any
    ) -> Any:
        extra["template"] = exactly(connection, "%(expressions)s")
        return super().as_sql(compiler, connection, *args, **extra)


def same_text(field: Any, value: Any) -> Q:
    """The condition that a column has this very text."""
    return Q(Exact(Exactly(F(field.attname)), Exactly(Value(value, output_field=field))))


def taken_for_equal(connection: BaseDatabaseWrapper, table: str, column: str) -> str:
    """The texts among some pairs that a column takes for each other, for people."""
    quote = connection.ops.quote_name
    # As a second part of the column's own values, a text is compared as they are.
    text = f"SELECT {quote(column)} AS t FROM {quote(table)} WHERE 1 = 0 UNION ALL SELECT %s"
    found = []
    with connection.cursor() as cursor:
        for one, other in _PAIRS:
            cursor.execute(
                f"SELECT CASE WHEN x.t = y.t THEN 1 ELSE 0 END FROM ({text}) x, ({text}) y",
                [one, other],
            )
            if cursor.fetchone()[0]:
                found.append(f"{one!r} for {other!r}")
    return " and ".join(found)


def may_take_for_equal(connection: BaseDatabaseWrapper, field: Any) -> bool:
    """Whether a text column has to be asked; its texts differ where nothing else was asked for."""
    plain = (field.db_type(connection) or "").startswith(("varchar", "text"))
    declared = getattr(target_of(field), "db_collation", None)
    return connection.vendor == "mysql" or bool(declared) or not plain
