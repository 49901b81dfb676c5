"""Columns: those that fenced and versioned models add, and the exact comparison of texts."""

from __future__ import annotations

import hashlib
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from django.db import Error, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Field, Func, Q, Value
from django.db.models.lookups import Exact
from django.db.models.sql.compiler import SQLCompiler

#: What a statement writes into a row that it may not write: the CHECK constraint then fails it.
REJECTED = -1
_LONGEST_NAME = 60


class RejectedRow(models.CheckConstraint):
    """Fails a statement that wrote `REJECTED`; a filter would skip stale rows silently."""

    def deconstruct(self) -> Any:
        # Migrations must work without this package, once it is removed from the project.
        return "django.db.models.CheckConstraint", *super().deconstruct()[1:]

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Skip the query: no form edits the column."""


if TYPE_CHECKING:
    _BigInteger = models.BigIntegerField[int, int]
else:
    _BigInteger = models.BigIntegerField


class StampField(_BigInteger):
    """A number that the package writes: 0 at first, and rising. Not for forms nor fixtures."""

    #: The package knows what it writes, so an INSERT needn't return it in spite of db_default.
    db_returning = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Without db_default, code of the release before the column couldn't insert rows during a
        # deployment. If it were serialised, fixtures would lower it.
        kwargs.update(default=0, db_default=0, editable=False, serialize=False)
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        for key in ("default", "editable", "serialize"):
            kwargs.pop(key, None)
        # See RejectedRow.
        return name, "django.db.models.BigIntegerField", args, kwargs

    def contribute_to_class(self, cls: Any, name: str, *args: Any, **kwargs: Any) -> None:
        for base in cls.__mro__[1:]:
            meta = getattr(base, "_meta", None)
            if meta and not meta.abstract and any(f.name == name for f in meta.local_fields):
                return  # The column is in the table of a parent, and one is enough.
        # Fields of an abstract parent come first, where this one would shift positional arguments:
        # Invoice(1, "x"). Django has no documented way to put it last.
        self.creation_counter = Field.creation_counter
        Field.creation_counter += 1
        super().contribute_to_class(cls, name, *args, **kwargs)
        # Migrations' models have the constraint from their own operations. The table of an
        # unmanaged model has it from the model that manages the table.
        if not cls._meta.abstract and cls._meta.managed and cls.__module__ != "__fake__":
            models.signals.class_prepared.connect(self._add_constraint, sender=cls)

    def _add_constraint(self, sender: Any, **kwargs: Any) -> None:
        meta, name = sender._meta, constraint_name(sender, self.name)
        if all(each.name != name for each in meta.constraints):
            constraint = RejectedRow(condition=condition(self.name), name=name)
            meta.constraints = [*meta.constraints, constraint]
            # Where makemigrations looks.
            meta.original_attrs["constraints"] = meta.constraints


class FenceField(StampField):
    """The token under which the row was last written; 0 if never under a lease."""


class VersionField(StampField):
    """How often the row was written."""


def condition(column: str) -> Q:
    """Return the condition of the constraint on a column."""
    return Q(**{f"{column}__gte": 0})


def constraint_name(model: Any, column: str) -> str:
    """Return the name of the constraint on a column of `model`."""
    name = f"{model._meta.db_table}_{column}_rejected"
    # A table may be named with its schema: '"schema"."table"'.
    name = re.sub(r"_*\W[\W_]*", "_", name).strip("_")
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{name[: _LONGEST_NAME - 9]}_{digest}"


def is_rejected(error: Error, model: Any, column: str) -> bool:
    """Whether the constraint on a column of `model` failed the statement."""
    name = constraint_name(model._meta.get_field(column).model, column)
    diag = getattr(error.__cause__, "diag", None)
    if diag is not None and getattr(diag, "constraint_name", None):
        return bool(diag.constraint_name == name)
    # SQLite: "CHECK constraint failed: name"; MariaDB (an OperationalError, 4025): "CONSTRAINT
    # `name` failed for ..."; MySQL: "Check constraint 'name' is violated."
    return name in str(error) and "constraint" in str(error).lower()


# Texts are compared by every character, also where a column's collation takes 'a' for 'A'.

_EXACT = {
    "postgresql": '({})::text COLLATE "C"',
    "sqlite": "({}) COLLATE BINARY",
    "mysql": "CAST(CONVERT({} USING utf8mb4) AS BINARY)",
}
#: Texts that differ, and that collations often take for each other.
_PAIRS = (("a", "A"), ("e", "é"), ("a", "a "))


def target_of(field: Any) -> Any:
    """Return the field whose values a foreign key has, or the field itself."""
    while field.remote_field is not None:
        field = field.target_field
    return field


def is_text(field: Any) -> bool:
    kinds = (models.CharField, models.TextField, models.FileField, models.FilePathField)
    return isinstance(target_of(field), kinds)


def exactly(connection: BaseDatabaseWrapper, sql: str) -> str:
    """Return the SQL of a text that equals no other text."""
    return _EXACT[connection.vendor].replace("{}", sql)


class Exactly(Func):
    """A text that equals no other text."""

    arity = 1
    output_field = models.TextField()

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *args: Any, **extra: Any
    ) -> Any:
        extra["template"] = exactly(connection, "%(expressions)s")
        return super().as_sql(compiler, connection, *args, **extra)


def same_text(field: Any, value: Any) -> Q:
    """Return the condition that a column has this very text."""
    return Q(Exact(Exactly(F(field.attname)), Exactly(Value(value, output_field=field))))


def confused_texts(connection: BaseDatabaseWrapper, field: Any) -> str:
    """Return the texts among some pairs that a column takes for each other, for a message."""
    quote = connection.ops.quote_name
    column, table = quote(field.column), quote(field.model._meta.db_table)
    # As a second part of the column's own values, a text is compared as they are.
    text = f"SELECT {column} AS t FROM {table} WHERE 1 = 0 UNION ALL SELECT %s"
    same = f"(SELECT CASE WHEN x.t = y.t THEN 1 ELSE 0 END FROM ({text}) x, ({text}) y)"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join([same] * len(_PAIRS))}", [*chain(*_PAIRS)])
        found = zip(_PAIRS, cursor.fetchone(), strict=True)
    return " and ".join(f"{one!r} for {other!r}" for (one, other), is_same in found if is_same)
