"""What a process held is known after it was killed."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from django_fencedlock import journal, lock
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.journal import LENGTH, MOST, Journal, JournalEntry, read
from django_fencedlock.processes import this_process
from django_fencedlock.services import service

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux alone has it")

START = 3 * LENGTH


@pytest.fixture
def file():
    descriptor = os.memfd_create("journals")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def mine(file):
    return Journal(file, START)


def entry(number=0, name="invoice:42"):
    return JournalEntry("default", name, f"owner{number}", 30.0, True)


def found(file):
    return read(file, START, this_process())


class TestJournal:
    def test_an_entry_is_there_until_it_is_erased(self, file, mine):
        assert found(file) == ([], True)
        mine.enter(entry())
        assert found(file) == ([entry()], True)
        mine.erase("owner0")
        assert found(file) == ([], True)

    def test_entries_are_erased_in_any_order(self, file, mine):
        for number in range(5):
            mine.enter(entry(number))
        for number in (0, 3, 1):
            mine.erase(f"owner{number}")
        mine.enter(entry(5))
        assert {each.owner for each in found(file).entries} == {"owner2", "owner4", "owner5"}

    def test_erasing_what_was_never_entered_is_harmless(self, file, mine):
        mine.erase("nobody")
        assert found(file) == ([], True)

    @pytest.mark.parametrize("name", ["ñandú:42", "x" * 200, "\U0001f512" * 200, "a\nb|c\0d"])
    def test_any_name_can_be_entered(self, file, mine, name):
        mine.enter(entry(name=name))
        assert found(file) == ([entry(name=name)], True)

    def test_it_survives_a_kill(self, file):
        code = (
            "import os, signal, sys; from django_fencedlock import journal, processes;"
            "journal.begin(int(sys.argv[1]), int(sys.argv[2]));"
            "journal.enter('default', 'x', 'me', 30.0, False);"
            "print(processes.this_process(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(file), str(START)],
            pass_fds=[file],
            stdout=subprocess.PIPE,
            check=False,
        )
        who = this_process().read(done.stdout.decode().strip())
        assert read(file, START, who) == ([JournalEntry("default", "x", "me", 30.0, False)], True)

    def test_that_of_another_process_tells_nothing(self, file, mine):
        mine.enter(entry())
        other = replace(this_process(), pid=1)
        assert read(file, START, other) == journal.NOTHING
        assert read(file, 0, this_process()) == journal.NOTHING

    def test_the_next_process_begins_anew(self, file, mine):
        for number in range(5):
            mine.enter(entry(number))
        Journal(file, START)
        assert found(file) == ([], True)

    def test_journals_of_one_file_do_not_meet(self, file, mine):
        for number in range(MOST + 5):
            mine.enter(entry(number))
        beside = Journal(file, START + LENGTH)
        beside.enter(entry(-1))
        assert entry(-1) not in found(file).entries
        assert read(file, START + LENGTH, this_process()).entries == [entry(-1)]
        assert os.pread(file, 10, START - 10) == bytes(10)

    def test_a_full_one_says_so_once_and_goes_on(self, file, mine, caplog):
        with caplog.at_level(logging.WARNING):
            for number in range(MOST + 5):
                mine.enter(entry(number))
        assert len(found(file).entries) == MOST - 1
        assert not found(file).complete
        assert len(caplog.records) == 1
        for number in range(MOST + 5):
            mine.erase(f"owner{number}")
        mine.enter(entry(1))
        assert found(file).entries == [entry(1)]

    def test_one_that_cannot_be_written_says_so(self, file, mine, monkeypatch, caplog):
        write = os.pwrite

        def full(file, data, place):
            if len(data) > 1:
                raise OSError("no space left")
            return write(file, data, place)

        monkeypatch.setattr(os, "pwrite", full)
        mine.enter(entry())
        assert found(file) == ([], False)
        assert "no space left" in caplog.text

    def test_any_thread_may_write(self, file, mine):
        def come_and_go(first):
            for number in range(first, first + 300):
                mine.enter(entry(number))
                mine.erase(f"owner{number}")

        threads = [threading.Thread(target=come_and_go, args=(n * 1000,)) for n in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert found(file) == ([], True)
        for number in range(MOST - 1):
            mine.enter(entry(number))
        assert found(file).complete


@pytest.mark.django_db(transaction=True)
class TestServices:
    @pytest.fixture(autouse=True)
    def kept(self, file, monkeypatch):
        monkeypatch.setattr(journal, "_opened", Journal(file, START))

    def test_what_is_held_is_noted(self, file):
        with lock("x", ttl=20) as lease:
            assert found(file).entries == [JournalEntry("default", "x", lease.owner, 20.0, True)]
        assert found(file).entries == []

    def test_unfenced_leases_too(self, file):
        with lock("x", fenced=False):
            assert [each.fenced for each in found(file).entries] == [False]

    def test_a_lease_that_is_entered_twice_is_noted_once(self, file):
        with lock("x"):
            with lock("x"):
                assert len(found(file).entries) == 1
            assert len(found(file).entries) == 1

    def test_it_is_noted_before_it_is_asked_for(self, file, monkeypatch):
        backend = service("default").backend
        noted = []

        def look(request):
            noted.extend(found(file).entries)

        monkeypatch.setattr(backend, "acquire", look)
        assert lock("x").acquire(blocking=False) is None
        assert [each.name for each in noted] == ["x"]
        assert found(file).entries == []

    def test_what_could_not_be_asked_for_is_not_held(self, file, monkeypatch):
        def fail(request):
            raise BackendUnavailable("away")

        monkeypatch.setattr(service("default").backend, "acquire", fail)
        with pytest.raises(BackendUnavailable):
            lock("x").acquire(blocking=False)
        assert found(file).entries == []

    def test_it_is_erased_after_the_release(self, file, monkeypatch):
        backend = service("default").backend
        release, noted = backend.release, []

        def look(lease):
            noted.extend(found(file).entries)
            return release(lease)

        monkeypatch.setattr(backend, "release", look)
        with lock("x"):
            pass
        assert len(noted) == 1

    def test_a_release_that_fails_is_one(self, file, monkeypatch):
        def fail(lease):
            raise BackendUnavailable("away")

        monkeypatch.setattr(service("default").backend, "release", fail)
        with contextlib.suppress(BackendUnavailable), lock("x"):
            pass
        assert found(file).entries == []


def test_a_child_after_fork_keeps_none(file):
    code = (
        "import os, sys; from django_fencedlock import journal, processes;"
        "journal.begin(int(sys.argv[1]), 0); child = os.fork();"
        "journal.enter('default', 'child' if child == 0 else 'parent', 'me', 30.0, False);"
        "child or os._exit(0); os.waitpid(child, 0); print(processes.this_process())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], pass_fds=[file], stdout=subprocess.PIPE, check=True
    )
    who = this_process().read(done.stdout.decode().strip())
    assert [each.name for each in read(file, 0, who).entries] == ["parent"]


def test_without_one_nothing_is_noted():
    journal.enter("default", "x", "me", 30.0, True)
    journal.erase("me")
    assert journal._opened is None
