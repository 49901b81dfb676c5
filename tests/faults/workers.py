"""Clients that are Celery tasks, from the lab's side: a worker, and a sender of messages."""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from celery import Celery

from tests.servers import Redis, finding
from tests.servers.process import Process, _alive, _processes, _send, wait_until

from .hosts import standing_still, variables_of

#: Messages that wait for a child, at the most.
QUEUED = 6
_QUICK = ["--without-mingle", "--without-gossip", "--without-heartbeat"]

#: Seconds that a child of Celery 5.5 and 5.6 waits, at the worker's end, for an answer to be taken
#: that was half-way then: no worker takes it.
LINGERS = 30


class Workers:
    """A worker whose children are the clients of a run. See Crew."""

    def __init__(self, lab: Mapping[str, Any], directory: Path, size: int, rows: int) -> None:
        self._broker = Redis.launch(finding.redis())
        self._rows = rows
        ready = directory / "ready"
        settings = {**_settings(self._broker.url), **lab["celery"]}
        self._app = Celery("tests.faults.sender", set_as_current=False)
        self._app.conf.update(settings)
        variables = variables_of(json.dumps({**lab, "celery": settings, "ready": str(ready)}))
        command = [sys.executable, "-m", "celery", "-A", "tests.faults.tasks", "worker"]
        command += ["-c", str(size), "-l", "WARNING", *_QUICK]
        self._process = Process(
            command,
            directory,
            lambda process: ready.exists(),
            environment=variables,
            patience=60,
            ours=True,
        )
        self._ready = ready
        self._ends = threading.Event()
        self._sender = threading.Thread(target=self._send, daemon=True)

    @property
    def pids(self) -> dict[str, int]:
        """The children that live, by the names of their accounts."""
        return {f"child-{pid}": pid for pid in self._children()}

    def fill(self) -> None:
        """Start the worker if it isn't running. It sees to its children itself."""
        if not self._process.running:
            self._ready.unlink(missing_ok=True)
            self._process.start()
        if not self._sender.is_alive():
            self._sender.start()
        wait_until(self._children, "a child of the worker", 30)

    def kill(self, name: str) -> None:
        pid = int(name.removeprefix("child-"))
        _send(pid, signal.SIGKILL)
        wait_until(lambda: not _alive([pid]), "a child to be gone")

    def kill_all(self) -> None:
        """End the worker with its children, as a machine that stops does."""
        self._process.kill()

    def shut_down(self, number: int) -> None:
        os.kill(self._process.pid, number)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self._process.running, "the worker to end", 20)
        self._process.kill()

    def paused(self, *names: str) -> AbstractContextManager[None]:
        return standing_still([int(name.removeprefix("child-")) for name in names])

    @contextlib.contextmanager
    def all_paused(self) -> Iterator[None]:
        self._process.pause()
        try:
            yield
        finally:
            self._process.resume()

    def wait_for_end(self, timeout: float) -> list[str]:
        """Let the worker finish its tasks; return its name if it doesn't in time."""
        self._ends.set()
        self._sender.join()
        self._app.control.purge()
        if not self._process.running:
            return []
        os.kill(self._process.pid, signal.SIGTERM)
        try:
            wait_until(lambda: not self._process.running, "the worker to end", timeout + LINGERS)
        except TimeoutError:
            return ["worker"]
        finally:
            self._process.kill()
        return []

    def close(self) -> None:
        self._ends.set()
        if self._sender.is_alive():
            self._sender.join()
        self._process.kill()
        self._app.close()
        self._broker.close()

    def _children(self) -> list[int]:
        main = self._process.pid
        return [pid for pid, parent, state in _processes() if parent == main and state != "Z"]

    def _send(self) -> None:
        places = itertools.cycle(range(1, self._rows + 1))
        with self._broker.client() as client:
            while not self._ends.wait(0.05):
                if client.llen("celery") < QUEUED:
                    self._app.send_task("faults.work", [next(places)])


def _settings(url: str) -> dict[str, Any]:
    return {
        "broker_url": url,
        # By default it looks every 100 s or so for the messages of dead workers.
        "broker_transport_options": {
            "visibility_timeout": 3600,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        },
        "broker_connection_retry_on_startup": True,
        "worker_prefetch_multiplier": 1,
        "task_ignore_result": True,
    }
