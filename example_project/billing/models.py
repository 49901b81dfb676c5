from django.db import models

from django_fencedlock.models import FencedModel, VersionedModel

from ..accounts.models import Account


class Customer(VersionedModel):
    """A customer, edited without a lock: the second of two concurrent edits is rejected."""

    name = models.CharField(max_length=100)
    email = models.EmailField()

    def __str__(self) -> str:
        return self.name


class Invoice(FencedModel, VersionedModel):
    """
    An invoice. A task charges it under its lock, billing.invoice:{pk}; users edit it.

    The version also detects conflicting writes without a lock, if you allow them later.
    """

    OPEN, PAID = "open", "paid"

    number = models.CharField(max_length=20, unique=True)
    customer = models.ForeignKey(Customer, models.PROTECT, related_name="invoices")
    account = models.ForeignKey(
        Account, models.PROTECT, help_text="The account that gets the money."
    )
    amount = models.DecimalField(max_digits=12, decimal_places=2)
    status = models.CharField(
        max_length=10, choices=[(OPEN, "open"), (PAID, "paid")], default=OPEN, editable=False
    )
    receipt = models.CharField(max_length=40, blank=True, editable=False)

    def __str__(self) -> str:
        return f"invoice {self.number}"
