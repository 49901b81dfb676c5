"""For migrations: `FenceTrigger`, by which PostgreSQL rejects stale writes of raw SQL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation, OperationCategory
from django.db.models import Model

from .models.fields import StampField, condition

__all__ = ["FENCE_LOWERED", "VERSION_KEPT", "FenceTrigger", "RemoveFenceTrigger"]

#: The SQLSTATEs of a rejected UPDATE.
FENCE_LOWERED, VERSION_KEPT = "FL001", "FL002"

#: The name of each table's trigger, and of the function that all of them share.
NAME = "fencedlock_reject_update"

# TG_ARGV: the columns of the fence and of the version, empty if the table lacks it; then those that
# name the row's lock, none if the primary key does. Table and primary key aren't named: both may be
# renamed. In the trigger's WHEN, the type of a naming column couldn't be changed any more.
BODY = f"""
DECLARE
    before jsonb := to_jsonb(OLD);
    after jsonb := to_jsonb(NEW);
    fence bigint := before ->> TG_ARGV[0];
    version bigint := before ->> TG_ARGV[1];
    stamps text[] := TG_ARGV[:1];
    keys text[] := ARRAY(
        SELECT attname::text
        FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey)
        WHERE indrelid = TG_RELID AND indisprimary
    );
    naming text[] := CASE WHEN TG_NARGS > 2 THEN TG_ARGV[2:] ELSE keys END;
    state text;
    reason text;
    remedy text;
    key text;
BEGIN
    IF (after ->> TG_ARGV[0])::bigint < fence AND NOT EXISTS (
        SELECT FROM unnest(naming) AS name WHERE before -> name IS DISTINCT FROM after -> name
    ) THEN
        state := '{FENCE_LOWERED}';
        reason := format('it lowers the fence from %s to %s', fence, after ->> TG_ARGV[0]);
        remedy := 'A newer holder of the row''s lock has written it. Acquire the lock, read the '
            'row again, and write the token of your own grant, or leave the fence as it is.';
    ELSIF (after ->> TG_ARGV[1])::bigint < version
        OR (after ->> TG_ARGV[1])::bigint = version AND after - stamps <> before - stamps
    THEN
        state := '{VERSION_KEPT}';
        reason := format('it takes the version from %s to %s', version, after ->> TG_ARGV[1]);
        remedy := 'A change of a row has to raise its version: SET version = version + 1.';
    ELSE
        RETURN NULL;
    END IF;

    SELECT string_agg(format('%I = %s', name, before ->> name), ', ') INTO key
    FROM unnest(keys) AS name;
    RAISE EXCEPTION USING
        ERRCODE = state, SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME, HINT = remedy,
        MESSAGE = format('UPDATE of %I (%s) rejected: %s.', TG_TABLE_NAME, key, reason);
END
"""


def arguments_of(model: type[Model], named_by: Iterable[str] = ()) -> tuple[str, ...]:
    """Return what the trigger of a model's own table is given; see `BODY`."""
    # The fields of migrations' models are plain; what tells them is the constraint, by its
    # condition: it keeps its name when the model or its table is renamed.
    conditions = [getattr(each, "condition", None) for each in model._meta.constraints]
    columns = {
        field.name: str(field.column)
        for field in model._meta.local_fields
        if isinstance(field, StampField) or condition(field.name) in conditions
    }
    fence, version = columns.get("fence", ""), columns.get("version", "")
    return (fence, version, *(_naming_columns(model, named_by) if fence else ()))


def _naming_columns(model: type[Model], named_by: Iterable[str]) -> tuple[str, ...]:
    meta: Any = model._meta
    own = meta.local_concrete_fields
    chosen: set[Any] = set()
    for name in named_by:
        named = [field for field in own if name in (field.name, field.attname)]
        found = meta.pk_fields if name == "pk" else named
        if not found:
            fields = ", ".join(field.name for field in own)
            raise ImproperlyConfigured(
                f"The trigger of {model.__name__} is named_by {name!r}, which is not a column of "
                f"table {meta.db_table!r}. Its fields are {fields}."
            )
        chosen.update(found)
    if chosen == set(meta.pk_fields):
        return ()
    return tuple(str(field.column) for field in own if field in chosen)


def _create(table: str, arguments: Sequence[str]) -> list[str]:
    """Return the statements that create or replace the trigger of a (quoted) table."""
    fence, version, *_ = arguments
    given = ", ".join("'{}'".format(name.replace("'", "''")) for name in arguments)
    # All other UPDATEs cost next to nothing.
    suspicious = [f'NEW."{fence}" < OLD."{fence}"'] * bool(fence)
    suspicious += [f'NEW."{version}" <= OLD."{version}"'] * bool(version)
    # AFTER, not BEFORE: it costs less, generated columns have their values, other triggers can't
    # change the row any more, and a stale bulk statement has met its CHECK constraint.
    return [
        f"CREATE OR REPLACE FUNCTION {NAME}() RETURNS trigger LANGUAGE plpgsql "
        f"AS $fencedlock${BODY}$fencedlock$",
        f"CREATE OR REPLACE TRIGGER {NAME} AFTER UPDATE ON {table} FOR EACH ROW "
        f"WHEN ({' OR '.join(suspicious)}) EXECUTE FUNCTION {NAME}({given})",
    ]


class FenceTrigger(Operation):
    """
    Lets PostgreSQL reject an UPDATE of the model's table that lowers its fence.

    If the table has a version, it also rejects an UPDATE that changes a row without raising it.
    What the package writes passes. On other databases it does nothing. Run again, it replaces the
    trigger: after the model gained a version, or its `Fencing` changed.

    Args:
        model_name: The model whose own table has the column: under inheritance, a parent.
        named_by: The fields of that table, and ``"pk"``, that name a row's lock: those of the
            template ``Fencing("account:{account_id}")`` are ``["account"]``. Without it, the
            primary key.
    """

    category = OperationCategory.SQL
    creates = True
    description = "Reject raw UPDATEs of {} that lower its fence (PostgreSQL alone)"
    fragment = "{}_fence_trigger"

    def __init__(self, model_name: str, *, named_by: Iterable[str] = ()) -> None:
        if isinstance(named_by, str):
            raise TypeError(f"named_by is a list of fields: named_by=[{named_by!r}].")
        self.model_name = model_name
        self.named_by = tuple(named_by)

    def describe(self) -> str:
        return self.description.format(self.model_name)

    @property
    def migration_name_fragment(self) -> str:
        return self.fragment.format(self.model_name.lower())

    def state_forwards(self, app_label: str, state: Any) -> None:
        """No model changes by it."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        self._run(app_label, schema_editor, to_state, create=self.creates)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        self._run(app_label, schema_editor, from_state, create=not self.creates)

    def _run(
        self, app_label: str, editor: BaseDatabaseSchemaEditor, state: Any, *, create: bool
    ) -> None:
        if editor.connection.vendor != "postgresql":
            return
        model: type[Model] = state.apps.get_model(app_label, self.model_name)
        if not self.allow_migrate_model(editor.connection.alias, model):
            return
        table = editor.quote_name(model._meta.db_table)
        statements = [
            f"DROP TRIGGER IF EXISTS {NAME} ON {table}",
            "DO $fencedlock$ BEGIN IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgfoid = to_regproc("
            f"'{NAME}')) THEN DROP FUNCTION IF EXISTS {NAME}(); END IF; END $fencedlock$",
        ]
        if create:
            arguments = arguments_of(model, self.named_by)
            if not any(arguments):
                raise ImproperlyConfigured(
                    f"{type(self).__name__}({self.model_name!r}): its table {table} has neither a "
                    "fence nor a version at this point of the migrations. Put it after the column "
                    "and its constraint, and under inheritance name the parent that has them."
                )
            statements = _create(table, arguments)
        for statement in statements:
            # None, since there are percent signs in it.
            editor.execute(statement, params=None)


class RemoveFenceTrigger(FenceTrigger):
    """Removes a `FenceTrigger`; PostgreSQL lets no column be removed that a trigger watches."""

    creates = False
    description = "Remove the fence trigger of {} (PostgreSQL alone)"
    fragment = "remove_{}_fence_trigger"
