"""What is wrong with fenced models, seen in the code."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import models, router

from . import conf
from .conf import Problem
from .models.fenced import FencedModel
from .models.fencing import Fencing
from .models.fields import FenceField, StampField
from .models.guarded import GuardedModel
from .models.managers import BaseRowsManager
from .models.querysets import FencedQuerySet
from .models.versioned import VersionedModel

Model = type[models.Model]

#: What the database does by itself when a row goes, from Django 6.1 on.
_BY_DATABASE = ("DB_CASCADE", "DB_SET_NULL", "DB_SET_DEFAULT")


def problems(chosen: Iterable[Model]) -> Iterator[Problem]:
    """What is wrong with those of the chosen models that are fenced or versioned."""
    for model in chosen:
        if issubclass(model, GuardedModel):
            yield from _inheritance_problems(model)
            yield from _column_problems(model)
            yield from _manager_problems(model)
            yield from _database_rule_problems(model)
            if has_fence(model):
                yield from _fencing_problems(model)


def _fencing_problems(model: Model) -> Iterator[Problem]:
    spec = inspect.getattr_static(model, "fencing", None)
    label = model._meta.label
    if not isinstance(spec, Fencing):
        yield Problem(
            "E021",
            f"{label}.fencing is {spec!r}.",
            'Write it as fencing = Fencing("account:{account_id}").',
        )
        return
    yield from _template_problems(model, spec)
    yield from _second_lock_problems(model, spec)
    if conf.lacks(spec.backend):
        yield Problem(
            "E022",
            f"{label}.fencing names the alias {spec.backend!r}, which FENCEDLOCK hasn't.",
            conf.unknown(spec.backend, conf.aliases()),
        )
    elif spec.serialised:
        yield from _router_problems(model, spec)


def _template_problems(model: Model, spec: Fencing) -> Iterator[Problem]:
    try:
        spec.plan(model)
    except (ImproperlyConfigured, ValueError) as exc:
        columns = [field.attname for field in model._meta.concrete_fields]
        yield Problem(
            "E020",
            f"The locks of {model._meta.label} are named by {spec.template!r}: "
            f"{str(exc).rstrip('.')}.",
            f"Use {{pk}} and the model's columns: {', '.join(columns)}.",
        )


def _second_lock_problems(model: Model, spec: Fencing) -> Iterator[Problem]:
    table: Any = model._meta.get_field("fence").model
    of_table = inspect.getattr_static(table, "fencing", None)
    if not isinstance(of_table, Fencing) or table._meta.concrete_model is model:
        return
    default = f"{table._meta.label_lower}:{{pk}}"
    templates = {each.template or default for each in (spec, of_table)}
    if len(templates) > 1 or spec.mode != of_table.mode:
        label, owner = model._meta.label, table._meta.label
        yield Problem(
            "E026",
            f"{label}.fencing differs from that of {owner}, whose table has the fence: a row would "
            "have two locks, and tokens of different locks can't be compared.",
            f"Take the attribute away from {label}, or give it the template and mode of {owner}.",
        )


def _router_problems(model: Model, spec: Fencing) -> Iterator[Problem]:
    try:
        rows = router.db_for_write(model)
        fences = conf.config(spec.backend).fence_database
    except Exception:
        # A router may go by the row, which a check hasn't. The settings have checks of their own.
        return
    if rows != fences:
        yield Problem(
            "E023",
            f"{model._meta.label} is written to database {rows!r}, and the fences of alias "
            f"{spec.backend!r} are in {fences!r}.",
            f"Name {rows!r} as FENCE_DATABASE of an alias and that one as Fencing(backend=...), or "
            "use Fencing(mode='high_water'), which promises less.",
        )


def _inheritance_problems(model: Model) -> Iterator[Problem]:
    for name in ("fence", "version"):
        owners = [
            field.model._meta.label
            for field in model._meta.concrete_fields
            if isinstance(field, StampField) and field.name == name
        ]
        if len(owners) > 1:
            yield Problem(
                "E024",
                f"{model._meta.label} has {len(owners)} columns {name!r}, of {' and '.join(owners)}"
                ": a row can be fenced and versioned in one table alone.",
                "Keep it in one of the tables: let the others inherit from models.Model.",
            )


def _column_problems(model: Model) -> Iterator[Problem]:
    for base, name in ((FencedModel, "fence"), (VersionedModel, "version")):
        if not issubclass(model, base):
            continue
        field = {each.name: each for each in model._meta.fields}.get(name)
        if not isinstance(field, StampField):
            yield Problem(
                "E025",
                f"{model._meta.label} has no field {name!r} such as {base.__name__} writes"
                + ("." if field is None else f", but a {type(field).__name__} of that name."),
                f"Give the model's own field another name, and leave {name!r} to {base.__name__}.",
            )


def _manager_problems(model: Model) -> Iterator[Problem]:
    if not _is_fenced(model._default_manager):
        yield Problem(
            "W020",
            f"The default manager of {model._meta.label}, {model._default_manager.name!r}, isn't "
            "fenced: its update(), bulk_*() and delete(), those of related managers, and the "
            "admin's actions write without a look at fence and version.",
            _HINT,
        )
    if not isinstance(model._base_manager, BaseRowsManager):
        yield Problem(
            "W021",
            f"The base manager of {model._meta.label} is {model._base_manager.name!r} in place of "
            "the package's own: cascades, SET_NULL, and add() and clear() of related managers may "
            "write without a look at fence and version, or not find the row.",
            "Leave base_manager_name out of the model's Meta, and inherit no Meta that has it; or "
            'set it to "_guarded_rows".',
        )
    yield from _hidden_manager_problems(model)


def _hidden_manager_problems(model: Model) -> Iterator[Problem]:
    of_bases = [
        (base, manager)
        for base in model.__mro__
        for manager in getattr(getattr(base, "_meta", None), "local_managers", ())
        if manager.name == "objects" and not manager.auto_created
    ]
    if not of_bases or of_bases[0][0] is not GuardedModel:
        return  # The model's own, or that of a class that knows of both.
    for base, manager in of_bases[1:]:
        if type(manager) is not models.Manager:
            yield Problem(
                "W027",
                f"{model._meta.label}.objects is the FencedManager of the package, and hides the "
                f"{type(manager).__name__} of {base.__name__}: rows that it leaves out, such as "
                "deleted ones, are found.",
                f"Write objects in {model._meta.label}, made of both: class Both("
                f"{type(manager).__name__}, FencedManager). If it has its own queryset, make one "
                "of both as well.",
            )


_HINT = (
    "Make it with FencedManager, or FencedManager.from_queryset(...) of a subclass of "
    "FencedQuerySet, from django_fencedlock.models."
)


def _is_fenced(manager: Any) -> bool:
    if issubclass(getattr(manager, "_queryset_class", object), FencedQuerySet):
        return True
    with contextlib.suppress(Exception):
        # It may want a request or a tenant, which a check hasn't.
        return isinstance(manager.get_queryset(), FencedQuerySet)
    return False


def _database_rule_problems(model: Model) -> Iterator[Problem]:
    rules = {getattr(models, name, None): name for name in _BY_DATABASE}
    for field in model._meta.local_fields:
        rule = rules.get(getattr(field.remote_field, "on_delete", None))
        if rule is not None and field.remote_field is not None:
            target = field.remote_field.model._meta.label
            yield Problem(
                "W022",
                f"{model._meta.label}.{field.name} has on_delete={rule}: when a row of {target} "
                "goes, the database writes this table, under no lease and unseen by Django.",
                f"Use on_delete=models.{rule.removeprefix('DB_')}.",
            )


def has_fence(model: Model) -> bool:
    """Whether a model has a fence, be it in the table of a parent."""
    return any(isinstance(field, FenceField) for field in model._meta.concrete_fields)
