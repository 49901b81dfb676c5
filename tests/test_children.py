"""A worker's main process sees which children have ended, and releases their locks."""

import contextlib
import os
import threading
import time

import pytest
from django.core.management import call_command

from django_fencedlock import lock
from django_fencedlock.backends.interface import Wait
from django_fencedlock.celery import worker
from django_fencedlock.celery.worker import VARIABLE, ChildWatch, ForkGate, LeftLocks, Maintenance
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.identity import Process, this_process
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.storage import connections
from django_fencedlock.storage.dialect import LOCK_WAIT
from tests.scripts import python
from tests.servers.process import wait_until
from tests.threads import beside

pytestmark = pytest.mark.skipif(not worker.can_watch(), reason="this system has no pidfd")

# It announces itself as a spawned child does, and waits for its end.
CHILD = """
import sys
from django_fencedlock.celery import worker
worker.announce()
print(worker.this_process(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ended():
    return []


@pytest.fixture
def watch(ended, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(worker, "_pipe", None)
    made = ChildWatch(ended.append)
    yield made
    for end in (made._announcements, worker._pipe):
        os.close(end)


@contextlib.contextmanager
def child_of(watch):
    with python(code=CHILD) as child:
        child.identity = Process.read(child.stdout.readline().strip())
        assert child.identity.pid == child.pid
        yield child


def look_until(watch, condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        watch.look(timeout=0.05)


class TestChildWatch:
    @pytest.mark.slow
    @pytest.mark.parametrize("before", [True, False])
    def test_a_child_that_ends_before_or_after_the_first_look(self, watch, ended, before):
        with child_of(watch) as child:
            if before:
                child.kill()
                child.wait()
            else:
                watch.look(timeout=1)
                child.stdin.close()
            look_until(watch, lambda: ended)
        assert ended == [child.identity]

    def test_a_child_whose_pid_another_process_has_by_now(self, watch, ended):
        former = this_process()._replace(started=this_process().started - 1)
        os.write(worker._pipe, f"{former}\n".encode())
        watch.look(timeout=1)
        assert ended == [former]

    def test_announcements_may_come_in_pieces(self, watch, ended):
        lines = "".join(f"{Process('b', 'n', 2**22 + number, 1)}\n" for number in range(50))
        for start in range(0, len(lines), 7):
            os.write(worker._pipe, lines[start : start + 7].encode())
            watch.look(timeout=1)
        assert [child.pid - 2**22 for child in ended] == list(range(50))

    @pytest.mark.slow
    def test_an_error_ends_no_watch(self, watch, ended, monkeypatch, caplog):
        monkeypatch.setattr(worker, "AFTER_ERROR", 0.01)

        def fail_once(child):
            watch._ended = ended.append
            raise RuntimeError

        watch._ended = fail_once
        watch.start()
        try:
            with child_of(watch) as first:
                first.kill()
            wait_until(lambda: "Watching the worker's children failed" in caplog.text, "the error")
            with child_of(watch) as second:
                second.kill()
                wait_until(lambda: ended, "the second end", 30)
            assert ended == [second.identity]
        finally:
            # The thread is left with a pipe of its own, which nobody closes under it.
            watch._announcements, worker._pipe = os.pipe()

    @pytest.mark.slow
    def test_no_file_stays_open(self, watch, ended):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with child_of(watch) as child:
                watch.look(timeout=1)
                child.kill()
                look_until(watch, lambda: ended)
            ended.clear()
        assert len(os.listdir("/proc/self/fd")) == before


class TestAnnouncing:
    def test_without_a_worker_it_is_a_warning(self, monkeypatch, caplog):
        monkeypatch.setenv(VARIABLE, "1:900")
        monkeypatch.setattr(worker, "_pipe", None)
        worker.announce()
        assert "couldn't announce itself" in caplog.text

    def test_a_worker_that_a_task_started_is_not_its_child(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "1:2")
        monkeypatch.setattr(worker, "_pipe", None)
        worker.forget_watch()
        assert VARIABLE not in os.environ
        assert worker._pipe is None


class Service:
    """Takes the place of `release_locks_of()`, and fails for as long as it is told to."""

    def __init__(self):
        self.released = []
        self.tries = 0
        self.away = False
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, ended, alias):
        self.tries += 1
        self.gate.wait(30)
        if self.away:
            raise BackendUnavailable("away")
        self.released.append((alias, ended))


def test_the_last_look_comes_after_any_request_that_a_child_has_sent():
    assert worker.LOOK_AFTER[0] == 0
    # It may wait in the server for a row, and take it then.
    assert worker.LOOK_AFTER[-1] > 2 * LOCK_WAIT / 1000


class TestLeftLocks:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch, settings):
        settings.FENCEDLOCK = {"default": {}}
        monkeypatch.setattr(worker, "LOOK_AFTER", (0.0, 0.05))
        monkeypatch.setattr(worker, "AFTER_ERROR", 0.01)

    @pytest.fixture
    def second_look_after(self, monkeypatch):
        """By the real clock, both looks might be due before the thread runs, and become one."""

        def after(condition):
            monkeypatch.setattr(worker, "clock", lambda: 1.0 if condition() else 0.0)

        return after

    @pytest.fixture
    def release(self, monkeypatch):
        started = []

        def release(service):
            monkeypatch.setattr(worker, "release_locks_of", service)
            made = LeftLocks()
            started.append(made)
            made.release(this_process())
            return made

        yield release
        # A thread that goes on would call the service of the next test.
        monkeypatch.setattr(worker, "release_locks_of", lambda ended, alias: None)
        for made in started:
            wait_until(lambda made=made: not made.looks, "the end of its threads", 30)

    @pytest.mark.parametrize("aliases", [["default"], ["default", "other"]])
    def test_every_alias_is_asked_and_once_more_a_little_later(
        self, release, settings, second_look_after, aliases
    ):
        settings.FENCEDLOCK = {alias: {} for alias in aliases}
        service = Service()
        second_look_after(lambda: len(service.released) >= len(aliases))
        release(service)
        wait_until(lambda: len(service.released) == 2 * len(aliases), "two looks", 30)
        assert sorted(service.released) == sorted(
            2 * [(each, {this_process()}) for each in aliases]
        )

    def test_but_not_for_longer_than_the_ttl(self, release, settings):
        settings.FENCEDLOCK = {"default": {"TTL": 1}}
        service = Service()
        service.away = True
        made = release(service)
        wait_until(lambda: not made.looks, "it to give up", 30)
        assert service.released == []

    def test_children_that_end_meanwhile_are_looked_up_together(self, release):
        service = Service()
        service.gate.clear()
        made = release(service)
        wait_until(lambda: service.tries, "the first look", 30)
        others = [this_process()._replace(pid=pid) for pid in (1, 2, 3)]
        for each in others:
            made.release(each)
        service.gate.set()
        wait_until(lambda: len(service.released) >= 2, "the second look", 30)
        assert set(others) <= set(service.released[1][1])


@pytest.mark.django_db(transaction=True)
class TestReleasing:
    def hold(self, name):
        """Hold a lock that no lease of this process has."""
        service("default").backend.acquire(new_claim(name, 30), Wait())

    def test_what_the_registry_says_is_released(self):
        self.hold("x")
        self.hold("y")
        worker.release_locks_of([this_process()._replace(pid=1), this_process()], "default")
        assert lock("x").holder() is None
        assert lock("y").holder() is None

    @pytest.mark.parametrize(
        "other", [{"boot_id": "b"}, {"pid_namespace": "n"}, {"pid": 1}, {"started": 1}]
    )
    def test_and_of_that_very_process_alone(self, other):
        self.hold("x")
        worker.release_locks_of([this_process()._replace(**other)], "default")
        assert lock("x").holder() is not None

    def test_no_other_alias_is_touched(self, settings):
        self.hold("x")
        settings.FENCEDLOCK = {"default": {}, "other": {}}
        worker.release_locks_of([this_process()], "other")
        assert lock("x").holder() is not None

    def test_no_connection_stays_open(self, monkeypatch, settings):
        monkeypatch.setattr(connections, "under_test", lambda: False)
        settings.FENCEDLOCK = {"default": {"OPTIONS": {"TIMEOUT": 1}}}
        self.hold("x")
        worker.release_locks_of([this_process()], "default")
        assert not any(each._idle for each in connections._pools.values())

    @pytest.mark.slow
    def test_a_project_without_tables_is_told_nothing(self, settings, make_alias, tmp_path, caplog):
        entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "empty.sqlite3")}
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": (alias := make_alias(entry))}}
        call_command("migrate", "django_fencedlock", "zero", database=alias, verbosity=0)
        left = LeftLocks()
        left.release(this_process())
        wait_until(lambda: not left.looks, "the looks", 30)
        assert caplog.text == ""


class TestForks:
    @contextlib.contextmanager
    def talking(self, gate, until):
        """Talk to a server in another thread."""
        began = threading.Event()

        def talk():
            with gate.closed():
                began.set()
                until.wait(30)

        talking = beside(talk)
        try:
            yield began
        finally:
            until.set()
            talking.result()

    @pytest.mark.parametrize("is_short", [True, False])
    def test_a_fork_waits_for_a_short_talk_and_not_for_a_long_one(self, monkeypatch, is_short):
        if is_short:
            monkeypatch.setattr(worker, "FORK_TIMEOUT", 5.0)
        gate, until = ForkGate(), threading.Event()
        with self.talking(gate, until) as began:
            began.wait(30)
            if is_short:
                threading.Timer(0.05, until.set).start()
            started = time.monotonic()
            gate.before_fork()
            least, most = (0.04, 5) if is_short else (worker.FORK_TIMEOUT, worker.FORK_TIMEOUT + 5)
            assert least <= time.monotonic() - started < most
            gate.after_fork_in_parent()

    def test_a_talk_waits_for_the_fork(self):
        gate = ForkGate()
        gate.before_fork()
        with self.talking(gate, threading.Event()) as began:
            assert not began.wait(0.05)
            gate.after_fork_in_parent()
            assert began.wait(5)

    def test_a_child_doesnt_wait(self):
        gate = ForkGate()
        with self.talking(gate, threading.Event()) as began:
            began.wait(30)
            gate.before_fork()
            gate.after_fork()
            started = time.monotonic()
            gate.before_fork()
            gate.after_fork_in_parent()
            assert time.monotonic() - started < 0.1


class TestMaintenance:
    @pytest.fixture
    def looks(self, monkeypatch):
        looks = []
        monkeypatch.setattr(Maintenance, "look", lambda self: looks.append(1))
        monkeypatch.setattr(Maintenance, "period", lambda self: 0.01)
        return looks

    def test_it_looks_until_it_is_stopped(self, looks):
        maintenance = Maintenance(None)
        thread = threading.Thread(target=maintenance._run)
        thread.start()
        wait_until(lambda: len(looks) > 3, "some looks", 5)
        maintenance.stop()
        thread.join(5)
        assert not thread.is_alive()

    def test_an_error_is_logged_and_it_looks_again(self, looks, monkeypatch, caplog):
        def fail(self):
            looks.append(1)
            raise RuntimeError("oh")

        monkeypatch.setattr(worker, "AFTER_FAILURE", 0.01)
        monkeypatch.setattr(Maintenance, "look", fail)
        maintenance = Maintenance(None)
        maintenance.start()
        wait_until(lambda: len(looks) > 1, "two looks", 5)
        maintenance.stop()
        assert "oh" in caplog.text
