"""
A wall clock that can be set, for one process and its children.

libfaketime doesn't do: Redis dies of it, and it moves the clocks that nobody sets as well.
"""

import functools
import os
import shutil
import struct
import subprocess
from pathlib import Path

from . import workspace

_SOURCE = Path(__file__).with_name("clock.c")


def missing() -> str | None:
    """
    Tell what keeps this machine from having such clocks; None if nothing does.
    """
    if os.uname().sysname != "Linux" or not _compiler():
        return "a C compiler was not found on this machine. To get it: apt-get install gcc libc-dev"
    return None


class Clock:
    """
    The clock of all processes that are started with its environment.
    """

    def __init__(self) -> None:
        directory = workspace.new_directory("clock")
        # For servers of another user as well.
        directory.chmod(0o755)
        self._file = directory / "offset"
        self._seconds = 0.0
        self.set(0)

    @property
    def environment(self) -> dict[str, str]:
        """
        Return what makes a process go by this clock.
        """
        return {"LD_PRELOAD": str(_library()), "FENCEDLOCK_CLOCK": str(self._file)}

    def set(self, seconds: float) -> None:
        """
        Have it be so many seconds ahead, for running processes too.
        """
        self._seconds = seconds
        mode = "r+b" if self._file.exists() else "wb"
        with self._file.open(mode) as file:
            file.write(struct.pack("=q", round(seconds * 1_000_000)))

    def jump(self, seconds: float) -> None:
        """
        Set it forward, or back, from where it is.
        """
        self.set(self._seconds + seconds)


@functools.cache
def _library() -> Path:
    directory = workspace.new_directory("clock-library")
    directory.chmod(0o755)
    library = directory / "clock.so"
    command = [_compiler() or "cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return library


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")
