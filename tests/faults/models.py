"""What the clients protect. Row 1 of the first three tables is protected by the lock row:1."""

from typing import ClassVar

from django.db import models

from django_fencedlock.models import FencedModel, Fencing


class Counted(models.Model):
    """A counter that every write raises by one, and a stamp that no two writes share."""

    #: What is before and after the row's number in the name of its lock.
    lock_name: ClassVar = ("row:", "")

    count = models.BigIntegerField(default=0)
    stamp = models.CharField(max_length=40, default="")

    class Meta:
        abstract = True


class Tally(Counted, FencedModel):
    """Every write is refused to all but the newest holder."""

    fencing = Fencing("row:{pk}")

    def __str__(self) -> str:
        return f"Tally {self.pk}"


class Gauge(Counted, FencedModel):
    """Compares with its own column alone."""

    fencing = Fencing("row:{pk}", mode="high_water")

    def __str__(self) -> str:
        return f"Gauge {self.pk}"


class Plain(Counted):
    """Fenced only inside of lease.atomic()."""

    def __str__(self) -> str:
        return f"Plain {self.pk}"


class Slot(Counted):
    """Protected by a permit: row 1 by permit 1, and so on."""

    lock_name: ClassVar = ("pool [permit ", "]")

    def __str__(self) -> str:
        return f"Slot {self.pk}"


class Stock(Counted):
    """Written by writers of a lock that readers share, inside of lease.atomic()."""

    lock_name: ClassVar = ("stock:", "")

    def __str__(self) -> str:
        return f"Stock {self.pk}"


class Reading(models.Model):
    """What a reader read in a row of Stock, written inside of its lease.atomic()."""

    stock = models.BigIntegerField()
    count = models.BigIntegerField()
    stamp = models.CharField(max_length=40)

    def __str__(self) -> str:
        return f"Reading {self.pk} of {self.stock}: {self.count}"


class Trail(models.Model):
    """
    The changes in the database, recorded in order by its triggers.

    A writer has locked the row, or the fence, by then: for one row, and for a fence and its rows,
    the order of the numbers is that of the commits.
    """

    kind = models.CharField(max_length=10)
    name = models.CharField(max_length=200)
    before = models.BigIntegerField(null=True)
    after = models.BigIntegerField()
    #: The fence column; None for a row that has none.
    token = models.BigIntegerField(null=True)
    #: The stamp of a write, the owner of a grant.
    stamp = models.CharField(max_length=40)

    def __str__(self) -> str:
        return f"{self.pk}: {self.kind} {self.name} {self.before} -> {self.after}"


PROTECTED = {"tally": Tally, "gauge": Gauge, "plain": Plain, "slot": Slot, "stock": Stock}
#: Permits of the pool, each with a row of its own. A permit above it would have none.
PERMITS = 3
