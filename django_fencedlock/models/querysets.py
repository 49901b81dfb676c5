"""The queryset of guarded models: statements over many rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Self, TypeVar

from django.db import Error, connections, models, transaction
from django.db.models import Case, F, Value, When
from django.db.models.deletion import Collector

from ..lease import Lease, held_owners
from .adding import NewRows
from .cascades import watch
from .comparing import Exactly
from .fencing import FencingOf
from .fields import REFUSED, constraint_name
from .naming import Rows, all_named, naming_values, rows_of
from .refusals import names_constraint, of_many, version_conflict
from .writes import (
    Write,
    as_read,
    fence_of_claimed,
    gather,
    leases_of,
    token_or_refused,
    write_for,
)

_Row = TypeVar("_Row", bound=models.Model, covariant=True)

#: The lease of a queryset that is about to save one object of the model.
_handed_over: ContextVar[tuple[type[models.Model], Lease] | None] = ContextVar(
    "fencedlock_handed_over", default=None
)

#: The owner ids of the leases under which rows are read: those that were held when the query was
#: sent. None for rows of an iterator, which are fetched long after that.
reading_under: ContextVar[tuple[str, ...]] = ContextVar("fencedlock_reading_under", default=())


def handed_over(model: type[models.Model]) -> Lease | None:
    """The lease that a queryset hands over to the save that it makes; once."""
    found = _handed_over.get()
    if found is None or found[0] is not model:
        return None
    _handed_over.set(None)
    return found[1]


class FencedQuerySet(models.QuerySet[_Row]):
    """
    A queryset whose writes are guarded as those of single objects are.

    A statement over many fenced rows needs the lease of every row's lock. It is refused before it
    writes if one isn't held, and fails as a whole if one of the rows is stale.
    """

    _lease: Lease | None = None
    #: The objects that are being updated, where the rows are known by them.
    _objects: Sequence[Any] | None = None

    def using_lease(self, lease: Lease) -> Self:
        """Write under `lease`, whatever the context holds."""
        clone = self._chain()  # type: ignore[attr-defined]
        clone._lease = lease
        return clone  # type: ignore[no-any-return]

    def _clone(self) -> Self:
        clone = super()._clone()  # type: ignore[misc]
        if self._lease is not None:
            clone._lease = self._lease
        if self._objects is not None:
            clone._objects = self._objects
        return clone  # type: ignore[no-any-return]

    def only(self, *fields: Any) -> Self:
        # An object without its fence can't be written.
        loaded = (*fields, "fence") if self._is_fenced and fields not in ((), (None,)) else fields
        return super().only(*loaded)

    def defer(self, *fields: Any) -> Self:
        deferred = (each for each in fields if each != "fence" or not self._is_fenced)
        return super().defer(*deferred)

    def _fetch_all(self) -> None:
        owners = held_owners() if self._lease is None else (*held_owners(), self._lease.owner_id)
        token = reading_under.set(owners)
        try:
            super()._fetch_all()
        finally:
            reading_under.reset(token)

    def _is_covered(self) -> bool:
        """Whether any write can need a lease: else it is left to Django as it is."""
        return self._is_fenced and self._fencing.may_need_lease(self._lease)

    def create(self, **values: Any) -> Any:
        with self._handing_over():
            return super().create(**values)

    create.alters_data = True  # type: ignore[attr-defined]

    def update_or_create(self, *args: Any, **values: Any) -> tuple[Any, bool]:
        with self._handing_over():
            return super().update_or_create(*args, **values)

    update_or_create.alters_data = True  # type: ignore[attr-defined]

    def update(self, **values: Any) -> int:
        self._refuse_own_columns(values, "update")
        writes = self._writes("Updating", values)
        stamps: dict[str, Any] = {}
        if writes is not None:
            stamps["fence"] = token_or_refused(writes)
        if self._is_versioned:
            stamps["version"] = self._next_versions()
        if not stamps:
            return super().update(**values)
        with self._all_or_nothing(writes or ()):
            # MySQL sets one column after the other, and the conditions are on what was before.
            return super().update(**stamps, **values)

    update.alters_data = True  # type: ignore[attr-defined]

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        objs, fields = tuple(objs), tuple(fields)
        self._refuse_own_columns(fields, "bulk_update")
        writes = self._writes_of(objs) if self._is_fenced else None
        if (writes is None and not self._is_versioned) or not all(obj.pk for obj in objs):
            return super().bulk_update(objs, fields, batch_size)
        count = 0
        within = transaction.atomic(using=self._database(), savepoint=False)
        with self._all_or_nothing(writes or ()), within:
            for batch in self._batches(objs, fields, batch_size):
                rows = self._chain()  # type: ignore[attr-defined]
                rows._objects = batch
                found = super(FencedQuerySet, rows).bulk_update(batch, fields)
                if found < len({obj.pk for obj in batch}):
                    raise self._gone(batch, writes)
                count += found
        tokens = {write.name: write.token for write in leases_of(writes or ())}
        for obj in objs:
            if self._is_versioned:
                obj.version += 1
            if tokens and (token := tokens.get(obj.fencing.name_to_write())) is not None:
                obj.fence = token
        return count

    bulk_update.alters_data = True  # type: ignore[attr-defined]

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
        new = NewRows(
            self.model,
            objs,
            fencing=self._fencing if self._is_fenced else None,
            is_versioned=self._is_versioned,
            using=self._database(),
            given=self._lease,
        )
        if update_conflicts:
            unique_fields = unique_fields and list(unique_fields)
            new.refuse_overwriting(unique_fields)
            update_fields = [*(update_fields or ()), *(["fence"] if new.are_leased else [])]
        with new.columns_kept(), self._all_or_nothing(new.writes):
            if ignore_conflicts and new.are_leased:
                # SQLite and MySQL ignore the constraint as well.
                with transaction.atomic(using=self.db, savepoint=False):
                    new.check_beforehand()
                    return super().bulk_create(objs, batch_size, ignore_conflicts=True)
            new.have_checked()
            return super().bulk_create(
                objs, batch_size, ignore_conflicts, update_conflicts, update_fields, unique_fields
            )

    bulk_create.alters_data = True  # type: ignore[attr-defined]

    def delete(self) -> tuple[int, dict[str, int]]:
        if self._is_covered():
            watch(self.model)
            if not Collector(using=self._database(), origin=self).can_fast_delete(self):
                # Each row is guarded as it is collected. Here, one that isn't covered at all
                # is refused before anything is written.
                self._writes("Deleting")
        return super().delete()

    delete.alters_data = True  # type: ignore[attr-defined]
    delete.queryset_only = True  # type: ignore[attr-defined]

    def _raw_delete(self, using: Any) -> int:
        """Delete the rows in one statement; cascades come here, past delete()."""
        rows = self.using(using)
        writes = rows._writes("Deleting")
        if writes is None:
            return super()._raw_delete(using)
        with rows._all_or_nothing(writes), transaction.atomic(using=using, savepoint=False):
            # Writing the fence first stops whoever may not delete. Rows that came since then are
            # left alone: nobody has asked for their leases.
            claimed = rows._plain_rows()
            models.QuerySet.update(claimed, fence=token_or_refused(writes))
            rows = rows.filter(fence=fence_of_claimed(writes))
            return super(FencedQuerySet, rows)._raw_delete(using)

    _raw_delete.alters_data = True  # type: ignore[attr-defined]

    # What the model is

    @property
    def _is_fenced(self) -> bool:
        return bool(getattr(self.model, "_is_fenced", False))

    @property
    def _is_versioned(self) -> bool:
        return bool(getattr(self.model, "_is_versioned", False))

    @property
    def _fencing(self) -> FencingOf:
        model: Any = self.model
        return model.fencing  # type: ignore[no-any-return]

    def _database(self) -> str:
        self._for_write = True
        return self.db

    def _refuse_own_columns(self, names: Iterable[str], method: str) -> None:
        for own in {"fence", "version"}.intersection(names):
            if self._is_fenced if own == "fence" else self._is_versioned:
                raise TypeError(f"{method}() can't set {own!r}: it is written along with the row.")

    # Names and leases

    def _writes(
        self, doing: str, values: Mapping[str, Any] | None = None
    ) -> Sequence[Write] | None:
        """The leases for the rows of this queryset; None if they are left to Django."""
        if self.query.is_sliced or self.query.combinator:
            return None  # Django refuses to write these.
        if not self._is_covered():
            return None
        database = self._database()
        writes = gather(self._fencing, self._rows(), database, self._lease, doing)
        objs = self._objects
        names = [] if objs is None else [obj.fencing.name_to_write() for obj in objs]
        if objs is not None:
            writes = as_read(writes, objs, names)
        # Objects that have a name have that of their row, and give it no other.
        if values and (objs is None or None in names):
            writes = [self._moved(write, values) for write in writes]
        return self._unless_left_alone(writes)

    def _writes_of(self, objs: Sequence[Any]) -> Sequence[Write] | None:
        """The leases for these objects; None if they are left to Django."""
        if not self._is_covered():
            return None
        rows = self._known(objs)
        if rows is None:
            rows = self.filter(pk__in=[obj.pk for obj in objs])._rows()
        return self._unless_left_alone(
            gather(self._fencing, rows, self._database(), self._lease, "Updating")
        )

    def _unless_left_alone(self, writes: Sequence[Write]) -> Sequence[Write] | None:
        if not leases_of(writes) and (writes or self._fencing.spec.without_lock != "reject"):
            return None
        # If there are none: of rows that come meanwhile, nobody knows the names. None is written.
        return writes

    def _rows(self) -> Rows:
        """
        The names of the rows' locks, each with what tells its rows from others.

        Asks the database only if names differ by row.
        """
        fencing = self._fencing
        if self._objects is not None and (known := self._known(self._objects)) is not None:
            return known
        columns = fencing.columns
        if columns == ():
            return [(fencing.name_of({}), {})]
        rows = self._plain_rows()
        tells_rows = fencing.plan.tells_rows or self._objects is None
        if columns is None or not fencing.plan.is_local or not tells_rows:
            return rows_of(fencing, rows)
        # Texts that the database takes for equal are still the names of different locks.
        exact = {f"_exact_{column}": Exactly(F(column)) for column in fencing.plan.texts}
        found = rows.annotate(**exact).values_list(*columns, *exact).distinct()
        named = [dict(zip(columns, row, strict=False)) for row in found]
        return [(fencing.name_of(values), values) for values in named]

    def _known(self, objs: Sequence[Any]) -> Rows | None:
        """The names of objects, if they need not be compared with those of their rows."""
        if not self._fencing.plan.tells_rows:
            return None
        rows = rows_of(self._fencing, objs)
        return rows if all_named(rows) else None

    def _moved(self, write: Write, values: Mapping[str, Any]) -> Write:
        """Rows that are given to another lock are written under that one's lease as well."""
        columns = self._fencing.columns or ()
        changed = naming_values(self.model, values, columns)
        if not changed:
            return write
        new = {**write.columns, **changed}
        # If rows go by their keys, the new name is known only if it is given as a whole.
        name = self._fencing.name_of(new) if new.keys() >= set(columns) else None
        if name is not None and name == write.name:
            return write
        target = write_for(self._fencing, name, {}, write.using, self._lease, write.doing)
        return write._replace(moving_to=target)

    def _plain_rows(self) -> Self:
        rows = self._chain().using(self._database()).order_by()  # type: ignore[attr-defined]
        rows.query.clear_select_clause()
        rows.query.select_for_update = False
        rows.query.distinct_fields = ()
        rows.query.default_cols = True
        rows._fields = None
        rows._iterable_class = models.query.ModelIterable
        return rows  # type: ignore[no-any-return]

    # Parts of bulk_update()

    def _batches(
        self, objs: Sequence[Any], fields: Sequence[str], size: int | None
    ) -> Iterator[Sequence[Any]]:
        if size is not None and size <= 0:
            raise ValueError("Batch size must be a positive integer.")
        meta: Any = self.model._meta
        # As Django counts parameters, and some more for each object's fence and version.
        columns = [meta.pk, meta.pk, *map(meta.get_field, fields)]
        if self._is_fenced:
            columns += [meta.pk, meta.get_field("fence"), meta.get_field("fence")]
        if self._is_versioned:
            columns += [meta.pk, meta.get_field("version"), meta.get_field("version")]
        largest = max(1, connections[self.db].ops.bulk_batch_size(columns, objs))
        size = min(size or largest, largest)
        for start in range(0, len(objs), size):
            yield objs[start : start + size]

    def _next_versions(self) -> Any:
        """What an UPDATE sets the version to: for objects, only if it is the loaded one still."""
        if self._objects is None:
            return F("version") + 1
        branches = []
        for obj in self._objects:
            loaded = obj.__dict__.get("version")
            if not isinstance(loaded, int):
                raise version_conflict(
                    self.model, obj.pk, None, "its version wasn't loaded with it"
                )
            branches.append(When(pk=obj.pk, version=loaded, then=Value(loaded + 1)))
        return Case(*branches, default=Value(REFUSED), output_field=models.BigIntegerField())

    def _gone(self, objs: Sequence[Any], writes: Sequence[Write] | None) -> Exception:
        why = "a row is gone, or isn't among those of the queryset"
        leased = leases_of(writes or ())
        if not leased:
            return version_conflict(self.model, None, None, why)
        for write in leased:
            if superseded := write.refusal().superseded():
                return superseded
        return leased[0].refusal().error(None, why)

    @contextlib.contextmanager
    def _handing_over(self) -> Iterator[None]:
        lease = self._lease
        before = _handed_over.set(None if lease is None else (self.model, lease))
        try:
            yield
        finally:
            _handed_over.reset(before)

    @contextlib.contextmanager
    def _all_or_nothing(self, writes: Sequence[Write]) -> Iterator[None]:
        """Have the statement, and those that go with it, fail as one if a row is refused."""
        using = self._database()
        inherits = bool(self.model._meta.all_parents)
        try:
            with (
                transaction.atomic(using=using, savepoint=False)
                if inherits
                else contextlib.nullcontext()
            ):
                yield
        except Error as exc:
            if self._objects is not None:
                raise  # It is explained by bulk_update(), once the transaction has ended.
            leased = leases_of(writes)
            if self._is_fenced and _stopped(exc, self._fencing.table, "fence"):
                if leased:
                    raise of_many([write.refusal() for write in leased]) from exc
                raise self._fencing.no_lease("Writing", "rows of some lock came meanwhile") from exc
            if self._is_versioned:
                table = self.model._meta.get_field("version").model
                if _stopped(exc, table, "version"):
                    why = "one of the rows has another version now"
                    raise version_conflict(self.model, None, None, why) from exc
            raise


def _stopped(error: Error, table: Any, column: str) -> bool:
    return names_constraint(error, constraint_name(table, column))
