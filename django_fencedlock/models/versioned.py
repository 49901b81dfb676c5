"""`VersionedModel`: an optimistic version, which needs no lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F

from ..exceptions import VersionConflict
from .base import ADDING, LOADING, Guard
from .fields import VersionField
from .queryset import FencedManager, GuardedModel
from .writes import version_conflict


class VersionedModel(GuardedModel):
    """
    Adds a ``version`` column that rises with every write.

    Saving or deleting an object whose row was written since it was loaded raises
    `VersionConflict`. Works without any lock, and together with `FencedModel`.
    """

    version = VersionField()
    _is_versioned = True
    if TYPE_CHECKING:
        # django-stubs would make it this very class's, and no model could have both mixins.
        _default_manager: ClassVar[FencedManager[Self]]
    else:

        class Meta(GuardedModel.Meta):
            abstract = True

    def _guards(self, table: Any, using: str, doing: str, is_first: bool) -> list[Guard]:
        guards = super()._guards(table, using, doing, is_first)
        its_table: Any = self._meta.get_field("version").model
        if table is its_table._meta.concrete_model:
            guards.insert(0, VersionGuard(self, doing))
        return guards


class VersionGuard(Guard):
    """Counts a write, on the condition that the row wasn't written since it was loaded."""

    column = "version"

    def __init__(self, instance: VersionedModel, doing: str) -> None:
        super().__init__(instance)
        # Fixtures have no version: they overwrite what is there.
        self.keeps = doing == LOADING
        # An object that was never loaded takes no other's place.
        self.insert_only = doing == ADDING
        loaded = instance.__dict__.get("version")
        self.loaded = loaded if isinstance(loaded, int) else None
        self.doing = doing
        if self.loaded is None and not self.keeps:
            raise self._conflict("its version wasn't loaded with it")
        self.updated = F("version") + 1 if self.keeps else (self.loaded or 0) + 1

    def condition(self, table: str, connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
        column = self.instance._meta.get_field("version").column
        return f"{table}.{connection.ops.quote_name(column)} = %s", [self.loaded]

    def failed(self) -> Exception:
        return self._conflict("its row was written since it was loaded")

    def explain(self, row: Any) -> None:
        found = row.values_list("version", flat=True).first()
        if found is None:
            if self.instance._state.adding:
                return
            raise self._conflict("its row was deleted, and isn't inserted again")
        if found != self.loaded:
            raise self._conflict(
                f"it was loaded as version {self.loaded}, and its row has version {found} now"
            )

    def _conflict(self, why: str) -> VersionConflict:
        row = self.instance
        return version_conflict(type(row), self.doing, why, pk=row.pk, version=self.loaded)
