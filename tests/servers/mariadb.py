"""MariaDB."""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql

from . import workspace
from .database import DatabaseServer
from .finding import Found, install_db
from .process import Process, free_port, run_as_server_user

# A twelfth of what it would be: it gets copied.
_LOG_SIZE = "--innodb-log-file-size=8M"
_SYSTEM_DATABASES = {"information_schema", "mysql", "performance_schema", "sys"}


class MariaDB(DatabaseServer):
    """The user is root, without password. It survives a kill, no power cut: it seldom syncs."""

    name = "mariadb"
    engine = "mysql"
    default_port = 3306
    default_user = "root"
    default_database = "fencedlock"

    @classmethod
    def launch(cls, found: Found, *arguments: str) -> "MariaDB":
        directory = workspace.new_directory("mariadb")
        data = directory / "data"
        run_as_server_user("cp", "-R", _template(found), data)
        port = free_port()
        command: list[object] = [found.path, "--no-defaults", f"--datadir={data}", f"--port={port}"]
        command += ["--bind-address=127.0.0.1", f"--socket={directory}/socket"]
        command += [f"--pid-file={directory}/pid", "--skip-name-resolve", "--skip-log-bin"]
        # At each commit to the operating system, once a second to the disk: a kill loses nothing.
        command += ["--innodb-flush-log-at-trx-commit=2", "--innodb-buffer-pool-size=32M"]
        # One that starts removes all temporary files of the directory, those of others as well.
        command += [_LOG_SIZE, f"--tmpdir={data}"]
        server = cls(f"mysql://root@127.0.0.1:{port}")
        server._process = Process(
            [*command, *arguments], directory, lambda process: server.answers()
        )
        server.start()
        return server

    def connect(self, database: str | None = None, **options: Any) -> pymysql.Connection:
        address = {"host": self.host, "port": self.port}
        login = {"user": self.user, "password": self.password, "database": database}
        options = {"autocommit": True, "connect_timeout": 5} | options
        return pymysql.connect(**address, **login, **options)

    def execute(self, sql: str, *parameters: Any, database: str | None = None) -> tuple[Any, ...]:
        with self.connect(database) as connection, connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            return cursor.fetchall()

    def answers(self) -> bool:
        try:
            return bool(self.execute("SELECT 1"))
        except pymysql.MySQLError:
            return False

    def empty(self) -> None:
        for (name,) in self.execute("SHOW DATABASES"):
            if name not in _SYSTEM_DATABASES:
                self.execute(f"DROP DATABASE `{name}`")

    @contextlib.contextmanager
    def statements(self) -> Iterator[Counter[str]]:
        """Yield a counter that, when the block ends, has how often each statement was executed."""
        counted: Counter[str] = Counter()
        with self.connect("mysql") as connection, connection.cursor() as cursor:
            cursor.execute("SET GLOBAL general_log = 'OFF'")
            cursor.execute("SET GLOBAL log_output = 'TABLE'")
            cursor.execute("TRUNCATE TABLE general_log")
            cursor.execute("SET GLOBAL general_log = 'ON'")
            yield counted
            cursor.execute("SET GLOBAL general_log = 'OFF'")
            cursor.execute(
                "SELECT argument FROM general_log WHERE command_type = 'Query'"
                " AND thread_id <> CONNECTION_ID()"
            )
            counted.update(_text(argument) for (argument,) in cursor.fetchall())


@functools.cache
def _template(found: Found) -> Path:
    directory = workspace.new_directory("install-db")
    program = install_db(found.path)
    command = [program, "--no-defaults", f"--datadir={directory}/data", "--skip-test-db"]
    # Its own temporary files collide with those of another run.
    command.append(f"--tmpdir={directory}")
    run_as_server_user(*command, "--auth-root-authentication-method=normal", _LOG_SIZE)
    return directory / "data"


def _text(argument: str | bytes) -> str:
    return argument.decode(errors="replace") if isinstance(argument, bytes) else argument
