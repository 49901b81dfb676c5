import csv
from pathlib import Path

from celery import shared_task
from django.conf import settings
from django.db import transaction

from django_fencedlock import LeaseLost, StaleFence
from django_fencedlock.celery import single_instance

from .models import Stock


# The warehouse triggers this with every change. All triggers during a run are coalesced into one
# further run.
@shared_task(acks_late=True, autoretry_for=(StaleFence, LeaseLost), retry_backoff=True)
@single_instance("warehouse:{warehouse}", on_conflict="coalesce")
def import_stock(warehouse: str) -> int:
    """Import the stock from the file of a warehouse."""
    rows = [
        Stock(warehouse=warehouse, article=article, count=count)
        for article, count in counted(warehouse).items()
    ]
    # One statement, under the lock of all its rows; the lock name's field must be in unique_fields.
    # A stale write rolls back the enclosing transaction: in a test, only this one.
    with transaction.atomic():
        Stock.objects.bulk_create(
            rows,
            update_conflicts=True,
            unique_fields=["warehouse", "article"],
            update_fields=["count"],
        )
    return len(rows)


def counted(warehouse: str) -> dict[str, int]:
    """Read the counts from the file of a warehouse."""
    with Path(settings.WAREHOUSES, f"{warehouse}.csv").open(newline="") as file:
        return {row["article"]: int(row["count"]) for row in csv.DictReader(file)}
