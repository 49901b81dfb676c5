"""Pages of locks where several databases have fences: each page shows one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.db import OperationalError, router
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..exceptions import SettingsError
from ..registry import fence_databases

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

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        try:
            return super().changelist_view(request, extra_context)
        except OperationalError as exc:
            if not request.GET.get(PARAMETER):
                raise
            text = _now("There is no answer from database “%(database)s”: %(why)s")
            facts = {"database": shown_of(request, self.model), "why": str(exc).strip()}
            messages.error(request, text % facts)
            return HttpResponseRedirect(request.path)
