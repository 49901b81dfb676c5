from django.db import models

from django_fencedlock.models import FencedModel, Fencing


class Sale(FencedModel):
    """A sale of a few items, first come, first served."""

    fencing = Fencing("sale:{pk}")

    title = models.CharField(max_length=100)
    left = models.PositiveIntegerField()

    def __str__(self) -> str:
        return self.title


class Order(FencedModel):
    """A sold item, written under the sale's lock."""

    fencing = Fencing("sale:{sale_id}")

    sale = models.ForeignKey(Sale, models.PROTECT, related_name="orders")
    buyer = models.CharField(max_length=100)

    def __str__(self) -> str:
        return f"{self.sale} for {self.buyer}"


class Stock(FencedModel):
    """The stock of an article in a warehouse. All articles of a warehouse share a lock."""

    fencing = Fencing("warehouse:{warehouse}")

    warehouse = models.SlugField(max_length=40)
    article = models.CharField(max_length=40)
    count = models.PositiveIntegerField()

    class Meta:
        verbose_name_plural = "stock"
        constraints = [
            models.UniqueConstraint(fields=["warehouse", "article"], name="counted_once"),
        ]

    def __str__(self) -> str:
        return f"{self.article} in {self.warehouse}: {self.count}"
