"""PgBouncer, in front of a PostgreSQL."""

from typing import Any

import psycopg

from . import workspace
from .finding import Found
from .postgres import Postgres
from .process import Process, accepts_connections, free_port
from .server import Server

_CONFIGURATION = """\
[databases]
* = host={postgres.host} port={postgres.port} user={postgres.user} {password}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir = {directory}
auth_type = any
pool_mode = {pool_mode}
default_pool_size = {pool_size}
ignore_startup_parameters = extra_float_digits,options
"""


class PgBouncer(Server):
    """A PgBouncer whose clients share a few sessions of a PostgreSQL."""

    name = "pgbouncer"

    def __init__(self, postgres: Postgres, port: int) -> None:
        super().__init__("127.0.0.1", port)
        self.postgres = postgres

    @classmethod
    def launch(
        cls, found: Found, postgres: Postgres, pool_mode: str = "transaction", pool_size: int = 5
    ) -> "PgBouncer":
        directory = workspace.new_directory("pgbouncer")
        port = free_port()
        # An empty password is a syntax error to it.
        password = f"password='{postgres.password}'" if postgres.password else ""
        configuration = directory / "pgbouncer.ini"
        terms = {"port": port, "directory": directory, "password": password}
        terms |= {"postgres": postgres, "pool_mode": pool_mode, "pool_size": pool_size}
        configuration.write_text(_CONFIGURATION.format(**terms))
        server = cls(postgres, port)
        server._process = Process(
            [found.path, configuration], directory, lambda process: accepts_connections(port)
        )
        server.start()
        return server

    @property
    def url(self) -> str:
        return f"postgresql://{self.postgres.user}@{self.host}:{self.port}/{self.postgres.database}"

    def django(self, database: str | None = None) -> dict[str, Any]:
        address = {"HOST": self.host, "PORT": str(self.port), "PASSWORD": ""}
        return self.postgres.django(database) | address

    def connect(self, **options: Any) -> psycopg.Connection:
        # A prepared statement belongs to a session; here the next one may be another.
        options = {"autocommit": True, "connect_timeout": 5, "prepare_threshold": None} | options
        return psycopg.connect(self.url, **options)
