"""
A worker's main process sees the deaths of its children, and learns what they held.

A child announces itself before it takes a task; from then on the main process has a file of the
system's for it that turns readable when the whole process has ended, whatever ended it. Celery's
own signals come too early (the child still runs) or too late (up to five seconds after a SIGKILL),
so nothing is freed on their word. `burials` does the freeing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import NamedTuple

from .. import journal, threads
from ..processes import PidFd, Process, this_process

logger = logging.getLogger(__name__)

#: Children of one worker that can keep a journal; of those beyond, the registry knows.
MOST = 1024
#: Tells children that are spawned, not forked, where to announce themselves.
VARIABLE = "FENCEDLOCK_WORKER"

#: Seconds to pause after an error that nobody foresaw.
_PAUSE = 1.0


def are_seen() -> bool:
    """Whether this system lets a process see another one's end."""
    try:
        with contextlib.closing(PidFd(os.getpid())):
            return bool(this_process().started) and hasattr(os, "memfd_create")
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Desk:
    """
    Open files that a worker shares with its children.

    None of them has a name that somebody could tidy away, and all are gone with the processes.
    """

    #: For announcements: where they are read, and written.
    ear: int
    mouth: int
    #: The numbers of journals that nobody keeps: each is in this pipe, until a child takes it out.
    tickets: int
    returned: int
    #: The file of all journals.
    journals: int

    @classmethod
    def make(cls) -> Desk:
        made = cls(*os.pipe(), *os.pipe(), os.memfd_create("fencedlock-journals"))
        for end in (made.ear, made.mouth, made.tickets):
            os.set_blocking(end, False)
        for ticket in range(MOST):
            made.give_back(ticket)
        return made

    def words(self) -> str:
        """How a process that didn't inherit the files finds them."""
        return ":".join(map(str, (os.getpid(), *astuple(self))))

    @classmethod
    def find(cls, words: str) -> Desk:
        """Open the files of a parent that told their `words()`."""
        pid, *files = words.split(":")
        modes = (os.O_RDONLY, os.O_WRONLY, os.O_RDONLY, os.O_WRONLY, os.O_RDWR)
        return cls(
            *(
                os.open(f"/proc/{pid}/fd/{file}", mode | os.O_NONBLOCK | os.O_CLOEXEC)
                for file, mode in zip(files, modes, strict=True)
            )
        )

    def take_ticket(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            return int.from_bytes(os.read(self.tickets, 2), "big")
        return None

    def give_back(self, ticket: int) -> None:
        os.write(self.returned, ticket.to_bytes(2, "big"))


class Announcement(NamedTuple):
    """What a child says when it begins."""

    child: Process
    ticket: int | None

    def line(self) -> bytes:
        # Short enough to be written wholly or not at all, and not mixed with another one.
        return f"{'' if self.ticket is None else self.ticket} {self.child}\n".encode()

    @classmethod
    def read(cls, line: bytes) -> Announcement:
        ticket, _, child = line.decode(errors="replace").partition(" ")
        return cls(Process.read(child), int(ticket) if ticket.isdigit() else None)


# In the main process

Bury = Callable[[Process, journal.Found], object]


class DeathWatch:
    """
    Watches the children, in a thread that sleeps until one begins or ends.

    Made before the first child, so that each can announce itself.

    Args:
        bury: Called with each child that is gone and what it held, from the thread.
    """

    def __init__(self, bury: Bury) -> None:
        global _desk
        self._to_bury = bury
        self._desk = _desk = Desk.make()
        os.environ[VARIABLE] = _desk.words()
        self._heard = b""
        self._children: dict[int, tuple[Announcement, PidFd]] = {}
        self._poll = select.poll()
        self._poll.register(_desk.ear, select.POLLIN)

    def start(self) -> None:
        threads.start(self._run)

    def _run(self) -> None:
        threading.current_thread().name = "fencedlock-deaths"
        bell = threads.SimpleQueue[None]()
        while True:
            try:
                self.look()
            except Exception:
                # Without this thread the locks of killed children would run out, and no sooner.
                logger.exception("The watch over the worker's children stumbled")
                with contextlib.suppress(threads.Empty):
                    bell.get(timeout=_PAUSE)

    def look(self, timeout: float | None = None) -> None:
        """Wait until something has happened, and see to it."""
        for ready, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            if ready == self._desk.ear:
                self._listen()
            else:
                self._note_end(ready)

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._heard += os.read(self._desk.ear, 65536)
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self._meet(Announcement.read(line))

    def _meet(self, said: Announcement) -> None:
        try:
            opened = PidFd(said.child.pid)
        except ProcessLookupError:
            self._bury(said)
            return
        if opened.is_gone(said.child.started):
            # Somebody else may have its pid by now.
            opened.close()
            self._bury(said)
            return
        self._children[opened.fileno()] = said, opened
        self._poll.register(opened, select.POLLIN)

    def _note_end(self, fileno: int) -> None:
        said, opened = self._children.pop(fileno)
        self._poll.unregister(fileno)
        opened.close()
        self._bury(said)

    def _bury(self, said: Announcement) -> None:
        found = journal.NOTHING
        if said.ticket is not None:
            found = journal.read(self._desk.journals, said.ticket * journal.LENGTH, said.child)
            self._desk.give_back(said.ticket)
        self._to_bury(said.child, found)


# In a child

#: What the main process made, in its children too if they were forked.
_desk: Desk | None = None


def is_watched() -> bool:
    """Whether this process has somebody to announce itself to."""
    return VARIABLE in os.environ


def forget_watch() -> None:
    """Announce nothing to whoever watches over the process that started this one."""
    global _desk
    _desk = None
    os.environ.pop(VARIABLE, None)


def announce() -> None:
    """Tell the main process of this one, and keep a journal for it."""
    with _reported("find its worker"):
        desk = _desk or Desk.find(os.environ[VARIABLE])
        ticket = desk.take_ticket()
        if ticket is not None:
            with _reported("keep a journal"):
                journal.begin(desk.journals, ticket * journal.LENGTH)
        os.write(desk.mouth, Announcement(this_process(), ticket).line())


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        logger.warning(
            "Process %d couldn't %s (%s). If it is killed, its locks may be held until they run "
            "out.",
            os.getpid(),
            what,
            exc,
        )
