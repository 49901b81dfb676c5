"""
What this process holds or is about to take, in a file that another one reads after its death.

Only where somebody gave it a journal, as a worker does with its children. An entry is written
before the lock is asked for, and erased after it was given back, so that none is missing at
whatever moment the process is killed. What was written is with the system by then, and needs
nobody to flush it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from .processes import Process, this_process

logger = logging.getLogger(__name__)

#: Bytes of an entry. It fits the longest names, and a whole number of entries fits into a page of
#: the system's: an entry is written wholly, or not at all.
SIZE = 2048
#: Entries of a journal, the first of which stands for the journal itself.
MOST = 512
#: Bytes of a journal; several may be in one file.
LENGTH = SIZE * MOST

# json.dumps() makes an encoder for each call, which takes longer than all the rest.
_quoted = json.encoder.encode_basestring

_EMPTY, _WRITTEN, _INCOMPLETE = b"\0", b"=", b"!"


class JournalEntry(NamedTuple):
    """One lease that a process had, or was about to get."""

    alias: str
    name: str
    owner: str
    ttl: float
    fenced: bool


class Journal:
    """
    The part of a file, from `start`, that this process alone writes. Any thread may.

    Former entries there are overwritten: the process that made them has been dealt with.
    """

    def __init__(self, file: int, start: int) -> None:
        self._file = file
        self._start = start
        self._places: dict[str, int] = {}
        # Taken and given back by one call each, which no other thread comes between. The lowest
        # first: the reader stops at a place that was never used.
        self._free = deque(range(1, MOST))
        self._complete = True
        _wipe(file, start)
        self._write(0, _WRITTEN + str(this_process()).encode())

    def enter(self, entry: JournalEntry) -> None:
        """Note what is about to be asked for."""
        try:
            place = self._free.popleft()
        except IndexError:
            self._go_without(f"there is room for {MOST - 1} locks at once")
            return
        try:
            text = _as_json(entry)
            self._write(place, _WRITTEN + text.encode(errors="surrogatepass"))
        except (OSError, ValueError) as exc:
            self._free.appendleft(place)
            self._go_without(str(exc))
            return
        self._places[entry.owner] = place

    def erase(self, owner: str) -> None:
        """Note that an owner has nothing any more, and asks for nothing."""
        place = self._places.pop(owner, None)
        if place is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, _EMPTY, self._start + place * SIZE)
            self._free.appendleft(place)

    def _write(self, place: int, line: bytes) -> None:
        if len(line) > SIZE:
            raise ValueError(f"an entry of {len(line)} bytes is too long")
        os.pwrite(self._file, line.ljust(SIZE), self._start + place * SIZE)

    def _go_without(self, why: str) -> None:
        if not self._complete:
            return
        self._complete = False
        with contextlib.suppress(OSError):
            os.pwrite(self._file, _INCOMPLETE, self._start)
        logger.warning(
            "Process %d couldn't note in its journal what it is about to lock: %s. If it is "
            "killed, such locks are found by the registry alone, or run out.",
            os.getpid(),
            why,
        )


def _as_json(entry: JournalEntry) -> str:
    words = ", ".join(map(_quoted, (entry.alias, entry.name, entry.owner)))
    return f"[{words}, {entry.ttl!r}, {'true' if entry.fenced else 'false'}]"


class Found(NamedTuple):
    """What a process left behind."""

    entries: list[JournalEntry]
    #: Nothing is missing among them.
    complete: bool


#: What is known of a process that kept no journal.
NOTHING = Found([], False)


def read(file: int, start: int, process: Process) -> Found:
    """Read the journal of a process that is gone."""
    head = os.pread(file, SIZE, start)
    if head[1:].strip() != str(process).encode():
        return NOTHING
    return Found(list(_entries(file, start)), head[:1] == _WRITTEN)


def _entries(file: int, start: int) -> Iterator[JournalEntry]:
    for line in _used(file, start):
        if line[:1] == _WRITTEN:
            with contextlib.suppress(ValueError, TypeError):
                yield JournalEntry(*json.loads(line[1:]))


def _used(file: int, start: int) -> Iterator[bytes]:
    for place in range(1, MOST):
        line = os.pread(file, SIZE, start + place * SIZE)
        if not line.strip(_EMPTY):
            return
        yield line


def _wipe(file: int, start: int) -> None:
    for place, line in enumerate(_used(file, start), 1):
        if line[:1] != _EMPTY:
            os.pwrite(file, _EMPTY, start + place * SIZE)


_opened: Journal | None = None


def begin(file: int, start: int) -> None:
    """Have this process keep a journal from now on."""
    global _opened
    _opened = Journal(file, start)


def enter(alias: str, name: str, owner: str, ttl: float, fenced: bool) -> None:
    """See `Journal.enter()`."""
    if _opened is not None:
        _opened.enter(JournalEntry(alias, name, owner, ttl, fenced))


def erase(owner: str) -> None:
    """See `Journal.erase()`."""
    if _opened is not None:
        _opened.erase(owner)


def _forget_after_fork() -> None:
    # What the parent holds isn't this process's.
    global _opened
    _opened = None


os.register_at_fork(after_in_child=_forget_after_fork)
