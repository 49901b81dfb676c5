"""What only some fenced rows, objects or leases meet when they are written."""

import contextlib
import copy
import datetime
import functools
import json
import pickle

import django
import pytest
from django.core import serializers
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import DatabaseError, connections, models, transaction
from django.db.models import F
from django.db.models.functions import Lower
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save
from django.test.utils import CaptureQueriesContext

from django_fencedlock import current_lease, lock
from django_fencedlock.exceptions import LockRequired, StaleFence, StaleObject, VersionConflict
from django_fencedlock.lease_context import leave
from django_fencedlock.models import Fence, Fencing, base
from django_fencedlock.models.queryset import FencedQuerySet
from django_fencedlock.signals import stale_write_rejected
from tests import models as m
from tests.models import Account, Crate, Invoice, LedgerLine, Shift, Stock, Truck, Vehicle
from tests.test_write_paths import (
    Everything,
    awaited,
    database,
    invoice,
    leased,
    load,
    overtake,
    plainly,
    refused,
    rows_of,
    set_,
    statements,
    upsert,
)
from tests.threads import elsewhere

__all__ = ["database", "invoice"]


@contextlib.contextmanager
def held(*names):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(lock(name)) for name in names]


@contextlib.contextmanager
def receiving(receiver, sender, *signals):
    for signal in signals:
        signal.connect(receiver, sender=sender)
    try:
        yield
    finally:
        for signal in signals:
            signal.disconnect(receiver, sender=sender)
        # The guard of collected rows stays connected: other tests count statements without it.
        pre_delete.disconnect(sender=sender, dispatch_uid="django_fencedlock")
        base._watched.discard(sender)


def all_refused(error, tables, *writes, match=None):
    for write in writes:
        with refused(error, *tables, match=match):
            write()


def values_of(model, *columns):
    return [tuple(row[column] for column in columns) for row in rows_of(model)]


# New rows


def test_a_new_object_knows_its_fence(database):
    account = Account.objects.create()
    with LedgerLine.fencing.lock(account=account) as lease:
        line = LedgerLine.objects.create(account=account)
        lines = LedgerLine.objects.bulk_create([LedgerLine(account=account) for _ in range(2)])
        with statements(0):
            assert {each.fence for each in (line, *lines)} == {lease.token}
        line.save()


@pytest.mark.parametrize("is_held", [False, True])
def test_a_copy_of_a_row_is_a_new_row(database, invoice, is_held):
    with lock("tests.invoice:1") if is_held else contextlib.nullcontext():
        twin = Invoice.objects.get(pk=invoice.pk)
        twin.pk = None
        with statements(1):
            twin.save()
        assert (Invoice.objects.get(pk=twin.pk).fence, twin.fence) == (0, 0)
        twin.pk = 1000
        with statements(1):
            twin.save(force_insert=True)
    assert Invoice.objects.count() == 3
    all_refused(LockRequired, (Invoice,), twin.save)


def test_a_copy_of_a_row_of_another_kind(database):
    made = m.Unique.objects.create(amount=1)  # Its key has a default.
    set_(made, pk=None, amount=2).save()
    assert m.Unique.objects.count() == 2
    truck = Truck.objects.create(wheels=6, load=1)
    set_(truck, pk=None, id=None).save()
    assert (Truck.objects.count(), Vehicle.objects.count()) == (2, 2)
    line = leased(LedgerLine, account=Account.objects.create())
    line.pk = None
    all_refused(LockRequired, (LedgerLine,), line.save)
    with line.fencing.lock() as lease:
        line.save()
    assert LedgerLine.objects.get(pk=line.pk).fence == lease.token


def test_a_row_under_its_own_lock_is_always_added(database):
    with statements(4):
        Invoice.objects.create()
        Invoice.objects.bulk_create([Invoice(), Invoice()])
        m.Unique.objects.create()  # A default makes its key.
        m.Seat.objects.bulk_create([m.Seat(row="A", number=1)])


def test_what_is_new_does_not_take_the_place_of_a_row(database, invoice):
    def new():
        return Invoice(pk=invoice.pk, amount=99)

    errors = (DatabaseError, ImproperlyConfigured, LockRequired)
    for write in (
        lambda: new().save(),
        lambda: Invoice.objects.bulk_create([new()]),
        lambda: new().save(force_insert=True),
    ):
        with refused(errors), transaction.atomic(using=database):
            write()
    seat = {"row": "A", "number": 1}
    with invoice.fencing.lock(), m.Seat.fencing.lock(**seat):
        new().save()
        for guest in ("Ada", "Bo"):
            m.Seat(**seat, guest=guest).save()
    assert values_of(Invoice, "amount") == [(99,)]
    assert values_of(m.Seat, "guest") == [("Bo",)]


def test_a_warning_is_logged_when_something_new_takes_the_place_of_a_row(database, caplog):
    row = m.Warned.objects.create()
    assert not caplog.text
    m.Warned(pk=row.pk, amount=99).save()
    assert f"Saving tests.Warned without lock 'tests.warned:{row.pk}'" in caplog.text
    assert values_of(m.Warned, "amount") == [(99,)]


def test_a_stale_holder_does_not_bring_a_deleted_row_back_as_a_new_one(database, invoice):
    with invoice.fencing.lock() as lease:
        overtake(lease)
        for pk in (invoice.pk, invoice.pk + 1):
            models.QuerySet(Invoice).filter(pk=invoice.pk)._raw_delete(database)
            with contextlib.suppress(StaleFence):
                Invoice(pk=pk).save()
        assert values_of(Invoice, "id") == [(invoice.pk + 1,)]


@pytest.mark.parametrize(
    ("model", "template", "values", "name"),
    [
        (m.Seat, "row:{row}", {"row": "A", "number": 1}, "row:A"),
        (m.Ticket, "series:{pk:.1}", {"code": "A1"}, "series:A"),
    ],
)
def test_part_of_a_key_makes_no_lock_of_a_row(database, monkeypatch, model, template, values, name):
    monkeypatch.setattr(model, "fencing", Fencing(template))
    all_refused(LockRequired, (model,), model(**values).save, match=f"'{name}'")
    with lock(name):
        model.objects.bulk_create([model(**values)])


# Rows that conflict


def update_conflicts(model, rows, field, *unique):
    target = {"unique_fields": unique}
    if connections[Fence.objects.db].vendor == "mysql":
        target = {}  # It goes by any unique key.
    model.objects.bulk_create(rows, update_conflicts=True, update_fields=[field], **target)


def upsert_stock(*skus):
    update_conflicts(Stock, [Stock(sku=sku, count=9) for sku in skus], "count", "sku")


def test_conflicting_rows_are_overwritten_only_under_a_known_lock(database, monkeypatch):
    all_refused(LockRequired, (Stock,), lambda: upsert_stock("a"))
    with held("stock:a", "stock:b") as (lease, _):
        if database == "mariadb":
            why = "might overwrite rows of another lock"
            all_refused(ImproperlyConfigured, (Stock,), lambda: upsert_stock("a"), match=why)
        else:
            with statements(2):
                upsert_stock("a", "b")
            upsert_stock("a", "b")
            assert values_of(Stock, "count", "fence") == [(9, 1), (9, 1)]
            overtake(lease)
            all_refused(StaleFence, (Stock,), lambda: upsert_stock("b", "a"))
            all_refused(LockRequired, (Stock,), lambda: upsert_stock("b", "c"))
    monkeypatch.setattr(Stock, "fencing", Invoice.fencing.spec)
    with lock("tests.stock:5"), refused(ImproperlyConfigured, Stock, match="id has to be among"):
        update_conflicts(Stock, [Stock(pk=5, sku="a")], "count", "sku")
    with lock("tests.meter:5"), refused(ImproperlyConfigured, m.Meter, match="mode 'high_water'"):
        update_conflicts(m.Meter, [m.Meter(pk=5, serial="a")], "reading", "id")


@pytest.mark.django_db(transaction=True, databases=["default", "mariadb"])
def test_a_unique_key_over_an_expression_does_not_show_the_lock(settings, monkeypatch):
    """MySQL goes by any unique key, so the row of another lock would be overwritten."""
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "mariadb"}}
    settings.DATABASE_ROUTERS = [Everything("mariadb")]
    row = Invoice.objects.create(pk=7, note="A")
    with Invoice.fencing.lock(pk=7):
        upsert(row)
        assert values_of(Invoice, "amount") == [(99,)]
        key = models.UniqueConstraint(Lower("note"), name="lower_note")
        monkeypatch.setattr(Invoice._meta, "constraints", [*Invoice._meta.constraints, key])
        with refused(ImproperlyConfigured, match="might overwrite rows of another lock"):
            upsert(row)


def test_conflicts_that_need_no_lease(database, invoice):
    # A row may be added with no lease, but its neighbour isn't overwritten on the way.
    all_refused(LockRequired, (Invoice,), lambda: upsert(invoice), match="Overwriting")
    with held("stock:a", "stock:b"):
        Stock.objects.create(sku="a", count=1)
        Stock.objects.bulk_create([Stock(sku=sku) for sku in "ab"], ignore_conflicts=True)
    assert values_of(Stock, "sku", "count") == [("a", 1), ("b", 0)]
    m.Relaxed.objects.create(code="a")
    plainly(m.Relaxed, fence=5)
    update_conflicts(m.Relaxed, [m.Relaxed(code="a", amount=9)], "amount", "code")
    assert values_of(m.Relaxed, "code", "amount", "fence") == [("a", 9, 5)]


@pytest.mark.django_db(transaction=True)
def test_another_session_writes_just_before_the_rows_that_may_conflict(monkeypatch):
    """SQLite lets no transaction write whose first read is older than another session's commit."""
    insert = models.QuerySet.bulk_create

    def insert_later(rows, *args, **kwargs):
        if rows.model is Stock:
            elsewhere(Account.objects.create)
        return insert(rows, *args, **kwargs)

    monkeypatch.setattr(models.QuerySet, "bulk_create", insert_later)
    with lock("stock:a") as lease:
        connections["default"].ensure_connection()  # It reads the mode from the settings.
        monkeypatch.setattr(connections["default"], "transaction_mode", None)
        Stock.objects.bulk_create([Stock(sku="a")], ignore_conflicts=True)
        assert values_of(Stock, "sku", "fence") == [("a", lease.token)]


def load_file(tmp_path, text, database):
    fixture = tmp_path / "invoices.json"
    fixture.write_text(text)
    call_command("loaddata", str(fixture), database=database, verbosity=0)


def test_a_fixture_leaves_the_fence_of_the_row(database, invoice, tmp_path):
    text = serializers.serialize("json", [set_(invoice, amount=99)])
    assert "fence" not in text
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    load_file(tmp_path, text, database)
    assert values_of(Invoice, "amount", "fence") == [(99, 1)]
    for fence in (0, 99):  # Also if it names one.
        fields = {"amount": fence, "fence": fence}
        keys = (invoice.pk, invoice.pk + 1)
        entries = [{"model": "tests.invoice", "pk": pk, "fields": fields} for pk in keys]
        load_file(tmp_path, json.dumps(entries), database)
        assert values_of(Invoice, "amount", "fence") == [(fence, 1), (fence, 0)]


def test_a_fixture_under_a_lease_is_a_write_like_any_other(database, invoice):
    with invoice.fencing.lock() as lease:
        load("tests.invoice", invoice.pk, amount=99)
        assert values_of(Invoice, "amount", "fence") == [(99, 1)]
        overtake(lease)
        all_refused(StaleFence, (Invoice,), lambda: load("tests.invoice", invoice.pk, amount=5))


def test_a_fixture_of_a_child_is_checked_with_its_parents_fence(database):
    """Deserialisers save the child's own table alone."""
    pk = m.Trailer.objects.create(wheels=4).pk
    tables = (Truck, m.Trailer, Vehicle)

    def load_truck(size):
        load("tests.truck", pk, load=size)
        assert Truck.objects.get().load == size
        return rows_of(Vehicle)[0]["fence"]

    assert load_truck(5) == 0
    with Truck.fencing.lock(pk=pk) as lease:
        assert load_truck(6) == lease.token
        load("tests.trailer", pk, axles=6)
        with lock("other"):
            load_truck(7)
        newer = overtake(lease)
        all_refused(
            StaleFence,
            tables,
            lambda: load("tests.truck", pk, load=9),
            lambda: load("tests.trailer", pk, axles=9),
        )
    with Truck.fencing.lock(pk=pk):
        plainly(Vehicle, fence=newer + 5)
        all_refused(StaleFence, tables, lambda: load("tests.truck", pk, load=9))


def test_a_fixture_of_a_child_whose_parent_comes_later(database):
    with lock("tests.vehicle:7") as lease:
        steps = [("tests.truck", {"load": 5}), ("tests.vehicle", {"wheels": 4})]
        if database == "mariadb":  # It checks keys at once.
            steps.reverse()
        with transaction.atomic(using=database):
            for label, fields in steps:
                load(label, 7, **fields)
    assert Truck.objects.get().fence == lease.token


def test_a_fixture_of_a_child_is_under_the_lock_that_its_parents_column_names(database):
    with lock("town:a:0") as lease:
        pk = m.Warehouse.objects.create(town="a").pk
        load("tests.warehouse", pk, goods=5)
        assert values_of(m.Warehouse, "goods", "fence") == [(5, lease.token)]
        overtake(lease)
        all_refused(StaleFence, (m.Warehouse,), lambda: load("tests.warehouse", pk, goods=9))


# Keys and columns of all kinds


def test_a_child_that_fails_half_way_is_as_it_was(database):
    """The write of the parent's row is rolled back, and so is the object's fence."""
    truck = Truck.objects.create()
    with truck.fencing.lock():
        truck.load = "no number"
        all_refused(ValueError, (Truck, Vehicle), truck.save, match="no number")
        assert truck.fence == 0
        set_(truck, load=3).save()
        assert truck.fence == 1


@pytest.mark.parametrize("pk", [2**40, -(2**63)])
def test_a_key_that_no_row_can_have(database, pk):
    row = Invoice(pk=pk)
    row._state.adding = False
    with row.fencing.lock():
        all_refused(StaleFence, (Invoice,), row.save)


def test_after_an_expression_the_fence_is_known(database):
    price = m.Price.objects.create(net=1)
    with price.fencing.lock() as lease:
        set_(price, net=F("net") + 1).save()
        with statements(0):
            assert price.fence == lease.token
        price.refresh_from_db()
        assert (price.net, price.gross) == (2, 4)


def test_what_django_refuses_is_left_to_django(database):
    rows = Invoice.objects
    for write, why in (
        (lambda: rows.all()[:1].update(amount=1), "slice"),
        (lambda: rows.all()[:1].delete(), r"delete\(\)"),
        (lambda: rows.update(fence=1), r"update\(\) can't set 'fence'"),
        (lambda: rows.bulk_update([], ["fence"]), r"bulk_update\(\) can't set 'fence'"),
    ):
        with pytest.raises(TypeError, match=why):
            write()
    rows.create()
    with refused((LockRequired, TypeError)):  # Django 5.2 would write them.
        rows.distinct("note").update(amount=1)
    listens = pre_delete.has_listeners(LedgerLine)
    with pytest.raises(ValueError, match="can't be deleted"):
        LedgerLine().delete()
    assert pre_delete.has_listeners(LedgerLine) is listens


# How old an object is


def test_the_fence_is_loaded_whatever_is_deferred(database, invoice):
    queries = [
        lambda: Invoice.objects.only("amount"),
        lambda: Invoice.objects.defer("fence"),
        lambda: Invoice.objects.defer("note", "fence"),
        lambda: Invoice.objects.defer("fence").defer(None).only("pk", "amount").defer("amount"),
    ]
    truck = Truck.objects.create(wheels=4, load=1)
    old = [rows().get() for rows in queries]
    assert not any("fence" in each.get_deferred_fields() for each in old)
    old_truck = Truck.objects.only("load").get()
    assert old_truck.get_deferred_fields() == {"id", "wheels"}
    with invoice.fencing.lock(), truck.fencing.lock():
        Invoice.objects.update(amount=7)
        Truck.objects.update(load=5)
    with invoice.fencing.lock(), truck.fencing.lock():
        for each in old:
            all_refused(StaleObject, (Invoice,), set_(each, note="x").save)
        all_refused(StaleObject, (Truck, Vehicle), set_(old_truck, load=9).save)
        for rows in queries:
            set_(rows().get(), note="x").save()


def test_deferred_fields_that_are_loaded_later_leave_the_fence(database, invoice):
    old = Invoice.objects.only("note").get()
    again = Invoice.objects.get()
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    with invoice.fencing.lock():
        assert old.amount == 7  # It is loaded now. The rest of the object is older.
        again.refresh_from_db(fields=["amount", "fence"])
        again.refresh_from_db(None, ["amount"], from_queryset=Invoice.objects.all())
        for each in (old, again):
            assert each.fence == 0
            all_refused(StaleObject, (Invoice,), each.save)


def _without_fence():
    return Invoice.objects.raw("SELECT id, account_id, amount, note FROM tests_invoice")[0]


def test_an_object_without_its_fence_is_refused(database, settings, invoice):
    """It may be older than what was written since."""
    why = "its fence wasn't loaded with it"
    with invoice.fencing.lock() as lease:
        for write in (
            lambda row: row.save(),
            lambda row: row.save(update_fields=["amount"]),
            lambda row: pickle.loads(pickle.dumps(row)).save(),
            lambda row: Invoice.objects.bulk_update([row], ["amount"]),
            lambda row: row.delete(),
        ):
            row = _without_fence()
            with refused(StaleObject, match=why):
                write(row)
            assert row.fence in (0, 1)  # It is loaded now, and the rest of the object before.
            row.refresh_from_db(fields=["amount"])
            with refused(StaleObject, match=why):
                write(row)
            row.refresh_from_db()
            write(row)
            assert values_of(Invoice, "fence") in ([(lease.token,)], [])
    settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
    Invoice.objects.create()
    set_(_without_fence(), amount=9).save()
    assert values_of(Invoice, "amount") == [(9,)]


def _locked(pk):
    with transaction.atomic(using=Fence.objects.db):
        return Invoice.objects.select_for_update().get(pk=pk)


READS = {
    "get": lambda pk: Invoice.objects.get(pk=pk),
    "only": lambda pk: Invoice.objects.only("amount").get(pk=pk),
    "list": lambda pk: next(iter(Invoice.objects.filter(pk=pk))),
    "base": lambda pk: Invoice._base_manager.get(pk=pk),
    "locked": _locked,
    "aget": lambda pk: awaited(Invoice.objects.aget, pk=pk),
    "related": lambda pk: Account.objects.get().invoice_set.get(),
    "prefetched": lambda pk: (
        Account.objects.prefetch_related("invoice_set").get().invoice_set.all()[0]
    ),
    "joined": lambda pk: m.Docket.objects.select_related("invoice").get().invoice,
    "followed": lambda pk: m.Docket.objects.get().invoice,
    "pickled": lambda pk: pickle.loads(pickle.dumps(Invoice.objects.get(pk=pk))),
    "copied": lambda pk: copy.deepcopy(Invoice.objects.get(pk=pk)),
    "fallen_back": lambda pk: Invoice.objects.get_or_create(pk=pk)[0],
}


def test_objects_that_were_read_under_one_lease_may_all_be_saved(database, invoice):
    leased(m.Docket, invoice=invoice)
    for how, read in READS.items():
        with invoice.fencing.lock() as lease:
            twin = read(invoice.pk)
            Invoice.objects.update(note=how)
            set_(twin, amount=2).save(update_fields=["amount"])
            assert (twin.fence, rows_of(Invoice)[0]["note"]) == (lease.token, how)
        # Not under the next lease: others may have written in between.
        with invoice.fencing.lock():
            old = read(invoice.pk)
        with invoice.fencing.lock():
            Invoice.objects.update(note="again")
            all_refused(StaleObject, (Invoice,), old.save)


@pytest.mark.parametrize(("model", "is_noticed"), [(Invoice, False), (m.Contract, True)])
def test_what_one_holder_writes_twice_is_noticed_by_a_version(database, model, is_noticed):
    """The fence is the same: the object was read between two writes under one token."""
    row = model.objects.create()
    with row.fencing.lock():
        model.objects.get(pk=row.pk).save()
        old = model.objects.get(pk=row.pk)
        model.objects.get(pk=row.pk).save()
    with row.fencing.lock(), refused(VersionConflict, model) if is_noticed else statements(1):
        old.save()


def test_an_object_that_was_refreshed_under_the_lease_may_be_saved(database, invoice):
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    with invoice.fencing.lock():
        without = _without_fence()
        without.refresh_from_db(from_queryset=Invoice.objects.all())
        awaited(invoice.arefresh_from_db)
        Invoice.objects.update(note="written")
        set_(invoice, note="one").save()
        without.delete()
    assert not rows_of(Invoice)


def test_rows_of_an_iterator_may_be_older_than_the_lease(database, invoice):
    """Its query was sent before the lock was acquired, though the row is fetched under it."""
    if database == "default":
        pytest.skip("SQLite writes nothing while the rows are fetched")
    later = Invoice.objects.create(amount=1)
    with contextlib.closing(Invoice.objects.order_by("pk").iterator(chunk_size=1)) as rows:
        assert next(rows).pk == invoice.pk
        plainly(Invoice, amount=7)
        with later.fencing.lock():
            Invoice.objects.filter(pk=later.pk).update(note="written")
            all_refused(StaleObject, (Invoice,), set_(next(rows), amount=2).save)


@pytest.mark.parametrize(
    "read",
    [
        lambda: next(Invoice.objects.iterator()),
        lambda: Invoice.objects.raw("SELECT * FROM tests_invoice")[0],
    ],
    ids=["iterator", "raw"],
)
def test_an_object_of_unknown_age_may_be_saved_over_an_unchanged_row(database, invoice, read):
    with invoice.fencing.lock():
        set_(read(), amount=2).save()
        old = read()
        old.save()
        Invoice.objects.update(note="written")
        set_(old, amount=3).save()  # The fence is that of this lease.


def test_an_object_may_be_saved_again_under_a_later_lease(database, invoice):
    other = Invoice.objects.create()
    for amount in range(3):
        with invoice.fencing.lock(), other.fencing.lock():
            set_(invoice, amount=amount).save()
            set_(invoice, note="again").save()
            assert Invoice.objects.bulk_update([invoice, other], ["note"], batch_size=1) == 2
            set_(invoice, note="once more").save()
            other.save()
    assert values_of(Invoice, "fence") == [(3,), (3,)]


def test_bulk_update_compares_the_fence_of_each_object(database):
    rows = [Invoice.objects.create() for _ in range(3)]
    for times, row in enumerate(rows):
        for _ in range(times):
            with row.fencing.lock():
                Invoice.objects.get(pk=row.pk).save()
    rows, twins = (list(Invoice.objects.order_by("pk")) for _ in range(2))
    assert [row.fence for row in rows] == [0, 1, 2]
    with held(*[row.fencing.name() for row in rows]):
        with statements(1):
            Invoice.objects.bulk_update([set_(row, amount=5) for row in rows], ["amount"])
        with refused(StaleObject, match="read before the lock was acquired, and written since"):
            Invoice.objects.bulk_update([set_(row, amount=6) for row in twins], ["amount"])
        Invoice.objects.bulk_update(
            [rows[0], Invoice(pk=rows[1].pk, amount=7), rows[2]], ["amount"], batch_size=2
        )
    assert values_of(Invoice, "amount") == [(5,), (7,), (5,)]
    # Of rows of one lock, each with its own fence.
    account = Account.objects.create()
    first, second = (leased(LedgerLine, account=account) for _ in range(2))
    with first.fencing.lock():
        LedgerLine.objects.update(amount=7)
    second.refresh_from_db()
    with first.fencing.lock(), refused(StaleObject, LedgerLine, match=f"pk={first.pk}"):
        LedgerLine.objects.bulk_update([first, second], ["amount"])


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_what_was_read_from_a_database_that_lags_behind_was_not_read_under_the_lease():
    row = Invoice.objects.create(amount=1)
    models.QuerySet(Invoice, using="postgres").create(pk=row.pk, amount=1)
    with row.fencing.lock():
        Invoice.objects.update(amount=7)
    with row.fencing.lock():
        lagging = Invoice.objects.using("postgres").get()
        for _ in range(2):
            with refused(StaleObject):
                lagging.save(using="default")
            Invoice.objects.update(note="written")


def test_the_object_changes_only_when_the_row_has(database, invoice):
    with invoice.fencing.lock():
        invoice.save()
        assert invoice.fence == 1
    with invoice.fencing.lock() as lease:
        overtake(lease)
        for write in (
            invoice.save,
            invoice.delete,
            lambda: Invoice.objects.bulk_update([set_(invoice, amount=3)], ["amount"]),
        ):
            with refused():
                write()
            assert invoice.fence == 1
    with lock("tests.invoice:77") as lease:
        overtake(lease)
        new = Invoice(pk=77, amount=1)
        all_refused(StaleFence, (Invoice,), lambda: Invoice.objects.bulk_create([new]))
        assert new.fence == 0


def test_a_rejection_is_logged_and_sent(database, invoice, caplog):
    heard = []

    def hear(signal, **facts):
        heard.append(facts)

    with receiving(hear, None, stale_write_rejected), invoice.fencing.lock() as lease:
        plainly(Invoice, fence=overtake(lease))
        with pytest.raises(StaleFence) as caught:
            invoice.save()
    error = caught.value
    assert (error.name, error.token, error.owner_id) == (lease.name, 1, lease.owner_id)
    ((facts),) = heard
    told = {"sender": Invoice, "pk": invoice.pk, "name": lease.name, "token": 1, "reason": "stale"}
    assert facts.items() >= told.items()
    assert f"model=tests.Invoice pk={invoice.pk} lock='{lease.name}'" in caplog.text


@pytest.mark.parametrize("model", [Account, Invoice, m.Document])
def test_positional_arguments_of_save_end_as_without_the_mixin(database, model):
    """Django 5.2 warns of them at the line that passes them; later versions don't take them."""
    row = model()
    if django.VERSION >= (6, 0):
        for save in (row.save, functools.partial(awaited, row.asave)):
            with pytest.raises(TypeError, match=r"save\(\) takes 1 positional argument but 2 were"):
                save(True)
        return
    with pytest.warns(DeprecationWarning, match=r"to save\(\) is deprecated") as seen:
        row.save(True, False, database)
    assert [each.filename for each in seen] == [__file__]
    assert row.pk

    async def asave():
        await model().asave(True, using=database)

    with pytest.warns(DeprecationWarning, match=r"to asave\(\) is deprecated") as seen:
        awaited(asave)
    assert [each.filename for each in seen] == [__file__]
    with pytest.raises(TypeError), pytest.warns(DeprecationWarning, match="deprecated"):
        model().save(True, force_insert=True)


def test_a_rejection_that_is_swallowed_rolls_the_transaction_back(database, invoice):
    account = Account.objects.get()
    with invoice.fencing.lock() as lease:
        overtake(lease)
        with (
            refused(transaction.TransactionManagementError, Account, Invoice),
            transaction.atomic(using=database),
        ):
            set_(account, name="changed").save()
            with contextlib.suppress(StaleFence):
                invoice.save()
            account.save()


@pytest.mark.parametrize("write", ["save", "delete"])
def test_a_row_of_a_higher_fence_is_refused(database, invoice, write):
    """Of its grant the database knows nothing, or nothing any more."""
    plainly(Invoice, fence=1000)
    invoice.refresh_from_db()
    with invoice.fencing.lock():
        all_refused(StaleFence, (Invoice,), getattr(invoice, write), match="token 1000 already")


def _in_one_transaction(lease, line):
    with lease.atomic():
        pytest.fail("the block was entered")


WRITES = {
    "save": lambda lease, line: line.save(),
    "delete": lambda lease, line: line.delete(),
    "update": lambda lease, line: LedgerLine.objects.update(amount=7),
    "insert": lambda lease, line: LedgerLine(account=line.account).save(),
    "atomic": _in_one_transaction,
}


@pytest.mark.parametrize("other", [{"owner": "f" * 32}, {"token": 9}], ids=["owner", "token"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_needs_the_fences_token_and_its_owner(database, write, other):
    """A crash or a restored backup may have a token handed out again, to another owner."""
    line = leased(LedgerLine, account=Account.objects.create(), amount=1)
    with line.fencing.lock() as lease:
        Fence.objects.filter(name=lease.name).update(**other)
        with refused(StaleFence, LedgerLine):
            write(lease, line)


# Rows of several locks


def _lines():
    accounts = [Account.objects.create() for _ in range(2)]
    names = [f"account:{each.pk}" for each in accounts]
    return *accounts, *names, [leased(LedgerLine, account=each) for each in accounts]


def _writes_of_lines(first, second, lines):
    return (
        lambda: LedgerLine.objects.update(amount=9),
        lambda: LedgerLine.objects.bulk_update(
            [set_(each, amount=9) for each in lines], ["amount"]
        ),
        lambda: LedgerLine.objects.bulk_create([LedgerLine(account=a) for a in (first, second)]),
        lambda: LedgerLine.objects.all().delete(),
    )


def test_rows_of_several_locks_need_every_lease(database):
    first, second, name, other, lines = _lines()
    with held(name, other) as (_, lease):
        update, *others = _writes_of_lines(first, second, lines)
        for count, write in zip((1, 1, 2, 3), (*others[:2], update, others[2]), strict=True):
            with statements(count):
                write()
    lines = [leased(LedgerLine, account=each) for each in (first, second, second)]
    writes = _writes_of_lines(first, second, lines)
    with held(name, other) as (_, lease):
        overtake(lease)
        all_refused(StaleFence, (LedgerLine,), *writes, match=f"'{other}'")
    with lock(name), CaptureQueriesContext(connections[database]) as captured:
        all_refused(LockRequired, (LedgerLine,), *writes, match=f"'{other}'")
    sent = [query["sql"] for query in captured]
    assert not [sql for sql in sent if sql.startswith(("UPDATE", "INSERT", "DELETE"))]


def add_while_names_are_read(monkeypatch, **values):
    read_names = FencedQuerySet._rows

    def read_and_add(rows):
        found = read_names(rows)
        models.QuerySet(LedgerLine).bulk_create([LedgerLine(**values)])
        return found

    monkeypatch.setattr(FencedQuerySet, "_rows", read_and_add)


def test_rows_that_come_while_names_are_read_are_not_written(database, monkeypatch):
    """Their leases weren't asked for."""
    account, other = Account.objects.create(), Account.objects.create()
    leased(LedgerLine, account=account)
    with LedgerLine.fencing.lock(account=account):
        add_while_names_are_read(monkeypatch, account=other)
        with pytest.raises(StaleFence):
            LedgerLine.objects.update(amount=9)
        assert {row["amount"] for row in rows_of(LedgerLine)} == {0}
    models.QuerySet(LedgerLine)._raw_delete(database)
    with pytest.raises(LockRequired, match="came meanwhile"):
        LedgerLine.objects.update(amount=9)  # There was no name to read.
    assert values_of(LedgerLine, "amount") == [(0,)]


def test_rows_of_other_locks_that_come_before_the_delete_are_left(database, monkeypatch):
    account, other = Account.objects.create(), Account.objects.create()
    leased(LedgerLine, account=account, amount=5)
    add_while_names_are_read(monkeypatch, account=other, amount=5)
    with LedgerLine.fencing.lock(account=account):
        assert LedgerLine.objects.filter(amount=5).delete()[0] == 1
    assert values_of(LedgerLine, "account_id") == [(other.pk,)]
    plainly(LedgerLine, amount=0)
    assert LedgerLine.objects.filter(amount=5).delete()[0] == 0  # There was no name to read.
    assert values_of(LedgerLine, "amount") == [(0,), (5,)]


def test_rows_that_match_only_once_others_are_deleted_are_left(database):
    account = Account.objects.create()
    for amount in (1, 2):
        leased(LedgerLine, account=account, amount=amount)
    newest = models.Subquery(LedgerLine.objects.order_by("-amount").values("pk")[:1])
    with LedgerLine.fencing.lock(account=account) as lease:
        assert LedgerLine.objects.filter(pk=newest).delete()[0] == 1
        assert values_of(LedgerLine, "amount") == [(1,)]
        overtake(lease)
        all_refused(StaleFence, (LedgerLine,), LedgerLine.objects.filter(pk=newest).delete)


def test_a_delete_asks_for_the_leases_before_anything_else(database):
    crates, told = [Crate.objects.create() for _ in range(2)], []
    with (
        receiving(lambda instance, **_: told.append(instance), Crate, pre_delete),
        crates[0].fencing.lock(),
        transaction.atomic(using=database),
    ):
        with pytest.raises(LockRequired):
            Crate.objects.order_by("pk").delete()
        assert not told
        assert Crate.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_another_session_writes_while_the_names_of_rows_to_delete_are_read(monkeypatch):
    """SQLite lets no transaction write whose first read is older than another session's commit."""
    account, read_names = Account.objects.create(), FencedQuerySet._rows

    def read_and_write(rows):
        found = read_names(rows)
        elsewhere(Account.objects.create)
        return found

    leased(LedgerLine, account=account)
    with LedgerLine.fencing.lock(account=account):
        monkeypatch.setattr(FencedQuerySet, "_rows", read_and_write)
        connections["default"].ensure_connection()  # It reads the mode from the settings.
        monkeypatch.setattr(connections["default"], "transaction_mode", None)
        assert LedgerLine.objects.all().delete()[0] == 1


def test_moving_rows_to_another_lock_needs_both_leases(database):
    first, second = Account.objects.create(), Account.objects.create()
    for _ in range(3):
        LedgerLine.fencing.lock(account=first).acquire().release()
    names = [f"account:{each.pk}" for each in (first, second)]

    def move():
        LedgerLine.objects.update(account=second)

    with lock(names[0]) as theirs:
        line = LedgerLine.objects.create(account=first)
        why = f"'{names[1]}'; held here: "
        all_refused(LockRequired, (LedgerLine,), move, match=why)
        with lock(names[1]) as ours:
            with refused(StaleFence, LedgerLine, match="update.. it under the leases of both"):
                set_(line, account=second).save()
            for values in ({"account": second, "amount": 5}, {"account_id": second.pk}):
                LedgerLine.objects.update(**values)
                assert values_of(LedgerLine, "account_id", "amount", "fence") == [
                    (second.pk, 5, ours.token)
                ]
                assert ours.token < theirs.token
                LedgerLine.objects.get().save()
            LedgerLine.objects.update(account=first)
            second.ledgerline_set.add(LedgerLine.objects.get())
            LedgerLine.objects.update(account=first)
            overtake(ours)
            all_refused(StaleFence, (LedgerLine,), move)
        with refused(LockRequired, LedgerLine, match="account_id is empty"):
            LedgerLine.objects.update(account_id=F("account_id"))
    with lock(names[1]):
        all_refused(LockRequired, (LedgerLine,), move)
        with lock(names[0]) as theirs:
            overtake(theirs)
            all_refused(StaleFence, (LedgerLine,), move)


def test_a_row_that_was_moved_is_not_written_under_its_former_lock(database):
    first, second = Account.objects.create(), Account.objects.create()
    with held(f"account:{first.pk}", f"account:{second.pk}") as (former, present):
        # The fence can't tell: tokens of different names may be the same.
        assert former.token == present.token
        LedgerLine.objects.create(account=first)
        line = LedgerLine.objects.get()
        LedgerLine.objects.update(account=second)
        writes = (set_(line, amount=9).save, line.delete)
        all_refused(StaleFence, (LedgerLine,), *writes, match="belongs to another lock")


def test_rows_whose_lock_a_callable_names(database):
    with held("called:1", "called:0") as (odd, _):
        for amount in range(4):
            m.Called.objects.create(amount=amount)
        m.Called.objects.update(amount=F("amount") + 2)
        overtake(odd)
        all_refused(StaleFence, (m.Called,), lambda: m.Called.objects.update(amount=9))
        m.Called.objects.filter(amount__in=[2, 4]).update(amount=8)
    with lock("called:1"):
        all_refused(
            LockRequired,
            (m.Called,),
            lambda: m.Called.objects.update(amount=9),
            lambda: m.Called.objects.all().delete(),
            match="'called:0'",
        )
        assert m.Called.objects.filter(amount=3).delete()[0] == 1


def _at(day, hour=0):
    return datetime.datetime(2024, 5, day, hour, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("model", "mine", "others", "other"),
    [
        (m.Called, {"amount": 1}, {"amount": 2}, "note"),
        (Shift, {"at": _at(1)}, {"at": _at(2)}, "note"),
        (m.Warehouse, {"town": "a"}, {"town": "b"}, "goods"),
        (LedgerLine, {"account_id": 1}, {"account_id": 2}, "amount"),
    ],
    ids=["callable", "format", "column of a parent", "column"],
)
def test_a_row_is_not_written_under_the_lock_its_object_names(database, model, mine, others, other):
    Account.objects.bulk_create([Account(pk=1), Account(pk=2)])
    pk = leased(model, **mine).pk

    def loaded():
        return set_(model.objects.get(), **others)

    def by_hand():
        return model(pk=pk, **others)

    writes = [
        lambda: loaded().save(),
        lambda: loaded().save_base(raw=True),
        lambda: loaded().save(update_fields=[*others]),
        lambda: loaded().save(update_fields=[other]),
        lambda: loaded().save(force_update=True),
        lambda: pickle.loads(pickle.dumps(loaded())).save(),
        lambda: model.objects.bulk_update([loaded()], [*others, other]),
        lambda: model.objects.bulk_update([loaded()], [other]),
        lambda: loaded().delete(),
        lambda: by_hand().save(update_fields=[*others]),
        lambda: by_hand().save(force_update=True),
        lambda: model.objects.bulk_update([by_hand()], [other]),
    ]
    if not model._meta.parents:  # Django deletes no child without its parent's key.
        writes.append(lambda: by_hand().delete())
    if model is m.Called:  # For the others it is an INSERT, of a key that is there.
        writes.append(lambda: by_hand().save())
    old, new = (model(**values).fencing.name() for values in (mine, others))
    for names in ((new,), (new, old)):
        with held(*names):
            all_refused((StaleFence, LockRequired), [model, *model._meta.all_parents], *writes)


def test_rows_of_one_lock_with_several_values_in_its_columns(database):
    with lock("day:2024-05-01") as lease:
        shifts = [Shift.objects.create(at=_at(1, hour)) for hour in (0, 3)]
        assert Shift.objects.bulk_update([set_(each, note="x") for each in shifts], ["note"]) == 2
        set_(shifts[0], at=_at(1, 5)).save()
        Shift.objects.bulk_update([set_(each, at=_at(1, 6)) for each in shifts], ["at"])
        assert Shift.objects.update(note="y") == 2
        Shift.objects.update(at=_at(1, 7))
        assert values_of(Shift, "at", "fence") == [(_at(1, 7), lease.token)] * 2
        with refused(LockRequired, Shift, match="day:2024-05-02"):
            Shift.objects.update(at=_at(2))
        with lock("day:2024-05-02") as other:
            Shift.objects.filter(pk=shifts[0].pk).update(at=_at(2))
            assert values_of(Shift, "fence") == [(other.token,), (lease.token,)]
            Shift.objects.all().delete()


def test_bulk_update_may_set_a_column_of_the_name_to_what_it_is(database):
    line = leased(LedgerLine, account=Account.objects.create())
    with line.fencing.lock():
        LedgerLine.objects.bulk_update([set_(line, amount=5)], ["account", "amount"])
        for value in (F("account") + 1, None):
            line = set_(LedgerLine.objects.get(), account_id=value)
            with refused(LockRequired, LedgerLine):
                LedgerLine.objects.bulk_update([line], ["account"])
    assert values_of(LedgerLine, "amount") == [(5,)]


def test_rows_whose_lock_is_named_by_a_parents_column_are_moved_under_both_leases(database):
    rows, tables = m.Warehouse.objects, (m.Warehouse, m.Depot)
    leased(m.Warehouse, town="a")
    with lock("town:a:0"):
        all_refused(LockRequired, tables, lambda: rows.update(town="b", floor=1))
        # The new name doesn't tell which floor.
        all_refused(LockRequired, tables, lambda: rows.update(town="b"))
        rows.update(town="a", floor=0, goods=5)
        with lock("town:b:1"):
            rows.update(town="b", floor=1)
    with lock("town:b:1"):
        set_(rows.get(), goods=7).save()


# Cascades


@pytest.mark.parametrize(
    "delete",
    [lambda shelf: shelf.delete(), lambda shelf: m.Shelf.objects.all().delete()],
    ids=["object", "queryset"],
)
def test_what_a_plain_row_takes_along_is_guarded(database, monkeypatch, delete):
    """Collected rows (crate), updated ones (label) and generic ones (remark)."""
    shelf = m.Shelf.objects.create()
    crate = Crate.objects.create(shelf=shelf)
    m.Bottle.objects.create(crate=crate)
    leased(m.Label, shelf=shelf)
    remark = m.Remark.objects.create(about=shelf)
    tables = (m.Shelf, Crate, m.Bottle, m.Label, m.Remark)
    names = [f"shelf:{shelf.pk}", f"tests.crate:{crate.pk}", f"tests.remark:{remark.pk}"]
    for missing in names:
        with held(*{*names} - {missing}):
            all_refused(LockRequired, tables, lambda: delete(shelf), match=missing)
    # A label without a shelf has no lock, so it is written only where that is allowed.
    monkeypatch.setattr(m.Label.fencing.spec, "_without_lock", "allow")
    for number in range(3):
        with held(*names) as leases:
            overtake(leases[number])
            all_refused(StaleFence, tables, lambda: delete(shelf))
    with held(*names):
        delete(shelf)
    assert not any(map(rows_of, (m.Shelf, Crate, m.Bottle, m.Remark)))
    assert values_of(m.Label, "shelf_id", "fence") == [(None, 0)]


def test_another_row_of_its_model_that_a_delete_collects_is_guarded(database):
    outer = m.Box.objects.create()
    inner = m.Box.objects.create(inside=outer)
    with outer.fencing.lock():
        why = f"'tests.box:{inner.pk}'"
        all_refused(LockRequired, (m.Box,), outer.delete, match=why)
        with inner.fencing.lock() as lease:
            overtake(lease)
            all_refused(StaleFence, (m.Box,), outer.delete)
        with inner.fencing.lock():
            outer.delete()
    assert not rows_of(m.Box)


def test_the_guard_of_collected_rows_costs_one_statement_each(database):
    crates = [Crate.objects.create() for _ in range(3)]
    # Names, rows; a guard each; bottles, crates.
    with held(*[crate.fencing.name() for crate in crates]), statements(2 + 3 * 1 + 2):
        Crate.objects.all().delete()
    crate = Crate.objects.create()
    with crate.fencing.lock() as lease:
        plainly(Crate, fence=lease.token + 1)
        with refused(StaleFence, Crate), lease.atomic():
            Crate.objects.all().delete()


@pytest.mark.parametrize("signal", [pre_delete, post_delete])
def test_a_listener_that_comes_later_lets_no_row_escape(database, signal):
    """Django collects the rows of a model that has listeners, where it didn't before."""

    def hear(instance, **kwargs):
        pass

    account = Account.objects.create()
    leased(LedgerLine, account=account)
    deletes = (account.delete, lambda: LedgerLine.objects.all().delete())
    with receiving(hear, LedgerLine, signal):
        with LedgerLine.fencing.lock(account=account) as lease:
            overtake(lease)
            all_refused(StaleFence, (LedgerLine, Account), *deletes)
        all_refused(LockRequired, (LedgerLine, Account), *deletes)
    with LedgerLine.fencing.lock(account=account):
        assert account.delete()[1] == {"tests.LedgerLine": 1, "tests.Account": 1}


# Leases that are given


@pytest.fixture
def given(invoice):
    lease = invoice.fencing.lock().acquire()
    leave(lease)
    yield lease
    lease.release()


def _given_writes(row, lease):
    rows = Invoice.objects.using_lease(lease)
    return {
        "save": lambda: row.save(lease=lease),
        "asave": lambda: awaited(row.asave, lease=lease),
        "update": lambda: rows.update(amount=9),
        "bulk_update": lambda: rows.bulk_update([row], ["note"]),
        "update_or_create": lambda: rows.update_or_create(pk=row.pk, defaults={"amount": 9}),
        "create": lambda: rows.create(pk=row.pk and row.pk + 1, amount=9),
        "delete": lambda: row.delete(lease=lease),
        "queryset": lambda: rows.all().delete(),
    }


def test_a_lease_can_be_given(database, invoice, given):
    def work():
        assert current_lease() is None
        all_refused(LockRequired, (Invoice,), invoice.save)
        pk = invoice.pk
        writes = _given_writes(invoice, given)
        for how in ("save", "asave", "update", "bulk_update", "update_or_create", "delete"):
            writes[how]()
        rows = Invoice.objects.using_lease(given)
        rows.create(pk=pk, amount=7)
        writes["queryset"]()
        rows.get_or_create(pk=pk)
        return values_of(Invoice, "fence")

    assert elsewhere(work) == [(1,)]


def test_a_given_lease_is_the_one_that_counts(database, invoice):
    with lock("other") as wrong, invoice.fencing.lock() as lease:
        writes = _given_writes(invoice, wrong).values()
        why = "the given lease is of lock 'other'"
        all_refused(LockRequired, (Invoice,), *writes, match=why)
        invoice.save()
    for write in ("save", "update"):
        with refused(LockRequired, match="the given lease was released"):
            _given_writes(invoice, lease)[write]()


@pytest.mark.parametrize("how", ["save", "asave", "update_or_create", "delete"])
def test_a_given_lease_stays_out_of_the_object(database, invoice, given, how):
    """Receivers put objects into caches, and copies would keep the lease for good."""
    copies = []

    def copy_it(instance, **kwargs):
        copies.extend([copy.copy(instance), copy.deepcopy(instance)])
        copies.append(pickle.loads(pickle.dumps(instance)))

    with receiving(copy_it, Invoice, pre_save, post_save, pre_delete, post_delete):
        _given_writes(invoice, given)[how]()
    assert len(copies) == 6
    for each in (*copies, invoice):
        if each.pk is not None:
            with pytest.raises(LockRequired, match="pass its lease"):
                each.save()


def test_a_given_lease_is_for_its_own_object_alone(database, invoice, given):
    def again(instance, **kwargs):
        if instance is invoice and invoice.note != "again":
            set_(instance, note="again").save(update_fields=["note"])
        if not Invoice.objects.filter(note="another").exists():
            Invoice(note="another").save()

    with receiving(again, Invoice, post_save):
        invoice.save(lease=given)
    assert sorted(values_of(Invoice, "fence", "note")) == [(0, "another"), (1, "again")]

    def add_another(instance, **kwargs):
        if Invoice.objects.count() < 3:
            Invoice(note="third").save()

    rows = Invoice.objects.using_lease(given)
    with receiving(add_another, Invoice, post_save):
        rows.update_or_create(pk=invoice.pk, defaults={"amount": 9})
    assert {row["fence"] for row in rows_of(Invoice) if row["note"] == "third"} == {0}


# The weaker mode


def test_high_water_refuses_only_what_a_newer_holder_has_written_to(database):
    meter = m.Meter.objects.create(serial="a")
    with meter.fencing.lock() as lease:
        newer = overtake(lease)
        # The newer holder has read the row by now, and its update of it gets lost.
        set_(meter, reading=2).save()
        m.Meter.objects.update(reading=3)
        m.Meter.objects.bulk_update([set_(meter, reading=4)], ["reading"])
        m.Meter.objects.create(serial="b")
        plainly(m.Meter, fence=newer, reading=7)
        all_refused(StaleFence, (m.Meter,), set_(meter, reading=9).save, meter.delete)
    with meter.fencing.lock(), refused(StaleObject, m.Meter, match="read before the lock"):
        set_(meter, reading=9).save()


# Statements that Postgres prepares


@pytest.fixture
def prepared(settings, monkeypatch):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
    settings.DATABASE_ROUTERS = [Everything("postgres")]
    connection = connections["postgres"]
    options = {"server_side_binding": True, "prepare_threshold": 2}
    with monkeypatch.context() as changed:
        changed.setitem(connection.settings_dict, "OPTIONS", options)
        _reconnect(connection)
        yield connection
    _reconnect(connection)


def _reconnect(connection):
    connection.close()
    # Django reads the OPTIONS once.
    connection.features.__dict__.pop("uses_server_side_binding", None)


@pytest.mark.django_db(transaction=True, databases=["postgres"])
def test_the_statement_of_a_save_is_prepared_where_it_may_be(prepared):
    row = Invoice.objects.create()
    with row.fencing.lock() as lease:
        for amount in range(12):
            with statements(1):
                set_(row, amount=amount).save()
        with transaction.atomic(using="postgres"):
            set_(row, amount=20).save()
        with prepared.cursor() as cursor:
            cursor.execute("SELECT statement FROM pg_prepared_statements")
            (kept,) = (statement for (statement,) in cursor.fetchall() if "UPDATE" in statement)
        assert "FOR SHARE" in kept
        overtake(lease)
        all_refused(StaleFence, (Invoice,), set_(row, amount=21).save)
