"""Clients that acquire permits, and clients that are readers and writers."""

from typing import Any

from django_fencedlock.lease import Lease

from .client import Client
from .models import PERMITS, Reading, Slot, Stock


class InBlocks(Client):
    """Writes only inside of ``lease.atomic()``: nothing else fences what such a lock protects."""

    def write_as_child(self, lease: Lease) -> None:
        with lease.atomic(self.using):
            pass


class PermitClient(InBlocks):
    """Acquires one of several permits, and writes the row of that permit."""

    def choose(self) -> tuple[str, dict[str, Any]]:
        return "pool", {"limit": PERMITS}

    def ways_under(self, lease: Lease) -> dict[str, int]:
        return {"slot": 1}

    def write_by_slot(self, lease: Lease, pk: int) -> None:
        self.think()
        self.write_in_block(lease, pk, Slot)


class SharedClient(InBlocks):
    """Writes a row as a writer; as a reader, it writes down what it read there."""

    def choose(self) -> tuple[str, dict[str, Any]]:
        shared = self.random.random() < 0.6
        return f"stock:{self.random.randint(1, self.rows)}", {"shared": shared}

    def ways_under(self, lease: Lease) -> dict[str, int]:
        return {"reading": 1} if lease.shared else {"stock": 1}

    def write_by_stock(self, lease: Lease, pk: int) -> None:
        self.think()
        self.write_in_block(lease, pk, Stock)

    def write_by_reading(self, lease: Lease, pk: int) -> None:
        self.think()
        with self.in_block("reading", lease) as stamp:
            read = Stock.objects.using(self.using).get(pk=pk).count
            self.think()
            Reading.objects.using(self.using).create(stock=pk, count=read, stamp=stamp)
            self.think()


CLIENTS = {"exclusive": Client, "permits": PermitClient, "shared": SharedClient}
