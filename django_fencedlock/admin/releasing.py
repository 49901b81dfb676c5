"""Releasing locks by force in the admin: the action, the pages that ask, and what is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import AbstractBaseUser
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import connections
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.clickjacking import xframe_options_deny

from ..core.names import validate
from ..core.runtime import clock
from ..exceptions import BackendUnavailable, FencedLockError
from ..models import HeldLock
from ..ops.force_release import Outcome, Release, end_session_sql, force_release
from ..ops.registry import ListedLock, State, entries
from ..storage.fences import Note, notes
from ..storage.text import show_blanks
from .databases import address, be_storable, shown_of
from .reasons import reason
from .transactions import outside

#: Locks that are released at once.
MOST = 100
#: Seconds after which no further one is tried: the page has to be answered.
LIMIT = 20.0
#: Locks that are told of one by one.
TOLD = 10

_CANT = {
    State.LOST: gettext_lazy("Another holder has acquired it since. It will not be released."),
    State.UNKNOWN: gettext_lazy("Its lock service is unavailable, so it can't be released."),
}


@dataclass(frozen=True)
class Marked:
    """A lock with the holder who was seen: nobody else is to lose it."""

    name: str
    alias: str
    owner: str

    def __str__(self) -> str:
        return json.dumps([self.name, self.alias, self.owner])

    @classmethod
    def read(cls, text: str) -> Marked:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise BadRequest("No lock of this form.") from exc
        if not (isinstance(found, list) and len(found) == 3 and _are_texts(found)):
            raise BadRequest("No lock of this form.")
        try:
            validate(found[0])
        except ValueError as exc:
            raise BadRequest("No lock has such a name.") from exc
        return cls(*found)


def _are_texts(found: list[Any]) -> bool:
    return all(isinstance(each, str) for each in found)


@dataclass(frozen=True)
class Shown:
    """A lock on a page that asks."""

    entry: ListedLock
    #: The server process of the session that it lives on, if it lives on one.
    session_pid: int | None = None
    #: By whom it was taken away before, if its holder hasn't given it back yet.
    before: Note | None = None

    @property
    def mark(self) -> Marked:
        return Marked(self.entry.name, self.entry.alias, self.entry.owner)

    @property
    def name(self) -> str:
        return show_blanks(self.entry.name)

    @property
    def why_not(self) -> Any:
        """Why it can't be released."""
        return _CANT.get(self.entry.state)

    @property
    def end_session_sql(self) -> str:
        return end_session_sql(self.session_pid) if self.session_pid else ""

    @property
    def seconds(self) -> int:
        """Seconds within which its process renews it, where it is to give the lock back."""
        ttl = (self.entry.expires_at - self.entry.renewed_at).total_seconds()
        return max(1, round(ttl / 3))


class _Page(Protocol):
    """What the mixin needs of a ModelAdmin."""

    admin_site: Any
    opts: Any

    def get_queryset(self, request: HttpRequest) -> QuerySet[HeldLock]: ...
    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool: ...
    def answered(
        self, request: HttpRequest, view: Callable[..., HttpResponse], *args: Any
    ) -> HttpResponse: ...


class ReleasesByForce:
    """Adds the action, the button's address and the pages to the admin of held locks."""

    actions: Any = ("release_by_force",)

    def has_release_permission(self, request: HttpRequest) -> bool:
        page = cast(_Page, self)
        user = cast(Any, request.user)
        return page.has_view_permission(request) and user.has_perm(
            f"{page.opts.app_label}.release_heldlock"
        )

    @admin.action(
        permissions=["release"], description=gettext_lazy("Release selected locks by force")
    )
    def release_by_force(
        self, request: HttpRequest, queryset: QuerySet[HeldLock]
    ) -> HttpResponse | None:
        if queryset.count() > MOST:
            text = _("At most %d locks can be released at once. Nothing was released.")
            messages.error(request, text % MOST)
            return None
        return self._ask(request, shown(self._visible(request, queryset)))

    def get_urls(self) -> list[Any]:
        page = cast(_Page, self)
        # A page that is shown within another one's is clicked by who doesn't see it.
        view = outside(xframe_options_deny(page.admin_site.admin_view(self.release_view)))
        name = f"{page.opts.app_label}_{page.opts.model_name}_release"
        return [path("release/", view, name=name), *super().get_urls()]  # type: ignore[misc]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        row = kwargs.get("obj")
        if row is not None and self.has_release_permission(request):
            context["release_url"] = self._url(request, "release", name=row.pk)
        answer: HttpResponse = super().render_change_form(  # type: ignore[misc]
            request, context, *args, **kwargs
        )
        return answer

    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Ask, or do what was confirmed."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        page = cast(_Page, self)
        if request.method != "POST":
            be_storable(request)
            return page.answered(request, self._ask_first)
        marks = [Marked.read(text) for text in request.POST.getlist("lock")[:MOST]]
        if request.POST.get("step") != "release":
            raise BadRequest("Nothing is to be done.")
        return page.answered(request, self._release, marks)

    def _ask_first(self, request: HttpRequest) -> HttpResponse:
        return self._ask(request, shown(self._listed_rows(request, [request.GET.get("name", "")])))

    def _listed_rows(self, request: HttpRequest, names: Iterable[str]) -> list[HeldLock]:
        """Return the rows of these locks that the list shows to the user."""
        queryset = cast(_Page, self).get_queryset(request)
        return self._visible(request, queryset.filter(pk__in=list(names)))

    def _visible(self, request: HttpRequest, queryset: QuerySet[HeldLock]) -> list[HeldLock]:
        page = cast(_Page, self)
        rows = queryset.order_by("name")
        return [row for row in rows if page.has_view_permission(request, row)]

    def _url(self, request: HttpRequest, view: str, **query: str) -> str:
        page = cast(_Page, self)
        base = f"admin:{page.opts.app_label}_{page.opts.model_name}"
        path = reverse(f"{base}_{view}", current_app=page.admin_site.name)
        return address(path, shown_of(request, HeldLock), **query)

    def _ask(self, request: HttpRequest, locks: Sequence[Shown]) -> HttpResponse:
        if not locks:
            messages.warning(
                request, _("The lock was released, or another holder has acquired it.")
            )
            return HttpResponseRedirect(self._url(request, "changelist"))
        page = cast(_Page, self)
        context = {
            **page.admin_site.each_context(request),
            "title": _("Release by force?"),
            "opts": page.opts,
            "media": getattr(self, "media", ""),
            "locks": locks,
            "some": [each for each in locks if not each.why_not],
            "list_url": self._url(request, "changelist"),
            "release_url": self._url(request, "release"),
        }
        request.current_app = page.admin_site.name
        return TemplateResponse(
            request, "admin/django_fencedlock/heldlock/release_confirmation.html", context
        )

    def _release(self, request: HttpRequest, marks: Sequence[Marked]) -> HttpResponse:
        # A form can name any lock.
        rows = self._listed_rows(request, [mark.name for mark in marks])
        listed = {(row.name, row.alias) for row in rows}
        by = f"{cast(AbstractBaseUser, request.user).get_username()} (admin)"
        until = clock() + LIMIT
        done: list[Release] = []
        away: set[str] = set()
        for mark in marks:
            if (mark.name, mark.alias) not in listed:
                text = _("Lock “%s” is no longer in the list. Nothing was released.")
                messages.info(request, text % mark.name)
                continue
            if mark.alias in away or clock() > until:
                text = _("Lock “%s” was not tried: others before it failed or took too long.")
                messages.error(request, text % mark.name)
                continue
            try:
                release = force_release(mark.name, by=by, backend=mark.alias, owner=mark.owner)
            except FencedLockError as exc:
                if isinstance(exc, BackendUnavailable):
                    away.add(mark.alias)
                text = _("Lock “%(name)s” was not released: %(why)s")
                messages.error(request, text % {"name": mark.name, "why": reason(exc)})
                continue
            if release.done:
                _log(request, release)
            if release.outcome is Outcome.FREED:
                done.append(release)
            else:
                _tell(request, release)
        _tell_done(request, done)
        return HttpResponseRedirect(self._url(request, "changelist"))


def shown(rows: Iterable[HeldLock]) -> list[Shown]:
    """Locks as their services see them now."""
    found = list(rows)
    if not found:
        return []
    using = found[0]._state.db or "default"
    listed = list(entries(using, found, {}))
    before = notes(connections[using], [entry.owner for entry in listed])
    return [
        Shown(entry, row.session_pid, before.get(entry.owner))
        for row, entry in zip(found, listed, strict=True)
    ]


def _log(request: HttpRequest, release: Release) -> None:
    what = _("Released by force. It was held by %s.") % release.holder
    if release.token is not None:
        what += " " + _("The fence was raised to %d.") % release.token
    if release.outcome is Outcome.LEFT_TO_HOLDER:
        what += " " + _("Its process has not released it yet.")
    LogEntry.objects.log_actions(
        user_id=cast(Any, request.user).pk,
        # The row is gone, or somebody else's.
        queryset=[HeldLock(name=release.name)],
        action_flag=CHANGE,
        change_message=what,
        single_object=True,
    )


def _tell(request: HttpRequest, release: Release) -> None:
    facts = {"name": release.name, "holder": release.holder}
    if release.outcome is Outcome.LEFT_TO_HOLDER:
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


def _tell_done(request: HttpRequest, done: Sequence[Release]) -> None:
    if len(done) > TOLD:
        text = ngettext(
            "%(count)d lock was released by force: %(names)s.",
            "%(count)d locks were released by force: %(names)s.",
            len(done),
        )
        names = ", ".join(f"“{each.name}”" for each in done)
        messages.success(request, text % {"count": len(done), "names": names})
        return
    for each in done:
        text = _("Lock “%(name)s” of %(holder)s was released by force.")
        text %= {"name": each.name, "holder": each.holder}
        if each.token is None:
            text += " " + _("It isn't fenced: writes of that holder are not rejected.")
        messages.success(request, text)
