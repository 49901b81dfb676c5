"""
How a model's columns guard its writes: the steps of saving and deleting that Django goes through.

Deserialisers and ``save_base()`` pass by ``save()``, but not by the steps that are hooked here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar
from uuid import UUID

from django.db import Error, models, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Expression
from django.db.models.base import ModelBase
from django.db.models.deletion import Collector
from django.db.models.fields.related_lookups import RelatedExact
from django.db.models.lookups import Exact, IntegerFieldExact
from django.db.models.signals import class_prepared
from django.db.models.sql.compiler import SQLCompiler
from django.db.models.sql.where import AND

from .cascades import listen, watch
from .fields import constraint_name
from .managers import BaseRowsManager, FencedManager
from .refusals import names_constraint

_ABSENT = object()
#: Where any other is looked up by, Django has to see to its meaning first.
_PLAIN_KEYS = (int, str, UUID)
_PLAIN_LOOKUPS = (Exact, IntegerFieldExact, RelatedExact)


class Doing(StrEnum):
    """What is done to a row; the text begins the messages."""

    ADDING = "Adding"
    SAVING = "Saving"
    #: From a fixture.
    LOADING = "Loading"
    DELETING = "Deleting"


class Guard(ABC):
    """What one column adds to one write of one row; a node of its WHERE."""

    contains_aggregate = False
    contains_over_clause = False

    #: The column's field name.
    column: str
    #: The write is made on no condition.
    keeps = False
    #: What such an UPDATE sets the column to; None leaves it as it is.
    kept: Expression | None = None
    #: A new row may be inserted, and never take the place of one that is there.
    insert_only = False

    def __init__(self, instance: GuardedModel) -> None:
        self.instance = instance
        self.before = instance.__dict__.get(self.column, _ABSENT)

    #: What an UPDATE sets the column to.
    updated: int
    #: What it is after an INSERT.
    after_insert: int = 0

    @property
    @abstractmethod
    def inserted(self) -> Any:
        """What an INSERT sets the column to."""

    @abstractmethod
    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, list[Any]]:
        """The condition of the row's UPDATE or DELETE."""

    @abstractmethod
    def explain(self, row: Any) -> None:
        """Raise the reason why no row met the condition, if it lies here."""

    def overwrote(self) -> None:
        """Note that an object that was never loaded took the place of a row, on no condition."""

    @abstractmethod
    def stopped(self) -> Exception:
        """The error for a write that was stopped, if no more is known."""

    def restore(self) -> None:
        """Have the object as it was: whatever failed once fails again."""
        if self.before is _ABSENT:
            self.instance.__dict__.pop(self.column, None)
        else:
            self.instance.__dict__[self.column] = self.before


if TYPE_CHECKING:
    _Row = TypeVar("_Row", bound=models.Model)

    class _ModelBase(ModelBase):
        # As django-stubs has it. Were it declared, pyright would allow no model another manager.
        def __getattr__(  # type: ignore[misc]
            self: type[_Row], name: Literal["objects"]
        ) -> FencedManager[_Row]: ...
else:
    _ModelBase = ModelBase


class GuardedModel(models.Model, metaclass=_ModelBase):  # noqa: DJ008
    """What fenced and versioned models have in common."""

    if not TYPE_CHECKING:
        objects = FencedManager()
    # It has a name of its own, so that a model's own filtered `objects` never takes its place.
    _guarded_rows = BaseRowsManager()
    _is_fenced = False
    _is_versioned = False

    if TYPE_CHECKING:
        # pyright wants a model's Meta to be one of these, by its base or, as a Protocol, as it is.
        class Meta(Protocol): ...
    else:

        class Meta:
            abstract = True
            base_manager_name = "_guarded_rows"

    def _guards(self, table: Any, using: str, doing: Doing) -> list[Guard]:
        """The guards of the columns in the table of model `table`."""
        return []

    def _look_first(self, using: str, doing: Doing) -> None:
        """Compare with the row what the condition of its UPDATE or DELETE can't."""

    def _guard_parents(self, using: str) -> None:
        """Write the columns in the parents' tables, which deserialisers leave out."""
        for table in self._meta.all_parents:
            if issubclass(table, GuardedModel):
                rows = table._base_manager.using(using)
                row: Any = rows.filter(pk=self._key_in(table)).first()
                if row is not None:
                    row._claim_row(table, using, row._guards(table, using, Doing.LOADING))

    def _guard_collected(self, using: str, origin: Any) -> None:
        """Guard a row that Django is about to delete."""
        deletion = _Deletion.of(origin)
        if deletion is None or not deletion.is_about(self):
            self._guard_dependent(using, origin)
        elif not deletion.is_claimed:
            deletion.claim(using)

    def _guard_dependent(self, using: str, origin: Any) -> None:
        """Guard a row that goes because of another."""

    def _save_table(
        self,
        raw: bool = False,
        cls: Any = None,
        force_insert: Any = False,
        force_update: bool = False,
        using: Any = None,
        update_fields: Any = None,
    ) -> Any:
        parent: Any = super()
        # The row has to be there: Django will insert none.
        forced = bool(force_update or update_fields)
        # One that was loaded, and whose key was taken away, is a copy.
        is_copy = force_insert or self._get_pk_val(cls._meta) is None
        adding = bool(self._state.adding or is_copy) and not forced
        doing = Doing.LOADING if raw else Doing.ADDING if adding else Doing.SAVING
        if not is_copy and "_guarded_done" not in self.__dict__:
            self._look_first(using, doing)
        # Under multi-table inheritance, what was done for the tables of the parents: they are
        # rolled back with this one. The object's own table comes last.
        done = self.__dict__.pop("_guarded_done", [])
        try:
            if raw:
                self._guard_parents(using)
            guards = self._guards(cls, using, doing)
            if update_fields:
                writing = {guard.column for guard in guards if not guard.keeps}
                update_fields = frozenset(update_fields) | writing
            with _Pass(self, cls, guards, adding):
                updated = parent._save_table(
                    raw, cls, force_insert, force_update, using, update_fields
                )
        except BaseException:
            for guard in done:
                guard.restore()
            raise
        if cls._meta.concrete_model is not self._meta.concrete_model:
            self.__dict__["_guarded_done"] = done + guards
        return updated

    def _do_update(self, base_qs: Any, using: Any, *args: Any, **kwargs: Any) -> Any:
        # The signature differs between versions of Django: (pk_val, values, ...) come first.
        parent: Any = super()
        step = _Pass.of(self, base_qs.model)
        if step is None:
            return parent._do_update(base_qs, using, *args, **kwargs)
        if step.inserts_only:
            return []
        pk, values, *rest = args
        row = _OneRow(base_qs, step.writing)
        updated = parent._do_update(row, using, pk, step.values(values), *rest, **kwargs)
        if not updated and not step.adding:
            # Were it not raised here, Django would insert the row that a newer holder deleted.
            _explain(step.writing, base_qs.model._base_manager.using(using).filter(pk=pk))
        if updated and step.adding:
            for guard in step.guards:
                guard.overwrote()
        return updated

    def _do_insert(self, manager: Any, using: str, fields: Any, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        step = _Pass.of(self, manager.model)
        if step is None:
            return parent._do_insert(manager, using, fields, *args, **kwargs)
        for guard in step.guards:
            setattr(self, guard.column, guard.inserted)
        try:
            answer = parent._do_insert(manager, using, fields, *args, **kwargs)
        except Error as exc:
            raise_if_stopped(step.guards, step.table, exc)
            raise
        step.was_inserted = True
        return answer

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        """Delete the row on the same conditions as it is saved."""
        parent: Any = super()
        if getattr(parent.delete, "__func__", None) is models.Model.delete:
            return self._guarded_delete(*args, **kwargs)
        # The delete() of another base class, such as a soft delete. What it saves is guarded, and
        # so is the row if it comes to Django's delete() in the end.
        listen(type(self))
        with _Deletion(self):
            return parent.delete(*args, **kwargs)  # type: ignore[no-any-return]

    delete.alters_data = True  # type: ignore[attr-defined]

    def _guarded_delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        using = using or router.db_for_write(type(self), instance=self)
        guards = self._guards_of_delete(using) if self.pk is not None else {}
        if not any(guards.values()):
            return models.Model.delete(self, using, keep_parents)
        if self._is_fenced:
            watch(type(self))
        if not keep_parents and Collector(using=using).can_fast_delete(self):
            self._look_first(using, Doing.DELETING)
            return self._delete_row(using, guards[self._meta.concrete_model])
        with transaction.atomic(using=using, savepoint=False), _Deletion(self) as deletion:
            deletion.claim(using)
            return models.Model.delete(self, using, keep_parents)

    def _guards_of_delete(self, using: str) -> dict[Any, list[Guard]]:
        """The guards of the object's row in each of its tables."""
        tables = dict.fromkeys([self._meta.concrete_model, *self._meta.all_parents])
        return {table: self._writing(table, using) for table in tables}

    def _writing(self, table: Any, using: str) -> list[Guard]:
        return [guard for guard in self._guards(table, using, Doing.DELETING) if not guard.keeps]

    def _delete_row(self, using: str, guards: Sequence[Guard]) -> tuple[int, dict[str, int]]:
        with transaction.mark_for_rollback_on_error(using=using):
            rows = self._row(type(self), using, guards)
            count = models.QuerySet._raw_delete(rows, using=using)
            if not count:
                _explain(guards, self._row(type(self), using))
        setattr(self, self._meta.pk.attname, None)
        return count, {self._meta.label: count}

    def _claim_row(self, table: Any, using: str, guards: Sequence[Guard]) -> None:
        """Write the columns of the guards alone, before what is done in several steps."""
        writing = [guard for guard in guards if not guard.keeps]
        values = [
            (
                table._meta.get_field(guard.column),
                None,
                guard.kept if guard.keeps else guard.updated,
            )
            for guard in guards
            if not guard.keeps or guard.kept is not None
        ]
        if values and not self._row(table, using, writing)._update(values):
            _explain(writing, self._row(table, using))

    def _row(self, table: Any, using: str, guards: Sequence[Guard] = ()) -> Any:
        return _OneRow(table._base_manager.using(using), guards).filter(self._key_in(table))

    def _key_in(self, table: Any) -> Any:
        """The key of the object's row in its own table or that of a parent."""
        # That of a further parent is another than the object's own.
        pk = self._get_pk_val(table._meta)
        if pk is None and (link := self._meta.get_ancestor_link(table)) is not None:
            # An object that was made by hand, or from a fixture, has it in its own table alone.
            pk = getattr(self, link.attname)
        return pk


def raise_if_stopped(guards: Sequence[Guard], table: Any, error: Error) -> None:
    """Raise a guard's own error if `error` says that its constraint stopped the statement."""
    for guard in guards:
        if names_constraint(error, constraint_name(table, guard.column)):
            raise guard.stopped() from error


def _explain(guards: Sequence[Guard], row: Any) -> None:
    for guard in guards:
        guard.explain(row)
    if guards and not guards[0].instance._state.adding:
        raise guards[0].stopped()


class _Deletion:
    """The delete() of one object, while it lasts."""

    def __init__(self, instance: GuardedModel) -> None:
        self.instance = instance
        #: Its row was written, on the conditions of a save.
        self.is_claimed = False

    @staticmethod
    def of(origin: Any) -> _Deletion | None:
        """The delete() of `origin` that is under way."""
        return next((each for each in _deletions.get() if each.instance is origin), None)

    def is_about(self, row: GuardedModel) -> bool:
        """Whether a collected row is the object's, in its own table or in that of a parent."""
        table: Any = row._meta.concrete_model
        instance: Any = self.instance
        return isinstance(instance, table) and instance._key_in(table) == row.pk

    def claim(self, using: str) -> None:
        """Write the object's row in each table, or be stopped there."""
        self.instance._look_first(using, Doing.DELETING)
        for table, guards in self.instance._guards_of_delete(using).items():
            self.instance._claim_row(table, using, guards)
        self.is_claimed = True

    def __enter__(self) -> _Deletion:
        self._token = _deletions.set((self, *_deletions.get()))
        return self

    def __exit__(self, *raised: object) -> None:
        _deletions.reset(self._token)


_deletions: ContextVar[tuple[_Deletion, ...]] = ContextVar("fencedlock_deletions", default=())


class _OneRow(NamedTuple):
    """Stands in for rows that nobody else has, and that Django narrows down to one."""

    rows: Any
    guards: Sequence[Guard]

    def filter(self, pk: Any) -> Any:
        rows = self.rows
        if not _is_plain(pk, rows.model._meta.pk):
            rows = rows.filter(pk=pk)
            for guard in self.guards:
                rows.query.where.add(guard, AND)
            return rows
        rows.query.get_initial_alias()
        rows.query.where.add(_KeyAndGuards(rows.model._meta, pk, self.guards), AND)
        return rows


def _is_plain(pk: Any, field: Any) -> bool:
    """Whether a key is compared as it is, and may be in the column at all."""
    if type(pk) not in _PLAIN_KEYS or field.get_lookup("exact") not in _PLAIN_LOOKUPS:
        return False
    most = 63 if isinstance(field, models.BigIntegerField) else 31
    return type(pk) is not int or pk.bit_length() <= most


class _KeyAndGuards:
    """
    The WHERE of one row.

    Made by hand: Django's way to compare a key costs more than the database's work.
    """

    contains_aggregate = False
    contains_over_clause = False

    def __init__(self, meta: Any, pk: Any, guards: Sequence[Guard]) -> None:
        self.meta = meta
        self.pk = pk
        self.guards = guards

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, list[Any]]:
        quote = connection.ops.quote_name
        field = self.meta.pk
        parts = [f"{quote(self.meta.db_table)}.{quote(field.column)} = %s"]
        given = [field.get_db_prep_value(self.pk, connection)]
        for guard in self.guards:
            part, more = guard.as_sql(compiler, connection)
            parts.append(part)
            given += more
        return " AND ".join(parts), given


class _Pass:
    """One pass through one table in the course of a save."""

    def __init__(
        self, instance: GuardedModel, table: Any, guards: Sequence[Guard], adding: bool
    ) -> None:
        self.table = table
        self.guards = guards
        self.writing = [guard for guard in guards if not guard.keeps]
        #: The row is new, as far as is known.
        self.adding = adding
        self.was_inserted = False
        self._instance = instance

    @staticmethod
    def of(instance: GuardedModel, table: Any) -> _Pass | None:
        """The pass through `table` that is under way."""
        step: _Pass | None = instance.__dict__.get("_guarded_pass")
        if step is None or step.table._meta.concrete_model is not table._meta.concrete_model:
            return None
        return step

    @property
    def inserts_only(self) -> bool:
        return self.adding and any(guard.insert_only for guard in self.guards)

    def values(self, values: Sequence[Any]) -> list[Any]:
        """What the UPDATE sets, given what Django would set."""
        if len(self.writing) == len(self.guards):
            return list(values)
        keeping = {guard.column: guard.kept for guard in self.guards if guard.keeps}
        found = [each for each in values if each[0].name not in keeping]
        for column, kept in keeping.items():
            if kept is not None:
                found.append((self.table._meta.get_field(column), None, kept))
        return found

    def __enter__(self) -> None:
        self._instance.__dict__["_guarded_pass"] = self
        for guard in self.writing:
            setattr(self._instance, guard.column, guard.updated)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        instance = self._instance
        del instance.__dict__["_guarded_pass"]
        for guard in self.guards:
            if error is not None:
                guard.restore()
            elif self.was_inserted:
                setattr(instance, guard.column, guard.after_insert)
            elif guard.kept is not None:
                # Known to the database alone.
                instance.__dict__.pop(guard.column, None)
            elif not guard.keeps:
                # Django may have set it to an expression's answer, or have dropped it.
                setattr(instance, guard.column, guard.updated)


def _use_own_base_manager(sender: Any, **kwargs: Any) -> None:
    # Django takes that of the first base class alone, which may be a plain one.
    if issubclass(sender, GuardedModel) and sender._meta.base_manager_name is None:
        sender._meta.base_manager_name = "_guarded_rows"


class_prepared.connect(_use_own_base_manager)
