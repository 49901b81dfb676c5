"""Tests of the demonstration's parts."""

import os
import tempfile
from pathlib import Path
from unittest import mock

from django.test import SimpleTestCase, TestCase
from kombu import Connection

from ..billing.models import Invoice
from ..shop.models import Stock
from . import seed


class MessageTests(SimpleTestCase):
    def test_workers_only_see_complete_messages(self) -> None:
        directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        options = {"data_folder_in": directory, "data_folder_out": directory}
        options |= {"control_folder": directory / "control"}
        replace, seen = os.replace, []

        def look_and_replace(source: Path, target: Path) -> None:
            # As a worker does.
            seen.append([name for name in os.listdir(directory) if ".q.msg" in name])
            replace(source, target)

        transport = "example_project.messages:Transport"
        with (
            Connection("filesystem://", transport=transport, transport_options=options) as broker,
            broker.SimpleQueue("q") as queue,
        ):
            with mock.patch.object(os, "replace", look_and_replace):
                queue.put({"number": 1})
            self.assertEqual(seen, [[]])
            self.assertEqual(queue.get(timeout=5).payload, {"number": 1})


class SeedTests(TestCase):
    def test_it_may_be_called_again(self) -> None:
        for _ in range(2):
            with tempfile.TemporaryDirectory() as directory, self.settings(WAREHOUSES=directory):
                seed.seed()
        self.assertEqual((Invoice.objects.count(), Stock.objects.count()), (3, 2))
