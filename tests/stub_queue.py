"""A lock service in memory with sessions and queues, and a network that fails."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django_fencedlock.backends.interface import Claim, Held
from django_fencedlock.backends.places import (
    Place,
    SessionGone,
    Watch,
    describe_claim,
    read_entry,
    read_queue,
)
from django_fencedlock.backends.queued import QueuedBackend
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core import runtime


class NoAnswer(OSError):
    """The request or its answer was lost."""


class Line(NamedTuple):
    """One entry of a queue."""

    name: str
    owner: str
    session: int
    number: int
    text: str


@dataclass
class QueueService:
    """The service that the backends of one test share."""

    clock: Callable[[], float] = runtime.clock
    entries: list[Line] = field(default_factory=list)
    #: By id: its ttl, and when it ends.
    sessions: dict[int, tuple[float, float]] = field(default_factory=dict)
    revision: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: The names of the requests that came, and what happens to the next ones of such a name.
    requests: list[str] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    #: Called at each request, for a fault.
    fail: Callable[[str], str] = lambda what: ""
    #: Copies of requests that are still under way, and since when.
    under_way: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    #: Called in each watch, instead of waiting.
    meanwhile: Callable[[Watch], object] | None = None

    def queue(self, name: str) -> list[Line]:
        return sorted((each for each in self.entries if each.name == name), key=lambda it: it[3])

    def owners(self, name: str) -> list[str]:
        return [each.owner for each in self.queue(name)]

    def expire(self) -> None:
        for session, (_, until) in list(self.sessions.items()):
            if until <= self.clock():
                self.end(session)

    def end(self, session: int) -> None:
        self.sessions.pop(session, None)
        self.entries = [each for each in self.entries if each.session != session]
        self.changed.notify_all()

    def end_all(self) -> None:
        with self.changed:
            for session in list(self.sessions):
                self.end(session)

    def deliver(self, latest: float = math.inf) -> None:
        """Let the requests arrive that were under way for at most so many seconds."""
        with self.changed:
            while self.under_way:
                since, act = self.under_way.pop(0)
                if self.clock() <= since + latest:
                    self.carry_out(act)

    def carry_out(self, act: Callable[[], Any]) -> Any:
        self.expire()
        try:
            return act()
        except SessionGone:
            return SessionGone

    def send(self, what: str, act: Callable[[], Any]) -> tuple[Any, bool]:
        """Return what a request returned, and whether it was sent twice."""
        with self.changed:
            self.requests.append(what)
            fault = self.fail(what)
            for planned in self.faults:
                if planned[0] == what:
                    self.faults.remove(planned)
                    fault = planned[1]
                    break
            if fault in ("answer lost", "twice"):
                self.carry_out(act)
            if fault in ("late", "twice, one late"):
                self.under_way.append((self.clock(), act))
            if fault in ("lost", "late", "answer lost"):
                raise NoAnswer(fault)
            answer = self.carry_out(act)
            if answer is SessionGone:
                raise SessionGone
            return answer, fault.startswith("twice")


class StubQueue(QueuedBackend):
    """`lists_strays`: whether the service can list a session's entries."""

    label = "stub"
    supports_shared = True
    errors = (NoAnswer,)

    def __init__(
        self, config: AliasConfig, service: QueueService, *, lists_strays: bool = True
    ) -> None:
        super().__init__(config)
        self.service = service
        self.lists_strays = lists_strays
        self.forgotten = 0

    def open(self, ttl: float) -> int:
        session = random.getrandbits(60)

        def act() -> None:
            self.service.sessions[session] = ttl, self.service.clock() + ttl

        self.service.send("open", act)
        return session

    def keep(self, session: int) -> bool:
        def act() -> bool:
            if session not in self.service.sessions:
                return False
            ttl, _ = self.service.sessions[session]
            self.service.sessions[session] = ttl, self.service.clock() + ttl
            return True

        return bool(self.service.send("keep", act)[0])

    def end(self, session: int) -> None:
        self.service.send("end", lambda: self.service.end(session))

    def enter(self, session: int, claim: Claim, alone: bool) -> Place | Held:
        if alone and not self.lists_strays:
            # Nothing would tell of a copy that adds the entry later.
            queue, _ = self.service.send("look", lambda: self.service.queue(claim.name))
            is_held = bool(_in_the_way(queue, claim.shared))
            if is_held and claim.owner not in [each.owner for each in queue]:
                return _held(queue[0])
            alone = False

        def act() -> Place | Held:
            service = self.service
            if session not in service.sessions:
                raise SessionGone
            queue = service.queue(claim.name)
            if claim.owner not in service.owners(claim.name):
                if alone and _in_the_way(queue, claim.shared):
                    return _held(queue[0])
                service.revision += 1
                text = describe_claim(claim)
                entry = Line(claim.name, claim.owner, session, service.revision, text)
                service.entries.append(entry)
            place = self._place(claim.name, claim.owner)
            assert place is not None
            return place

        place, is_repeated = self.service.send("enter", act)
        return place._replace(is_repeated=is_repeated) if isinstance(place, Place) else place

    def _place(self, name: str, owner: str, number: int = 0) -> Place | None:
        queue = self.service.queue(name)
        for count, entry in enumerate(queue):
            if entry.owner == owner and number <= entry.number:
                before = _in_the_way(queue[:count], _held(entry).shared)
                ahead = before[-1].number if before else None
                return Place(entry.number, ahead, _held(queue[0]))
        return None

    def look(self, name: str, owner: str, number: int) -> Place | None:
        return self.service.send("look", lambda: self._place(name, owner, number))[0]

    def watch(self, name: str, owner: str, place: Place, watch: Watch) -> None:
        if self.service.meanwhile is not None:
            self.service.meanwhile(watch)
            return
        stopped = False

        def stop() -> None:
            nonlocal stopped
            with self.service.changed:
                stopped = True
                self.service.changed.notify_all()

        def is_over() -> bool:
            ahead = [each.number for each in self.service.queue(name)]
            return stopped or place.ahead not in ahead

        with self.service.changed:
            watch.on_stop(stop)
            self.service.changed.wait_for(is_over, watch.seconds)

    def leave(self, name: str, owner: str) -> bool | None:
        def act() -> bool:
            before = len(self.service.entries)
            self.service.entries = [
                each for each in self.service.entries if (each.name, each.owner) != (name, owner)
            ]
            self.service.changed.notify_all()
            return len(self.service.entries) < before

        was_there, is_repeated = self.service.send("leave", act)
        return bool(was_there) or (None if is_repeated else False)

    def entries(self, session: int, names: Mapping[str, str]) -> Mapping[str, str]:
        def act() -> dict[str, str]:
            found = {each.owner: each.name for each in self.service.entries if each[2] == session}
            return {
                owner: name for owner, name in found.items() if self.lists_strays or owner in names
            }

        found: dict[str, str] = self.service.send("entries", act)[0]
        return found

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        with self.service.changed:
            self.service.expire()
            queues = {name: self.service.queue(name) for name in names}
        return {
            name: read_queue([*map(_held, queue)], len(queue))
            for name, queue in queues.items()
            if queue
        }

    def forget(self) -> None:
        self.forgotten += 1


def _held(entry: Line) -> Held:
    return read_entry(entry.owner, entry.text, entry.number)


def _in_the_way(queue: Sequence[Line], shared: bool) -> list[Line]:
    return [each for each in queue if not (shared and _held(each).shared)]


class Time:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def random_faults(rng: random.Random, share: float) -> Iterator[str]:
    """Yield a fault for some of the requests."""
    kinds = ["lost", "late", "answer lost", "twice", "twice, one late"]
    while True:
        yield rng.choice(kinds) if rng.random() < share else ""
