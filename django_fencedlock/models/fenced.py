"""`FencedModel`: a row is written under the newest grant of its lock, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Self

from django.db import models

from ..lease import Lease, held_names, held_owners
from .base import Doing, Guard
from .fencing import Fencing, FencingOf
from .fields import FenceField
from .queryset import FencedManager, GuardedModel, handed_over, reading_under
from .writes import FenceGuard, Write, write_for, write_for_new_row


class FencedModel(GuardedModel):
    """
    Adds a ``fence`` column, and checks it in every way the ORM writes.

    Under a lease of the row's lock a save is one query, as without it. It raises `StaleFence` if
    a newer grant exists, or if the row was written since it was loaded. Without a lease it
    raises `LockRequired`, unless ``fencing`` or the settings allow it.
    """

    fence = FenceField()
    fencing = Fencing()
    _is_fenced = True
    if TYPE_CHECKING:
        # django-stubs would make it this very class's, and no model could have both mixins.
        _default_manager: ClassVar[FencedManager[Self]]
    else:

        class Meta(GuardedModel.Meta):
            abstract = True

    @classmethod
    def from_db(cls, *args: Any, **kwargs: Any) -> Self:
        row: Any = super().from_db(*args, **kwargs)
        if "fence" not in row.__dict__:
            # A fence that is loaded later isn't that of its other columns.
            row._state.fence_read_under = None
        elif owners := reading_under.get():
            row._state.fence_read_under = owners
        return row  # type: ignore[no-any-return]

    def refresh_from_db(
        self,
        using: str | None = None,
        fields: Iterable[str] | None = None,
        from_queryset: models.QuerySet[Self] | None = None,
    ) -> None:
        """
        Reload the row, and with it the fence.

        Some fields alone leave the fence as it is, since the others stay older.
        """
        before = self.__dict__.get("fence")
        owners = held_owners()
        super().refresh_from_db(using, fields, from_queryset)
        if fields is not None:
            if before is not None:
                self.__dict__["fence"] = before
        elif "fence" in self.__dict__:
            self._state.fence_read_under = owners

    def save(self, *args: Any, lease: Lease | None = None, **kwargs: Any) -> None:
        """Save under `lease`, or the context's lease of the row's lock."""
        given = handed_over.get()
        if lease is None and given is not None and given[0] is type(self):
            handed_over.set(None)  # It is for this object alone.
            lease = given[1]
        if lease is None:
            super().save(*args, **kwargs)
        else:
            with _given(self, lease):
                super().save(*args, **kwargs)

    save.alters_data = True  # type: ignore[attr-defined]

    async def asave(self, *args: Any, lease: Lease | None = None, **kwargs: Any) -> None:
        """See save()."""
        with _given(self, lease):
            await super().asave(*args, **kwargs)

    asave.alters_data = True  # type: ignore[attr-defined]

    def delete(
        self, *args: Any, lease: Lease | None = None, **kwargs: Any
    ) -> tuple[int, dict[str, int]]:
        """Delete under `lease`, or the context's lease of the row's lock."""
        with _given(self, lease):
            return super().delete(*args, **kwargs)

    delete.alters_data = True  # type: ignore[attr-defined]

    async def adelete(
        self, *args: Any, lease: Lease | None = None, **kwargs: Any
    ) -> tuple[int, dict[str, int]]:
        """See delete()."""
        with _given(self, lease):
            return await super().adelete(*args, **kwargs)

    adelete.alters_data = True  # type: ignore[attr-defined]

    def _guards(self, table: Any, using: str, doing: Doing, is_first: bool) -> list[Guard]:
        guards = super()._guards(table, using, doing, is_first)
        given, fencing = _lease_given_to(self), type(self).fencing
        compares = is_first and not fencing.finds_rows
        if table is not fencing.table and not compares:
            return guards
        write = self._write(fencing, using, doing, given)
        if compares and write.grant is not None:
            # SQL can't compare the names, so the row is read before its first table is written.
            row = self._row(fencing.table, using).first()
            if row is not None and type(row).fencing.name_of_row(row) != write.name:
                raise write.moved(self.pk, row.fence)
        return [*guards, FenceGuard(self, write)] if table is fencing.table else guards

    def _guard_dependent(self, using: str, origin: Any) -> None:
        fencing, given = type(self).fencing, _lease_given_to(origin)
        if self._meta.concrete_model is not fencing.table:
            return  # The row of the fence's own table is collected as well.
        if given is not None and given.name != fencing.name_of_row(self):
            given = None
        guard = FenceGuard(self, self._write(fencing, using, Doing.DELETING, given))
        if not guard.keeps and not guard.is_met(using):
            self._claim_row(fencing.table, using, [guard])

    def _write(self, fencing: FencingOf, using: str, doing: Doing, given: Lease | None) -> Write:
        if not fencing.may_need_lease(given):
            return Write(fencing, using, None, {}, doing)
        name = fencing.name_of_row(self)
        if doing is Doing.ADDING:
            return write_for_new_row(fencing, name, using, given, doing)
        if doing is Doing.LOADING and given is None and name not in held_names():
            # The object of a fixture has the columns of its own table alone.
            row = None if fencing.finds_rows else self._row(fencing.table, using).first()
            name = None if row is None else type(row).fencing.name_of_row(row)
            if name not in held_names():
                # It may overwrite the row, and leaves the fence as it is.
                return Write(fencing, using, None, {}, doing)
        columns = {each.attname: fencing.value_of(self, each.attname) for each in fencing.compared}
        return write_for(fencing, name, columns, using, given, doing)


#: The objects that are being written under a given lease, the innermost first. Not kept in the
#: objects: a lease can't be pickled, and copies would keep it.
_given_leases: ContextVar[tuple[tuple[models.Model, Lease], ...]] = ContextVar(
    "fencedlock_given_leases", default=()
)


def _lease_given_to(origin: Any) -> Lease | None:
    """Return the lease that a write of an object or queryset was given explicitly."""
    if not isinstance(origin, models.Model):
        return getattr(origin, "_lease", None)
    return next((lease for instance, lease in _given_leases.get() if instance is origin), None)


@contextlib.contextmanager
def _given(instance: models.Model, lease: Lease | None) -> Iterator[None]:
    """Note the lease that a write was given, for the steps that Django takes from there."""
    if lease is None:
        yield
        return
    token = _given_leases.set(((instance, lease), *_given_leases.get()))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # A coroutine is closed in another context.
            _given_leases.reset(token)
