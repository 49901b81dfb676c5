"""
The private hooks of Django that the objects of guarded models go through.

Deserialisers and ``save_base()`` bypass ``save()``, but not ``_save_table()``; cascades bypass
``delete()``, but neither ``_raw_delete()`` nor signals. tests/test_hooks.py names the versions of
Django in which these are as they are here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from django.db import Error, models, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Lookup
from django.db.models.deletion import Collector
from django.db.models.signals import pre_delete

from ..lease import Lease
from .fields import is_rejected

_OWN = ("fence", "version")
_Row = TypeVar("_Row", bound=models.Model, covariant=True)


#: What is done to a row, LOADING from a fixture; the text begins the messages.
ADDING, SAVING, LOADING, DELETING = "Adding", "Saving", "Loading", "Deleting"


class Guard:
    """What one column adds to one write of one row."""

    #: The column's field name.
    column: str
    #: The write is made on no condition.
    keeps = False
    #: A new row may be inserted, and never take the place of one that is there.
    insert_only = False
    #: What an UPDATE sets the column to, if to anything; what an INSERT does, and what that is in
    #: the object.
    updated: Any = None
    inserted: Any = 0
    after_insert = 0

    def __init__(self, instance: SaveHooks) -> None:
        self.instance: Any = instance

    def condition(self, table: str, connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
        """Return the condition of the row's UPDATE or DELETE, with its parameters."""
        raise NotImplementedError

    def explain(self, row: Any) -> None:
        """Raise the reason why no row met the condition, if it lies here."""
        raise NotImplementedError

    def failed(self) -> Exception:
        """Return the error for a write that was stopped, if no more is known."""
        raise NotImplementedError

    def overwrote(self) -> None:
        """Note that an object that was never loaded took the place of a row, on no condition."""

    def set(self, value: Any) -> None:
        self.instance.__dict__[self.column] = value


# Migrations name each base class of a model that isn't an abstract model, and would import it.
if TYPE_CHECKING:
    _Hooks = object
else:
    _Hooks = models.Model


class SaveHooks(_Hooks):
    """The hooks of a model; `GuardedModel` mixes them in, its subclasses fill them in."""

    _is_fenced = False
    _is_versioned = False
    if TYPE_CHECKING:
        _meta: Any
        _state: Any
        _get_pk_val: Any
        pk: Any
    else:

        class Meta:
            abstract = True

    def _guards(self, table: Any, using: str, doing: str, is_first: bool) -> list[Guard]:
        """Return the guards of the columns that are in the table of model `table`."""
        return []

    def _guard_dependent(self, using: str, origin: Any) -> None:
        """Guard a row that is deleted because of another row."""

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
        # An object that was loaded, and whose key was removed, is a copy.
        is_copy = force_insert or self._get_pk_val(cls._meta) is None
        # With these, Django inserts no row.
        must_exist = force_update or update_fields
        adding = bool(self._state.adding or is_copy) and not must_exist
        doing = LOADING if raw else ADDING if adding else SAVING
        is_first = not is_copy and "_before_parents" not in self.__dict__
        before = {key: self.__dict__[key] for key in _OWN if key in self.__dict__}
        before = self.__dict__.pop("_before_parents", before)
        try:
            if raw:
                self._guard_parents(using)
            self.__dict__["_guarded_step"] = self._guards(cls, using, doing, is_first), adding
            updated = parent._save_table(raw, cls, force_insert, force_update, using, update_fields)
        except BaseException:
            # The tables of parents are rolled back as well. A failed write fails again.
            for key in _OWN:
                self.__dict__.pop(key, None)
            self.__dict__.update(before)
            raise
        finally:
            self.__dict__.pop("_guarded_step", None)
        if cls is not self._meta.concrete_model:
            self.__dict__["_before_parents"] = before
        return updated

    def _do_update(self, base_qs: Any, using: Any, *args: Any, **kwargs: Any) -> Any:
        # What follows differs between versions of Django.
        pk, values, *rest = args
        parent: Any = super()
        guards, adding = self.__dict__["_guarded_step"]
        if adding and any(guard.insert_only for guard in guards):
            return []
        for guard in guards:
            values = [each for each in values if each[0].name != guard.column]
            if guard.updated is not None:
                values.append((base_qs.model._meta.get_field(guard.column), None, guard.updated))
        writing = _writing(guards)
        rows = _OneRow(base_qs, writing) if writing else base_qs
        updated = parent._do_update(rows, using, pk, values, *rest, **kwargs)
        if updated:
            for guard in guards:
                if isinstance(guard.updated, int):
                    guard.set(guard.updated)
                elif guard.updated is not None:
                    self.__dict__.pop(guard.column, None)  # Known to the database alone.
                if adding:
                    guard.overwrote()
        elif not adding:
            # Without an error, Django would insert the row that a newer holder deleted.
            _explain(writing, models.QuerySet(base_qs.model, using=using).filter(pk=pk))
        return updated

    def _do_insert(self, manager: Any, using: str, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        guards, _ = self.__dict__["_guarded_step"]
        for guard in guards:
            guard.set(guard.inserted)
        try:
            inserted = parent._do_insert(manager, using, *args, **kwargs)
        except Error as exc:
            for guard in guards:
                if is_rejected(exc, manager.model, guard.column):
                    raise guard.failed() from exc
            raise
        for guard in guards:
            guard.set(guard.after_insert)
        return inserted

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        """Delete the row on the same conditions as it is saved."""
        parent: Any = super()
        is_djangos = getattr(parent.delete, "__func__", None) is models.Model.delete
        if is_djangos and (self.pk is None or is_fast_delete(self)):
            return self._delete_at_once(*args, **kwargs)
        # The row is guarded when Django collects it. What the delete() of another base class
        # saves, such as a soft delete, is guarded as well.
        _listen(type(self))
        before = getattr(self._state, "is_claimed", None)
        self._state.is_claimed = False
        try:
            return parent.delete(*args, **kwargs)  # type: ignore[no-any-return]
        finally:
            self._state.is_claimed = before

    delete.alters_data = True  # type: ignore[attr-defined]

    def _delete_at_once(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        row: Any = self
        using = using or router.db_for_write(type(row), instance=row)
        table = self._meta.concrete_model
        guards = _writing(self._guards(table, using, DELETING, True)) if self.pk is not None else []
        if not guards:
            return models.Model.delete(row, using, keep_parents)
        with transaction.mark_for_rollback_on_error(using=using):
            rows: Any = self._row(table, using, guards)
            count: int = models.QuerySet._raw_delete(rows, using=using)
            if not count:
                _explain(guards, self._row(table, using))
        setattr(self, self._meta.pk.attname, None)
        return count, {self._meta.label: count}

    def _guard_collected(self, row: SaveHooks, using: str) -> bool:
        """Guard a collected row if it is the object's, in its own table or in a parent's."""
        own, table = self._meta.concrete_model, row._meta.concrete_model
        is_claimed = getattr(self._state, "is_claimed", None)
        if is_claimed is None or not isinstance(self, table) or self._key_in(table) != row.pk:
            return False
        if not is_claimed:
            self._state.is_claimed = True
            for each in dict.fromkeys([own, *self._meta.all_parents]):
                self._claim_row(each, using, self._guards(each, using, DELETING, each is own))
        return True

    def _guard_parents(self, using: str) -> None:
        """Write the columns in the parents' tables, which deserialisers leave out."""
        for table in self._meta.all_parents:
            if issubclass(table, SaveHooks):
                row: Any = self._row(table, using).first()
                if row is not None:
                    row._claim_row(table, using, row._guards(table, using, LOADING, False))

    def _claim_row(self, table: Any, using: str, guards: Sequence[Guard]) -> None:
        """Write the columns of the guards alone, before what is done in several steps."""
        values = {each.column: each.updated for each in guards if each.updated is not None}
        writing = _writing(guards)
        if values and not models.QuerySet.update(self._row(table, using, writing), **values):
            _explain(writing, self._row(table, using))

    def _row(self, table: Any, using: str, guards: Sequence[Guard] = ()) -> Any:
        """Return the object's row in its own table or in that of a parent, as a queryset."""
        return _OneRow(table._base_manager.using(using), guards).filter(self._key_in(table))

    def _key_in(self, table: Any) -> Any:
        # The key in the table of a further parent isn't the object's own.
        pk = self._get_pk_val(table._meta)
        if pk is None and (link := self._meta.get_ancestor_link(table)) is not None:
            # An object that was made by hand, or from a fixture, has it in its own table alone.
            pk = getattr(self, link.attname)
        return pk


def _writing(guards: Sequence[Guard]) -> list[Guard]:
    return [guard for guard in guards if not guard.keeps]


def _explain(guards: Sequence[Guard], row: Any) -> None:
    for guard in guards:
        guard.explain(row)
    if guards and not guards[0].instance._state.adding:
        raise guards[0].failed()


class _OneRow(NamedTuple):
    """Stands in for rows that Django narrows down to one by ``filter(pk=pk)``."""

    rows: Any
    guards: Sequence[Guard]

    def filter(self, pk: Any) -> Any:
        return models.QuerySet.filter(self.rows, _RowCondition(self.rows.model, pk, self.guards))


class _RowCondition(Lookup):
    """The key of a row, and the guards' conditions: filters for each take a third of a save."""

    # As another expression, Django 6.1 would compare it with 1, and SQLite would use no index.
    #: A look-up of Django makes one for each query, which is a tenth of a save.
    output_field = models.BooleanField()

    def __init__(self, model: Any, pk: Any, guards: Sequence[Guard]) -> None:
        self.meta, self.lhs, self.rhs = model._meta, pk, guards

    def get_source_expressions(self) -> list[Any]:
        return []

    def resolve_expression(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        quote, keys = connection.ops.quote_name, self.meta.pk_fields
        table = quote(self.meta.db_table)
        parts, given = [], []
        for field, value in zip(keys, self.lhs if len(keys) > 1 else [self.lhs], strict=True):
            value = field.get_prep_value(value)
            parts.append(f"{table}.{quote(field.column)} = %s")
            given.append(field.get_db_prep_value(value, connection, prepared=True))
        for guard in self.rhs:
            sql, values = guard.condition(table, connection)
            parts.append(sql)
            given += values
        return f"({' AND '.join(parts)})", tuple(given)


class GuardedQuerySet(models.QuerySet[_Row]):
    """A queryset whose copies have the same lease and stamps. Each save copies one."""

    #: The lease of using_lease().
    _lease: Lease | None = None
    #: The fences and versions that bulk_update() writes along.
    _stamps: Mapping[str, Any] | None = None
    #: The leases that delete() found for the rows.
    _deleting: Sequence[Any] = ()

    def _clone(self) -> Self:
        clone: Any = super()._clone()  # type: ignore[misc]
        clone._lease, clone._stamps, clone._deleting = self._lease, self._stamps, self._deleting
        return clone  # type: ignore[no-any-return]

    def _copy(self, **attributes: Any) -> Self:
        clone: Any = self._chain()  # type: ignore[attr-defined]
        clone.__dict__.update(attributes)
        return clone  # type: ignore[no-any-return]


#: Leases that writes were given explicitly, the innermost first, each with the object that it is
#: for; or with its model, until a queryset saves the object. Not kept in the objects: a lease can't
#: be pickled, and copies would keep it.
given_leases: ContextVar[tuple[list[Any], ...]] = ContextVar("fencedlock_given", default=())


@contextlib.contextmanager
def given(target: Any, lease: Lease | None) -> Iterator[None]:
    """Note the lease that a write was given, for the steps that Django takes from there."""
    token = given_leases.set(([target, lease], *given_leases.get())) if lease is not None else None
    try:
        yield
    finally:
        if token is not None:
            with contextlib.suppress(ValueError):  # A coroutine is closed in another context.
                given_leases.reset(token)


# Cascades. Signals are all that Django calls for rows that it collects before it deletes them. It
# collects the rows of every model that has a listener, so a listener that is always connected would
# make deletes of fenced rows without dependents, and cascades to them, as slow as many single ones.

#: The models whose collected rows are guarded.
_watched: set[type] = set()


def watch(model: Any) -> None:
    """Guard the collected rows of a fenced model, if Django collects them anyway by now."""
    if not model._is_fenced or model in _watched:
        return
    if not is_fast_delete(model) and model.fencing.may_need_lease(None):
        # A child's row of the fence's own table is collected along with it.
        for each in {model, model.fencing.table}:
            _listen(each)


def _listen(model: type) -> None:
    pre_delete.connect(_guard_collected, sender=model, dispatch_uid="django_fencedlock")
    _watched.add(model)


def _guard_collected(instance: Any, using: str, origin: Any = None, **kwargs: Any) -> None:
    if not (isinstance(origin, SaveHooks) and origin._guard_collected(instance, using)):
        instance._guard_dependent(using, origin)


def is_fast_delete(objs: Any) -> bool:
    """Whether Django deletes an object, a queryset or rows of a model without collecting them."""
    return bool(Collector(using="", origin=objs).can_fast_delete(objs))
