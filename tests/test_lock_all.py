"""`fencing.lock_all()`: the locks of many rows, all of them or none."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import models

from django_fencedlock import LeaseLost, LockNotAcquired
from django_fencedlock.core.manager import service
from django_fencedlock.lease_context import held_names
from django_fencedlock.models import Fencing
from django_fencedlock.test import assert_locked, assert_not_locked, hold_lock, lose_lease
from tests.failing import unavailable
from tests.models import Account, Called, Invoice, LedgerLine, Shelf, Truck, Vehicle
from tests.servers.process import wait_until
from tests.test_write_paths import awaited

pytestmark = pytest.mark.django_db(transaction=True)
PKS = (8, 9, 10, 11)
#: In the order of their bytes.
NAMES = ["tests.invoice:10", "tests.invoice:11", "tests.invoice:8", "tests.invoice:9"]


@pytest.fixture
def rows():
    Invoice.objects.bulk_create(Invoice(pk=pk, amount=pk) for pk in PKS)
    return Invoice.objects.order_by("pk")


def test_all_locks_are_held_within_the_block_and_released_after_it(rows):
    with Invoice.fencing.lock_all(rows, ttl=7) as leases:
        assert list(leases) == NAMES
        assert {name: each.name for name, each in leases.items()} == {n: n for n in NAMES}
        assert {each.ttl for each in leases.values()} == {7}
        assert rows.update(note="x") == 4
        for row in rows:
            row.save()
    assert held_names() == ()
    for name in NAMES:
        assert_not_locked(name)


def test_a_coroutine_holds_them_as_well(rows):
    async def write():
        async with Invoice.fencing.lock_all(rows) as leases:
            assert await Invoice.objects.aupdate(note="x") == 4
        assert held_names() == ()
        return list(leases)

    assert awaited(write) == NAMES
    with pytest.raises(LockNotAcquired, match=NAMES[2]), hold_lock(NAMES[2]):
        awaited(Invoice.fencing.lock_all(rows, blocking_timeout=0).__aenter__)
    for name in NAMES:
        assert_not_locked(name)


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda rows: rows[1:3], ["tests.invoice:10", "tests.invoice:9"]),
        (lambda rows: rows.none(), []),
        (lambda rows: [], []),
        (lambda rows: list(rows), NAMES),
        (lambda rows: iter(rows), NAMES),
        (lambda rows: Invoice.objects, NAMES),
        (lambda rows: models.QuerySet(Invoice).filter(pk=9), ["tests.invoice:9"]),
        (lambda rows: Invoice.objects.filter(pk=8).union(Invoice.objects.filter(pk=9)), NAMES[2:]),
    ],
)
def test_rows_are_a_queryset_or_objects(rows, choose, expected):
    with Invoice.fencing.lock_all(choose(rows)) as leases:
        assert list(leases) == expected


def test_rows_of_one_lock_need_it_once():
    accounts = [Account.objects.create() for _ in range(2)]
    lines = [LedgerLine(account=accounts[number % 2]) for number in range(4)]
    names = sorted(f"account:{each.pk}" for each in accounts)
    with LedgerLine.fencing.lock_all(lines) as leases:
        assert list(leases) == names
        LedgerLine.objects.bulk_create(lines)
    with LedgerLine.fencing.lock_all(LedgerLine.objects.all()) as leases:
        assert list(leases) == names
    with Called.fencing.lock_all([Called(amount=5), Called(amount=7)]) as leases:
        assert list(leases) == ["called:1"]
    with Truck.fencing.lock_all([Truck(pk=1), Vehicle(pk=2)]) as leases:
        assert list(leases) == ["tests.vehicle:1", "tests.vehicle:2"]


def test_the_queryset_keeps_no_rows_that_were_read_before_the_locks(rows):
    with Invoice.fencing.lock_all(rows[:2]), Invoice.fencing.lock_all(rows):
        assert rows._result_cache is None


def test_one_that_is_held_by_another_holder_leaves_none(rows):
    with hold_lock(NAMES[2]) as other:
        locks = Invoice.fencing.lock_all(rows, blocking_timeout=0)
        with pytest.raises(LockNotAcquired) as caught, locks:
            pytest.fail("the block was entered")
        assert caught.value.name == NAMES[2]
        assert str(caught.value.holder) == str(other.holder)
        assert str(other.holder) in str(caught.value)
        assert list(caught.value.holders) == [NAMES[2]]
        for name in (NAMES[0], NAMES[1], NAMES[3]):
            assert_not_locked(name)
    with locks:  # Once more.
        assert_locked(NAMES[2])


def test_the_options_are_those_of_lock(rows, settings):
    settings.FENCEDLOCK = {"default": {"BLOCKING_TIMEOUT": 2.5}}
    assert Invoice.fencing.lock_all(rows).blocking_timeout == 2.5
    assert Invoice.fencing.lock_all(rows, blocking_timeout=0.5).blocking_timeout == 0.5
    assert Invoice.fencing.lock_all(rows, blocking_timeout=None).blocking_timeout == float("inf")
    locks = Invoice.fencing.lock_all(rows, required=False, blocking_timeout=0)
    with hold_lock(NAMES[2]), locks as leases:
        assert leases is None
    with locks as leases:
        assert list(leases) == NAMES


def test_a_lease_that_is_lost_is_an_error_at_the_end(rows):
    locks = Invoice.fencing.lock_all(rows)
    with pytest.raises(LeaseLost, match=NAMES[1]), locks as leases:
        lose_lease(leases[NAMES[1]])
    with pytest.raises(KeyError), locks as leases:
        lose_lease(leases[NAMES[1]])
        raise KeyError
    for name in NAMES:
        assert_not_locked(name)


def test_a_release_that_fails_keeps_no_other_lock(rows, monkeypatch):
    backend = service("default").backend
    release = backend.release

    def fail_once(grant):
        return (unavailable if grant.name == NAMES[1] else release)(grant)

    with Invoice.fencing.lock_all(rows):
        monkeypatch.setattr(backend, "release", fail_once)
    monkeypatch.undo()
    for name in (NAMES[0], NAMES[2], NAMES[3]):
        wait_until(lambda name=name: not backend.holders([name]), f"{name} is free")


def test_a_set_may_be_entered_again_and_by_other_holders(rows):
    locks = Invoice.fencing.lock_all(rows, blocking_timeout=0)
    with locks as outer, locks as inner:
        assert dict(outer) == dict(inner)
        with ThreadPoolExecutor(1) as other, pytest.raises(LockNotAcquired):
            other.submit(locks.__enter__).result()
        with Invoice.fencing.lock_all(rows):
            pass
        assert_locked(NAMES[0])
    for name in NAMES:
        assert_not_locked(name)


def test_rows_of_another_alias_are_an_error(rows, settings, monkeypatch):
    settings.FENCEDLOCK = {"default": {}, "other": {}}
    monkeypatch.setattr(Truck, "fencing", Fencing(backend="other"))
    trucks = [Truck(pk=1), Vehicle(pk=2)]
    text = "rows of Truck, whose locks are of alias 'other', not 'default'"
    with pytest.raises(ValueError, match=text), Vehicle.fencing.lock_all(trucks):
        pytest.fail("the block was entered")
    with Vehicle.fencing.lock_all(trucks, backend="default") as leases:
        assert {lease.alias for lease in leases.values()} == {"default"}


def enter(rows):
    with Invoice.fencing.lock_all(rows):
        pass


async def enter_in_coroutine():
    enter([])


VALUES = (
    "Invoice.fencing.lock_all() takes rows, not their values: remove values(), values_list(), "
    "dates() or datetimes() from the queryset."
)
NOT_ROWS = "takes a queryset or objects of Invoice, not "
WRONG = [
    (lambda: enter([9]), TypeError, NOT_ROWS + "9. Write Invoice.objects.filter(pk__in=[...])."),
    (lambda: enter([Shelf(pk=1)]), TypeError, NOT_ROWS + "<Shelf"),
    (lambda: enter(Shelf.objects.all()), TypeError, NOT_ROWS + "<Shelf"),
    *(
        (lambda values=values: enter(values(Invoice.objects)), TypeError, VALUES)
        for values in (
            lambda rows: rows.values("note"),
            lambda rows: rows.values_list("pk")[:1],
            lambda rows: rows.values_list("pk").union(rows.values_list("pk")),
        )
    ),
    (lambda: enter([Invoice()]), ValueError, "no lock yet: id is empty. Save it first."),
    (lambda: Invoice.fencing.lock_all([], ttl=0), ValueError, "ttl is 0"),
    (lambda: Invoice.fencing.lock_all([], fenced=0), TypeError, "has no argument fenced; it has"),
    (lambda: Invoice.fencing.lock_all([], shared=True), TypeError, "has no argument shared; it"),
    (
        lambda: awaited(enter_in_coroutine),
        SynchronousOnlyOperation,
        "write `async with Invoice.fencing.lock_all()`",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), WRONG)
def test_what_is_wrong_is_said(call, error, text):
    Shelf.objects.create()
    with pytest.raises(error, match=re.escape(text)):
        call()
