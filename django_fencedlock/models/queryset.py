"""The queryset and managers of guarded models: statements over many rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, models, transaction
from django.db.models import Case, F, Q, Value, When
from django.db.models.base import ModelBase
from django.db.models.lookups import Exact
from django.db.models.options import Options
from django.db.models.signals import class_prepared
from django.utils.functional import cached_property

from ..lease import Lease
from ..lease_context import held_owners
from ..storage.fences import is_newest
from .base import GuardedQuerySet, SaveHooks, given, watch
from .fencing import FencingOf, Rows
from .fields import REJECTED, Exactly, is_rejected
from .writes import (
    WRITTEN_SINCE,
    Write,
    by_rows,
    inserted_fence,
    is_of,
    leases_of,
    limit_to,
    may_write,
    rejected,
    token_or_rejected,
    version_conflict,
)

_Row = TypeVar("_Row", bound=models.Model, covariant=True)


#: The owner ids of the leases under which rows are read: those that were held when the query was
#: sent. Empty for rows of an iterator, which are fetched long after that.
reading_under: ContextVar[tuple[str, ...]] = ContextVar("fencedlock_reading_under", default=())


class FencedQuerySet(GuardedQuerySet[_Row]):
    """
    A queryset whose writes are guarded as those of single objects are.

    A statement over many fenced rows needs the lease of every row's lock. It raises before it
    writes if one isn't held, and fails as a whole if one of the rows is stale.
    """

    def using_lease(self, lease: Lease) -> Self:
        """Write under `lease`, whatever the context holds."""
        return self._copy(_lease=lease)

    def only(self, *fields: Any) -> Self:
        # An object without its fence, or its version, can't be written.
        return super().only(*fields, *(self._own if fields not in ((), (None,)) else ()))

    def defer(self, *fields: Any) -> Self:
        return super().defer(*(each for each in fields if each not in self._own))

    def create(self, **values: Any) -> Any:
        with given(self.model, self._lease):
            return super().create(**values)

    def update_or_create(self, *args: Any, **values: Any) -> tuple[Any, bool]:
        with given(self.model, self._lease):
            return super().update_or_create(*args, **values)

    def update(self, **values: Any) -> int:
        self._require_other_columns(values, "update")
        if self._stamps is not None:
            return super().update(**self._stamps, **values)
        writes = self._writes("Updating", values)
        stamps: dict[str, Any] = {}
        if writes is not None:
            stamps["fence"] = token_or_rejected(writes)
        if self._is_versioned:
            stamps["version"] = F("version") + 1
        if not stamps:
            return super().update(**values)
        with self._all_or_nothing(writes or ()):
            # MySQL sets one column after the other, and the conditions are on what was before.
            return super().update(**stamps, **values)

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        objs, fields = tuple(objs), tuple(fields)
        self._require_other_columns(fields, "bulk_update")
        if not (self._is_covered() or self._is_versioned) or not all(obj.pk for obj in objs):
            return super().bulk_update(objs, fields, batch_size)
        # As Django counts parameters, and some more for each object's fence and version.
        parameters = 2 + len(fields) + 3 * (self._is_fenced + self._is_versioned)
        operations = connections[self._database()].ops
        most = operations.bulk_batch_size([self.model._meta.pk] * parameters, objs)
        size = max(1, min(batch_size or most, most))
        batches = [objs[start : start + size] for start in range(0, len(objs), size)]
        # A row without a lease raises here, before anything is written.
        values = dict.fromkeys(fields, Value(None))
        writes = [
            self.filter(pk__in=[obj.pk for obj in batch])._writes("Updating", values, batch)
            for batch in batches
        ]
        leased = [write for each in writes for write in leases_of(each or ())]
        count = 0
        within = transaction.atomic(using=self.db, savepoint=False)
        with self._all_or_nothing(leased), within:
            for batch, each in zip(batches, writes, strict=True):
                stamps = {} if each is None else {"fence": token_or_rejected(each)}
                if self._is_versioned:
                    stamps["version"] = self._next_versions(batch)
                rows = self._copy(_stamps=stamps)
                found = super(FencedQuerySet, rows).bulk_update(batch, fields, batch_size)
                if stamps and found < len({obj.pk for obj in batch}):
                    why = "a row was deleted, or isn't among those of the queryset"
                    if leased:
                        raise rejected(leased, missed=why)
                    raise version_conflict(self.model, "Updating", why)
                count += found
        tokens = {write.name: write.token for write in leased}
        for obj in objs:
            if self._is_versioned:
                obj.version += 1
            if tokens and (token := tokens.get(type(obj).fencing.name_of_row(obj))) is not None:
                obj.fence = token
        return count

    def bulk_create(
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Any = None,
        unique_fields: Any = None,
    ) -> list[Any]:
        objs = list(objs)
        writes = self._writes_of_new(objs) if self._is_fenced else []
        if update_conflicts:
            unique_fields = unique_fields and list(unique_fields)
            self._require_comparable(writes, unique_fields)
            update_fields = [*(update_fields or ()), *(["fence"] if leases_of(writes) else [])]
        firsts: dict[Any, tuple[Write, Any]] = {}
        for write, obj in zip(writes, objs, strict=False):
            firsts.setdefault(write.grant, (write, obj))
        within = transaction.atomic(using=self._database(), savepoint=False)
        with self._stamped(objs, writes), self._all_or_nothing(writes), within:
            for write, first in firsts.values():
                if not ignore_conflicts:
                    # The INSERT itself checks each lease, with its first row.
                    first.fence = inserted_fence(write)
            made = super().bulk_create(
                objs, batch_size, ignore_conflicts, update_conflicts, update_fields, unique_fields
            )
            for write, _ in firsts.values():
                # SQLite and MySQL ignore the constraint as well. Not before the INSERT: SQLite
                # refuses it if another session wrote since the first read of the transaction.
                grant = write.pin(connections[self.db]) if ignore_conflicts else None
                if grant is not None and not is_newest(self.db, grant):
                    raise rejected([write])
            return made

    def delete(self) -> tuple[int, dict[str, int]]:
        if self._is_covered():
            watch(self.model)
            # A row without a lease raises here, before receivers of signals are called. SQLite lets
            # no transaction write if another session wrote since the names were read in it.
            self._deleting = [self._writes("Deleting")]
        try:
            return super().delete()
        finally:
            self._deleting = []

    delete.queryset_only = True  # type: ignore[attr-defined]

    def _raw_delete(self, using: Any) -> int:
        # Cascades come here, bypassing delete().
        rows: Any = self.using(using)
        writes = self._deleting[0] if self._deleting else rows._writes("Deleting")
        if writes is None:
            return super()._raw_delete(using)
        if not writes:
            return 0
        with transaction.atomic(using=using, savepoint=False):
            written = Q.create([may_write(write) for write in writes], connector=Q.OR)
            count = models.QuerySet._raw_delete(rows.filter(written), using)
            # Rows of other locks, which came meanwhile, are left alone; so are rows that match only
            # since others are gone, such as the next ones of a slice.
            leased = leases_of(writes)
            left = Q.create([is_of(write) for write in leased], connector=Q.OR)
            if rows.filter(left, Exact(token_or_rejected(leased), REJECTED)).exists():
                raise rejected(leased, missed=WRITTEN_SINCE)
            return count

    def _fetch_all(self) -> None:
        owners = held_owners() if self._lease is None else (*held_owners(), self._lease.owner_id)
        token = reading_under.set(owners)
        try:
            super()._fetch_all()
        finally:
            reading_under.reset(token)

    def _plain_rows(self) -> Self:
        """Return the rows without order, annotations and values()."""
        rows = self._copy(_fields=None, _iterable_class=models.query.ModelIterable)
        rows = rows.using(self._database()).order_by()
        rows.query.clear_select_clause()
        rows.query.select_for_update = False
        rows.query.distinct_fields = ()
        rows.query.default_cols = True
        return rows

    @property
    def _is_fenced(self) -> bool:
        return bool(getattr(self.model, "_is_fenced", False))

    @property
    def _is_versioned(self) -> bool:
        return bool(getattr(self.model, "_is_versioned", False))

    @property
    def _own(self) -> list[str]:
        """The columns that the package writes."""
        return ["version"] * self._is_versioned + ["fence"] * self._is_fenced

    @property
    def _fencing(self) -> FencingOf:
        model: Any = self.model
        return model.fencing  # type: ignore[no-any-return]

    def _is_covered(self) -> bool:
        """Whether any write can need a lease. If not, it is left to Django."""
        return self._is_fenced and self._fencing.may_need_lease(self._lease)

    def _database(self) -> str:
        self._for_write = True
        return self.db

    def _require_other_columns(self, names: Iterable[str], method: str) -> None:
        for own in set(self._own).intersection(names):
            raise TypeError(f"{method}() can't set {own!r}: it is written along with the row.")

    def _writes(
        self,
        doing: str,
        values: Mapping[str, Any] | None = None,
        objs: Sequence[Any] | None = None,
    ) -> Sequence[Write] | None:
        """Find the leases for the rows of this queryset; None if they are left to Django."""
        is_djangos_error = self.query.is_sliced or self.query.combinator
        if is_djangos_error or not self._is_covered():
            return None
        fencing, using = self._fencing, self._database()
        names = [type(obj).fencing.name_of_row(obj) for obj in objs or ()]
        # Objects that Django makes to set an order have keys alone, and no name.
        is_known = objs is not None and fencing.finds_rows and None not in names
        found = fencing.rows_of(objs or ()) if is_known else self._rows()
        writes = [
            Write(fencing, using, doing, *each, locks=len(found)).under(self._lease)
            for each in found
        ]
        if objs is not None:
            limit_to(writes, objs, names)
        # Objects that have a name have that of their row, and move it to no other lock.
        if values and (objs is None or None in names):
            for write in writes:
                self._note_move(write, values)
        # If there are no rows, the locks of rows that come meanwhile are unknown: none is written.
        if not leases_of(writes) and (writes or fencing.spec.without_lock != "reject"):
            return None
        return writes

    def _rows(self) -> Rows:
        """Find the names of the rows' locks; asks the database only if they differ by row."""
        fencing = self._fencing
        columns = fencing.columns
        if columns == ():
            return [(fencing.name_of({}), {})]
        rows = self._plain_rows()
        if columns is None or not fencing.finds_rows:
            return fencing.rows_of(rows)
        # Texts that the database takes for equal are still the names of different locks.
        exact = {f"_exact_{column}": Exactly(F(column)) for column in fencing.texts}
        found = rows.annotate(**exact).values_list(*columns, *exact).distinct()
        named = [dict(zip(columns, row, strict=False)) for row in found]
        return [(fencing.name_of(values), values) for values in named]

    def lock_names(self) -> list[str | None]:
        """Return the names of the rows' locks. Asks the database."""
        if self._fields is not None:  # type: ignore[attr-defined]
            raise TypeError(
                f"{self.model.__name__}.fencing.lock_all() takes rows, not their values: remove "
                "values(), values_list(), dates() or datetimes() from the queryset."
            )
        is_whole = not self.query.is_sliced and not self.query.combinator
        return [name for name, _ in (self._rows() if is_whole else self._fencing.rows_of(self))]

    def _note_move(self, write: Write, values: Mapping[str, Any]) -> None:
        """Find the lease of the lock that rows are moved to."""
        fencing = self._fencing
        changed = fencing.naming_values(values)
        if not changed:
            return
        new = {**write.columns, **changed}
        # If rows go by their keys, the new name is known only if it is given as a whole.
        name = fencing.name_of(new) if new.keys() >= set(fencing.columns or ()) else None
        if name is None or name != write.name:
            target = Write(fencing, write.using, write.doing, name, new)
            write.moving_to = target.under(self._lease)

    def _writes_of_new(self, objs: Sequence[Any]) -> list[Write]:
        fencing, using = self._fencing, self._database()
        if not self._is_covered():
            return [Write(fencing, using, "Creating")] * len(objs)
        names = [type(obj).fencing.name_of_row(obj) for obj in objs]
        found = {
            name: Write(fencing, using, "Creating", name, row=obj).adding(self._lease)
            for name, obj in dict(zip(names, objs, strict=True)).items()
        }
        return [found[name] for name in names]

    def _require_comparable(
        self, writes: Sequence[Write], unique_fields: Sequence[str] | None
    ) -> None:
        """Raise if new rows may take the place of rows that they can't be compared with."""
        why = ""
        if self._is_versioned:
            why = "can't compare the versions of the rows that it overwrites"
        elif self._is_covered():
            for write in writes:
                if write.grant is None:
                    # Adding is free, overwriting isn't.
                    replace(write, doing="Overwriting").under(None)
            if leases_of(writes):
                why = self._fencing.why_incomparable(connections[self._database()], unique_fields)
        if why:
            label = self.model._meta.label
            raise ImproperlyConfigured(f"bulk_create(update_conflicts=True) of {label} {why}.")

    @contextlib.contextmanager
    def _stamped(self, objs: Sequence[Any], writes: Sequence[Write]) -> Iterator[None]:
        """Set the objects' own columns as their rows have them, or as they were on failure."""
        own = self._own
        before = [{column: obj.__dict__.get(column, 0) for column in own} for obj in objs]
        values = [dict.fromkeys(own, 0) for _ in objs]
        for each, write in zip(values, writes, strict=False):
            each["fence"] = 0 if write.grant is None else write.token
        for obj, stamps in zip(objs, values, strict=True):
            obj.__dict__.update(stamps)
        try:
            yield
        except BaseException:
            values = before
            raise
        finally:
            for obj, stamps in zip(objs, values, strict=True):
                obj.__dict__.update(stamps)

    def _next_versions(self, objs: Iterable[Any]) -> Case:
        """Return what an UPDATE of objects sets the version to, if it is the loaded one still."""
        branches = []
        for obj in objs:
            loaded = obj.__dict__.get("version")
            if not isinstance(loaded, int):
                why = "its version wasn't loaded with it"
                raise version_conflict(self.model, "Updating", why, pk=obj.pk)
            branches.append(When(pk=obj.pk, version=loaded, then=Value(loaded + 1)))
        return by_rows(branches)

    @contextlib.contextmanager
    def _all_or_nothing(self, writes: Sequence[Write]) -> Iterator[None]:
        """Roll back the statement, and those that go with it, if a row is rejected."""
        inherits = bool(self.model._meta.all_parents)
        within = transaction.atomic(using=self._database(), savepoint=False)
        try:
            with within if inherits else contextlib.nullcontext():
                yield
        except Error as exc:
            leased = leases_of(writes)
            if self._is_fenced and is_rejected(exc, self.model, "fence"):
                if leased:
                    raise rejected(leased) from exc
                write = Write(self._fencing, self.db, "Writing", locks=0)
                why = "rows of locks that aren't held here came meanwhile"
                raise write.lock_required(why) from exc
            if self._is_versioned and is_rejected(exc, self.model, "version"):
                why = "one of the rows was written since it was loaded"
                raise version_conflict(self.model, "Writing", why) from exc
            raise


if TYPE_CHECKING:
    _Manager = models.Manager
else:
    _Manager = models.Manager.from_queryset(FencedQuerySet)


class FencedManager(_Manager[_Row]):
    """The manager of guarded models. A model's own `objects` should be a subclass of it."""

    # Written out for type checkers, which don't see what from_queryset() copies.
    def using_lease(self, lease: Lease) -> FencedQuerySet[_Row]:
        """Write under `lease`, whatever the context holds."""
        return self.get_queryset().using_lease(lease)  # type: ignore


class BaseRows(FencedQuerySet[Any]):
    """Rows that Django looks up for itself: for cascades, saves and related rows."""

    def filter(self, *args: Any, **kwargs: Any) -> Self:
        watch(self.model)
        return super().filter(*args, **kwargs)

    def __bool__(self) -> bool:
        # Before SET_DEFAULT and SET(), Django asks whether there are rows. If that fetched them,
        # it would update them one by one, bypassing update().
        if self._result_cache is None and (self._is_covered() or self._is_versioned):
            return self.exists()
        return super().__bool__()


class BaseRowsManager(models.Manager.from_queryset(BaseRows)):  # type: ignore[misc]
    """The manager of Django's own look-ups, `Model._base_manager`."""


class _GuardedOptions(Options):  # type: ignore[type-arg]
    """
    The ``_meta`` of guarded models: their base manager is the package's own.

    As an attribute of the models, named by `Meta.base_manager_name`, it would be in their
    migrations; and of several base classes, Django takes that of the first one alone.
    """

    @cached_property
    def base_manager(self) -> Any:
        if self.base_manager_name:
            return super().base_manager
        manager: Any = BaseRowsManager()
        manager.name, manager.model, manager.auto_created = "_base_manager", self.model, True
        return manager


def _use_own_base_manager(sender: Any, **kwargs: Any) -> None:
    if issubclass(sender, SaveHooks):
        sender._meta.__class__ = _GuardedOptions
        sender._meta.__dict__.pop("base_manager", None)


class_prepared.connect(_use_own_base_manager)


if TYPE_CHECKING:
    _AnyRow = TypeVar("_AnyRow", bound=models.Model)

    class _ModelBase(ModelBase):
        # As django-stubs has it. Were it declared, pyright would allow no model another manager.
        def __getattr__(  # type: ignore[misc]
            self: type[_AnyRow], name: Literal["objects"]
        ) -> FencedManager[_AnyRow]: ...
else:
    _ModelBase = ModelBase


class GuardedModel(SaveHooks, models.Model, metaclass=_ModelBase):  # noqa: DJ008
    """What fenced and versioned models have in common."""

    if not TYPE_CHECKING:
        objects = FencedManager()

    if TYPE_CHECKING:
        # pyright wants a model's Meta to be one of these, by its base or, as a Protocol, as it is.
        class Meta(Protocol): ...
    else:

        class Meta:
            abstract = True
