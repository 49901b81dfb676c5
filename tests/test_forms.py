"""A form that carries the version of the row that the user saw."""

from typing import Any

import pytest
from django.db import transaction
from django.forms import modelformset_factory
from django.test import RequestFactory
from django.views.generic import UpdateView

from django_fencedlock import VersionConflict
from django_fencedlock.forms import VersionedModelForm
from tests.models import Contract, Document

pytestmark = pytest.mark.django_db

CHANGED = (
    "“Document object ({})” was changed since you opened this form. Your changes were not saved. "
    "Reopen the form and apply them again."
)


class DocumentForm(VersionedModelForm):
    class Meta:
        model = Document
        fields = ("text",)

    def clean(self) -> None:
        """A form of a project may leave out what its base class does."""


@pytest.fixture
def document() -> Document:
    return Document.objects.create(text="draft")


def sent(document: Any, **data: Any) -> DocumentForm:
    return DocumentForm(data, instance=Document.objects.get(pk=document.pk))


def test_the_version_is_a_hidden_field_of_a_form_for_a_row_that_is_there(
    document: Document,
) -> None:
    document.save()
    html = str(DocumentForm(instance=document))
    assert '<input type="hidden" name="seen_version" value="1"' in html
    assert "seen_version" not in str(DocumentForm())
    form = DocumentForm({"text": "new"})
    assert (form.save().version, Document.objects.count()) == (0, 2)


def test_a_stale_form_is_invalid_and_keeps_what_was_typed(document: Document) -> None:
    form = sent(document, text="by anna", seen_version=0)
    assert form.is_valid()
    assert not form.has_error("seen_version")
    assert sent(document, text="by ben", seen_version=0).save().version == 1
    form = sent(document, text="by anna", seen_version=0)
    assert form.errors == {"__all__": [CHANGED.format(document.pk)]}
    assert form.has_error("__all__", "version_conflict")
    assert 'value="by anna"' in str(form)
    assert 'name="seen_version" value="0"' in str(form)
    assert Document.objects.get().text == "by ben"


@pytest.mark.parametrize("seen", [{}, {"seen_version": ""}, {"seen_version": "none"}])
def test_a_form_without_a_version_says_what_its_template_lacks(
    document: Document, seen: dict[str, str]
) -> None:
    form = sent(document, text="x", **seen)
    assert not form.is_valid()
    text = "The form was sent without the version. Add {{ form.seen_version }} to it."
    assert form.non_field_errors() == [text] * ("none" not in seen.values())


def test_a_change_after_the_check_ends_in_an_error_of_the_form(document: Document) -> None:
    form = sent(document, text="by anna", seen_version=0)
    assert form.is_valid()
    Document.objects.update(text="by ben")
    # The transaction of a request goes on, and shows the form.
    with transaction.atomic():
        with pytest.raises(VersionConflict):
            form.save()
        assert Document.objects.get().text == "by ben"
    assert form.non_field_errors() == [CHANGED.format(document.pk)]


def test_what_a_view_saves_later_is_compared_as_well(document: Document) -> None:
    form = sent(document, text="by anna", seen_version=0)
    assert form.is_valid()
    found = form.save(commit=False)
    Document.objects.update(text="by ben")
    with pytest.raises(VersionConflict), transaction.atomic():
        found.save()
    form = sent(document, text="by anna", seen_version=0)
    assert not form.is_valid()
    # A view that doesn't ask whether the form is valid overwrites nothing either.
    with pytest.raises(VersionConflict), transaction.atomic():
        form.instance.save()


def test_a_formset_deletes_no_row_that_was_changed(document: Document) -> None:
    rows: Any = modelformset_factory(Document, DocumentForm, extra=0, can_delete=True)
    data = {"form-TOTAL_FORMS": 1, "form-INITIAL_FORMS": 1, "form-0-id": document.pk}
    data |= {"form-0-text": "draft", "form-0-seen_version": 0, "form-0-DELETE": "on"}
    Document.objects.update(text="by ben")
    formset = rows(data)
    assert formset.is_valid()  # Django ignores the errors of rows that are deleted.
    with pytest.raises(VersionConflict), transaction.atomic():
        formset.save()
    assert Document.objects.exists()


def test_a_generic_view(document: Document) -> None:
    class Edit(UpdateView):
        model, form_class, success_url = Document, DocumentForm, "/"

        def form_valid(self, form: Any) -> Any:
            try:
                return super().form_valid(form)
            except VersionConflict:
                return self.form_invalid(form)

    def post(**data: Any) -> Any:
        return Edit.as_view()(RequestFactory().post("/", data), pk=document.pk)

    assert post(text="by ben", seen_version=0).status_code == 302
    answer = post(text="by anna", seen_version=0)
    assert answer.context_data["form"].non_field_errors() == [CHANGED.format(document.pk)]


def test_a_form_of_a_fenced_and_versioned_row() -> None:
    class ContractForm(VersionedModelForm):
        class Meta:
            model = Contract
            fields = ("text",)

    contract = Contract.objects.create()
    with contract.fencing.lock():
        found = Contract.objects.get()
        assert ContractForm({"text": "mine", "seen_version": 0}, instance=found).save()
    assert not ContractForm({"text": "x", "seen_version": 0}, instance=found).is_valid()
