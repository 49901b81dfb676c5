"""`VersionedModel`: an optimistic version, which needs no lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F
from django.db.models.sql.compiler import SQLCompiler

from ..exceptions import VersionConflict
from .fields import VersionField
from .guarded import Doing, Guard, GuardedModel
from .managers import FencedManager
from .refusals import version_conflict


class VersionedModel(GuardedModel):
    """
    Adds a ``version`` column that rises with every write.

    Saving or deleting an object that somebody else has written since it was loaded raises
    `VersionConflict`. Works without any lock, and together with `FencedModel`.
    """

    version = VersionField()
    _is_versioned = True
    if TYPE_CHECKING:
        # django-stubs would make it this very class's, and no model could have both mixins.
        _default_manager: ClassVar[FencedManager[Self]]

    if not TYPE_CHECKING:

        class Meta(GuardedModel.Meta):
            abstract = True

    def _guards(self, table: Any, using: str, doing: Doing) -> list[Guard]:
        guards = super()._guards(table, using, doing)
        its: Any = self._meta.get_field("version").model
        if table._meta.concrete_model is its._meta.concrete_model:
            guards.append(VersionGuard(self, doing))
        return guards


class VersionGuard(Guard):
    """Counts a write, on the condition that nobody else has written meanwhile."""

    column = "version"
    inserted = 0

    def __init__(self, instance: VersionedModel, doing: Doing) -> None:
        super().__init__(instance)
        if doing is Doing.LOADING:
            # Fixtures have no version: they overwrite what is there.
            self.keeps = True
            self.kept = F("version") + 1
        # An object that was never loaded takes no other's place.
        self.insert_only = doing is Doing.ADDING
        self.loaded = self.before if isinstance(self.before, int) else None
        if self.loaded is None and not self.keeps:
            raise self._conflict("its version wasn't loaded with it, so it can't be compared")
        self.updated = (self.loaded or 0) + 1

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, list[Any]]:
        meta: Any = self.instance._meta
        field = meta.get_field("version")
        quote = connection.ops.quote_name
        return f"{quote(field.model._meta.db_table)}.{quote(field.column)} = %s", [self.loaded]

    def stopped(self) -> Exception:
        return self._conflict("its version was refused")

    def explain(self, row: Any) -> None:
        found = models.QuerySet.values_list(row, "version", flat=True).first()
        if found is None:
            if self.instance._state.adding:
                return
            raise self._conflict("the row is gone, and isn't inserted again")
        if found != self.loaded:
            raise self._conflict(f"it was loaded as version {self.loaded}, and is {found} now")

    def _conflict(self, why: str) -> VersionConflict:
        return version_conflict(type(self.instance), self.instance.pk, self.loaded, why)
