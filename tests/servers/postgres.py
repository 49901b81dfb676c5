"""PostgreSQL."""

import contextlib
import ctypes
import functools
import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from . import workspace
from .database import DatabaseServer
from .finding import Found
from .process import Process, free_port, run_as_server_user

_IPC_RMID = 0
_names = itertools.count(1)


class Postgres(DatabaseServer):
    """The user is postgres, without password. It survives a kill, no power cut: fsync is off."""

    name = "postgres"
    engine = "postgresql"
    default_port = 5432
    default_user = "postgres"
    default_database = "postgres"

    def __init__(self, url: str, process: Process | None = None) -> None:
        super().__init__(url, process)
        self.directory: Path | None = None

    @classmethod
    def launch(cls, found: Found, **options: str) -> "Postgres":
        directory = workspace.new_directory("postgres")
        data = directory / "data"
        run_as_server_user("cp", "-R", _template(found), data)
        port = free_port()
        command: list[object] = [found.path, "-D", data, "-k", directory]
        command += ["-h", "127.0.0.1", "-p", port]
        for option, value in (_defaults(found) | options).items():
            command += ["-c", f"{option}={value}"]
        server = cls(f"postgres://postgres@127.0.0.1:{port}/postgres")
        server.directory = directory
        server._process = Process(
            command,
            directory,
            functools.partial(_ready, data),
            terminate=signal.SIGINT,
            quit=signal.SIGQUIT,
        )
        server.start()
        return server

    def connect(self, database: str | None = None, **options: Any) -> psycopg.Connection:
        options = {"autocommit": True, "connect_timeout": 5} | options
        return psycopg.connect(self.url_of(database or self.database), **options)

    def execute(self, sql: str, *parameters: Any, database: str | None = None) -> list[tuple]:
        with self.connect(database) as connection:
            cursor = connection.execute(sql, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def create_database(self) -> str:
        name = f"fencedlock_{os.getpid()}_{next(_names)}"
        self.execute(f"CREATE DATABASE {name}")
        return name

    def empty(self) -> None:
        """Drop all databases but those that initdb makes."""
        for (name,) in self.execute(
            "SELECT datname FROM pg_database WHERE NOT datistemplate AND datname <> 'postgres'"
        ):
            self.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def terminate_sessions(self) -> None:
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )

    @contextlib.contextmanager
    def statements(self) -> Iterator[Counter[str]]:
        """Yield a counter of the executed statements, with the texts of pg_stat_statements."""
        counted: Counter[str] = Counter()
        with self.connect("postgres") as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
            connection.execute("SELECT pg_stat_statements_reset()")
            yield counted
            for query, calls in connection.execute(
                "SELECT query, calls FROM pg_stat_statements"
                " WHERE query NOT LIKE '%pg_stat_statements%'"
            ):
                counted[query] += calls

    def kill(self) -> None:
        process = self.process
        segment = int(_pid_file(process.log.with_name("data"))[6].split()[1])
        process.kill()
        # The kernel keeps the shared memory, and only has room for a few thousand.
        ctypes.CDLL(None).shmctl(segment, _IPC_RMID, None)


@functools.cache
def _template(found: Found) -> Path:
    directory = workspace.new_directory("initdb")
    command: list[object] = [found.beside("initdb"), "--no-sync", "-A", "trust", "-U", "postgres"]
    # Small segments: it gets copied.
    command += ["--encoding=UTF8", "--locale=C", "--wal-segsize=1", "-D", directory / "data"]
    run_as_server_user(*command)
    return directory / "data"


def _defaults(found: Found) -> dict[str, str]:
    options = {
        # Not synchronous_commit: without it a kill loses what was committed.
        "fsync": "off",
        "max_connections": "200",
        "shared_buffers": "32MB",
    }
    if _has_pg_stat_statements(found):
        options["shared_preload_libraries"] = "pg_stat_statements"
    return options


def _has_pg_stat_statements(found: Found) -> bool:
    home = found.path.parent.parent
    libraries = (home / "lib", home / "lib/postgresql", home / "lib64/pgsql")
    return any(list(library.glob("pg_stat_statements.*")) for library in libraries)


def _ready(data: Path, process: Process) -> bool:
    # As pg_ctl does it. The pid, because a killed server leaves the file behind.
    lines = _pid_file(data)
    return len(lines) > 7 and lines[0] == str(process.pid) and lines[7].strip() == "ready"


def _pid_file(data: Path) -> list[str]:
    try:
        return (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return []
