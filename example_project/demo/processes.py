"""Processes of the demonstration, none of which outlives it."""

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")


class DemoFailed(Exception):
    """Something went otherwise than the demonstration tells it."""


class Process:
    """
    A program in a session of its own, so that Ctrl-C is for the demonstration alone.

    Args:
        command: What to run.
        log: The file that gets its output.
        stop: The signal that ends it orderly.
        patience: Seconds that it may take to end; then it is killed.
        user: Who it runs as, if not as we do.
        cwd: The directory that it runs in.
        temporary: Where it puts temporary files, which one that is killed leaves behind.
    """

    def __init__(
        self,
        command: Sequence[object],
        log: Path,
        *,
        stop: int = signal.SIGTERM,
        patience: int = 5,
        user: pwd.struct_passwd | None = None,
        cwd: Path = Path("/"),
        temporary: str | None = None,
    ) -> None:
        self._name = Path(str(command[0])).name
        self._log = log
        uid, gid = (user.pw_uid, user.pw_gid) if user else (os.getuid(), os.getgid())
        guard = [sys.executable, "-I", "-S", _GUARD, int(stop), patience, uid, gid, *command]
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [str(part) for part in guard],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, "TMPDIR": temporary} if temporary else None,
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], object], seconds: float = 30) -> None:
        """Ask again and again until it is ready."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise DemoFailed(f"{self._name} wasn't ready within {seconds:g} s.{self.tail()}")
            time.sleep(0.02)

    def check(self) -> None:
        """Raise if it has ended by itself."""
        if self._popen.poll() is not None:
            raise DemoFailed(f"{self._name} has ended.{self.tail()}")

    def tail(self) -> str:
        """Return the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([" Its log ends with:", *lines])

    def close(self) -> None:
        """End it, whatever state it is in; returns when it is gone."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()
