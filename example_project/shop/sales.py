from django.db import transaction

from .models import Order, Sale


class SoldOut(Exception):
    """Nothing is left."""


def sell(sale_id: int, buyer: str) -> Order:
    """
    Sell one item.

    Raises:
        SoldOut: No item is left.
        LockNotAcquired: Too many buyers at once. Retry.
    """
    # First the lock, then the transaction: the lock is released after the commit.
    with Sale.fencing.lock(pk=sale_id, ttl=10, blocking_timeout=5), transaction.atomic():
        sale = Sale.objects.get(pk=sale_id)
        if not sale.left:
            raise SoldOut(f"{sale} is sold out.")
        sale.left -= 1
        sale.save()
        return Order.objects.create(sale=sale, buyer=buyer)
