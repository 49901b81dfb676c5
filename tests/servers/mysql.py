"""MySQL itself. What differs from MariaDB is how it is made and started."""

import functools
from pathlib import Path

from . import workspace
from .finding import Found, own_loader
from .mariadb import MariaDB
from .process import free_port, run_as_server_user

_OPTIONS = (
    *("--bind-address=127.0.0.1", "--mysqlx=OFF", "--skip-name-resolve", "--skip-log-bin"),
    # At each commit to the operating system, once a second to the disk: a kill loses nothing.
    *("--innodb-flush-log-at-trx-commit=2", "--innodb-buffer-pool-size=32M"),
    # 0.4 GB instead of 0.6.
    *("--innodb-log-buffer-size=1M", "--performance-schema-digests-size=100"),
    *("--table-open-cache=200", "--table-definition-cache=400", "--max-connections=200"),
)
# A twelfth of what it would be: it gets copied.
_LOG_SIZE = "--innodb-redo-log-capacity=8M"
# It makes one that may only come from localhost, a name that isn't looked up.
_ROOT = """\
CREATE USER root@'127.0.0.1';
GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;
"""


class MySQL(MariaDB):
    """The user is root, without password. It survives a kill, no power cut: it seldom syncs."""

    name = "mysql"

    @classmethod
    def launch(cls, found: Found, *arguments: str) -> "MySQL":
        directory = workspace.new_directory("mysql")
        data, port = directory / "data", free_port()
        run_as_server_user("cp", "-R", _template(found), data)
        command = [*_program(found), f"--datadir={data}", f"--tmpdir={data}", f"--port={port}"]
        command += [f"--socket={directory}/socket", f"--pid-file={directory}/pid"]
        server = cls(f"mysql://root@127.0.0.1:{port}")
        command += [_LOG_SIZE, *_OPTIONS, *arguments]
        server._process = server.as_process(command, directory)
        server.start()
        return server


@functools.cache
def _template(found: Found) -> Path:
    directory = workspace.new_directory("initialize")
    command = [*_program(found), "--initialize-insecure", f"--datadir={directory}/data"]
    (directory / "root.sql").write_text(_ROOT)
    command.append(f"--init-file={directory}/root.sql")
    run_as_server_user(*command, f"--tmpdir={directory}", _LOG_SIZE)
    return directory / "data"


def _program(found: Found) -> list[object]:
    # Without secure-file-priv it wants a directory of the system.
    command: list[object] = [found.path, "--no-defaults", "--secure-file-priv="]
    if loader := own_loader(found.path):
        home = found.path.parents[1]
        places = {"basedir": "", "lc-messages-dir": "share/mysql", "plugin-dir": "lib/mysql/plugin"}
        command += [f"--{option}={home / place}" for option, place in places.items()]
        return [*loader, *command]
    return command
