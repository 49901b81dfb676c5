"""Which process of which machine this is, and whether another one is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import select
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import threads

#: The first of all time namespaces. In another one the same process has another start time.
_FIRST_TIME_NAMESPACE = "time:[4026531834]"


@dataclass(frozen=True, slots=True)
class Process:
    """
    One process, told from all others that ever had its pid.

    What the system doesn't tell is empty, or 0; of such a process nobody knows whether it is gone.
    """

    boot_id: str = ""
    pid_namespace: str = ""
    pid: int = 0
    started: int = 0

    def __str__(self) -> str:
        return f"{self.boot_id}|{self.pid_namespace}|{self.pid}|{self.started}"

    @classmethod
    def read(cls, text: str) -> Process:
        """What `str()` made of a process; of any other text, one that nothing is known of."""
        parts = text.split("|")
        if len(parts) != 4 or not (parts[2].isdecimal() and parts[3].isdecimal()):
            return cls()
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))


def this_process() -> Process:
    return _of_pid(os.getpid())


@lru_cache(maxsize=1)
def _of_pid(pid: int) -> Process:
    return Process(
        boot_id=_read("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_namespaces(),
        pid=pid,
        # If it is the /proc of another namespace, our pid is somebody else's there.
        started=_start_time("self") or 0 if _link("/proc/self") == str(pid) else 0,
    )


# Not left to the pid alone: it may be a forefather's, whom the cache still remembers.
os.register_at_fork(after_in_child=_of_pid.cache_clear)


def _namespaces() -> str:
    pids, time = _link("/proc/self/ns/pid"), _link("/proc/self/ns/time")
    return pids if time in ("", _FIRST_TIME_NAMESPACE) else f"{pids} {time}"


def is_gone(boot_id: str, pid_namespace: str, pid: int, started: int) -> bool | None:
    """
    Tell whether a process is gone with all its threads; None if that can't be told from here.

    A pid that was used again within the same 10 ms passes for the old process, and so for alive.
    """
    here = this_process()
    if not (here.boot_id and here.pid_namespace and here.started and started):
        return None
    if (boot_id, pid_namespace) != (here.boot_id, here.pid_namespace):
        return None
    try:
        with contextlib.closing(PidFd(pid)) as opened:
            return opened.is_gone(started)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return None


class PidFd:
    """
    A file that stands for one process, whoever gets its pid later.

    Raises `ProcessLookupError` if there is none with this pid, and another `OSError` where the
    system has no such files.
    """

    def __init__(self, pid: int) -> None:
        if not hasattr(os, "pidfd_open"):
            raise OSError(errno.ENOSYS, "this system has no pidfd_open()")
        self.pid = pid
        self._fd: int = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def is_gone(self, started: int) -> bool | None:
        """Whether it has ended, or isn't the process that was started then."""
        # Read after the file was opened: from then on the pid of a living process is its own.
        found = _start_time(str(self.pid))
        if found is not None and found != started:
            return True
        if self.has_ended():
            return True
        # Alive, but /proc shows it to its own user alone: perhaps it isn't the one.
        return False if found is not None else None

    def has_ended(self) -> bool:
        """
        Whether the process, with all its threads, has ended.

        Not what ``kill(pid, 0)`` or the state in /proc say: the first takes a zombie for alive,
        the second takes a process for a zombie whose other threads still run.
        """
        poll = threads.original("select", "poll")()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))


def _start_time(pid: str) -> int | None:
    # Field 22, counted after the command's closing bracket: a command may hold brackets.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
