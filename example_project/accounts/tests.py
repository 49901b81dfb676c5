"""What goes wrong without the fence, and what happens with it."""

from decimal import Decimal

from celery import current_app
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_fencedlock import LeaseLost, LockNotAcquired, LockRequired, StaleFence, lock
from django_fencedlock.celery import SkippedRun
from django_fencedlock.test import assert_all_writes_fenced, eager_tasks, hold_lock

from ..demo.models import PlainAccount
from ..overtaking import overtaken
from . import tasks
from .models import Account, Closing


class AccountTestCase(TestCase):
    def setUp(self) -> None:
        self.account = Account.objects.create(number="1000")
        self.name = self.account.fencing.name()
        with self.account.fencing.lock():
            self.account.post(Decimal(100), "opening balance")

    def post(self, model: type, amount: int) -> None:
        """Book an amount under the lock."""
        with lock(self.name):
            model.objects.get(pk=self.account.pk).post(Decimal(amount), f"{amount}")

    def b(self) -> None:
        """Book as B while A is paused. B has already released its lock."""
        PlainAccount.objects.get(pk=self.account.pk).post(Decimal(-30), "B")

    def books(self) -> tuple[Decimal, Decimal]:
        """Return the balance and the sum of the ledger."""
        self.account.refresh_from_db()
        return self.account.balance, self.account.total()


class BookingTests(AccountTestCase):
    def test_without_the_fence_a_booking_is_lost(self) -> None:
        with (
            self.assertRaises(LeaseLost),  # too late
            overtaken(PlainAccount.objects, "get", self.name, self.b),
        ):
            self.post(PlainAccount, 50)
        self.assertEqual(self.books(), (150, 120))

    def test_with_the_fence_the_stale_booking_is_rejected(self) -> None:
        with (
            self.assertRaises(StaleFence),
            overtaken(Account.objects, "get", self.name, self.b),
        ):
            self.post(Account, 50)
        self.assertEqual(self.books(), (70, 70))

    def test_the_task_is_retried(self) -> None:
        with eager_tasks(), overtaken(Account.objects, "get", self.name, self.b):
            booked = tasks.book.delay(self.account.pk, "50", "A").get()
        self.assertTrue(booked)
        self.assertEqual(self.books(), (120, 120))

    def test_nothing_is_booked_without_the_lock(self) -> None:
        with self.assertRaises(LockRequired):
            self.account.post(Decimal(50), "no lock")
        self.assertEqual(self.books(), (100, 100))

    def test_a_task_that_runs_twice_books_once(self) -> None:
        with assert_all_writes_fenced():
            self.assertTrue(tasks.book(self.account.pk, "50", "A"))
            self.assertFalse(tasks.book(self.account.pk, "50", "A"))
        self.assertEqual(self.books(), (150, 150))

    def test_a_task_waits_for_the_lock(self) -> None:
        with eager_tasks(), hold_lock(self.name):
            result = tasks.book.delay(self.account.pk, "50", "A")
        with self.assertRaises(LockNotAcquired):  # in a test, the holder never releases the lock
            result.get()
        self.assertEqual(self.books(), (100, 100))


class ClosingTests(AccountTestCase):
    today = timezone.localdate()

    def correct(self) -> None:
        """Close the day again with a late booking while the first close is paused."""
        self.b()
        Closing.objects.replace(self.today, {self.account.pk: Decimal(70)})

    def closed(self) -> list[Decimal]:
        return list(Closing.objects.values_list("balance", flat=True))

    def test_without_the_fence_an_older_close_replaces_a_newer_one(self) -> None:
        with (
            self.assertRaises(LeaseLost),  # too late
            overtaken(tasks, "balances_at", "nightly-close", self.correct),
            lock("nightly-close"),
        ):
            balances = tasks.balances_at(self.today)
            with transaction.atomic():
                Closing.objects.replace(self.today, balances)
        self.assertEqual(self.closed(), [100])

    def test_with_the_fence_the_older_close_is_rejected(self) -> None:
        with (
            self.assertRaises(LeaseLost),  # before it has written
            overtaken(tasks, "balances_at", "nightly-close", self.correct),
        ):
            tasks.close_day(self.today.isoformat())
        self.assertEqual(self.closed(), [70])

    def test_the_task_is_retried(self) -> None:
        with eager_tasks(), overtaken(tasks, "balances_at", "nightly-close", self.b):
            tasks.close_day.delay(self.today.isoformat()).get()
        self.assertEqual(self.closed(), [70])

    def test_every_write_of_a_close_is_fenced(self) -> None:
        with assert_all_writes_fenced():
            self.assertEqual(tasks.close_day(self.today.isoformat()), 1)
        self.assertEqual(self.closed(), [100])

    def test_a_second_close_is_skipped_while_one_runs(self) -> None:
        with eager_tasks(), hold_lock("nightly-close"):
            result = tasks.close_day.delay().get()
        self.assertEqual(SkippedRun.of(result).reason, "held")

    def test_beat_schedules_existing_tasks(self) -> None:
        known = current_app.tasks
        for entry in settings.CELERY_BEAT_SCHEDULE.values():
            self.assertIn(entry["task"], known)

    def test_by_default_yesterday_is_closed(self) -> None:
        tasks.close_day()
        self.assertEqual(self.closed(), [])  # the account's first entry is from today


class AdminTests(AccountTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.client.force_login(User.objects.create_superuser("boss"))

    def test_it_shows_whether_balance_and_ledger_agree(self) -> None:
        page = self.client.get(reverse("admin:accounts_account_changelist"))
        self.assertContains(page, "icon-yes")
        PlainAccount.objects.filter(pk=self.account.pk).update(balance=7)
        page = self.client.get(reverse("admin:accounts_account_changelist"))
        self.assertContains(page, "icon-no")

    def test_the_list_needs_the_same_number_of_queries_for_more_accounts(self) -> None:
        url = reverse("admin:accounts_account_changelist")
        with CaptureQueriesContext(connection) as few:
            self.client.get(url)
        for number in range(5):
            Account.objects.create(number=f"200{number}")
        with self.assertNumQueries(len(few)):
            self.client.get(url)

    def test_a_form_does_not_overwrite_a_running_booking(self) -> None:
        url = reverse("admin:accounts_account_change", args=[self.account.pk])
        form = {"number": "2000", "entries-TOTAL_FORMS": 0, "entries-INITIAL_FORMS": 0}
        form["_fencedlock_seen"] = self.client.get(url).fencedlock_seen
        with hold_lock(self.name):
            page = self.client.post(url, form)
        self.assertContains(page, "is being processed by")
        self.account.refresh_from_db()
        self.assertEqual(self.account.number, "1000")
        page = self.client.post(url, form)
        self.assertEqual(page.status_code, 302)
