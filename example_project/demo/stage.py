"""A socket on which the worker's processes send events to the demonstration."""

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
    """Send an event, if the demonstration listens."""
    with contextlib.suppress(OSError), _line() as line:
        _send(line, event, facts)


def ask() -> None:
    """Send a question, and wait for the answer without a time limit."""
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
    """An event from one of the worker's processes."""

    event: str
    pid: int
    facts: dict[str, Any]
    _line: socket.socket

    def answer(self) -> None:
        """Send the answer that the process waits for."""
        with self._line:
            self._line.sendall(b"\n")


class Stage:
    """Receives the events of the worker's processes in order."""

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
        """Return the next event, or None after `timeout` seconds."""
        with contextlib.suppress(queue.Empty):
            return self._heard.get(timeout=timeout)
        return None

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self._directory.cleanup()
        os.environ.pop(VARIABLE, None)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                # One connection at a time, to keep the order of the events.
                line, _ = self._socket.accept()
                with line.makefile("rb") as file:
                    sent = file.readline()
                if not sent.endswith(b"\n"):
                    # The process was ended before it had sent its event.
                    line.close()
                    continue
                facts = json.loads(sent)
                told = Told(facts.pop("event"), facts.pop("pid"), facts, line)
                if told.event != _ASKS:
                    # Only a question gets an answer.
                    line.close()
                self._heard.put(told)
