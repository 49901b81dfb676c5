"""
A lock service in memory, and a network that delays, drops, doubles and keeps back what is sent.

The drivers of the real backends talk to sockets and have clocks of their own in a server, so they
can't be driven here; their protocols are in `tests/faults/model/`, and real servers are broken in
the tests that start them. This service answers as the tables of the database backend do, which
`test_simulation.py` compares, and everything above it is the package's own.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from django_fencedlock.backends.interface import Backend, Claim, Grant, Granted, Held, Renewal, Wait
from django_fencedlock.exceptions import BackendUnavailable
from tests.clocks import Clock

T = TypeVar("T")

#: Seconds until a request without an answer is given up.
TIMEOUT = 5.0


class Tables:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.rows: dict[str, tuple[str, float]] = {}
        self.fences: dict[str, tuple[int, str]] = {}

    def claim(self, name: str, owner: str, ttl: float) -> int | None:
        holder, until = self.rows.get(name, ("", 0.0))
        if holder not in ("", owner) and until > self._clock():
            return None
        self.rows[name] = owner, self._clock() + ttl
        token, newest = self.fences.get(name, (0, ""))
        self.fences[name] = token + (newest != owner), owner
        return self.fences[name][0]

    def renew(self, leases: Sequence[tuple[str, str, float]]) -> set[str]:
        kept = set()
        for name, owner, ttl in leases:
            if self.holder(name) == owner:
                self.rows[name] = owner, self._clock() + ttl
                kept.add(owner)
        return kept

    def clear(self, name: str, owner: str) -> bool:
        if self.holder(name) != owner:
            return False
        del self.rows[name]
        return True

    def lift(self, name: str) -> None:
        """Leave nobody the newest grant."""
        self.fences[name] = self.fences.get(name, (0, ""))[0] + 1, ""

    def holder(self, name: str) -> str:
        return self.rows.get(name, ("", 0.0))[0]

    def is_live(self, name: str) -> bool:
        return self.rows.get(name, ("", 0.0))[1] > self._clock()


class Fault(enum.Enum):
    """What becomes of one request."""

    NONE = "it is answered"
    NO_REQUEST = "it is lost"
    NO_REPLY = "its answer is lost"
    TWICE = "it comes twice"
    SLOW = "it takes long both ways"
    LATE = "it comes after it was given up"


class Network:
    def __init__(self, clock: Clock, seen: Counter[str]) -> None:
        self._clock = clock
        self._seen = seen
        #: What is to become of the next requests; none of those beyond.
        self.faults: list[Fault] = []
        #: How long a slow one takes, and what others do before its answer comes.
        self.delay = 0.0
        self.meanwhile: Callable[[], object] = lambda: None
        self.under_way: list[Callable[[], object]] = []

    def ask(self, name: str | None, request: Callable[[], T]) -> T:
        fault = self.faults.pop(0) if self.faults else Fault.NONE
        if fault is Fault.SLOW:
            self._clock.now += self.delay
            answer = request()
            self._clock.now += self.delay
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()
            return answer
        if fault is Fault.TWICE:
            request()
        if fault in (Fault.NONE, Fault.TWICE):
            return request()
        self._seen["unknown"] += 1
        if fault is Fault.NO_REPLY:
            request()
        if fault is Fault.LATE:
            self.under_way.append(request)
        self._clock.now += TIMEOUT
        raise BackendUnavailable("no answer", name=name, alias="default")


class SimulatedBackend(Backend):
    """A backend of one process, by that network."""

    label = "database"
    records_grants = True
    records_unfenced = True

    def __init__(self, config: Any, clock: Clock, tables: Tables, network: Network) -> None:
        super().__init__(config)
        self._clock, self._tables, self._network = clock, tables, network

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        since = self._clock()
        token = self._network.ask(
            claim.name, lambda: self._tables.claim(claim.name, claim.owner, claim.ttl)
        )
        return Held() if token is None else Granted(token, since)

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        sent = [(grant.name, grant.owner, grant.ttl) for grant in grants]
        try:
            kept = self._network.ask(None, lambda: self._tables.renew(sent))
        except BackendUnavailable:
            return [Renewal.UNKNOWN] * len(grants)
        return [Renewal.KEPT if grant.owner in kept else Renewal.LOST for grant in grants]

    def verify(self, grant: Grant) -> bool:
        return self._network.ask(grant.name, lambda: self._tables.holder(grant.name) == grant.owner)

    def release(self, grant: Grant) -> bool:
        name, owner = grant.name, grant.owner
        return self._network.ask(name, lambda: self._tables.clear(name, owner))

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        held = [name for name in names if self._tables.is_live(name)]
        return {name: Held(self._tables.holder(name)) for name in held}
