from datetime import date, datetime, time, timedelta
from decimal import Decimal

from celery import shared_task
from django.db.models import Sum
from django.utils import timezone

from django_fencedlock import LeaseLost, StaleFence, current_lease
from django_fencedlock.celery import single_instance

from .models import Account, Closing, Entry


# After a stale write or a lost lock, the retry acquires the lock and reads again.
@shared_task(acks_late=True, autoretry_for=(StaleFence, LeaseLost), retry_backoff=True)
@single_instance(Account, pk="{account_id}", on_conflict="retry", retry_countdown=1)
def book(account_id: int, amount: str, reference: str) -> bool:
    """Book an amount. It is text because JSON has no decimals."""
    account = Account.objects.get(pk=account_id)
    return account.post(Decimal(amount), reference)


# One close at a time for all days; a second one is skipped. After an hour the lock is released.
@shared_task(acks_late=True, autoretry_for=(StaleFence, LeaseLost), retry_backoff=True)
@single_instance("nightly-close", max_hold=timedelta(hours=1))
def close_day(day: str | None = None) -> int:
    """Record every account's balance at the end of a day (default: yesterday)."""
    closed = date.fromisoformat(day) if day else timezone.localdate() - timedelta(days=1)
    balances = balances_at(closed)
    # The fence covers every write in this block: plain models, deletions, raw SQL. Keep it short:
    # the next grant of the lock waits for its end.
    with current_lease("nightly-close").atomic():
        Closing.objects.replace(closed, balances)
    return len(balances)


def balances_at(day: date) -> dict[int, Decimal]:
    """Return the balances at the end of a day, by account."""
    end = timezone.make_aware(datetime.combine(day + timedelta(days=1), time.min))
    booked = Entry.objects.filter(booked_at__lt=end).values_list("account")
    return dict(booked.annotate(Sum("amount")).order_by("account"))
