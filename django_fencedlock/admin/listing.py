"""The lists: of held locks as the lock services see them, of their history, and the filters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db import connections
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..models import HeldLock
from ..ops.registry import Listing, State, entries, states
from ..storage.vendors import ledger_for

STATES = {
    State.HELD: _("held"),
    State.EXPIRING: _("expiring"),
    State.EXPIRED: _("expired"),
    State.LOST: _("lost"),
    State.FREE: _("free"),
    State.UNKNOWN: _("unknown"),
}

#: So many locks are looked at for their state, which only the services know: in one request to
#: each.
LOOKED_AT = 1000


class StateFilter(admin.SimpleListFilter):
    """By what the lock services say now. Applied by the list, after all else has narrowed it."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(state.value, STATES[state]) for state in State]

    def queryset(self, request: HttpRequest, queryset: QuerySet[HeldLock]) -> QuerySet[HeldLock]:
        return queryset


class FewValues(admin.AllValuesFieldListFilter):
    """The values that there are; nothing to choose from a single one."""

    def has_output(self) -> bool:
        return len(self.lookup_choices) > 1

    def choices(self, changelist: Any) -> Iterator[Any]:
        for choice in super().choices(changelist):
            # What has no task has an empty name of one.
            display = choice["display"] or _("none")
            yield {**choice, "display": display}


class HeldLocks(ChangeList):
    """The page's locks, as the lock services see them: each is asked once for the whole page."""

    listing: Listing
    #: Lock services that didn't answer when the state was asked for the filter.
    silent: Mapping[str, str] = {}
    #: Of how many the state was asked for the filter, if there are more.
    looked_at = 0

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: Any = None
    ) -> QuerySet[HeldLock]:
        queryset = super().get_queryset(request, exclude_parameters)
        wanted = next(
            (spec.value() for spec in self.filter_specs if isinstance(spec, StateFilter)), None
        )
        return self._in_state(queryset, State(wanted)) if wanted in list(State) else queryset

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list, self.listing = observed(self.result_list, self.silent)
        page: Any = self.model_admin
        events_page = page.events_page(request)
        for row in self.result_list:
            row.events_page = events_page

    def _in_state(self, queryset: QuerySet[HeldLock], wanted: State) -> QuerySet[HeldLock]:
        rows = list(candidates(queryset, wanted)[: LOOKED_AT + 1])
        if len(rows) > LOOKED_AT:
            self.looked_at = LOOKED_AT
        asked = rows[:LOOKED_AT]
        self.silent = silent = dict[str, str]()
        found = zip(asked, states(queryset.db, asked, silent), strict=True)
        return queryset.filter(pk__in=[row.pk for row, state in found if state is wanted])


class Events(ChangeList):
    """The history, by date where the database knows the time zone."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if self.date_hierarchy and not _knows_time_zone(self.root_queryset.db):
            self.date_hierarchy = None


def _knows_time_zone(using: str) -> bool:
    """Whether dates can be told there; MariaDB and MySQL are installed without time zones."""
    connection, zone = connections[using], timezone.get_current_timezone_name()
    if connection.vendor != "postgresql" and settings.USE_TZ and connection.timezone_name != "UTC":
        # Django takes the times for local ones of the database's TIME_ZONE.
        return False
    if connection.vendor != "mysql" or not settings.USE_TZ or zone == connection.timezone_name:
        return True
    with connection.cursor() as cursor:
        cursor.execute("SELECT CONVERT_TZ('2000-01-01 12:00:00', 'UTC', %s)", [zone])
        return cursor.fetchone()[0] is not None


def candidates(queryset: QuerySet[HeldLock], wanted: State) -> QuerySet[HeldLock]:
    """The locks that may be in a state by what the registry knows, the likeliest first."""
    if wanted not in (State.EXPIRED, State.EXPIRING, State.FREE):
        return queryset
    connection = connections[queryset.db]
    now = ledger_for(connection).now(connection)
    if wanted is State.EXPIRED:
        return queryset.filter(expires_at__lte=now).order_by("expires_at")
    living = queryset.filter(expires_at__gt=now)
    return living.order_by("expires_at") if wanted is State.EXPIRING else living


def observed(
    queryset: QuerySet[HeldLock], silent: Mapping[str, str]
) -> tuple[list[HeldLock], Listing]:
    """Rows, each with its entry of the registry; and the listing of those."""
    rows = list(queryset)
    listing = Listing(unanswered=dict(silent))
    if rows:
        listing.entries += entries(queryset.db, rows, listing.unanswered)
    for row, entry in zip(rows, listing.entries, strict=True):
        row.entry = entry  # type: ignore[attr-defined]
    return rows, listing
