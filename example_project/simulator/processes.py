"""The processes of a simulation: started when they are wanted, and none of them left behind."""

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

#: Seconds that a process has to tidy up.
PATIENCE = 5
_ROOT = Path(__file__).resolve().parents[2]


class Puppet:
    """
    One process that obeys, and tells what happens.

    Args:
        module: What it runs.
        arguments: More of its command line.
        settings: Django's, for it alone.
        hear: Called with all that it says; with None when it has ended.
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
            # Ctrl-C is for the server. And of a process group that is left alone by the death of
            # its parent the system wakes those that are stopped.
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
        """Have it do something. It does one thing after the other."""
        self._write({"do": do, **facts})

    def pause(self) -> None:
        """Stop it in the middle of whatever it does; returns when it stands still."""
        # Not os.kill(): the pid of one that is gone may be somebody else's.
        self._process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 2
        while self.running and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)[0]:
                    return
            time.sleep(0.001)

    def wake(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as SIGKILL does, also if it stands still; returns when it is gone."""
        self._process.kill()
        self._process.wait()

    def dismiss(self) -> None:
        """Have it tidy up and end; returns when it is gone."""
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
        # One that is gone can't be told anything; that it is gone is told by _listen().
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

    They ask to be killed with their parent, and to the system that is the thread which started
    them; the threads of a web server live for one request.
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
