"""Forced release in the admin: the confirmation page, the release, and what it reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import AbstractBaseUser
from django.core.exceptions import BadRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import exceptions
from ..core.names import validate
from ..core.runtime import clock
from ..models import HeldLock
from ..ops.force_release import Outcome, Release, end_session_sql, force_release
from ..ops.registry import State, entries
from ..storage.fences import notes
from ..storage.text import show_blanks

#: Locks in one request.
MAX_LOCKS = 100
#: Seconds after which no further lock is tried: the page has to be answered.
TIME_LIMIT = 20.0

_OBSTACLES = {
    State.LOST: gettext_lazy("Another holder has acquired it since. It will not be released."),
    State.UNKNOWN: gettext_lazy("Its lock service is unavailable, so it can't be released."),
}
_REASONS = {
    exceptions.LockNotAcquired: gettext_lazy("Another holder has the lock."),
    exceptions.BackendUnavailable: gettext_lazy("The lock service is unavailable."),
    exceptions.ReleaseBlocked: gettext_lazy("An open transaction keeps the fence locked."),
    exceptions.InsideTransaction: gettext_lazy("The request's transaction prevents it."),
    exceptions.LeaseLost: gettext_lazy("The lock was lost."),
    exceptions.LockRequired: gettext_lazy("This change needs the lock of another row as well."),
    exceptions.StaleFence: gettext_lazy(
        "Another holder has acquired the lock, or changed the row."
    ),
    exceptions.VersionConflict: gettext_lazy("The row was changed by someone else."),
    exceptions.WrongDatabase: gettext_lazy("The row isn't in the database that has its fence."),
    exceptions.OutcomeUnknown: gettext_lazy("It is unknown whether it was saved. Check it."),
    exceptions.SettingsError: gettext_lazy("The lock settings are invalid."),
}


def translated(error: exceptions.FencedLockError) -> str:
    """Return the user's translation of an error, followed by the error's own English text."""
    for kind in type(error).__mro__:
        if kind in _REASONS:
            facts = {"reason": _REASONS[kind], "details": error}
            return _("%(reason)s Details: %(details)s") % facts
    return str(error)


def outside_transactions(view: Any) -> Any:
    """
    Exclude a view from ATOMIC_REQUESTS in every database.

    In the request's transaction, SQLite would block the fence's own, a lock would last until
    the request's end, and a later error would undo a release that was already reported.
    """
    for using in connections:
        view = transaction.non_atomic_requests(using)(view)
    return view


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
    before = notes(connections[using], [entry.owner for entry in listed])
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


def confirmation(
    request: HttpRequest, page: Any, names: Sequence[str] | None = None
) -> HttpResponse:
    """Ask whether to release these locks, or the one that the address names."""
    names = [request.GET.get("name", "")] if names is None else names
    locks = list(_questions(page.viewable(request, pk__in=names)))
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


def release(request: HttpRequest, page: Any) -> HttpResponse:
    """Release the locks of a confirmed form, and report what became of each."""
    seen = [_read(text) for text in request.POST.getlist("lock")[:MAX_LOCKS]]
    if request.POST.get("step") != "release":
        raise BadRequest("Unknown step in the form.")
    # A form can name any lock, also one that the user may not view.
    rows = page.viewable(request, pk__in=[name for name, _alias, _owner in seen])
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
