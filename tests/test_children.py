"""A worker's main process sees which children have ended, and releases their locks."""

import contextlib
import os
import threading
import time
from unittest.mock import Mock

import pytest
from django.core.management import call_command

from django_fencedlock import lock
from django_fencedlock.backends.interface import Wait
from django_fencedlock.celery import worker
from django_fencedlock.celery.worker import VARIABLE, ChildWatch, ForkGate, LeftLocks, Maintenance
from django_fencedlock.core import runtime
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.identity import Process, this_process
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.storage import connections
from django_fencedlock.storage.dialect import LOCK_WAIT
from tests.failing import raising
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
    return runtime.SimpleQueue()


@pytest.fixture
def watch(ended, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(worker, "_pipe", None)
    made = ChildWatch([ended])
    running = beside(made.run)
    yield made
    # It ends with the last writer.
    os.close(worker._pipe)
    running.result()


@contextlib.contextmanager
def child_of(watch):
    with python(code=CHILD) as child:
        child.identity = Process.read(child.stdout.readline().strip())
        assert child.identity.pid == child.pid
        yield child


class TestChildWatch:
    @pytest.mark.slow
    def test_a_child_is_reported_when_it_ends_and_not_before(self, watch, ended):
        with child_of(watch) as child:
            with pytest.raises(runtime.Empty):
                ended.get(timeout=0.1)
            child.kill()
            assert ended.get(timeout=30) == child.identity

    @pytest.mark.parametrize("other", [{"pid": 2**22 + 1}, {"started": 1}], ids=["gone", "reused"])
    def test_a_child_whose_pid_is_gone_or_reused_before_it_is_watched(self, watch, ended, other):
        former = this_process()._replace(**other)
        os.write(worker._pipe, f"{former}\n".encode())
        assert ended.get(timeout=30) == former

    def test_announcements_may_come_in_pieces(self, watch, ended):
        lines = "".join(f"{Process('b', 'n', 2**22 + number, 1)}\n" for number in range(50))
        for start in range(0, len(lines), 7):
            os.write(worker._pipe, lines[start : start + 7].encode())
        assert [ended.get(timeout=30).pid - 2**22 for _ in range(50)] == list(range(50))

    def test_an_error_ends_no_watch(self, watch, ended, monkeypatch, caplog):
        with monkeypatch.context() as patched:
            patched.setattr(worker, "PidFd", raising(OSError("too many open files")))
            os.write(worker._pipe, f"{this_process()}\n".encode())
            wait_until(lambda: "can't be watched (too many open files)" in caplog.text, "an error")
        former = this_process()._replace(started=this_process().started - 1)
        os.write(worker._pipe, f"{former}\n".encode())
        assert ended.get(timeout=30) == former

    @pytest.mark.slow
    def test_no_file_stays_open(self, watch, ended):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with child_of(watch) as child:
                child.kill()
                ended.get(timeout=30)
        assert len(os.listdir("/proc/self/fd")) == before


class TestAnnouncing:
    def test_without_a_pipe_it_is_a_warning(self, monkeypatch, caplog):
        monkeypatch.setenv(VARIABLE, f"{os.getppid()}:900")
        monkeypatch.setattr(worker, "_pipe", None)
        worker.announce()
        assert "couldn't announce itself" in caplog.text

    def test_a_worker_that_a_task_started_is_not_its_child(self, monkeypatch, caplog):
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        monkeypatch.setenv(VARIABLE, f"1:{writing}")
        monkeypatch.setattr(worker, "_pipe", writing)
        worker.announce()
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        assert caplog.text == ""
        os.close(reading)
        os.close(writing)


def test_there_is_a_look_after_any_request_that_a_child_has_sent():
    # It may wait in the server for a row, and take it then.
    assert LOCK_WAIT / 1000 < worker.LOOK_EACH < 1
    assert worker.LOOK_EACH < worker.LOOK_FOR


class TestLeftLocks:
    @pytest.fixture
    def left(self, monkeypatch, settings):
        settings.FENCEDLOCK = {"default": {"TTL": 30}}
        self.now, self.looks, self.error = 0.0, [], None
        monkeypatch.setattr(worker, "LOOK_EACH", 0.0)
        monkeypatch.setattr(worker, "clock", lambda: self.now)
        monkeypatch.setattr(worker, "release_locks_of", self.release)
        return LeftLocks("default")

    def release(self, ended, alias):
        self.looks.append(({child.pid for child in ended}, alias))
        if self.error is not None:
            raise self.error

    def end(self, left, *pids):
        for pid in pids:
            left.ended.put(this_process()._replace(pid=pid))

    def look_until_done(self, left):
        left.look()
        while left.children:
            self.now += 1
            left.look()
        return self.now

    def test_a_child_is_looked_up_again_a_little_later(self, left):
        self.end(left, 1)
        assert self.look_until_done(left) == 2
        assert self.looks == [({1}, "default")] * 3

    def test_one_that_ended_after_a_long_wait_is_looked_up_as_often(self, left):
        queue, left.ended = left.ended, Mock()

        def get(timeout=None):
            self.now += 3600 if timeout is None else 0
            return queue.get(timeout=timeout)

        left.ended.get = get
        queue.put(this_process())
        self.look_until_done(left)
        assert len(self.looks) == 3

    def test_children_that_ended_together_are_looked_up_together(self, left):
        self.end(left, 1)
        left.look()
        self.end(left, 2, 3)
        left.look()
        assert self.looks == [({1}, "default"), ({1, 2, 3}, "default")]

    def test_a_service_that_does_not_answer_is_asked_for_a_ttl(self, left, caplog):
        self.error = BackendUnavailable("away")
        self.end(left, 1)
        assert self.look_until_done(left) == 30
        warnings = [each for each in caplog.records if each.levelname == "WARNING"]
        assert [each.getMessage() for each in warnings] == [
            "The locks that ended children held through alias 'default' couldn't be released: away."
            " It is tried again for a while; then they expire. This is logged once."
        ]

    def test_an_error_of_another_kind_is_no_repetition(self, left, caplog):
        self.end(left, 1)
        for self.error in [*[BackendUnavailable("away")] * 2, *[KeyError("bug")] * 2, None]:
            left.look()
        warnings = [each for each in caplog.records if each.levelname == "WARNING"]
        assert [bool(each.exc_info) for each in warnings] == [False, True]

    def test_and_its_locks_are_released_when_it_answers(self, left):
        self.error = BackendUnavailable("away")
        self.end(left, 1)
        for self.now in (0.0, 10.0):
            left.look()
        self.error = None
        left.look()
        assert len(self.looks) == 3
        assert left.children == {}


@pytest.mark.django_db(transaction=True)
class TestReleasing:
    def hold(self, name):
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
    def test_a_project_without_tables_gets_no_message(self, settings, make_alias, tmp_path, caplog):
        entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "empty.sqlite3")}
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": (database := make_alias(entry))}}
        call_command("migrate", "django_fencedlock", "zero", database=database, verbosity=0)
        left = LeftLocks("default")
        left.ended.put(this_process())
        left.look()
        assert caplog.text == ""


class TestForks:
    @contextlib.contextmanager
    def talking(self, gate, until):
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
            monkeypatch.setattr(worker, "FORK_TIMEOUT", 60.0)
        gate, until = ForkGate(), threading.Event()
        with self.talking(gate, until) as began:
            began.wait(30)
            if is_short:
                threading.Timer(0.05, until.set).start()
            started = time.monotonic()
            gate.before_fork()
            least = 0.04 if is_short else worker.FORK_TIMEOUT
            assert least <= time.monotonic() - started < 20
            gate.after_fork_in_parent()

    def test_a_talk_waits_for_the_fork(self):
        gate = ForkGate()
        gate.before_fork()
        with self.talking(gate, threading.Event()) as began:
            assert not began.wait(0.05)
            gate.after_fork_in_parent()
            assert began.wait(20)

    def test_a_child_doesnt_wait(self):
        gate = ForkGate()
        with self.talking(gate, threading.Event()) as began:
            began.wait(30)
            gate.before_fork()
            gate.after_fork()
            started = time.monotonic()
            gate.before_fork()
            gate.after_fork_in_parent()
            assert time.monotonic() - started < 10


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
        wait_until(lambda: len(looks) > 3, "some looks")
        maintenance.stop()
        thread.join(20)
        assert not thread.is_alive()

    def test_an_error_is_logged_and_it_looks_again(self, looks, monkeypatch, caplog):
        def fail(self):
            looks.append(1)
            raise RuntimeError("oh")

        monkeypatch.setattr(worker, "AFTER_FAILURE", 0.01)
        monkeypatch.setattr(Maintenance, "look", fail)
        maintenance = Maintenance(None)
        maintenance.start()
        wait_until(lambda: len(looks) > 1, "two looks")
        maintenance.stop()
        assert "oh" in caplog.text
