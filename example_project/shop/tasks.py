import csv
from pathlib import Path

from celery import shared_task
from django.conf import settings
from django.db import transaction

from django_fencedlock import LeaseLost, StaleFence
from django_fencedlock.celery import single_instance

from .models import Stock


# The warehouse sends a trigger with every change. While one import runs, all that come leave their
# work to one further run.
@shared_task(acks_late=True, autoretry_for=(StaleFence, LeaseLost), retry_backoff=True)
@single_instance("warehouse:{warehouse}", on_conflict="coalesce")
def import_stock(warehouse: str) -> int:
    """Take over what a warehouse has, from the file that it writes."""
    rows = [
        Stock(warehouse=warehouse, article=article, count=count)
        for article, count in counted(warehouse).items()
    ]
    # One statement, under the lock that all of its rows have; what names the lock is a part of
    # unique_fields. If it is refused, so is everything in the transaction: in a test, in this one.
    with transaction.atomic():
        Stock.objects.bulk_create(
            rows,
            update_conflicts=True,
            unique_fields=["warehouse", "article"],
            update_fields=["count"],
        )
    return len(rows)


def counted(warehouse: str) -> dict[str, int]:
    """Read the file of a warehouse."""
    with Path(settings.WAREHOUSES, f"{warehouse}.csv").open(newline="") as file:
        return {row["article"]: int(row["count"]) for row in csv.DictReader(file)}
