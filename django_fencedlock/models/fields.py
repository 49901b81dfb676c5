"""The columns that fenced and versioned models add, and the constraints that go with them."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models import Field, Q
from django.utils.translation import gettext_lazy as _

#: What a bulk statement writes where it may not write: the constraint then fails the statement.
REFUSED = -1
_LONGEST = 60


class RefusedRow(models.CheckConstraint):
    """
    Fails a statement that wrote `REFUSED` into a column.

    Filtering the rows instead would pass over the stale ones in silence.
    """

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Nobody edits the column, so a form's validation needn't ask the database."""


if TYPE_CHECKING:
    _BigInteger = models.BigIntegerField[int, int]
else:
    _BigInteger = models.BigIntegerField


class StampField(_BigInteger):
    """A number that the package writes: 0 at first, and rising. Not for forms nor fixtures."""

    #: The end of the constraint's name.
    purpose: str
    #: The package knows what it writes: an INSERT need not return it, for all its db_default.
    db_returning = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # With a default of Python's alone, code that doesn't know the column yet would fail to
        # insert rows in the middle of a deployment. Fixtures with the column would lower it.
        kwargs.update(default=0, db_default=0, editable=False, serialize=False)
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()
        for key in ("default", "editable", "serialize"):
            kwargs.pop(key, None)
        return name, path, args, kwargs

    def contribute_to_class(self, cls: Any, name: str, *args: Any, **kwargs: Any) -> None:
        if any(_has_own(base, name) for base in cls.__mro__[1:]):
            return  # The column is in the table of a parent, and one is enough.
        # Last of all fields, where it disturbs no positional argument: fields of an abstract
        # parent would come first.
        self.creation_counter = Field.creation_counter
        Field.creation_counter += 1
        super().contribute_to_class(cls, name, *args, **kwargs)
        # Migrations' models have the constraint from their own operations, and unmanaged ones from
        # whoever manages the table: a model of the same table has the same name for it.
        if not cls._meta.abstract and cls._meta.managed and cls.__module__ != "__fake__":
            models.signals.class_prepared.connect(self._add_constraint, sender=cls)

    def _add_constraint(self, sender: Any, **kwargs: Any) -> None:
        constraint = RefusedRow(
            condition=Q(**{f"{self.name}__gte": 0}),
            name=constraint_name(sender, self.name),
        )
        meta = sender._meta
        if any(each.name == constraint.name for each in meta.constraints):
            return
        meta.constraints = [*meta.constraints, constraint]
        # Where makemigrations looks.
        meta.original_attrs["constraints"] = meta.constraints


class FenceField(StampField):
    """The token under which the row was last written; 0 if never under a lease."""

    purpose = "fence_refused"
    description = _("Fence")


class VersionField(StampField):
    """How often the row was written."""

    purpose = "version_refused"
    description = _("Version")


def constraint_name(model: Any, column: str) -> str:
    """The name of the constraint on a column of `model`."""
    meta = model._meta
    return _fitting(f"{meta.db_table}_{meta.get_field(column).purpose}")


def _has_own(base: Any, name: str) -> bool:
    meta = getattr(base, "_meta", None)
    return (
        meta is not None
        and not meta.abstract
        and any(field.name == name for field in meta.local_fields)
    )


def _fitting(name: str) -> str:
    # A table may be named with its schema: '"schema"."table"'.
    name = re.sub(r"_*\W[\W_]*", "_", name).strip("_")
    if len(name) <= _LONGEST:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{name[: _LONGEST - 9]}_{digest}"
