"""A plain model, which knows nothing of locks."""

from django.db import models


class Account(models.Model):
    balance = models.IntegerField()

    def __str__(self) -> str:
        return f"account {self.pk}: {self.balance}"
