"""The processes of a simulation, started on demand and always ended."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

#: Seconds for a process to clean up.
PATIENCE = 5
_ROOT = Path(__file__).resolve().parents[2]


class Puppet:
    """
    A process that executes commands and sends messages.

    Args:
        module: The module to run.
        arguments: Further arguments of the command line.
        settings: The Django settings of the process.
        hear: Called with each message, and with None when the process has ended.
    """

    def __init__(
        self,
        module: str,
        arguments: list[str],
        settings: Mapping[str, Any],
        hear: Callable[[dict[str, Any] | None], object],
    ) -> None:
        command = [sys.executable, "-m", f"{__package__}.{module}", str(os.getpid()), *arguments]
        self._process = _spawner.popen(
            command,
            cwd=_ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C must not reach it. If its parent dies, the system continues the stopped
            # processes of an orphaned process group.
            process_group=0,
        )
        self.pid: int = self._process.pid
        self._hear = hear
        self._writing = threading.Lock()
        self._write(settings)
        threading.Thread(target=self._listen, name=f"simulator-{module}", daemon=True).start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def tell(self, do: str, **facts: Any) -> None:
        """Send a command. The process executes one after the other."""
        self._write({"do": do, **facts})

    def pause(self) -> None:
        """Stop the process, and wait until it is stopped."""
        # Not os.kill(): the pid of an ended process may belong to another one.
        self._process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 2
        while self.running and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)[0]:
                    return
            time.sleep(0.001)

    def wake(self) -> None:
        """Continue the process."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, also if it is stopped, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def dismiss(self) -> None:
        """Let the process clean up and end, and wait for its end."""
        with self._writing, contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    def _write(self, line: Mapping[str, Any]) -> None:
        # The process may have ended; _listen() reports that.
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._stdin.write(json.dumps(line) + "\n")
            self._stdin.flush()

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    self._hear(json.loads(line))
        self._process.wait()
        with self._writing, contextlib.suppress(OSError):
            self._stdin.close()
        self._hear(None)


class _Spawner:
    """
    Starts processes from one thread that lives as long as the server.

    The processes ask to be killed with their parent. For the system, that is the thread that
    started them, and a web server's thread ends with its request.
    """

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[Future[subprocess.Popen[str]], Any, Any]]
        self._wanted = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def popen(self, *args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="simulator-spawner", daemon=True
                )
                self._thread.start()
        started: Future[subprocess.Popen[str]] = Future()
        self._wanted.put((started, args, kwargs))
        return started.result()

    def _run(self) -> None:
        while True:
            started, args, kwargs = self._wanted.get()
            try:
                started.set_result(subprocess.Popen(*args, **kwargs))
            except OSError as exc:
                started.set_exception(exc)


_spawner = _Spawner()
