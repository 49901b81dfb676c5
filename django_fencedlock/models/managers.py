"""The managers of guarded models: the one for their code, and the one that Django goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from django.db import models

from ..lease import Lease
from .cascades import watch
from .querysets import FencedQuerySet

_Row = TypeVar("_Row", bound=models.Model, covariant=True)

if TYPE_CHECKING:
    _Manager = models.Manager
else:
    _Manager = models.Manager.from_queryset(FencedQuerySet)


class FencedManager(_Manager[_Row]):
    """The manager of guarded models. A model's own `objects` should be a subclass of it."""

    # Written out for type checkers, which don't see what from_queryset() copies.
    def using_lease(self, lease: Lease) -> FencedQuerySet[_Row]:
        """Write under `lease`, whatever the context holds."""
        rows: Any = self.get_queryset()
        return rows.using_lease(lease)  # type: ignore[no-any-return]

    def count(self) -> int:
        links = self._links()
        return int(super().count() if links is None else links.count())

    def exists(self) -> bool:
        links = self._links()
        return bool(super().exists() if links is None else links.exists())

    def _links(self) -> Any:
        """
        Find the rows that link a many-to-many relation, if they alone can answer for it.

        Django spares the join to the rows themselves for managers of its own class alone.
        """
        related: Any = self
        if FencedManager not in type(self).__bases__ or not hasattr(self, "constrained_target"):
            return None
        return None if related.get_prefetch_cache() is not None else related.constrained_target


class BaseRows(FencedQuerySet[Any]):
    """Rows that Django looks up for itself, as in cascades."""

    _peeked: list[Any] | None = None

    def __bool__(self) -> bool:
        # Of rows that a cascade is to update (SET_DEFAULT), Django first asks whether there are
        # any. Once they are in the cache it updates them one by one, past update().
        if not self._is_covered() and not self._is_versioned:
            return super().__bool__()
        if self._result_cache is None and self._peeked is None:
            self._fetch_all()
            self._peeked, self._result_cache = self._result_cache, None
        return bool(self._peeked if self._result_cache is None else self._result_cache)

    def __getitem__(self, key: Any) -> Any:
        if self._peeked is not None:
            self._fetch_all()
        return super().__getitem__(key)

    def _fetch_all(self) -> None:
        if self._result_cache is None:
            self._result_cache = self._peeked
        super()._fetch_all()


class BaseRowsManager(models.Manager.from_queryset(BaseRows)):  # type: ignore[misc]
    """The manager through which Django itself looks rows up: cascades, saves, related managers."""

    def get_queryset(self) -> Any:
        if self.model._is_fenced:
            watch(self.model)
        return super().get_queryset()

    def using(self, alias: str | None) -> Any:
        # Every save begins here: nobody else has this queryset, so it needn't be copied.
        rows = self.get_queryset()
        rows._db = alias
        return rows
