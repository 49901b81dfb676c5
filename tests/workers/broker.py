"""What lies between a test and its worker: a queue that no other test has."""

import itertools
from pathlib import Path
from typing import Any

import amqp
import redis

from tests.servers import RabbitMQ, Redis, workspace

_numbers = itertools.count(1)


class Broker:
    kind = ""

    def __init__(self, url: str, results: str, **options: Any) -> None:
        self.queue = f"{workspace.root().name}-{next(_numbers)}"
        self._url = url
        self._results = results
        self._options = options

    def settings(self, **transport_options: Any) -> dict[str, Any]:
        return {
            "broker_url": self._url,
            "broker_transport_options": self._options | transport_options,
            "broker_connection_retry_on_startup": True,
            "result_backend": self._results,
            "task_default_queue": self.queue,
            # On RabbitMQ, workers of one exchange hear each other's orders.
            "control_exchange": f"{self.queue}-control",
            "event_exchange": f"{self.queue}-events",
            # What isn't running stays where others can have it.
            "worker_prefetch_multiplier": 1,
        }

    def depth(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        """Remove what would stay in a server that others use too."""


class RedisBroker(Broker):
    kind = "redis"
    _databases = itertools.count(1)

    def __init__(self, server: Redis) -> None:
        self._address = f"{server.url.rpartition('/')[0]}/{next(self._databases)}"
        # By default it looks every 100 s or so for the messages of dead workers.
        often = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}
        super().__init__(self._address, self._address, **often)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self._address, decode_responses=True, socket_timeout=5)

    def depth(self) -> int:
        with self.client() as client:
            return int(client.llen(self.queue))

    def unacknowledged(self) -> int:
        with self.client() as client:
            return int(client.hlen("unacked"))


class FilesystemBroker(Broker):
    kind = "filesystem"

    def __init__(self) -> None:
        directory = workspace.new_directory("broker")
        self._messages = directory / "messages"
        for path in (self._messages, directory / "results", directory / "control"):
            path.mkdir()
        super().__init__(
            "filesystem://",
            f"file://{directory}/results",
            data_folder_in=str(self._messages),
            data_folder_out=str(self._messages),
            control_folder=str(directory / "control"),
            # By default it looks once a second.
            polling_interval=0.05,
        )

    def settings(self, **transport_options: Any) -> dict[str, Any]:
        transport = {"broker_transport": "tests.workers.files:Transport"}
        return super().settings(**transport_options) | transport

    def depth(self) -> int:
        return len(list(Path(self._messages).glob(f"*.{self.queue}.msg")))


class RabbitBroker(Broker):
    kind = "rabbitmq"

    def __init__(self, server: RabbitMQ, results: Redis) -> None:
        super().__init__(server.url, f"{results.url.rpartition('/')[0]}/0")
        self._server = server

    def depth(self) -> int:
        try:
            with self._server.connect() as connection:
                declared: Any = connection.channel().queue_declare(self.queue, passive=True)
                return int(declared.message_count)
        except amqp.NotFound:
            return 0

    def close(self) -> None:
        with self._server.connect() as connection:
            connection.channel().queue_delete(self.queue)
