"""A lock service in memory with readers and writers: a waiting writer stops new readers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from django_fencedlock.backends.interface import Backend, Claim, Grant, Granted, Held, Renewal, Wait
from django_fencedlock.core.runtime import clock

#: Seconds for which a writer that was refused stops new readers.
NOTED = 2.0


@dataclass
class Entry:
    claim: Claim
    until: float

    @property
    def is_live(self) -> bool:
        return self.until > clock()


@dataclass
class Place:
    """What the service knows of one lock."""

    holders: dict[str, Entry] = field(default_factory=dict)
    #: Writers that were refused, and until when they stop new readers.
    waiting: dict[str, Entry] = field(default_factory=dict)
    #: The newest token of a writer.
    token: int = 0

    def tidy(self) -> None:
        for found in (self.holders, self.waiting):
            for owner in [owner for owner, entry in found.items() if not entry.is_live]:
                del found[owner]


@dataclass
class SharedStubService:
    """The service that all `SharedStubBackend` objects of one test share."""

    places: dict[str, Place] = field(default_factory=dict)
    mutex: threading.RLock = field(default_factory=threading.RLock)

    def place(self, name: str) -> Place:
        found = self.places.setdefault(name, Place())
        found.tidy()
        return found


class SharedStubBackend(Backend):
    """Locks in a dict, with readers. They expire with their ttl, and the core polls."""

    label = "stub"
    supports_shared = True
    #: Whether it proposes tokens to writers.
    has_tokens = True
    service = SharedStubService()

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        since = clock()
        with self.service.mutex:
            place = self.service.place(claim.name)
            writers_wait = [each for owner, each in place.waiting.items() if owner != claim.owner]
            others = [each for owner, each in place.holders.items() if owner != claim.owner]
            in_the_way = [each for each in others if not (each.claim.shared and claim.shared)]
            if claim.owner not in place.holders:
                if claim.shared and writers_wait:
                    in_the_way = [*others, *writers_wait]
                if in_the_way:
                    if not claim.shared and wait.left:
                        place.waiting[claim.owner] = Entry(claim, clock() + NOTED)
                    return _held(in_the_way[0], place)._replace(waiting=len(place.waiting))
                if not claim.shared:
                    place.token += 1
            place.waiting.pop(claim.owner, None)
            place.holders[claim.owner] = Entry(claim, clock() + claim.ttl)
            has_token = self.has_tokens and not claim.shared
            return Granted(place.token if has_token else None, since)

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        with self.service.mutex:
            return [self._renew(grant) for grant in grants]

    def _renew(self, grant: Grant) -> Renewal:
        if not self.verify(grant):
            return Renewal.LOST
        self.service.places[grant.name].holders[grant.owner].until = clock() + grant.ttl
        return Renewal.KEPT

    def release(self, grant: Grant) -> bool:
        with self.service.mutex:
            place = self.service.place(grant.name)
            found = [each.pop(grant.owner, None) for each in (place.holders, place.waiting)]
            return any(found)

    def verify(self, grant: Grant) -> bool:
        with self.service.mutex:
            return grant.owner in self.service.place(grant.name).holders

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        with self.service.mutex:
            places = {name: self.service.place(name) for name in names}
            found = {
                name: [_held(each, place) for each in place.holders.values()]
                for name, place in places.items()
            }
        return {
            name: held[0]._replace(others=tuple(held[1:])) for name, held in found.items() if held
        }

    def suggest(self, name: str, floor: int) -> None:
        with self.service.mutex:
            place = self.service.place(name)
            place.token = max(floor, place.token)


def _held(entry: Entry, place: Place) -> Held:
    claim, left = entry.claim, max(0.0, entry.until - clock())
    token = None if claim.shared else place.token
    return Held(claim.owner, claim.identity, token, left, shared=claim.shared)
