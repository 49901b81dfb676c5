"""What the clients protect. Row 1 of each table is protected by the lock row:1, and so on."""

from django.db import models

from django_fencedlock.models import FencedModel, Fencing


class Counted(models.Model):
    """A counter that every write raises by one, and a stamp that no two writes share."""

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


PROTECTED = {"tally": Tally, "gauge": Gauge, "plain": Plain}
