import signal
from pathlib import Path

import pytest

from tests.scripts import run_python
from tests.servers import Postgres, Redis, ServerNotOurs, workspace
from tests.servers.process import _family, _processes, wait_until

pytestmark = pytest.mark.slow


def test_rabbitmq_leaves_no_process_and_nothing_at_home(make_rabbitmq):
    cookie = Path("~/.erlang.cookie").expanduser()
    before = cookie.exists()
    server = make_rabbitmq()
    pids = {*_family(server.process.pid), *_family(server._names.pid)}
    assert len(pids) > 2
    server.close()
    # What the server had started ends when it finds that the server has.
    wait_until(lambda: not running(pids), "all of its processes to end")
    assert cookie.exists() == before


def test_a_server_from_the_environment_can_not_be_killed():
    assert not Redis("redis://127.0.0.1:6379").can_kill
    with pytest.raises(ServerNotOurs, match="make_postgres"):
        Postgres("postgres://127.0.0.1").kill()


_SCRIPT = """
import os, signal
from tests.servers import Postgres, Redis, finding, workspace
servers = [Postgres.launch(finding.postgres()), Redis.launch(finding.valkey())]
servers[1].pause()
print(workspace.root(), *(server.process.pid for server in servers), flush=True)
if os.fork() == 0:
    raise SystemExit
os.wait()
assert servers[0].execute("SELECT 1") == [(1,)], "the fork took the servers along"
"""


def run_script(end):
    done = run_python(code=_SCRIPT + end, check=False)
    directory, *pids = done.stdout.split()
    return done.returncode, Path(directory), {int(pid) for pid in pids}


def running(pids):
    return {pid for pid, _, state in _processes() if pid in pids and state != "Z"}


def test_nothing_is_left_behind():
    code, directory, pids = run_script("")
    assert code == 0
    assert not running(pids)
    assert not directory.exists()


def test_killed_test_process_leaves_no_server_and_the_next_one_sweeps():
    end = "os.kill(os.getpid(), signal.SIGKILL)"
    code, directory, pids = run_script(end)
    assert code == -signal.SIGKILL
    wait_until(lambda: not running(pids), "the servers to die along")
    assert directory.exists()
    workspace._sweep()
    assert not directory.exists()
    assert workspace.root().exists()
