"""Who holds a lock: the owner's id, the words that people read, and which code may re-enter."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from asyncio import _get_running_loop as running_loop
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from asgiref.sync import SyncToAsync

from .processes import Process, this_process
from .texts import visible

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


#: Seconds that an event loop may take to tell which task waits.
LOOP_ANSWERS = 2.0


class _Thread(threading.local):
    def __init__(self) -> None:
        # Not the thread's ident: the system gives it out again after the thread's end.
        self.key = object()


_thread = _Thread()


def whoami() -> object:
    """
    Tell who runs this code: the asyncio task, else the greenlet, else the thread.

    Code that an asyncio task sent to a thread by ``sync_to_async`` is still that task. Whatever
    merely inherited a context (a child task, a copied context) is somebody else.
    """
    # Not get_running_loop(), which raises where there is none, as nearly always.
    if running_loop() is None:
        return _waiting_task() or running_greenlet() or _thread.key
    return asyncio.current_task() or _thread.key


def running_greenlet() -> object | None:
    """The greenlet that runs this code; None if it is the thread itself."""
    greenlet = sys.modules.get("greenlet")
    if greenlet is None:
        return None
    current = greenlet.getcurrent()
    # The main greenlet is the thread itself.
    return current if current.parent is not None else None


def _waiting_task() -> object | None:
    """
    Find the task that awaits this very call of ``sync_to_async``.

    asgiref hands one list, ``task_context``, to the waiting coroutine and to the thread, so the
    task whose coroutine holds the same list is the caller. The context can't tell: a child task
    inherits it. Should asgiref change this, no task is found, and the thread is another holder.
    """
    here = vars(SyncToAsync.threadlocal)
    mark, loop = here.get("task_context"), here.get("main_event_loop")
    if mark is None or loop is None or not loop.is_running():
        return None
    # Asked in the loop itself: this thread may have begun before the task came to wait for it.
    answer: Future[object | None] = Future()
    loop.call_soon_threadsafe(lambda: answer.set_result(_find_task(loop, mark)))
    try:
        return answer.result(timeout=LOOP_ANSWERS)
    except TimeoutError:
        return None


def _find_task(loop: asyncio.AbstractEventLoop, mark: Any) -> object | None:
    return next((task for task in asyncio.all_tasks(loop) if _awaits(task, mark)), None)


def _awaits(task: asyncio.Task[Any], mark: Any) -> bool:
    step: Any = task.get_coro()
    while step is not None:
        frame = getattr(step, "cr_frame", None)
        if (
            frame is not None
            and frame.f_code is SyncToAsync.__call__.__code__
            and frame.f_locals.get("task_context") is mark
        ):
            return True
        step = getattr(step, "cr_await", None)
    return False
