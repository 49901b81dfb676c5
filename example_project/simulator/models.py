"""
The counter that all clients write, one model for each fencing mode.

The simulator creates their tables in its own databases; in the project's database they stay empty.
"""

from django.db import models

from django_fencedlock.models import FencedModel, Fencing

LOCK = "counter:{run}"


class Counter(models.Model):
    """Base class of the counters. One row per run of the simulation."""

    run = models.CharField(max_length=40, primary_key=True)
    value = models.IntegerField(default=0)

    class Meta:
        abstract = True


class PlainCounter(Counter):
    """No write checks the token."""

    def __str__(self):
        return f"{self.run}: {self.value}"


class HighWaterCounter(FencedModel, Counter):
    """The row's fence never goes down."""

    fencing = Fencing(LOCK, mode="high_water")

    def __str__(self):
        return f"{self.run}: {self.value}"


class SerialisedCounter(FencedModel, Counter):
    """No write commits after a newer grant was recorded."""

    fencing = Fencing(LOCK)

    def __str__(self):
        return f"{self.run}: {self.value}"


COUNTERS = {"off": PlainCounter, "high_water": HighWaterCounter, "serialised": SerialisedCounter}
