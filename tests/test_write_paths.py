"""Every way the ORM writes a fenced row: under a lease, under an old one, and under none."""

import contextlib
import copy
import datetime
import json
import logging
import pickle
import threading
from collections.abc import Iterator

import pytest
from asgiref.sync import async_to_sync
from django.contrib import admin
from django.contrib.auth.models import User
from django.core import serializers
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, connections, models, transaction
from django.db.models import F
from django.db.models.functions import Lower
from django.db.models.lookups import Exact
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save
from django.test.utils import CaptureQueriesContext, register_lookup
from django.urls import path

from django_fencedlock import current_lease, lock
from django_fencedlock.exceptions import (
    LockRequired,
    SettingsError,
    StaleFence,
    StaleObject,
    VersionConflict,
    WrongDatabase,
)
from django_fencedlock.models import Fence
from django_fencedlock.signals import stale_write_rejected
from tests.models import (
    Account,
    Bottle,
    Box,
    Called,
    Careful,
    Contract,
    Crate,
    Depot,
    Docket,
    Filtered,
    Invoice,
    Label,
    LedgerLine,
    Meter,
    Price,
    Relaxed,
    Remark,
    Seat,
    Shelf,
    Shift,
    Stock,
    Ticket,
    Trailer,
    Truck,
    Unique,
    Van,
    Vehicle,
    Verse,
    Warehouse,
    Warned,
)

site = admin.AdminSite()


@admin.register(Invoice, site=site)
class InvoiceAdmin(admin.ModelAdmin):
    list_display = ("pk", "amount")
    list_editable = ("amount",)


urlpatterns = [path("admin/", site.urls)]


def awaited(function, *args, **kwargs):
    async def run():
        return await function(*args, **kwargs)

    return async_to_sync(run)()


class Everything:
    """Routes all models to one database."""

    def __init__(self, alias):
        self.alias = alias

    def db_for_read(self, model, **hints):
        return self.alias

    db_for_write = db_for_read


def on(alias, *marks):
    marks = [pytest.mark.django_db(transaction=True, databases=[alias]), *marks]
    return pytest.param(alias, marks=marks, id=alias)


@pytest.fixture(params=[on("default"), on("postgres", pytest.mark.slow), on("mariadb")])
def database(request, settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": request.param}}
    settings.DATABASE_ROUTERS = [Everything(request.param)]
    return request.param


@contextlib.contextmanager
def statements(count):
    """Fail unless the block sends so many statements; those of the transaction don't count."""
    (alias,) = {router.alias for router in _routers()}
    with CaptureQueriesContext(connections[alias]) as captured:
        yield
    verbs = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE", "ROLLBACK", "START")
    sent = [q["sql"] for q in captured if not q["sql"].upper().startswith(verbs)]
    assert len(sent) == count, "\n".join(sent)


def _routers():
    from django.db import router

    return router.routers


def overtake(lease):
    """Record a newer grant, as another process would after this one's lease ran out."""
    newer = lease.token + 1
    Fence.objects.filter(name=lease.name).update(token=newer, owner="f" * 32)
    return newer


def rows_of(model):
    """The rows as they are, whatever the model's manager says."""
    return list(models.QuerySet(model).order_by("pk").values())


def plainly(model, **values):
    """Write past the fence, as another process would."""
    return models.QuerySet(model).update(**values)


@contextlib.contextmanager
def refused(error=StaleFence, *tables, match=None) -> Iterator[pytest.ExceptionInfo]:
    """Expect the error, and that nothing is written."""
    tables = tables or (Invoice,)
    before = [rows_of(table) for table in tables]
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert [rows_of(table) for table in tables] == before


# One row that is there already, written in every way. Each takes the row as it was loaded.


def _set(row, **values):
    for name, value in values.items():
        setattr(row, name, value)
    return row


def _upsert(row):
    rows = [type(row)(pk=row.pk, amount=99)]
    target = {} if connections[row._state.db].vendor == "mysql" else {"unique_fields": ["pk"]}
    type(row).objects.bulk_create(rows, update_conflicts=True, update_fields=["amount"], **target)


WRITES = {
    "save": lambda row: _set(row, amount=99).save(),
    "asave": lambda row: awaited(_set(row, amount=99).asave),
    "save_base": lambda row: _set(row, amount=99).save_base(),
    "unbound_save": lambda row: models.Model.save(_set(row, amount=99)),
    "update_fields": lambda row: _set(row, amount=99).save(update_fields=["amount"]),
    "force_update": lambda row: _set(row, amount=99).save(force_update=True),
    "deferred": lambda row: _set(Invoice.objects.only("amount").get(pk=row.pk), amount=99).save(),
    "pickled": lambda row: pickle.loads(pickle.dumps(_set(row, amount=99))).save(),
    "expression": lambda row: _set(row, amount=F("amount") + 99).save(),
    "never_loaded": lambda row: Invoice(pk=row.pk, amount=99).save(update_fields=["amount"]),
    "never_loaded_forced": lambda row: Invoice(pk=row.pk, amount=99).save(force_update=True),
    "update": lambda row: Invoice.objects.filter(pk=row.pk).update(amount=99),
    "base_update": lambda row: Invoice._base_manager.filter(pk=row.pk).update(amount=99),
    "aupdate": lambda row: awaited(Invoice.objects.filter(pk=row.pk).aupdate, amount=99),
    "bulk_update": lambda row: Invoice.objects.bulk_update([_set(row, amount=99)], ["amount"]),
    "update_or_create": lambda row: Invoice.objects.update_or_create(
        pk=row.pk, defaults={"amount": 99}
    ),
    "upsert": _upsert,
    "related_add": lambda row: Account.objects.create().invoice_set.add(row),
    "related_clear": lambda row: Account.objects.get().invoice_set.clear(),
    "set_null": lambda row: Account.objects.get().delete(),
}
DELETES = {
    "delete": lambda row: row.delete(),
    "adelete": lambda row: awaited(row.adelete),
    "delete_unloaded": lambda row: Invoice(pk=row.pk).delete(),
    "queryset_delete": lambda row: Invoice.objects.filter(pk=row.pk).delete(),
    "queryset_adelete": lambda row: awaited(Invoice.objects.filter(pk=row.pk).adelete),
}
ALL = {**WRITES, **DELETES}
#: Statements of these, where they aren't as many as a plain model's: one to learn the names of
#: the rows' locks, and for a delete, one that claims the rows.
STATEMENTS = {
    "deferred": 2,
    "update": 2,
    "base_update": 2,
    "aupdate": 2,
    "update_or_create": 2,
    "related_add": 3,
    "related_clear": 3,
    "queryset_delete": 3,
    "queryset_adelete": 3,
}
#: These load the object themselves, or none: it can't be older than the lock.
READ_IN_TIME = {
    *("deferred", "never_loaded", "never_loaded_forced", "update", "base_update", "aupdate"),
    *("update_or_create", "upsert", "related_add", "related_clear", "set_null"),
    *("delete_unloaded", "queryset_delete", "queryset_adelete"),
}


@pytest.fixture
def invoice(database):
    return Invoice.objects.create(amount=1, account=Account.objects.create())


@pytest.mark.parametrize("how", ALL)
def test_under_its_lease_the_row_is_written(database, invoice, how):
    with invoice.fencing.lock() as lease:
        count = (
            contextlib.nullcontext() if how == "set_null" else statements(STATEMENTS.get(how, 1))
        )
        with count:
            ALL[how](invoice)
        if how in DELETES:
            assert not rows_of(Invoice)
        else:
            (row,) = rows_of(Invoice)
            assert row["fence"] == lease.token == 1
            assert row["amount"] in (99, 100) or how.startswith(("related", "set_null"))


@pytest.mark.parametrize("how", ALL)
def test_in_a_transaction_of_its_lease_the_row_is_written(database, invoice, how):
    with invoice.fencing.lock() as lease, lease.atomic():
        ALL[how](invoice)
    if how in DELETES:
        assert not rows_of(Invoice)
    else:
        assert rows_of(Invoice)[0]["fence"] == 1


@pytest.mark.parametrize("how", ALL)
def test_once_a_newer_grant_is_recorded_the_write_is_refused(database, invoice, how):
    with invoice.fencing.lock() as lease:
        overtake(lease)
        with refused():
            ALL[how](invoice)


@pytest.mark.parametrize("how", ALL)
def test_after_the_newer_holder_has_written_the_write_is_refused(database, invoice, how):
    with invoice.fencing.lock() as lease:
        plainly(Invoice, amount=7, fence=overtake(lease))
        with refused():
            ALL[how](invoice)
        with refused():  # again: what failed once fails again
            ALL[how](invoice)


@pytest.mark.parametrize("how", ALL)
def test_a_row_that_the_newer_holder_deleted_is_never_inserted_again(database, invoice, how):
    with invoice.fencing.lock() as lease:
        overtake(lease)
        models.QuerySet(Invoice)._raw_delete(database)
        with contextlib.suppress(StaleFence, Invoice.DoesNotExist):
            ALL[how](invoice)
        assert not rows_of(Invoice)


@pytest.mark.parametrize("how", ["save", "update_fields", "pickled", "bulk_update", "delete"])
def test_such_a_write_of_a_loaded_object_raises(database, invoice, how):
    with invoice.fencing.lock() as lease:
        models.QuerySet(Invoice)._raw_delete(database)
        with pytest.raises(StaleFence, match="gone"):
            ALL[how](invoice)
        overtake(lease)
        with pytest.raises(StaleFence, match="newest token is 2"):
            ALL[how](invoice)
        assert not rows_of(Invoice)


OF_OLD_OBJECTS = sorted(set(ALL) - READ_IN_TIME)


@pytest.mark.parametrize("how", OF_OLD_OBJECTS)
def test_an_object_that_was_read_before_the_lock_and_written_since_is_refused(
    database, invoice, how
):
    old = [Invoice.objects.get() for _ in range(3)]
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    with invoice.fencing.lock() as lease:
        why = "read before the lock was acquired, and written under token 1 since|since it was read"
        with refused(match=why) as caught:
            ALL[how](old[0])
        # A bug of the caller, and no incident.
        assert type(caught.value) is (StaleFence if how == "bulk_update" else StaleObject)
        # A write under the new lease makes the old object no newer.
        Invoice.objects.update(note="written")
        with refused():
            ALL[how](old[1])
        ALL[how](Invoice.objects.get())
        overtake(lease)
        with refused() as caught:
            ALL[how](old[2])
        assert type(caught.value) is StaleFence


@pytest.mark.parametrize("how", ALL)
def test_without_a_lease_nothing_is_written(database, invoice, how):
    with refused(LockRequired, match="needs the lease of lock 'tests.invoice:.*none is held here"):
        ALL[how](invoice)


@pytest.mark.parametrize("how", ALL)
def test_the_lease_of_another_lock_is_none_for_this_row(database, invoice, how):
    with lock("other") as lease, refused(LockRequired, match="'tests.invoice:.*held here: 'other'"):
        ALL[how](invoice)
    with lock("other") as lease, lease.atomic():  # noqa: SIM117
        with refused(LockRequired), transaction.atomic(using=database):
            ALL[how](invoice)


@pytest.mark.parametrize("how", ALL)
def test_an_unfenced_lease_is_none(database, invoice, how):
    with lock(f"tests.invoice:{invoice.pk}", fenced=False), refused(LockRequired):
        ALL[how](invoice)


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("policy", ["allow", "warn"])
def test_an_write_without_lock_that_is_allowed_leaves_the_fence(
    database, settings, invoice, how, policy, caplog
):
    plainly(Invoice, fence=5)
    invoice.refresh_from_db()
    settings.FENCEDLOCK_WITHOUT_LOCK = policy
    with caplog.at_level(logging.WARNING, "django_fencedlock"):
        ALL[how](invoice)
    assert ("without the lease of lock 'tests.invoice:" in caplog.text) == (policy == "warn")
    if how in DELETES:
        assert not rows_of(Invoice)
    else:
        (row,) = rows_of(Invoice)
        assert row["fence"] == 5
        assert row["amount"] in (99, 100) or how.startswith(("related", "set_null"))


@pytest.mark.parametrize("how", ALL)
def test_a_policy_that_is_none_lets_nothing_pass(database, settings, invoice, how):
    settings.FENCEDLOCK_WITHOUT_LOCK = "warm"
    with pytest.raises(SettingsError, match="FENCEDLOCK_WITHOUT_LOCK is 'warm'"):
        ALL[how](invoice)
    (row,) = rows_of(Invoice)
    assert row["amount"] not in (99, 100)


# New rows, under a lock that isn't their own


def _unchecked(account):
    (found,) = serializers.deserialize(
        "python",
        [{"model": "tests.ledgerline", "fields": {"account": account.pk, "amount": 5}}],
    )
    found.object.save()


CREATES = {
    "save": lambda account: LedgerLine(account=account).save(),
    "force_insert": lambda account: LedgerLine(account=account).save(force_insert=True),
    "asave": lambda account: awaited(LedgerLine(account=account).asave),
    "save_base": lambda account: LedgerLine(account=account).save_base(),
    "create": lambda account: LedgerLine.objects.create(account=account),
    "acreate": lambda account: awaited(LedgerLine.objects.acreate, account=account),
    "related_create": lambda account: account.ledgerline_set.create(),
    "related_add": lambda account: account.ledgerline_set.add(LedgerLine(), bulk=False),
    "get_or_create": lambda account: LedgerLine.objects.get_or_create(account=account),
    "update_or_create": lambda account: LedgerLine.objects.update_or_create(account=account),
    "bulk_create": lambda account: LedgerLine.objects.bulk_create([LedgerLine(account=account)]),
    "bulk_create_many": lambda account: LedgerLine.objects.bulk_create(
        [LedgerLine(account=account, amount=n) for n in range(3)], batch_size=2
    ),
    "abulk_create": lambda account: awaited(
        LedgerLine.objects.abulk_create, [LedgerLine(account=account)]
    ),
    "ignore_conflicts": lambda account: LedgerLine.objects.bulk_create(
        [LedgerLine(account=account, amount=n) for n in range(3)], ignore_conflicts=True
    ),
    "deserialised": _unchecked,
}
CREATE_STATEMENTS = {
    "get_or_create": 2,
    "update_or_create": 2,
    "bulk_create_many": 2,
    "ignore_conflicts": 2,
}


@pytest.mark.parametrize("how", CREATES)
def test_a_row_is_added_under_the_lease_of_its_lock(database, how):
    account = Account.objects.create()
    with LedgerLine.fencing.lock(account=account) as lease:
        with statements(CREATE_STATEMENTS.get(how, 1)):
            CREATES[how](account)
        assert {row["fence"] for row in rows_of(LedgerLine)} == {lease.token}


def test_a_new_object_knows_its_fence(database):
    account = Account.objects.create()
    with LedgerLine.fencing.lock(account=account) as lease:
        line = LedgerLine.objects.create(account=account)
        lines = LedgerLine.objects.bulk_create([LedgerLine(account=account) for _ in range(2)])
        with statements(0):
            assert {each.fence for each in (line, *lines)} == {lease.token}
        line.save()


@pytest.mark.parametrize("how", CREATES)
def test_a_row_is_not_added_once_a_newer_grant_is_recorded(database, how):
    account = Account.objects.create()
    with LedgerLine.fencing.lock(account=account) as lease:
        overtake(lease)
        with refused(StaleFence, LedgerLine):
            CREATES[how](account)


@pytest.mark.parametrize("how", CREATES)
def test_a_row_is_not_added_without_the_lease_of_its_lock(database, how):
    account = Account.objects.create()
    with refused(LockRequired, LedgerLine):
        CREATES[how](account)


@pytest.mark.parametrize("how", CREATES)
def test_an_without_lock_row_that_is_allowed_has_fence_0(database, settings, how):
    settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
    CREATES[how](Account.objects.create())
    assert {row["fence"] for row in rows_of(LedgerLine)} == {0}


@pytest.mark.parametrize("is_held", [False, True])
def test_a_copy_of_a_row_is_a_new_row(database, invoice, is_held):
    with lock("tests.invoice:1") if is_held else contextlib.nullcontext():
        copy = Invoice.objects.get(pk=invoice.pk)
        copy.pk = None
        with statements(1):
            copy.save()
        assert (Invoice.objects.get(pk=copy.pk).fence, copy.fence) == (0, 0)
        copy.pk = 1000
        with statements(1):
            copy.save(force_insert=True)
    assert Invoice.objects.count() == 3
    with refused(LockRequired):
        copy.save()


def test_a_copy_of_a_row_whose_key_has_a_default(database):
    made = Unique.objects.create(amount=1)
    made.pk = None
    made.amount = 2
    made.save()
    assert Unique.objects.count() == 2


def test_a_copy_of_a_child_is_a_new_row_in_each_table(database):
    truck = Truck.objects.create(wheels=6, load=1)
    truck.pk = truck.id = None
    truck.save()
    assert (Truck.objects.count(), Vehicle.objects.count()) == (2, 2)


def test_a_copy_of_a_row_under_anothers_lock_wants_its_lease(database):
    account = Account.objects.create()
    with lock(f"account:{account.pk}"):
        line = LedgerLine.objects.create(account=account)
    line.pk = None
    with refused(LockRequired, LedgerLine):
        line.save()
    with lock(f"account:{account.pk}") as lease:
        line.save()
    assert LedgerLine.objects.get(pk=line.pk).fence == lease.token


def test_a_row_under_its_own_lock_is_always_added(database):
    with statements(3):
        Invoice.objects.create()
        Invoice.objects.bulk_create([Invoice(), Invoice()])
        Unique.objects.create()  # its key is made by a default
    with statements(1):
        Seat.objects.bulk_create([Seat(row="A", number=1)])


def test_what_is_new_does_not_take_the_place_of_a_row(database, invoice):
    with refused(IntegrityError), transaction.atomic(using=database):
        Invoice(pk=invoice.pk, amount=99).save()
    with (
        refused((IntegrityError, ImproperlyConfigured, LockRequired)),
        transaction.atomic(using=database),
    ):
        Invoice.objects.bulk_create([Invoice(pk=invoice.pk, amount=99)])
    with refused(DatabaseError), transaction.atomic(using=database):
        Invoice(pk=invoice.pk, amount=99).save(force_insert=True)
    with invoice.fencing.lock():
        Invoice(pk=invoice.pk, amount=99).save()
    assert rows_of(Invoice)[0]["amount"] == 99


def test_a_warning_is_logged_when_something_new_takes_the_place_of_a_row(database, caplog):
    row = Warned.objects.create()
    assert not caplog.text
    Warned(pk=row.pk, amount=99).save()
    assert f"Saving tests.Warned without the lease of lock 'tests.warned:{row.pk}'" in caplog.text
    assert rows_of(Warned)[0]["amount"] == 99


def test_a_stale_holder_does_not_bring_a_deleted_row_back_as_a_new_one(database, invoice):
    with invoice.fencing.lock() as lease:
        overtake(lease)
        for pk in (invoice.pk, invoice.pk + 1):
            models.QuerySet(Invoice).filter(pk=invoice.pk)._raw_delete(database)
            with contextlib.suppress(StaleFence):
                Invoice(pk=pk).save()
        assert [row["id"] for row in rows_of(Invoice)] == [invoice.pk + 1]


def test_half_the_key_does_not_make_a_lock_a_rows_own(database, monkeypatch):
    from django_fencedlock.models import Fencing

    monkeypatch.setattr(Seat, "fencing", Fencing("row:{row}"))
    with pytest.raises(LockRequired, match="'row:A'"):
        Seat.objects.create(row="A", number=1)


def test_a_part_of_the_key_does_not_make_a_lock_a_rows_own(database, monkeypatch):
    from django_fencedlock.models import Fencing

    monkeypatch.setattr(Ticket, "fencing", Fencing("series:{pk:.1}"))
    with refused(LockRequired, Ticket, match="'series:A'"):
        Ticket(code="A1").save()
    with lock("series:A"):
        Ticket.objects.bulk_create([Ticket(code="A1"), Ticket(code="A2")])


# Rows that conflict


def upsert_stock(*skus):
    alias = Fence.objects.db
    target = {} if connections[alias].vendor == "mysql" else {"unique_fields": ["sku"]}
    Stock.objects.bulk_create(
        [Stock(sku=sku, count=9) for sku in skus],
        update_conflicts=True,
        update_fields=["count"],
        **target,
    )


def test_conflicting_rows_are_overwritten_only_where_the_conflict_tells_their_lock(database):
    with pytest.raises(LockRequired):
        upsert_stock("a")
    with lock("stock:a") as lease, lock("stock:b"):
        if database == "mariadb":
            with pytest.raises(ImproperlyConfigured, match="might overwrite rows of another lock"):
                upsert_stock("a")  # it goes by the primary key as well
            return
        with statements(1):
            upsert_stock("a", "b")
        upsert_stock("a", "b")
        assert [(row["count"], row["fence"]) for row in rows_of(Stock)] == [(9, 1), (9, 1)]
        overtake(lease)
        with refused(StaleFence, Stock):
            upsert_stock("b", "a")
        with refused(LockRequired, Stock):
            upsert_stock("b", "c")


def test_conflicts_that_may_be_with_rows_of_any_lock_are_refused(database, monkeypatch):
    monkeypatch.setattr(Stock, "fencing", Invoice.fencing.spec)
    target = {} if database == "mariadb" else {"unique_fields": ["sku"]}
    with lock("tests.stock:5"), refused(ImproperlyConfigured, Stock, match="id has to be among"):
        Stock.objects.bulk_create(
            [Stock(pk=5, sku="a")], update_conflicts=True, update_fields=["count"], **target
        )


@pytest.mark.django_db(transaction=True, databases=["default", "mariadb"])
def test_a_unique_key_over_an_expression_does_not_tell_the_lock(settings, monkeypatch):
    """MySQL goes by any unique key, so the row of another lock would be overwritten."""
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "mariadb"}}
    settings.DATABASE_ROUTERS = [Everything("mariadb")]

    def upsert():
        rows = [Invoice(pk=7, note="A", amount=9)]
        Invoice.objects.bulk_create(rows, update_conflicts=True, update_fields=["amount"])

    with Invoice.fencing.lock(pk=7):
        upsert()
        upsert()
        assert [row["amount"] for row in rows_of(Invoice)] == [9]
        key = models.UniqueConstraint(Lower("note"), name="lower_note")
        monkeypatch.setattr(Invoice._meta, "constraints", [*Invoice._meta.constraints, key])
        with refused(ImproperlyConfigured, match="might overwrite rows of another lock"):
            upsert()


def test_overwriting_is_not_adding(database, invoice):
    """A row may be added with no lease, but its neighbour isn't overwritten on the way."""
    with refused(LockRequired, match="Overwriting"):
        _upsert(invoice)


def test_ignored_conflicts_leave_the_rows_that_are_there(database):
    with lock("stock:a"), lock("stock:b"):
        Stock.objects.create(sku="a", count=1)
        Stock.objects.bulk_create([Stock(sku=sku) for sku in "ab"], ignore_conflicts=True)
    assert [(row["sku"], row["count"]) for row in rows_of(Stock)] == [("a", 1), ("b", 0)]


def test_where_writes_without_lock_are_allowed_conflicts_are_left_to_django(database):
    row = Relaxed.objects.create(code="a")
    plainly(Relaxed, fence=5)
    target = {} if database == "mariadb" else {"unique_fields": ["code"]}
    Relaxed.objects.bulk_create(
        [Relaxed(code="a", amount=9)], update_conflicts=True, update_fields=["amount"], **target
    )
    assert rows_of(Relaxed) == [{"id": row.pk, "code": "a", "amount": 9, "fence": 5}]


# Fixtures


def test_a_fixture_has_no_fence_and_leaves_that_of_the_row(database, invoice, tmp_path):
    text = serializers.serialize("json", [_set(invoice, amount=99)])
    assert "fence" not in text
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    fixture = tmp_path / "invoices.json"
    fixture.write_text(text)
    call_command("loaddata", str(fixture), database=database, verbosity=0)
    assert [(row["amount"], row["fence"]) for row in rows_of(Invoice)] == [(99, 1)]


@pytest.mark.parametrize("fence", [0, 99])
def test_a_fixture_that_names_a_fence_neither_lowers_nor_raises_it(
    database, invoice, tmp_path, fence
):
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    fields = {"amount": 99, "fence": fence}
    entries = [
        {"model": "tests.invoice", "pk": pk, "fields": fields}
        for pk in (invoice.pk, invoice.pk + 1)
    ]
    fixture = tmp_path / "invoices.json"
    fixture.write_text(json.dumps(entries))
    call_command("loaddata", str(fixture), database=database, verbosity=0)
    assert [(row["amount"], row["fence"]) for row in rows_of(Invoice)] == [(99, 1), (99, 0)]


def test_a_fixture_under_a_lease_is_a_write_like_any_other(database, invoice):
    (found,) = serializers.deserialize(
        "json", serializers.serialize("json", [_set(invoice, amount=99)])
    )
    with invoice.fencing.lock() as lease:
        found.save()
        assert rows_of(Invoice)[0]["fence"] == 1
        overtake(lease)
        found.object.amount = 5
        with refused():
            found.save()


def _load(label, pk, **fields):
    (found,) = serializers.deserialize("python", [{"model": label, "pk": pk, "fields": fields}])
    found.save()


def test_a_fixture_of_a_child_is_checked_with_its_parents_fence(database):
    """Deserialisers save the child's own table alone."""
    truck = Trailer.objects.create(wheels=4)
    _load("tests.truck", truck.pk, load=5)
    assert (Truck.objects.get().load, rows_of(Vehicle)[0]["fence"]) == (5, 0)
    with truck.fencing.lock() as lease:
        _load("tests.truck", truck.pk, load=6)
        assert (Truck.objects.get().load, rows_of(Vehicle)[0]["fence"]) == (6, lease.token)
        _load("tests.trailer", truck.pk, axles=6)
        with lock("other"):
            _load("tests.truck", truck.pk, load=7)
        newer = overtake(lease)
        for label, fields in (("tests.truck", {"load": 9}), ("tests.trailer", {"axles": 9})):
            with refused(StaleFence, Truck, Trailer, Vehicle):
                _load(label, truck.pk, **fields)
    with truck.fencing.lock() as lease:
        plainly(Vehicle, fence=newer + 5)
        with refused(StaleFence, Truck, Trailer, Vehicle):
            _load("tests.truck", truck.pk, load=9)


def test_a_fixture_of_a_child_whose_parent_comes_later(database):
    with lock("tests.vehicle:7") as lease:
        first, second = ("tests.truck", {"load": 5}), ("tests.vehicle", {"wheels": 4})
        if database == "mariadb":  # It checks keys at once.
            first, second = second, first
        with transaction.atomic(using=database):
            for label, fields in (first, second):
                _load(label, 7, **fields)
    assert Truck.objects.get().fence == lease.token


def test_a_fixture_of_a_child_is_under_the_lock_that_its_parents_column_names(database):
    with lock("town:a:0") as lease:
        pk = Warehouse.objects.create(town="a").pk
        _load("tests.warehouse", pk, goods=5)
        assert [(row["goods"], row["fence"]) for row in rows_of(Warehouse)] == [(5, lease.token)]
        overtake(lease)
        with refused(StaleFence, Warehouse):
            _load("tests.warehouse", pk, goods=9)


# Inheritance, keys and columns of all kinds


def test_a_child_is_written_with_its_parents_fence(database):
    with statements(2):
        truck = Truck.objects.create(wheels=4, load=1)
    with truck.fencing.lock() as lease:
        assert lease.name == f"tests.vehicle:{truck.pk}"
        with statements(2):
            truck.save()
        with statements(2):  # the parent's as well, where Django alone writes the child's
            truck.save(update_fields=["load"])
        with statements(1):
            truck.save(update_fields=["wheels"])
        with statements(4):  # names, keys, child, parent
            Truck.objects.update(load=5)
        assert rows_of(Vehicle)[0]["fence"] == truck.fence == 1
        overtake(lease)
        for write in (
            lambda: _set(truck, load=9).save(),
            lambda: truck.save(update_fields=["load"]),
            lambda: Truck.objects.update(load=9),
            lambda: Truck.objects.update(load=9, wheels=9),
            lambda: Truck.objects.bulk_update([truck], ["load"]),
            lambda: truck.delete(),
            lambda: truck.delete(keep_parents=True),
            lambda: Truck.objects.all().delete(),
        ):
            with refused(StaleFence, Truck, Vehicle):
                write()


def test_no_part_of_a_child_is_written_without_a_lease(database):
    truck = Truck.objects.create(wheels=4, load=1)
    for write in (
        lambda: _set(truck, load=9).save(),
        lambda: truck.save(update_fields=["load"]),
        lambda: Truck.objects.update(load=9),
        lambda: Truck.objects.bulk_update([truck], ["load"]),
        lambda: truck.delete(),
        lambda: truck.delete(keep_parents=True),
        lambda: Truck.objects.all().delete(),
        lambda: Vehicle.objects.get().delete(),
        lambda: Vehicle.objects.all().delete(),
        lambda: Vehicle.objects.update(wheels=1),
    ):
        with refused(LockRequired, Truck, Vehicle):
            write()


def test_a_grandchild_is_written_with_the_fence_of_the_first(database):
    trailer = Trailer.objects.create(axles=1)
    with trailer.fencing.lock() as lease:
        with statements(3):
            trailer.save()
        with statements(2):
            trailer.save(update_fields=["axles"])
        overtake(lease)
        with refused(StaleFence, Trailer):
            _set(trailer, axles=9).save()
        with refused(StaleFence, Trailer):
            Trailer.objects.update(axles=9)


def test_a_child_is_deleted_with_all_its_tables(database):
    for delete in (
        lambda trailer: trailer.delete(),
        lambda trailer: Trailer.objects.all().delete(),
        lambda trailer: Vehicle.objects.all().delete(),
        lambda trailer: Vehicle.objects.get().delete(),
    ):
        trailer = Trailer.objects.create()
        with trailer.fencing.lock():
            delete(trailer)
        assert not rows_of(Vehicle)
        assert not rows_of(Trailer)


def test_a_child_that_was_never_loaded_is_deleted_under_its_lease(database):
    """Django knows its key in its own table, and not in its parent's."""
    pk = Truck.objects.create().pk
    with refused(LockRequired, Truck, Vehicle):
        Truck(pk=pk).delete(keep_parents=True)
    with Truck.fencing.lock(pk=pk) as lease:
        overtake(lease)
        with refused(StaleFence, Truck, Vehicle):
            Truck(pk=pk).delete(keep_parents=True)
    with Truck.fencing.lock(pk=pk) as lease:
        plainly(Vehicle, fence=lease.token + 1)
        with refused(StaleFence, Truck, Vehicle):
            Truck(pk=pk).delete(keep_parents=True)
        plainly(Vehicle, fence=0)
        Truck(pk=pk).delete(keep_parents=True)
        assert [row["fence"] for row in rows_of(Vehicle)] == [lease.token]
    assert not rows_of(Truck)


def test_a_child_is_deleted_from_its_own_table_alone(database):
    truck = Truck.objects.create()
    with truck.fencing.lock():
        truck.delete(keep_parents=True)
    assert [row["fence"] for row in rows_of(Vehicle)] == [1]
    assert not Truck.objects.exists()


def test_a_child_that_fails_half_way_is_as_it_was(database):
    """The parent's row was written, and is rolled back: so is what the object says of it."""
    truck = Truck.objects.create()
    with truck.fencing.lock():
        truck.load = "no number"
        with pytest.raises(ValueError, match="no number"):
            truck.save()
        assert truck.fence == 0
        assert rows_of(Vehicle)[0]["fence"] == 0
        truck.load = 3
        truck.save()
        assert truck.fence == 1


def test_a_proxy_is_written_as_its_model_is(database):
    van = Van.objects.create()
    with pytest.raises(LockRequired, match=r"'tests\.vehicle:"):
        van.save()
    with pytest.raises(LockRequired):
        Van.objects.all().delete()
    with van.fencing.lock() as lease:
        with statements(1):
            van.save()
        Van.objects.update(wheels=3)
        overtake(lease)
        with refused(StaleFence, Vehicle):
            van.save()
        with refused(StaleFence, Vehicle):
            Van.objects.all().delete()


def test_a_composite_key(database):
    seat = Seat.objects.create(row="A", number=1)
    other = Seat.objects.create(row="A", number=2)
    assert seat.fencing.lock().name == Seat.fencing.lock(pk=("A", 1)).name == "tests.seat:A,1"
    with seat.fencing.lock() as lease:
        with statements(1):
            _set(seat, guest="Ada").save()
        Seat.objects.filter(pk=seat.pk).update(guest="Bo")
        Seat.objects.bulk_update([seat], ["guest"])
        with refused(LockRequired, Seat):
            Seat.objects.update(guest="Cy")
        with refused(LockRequired, Seat):
            other.save()
        overtake(lease)
        for write in (
            lambda: seat.save(),
            lambda: Seat.objects.bulk_update([seat], ["guest"]),
            lambda: seat.delete(),
            lambda: Seat.objects.filter(number=1).delete(),
        ):
            with refused(StaleFence, Seat):
                write()
    with other.fencing.lock(), statements(1):
        other.delete()
    assert len(rows_of(Seat)) == 1


@pytest.mark.parametrize("pk", [2**40, -(2**63), 2**70])
def test_a_key_that_no_row_can_have(database, pk):
    invoice = Invoice(pk=pk)
    invoice._state.adding = False
    with invoice.fencing.lock(), refused(StaleFence, Invoice):
        invoice.save()


def test_a_key_that_is_compared_in_a_way_of_its_own(database, invoice):
    class Never(Exact):
        def as_sql(self, *args, **kwargs):
            return "1 = 0", []

    with invoice.fencing.lock():
        with register_lookup(Invoice._meta.pk, Never), refused(StaleFence, Invoice):
            invoice.save()
        invoice.save()


def test_a_generated_column_and_an_expression(database):
    price = Price.objects.create(net=1)
    with price.fencing.lock() as lease:
        price.net = F("net") + 1
        with statements(1):
            price.save()
        with statements(0):
            assert price.fence == 1
        price.refresh_from_db()
        assert (price.net, price.gross) == (2, 4)
        overtake(lease)
        price.net = F("net") + 1
        with refused(StaleFence, Price):
            price.save()


def test_select_on_save(database):
    row = Careful.objects.create()
    with row.fencing.lock() as lease:
        with statements(2):
            row.save()
        overtake(lease)
        with refused(StaleFence, Careful):
            _set(row, amount=9).save()
        models.QuerySet(Careful)._raw_delete(database)
        with refused(StaleFence, Careful):
            row.save()


def test_the_fence_is_loaded_whatever_is_deferred(database, invoice):
    queries = [
        lambda: Invoice.objects.only("amount"),
        lambda: Invoice.objects.defer("fence"),
        lambda: Invoice.objects.defer("note", "fence"),
        lambda: Invoice.objects.defer("fence").defer(None).only("pk", "amount").defer("amount"),
    ]
    old = [rows().get() for rows in queries]
    assert not any("fence" in each.get_deferred_fields() for each in old)
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    with invoice.fencing.lock():
        for each in old:
            with refused(StaleObject):
                _set(each, note="x").save()
        for rows in queries:
            _set(rows().get(), note="x").save()


def test_the_fence_of_a_child_is_loaded_whatever_is_deferred(database):
    Truck.objects.create(wheels=4, load=1)
    truck = Truck.objects.only("load").get()
    assert truck.get_deferred_fields() == {"id", "wheels"}
    with truck.fencing.lock():
        Truck.objects.update(load=5)
    with truck.fencing.lock(), refused(StaleObject, Truck, Vehicle):
        _set(truck, load=9).save()


def test_deferred_fields_that_are_loaded_later_leave_the_fence(database, invoice):
    old = Invoice.objects.only("note").get()
    again = Invoice.objects.get()
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    with invoice.fencing.lock():
        assert old.amount == 7  # loaded now: the rest of the object is older
        again.refresh_from_db(fields=["amount", "fence"])
        again.refresh_from_db(None, ["amount"], from_queryset=Invoice.objects.all())
        for each in (old, again):
            assert each.fence == 0
            with refused(StaleObject):
                each.save()


def _without_fence():
    return Invoice.objects.raw("SELECT id, account_id, amount, note FROM tests_invoice")[0]


OF_ONE_OBJECT = {
    "save": lambda row: row.save(),
    "update_fields": lambda row: row.save(update_fields=["amount"]),
    "pickled": lambda row: pickle.loads(pickle.dumps(row)).save(),
    "bulk_update": lambda row: Invoice.objects.bulk_update([row], ["amount"]),
    "delete": lambda row: row.delete(),
}


def test_an_object_without_its_fence_is_refused(database, invoice):
    """It can't be told whether it is older than what was written since."""
    with invoice.fencing.lock() as lease:
        for write in OF_ONE_OBJECT.values():
            row = _without_fence()
            with refused(StaleObject, match="its fence wasn't loaded with it"):
                write(row)
            assert row.fence in (0, 1)  # loaded now, and the rest of the object before
            row.refresh_from_db(fields=["amount"])
            with refused(StaleObject, match="its fence wasn't loaded with it"):
                write(row)
            row.refresh_from_db()
            write(row)
            assert [each["fence"] for each in rows_of(Invoice)] in ([lease.token], [])


def test_an_object_without_its_fence_may_be_saved_where_writes_without_lock_are_allowed(
    database, settings, invoice
):
    settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
    _set(_without_fence(), amount=9).save()
    assert rows_of(Invoice)[0]["amount"] == 9


# Several objects of one row


READ_UNDER_THE_LEASE = {
    "get": lambda pk: Invoice.objects.get(pk=pk),
    "only": lambda pk: Invoice.objects.only("amount").get(pk=pk),
    "list": lambda pk: next(iter(Invoice.objects.filter(pk=pk))),
    "base": lambda pk: Invoice._base_manager.get(pk=pk),
    "locked": lambda pk: _locked(pk),
    "aget": lambda pk: awaited(Invoice.objects.aget, pk=pk),
    "related": lambda pk: Account.objects.get().invoice_set.get(),
    "prefetched": lambda pk: (
        Account.objects.prefetch_related("invoice_set").get().invoice_set.all()[0]
    ),
    "joined": lambda pk: Docket.objects.select_related("invoice").get().invoice,
    "followed": lambda pk: Docket.objects.get().invoice,
    "pickled": lambda pk: pickle.loads(pickle.dumps(Invoice.objects.get(pk=pk))),
    "copied": lambda pk: copy.deepcopy(Invoice.objects.get(pk=pk)),
    "fallen_back": lambda pk: Invoice.objects.get_or_create(pk=pk)[0],
}


def _locked(pk):
    with transaction.atomic(using=Fence.objects.db):
        return Invoice.objects.select_for_update().get(pk=pk)


def test_objects_that_were_read_under_one_lease_may_all_be_saved(database, invoice):
    with lock("dockets"):
        Docket.objects.create(invoice=invoice)
    for how, read in READ_UNDER_THE_LEASE.items():
        with invoice.fencing.lock() as lease:
            twin = read(invoice.pk)
            Invoice.objects.update(note=how)
            _set(twin, amount=2).save(update_fields=["amount"])
            assert (twin.fence, rows_of(Invoice)[0]["note"]) == (lease.token, how)
        # Not under the next lease: others may have written in between.
        with invoice.fencing.lock():
            old = read(invoice.pk)
        with invoice.fencing.lock():
            Invoice.objects.update(note="again")
            with refused(StaleObject):
                old.save()


def test_what_one_holder_writes_twice_is_noticed_by_a_version(database):
    """The fence is the same: the object was read between two writes under one token."""
    for model, error in ((Invoice, None), (Contract, VersionConflict)):
        row = model.objects.create()
        with row.fencing.lock():
            model.objects.get(pk=row.pk).save()
            old = model.objects.get(pk=row.pk)
            model.objects.get(pk=row.pk).save()
        with row.fencing.lock():
            if error is None:
                old.save()
            else:
                with refused(error, model):
                    old.save()


def test_an_object_that_was_refreshed_under_the_lease_may_be_saved(database, invoice):
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    with invoice.fencing.lock():
        without = _without_fence()
        without.refresh_from_db(from_queryset=Invoice.objects.all())
        awaited(invoice.arefresh_from_db)
        Invoice.objects.update(note="written")
        _set(invoice, note="one").save()
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
            with refused(StaleObject):
                _set(next(rows), amount=2).save()


@pytest.mark.parametrize(
    "read",
    [
        lambda: next(Invoice.objects.iterator()),
        lambda: Invoice.objects.raw("SELECT * FROM tests_invoice")[0],
    ],
    ids=["iterator", "raw"],
)
def test_an_object_of_an_unknown_age_may_be_saved_while_its_row_is_as_it_was(
    database, invoice, read
):
    with invoice.fencing.lock():
        _set(read(), amount=2).save()
        old = read()
        old.save()
        Invoice.objects.update(note="written")
        _set(old, amount=3).save()  # the fence is that of this lease


def test_an_object_may_be_saved_again_under_a_later_lease(database, invoice):
    for amount in range(3):
        with invoice.fencing.lock():
            _set(invoice, amount=amount).save()
            _set(invoice, note="again").save()
            Invoice.objects.bulk_update([invoice], ["note"])
            _set(invoice, note="once more").save()
    assert rows_of(Invoice)[0]["fence"] == 3


def test_bulk_update_compares_the_fence_of_each_object(database):
    rows = [Invoice.objects.create() for _ in range(3)]
    for times, row in enumerate(rows):  # fences 0, 1, 2
        for _ in range(times):
            with row.fencing.lock():
                Invoice.objects.get(pk=row.pk).save()
    rows = list(Invoice.objects.order_by("pk"))
    assert [row.fence for row in rows] == [0, 1, 2]
    twins = list(Invoice.objects.order_by("pk"))
    with contextlib.ExitStack() as stack:
        for row in rows:
            stack.enter_context(row.fencing.lock())
        with statements(1):
            Invoice.objects.bulk_update([_set(row, amount=5) for row in rows], ["amount"])
        with refused(StaleFence, match="since it was read"):
            Invoice.objects.bulk_update([_set(row, amount=6) for row in twins], ["amount"])
        Invoice.objects.bulk_update(
            [rows[0], Invoice(pk=rows[1].pk, amount=7), rows[2]], ["amount"], batch_size=2
        )
    assert [row["amount"] for row in rows_of(Invoice)] == [5, 7, 5]


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_what_was_read_from_a_database_that_lags_behind_was_not_read_under_the_lease():
    invoice = Invoice.objects.create(amount=1)
    models.QuerySet(Invoice, using="postgres").create(pk=invoice.pk, amount=1)
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    with invoice.fencing.lock():
        lagging = Invoice.objects.using("postgres").get()
        with refused(StaleObject):
            lagging.save(using="default")
        Invoice.objects.update(note="written")
        with refused(StaleObject):
            lagging.save(using="default")


def test_rows_that_the_manager_leaves_out_are_fenced_as_well(database):
    row = Filtered.objects.create(amount=1)
    with pytest.raises(LockRequired):
        row.save()
    with row.fencing.lock() as lease:
        row.save()
        assert rows_of(Filtered)[0]["fence"] == 1
        overtake(lease)
        with refused(StaleFence, Filtered):
            row.delete()


# What is in the object


def test_the_object_changes_only_when_the_row_has(database, invoice):
    with invoice.fencing.lock() as lease:
        invoice.save()
        assert invoice.fence == 1
    with invoice.fencing.lock() as lease:
        overtake(lease)
        for write in (invoice.save, invoice.delete):
            with refused():
                write()
            assert invoice.fence == 1
        with refused():
            Invoice.objects.bulk_update([_set(invoice, amount=3)], ["amount"])
        assert invoice.fence == 1
        line = Invoice(amount=1)
        with lock("tests.invoice:77") as second:
            overtake(second)
            line.pk = 77
            with refused():
                Invoice.objects.bulk_create([line])
        assert line.fence == 0


def test_two_objects_of_one_row_may_both_be_saved_under_one_lease(database, invoice):
    with invoice.fencing.lock():
        twin = Invoice.objects.get()
        _set(invoice, amount=1).save()
        _set(twin, amount=2).save()
    assert rows_of(Invoice)[0]["amount"] == 2


def test_bulk_updated_objects_can_be_saved_under_the_next_lease(database):
    rows = [Invoice.objects.create() for _ in range(3)]
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            for row in rows:
                stack.enter_context(row.fencing.lock())
            assert Invoice.objects.bulk_update(rows, ["amount"], batch_size=2) == 3
            for row in rows:
                row.save()


def test_a_refusal_is_logged_and_sent(database, invoice, caplog):
    heard = []

    def hear(sender, signal, **facts):
        heard.append((sender, facts))

    stale_write_rejected.connect(hear)
    try:
        with invoice.fencing.lock() as lease:
            plainly(Invoice, fence=overtake(lease))
            with pytest.raises(StaleFence) as caught:
                invoice.save()
    finally:
        stale_write_rejected.disconnect(hear)
    error = caught.value
    assert (error.name, error.token, error.owner) == (lease.name, 1, lease.owner_id)
    ((sender, facts),) = heard
    assert sender is Invoice
    assert (facts["pk"], facts["name"], facts["token"]) == (invoice.pk, lease.name, 1)
    assert f"model=tests.Invoice pk={invoice.pk} lock='{lease.name}'" in caplog.text


# Rows that go with others


def test_rows_of_several_locks_need_every_lease(database):
    first, second = Account.objects.create(), Account.objects.create()
    with LedgerLine.fencing.lock(account=first), LedgerLine.fencing.lock(account=second) as lease:
        lines = [LedgerLine.objects.create(account=each) for each in (first, second, second)]
        with statements(2):
            LedgerLine.objects.update(amount=1)
        with statements(1):
            LedgerLine.objects.bulk_update([_set(line, amount=2) for line in lines], ["amount"])
        LedgerLine.objects.bulk_create([LedgerLine(account=each) for each in (first, second)])
        with statements(3):
            LedgerLine.objects.filter(amount=0).delete()
        overtake(lease)
        for write in _writes_of_lines(first, second, lines):
            with refused(StaleFence, LedgerLine, match=f"'account:{second.pk}'"):
                write()


def _writes_of_lines(first, second, lines):
    return (
        lambda: LedgerLine.objects.update(amount=9),
        lambda: LedgerLine.objects.bulk_update(
            [_set(line, amount=9) for line in lines], ["amount"]
        ),
        lambda: LedgerLine.objects.bulk_create(
            [LedgerLine(account=each) for each in (first, second)]
        ),
        lambda: LedgerLine.objects.all().delete(),
    )


def test_one_lease_that_is_missing_refuses_all_before_anything_is_written(database):
    first, second = Account.objects.create(), Account.objects.create()
    with LedgerLine.fencing.lock(account=first), LedgerLine.fencing.lock(account=second):
        lines = [LedgerLine.objects.create(account=each) for each in (first, second)]
    with LedgerLine.fencing.lock(account=first):
        for write in _writes_of_lines(first, second, lines):
            with (
                refused(LockRequired, LedgerLine, match=f"'account:{second.pk}'"),
                CaptureQueriesContext(connections[database]) as captured,
            ):
                write()
            sent = [query["sql"] for query in captured]
            assert not [sql for sql in sent if sql.startswith(("UPDATE", "INSERT", "DELETE"))]


def test_rows_that_come_while_names_are_learnt_are_not_written(database, monkeypatch):
    """Nobody has asked for their leases."""
    from django_fencedlock.models.queryset import FencedQuerySet

    account, other = Account.objects.create(), Account.objects.create()
    learn = FencedQuerySet._rows

    def learn_and_be_late(rows):
        found = learn(rows)
        models.QuerySet(LedgerLine).bulk_create([LedgerLine(account=other)])
        return found

    with LedgerLine.fencing.lock(account=account):
        LedgerLine.objects.create(account=account)
        monkeypatch.setattr(FencedQuerySet, "_rows", learn_and_be_late)
        with pytest.raises(StaleFence):
            LedgerLine.objects.update(amount=9)
        assert {row["amount"] for row in rows_of(LedgerLine)} == {0}
    models.QuerySet(LedgerLine)._raw_delete(database)
    with pytest.raises(LockRequired, match="came meanwhile"):
        LedgerLine.objects.update(amount=9)  # there was none to be learnt of
    assert [row["amount"] for row in rows_of(LedgerLine)] == [0]


def test_rows_that_come_between_claim_and_delete_are_left(database, monkeypatch):
    account, other = Account.objects.create(), Account.objects.create()
    update = models.QuerySet.update

    def update_and_be_late(rows, **values):
        count = update(rows, **values)
        models.QuerySet(LedgerLine).bulk_create([LedgerLine(account=other, amount=5)])
        return count

    with LedgerLine.fencing.lock(account=account):
        LedgerLine.objects.create(account=account, amount=5)
        monkeypatch.setattr(models.QuerySet, "update", update_and_be_late)
        assert LedgerLine.objects.filter(amount=5).delete()[0] == 1
    assert [row["account_id"] for row in rows_of(LedgerLine)] == [other.pk]


def test_giving_rows_to_another_lock_needs_both_leases(database):
    first, second = Account.objects.create(), Account.objects.create()
    for _ in range(3):
        LedgerLine.fencing.lock(account=first).acquire().release()
    with LedgerLine.fencing.lock(account=first) as theirs:
        line = LedgerLine.objects.create(account=first)
        with refused(LockRequired, LedgerLine, match=f"'account:{second.pk}'; held here: "):
            LedgerLine.objects.update(account=second)
        with LedgerLine.fencing.lock(account=second) as ours:
            with refused(StaleFence, LedgerLine, match="update.. it under the leases of both"):
                _set(line, account=second).save()
            for write in (
                {"account": second, "amount": 5},
                {"amount": 5, "account_id": second.pk},
            ):
                LedgerLine.objects.update(**write)
                (row,) = rows_of(LedgerLine)
                assert (row["account_id"], row["amount"]) == (second.pk, 5)
                assert row["fence"] == ours.token < theirs.token
            LedgerLine.objects.update(account=first)
            overtake(ours)
            with refused(StaleFence, LedgerLine):
                LedgerLine.objects.update(account=second)
            first.ledgerline_set.update(amount=6)
    with LedgerLine.fencing.lock(account=second):
        with refused(LockRequired, LedgerLine):
            LedgerLine.objects.update(account=second)
        with LedgerLine.fencing.lock(account=first) as theirs:
            overtake(theirs)
            with refused(StaleFence, LedgerLine):
                LedgerLine.objects.update(account=second)


def test_a_row_that_was_moved_is_written_under_its_new_lock(database):
    first, second = Account.objects.create(), Account.objects.create()
    for _ in range(3):
        LedgerLine.fencing.lock(account=first).acquire().release()
    with LedgerLine.fencing.lock(account=first), LedgerLine.fencing.lock(account=second):
        LedgerLine.objects.create(account=first)
        second.ledgerline_set.add(LedgerLine.objects.get())
    with LedgerLine.fencing.lock(account=second) as lease:
        LedgerLine.objects.get().save()
        LedgerLine.objects.update(amount=5)
        assert rows_of(LedgerLine)[0]["fence"] == lease.token == 2


def test_a_row_that_was_given_to_another_lock_is_not_written_under_its_former_one(database):
    first, second = Account.objects.create(), Account.objects.create()
    names = LedgerLine.fencing.lock
    with names(account=first) as former, names(account=second) as present:
        # The fence can't tell: tokens of different names may be the same.
        assert former.token == present.token
        LedgerLine.objects.create(account=first)
        line = LedgerLine.objects.get()
        LedgerLine.objects.update(account=second)
        with refused(StaleFence, LedgerLine, match="belongs to another lock"):
            _set(line, amount=9).save()
        with refused(StaleFence, LedgerLine, match="belongs to another lock"):
            line.delete()


def test_a_value_that_only_the_database_knows_names_no_lock(database):
    first = Account.objects.create()
    with LedgerLine.fencing.lock(account=first):
        LedgerLine.objects.create(account=first)
        with refused(LockRequired, LedgerLine, match="account_id is empty"):
            LedgerLine.objects.update(account_id=F("account_id"))


def test_names_that_only_a_callable_knows(database):
    with lock("called:1") as odd, lock("called:0"):
        for amount in range(4):
            Called.objects.create(amount=amount)
        with statements(2):
            Called.objects.update(amount=F("amount") + 2)
        Called.objects.bulk_update(Called.objects.all(), ["amount"])
        overtake(odd)
        with refused(StaleFence, Called):
            Called.objects.update(amount=9)
        Called.objects.filter(amount__in=[2, 4]).update(amount=8)
    with lock("called:1"):
        with refused(LockRequired, Called, match="'called:0'"):
            Called.objects.update(amount=9)
        with refused(LockRequired, Called):
            Called.objects.all().delete()
        assert Called.objects.filter(amount=3).delete()[0] == 1


def _given_to_another_lock(model, other, **values):
    """Ways to write a row of `model` whose object has the name of another lock."""

    def loaded():
        return _set(model.objects.get(), **values)

    def by_hand():
        return model(pk=model.objects.get().pk, **values)

    return {
        "save": lambda: loaded().save(),
        "save_base": lambda: loaded().save_base(raw=True),
        "update_fields": lambda: loaded().save(update_fields=[*values]),
        "others": lambda: loaded().save(update_fields=[other]),
        "force_update": lambda: loaded().save(force_update=True),
        "pickled": lambda: pickle.loads(pickle.dumps(loaded())).save(),
        "bulk_update": lambda: model.objects.bulk_update([loaded()], [*values, other]),
        "bulk_others": lambda: model.objects.bulk_update([loaded()], [other]),
        "delete": lambda: loaded().delete(),
        "never_loaded": lambda: by_hand().save(),
        "never_loaded_fields": lambda: by_hand().save(update_fields=[*values]),
        "never_loaded_forced": lambda: by_hand().save(force_update=True),
        "never_loaded_bulk": lambda: model.objects.bulk_update([by_hand()], [other]),
        "delete_unloaded": lambda: by_hand().delete(),
    }


def _at(day, hour=0):
    return datetime.datetime(2024, 5, day, hour, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("model", "mine", "others"),
    [
        (Called, {"amount": 1}, {"amount": 2}),
        (Shift, {"at": _at(1)}, {"at": _at(2)}),
        (Warehouse, {"town": "a"}, {"town": "b"}),
        (LedgerLine, {"account_id": 1}, {"account_id": 2}),
    ],
    ids=["callable", "format", "column of a parent", "column"],
)
def test_a_row_is_not_written_under_the_lock_that_its_object_names_now(
    database, model, mine, others
):
    Account.objects.bulk_create([Account(pk=1), Account(pk=2)])
    old, new = (model(**values).fencing.lock() for values in (mine, others))
    with old:
        model.objects.create(**mine)
    other = next(name for name in ("note", "goods", "amount") if hasattr(model, name))
    tables = [model, *model._meta.all_parents]
    for held in ((new,), (new, old)):
        with contextlib.ExitStack() as stack:
            for each in held:
                stack.enter_context(each)
            for how, write in _given_to_another_lock(model, other, **others).items():
                if how == "never_loaded" and model is not Called:
                    continue  # It is an INSERT, of a key that is there.
                with refused((StaleFence, LockRequired), *tables):
                    write()


@pytest.mark.parametrize("model", [Called, Shift, Warehouse])
def test_a_row_whose_lock_its_columns_do_not_tell_is_written_under_it(database, model):
    values = {"at": _at(1)} if model is Shift else {}
    other = "goods" if model is Warehouse else "note"
    with model(**values).fencing.lock() as lease:
        row = model.objects.create(**values)
        parents = 1 if model is Warehouse else 0
        with statements(2 + parents):  # it is looked for first
            _set(row, **{other: "5"}).save()
        with statements(3):  # names, and for the objects again; the update
            model.objects.bulk_update([row], [other])
        model(pk=row.pk, **values).save(force_update=True)
        row.refresh_from_db()
        overtake(lease)
        for write in (row.save, row.delete, lambda: model.objects.bulk_update([row], [other])):
            with refused(StaleFence, model):
                write()
    with row.fencing.lock():
        row.delete()
    assert not rows_of(model)


def test_rows_of_one_lock_with_several_values_in_its_columns(database):
    with lock("day:2024-05-01") as lease:
        shifts = [Shift.objects.create(at=_at(1, hour)) for hour in (0, 3)]
        assert Shift.objects.bulk_update([_set(each, note="x") for each in shifts], ["note"]) == 2
        _set(shifts[0], at=_at(1, 5)).save()
        Shift.objects.bulk_update([_set(each, at=_at(1, 6)) for each in shifts], ["at"])
        assert Shift.objects.update(note="y") == 2
        Shift.objects.update(at=_at(1, 7))
        assert {(row["at"], row["fence"]) for row in rows_of(Shift)} == {(_at(1, 7), lease.token)}
        with refused(LockRequired, Shift, match="day:2024-05-02"):
            Shift.objects.update(at=_at(2))
        with lock("day:2024-05-02") as other:
            Shift.objects.filter(pk=shifts[0].pk).update(at=_at(2))
            assert {row["fence"] for row in rows_of(Shift)} == {lease.token, other.token}
            Shift.objects.all().delete()


def test_bulk_update_may_set_a_column_of_the_name_to_what_it_is(database):
    account = Account.objects.create()
    with LedgerLine.fencing.lock(account=account):
        line = LedgerLine.objects.create(account=account)
        LedgerLine.objects.bulk_update([_set(line, amount=5)], ["account", "amount"])
        for value in (F("account") + 1, None):
            line = LedgerLine.objects.get()
            with refused(LockRequired, LedgerLine):
                LedgerLine.objects.bulk_update([_set(line, account_id=value)], ["account"])
    assert rows_of(LedgerLine)[0]["amount"] == 5


def test_rows_whose_lock_is_named_by_a_parents_column_are_moved_under_both_leases(database):
    with lock("town:a:0"):
        Warehouse.objects.create(town="a")
        with refused(LockRequired, Warehouse, Depot):
            Warehouse.objects.update(town="b", floor=1)
        with refused(LockRequired, Warehouse, Depot):
            Warehouse.objects.update(town="b")  # which floor, the new name doesn't tell
        Warehouse.objects.update(town="a", floor=0, goods=5)
        with lock("town:b:1"):
            Warehouse.objects.update(town="b", floor=1)
    with lock("town:b:1"):
        _set(Warehouse.objects.get(), goods=7).save()


def test_an_order_with_respect_to_something_is_set_under_the_lease(database):
    song = Account.objects.create()
    with lock(f"song:{song.pk}"):
        verses = [Verse.objects.create(song=song) for _ in range(3)]
    turned = [verse.pk for verse in reversed(verses)]
    with refused(LockRequired, Verse):
        song.set_verse_order(turned)
    with lock(f"song:{song.pk}") as lease:
        song.set_verse_order(turned)
        assert list(song.get_verse_order()) == turned
        assert {row["fence"] for row in rows_of(Verse)} == {lease.token}
        plainly(Verse, fence=lease.token + 1)
        with refused(StaleFence, Verse):
            song.set_verse_order([verse.pk for verse in verses])
        plainly(Verse, fence=lease.token)
        overtake(lease)
        with refused(StaleFence, Verse):
            song.set_verse_order([verse.pk for verse in verses])


def test_what_django_refuses_is_left_to_django(database):
    with pytest.raises(TypeError, match="slice"):
        Invoice.objects.all()[:1].update(amount=1)
    with pytest.raises(TypeError, match=r"delete\(\)"):
        Invoice.objects.all()[:1].delete()
    Invoice.objects.create()
    with refused((LockRequired, TypeError)):  # Django 5.2 would write them
        Invoice.objects.distinct("note").update(amount=1)
    with pytest.raises(TypeError, match=r"update\(\) can't set 'fence'"):
        Invoice.objects.update(fence=1)
    with pytest.raises(TypeError, match=r"bulk_update\(\) can't set 'fence'"):
        Invoice.objects.bulk_update([], ["fence"])


def test_statements_over_joins_and_annotations(database):
    account = Account.objects.create(name="x")
    with LedgerLine.fencing.lock(account=account) as lease:
        LedgerLine.objects.create(account=account, amount=1)
        rows = LedgerLine.objects.annotate(twice=F("amount") * 2).filter(account__name="x")
        assert rows.order_by("amount").update(amount=F("twice")) == 1
        assert rows.distinct().update(amount=3) == 1
        assert [row["amount"] for row in rows_of(LedgerLine)] == [3]
        overtake(lease)
        with refused(StaleFence, LedgerLine):
            rows.update(amount=9)
        with refused(StaleFence, LedgerLine):
            rows.delete()


# Cascades


@pytest.fixture
def shelf(database):
    return Shelf.objects.create()


def _fill(shelf):
    """One row of each kind, on the shelf; and the lock that it is under."""
    crate = Crate.objects.create(shelf=shelf)
    Bottle.objects.create(crate=crate)
    with lock(f"shelf:{shelf.pk}"):
        label = Label.objects.create(shelf=shelf)
    return crate, label, Remark.objects.create(about=shelf)


DELETES_OF_SHELVES = {
    "object": lambda shelf: shelf.delete(),
    "queryset": lambda shelf: Shelf.objects.all().delete(),
}


@pytest.mark.parametrize("how", DELETES_OF_SHELVES)
def test_what_a_plain_row_takes_along_is_guarded(database, shelf, how):
    """Collected rows (crate), updated ones (label) and generic ones (remark)."""
    crate, _, remark = _fill(shelf)
    delete = DELETES_OF_SHELVES[how]
    tables = (Shelf, Crate, Bottle, Label, Remark)
    names = [f"shelf:{shelf.pk}", f"tests.crate:{crate.pk}", f"tests.remark:{remark.pk}"]
    for missing in names:
        with contextlib.ExitStack() as stack:
            for name in set(names) - {missing}:
                stack.enter_context(lock(name))
            with refused(LockRequired, *tables, match=missing):
                delete(shelf)
    # A label without a shelf has no lock, so nobody may write it but where that is allowed.
    Label.fencing.spec._without_lock = "allow"
    try:
        for stale in names:
            with contextlib.ExitStack() as stack:
                leases = {name: stack.enter_context(lock(name)) for name in names}
                overtake(leases[stale])
                with refused(StaleFence, *tables):
                    delete(shelf)
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(lock(name))
            delete(shelf)
    finally:
        Label.fencing.spec._without_lock = None
    assert not any(map(rows_of, (Shelf, Crate, Bottle, Remark)))
    assert [(row["shelf_id"], row["fence"]) for row in rows_of(Label)] == [(None, 0)]


def test_a_row_with_dependents_is_deleted_under_its_lease_alone(database, shelf):
    for delete in (lambda crate: crate.delete(), lambda crate: Crate.objects.all().delete()):
        crate = Crate.objects.create(shelf=shelf)
        Bottle.objects.create(crate=crate)
        with refused(LockRequired, Crate, Bottle):
            delete(crate)
        with crate.fencing.lock() as lease:
            overtake(lease)
            with refused(StaleFence, Crate, Bottle):
                delete(crate)
        with crate.fencing.lock():
            delete(crate)
        assert not rows_of(Crate)
        assert not rows_of(Bottle)


def test_another_row_of_its_model_that_a_delete_collects_is_guarded(database):
    outer = Box.objects.create()
    inner = Box.objects.create(inside=outer)
    with outer.fencing.lock():
        with refused(LockRequired, Box, match=f"'tests.box:{inner.pk}'"):
            outer.delete()
        with inner.fencing.lock() as lease:
            overtake(lease)
            with refused(StaleFence, Box):
                outer.delete()
        with inner.fencing.lock():
            outer.delete()
    assert not rows_of(Box)


def test_the_guard_of_collected_rows_costs_one_statement_each(database, shelf):
    crates = [Crate.objects.create(shelf=shelf) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for crate in crates[1:]:
            stack.enter_context(crate.fencing.lock())
        with crates[0].fencing.lock() as lease:
            with statements(3):  # claim, bottles, crate
                crates[0].delete()
            crates[0] = Crate.objects.create(pk=int(lease.name.partition(":")[2]), shelf=shelf)
            with statements(3 + 3 * 1 + 1):  # names, rows; a guard each; bottles, crates
                Crate.objects.all().delete()


def test_in_a_transaction_of_its_lease_a_collected_row_costs_none(database, shelf):
    crate = Crate.objects.create(shelf=shelf)
    with crate.fencing.lock() as lease, lease.atomic(), statements(4):
        Crate.objects.all().delete()


def test_in_a_transaction_of_its_lease_a_collected_row_of_a_newer_token_stays(database, shelf):
    crate = Crate.objects.create(shelf=shelf)
    Bottle.objects.create(crate=crate)
    with crate.fencing.lock() as lease:
        plainly(Crate, fence=lease.token + 1)
        with pytest.raises(StaleFence), lease.atomic():
            Crate.objects.all().delete()
    assert rows_of(Crate)


@pytest.mark.parametrize("signal", [pre_delete, post_delete])
def test_a_listener_that_comes_later_lets_no_row_escape(database, signal):
    """Django collects the rows of a model that has listeners, where it didn't before."""
    heard = []

    def hear(instance, **kwargs):
        heard.append(instance)

    account = Account.objects.create()
    with LedgerLine.fencing.lock(account=account) as lease:
        LedgerLine.objects.create(account=account)
        signal.connect(hear, sender=LedgerLine)
        try:
            overtake(lease)
            with refused(StaleFence, LedgerLine, Account):
                account.delete()
            with refused(StaleFence, LedgerLine):
                LedgerLine.objects.all().delete()
        finally:
            signal.disconnect(hear, sender=LedgerLine)
    with refused(LockRequired, LedgerLine, Account):
        account.delete()
    with LedgerLine.fencing.lock(account=account):
        LedgerLine.objects.all().delete()
        account.delete()
    assert not rows_of(LedgerLine)


def test_a_fast_cascade_is_guarded(database):
    account = Account.objects.create()
    with LedgerLine.fencing.lock(account=account) as lease:
        LedgerLine.objects.create(account=account)
        overtake(lease)
        with refused(StaleFence, LedgerLine, Account):
            account.delete()
    with LedgerLine.fencing.lock(account=account):
        assert account.delete()[1] == {"tests.LedgerLine": 1, "tests.Account": 1}


# Given leases, threads, databases


def test_a_lease_can_be_given(database, invoice):
    lease = invoice.fencing.lock().acquire()
    pk = invoice.pk
    done = []

    def work():
        """A thread has no context of its own to find it in."""
        try:
            assert current_lease() is None
            with pytest.raises(LockRequired):
                invoice.save()
            invoice.save(lease=lease)
            awaited(invoice.asave, lease=lease)
            Invoice.objects.using_lease(lease).update(amount=5)
            Invoice.objects.using_lease(lease).bulk_update([invoice], ["note"])
            Invoice.objects.using_lease(lease).update_or_create(
                pk=invoice.pk, defaults={"amount": 6}
            )
            invoice.delete(lease=lease)
            Invoice.objects.using_lease(lease).create(pk=pk, amount=7)
            Invoice.objects.using_lease(lease).all().delete()
            Invoice.objects.using_lease(lease).get_or_create(pk=pk)
            done.append(rows_of(Invoice)[0]["fence"])
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    lease.release()
    assert done == [1]


def test_a_given_lease_is_the_one_that_counts(database, invoice):
    with lock("other") as wrong, invoice.fencing.lock():
        for write in (
            lambda: invoice.save(lease=wrong),
            lambda: invoice.delete(lease=wrong),
            lambda: Invoice.objects.using_lease(wrong).update(amount=9),
            lambda: Invoice.objects.using_lease(wrong).all().delete(),
            lambda: Invoice.objects.using_lease(wrong).bulk_update([invoice], ["amount"]),
            lambda: Invoice.objects.using_lease(wrong).update_or_create(
                pk=invoice.pk, defaults={"amount": 9}
            ),
            lambda: Invoice.objects.using_lease(wrong).create(amount=9),
        ):
            with refused(LockRequired, match="the given lease is of 'other'"):
                write()
        invoice.save()


def test_a_lease_that_was_released_is_none(database, invoice):
    with invoice.fencing.lock() as lease:
        pass
    with refused(LockRequired, match="the given lease was released"):
        invoice.save(lease=lease)
    with refused(LockRequired):
        Invoice.objects.using_lease(lease).update(amount=9)


def test_a_given_lease_is_not_kept(database, invoice):
    lease = invoice.fencing.lock().acquire()
    _leave(lease)
    invoice.save(lease=lease)
    with refused(LockRequired):
        invoice.save()
    lease.release()


@pytest.mark.parametrize("how", ["save", "asave", "update_or_create", "delete"])
def test_a_given_lease_stays_out_of_the_object(database, invoice, how):
    """Receivers put objects into caches, and copies would keep the lease for good."""
    lease = invoice.fencing.lock().acquire()
    _leave(lease)
    copies = []

    def copy_it(instance, **kwargs):
        copies.extend([copy.copy(instance), copy.deepcopy(instance)])
        copies.append(pickle.loads(pickle.dumps(instance)))

    writes = {
        "save": lambda: invoice.save(lease=lease),
        "asave": lambda: awaited(invoice.asave, lease=lease),
        "update_or_create": lambda: Invoice.objects.using_lease(lease).update_or_create(
            pk=invoice.pk, defaults={"amount": 9}
        ),
        "delete": lambda: invoice.delete(lease=lease),
    }
    signals = (pre_save, post_save, pre_delete, post_delete)
    for signal in signals:
        signal.connect(copy_it, sender=Invoice)
    try:
        writes[how]()
    finally:
        for signal in signals:
            signal.disconnect(copy_it, sender=Invoice)
    assert len(copies) == 6
    for each in copies:
        with pytest.raises(LockRequired, match="none is held here"):
            each.save()
    lease.release()


def test_the_lease_of_a_queryset_is_for_its_own_object_alone(database, invoice):
    lease = invoice.fencing.lock().acquire()
    _leave(lease)

    def add_another(created, **kwargs):
        if not Invoice.objects.filter(note="another").exists():
            Invoice(note="another").save()

    post_save.connect(add_another, sender=Invoice)
    try:
        Invoice.objects.using_lease(lease).update_or_create(pk=invoice.pk, defaults={"amount": 9})
    finally:
        post_save.disconnect(add_another, sender=Invoice)
    lease.release()
    assert sorted(row["fence"] for row in rows_of(Invoice)) == [0, 1]


def _leave(lease):
    from django_fencedlock.lease import leave

    leave(lease)


def test_saving_within_a_save_goes_under_the_given_lease(database, invoice):
    lease = invoice.fencing.lock().acquire()
    _leave(lease)

    def again(instance, **kwargs):
        if instance.note != "again":
            instance.note = "again"
            instance.save(update_fields=["note"])

    post_save.connect(again, sender=Invoice)
    try:
        invoice.save(lease=lease)
    finally:
        post_save.disconnect(again, sender=Invoice)
    lease.release()
    assert rows_of(Invoice)[0]["note"] == "again"


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
class TestTwoDatabases:
    @pytest.fixture(autouse=True)
    def _fences(self, settings):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}

    def test_a_serialised_write_is_refused_and_both_are_named(self):
        invoice = Invoice.objects.create()
        with invoice.fencing.lock():
            for write in (
                lambda: invoice.save(),
                lambda: Invoice.objects.update(amount=1),
                lambda: Invoice.objects.bulk_update([invoice], ["amount"]),
                lambda: invoice.delete(),
                lambda: Invoice.objects.all().delete(),
            ):
                with refused(WrongDatabase, match="'default'.*'postgres'"):
                    write()

    def test_a_high_water_mark_needs_no_fence(self):
        meter = Meter.objects.create(serial="a")
        with meter.fencing.lock() as lease:
            _set(meter, reading=1).save()
            Meter.objects.update(reading=2)
            assert rows_of(Meter)[0]["fence"] == lease.token


# The weaker mode


def test_high_water_looks_at_a_fence_that_was_not_loaded(database):
    meter = Meter.objects.create(serial="a")
    with meter.fencing.lock() as lease:
        plainly(Meter, fence=overtake(lease), reading=7)
        with refused(StaleFence, Meter):
            _set(Meter.objects.defer("fence").get(), reading=9).save()


def test_high_water_refuses_only_what_a_newer_holder_has_written_to(database):
    meter = Meter.objects.create(serial="a")
    with meter.fencing.lock() as lease:
        with statements(1):
            _set(meter, reading=1).save()
        newer = overtake(lease)
        # The newer holder has read the row by now, and its update of it gets lost.
        _set(meter, reading=2).save()
        Meter.objects.update(reading=3)
        Meter.objects.bulk_update([_set(meter, reading=4)], ["reading"])
        Meter.objects.create(serial="b")
        plainly(Meter, fence=newer, reading=7)
        for write in (
            lambda: _set(meter, reading=9).save(),
            lambda: meter.save(update_fields=["reading"]),
            lambda: Meter.objects.filter(pk=meter.pk).update(reading=9),
            lambda: Meter.objects.bulk_update([_set(meter, reading=9)], ["reading"]),
            lambda: meter.delete(),
            lambda: Meter.objects.filter(pk=meter.pk).delete(),
        ):
            with refused(StaleFence, Meter):
                write()


def test_high_water_wants_a_lease_as_well(database):
    meter = Meter.objects.create(serial="a")
    for write in (meter.save, meter.delete, lambda: Meter.objects.update(reading=9)):
        with refused(LockRequired, Meter):
            write()


def test_high_water_cannot_overwrite_conflicting_rows(database):
    target = {} if database == "mariadb" else {"unique_fields": ["id"]}
    with (
        lock("tests.meter:5"),
        refused(ImproperlyConfigured, Meter, match="mode 'high_water' rejects it"),
    ):
        Meter.objects.bulk_create(
            [Meter(pk=5, serial="a")], update_conflicts=True, update_fields=["reading"], **target
        )


def test_high_water_refuses_what_was_read_before_the_lock(database):
    meter = Meter.objects.create(serial="a")
    with meter.fencing.lock():
        Meter.objects.update(reading=1)
    with meter.fencing.lock(), refused(StaleObject, Meter, match="read before the lock"):
        _set(meter, reading=9).save()


# The admin


@pytest.fixture
def browser(database, settings, client):
    settings.ROOT_URLCONF = __name__
    client.force_login(User.objects.create_superuser("ada"))
    return client


def _admin_posts(invoice):
    url = "/admin/tests/invoice/"
    form = {"amount": 99, "note": "n", "account": invoice.account_id}
    several = {
        "form-TOTAL_FORMS": 1,
        "form-INITIAL_FORMS": 1,
        "form-0-id": invoice.pk,
        "form-0-amount": 99,
        "_save": "Save",
    }
    chosen = {"action": "delete_selected", "_selected_action": invoice.pk, "post": "yes"}
    return {
        "form": (f"{url}{invoice.pk}/change/", form),
        "list": (url, several),
        "selected": (url, chosen),
        "delete": (f"{url}{invoice.pk}/delete/", {"post": "yes"}),
    }


@pytest.mark.parametrize("what", ["form", "list", "selected", "delete"])
def test_the_admin_writes_under_a_lease_as_well(browser, invoice, what):
    url, data = _admin_posts(invoice)[what]
    with refused(LockRequired):
        browser.post(url, data)
    with invoice.fencing.lock() as lease:
        overtake(lease)
        with refused():
            browser.post(url, data)
    with invoice.fencing.lock():
        assert browser.post(url, data).status_code == 302
    assert [row["amount"] for row in rows_of(Invoice)] == ([99] if what in ("form", "list") else [])


def test_the_admin_does_not_show_the_fence(browser, invoice):
    page = browser.get(f"/admin/tests/invoice/{invoice.pk}/change/").content.decode()
    assert 'name="amount"' in page
    assert "fence" not in page


# Inside of a TestCase


@pytest.mark.django_db(databases=["default", "postgres"])
@pytest.mark.parametrize("alias", ["default", "postgres"])
def test_within_a_tests_own_transaction(settings, alias):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": alias}}
    settings.DATABASE_ROUTERS = [Everything(alias)]
    invoice = Invoice.objects.create()
    with invoice.fencing.lock() as lease:
        with statements(1):
            invoice.save()
        Invoice.objects.update(amount=1)
        overtake(lease)
        for write in (
            lambda: _set(invoice, amount=9).save(),
            lambda: Invoice.objects.update(amount=9),
            lambda: Invoice.objects.bulk_update([invoice], ["amount"]),
            lambda: invoice.delete(),
            lambda: Invoice.objects.all().delete(),
        ):
            with refused(), transaction.atomic(using=alias):
                write()


def test_a_refusal_that_is_swallowed_rolls_the_transaction_back(database, invoice):
    account = Account.objects.create()
    with invoice.fencing.lock() as lease:
        overtake(lease)
        with pytest.raises(transaction.TransactionManagementError):  # noqa: SIM117
            with transaction.atomic(using=database):
                account.name = "changed"
                account.save()
                with contextlib.suppress(StaleFence):
                    invoice.save()
                account.save()
    account.refresh_from_db()
    assert account.name == ""


def test_get_or_create_does_not_swallow_a_refusal(database):
    """It takes an IntegrityError for somebody else having created the row."""
    with lock("stock:a") as lease:
        overtake(lease)
        with refused(StaleFence, Stock):
            Stock.objects.get_or_create(sku="a")


@pytest.fixture
def prepared(settings, monkeypatch):
    """Postgres, by a connection whose OPTIONS let Django have its statements prepared."""
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
    settings.DATABASE_ROUTERS = [Everything("postgres")]
    connection = connections["postgres"]
    options = {"server_side_binding": True, "prepare_threshold": 2}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    _connect_anew(connection)
    yield connection
    monkeypatch.undo()
    _connect_anew(connection)


def _connect_anew(connection):
    connection.close()
    # Django looks at the OPTIONS once.
    connection.features.__dict__.pop("uses_server_side_binding", None)


@pytest.mark.django_db(transaction=True, databases=["postgres"])
def test_the_statement_of_a_save_is_prepared_where_it_may_be(prepared):
    invoice = Invoice.objects.create()
    with invoice.fencing.lock() as lease:
        for amount in range(12):
            with statements(1):
                _set(invoice, amount=amount).save()
        with transaction.atomic(using="postgres"):
            _set(invoice, amount=20).save()
        with prepared.cursor() as cursor:
            cursor.execute("SELECT statement FROM pg_prepared_statements")
            (kept,) = (statement for (statement,) in cursor.fetchall() if "UPDATE" in statement)
        assert "FOR SHARE" in kept
        overtake(lease)
        with refused():
            _set(invoice, amount=21).save()
