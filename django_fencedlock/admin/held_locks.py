"""The admin's pages of held locks, fences and history. They show, and change no rows."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import localtime
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from ..models import Fence, HeldLock, LockEvent
from ..ops.registry import ListedLock, State, entries, history
from ..storage.text import show_blanks
from .databases import DatabaseFilter, address
from .listing import STATES, Events, FewValues, HeldLocks, StateFilter
from .readonly import ReadOnly
from .releasing import ReleasesByForce

EXPLAINED = {
    State.HELD: _("The lock service says that this holder has the lock."),
    State.EXPIRING: _("Held, but its holder is late with the renewal."),
    State.EXPIRED: _("The lease is over and nobody has come since: its holder died or is paused."),
    State.LOST: _("Somebody else has the lock by now."),
    State.FREE: _("Nobody has the lock: it was given back a moment ago, or the service forgot it."),
    State.UNKNOWN: _("The lock service can't be asked."),
}

#: What stands for nothing.
NONE = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


@admin.register(HeldLock)
class HeldLockAdmin(ReleasesByForce, ReadOnly):
    """What is locked, by whom, and for how long."""

    list_display = (
        "lock_name",
        "state_at_service",
        "holder",
        "service",
        "token_number",
        "held_for",
        "lease_left",
        "waiting",
        "refused",
    )
    list_filter = (
        DatabaseFilter,
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
    list_max_show_all = 0
    show_full_result_count = False
    # Each count would ask all lock services.
    show_facets = admin.ShowFacets.NEVER
    fieldsets = (
        (
            None,
            {
                "fields": (
                    *("lock_name", "state_explained", "token_number", "lease_left", "waiting"),
                    "refused",
                )
            },
        ),
        (_("Holder"), {"fields": ("holder", "task_name", "task_id", "host", "pid", "thread")}),
        (_("Lock service"), {"fields": ("alias", "backend", "fenced", "owner", "session")}),
        (_("Times"), {"fields": ("acquired", "renewed", "expires", "held_for")}),
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
            row.unanswered = {}
            row.entry = next(entries(row._state.db, [row], row.unanswered))
            row.events_page = self.events_page(request)
        return row

    def events_page(self, request: HttpRequest) -> str:
        """Where the user may look at the history of all locks; empty if nowhere."""
        site = self.admin_site
        if not site.is_registered(LockEvent):
            return ""
        if not site.get_model_admin(LockEvent).has_view_permission(request):
            return ""
        return reverse("admin:django_fencedlock_lockevent_changelist", current_app=site.name)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        row = kwargs.get("obj")
        if row is not None:
            names = dict(LockEvent.Kind.choices)
            happened = [(each, names[each.kind]) for each in history(row._state.db, row.name)]
            context["happened"] = happened
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description=_("lock name"), ordering="name")
    def lock_name(self, row: Any) -> str:
        return show_blanks(row.name)

    def state(self, row: Any) -> SafeString:
        found: ListedLock = row.entry
        return format_html(
            '<span class="fencedlock-state fencedlock-{}" title="{}">{}</span>',
            found.state.value,
            EXPLAINED[found.state],
            STATES[found.state],
        )

    @admin.display(description=_("state"), ordering="expires_at")
    def state_at_service(self, row: Any) -> SafeString:
        return self.state(row)

    @admin.display(description=_("state"))
    def state_explained(self, row: Any) -> SafeString:
        why = row.unanswered.get(row.alias, "")
        return format_html("{} {} {}", self.state(row), EXPLAINED[row.entry.state], why)

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

    @admin.display(description=_("lock service"), ordering="alias")
    def service(self, row: Any) -> SafeString:
        where = row.alias
        if row.alias != row.backend:
            small = '{}<br><span class="fencedlock-small">{}</span>'
            where = format_html(small, row.alias, row.backend)
        return _labelled(_("lock service"), where)

    @admin.display(description=_("session"))
    def session(self, row: Any) -> Any:
        return row.session_pid or NONE

    @admin.display(description=_("token"))
    def token_number(self, row: Any) -> SafeString:
        if not row.fenced:
            return _labelled(_("token"), _("unfenced"))
        # A newer grant, or a forced release, has its fence.
        return _labelled(_("token"), _("superseded") if row.token is None else row.token)

    @admin.display(description=_("acquired"))
    def acquired(self, row: Any) -> str:
        return _to_the_second(row.acquired_at)

    @admin.display(description=_("renewed"))
    def renewed(self, row: Any) -> str:
        return _to_the_second(row.renewed_at)

    @admin.display(description=_("expires"))
    def expires(self, row: Any) -> str:
        return _to_the_second(row.expires_at)

    @admin.display(description=_("held for"), ordering="-acquired_at")
    def held_for(self, row: Any) -> SafeString:
        return _labelled(_("held for"), in_words(row.entry.held_for))

    @admin.display(description=_("lease left"), ordering="expires_at")
    def lease_left(self, row: Any) -> SafeString:
        found: ListedLock = row.entry
        left = in_words(max(0.0, found.remaining))
        bar = format_html(
            '<meter class="fencedlock-left" min="0" low="0.33" optimum="1" max="1" value="{}" '
            'aria-label="{}"></meter> <span class="fencedlock-small">{}</span>',
            f"{found.part_left:.2f}",
            _now("lease left"),
            left,
        )
        return _labelled(_("lease left"), bar)

    @admin.display(description=_("waiting"))
    def waiting(self, row: Any) -> SafeString:
        return _labelled(_("waiting"), row.entry.waiting or NONE)

    @admin.display(description=_("writes refused"))
    def refused(self, row: Any) -> SafeString:
        times = row.entry.refused
        if not times:
            return _labelled(_("writes refused"), NONE)
        return _labelled(_("writes refused"), _refused(row, times))


@admin.register(Fence)
class FenceAdmin(ReadOnly):
    """The newest grant of every name that was ever locked."""

    list_display = ("lock_name", "token")
    list_filter = (DatabaseFilter,)
    search_fields = ("name",)
    list_per_page = 100
    show_full_result_count = False
    fields = ("lock_name", "token", "owner")

    @admin.display(description=_("lock name"), ordering="name")
    def lock_name(self, row: Fence) -> str:
        return show_blanks(row.name)


@admin.register(LockEvent)
class LockEventAdmin(ReadOnly):
    """What happened to locks lately."""

    list_display = ("when", "lock_name", "what", "token_number", "holder", "note")
    list_filter = (DatabaseFilter, "kind", ("alias", FewValues))
    search_fields = ("name", "holder", "note")
    search_help_text = _("Searches names, holders and notes.")
    date_hierarchy = "happened_at"
    ordering = ("-happened_at", "-id")
    list_per_page = 100
    show_full_result_count = False

    class Media:
        css = {"all": ("django_fencedlock/held_locks.css",)}

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return Events

    @admin.display(description=_("when"), ordering="happened_at")
    def when(self, row: LockEvent) -> str:
        return _to_the_second(row.happened_at)

    @admin.display(description=_("lock name"), ordering="name")
    def lock_name(self, row: LockEvent) -> SafeString:
        return _labelled(_("lock name"), show_blanks(row.name))

    @admin.display(description=_("what"), ordering="kind")
    def what(self, row: LockEvent) -> SafeString:
        words = str(LockEvent.Kind(row.kind).label)
        often = "" if row.times == 1 else f" {TIMES} {row.times}"
        return _labelled(_("what"), f"{words}{often}")

    @admin.display(description=_("token"), ordering="token")
    def token_number(self, row: LockEvent) -> SafeString:
        return _labelled(_("token"), NONE if row.token is None else row.token)


def _to_the_second(at: datetime) -> str:
    return date_format(localtime(at), "Y-m-d H:i:s")


def _labelled(label: Any, value: Any) -> SafeString:
    """A value with the head of its column, which is shown where there are no columns."""
    return format_html('<span class="fencedlock-label">{}</span> {}', label, value)


def _refused(row: Any, times: int) -> SafeString:
    if not row.events_page:
        return format_html('<span class="fencedlock-refused">{}</span>', times)
    query = {"q": row.name, "kind__exact": LockEvent.Kind.REFUSED.value}
    url = address(row.events_page, row._state.db, **query)
    return format_html('<a class="fencedlock-refused" href="{}">{}</a>', url, times)


def in_words(seconds: float) -> str:
    """A duration, in its two largest units."""
    whole = int(seconds)
    if whole < 60:
        return ngettext("%d second", "%d seconds", whole) % whole
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return _now("%(minutes)d min %(seconds)02d s") % {"minutes": minutes, "seconds": rest}
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return _now("%(hours)d h %(minutes)02d min") % {"hours": hours, "minutes": minutes}
    return _now("%(days)d d %(hours)d h") % {"days": hours // 24, "hours": hours % 24}
