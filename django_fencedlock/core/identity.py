"""Which code holds a lock, in which process, and whether that process still exists."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import select
import socket
import sys
import threading
import time
import weakref
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from asgiref.sync import SyncToAsync

from ..storage.text import escape_control
from . import runtime

#: Seconds after which the end of a call in a thread was noticed: it hands over its result before.
NOTICED = 1.0

#: The inode of the initial time namespace. In another one, start times differ.
_INITIAL_TIME_NAMESPACE = "time:[4026531834]"


class Process(NamedTuple):
    """One process, distinct from all that had its pid. Unknown parts are empty or 0."""

    boot_id: str = ""
    pid_namespace: str = ""
    pid: int = 0
    started: int = 0

    def __str__(self) -> str:
        return "|".join(map(str, self))

    @classmethod
    def read(cls, text: str) -> Process:
        """Parse what `str()` made of a process; return an unknown process for other text."""
        with contextlib.suppress(ValueError):
            boot_id, pid_namespace, pid, started = text.split("|")
            return cls(boot_id, pid_namespace, int(pid), int(started))
        return cls()


@lru_cache(1)
def _here(pid: int) -> tuple[str, Process]:
    """Return the name of the host and the process that has this pid: this one."""
    # /proc of another pid namespace shows another process under this pid.
    started = _start_time("self") if _link("/proc/self") == str(pid) else None
    pids, time = _link("/proc/self/ns/pid"), _link("/proc/self/ns/time")
    namespaces = pids if time in ("", _INITIAL_TIME_NAMESPACE) else f"{pids} {time}"
    boot_id = _read("/proc/sys/kernel/random/boot_id")
    process = Process(boot_id, namespaces, pid, started or 0)
    return escape_control(socket.gethostname())[:100], process


# A child in another pid namespace may have the pid of an ancestor.
runtime.forks.register(_here).after_fork = _here.cache_clear  # type: ignore[attr-defined]


def this_process() -> Process:
    return _here(os.getpid())[1]


def is_process_gone(process: Process) -> bool | None:
    """Return whether a process has ended with all its threads; None if unknown."""
    # A pid that was reused within the same 10 ms counts as the old process, and so as alive.
    mine = this_process()
    if not all(mine) or not process.started or process[:2] != mine[:2]:
        return None
    try:
        with contextlib.closing(PidFd(process.pid)) as opened:
            return opened.is_gone(process.started)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return None


class PidFd:
    """A file descriptor of one process. Raises `OSError` where the system has none."""

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
        """Return whether it has ended, or its pid was reused before the descriptor was opened."""
        found = _start_time(str(self.pid))
        if self.has_ended() or (found is not None and found != started):
            return True
        # If /proc hides the process from this user, it may be a later one.
        return None if found is None else False

    def has_ended(self) -> bool:
        """Return whether the process has ended with all its threads."""
        # ``kill(pid, 0)`` counts a zombie as alive; /proc shows one while other threads still run.
        poll = runtime.original("select", "poll")()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))


def _start_time(pid: str) -> int | None:
    # Field 22, counted after the last bracket: the command's name may contain brackets.
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


#: Name and id of the task that runs in this context, set by a task runner.
running_task: ContextVar[tuple[str, str]] = ContextVar("fencedlock_task", default=("", ""))


# The identities of a process are few, and each lock writes and parses one.
_write = lru_cache(256)(json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode)


@lru_cache(256)
def _parse(identity: str) -> tuple[Any, ...]:
    kinds = [str, str, str, int, int, str, str, str]
    with contextlib.suppress(ValueError):
        found = json.loads(identity)
        if isinstance(found, list) and [type(each) for each in found] == kinds:
            return tuple(found)
    return "", "", "", 0, 0, ""


class Owner(NamedTuple):
    """One acquisition: a unique id, and where its holder runs."""

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
        return Process(*self[2:6])

    @property
    def identity(self) -> str:
        """Where the holder runs, as text that a lock service stores; `read()` parses it."""
        return _write(self[1:])

    @classmethod
    def read(cls, owner: str, identity: str) -> Owner:
        """Parse an identity; return an owner in an unknown place for any other text."""
        return cls(owner, *_parse(identity))

    def __str__(self) -> str:
        return describe_place(self.host, self.pid, *self[6:])


def describe_identity(identity: str) -> str:
    """Describe a holder for people; text that isn't an identity is shown as it is."""
    owner = Owner.read("", identity)
    return str(owner) if owner.pid else escape_control(identity)


def describe_place(host: str, pid: int, thread: str, task_name: str, task_id: str) -> str:
    """Describe where a holder runs, for people."""
    place = f"{host}, pid {pid}"
    if task_name:
        place = f"task {task_name}{f'[{task_id}]' if task_id else ''} on {place}"
    elif thread:
        place = f"{place}, thread {thread}"
    return escape_control(place)


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lock, as the lock service describes it."""

    owner_id: str
    description: str
    alias: str
    token: int | None = None
    acquired_at: datetime | None = None
    expires_at: datetime | None = None
    #: The server process of the session that holds the lock, if a session holds it.
    session_pid: int | None = None
    #: Whether it is a reader; there may be others.
    shared: bool = False

    def __str__(self) -> str:
        # Written by another process: it must not forge log lines.
        return escape_control(self.description or f"owner {self.owner_id}")


def new_owner(task: tuple[str, str] | None = None) -> Owner:
    """Make a new owner; `task` replaces `running_task`."""
    thread = threading.current_thread().name
    place = _place(*_here(os.getpid()), thread, *(task or running_task.get()))
    return Owner(new_owner_id(), *place)


def new_owner_id() -> str:
    return os.urandom(16).hex()


@lru_cache(256)
def _place(host: str, process: Process, thread: str, task_name: str, task_id: str) -> Any:
    task = escape_control(task_name)[:200], shorten_task_id(task_id)
    return (host, *process, escape_control(thread)[:100], *task)


def shorten_task_id(task_id: str) -> str:
    """Return a task's id as its owner has it: the sender of a message may choose any."""
    return escape_control(task_id)[:100]


class LocalHolder:
    """A holder in this process: a task, a greenlet, a thread, or one call in a thread."""

    __slots__ = ("__weakref__", "_runs_in", "ended", "leases", "may_be_call")

    def __init__(self, runs_in: object = None, may_be_call: bool = False) -> None:
        self._runs_in = None if runs_in is None else weakref.ref(runs_in)
        self.ended = False
        #: It may be a call of ``asyncio.to_thread()``, whose end is noticed a moment late.
        self.may_be_call = may_be_call
        #: Leases by lock service and lock name, freed with the holder.
        self.leases: dict[tuple[object, str], Any] = {}

    def runs_in(self, place: object) -> bool:
        return self._runs_in is not None and self._runs_in() is place

    def is_task(self) -> bool:
        return self._runs_in is not None and isinstance(self._runs_in(), asyncio.Future)

    def has_ended(self) -> bool:
        """Return whether none of its code can run any more."""
        if self.ended or self._runs_in is None:
            return self.ended
        place = self._runs_in()
        if isinstance(place, asyncio.Future):
            return place.done()
        # A greenlet has an attribute `dead`.
        return place is None or bool(getattr(place, "dead", False))


class OfHolder:
    """What a task, greenlet, thread or call has begun: other code may end it only after that."""

    # Weak: a holder that is gone has ended.
    _who: Callable[[], LocalHolder | None] | None = None

    def __init__(self, who: LocalHolder | None) -> None:
        if who is not None:
            self._who = weakref.ref(who)

    @property
    def who(self) -> LocalHolder | None:
        """The task, greenlet, thread or call that began it; None once it is gone."""
        return None if self._who is None else self._who()

    def is_left(self) -> bool:
        """Whether the code that began it has ended, so that any other code may end it."""
        return self._who is not None and ((who := self._who()) is None or who.has_ended())

    def wait_until_left(self) -> bool:
        """As `is_left()`, for code that may know of the end before it was noticed here."""
        for pause in self.pauses_until_left():
            time.sleep(pause)
        return self.is_left()

    def pauses_until_left(self) -> Iterator[float]:
        """Yield the pauses of a wait until the end is noticed; a coroutine may not block."""
        until = runtime.clock() + NOTICED
        while (
            not self.is_left()
            and runtime.clock() < until
            and getattr(self.who, "may_be_call", True)
        ):
            yield 0.001


class _Key:
    """Ends with its thread. The system reuses a thread's ident."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.key = _Key()
        #: Of the main thread alone: asyncio.to_thread() runs no call there.
        self.holder: LocalHolder | None = None
        if threading.current_thread() is threading.main_thread():
            self.holder = LocalHolder(self.key)
        #: The call of ``sync_to_async`` that runs here now.
        self.call: LocalHolder | None = None


_thread = _Thread()
#: By task or greenlet.
_holders: WeakKeyDictionary[object, LocalHolder] = WeakKeyDictionary()
#: The holder of another thread. A context variable, since each call of ``asyncio.to_thread()`` has
#: a context of its own, but shares its thread with other calls.
_holder: ContextVar[LocalHolder | None] = ContextVar("fencedlock_holder", default=None)


def current_holder() -> LocalHolder:
    """
    Return the holder that runs this code.

    It is the asyncio task, else the call of ``sync_to_async`` or ``asyncio.to_thread``, else the
    greenlet, else the thread. A child task and a thread with a copied context are other holders.
    """
    if (task := _running_task()) is not None:
        return _holders.get(task) or _holders.setdefault(task, LocalHolder(task))
    if _thread.call is not None:
        return _thread.call
    if (greenlet := running_greenlet()) is not None:
        return _holders.get(greenlet) or _holders.setdefault(greenlet, LocalHolder(greenlet))
    if _thread.holder is not None:
        return _thread.holder
    holder = _holder.get()
    if holder is None or not holder.runs_in(_thread.key):
        holder = LocalHolder(_thread.key, may_be_call=True)
        _holder.set(holder)
    return holder


def _running_task() -> asyncio.Task[Any] | None:
    # Without a loop, current_task() raises an error, which takes seven times as long.
    return asyncio.current_task() if running_loop() is not None else None


def is_in_call() -> bool:
    """Return whether a call of ``sync_to_async`` runs this code."""
    return _thread.call is not None and _running_task() is None


def running_greenlet() -> object | None:
    """Return the greenlet that runs this code; None if it is the thread itself."""
    greenlet = sys.modules.get("greenlet")
    if greenlet is None:
        return None
    current = greenlet.getcurrent()
    # The main greenlet has no parent.
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
            call.ended = True

    return thread_handler


# asgiref has no public hook for the beginning and the end of a call in a thread. Without one, all
# calls in the thread that Django shares among tasks would be one holder, with one lease.
SyncToAsync.thread_handler = _mark_calls(SyncToAsync.thread_handler)  # type: ignore[method-assign]
