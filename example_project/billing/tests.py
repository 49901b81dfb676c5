"""Invoices are charged once, even if requests or answers are lost."""

import json
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from django.contrib.auth.models import User
from django.test import TestCase, override_settings
from django.urls import reverse

from django_fencedlock import LockNotAcquired
from django_fencedlock.test import assert_all_writes_fenced, eager_tasks, hold_lock

from ..accounts.models import Account
from ..overtaking import overtaken
from . import gateway, tasks
from .models import Customer, Invoice


class BillingTestCase(TestCase):
    def setUp(self) -> None:
        directory = self.enterContext(TemporaryDirectory())
        service = {"GATEWAY_FILE": Path(directory, "gateway.sqlite3"), "GATEWAY_LOSES": 0}
        self.enterContext(override_settings(**service))
        self.account = Account.objects.create(number="1000")
        self.customer = Customer.objects.create(name="Ada", email="ada@example.org")
        self.invoice = Invoice.objects.create(
            number="1", customer=self.customer, account=self.account, amount=Decimal(120)
        )
        self.name = self.invoice.fencing.name()


class ChargeTests(BillingTestCase):
    def charge(self) -> Any:
        with eager_tasks():
            return tasks.charge.delay(self.invoice.pk)

    def assert_paid_once(self) -> None:
        self.invoice.refresh_from_db()
        self.account.refresh_from_db()
        self.assertEqual(self.invoice.status, Invoice.PAID)
        self.assertEqual((self.account.balance, self.account.total()), (120, 120))
        self.assertEqual(gateway.charges(), [(f"invoice-{self.invoice.pk}", 120)])

    def test_a_request_is_retried_after_a_lost_answer_and_charged_once(self) -> None:
        # The first answer is lost; the second request and answer arrive.
        with mock.patch.object(gateway, "is_lost", side_effect=[False, True, False, False]):
            self.charge().get()
        self.assert_paid_once()

    def test_another_key_for_each_try_would_charge_twice(self) -> None:
        # So the key identifies the payment, and the token is separate.
        for token in (1, 2):
            gateway.charge(f"invoice-1-by-{token}", Decimal(120), token)
        self.assertEqual(len(gateway.charges()), 2)

    def test_a_service_that_never_answers_leaves_the_invoice_open(self) -> None:
        with mock.patch.object(gateway, "is_lost", return_value=True):
            result = self.charge()
        with self.assertRaises(gateway.NoAnswer):
            result.get()
        self.invoice.refresh_from_db()
        self.assertEqual((self.invoice.status, gateway.charges()), (Invoice.OPEN, []))

    def test_an_amount_that_was_changed_after_a_lost_answer_is_not_booked(self) -> None:
        with mock.patch.object(gateway, "is_lost", side_effect=[False, True]):
            self.assertRaises(gateway.NoAnswer, tasks.charge, self.invoice.pk)
        with self.invoice.fencing.lock():
            self.invoice.refresh_from_db()
            self.invoice.amount = Decimal(130)
            self.invoice.save()
        # A person has to look at this: a retry would fail the same way.
        with self.assertRaises(gateway.AmountDiffers):
            self.charge().get()
        self.invoice.refresh_from_db()
        self.assertEqual(self.invoice.status, Invoice.OPEN)
        self.assertEqual((self.account.total(), gateway.charges()[0][1]), (0, 120))

    def test_the_service_rejects_a_former_holder(self) -> None:
        gateway.charge("invoice-1", Decimal(100), token=2)
        with self.assertRaises(gateway.StaleRequest):
            gateway.charge("invoice-1", Decimal(120), token=1)

    def test_a_stale_run_charges_nothing_twice(self) -> None:
        def meanwhile() -> None:
            gateway.charge(f"invoice-{self.invoice.pk}", Decimal(120), token=10**15)

        with overtaken(Invoice.objects, "get", self.name, meanwhile):
            result = self.charge()
        # To the service, all later tokens are older.
        with self.assertRaises(gateway.StaleRequest):
            result.get()
        self.assertEqual(len(gateway.charges()), 1)

    def test_a_run_that_becomes_stale_after_the_charge_is_retried(self) -> None:
        with overtaken(gateway, "charge", self.name, lambda: None):
            self.charge().get()
        self.assert_paid_once()

    def test_a_second_run_finds_it_paid(self) -> None:
        with assert_all_writes_fenced():
            receipts = {self.charge().get(), self.charge().get()}
        self.assertEqual(len(receipts), 1)
        self.assert_paid_once()

    def test_paid_and_booked_are_one(self) -> None:
        with hold_lock(self.account.fencing.name()):
            result = self.charge()
        with self.assertRaises(LockNotAcquired):  # in a test, the holder never releases the lock
            result.get()
        self.invoice.refresh_from_db()
        self.assertEqual(self.invoice.status, Invoice.OPEN)
        self.charge().get()
        self.assert_paid_once()


class CustomerTests(BillingTestCase):
    def put(self, version: str, **changed: str) -> Any:
        body = {"name": "Ada", "email": "ada@example.org", **changed}
        url = reverse("customer", args=[self.customer.pk])
        return self.client.put(url, json.dumps(body), headers={"If-Match": version})

    def test_the_second_of_two_concurrent_changes_is_rejected(self) -> None:
        version = self.client.get(reverse("customer", args=[self.customer.pk])).headers["ETag"]
        self.assertEqual(self.put(version, email="new@example.org").status_code, 200)
        self.assertEqual(self.put(version, name="Ada L.").status_code, 412)
        self.customer.refresh_from_db()
        self.assertEqual((self.customer.name, self.customer.email), ("Ada", "new@example.org"))

    def test_a_change_without_a_version_is_rejected(self) -> None:
        self.assertEqual(self.put("").status_code, 428)
        self.assertEqual(self.put("0", email="no address").status_code, 400)


class AdminTests(BillingTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.client.force_login(User.objects.create_superuser("boss"))

    def test_the_second_of_two_open_forms_is_rejected(self) -> None:
        url = reverse("admin:billing_customer_change", args=[self.customer.pk])
        seen = self.client.get(url).fencedlock_seen
        form = {"name": "Ada", "email": "a@example.org", "_fencedlock_seen": seen}
        self.assertEqual(self.client.post(url, {**form, "name": "Ada L."}).status_code, 302)
        self.assertContains(self.client.post(url, form), "was changed since you opened this form")
        self.customer.refresh_from_db()
        self.assertEqual(self.customer.name, "Ada L.")

    def test_selected_invoices_are_charged(self) -> None:
        chosen = {"action": "charge_now", "_selected_action": [self.invoice.pk]}
        with eager_tasks():
            self.client.post(reverse("admin:billing_invoice_changelist"), chosen)
        self.invoice.refresh_from_db()
        self.assertEqual(self.invoice.status, Invoice.PAID)
