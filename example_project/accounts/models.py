from datetime import date
from decimal import Decimal

from django.db import models, transaction
from django.db.models import Sum

from django_fencedlock.models import FencedModel, Fencing


class Account(FencedModel):
    """An account. Its lock also protects its ledger."""

    fencing = Fencing("account:{pk}")

    number = models.CharField(max_length=20, unique=True)
    balance = models.DecimalField(max_digits=12, decimal_places=2, default=0)

    def __str__(self) -> str:
        return f"account {self.number}"

    def post(self, amount: Decimal, reference: str) -> bool:
        """
        Book an amount once per reference. Return False if it was already booked.

        Read the account under its lock before.
        """
        with transaction.atomic():
            if self.entries.filter(reference=reference).exists():
                return False
            self.balance += amount
            self.save(update_fields=["balance"])
            self.entries.create(amount=amount, reference=reference)
        return True

    def total(self) -> Decimal:
        """Return the sum of the ledger, which the balance must equal."""
        return self.entries.aggregate(total=Sum("amount", default=Decimal()))["total"]


class Entry(FencedModel):
    """A line of an account's ledger, protected by the account's lock."""

    fencing = Fencing("account:{account_id}")

    account = models.ForeignKey(Account, models.PROTECT, related_name="entries")
    amount = models.DecimalField(max_digits=12, decimal_places=2)
    reference = models.CharField(max_length=100)
    booked_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "entries"
        constraints = [
            # A task that runs again after its worker died books nothing twice.
            models.UniqueConstraint(fields=["account", "reference"], name="booked_once"),
        ]

    def __str__(self) -> str:
        return f"{self.amount} for {self.reference}"


class ClosingQuerySet(models.QuerySet["Closing"]):
    def replace(self, day: date, balances: dict[int, Decimal]) -> None:
        """Replace a day's closings with these balances by account."""
        self.filter(day=day).delete()
        self.bulk_create(
            Closing(day=day, account_id=account, balance=balance)
            for account, balance in balances.items()
        )


class Closing(models.Model):
    """An account's balance at the end of a day. A plain model, written in fenced transactions."""

    day = models.DateField()
    account = models.ForeignKey(Account, models.PROTECT, related_name="closings")
    balance = models.DecimalField(max_digits=12, decimal_places=2)

    objects = ClosingQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["account", "day"], name="closed_once"),
        ]

    def __str__(self) -> str:
        return f"{self.account} on {self.day}: {self.balance}"
