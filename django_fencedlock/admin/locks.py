"""Admin pages of held locks, which can be released by force, of fences and of lock events."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import Any, cast

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.contrib.auth.models import AbstractBaseUser
from django.core.exceptions import BadRequest, PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.clickjacking import xframe_options_deny

from .. import exceptions
from ..core.runtime import clock
from ..models import Fence, HeldLock, LockEvent
from ..ops.force_release import Outcome, consequences, force_release
from ..ops.registry import State, duration, entries, history
from ..storage.text import for_shell, show_blanks
from .base import (
    EMPTY,
    DatabaseFilter,
    ExistingValuesFilter,
    ReadOnlyAdmin,
    column,
    outside_transactions,
    page_url,
    time_column,
    translated,
)
from .kinds import BY_NUMBER, Family, KindFilter, described, of_same_lock

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


#: Locks in one forced release.
MAX_LOCKS = 100
#: Seconds after which no further lock is released: the page has to be answered.
TIME_LIMIT = 20.0

_LEVELS = {
    Outcome.FREED: messages.SUCCESS,
    Outcome.LEFT_TO_HOLDER: messages.WARNING,
    Outcome.NOT_HELD: messages.INFO,
}
_OBSTACLES = {
    State.LOST: _("Another holder has acquired it since. It will not be released."),
    State.UNKNOWN: _("Its lock service is unavailable, so it can't be released."),
}


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
class HeldLockAdmin(ReadOnlyAdmin):
    """Held locks with their holders, as the lock services see them now."""

    actions = ("release_by_force",)
    list_display = (
        *("lock_name", "state", "kind", "holder", "service", "token_number"),
        *("held_for", "lease_left", "waiting", "rejected"),
    )
    list_filter = (
        DatabaseFilter,
        StateFilter,
        KindFilter,
        *[(field, ExistingValuesFilter) for field in ("backend", "alias", "task_name", "host")],
    )
    search_fields = ("name", "task_id", "host")
    search_help_text = _("Searches names, task ids and hosts.")
    ordering = ("acquired_at",)
    list_max_show_all = 0
    # Each count would ask all lock services.
    show_facets = admin.ShowFacets.NEVER
    _summary = (
        *("lock_name", "state_explained", "kind", "token_number", "lease_left"),
        *("waiting", "rejected"),
    )
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
            if (others := of_same_lock(row, self.get_queryset(request))) is not None:
                shown = [each for each in others if self.has_view_permission(request, each)]
                context["family"] = Family(row.entry, with_entries(shown, {}))
                context["family_cells"] = [self._family_cells(each) for each in shown]
            if self.has_release_permission(request):
                reader = {"slot": row.slot} if row.slot else {}
                context["release_url"] = self.url(request, "release", name=row.name, **reader)
                if row.slot:
                    context["release_all_url"] = self.url(request, "release", name=row.name)
        return super().render_change_form(request, context, *args, **kwargs)

    def _family_cells(self, row: Any) -> dict[str, Any]:
        return {
            "row": row,
            "entry": row.entry,
            "url": page_url(self, "change", row._state.db, str(row.pk)),
            "state": self.state(row),
            "held_for": duration(row.entry.held_for),
        }

    # Columns

    @admin.display(description=_("lock name"), ordering=BY_NUMBER)
    def lock_name(self, row: Any) -> str:
        return show_blanks(row.name)

    @column(_("kind"))
    def kind(self, row: Any) -> Any:
        return described(row.entry) or EMPTY

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

    # Forced release

    def get_urls(self) -> list[Any]:
        # Within a frame of another site, a user could click it without seeing it.
        view = xframe_options_deny(self.admin_site.admin_view(self.release_view))
        name = f"{self.opts.app_label}_{self.opts.model_name}_release"
        return [path("release/", outside_transactions(view), name=name), *super().get_urls()]

    def has_release_permission(self, request: HttpRequest) -> bool:
        permission = f"{self.opts.app_label}.release_heldlock"
        return self.has_view_permission(request) and request.user.has_perm(permission)

    @admin.action(permissions=["release"], description=_("Release selected locks by force"))
    def release_by_force(
        self, request: HttpRequest, queryset: QuerySet[HeldLock]
    ) -> HttpResponse | None:
        if queryset.count() > MAX_LOCKS:
            text = _("At most %d locks can be released at once. Nothing was released.")
            messages.error(request, text % MAX_LOCKS)
            return None
        return self._confirmation(request, pk__in=list(queryset.values_list("pk", flat=True)))

    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Show the confirmation page (GET), or release the confirmed locks (POST)."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self.answer(self._release, request)
        # All readers of a name, or one of them.
        which = {"name": request.GET.get("name", "")}
        if slot := request.GET.get("slot"):
            which["slot"] = slot
        return self.answer(self._confirmation, request, **which)

    def _viewable(self, request: HttpRequest, **which: Any) -> list[HeldLock]:
        """Return the rows that the list shows to the user."""
        rows = self.get_queryset(request).filter(**which).order_by("name", "acquired_at")
        return [row for row in rows if self.has_view_permission(request, row)]

    def _confirmation(self, request: HttpRequest, **which: Any) -> HttpResponse:
        """Ask whether to release these locks."""
        rows, list_url = self._viewable(request, **which), self.url(request, "changelist")
        if not rows:
            text = _("The lock was released, or another holder has acquired it.")
            messages.warning(request, text)
            return HttpResponseRedirect(list_url)
        if len(rows) > MAX_LOCKS:
            text = _("At most %(count)d readers can be released here. For all, run: %(command)s")
            command = f"manage.py fencedlock release {for_shell(rows[0].name)}"
            messages.error(request, text % {"count": MAX_LOCKS, "command": command})
            return HttpResponseRedirect(list_url)
        # All readers of a lock in one card.
        cards: dict[Any, list[Any]] = {}
        for row in with_entries(rows, {}):
            about = (row.name, row.alias, row.entry.state in _OBSTACLES) if row.slot else row.pk
            cards.setdefault(about, []).append(row)
        locks = [self._card(request, card) for card in cards.values()]
        context = {
            **self.admin_site.each_context(request),
            "title": _("Release by force?"),
            "opts": self.opts,
            "media": self.media,
            "locks": locks,
            "releasable": [each for each in locks if not each["obstacle"]],
            "list_url": list_url,
            "release_url": self.url(request, "release"),
        }
        request.current_app = self.admin_site.name
        template = "admin/django_fencedlock/heldlock/release_confirmation.html"
        return TemplateResponse(request, template, context)

    def _card(self, request: HttpRequest, rows: list[Any]) -> dict[str, Any]:
        """Return what the confirmation page says of one lock, or of some readers of one."""
        first = rows[0]
        kind = described(first.entry)
        if first.slot:
            readers = of_same_lock(first, self.get_queryset(request)) or rows
            kind = gettext("%(lost)d of %(all)d readers") % {"lost": len(rows), "all": len(readers)}
        pids = list(dict.fromkeys(row.session_pid for row in rows if row.session_pid))
        steps = dict.fromkeys(
            step
            for pid in pids or [None]
            for step in consequences(first.fenced, pid, gettext, shared=bool(first.slot))
        )
        return {
            "rows": rows,
            "entry": first.entry,
            "name": show_blanks(first.name),
            "kind": kind,
            "sessions": ", ".join(map(str, pids)),
            "obstacle": _OBSTACLES.get(first.entry.state),
            "consequences": list(steps),
        }

    def _release(self, request: HttpRequest) -> HttpResponse:
        """Release the locks of a confirmed form, and report the result of each."""
        owners = set(request.POST.getlist("lock")[:MAX_LOCKS])
        if request.POST.get("step") != "release" or not "".join(owners).isascii():
            # MariaDB can't compare other characters with the owner's column if that is latin1.
            raise BadRequest("The form isn't one of the confirmation page.")
        # A form can name any owner, also one whose lock the user may not view.
        rows = self._viewable(request, owner__in=owners)
        if gone := len(owners) - len(rows):
            text = _("Locks that the holder you saw no longer holds, which were left alone: %d")
            messages.info(request, text % gone)
        by = f"{cast(AbstractBaseUser, request.user).get_username()} (admin)"
        until = clock() + TIME_LIMIT
        # All readers of a lock at once: they have one fence.
        key = attrgetter("name", "alias")
        for (name, alias), same in groupby(sorted(rows, key=key), key):
            if clock() > until:
                text = _("Lock “%s” was not tried: others before it took too long.")
                messages.error(request, text % name)
                continue
            mine = {row.owner: row for row in same}
            try:
                released = force_release(name, by=by, backend=alias, owner_id=list(mine))
            except exceptions.FencedLockError as exc:
                text = _("Lock “%(name)s” was not released: %(why)s")
                messages.error(request, text % {"name": name, "why": translated(exc)})
                continue
            told = released.describe(gettext)
            messages.add_message(request, _LEVELS.get(released.outcome, messages.ERROR), told)
            if released.done:
                for lost in filter(None, (released.holder, *released.others)):
                    self.log_change(request, mine[lost.owner_id], told)
        return HttpResponseRedirect(self.url(request, "changelist"))


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
