"""Which locks many rows have, and what tells the rows of one from those of another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db import models

from .fencing import FencingOf, value_in

#: The names of locks, each with what tells its rows from others, as look-ups.
Rows = Sequence[tuple[str | None, Mapping[str, Any]]]


def rows_of(fencing: FencingOf, objs: Iterable[Any]) -> Rows:
    """The names of objects, each with what tells their rows from others."""
    keys: dict[str | None, list[Any]] = {}
    columns: dict[str | None, Mapping[str, Any]] = {}
    for obj in objs:
        name = obj.fencing.name_to_write()
        keys.setdefault(name, []).append(obj.pk)
        if fencing.columns is not None and fencing.plan.tells_rows:
            columns[name] = {column: getattr(obj, column) for column in fencing.columns}
    # Where the name's columns don't tell the rows, these go by their keys.
    return [(name, columns.get(name, {"pk__in": pks})) for name, pks in keys.items()]


def all_named(rows: Rows) -> bool:
    """Whether each name is known: objects that Django makes to set an order have keys alone."""
    return all(name is not None for name, _ in rows)


def tells_the_lock(fencing: FencingOf, unique_fields: Sequence[str] | None) -> bool:
    """Whether rows that conflict in these fields have one lock, whichever they are."""
    if fencing.columns is None:
        return False
    meta: Any = fencing.model._meta
    if unique_fields is not None:
        return set(fencing.columns) <= _attributes(meta, unique_fields)
    # MySQL goes by any unique key of the table, also one over an expression.
    if any(getattr(each, "expressions", ()) for each in meta.constraints):
        return False
    unique = [[field.name] for field in meta.concrete_fields if field.unique]
    unique += [constraint.fields for constraint in meta.total_unique_constraints]
    unique += meta.unique_together
    unique += [[field.name for field in meta.pk_fields]]
    return all(set(fencing.columns) <= _attributes(meta, names) for names in unique)


def _attributes(meta: Any, names: Iterable[str]) -> set[str]:
    fields: set[Any] = set()
    for name in names:
        fields.update(meta.pk_fields if name == "pk" else [meta.get_field(name)])
    return {field.attname for field in fields}


def naming_values(
    model: type[models.Model], values: Mapping[str, Any], columns: Sequence[str]
) -> dict[str, Any]:
    """Those of the values that an update() gives to columns of the lock's name."""
    found = {}
    for field in model._meta.concrete_fields:
        if field.attname in columns:
            for key in (field.name, field.attname):
                if key in values:
                    found[field.attname] = value_in(field, values[key])
    return found
