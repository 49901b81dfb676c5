"""
A wall clock that can be set, for one process and its children.

libfaketime can't be used: it crashes Redis, and it also changes monotonic clocks.
"""

import functools
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from . import workspace
from .finding import ServerMissing

_SOURCE = Path(__file__).with_name("clock.c")


def compiler() -> str:
    """Return what compiles the library that such clocks need."""
    found = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or not found:
        raise ServerMissing("A C compiler (on Linux)", "apt-get install gcc libc6-dev")
    return found


def missing() -> str | None:
    """Return why this machine can't have such clocks; None if it can."""
    try:
        compiler()
    except ServerMissing as exc:
        return str(exc)
    return None


class Clock:
    """The clock of all processes that are started with its environment."""

    def __init__(self) -> None:
        directory = workspace.new_directory("clock")
        # For servers of another user as well.
        directory.chmod(0o755)
        self._file = directory / "offset"
        self._seconds = 0.0
        self.set(0)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(_library()), "FENCEDLOCK_CLOCK": str(self._file)}

    def set(self, seconds: float) -> None:
        self._seconds = seconds
        mode = "r+b" if self._file.exists() else "wb"
        with self._file.open(mode) as file:
            file.write(struct.pack("=q", round(seconds * 1_000_000)))

    def jump(self, seconds: float) -> None:
        self.set(self._seconds + seconds)


@functools.cache
def _library() -> Path:
    directory = workspace.new_directory("clock-library")
    directory.chmod(0o755)
    library = directory / "clock.so"
    command = [compiler(), "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return library
