import contextlib
import html
import re
import time
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connections, models
from django.test import Client, RequestFactory, override_settings
from django.test.utils import isolate_apps
from django.urls import path

from django_fencedlock import current_lease, lock
from django_fencedlock.admin import FencedModelAdmin
from django_fencedlock.admin.fenced import _stamp
from django_fencedlock.exceptions import StaleFence
from django_fencedlock.models import Fence, FencedModel
from django_fencedlock.test import hold_lock
from tests.backends import REDIS
from tests.models import Account, Bin, Contract, Invoice, Label, LedgerLine, Rebate, Ticket
from tests.test_write_paths import Everything

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.test_fenced_admin")]

site = admin.AdminSite()


@admin.register(Invoice, site=site)
class InvoiceAdmin(FencedModelAdmin):
    fields = ("amount", "note")


@admin.register(Bin, Contract, Label, LedgerLine, Ticket, site=site)
class OtherAdmin(FencedModelAdmin):
    pass


class RebateInline(admin.TabularInline):
    model = Rebate
    extra = 1


urlpatterns = [path("admin/", site.urls)]
NO_NAME = (
    "Nothing was saved: The row has no lock yet, as a field that names it is empty. Details: "
    "{saving} needs a lock; it has no name, as {column} is empty"
)


@pytest.fixture
def browser(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("root"))
    return client


@pytest.fixture
def invoice() -> Invoice:
    return Invoice.objects.create(amount=1)


def url(row: Any, view: str = "change") -> str:
    return f"/admin/tests/{row._meta.model_name}/{row.pk}/{view}/"


def inputs(answer: Any) -> dict[str, str]:
    """Return what the forms of a page would send."""
    pattern = r'<input type="(?:hidden|text|number)" name="([\w-]+)" value="([^"]*)"'
    found = re.findall(pattern, answer.content.decode())
    return {name: html.unescape(value) for name, value in found}


def text_of(answer: Any) -> str:
    return html.unescape(answer.content.decode())


def opened(browser: Client, row: Any, view: str = "change") -> dict[str, str]:
    return {**inputs(browser.get(url(row, view))), "_save": "Save"}


def selected(browser: Client, rows: Any) -> dict[str, Any]:
    """Return the form of the page that asks whether to delete these rows."""
    address = f"/admin/tests/{rows[0]._meta.model_name}/"
    form = {"action": "delete_selected", "_selected_action": [row.pk for row in rows]}
    answer = browser.post(address, {**inputs(browser.get(address)), **form, "index": 0})
    assert "Are you sure" in answer.content.decode()
    return {**inputs(answer), **form}


@pytest.fixture(params=[False, True], ids=["plain", "ATOMIC_REQUESTS"])
def atomic_requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """On SQLite, a grant must be recorded before the request's transaction begins."""
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", request.param)
    return bool(request.param)


@pytest.mark.usefixtures("atomic_requests")
def test_a_change_is_made_under_the_rows_lock(browser: Client, invoice: Invoice) -> None:
    answer = browser.post(url(invoice), {**opened(browser, invoice), "amount": 5, "note": "x"})
    assert answer.status_code == 302
    invoice.refresh_from_db()
    assert (invoice.amount, invoice.fence) == (5, 1)


@pytest.mark.usefixtures("atomic_requests")
def test_a_row_whose_lock_is_a_path(browser: Client) -> None:
    form = {"warehouse_id": 7, "code": "a", "count": 1}
    with hold_lock("warehouse/7", path=True):
        answer = browser.post("/admin/tests/bin/add/", form)
        assert "is being processed by" in answer.content.decode()
    assert browser.post("/admin/tests/bin/add/", form).status_code == 302
    row = Bin.objects.get()
    answer = browser.post(url(row), {**opened(browser, row), "count": 5})
    assert answer.status_code == 302
    row.refresh_from_db()
    assert (row.count, row.fence) == (5, 2)
    with hold_lock("warehouse", path=True):
        answer = browser.post(url(row), {**opened(browser, row), "count": 6})
        assert "is being processed by" in answer.content.decode()
    browser.post(url(row, "delete"), {**opened(browser, row, "delete"), "post": "yes"})
    assert not Bin.objects.exists()


def test_rows_whose_locks_are_paths_are_deleted_together(browser: Client) -> None:
    form = {"warehouse_id": 7, "count": 1}
    for code in "abc":
        browser.post("/admin/tests/bin/add/", {**form, "code": code})
    browser.post("/admin/tests/bin/", selected(browser, list(Bin.objects.all())))
    assert not Bin.objects.exists()


def test_a_held_row_is_reported_and_typed_values_stay(browser: Client, invoice: Invoice) -> None:
    form = {**opened(browser, invoice), "amount": 5, "note": "typed"}
    with hold_lock(f"tests.invoice:{invoice.pk}"):
        answer = browser.post(url(invoice), form)
    page = answer.content.decode()
    assert answer.status_code == 200
    assert "is being processed by" in page
    assert "thread hold_lock, at least until" in page
    assert 'value="typed"' in page
    invoice.refresh_from_db()
    assert invoice.amount == 1


def test_a_form_that_was_opened_before_a_change(browser: Client, invoice: Invoice) -> None:
    form = {**opened(browser, invoice), "amount": 5, "note": "typed"}
    with invoice.fencing.lock():
        invoice.amount = 2
        invoice.save()
    for _ in range(2):
        answer = browser.post(url(invoice), form)
        page = answer.content.decode()
        assert "was changed since you opened this form" in page
        assert 'value="typed"' in page
        assert inputs(answer)["_fencedlock_seen"] == form["_fencedlock_seen"]
    invoice.refresh_from_db()
    assert invoice.amount == 2
    assert browser.post(url(invoice), {**opened(browser, invoice), "note": "x"}).status_code == 302


@isolate_apps("tests")
def test_what_a_page_showed_is_the_same_after_its_template_has_read_the_columns() -> None:
    class Scan(FencedModel):
        image = models.FileField()
        data = models.BinaryField(null=True)
        tags = models.JSONField()

        class Meta:
            app_label = "tests"

    row, again = (Scan(pk=1, image="a.png", tags={"a": [1]}) for _ in range(2))
    assert row.image.name == "a.png"
    assert _stamp(row) == _stamp(again)
    for change in ({"image": "b.png"}, {"data": b""}, {"tags": {"a": [2]}}):
        other = Scan(**{"pk": 1, "image": "a.png", "tags": {"a": [1]}, **change})
        assert _stamp(row)["values"] != _stamp(other)["values"]


def test_the_form_for_logging_out_does_not_send_what_the_page_showed(
    browser: Client, invoice: Invoice
) -> None:
    page = browser.get(url(invoice)).content.decode()
    assert page.count("csrfmiddlewaretoken") == 1 + page.count("_fencedlock_seen")
    assert "_fencedlock_seen" not in re.findall(r'id="logout-form".*?</form>', page, re.S)[0]


@pytest.mark.parametrize("policy", ["reject", "warn"])
@pytest.mark.parametrize("how", ["change", "delete", "selected"])
@pytest.mark.parametrize("deferred", [(), ("note",)])
def test_a_write_that_leaves_the_fence_as_it_is_was_not_on_the_page(
    browser: Client,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    how: str,
    deferred: tuple[str, ...],
) -> None:
    """Two writes under one lease have one fence, and writes without a lease leave it."""
    settings.FENCEDLOCK_WITHOUT_LOCK = policy
    rows = Invoice.objects.defer(*deferred)
    monkeypatch.setattr(InvoiceAdmin, "get_queryset", lambda page, request: rows.all())
    row = Invoice.objects.create()
    address = "/admin/tests/invoice/" if how == "selected" else url(row, how)

    def form() -> dict[str, Any]:
        shown = selected(browser, [row]) if how == "selected" else opened(browser, row, how)
        return {**shown, "post": "yes", "note": "mine"}

    with row.fencing.lock() if policy == "reject" else contextlib.nullcontext():
        row.amount = 2
        row.save()
        stale = form()
        row.amount = 3
        row.save()
    assert "was changed since" in text_of(browser.post(address, stale, follow=True))
    assert Invoice.objects.get().amount == 3
    assert "was changed since" not in text_of(browser.post(address, form(), follow=True))
    left = Invoice.objects.values_list("amount", "note")
    assert list(left) == [(3, "mine")] * (how == "change")


def test_a_form_that_was_opened_on_an_older_version(browser: Client) -> None:
    contract = Contract.objects.create(text="one")
    form = {**opened(browser, contract), "text": "mine"}
    with contract.fencing.lock() as lease:
        contract.text = "two"
        contract.save()
        contract.text = "three"
        contract.save()
    assert lease.token == 1
    assert "was changed since" in browser.post(url(contract), form).content.decode()


@pytest.mark.usefixtures("atomic_requests")
def test_a_new_row_under_a_lock_that_is_not_its_own(browser: Client) -> None:
    account = Account.objects.create()
    form = {field.name: 1 for field in LedgerLine._meta.fields}
    form |= {"account": account.pk, "amount": 3}
    with hold_lock(f"account:{account.pk}"):
        answer = browser.post("/admin/tests/ledgerline/add/", form)
        assert answer.status_code == 200
        assert "Nothing was saved" in answer.content.decode()
    assert not LedgerLine.objects.exists()
    assert browser.post("/admin/tests/ledgerline/add/", form).status_code == 302
    assert LedgerLine.objects.get().account_id == account.pk


def test_a_column_that_names_the_lock_may_be_set_when_the_form_is_saved(
    browser: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = Account.objects.create()

    def save(page: Any, request: Any, row: Any, form: Any, change: bool) -> None:
        row.account = account
        super(OtherAdmin, page).save_model(request, row, form, change)

    monkeypatch.setattr(OtherAdmin, "save_model", save)
    monkeypatch.setattr(OtherAdmin, "fields", ("amount",))
    with hold_lock(f"account:{account.pk}"):
        answer = browser.post("/admin/tests/ledgerline/add/", {"amount": 3})
        assert "is being processed by" in answer.content.decode()
    assert browser.post("/admin/tests/ledgerline/add/", {"amount": 3}).status_code == 302
    assert LedgerLine.objects.get().account == account
    with monkeypatch.context() as patch:
        patch.setattr(LedgerLine.fencing.spec, "template", lambda row: f"x{time.monotonic_ns()}")
        answer = browser.post("/admin/tests/ledgerline/add/", {"amount": 3})
    assert "the name of the row's lock changes each time" in text_of(answer)
    monkeypatch.setattr(OtherAdmin, "save_model", lambda self, request, row, *args: row.save())
    answer = browser.post("/admin/tests/ledgerline/add/", {"amount": 3})
    assert NO_NAME.format(saving="Adding tests.LedgerLine", column="account_id") in text_of(answer)


@pytest.mark.parametrize("how", ["change", "selected"])
def test_a_row_without_a_lock_is_reported(
    browser: Client, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute("INSERT INTO tests_label (text, fence) VALUES ('', 0), ('', 0)")
    rows = list(Label.objects.all())
    monkeypatch.setattr(OtherAdmin, "fields", ("text",))
    address = url(rows[0]) if how == "change" else "/admin/tests/label/"
    form = opened(browser, rows[0]) if how == "change" else selected(browser, rows)
    page = text_of(browser.post(address, {**form, "text": "mine"}, follow=True))
    assert "Nothing was saved: The row has no lock yet, as a field that names it is empty." in page
    assert Label.objects.filter(text="").count() == 2


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.parametrize("database", ["default", "postgres"])
@pytest.mark.parametrize("how", ["_save", "_saveasnew"])
def test_rows_of_an_inline_are_added_with_their_parent(
    browser: Client, settings: Any, monkeypatch: pytest.MonkeyPatch, database: str, how: str
) -> None:
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": database}}
    settings.DATABASE_ROUTERS = [Everything(database)]
    browser.force_login(User.objects.create_superuser("eve"))
    monkeypatch.setattr(InvoiceAdmin, "inlines", [RebateInline])
    monkeypatch.setattr(InvoiceAdmin, "save_as", True)
    address = "/admin/tests/invoice/add/"
    if how == "_saveasnew":
        address = url(Invoice.objects.create())
    form = {**inputs(browser.get(address)), "amount": "3", "note": "-", how: "1"}
    answer = browser.post(address, {**form, "rebate_set-0-amount": "7"})
    if database == "default":
        assert "Nothing was saved. Save the invoice first, then add the rows." in text_of(answer)
        assert not Rebate.objects.exists()
        form["rebate_set-0-amount"] = "0"
        assert browser.post(address, form).status_code == 302
        return
    assert answer.status_code == 302
    assert Rebate.objects.get().invoice == Invoice.objects.get(amount=3)
    assert Fence.objects.get().name == f"tests.invoice:{Rebate.objects.get().invoice_id}"
    assert Rebate.fencing.lock(invoice_id=Rebate.objects.get().invoice_id).holder() is None


def test_a_row_is_not_moved_to_another_lock(browser: Client) -> None:
    one, two = Account.objects.create(), Account.objects.create()
    with lock(f"account:{one.pk}"):
        line = LedgerLine.objects.create(account=one)
    answer = browser.post(url(line), {**opened(browser, line), "account": two.pk, "amount": 3})
    assert answer.status_code == 200
    assert "Nothing was saved" in answer.content.decode()
    line.refresh_from_db()
    assert (line.account, line.amount) == (one, 0)


@pytest.mark.usefixtures("atomic_requests")
def test_a_row_is_deleted_under_its_lock(browser: Client, invoice: Invoice) -> None:
    form = opened(browser, invoice, "delete")
    with hold_lock(f"tests.invoice:{invoice.pk}"):
        answer = browser.post(url(invoice, "delete"), form, follow=True)
        assert "is being processed by" in answer.content.decode()
    assert Invoice.objects.exists()
    assert browser.post(url(invoice, "delete"), form).status_code == 302
    assert not Invoice.objects.exists()


@pytest.mark.parametrize("view", ["change", "delete"])
def test_a_key_that_is_quoted_in_the_address(browser: Client, view: str) -> None:
    with Ticket.fencing.lock(pk="a/1"):
        ticket = Ticket.objects.create(pk="a/1")
    address = f"/admin/tests/ticket/a_2F1/{view}/"
    form = {**inputs(browser.get(address)), "code": "a/1", "amount": 5}
    assert browser.post(address, form).status_code == 302
    assert not Ticket.objects.filter(amount=ticket.amount).exists()


def test_what_else_would_be_deleted_needs_permission_too(
    browser: Client, invoice: Invoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = lambda self, objs, request: ([], {}, {"ledger line"}, [])  # noqa: E731
    monkeypatch.setattr(InvoiceAdmin, "get_deleted_objects", lacking)
    assert browser.post(url(invoice, "delete"), {"post": "yes"}).status_code == 403
    assert not Fence.objects.exists()


def test_many_rows_are_deleted_under_their_locks(browser: Client, atomic_requests: bool) -> None:
    rows = [Invoice.objects.create() for _ in range(3)]
    form = selected(browser, rows)
    if atomic_requests:
        # Other actions rely on the request's transaction, so the list keeps it.
        answer = browser.post("/admin/tests/invoice/", form, follow=True)
        assert "inside a transaction that has the file" in answer.content.decode()
        assert Invoice.objects.count() == 3
        return
    with hold_lock(f"tests.invoice:{rows[1].pk}"):
        answer = browser.post("/admin/tests/invoice/", form, follow=True)
        page = answer.content.decode()
        assert "is being processed by" in page
        assert "Successfully" not in page
    assert not LogEntry.objects.exists()
    assert Invoice.objects.count() == 3
    browser.post("/admin/tests/invoice/", form)
    assert not Invoice.objects.exists()


def test_locks_of_many_rows_are_acquired_in_one_order(browser: Client) -> None:
    """Otherwise two users who select the same rows could each acquire a part of the locks."""
    rows = sorted((Invoice.objects.create() for _ in range(3)), key=lambda row: row.fencing.name())
    page = InvoiceAdmin(Invoice, site)
    request = RequestFactory().get("/")
    first, *others = [row.fencing.name() for row in rows]
    with hold_lock(first), pytest.raises(Exception, match="is being processed by"):
        page.delete_queryset(request, Invoice.objects.order_by("-pk"))
    assert not Fence.objects.filter(name__in=others).exists()
    page.delete_queryset(request, Invoice.objects.order_by("-pk"))
    assert Fence.objects.filter(name__in=others).count() == 2


def test_an_unavailable_lock_service(browser: Client, invoice: Invoice) -> None:
    form = {**opened(browser, invoice), "amount": 5, "note": ""}
    redis = {"BACKEND": REDIS, "LOCATION": "redis://127.0.0.1:1", "OPTIONS": {"TIMEOUT": 0.5}}
    with override_settings(FENCEDLOCK={"default": redis}):
        answer = browser.post(url(invoice), form)
    assert answer.status_code == 200
    assert "Nothing was saved" in answer.content.decode()


def test_a_delete_that_is_rejected_is_reported(
    browser: Client, invoice: Invoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(page: Any, request: Any, row: Any) -> None:
        raise StaleFence("A newer holder has written it.")

    monkeypatch.setattr(InvoiceAdmin, "delete_model", delete)
    form = opened(browser, invoice, "delete")
    answer = browser.post(url(invoice, "delete"), form, follow=True)
    assert "Nothing was saved: Another holder has acquired the lock" in answer.content.decode()


def test_what_was_written_before_its_lease_was_lost_is_saved(
    browser: Client, invoice: Invoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(page: Any, request: Any, row: Any) -> None:
        row.delete()
        current_lease().mark_lost("the lock service no longer knows it")

    monkeypatch.setattr(InvoiceAdmin, "delete_model", delete)
    form = opened(browser, invoice, "delete")
    answer = browser.post(url(invoice, "delete"), form, follow=True)
    assert not Invoice.objects.exists()
    assert "Nothing was saved" not in answer.content.decode()
    assert "was deleted successfully" in answer.content.decode()


def test_list_editable_is_reported_by_the_checks() -> None:
    class Editable(FencedModelAdmin):
        list_display = ("pk", "amount")
        list_editable = ("amount",)

    found = Editable(Invoice, admin.AdminSite()).check()
    assert "django_fencedlock.E040" in [each.id for each in found]
    assert InvoiceAdmin(Invoice, site).check() == []
