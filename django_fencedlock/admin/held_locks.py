"""The admin's pages of held locks and of fences. They show, and change no rows."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import floatformat
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from ..models import Fence, HeldLock
from ..registry import Entry, Listing, State, entries
from .releasing import ReleasesByForce

STATES = {
    State.HELD: _("held"),
    State.EXPIRING: _("expiring"),
    State.EXPIRED: _("expired"),
    State.LOST: _("lost"),
    State.FREE: _("free"),
    State.UNKNOWN: _("unknown"),
}

EXPLAINED = {
    State.HELD: _("The lock service says that this holder has the lock."),
    State.EXPIRING: _("Held, but its holder is late with the renewal."),
    State.EXPIRED: _("The lease is over and nobody has come since: its holder died or is paused."),
    State.LOST: _("Somebody else has the lock by now."),
    State.FREE: _("Nobody has the lock: it was given back a moment ago, or the service forgot it."),
    State.UNKNOWN: _("The lock service can't be asked."),
}


class ReadOnly(admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows rows, and lets nobody touch them: what holds a lock is in a process."""

    actions: Any = None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


class StateFilter(admin.SimpleListFilter):
    """By what the lock services say now, for which each is asked once."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(state.value, STATES[state]) for state in State]

    def queryset(self, request: HttpRequest, queryset: QuerySet[HeldLock]) -> QuerySet[HeldLock]:
        if self.value() is None:
            return queryset
        _, listing = observed(queryset)
        names = [each.name for each in listing.entries if each.state == self.value()]
        return queryset.filter(pk__in=names)


class FewValues(admin.AllValuesFieldListFilter):
    """The values that there are; nothing to choose from a single one."""

    def has_output(self) -> bool:
        return len(self.lookup_choices) > 1


class HeldLocks(ChangeList):
    """The page's locks, as the lock services see them: each is asked once for the whole page."""

    listing: Listing

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list, self.listing = observed(self.result_list)


def observed(queryset: QuerySet[HeldLock]) -> tuple[list[HeldLock], Listing]:
    """Rows, each with its entry of the registry; and the listing of those."""
    rows = list(queryset)
    listing = Listing()
    if rows:
        listing.entries += entries(queryset.db, rows, listing.unanswered)
    for row, entry in zip(rows, listing.entries, strict=True):
        row.entry = entry  # type: ignore[attr-defined]
    return rows, listing


@admin.register(HeldLock)
class HeldLockAdmin(ReleasesByForce, ReadOnly):
    """What is locked, by whom, and for how long."""

    list_display = (
        "name",
        "state_at_service",
        "holder",
        "token_number",
        "times",
        "waiting",
    )
    list_filter = (
        StateFilter,
        ("backend", FewValues),
        ("alias", FewValues),
        ("task_name", FewValues),
        ("host", FewValues),
    )
    search_fields = ("name", "task_id", "host")
    search_help_text = _("Searches names, task ids and hosts.")
    ordering = ("acquired_at",)
    list_per_page = 100
    show_full_result_count = False
    fieldsets = (
        (None, {"fields": ("name", "state_explained", "token_number", "lease_left", "waiting")}),
        (_("Holder"), {"fields": ("holder", "task_name", "task_id", "host", "pid", "thread")}),
        (_("Lock service"), {"fields": ("alias", "backend", "fenced", "owner", "session_pid")}),
        (_("Times"), {"fields": ("acquired_at", "renewed_at", "expires_at", "held_for")}),
    )

    class Media:
        css = {"all": ("django_fencedlock/held_locks.css",)}
        js = ("django_fencedlock/held_locks.js",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return HeldLocks

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        row = super().get_object(request, object_id, from_field)
        if row is not None:
            row.entry = next(entries(row._state.db, [row], {}))
        return row

    def state(self, row: Any) -> SafeString:
        found: Entry = row.entry
        return format_html(
            '<span class="fencedlock-state fencedlock-{}" title="{}">{}</span>',
            found.state.value,
            EXPLAINED[found.state],
            STATES[found.state],
        )

    @admin.display(description=_("state"), ordering="alias")
    def state_at_service(self, row: Any) -> SafeString:
        return format_html(
            '{}<br><span class="fencedlock-small">{}</span>',
            self.state(row),
            row.alias if row.alias == row.backend else f"{row.alias} ({row.backend})",
        )

    @admin.display(description=_("state"))
    def state_explained(self, row: Any) -> SafeString:
        return format_html("{} {}", self.state(row), EXPLAINED[row.entry.state])

    @admin.display(description=_("holder"), ordering="task_name")
    def holder(self, row: Any) -> SafeString:
        place = f"{row.host}, pid {row.pid}"
        if not row.task_name:
            return format_html("{}", f"{place}, {row.thread}" if row.thread else place)
        return format_html(
            '<strong>{}</strong><br><span class="fencedlock-small">{}{}</span>',
            row.task_name,
            f"{row.task_id} · " if row.task_id else "",
            place,
        )

    @admin.display(description=_("token"))
    def token_number(self, row: Any) -> Any:
        # A newer grant, or a forced release, has its fence.
        superseded = _("superseded") if row.fenced else _("unfenced")
        return superseded if row.token is None else row.token

    @admin.display(description=_("held for"))
    def held_for(self, row: Any) -> str:
        return in_words(row.entry.held_for)

    @admin.display(description=_("lease left"))
    def lease_left(self, row: Any) -> SafeString:
        found: Entry = row.entry
        return format_html(
            '<meter class="fencedlock-left" low="{}" optimum="1" value="{}"></meter> '
            '<span class="fencedlock-small">{} s</span>',
            "0.33",
            f"{found.part_left:.2f}",
            floatformat(max(0.0, found.remaining), 0),
        )

    @admin.display(description=_("held for, lease left"), ordering="-acquired_at")
    def times(self, row: Any) -> SafeString:
        return format_html("{}<br>{}", self.held_for(row), self.lease_left(row))

    @admin.display(description=_("waiting"))
    def waiting(self, row: Any) -> Any:
        return row.entry.waiting or _("nobody")


@admin.register(Fence)
class FenceAdmin(ReadOnly):
    """The newest grant of every name that was ever locked."""

    list_display = ("name", "token")
    search_fields = ("name",)
    list_per_page = 100
    show_full_result_count = False
    fields = ("name", "token", "owner")


def in_words(seconds: float) -> str:
    """A duration, in its two largest units."""
    whole = int(seconds)
    if whole < 60:
        return ngettext("%d second", "%d seconds", whole) % whole
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"
