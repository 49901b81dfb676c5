"""Shared by the admin's pages: database, columns, errors, transactions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import SEARCH_VAR
from django.contrib.auth import get_user_model
from django.core.exceptions import BadRequest
from django.db import Error, InterfaceError, OperationalError, connections, router, transaction
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import localtime
from django.utils.translation import gettext_lazy as _

from .. import conf, exceptions
from ..ops.registry import ANSWERED, fence_databases
from ..storage.connections import time_limited
from ..storage.text import describe_error, fit_column, is_table_missing, show_blanks

#: The parameter that chooses the database of a page.
DATABASE = "database"
EMPTY = "\N{EN DASH}"

_REASONS = {
    exceptions.LockNotAcquired: _("Another holder has the lock."),
    exceptions.BackendUnavailable: _("The lock service is unavailable."),
    exceptions.ReleaseBlocked: _("An open transaction keeps the fence locked."),
    exceptions.InsideTransaction: _("The request's transaction prevents it."),
    exceptions.LeaseLost: _("The lock was lost."),
    exceptions.LockRequired: _(
        "This change needs the lock of another row as well. Change that row on its own page."
    ),
    exceptions.StaleFence: _(
        "Another holder has acquired the lock, or changed the row. Reopen the page and try again."
    ),
    exceptions.VersionConflict: _(
        "Another user or process changed the row. Reopen it and apply your changes again."
    ),
    exceptions.WrongDatabase: _("The row isn't in the database that has its fence."),
    exceptions.OutcomeUnknown: _("It is unknown whether it was saved. Check it."),
    exceptions.SettingsError: _("The lock settings are invalid."),
    exceptions.FencedLockError: _("The lock can't be used."),
}


def translated(error: exceptions.FencedLockError) -> str:
    """Return a translation of an error, and its own English text."""
    reason = next(_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS)
    if isinstance(error, exceptions.LockRequired) and error.name is None:
        reason = _("The row has no lock yet, as a field that names it is empty.")
    return _("%(reason)s Details: %(details)s") % {"reason": reason, "details": error}


def outside_transactions(view: Any) -> Any:
    """
    Exclude a view from ATOMIC_REQUESTS in every database; return it.

    In the request's transaction, SQLite would block the fence's own, a lock would last until
    the request's end, and a later error would undo a release that was already reported.
    """
    for using in connections:
        transaction.non_atomic_requests(using)(view)
    return view


def column(title: Any, ordering: str | None = None) -> Callable[[Any], Any]:
    """Declare a column; narrow screens show its title in each cell."""

    def decorate(value_of: Any) -> Any:
        @admin.display(description=title, ordering=ordering)
        @functools.wraps(value_of)
        def show(page: Any, row: Any) -> SafeString:
            label = '<span class="fencedlock-label">{}</span> {}'
            return format_html(label, title, value_of(page, row))

        return show

    return decorate


def time_column(title: Any, field: str) -> Any:
    @admin.display(description=title, ordering=field)
    def show(page: Any, row: Any) -> str:
        return date_format(localtime(getattr(row, field)), "Y-m-d H:i:s")

    return show


def databases() -> list[str]:
    """Return the databases that have fences; none if the settings are invalid."""
    try:
        return fence_databases(conf.aliases())
    except exceptions.SettingsError:
        return []


def page_url(page: Any, view: str, using: str | None, *pk: str, **query: str) -> str:
    """Return the address of a model admin's page about a database."""
    name = f"admin:{page.opts.app_label}_{page.opts.model_name}_{view}"
    path = reverse(name, args=list(map(quote, pk)), current_app=page.admin_site.name)
    if using and len(databases()) > 1:
        query[DATABASE] = using
    return f"{path}?{urlencode(query)}" if query else path


class DatabaseFilter(admin.SimpleListFilter):
    """Chooses the database to show. `ReadOnlyAdmin` applies it."""

    title = _("database")
    parameter_name = DATABASE

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        found = databases()
        return [(each, each) for each in found] if len(found) > 1 else []

    def choices(self, changelist: Any) -> Iterator[Any]:
        shown = changelist.root_queryset.db
        for each, title in self.lookup_choices:
            query = changelist.get_query_string({DATABASE: each})
            yield {"selected": each == shown, "query_string": query, "display": title}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
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

    def _never(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    has_add_permission = has_change_permission = has_delete_permission = _never

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

    def get_search_fields(self, request: HttpRequest) -> Any:
        text = request.GET.get(SEARCH_VAR, "")
        if fit_column(connections[self.database(request)], text) == text:
            return super().get_search_fields(request)
        # The other columns have a character set that can't be compared with this text.
        return ["name"]

    def changelist_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.answer(super().changelist_view, request, *args, **kwargs)

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.answer(super().changeform_view, request, *args, **kwargs)

    def history_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.answer(super().history_view, request, *args, **kwargs)

    def answer(
        self, view: Callable[..., HttpResponse], request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Return the view's answer, or a page for an unavailable database."""
        given = (*request.GET.lists(), *request.POST.lists())
        if any("\0" in each for _key, values in given for each in values):
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
            "why": describe_error(error, using),
            "others": [(each, page_url(self, "changelist", each)) for each in others],
        }
        request.current_app = self.admin_site.name
        template = "admin/django_fencedlock/database_unavailable.html"
        return TemplateResponse(request, template, context, status=503)
