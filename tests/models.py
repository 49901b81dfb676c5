"""Fenced and plain models for the tests."""

import uuid
from decimal import Decimal
from typing import Any, ClassVar

from django.contrib.contenttypes.fields import GenericForeignKey, GenericRelation
from django.contrib.contenttypes.models import ContentType
from django.db import models

from django_fencedlock import lock
from django_fencedlock.models import FencedManager, FencedModel, Fencing, VersionedModel


class Account(models.Model):
    """Plain: what is fenced refers to it."""

    name = models.CharField(max_length=50, default="")
    balance = models.IntegerField(default=0)

    def __str__(self):
        return self.name


class Invoice(FencedModel):
    """Its lock is named by its own primary key."""

    account = models.ForeignKey(Account, null=True, on_delete=models.SET_NULL)
    amount = models.IntegerField(default=0)
    note = models.CharField(max_length=50, default="")


class Docket(FencedModel):
    """Refers to another fenced row."""

    fencing = Fencing("dockets")

    invoice = models.ForeignKey(Invoice, on_delete=models.DO_NOTHING)


class LedgerLine(FencedModel):
    fencing = Fencing("account:{account_id}")

    account = models.ForeignKey(Account, on_delete=models.CASCADE)
    amount = models.IntegerField(default=0)


class Bin(FencedModel):
    """Its lock is a path."""

    fencing = Fencing("warehouse/{warehouse_id}/bin/{code}", path=True)

    warehouse_id = models.IntegerField()
    code = models.CharField(max_length=20, unique=True)
    count = models.IntegerField(default=0)


class Document(VersionedModel):
    text = models.CharField(max_length=50, default="")


class Contract(FencedModel, VersionedModel):
    text = models.CharField(max_length=50, default="")


class Clause(VersionedModel):
    """Is edited on the page of its contract."""

    # Not CASCADE: a contract is deleted in one statement, as other tests count.
    contract = models.ForeignKey(Contract, on_delete=models.DO_NOTHING)
    text = models.CharField(max_length=50, default="")


class Rebate(FencedModel):
    """Has the lock of its invoice."""

    fencing = Fencing("tests.invoice:{invoice_id}")

    invoice = models.ForeignKey(Invoice, on_delete=models.DO_NOTHING)
    amount = models.IntegerField(default=0)


class Deed(VersionedModel, FencedModel):
    text = models.CharField(max_length=50, default="")


# What a write can meet on its way


class Vehicle(FencedModel):
    """The parent of others: its table has their fence."""

    wheels = models.IntegerField(default=0)


class Truck(Vehicle):
    load = models.IntegerField(default=0)


class Trailer(Truck):
    axles = models.IntegerField(default=0)


class Van(Vehicle):
    class Meta:
        proxy = True


class Paper(VersionedModel):
    pages = models.IntegerField(default=0)


class Letter(Paper):
    sender = models.CharField(max_length=50, default="", unique=True)


class Shelf(models.Model):
    """Plain: has fenced rows that depend on it in several ways."""

    title = models.CharField(max_length=50, default="")
    remarks = GenericRelation("Remark")

    def __str__(self):
        return self.title


class Crate(FencedModel):
    """Has dependents of its own, so Django collects its rows one by one."""

    shelf = models.ForeignKey(Shelf, null=True, on_delete=models.CASCADE)
    weight = models.IntegerField(default=0)


class Box(FencedModel):
    """Goes with the box that it is in."""

    inside = models.ForeignKey("self", null=True, on_delete=models.CASCADE)


class Bottle(models.Model):
    crate = models.ForeignKey(Crate, on_delete=models.CASCADE)

    def __str__(self):
        return f"Bottle {self.pk}"


class Label(FencedModel):
    """Depends on a shelf without any lock of its own."""

    fencing = Fencing("shelf:{shelf_id}")

    shelf = models.ForeignKey(Shelf, null=True, on_delete=models.SET_DEFAULT, default=None)
    text = models.CharField(max_length=50, default="")


class Remark(FencedModel):
    """Depends on any kind of row."""

    # This app has no migrations, so its tables are made before those of the others.
    content_type = models.ForeignKey(ContentType, on_delete=models.CASCADE, db_constraint=False)
    object_id = models.BigIntegerField()
    about = GenericForeignKey()
    text = models.CharField(max_length=50, default="")


class Seat(FencedModel):
    pk = models.CompositePrimaryKey("row", "number")
    row = models.CharField(max_length=5)
    number = models.IntegerField()
    guest = models.CharField(max_length=50, default="")


class Price(FencedModel):
    """Has a column that the database computes."""

    net = models.IntegerField(default=0)
    gross = models.GeneratedField(
        expression=models.F("net") * 2, output_field=models.IntegerField(), db_persist=True
    )


class Careful(FencedModel):
    """Django looks whether the row is there before it is updated."""

    amount = models.IntegerField(default=0)

    class Meta:
        select_on_save = True


class Meter(FencedModel):
    """Compares with its own column alone."""

    fencing = Fencing(mode="high_water")

    serial = models.CharField(max_length=20, unique=True)
    reading = models.IntegerField(default=0)


class Stock(FencedModel):
    """Has a natural key that names its lock."""

    fencing = Fencing("stock:{sku}")

    sku = models.CharField(max_length=20, unique=True)
    count = models.IntegerField(default=0)


class Relaxed(FencedModel):
    fencing = Fencing(without_lock="allow")

    code = models.CharField(max_length=20, null=True, unique=True)  # noqa: DJ001
    amount = models.IntegerField(default=0)


class Warned(FencedModel):
    fencing = Fencing(without_lock="warn")

    amount = models.IntegerField(default=0)


class HeavyManager(FencedManager):
    def get_queryset(self):
        return super().get_queryset().filter(amount__gte=100)


class Filtered(FencedModel):
    """Its manager leaves rows out."""

    amount = models.IntegerField(default=0)

    objects: ClassVar[Any] = HeavyManager()


# What names can be made of


class Colour(models.TextChoices):
    RED = "red"
    BLUE = "blue"


class Parcel(FencedModel):
    """Its lock is named by columns of many kinds."""

    fencing = Fencing("{colour}/{day}/{price}/{at}/{owner}/{rank:03d}")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    colour = models.CharField(max_length=10, choices=Colour)
    day = models.DateField()
    price = models.DecimalField(max_digits=10, decimal_places=2, default=Decimal(0))
    at = models.DateTimeField()
    owner = models.ForeignKey(Stock, to_field="sku", on_delete=models.DO_NOTHING)
    rank = models.IntegerField(default=0)


class Shift(FencedModel):
    """Its lock is that of a day; the column has the minute."""

    fencing = Fencing("day:{at:%Y-%m-%d}")

    at = models.DateTimeField()
    note = models.CharField(max_length=50, default="")


class Depot(models.Model):
    """Plain: the parent of a fenced model, and what its lock is named by."""

    town = models.CharField(max_length=50, default="")

    def __str__(self) -> str:
        return self.town


class Warehouse(FencedModel, Depot):  # type: ignore[misc]
    """Its lock is named by a column of another table than the fence's."""

    fencing = Fencing("town:{town}:{floor}")

    floor = models.IntegerField(default=0)
    goods = models.IntegerField(default=0)


class Called(FencedModel):
    """Its lock is named by a callable."""

    fencing = Fencing(lambda called: f"called:{called.amount % 2}")

    amount = models.IntegerField(default=0)
    note = models.CharField(max_length=50, default="")


class Unique(FencedModel):
    """Its primary key is there before it is saved."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    amount = models.IntegerField(default=0)


class Topic(FencedModel):
    """What a many-to-many relation leads to."""

    text = models.CharField(max_length=50, default="")


class Folder(models.Model):
    """Plain, with such a relation."""

    topics = models.ManyToManyField(Topic)

    def __str__(self) -> str:
        return str(self.pk)


class Verse(FencedModel):
    """Has a place among those of its song, which are under one lock."""

    fencing = Fencing("song:{song_id}")

    song = models.ForeignKey(Account, on_delete=models.CASCADE)
    text = models.CharField(max_length=50, default="")

    class Meta:
        order_with_respect_to = "song"


class Ticket(FencedModel):
    """Its key is a text, which the admin quotes in addresses."""

    code = models.CharField(max_length=20, primary_key=True)
    amount = models.IntegerField(default=0)


# Base classes that save and delete in their own way


class Counted(models.Model):
    """Counts saves, as an audit log does."""

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return str(self.pk)

    def save(self, *args, **kwargs):
        self.saves = getattr(self, "saves", 0) + 1
        super().save(*args, **kwargs)


class Trash(Counted):
    """Marks a row as deleted, or deletes it if asked for that."""

    gone = models.BooleanField(default=False)
    why = models.CharField(max_length=50, default="")
    to_lock = ""

    class Meta:
        abstract = True

    def delete(self, *args, hard=False, why="", **kwargs):
        if hard:
            return super().delete(*args, **kwargs)
        if self.to_lock:
            lock(self.to_lock).acquire().release()
        self.gone, self.why = True, why
        self.save()
        return 0, {"kept": 1}


class FencedBeforeTrash(FencedModel, Trash):
    pass


class FencedAfterTrash(Trash, FencedModel):
    folder = models.ForeignKey(Folder, null=True, on_delete=models.CASCADE)


class VersionedBeforeTrash(VersionedModel, Trash):
    pass


class VersionedAfterTrash(Trash, VersionedModel):
    pass


class BetweenTheTwo(FencedModel, Trash, VersionedModel):
    pass


class TrashChild(FencedBeforeTrash):
    size = models.IntegerField(default=0)


class FolderOfTrash(models.Model):
    """Plain: is deleted along with a row."""

    trash = models.ForeignKey(FencedBeforeTrash, on_delete=models.CASCADE)

    def __str__(self) -> str:
        return str(self.pk)
