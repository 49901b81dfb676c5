"""Read-only admin pages of held locks, fences and lock events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.contrib.auth import get_user_model
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import Error, InterfaceError, OperationalError, connections, router
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import get_current_timezone_name, localtime
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext
from django.views.decorators.clickjacking import xframe_options_deny

from .. import conf
from ..exceptions import SettingsError
from ..models import Fence, HeldLock, LockEvent
from ..ops.registry import (
    ANSWERED,
    Listing,
    State,
    entries,
    fence_databases,
    history,
    states,
    words_of,
)
from ..storage.connections import time_limited
from ..storage.errors import is_table_missing
from ..storage.tables import ExactCharField
from ..storage.text import can_store, show_blanks
from ..storage.vendors import ledger_for
from . import release

#: The parameter that chooses the database of a page.
DATABASE = "database"

STATES = {
    State.HELD: _("held"),
    State.EXPIRING: _("expiring"),
    State.EXPIRED: _("expired"),
    State.LOST: _("lost"),
    State.FREE: _("free"),
    State.UNKNOWN: _("unknown"),
}
EXPLANATIONS = {
    State.HELD: _("The lock service confirms this holder."),
    State.EXPIRING: _("Held, but the renewal is overdue."),
    State.EXPIRED: _("The lease has expired and no other holder has acquired the lock."),
    State.LOST: _("Another holder has acquired the lock."),
    State.FREE: _("The lock is free: it was just released, or the service has lost it."),
    State.UNKNOWN: _("The lock service is unavailable."),
}
#: Locks whose state is asked for the state filter, in one request to each service.
STATE_FILTER_LIMIT = 1000
EMPTY = "\N{EN DASH}"


def _time_column(title: Any, field: str) -> Any:
    @admin.display(description=title, ordering=field)
    def column(self: Any, row: Any) -> str:
        return date_format(localtime(getattr(row, field)), "Y-m-d H:i:s")

    return column


def databases() -> list[str]:
    """Return the databases that have fences; none if the settings are invalid."""
    try:
        return fence_databases(conf.aliases())
    except SettingsError:
        return []


def page_url(page: Any, view: str, using: str | None, **query: str) -> str:
    """Return the address of a model admin's page about a database."""
    name = f"admin:{page.opts.app_label}_{page.opts.model_name}_{view}"
    path = reverse(name, current_app=page.admin_site.name)
    if using and len(databases()) > 1:
        query[DATABASE] = using
    return f"{path}?{urlencode(query)}" if query else path


class DatabaseFilter(admin.SimpleListFilter):
    """Chooses the database to show. `ReadOnlyAdmin` applies it."""

    title = _("database")
    parameter_name = DATABASE

    def __init__(self, request: HttpRequest, params: Any, model: Any, model_admin: Any) -> None:
        super().__init__(request, params, model, model_admin)
        self._shown = model_admin.database(request)

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        found = databases()
        return [(each, each) for each in found] if len(found) > 1 else []

    def choices(self, changelist: Any) -> Iterator[Any]:
        for each, title in self.lookup_choices:
            query = changelist.get_query_string({DATABASE: each})
            yield {"selected": each == self._shown, "query_string": query, "display": title}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset


class StateFilter(admin.SimpleListFilter):
    """Filters by the state at the lock service. `HeldLockList` applies it after all others."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(state.value, STATES[state]) for state in State]

    def queryset(self, request: HttpRequest, queryset: QuerySet[HeldLock]) -> QuerySet[HeldLock]:
        return queryset


class ExistingValuesFilter(admin.AllValuesFieldListFilter):
    """Offers the values in the table; hidden if there is only one."""

    def has_output(self) -> bool:
        return len(self.lookup_choices) > 1

    def choices(self, changelist: Any) -> Iterator[Any]:
        for choice in super().choices(changelist):
            yield {**choice, "display": choice["display"] or _("none")}


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows the rows of one fence database, which a filter chooses."""

    actions: Any = None
    list_per_page = 100
    show_full_result_count = False

    class Media:
        css = {"all": ("django_fencedlock/held_locks.css",)}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def database(self, request: HttpRequest) -> str:
        """Return the database whose rows a page shows."""
        # The pages of single rows get the parameters of the list in `_changelist_filters`.
        kept = QueryDict(request.GET.get("_changelist_filters", ""))
        wanted = request.GET.get(DATABASE) or kept.get(DATABASE) or ""
        known, routed = databases(), router.db_for_read(self.model)
        if wanted in known:
            return wanted
        return routed if routed in known or not known else known[0]

    def url(self, request: HttpRequest, view: str, **query: str) -> str:
        """Return the address of another page about the same database."""
        return page_url(self, view, self.database(request), **query)

    @admin.display(description=_("lock name"), ordering="name")
    def lock_name(self, row: Any) -> str:
        return show_blanks(row.name)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(self.database(request))

    def get_search_fields(self, request: HttpRequest) -> list[Any]:
        fields = list(super().get_search_fields(request))
        if can_store(connections[self.database(request)], request.GET.get(SEARCH_VAR, "")):
            return fields
        # The other columns have a character set that can't be compared with this text.
        known = {each.name: each for each in self.model._meta.get_fields()}
        return [each for each in fields if isinstance(known[each], ExactCharField)]

    def changelist_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.answer(super().changelist_view, request, *args, **kwargs)

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.answer(super().changeform_view, request, *args, **kwargs)

    def history_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.answer(super().history_view, request, *args, **kwargs)

    def answer(
        self, view: Callable[..., HttpResponse], request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Return the view's answer, or an error page in time if its database is unavailable."""
        if any("\0" in each for _key, values in request.GET.lists() for each in values):
            raise BadRequest("PostgreSQL can't compare texts that have a NUL character.")
        using = self.database(request)
        # The admin can't work without the database of its users, and it has just answered.
        has_users = using == router.db_for_read(get_user_model())
        try:
            with nullcontext() if has_users else time_limited(using, ANSWERED):
                return view(request, *args, **kwargs)
        except Error as exc:
            away = isinstance(exc, OperationalError | InterfaceError) and not has_users
            if not (away or is_table_missing(exc)):
                raise
            return self._unavailable(request, using, exc)

    def _unavailable(self, request: HttpRequest, using: str, error: Error) -> HttpResponse:
        others = [each for each in databases() if each != using]
        context = {
            **self.admin_site.each_context(request),
            "title": _("Database unavailable"),
            "opts": self.opts,
            "list_url": self.url(request, "changelist"),
            "database": using,
            "why": words_of(error, using),
            "others": [(each, page_url(self, "changelist", each)) for each in others],
        }
        request.current_app = self.admin_site.name
        template = "admin/django_fencedlock/database_unavailable.html"
        return TemplateResponse(request, template, context, status=503)


class HeldLockList(ChangeList):
    """Held locks with their states. Each lock service is asked once for the whole page."""

    listing: Listing
    #: The number of locks that the state filter looked at, if there are more.
    looked_at = 0

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: Any = None
    ) -> QuerySet[HeldLock]:
        self.listing = Listing()
        queryset = super().get_queryset(request, exclude_parameters)
        wanted = next(
            (spec.value() for spec in self.filter_specs if isinstance(spec, StateFilter)), None
        )
        return self._in_state(queryset, State(wanted)) if wanted in list(State) else queryset

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list = rows = list(self.result_list)
        page: Any = self.model_admin
        if rows:
            using = rows[0]._state.db
            self.listing.entries += entries(using, rows, self.listing.unanswered)
        for row, entry in zip(rows, self.listing.entries, strict=True):
            row.entry = entry
            row.events_url = page.events_url(request, row)

    def _in_state(self, queryset: QuerySet[HeldLock], wanted: State) -> QuerySet[HeldLock]:
        rows = list(_candidates(queryset, wanted)[: STATE_FILTER_LIMIT + 1])
        if len(rows) > STATE_FILTER_LIMIT:
            self.looked_at = STATE_FILTER_LIMIT
        rows = rows[:STATE_FILTER_LIMIT]
        found = zip(rows, states(queryset.db, rows, self.listing.unanswered), strict=True)
        return queryset.filter(pk__in=[row.pk for row, state in found if state is wanted])


def _candidates(queryset: QuerySet[HeldLock], wanted: State) -> QuerySet[HeldLock]:
    """Narrow the rows down to those that can be in a state, the likeliest first."""
    if wanted not in (State.EXPIRED, State.EXPIRING, State.FREE):
        return queryset
    connection = connections[queryset.db]
    now = ledger_for(connection).now(connection)
    if wanted is State.EXPIRED:
        return queryset.filter(expires_at__lte=now).order_by("expires_at")
    unexpired = queryset.filter(expires_at__gt=now)
    return unexpired.order_by("expires_at") if wanted is State.EXPIRING else unexpired


@admin.register(HeldLock)
class HeldLockAdmin(ReadOnlyAdmin):
    """Held locks with their holders, as the lock services see them now."""

    actions = ("release_by_force",)
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
        (_("Holder"), {"fields": ("holder", "task_name", "task_id", "host", "pid", "thread")}),
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
        row = super().get_object(request, object_id, from_field)
        if row is not None:
            row.unanswered = {}
            row.entry = next(entries(row._state.db, [row], row.unanswered))
            row.events_url = self.events_url(request, row)
        return row

    def events_url(self, request: HttpRequest, row: HeldLock) -> str:
        """Return the page of the lock's rejected writes; empty if the user may not view it."""
        site = self.admin_site
        if not site.is_registered(LockEvent):
            return ""
        page = site.get_model_admin(LockEvent)
        if not page.has_view_permission(request):
            return ""
        query = {"q": row.name, "kind__exact": LockEvent.Kind.REJECTED.value}
        return page_url(page, "changelist", row._state.db, **query)

    # Forced release

    def get_urls(self) -> list[Any]:
        # Within a frame of another site, a user could click it without seeing it.
        view = release.outside_transactions(
            xframe_options_deny(self.admin_site.admin_view(self.release_view))
        )
        name = f"{self.opts.app_label}_{self.opts.model_name}_release"
        return [path("release/", view, name=name), *super().get_urls()]

    def has_release_permission(self, request: HttpRequest) -> bool:
        permission = f"{self.opts.app_label}.release_heldlock"
        return self.has_view_permission(request) and request.user.has_perm(permission)

    @admin.action(permissions=["release"], description=_("Release selected locks by force"))
    def release_by_force(
        self, request: HttpRequest, queryset: QuerySet[HeldLock]
    ) -> HttpResponse | None:
        if queryset.count() > release.MAX_LOCKS:
            text = _now("At most %d locks can be released at once. Nothing was released.")
            messages.error(request, text % release.MAX_LOCKS)
            return None
        return release.confirmation(request, self, list(queryset.values_list("pk", flat=True)))

    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Show the confirmation page (GET), or release the confirmed locks (POST)."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        view = release.release if request.method == "POST" else release.confirmation
        return self.answer(view, request, self)

    def viewable(self, request: HttpRequest, **wanted: Any) -> list[HeldLock]:
        """Return the rows that the list shows to the user."""
        rows = self.get_queryset(request).filter(**wanted).order_by("name")
        return [row for row in rows if self.has_view_permission(request, row)]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        row = kwargs.get("obj")
        if row is not None:
            names = dict(LockEvent.Kind.choices)
            context["events"] = [(e, names[e.kind]) for e in history(row._state.db, row.name)]
            if self.has_release_permission(request):
                context["release_url"] = self.url(request, "release", name=row.pk)
        return super().render_change_form(request, context, *args, **kwargs)

    # Columns

    @admin.display(description=_("state"), ordering="expires_at")
    def state(self, row: Any) -> SafeString:
        state = row.entry.state
        return format_html(
            '<span class="fencedlock-state fencedlock-{}" title="{}">{}</span>',
            *(state.value, EXPLANATIONS[state], STATES[state]),
        )

    @admin.display(description=_("state"))
    def state_explained(self, row: Any) -> SafeString:
        why = row.unanswered.get(row.alias, "")
        return format_html("{} {} {}", self.state(row), EXPLANATIONS[row.entry.state], why)

    @admin.display(description=_("holder"), ordering="task_name")
    def holder(self, row: Any) -> SafeString:
        place = f"{row.host}, pid {row.pid}"
        if not row.task_name:
            return format_html("{}", f"{place}, {row.thread}" if row.thread else place)
        return format_html(
            '<strong>{}</strong><br><span class="fencedlock-small">{}{}</span>',
            *(row.task_name, f"{row.task_id} · " if row.task_id else "", place),
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
        return row.session_pid or EMPTY

    @admin.display(description=_("token"))
    def token_number(self, row: Any) -> SafeString:
        if not row.fenced:
            return _labelled(_("token"), _("unfenced"))
        # None after a newer grant or a forced release.
        return _labelled(_("token"), _("superseded") if row.token is None else row.token)

    acquired = _time_column(_("acquired"), "acquired_at")
    renewed = _time_column(_("renewed"), "renewed_at")
    expires = _time_column(_("expires"), "expires_at")

    @admin.display(description=_("held for"), ordering="-acquired_at")
    def held_for(self, row: Any) -> SafeString:
        return _labelled(_("held for"), format_duration(row.entry.held_for))

    @admin.display(description=_("lease left"), ordering="expires_at")
    def lease_left(self, row: Any) -> SafeString:
        left = format_duration(max(0.0, row.entry.remaining))
        bar = format_html(
            '<meter class="fencedlock-left" min="0" low="0.33" optimum="1" max="1" value="{}" '
            'aria-label="{}"></meter> <span class="fencedlock-small">{}</span>',
            *(f"{row.entry.part_left:.2f}", _now("lease left"), left),
        )
        return _labelled(_("lease left"), bar)

    @admin.display(description=_("waiting"))
    def waiting(self, row: Any) -> SafeString:
        return _labelled(_("waiting"), row.entry.waiting or EMPTY)

    @admin.display(description=_("writes rejected"))
    def rejected(self, row: Any) -> SafeString:
        value = row.entry.refused or EMPTY
        if row.entry.refused and row.events_url:
            value = format_html(
                '<a class="fencedlock-rejected" href="{}">{}</a>', row.events_url, value
            )
        elif row.entry.refused:
            value = format_html('<span class="fencedlock-rejected">{}</span>', value)
        return _labelled(_("writes rejected"), value)


@admin.register(Fence)
class FenceAdmin(ReadOnlyAdmin):
    """The newest grant of every lock name."""

    list_display = ("lock_name", "token")
    list_filter = (DatabaseFilter,)
    search_fields = ("name",)
    fields = ("lock_name", "token", "owner")


class LockEventList(ChangeList):
    """Lock events, by date where the database knows the time zone."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if self.date_hierarchy and not _knows_time_zone(self.root_queryset.db):
            self.date_hierarchy = None


def _knows_time_zone(using: str) -> bool:
    """Return whether dates work there; MySQL and MariaDB come without time zones."""
    connection = connections[using]
    if connection.vendor == "postgresql" or not settings.USE_TZ:
        return True
    if connection.timezone_name != "UTC":
        # Django takes the times for local ones of the database's TIME_ZONE.
        return False
    return get_current_timezone_name() == "UTC" or connection.features.has_zoneinfo_database


@admin.register(LockEvent)
class LockEventAdmin(ReadOnlyAdmin):
    """The recent history of all locks."""

    list_display = ("when", "lock_name", "what", "token_number", "holder", "note")
    list_filter = (DatabaseFilter, "kind", ("alias", ExistingValuesFilter))
    search_fields = ("name", "holder", "note")
    search_help_text = _("Searches names, holders and notes.")
    date_hierarchy = "happened_at"
    ordering = ("-happened_at", "-id")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LockEventList

    when = _time_column(_("when"), "happened_at")

    @admin.display(description=_("what"), ordering="kind")
    def what(self, row: LockEvent) -> SafeString:
        times = "" if row.times == 1 else f" \N{MULTIPLICATION SIGN} {row.times}"
        return _labelled(_("what"), f"{LockEvent.Kind(row.kind).label}{times}")

    @admin.display(description=_("token"), ordering="token")
    def token_number(self, row: LockEvent) -> SafeString:
        return _labelled(_("token"), EMPTY if row.token is None else row.token)


def _labelled(label: Any, value: Any) -> SafeString:
    """Add the column's title, which narrow screens show instead of the table's head."""
    return format_html('<span class="fencedlock-label">{}</span> {}', label, value)


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
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
