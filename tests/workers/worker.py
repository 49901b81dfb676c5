"""A Celery worker, or beat, in a process of its own."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from tests.servers import workspace
from tests.servers.process import Process, _alive, _family, _processes, wait_until

from . import app as celery_app
from .broker import Broker
from .journal import VARIABLE as JOURNAL
from .journal import Journal

_QUICK = ["--without-mingle", "--without-gossip", "--without-heartbeat"]


class _Celery:
    def __init__(
        self,
        arguments: list[object],
        broker: Broker,
        journal: Journal,
        environment: Mapping[str, str],
        settings: Mapping[str, Any],
    ) -> None:
        self.broker = broker
        self.journal = journal
        self.directory = workspace.new_directory("celery")
        ready = self.directory / "ready"
        command = [sys.executable, "-m", "celery", "-A", "tests.workers.app", *arguments]
        variables = {
            celery_app.VARIABLE: json.dumps(settings),
            celery_app.READY: ready,
            JOURNAL: journal.path,
        }
        # Cut off at the first start that fails: nobody would look at it longer.
        self.process = Process(
            command,
            self.directory,
            lambda process: ready.exists(),
            environment={**environment, **variables},
            patience=60,
            ours=True,
        )
        self._ready = ready
        self._seen = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        self.process.start()

    def kill(self) -> None:
        self.process.kill()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_for_end(self, timeout: float = 20) -> None:
        family = _family(self.pid)
        wait_until(lambda: not self.process.running, "the end of a Celery program", timeout)
        wait_until(lambda: not _alive(family), "the end of its children")
        self.process.kill()

    def close(self) -> None:
        self.process.kill()

    @property
    def log(self) -> str:
        path = self.process.log
        return path.read_text(errors="replace") if path.exists() else ""

    def mark_log(self) -> None:
        self._seen = len(self.log)

    @property
    def new_log(self) -> str:
        return self.log[self._seen :]


class Worker(_Celery):
    def __init__(
        self,
        broker: Broker,
        journal: Journal,
        environment: Mapping[str, str],
        *arguments: str,
        pool: str = "prefork",
        concurrency: int = 4,
        transport: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.pool = pool
        settings = broker.settings(**(transport or {})) | settings
        self.name = f"{broker.queue}@{os.urandom(4).hex()}"
        command = ["worker", "-P", pool, "-c", concurrency, "-n", self.name, "-l", "INFO"]
        super().__init__([*command, *_QUICK, *arguments], broker, journal, environment, settings)
        self.app = celery_app.make(settings)

    def __repr__(self) -> str:
        return f"<a worker with the pool {self.pool} on {self.broker.kind}>"

    def children(self) -> list[int]:
        return [pid for pid, parent, state in _processes() if parent == self.pid and state != "Z"]

    def close(self) -> None:
        super().close()
        # Results that a failed test keeps alive would go on asking a server that is gone.
        consumer = getattr(self.app.backend, "result_consumer", None)
        if consumer is not None:
            consumer.stop()
            consumer._pubsub = None
        self.app.close()


class Beat(_Celery):
    def __init__(self, worker: Worker, environment: Mapping[str, str], schedule: Any) -> None:
        settings = worker.broker.settings() | {
            "beat_schedule": schedule,
            "beat_max_loop_interval": 0.5,
        }
        file = workspace.new_directory("beat") / "schedule"
        command = ["beat", "-s", file, "--pidfile=", "-l", "INFO"]
        super().__init__(command, worker.broker, worker.journal, environment, settings)
