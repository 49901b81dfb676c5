"""Starting clients, from the lab's side."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.servers.process import _alive, _send, _stopped, wait_until

from .settings import VARIABLE

ROOT = Path(__file__).parent.parent.parent
#: Seconds that anything may take that isn't under attack.
PATIENCE = 60


def variables_of(lab: str) -> dict[str, str]:
    settings = {"PYTHONPATH": str(ROOT), "DJANGO_SETTINGS_MODULE": "tests.faults.settings"}
    return {**os.environ, **settings, VARIABLE: lab}


class Host:
    """A process that forks clients, all with the same settings."""

    def __init__(self, lab: Mapping[str, Any], log: Path, **environment: str) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.host"],
            cwd=ROOT,
            env=variables_of(json.dumps(lab)) | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            text=True,
        )
        self._hear()

    def client(self, name: str) -> int:
        return self._order(do="client", name=name)

    def ask(self, what: str, path: Path) -> Any:
        path.unlink(missing_ok=True)
        pid = self._order(do=what, to=str(path))
        wait_until(lambda: path.exists() or not _alive([pid]), f"{what} by the lab", PATIENCE)
        if not path.exists():
            raise RuntimeError(f"{what} failed:\n{self._log.read_text()[-4000:]}")
        return json.loads(path.read_text())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _order(self, **order: Any) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid: int = self._hear()["pid"]
        return pid

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The lab's host ended:\n{self._log.read_text()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def standing_still(pids: list[int]) -> Iterator[None]:
    try:
        for pid in pids:
            _send(pid, signal.SIGSTOP)
        wait_until(lambda: _stopped(pids), "processes to stand still")
        yield
    finally:
        for pid in pids:
            _send(pid, signal.SIGCONT)


class Crew:
    """The clients of a run. Dead ones are replaced."""

    def __init__(self, hosts: list[Host], size: int) -> None:
        self._hosts = hosts
        self._size = size
        self._born = 0
        # Two things may go wrong at once.
        self._lock = threading.Lock()
        #: The pids of the living, by the names of their accounts.
        self.pids: dict[str, int] = {}

    def fill(self) -> None:
        with self._lock:
            self.forget_dead()
            pids = dict(self.pids)
            for place in set(range(self._size)) - {int(name.split("-")[1]) for name in pids}:
                name = f"client-{place}-{self._born}"
                self._born += 1
                pids[name] = self._hosts[place % len(self._hosts)].client(name)
            self.pids = pids

    def forget_dead(self) -> None:
        self.pids = {name: pid for name, pid in self.pids.items() if _alive([pid])}

    def kill(self, name: str) -> None:
        pid = self.pids.get(name)
        if pid is None:
            return
        _send(pid, signal.SIGKILL)
        wait_until(lambda: not _alive([pid]), "a client to be gone")

    def paused(self, *names: str) -> AbstractContextManager[None]:
        return standing_still([self.pids[name] for name in names if name in self.pids])

    def wait_for_end(self, timeout: float) -> list[str]:
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not _alive(list(self.pids.values())), "clients to end", timeout)
        self.forget_dead()
        late = list(self.pids)
        for name in late:
            self.kill(name)
        return late
