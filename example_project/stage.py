"""Worker processes: start them, hear what they say, pause them, and leave none behind."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

#: Seconds that a worker may be silent before the demo gives up.
PATIENCE = 20


class DemoFailed(Exception):
    """Something went otherwise than the demo tells it."""


class Worker:
    """A worker process, told of by its name."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "example_project", "worker", *map(str, arguments)],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for the demo, which then ends its workers.
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def hear(self) -> dict[str, Any] | None:
        """Return the next thing it says; None at its end."""
        try:
            return self._events.get(timeout=PATIENCE)
        except queue.Empty:
            raise DemoFailed(f"{self.name} said nothing for {PATIENCE} s.") from None

    def pause(self) -> None:
        """Stop it in the middle of whatever it does; returns when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def wake(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def answer(self) -> None:
        """Give the answer that it waits for."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """See to it that the process is gone, also if it stands still."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)
