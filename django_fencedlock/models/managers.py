"""The manager of guarded models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from django.db import models

from ..lease import Lease
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
