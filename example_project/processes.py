"""Servers and workers that the example starts, none of which outlives whoever started it."""

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
    """A program didn't start, or has ended by itself. The message says what its log says."""


class Process:
    """
    A program in a session of its own, so that Ctrl-C is for us alone.

    Args:
        command: What to run.
        log: The file that gets its output.
        stop: The signal that ends it orderly.
        patience: Seconds that it may take to end; then it is killed.
        user: Who it runs as, an entry of the system's users, if not as we do.
        cwd: The directory that it runs in.
        environment: Its variables, if not ours.
        directory: What is removed with it, also if we were killed.
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
        """Ask again and again until it is ready."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self._name} wasn't ready within {seconds:g} s.{self.tail()}")
            time.sleep(0.02)

    def check(self) -> None:
        """Raise if it has ended by itself."""
        if self._popen.poll() is not None:
            raise ProcessFailed(f"{self._name} has ended.{self.tail()}")

    def tail(self) -> str:
        """Return the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([" Its log ends with:", *lines])

    def close(self) -> None:
        """End it, whatever state it is in; returns when it is gone."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()
        if self._directory is not None:
            # The guard has done it, unless the program had ended before.
            shutil.rmtree(self._directory, ignore_errors=True)
