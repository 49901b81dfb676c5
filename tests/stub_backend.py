"""A lock service in memory: the smallest backend, and what tests break on purpose."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from django_fencedlock.backends.interface import Backend, Claim, Grant, Granted, Held, Renewal, Wait
from django_fencedlock.core.runtime import clock


@dataclass
class StubService:
    """The service that all `StubBackend` objects of one test share."""

    locks: dict[str, tuple[Claim, int, float]] = field(default_factory=dict)
    #: The newest token of each name. A service that lost its data begins again.
    tokens: dict[str, int] = field(default_factory=dict)
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def live(self, name: str) -> tuple[Claim, int, float] | None:
        found = self.locks.get(name)
        return found if found and found[2] > clock() else None


class StubBackend(Backend):
    """Locks in a dict. They expire with their ttl, and the core polls."""

    label = "stub"
    service = StubService()

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        since = clock()
        with self.service.mutex:
            found = self.service.live(claim.name)
            if found and found[0].owner != claim.owner:
                return _held(*found)
            token = found[1] if found else self.service.tokens.get(claim.name, 0) + 1
            self.service.tokens[claim.name] = token
            self.service.locks[claim.name] = claim, token, clock() + claim.ttl
            return Granted(token, since)

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        with self.service.mutex:
            return [self._renew(grant) for grant in grants]

    def _renew(self, grant: Grant) -> Renewal:
        if not self.verify(grant):
            return Renewal.LOST
        claim, token, _ = self.service.locks[grant.name]
        self.service.locks[grant.name] = claim, token, clock() + grant.ttl
        return Renewal.KEPT

    def release(self, grant: Grant) -> bool:
        with self.service.mutex:
            held = self.verify(grant)
            if held:
                del self.service.locks[grant.name]
            return held

    def verify(self, grant: Grant) -> bool:
        found = self.service.live(grant.name)
        return found is not None and found[0].owner == grant.owner

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        return {name: _held(*found) for name in names if (found := self.service.live(name))}

    def suggest(self, name: str, floor: int) -> None:
        self.service.tokens[name] = max(floor, self.service.tokens.get(name, 0))


def _held(claim: Claim, token: int, until: float) -> Held:
    return Held(claim.owner, claim.identity, token, max(0.0, until - clock()))
