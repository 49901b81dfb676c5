"""Which process of which machine this is, and whether another one is gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import select
import socket
import sys
import threading
import weakref
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from asgiref.sync import SyncToAsync

from ..storage.text import visible
from . import runtime

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
        poll = runtime.original("select", "poll")()
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


#: Name and id of the task that runs in this context, as a task runner sets them.
running_task: ContextVar[tuple[str, str]] = ContextVar("fencedlock_task", default=("", ""))


# Each lock makes one, and a frozen one takes five times as long to make; nobody changes it.
@dataclass(slots=True)
class Owner:
    """One holder of one lock: a unique id, and where it runs."""

    id: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_started: int
    thread: str
    task_name: str = ""
    task_id: str = ""

    @property
    def process(self) -> Process:
        return Process(self.boot_id, self.pid_namespace, self.pid, self.pid_started)

    def __str__(self) -> str:
        return place_in_words(self.host, self.pid, self.thread, self.task_name, self.task_id)


def place_in_words(host: str, pid: int, thread: str, task_name: str, task_id: str) -> str:
    """Where an owner runs, for people to read."""
    place = f"{host}, pid {pid}"
    if task_name:
        told = f"[{task_id}]" if task_id else ""
        return visible(f"task {task_name}{told} on {place}")
    return visible(f"{place}, thread {thread}" if thread else place)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a lock, as the lock service tells it."""

    owner: str
    words: str
    alias: str
    token: int | None = None
    acquired_at: datetime | None = None
    expires_at: datetime | None = None
    #: The server process of the session that has the lock, where a lock lives on a session.
    session_pid: int | None = None

    def __str__(self) -> str:
        # As another process wrote them, of whatever release: nothing in them is to forge a log.
        return visible(self.words or f"owner {self.owner}")


def new_owner(task: tuple[str, str] | None = None) -> Owner:
    """Make an owner that nobody was before; `task` is what `running_task` would say of it."""
    task_name, task_id = task or running_task.get()
    # A uuid of random bits, at a quarter of what `uuid.uuid4()` takes.
    bits = os.urandom(16).hex()
    return Owner(
        f"{bits[:12]}4{bits[13:16]}8{bits[17:]}",
        *_place(os.getpid()),
        visible(threading.current_thread().name)[:100],
        visible(task_name)[:200],
        told_id(task_id),
    )


def told_id(task_id: str) -> str:
    """A task's id as its owner tells it: whoever sends a message may choose any."""
    return visible(task_id)[:100]


@lru_cache(maxsize=1)
def _place(pid: int) -> tuple[str, str, str, int, int]:
    # Keyed by the pid, so that a child after fork asks again.
    process = this_process()
    host = visible(socket.gethostname())[:100]
    return host, process.boot_id, process.pid_namespace, pid, process.started


class LocalHolder:
    """What holds locks in this process: a task, a greenlet, a thread, or one call in a thread."""

    __slots__ = ("__weakref__", "_ended", "_runs_in", "leases", "may_be_call")

    def __init__(self, runs_in: object = None, may_be_call: bool = False) -> None:
        self._runs_in = None if runs_in is None else weakref.ref(runs_in)
        self._ended = False
        #: It may be a call of ``asyncio.to_thread()``, whose end is noticed a moment too late.
        self.may_be_call = may_be_call
        #: By lock service and lock name. The leases of a holder that is gone go with it.
        self.leases: dict[tuple[object, str], Any] = {}

    def runs_in(self, place: object) -> bool:
        """Whether this is the holder of a task, a greenlet or a thread."""
        return self._runs_in is not None and self._runs_in() is place

    def is_task(self) -> bool:
        return self._runs_in is not None and isinstance(self._runs_in(), asyncio.Future)

    def end(self) -> None:
        self._ended = True

    def has_ended(self) -> bool:
        """Whether none of its code can run any more."""
        if self._ended or self._runs_in is None:
            return self._ended
        place = self._runs_in()
        if isinstance(place, asyncio.Future):
            return place.done()
        # A greenlet knows whether it is dead.
        return place is None or bool(getattr(place, "dead", False))


class _Key:
    """Stands for a thread and ends with it. The system uses a thread's ident again."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.key = _Key()
        #: In the main thread alone, where asyncio.to_thread() runs no call: a copied context makes
        #: no other holder there.
        self.holder: LocalHolder | None = None
        if threading.current_thread() is threading.main_thread():
            self.holder = LocalHolder(self.key)
        #: The call of ``sync_to_async`` that runs here now.
        self.call: LocalHolder | None = None


_thread = _Thread()
_tasks: WeakKeyDictionary[asyncio.Task[Any], LocalHolder] = WeakKeyDictionary()
_greenlets: WeakKeyDictionary[object, LocalHolder] = WeakKeyDictionary()
#: The holder of another thread. A context variable, since each call of ``asyncio.to_thread()`` has
#: a context of its own, and shares its thread with others.
_holder: ContextVar[LocalHolder | None] = ContextVar("fencedlock_holder", default=None)


def whoami() -> LocalHolder:
    """
    Return the holder that runs this code.

    It is the asyncio task, else the call of ``sync_to_async`` or ``asyncio.to_thread``, else the
    greenlet, else the thread. A child task and a thread with a copied context are other holders.
    """
    # Not get_running_loop(), which raises where there is none, as nearly always.
    if running_loop() is not None and (task := asyncio.current_task()) is not None:
        return _tasks.get(task) or _tasks.setdefault(task, LocalHolder(task))
    if _thread.call is not None:
        return _thread.call
    if (greenlet := running_greenlet()) is not None:
        return _greenlets.get(greenlet) or _greenlets.setdefault(greenlet, LocalHolder(greenlet))
    if _thread.holder is not None:
        return _thread.holder
    holder = _holder.get()
    if holder is None or not holder.runs_in(_thread.key):
        holder = LocalHolder(_thread.key, may_be_call=True)
        _holder.set(holder)
    return holder


def is_in_call() -> bool:
    """Whether a call of ``sync_to_async`` runs this code."""
    return running_loop() is None and _thread.call is not None


def running_greenlet() -> object | None:
    """The greenlet that runs this code; None if it is the thread itself."""
    greenlet = sys.modules.get("greenlet")
    if greenlet is None:
        return None
    current = greenlet.getcurrent()
    # The main greenlet is the thread itself.
    return current if current.parent is not None else None


def _mark_calls(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def thread_handler(*args: Any, **kwargs: Any) -> Any:
        outer, call = _thread.call, LocalHolder()
        _thread.call = call
        try:
            return handler(*args, **kwargs)
        finally:
            _thread.call = outer
            call.end()

    return thread_handler


# asgiref has no public hook for the beginning and the end of a call in a thread. Without it, all
# calls of the one thread that Django shares among tasks are one holder, and get the same lease.
SyncToAsync.thread_handler = _mark_calls(SyncToAsync.thread_handler)  # type: ignore[method-assign]
