"""`FencedModelAdmin`: changes rows of a fenced model under their locks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.options import TO_FIELD_VAR
from django.contrib.admin.utils import unquote
from django.core.checks import CheckMessage
from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import formats, timezone
from django.utils.translation import gettext as _

from ..checks import messages as messages_of
from ..exceptions import FencedLockError, LockNotAcquired
from ..problems import Problem
from .base import outside_transactions, translated

#: The form field with the fence and version of the row at the time when the form was opened.
SEEN = "_fencedlock_seen"


class FencedModelAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """
    Acquires the row's lock for each change, before the transaction.

    A form that can't be saved shows the reason and keeps what the user typed.
    """

    change_form_template = "admin/django_fencedlock/fenced_change_form.html"

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        found: list[CheckMessage] = super().check(**kwargs)
        if self.list_editable:
            problem = Problem(
                "E040",
                f"{type(self).__name__}.list_editable saves many rows at once, but each row has "
                "its own lock.",
                "Remove list_editable. Users can change each row on its own page.",
            )
            found += messages_of([problem], type(self))
        return found

    def get_urls(self) -> list[Any]:
        # Django's views begin a transaction of their own, after the lock was acquired.
        base, urls = f"{self.opts.app_label}_{self.opts.model_name}", super().get_urls()
        for each in urls:
            if each.name in (f"{base}_add", f"{base}_change", f"{base}_delete"):
                outside_transactions(each.callback)
        return urls

    # Changing

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        show = functools.partial(super().changeform_view, request, object_id, *args, **kwargs)
        try:
            with _locked(self._rows_to_save(request, object_id)):
                return show()
        except _NotSaved as exc:
            # Show the form again with what was typed; get_form() makes it invalid.
            request.fencedlock_rejection = str(exc)  # type: ignore[attr-defined]
            return show()

    def _rows_to_save(self, request: HttpRequest, object_id: str | None) -> list[Any]:
        """Return the row whose lock the request needs, if the user may save it."""
        if request.method != "POST":
            return []
        if object_id is not None and "_saveasnew" not in request.POST:
            row = self._posted_row(request, object_id)
            may = row is not None and self.has_change_permission(request, row)
            return [row] if may else []
        if self.model.fencing.is_of_own_pk or not self.has_add_permission(request):
            return []
        form = self.get_form(request, None)(request.POST, request.FILES)
        return [form.instance] if form.is_valid() else []

    def _posted_row(self, request: HttpRequest, object_id: str) -> Any:
        """Return the row that Django's view will find."""
        to_field = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        if to_field and not self.to_field_allowed(request, to_field):
            return None
        return self.get_object(request, unquote(object_id), to_field)

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> type[forms.ModelForm[Any]]:
        form: Any = super().get_form(request, obj, change, **kwargs)
        why = getattr(request, "fencedlock_rejection", None) or _changed_since(request, obj)
        if why is None:
            return form  # type: ignore[no-any-return]

        class RejectedForm(form):  # type: ignore[misc]
            def clean(self) -> Any:
                """Show what was typed, and never be valid."""
                super().clean()
                raise ValidationError(str(why))

        return RejectedForm

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        row = context.get("original")
        if row is not None:
            # As posted: sending a rejected form again must not overwrite the other change.
            context["fencedlock_seen"] = request.POST.get(SEEN) or _stamp(row)
        return super().render_change_form(request, context, *args, **kwargs)

    # Deleting

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: Any = None
    ) -> HttpResponse:
        try:
            with _locked(self._rows_to_delete(request, object_id)):
                return super().delete_view(request, object_id, extra_context)
        except _NotSaved as exc:
            return self._report(request, exc)

    def _rows_to_delete(self, request: HttpRequest, object_id: str) -> list[Any]:
        """Return the row whose lock the request needs, if it will be deleted."""
        row = self._posted_row(request, object_id) if request.POST else None
        if row is None or not self.has_delete_permission(request, row):
            return []
        _texts, _counts, lacking, protected = self.get_deleted_objects([row], request)
        return [] if lacking or protected else [row]

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        with _locked(queryset):
            super().delete_queryset(request, queryset)

    def response_action(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().response_action(request, *args, **kwargs)
        except _NotSaved as exc:
            return self._report(request, exc)

    def _report(self, request: HttpRequest, error: _NotSaved) -> HttpResponse:
        self.message_user(request, str(error), messages.ERROR)
        return HttpResponseRedirect(request.get_full_path())


class _NotSaved(Exception):
    """Nothing was saved or deleted; the message is for the user."""


@contextlib.contextmanager
def _locked(rows: Iterable[Any]) -> Iterator[None]:
    """Hold the rows' locks. Raise `_NotSaved` if one is held, and for other errors of locks."""
    is_done = False
    try:
        with contextlib.ExitStack() as stack:
            # Sorted: two users who select the same rows must not each acquire a part of the locks.
            for _name, row in sorted({row.fencing.name(): row for row in rows}.items()):
                try:
                    stack.enter_context(row.fencing.lock(blocking_timeout=0))
                except LockNotAcquired as exc:
                    raise _NotSaved(_held(row, exc)) from exc
            yield
            is_done = True
    except FencedLockError as exc:
        if is_done:
            return  # A lease was lost after the writes, which its fence has let through.
        raise _NotSaved(_("Nothing was saved: %(why)s") % {"why": translated(exc)}) from exc


def _held(row: Model, error: LockNotAcquired) -> str:
    holder = error.holder
    facts: dict[str, Any] = {"row": row, "who": holder or _("an unknown holder")}
    if holder is None or holder.expires_at is None:
        return _("“%(row)s” is being processed by %(who)s. Nothing was saved. Try again.") % facts
    facts["until"] = formats.time_format(timezone.localtime(holder.expires_at), "H:i:s")
    text = _(
        "“%(row)s” is being processed by %(who)s, at least until %(until)s. Nothing was saved. Try "
        "again after that."
    )
    return text % facts


def _stamp(row: Any) -> str:
    """Return a text that changes with every write of the row under a lease."""
    return f"{row.fence}:{getattr(row, 'version', '')}"


def _changed_since(request: HttpRequest, row: Any) -> str | None:
    seen = request.POST.get(SEEN)
    if row is None or seen is None or seen == _stamp(row):
        return None
    return _(
        "“%(row)s” was changed since you opened this form. Your changes were not saved. Reopen the "
        "form and apply them again."
    ) % {"row": row}
