"""What a service says about sessions and places in a queue, and how a waiter watches one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from .interface import Claim, Held

#: The mark of a reader's entry. A writer's is 1 if its number is a token, and else 0.
READER = "s"


class SessionGone(Exception):
    """The service doesn't know the session any more, nor its entries."""


class Place(NamedTuple):
    """Where an entry stands in the queue of its lock."""

    #: The service's number of the entry: it rises from entry to entry, whatever their locks.
    number: int
    #: What the service knows the nearest entry before it by that excludes it; None if it has the
    #: lock.
    ahead: Any
    #: The first entry of the queue.
    first: Held
    #: The request was sent twice: one of them may still be carried out.
    is_repeated: bool = False


def describe_claim(claim: Claim) -> str:
    """Return what is stored in an entry: the mark of its kind, and who the owner is."""
    return f"{READER if claim.shared else int(claim.fenced)}{claim.identity}"


def read_entry(owner: str, text: str, number: int) -> Held:
    """Describe the owner of an entry."""
    mark = text[:1]
    return Held(owner, text[1:], number if mark == "1" else None, shared=mark == READER)


def read_queue(entries: Sequence[Held], count: int) -> Held:
    """Describe the holders of a lock by the first entries of its queue, which has `count`."""
    readers = takewhile(lambda entry: entry.shared, entries)
    first, *others = tuple(readers) or entries[:1]
    return first._replace(others=tuple(others), waiting=count - 1 - len(others))


class Watch:
    """How long a waiter watches the entry before its own."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_over = False
        self._end: Callable[[], object] = lambda: None

    def on_stop(self, end: Callable[[], object]) -> None:
        """Note what ends the watch, from any thread; at once if the wait was cancelled before."""
        self._end = end
        if self._is_over:
            end()

    def stop(self) -> None:
        self._is_over = True
        self._end()


@dataclass(slots=True, eq=False)
class Session:
    """A session of this process with the service: all its locks of one ttl live in it."""

    id: Any
    ttl: float
    #: The local clock, read before the request that renewed it last.
    since: float
    #: When it is to be renewed.
    due: float
    #: Owners of entries that nothing here owns, seen at the last beat.
    strays: set[str] = field(default_factory=set)


class Entry(NamedTuple):
    """The handle of a grant."""

    session: Session
    number: int
