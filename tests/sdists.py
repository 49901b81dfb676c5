"""The tests of another package, which are in its sdist and not in its wheel."""

import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def fetched(
    package: str, version: str, work: Path, keep: Callable[[str], bool] = lambda name: True
) -> Path:
    source = work / f"{package}-{version}"
    if not source.exists():
        work.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "-d", str(work), f"{package}=={version}"], check=True)
        archive = next(
            work.glob(f"[{package[0]}{package[0].upper()}]{package[1:]}-{version}.tar.gz")
        )
        with tarfile.open(archive) as tar:
            members = [each for each in tar.getmembers() if keep(each.name)]
            tar.extractall(work, members, filter="data")
        if not source.exists():
            (work / f"{package.capitalize()}-{version}").rename(source)
    return source


def run_logged(command: Sequence[str], log: Path, timeout: float, **options: Any) -> int:
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=timeout, **options
            )
        except subprocess.TimeoutExpired:
            return -1
    return done.returncode
