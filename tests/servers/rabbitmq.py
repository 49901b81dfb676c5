"""RabbitMQ."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import amqp

from . import workspace
from .finding import Found, ServerMissing
from .process import Process, accepts_connections, free_port
from .server import Server

_CONFIGURATION = """\
listeners.tcp.1 = 127.0.0.1:{port}
log.file = false
log.console = true
log.console.level = warning
# Otherwise it stops taking messages while the disk of the machine is nearly full.
disk_free_limit.absolute = 1MB
"""
# One scheduler that sleeps when idle: the tests need the processors for themselves.
_ERLANG = (
    "+S 1:1 +SDcpu 1:1 +SDio 4 +A 2 +sbwt none +sbwtdcpu none +sbwtdio none"
    " -kernel inet_dist_use_interface {127,0,0,1}"
)


class RabbitMQ(Server):
    """It has no plugins, and keeps durable queues and persistent messages when it is killed."""

    name = "rabbitmq"

    def __init__(
        self, url: str, process: Process | None = None, names: Process | None = None
    ) -> None:
        parts = urlsplit(url)
        super().__init__(parts.hostname or "127.0.0.1", parts.port or 5672, process)
        self.url = url
        self.user = unquote(parts.username or "guest")
        self.password = unquote(parts.password or "guest")
        self.virtual_host = unquote(parts.path[1:]) or "/"
        self._names = names

    @classmethod
    def launch(cls, found: Found) -> "RabbitMQ":
        directory = workspace.new_directory("rabbitmq")
        port, names_port = free_port(), free_port()
        (directory / "rabbitmq.conf").write_text(_CONFIGURATION.format(port=port))
        (directory / "enabled_plugins").write_text("[].\n")
        names = _start_epmd(names_port)
        server = cls(f"amqp://guest:guest@127.0.0.1:{port}//", names=names)
        server._process = Process(
            [found.path],
            directory,
            lambda process: server.answers(),
            environment=_environment(directory, names_port),
            # 3 s of processor, and some syncs: on a busy machine, four times as long.
            patience=60,
        )
        server.start()
        return server

    @contextlib.contextmanager
    def connect(self) -> Iterator[amqp.Connection]:
        connection = amqp.Connection(
            f"{self.host}:{self.port}",
            userid=self.user,
            password=self.password,
            virtual_host=self.virtual_host,
            connect_timeout=5,
            read_timeout=5,
            write_timeout=5,
        )
        try:
            connection.connect()
            yield connection
        finally:
            connection.collect()

    def answers(self) -> bool:
        try:
            with self.connect() as connection:
                return bool(connection.connected)
        except (OSError, amqp.AMQPError):
            return False

    def close(self) -> None:
        super().close()
        if self._names is not None:
            self._names.quit()


def _start_epmd(port: int) -> Process:
    # Erlang would start one that outlives us, on a port that it shares with the whole machine.
    program = shutil.which("epmd")
    if program is None:
        raise ServerMissing("Erlang's epmd", "apt-get install erlang-base")
    process = Process(
        [program, "-port", port, "-address", "127.0.0.1"],
        workspace.new_directory("epmd"),
        lambda process: accepts_connections(port),
    )
    process.start()
    return process


def _environment(directory: Path, names_port: int) -> dict[str, object]:
    return {
        # Gets the cookie. Nothing of the real home is read.
        "HOME": directory,
        "LC_ALL": "C.UTF-8",
        "ERL_EPMD_PORT": names_port,
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        # The script then becomes the server itself: a shell in between would leave the server
        # running when we are killed. No process listens on this port.
        "NOTIFY_SOCKET": directory / "notify",
        "RABBITMQ_NODENAME": "fencedlock@localhost",
        "RABBITMQ_DIST_PORT": free_port(),
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        "RABBITMQ_CONFIG_FILE": directory / "rabbitmq.conf",
        "RABBITMQ_ADVANCED_CONFIG_FILE": directory / "none.config",
        "RABBITMQ_ENABLED_PLUGINS_FILE": directory / "enabled_plugins",
        "RABBITMQ_GENERATED_CONFIG_DIR": directory / "generated",
        "RABBITMQ_LOG_BASE": directory / "log",
        "RABBITMQ_MNESIA_BASE": directory / "mnesia",
        "RABBITMQ_SCHEMA_DIR": directory / "schema",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _ERLANG,
    }
