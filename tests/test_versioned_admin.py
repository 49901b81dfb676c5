"""Two users change one row in the admin: the second one can't overwrite what the first one did."""

from collections.abc import Callable
from typing import Any

import pytest
from django import forms
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db.models import CASCADE, QuerySet
from django.db.models.signals import post_save, pre_delete, pre_save
from django.http import HttpRequest, HttpResponse
from django.middleware.csrf import get_token
from django.template import engines
from django.template.response import SimpleTemplateResponse
from django.test import Client, RequestFactory
from django.urls import path

from django_fencedlock import lock
from django_fencedlock.admin import FencedModelAdmin, VersionedModelAdmin
from django_fencedlock.forms import VersionedModelForm
from django_fencedlock.models import Fence
from django_fencedlock.test import hold_lock
from tests.models import Clause, Contract, Docket, Document, Invoice, Letter, Rebate
from tests.test_fenced_admin import atomic_requests, browser, inputs, opened, selected, url

__all__ = ["atomic_requests", "browser"]

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls("tests.test_versioned_admin"),
]
site = admin.AdminSite()


@admin.register(Document, site=site)
class DocumentAdmin(VersionedModelAdmin):
    list_display = ("pk", "text")
    list_editable = ("text",)
    save_as = True
    actions = ("shout", "ask")
    ran: list[str] = []

    def shout(self, request: HttpRequest, queryset: Any) -> None:
        for row in queryset.order_by("pk"):
            self.ran.append(row.text)
            row.text = row.text.upper()
            row.save()

    def ask(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        """Show a page of its own first, as the documentation of Django does."""
        if request.POST.get("sure"):
            return self.shout(request, queryset)
        field = '<input type="hidden" name="csrfmiddlewaretoken" value="{}">'
        return HttpResponse(f"<form>{field.format(get_token(request))}</form>")


class ClauseInline(admin.TabularInline):
    model = Clause
    extra = 0


class RebateInline(admin.TabularInline):
    model = Rebate
    extra = 0


class DocketInline(admin.StackedInline):
    model = Docket
    extra = 0


@admin.register(Contract, site=site)
class ContractAdmin(FencedModelAdmin):
    inlines = (ClauseInline,)
    actions = ("sign",)

    def sign(self, request: HttpRequest, queryset: Any) -> None:
        """Needs no permission, so every user has an action."""


@admin.register(Invoice, site=site)
class InvoiceAdmin(FencedModelAdmin):
    fields = ("note",)
    inlines = (RebateInline,)


site.register(Letter, FencedModelAdmin)
urlpatterns = [path("admin/", site.urls)]
LIST = "/admin/tests/document/"
CHANGED_FORM = (
    "was changed since you opened this form. Your changes were not saved. Reopen the form and "
    "apply them again."
)
CHANGED_ROW = "was changed since this page showed it. Nothing was done. Check it, and try again."
LACKS = (
    "The page was sent without the version of “Document object ({})”. Nothing was done. Reload the "
    "page and try again."
)


@pytest.fixture
def document() -> Document:
    return Document.objects.create(text="draft")


@pytest.fixture(autouse=True)
def ran() -> list[str]:
    DocumentAdmin.ran = []
    return DocumentAdmin.ran


@pytest.fixture
def on_signal() -> Any:
    """Do something in a receiver, which runs between a check and a write."""
    connected: list[tuple[Any, Any, Any]] = []

    def connect(signal: Any, sender: Any, action: Callable[[Any], None]) -> None:
        def receive(instance: Any, **kwargs: Any) -> None:
            action(instance)

        signal.connect(receive, sender=sender, weak=False)
        connected.append((signal, receive, sender))

    yield connect
    for signal, receive, sender in connected:
        signal.disconnect(receive, sender=sender)


def change(*rows: Any, text: str = "by ben") -> None:
    """Change rows as another user does."""
    for row in rows:
        found = type(row).objects.get(pk=row.pk)
        found.text = text
        if hasattr(row, "fencing"):
            with found.fencing.lock():
                found.save()
        else:
            found.save()


def text_of(answer: Any) -> str:
    return str(answer.content.decode())


def texts() -> list[str]:
    return list(Document.objects.order_by("pk").values_list("text", flat=True))


@pytest.mark.parametrize("model", [Document, Contract, Letter])
@pytest.mark.usefixtures("atomic_requests")
def test_the_second_of_two_open_forms_is_rejected_and_keeps_what_was_typed(
    browser: Client, model: Any
) -> None:
    field = "sender" if model is Letter else "text"
    row = model.objects.create(**{field: "draft"})
    anna, ben = opened(browser, row), opened(browser, row)
    assert browser.post(url(row), {**ben, field: "by ben"}).status_code == 302
    for _ in range(2):
        answer = browser.post(url(row), {**anna, field: "by anna"})
        assert answer.status_code == 200
        assert CHANGED_FORM in text_of(answer)
        assert inputs(answer)[field] == "by anna"
        anna = inputs(answer)
    assert list(model.objects.values_list(field, flat=True)) == ["by ben"]
    answer = browser.post(url(row), {**opened(browser, row), field: "by both"})
    assert answer.status_code == 302
    assert list(model.objects.values_list(field, flat=True)) == ["by both"]


@pytest.mark.usefixtures("atomic_requests")
def test_a_change_between_the_check_and_the_save_is_reported_in_the_form(
    browser: Client, document: Document, on_signal: Any
) -> None:
    form = {**opened(browser, document), "text": "by anna"}
    on_signal(pre_save, Document, lambda row: Document.objects.update(text="by ben"))
    answer = browser.post(url(document), form)
    assert answer.status_code == 200
    assert "Nothing was saved: Another user or process changed the row. Reopen it" in text_of(
        answer
    )
    assert inputs(answer)["text"] == "by anna"
    assert texts() == ["draft"]  # Its own change is part of the transaction that was rolled back.


@pytest.mark.usefixtures("atomic_requests")
def test_a_row_that_was_changed_since_the_question_is_not_deleted(
    browser: Client, document: Document
) -> None:
    form = opened(browser, document, "delete")
    change(document)
    answer = browser.post(url(document, "delete"), form, follow=True)
    assert CHANGED_ROW in text_of(answer)
    assert "Are you sure" in text_of(answer)
    assert texts() == ["by ben"]
    assert not LogEntry.objects.exists()
    browser.post(url(document, "delete"), inputs(answer))
    assert texts() == []


@pytest.mark.parametrize("model", [Document, Contract])
def test_selected_rows_are_deleted_as_they_were_shown_or_not_at_all(
    browser: Client, model: Any
) -> None:
    rows = [model.objects.create(text="draft") for _ in range(3)]
    address = f"/admin/tests/{model._meta.model_name}/"
    form = selected(browser, rows)
    change(rows[1])
    answer = browser.post(address, form, follow=True)
    assert CHANGED_ROW in text_of(answer)
    assert "Successfully" not in text_of(answer)
    assert model.objects.count() == 3
    assert not LogEntry.objects.exists()
    assert "Successfully deleted 3" in text_of(
        browser.post(address, selected(browser, rows), follow=True)
    )
    assert LogEntry.objects.count() == 3


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("count", [1, 2])
def test_a_change_between_the_check_and_the_delete_undoes_the_delete_and_its_log(
    browser: Client, on_signal: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rows = [Document.objects.create(text="draft") for _ in range(count)]
    form = selected(browser, rows)
    logged = DocumentAdmin.log_deletions

    def log_deletions(page: Any, request: Any, queryset: Any) -> Any:
        result = logged(page, request, queryset)
        Document.objects.filter(pk=rows[-1].pk).update(text="by ben")
        return result

    monkeypatch.setattr(DocumentAdmin, "log_deletions", log_deletions)
    answer = browser.post(LIST, form, follow=True)
    assert CHANGED_ROW in text_of(answer)
    assert Document.objects.count() == count
    assert not LogEntry.objects.exists()
    form = opened(browser, rows[-1], "delete")
    answer = browser.post(url(rows[-1], "delete"), form, follow=True)
    assert "Nothing was saved: Another user or process changed the row" in text_of(answer)
    assert Document.objects.count() == count
    assert not LogEntry.objects.exists()


def test_a_row_and_what_is_deleted_with_it_can_both_be_selected(
    browser: Client, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    relation: Any = Clause._meta.get_field("contract").remote_field
    monkeypatch.setattr(relation, "on_delete", CASCADE)
    # The listener of cascades would make each later delete of a contract a slow one.
    listener = {"sender": Contract, "dispatch_uid": "django_fencedlock"}
    request.addfinalizer(lambda: pre_delete.disconnect(**listener))
    documents = [Document.objects.create() for _ in range(2)]
    clauses = [Clause.objects.create(contract=Contract.objects.create()) for _ in range(2)]
    browser.post(LIST, selected(browser, documents))
    browser.post("/admin/tests/contract/", selected(browser, [each.contract for each in clauses]))
    assert not any(model.objects.exists() for model in (Document, Contract, Clause))


# Actions


def act(browser: Client, rows: list[Any], shown: Any = None, **more: Any) -> Any:
    form = {"action": "shout", "index": 0, "_selected_action": [row.pk for row in rows], **more}
    return browser.post(LIST, {**(shown or inputs(browser.get(LIST))), **form}, follow=True)


@pytest.mark.parametrize("action", ["shout", "delete_selected"])
def test_an_action_needs_rows_as_the_list_showed_them(
    browser: Client, ran: list[str], action: str
) -> None:
    rows = [Document.objects.create(text=text) for text in ("one", "two", "three")]
    shown = inputs(browser.get(LIST))
    change(rows[2])
    assert CHANGED_ROW in text_of(act(browser, rows, shown, action=action))
    assert ran == []
    # The others can be chosen.
    answer = act(browser, rows[:2], shown, action=action)
    assert "was changed since" not in text_of(answer)
    assert ran == ["one", "two"] * (action == "shout")


def test_an_action_on_all_pages_compares_the_rows_that_were_shown(
    browser: Client, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DocumentAdmin, "list_per_page", 1)
    first, last = (Document.objects.create(text=text) for text in ("first", "last"))
    shown = inputs(browser.get(LIST))
    change(first)  # The list shows the last one first.
    act(browser, [last], shown, select_across=1)
    assert ran == ["by ben", "last"]
    assert CHANGED_ROW in text_of(act(browser, [last], shown, select_across=1))
    # The question about them shows all.
    answer = act(browser, [last], select_across=1, action="delete_selected")
    form = {**inputs(answer), "_selected_action": [first.pk, last.pk]}
    change(first)
    assert CHANGED_ROW in text_of(browser.post(LIST, form, follow=True))
    assert Document.objects.count() == 2


def test_an_action_that_meets_a_conflict_is_reported(
    browser: Client, document: Document, on_signal: Any
) -> None:
    on_signal(pre_save, Document, lambda row: Document.objects.update(text="by ben"))
    page = text_of(act(browser, [document]))
    assert "The action stopped, and may have changed other rows before. Another user or" in page
    assert texts() == ["by ben"]


def test_a_row_that_is_loaded_without_its_version_is_not_written(
    browser: Client, document: Document, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = QuerySet(Document).only("text")  # The managers of the package load the version.
    monkeypatch.setattr(DocumentAdmin, "get_queryset", lambda page, request: rows.all())
    text = (
        f"Nothing was done: get_queryset() of this page loads “{document}” without its fence or "
        "version. Add it to only(), or remove it from defer()."
    )
    assert text in text_of(act(browser, [document]))
    assert text in text_of(browser.post(url(document), opened(browser, document)))
    assert ran == []


def test_the_page_of_an_action_carries_what_the_list_showed(
    browser: Client, document: Document, ran: list[str]
) -> None:
    answer = act(browser, [document], action="ask")
    form = {**inputs(answer), "action": "ask", "_selected_action": document.pk, "sure": 1}
    change(document)
    assert CHANGED_ROW in text_of(browser.post(LIST, form, follow=True))
    assert ran == []


@pytest.mark.parametrize(
    "context",
    [
        {"queryset": 5},
        {"queryset": Document.objects.all()},
        {"inline_admin_formsets": None},
        {"inline_admin_formsets": [5], "cl": 5},
    ],
)
def test_the_page_of_an_action_may_have_any_context(
    browser: Client,
    document: Document,
    monkeypatch: pytest.MonkeyPatch,
    context: Any,
) -> None:
    def ask(page: Any, request: HttpRequest, queryset: Any) -> HttpResponse:
        context["csrf_token"] = get_token(request)
        page = "<form method='post'>{% csrf_token %}</form>"
        return SimpleTemplateResponse(engines["django"].from_string(page), context)

    monkeypatch.setattr(DocumentAdmin, "ask", ask)
    answer = act(browser, [document], action="ask")
    assert answer.fencedlock_seen == browser.get(LIST).fencedlock_seen
    assert getattr(context.get("queryset"), "_result_cache", None) is None


# Lists


def edited(shown: dict[str, str], **values: str) -> dict[str, str]:
    """Return the form of a list, with other texts of some rows: `_1="x"`, by place."""
    return {**shown, **{f"form-{key[1:]}-text": value for key, value in values.items()}}


@pytest.mark.usefixtures("atomic_requests")
def test_each_row_of_an_editable_list_is_compared(browser: Client) -> None:
    rows = [Document.objects.create(text=text) for text in ("one", "two", "three")][::-1]
    shown = {**inputs(browser.get(LIST)), "_save": "Save"}
    change(rows[1])
    answer = browser.post(LIST, edited(shown, _0="mine", _1="mine"))
    assert text_of(answer).count(CHANGED_FORM) == 1
    assert inputs(answer)["form-0-text"] == "mine"
    assert texts() == ["one", "by ben", "three"]
    again = {**inputs(answer), "_save": "Save"}
    assert CHANGED_FORM in text_of(browser.post(LIST, again))
    # The user left this row alone, and its text is the same again.
    change(rows[1], text="two")
    assert browser.post(LIST, edited(shown, _0="mine")).status_code == 302
    assert texts() == ["one", "two", "mine"]


def test_a_change_between_the_check_and_the_save_of_a_list_is_reported(
    browser: Client, on_signal: Any
) -> None:
    for text in ("one", "two"):
        Document.objects.create(text=text)
    shown = {**inputs(browser.get(LIST)), "_save": "Save"}
    on_signal(post_save, Document, lambda row: Document.objects.update(text="by ben"))
    answer = browser.post(LIST, edited(shown, _0="mine", _1="mine"), follow=True)
    assert "Nothing was saved: Another user or process changed the row" in text_of(answer)
    assert texts() == ["one", "two"]


# Inlines


@pytest.mark.parametrize("how", ["text", "DELETE"])
def test_a_row_of_an_inline_is_compared(browser: Client, how: str) -> None:
    contract = Contract.objects.create(text="-")
    _one, two = (Clause.objects.create(contract=contract, text="draft") for _ in range(2))
    form = opened(browser, contract)
    Clause.objects.filter(pk=two.pk).update(text="by ben")
    answer = browser.post(url(contract), {**form, f"clause_set-1-{how}": "on"})
    assert answer.status_code == 200
    assert CHANGED_FORM in text_of(answer)
    assert Clause.objects.filter(text="by ben").count() == 1
    form |= {"clause_set-0-text": "mine", "clause_set-1-text": "by ben"}
    assert browser.post(url(contract), form).status_code == 302
    assert set(Clause.objects.values_list("text", flat=True)) == {"mine", "by ben"}


def test_rows_of_an_inline_are_saved_under_the_lock_of_their_parent(browser: Client) -> None:
    invoice = Invoice.objects.create(note="-")
    with invoice.fencing.lock():
        Rebate.objects.create(invoice=invoice)
    form = {**opened(browser, invoice), "rebate_set-0-amount": "7"}
    assert browser.post(url(invoice), form).status_code == 302
    assert Rebate.objects.get().amount == 7
    with invoice.fencing.lock():
        rebate = Rebate.objects.get()
        rebate.save()
        form = {**opened(browser, invoice), "rebate_set-0-DELETE": "on"}
        rebate.amount = 8
        rebate.save()
    assert CHANGED_FORM in text_of(browser.post(url(invoice), form))
    assert Rebate.objects.get().amount == 8
    # A new invoice has no lock yet that its rebates could be under.
    form = {**inputs(browser.get("/admin/tests/invoice/add/")), "rebate_set-TOTAL_FORMS": "1"}
    form |= {"note": "-", "rebate_set-0-amount": "1", "rebate_set-0-invoice": ""}
    page = text_of(browser.post("/admin/tests/invoice/add/", form))
    assert "Nothing was saved. Save the invoice first, then add the rows." in page
    assert Invoice.objects.count() == 1


def test_rows_of_an_inline_with_another_lock_are_not_saved(
    browser: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InvoiceAdmin, "inlines", (DocketInline,))
    invoice = Invoice.objects.create(note="draft")
    with lock("dockets"):
        Docket.objects.create(invoice=invoice)
    form = {**opened(browser, invoice), "note": "mine", "docket_set-0-DELETE": "on"}
    page = text_of(browser.post(url(invoice), form))
    assert "Nothing was saved: This change needs the lock of another row as well." in page
    assert Docket.objects.exists()
    invoice.refresh_from_db()
    assert invoice.note == "draft"


def test_a_user_who_may_only_delete_rows_of_an_inline(client: Client) -> None:
    contract, user = Contract.objects.create(text="-"), User.objects.create_user("eve")
    clause = Clause.objects.create(contract=contract)
    may = ("view_contract", "change_contract", "view_clause", "delete_clause")
    user.user_permissions.set(Permission.objects.filter(codename__in=may))
    User.objects.update(is_staff=True)
    client.force_login(User.objects.get())
    form = {**opened(client, contract), "clause_set-0-DELETE": "on"}
    form |= {"clause_set-0-id": str(clause.pk), "clause_set-0-contract": str(contract.pk)}
    change(clause)
    assert CHANGED_FORM in text_of(client.post(url(contract), form))
    assert Clause.objects.exists()


# Ways around


def test_a_page_without_versions_changes_nothing(browser: Client, document: Document) -> None:
    for seen in ({}, {"_fencedlock_seen": "["}, {"_fencedlock_seen": "[" * 9999}):
        lacks = LACKS.format(document.pk)
        shown = {**inputs(browser.get(LIST)), "_save": "Save", **seen}
        for address, form in (
            (url(document), {"text": "x"}),
            (url(document, "delete"), {"post": "yes"}),
            (LIST, {"action": "delete_selected", "post": "yes", "_selected_action": document.pk}),
            (LIST, edited(shown, _0="x")),
        ):
            sent = {key: value for key, value in form.items() if key != "_fencedlock_seen"} | seen
            assert lacks in text_of(browser.post(address, sent, follow=True))
        assert texts() == ["draft"]


def test_overridden_hooks_of_django_change_nothing(
    browser: Client, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = forms.modelform_factory(Document, fields=["text"])
    for hook, result in {
        "get_form": lambda *args, **kwargs: plain,
        "get_changelist_form": lambda *args, **kwargs: plain,
        "save_model": lambda page, request, row, form, change: row.save(),
        "delete_model": lambda page, request, row: row.delete(),
        "delete_queryset": lambda page, request, rows: rows.delete(),
    }.items():
        monkeypatch.setattr(DocumentAdmin, hook, result, raising=False)
    form = {**opened(browser, document), "text": "mine"}
    listed = edited({**inputs(browser.get(LIST)), "_save": "Save"}, _0="mine")
    question, many = opened(browser, document, "delete"), selected(browser, [document])
    change(document)
    for address, sent in (
        (url(document), form),
        (LIST, listed),
        (url(document, "delete"), question),
        (LIST, many),
    ):
        page = text_of(browser.post(address, sent, follow=True))
        assert "was changed since" in page, address
    assert texts() == ["by ben"]


def test_a_form_that_is_not_ours_saves_nothing_while_the_lock_is_held(
    browser: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = Contract.objects.create(text="draft")
    plain: Any = forms.modelform_factory(Contract, fields=["text"])
    monkeypatch.setattr(ContractAdmin, "get_form", lambda *args, **kwargs: plain)
    form = {**opened(browser, contract), "text": "mine"}
    with hold_lock(contract.fencing.name()):
        answer = browser.post(url(contract), form, follow=True)
    assert "is being processed by" in text_of(answer)
    assert Contract.objects.get().text == "draft"


@pytest.mark.parametrize("fields", [None, ("text",)])
def test_the_form_of_an_admin_may_be_a_versioned_one(
    browser: Client, document: Document, monkeypatch: pytest.MonkeyPatch, fields: Any
) -> None:
    monkeypatch.setattr(DocumentAdmin, "form", VersionedModelForm)
    monkeypatch.setattr(DocumentAdmin, "fields", fields)
    form = opened(browser, document)
    assert "seen_version" not in form
    assert browser.post(url(document), {**form, "text": "mine"}).status_code == 302
    assert texts() == ["mine"]


def test_a_form_without_the_field_of_a_versioned_one(
    browser: Client, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = type("Form", (VersionedModelForm,), {"seen_version": None})
    monkeypatch.setattr(DocumentAdmin, "form", form)
    sent = {**opened(browser, document), "text": "mine"}
    assert browser.post(url(document), sent).status_code == 302


def test_a_page_of_a_fenced_and_versioned_model_may_have_both_bases() -> None:
    page: Any = type("Page", (FencedModelAdmin, VersionedModelAdmin), {})
    assert page(Contract, site).check() == []


def test_a_view_of_a_project_may_log_deletions(browser: Client, document: Document) -> None:
    request = RequestFactory().post("/")
    request.user = User.objects.get()
    DocumentAdmin(Document, site).log_deletions(request, [document])
    assert LogEntry.objects.count() == 1


# The admin's other paths


def test_other_buttons_and_popups(browser: Client, document: Document) -> None:
    form = {**opened(browser, document), "text": "two"}
    del form["_save"]
    answer = browser.post(url(document), {**form, "_continue": 1}, follow=True)
    form = {**inputs(answer), "text": "three"}
    assert browser.post(url(document), {**form, "_addanother": 1}).status_code == 302
    # A copy takes the place of no row, so an older form can make one.
    assert browser.post(url(document), {**form, "text": "copy", "_saveasnew": 1}).status_code == 302
    assert texts() == ["three", "copy"]
    assert "three" not in text_of(browser.get(url(document, "history")))
    answer = browser.post(url(document), {**opened(browser, document), "_popup": 1, "text": "pop"})
    assert "popup_response" in text_of(answer)
    question = browser.get(f"{url(document, 'delete')}?_popup=1")
    change(document)
    answer = browser.post(f"{url(document, 'delete')}?_popup=1", inputs(question), follow=True)
    assert CHANGED_ROW in text_of(answer)
    assert inputs(answer)["_popup"] == "1"
    answer = browser.post(url(document, "delete"), inputs(answer))
    assert "popup_response" in text_of(answer)
    assert texts() == ["copy"]


@pytest.mark.parametrize("model", [Document, Contract])
def test_a_user_who_may_only_view_changes_nothing(client: Client, model: Any) -> None:
    row, user = model.objects.create(), User.objects.create_user("eve", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename=f"view_{model._meta.model_name}"))
    client.force_login(user)
    form = opened(client, row)
    change(row)
    fences = Fence.objects.count()
    assert client.post(url(row), {**form, "text": "x"}).status_code == 403
    assert client.post(url(row, "delete"), {**form, "post": "yes"}).status_code == 403
    many = {"action": "delete_selected", "post": "yes", "_selected_action": row.pk}
    client.post(f"/admin/tests/{model._meta.model_name}/", many)
    assert Fence.objects.count() == fences
    assert list(model.objects.values_list("text", flat=True)) == ["by ben"]
