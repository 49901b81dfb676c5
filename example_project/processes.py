"""Servers and workers of the example, which end with the process that started them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_GUARD = Path(__file__).with_name("guard.py")


class ProcessFailed(Exception):
    """A program didn't start, or ended unexpectedly. The message has the end of its log."""


class Process:
    """
    A program in its own session, so that Ctrl-C doesn't reach it.

    Args:
        command: The command line.
        log: The file for its output.
        stop: The signal for a clean shutdown.
        patience: Seconds for the shutdown; then it is killed.
        user: The `pwd` entry of the user to run as (default: this process's user).
        cwd: The working directory.
        environment: The environment (default: this process's).
        directory: A directory to remove afterwards, also if this process is killed.
    """

    def __init__(
        self,
        command: Sequence[object],
        log: Path,
        *,
        stop: int = signal.SIGTERM,
        patience: int = 5,
        user: Any = None,
        cwd: Path = Path("/"),
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._name = Path(str(command[0])).name
        self._log = log
        self._directory = directory
        uid, gid = (user.pw_uid, user.pw_gid) if user else (os.getuid(), os.getgid())
        guard = [sys.executable, "-I", "-S", _GUARD, int(stop), patience, uid, gid]
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [str(part) for part in (*guard, directory or "", *command)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=environment,
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], object], seconds: float = 30) -> None:
        """Poll until it is ready."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self._name} wasn't ready within {seconds:g} s.{self.tail()}")
            time.sleep(0.02)

    def check(self) -> None:
        """Raise if it has ended unexpectedly."""
        if self._popen.poll() is not None:
            raise ProcessFailed(f"{self._name} has ended.{self.tail()}")

    def tail(self) -> str:
        """Return the end of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([" Its log ends with:", *lines])

    def close(self) -> None:
        """End the program, and wait for its end."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()
        if self._directory is not None:
            # The guard removes it, unless the program ended before.
            shutil.rmtree(self._directory, ignore_errors=True)
