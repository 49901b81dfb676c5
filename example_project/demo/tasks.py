"""The task of the demonstration: `accounts.tasks.book`, which also sends events."""

from decimal import Decimal
from typing import Any

from celery import shared_task

from django_fencedlock import StaleFence, current_lease
from django_fencedlock.celery import single_instance

from ..accounts.models import Account
from . import stage
from .models import PlainAccount


# After a stale write, retry at once with a new message.
@shared_task(bind=True, autoretry_for=(StaleFence,), retry_kwargs={"countdown": 0})
@single_instance("account:{account_id}", backend="demo", on_conflict="wait", blocking_timeout=25)
def book(self: Any, account_id: int, amount: str, reference: str, fenced: bool, ask: bool) -> None:
    """Read the account, ask if wanted, and write: all under the account's lock."""
    model = Account if fenced else PlainAccount
    token = current_lease().token
    stage.tell("acquired", token=token)
    account = model.objects.get(pk=account_id)
    stage.tell("read", balance=account.balance)
    if ask and not self.request.retries:
        # The answer may take long, and this process is paused before it arrives.
        stage.ask()
    try:
        account.post(Decimal(amount), reference)
    except StaleFence as exc:
        # Not later: the retry may begin before this task has ended.
        stage.tell("refused", message=str(exc))
        raise
    stage.tell("wrote", balance=account.balance, token=token)
