"""
Every way the ORM writes a fenced row, in every situation of its lease, on every database.

A path is a way to write; `PATHS` has all of them. What only some rows or leases meet is in
test_write_rules.py.
"""

import contextlib
import datetime
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from asgiref.sync import async_to_sync
from django.core import serializers
from django.db import connections, models, router, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from django_fencedlock import lock
from django_fencedlock.exceptions import (
    LockRequired,
    SettingsError,
    StaleFence,
    StaleObject,
    WrongDatabase,
)
from django_fencedlock.models import Fence
from tests import models as m
from tests.models import Account, Invoice, LedgerLine, Truck, Vehicle


def awaited(function, *args, **kwargs):
    async def run():
        return await function(*args, **kwargs)

    return async_to_sync(run)()


class Everything:
    def __init__(self, alias):
        self.alias = alias

    def db_for_read(self, model, **hints):
        return self.alias

    db_for_write = db_for_read


def on(alias):
    marks = pytest.mark.django_db(transaction=True, databases=[alias])
    return pytest.param(alias, marks=marks, id=alias)


@pytest.fixture(params=[on("default"), on("postgres"), on("mariadb")])
def database(request, settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": request.param}}
    settings.DATABASE_ROUTERS = [Everything(request.param)]
    return request.param


@pytest.fixture
def invoice(database):
    return Invoice.objects.create(amount=1, account=Account.objects.create())


@contextlib.contextmanager
def statements(count):
    """Fail unless the block sends this many statements, without those of transactions."""
    (alias,) = {each.alias for each in router.routers}
    with CaptureQueriesContext(connections[alias]) as captured:
        yield
    verbs = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE", "ROLLBACK", "START")
    sent = [q["sql"] for q in captured if not q["sql"].upper().startswith(verbs)]
    assert count is None or len(sent) == count, "\n".join(sent)


def overtake(lease):
    """Record a newer grant, as another process does after this lease expired."""
    newer = lease.token + 1
    Fence.objects.filter(name=lease.name).update(token=newer, owner="f" * 32)
    return newer


def rows_of(model):
    return list(models.QuerySet(model).order_by("pk").values())


def plainly(model, **values):
    """Write past the fence, as another process does."""
    return models.QuerySet(model).update(**values)


@contextlib.contextmanager
def refused(error=StaleFence, *tables, match=None) -> Iterator[pytest.ExceptionInfo]:
    tables = tables or (Invoice,)
    before = [rows_of(table) for table in tables]
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert [rows_of(table) for table in tables] == before


def set_(row, **values):
    for name, value in values.items():
        setattr(row, name, value)
    return row


def leased(model, **values):
    with model(**values).fencing.lock():
        return model.objects.create(**values)


def _loaded(label, pk=None, **fields):
    (found,) = serializers.deserialize("python", [{"model": label, "pk": pk, "fields": fields}])
    return found


def load(label, pk=None, **fields):
    _loaded(label, pk, **fields).save()


def upsert(row):
    target = {} if connections[row._state.db].vendor == "mysql" else {"unique_fields": ["pk"]}
    type(row).objects.bulk_create(
        [type(row)(pk=row.pk, amount=99)], update_conflicts=True, update_fields=["amount"], **target
    )


class Path(NamedTuple):
    model: Any
    #: Makes what is there before, and returns what the others take.
    make: Callable[[], Any]
    write: Callable[[Any], Any]
    #: How many statements it takes; None if another row is written along with it.
    count: int | None
    tables: tuple[Any, ...]
    lock: Callable[[Any], Any]

    @property
    def is_new(self):
        return self.make is _account

    def fences(self):
        return {row["fence"] for row in rows_of(self.model.fencing.table)}

    def found(self):
        rows = [row for table in self.tables for row in rows_of(table)]
        return [{key: value for key, value in row.items() if key != "fence"} for row in rows]

    def refused(self, error, match=None):
        return refused(error, *self.tables, match=match)


PATHS: dict[str, Path] = {}


def paths(prefix, model, make, *more, lock=lambda row: row.fencing.lock(), **writes):
    """Add paths; one of more than one statement is a tuple of their number and the write."""
    for name, write in writes.items():
        count, write = write if isinstance(write, tuple) else (1, write)
        PATHS[f"{prefix}{name}"] = Path(model, make, write, count, (model, *more), lock)


# One row of its own lock. Each path takes the row as it was loaded. Two statements: one finds the
# names of the rows' locks. Three: a delete claims the rows first.
paths(
    "",
    Invoice,
    lambda: Invoice.objects.create(amount=1, account=Account.objects.create()),
    save=lambda row: set_(row, amount=99).save(),
    asave=lambda row: awaited(set_(row, amount=99).asave),
    save_base=lambda row: set_(row, amount=99).save_base(),
    unbound_save=lambda row: models.Model.save(set_(row, amount=99)),
    update_fields=lambda row: set_(row, amount=99).save(update_fields=["amount"]),
    force_update=lambda row: set_(row, amount=99).save(force_update=True),
    deferred=(2, lambda row: set_(Invoice.objects.only("amount").get(pk=row.pk), amount=99).save()),
    pickled=lambda row: pickle.loads(pickle.dumps(set_(row, amount=99))).save(),
    expression=lambda row: set_(row, amount=F("amount") + 99).save(),
    never_loaded=lambda row: Invoice(pk=row.pk, amount=99).save(update_fields=["amount"]),
    never_loaded_forced=lambda row: Invoice(pk=row.pk, amount=99).save(force_update=True),
    update=(2, lambda row: Invoice.objects.filter(pk=row.pk).update(amount=99)),
    base_update=(2, lambda row: Invoice._base_manager.filter(pk=row.pk).update(amount=99)),
    aupdate=(2, lambda row: awaited(Invoice.objects.filter(pk=row.pk).aupdate, amount=99)),
    bulk_update=lambda row: Invoice.objects.bulk_update([set_(row, amount=99)], ["amount"]),
    update_or_create=(
        2,
        lambda row: Invoice.objects.update_or_create(pk=row.pk, defaults={"amount": 99}),
    ),
    upsert=upsert,
    related_add=(3, lambda row: Account.objects.create().invoice_set.add(row)),
    related_clear=(3, lambda row: Account.objects.get().invoice_set.clear()),
    set_null=(None, lambda row: Account.objects.get().delete()),
    delete=lambda row: row.delete(),
    adelete=lambda row: awaited(row.adelete),
    delete_unloaded=lambda row: Invoice(pk=row.pk).delete(),
    queryset_delete=(3, lambda row: Invoice.objects.filter(pk=row.pk).delete()),
    queryset_adelete=(3, lambda row: awaited(Invoice.objects.filter(pk=row.pk).adelete)),
)
OF_ONE_ROW = [*PATHS]
OF_LOADED = ["save", "asave", "save_base", "unbound_save", "update_fields", "force_update"]
OF_LOADED += ["pickled", "expression", "bulk_update", "delete", "adelete"]
FEW = ["save", "update", "bulk_update", "delete", "queryset_delete"]

paths(
    "child_",
    Truck,
    lambda: Truck.objects.create(wheels=4, load=1),
    Vehicle,
    save=(2, lambda row: set_(row, load=9).save()),
    # The parent's table as well, where Django alone writes the child's.
    own_field=(2, lambda row: set_(row, load=9).save(update_fields=["load"])),
    parents_field=lambda row: set_(row, wheels=9).save(update_fields=["wheels"]),
    deferred=(None, lambda row: set_(Truck.objects.only("load").get(), load=9).save()),
    update=(4, lambda row: Truck.objects.update(load=9)),  # names, keys, child, parent
    update_both=(None, lambda row: Truck.objects.update(load=9, wheels=9)),
    update_parent=(2, lambda row: Vehicle.objects.update(wheels=9)),
    bulk_update=(None, lambda row: Truck.objects.bulk_update([set_(row, load=9)], ["load"])),
    delete=(None, lambda row: row.delete()),
    delete_alone=(None, lambda row: row.delete(keep_parents=True)),
    # Of an object that was never loaded, Django knows the key in its own table alone.
    delete_unloaded=(None, lambda row: Truck(pk=row.pk).delete(keep_parents=True)),
    queryset_delete=(None, lambda row: Truck.objects.all().delete()),
)
paths(
    "grandchild_",
    m.Trailer,
    lambda: m.Trailer.objects.create(axles=1),
    Truck,
    Vehicle,
    save=(3, lambda row: set_(row, axles=9).save()),
    own_field=(2, lambda row: set_(row, axles=9).save(update_fields=["axles"])),
    update=(None, lambda row: m.Trailer.objects.update(axles=9)),
    delete=(None, lambda row: row.delete()),
    queryset_delete=(None, lambda row: m.Trailer.objects.all().delete()),
    delete_parent=(None, lambda row: Vehicle.objects.get().delete()),
    delete_parents=(None, lambda row: Vehicle.objects.all().delete()),
)
paths(
    "proxy_",
    m.Van,
    lambda: m.Van.objects.create(),
    save=lambda row: set_(row, wheels=9).save(),
    update=(2, lambda row: m.Van.objects.update(wheels=9)),
    queryset_delete=(None, lambda row: m.Van.objects.all().delete()),
)
paths(
    "composite_",
    m.Seat,
    lambda: m.Seat.objects.create(row="A", number=1),
    save=lambda row: set_(row, guest="Ada").save(),
    update=(2, lambda row: m.Seat.objects.filter(pk=row.pk).update(guest="Ada")),
    bulk_update=lambda row: m.Seat.objects.bulk_update([set_(row, guest="Ada")], ["guest"]),
    delete=lambda row: row.delete(),
    queryset_delete=(3, lambda row: m.Seat.objects.filter(number=1).delete()),
)
paths(
    "generated_",
    m.Price,
    lambda: m.Price.objects.create(net=1),
    save=lambda row: set_(row, net=F("net") + 1).save(),
)
paths(
    "select_on_save_",
    m.Careful,
    lambda: m.Careful.objects.create(),
    save=(2, lambda row: set_(row, amount=9).save()),
)
paths(
    "left_out_",
    m.Filtered,
    lambda: m.Filtered.objects.create(amount=1),
    save=lambda row: set_(row, amount=9).save(),
    delete=lambda row: row.delete(),
)
paths(
    "high_water_",
    m.Meter,
    lambda: m.Meter.objects.create(serial="a"),
    save=lambda row: set_(row, reading=9).save(),
    update_fields=lambda row: set_(row, reading=9).save(update_fields=["reading"]),
    deferred=(2, lambda row: set_(m.Meter.objects.defer("fence").get(), reading=9).save()),
    update=(2, lambda row: m.Meter.objects.update(reading=9)),
    bulk_update=lambda row: m.Meter.objects.bulk_update([set_(row, reading=9)], ["reading"]),
    delete=lambda row: row.delete(),
    queryset_delete=(3, lambda row: m.Meter.objects.all().delete()),
)
# Locks that are named by another column, which is compared, and by what SQL doesn't compare: then
# the row is looked for first.
for prefix, model, values, more, field, selects in (
    ("column_", LedgerLine, {"account_id": 1}, (), "amount", 0),
    ("callable_", m.Called, {"amount": 1}, (), "note", 1),
    (
        "rounded_",
        m.Shift,
        {"at": datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)},
        (),
        "note",
        1,
    ),
    ("parents_column_", m.Warehouse, {"town": "a"}, (m.Depot,), "goods", 1),
):

    def _make(model=model, values=values):
        Account.objects.create(pk=1)
        return leased(model, **values)

    def _update(row, model=model, field=field):
        model.objects.update(**{field: "9"})

    def _bulk_update(row, model=model, field=field):
        model.objects.bulk_update([set_(row, **{field: "9"})], [field])

    def _unloaded(row, model=model, field=field, values=values):
        parents = {link.attname: row.pk for link in model._meta.parents.values()}
        model(pk=row.pk, **parents, **{**values, field: "9"}).save(force_update=True)

    paths(
        prefix,
        model,
        _make,
        *more,
        save=(1 + selects + len(more), lambda row, field=field: set_(row, **{field: "9"}).save()),
        never_loaded=(None, _unloaded),
        update=(2, _update),
        bulk_update=(1 + selects, _bulk_update),
        delete=(None, lambda row: row.delete()),
        queryset_delete=(None, lambda row: type(row).objects.all().delete()),
    )


def _joined():
    rows = LedgerLine.objects.annotate(twice=F("amount") * 2).filter(account__name="x")
    return rows.order_by("amount")


paths(
    "joined_",
    LedgerLine,
    lambda: leased(LedgerLine, account=Account.objects.create(name="x"), amount=1),
    Account,
    update=(None, lambda row: _joined().update(amount=F("twice"))),
    distinct=(None, lambda row: _joined().distinct().update(amount=9)),
    delete=(None, lambda row: _joined().delete()),
    cascade=(None, lambda row: row.account.delete()),
)


def _crate():
    crate = m.Crate.objects.create()
    m.Bottle.objects.create(crate=crate)
    return crate


paths(
    "with_dependents_",
    m.Crate,
    _crate,
    m.Bottle,
    delete=(3, lambda row: row.delete()),  # a claim, the bottles, the crate
    queryset_delete=(None, lambda row: m.Crate.objects.all().delete()),
)


def _verses():
    song = Account.objects.create()
    verses = [leased(m.Verse, song=song) for _ in range(3)]
    return verses[0]


paths(
    "ordered_",
    m.Verse,
    _verses,
    set=(None, lambda row: row.song.set_verse_order(row.song.get_verse_order()[::-1])),
)
for model in (m.Contract, m.Deed):
    paths(
        f"versioned_{model.__name__}_",
        model,
        lambda model=model: model.objects.create(),
        save=lambda row: set_(row, text="x").save(),
        save_base=lambda row: set_(row, text="x").save_base(),
        update_fields=lambda row: set_(row, text="x").save(update_fields=["text"]),
        bulk_update=lambda row: type(row).objects.bulk_update([set_(row, text="x")], ["text"]),
        update=(2, lambda row: type(row).objects.update(text="x")),
        delete=lambda row: row.delete(),
        queryset_delete=(3, lambda row: type(row).objects.all().delete()),
    )


# New rows of a lock that isn't their own. The INSERT itself checks the lease.


def _account():
    return Account.objects.create()


def _bulk_create(account, count=1, **terms):
    rows = [LedgerLine(account=account, amount=n) for n in range(count)]
    LedgerLine.objects.bulk_create(rows, **terms)


paths(
    "new_",
    LedgerLine,
    _account,
    lock=lambda account: LedgerLine.fencing.lock(account=account),
    save=lambda account: LedgerLine(account=account).save(),
    force_insert=lambda account: LedgerLine(account=account).save(force_insert=True),
    asave=lambda account: awaited(LedgerLine(account=account).asave),
    save_base=lambda account: LedgerLine(account=account).save_base(),
    create=lambda account: LedgerLine.objects.create(account=account),
    acreate=lambda account: awaited(LedgerLine.objects.acreate, account=account),
    related_create=lambda account: account.ledgerline_set.create(),
    related_add=lambda account: account.ledgerline_set.add(LedgerLine(), bulk=False),
    # It takes an IntegrityError as a sign that another process created the row.
    get_or_create=(2, lambda account: LedgerLine.objects.get_or_create(account=account)),
    update_or_create=(2, lambda account: LedgerLine.objects.update_or_create(account=account)),
    bulk_create=_bulk_create,
    bulk_create_many=(2, lambda account: _bulk_create(account, 3, batch_size=2)),
    abulk_create=lambda account: awaited(
        LedgerLine.objects.abulk_create, [LedgerLine(account=account)]
    ),
    ignore_conflicts=(2, lambda account: _bulk_create(account, 3, ignore_conflicts=True)),
    deserialised=lambda account: _loaded("tests.ledgerline", account=account.pk).object.save(),
)

slow = pytest.mark.slow
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


@every_path
@pytest.mark.parametrize(
    "is_pinned", [False, pytest.param(True, marks=slow)], ids=["", "in its transaction"]
)
def test_under_its_lease_the_row_is_written(database, path, is_pinned):
    row = path.make()
    before = path.found()
    with path.lock(row) as lease:
        if is_pinned:
            with lease.atomic():
                path.write(row)
        else:
            with statements(path.count):
                path.write(row)
        assert path.found() != before
        assert path.fences() <= {lease.token}


@every_path
def test_without_its_lease_nothing_is_written(database, path):
    row = path.make()
    name = path.lock(row).name
    with path.refused(LockRequired, match=f"needs lock '{name}'; none is held here"):
        path.write(row)
    with lock("other"), path.refused(LockRequired, match="held here: 'other'"):
        path.write(row)
    with lock("other") as lease, lease.atomic():  # noqa: SIM117
        with path.refused(LockRequired), transaction.atomic(using=database):
            path.write(row)
    with lock(name, fenced=False), path.refused(LockRequired, match="fenced=False"):
        path.write(row)


@every_path
def test_under_an_overtaken_lease_nothing_is_written(database, path):
    row = path.make()
    with path.lock(row) as lease:
        newer = overtake(lease)
        if path.model is not m.Meter:  # It compares with what the newer holder has written.
            with path.refused(StaleFence, match=r"newest token is|newer grant"):
                path.write(row)
        if not path.is_new:
            plainly(path.model.fencing.table, fence=newer)
            for _ in range(2):  # What failed once fails again.
                with path.refused(StaleFence):
                    path.write(row)


@every_path
@pytest.mark.parametrize("policy", [pytest.param("allow", marks=slow), "warn"])
def test_an_allowed_write_without_lock_leaves_the_fence(database, settings, path, policy, caplog):
    row = path.make()
    if not path.is_new:
        plainly(path.model.fencing.table, fence=5)
        row.refresh_from_db()
    before = path.found()
    settings.FENCEDLOCK_WITHOUT_LOCK = policy
    with caplog.at_level(logging.WARNING, "django_fencedlock"):
        path.write(row)
    assert ("without lock '" in caplog.text) == (policy == "warn")
    assert path.found() != before
    assert path.fences() <= {0 if path.is_new else 5}


@slow
@every_path
def test_a_policy_that_does_not_exist_allows_no_write(database, settings, path):
    row = path.make()
    settings.FENCEDLOCK_WITHOUT_LOCK = "warm"
    with path.refused(SettingsError, match="FENCEDLOCK_WITHOUT_LOCK is 'warm'"):
        path.write(row)


# Which object a path writes


@pytest.mark.parametrize("name", OF_ONE_ROW)
def test_a_row_that_the_newer_holder_deleted_is_never_inserted_again(database, invoice, name):
    with invoice.fencing.lock() as lease:
        overtake(lease)
        models.QuerySet(Invoice)._raw_delete(database)
        with contextlib.suppress(StaleFence, Invoice.DoesNotExist):
            PATHS[name].write(invoice)
        assert not rows_of(Invoice)


@pytest.mark.parametrize("name", OF_LOADED)
def test_a_loaded_object_whose_row_is_gone_is_refused(database, invoice, name):
    with invoice.fencing.lock() as lease:
        models.QuerySet(Invoice)._raw_delete(database)
        with pytest.raises(StaleFence, match="row was deleted"):
            PATHS[name].write(invoice)
        overtake(lease)
        with pytest.raises(StaleFence, match="newest token is 2"):
            PATHS[name].write(invoice)
        assert not rows_of(Invoice)


@pytest.mark.parametrize("name", OF_LOADED)
def test_an_object_read_before_the_lock_and_written_since_is_refused(database, invoice, name):
    old = [Invoice.objects.get() for _ in range(3)]
    write = PATHS[name].write
    with invoice.fencing.lock():
        Invoice.objects.update(amount=7)
    with invoice.fencing.lock() as lease:
        why = r"read before the lock was acquired, and written (under token 1 )?since; read"
        with refused(match=why) as caught:
            write(old[0])
        assert type(caught.value) is StaleObject
        Invoice.objects.update(note="written")
        with refused():
            write(old[1])
        write(Invoice.objects.get())
        overtake(lease)
        with refused() as caught:
            write(old[2])
        assert type(caught.value) is StaleFence


# Other transactions and databases


@pytest.mark.django_db(databases=["default", "postgres"])
@pytest.mark.parametrize("alias", ["default", "postgres"])
@pytest.mark.parametrize("name", FEW)
def test_within_a_tests_own_transaction(settings, alias, name):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": alias}}
    settings.DATABASE_ROUTERS = [Everything(alias)]
    path = PATHS[name]
    row = path.make()
    with row.fencing.lock() as lease:
        overtake(lease)
        with refused(), transaction.atomic(using=alias):
            path.write(row)
    with row.fencing.lock(), statements(path.count):
        path.write(row)


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.parametrize("name", FEW)
def test_fences_of_another_database_are_refused(settings, name):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
    invoice = Invoice.objects.create()
    with invoice.fencing.lock(), refused(WrongDatabase, match="'default'.*'postgres'"):
        PATHS[name].write(invoice)
    path = PATHS[f"high_water_{name}"]
    meter = path.make()
    with meter.fencing.lock() as lease:
        path.write(meter)
        assert path.fences() <= {lease.token}
