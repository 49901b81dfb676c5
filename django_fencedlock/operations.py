"""For migrations: `FenceTrigger`, by which PostgreSQL itself refuses what passes by the ORM."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation, OperationCategory
from django.db.models import Model

from .models.fields import FenceField, StampField, VersionField

__all__ = ["FENCE_LOWERED", "VERSION_KEPT", "FenceTrigger", "RemoveFenceTrigger"]

#: The SQLSTATEs that an UPDATE is refused with.
FENCE_LOWERED, VERSION_KEPT = "FL001", "FL002"

#: The name of each table's trigger, and of the function that all of them share.
NAME = "fencedlock_refuse_update"

# TG_ARGV: the columns of the fence and of the version, empty for one that the table hasn't.
# It names no table and asks for the primary key, so that it outlives that those are renamed.
BODY = f"""
DECLARE
    before jsonb := to_jsonb(OLD);
    after jsonb := to_jsonb(NEW);
    fence bigint := before ->> TG_ARGV[0];
    version bigint := before ->> TG_ARGV[1];
    state text;
    reason text;
    remedy text;
    key text;
BEGIN
    IF (after ->> TG_ARGV[0])::bigint < fence THEN
        state := '{FENCE_LOWERED}';
        reason := format('it lowers the fence from %s to %s', fence, after ->> TG_ARGV[0]);
        remedy := 'A newer holder of the row''s lock has written it. Take the lock, read the row '
            'again, and write the token of your own grant, or leave the fence as it is.';
    ELSIF (after ->> TG_ARGV[1])::bigint < version
        OR (after ->> TG_ARGV[1])::bigint = version AND after - TG_ARGV <> before - TG_ARGV
    THEN
        state := '{VERSION_KEPT}';
        reason := format('it takes the version from %s to %s', version, after ->> TG_ARGV[1]);
        remedy := 'Whoever changes a row has to raise its version: SET version = version + 1.';
    ELSE
        RETURN NULL;
    END IF;

    SELECT string_agg(format('%I = %s', attname, before ->> attname), ', ') INTO key
    FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey)
    WHERE indrelid = TG_RELID AND indisprimary;
    RAISE EXCEPTION USING
        ERRCODE = state, SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME, HINT = remedy,
        MESSAGE = format('UPDATE of %I (%s) refused: %s.', TG_TABLE_NAME, key, reason);
END
"""


@dataclass(frozen=True, slots=True)
class Trigger:
    """The trigger of one table: which of its columns it watches."""

    fence: str = ""
    version: str = ""

    @classmethod
    def of(cls, model: type[Model]) -> Trigger:
        """The trigger for the columns that are in the model's own table."""
        return cls(_column(model, FenceField), _column(model, VersionField))

    def among(self, columns: Collection[str]) -> Trigger:
        """The trigger for those of the columns that there are."""
        return Trigger(*(each if each in columns else "" for each in (self.fence, self.version)))

    @property
    def suspicion(self) -> str:
        """What an UPDATE does that has the function called: all others cost next to nothing."""
        parts = [f'NEW."{self.fence}" < OLD."{self.fence}"'] if self.fence else []
        if self.version:
            parts.append(f'NEW."{self.version}" <= OLD."{self.version}"')
        return " OR ".join(parts)

    @property
    def comment(self) -> str:
        """What tells this definition from those of other columns or releases."""
        whole = "\n".join([BODY, self.suspicion, self.fence, self.version])
        digest = hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
        return f"django_fencedlock {digest}"

    def create(self, table: str) -> list[str]:
        """The statements that make the trigger of a (quoted) table, or make it anew."""
        # AFTER, not BEFORE: it costs less, generated columns have their values, other triggers
        # can't change the row any more, and a stale bulk statement has met its CHECK constraint.
        return [
            f"CREATE OR REPLACE FUNCTION {NAME}() RETURNS trigger LANGUAGE plpgsql "
            f"AS $fencedlock${BODY}$fencedlock$",
            f"CREATE OR REPLACE TRIGGER {NAME} AFTER UPDATE ON {table} FOR EACH ROW "
            f"WHEN ({self.suspicion}) EXECUTE FUNCTION {NAME}('{self.fence}', '{self.version}')",
            f"COMMENT ON TRIGGER {NAME} ON {table} IS '{self.comment}'",
        ]


def _column(model: type[Model], kind: type[StampField]) -> str:
    found = (str(field.column) for field in model._meta.local_fields if isinstance(field, kind))
    return next(found, "")


def drop(table: str) -> list[str]:
    """The statements that drop the trigger of a table, and the function with the last trigger."""
    return [
        f"DROP TRIGGER IF EXISTS {NAME} ON {table}",
        f"DO $fencedlock$ BEGIN IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgfoid = "
        f"to_regproc('{NAME}')) THEN DROP FUNCTION IF EXISTS {NAME}(); END IF; END $fencedlock$",
    ]


class _TriggerOperation(Operation):
    category = OperationCategory.SQL

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        return type(self).__name__, [self.model_name], {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """No model changes by it."""

    def _create(self, app_label: str, editor: BaseDatabaseSchemaEditor, state: Any) -> None:
        if (model := self._model(app_label, editor, state)) is not None:
            self._run(editor, self._trigger(model).create(_table(model, editor)))

    def _drop(self, app_label: str, editor: BaseDatabaseSchemaEditor, state: Any) -> None:
        if (model := self._model(app_label, editor, state)) is not None:
            self._run(editor, drop(_table(model, editor)))

    def _model(
        self, app_label: str, editor: BaseDatabaseSchemaEditor, state: Any
    ) -> type[Model] | None:
        """The model whose table has the trigger; None if it has none on this database."""
        connection = editor.connection
        if connection.vendor != "postgresql":
            return None
        model: type[Model] = state.apps.get_model(app_label, self.model_name)
        return model if self.allow_migrate_model(connection.alias, model) else None

    def _trigger(self, model: type[Model]) -> Trigger:
        trigger = Trigger.of(model)
        if trigger == Trigger():
            raise ImproperlyConfigured(
                f"{type(self).__name__}({self.model_name!r}): its table {model._meta.db_table!r} "
                "has neither a fence nor a version at this point of the migrations. Put it where "
                "the column is there, and under inheritance name the parent that has the column."
            )
        return trigger

    @staticmethod
    def _run(editor: BaseDatabaseSchemaEditor, statements: list[str]) -> None:
        for statement in statements:
            # None, since there are percent signs in it.
            editor.execute(statement, params=None)


class FenceTrigger(_TriggerOperation):
    """
    Has PostgreSQL refuse an UPDATE of the model's table that lowers its fence.

    If the table has a version, it also refuses one that changes a row and doesn't raise its
    version. What the package writes passes. On other databases it does nothing, so that one
    migration serves several.

    It isn't asked about INSERT, DELETE and TRUNCATE, nor in a session whose
    ``session_replication_role`` is ``replica``. An UPDATE that leaves the fence as it is passes.

    Run again, it replaces the trigger: that is how a model gets one after it gained a version, or
    after a release changed the trigger.

    Args:
        model_name: The model whose own table has the column: under inheritance, a parent.
    """

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        self._create(app_label, schema_editor, to_state)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        self._drop(app_label, schema_editor, from_state)

    def describe(self) -> str:
        return f"Refuse raw UPDATEs of {self.model_name} that lower its fence (PostgreSQL alone)"

    @property
    def migration_name_fragment(self) -> str:
        return f"{self.model_name.lower()}_fence_trigger"


class RemoveFenceTrigger(_TriggerOperation):
    """
    Takes a `FenceTrigger` away again.

    It has to come before the column is removed, which PostgreSQL refuses while a trigger is
    there that watches it.
    """

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        self._drop(app_label, schema_editor, to_state)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        self._create(app_label, schema_editor, from_state)

    def describe(self) -> str:
        return f"Remove the fence trigger of {self.model_name} (PostgreSQL alone)"

    @property
    def migration_name_fragment(self) -> str:
        return f"remove_{self.model_name.lower()}_fence_trigger"


def _table(model: type[Model], schema_editor: BaseDatabaseSchemaEditor) -> str:
    return schema_editor.quote_name(model._meta.db_table)
