"""System checks of fenced and versioned models: in the code, and in the database."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, models, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.operations import DeleteModel, RenameModel, SeparateDatabaseAndState

from .. import conf, operations
from ..problems import Problem
from ..storage.tables import exact_collation
from .fenced import FencedModel
from .fencing import Fencing
from .fields import FenceField, StampField, confused_texts, constraint_name, is_text, target_of
from .queryset import BaseRowsManager, FencedQuerySet, GuardedModel
from .versioned import VersionedModel

Model = type[models.Model]

#: The values of on_delete by which the database writes the rows itself, from Django 6.1 on.
_DATABASE_RULES = ("DB_CASCADE", "DB_SET_NULL", "DB_SET_DEFAULT")


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
            f"The locks of {label} are named by {spec.template!r}: {str(exc).rstrip('.')}.",
            f"Use {{pk}} and the model's columns: {', '.join(columns)}.",
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


def _locks(spec: Fencing, table: Model) -> tuple[Any, str]:
    """Return what decides which lock a row has, and what its token says."""
    return spec.template or f"{table._meta.label_lower}:{{pk}}", spec.mode


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
    label, fields = model._meta.label, model._meta.fields
    for base, name in ((FencedModel, "fence"), (VersionedModel, "version")):
        named = [field for field in fields if field.name == name]
        stamps = [field for field in named if isinstance(field, StampField)]
        if len(stamps) > 1:
            owners = " and ".join(field.model._meta.label for field in stamps)
            yield Problem(
                "E024",
                f"{label} has {len(stamps)} columns {name!r}, of {owners}.",
                "Keep it in one of the tables: let the others inherit from models.Model.",
            )
        if issubclass(model, base) and not (named and isinstance(named[-1], StampField)):
            found = f", but a {type(named[-1]).__name__} of that name." if named else "."
            yield Problem(
                "E025",
                f"{label} has no field {name!r} such as {base.__name__} writes{found}",
                f"Leave the name to {base.__name__}.",
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
            'Remove base_manager_name from the model\'s Meta, or set it to "_guarded_rows".',
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
    rules = {getattr(models, name, None): name for name in _DATABASE_RULES}
    for field in model._meta.local_fields:
        remote: Any = field.remote_field
        rule = rules.get(getattr(remote, "on_delete", None))
        if remote is not None and rule is not None:
            target = remote.model._meta.label
            yield Problem(
                "W022",
                f"{model._meta.label}.{field.name} has on_delete={rule}: when a row of {target} "
                "is deleted, the database writes this table, under no lease and unseen by Django.",
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
            yield from _trigger_problems(connection)


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
    if connection.vendor != "mysql":
        return
    mode = str(_row(connection, "SELECT @@sql_mode")[0])
    if not {"STRICT_TRANS_TABLES", "STRICT_ALL_TABLES"} & set(mode.split(",")):
        yield Problem(
            "W023",
            f"Database {connection.alias!r} isn't strict, its sql_mode being {mode!r}: it changes "
            "values that don't fit, where a fenced write has to be rejected.",
            "Add STRICT_TRANS_TABLES to the sql_mode, in OPTIONS or the server's configuration.",
        )
    mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
    if mariadb and not _row(connection, "SELECT @@check_constraint_checks")[0]:
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
        if confused := confused_texts(connection, table, column):
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

#: By app and lower-case name of a model, the `named_by` of its trigger.
Declared = dict[tuple[str, str], tuple[str, ...]]

_TRIGGER = """
SELECT t.tgenabled IN ('O', 'A'), t.tgargs, p.prosrc
FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
WHERE t.tgrelid = to_regclass(%s) AND t.tgname = %s
"""


def _trigger_problems(connection: BaseDatabaseWrapper) -> Iterator[Problem]:
    for model, declared in declared_triggers(connection).items():
        table, named_by = model._meta.db_table, _naming_fields(model, declared)
        wanted = operations.arguments_of(model, named_by)
        if not router.allow_migrate_model(connection.alias, model):
            continue
        if not {*filter(None, wanted)} <= _columns_of(connection, table):
            continue  # Migrations are due.
        found = _row(connection, _TRIGGER, [connection.ops.quote_name(table), operations.NAME])
        enabled, arguments, body = found or (False, b"", "")
        if not enabled:
            state = "is disabled" if found else "isn't there"
        elif (*bytes(arguments).decode().split("\0")[:-1], body) != (*wanted, operations.BODY):
            state = "is another than this release makes for its columns and its lock's name"
        else:
            continue
        names = f", named_by={list(named_by)!r}" if named_by else ""
        yield Problem(
            "W025",
            f"A migration gives {model._meta.label} a FenceTrigger, and in database "
            f"{connection.alias!r} it {state}.",
            f"Run it again, in a new migration: FenceTrigger({model.__name__!r}{names}).",
        )


def _naming_fields(model: Model, declared: Sequence[str]) -> tuple[str, ...]:
    """Return the `named_by` that a trigger should have; none if the key names the locks."""
    if not has_fence(model):
        return ()
    fencing, own = model.fencing, model._meta.local_concrete_fields  # type: ignore[attr-defined]
    if fencing.columns is None:
        # Only the callable knows. What the migration said is kept, as far as it still holds.
        known = {"pk", *(name for field in own for name in (field.name, field.attname))}
        return tuple(name for name in declared if name in known)
    naming = [field for field in own if field.attname in fencing.columns]
    return () if set(naming) == set(fencing.pk) else tuple(field.name for field in naming)


def declared_triggers(connection: BaseDatabaseWrapper) -> dict[Model, tuple[str, ...]]:
    """Find the models that applied migrations give a trigger, and its `named_by`."""
    executor, declared = MigrationExecutor(connection), Declared()
    applied = executor.loader.applied_migrations
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes(), clean_start=True)
    for migration, _ in plan:
        if (migration.app_label, migration.name) in applied:
            _follow(migration.app_label, migration.operations, declared)
    return {
        apps.all_models[app][name]: named_by
        for (app, name), named_by in declared.items()
        if name in apps.all_models[app]
    }


def _follow(app: str, steps: Iterable[Any], declared: Declared) -> None:
    """Track the models with a trigger while they are renamed and deleted."""
    for step in steps:
        match step:
            case operations.RemoveFenceTrigger():
                declared.pop((app, step.model_name.lower()), None)
            case operations.FenceTrigger():
                declared[app, step.model_name.lower()] = step.named_by
            case DeleteModel():
                declared.pop((app, step.name_lower), None)
            case RenameModel():
                if (named_by := declared.pop((app, step.old_name_lower), None)) is not None:
                    declared[app, step.new_name_lower] = named_by
            case SeparateDatabaseAndState():
                _follow(app, [*step.database_operations, *step.state_operations], declared)


def _row(connection: BaseDatabaseWrapper, sql: str, given: Sequence[Any] = ()) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql, given or None)
        return cursor.fetchone()
