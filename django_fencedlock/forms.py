"""`VersionedModelForm`: rejects what was typed into a form of an older version of the row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.core.exceptions import ValidationError
from django.db import router, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .exceptions import VersionConflict

if TYPE_CHECKING:
    _ModelForm = forms.ModelForm[Any]
else:
    _ModelForm = forms.ModelForm

CHANGED = gettext_lazy(
    "“%(row)s” was changed since you opened this form. Your changes were not saved. Reopen the "
    "form and apply them again."
)


class VersionedModelForm(_ModelForm):
    """
    Carries the version of the row that the user saw, in a hidden field.

    If the row was changed since then, the form is invalid and keeps what was typed. If it is
    changed between ``is_valid()`` and ``save()``, `save()` adds that error and raises
    `VersionConflict`.
    """

    # Not "version": a form can't name that column, since it isn't editable.
    seen_version = forms.IntegerField(required=False, widget=forms.HiddenInput)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance._state.adding:
            self.fields.pop("seen_version", None)
        else:
            self.initial["seen_version"] = self.instance.version

    def clean_seen_version(self) -> int | None:
        seen: int | None = self.cleaned_data["seen_version"]
        if seen is None:
            # The field is hidden, so its own errors are too.
            text = _("The form was sent without the version. Add {{ form.seen_version }} to it.")
            self.add_error(None, ValidationError(text, code="no_version"))
        elif seen != self.instance.version:
            self._add_conflict()
            # A formset deletes rows of invalid forms: the statement itself compares this.
            self.instance.version = seen
        return seen

    def save(self, commit: bool = True) -> Any:
        try:
            # A conflict must not break the transaction of the request, which shows the form again.
            with transaction.atomic(using=router.db_for_write(type(self.instance))):
                return super().save(commit)
        except VersionConflict:
            self._add_conflict()
            raise

    def _add_conflict(self) -> None:
        self.add_error(None, ValidationError(CHANGED, "version_conflict", {"row": self.instance}))
