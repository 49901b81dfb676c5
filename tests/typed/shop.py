"""A user's models, tasks and locks; each ``assert_type`` is a promise to type checkers."""

from typing import Any, ClassVar, assert_type

from celery import shared_task
from django.db import models

from django_fencedlock import Lease
from django_fencedlock.celery import SkippedRun, single_instance
from django_fencedlock.models import FencedManager, FencedModel, Fencing, VersionedModel


class Account(FencedModel, VersionedModel):
    balance = models.IntegerField(default=0)


class Sale(FencedModel, VersionedModel):
    class Meta:
        ordering = ("pk",)


class LedgerLine(FencedModel):
    fencing = Fencing("account:{account_id}", without_lock="warn")
    account = models.ForeignKey(Account, on_delete=models.PROTECT)
    amount = models.IntegerField()

    class Meta(FencedModel.Meta):
        verbose_name = "line of the ledger"


class BillManager(FencedManager["Bill"]):
    def unpaid(self) -> "models.QuerySet[Bill]":
        return self.filter(paid=False)


class Bill(FencedModel):
    paid = models.BooleanField(default=False)

    objects: ClassVar[BillManager] = BillManager()


def managers() -> None:
    assert_type(Bill.objects, BillManager)
    assert_type(Bill.objects.unpaid().get(), Bill)
    assert_type(Sale.objects.get(), Sale)


def blocks(pk: int) -> None:
    with Account.fencing.lock(pk=pk) as lease:
        assert_type(lease, Lease)
        account = Account.objects.get(pk=pk)
        assert_type(account, Account)
        account.balance += 1
        account.save(lease=lease)
        assert_type(account.fence, int)
        assert_type(account.version, int)
        Account.objects.using_lease(lease).filter(pk=pk).update(balance=0)
    with Account(pk=pk).fencing.lock() as lease:
        assert_type(lease, Lease)


@shared_task(acks_late=True)
@single_instance("invoice:{invoice_id}", ttl=30, on_conflict="retry")
def charge(invoice_id: int, currency: str = "EUR") -> str:
    return f"{invoice_id} {currency}"


@shared_task
@single_instance
def nightly() -> int:
    return 1


@single_instance(Account, pk="{account_id}")
def deposit(account_id: int, amount: int) -> None:
    return None


@single_instance("shop.Account", on_conflict="wait", blocking_timeout=None, columns={"ttl": "{x}"})
def deposit_by_label(x: int) -> int:
    return x


def tasks() -> None:
    # Called directly, it locks as well, and a conflict raises; a skip is for messages alone.
    assert_type(charge(1, currency="USD"), str)
    assert_type(nightly(), int)
    assert_type(charge.delay(1).id, str)
    deposit(account_id=1, amount=2)
    assert_type(deposit_by_label(1), int)


def told(result: Any) -> None:
    if isinstance(result, SkippedRun):
        print(result.lock, result.reason, result.holder, result.token)
