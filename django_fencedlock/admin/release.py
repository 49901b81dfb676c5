"""Forced release in the admin: confirmation, release and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from django.contrib import admin, messages
from django.contrib.auth.models import AbstractBaseUser
from django.core.exceptions import BadRequest, PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.clickjacking import xframe_options_deny

from .. import exceptions
from ..core.runtime import clock
from ..models import HeldLock
from ..ops.force_release import Outcome, consequences, force_release
from ..ops.registry import State, entries
from ..storage.text import show_blanks
from .base import ReadOnlyAdmin, outside_transactions, translated

#: Locks in one request.
MAX_LOCKS = 100
#: Seconds after which no further lock is tried: the page has to be answered.
TIME_LIMIT = 20.0

_LEVELS = {
    Outcome.FREED: messages.SUCCESS,
    Outcome.LEFT_TO_HOLDER: messages.WARNING,
    Outcome.NOT_HELD: messages.INFO,
}
_OBSTACLES = {
    State.LOST: gettext_lazy("Another holder has acquired it since. It will not be released."),
    State.UNKNOWN: gettext_lazy("Its lock service is unavailable, so it can't be released."),
}


class ReleasingAdmin(ReadOnlyAdmin):
    """Adds the action, the page and the permission to the admin of held locks."""

    actions = ("release_by_force",)

    def get_urls(self) -> list[Any]:
        # Within a frame of another site, a user could click it without seeing it.
        view = outside_transactions(
            xframe_options_deny(self.admin_site.admin_view(self.release_view))
        )
        name = f"{self.opts.app_label}_{self.opts.model_name}_release"
        return [path("release/", view, name=name), *super().get_urls()]

    def has_release_permission(self, request: HttpRequest) -> bool:
        permission = f"{self.opts.app_label}.release_heldlock"
        return self.has_view_permission(request) and request.user.has_perm(permission)

    @admin.action(
        permissions=["release"], description=gettext_lazy("Release selected locks by force")
    )
    def release_by_force(
        self, request: HttpRequest, queryset: QuerySet[HeldLock]
    ) -> HttpResponse | None:
        if queryset.count() > MAX_LOCKS:
            text = _("At most %d locks can be released at once. Nothing was released.")
            messages.error(request, text % MAX_LOCKS)
            return None
        return _confirmation(request, self, list(queryset.values_list("pk", flat=True)))

    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Show the confirmation page (GET), or release the confirmed locks (POST)."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self.answer(_release, request, self)
        return self.answer(_confirmation, request, self, [request.GET.get("name", "")])


def _viewable(request: HttpRequest, page: ReleasingAdmin, **which: Any) -> list[HeldLock]:
    """Return the rows that the list shows to the user."""
    rows = page.get_queryset(request).filter(**which).order_by("name")
    return [row for row in rows if page.has_view_permission(request, row)]


def _confirmation(request: HttpRequest, page: ReleasingAdmin, names: Sequence[str]) -> HttpResponse:
    """Ask whether to release these locks."""
    rows = _viewable(request, page, pk__in=names)
    list_url = page.url(request, "changelist")
    if not rows:
        messages.warning(request, _("The lock was released, or another holder has acquired it."))
        return HttpResponseRedirect(list_url)
    locks = [
        {
            "row": row,
            "entry": entry,
            "name": show_blanks(row.name),
            "obstacle": _OBSTACLES.get(entry.state),
            "consequences": consequences(row.fenced, row.session_pid, _),
        }
        for row, entry in zip(rows, entries(page.database(request), rows, {}), strict=True)
    ]
    context = {
        **page.admin_site.each_context(request),
        "title": _("Release by force?"),
        "opts": page.opts,
        "media": page.media,
        "locks": locks,
        "releasable": [each for each in locks if not each["obstacle"]],
        "list_url": list_url,
        "release_url": page.url(request, "release"),
    }
    request.current_app = page.admin_site.name
    template = "admin/django_fencedlock/heldlock/release_confirmation.html"
    return TemplateResponse(request, template, context)


def _release(request: HttpRequest, page: ReleasingAdmin) -> HttpResponse:
    """Release the locks of a confirmed form, and report the result of each."""
    owners = set(request.POST.getlist("lock")[:MAX_LOCKS])
    if request.POST.get("step") != "release" or not "".join(owners).isascii():
        # MariaDB can't compare other characters with the owner's column if that is latin1.
        raise BadRequest("The form isn't one of the confirmation page.")
    # A form can name any owner, also one whose lock the user may not view.
    rows = _viewable(request, page, owner__in=owners)
    if gone := len(owners) - len(rows):
        text = _("Locks that the holder you saw no longer holds, which were left alone: %d")
        messages.info(request, text % gone)
    by = f"{cast(AbstractBaseUser, request.user).get_username()} (admin)"
    until = clock() + TIME_LIMIT
    away: set[str] = set()
    for row in rows:
        if row.alias in away or clock() > until:
            text = _("Lock “%s” was not tried: others before it failed or took too long.")
            messages.error(request, text % row.name)
            continue
        try:
            released = force_release(row.name, by=by, backend=row.alias, owner=row.owner)
        except exceptions.FencedLockError as exc:
            if isinstance(exc, exceptions.BackendUnavailable):
                away.add(row.alias)
            text = _("Lock “%(name)s” was not released: %(why)s")
            messages.error(request, text % {"name": row.name, "why": translated(exc)})
            continue
        told = released.describe(_)
        messages.add_message(request, _LEVELS.get(released.outcome, messages.ERROR), told)
        if released.done:
            page.log_change(request, row, told)
    return HttpResponseRedirect(page.url(request, "changelist"))
