"""The history: which events are written, how many are kept, and when they are dropped."""

import contextlib
import os
from datetime import timedelta
from unittest import mock

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_fencedlock import StaleFence, conf, force_release, lock
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import StaleObject
from django_fencedlock.models import Fence, HeldLock, LockEvent
from django_fencedlock.storage import connections as sessions
from django_fencedlock.storage import history as events
from django_fencedlock.storage.history import Event, history
from django_fencedlock.test import lose_lease
from django_fencedlock.test.contract import acts
from django_fencedlock.test.contract.dying import kill
from django_fencedlock.test.processes import AnotherProcess, Surroundings
from tests.models import Invoice
from tests.scripts import run_python

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


@pytest.fixture(params=["default", "postgres"])
def database(request, settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": request.param}}
    return request.param


def events_in(database="default"):
    found = LockEvent.objects.using(database).order_by("id")
    return [(each.kind, each.name, each.times) for each in found]


def held_for(lease, seconds):
    lease.granted_at -= seconds
    return lease


class TestGrants:
    def test_a_grant_that_lasts_is_written_once(self, writing, database):
        with lock("invoice:42") as lease:
            writing.flush()
            assert events_in(database) == []
            held_for(lease, 70)
            writing.flush()
            writing.flush()
        writing.flush()
        (event,) = LockEvent.objects.using(database).all()
        assert (event.kind, event.name, event.times) == ("granted", "invoice:42", 1)
        assert (event.alias, event.token, event.holder) == ("default", 1, str(lease.holder))
        age = timezone.now() - event.happened_at
        assert timedelta(seconds=60) < age < timedelta(seconds=90)

    def test_short_ones_are_not(self, writing):
        for _ in range(3):
            with lock("x"):
                pass
        assert not writing.flush()
        assert events_in() == []

    def test_an_unfenced_one_has_no_token(self, writing):
        with lock("x", fenced=False) as lease:
            held_for(lease, 2)
            writing.flush()
        assert LockEvent.objects.get().token is None


class TestLosses:
    def test_a_loss_is_written_with_its_grant(self, writing, database):
        lease = lock("x").acquire()
        lose_lease(lease)
        writing.flush()
        assert events_in(database) == [("granted", "x", 1), ("lost", "x", 1)]
        (event,) = LockEvent.objects.using(database).filter(kind="lost")
        assert (event.token, event.holder) == (1, str(lease.holder))
        assert event.note == lease.why_lost

    def test_one_that_is_noticed_at_the_release(self, writing):
        lease = lock("x").acquire()
        HeldLock.objects.all().delete()
        assert not lease.release()
        writing.flush()
        assert events_in() == [("granted", "x", 1), ("lost", "x", 1)]

    @pytest.mark.slow
    def test_a_dead_holder(self, writing):
        with contextlib.closing(AnotherProcess(Surroundings.here())) as holder:
            holder.call(acts.hold, "default", "x")
            kill(holder)
            with lock("x"):
                pass
        writing.flush()
        (event,) = LockEvent.objects.all()
        assert (event.kind, event.name, event.token) == ("lost", "x", None)
        assert event.holder.endswith(f", pid {holder.pid}")
        assert event.note == "its process is gone; the lock was freed"


class TestForcedReleases:
    def test_a_forced_release(self, writing, database):
        lease = lock("x").acquire()
        force_release("x", by="ada")
        assert not lease.verify()
        writing.flush()
        forced, granted, lost = LockEvent.objects.using(database).order_by("id")
        assert (forced.kind, forced.name, forced.note) == ("forced", "x", "by ada")
        assert (forced.token, forced.holder) == (2, str(lease.holder))
        assert (granted.kind, lost.kind) == ("granted", "lost")
        assert "released by force, by ada" in lost.note


class TestRejections:
    def test_a_rejected_write(self, writing):
        with lock("other"):
            row = Invoice.objects.create(amount=1)
        name = row.fencing.name()
        with Invoice.fencing.lock(pk=row.pk) as lease:
            row.amount = 2
            Fence.objects.filter(name=name).update(token=17, owner="another")
            for _ in range(3):
                with pytest.raises(StaleFence):
                    row.save()
            with pytest.raises(StaleFence), lease.atomic():
                pass
        writing.flush()
        rows = LockEvent.objects.filter(kind="rejected").order_by("id")
        assert [(each.name, each.times) for each in rows] == [(name, 3), (name, 1)]
        write, transaction = rows
        assert write.token == transaction.token == lease.token
        assert write.note.startswith(f"tests.Invoice pk={row.pk}")
        assert f"pid {os.getpid()}" in write.holder
        assert transaction.note.startswith("lease.atomic()")

    def test_an_object_that_was_read_before_its_lock_is_told_apart(self, writing):
        old = Invoice.objects.create()
        with old.fencing.lock():
            Invoice.objects.get().save()
        with old.fencing.lock(), pytest.raises(StaleObject):
            old.save()
        writing.flush()
        note = f"tests.Invoice pk={old.pk}; it was read before the lock was acquired"
        assert LockEvent.objects.get(kind="rejected").note == note

    def test_its_alias_is_the_leases(self, writing, settings):
        settings.FENCEDLOCK = {"default": {"TTL": 30}, "night": {"TTL": 30}}
        row = Invoice.objects.create(amount=1)
        with row.fencing.lock(backend="night"):
            Fence.objects.filter(name=row.fencing.name()).update(token=17, owner="another")
            with pytest.raises(StaleFence):
                row.save()
        writing.flush()
        assert LockEvent.objects.get(kind="rejected").alias == "night"


def on_every_database(test):
    aliases = ["default", "postgres", "mariadb"]
    marked = pytest.mark.django_db(transaction=True, databases=aliases)(test)
    return pytest.mark.parametrize("alias", aliases)(marked)


class TestBounds:
    def write(self, database, rows, keep=20):
        with mock.patch.object(conf, "history", return_value=keep):
            events.write(database, rows)

    def rows(self, count, name="x", kind="granted"):
        return [(clock(), Event(kind, name, "default", n, "me", "")) for n in range(count)]

    @on_every_database
    def test_the_newest_of_each_kind_of_each_name_are_kept(self, alias):
        self.write(alias, self.rows(30))
        self.write(alias, self.rows(5, kind="lost") + self.rows(2, "y"))
        kept = LockEvent.objects.using(alias)
        tokens = (
            kept.filter(name="x", kind="granted").order_by("id").values_list("token", flat=True)
        )
        assert list(tokens) == list(range(10, 30))
        assert kept.filter(name="x", kind="lost").count() == 5
        assert kept.filter(name="y").count() == 2

    @on_every_database
    def test_the_newest_of_each_kind_are_kept_in_all(self, alias, monkeypatch):
        monkeypatch.setattr(events, "MAX_ROWS", 50)
        monkeypatch.setattr(events, "SLACK", 1)
        for part in range(4):
            names = [f"n{part}.{n}" for n in range(20)]
            self.write(alias, [row for name in names for row in self.rows(1, name)])
        self.write(alias, self.rows(3, kind="lost"))
        kept = LockEvent.objects.using(alias)
        assert kept.filter(kind="granted").count() == 50
        assert not kept.filter(name__startswith="n0").exists()
        assert kept.filter(kind="lost").count() == 3

    @on_every_database
    def test_any_text_and_the_time_are_written(self, alias):
        odd = ("plain", 'a "b"', "back\\slash", "{a,b}", "NULL", " ", "it's", "50% %s")
        happened = [Event("rejected", text, "default", 2**62, text, text) for text in odd]
        self.write(alias, [(clock() - 60, event) for event in happened * 3])
        found = LockEvent.objects.using(alias).order_by("id")
        written = [Event(e.kind, e.name, e.alias, e.token, e.holder, e.note) for e in found]
        assert written == happened
        assert {event.times for event in found} == {3}
        now = timezone.now()
        assert all(55 < (now - event.happened_at).total_seconds() < 90 for event in found)

    def test_grants_that_may_get_a_row_are_bounded(self, writing, monkeypatch):
        monkeypatch.setattr(events, "MAX_QUEUED", 2)
        with lock("a"), lock("b"), lock("c"):
            assert len(history.granted) == 2

    @pytest.mark.parametrize(("drawn", "most"), [(0.99, 6), (0.0, 9)])
    def test_a_write_has_few_statements(self, drawn, most, monkeypatch):
        # One write of many also deletes what is beyond the limit of a kind.
        monkeypatch.setattr(events.random, "random", lambda: drawn)
        rows = [(0.0, Event("lost", f"n{n}", "default", n, "", "x" * 1000)) for n in range(100)]
        with CaptureQueriesContext(connections["postgres"]) as queries:
            events.write("postgres", rows)
        assert len([each for each in queries if "INSERT" in each["sql"]]) == 1
        assert len(queries) <= most
        assert len(LockEvent.objects.using("postgres").first().note) == 400


class TestSettings:
    def test_off(self, writing, settings):
        settings.FENCEDLOCK_HISTORY = 0
        lose_lease(lock("x").acquire())
        assert not writing._queues
        assert events_in() == []

    def test_how_many(self, writing, settings):
        settings.FENCEDLOCK_HISTORY = 2
        for number in range(5):
            history.add(Event("lost", "x", "default", number, "", ""))
        writing.flush()
        assert [each.token for each in LockEvent.objects.order_by("id")] == [3, 4]

    @pytest.mark.parametrize("value", [-1, True, "20", None, 1.5, 1001])
    def test_what_it_cannot_be(self, settings, value):
        settings.FENCEDLOCK_HISTORY = value
        assert conf.history() == 0
        (problem,) = conf.problems()
        assert problem.id == "E016"
        assert repr(value) in problem.message


EVENTS = "django_fencedlock_lockevent"


def execute(sql):
    with connections["default"].cursor() as cursor:
        cursor.execute(sql)


class TestTrouble:
    """No lock fails with a write of the history."""

    @pytest.mark.parametrize(
        ("away", "back", "level"),
        [
            # A project with unfenced locks alone needs no tables.
            (f"{EVENTS} RENAME TO away", f"away RENAME TO {EVENTS}", "INFO"),
            (f"{EVENTS} RENAME times TO away", f"{EVENTS} RENAME away TO times", "WARNING"),
        ],
    )
    def test_a_failing_database(self, writing, caplog, away, back, level):
        caplog.set_level("INFO", "django_fencedlock.storage.background_writer")
        execute(f"ALTER TABLE {away}")
        try:
            for number in range(2):
                lose_lease(lock(f"x{number}").acquire())
                assert not writing.flush()
        finally:
            execute(f"ALTER TABLE {back}")
        said = [record for record in caplog.records if "can't be written" in record.message]
        assert [record.levelname for record in said] == [level]
        lose_lease(lock("x2").acquire())
        assert not writing.flush()
        assert [name for _, name, _ in events_in()] == ["x2", "x2"]

    def test_a_file_that_another_connection_writes_to(self, writing):
        lose_lease(lock("x").acquire())
        execute("BEGIN IMMEDIATE")
        assert writing.flush()
        execute("ROLLBACK")
        assert events_in() == []
        assert not writing.flush()
        assert len(events_in()) == 2


PROGRAM = """
import sys, os, time, django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_fencedlock"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
)
django.setup()
from django_fencedlock import lock
from django_fencedlock.core import runtime
from django_fencedlock.core.manager import service
from django_fencedlock.models import LockEvent
from django_fencedlock.storage.background_writer import writer
runtime.IDLE_SECONDS = 0.1
def until(what, seconds=20):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "too late"
        time.sleep(0.02)
def lose(name):
    service("default").lose(lock(name).acquire(), "for a test")
exec(sys.argv[2])
"""


@pytest.mark.slow
class TestProcess:
    @pytest.fixture
    def run(self, tmp_path, make_alias):
        path = tmp_path / "db.sqlite3"
        alias = make_alias({"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)})

        def run(code):
            done = run_python(path, code, code=PROGRAM, DJANGO_SETTINGS_MODULE=None)
            assert "Traceback" not in done.stderr, done.stderr
            return events_in(alias)

        return run

    def test_the_thread_writes_and_ends_when_idle(self, run):
        found = run(
            "with lock('x'):\n"
            "    until(LockEvent.objects.exists)\n"
            "    assert writer._worker.thread()\n"
            "    until(lambda: not writer._worker.thread())\n"
            "with lock('y'):\n"
            "    assert writer._worker.thread()\n"
            "    until(lambda: LockEvent.objects.count() == 2)\n"
        )
        assert found == [("granted", "x", 1), ("granted", "y", 1)]

    def test_a_last_time_at_the_exit(self, run):
        assert run("lose('x')") == [("granted", "x", 1), ("lost", "x", 1)]

    def test_a_child_inherits_no_connection(self, run):
        found = run(
            "lose('x')\n"
            "until(lambda: LockEvent.objects.count() == 2)\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    os._exit(bool(writer._pools['default']._idle))\n"
            "assert os.waitpid(child, 0)[1] == 0\n"
            "lose('y')\n"
            "until(lambda: LockEvent.objects.count() == 4)\n"
        )
        assert len(found) == 4


def test_at_the_exit_nothing_is_left_open(writing, settings, monkeypatch):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
    monkeypatch.setattr(sessions, "under_test", lambda: False)
    with lock("x") as lease:
        held_for(lease, 2)
        writing.flush()
        (idle,) = writing._pools["postgres"]._idle
        assert idle.connection is not None
        lose_lease(lock("y").acquire())
        writing.finish()
    assert idle.connection is None
    assert len(events_in("postgres")) == 3
