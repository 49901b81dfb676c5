"""Permits and readers in the admin: their filter, their order, and the others of a lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.db.models import Case, CharField, F, Q, QuerySet, Value, When
from django.db.models.functions import Concat, Length, Substr
from django.db.models.lookups import Exact
from django.http import HttpRequest
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from ..models import HeldLock
from ..ops.permits import by_number, permit_rows, shown_ranges
from ..ops.registry import Kind, ListedLock, kind_of

#: The name and the rows of each kind.
KINDS = {
    Kind.EXCLUSIVE: (_("exclusive"), Q(slot="", permits=None)),
    Kind.PERMIT: (_("permit"), Q(permits__isnull=False)),
    Kind.READER: (_("reader"), ~Q(slot="")),
}


class KindFilter(admin.SimpleListFilter):
    """Filters by how a lock is held."""

    title = _("kind")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(kind.value, name) for kind, (name, _rows) in KINDS.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[HeldLock]) -> QuerySet[HeldLock]:
        chosen = self.value()
        return queryset.filter(KINDS[Kind(chosen)][1]) if chosen in list(Kind) else queryset


def _by_number() -> Case:
    end, cases = Length("name"), []
    # Of a permit, the blank before its number tells how many digits that has.
    for digits in range(1, 4):
        is_before = Exact(Substr("name", end - digits - 1, 1), Value(" "))
        padded = Concat(
            Substr("name", 1, end - digits - 1),
            Value("0" * (4 - digits)),
            Substr("name", end - digits),
        )
        cases.append(When(Q(is_before, permits__isnull=False), then=padded))
    return Case(*cases, default=F("name"), output_field=CharField())


#: What lock names are sorted by: permit 10 comes after permit 2.
BY_NUMBER = _by_number()


def described(lock: ListedLock) -> str:
    """Return the kind of a lock; empty for an exclusive one."""
    if lock.kind is Kind.PERMIT:
        return _now("permit %(number)d of %(count)d") % {
            "number": lock.permit,
            "count": lock.permits,
        }
    return _now("reader") if lock.kind is Kind.READER else ""


def of_same_lock(row: HeldLock, rows: QuerySet[HeldLock]) -> list[HeldLock] | None:
    """Return all permits or all readers of a row's lock; None if it is an exclusive one."""
    kind, rows = kind_of(row), rows.filter(alias=row.alias)
    if kind is Kind.PERMIT:
        return permit_rows(by_number(row.name)[0], rows)
    if kind is Kind.READER:
        return list(rows.filter(name=row.name).exclude(slot="").order_by("acquired_at"))
    return None


class Family:
    """What a lock's page shows of all permits or readers of the lock."""

    def __init__(self, lock: ListedLock, rows: Sequence[Any]) -> None:
        self.name = by_number(lock.name)[0]
        held = [row.entry for row in rows if row.entry.is_held]
        self.used, self.limit, self.free = len(held), 0, ""
        if lock.kind is Kind.PERMIT:
            self.limit = max((row.permits for row in rows), default=lock.permits or 0)
            taken = {each.permit for each in held}
            self.free = shown_ranges([n + 1 for n in range(self.limit) if n + 1 not in taken])
