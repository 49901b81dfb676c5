"""Forced release in the admin: confirmation, release and messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
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
from ..core.names import validate
from ..core.runtime import clock
from ..models import HeldLock
from ..ops.force_release import Outcome, Release, end_session_sql, force_release
from ..ops.registry import State, entries
from ..storage.fences import notes
from ..storage.text import show_blanks
from .base import ReadOnlyAdmin, outside_transactions, translated

#: Locks in one request.
MAX_LOCKS = 100
#: Seconds after which no further lock is tried: the page has to be answered.
TIME_LIMIT = 20.0

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


def _viewable(request: HttpRequest, page: ReleasingAdmin, names: Sequence[str]) -> list[HeldLock]:
    """Return the rows that the list shows to the user."""
    rows = page.get_queryset(request).filter(pk__in=names).order_by("name")
    return [row for row in rows if page.has_view_permission(request, row)]


def _read(text: str) -> list[str]:
    """Return name, alias and owner id of a lock in the form."""
    try:
        found = json.loads(text)
        if [type(each) for each in found] != [str, str, str]:
            raise TypeError(f"Not three texts: {text!r}")
        validate(found[0])
    except (TypeError, ValueError, RecursionError) as exc:
        raise BadRequest("Invalid lock in the form.") from exc
    return found  # type: ignore[no-any-return]


def _questions(rows: Sequence[HeldLock]) -> Iterator[dict[str, Any]]:
    """Return what the confirmation page shows of each lock."""
    if not rows:
        return
    using = rows[0]._state.db or "default"
    listed = list(entries(using, rows, {}))
    before = notes(using, [entry.owner for entry in listed])
    for row, entry in zip(rows, listed, strict=True):
        ttl = (entry.expires_at - entry.renewed_at).total_seconds()
        yield {
            "entry": entry,
            "name": show_blanks(entry.name),
            # Only the owner that the user saw may lose the lock.
            "value": json.dumps([entry.name, entry.alias, entry.owner]),
            "obstacle": _OBSTACLES.get(entry.state),
            "before": before.get(entry.owner),
            "session_pid": row.session_pid,
            "end_session_sql": end_session_sql(row.session_pid) if row.session_pid else "",
            "seconds_to_renewal": max(1, round(ttl / 3)),
        }


def _confirmation(request: HttpRequest, page: ReleasingAdmin, names: Sequence[str]) -> HttpResponse:
    """Ask whether to release these locks."""
    locks = list(_questions(_viewable(request, page, names)))
    list_url = page.url(request, "changelist")
    if not locks:
        text = _("The lock was released, or another holder has acquired it.")
        messages.warning(request, text)
        return HttpResponseRedirect(list_url)
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
    """Release the locks of a confirmed form, and report what became of each."""
    seen = [_read(text) for text in request.POST.getlist("lock")[:MAX_LOCKS]]
    if request.POST.get("step") != "release":
        raise BadRequest("Unknown step in the form.")
    # A form can name any lock, also one that the user may not view.
    rows = _viewable(request, page, [name for name, _alias, _owner in seen])
    viewable = {(row.name, row.alias) for row in rows}
    by = f"{cast(AbstractBaseUser, request.user).get_username()} (admin)"
    until = clock() + TIME_LIMIT
    away: set[str] = set()
    for name, alias, owner in seen:
        if (name, alias) not in viewable:
            text = _("Lock “%s” is no longer in the list. Nothing was released.")
            messages.info(request, text % name)
            continue
        if alias in away or clock() > until:
            text = _("Lock “%s” was not tried: others before it failed or took too long.")
            messages.error(request, text % name)
            continue
        try:
            released = force_release(name, by=by, backend=alias, owner=owner)
        except exceptions.FencedLockError as exc:
            if isinstance(exc, exceptions.BackendUnavailable):
                away.add(alias)
            text = _("Lock “%(name)s” was not released: %(why)s")
            messages.error(request, text % {"name": name, "why": translated(exc)})
            continue
        if released.done:
            _log(request, released)
        _report(request, released)
    return HttpResponseRedirect(page.url(request, "changelist"))


def _log(request: HttpRequest, release: Release) -> None:
    what = _("Released by force. It was held by %s.") % release.holder
    if release.token is not None:
        what += " " + _("The fence was raised to %d.") % release.token
    if release.outcome is Outcome.LEFT_TO_HOLDER:
        what += " " + _("Its process has not released it yet.")
    LogEntry.objects.log_actions(
        user_id=cast(Any, request.user).pk,
        # The row may be gone, or be another holder's by now.
        queryset=[HeldLock(name=release.name)],
        action_flag=CHANGE,
        change_message=what,
        single_object=True,
    )


def _report(request: HttpRequest, release: Release) -> None:
    facts = {"name": release.name, "holder": release.holder}
    if release.outcome is Outcome.FREED:
        text = _("Lock “%(name)s” of %(holder)s was released by force.") % facts
        if release.token is None:
            text += " " + _("It isn't fenced: writes of that holder are not rejected.")
        messages.success(request, text)
    elif release.outcome is Outcome.LEFT_TO_HOLDER:
        text = _(
            "Lock “%(name)s”: writes of %(holder)s are rejected from now on. Its process releases "
            "the lock at its next renewal."
        )
        messages.warning(request, text % facts)
    elif release.outcome is Outcome.NOT_HELD:
        messages.info(request, _("Lock “%(name)s” was already released.") % facts)
    else:
        text = _("Lock “%(name)s” was not released: %(holder)s has acquired it since.")
        messages.error(request, text % facts)
