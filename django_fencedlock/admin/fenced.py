"""`FencedModelAdmin`: changes rows of a fenced model under their locks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.checks import ModelAdminChecks
from django.contrib.admin.options import TO_FIELD_VAR
from django.contrib.admin.utils import unquote
from django.core import checks
from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import formats, timezone
from django.utils.translation import gettext as _

from ..conf import Problem
from ..exceptions import FencedLockError, LockNotAcquired
from .reasons import reason
from .transactions import outside

#: The form's field that says what the row was like when the form was opened.
SEEN = "_fencedlock_seen"


class FencedModelAdminChecks(ModelAdminChecks):
    """What the admin can't do under the locks of the rows."""

    def check(self, admin_obj: Any, **kwargs: Any) -> list[checks.CheckMessage]:
        found: list[checks.CheckMessage] = super().check(admin_obj, **kwargs)
        if admin_obj.list_editable:
            problem = Problem(
                "E040",
                f"{type(admin_obj).__name__}.list_editable saves many rows at once, each of which "
                "has a lock of its own.",
                "Leave list_editable out: each row is changed on a page of its own.",
            )
            found.append(
                checks.Error(
                    problem.message,
                    hint=problem.hint,
                    obj=type(admin_obj),
                    id=f"django_fencedlock.{problem.id}",
                )
            )
        return found


class FencedModelAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """
    Acquire a row's lock for a change, outside of the view's transaction.

    If another holder has the lock, or if the row was changed since the form was opened, nothing
    is saved. The form then says so, and keeps what the user typed.
    """

    checks_class = FencedModelAdminChecks
    change_form_template = "admin/django_fencedlock/fenced_change_form.html"

    def get_urls(self) -> list[Any]:
        # Django's own transaction begins inside of these.
        base = f"{self.opts.app_label}_{self.opts.model_name}"
        named = {f"{base}_{view}" for view in ("add", "change", "delete")}
        urls = super().get_urls()
        for each in urls:
            if each.name in named:
                each.callback = outside(each.callback)
        return urls

    # Changing

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: Any = None,
    ) -> HttpResponse:
        show = functools.partial(super().changeform_view, request, object_id, form_url)
        refusal = None
        try:
            with contextlib.ExitStack() as stack:
                refusal = _take(stack, self._rows_to_save(request, object_id))
                if refusal is None:
                    return show(extra_context)
        except FencedLockError as exc:
            # The view's transaction was rolled back with it.
            refusal = _not_saved(exc)
        # Again, with what was typed, and a form that refuses itself.
        request.fencedlock_refusal = refusal  # type: ignore[attr-defined]
        return show(extra_context)

    def _rows_to_save(self, request: HttpRequest, object_id: str | None) -> list[Any]:
        """
        Return the row whose lock a request needs, if the user may save it.

        Django's view checks the same once more, and refuses.
        """
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
        refusal = getattr(request, "fencedlock_refusal", None) or _changed_since(request, obj)
        return form if refusal is None else _refusing(form, refusal)  # type: ignore[no-any-return]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        row = context.get("original")
        if row is not None:
            # As posted: who was told that the row was changed has to open it anew.
            context["fencedlock_seen"] = request.POST.get(SEEN) or _stamp(row)
        return super().render_change_form(request, context, *args, **kwargs)

    # Deleting

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: Any = None
    ) -> HttpResponse:
        with contextlib.ExitStack() as stack:
            refusal = _take(stack, self._rows_to_delete(request, object_id))
            if refusal is None:
                return super().delete_view(request, object_id, extra_context)
        self.message_user(request, refusal, messages.ERROR)
        return HttpResponseRedirect(request.get_full_path())

    def _rows_to_delete(self, request: HttpRequest, object_id: str) -> list[Any]:
        """Return the row whose lock a request needs, if Django's view will delete it."""
        # It asks first if nothing was posted.
        row = self._posted_row(request, object_id) if request.POST else None
        if row is None or not self.has_delete_permission(request, row):
            return []
        _texts, _counts, lacking, protected = self.get_deleted_objects([row], request)
        return [] if lacking or protected else [row]

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        with contextlib.ExitStack() as stack:
            refusal = _take(stack, queryset)
            if refusal is not None:
                raise _NotDeleted(refusal)
            super().delete_queryset(request, queryset)

    def response_action(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().response_action(request, *args, **kwargs)
        except _NotDeleted as exc:
            self.message_user(request, str(exc), messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())


def _refusing(form: Any, why: str) -> Any:
    """Return a form that shows what was typed and is never valid."""

    class RefusedForm(form):  # type: ignore[misc]
        def clean(self) -> Any:
            super().clean()
            raise ValidationError(why)

    return RefusedForm


class _NotDeleted(Exception):
    """Rows weren't deleted because another holder has the lock of one."""


def _take(stack: contextlib.ExitStack, rows: Iterable[Any]) -> str | None:
    """Acquire the rows' locks until `stack` is left, or return why that isn't possible."""
    # In one order, so that two who want the same don't each hold a part of it.
    for _name, row in sorted({row.fencing.name(): row for row in rows}.items()):
        try:
            stack.enter_context(row.fencing.lock(blocking_timeout=0))
        except LockNotAcquired as exc:
            return _held(row, exc)
        except FencedLockError as exc:
            return _not_saved(exc)
    return None


def _held(row: Model, refusal: LockNotAcquired) -> str:
    holder = refusal.holder
    facts = {"row": row, "who": holder or _("an unknown holder")}
    if holder is None or holder.expires_at is None:
        return _("“%(row)s” is being processed by %(who)s. Nothing was saved. Try again.") % facts
    until = timezone.localtime(holder.expires_at)
    return _(
        "“%(row)s” is being processed by %(who)s, at least until %(until)s. Nothing was saved. Try "
        "again after that."
    ) % {**facts, "until": formats.time_format(until, "H:i:s")}


def _not_saved(why: FencedLockError) -> str:
    return _("Nothing was saved: %(why)s") % {"why": reason(why)}


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
