"""Tests of sales, stock imports and the list of bestsellers."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from django.core.cache import cache
from django.db import connection
from django.db.models import QuerySet
from django.test import TestCase, TransactionTestCase, override_settings
from django.urls import reverse

from django_fencedlock import LeaseLost, StaleFence, lock
from django_fencedlock.celery import SkippedRun
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.test import assert_all_writes_fenced, eager_tasks, hold_lock

from ..overtaking import overtaken
from . import bestsellers, tasks
from .models import Order, Sale, Stock
from .sales import SoldOut, sell


class SaleTests(TestCase):
    def setUp(self) -> None:
        self.sale = Sale.objects.create(title="lamp", left=1)
        self.name = self.sale.fencing.name()

    def sell_to_b(self) -> None:
        """Sell the last item as B while A is paused. B has already released its lock."""
        plain = QuerySet(Sale)  # a plain queryset doesn't check fences
        plain.filter(pk=self.sale.pk).update(left=0)
        QuerySet(Order).bulk_create([Order(sale=self.sale, buyer="B")])

    def buyers(self) -> set[str]:
        return set(self.sale.orders.values_list("buyer", flat=True))

    def test_without_the_fence_the_last_one_is_sold_twice(self) -> None:
        with (
            self.assertRaises(LeaseLost),  # too late
            overtaken(Sale.objects, "get", self.name, self.sell_to_b),
            self.sale.fencing.lock(),
        ):
            sale = Sale.objects.get(pk=self.sale.pk)
            QuerySet(Sale).filter(pk=sale.pk).update(left=sale.left - 1)
            QuerySet(Order).bulk_create([Order(sale=sale, buyer="A")])
        self.assertEqual(self.buyers(), {"A", "B"})

    def test_with_the_fence_a_stale_seller_sells_nothing(self) -> None:
        with (
            self.assertRaises(StaleFence),
            overtaken(Sale.objects, "get", self.name, self.sell_to_b),
        ):
            sell(self.sale.pk, "A")
        self.assertNotIn("A", self.buyers())

    def test_every_write_is_fenced(self) -> None:
        with assert_all_writes_fenced():
            sell(self.sale.pk, "A")
        with self.assertRaises(SoldOut):
            sell(self.sale.pk, "B")

    def test_the_status_of_each_outcome(self) -> None:
        url = reverse("buy", args=[self.sale.pk])
        with hold_lock(self.name):
            self.assertEqual(self.client.post(url).status_code, 503)
        self.assertEqual(self.client.post(url).status_code, 201)
        self.assertEqual(self.client.post(url).status_code, 409)
        self.assertEqual(self.client.post(reverse("buy", args=[0])).status_code, 404)


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work` in threads at the same time, each with its own connections."""
    start = threading.Barrier(count)

    def run(number: int) -> Any:
        try:
            start.wait(10)
            return work(number)
        except Exception as exc:
            return exc
        finally:
            connection.close()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class CrowdTests(TransactionTestCase):
    def test_concurrent_buyers_get_no_more_than_there_is(self) -> None:
        sale = Sale.objects.create(title="lamp", left=3)
        results = at_once(6, lambda number: sell(sale.pk, f"buyer {number}"))
        sale.refresh_from_db()
        sold = [found for found in results if isinstance(found, Order)]
        self.assertEqual((len(sold), sale.left, sale.orders.count()), (3, 0, 3), results)

    def test_one_of_many_requests_builds_the_list(self) -> None:
        cache.delete(bestsellers.KEY)
        made = mock.Mock(return_value=["lamp"])
        with mock.patch.object(bestsellers, "look_up", made):
            results = at_once(6, lambda number: bestsellers.bestsellers())
        self.assertEqual((results, made.call_count), ([["lamp"]] * 6, 1))


class BestsellersTests(TestCase):
    def test_what_sells_best_comes_first(self) -> None:
        cache.delete(bestsellers.KEY)
        for title, orders in (("lamp", 1), ("bulb", 2), ("wire", 0)):
            sale = Sale.objects.create(title=title, left=5)
            for _ in range(orders):
                sell(sale.pk, "guest")
        self.assertEqual(
            self.client.get(reverse("bestsellers")).json(), {"bestsellers": ["bulb", "lamp"]}
        )

    def test_the_list_is_shown_without_the_lock(self) -> None:
        cache.delete(bestsellers.KEY)
        with hold_lock("bestsellers"):
            self.assertEqual(bestsellers.bestsellers(), [])
        cache.delete(bestsellers.KEY)
        down = BackendUnavailable("The lock service is down.", name="bestsellers", alias="default")
        with mock.patch.object(bestsellers, "lock", side_effect=down):
            self.assertEqual(bestsellers.bestsellers(), [])


class StockTests(TestCase):
    def setUp(self) -> None:
        directory = self.enterContext(TemporaryDirectory())
        self.enterContext(override_settings(WAREHOUSES=directory))
        self.file = Path(directory, "north.csv")
        self.count(10)

    def count(self, lamps: int) -> None:
        self.file.write_text(f"article,count\nlamp,{lamps}\n")

    def stock(self) -> dict[str, int]:
        return dict(Stock.objects.values_list("article", "count"))

    def import_newer(self) -> None:
        """Import a newer count while A is paused with the older one."""
        self.count(7)
        QuerySet(Stock).bulk_create([Stock(warehouse="north", article="lamp", count=7)])

    def test_an_older_count_never_replaces_a_newer_one(self) -> None:
        with (
            self.assertRaises(StaleFence),
            overtaken(tasks, "counted", "warehouse:north", self.import_newer),
        ):
            tasks.import_stock("north")
        self.assertEqual(self.stock(), {"lamp": 7})

    def test_any_number_of_triggers_become_one_further_import(self) -> None:
        found = []

        def count_and_trigger(warehouse: str) -> dict[str, int]:
            found.append(len(found))
            if len(found) == 1:
                for _ in range(3):
                    skipped = tasks.import_stock.delay("north").result
                    self.assertEqual(SkippedRun.of(skipped).reason, "coalesced")
            return {"lamp": found[-1]}

        with eager_tasks(), mock.patch.object(tasks, "counted", count_and_trigger):
            tasks.import_stock.delay("north").get()
        self.assertEqual((len(found), self.stock()), (2, {"lamp": 1}))

    def test_every_write_is_fenced(self) -> None:
        with assert_all_writes_fenced():
            self.assertEqual(tasks.import_stock("north"), 1)
        with lock("warehouse:north"), assert_all_writes_fenced():
            Stock.objects.update(count=0)
        self.assertEqual(self.stock(), {"lamp": 0})
