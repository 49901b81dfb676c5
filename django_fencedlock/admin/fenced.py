"""`FencedModelAdmin` and `VersionedModelAdmin`: save and delete rows as the user saw them."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import TO_FIELD_VAR
from django.contrib.admin.utils import unquote
from django.core.checks import CheckMessage
from django.core.exceptions import ValidationError
from django.db import connections, router, transaction
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import SimpleTemplateResponse
from django.utils import formats, timezone
from django.utils.crypto import salted_hmac
from django.utils.encoding import is_protected_type
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..checks import inlines_of
from ..checks import messages as messages_of
from ..core.names import is_path
from ..exceptions import FencedLockError, InsideTransaction, LockNotAcquired
from ..forms import CHANGED, VersionedModelForm
from ..lease import Lease, current_lease
from ..models import FencedModel, FencedQuerySet, VersionedModel
from ..problems import Problem
from ..storage.fenced_atomic import grant_of, is_pinned
from .base import outside_transactions, translated

#: The input that has the fences and versions of the rows that a page shows.
SEEN = "_fencedlock_seen"
#: The buttons without which a form of Django 6.1 runs an action.
_SAVE = ("_save", "_continue", "_addanother", "_saveasnew")
#: With the beginning of the form that each page has for logging out.
_CSRF_INPUT = re.compile(
    rb'(<form id="logout-form"[^>]*>\s*)?<input type="hidden" name="csrfmiddlewaretoken"[^>]*>'
)

_Response = TypeVar("_Response", bound=HttpResponse)

_CHANGED_ROW = gettext_lazy(
    "“%(row)s” was changed since this page showed it. Nothing was done. Check it, and try again."
)


class _ComparingModelAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    #: For the checks, which can't import this class.
    compares_rows = True

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        found: list[CheckMessage] = super().check(**kwargs)
        name, problems = type(self).__name__, []
        models = [self.model, *(each.model for each in inlines_of(self))]
        if self.list_editable and self._is_fenced:
            problem = Problem(
                "E040",
                f"{name}.list_editable saves many rows at once, but each row has its own lock.",
                "Remove list_editable. Users can change each row on its own page.",
            )
            problems.append(problem)
        if not any(issubclass(model, FencedModel | VersionedModel) for model in models):
            problem = Problem(
                "E041",
                f"{name} protects nothing: {self.opts.label} is neither a FencedModel nor a "
                "VersionedModel.",
                f"Derive {self.opts.object_name} from one of them, or {name} from ModelAdmin.",
            )
            problems.append(problem)
        return found + messages_of(problems, type(self))

    @property
    def _is_fenced(self) -> bool:
        return issubclass(self.model, FencedModel)

    def get_urls(self) -> list[Any]:
        # Django's views begin a transaction of their own, after the lock was acquired.
        base, urls = f"{self.opts.app_label}_{self.opts.model_name}", super().get_urls()
        for each in urls if self._is_fenced else ():
            if each.name in (f"{base}_add", f"{base}_change", f"{base}_delete"):
                outside_transactions(each.callback)
        return urls

    # Changing

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        show = functools.partial(super().changeform_view, request, object_id, *args, **kwargs)
        rows = self._rows_to_change(request, object_id)
        try:
            while True:
                try:
                    with _locked(rows) as locks:
                        request.fencedlock_locks = locks  # type: ignore[attr-defined]
                        return _with_stamps(request, show())
                except _LockNeeded as exc:
                    # Here the view's transaction was undone. SQLite acquires no lock within it.
                    if len(rows) > 2:
                        raise
                    rows.append(exc.row)
        except _NotSaved as exc:
            # Show the form again with what was typed; get_form() makes it invalid.
            request.fencedlock_rejection = str(exc)  # type: ignore[attr-defined]
            # Unless get_form() was overridden: then save_form() raises again.
            with contextlib.suppress(_NotSaved):
                return _with_stamps(request, show())
            return self._report(request, exc)

    def _rows_to_change(self, request: HttpRequest, object_id: str | None) -> list[Any]:
        """Return the row whose lock the request needs, if the user may change it."""
        is_action = ACTION_CHECKBOX_NAME in request.POST and request.POST.keys().isdisjoint(_SAVE)
        if request.method != "POST" or not self._is_fenced or is_action:
            return []
        if object_id is None or "_saveasnew" in request.POST:
            return []
        row = self._posted_row(request, object_id)
        may = row is not None and self.has_change_permission(request, row)
        return [row] if may else []

    def _posted_row(self, request: HttpRequest, object_id: str) -> Any:
        """Return the row that Django's view will find."""
        to_field = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        if to_field and not self.to_field_allowed(request, to_field):
            return None
        return self.get_object(request, unquote(object_id), to_field)

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> type[forms.ModelForm[Any]]:
        form = super().get_form(request, obj, change, **kwargs)
        is_rejected = _rejection(request) is not None
        return _comparing(request, form) if is_rejected or _has_version(form) else form

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> Any:
        return _comparing(request, super().get_changelist_form(request, **kwargs))

    def save_form(self, request: HttpRequest, form: Any, change: bool) -> Any:
        if why := _why_changed(request, form.instance, CHANGED, typed=True):
            raise _NotSaved(why)
        row = super().save_form(request, form, change)
        _require_savable(request, row)
        return row

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        # Again, for overrides that set what names the lock, and then call this.
        _require_savable(request, obj)
        super().save_model(request, obj, form, change)

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        for formset in formsets:
            for each in formset.initial_forms:
                if each.has_changed() or each in formset.deleted_forms:
                    _require_unchanged(request, [each.instance], CHANGED, typed=True)
        rows = [each for each in formsets if issubclass(each.model, FencedModel)]
        if not change and self._is_fenced and any(each.has_changed() for each in rows):
            self._hold_new(request, form.instance)
        super().save_related(request, form, formsets, change)

    def _hold_new(self, request: HttpRequest, row: Any) -> None:
        """Hold the lock of a row that was inserted just now, for the rows of its inlines."""
        locks, name = getattr(request, "fencedlock_locks", None), row.fencing.name()
        if locks is None or name is None or current_lease(name):
            return
        try:
            _hold(locks, row)
        except InsideTransaction as exc:
            text = _("Nothing was saved. Save the %(name)s first, then add the rows.")
            raise _NotSaved(text % {"name": self.opts.verbose_name}) from exc

    # Deleting, and other actions

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: Any = None
    ) -> HttpResponse:
        try:
            with _locked(self._rows_to_delete(request, object_id)):
                request.fencedlock_deletes = True  # type: ignore[attr-defined]
                answer = super().delete_view(request, object_id, extra_context)
                return _with_stamps(request, answer)
        except _NotSaved as exc:
            return self._report(request, exc)

    def _rows_to_delete(self, request: HttpRequest, object_id: str) -> list[Any]:
        """Return the row whose lock the request needs, if it will be deleted."""
        row = self._posted_row(request, object_id) if request.POST and self._is_fenced else None
        may = row is not None and self.has_delete_permission(request, row)
        return self._deletable(request, [row]) if may else []

    def _deletable(self, request: HttpRequest, rows: Any) -> Any:
        _texts, _counts, lacking, protected = self.get_deleted_objects(rows, request)
        return [] if lacking or protected else rows

    def log_deletions(self, request: HttpRequest, queryset: Any) -> Any:
        # The view and the action call this with the objects that they delete next, whatever
        # delete_model() and delete_queryset() are overridden with. Views of a project do so too.
        if getattr(request, "fencedlock_deletes", False):
            _require_unchanged(request, queryset, _CHANGED_ROW)
        return super().log_deletions(request, queryset)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        using = router.db_for_write(self.model)
        with _locked(queryset), transaction.atomic(using=using):
            # QuerySet.delete() compares no versions. After this update, no other transaction can
            # change the rows until the end of this one.
            rows: FencedQuerySet[Any] = FencedQuerySet(self.model, using=using)
            for row in queryset:
                guards = _guards(row)
                if guards and not rows.filter(pk=row.pk, **guards).update():
                    raise _NotSaved(_CHANGED_ROW % {"row": row})
            super().delete_queryset(request, queryset)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        try:
            with _locked(()):
                return _with_stamps(request, super().changelist_view(request, extra_context))
        except _NotSaved as exc:
            return self._report(request, exc)

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run an action, unless one of the rows was changed since the page showed it."""
        rows = queryset.filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME))
        # A list that has its actions above and below sends two names.
        actions = {*request.POST.getlist("action")}
        if actions == {"delete_selected"} and request.POST.get("post"):
            within = transaction.atomic(using=router.db_for_write(self.model))
            request.fencedlock_deletes = True  # type: ignore[attr-defined]
            # Otherwise the log would have rows that weren't deleted.
            with _locked(self._deletable(request, rows) if self._is_fenced else ()), within:
                return super().response_action(request, queryset, *args, **kwargs)
        seen = _seen(request)
        # Rows of other pages ("select all") weren't shown.
        shown = (row for row in rows if _key(row) in seen or None in _guards(row).values())
        _require_unchanged(request, shown, _CHANGED_ROW)
        try:
            return super().response_action(request, queryset, *args, **kwargs)
        except FencedLockError as exc:
            text = _("The action stopped, and may have changed other rows before. %(why)s")
            raise _NotSaved(text % {"why": translated(exc)}) from exc

    def _report(self, request: HttpRequest, error: _NotSaved) -> HttpResponse:
        if request.method != "POST":
            raise error  # The browser would load the page again and again.
        self.message_user(request, str(error), messages.ERROR)
        return HttpResponseRedirect(request.get_full_path())


class FencedModelAdmin(_ComparingModelAdmin):
    """
    Saves and deletes a row only as the page showed it; of a fenced model, under the row's lock.

    The lock is acquired before the transaction. A form that can't be saved shows the reason and
    keeps what the user typed.
    """


class VersionedModelAdmin(_ComparingModelAdmin):
    """Saves and deletes a row of a versioned model only as the page showed it."""


class _NotSaved(Exception):
    """Nothing was saved or deleted; the message is for the user."""


class _LockNeeded(_NotSaved):
    """The view has to run again, under the lock of a new row."""

    def __init__(self, row: Any) -> None:
        # Without the row: the text of a new one may need columns that it lacks.
        super().__init__(_("Nothing was saved: the name of the row's lock changes each time."))
        self.row = row


def _require_savable(request: HttpRequest, row: Any) -> None:
    """Raise if a form may not be saved, or if the lock of its new row has a name and isn't held."""
    if why := _rejection(request):
        raise _NotSaved(why)
    is_new = isinstance(row, FencedModel) and row._state.adding and not row.fencing.is_of_own_pk
    if not is_new or not hasattr(request, "fencedlock_locks"):
        return
    if (name := row.fencing.name()) is not None and current_lease(name) is None:
        raise _LockNeeded(row)


@contextlib.contextmanager
def _locked(rows: Iterable[Any]) -> Iterator[contextlib.ExitStack]:
    """Hold the fenced rows' locks. Raise `_NotSaved` for every error of locks and versions."""
    is_done = False
    try:
        with contextlib.ExitStack() as stack:
            named = {row.fencing.name(): row for row in rows if isinstance(row, FencedModel)}
            # Sorted: two users who select the same rows must not each acquire a part of the locks.
            # A row whose lock has no name is left to the write, which is rejected.
            held = [_hold(stack, named[name]) for name in sorted(filter(None, named))]
            # After all locks: SQLite acquires none within a transaction. Its COMMIT may fail.
            with contextlib.ExitStack() as within:
                for lease in held:
                    used = connections[lease.database]
                    if is_path(lease.name) and not is_pinned(used, grant_of(lease)):
                        within.enter_context(lease.atomic())
                yield stack
            is_done = True
    except FencedLockError as exc:
        if is_done:
            return  # A lease was lost after the writes, which its fence has let through.
        raise _NotSaved(_("Nothing was saved: %(why)s") % {"why": translated(exc)}) from exc


def _hold(locks: contextlib.ExitStack, row: FencedModel) -> Lease:
    try:
        return locks.enter_context(row.fencing.lock(blocking_timeout=0))
    except LockNotAcquired as exc:
        raise _NotSaved(_held(row, exc)) from exc


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


# What a page showed


def _with_stamps(request: HttpRequest, response: _Response) -> _Response:
    """
    Add the stamps of the rows that a page shows to its forms.

    To the finished page: Django's confirmation pages have no block inside of their forms, and
    themes and projects replace templates.
    """

    def add(page: Any) -> None:
        stamps = _shown_stamps(request, getattr(page, "context_data", None) or {})
        if stamps and not page.streaming:
            page.fencedlock_seen = value = json.dumps(stamps)  # For tests.
            field = format_html('<input type="hidden" name="{}" value="{}">', SEEN, value)
            more = field.encode(page.charset)
            page.content = _CSRF_INPUT.sub(
                lambda found: found[0] if found[1] else found[0] + more, page.content
            )

    if isinstance(response, SimpleTemplateResponse):
        response.add_post_render_callback(add)
    else:
        add(response)
    return response


def _shown_stamps(request: HttpRequest, context: Mapping[str, Any]) -> dict[str, Any]:
    rows = [context.get("original"), context.get("object"), *_read(context.get("queryset"))]
    rows += getattr(context.get("cl"), "result_list", ())
    for each in _read(context.get("inline_admin_formsets")):
        forms_of_rows = getattr(getattr(each, "formset", None), "initial_forms", ())
        rows += [form.instance for form in forms_of_rows]
    # As posted: sending a rejected form again must not overwrite the other change.
    seen = _seen(request)
    if request.method == "POST" and "queryset" not in context:
        return seen
    # The confirmation page of an action on all rows is the first one that shows some of them.
    stamps = {_key(row): _stamp(row) for row in rows if isinstance(row, Model)}
    stamps = {key: stamp for key, stamp in stamps.items() if stamp and None not in stamp.values()}
    return {**stamps, **seen}


def _read(rows: Any) -> Iterable[Any]:
    """Return those rows of a context that are in memory: the others weren't shown."""
    rows = getattr(rows, "_result_cache", rows)
    return rows if isinstance(rows, list | tuple) else ()


def _key(row: Model) -> str:
    return f"{row._meta.label_lower}:{row.pk}"


def _guards(row: Model) -> dict[str, Any]:
    """Return the columns that guarded writes of the row compare."""
    kinds = {"fence": FencedModel, "version": VersionedModel}
    return {each: row.__dict__.get(each) for each, kind in kinds.items() if isinstance(row, kind)}


def _stamp(row: Model, without: Iterable[str] | None = None) -> dict[str, Any]:
    """Return what changes with every write of the row, as a page carries it."""
    stamp = _guards(row)
    if stamp.keys() == {"fence"}:
        # Several writes under one lease, and those without one, leave the fence as it is.
        without = sorted(row.get_deferred_fields()) if without is None else without
        values = [
            _text(row, each) for each in row._meta.concrete_fields if each.attname not in without
        ]
        # Keyed: a user must not find out columns by trying values.
        digest = salted_hmac(SEEN, repr(values), algorithm="sha256").hexdigest()
        stamp |= {"values": digest[:16], **({"without": " ".join(without)} if without else {})}
    return stamp


def _text(row: Model, field: Any) -> Any:
    """Return a column's value, the same each time it is read: as fixtures have it."""
    value = field.value_from_object(row)
    return value if is_protected_type(value) else field.value_to_string(row)


def _seen(request: HttpRequest) -> dict[str, Any]:
    """Return the stamps of the rows that the user saw."""
    try:
        found = json.loads(request.POST.get(SEEN, ""))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _require_unchanged(
    request: HttpRequest, rows: Iterable[Any], text: Any, typed: bool = False
) -> None:
    for row in rows:
        if why := _why_changed(request, row, text, typed):
            raise _NotSaved(why)


def _why_changed(request: HttpRequest, row: Any, text: Any, typed: bool = False) -> str | None:
    """Return why a row may not be written, if it isn't as shown. `typed`: it is of a form."""
    guards = {} if row._state.adding else _guards(row)
    seen = _seen(request).get(_key(row))
    if not guards:
        return None
    if None in guards.values():
        text = _(
            "Nothing was done: get_queryset() of this page loads “%(row)s” without its fence or "
            "version. Add it to only(), or remove it from defer()."
        )
    elif not isinstance(seen, dict):
        text = _(
            "The page was sent without the version of “%(row)s”. Nothing was done. Reload the page "
            "and try again."
        )
    elif seen.items() >= guards.items() and seen == _stamp_now(row, seen, typed):
        return None
    return str(text % {"row": row})


def _stamp_now(row: Any, seen: Mapping[str, Any], typed: bool) -> dict[str, Any]:
    if typed and "version" not in seen:
        # The form has changed the object.
        using = router.db_for_write(type(row), instance=row)
        row = type(row)._base_manager.using(using).filter(pk=row.pk).first()
    return {} if row is None else _stamp(row, without=str(seen.get("without", "")).split())


def _rejection(request: HttpRequest) -> str | None:
    return getattr(request, "fencedlock_rejection", None)


def _has_version(form: Any) -> bool:
    return issubclass(form, VersionedModelForm) and "seen_version" in form.base_fields


def _comparing(request: HttpRequest, form: Any) -> Any:
    """Return a form that is invalid if its row isn't as the page showed it."""
    fields = dict(form.base_fields)
    if _has_version(form):
        del fields["seen_version"]  # The page has the versions of all of its rows.

    class ComparingForm(form):  # type: ignore[misc]
        def clean(self) -> Any:
            cleaned, why = super().clean(), _rejection(request)
            # A list sends rows that the user left alone as well.
            if why is None and self.has_changed():
                why = _why_changed(request, self.instance, CHANGED, typed=True)
            if why is not None:
                raise ValidationError(why)
            return cleaned

    # A subclass has new fields, without what another get_form() changed in them.
    ComparingForm.base_fields = fields
    return ComparingForm
