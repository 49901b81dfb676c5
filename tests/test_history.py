"""What is written of locks behind everybody's back, and what isn't."""

import contextlib
import os
import subprocess
import sys
from datetime import timedelta

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_fencedlock import StaleFence, conf, force_release, lock
from django_fencedlock.core.runtime import clock
from django_fencedlock.models import Fence, HeldLock, LockEvent
from django_fencedlock.storage import connections as sessions
from django_fencedlock.storage import history as events
from django_fencedlock.storage.background_writer import scribe
from django_fencedlock.storage.history import MOST_WAITING, Event, EventRow, history
from django_fencedlock.storage.records import Statements
from django_fencedlock.test import lose_lease
from django_fencedlock.test.contract import acts
from django_fencedlock.test.contract.dying import kill
from django_fencedlock.test.processes import AnotherProcess, Surroundings
from tests.models import Invoice

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


@pytest.fixture(params=["default", "postgres"])
def database(request, settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": request.param}}
    return request.param


def told(database="default"):
    found = LockEvent.objects.using(database).order_by("id")
    return [(each.kind, each.name, each.times) for each in found]


def held_for(lease, seconds):
    """Make it look as if a lease had been held for so long."""
    lease.granted_at -= seconds
    return lease


class TestGrants:
    def test_a_grant_that_lasts_is_written_once(self, writing, database):
        with lock("invoice:42") as lease:
            writing.flush()
            assert told(database) == []
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
        assert history.is_empty()
        assert not writing.flush()
        assert told() == []

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
        assert told(database) == [("granted", "x", 1), ("lost", "x", 1)]
        (event,) = LockEvent.objects.using(database).filter(kind="lost")
        assert (event.token, event.holder) == (1, str(lease.holder))
        assert event.note == lease._why_lost

    def test_one_that_is_noticed_at_the_release(self, writing):
        lease = lock("x").acquire()
        HeldLock.objects.all().delete()
        assert not lease.release()
        writing.flush()
        assert told() == [("granted", "x", 1), ("lost", "x", 1)]

    def test_a_holder_who_died(self, writing):
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
    def test_a_lock_that_was_taken_away(self, writing, database):
        lease = lock("x").acquire()
        force_release("x", by="ada")
        assert not lease.verify()
        writing.flush()
        forced, granted, lost = LockEvent.objects.using(database).order_by("id")
        assert (forced.kind, forced.name, forced.note) == ("forced", "x", "by ada")
        # The token is the fence's from then on, and the holder the former one.
        assert (forced.token, forced.holder) == (2, str(lease.holder))
        assert (granted.kind, lost.kind) == ("granted", "lost")
        assert "released by force, by ada" in lost.note


class TestRefusals:
    def test_a_refused_write(self, writing):
        with lock("other"):
            row = Invoice.objects.create(amount=1)
        name = row.fencing.name()
        with Invoice.fencing.lock(pk=row.pk) as lease:
            row.amount = 2
            Fence.objects.filter(name=name).update(token=17, owner="somebody else")
            for _ in range(3):
                with pytest.raises(StaleFence):
                    row.save()
            with pytest.raises(StaleFence), lease.atomic():
                pass
        writing.flush()
        rows = LockEvent.objects.filter(kind="refused").order_by("id")
        assert [(each.name, each.times) for each in rows] == [(name, 3), (name, 1)]
        write, transaction = rows
        assert write.token == transaction.token == lease.token
        assert write.note.startswith(f"tests.Invoice pk={row.pk}")
        assert f"pid {os.getpid()}" in write.holder
        assert transaction.note.startswith("lease.atomic()")

    def test_it_is_told_of_the_lease_s_alias(self, writing, settings):
        settings.FENCEDLOCK = {"default": {"TTL": 30}, "night": {"TTL": 30}}
        row = Invoice.objects.create(amount=1)
        with row.fencing.lock(backend="night"):
            Fence.objects.filter(name=row.fencing.name()).update(token=17, owner="somebody else")
            with pytest.raises(StaleFence):
                row.save()
        writing.flush()
        assert LockEvent.objects.get(kind="refused").alias == "night"


class TestBounds:
    def write(self, database, rows, keep=20):
        connection = connections[database]
        events.write(Statements(connection), rows, keep)

    def rows(self, count, name="x", kind="granted"):
        return [EventRow(Event(kind, name, "default", n, "me", ""), 0.0) for n in range(count)]

    @pytest.mark.parametrize("alias", ["default", "postgres", "mariadb"])
    @pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
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

    @pytest.mark.parametrize("alias", ["default", "postgres", "mariadb"])
    @pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
    def test_the_newest_of_each_kind_are_kept_in_all(self, alias, monkeypatch):
        monkeypatch.setattr(events, "MOST", 50)
        monkeypatch.setattr(events, "SLACK", 1)
        for part in range(4):
            names = [f"n{part}.{n}" for n in range(20)]
            self.write(alias, [row for name in names for row in self.rows(1, name)])
        self.write(alias, self.rows(3, kind="lost"))
        kept = LockEvent.objects.using(alias)
        assert kept.filter(kind="granted").count() == 50
        assert not kept.filter(name__startswith="n0").exists()
        assert kept.filter(kind="lost").count() == 3

    def test_what_waits_is_bounded_and_the_rest_counted(self, writing):
        for number in range(MOST_WAITING + 5):
            history._add(Event("lost", f"n{number}", "default", None, "", ""))
        assert scribe._left_out == 5
        assert writing.flush()
        assert LockEvent.objects.count() == 100

    def test_so_are_grants_that_may_get_a_row(self, writing, monkeypatch):
        monkeypatch.setattr("django_fencedlock.storage.history.MOST_WAITING", 2)
        with lock("a"), lock("b"), lock("c"):
            assert len(history._granted) == 2
            assert scribe._left_out == 1

    def test_statements_of_a_flush_are_few(self, writing):
        for number in range(100):
            history._add(Event("lost", f"n{number}", "default", None, "", "x" * 1000))
        with CaptureQueriesContext(connections["default"]):
            (page,) = history.pages()
            with CaptureQueriesContext(connections["default"]) as queries:
                page.write(Statements(connections["default"]))
        assert len([each for each in queries if "INSERT" in each["sql"]]) == 1
        assert len(queries) <= 5
        assert len(LockEvent.objects.first().note) == 400


class TestSettings:
    def test_off(self, writing, settings):
        settings.FENCEDLOCK_HISTORY = 0
        lose_lease(lock("x").acquire())
        assert history.is_empty()
        writing.flush()
        assert told() == []

    def test_how_many(self, writing, settings):
        settings.FENCEDLOCK_HISTORY = 2
        for number in range(5):
            history._add(Event("lost", "x", "default", number, "", ""))
        writing.flush()
        assert [each.token for each in LockEvent.objects.order_by("id")] == [3, 4]

    @pytest.mark.parametrize("value", [-1, True, "20", None, 1.5, 1001])
    def test_what_it_cannot_be(self, settings, value):
        settings.FENCEDLOCK_HISTORY = value
        assert conf.history() == 0
        (problem,) = conf.problems()
        assert problem.id == "E016"
        assert repr(value) in problem.message


class TestTrouble:
    """Nothing of it may reach a lock."""

    @pytest.mark.parametrize(
        ("away", "back", "level"),
        [
            # Whoever uses unfenced locks alone needs no tables.
            ("django_fencedlock_lockevent RENAME TO away", "away RENAME TO ", "INFO"),
            ("django_fencedlock_lockevent RENAME times TO away", "", "WARNING"),
        ],
    )
    def test_a_database_that_does_not_take_it(self, writing, caplog, away, back, level):
        caplog.set_level("INFO", "django_fencedlock.storage.background_writer")
        with connections["default"].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {away}")
        try:
            for number in range(2):
                lose_lease(lock(f"x{number}").acquire())
                writing.flush()
                assert scribe._rests_until["default"] > clock()
                scribe._rests_until["default"] = 0.0
        finally:
            with connections["default"].cursor() as cursor:
                table = "django_fencedlock_lockevent"
                cursor.execute(
                    f"ALTER TABLE {back}{table}"
                    if back
                    else f"ALTER TABLE {table} RENAME away TO times"
                )
        said = [record for record in caplog.records if "can't be written" in record.message]
        assert [record.levelname for record in said] == [level]
        assert scribe._left_out == 4
        scribe._rests_until["default"] = 0.0
        lose_lease(lock("x").acquire())
        writing.flush()
        assert len(told()) == 2

    def test_a_file_that_somebody_is_writing_to(self, writing):
        lose_lease(lock("x").acquire())
        with connections["default"].cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            assert writing.flush()
            cursor.execute("ROLLBACK")
        assert told() == []
        assert not writing.flush()
        assert len(told()) == 2

    def test_an_alias_that_the_settings_lost(self, writing):
        history._add(Event("lost", "x", "gone", None, "", ""))
        assert history.is_empty()


class TestQuiet:
    def test_nothing_is_noted_in_a_test(self):
        lose_lease(lock("x").acquire())
        with lock("y") as lease:
            held_for(lease, 5)
            assert history.is_empty()
        assert not scribe._runs


PROGRAM = """
import sys, os, time, django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_fencedlock"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
)
django.setup()
from django_fencedlock import lock
from django_fencedlock.storage import background_writer as scribe
from django_fencedlock.core.manager import service
scribe.LINGER = 1.5
def until(what, seconds=20):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "too late"
        time.sleep(0.02)
exec(sys.argv[2])
"""


@pytest.mark.slow
class TestProcess:
    """In a process of its own, where nothing says that it is a test's."""

    @pytest.fixture
    def run(self, tmp_path, make_alias):
        path = tmp_path / "db.sqlite3"
        alias = make_alias({"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)})

        def run(code):
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, str(path), code],
                env={k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            assert "Traceback" not in done.stderr, done.stderr
            return told(alias), done.stdout

        return run

    def test_the_thread_writes_and_ends_when_idle(self, run):
        found, _ = run(
            "from django_fencedlock.models import LockEvent\n"
            "with lock('x'):\n"
            "    until(LockEvent.objects.exists)\n"
            "    assert scribe.scribe._runs\n"
            "    until(lambda: not scribe.scribe._runs)\n"
            "with lock('y'):\n"
            "    assert scribe.scribe._runs\n"
            "    until(lambda: LockEvent.objects.count() == 2)\n"
        )
        assert found == [("granted", "x", 1), ("granted", "y", 1)]

    def test_a_last_time_at_the_exit(self, run):
        found, _ = run(
            "lease = lock('x').acquire()\nservice('default').lose(lease, 'for a test')\n"
        )
        assert found == [("granted", "x", 1), ("lost", "x", 1)]

    def test_a_child_inherits_no_connection(self, run):
        found, _ = run(
            "from django_fencedlock.storage.connections import ConnectionPool\n"
            "class Seen(ConnectionPool):\n"
            "    def _take_back(self, connection, keep):\n"
            "        kept.append(connection)\n"
            "        super()._take_back(connection, keep)\n"
            "kept = []\n"
            "scribe.ConnectionPool = Seen\n"
            "lease = lock('x').acquire()\n"
            "service('default').lose(lease, 'for a test')\n"
            "until(lambda: scribe.scribe._sessions and scribe.scribe._sessions['default']._idle)\n"
            "assert kept[-1].connection\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    os._exit(kept[-1].connection is not None)\n"
            "assert os.waitpid(child, 0)[1] == 0\n"
            "service('default').lose(lock('y').acquire(), 'for a test')\n"
            "until(lambda: all(book.is_empty() for book in scribe.scribe.books))\n"
        )
        assert len(found) == 4

    def test_a_child_writes_its_own_and_not_its_parents(self, run):
        found, _ = run(
            "lease = lock('x').acquire()\n"
            "service('default').lose(lease, 'for a test')\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    assert all(book.is_empty() for book in scribe.scribe.books)\n"
            "    assert not scribe.scribe._runs\n"
            "    service('default').lose(lock('y').acquire(), 'for a test')\n"
            "    until(lambda: all(book.is_empty() for book in scribe.scribe.books))\n"
            "    until(lambda: not scribe.scribe._runs)\n"
            "    os._exit(0)\n"
            "assert os.waitpid(child, 0)[1] == 0\n"
        )
        assert sorted(found) == [
            *(("granted", "x", 1), ("granted", "y", 1), ("lost", "x", 1), ("lost", "y", 1)),
        ]


def test_at_the_end_nothing_is_left_open(writing, settings, monkeypatch):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
    monkeypatch.setattr(sessions, "under_test", lambda: False)
    with lock("x") as lease:
        held_for(lease, 2)
        writing.flush()
        (idle,) = writing._sessions["postgres"]._idle
        assert idle.connection is not None
        writing.finish()
    assert idle.connection is None
    assert told("postgres") == [("granted", "x", 1)]
