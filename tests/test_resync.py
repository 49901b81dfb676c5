"""Fences that are older than the rows, as after a restore of one of them alone."""

import contextlib
import threading

import pytest
from django.db import connections, transaction

from django_fencedlock import current_lease, lock
from django_fencedlock.exceptions import StaleFence
from django_fencedlock.models import Fence, Fencing
from django_fencedlock.ops import resync
from django_fencedlock.storage import fences
from tests import models as m
from tests.models import Account, Invoice, LedgerLine, Seat, Unique, Vehicle
from tests.test_write_paths import Everything
from tests.threads import beside

ON_ALL = pytest.mark.parametrize(
    "database",
    [
        pytest.param(
            each, marks=pytest.mark.django_db(transaction=True, databases=["default", each])
        )
        for each in ("default", "postgres", "mariadb")
    ],
)
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def database():
    return "default"


@pytest.fixture(autouse=True)
def on(database, settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": database}}
    settings.DATABASE_ROUTERS = [Everything(database)]


def written(model, **values):
    row = model(**values)
    with row.fencing.lock() if row.fencing.name() else contextlib.nullcontext() as first:
        row.save()
    for _ in range(3 if first else 4):
        with row.fencing.lock():
            pass
    with row.fencing.lock():
        row = model.objects.get(pk=row.pk)
        row.save()
    assert row.fence == 5
    return row


def restored(token=2, owner="old"):
    Fence.objects.update(token=token, owner=owner)


def lift(model, dry_run=False):
    return resync.resync(model, dry_run=dry_run)


@ON_ALL
@pytest.mark.parametrize("damage", ["old", "missing"])
def test_a_fence_below_its_row_is_raised_above_it(database, damage):
    row, other = written(Invoice), written(Invoice)
    restored()
    with pytest.raises(StaleFence), row.fencing.lock():
        row.save()
    if damage == "missing":
        Fence.objects.all().delete()

    dry = lift(Invoice, dry_run=True)
    assert (dry.rows, dry.locked) == (2, [])
    assert dry.low == {row.fencing.name(): 5, other.fencing.name(): 5}
    assert Fence.objects.filter(token__gt=3).count() == 0

    assert lift(Invoice).low == dry.low
    assert {(each.token, each.owner) for each in Fence.objects.all()} == {(6, "")}
    assert lift(Invoice).low == {}
    with row.fencing.lock() as lease:
        assert lease.token == 7
        row.refresh_from_db()
        row.save()


@ON_ALL
def test_healthy_fences_stay_unchanged(database):
    row = written(Invoice)
    with row.fencing.lock() as lease:
        row.refresh_from_db()
        row.save()
        assert lift(Invoice).low == {}
        assert Fence.objects.values_list("token", "owner").get() == (6, lease.owner_id)
        row.save()


@ON_ALL
def test_a_former_holder_is_rejected_even_with_the_newest_token(database):
    row = written(Invoice)
    with pytest.raises(StaleFence), row.fencing.lock() as lease:
        restored(token=2, owner=lease.owner_id)
        lift(Invoice)
        with lease.atomic():
            raise AssertionError("The transaction began.")
    assert current_lease() is None


@pytest.mark.slow
@ON_ALL
def test_a_locked_fence_is_reported_and_the_others_are_raised(database, monkeypatch):
    if database == "default":
        pytest.skip("SQLite has one writer at a time")
    monkeypatch.setattr(fences, "PATIENCE", 1)
    rows = [written(Invoice) for _ in range(3)]
    restored()
    names = sorted(row.fencing.name() for row in rows)
    with transaction.atomic(using=database):
        Fence.objects.using(database).select_for_update().get(name=names[1])
        outcome = lift(Invoice)
    assert outcome.locked == [names[1]]
    assert sorted(outcome.low) == names
    assert Fence.objects.get(name=names[1]).token == 2
    assert Fence.objects.filter(token=6).count() == 2


@ON_ALL
def test_a_grant_before_the_raise_stays_the_newest(database):
    row = written(Invoice)
    with row.fencing.lock() as lease:
        fences.lift(database, {lease.name: 5})
        assert Fence.objects.values_list("token", "owner").get() == (6, lease.owner_id)


@ON_ALL
def test_tokens_stay_unique_beside_grants(database):
    """Grants run all the while: no token comes twice, and none at or below the row's after it."""
    row = written(Invoice)
    restored()
    name, stop, tokens = row.fencing.name(), threading.Event(), []

    def take():
        while not stop.is_set():
            with lock(name, blocking_timeout=20) as lease:
                tokens.append(lease.token)

    taking = [beside(take) for _ in range(2)]
    for _ in range(10):
        lift(Invoice)
    stop.set()
    for each in taking:
        each.result(60)
    assert len(tokens) == len(set(tokens))
    with lock(name) as lease:
        assert lease.token > max(5, *tokens)


def test_names_that_several_rows_share_go_by_the_highest(monkeypatch):
    monkeypatch.setattr(resync, "BATCH", 2)
    account = Account.objects.create()
    lines = [LedgerLine(account=account) for _ in range(5)]
    with LedgerLine.fencing.lock(account_id=account.pk):
        for line in lines:
            line.save()
    with connections["default"].cursor() as cursor:
        table = LedgerLine._meta.db_table
        for place, fence in enumerate((9, 7, 3, 8, 4)):
            cursor.execute(f"UPDATE {table} SET fence = %s WHERE id = %s", [fence, lines[place].pk])
    dry, real = lift(LedgerLine, dry_run=True), lift(LedgerLine)
    assert (dry.rows, dry.low) == (real.rows, real.low) == (5, {f"account:{account.pk}": 9})
    assert Fence.objects.get().token == 10


@pytest.mark.parametrize(
    ("model", "values"),
    [
        *((Unique, {}), (Seat, {"row": "A", "number": 1}), (m.Called, {"amount": 3})),
        *((m.Meter, {"serial": "m"}), (Vehicle, {})),
    ],
)
def test_every_kind_of_key_and_name(model, values, monkeypatch):
    monkeypatch.setattr(resync, "BATCH", 1)
    rows = [written(model, **values)]
    if model in (Unique, Vehicle):
        rows += [written(model), written(model)]
    elif model is Seat:
        rows += [written(Seat, row="A", number=2), written(Seat, row="B", number=1)]
    restored()
    outcome = lift(model)
    assert outcome.rows == len(rows)
    assert set(outcome.low) == {row.fencing.name() for row in rows}
    assert not Fence.objects.filter(token__lt=6).exists()


def test_rows_without_a_lock_name_are_counted(monkeypatch):
    monkeypatch.setattr(m.Called, "fencing", Fencing(lambda row: row.note or None))
    written(m.Called, note="a")
    written(m.Called, note="b")
    with connections["default"].cursor() as cursor:
        cursor.execute("UPDATE tests_called SET note = '' WHERE note = 'b'")
    restored()
    done = lift(m.Called)
    assert (done.rows, done.nameless, done.low) == (2, 1, {"a": 5})


def test_children_are_covered_by_their_parents():
    assert Vehicle in resync.models()
    assert not {m.Truck, m.Trailer} & set(resync.models())
    row = written(m.Trailer)
    restored()
    assert lift(Vehicle).low == {row.fencing.name(): 5}


def test_labels_of_models():
    assert resync.models(["tests.Invoice"]) == [Invoice]
    with pytest.raises(LookupError, match=r"tests\.Account isn't a fenced model"):
        resync.models(["tests.Account"])
