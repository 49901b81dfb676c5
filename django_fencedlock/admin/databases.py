"""Pages of locks where several databases have fences: each page shows one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR
from django.contrib.auth import get_user_model
from django.core.exceptions import BadRequest
from django.db import Error, InterfaceError, OperationalError, connections, router
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..backends.base import is_table_missing
from ..exceptions import SettingsError
from ..ops.registry import ANSWERED, fence_databases, words_of
from ..storage.connections import bounded
from ..storage.tables import ExactCharField
from ..storage.text import can_store

PARAMETER = "database"


def databases() -> list[str]:
    """The databases that have fences; none if the settings can't tell."""
    try:
        return fence_databases(conf.aliases())
    except SettingsError:
        return []


def shown_of(request: HttpRequest, model: type[Model]) -> str:
    """The database whose rows a page shows."""
    known, routed = databases(), router.db_for_read(model)
    wanted = _wanted(request)
    if wanted in known:
        return wanted
    return routed if routed in known or not known else known[0]


def _wanted(request: HttpRequest) -> str:
    # The list's parameters come along to the pages of its rows.
    kept = QueryDict(request.GET.get("_changelist_filters", ""))
    return request.GET.get(PARAMETER) or kept.get(PARAMETER) or ""


def address(path: str, using: str, **query: str) -> str:
    """The address of another page about the same database."""
    if len(databases()) > 1:
        query[PARAMETER] = using
    return f"{path}?{urlencode(query)}" if query else path


def be_storable(request: HttpRequest) -> None:
    """Refuse an address that asks for what PostgreSQL can't even compare with."""
    if any("\0" in each for _, values in request.GET.lists() for each in values):
        raise BadRequest("No row has a NUL character.")


class DatabaseFilter(admin.SimpleListFilter):
    """Which database's rows are shown; there is no page of all. Applied by `OfOneDatabase`."""

    title = _("database")
    parameter_name = PARAMETER

    def __init__(self, request: HttpRequest, params: Any, model: Any, model_admin: Any) -> None:
        super().__init__(request, params, model, model_admin)
        self._shown = shown_of(request, model)

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        found = databases()
        return [(each, each) for each in found] if len(found) > 1 else []

    def choices(self, changelist: Any) -> Iterator[Any]:
        for each, title in self.lookup_choices:
            yield {
                "selected": each == self._shown,
                "query_string": changelist.get_query_string({PARAMETER: each}),
                "display": title,
            }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset


class OfOneDatabase(admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows the rows of one database that has fences, which a filter chooses."""

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(shown_of(request, self.model))

    def get_search_fields(self, request: HttpRequest) -> list[Any]:
        fields = list(super().get_search_fields(request))
        connection = connections[shown_of(request, self.model)]
        if can_store(connection, request.GET.get(SEARCH_VAR, "")):
            return fields
        known = {each.name: each for each in self.model._meta.get_fields()}
        return [each for each in fields if isinstance(known[each], ExactCharField)]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        be_storable(request)
        return self.answered(request, super().changelist_view, extra_context)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: Any = None,
    ) -> HttpResponse:
        view = super().changeform_view
        return self.answered(request, view, object_id, form_url, extra_context)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: Any = None
    ) -> HttpResponse:
        return self.answered(request, super().history_view, object_id, extra_context)

    def answered(
        self, request: HttpRequest, view: Callable[..., HttpResponse], *args: Any
    ) -> HttpResponse:
        """Have a view answer; or say, in time, that its database doesn't."""
        using = shown_of(request, self.model)
        # Without it there is no admin at all, and it has just answered who asks.
        of_users = using == router.db_for_read(get_user_model())
        try:
            with nullcontext() if of_users else bounded(using, ANSWERED):
                return view(request, *args)
        except Error as exc:
            silent = isinstance(exc, OperationalError | InterfaceError) and not of_users
            if not (silent or is_table_missing(exc)):
                raise
            return self._no_answer(request, using, exc)

    def _no_answer(self, request: HttpRequest, using: str, error: Error) -> HttpResponse:
        site, opts = self.admin_site, self.opts
        name = f"admin:{opts.app_label}_{opts.model_name}_changelist"
        path = reverse(name, current_app=site.name)
        context = {
            **site.each_context(request),
            "title": _("No answer"),
            "opts": opts,
            "list_url": address(path, using),
            "database": using,
            "why": words_of(error, using),
            "others": [(each, address(path, each)) for each in databases() if each != using],
        }
        request.current_app = site.name
        template = "admin/django_fencedlock/no_answer.html"
        return TemplateResponse(request, template, context, status=503)
