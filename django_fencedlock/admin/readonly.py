"""Pages that show, and change no rows."""

from __future__ import annotations

from typing import Any

from django.db.models import Model
from django.http import HttpRequest

from .databases import OfOneDatabase


class ReadOnly(OfOneDatabase):
    """Shows rows, and lets nobody touch them: what holds a lock is in a process."""

    actions: Any = None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False
