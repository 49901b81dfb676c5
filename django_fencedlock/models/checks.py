"""System checks of fenced and versioned models: in the code, and in the database."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, models, router
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import conf, operations
from ..problems import Problem
from ..storage.tables import exact_collation
from .fenced import FencedModel
from .fencing import RESERVED, Fencing
from .fields import FenceField, StampField, confused_texts, constraint_name, is_text, target_of
from .queryset import BaseRowsManager, FencedQuerySet, GuardedModel
from .versioned import VersionedModel

Model = type[models.Model]


def model_problems(chosen: Iterable[Model]) -> Iterator[Problem]:
    """Check those of the chosen models that are fenced or versioned."""
    for model in chosen:
        if issubclass(model, GuardedModel):
            yield from _column_problems(model)
            yield from _manager_problems(model)
            yield from _database_rule_problems(model)
            if has_fence(model):
                yield from _fencing_problems(model)


def has_fence(model: Model) -> bool:
    """Whether a model has a fence, be it in the table of a parent."""
    return any(isinstance(field, FenceField) for field in model._meta.concrete_fields)


def _fencing_problems(model: Model) -> Iterator[Problem]:
    label, spec = model._meta.label, _spec_of(model)
    if not isinstance(spec, Fencing):
        yield Problem(
            "E021",
            f"{label}.fencing is {spec!r}.",
            'Write it as fencing = Fencing("account:{account_id}").',
        )
        return
    try:
        spec.__get__(None, model)
    except (ImproperlyConfigured, ValueError) as exc:
        columns = [field.attname for field in model._meta.concrete_fields]
        yield Problem(
            "E020",
            f"{label}.fencing can't be used: {str(exc).rstrip('.')}.",
            f"Use {{pk}} and the model's columns: {', '.join(columns)}.",
        )
    else:
        if taken := RESERVED.intersection(model.fencing.columns or ()):  # type: ignore[attr-defined]
            yield Problem(
                "W028",
                f"The locks of {label} are named by {', '.join(sorted(taken))}, which "
                "fencing.lock() takes for its own argument of that name.",
                f"Write {model.fencing.usage()}.",  # type: ignore[attr-defined]
            )
    table: Any = model._meta.get_field("fence").model
    of_table = _spec_of(table)
    if isinstance(of_table, Fencing) and _locks(spec, table) != _locks(of_table, table):
        yield Problem(
            "E026",
            f"{label}.fencing differs from that of {table._meta.label}, whose table has the fence: "
            "the tokens of a row's two locks can't be compared.",
            f"Remove the attribute from {label}, or use that template and mode.",
        )
    if conf.lacks(spec.backend):
        yield Problem(
            "E022",
            f"{label}.fencing names the alias {spec.backend!r}, which FENCEDLOCK doesn't have.",
            conf.unknown(spec.backend, conf.aliases()),
        )
    elif spec.serialised:
        yield from _router_problems(model, spec)


def _spec_of(model: Model) -> Any:
    return inspect.getattr_static(model, "fencing", None)


def _locks(spec: Fencing, table: Model) -> tuple[Any, str, bool]:
    """Return what decides which lock a row has, and what its token says."""
    return spec.template or f"{table._meta.label_lower}:{{pk}}", spec.mode, spec.path


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
            f"Give Fencing(backend=...) an alias with {rows!r} as FENCE_DATABASE, or use "
            "Fencing(mode='high_water'), which promises less.",
        )


def _column_problems(model: Model) -> Iterator[Problem]:
    for base, name in ((FencedModel, "fence"), (VersionedModel, "version")):
        field = next((each for each in model._meta.fields if each.name == name), None)
        if issubclass(model, base) and not isinstance(field, StampField):
            kind = type(field).__name__
            article = "an" if kind[0] in "AEIOU" else "a"
            of_model = f"{model._meta.label}.{name} is {article} {kind}"
            if field is None:
                of_model = f"{model._meta.label} has no field {name!r}"
            yield Problem(
                "E025",
                f"{of_model}, but {base.__name__} needs this name for its own field.",
                "Rename that field." if field else f"Remove {name} = None from the class.",
            )


def _manager_problems(model: Model) -> Iterator[Problem]:
    label, default, base = model._meta.label, model._default_manager, model._base_manager
    if not issubclass(getattr(default, "_queryset_class", object), FencedQuerySet):
        yield Problem(
            "W020",
            f"The default manager of {label}, {default.name!r}, isn't fenced: its update(), "
            "bulk_*() and delete(), and those of related managers, check no fence or version.",
            "Make it with FencedManager, or FencedManager.from_queryset(...) of a subclass of "
            "FencedQuerySet, from django_fencedlock.models.",
        )
    if not isinstance(base, BaseRowsManager):
        yield Problem(
            "W021",
            f"The base manager of {label} is {base.name!r} in place of the package's own: "
            "cascades, SET_NULL and related managers may check no fence or version.",
            f"Write base_manager_name = None in the Meta of {model.__name__}, also if a base class "
            "sets the other one.",
        )
    managers = [
        (owner, manager)
        for owner in model.__mro__
        for manager in getattr(getattr(owner, "_meta", None), "local_managers", ())
        if manager.name == "objects" and not manager.auto_created
    ]
    if managers and managers[0][0] is not GuardedModel:
        return  # It is the model's own, or that of a class that combines both.
    for owner, manager in managers[1:]:
        if (kind := type(manager)) is not models.Manager:
            yield Problem(
                "W027",
                f"{label}.objects is the FencedManager of the package, and hides the "
                f"{kind.__name__} of {owner.__name__}, with what that leaves out.",
                f"Write objects in {label}, made of both: class Both({kind.__name__}, "
                "FencedManager). If it has its own queryset, make one of both as well.",
            )


def _database_rule_problems(model: Model) -> Iterator[Problem]:
    for field in model._meta.local_fields:
        remote: Any = field.remote_field
        rule = getattr(getattr(remote, "on_delete", None), "__name__", "")
        if rule.startswith("DB_"):
            yield Problem(
                "W022",
                f"{model._meta.label}.{field.name} has on_delete={rule}: when a row of "
                f"{remote.model._meta.label} is deleted, the database writes this table, under no "
                "lease and unseen by Django.",
                f"Use on_delete=models.{rule.removeprefix('DB_')}.",
            )


# Tables


def table_problems(databases: Iterable[str]) -> Iterator[Problem]:
    """Check the fenced and versioned tables of these databases."""
    for alias in databases:
        tables, connection = list(_tables_in(alias)), connections[alias]
        if not tables:
            continue
        try:
            connection.ensure_connection()
        except Error:
            continue  # Other checks report it, or migrate.
        yield from _mode_problems(connection)
        yield from _constraint_problems(connection, tables)
        yield from _collation_problems(connection)
        if connection.vendor == "postgresql":
            yield from _trigger_problems(connection, tables)


def has_tables(database: str) -> bool:
    """Whether a database has tables of fenced or versioned models."""
    tables = {model._meta.db_table for model in _tables_in(database)}
    return bool(tables) and not tables.isdisjoint(connections[database].introspection.table_names())


def _tables_in(alias: str) -> Iterator[Model]:
    for model in apps.get_models():
        has_table = issubclass(model, GuardedModel) and not model._meta.proxy
        if has_table and any(_stamps(model)) and router.allow_migrate_model(alias, model):
            yield model


def _stamps(model: Model) -> Iterator[StampField]:
    return (field for field in model._meta.local_fields if isinstance(field, StampField))


def _mode_problems(connection: BaseDatabaseWrapper) -> Iterator[Problem]:
    is_mariadb = getattr(connection, "mysql_is_mariadb", False)
    if is_mariadb and not _row(connection, "SELECT @@check_constraint_checks")[0]:
        yield Problem(
            "W023",
            f"Database {connection.alias!r} has check_constraint_checks off: stale statements over "
            "many rows pass.",
            "Set check_constraint_checks to ON.",
        )


def _constraint_problems(
    connection: BaseDatabaseWrapper, tables: Sequence[Model]
) -> Iterator[Problem]:
    for model in tables:
        table = model._meta.db_table
        columns = _columns_of(connection, table)
        with connection.cursor() as cursor:
            present = columns and connection.introspection.get_constraints(cursor, table)
        for field in _stamps(model):
            name = constraint_name(model, field.name)
            if field.column in columns and name not in present:
                column = connection.ops.quote_name(str(field.column))
                yield Problem(
                    "W024",
                    f"Table {table!r} of database {connection.alias!r} lacks the constraint "
                    f"{name!r}: stale statements over many rows would pass, and write -1.",
                    f"Migrate. If the database lost it, add it: CHECK ({column} >= 0).",
                )


def _collation_problems(connection: BaseDatabaseWrapper) -> Iterator[Problem]:
    # By table and column, for models that share them have one problem.
    naming = {
        (field.model._meta.db_table, field.column): (model, field)
        for model in apps.get_models()
        if issubclass(model, FencedModel) and router.allow_migrate_model(connection.alias, model)
        for field in _text_fields_of_name(model)
    }
    exact = {"postgresql": "C", "sqlite": "BINARY"}.get(connection.vendor)
    for (table, column), (model, field) in naming.items():
        if column not in _columns_of(connection, table):
            continue
        if confused := confused_texts(connection, field):
            target = target_of(field)
            yield Problem(
                "W026",
                f"Column {column!r} of {table!r} names locks of {model._meta.label}, and database "
                f"{connection.alias!r} takes {confused} there: one value would have two locks.",
                f"Give {target.model._meta.label}.{target.name} the "
                f"db_collation={exact or exact_collation(connection)!r}, and migrate.",
            )


def _text_fields_of_name(model: Model) -> list[Any]:
    """Return the text columns that a model's locks are named by."""
    try:
        parts = model.fencing.parts  # type: ignore[attr-defined]
    except (AttributeError, ImproperlyConfigured, ValueError):
        return []  # E020 and E021 report it.
    return [part.field for part in parts if part.field is not None and is_text(part.field)]


def _columns_of(connection: BaseDatabaseWrapper, table: str) -> set[str]:
    """Return the columns of a table; none if migrate has yet to create it."""
    introspection = connection.introspection
    with connection.cursor() as cursor:
        if table not in introspection.table_names(cursor):
            return set()
        return {each.name for each in introspection.get_table_description(cursor, table)}


# Triggers

_TRIGGER = """
SELECT t.tgenabled IN ('O', 'A'), t.tgargs, p.prosrc
FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
WHERE t.tgrelid = to_regclass(%s) AND t.tgname = %s
"""


def _trigger_problems(
    connection: BaseDatabaseWrapper, tables: Sequence[Model]
) -> Iterator[Problem]:
    for model in tables:
        table = model._meta.db_table
        found = _row(connection, _TRIGGER, [connection.ops.quote_name(table), operations.NAME])
        if found is None:
            continue
        enabled, arguments, body = found
        given = tuple(bytes(arguments).decode().split("\0")[:-1])
        named_by = _naming_fields(model, given[2:])
        wanted = operations.arguments_of(model, named_by)
        if not {*filter(None, wanted)} <= _columns_of(connection, table):
            continue  # Migrations are due.
        if not enabled:
            state = "is disabled"
        elif (given, body) != (wanted, operations.BODY):
            state = "is another than this release makes for its columns and its lock's name"
        else:
            continue
        names = f", named_by={named_by!r}" if named_by else ""
        yield Problem(
            "W025",
            f"The FenceTrigger of {model._meta.label} in database {connection.alias!r} {state}.",
            f"Run it again, in a new migration: FenceTrigger({model.__name__!r}{names}).",
        )


def _naming_fields(model: Model, given: Sequence[str]) -> list[str]:
    """Return the `named_by` that a trigger should have; none if the key names the locks."""
    if not has_fence(model):
        return []
    fencing, own = model.fencing, model._meta.local_concrete_fields  # type: ignore[attr-defined]
    if fencing.columns is None:  # Only the callable knows, so what the trigger has is kept.
        return [field.name for field in own if field.column in given]
    naming = [field for field in own if field.attname in fencing.columns]
    return [] if set(naming) == set(fencing.pk) else [field.name for field in naming]


def _row(connection: BaseDatabaseWrapper, sql: str, given: Sequence[Any] = ()) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql, given or None)
        return cursor.fetchone()
