"""A client: acquires locks, waits, and writes under them, until it is stopped or killed."""

import contextlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from django.db import Error, close_old_connections, connections, models, transaction

from django_fencedlock import lock
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import (
    FencedLockError,
    LeaseLost,
    LockNotAcquired,
    LockRequired,
    StaleFence,
)
from django_fencedlock.lease import Lease

from .history import FAIL, OK, UNKNOWN, Recorder, new_stamp
from .models import PERMITS, PROTECTED, Gauge, Plain, Slot, Tally

REFUSALS = (LeaseLost, LockNotAcquired, LockRequired, StaleFence)
TROUBLES = (Error, FencedLockError, OSError)
#: What a client does under its lock, and how often in relation to each other.
WAYS = {"save": 6, "held": 2, "update": 2, "atomic": 3, "gauge": 2}


class Client:
    def __init__(self, name: str, lab: dict[str, Any]) -> None:
        self.notes = Recorder(Path(lab["directory"]), name)
        self.random = random.Random(f"{lab['seed']} {name}")
        self.ttl: float = lab["ttl"]
        self.rows: int = lab["rows"]
        self.using: str = lab["using"]
        self.fenced: bool = lab["fenced"]
        self.habits: dict[str, float] = lab["habits"]
        self.ways: dict[str, int] = lab.get("ways") or WAYS
        self.end = Path(lab["directory"]) / "stop"

    def run(self) -> None:
        while not self.end.exists():
            close_old_connections()
            self.work_once()

    def work_once(self) -> None:
        self.asked = name, terms = self.choose()
        number = self.notes.invoke("acquire", name, **terms)
        wait = self.random.uniform(1, 4) * self.ttl
        try:
            lease = lock(name, ttl=self.ttl, blocking_timeout=wait, **terms).acquire()
        except TROUBLES as exc:
            self.notes.answer(number, UNKNOWN, error=repr(exc))
            time.sleep(self.random.uniform(0, 0.2))
            return
        if lease is None:
            self.notes.answer(number, FAIL)
            return
        self.notes.answer(number, OK, token=lease.token, owner=lease.owner_id, name=lease.name)
        try:
            self.work_under(lease, number_in(lease.name))
        finally:
            self.release(lease)

    def choose(self) -> tuple[str, dict[str, Any]]:
        """Return the name of a lock, and what kind of lock it is."""
        return f"row:{self.random.randint(1, self.rows)}", {}

    def work_under(self, lease: Lease, pk: int) -> None:
        for _ in range(self.random.choice([1, 1, 2, 3])):
            ways = self.ways_under(lease)
            way = self.random.choices(list(ways), list(ways.values()))[0]
            try:
                getattr(self, f"write_by_{way}")(lease, pk)
            except REFUSALS:
                # Most code would end here; what goes on has to be refused again.
                if self.random.random() < 0.7:
                    return
            except TROUBLES:
                return
            self.do_something_else(lease)

    def ways_under(self, lease: Lease) -> dict[str, int]:
        return self.ways

    def do_something_else(self, lease: Lease) -> None:
        chance = self.random.random()
        if chance < 0.15:
            self.ask("verify", lease, lease.verify)
        elif chance < 0.3:
            self.ask("renew", lease, lease.renew)
        elif chance < 0.4:
            self.enter_again(lease)
        elif chance < 0.4 + self.habits.get("fork", 0):
            self.leave_to_child(lease)

    def write_by_save(self, lease: Lease, pk: int, model: Any = Tally) -> None:
        row = model.objects.using(self.using).get(pk=pk)
        read = row.count
        self.think()
        with self.writing(model.__name__.lower(), lease, read) as stamp:
            self.save(row, read, stamp)

    def write_by_gauge(self, lease: Lease, pk: int) -> None:
        self.write_by_save(lease, pk, Gauge)

    def write_by_update(self, lease: Lease, pk: int) -> None:
        read = Tally.objects.using(self.using).get(pk=pk).count
        self.think()
        with self.writing("tally", lease, read) as stamp:
            self.update(Tally, pk, read, stamp)

    def write_by_held(self, lease: Lease, pk: int) -> None:
        """Go on thinking after the write, in a transaction that is open."""
        row = Tally.objects.using(self.using).get(pk=pk)
        read = row.count
        self.think()
        with (
            self.writing("tally", lease, read) as stamp,
            self.committing(transaction.atomic(self.using)),
        ):
            self.save(row, read, stamp)
            self.think()

    def write_by_atomic(self, lease: Lease, pk: int) -> None:
        self.write_in_block(lease, pk, Plain)

    def write_in_block(self, lease: Lease, pk: int, model: Any) -> None:
        rows = model.objects.using(self.using)
        with self.in_block(model.__name__.lower(), lease) as stamp:
            read = rows.get(pk=pk).count
            self.think()
            self.notes.write(number=self._number, event="fact", read=read)
            rows.filter(pk=pk).update(count=read + 1, stamp=stamp)
            self.think()

    @contextlib.contextmanager
    def in_block(self, table: str, lease: Lease) -> Iterator[str]:
        block = lease.atomic(self.using) if self.fenced else transaction.atomic(self.using)
        with self.writing(table, lease, None) as stamp, self.committing(block):
            yield stamp

    def save(self, row: Any, read: int, stamp: str) -> None:
        if self.fenced:
            row.count, row.stamp = read + 1, stamp
            row.save()
        else:
            self.update(type(row), row.pk, read, stamp)

    def update(self, model: Any, pk: int, read: int, stamp: str) -> None:
        rows = model.objects if self.fenced else _bare(model)
        # Without the fence, the token is written but compared with nothing.
        token = {} if self.fenced else {"fence": self._token}
        rows.using(self.using).filter(pk=pk).update(count=read + 1, stamp=stamp, **token)

    @contextlib.contextmanager
    def writing(self, table: str, lease: Lease, read: int | None) -> Iterator[str]:
        stamp = new_stamp()
        self._token = lease.token
        facts = {"table": table, "stamp": stamp, "token": lease.token, "owner": lease.owner_id}
        facts["shared"] = lease.shared
        self._number = self.notes.invoke("write", lease.name, read=read, **facts)
        try:
            yield stamp
        except REFUSALS as exc:
            self.notes.answer(self._number, FAIL, error=type(exc).__name__)
            raise
        except TROUBLES as exc:
            self.notes.answer(self._number, UNKNOWN, error=repr(exc))
            raise
        self.notes.answer(self._number, OK)

    @contextlib.contextmanager
    def committing(self, block: Any) -> Iterator[None]:
        with block:
            yield
            self.notes.commit(self._number)

    def think(self) -> None:
        """Take some time, now and then more than a ttl."""
        chance = self.random.random()
        if chance < self.habits.get("starve", 0):
            _starve(self.random.uniform(1.2, 2.2) * self.ttl)
        elif chance < 0.5:
            time.sleep(self.random.uniform(0, 0.1) * self.ttl)
        elif chance < 0.8:
            time.sleep(self.random.uniform(0.1, 0.6) * self.ttl)
        else:
            time.sleep(self.random.uniform(0.6, 1.6) * self.ttl)

    # All but writing

    def release(self, lease: Lease) -> None:
        number = self.notes.invoke(
            "release", lease.name, token=lease.token, owner=lease.owner_id, lost=lease.lost
        )
        try:
            kept = lease.release()
        except TROUBLES as exc:
            self.notes.answer(number, UNKNOWN, error=repr(exc))
        else:
            self.notes.answer(number, OK if kept else FAIL)

    def ask(self, kind: str, lease: Lease, question: Callable[[], Any]) -> None:
        deadline, lost = lease.deadline, lease.lost
        number = self.notes.invoke(kind, lease.name, token=lease.token, owner=lease.owner_id)
        try:
            outcome = FAIL if question() is False else OK
        except LeaseLost:
            outcome = FAIL
        except TROUBLES:
            outcome = UNKNOWN
        self.notes.answer(number, outcome, left=deadline - clock(), lost=lost)

    def enter_again(self, lease: Lease) -> None:
        number = self.notes.invoke("reenter", lease.name, outer=lease.token, owner=lease.owner_id)
        try:
            name, terms = self.asked
            with lock(name, **terms) as again:
                token = again.token
        except LeaseLost:
            self.notes.answer(number, FAIL)
        except TROUBLES as exc:
            self.notes.answer(number, UNKNOWN, error=repr(exc))
        else:
            self.notes.answer(number, OK, token=token, released=lease.released)

    def leave_to_child(self, lease: Lease) -> None:
        number = self.notes.invoke("inherit", lease.name, token=lease.token, owner=lease.owner_id)
        pid = os.fork()
        if pid == 0:
            # The sockets are the parent's, and are not to be closed either.
            connections[self.using].connection = None
            os._exit(_outcome(lambda: self.write_as_child(lease)))
        _, status = os.waitpid(pid, 0)
        self.notes.answer(number, FAIL if status == 0 else OK, status=status)

    def write_as_child(self, lease: Lease) -> None:
        row = Tally.objects.using(self.using).get(pk=number_in(lease.name))
        row.stamp = "child"
        row.save(lease=lease)


def number_in(name: str) -> int:
    """Return the number of the row that a lock or permit protects."""
    return int(re.findall(r"\d+", name)[-1])


def _bare(model: Any) -> Any:
    return models.QuerySet(model)


def _outcome(write: Callable[[], None]) -> int:
    try:
        write()
    except REFUSALS:
        return 0
    except BaseException:
        return 2
    return 1


def _starve(seconds: float) -> None:
    """Hold the interpreter, so that no thread renews anything."""
    end = time.monotonic() + seconds
    # Each more character doubles the time of a match, all of it in one call of C.
    text, pattern = "a" * 23, re.compile(r"(a|a)*b")
    while time.monotonic() < end:
        pattern.match(text)


def prepare(using: str, rows: int) -> None:
    from django.core.management import call_command

    from . import trail

    call_command("migrate", database=using, run_syncdb=True, verbosity=0)
    for model in PROTECTED.values():
        for pk in range(1, (PERMITS if model is Slot else rows) + 1):
            _bare(model).using(using).create(pk=pk)
    trail.lay(using)


def collect(using: str) -> dict[str, Any]:
    from .models import Trail

    fields = ("pk", "kind", "name", "before", "after", "token", "stamp")
    counts = [
        (table, str(pk).join(model.lock_name), count)
        for table, model in PROTECTED.items()
        for pk, count in _bare(model).using(using).values_list("pk", "count")
    ]
    trail = Trail.objects.using(using).order_by("pk").values_list(*fields)
    return {"trail": list(trail), "counts": counts}
