"""Example rows for the admin."""

import csv
from decimal import Decimal
from pathlib import Path

from django.conf import settings

from ..accounts.models import Account
from ..billing.models import Customer, Invoice
from ..shop.models import Sale
from ..shop.tasks import import_stock


def seed() -> None:
    """Add the missing rows."""
    for number in ("1000", "1001"):
        account, _ = Account.objects.get_or_create(number=number)
    customer, _ = Customer.objects.get_or_create(
        name="Ada Example", defaults={"email": "ada@example.org"}
    )
    for number, amount in (("2026-1", "120.00"), ("2026-2", "79.90"), ("2026-3", "15.00")):
        Invoice.objects.get_or_create(
            number=number,
            defaults={"customer": customer, "account": account, "amount": Decimal(amount)},
        )
    Sale.objects.get_or_create(title="The last ten lamps", defaults={"left": 10})
    _count("north", {"lamp": 10, "bulb": 250})
    # Called like a function, a task acquires its lock as in a worker.
    import_stock("north")


def _count(warehouse: str, articles: dict[str, int]) -> None:
    directory = Path(settings.WAREHOUSES)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{warehouse}.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("article", "count"), *articles.items()])
