from django.db import models

from django_fencedlock.models import FencedModel, VersionedModel

from ..accounts.models import Account


class Customer(VersionedModel):
    """A customer, edited by people. There is no lock: of two who edit at once, one is refused."""

    name = models.CharField(max_length=100)
    email = models.EmailField()

    def __str__(self) -> str:
        return self.name


class Invoice(FencedModel, VersionedModel):
    """
    An invoice, charged by a task under its lock, billing.invoice:{pk}, and edited by people.

    The version is for writes that no lock covers, should you allow those one day.
    """

    OPEN, PAID = "open", "paid"

    number = models.CharField(max_length=20, unique=True)
    customer = models.ForeignKey(Customer, models.PROTECT, related_name="invoices")
    account = models.ForeignKey(Account, models.PROTECT, help_text="Where the money goes.")
    amount = models.DecimalField(max_digits=12, decimal_places=2)
    status = models.CharField(
        max_length=10, choices=[(OPEN, "open"), (PAID, "paid")], default=OPEN, editable=False
    )
    receipt = models.CharField(max_length=40, blank=True, editable=False)

    def __str__(self) -> str:
        return f"invoice {self.number}"
