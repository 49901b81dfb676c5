"""The full text of what users are told about writes, locks of rows and their models."""

from decimal import Decimal

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import F
from django.test.utils import isolate_apps

from django_fencedlock import LockRequired, StaleFence, VersionConflict, lock
from django_fencedlock.exceptions import StaleObject
from django_fencedlock.models import Fence, FencedModel, Fencing
from tests import models as m
from tests.models import Account, Called, Contract, Document, Invoice, LedgerLine, Seat
from tests.threads import elsewhere

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def rows():
    Account.objects.create(pk=1)
    Invoice.objects.create(pk=42)


def invoice():
    return Invoice.objects.get(pk=42)


def update_several():
    Invoice.objects.create(pk=43)
    Invoice.objects.update(amount=1)


def under(name, write, **options):
    with lock(name, **options):
        write()


def in_another_thread(write):
    with Invoice.fencing.lock(42):
        elsewhere(write)


def cascade():
    shelf = m.Shelf.objects.create(pk=1)
    m.Crate.objects.create(pk=7, shelf=shelf)
    shelf.delete()


def with_a_released_lease():
    with Invoice.fencing.lock(42) as lease:
        pass
    invoice().save(lease=lease)


def after_its_block(write):
    block = Invoice.fencing.lock(42)
    block.__enter__()
    with transaction.atomic():
        # The release waits for the end of the transaction.
        block.__exit__(None, None, None)
        write()


def upsert():
    fields = {"update_fields": ["amount"], "unique_fields": ["id"]}
    Invoice.objects.bulk_create([Invoice(pk=77)], update_conflicts=True, **fields)


def move():
    LedgerLine(account_id=F("id")).save()


ACQUIRE = "Acquire it: with Invoice.fencing.lock(pk=42):"
SAVING = "Saving tests.Invoice needs lock 'tests.invoice:42';"
ELSEWHERE = (
    "another thread or task of this process holds it. Acquire it: with Invoice.fencing.lock("
)
BLOCK_ENDED = "it was released before this. Write inside its `with` block."
REQUIRED = {
    lambda: invoice().save(): f"{SAVING} none is held here. {ACQUIRE}",
    lambda: under("other", invoice().save): f"{SAVING} held here: 'other'. {ACQUIRE}",
    lambda: under("tests.invoice:42", invoice().save, fenced=False): (
        f"{SAVING} the lease held here was acquired with fenced=False. {ACQUIRE}"
    ),
    with_a_released_lease: f"{SAVING} the given lease was released. {ACQUIRE}",
    lambda: in_another_thread(invoice().save): (
        f"{SAVING} {ELSEWHERE}pk=42), or pass its lease: save(lease=lease)."
    ),
    lambda: in_another_thread(lambda: Invoice.objects.update(amount=1)): (
        f"Updating{SAVING[6:]} {ELSEWHERE}pk=42), or pass its lease: using_lease(lease)."
    ),
    lambda: after_its_block(invoice().save): f"{SAVING} {BLOCK_ENDED}",
    lambda: after_its_block(Invoice.objects.all().delete): f"Deleting{SAVING[6:]} {BLOCK_ENDED}",
    lambda: after_its_block(lambda: elsewhere(invoice().save)): (
        f"{SAVING} {ELSEWHERE}pk=42), or pass its lease: save(lease=lease)."
    ),
    update_several: (
        "Updating tests.Invoice needs 2 locks, such as 'tests.invoice:42'; none is held here. "
        "Acquire them: with Invoice.fencing.lock_all(queryset):"
    ),
    cascade: (
        "Deleting tests.Crate needs the locks of its rows, such as 'tests.crate:7'; none is held "
        "here. Acquire them: with Crate.fencing.lock_all(queryset):"
    ),
    upsert: (
        "Overwriting tests.Invoice needs lock 'tests.invoice:77'; none is held here. Acquire it: "
        "with Invoice.fencing.lock(pk=77):"
    ),
    lambda: LedgerLine(account_id=1).save(): (
        "Adding tests.LedgerLine needs lock 'account:1'; none is held here. Acquire it: with "
        "LedgerLine.fencing.lock(account_id=1):"
    ),
    move: (
        "Adding tests.LedgerLine needs a lock; it has no name, as account_id is empty or an "
        "expression. Set that to a value first."
    ),
    lambda: Called.objects.create(): (
        "Adding tests.Called needs lock 'called:0'; none is held here. Acquire it: with "
        "row.fencing.lock():"
    ),
}


@pytest.mark.parametrize(("write", "text"), REQUIRED.items())
def test_a_write_without_its_lock(write, text):
    with pytest.raises(LockRequired) as caught:
        write()
    assert str(caught.value) == text
    assert len(text) <= 200


def stale_object():
    old = invoice()
    with Invoice.fencing.lock(42):
        invoice().save()
    with Invoice.fencing.lock(42):
        old.save()


def stale_fence():
    with Invoice.fencing.lock(42):
        Fence.objects.update(token=9, owner="else")
        invoice().save()


def stale_in_bulk():
    old = [invoice(), invoice()]
    for each in old:
        with Invoice.fencing.lock(42):
            Invoice.objects.bulk_update([each], ["amount"])


def deleted():
    with Invoice.fencing.lock(42):
        old = invoice()
        invoice().delete()
        old.save()


def old_version(write):
    old = Document.objects.create(pk=5)
    Document.objects.get().save()
    write(old)


UNDER = "Saving tests.Invoice pk=42 under token 1 of lock 'tests.invoice:42' was rejected: "
AGAIN = ". Load it again, and repeat the change."
VERSIONS = "it was loaded as version 0, and its row has version 1 now"
REJECTED = {
    stale_object: (
        StaleObject,
        UNDER.replace("token 1", "token 2") + "it was read before the lock was acquired, and "
        "written under token 1 since; read it again under the lock.",
    ),
    stale_in_bulk: (
        StaleObject,
        "Updating tests.Invoice pk=42 under token 2 of lock 'tests.invoice:42' was rejected: it "
        "was read before the lock was acquired, and written since; read it again under the lock.",
    ),
    stale_fence: (StaleFence, f"{UNDER}the newest token is 9."),
    deleted: (StaleFence, f"{UNDER}its row was deleted, and isn't inserted again."),
    lambda: old_version(lambda old: old.save()): (
        VersionConflict,
        f"Saving tests.Document pk=5 was rejected: {VERSIONS}{AGAIN}",
    ),
    lambda: old_version(lambda old: old.delete()): (
        VersionConflict,
        f"Deleting tests.Document pk=5 was rejected: {VERSIONS}{AGAIN}",
    ),
    lambda: old_version(lambda old: Document.objects.bulk_update([old], ["text"])): (
        VersionConflict,
        "Writing tests.Document was rejected: one of the rows was written since it was loaded"
        + AGAIN,
    ),
    lambda: old_version(lambda old: m.models.QuerySet(Document).defer("version").get().save()): (
        VersionConflict,
        f"Saving tests.Document pk=5 was rejected: its version wasn't loaded with it{AGAIN}",
    ),
}


@pytest.mark.parametrize(("write", "error", "text"), [(k, *v) for k, v in REJECTED.items()])
def test_a_write_that_is_rejected(write, error, text):
    with pytest.raises(error) as caught:
        write()
    assert str(caught.value) == text
    assert len(text) <= 220


@isolate_apps("tests")
def job():
    class Job(FencedModel):
        fencing = Fencing("job:{backend}")
        backend = m.models.CharField(max_length=9)

        class Meta:
            app_label = "tests"

    return Job


NO_ROW = "names no row: that is not a valid value for"
NONE = "Save the object first, or check that the id isn't None."
NAMED = {
    lambda: Invoice.fencing.lock("abc"): (
        ValueError,
        f"Invoice.fencing.lock(pk='abc') {NO_ROW} id (BigAutoField). Pass the id of the Invoice.",
    ),
    lambda: LedgerLine.fencing.lock(account="abc"): (
        ValueError,
        f"LedgerLine.fencing.lock(account='abc') {NO_ROW} account (BigAutoField). Pass the id of "
        "the Account.",
    ),
    lambda: Invoice.fencing.lock(pk=F("id")): (
        ValueError,
        f"Invoice.fencing.lock(pk=F(id)) {NO_ROW} id (BigAutoField). Pass the id of the Invoice.",
    ),
    **{
        lambda key=key: Invoice.fencing.lock(key): (
            ValueError,
            f"Invoice.fencing.lock(pk={key!r}) {NO_ROW} id (BigAutoField). Pass the id of the "
            "Invoice.",
        )
        for key in (42.9, True, b"42", Decimal("42.9"))
    },
    lambda: Invoice.fencing.lock(None): (
        ValueError,
        f"Argument pk is None, so it names no Invoice. {NONE}",
    ),
    lambda: Seat.fencing.lock(("A", None)): (
        ValueError,
        f"Argument pk is None, so it names no Seat. {NONE}",
    ),
    lambda: LedgerLine.fencing.lock(account=Account()): (
        ValueError,
        "Argument account isn't saved yet, so it names no LedgerLine. Save it first.",
    ),
    lambda: Invoice.fencing.lock(Invoice()): (
        ValueError,
        "This Invoice has no lock yet: id is empty. Save it first.",
    ),
    lambda: Invoice.fencing.lock(Account(pk=1)): (
        TypeError,
        "id has to be a value of BigAutoField, not <Account: >.",
    ),
    lambda: Seat.fencing.lock("A", 1): (
        TypeError,
        "Seat.fencing.lock() takes one primary key, not 2 arguments. If the key has several "
        "columns, write Seat.fencing.lock(('A', 1)).",
    ),
    lambda: Invoice.fencing.lock(1, pk=2): (
        TypeError,
        "Invoice.fencing.lock() was given pk twice.",
    ),
    lambda: Invoice.fencing.lock(pk=1, columns={"pk": 2}): (
        TypeError,
        "Invoice.fencing.lock() was given pk twice.",
    ),
    lambda: LedgerLine.fencing.lock(account=1, account_id=2): (
        TypeError,
        "LedgerLine.fencing.lock() was given account_id twice.",
    ),
    lambda: job().fencing.lock(backend="x"): (
        TypeError,
        "The lock of Job is named by backend; lock() was given nothing. Write "
        'Job.fencing.lock(columns={"backend": ...}).',
    ),
    lambda: Invoice.fencing.lock(columns=["pk"]): (
        TypeError,
        "Invoice.fencing.lock(): columns has to be a dict, not ['pk'].",
    ),
    lambda: Fencing("x:{nothing}").__get__(None, Invoice): (
        ImproperlyConfigured,
        "Fencing('x:{nothing}') of tests.Invoice uses {nothing}, which is not a column of it.",
    ),
}


@pytest.mark.parametrize(("make", "error", "text"), [(k, *v) for k, v in NAMED.items()])
def test_a_lock_that_is_named_wrongly(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == text
    assert len(text) <= 200


def test_a_write_names_the_columns_that_options_hide(rows):
    model = job()
    assert model.fencing.lock(columns={"backend": "x"}, ttl=3).name == "job:x"
    with pytest.raises(LockRequired, match=r'Job\.fencing\.lock\(columns={"backend": \'x\'}\):'):
        model(backend="x").save()
    assert Contract.fencing.lock(columns={"pk": 1}).name == Contract.fencing.lock(1).name
