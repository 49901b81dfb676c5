"""A worker's main process sees which children are gone, and frees what they held."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from django_fencedlock import journal, lock, sessions, threads
from django_fencedlock.backends.base import Request
from django_fencedlock.celery import burials, deaths, forks, mending, worker
from django_fencedlock.celery.burials import Burials
from django_fencedlock.celery.deaths import VARIABLE, Announcement, DeathWatch, Desk
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.fences.ledger import LOCK_WAIT
from django_fencedlock.journal import Found, JournalEntry
from django_fencedlock.owners import new_owner
from django_fencedlock.processes import Process, this_process
from django_fencedlock.services import service
from tests.servers.process import wait_until

pytestmark = pytest.mark.skipif(not deaths.are_seen(), reason="this system has no pidfd")

# It announces itself as a spawned child does, notes a lock, and waits for its end.
CHILD = """
import sys
from django_fencedlock import journal
from django_fencedlock.celery import deaths
deaths.announce()
journal.enter("default", sys.argv[1], "owner", 30.0, True)
print(deaths.this_process(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def buried():
    return []


@pytest.fixture
def watch(buried, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(deaths, "_desk", None)
    made = DeathWatch(lambda child, found: buried.append((child, found)))
    yield made
    desk = made._desk
    for file in (desk.ear, desk.mouth, desk.tickets, desk.returned, desk.journals):
        os.close(file)


@contextlib.contextmanager
def child_of(watch, name="x"):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, name],
        env={**os.environ, VARIABLE: watch._desk.words()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            child.identity = Process.read(child.stdout.readline().strip())
            assert child.identity.pid == child.pid
            yield child
        finally:
            child.kill()


def look_until(watch, condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        watch.look(timeout=0.05)


def entry(name):
    return JournalEntry("default", name, "owner", 30.0, True)


class TestDeathWatch:
    def test_a_killed_child_is_buried_with_what_it_held(self, watch, buried):
        with child_of(watch) as child:
            watch.look(timeout=1)
            child.kill()
            look_until(watch, lambda: buried)
        assert buried == [(child.identity, Found([entry("x")], True))]

    def test_a_living_one_is_not(self, watch, buried):
        with child_of(watch, "living"), child_of(watch, "killed") as killed:
            killed.kill()
            look_until(watch, lambda: buried)
            for _ in range(5):
                watch.look(timeout=0.02)
            assert [child for child, _ in buried] == [killed.identity]

    def test_one_that_was_gone_before_anybody_looked_is(self, watch, buried):
        with child_of(watch) as child:
            child.kill()
            child.wait()
            look_until(watch, lambda: buried)
        assert buried == [(child.identity, Found([entry("x")], True))]

    def test_one_that_ends_by_itself_is_too(self, watch, buried):
        with child_of(watch) as child:
            watch.look(timeout=1)
            child.stdin.close()
            look_until(watch, lambda: buried)

    def test_one_whose_pid_is_somebody_elses_by_now_is_gone(self, watch, buried):
        me = this_process()
        former = Process(me.boot_id, me.pid_namespace, me.pid, me.started - 1)
        os.write(watch._desk.mouth, Announcement(former, None).line())
        watch.look(timeout=1)
        assert buried == [(former, journal.NOTHING)]

    def test_announcements_may_come_in_pieces(self, watch, buried):
        lines = b"".join(
            Announcement(Process("b", "n", 2**22 + number, 1), None).line() for number in range(50)
        )
        for start in range(0, len(lines), 7):
            os.write(watch._desk.mouth, lines[start : start + 7])
            watch.look(timeout=1)
        assert [child.pid - 2**22 for child, _ in buried] == list(range(50))

    def test_an_error_ends_no_watch(self, watch, buried, monkeypatch, caplog):
        monkeypatch.setattr(deaths, "_PAUSE", 0.01)
        bury = watch._to_bury

        def fail_once(child, found):
            watch._to_bury = bury
            raise RuntimeError

        watch._to_bury = fail_once
        watch.start()
        with child_of(watch) as first:
            first.kill()
        with child_of(watch) as second:
            second.kill()
            wait_until(lambda: buried, "the second burial", 10)
        assert [child for child, _ in buried] == [second.identity]
        assert "stumbled" in caplog.text
        # The thread is left with files of its own, which nobody closes under it.
        watch._desk = Desk.make()

    def test_journals_are_kept_one_after_the_other(self, watch, buried, monkeypatch):
        taken = [watch._desk.take_ticket() for _ in range(deaths.MOST)]
        assert taken == list(range(deaths.MOST))
        assert watch._desk.take_ticket() is None
        watch._desk.give_back(7)
        for name in ("a", "b"):
            with child_of(watch, name) as child:
                watch.look(timeout=1)
                child.kill()
                look_until(watch, lambda: len(buried) == 1)
            assert buried.pop()[1].entries == [entry(name)]

    def test_a_child_too_many_keeps_none_and_is_watched(self, watch, buried):
        while watch._desk.take_ticket() is not None:
            pass
        with child_of(watch) as child:
            child.kill()
            look_until(watch, lambda: buried)
        assert buried == [(child.identity, journal.NOTHING)]

    def test_no_file_stays_open(self, watch, buried):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with child_of(watch) as child:
                watch.look(timeout=1)
                child.kill()
                look_until(watch, lambda: buried)
            buried.clear()
        assert len(os.listdir("/proc/self/fd")) == before


class TestAnnouncing:
    def test_without_a_worker_it_is_a_warning(self, monkeypatch, caplog):
        monkeypatch.setenv(VARIABLE, "1:900:901:902:903:904")
        monkeypatch.setattr(deaths, "_desk", None)
        deaths.announce()
        assert "couldn't find its worker" in caplog.text

    def test_a_worker_that_a_task_started_is_not_its_child(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "1:2:3:4:5:6")
        assert deaths.is_watched()
        deaths.forget_watch()
        assert not deaths.is_watched()

    def test_a_line_says_it_all(self):
        for ticket in (None, 0, 1023):
            said = Announcement(this_process(), ticket)
            assert Announcement.read(said.line()[:-1]) == said


class Service:
    """A service that fails for as long as it is told to."""

    def __init__(self):
        self.freed = []
        self.tries = 0
        self.away = False
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, alias, dead):
        self.tries += 1
        self.gate.wait(10)
        if self.away:
            raise BackendUnavailable("away")
        self.freed.append((alias, [each.name for each in dead.entries]))


def test_a_request_that_the_dead_have_sent_comes_before_their_locks_are_freed_for_the_last_time():
    assert burials.PASSES[0] == 0
    # It may wait in the server for a row, and take it then.
    assert burials.PASSES[-1] > 2 * LOCK_WAIT / 1000


class TestBurials:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        monkeypatch.setattr(burials, "PASSES", (0.0, 0.05))
        monkeypatch.setattr(burials, "FIRST_PAUSE", 0.01)

    def bury(self, free, *entries, complete=True):
        made = Burials(free)
        made.add(this_process(), Found(list(entries), complete))
        return made

    def test_what_was_held_is_freed_and_once_more_a_little_later(self):
        service = Service()
        self.bury(service, entry("x"), entry("y"))
        wait_until(lambda: len(service.freed) == 2, "two passes", 5)
        assert service.freed == [("default", ["x", "y"])] * 2

    def test_of_who_held_nothing_nobody_hears(self):
        service = Service()
        self.bury(service)
        time.sleep(0.1)
        assert service.tries == 0

    def test_of_who_kept_no_journal_every_alias_is_asked(self, settings):
        settings.FENCEDLOCK = {"default": {}, "other": {}}
        service = Service()
        self.bury(service, complete=False)
        wait_until(lambda: len(service.freed) == 4, "both aliases, twice", 5)
        assert {alias for alias, _ in service.freed} == {"default", "other"}

    def test_a_service_that_is_away_is_asked_again(self):
        service = Service()
        service.away = True
        self.bury(service, entry("x"))
        wait_until(lambda: service.tries > 4, "several tries", 5)
        service.away = False
        wait_until(lambda: len(service.freed) == 2, "the end of it", 5)

    def test_but_not_for_longer_than_the_ttl(self):
        service = Service()
        service.away = True
        made = self.bury(service, entry("x")._replace(ttl=0.1))
        wait_until(lambda: not made._aliases["default"]._runs, "it to give up", 5)
        assert service.freed == []

    def test_one_service_delays_no_other(self):
        slow, quick = Service(), Service()
        slow.gate.clear()
        made = Burials(lambda alias, dead: (slow if alias == "default" else quick)(alias, dead))
        try:
            made.add(this_process(), Found([entry("x"), entry("y")._replace(alias="b")], True))
            wait_until(lambda: quick.freed, "the other one", 5)
            assert slow.freed == []
        finally:
            slow.gate.set()

    def test_the_thread_ends_and_begins_again(self):
        service = Service()
        made = self.bury(service, entry("x"))
        alias = made._aliases["default"]
        wait_until(lambda: not alias._runs, "its end", 5)
        made.add(this_process(), Found([entry("y")], True))
        wait_until(lambda: ("default", ["y"]) in service.freed, "the second burial", 5)
        wait_until(lambda: not alias._runs, "its end", 5)


@pytest.mark.django_db(transaction=True)
class TestFreeing:
    def dead(self, name, complete=True, fenced=True):
        """A holder that is somewhere else, as far as this process knows."""
        owner = new_owner()
        request = Request(name=name, owner=owner, ttl=30, fenced=fenced)
        assert service("default").backend.acquire(request)
        entries = [JournalEntry("default", name, owner.id, 30, fenced)] if complete else []
        return burials.Dead(this_process(), entries, complete)

    def test_what_the_journal_says_is_freed(self):
        dead = self.dead("x")
        with lock("mine") as mine:
            burials.free_all("default", dead)
            assert mine.verify()
        assert lock("x").holder() is None

    def test_without_one_what_the_registry_says(self):
        burials.free_all("default", self.dead("x", complete=False))
        assert lock("x").holder() is None

    @pytest.mark.parametrize(
        "other", [{"boot_id": "b"}, {"pid_namespace": "n"}, {"pid": 1}, {"started": 1}]
    )
    def test_and_of_that_very_process_alone(self, other):
        self.dead("x")
        process = replace(this_process(), **other)
        burials.free_all("default", burials.Dead(process, [], complete=False))
        assert lock("x").holder() is not None

    def test_no_other_alias_is_touched(self, settings):
        dead = self.dead("x", complete=False)
        settings.FENCEDLOCK = {"default": {}, "other": {}}
        burials.free_all("other", dead)
        assert lock("x").holder() is not None

    def test_twice_does_no_harm(self):
        dead = self.dead("x")
        burials.free_all("default", dead)
        with lock("x") as lease:
            burials.free_all("default", dead)
            assert lease.verify()

    @pytest.mark.parametrize("complete", [True, False])
    def test_no_connection_stays_open(self, monkeypatch, settings, complete):
        monkeypatch.setattr(sessions, "under_test", lambda: False)
        settings.FENCEDLOCK = {"default": {"OPTIONS": {"TIMEOUT": 1}}}
        burials.free_all("default", self.dead("x", complete))
        assert not any(each._idle for each in sessions._all.values())


class TestForks:
    def test_a_fork_waits_for_a_talk_that_is_short(self):
        gate = forks._Gate()
        gate.enter()
        timer = threading.Timer(0.05, gate.leave)
        timer.start()
        started = time.monotonic()
        gate.before_fork()
        assert 0.04 < time.monotonic() - started < 0.2
        gate.after_in_parent()

    def test_but_not_for_a_long_one(self):
        gate = forks._Gate()
        gate.enter()
        started = time.monotonic()
        gate.before_fork()
        assert forks.PATIENCE <= time.monotonic() - started < forks.PATIENCE + 5
        gate.after_in_parent()
        gate.leave()

    def test_a_talk_waits_for_the_fork(self):
        gate = forks._Gate()
        gate.before_fork()
        talking = threading.Thread(target=gate.enter)
        talking.start()
        talking.join(0.05)
        assert talking.is_alive()
        gate.after_in_parent()
        talking.join(5)
        assert not talking.is_alive()

    def test_the_child_waits_for_nobody(self):
        gate = forks._Gate()
        gate.enter()
        gate.before_fork()
        gate.after_in_child()
        started = time.monotonic()
        gate.before_fork()
        gate.after_in_parent()
        assert time.monotonic() - started < 0.1


class TestRounds:
    @pytest.fixture(autouse=True)
    def regular(self, monkeypatch):
        monkeypatch.setattr(worker, "_regular", [])

    def run(self, forks=True):
        rounds = worker.Rounds(forks=forks)
        rounds.start()
        return rounds

    def test_each_has_its_own_pace(self):
        calls = []
        worker.every(lambda: 0.01, lambda: calls.append("often"))
        worker.every(lambda: 60, lambda: calls.append("once"))
        rounds = self.run()
        wait_until(lambda: calls.count("often") > 3, "some rounds", 5)
        rounds.stop()
        assert calls.count("once") == 1

    def test_an_error_is_logged_and_the_rounds_go_on(self, monkeypatch, caplog):
        monkeypatch.setattr(worker, "AFTER_FAILURE", 0.01)
        calls = []

        def fail():
            calls.append(1)
            raise RuntimeError("oh")

        worker.every(lambda: 0.01, fail)
        with caplog.at_level(logging.ERROR):
            rounds = self.run()
            wait_until(lambda: len(calls) > 1, "two rounds", 5)
            rounds.stop()
        assert "oh" in caplog.text

    def test_they_end(self):
        calls = []
        worker.every(lambda: 0.01, lambda: calls.append(1))
        rounds = worker.Rounds(forks=True)
        thread = threading.Thread(target=rounds._run)
        thread.start()
        wait_until(lambda: calls, "a round", 5)
        rounds.stop()
        thread.join(5)
        assert not thread.is_alive()

    def test_without_any_there_is_no_thread(self, monkeypatch):
        started = []
        monkeypatch.setattr(threads, "start", started.append)
        self.run()
        assert started == []


class Loop:
    """What a mender wants of an event loop."""

    def __init__(self):
        self.later = []

    def add_reader(self, file, callback, *args):
        self.read = lambda: callback(*args)

    def call_later(self, seconds, callback, *args):
        self.later.append((seconds, lambda: callback(*args)))


class Pool:
    def __init__(self):
        self.looks = 0

    def maintain_pool(self):
        self.looks += 1


class TestMender:
    def test_a_pool_is_mended_soon_and_not_too_often(self):
        mender, loop, pool = mending.Mender(), Loop(), Pool()
        mender.listen(pool, loop)
        for _ in range(3):
            mender.ring()
            loop.read()
        ((seconds, mend),) = loop.later
        assert seconds == pytest.approx(mending.FIRST, abs=0.01)
        time.sleep(mending.FIRST)
        mend()
        assert pool.looks == 1
        mender.ring()
        loop.read()
        assert loop.later[1][0] == pytest.approx(mending.APART, abs=0.1)

    def test_too_many_rings_are_harmless(self):
        mender = mending.Mender()
        for _ in range(70_000):
            mender.ring()
