"""`FencedModel`: a row is written under the newest grant of its lock, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

from django.db import models

from ..lease import Lease
from ..lease_context import held_names, held_owners
from .base import ADDING, DELETING, LOADING, Guard, given, given_leases
from .fencing import Fencing, FencingOf
from .fields import FenceField
from .queryset import FencedManager, GuardedModel, reading_under
from .writes import FenceGuard, Write

_SAVE = {"force_insert": False, "force_update": False, "using": None, "update_fields": None}


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
        _parse_save_params: Any
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
        """Reload the row and its fence; `fields` leave the fence, since the others stay older."""
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
        if args and _is_djangos(super().save):
            # Django 5.2 warns of positional arguments at the line of its caller's caller.
            kwargs = _SAVE | kwargs
            parsed = self._parse_save_params(*args, method_name="save", **kwargs)
            args, kwargs = (), dict(zip(kwargs, parsed, strict=True))
        lease_given_to(self)  # Before receivers save other objects.
        if lease is None:
            super().save(*args, **kwargs)
        else:
            with given(self, lease):
                super().save(*args, **kwargs)

    async def asave(self, *args: Any, lease: Lease | None = None, **kwargs: Any) -> None:
        if args and _is_djangos(super().asave):
            kwargs = _SAVE | kwargs
            parsed = self._parse_save_params(*args, method_name="asave", **kwargs)
            args, kwargs = (), dict(zip(kwargs, parsed, strict=True))
        with given(self, lease):
            await super().asave(*args, **kwargs)

    def delete(
        self, *args: Any, lease: Lease | None = None, **kwargs: Any
    ) -> tuple[int, dict[str, int]]:
        """Delete under `lease`, or the context's lease of the row's lock."""
        with given(self, lease):
            return super().delete(*args, **kwargs)

    async def adelete(
        self, *args: Any, lease: Lease | None = None, **kwargs: Any
    ) -> tuple[int, dict[str, int]]:
        with given(self, lease):
            return await super().adelete(*args, **kwargs)

    def _guards(self, table: Any, using: str, doing: str, is_first: bool) -> list[Guard]:
        own: list[Guard] = []
        fencing = type(self).fencing
        compares = is_first and not fencing.finds_rows
        if table is fencing.table or compares:
            write = self._write(fencing, using, doing, lease_given_to(self))
            if compares and write.grant is not None:
                # SQL can't compare the names: the row is read before its first table is written.
                row = self._row(fencing.table, using).first()
                if row is not None and type(row).fencing.name_of_row(row) != write.name:
                    raise write.moved(self.pk, row.fence)
            own = [FenceGuard(self, write)] if table is fencing.table else []
        return [*super()._guards(table, using, doing, is_first), *own]

    def _guard_dependent(self, using: str, origin: Any) -> None:
        fencing, lease = type(self).fencing, lease_given_to(origin)
        if self._meta.concrete_model is not fencing.table:
            return  # The row of the fence's own table is collected as well.
        if lease is not None and lease.name != fencing.name_of_row(self):
            lease = None
        # Its model may have more rows that are deleted along with it.
        guard = FenceGuard(self, self._write(fencing, using, DELETING, lease, locks=0))
        self._claim_row(fencing.table, using, [guard])

    def _write(
        self, fencing: FencingOf, using: str, doing: str, lease: Lease | None, locks: int = 1
    ) -> Write:
        if not fencing.may_need_lease(lease):
            return Write(fencing, using, doing)
        name = fencing.name_of_row(self)
        if doing == ADDING:
            return Write(fencing, using, doing, name, row=self).adding(lease)
        if doing == LOADING and lease is None and name not in held_names():
            # The object of a fixture has the columns of its own table alone.
            row = None if fencing.finds_rows else self._row(fencing.table, using).first()
            name = None if row is None else type(row).fencing.name_of_row(row)
            if name not in held_names():
                # It may overwrite the row, and leaves the fence as it is.
                return Write(fencing, using, doing)
        columns = {each.attname: fencing.value_of(self, each.attname) for each in fencing.compared}
        return Write(fencing, using, doing, name, columns, row=self, locks=locks).under(lease)


def _is_djangos(save: Any) -> bool:
    """Whether a method is Django's own, and takes positional arguments in this version."""
    own = (models.Model.save, models.Model.asave)
    return save.__func__ in own and hasattr(models.Model, "_parse_save_params")


def lease_given_to(origin: Any) -> Lease | None:
    """Return the lease that a write of an object or queryset was given explicitly."""
    if not isinstance(origin, models.Model):
        return getattr(origin, "_lease", None)
    for each in given_leases.get():
        if each[0] is type(origin):
            each[0] = origin
        if each[0] is origin:
            return each[1]  # type: ignore[no-any-return]
    return None
