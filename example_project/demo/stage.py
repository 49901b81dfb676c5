"""The line from the worker's processes to the demonstration: a socket that they tell things to."""

import contextlib
import json
import os
import queue
import socket
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "EXAMPLE_STAGE"

_ASKS = "asks"


# In the worker.


def tell(event: str, **facts: Any) -> None:
    """Tell what happens. If nobody listens, that is all right."""
    with contextlib.suppress(OSError), _line() as line:
        _send(line, event, facts)


def ask() -> None:
    """Ask a question, and wait for the answer however long it takes."""
    with contextlib.suppress(OSError), _line() as line:
        _send(line, _ASKS, {})
        line.recv(1)


def _line() -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    line.connect(os.environ[VARIABLE])
    return line


def _send(line: socket.socket, event: str, facts: dict[str, Any]) -> None:
    told = {"event": event, "pid": os.getpid(), **facts}
    line.sendall(json.dumps(told, default=str).encode() + b"\n")


# In the demonstration.


@dataclass
class Told:
    """What one of the worker's processes told."""

    event: str
    pid: int
    facts: dict[str, Any]
    _line: socket.socket

    def answer(self) -> None:
        """Give the answer that it waits for."""
        with self._line:
            self._line.sendall(b"\n")


class Stage:
    """Where the worker's processes are heard, one event after the other."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fencedlock-demo-")
        path = Path(self._directory.name, "stage.sock")
        self._heard: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(100)
        os.environ[VARIABLE] = str(path)
        threading.Thread(target=self._listen, daemon=True).start()

    def hear(self, timeout: float) -> Told | None:
        """Return the next event; None if nothing was told for so long."""
        with contextlib.suppress(queue.Empty):
            return self._heard.get(timeout=timeout)
        return None

    def close(self) -> None:
        """Listen no longer."""
        self._socket.close()
        self._directory.cleanup()
        os.environ.pop(VARIABLE, None)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                # One after the other, so that they stay in the order in which they were told.
                line, _ = self._socket.accept()
                with line.makefile("rb") as file:
                    facts = json.loads(file.readline())
                told = Told(facts.pop("event"), facts.pop("pid"), facts, line)
                if told.event != _ASKS:
                    # Nobody will answer.
                    line.close()
                self._heard.put(told)
