"""Tests of the demonstration's parts."""

import os
import tempfile
from pathlib import Path
from unittest import mock

from django.core.exceptions import ImproperlyConfigured
from django.test import SimpleTestCase, TestCase
from kombu import Connection

from .. import environment
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


class LockServiceTests(SimpleTestCase):
    def read(self, value: str) -> tuple[str, object, object]:
        with mock.patch.dict(os.environ, EXAMPLE_LOCKS=value):
            entry = environment.locks()
        name = entry["BACKEND"].rpartition(".")[2]
        return name, entry.get("LOCATION"), entry.get("OPTIONS")

    def test_each_kind_of_lock_service(self) -> None:
        hosts = ["redis://:secret@a:1", "redis://:secret@b:2", "redis://:secret@c:3"]
        for value, *expected in (
            ("postgres", "PostgresBackend", None, None),
            ("mysql", "MysqlBackend", None, None),
            ("redis://a:6379/0?db=1", "RedisBackend", "redis://a:6379/0?db=1", None),
            ("redlock://:secret@a:1,:secret@b:2,:secret@c:3", "RedlockBackend", hosts, None),
            ("etcd://a:2379", "EtcdBackend", ["http://a:2379"], None),
            (
                "etcds://a,b?ca=/ca.pem",
                "EtcdBackend",
                ["https://a", "https://b"],
                {"CA": "/ca.pem"},
            ),
            ("consul://a:8500?token=x", "ConsulBackend", ["http://a:8500"], {"TOKEN": "x"}),
            ("zookeeper://a:2181,b:2181/shop", "ZooKeeperBackend", "a:2181,b:2181/shop", None),
            (
                "dynamodb://Locks?region=eu-west-1&endpoint=http://a:8000",
                *("DynamoDBBackend", "Locks"),
                {"REGION": "eu-west-1", "ENDPOINT": "http://a:8000"},
            ),
        ):
            with self.subTest(value):
                self.assertEqual(self.read(value), tuple(expected))

    def test_another_scheme_is_an_error(self) -> None:
        for value in ("memcached://a:11211", "etcd"):
            with self.assertRaisesMessage(
                ImproperlyConfigured, f"{value.partition(':')[0]!r}; use"
            ):
                self.read(value)

    def test_the_lease_of_the_demonstration(self) -> None:
        with mock.patch.dict(os.environ, EXAMPLE_LOCKS="consul://a:8500?token=x"):
            demo = environment.demo_locks()
        self.assertEqual((demo["TTL"], demo["OPTIONS"]), (10, {"TOKEN": "x", "TIMEOUT": 1.5}))


class SeedTests(TestCase):
    def test_it_may_be_called_again(self) -> None:
        for _ in range(2):
            with tempfile.TemporaryDirectory() as directory, self.settings(WAREHOUSES=directory):
                seed.seed()
        self.assertEqual((Invoice.objects.count(), Stock.objects.count()), (3, 2))
