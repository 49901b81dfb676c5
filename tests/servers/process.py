"""One server process: start it, pause it, kill it, and leave none behind."""

import atexit
import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from . import workspace

_LAUNCHER = Path(__file__).with_name("launch.py")
_started: list["Process"] = []
_test_process = os.getpid()


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 20) -> None:
    """Ask every few milliseconds until *condition* holds; raise TimeoutError if it doesn't."""
    deadline = time.monotonic() + timeout
    pause = 0.001
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Waited {timeout} s for {what}.")
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def free_port(besides: int = 0) -> int:
    """
    Return a free loopback port. The port `besides` above it is also free.

    Both lie below the ephemeral range: otherwise an outgoing connection could take the port while
    its server is being restarted. And not from random: pytest-randomly gives every xdist worker
    the same seed.
    """
    while True:
        port = 15000 + secrets.randbelow(17000 - besides)
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            if besides:
                other.bind(("127.0.0.1", port + besides))
            return port


def accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def clean_environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def run_as_server_user(*command: object) -> None:
    """Run a short command, such as initdb, as the server user."""
    user = workspace.server_user()
    done = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[] if os.getuid() == 0 else None,
    )
    if done.returncode:
        output = done.stdout.decode(errors="replace")
        raise RuntimeError(f"{command[0]} failed with {done.returncode}:\n{output}")


class Process:
    """A server and its children; `ours` runs as us in our own directory, not as the server user."""

    def __init__(
        self,
        command: Sequence[object],
        directory: Path,
        ready: Callable[["Process"], bool],
        *,
        terminate: int = signal.SIGTERM,
        quit: int = signal.SIGKILL,  # noqa: A002
        environment: Mapping[str, object] | None = None,
        patience: float = 20,
        ours: bool = False,
    ) -> None:
        self.log = directory / "server.log"
        self._command = [str(part) for part in command]
        self._ready = ready
        self._terminate = terminate
        self._quit = quit
        self._environment = {name: str(value) for name, value in (environment or {}).items()}
        self._patience = patience
        self._ours = ours
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._popen is None:
            raise RuntimeError(f"{self._command[0]} is not running.")
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def add_environment(self, variables: Mapping[str, object]) -> None:
        self._environment |= {name: str(value) for name, value in variables.items()}

    def drop_option(self, option: str, values: int) -> None:
        place = self._command.index(option)
        del self._command[place : place + 1 + values]

    def set_option(self, option: str, value: str) -> None:
        self._command[self._command.index(option) + 1] = value

    def start(self) -> None:
        user = workspace.server_user()
        uid, gid = (os.getuid(), os.getgid()) if self._ours else (user.pw_uid, user.pw_gid)
        ids = (str(os.getpid()), str(uid), str(gid))
        with self.log.open("ab") as log:
            self._popen = _spawner.popen(
                [sys.executable, "-I", "-S", str(_LAUNCHER), *ids, *self._command],
                cwd="/",
                env=clean_environment() | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        _started.append(self)
        what = f"{self._command[0]} to answer; its log is {self.log}"
        wait_until(self._answers, what, self._patience)

    def kill(self) -> None:
        """Kill the server and its children with SIGKILL, without any cleanup."""
        family = self._pause() if self.running else []
        for pid in family:
            _send(pid, signal.SIGKILL)
        self._reap()
        wait_until(lambda: not _alive(family), f"{self._command[0]} to be gone")

    def pause(self) -> None:
        """Stop the server and its children with SIGSTOP: connections stay open, nothing answers."""
        self._pause()

    def resume(self) -> None:
        for pid in _family(self.pid):
            _send(pid, signal.SIGCONT)

    def terminate(self) -> None:
        self._end(self._terminate)

    def quit(self) -> None:
        """Stop the server quickly, whatever state it is in."""
        self._end(self._quit)

    def _end(self, number: int) -> None:
        if self._popen is not None and self.running:
            self.resume()
            _send(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=10)
        self.kill()

    def _pause(self) -> list[int]:
        # The parent first: a stopped parent has no more children.
        _send(self.pid, signal.SIGSTOP)
        wait_until(lambda: _stopped([self.pid]), f"{self._command[0]} to stop")
        family = _family(self.pid)
        for pid in family:
            _send(pid, signal.SIGSTOP)
        wait_until(lambda: _stopped(family), f"the children of {self._command[0]} to stop")
        return family

    def _reap(self) -> None:
        if self._popen is not None:
            self._popen.wait()
            self._popen = None
            _started.remove(self)

    def _answers(self) -> bool:
        if not self.running:
            log = self.log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"{self._command[0]} ended while it started:\n{log}")
        return self._ready(self)


class _Spawner:
    """
    Starts processes from one thread that lives as long as we do.

    PR_SET_PDEATHSIG watches the thread that forked: a server that a short-lived thread was the
    first to ask for would die together with that thread.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[subprocess.Popen[bytes]], Any, Any]]
        self._queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def popen(self, *args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="servers", daemon=True)
                self._thread.start()
        future: Future[subprocess.Popen[bytes]] = Future()
        self._queue.put((future, args, kwargs))
        return future.result()

    def _run(self) -> None:
        while True:
            future, args, kwargs = self._queue.get()
            try:
                future.set_result(subprocess.Popen(*args, **kwargs))
            except OSError as exc:
                future.set_exception(exc)


_spawner = _Spawner()


@atexit.register
def stop_everything() -> None:
    if os.getpid() != _test_process:
        # A forked child that ends must not stop the servers.
        return
    for process in list(_started):
        process.quit()
    workspace.remove()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _family(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for child, parent, _ in _processes():
        children.setdefault(parent, []).append(child)
    family = [pid]
    for member in family:
        family.extend(children.get(member, []))
    return family


def _alive(pids: Sequence[int]) -> bool:
    return any(pid in pids and state != "Z" for pid, _, state in _processes())


def _stopped(pids: Sequence[int]) -> bool:
    return all(state in "TtZ" for pid, _, state in _processes() if pid in pids)


def _processes() -> Iterator[tuple[int, int, str]]:
    if Path("/proc/self/stat").exists():
        yield from _processes_from_proc()
        return
    lines = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid=,state="], text=True)
    for line in lines.splitlines():
        pid, parent, state = line.split()
        yield int(pid), int(parent), state[0]


def _processes_from_proc() -> Iterator[tuple[int, int, str]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
                # The name in parentheses may hold anything, spaces and parentheses included.
                state, parent = stat.rpartition(")")[2].split()[:2]
                yield int(entry), int(parent), state
