"""Whether a process is gone: only when all of it is, and only if it is the one that is meant."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from django_fencedlock.core import identity as processes
from django_fencedlock.core.identity import PidFd, Process, this_process
from tests.failing import raising
from tests.scripts import python
from tests.servers.process import wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")

NEXT_PID = Path("/proc/sys/kernel/ns_last_pid")
# Its main thread ends, and another one goes on until it is killed.
WITHOUT_MAIN_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60, 0)
"""


def is_gone(process):
    return processes.is_process_gone(process)


def start_of(pid):
    return processes._start_time(str(pid))


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def child():
    with python(code="import time; time.sleep(60)") as started:
        yield started


def identity(child):
    return this_process()._replace(pid=child.pid, started=start_of(child.pid))


class TestIsGone:
    def test_a_killed_child_is_before_its_parent_took_notice(self, child):
        who = identity(child)
        child.kill()
        wait_until(lambda: state_of(child.pid) == "Z", "the child to be a zombie")
        os.kill(child.pid, 0)  # which says that it is there
        assert is_gone(who) is True

    def test_one_whose_other_threads_run_is_not(self):
        with python(code=WITHOUT_MAIN_THREAD) as child:
            who = identity(child)
            wait_until(lambda: state_of(child.pid) == "Z", "the main thread to end")
            assert is_gone(who) is False
            child.kill()
            wait_until(lambda: is_gone(who), "the other threads to end")

    def test_a_process_whose_pid_another_one_has_is_gone(self, child):
        assert is_gone(identity(child)._replace(started=start_of(child.pid) - 1)) is True

    @pytest.mark.skipif(not os.access(NEXT_PID, os.W_OK), reason="only root may choose a pid")
    def test_one_whose_pid_was_used_again_is(self):
        with python(code="") as first:
            former = identity(first)
        for _ in range(50):
            # The start of a process is known to a hundredth of a second.
            time.sleep(0.02)
            NEXT_PID.write_text(str(former.pid - 1))
            with python(code="import time; time.sleep(60)") as second:
                if second.pid == former.pid:
                    assert is_gone(former) is True
                    assert is_gone(identity(second)) is False
                    return
        pytest.skip("others got the pid, fifty times")

    @pytest.mark.parametrize(
        "other",
        [
            *({"boot_id": "9d3f2c1e-0000-0000-0000-000000000000"}, {"pid_namespace": "pid:[1]"}),
            *({"boot_id": ""}, {"pid_namespace": ""}, {"started": 0}, {"pid": 0}, {"pid": 2**40}),
        ],
    )
    def test_of_what_is_not_of_this_machine_nothing_is_known(self, child, other):
        who = identity(child)
        child.kill()
        child.wait()
        assert is_gone(who._replace(**other)) is None

    def test_nothing_is_known_without_pidfd_or_where_it_is_refused(self, child, monkeypatch):

        who = identity(child)
        monkeypatch.setattr(os, "pidfd_open", raising(PermissionError))
        assert is_gone(who) is None
        monkeypatch.delattr(os, "pidfd_open")
        assert is_gone(who) is is_gone(this_process()) is None

    def test_a_process_that_is_hidden_is_gone_when_it_has_ended(self, child, monkeypatch):
        who = identity(child)
        monkeypatch.setattr(processes, "_start_time", lambda pid: None)
        assert is_gone(who) is None
        child.kill()
        wait_until(lambda: state_of(child.pid) == "Z", "the child to be a zombie")
        assert is_gone(who) is True


class TestThisProcess:
    def test_it_is_known(self):
        here = this_process()
        assert here.pid == os.getpid()
        assert here.started == start_of(here.pid)
        assert here.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert here.pid_namespace == os.readlink("/proc/self/ns/pid")

    def test_it_has_no_start_by_the_processes_of_another_namespace(self, monkeypatch):
        monkeypatch.setattr(processes, "_link", lambda path: "17")
        assert processes._here.__wrapped__(os.getpid())[1].started == 0

    def test_it_is_another_one_in_another_time_namespace(self, monkeypatch):
        links = {"/proc/self/ns/pid": "pid:[1]", "/proc/self/ns/time": "time:[2]"}
        monkeypatch.setattr(processes, "_link", links.get)
        assert processes._here.__wrapped__(os.getpid())[1].pid_namespace == "pid:[1] time:[2]"

    def test_it_can_be_written_and_read(self):
        assert Process.read(str(this_process())) == this_process()

    @pytest.mark.parametrize("text", ["", "web-3, pid 812", "a|b|c|d", "a|b|1|2|3", "a|b|1|"])
    def test_of_any_other_text_nothing_is_known(self, text):
        assert is_gone(Process.read(text)) is None


def test_a_file_for_a_process_is_closed(child):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        is_gone(identity(child))
    assert len(os.listdir("/proc/self/fd")) == before
    with contextlib.closing(PidFd(child.pid)) as opened:
        assert not opened.has_ended()


def test_a_child_with_its_parents_pid_in_another_namespace_is_another_process():
    mine = this_process()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.getpid = lambda: mine.pid
            processes._link = lambda path: "another namespace"
            code = 0 if this_process() != mine else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
