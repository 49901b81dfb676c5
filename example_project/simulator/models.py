"""
The counter that all clients write, once for each way to fence it.

Their tables are in the databases that the simulator makes for itself; in the project's own they
stay empty.
"""

from django.db import models

from django_fencedlock.models import FencedModel, Fencing

LOCK = "counter:{run}"


class Counter(models.Model):
    """What the three have in common. One row for each run of the simulation."""

    run = models.CharField(max_length=40, primary_key=True)
    value = models.IntegerField(default=0)

    class Meta:
        abstract = True


class PlainCounter(Counter):
    """Nobody looks at the token."""

    def __str__(self):
        return f"{self.run}: {self.value}"


class HighWaterCounter(FencedModel, Counter):
    """The row's own fence never goes down."""

    fencing = Fencing(LOCK, mode="high_water")

    def __str__(self):
        return f"{self.run}: {self.value}"


class SerialisedCounter(FencedModel, Counter):
    """No write commits after a newer grant was recorded."""

    fencing = Fencing(LOCK)

    def __str__(self):
        return f"{self.run}: {self.value}"


COUNTERS = {"off": PlainCounter, "high_water": HighWaterCounter, "serialised": SerialisedCounter}
