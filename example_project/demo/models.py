"""
Plain models of the accounts' tables, to show what goes wrong without `FencedModel`.

The code that books is the same.
"""

from django.db import models

from ..accounts.models import Account, Entry


class PlainAccount(models.Model):
    number = models.CharField(max_length=20, unique=True)
    balance = models.DecimalField(max_digits=12, decimal_places=2, default=0)

    post = Account.post
    total = Account.total

    class Meta:
        managed = False
        db_table = Account._meta.db_table

    def __str__(self) -> str:
        return f"account {self.number}"


class PlainEntry(models.Model):
    account = models.ForeignKey(PlainAccount, models.PROTECT, related_name="entries")
    amount = models.DecimalField(max_digits=12, decimal_places=2)
    reference = models.CharField(max_length=100)
    booked_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        managed = False
        db_table = Entry._meta.db_table

    def __str__(self) -> str:
        return f"{self.amount} for {self.reference}"
