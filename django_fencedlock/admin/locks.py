"""Read-only admin pages of held locks, fences and lock events."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..models import Fence, HeldLock, LockEvent
from ..ops.registry import State, duration, entries, history
from .base import (
    EMPTY,
    DatabaseFilter,
    ExistingValuesFilter,
    ReadOnlyAdmin,
    column,
    page_url,
    time_column,
)
from .release import ReleasingAdmin

#: The name and the explanation of each state.
STATES = {
    State.HELD: (_("held"), _("The lock service confirms this holder.")),
    State.EXPIRING: (_("expiring"), _("Held, but the renewal is overdue.")),
    State.EXPIRED: (
        _("expired"),
        _("The lease has expired and no other holder has acquired the lock."),
    ),
    State.LOST: (_("lost"), _("Another holder has acquired the lock.")),
    State.FREE: (
        _("free"),
        _("The lock is free: it was just released, or the service has lost it."),
    ),
    State.UNKNOWN: (_("unknown"), _("The lock service is unavailable.")),
}
#: Locks whose state is asked for the state filter, in one request to each service.
STATE_FILTER_LIMIT = 1000


class StateFilter(admin.SimpleListFilter):
    """Filters by the state; `HeldLockList` applies it after all others."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(state.value, name) for state, (name, _why) in STATES.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[HeldLock]) -> QuerySet[HeldLock]:
        return queryset


class HeldLockList(ChangeList):
    """Held locks with their states: one request to each lock service."""

    #: The services that are unavailable, by alias.
    unanswered: dict[str, str]
    #: The number of locks that the state filter looked at, if there are more.
    looked_at = 0

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: Any = None
    ) -> QuerySet[HeldLock]:
        self.unanswered = {}
        queryset = super().get_queryset(request, exclude_parameters)
        wanted = request.GET.get(StateFilter.parameter_name)
        if wanted not in list(State):
            return queryset
        # Expired and expiring ones first.
        rows = list(queryset.order_by("expires_at")[: STATE_FILTER_LIMIT + 1])
        if len(rows) > STATE_FILTER_LIMIT:
            self.looked_at = STATE_FILTER_LIMIT
        found = with_entries(rows[:STATE_FILTER_LIMIT], self.unanswered)
        return queryset.filter(pk__in=[row.pk for row in found if row.entry.state == wanted])

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list = with_entries(list(self.result_list), self.unanswered)


def with_entries(rows: list[Any], unanswered: dict[str, str]) -> list[Any]:
    """Give each row what the columns show of it."""
    if rows:
        for row, entry in zip(rows, entries(rows[0]._state.db, rows, unanswered), strict=True):
            row.entry, row.unavailable = entry, unanswered.get(row.alias, "")
    return rows


@admin.register(HeldLock)
class HeldLockAdmin(ReleasingAdmin):
    """Held locks with their holders, as the lock services see them now."""

    list_display = (
        *("lock_name", "state", "holder", "service", "token_number", "held_for"),
        *("lease_left", "waiting", "rejected"),
    )
    list_filter = (
        DatabaseFilter,
        StateFilter,
        *[(field, ExistingValuesFilter) for field in ("backend", "alias", "task_name", "host")],
    )
    search_fields = ("name", "task_id", "host")
    search_help_text = _("Searches names, task ids and hosts.")
    ordering = ("acquired_at",)
    list_max_show_all = 0
    # Each count would ask all lock services.
    show_facets = admin.ShowFacets.NEVER
    _summary = ("lock_name", "state_explained", "token_number", "lease_left", "waiting", "rejected")
    fieldsets = (
        (None, {"fields": _summary}),
        (_("Holder"), {"fields": ("task_name", "task_id", "host", "pid", "thread")}),
        (_("Lock service"), {"fields": ("alias", "backend", "fenced", "owner", "session")}),
        (_("Times"), {"fields": ("acquired", "renewed", "expires", "held_for")}),
    )

    class Media:
        js = ("django_fencedlock/held_locks.js",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return HeldLockList

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        row: Any = super().get_object(request, object_id, from_field)
        if row is not None:
            with_entries([row], {})
        return row

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        row = kwargs.get("obj")
        if row is not None:
            names = dict(LockEvent.Kind.choices)
            context["events"] = [(e, names[e["kind"]]) for e in history(row._state.db, row.name)]
            if self.has_release_permission(request):
                context["release_url"] = self.url(request, "release", name=row.pk)
        return super().render_change_form(request, context, *args, **kwargs)

    # Columns

    @admin.display(description=_("state"), ordering="expires_at")
    def state(self, row: Any) -> SafeString:
        name, why = STATES[row.entry.state]
        badge = '<span class="fencedlock-state fencedlock-{}" title="{}">{}</span>'
        return format_html(badge, row.entry.state.value, why, name)

    @admin.display(description=_("state"))
    def state_explained(self, row: Any) -> SafeString:
        _name, why = STATES[row.entry.state]
        return format_html("{} {} {}", self.state(row), why, row.unavailable)

    @admin.display(description=_("holder"), ordering="task_name")
    def holder(self, row: Any) -> str:
        return str(row.entry.holder)

    @column(_("lock service"), ordering="alias")
    def service(self, row: Any) -> str:
        return row.alias if row.alias == row.backend else f"{row.alias} ({row.backend})"

    @admin.display(description=_("session"))
    def session(self, row: Any) -> Any:
        return row.session_pid or EMPTY

    @column(_("token"))
    def token_number(self, row: Any) -> Any:
        if not row.fenced:
            return _("unfenced")
        # None after a newer grant or a forced release.
        return _("superseded") if row.token is None else row.token

    acquired = time_column(_("acquired"), "acquired_at")
    renewed = time_column(_("renewed"), "renewed_at")
    expires = time_column(_("expires"), "expires_at")

    @column(_("held for"), ordering="-acquired_at")
    def held_for(self, row: Any) -> str:
        return duration(row.entry.held_for)

    @column(_("lease left"), ordering="expires_at")
    def lease_left(self, row: Any) -> str:
        return duration(max(0.0, row.entry.remaining))

    @column(_("waiting"))
    def waiting(self, row: Any) -> Any:
        return row.entry.waiting or EMPTY

    @column(_("writes rejected"))
    def rejected(self, row: Any) -> Any:
        count = row.entry.rejected
        if not count:
            return EMPTY
        url = page_url(self, "change", row._state.db, row.pk)
        link = '<a class="fencedlock-rejected" href="{}#fencedlock-history">{}</a>'
        return format_html(link, url, count)


@admin.register(Fence)
class FenceAdmin(ReadOnlyAdmin):
    """The newest grant of every lock name."""

    list_display = ("lock_name", "token")
    list_filter = (DatabaseFilter,)
    search_fields = ("name",)
    fields = ("lock_name", "token", "owner")


@admin.register(LockEvent)
class LockEventAdmin(ReadOnlyAdmin):
    """The recent history of all locks."""

    list_display = ("when", "lock_name", "what", "token_number", "holder", "note")
    list_filter = (DatabaseFilter, "kind", ("alias", ExistingValuesFilter), "happened_at")
    search_fields = ("name", "holder", "note")
    search_help_text = _("Searches names, holders and notes.")
    ordering = ("-happened_at", "-id")

    when = time_column(_("when"), "happened_at")

    @column(_("what"), ordering="kind")
    def what(self, row: LockEvent) -> str:
        times = "" if row.times == 1 else f" \N{MULTIPLICATION SIGN} {row.times}"
        return f"{LockEvent.Kind(row.kind).label}{times}"

    @column(_("token"), ordering="token")
    def token_number(self, row: LockEvent) -> Any:
        return EMPTY if row.token is None else row.token
