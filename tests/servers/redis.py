"""Redis and Valkey."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from . import workspace
from .finding import Found
from .process import Process, free_port, wait_until
from .server import Server

#: Arguments of a server whose data outlives it.
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
_END = "end-of-monitor"


@dataclass(frozen=True)
class Command:
    name: str
    text: str
    lua: bool


class Redis(Server):
    """
    A Redis or Valkey without persistence: it loses its data at a restart.

    Launched with DURABLE as arguments, it loses nothing, and each write waits for the disk.
    """

    name = "redis"

    def __init__(self, url: str, process: Process | None = None, flavour: str = "redis") -> None:
        parts = urlsplit(url)
        super().__init__(parts.hostname or "127.0.0.1", parts.port or 6379, process)
        self.url = url
        self.name = flavour
        self.directory: Path | None = None

    @classmethod
    def launch(cls, found: Found, *arguments: str, replica_of: "Redis | None" = None) -> "Redis":
        directory = workspace.new_directory(found.name)
        # The nodes of a cluster speak among themselves ten thousand further up.
        port = free_port(10000 if "--cluster-enabled" in arguments else 0)
        command: list[object] = [found.path, "--bind", "127.0.0.1", "--port", port]
        command += ["--dir", directory]
        command += ["--unixsocket", directory / "socket", "--save", "", "--appendonly", "no"]
        # With these a replica is in sync within 0.1 s, else after 1 to 5 s.
        command += ["--repl-diskless-sync", "no", "--repl-diskless-load", "on-empty-db"]
        command += arguments
        if replica_of:
            command += ["--replicaof", replica_of.host, str(replica_of.port)]
        server = cls(f"redis://127.0.0.1:{port}/0", flavour=found.name)
        server.directory = directory
        server._process = Process(command, directory, lambda process: server.answers())
        server.start()
        if replica_of:
            server.wait_for_sync()
        return server

    @property
    def socket(self) -> Path | None:
        return self.directory and self.directory / "socket"

    def start(self, *, empty: bool = False) -> None:
        """Start the server; with *empty*, as one that has lost all its data."""
        # A primary leaves behind the snapshot that it made for a replica.
        directory = self.process.log.parent
        (directory / "dump.rdb").unlink(missing_ok=True)
        if empty:
            # Redis 6 has the file; later ones have the directory.
            (directory / "appendonly.aof").unlink(missing_ok=True)
            shutil.rmtree(directory / "appendonlydir", ignore_errors=True)
        super().start()

    def client(self, **options: Any) -> redis.Redis:
        defaults = {
            "decode_responses": True,
            "socket_timeout": 5,
            "socket_connect_timeout": 5,
            "retry": Retry(NoBackoff(), 0),
        }
        return redis.Redis.from_url(self.url, **defaults | options)

    def answers(self) -> bool:
        try:
            return bool(self.execute("PING", timeout=1))
        except redis.RedisError:
            return False

    def execute(self, *command: Any, timeout: float = 5) -> Any:
        with self.client(socket_timeout=timeout, single_connection_client=True) as client:
            return client.execute_command(*command)

    def info(self, section: str) -> dict[str, Any]:
        """Return a section of INFO, such as ``"commandstats"`` or ``"replication"``."""
        return self.execute("INFO", section)

    def empty(self) -> None:
        self.execute("FLUSHALL")
        self.execute("SCRIPT", "FLUSH")

    @contextlib.contextmanager
    def configured(self, **options: Any) -> Iterator[None]:
        """Change the configuration inside the block: ``configured(maxmemory_policy=...)``."""
        with self.client() as client:
            named = {option.replace("_", "-"): value for option, value in options.items()}
            before: dict[str, Any] = {}
            for option in named:
                before |= client.config_get(option)
            for option, value in named.items():
                client.config_set(option, value)
            try:
                yield
            finally:
                for option, value in before.items():
                    client.config_set(option, value)

    @contextlib.contextmanager
    def monitor(self) -> Iterator[list[Command]]:
        """Yield a list that, when the block ends, holds each command executed in it."""
        seen: list[Command] = []
        with self.client(decode_responses=False) as client, client.monitor() as monitor:
            yield seen
            self.execute("ECHO", _END)
            while (command := _parse(monitor.connection.read_response())).text != f"ECHO {_END}":
                seen.append(command)
        # The connection that marked the end introduced itself first.
        while seen and seen[-1].name in ("HELLO", "CLIENT", "AUTH", "SELECT"):
            seen.pop()

    def wait_for_sync(self) -> None:
        wait_until(
            lambda: self.info("replication").get("master_link_status") == "up",
            f"{self!r} to follow its primary",
        )

    def promote(self) -> None:
        """Make a primary of a replica, which it stays when it is started again."""
        self.execute("REPLICAOF", "NO", "ONE")
        self.process.drop_option("--replicaof", values=2)


_LINE = re.compile(rb"[\d.]+ \[\d+ (?P<client>.*?)\] (?P<command>.*)", re.DOTALL)
_ARGUMENT = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)


def _parse(line: bytes) -> Command:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"MONITOR sent {line!r}.")
    words = [word.decode(errors="replace") for word in _ARGUMENT.findall(match["command"])]
    words[0] = words[0].upper()
    return Command(words[0], " ".join(words), match["client"] == b"lua")
