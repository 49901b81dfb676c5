"""What is wrong with the tables of fenced models, in their databases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations import DeleteModel, RenameModel, SeparateDatabaseAndState

from . import operations
from .conf import Problem
from .model_checks import Model, has_fence
from .models.comparing import is_text, taken_for_equal, target_of
from .models.fenced import FencedModel
from .models.fields import StampField, constraint_name
from .models.guarded import GuardedModel
from .models.tables import exact_collation

#: By app and lower-case name of a model, the `named_by` of its trigger.
Declared = dict[tuple[str, str], tuple[str, ...]]


def problems(databases: Iterable[str]) -> Iterator[Problem]:
    """What is wrong with the fenced and versioned tables of these databases."""
    for alias in databases:
        tables, connection = list(_tables_in(alias)), connections[alias]
        if tables and _answers(connection):
            yield from _mode_problems(connection)
            yield from _constraint_problems(connection, tables)
            yield from _collation_problems(connection)
            if connection.vendor == "postgresql":
                yield from _trigger_problems(connection)


def has_tables(database: str) -> bool:
    """Whether a database has tables of fenced or versioned models."""
    tables = {model._meta.db_table for model in _tables_in(database)}
    if not tables:
        return False
    connection = connections[database]
    with connection.cursor() as cursor:
        return not tables.isdisjoint(connection.introspection.table_names(cursor))


def _mode_problems(connection: BaseDatabaseWrapper) -> Iterator[Problem]:
    if connection.vendor != "mysql":
        return
    mode = str(_row(connection, "SELECT @@sql_mode")[0])
    if not {"STRICT_TRANS_TABLES", "STRICT_ALL_TABLES"} & set(mode.split(",")):
        yield Problem(
            "W023",
            f"Database {connection.alias!r} isn't strict, its sql_mode being {mode!r}: values that "
            "don't fit are changed until they do, where a fenced write has to be refused.",
            "Add STRICT_TRANS_TABLES to the sql_mode, in OPTIONS or the server's configuration.",
        )
    mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
    if mariadb and not _row(connection, "SELECT @@check_constraint_checks")[0]:
        yield Problem(
            "W023",
            f"Database {connection.alias!r} has check_constraint_checks off, so that stale "
            "statements over many rows pass.",
            "Set check_constraint_checks to ON.",
        )


def _constraint_problems(
    connection: BaseDatabaseWrapper, tables: Sequence[Model]
) -> Iterator[Problem]:
    introspection = connection.introspection
    with connection.cursor() as cursor:
        present = set(introspection.table_names(cursor))
        for model in tables:
            table = model._meta.db_table
            if table not in present:
                continue  # migrate runs this check before it makes the tables.
            described = introspection.get_table_description(cursor, table)
            columns = {column.name for column in described}
            found = introspection.get_constraints(cursor, table)
            for field in _stamps(model):
                name = constraint_name(model, field.name)
                if field.column in columns and name not in found:
                    yield _missing(connection.alias, model, field, name)


def _missing(alias: str, model: Model, field: StampField, name: str) -> Problem:
    return Problem(
        "W024",
        f"Table {model._meta.db_table!r} of database {alias!r} hasn't the constraint {name!r}: a "
        f"stale statement over many rows would write -1 into {field.column!r} instead of failing.",
        "Migrate. If the database lost it, add it: "
        f"CHECK ({connections[alias].ops.quote_name(str(field.column))} >= 0).",
    )


def _collation_problems(connection: BaseDatabaseWrapper) -> Iterator[Problem]:
    # By table and column, for models that share them have one problem.
    naming = {
        (field.model._meta.db_table, field.column): (model, field)
        for model in apps.get_models()
        if issubclass(model, FencedModel) and router.allow_migrate_model(connection.alias, model)
        for field in _text_fields_of_name(model)
    }
    present = connection.introspection.table_names() if naming else []
    for (table, column), (model, field) in naming.items():
        if table not in present or column not in _columns_of(connection, table):
            continue  # migrate runs this check before it makes them.
        if alike := taken_for_equal(connection, table, column):
            target = target_of(field)
            yield Problem(
                "W026",
                f"Column {column!r} of {table!r} names locks of {model._meta.label}, and database "
                f"{connection.alias!r} takes {alike} there: what counts as one value would have "
                "two locks.",
                f"Give {target.model._meta.label}.{target.name} a collation that compares every "
                f"character, as db_collation={_exact_collation(connection)!r}, and migrate.",
            )


def _exact_collation(connection: BaseDatabaseWrapper) -> str:
    if connection.vendor == "mysql":
        return exact_collation(connection)
    return "C" if connection.vendor == "postgresql" else "BINARY"


def _text_fields_of_name(model: Model) -> Iterator[Any]:
    """The text columns that a model's locks are named by."""
    try:
        parts = model.fencing.plan.parts  # type: ignore[attr-defined]
    except (AttributeError, ImproperlyConfigured, ValueError):
        return  # E020 and E021 say what is wrong with it.
    for part in parts:
        if part.field is not None and is_text(part.field):
            yield part.field


def _columns_of(connection: BaseDatabaseWrapper, table: str) -> set[str]:
    introspection = connection.introspection
    with connection.cursor() as cursor:
        return {each.name for each in introspection.get_table_description(cursor, table)}


def _trigger_problems(connection: BaseDatabaseWrapper) -> Iterator[Problem]:
    for model, declared in declared_triggers(connection).items():
        if router.allow_migrate_model(connection.alias, model):
            named_by = _naming_fields(model, declared)
            state = _state_of_trigger(connection, model, named_by)
            if state:
                names = f", named_by={list(named_by)!r}" if named_by else ""
                yield Problem(
                    "W025",
                    f"A migration gives {model._meta.label} a FenceTrigger, and in database "
                    f"{connection.alias!r} it {state}.",
                    f"Run it again, in a new migration: FenceTrigger({model.__name__!r}{names}).",
                )


def _naming_fields(model: Model, declared: Sequence[str]) -> tuple[str, ...]:
    """What a trigger is to be told of the names of the model's locks; nothing if it is the key."""
    if not has_fence(model):
        return ()
    plan = model.fencing.plan  # type: ignore[attr-defined]
    own = model._meta.local_concrete_fields
    if plan.columns is None:
        # Only the callable knows. What the migration said is kept, as far as it still holds.
        known = {"pk", *(name for field in own for name in (field.name, field.attname))}
        return tuple(name for name in declared if name in known)
    naming = [field for field in own if field.attname in plan.columns]
    if set(naming) == set(plan.pk):
        return ()
    return tuple(field.name for field in naming)


def declared_triggers(connection: BaseDatabaseWrapper) -> dict[Model, tuple[str, ...]]:
    """The models that the migrations applied to a database give a trigger, and its `named_by`."""
    loader = MigrationLoader(connection)
    declared: Declared = {}
    seen = set()
    for leaf in loader.graph.leaf_nodes():
        for node in loader.graph.forwards_plan(leaf):
            if node not in seen and node in loader.applied_migrations:
                seen.add(node)
                _follow(node[0], loader.graph.nodes[node].operations, declared)
    return {
        apps.all_models[app][name]: named_by
        for (app, name), named_by in declared.items()
        if name in apps.all_models[app]
    }


def _follow(app: str, steps: Iterable[Any], declared: Declared) -> None:
    """Keep account of the models with a trigger while they are renamed and deleted."""
    for operation in steps:
        match operation:
            case operations.FenceTrigger():
                declared[app, operation.model_name.lower()] = operation.named_by
            case operations.RemoveFenceTrigger():
                declared.pop((app, operation.model_name.lower()), None)
            case DeleteModel():
                declared.pop((app, operation.name_lower), None)
            case RenameModel():
                if (app, operation.old_name_lower) in declared:
                    named_by = declared.pop((app, operation.old_name_lower))
                    declared[app, operation.new_name_lower] = named_by
            case SeparateDatabaseAndState():
                _follow(app, operation.database_operations, declared)
                _follow(app, operation.state_operations, declared)


def _state_of_trigger(
    connection: BaseDatabaseWrapper, model: Model, named_by: Sequence[str]
) -> str:
    """What is the matter with a model's trigger; empty if nothing is, or if there is no table."""
    quoted = connection.ops.quote_name(model._meta.db_table)
    columns = _row(connection, _COLUMNS, [quoted])[0]
    wanted = operations.Trigger.of(model, named_by).among(columns or ())
    if not wanted:
        return ""
    found = _row(connection, _TRIGGER, [quoted, operations.NAME])
    if not found:
        return "isn't there"
    enabled, comment, body = found
    if not enabled:
        return "is disabled"
    if comment != wanted.comment or body != operations.BODY:
        return "is another than that of this release for the table's columns and its lock's name"
    return ""


_COLUMNS = """
SELECT array_agg(attname::text) FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""
_TRIGGER = """
SELECT t.tgenabled IN ('O', 'A'), obj_description(t.oid, 'pg_trigger'), p.prosrc
FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
WHERE t.tgrelid = to_regclass(%s) AND t.tgname = %s
"""


def _answers(connection: BaseDatabaseWrapper) -> bool:
    """Whether it can be asked; if it can't, other checks say so, or migrate."""
    try:
        connection.ensure_connection()
    except Error:
        return False
    return True


def _row(connection: BaseDatabaseWrapper, sql: str, given: Sequence[Any] = ()) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql, given or None)
        return cursor.fetchone()


def _tables_in(alias: str) -> Iterator[Model]:
    for model in apps.get_models():
        has_table = issubclass(model, GuardedModel) and not model._meta.proxy
        if has_table and any(_stamps(model)) and router.allow_migrate_model(alias, model):
            yield model


def _stamps(model: Model) -> Iterator[StampField]:
    return (field for field in model._meta.local_fields if isinstance(field, StampField))
