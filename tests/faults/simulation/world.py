"""Some processes that use locks by the package's own code, one step after the other."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from django_fencedlock import conf
from django_fencedlock.backends.interface import Grant, Wait
from django_fencedlock.core import endings, grants, keeper
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.identity import LocalHolder
from django_fencedlock.core.manager import Service
from django_fencedlock.exceptions import BackendUnavailable, LeaseLost, LockNotAcquired
from django_fencedlock.lease import Lease
from tests.clocks import Clock
from tests.threads import without_threads

from .server import Fault, Network, SimulatedBackend, Tables

PROCESSES, NAMES = 3, ("a", "b")
TTL = 30.0
#: Two clocks of floats never agree to the last bit.
EPSILON = 1e-6


class Step(NamedTuple):
    act: str
    process: int = 0
    name: int = 0
    seconds: float = 0.0
    faults: tuple[Fault, ...] = ()


#: A third of a ttl is when the keeper comes, and beyond a ttl others may.
SECONDS = (0.0, 1.0, 9.0, 11.0, 16.0, 31.0)
ACTS = {"wait": 4, "acquire": 6, "tick": 6, "write": 4, "release": 3, "renew": 2, "late": 3}
ACTS |= dict.fromkeys(("verify", "crash", "evict", "force"), 1)
_DRAWN = tuple(act for act, weight in ACTS.items() for _ in range(weight))
_FAULTS = (*[Fault.NONE] * 4, *Fault)


def drawn(source: random.Random, length: int = 30) -> list[Step]:
    pick = source.choice
    return [
        Step(
            pick(_DRAWN),
            source.randrange(PROCESSES),
            source.randrange(len(NAMES)),
            pick(SECONDS),
            tuple(pick(_FAULTS) for _ in range(source.randrange(3))),
        )
        for _ in range(length)
    ]


class Broken(AssertionError):
    """A promise was broken; the steps tell how."""


class Process:
    """One process: its lock service, and the leases that its code has."""

    def __init__(self, world: World) -> None:
        self.who = LocalHolder()
        config = conf.config("default")
        backend = SimulatedBackend(config, world.clock, world.tables, world.network)
        self.service = Service("default", backend, world.clock)
        without_threads(self.service.keeper)
        self.leases: dict[str, Lease] = {}


class World:
    """Runs one schedule, and looks after each step whether every promise is kept."""

    def __init__(self, seen: Counter[str]) -> None:
        self.clock = Clock()
        self.tables = Tables(self.clock)
        self.network = Network(self.clock, seen)
        self.seen = seen
        self.processes = [Process(self) for _ in range(PROCESSES)]
        self.trace: list[str] = []
        #: Of each name: the tokens that were handed out, and who was the last to have it.
        self.tokens: dict[str, list[int]] = {name: [] for name in NAMES}
        self.last: dict[str, str] = {}
        #: Of each name: the fence of the protected row.
        self.row: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.dead: list[Lease] = []
        self.forced: set[str] = set()
        self.shortened: set[str] = set()

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.take(step)
        self.end()

    def take(self, step: Step) -> None:
        self.trace.append(f"{self.clock.now - 1000:g} s: {step}")
        self.network.faults = list(step.faults)
        self.network.delay = step.seconds
        rival = self.processes[(step.process + 1) % PROCESSES]
        self.network.meanwhile = lambda: self._do("acquire", rival, step)
        self._do(step.act, self.processes[step.process], step)
        self.look()

    def _do(self, act: str, process: Process, step: Step) -> None:
        try:
            getattr(self, f"_{act}")(process, step)
        except (BackendUnavailable, LockNotAcquired):
            self.seen["errors"] += 1
        except LeaseLost:
            self.seen["lost"] += 1

    # What may happen

    def _wait(self, process: Process, step: Step) -> None:
        self.clock.now += step.seconds

    def _acquire(self, process: Process, step: Step) -> None:
        name = NAMES[step.name]
        had = process.leases.get(name)
        wait = Wait(step.seconds, now=self.clock, since=self.clock())
        lease = process.service.acquire(new_claim(name, TTL), wait, process.who)
        if lease is None:
            self.seen["refused"] += 1
            return
        process.leases[name] = lease
        if lease is had:
            self.seen["entered again"] += 1
            return
        if any(token >= lease.token for token in self.tokens[name]):
            raise self.broken(f"token {lease.token} of {name} came after {self.tokens[name]}")
        self.tokens[name].append(lease.token)
        if self.last.get(name, lease.owner_id) != lease.owner_id:
            self.seen["takeovers"] += 1
        self.last[name] = lease.owner_id
        if lease.expired:
            raise self.broken(f"{lease} was handed out after its end")

    def _release(self, process: Process, step: Step) -> None:
        if lease := process.leases.get(NAMES[step.name]):
            try:
                process.service.release([lease], process.who)
            finally:
                if not lease.is_open():
                    del process.leases[lease.name]

    def _renew(self, process: Process, step: Step) -> None:
        lease = process.leases.get(NAMES[step.name])
        if lease is not None and lease.is_open():
            lease.renew(ttl=step.seconds or None)

    def _verify(self, process: Process, step: Step) -> None:
        if lease := process.leases.get(NAMES[step.name]):
            lease.verify()

    def _tick(self, process: Process, step: Step) -> None:
        process.service.keeper.tick()
        process.service.keeper.tend()

    def _write(self, process: Process, step: Step) -> None:
        """A fenced save: the condition is that the grant is the newest, as in `fences.pins`."""
        lease = process.leases.get(NAMES[step.name])
        if lease is None:
            return
        if self.tables.fences.get(lease.name) != (lease.token, lease.owner_id):
            self.seen["stale"] += 1
            if lease.owner_id not in self.forced and self._has_it(lease):
                raise self.broken(f"{lease} has the lock, and its write was refused")
            return
        if lease.token < self.row[lease.name]:
            raise self.broken(f"{lease} wrote over token {self.row[lease.name]}")
        self.row[lease.name] = lease.token
        self.seen["written"] += 1

    def _late(self, process: Process, step: Step) -> None:
        """What was given up comes all the same; in no order."""
        if under_way := self.network.under_way:
            before = dict(self.tables.rows)
            under_way.pop(step.name % len(under_way))()
            self.seen["late"] += 1
            for name, (owner, until) in before.items():
                if self.tables.rows.get(name, ("", 0.0))[1] < until:
                    # Asked for a shorter ttl long ago. Nobody can know of that; the next beat of
                    # the keeper mends it.
                    self.shortened.add(owner)

    def _crash(self, process: Process, step: Step) -> None:
        self.dead += process.leases.values()
        self.processes[step.process] = Process(self)
        self.seen["crashes"] += 1

    def _evict(self, process: Process, step: Step) -> None:
        if self.dead:
            lease = self.dead.pop()
            if process.service.backend.release(Grant(lease.name, lease.owner_id)):
                self.seen["evicted"] += 1

    def _force(self, process: Process, step: Step) -> None:
        """A person takes the lock from its holder: the fence is lifted, then the lock freed."""
        name = NAMES[step.name]
        if owner := self.tables.holder(name):
            self.forced.add(owner)
            self.tables.lift(name)
            self.tables.clear(name, owner)
            self.seen["forced"] += 1

    # What has to be so

    def look(self) -> None:
        for process in self.processes:
            for lease in process.leases.values():
                self._look_at(process, lease)

    def _look_at(self, process: Process, lease: Lease) -> None:
        if lease.lost or lease.released:
            if lease in process.service.keeper._due:
                raise self.broken(f"{lease} is kept")
            return
        if lease.owner_id in self.forced | self.shortened or lease.expired:
            return
        if not self._has_it(lease):
            raise self.broken(f"{lease} is good, and the lock is another's")
        _, until = self.tables.rows[lease.name]
        if until < lease.deadline - EPSILON:
            raise self.broken(f"{lease} is good for longer than the lock is")

    def _has_it(self, lease: Lease) -> bool:
        return self.tables.holder(lease.name) == lease.owner_id

    def end(self) -> None:
        """Whatever happened: when all is over, anybody gets any lock, and has a token above all."""
        self.network.faults = []
        while self.network.under_way:
            self.network.under_way.pop()()
        for process in self.processes:
            for lease in list(process.leases.values()):
                while lease.is_open():
                    process.service.release([lease], process.who)
            process.leases.clear()
            if process.who.leases or process.service.keeper._due:
                raise self.broken("something is left in a process that gave all back")
        self.clock.now += 2 * TTL + max(SECONDS)
        for number in range(len(NAMES)):
            self._acquire(self.processes[0], Step("acquire", 0, number))
            if NAMES[number] not in self.processes[0].leases:
                raise self.broken(f"nobody gets {NAMES[number]!r} any more")

    def broken(self, what: str) -> Broken:
        return Broken("\n".join([what, *self.trace]))


@contextlib.contextmanager
def simulated_time() -> Iterator[Any]:
    now = SimpleNamespace(clock=None)

    def read() -> float:
        return now.clock()

    def call(function: Callable[..., object], *args: object, **kwargs: object) -> None:
        function(*args, **kwargs)

    def sleep(seconds: float) -> None:
        now.clock.now += seconds

    with (
        patch.object(grants, "time", SimpleNamespace(sleep=sleep)),
        # Nobody releases a lock by force, and there is no database to ask.
        patch.object(endings, "told", lambda using, owners: {}),
        patch.object(keeper, "notify", call),
        patch.dict(Lease.__init__.__kwdefaults__, {"clock": read}),
    ):
        yield now


def run(steps: Sequence[Step], now: Any, seen: Counter[str]) -> None:
    world = World(seen)
    now.clock = world.clock
    world.run(steps)
