"""`FencedModel`: a row is written under the newest grant of its lock, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Self

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.sql.compiler import SQLCompiler

from ..exceptions import StaleObject
from ..lease import Lease, held_names, held_owners
from .fencing import Fencing, FencingOf
from .fields import FenceField
from .guarded import Doing, Guard, GuardedModel
from .managers import FencedManager
from .querysets import handed_over, reading_under
from .writes import (
    Write,
    fences_of,
    new_rows_fence,
    row_condition,
    write_for,
    write_for_new_row,
)


class FencedModel(GuardedModel):
    """
    Adds a ``fence`` column, and checks it in every way the ORM writes.

    Under a lease of the row's lock a save is one query, as without it. It raises `StaleFence` if
    a newer grant exists, or if somebody wrote the row since it was loaded. Without a lease it
    raises `LockRequired`, unless ``fencing`` or the settings allow it.
    """

    fence = FenceField()
    fencing = Fencing()
    _is_fenced = True
    if TYPE_CHECKING:
        # django-stubs would make it this very class's, and no model could have both mixins.
        _default_manager: ClassVar[FencedManager[Self]]

    if not TYPE_CHECKING:

        class Meta(GuardedModel.Meta):
            abstract = True

    @classmethod
    def from_db(cls, *args: Any, **kwargs: Any) -> Self:
        row: Any = super().from_db(*args, **kwargs)
        if "fence" not in row.__dict__:
            # Whatever fence it gets later isn't that of its other columns.
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
            self._state.fence_read_under = owners  # type: ignore[attr-defined]

    def save(self, *args: Any, lease: Lease | None = None, **kwargs: Any) -> None:
        """Save under `lease`, or the context's lease of the row's lock."""
        lease = lease or handed_over(type(self))
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

    def _guards(self, table: Any, using: str, doing: Doing) -> list[Guard]:
        guards = super()._guards(table, using, doing)
        fencing: FencingOf = self.fencing
        if table._meta.concrete_model is fencing.plan.table:
            write = self._write(fencing, using, doing, _lease_given_to(self))
            guards.append(FenceGuard(self, write))
        return guards

    def _look_first(self, using: str, doing: Doing) -> None:
        super()._look_first(using, doing)
        fencing: FencingOf = self.fencing
        if fencing.plan.tells_rows:
            return
        write = self._write(fencing, using, doing, _lease_given_to(self))
        if write.grant is None:
            return
        row = self._row_now(using)
        if row is not None and row.fencing.name_to_write() != write.name:
            raise write.refusal(self.pk).moved(row.fence)

    def _row_now(self, using: str) -> Any:
        """The row as it is, in the fence's table."""
        table = self.fencing.plan.table
        pk = self._key_in(table)
        return None if pk is None else table._base_manager.using(using).filter(pk=pk).first()

    def _guard_dependent(self, using: str, origin: Any) -> None:
        super()._guard_dependent(using, origin)
        fencing: FencingOf = self.fencing
        table: Any = fencing.table
        concrete: Any = self._meta.concrete_model
        if concrete is not table:
            return  # The row of the fence's own table is collected as well.
        given = _lease_given_to(origin)
        if given is not None and given.name != fencing.name():
            given = None
        guard = FenceGuard(self, self._write(fencing, using, Doing.DELETING, given))
        if not guard.keeps and not guard.is_met():
            self._claim_row(table, using, [guard])

    def _write(self, fencing: FencingOf, using: str, doing: Doing, given: Lease | None) -> Write:
        if not fencing.may_need_lease(given):
            return Write(fencing, using, None, {}, doing)
        name = fencing.name_to_write()
        if doing is Doing.ADDING:
            return write_for_new_row(fencing, name, using, given, doing)
        if doing is Doing.LOADING and given is None and name not in held_names():
            # The object of a fixture has the columns of its own table alone.
            row = None if fencing.plan.tells_rows else self._row_now(using)
            name = None if row is None else row.fencing.name_to_write()
            if name not in held_names():
                # It may overwrite the row, and leaves the fence as it is.
                return Write(fencing, using, None, {}, doing)
        plan = fencing.plan
        columns = {field.attname: getattr(self, field.attname) for field in plan.guarding}
        if len(plan.pk) == 1 and plan.pk[0] in plan.guarding:
            columns[plan.pk[0].attname] = self._key_in(plan.table)
        return write_for(fencing, name, columns, using, given, doing)


class FenceGuard(Guard):
    """Has the fence rise to the lease's token, on the condition that it is the newest."""

    column = "fence"

    def __init__(self, instance: FencedModel, write: Write) -> None:
        super().__init__(instance)
        self.write = write
        self.keeps = write.grant is None
        # A row without a lock may be added, and by no means overwrite another of its key.
        self.insert_only = (
            self.keeps
            and write.doing is Doing.ADDING
            and write.fencing.spec.without_lock == "reject"
        )
        #: The fences that the row may have; None for any up to the token.
        self.fences: tuple[int, ...] | None = None
        if not self.keeps:
            self.updated = self.after_insert = write.token
            if write.doing is not Doing.ADDING:
                self.fences = fences_of(write, instance, self.before)

    @property
    def inserted(self) -> Any:
        return new_rows_fence(self.write)

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, list[Any]]:
        return row_condition(self.write, self.fences, connection)

    def is_met(self) -> bool:
        """Whether a row that was read in this transaction needs no statement to be checked."""
        # What was read under the lease that pins the transaction is as it was.
        fences = self.fences or ()
        return self.write.is_pinned and self.before in fences and self.write.token in fences

    def overwrote(self) -> None:
        if self.keeps and self.write.doing is Doing.ADDING:
            self.write.fencing.lease_for(self.write.fencing.name(), None, Doing.SAVING)

    def stopped(self) -> Exception:
        return self.write.refusal(self.instance.pk).of_statement()

    def explain(self, row: Any) -> None:
        expected = self.write.own_columns()
        found = models.QuerySet.values_list(row, "fence", *expected).first()
        refusal = self.write.refusal(self.instance.pk)
        if superseded := refusal.superseded():
            raise superseded
        if found is None:
            if self.instance._state.adding:
                return
            raise refusal.error(None, "the row is gone, and isn't inserted again")
        fence, *columns = found
        if columns != list(expected.values()):
            raise refusal.moved(fence)
        if fence > self.write.token:
            raise refusal.error(fence, f"the row was written under token {fence} already")
        if self.fences is not None and fence not in self.fences:
            lease = "this lease" if fence == self.write.token else f"token {fence}"
            raise refusal.error(
                fence,
                f"it was read before the lock was acquired, and written under {lease} since; read "
                "it again under the lock",
                kind=StaleObject,
            )


#: The objects that are being written under a lease that was given along, the innermost first. Not
#: kept in the objects: a lease can't be pickled, and copies would keep it.
_given_leases: ContextVar[tuple[tuple[models.Model, Lease], ...]] = ContextVar(
    "fencedlock_given_leases", default=()
)


def _lease_given_to(origin: Any) -> Lease | None:
    """The lease that a write of an object or queryset was given explicitly."""
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
