from celery import shared_task
from django.db import transaction

from django_fencedlock import LeaseLost, LockNotAcquired, StaleFence, current_lease
from django_fencedlock.celery import single_instance
from django_fencedlock.exceptions import BackendUnavailable

from ..accounts.models import Account
from . import gateway
from .models import Invoice

AGAIN = (
    *(gateway.NoAnswer, gateway.StaleRequest),
    *(StaleFence, LeaseLost, LockNotAcquired, BackendUnavailable),
)


@shared_task(
    # Without reject_on_worker_lost, Celery marks a run as failed if its child process was killed.
    acks_late=True,
    reject_on_worker_lost=True,
    autoretry_for=AGAIN,
    retry_backoff=True,
    max_retries=8,
)
@single_instance(Invoice, pk="{invoice_id}", ttl=60, on_conflict="retry")
def charge(invoice_id: int) -> str:
    """Charge an invoice. The task can safely run again after any failure."""
    invoice = Invoice.objects.get(pk=invoice_id)
    if invoice.status == Invoice.OPEN:
        token = current_lease(invoice.fencing.name()).token
        receipt = gateway.charge(f"invoice-{invoice.pk}", invoice.amount, token)
        settle(invoice, receipt)
    return invoice.receipt


def settle(invoice: Invoice, receipt: str) -> None:
    """Mark an invoice as paid and book it in one transaction, each under its own lock."""
    # Always acquire the invoice's lock before the account's, to prevent a deadlock. The transaction
    # is inside both, so the locks are released after the commit.
    with Account.fencing.lock(pk=invoice.account_id), transaction.atomic():
        account = Account.objects.get(pk=invoice.account_id)
        account.post(invoice.amount, reference=f"invoice {invoice.number}")
        invoice.status, invoice.receipt = Invoice.PAID, receipt
        invoice.save()
