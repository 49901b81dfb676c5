"""
Every order in which the steps of coalescing runs can be taken, with deaths between any two.

The steps are the package's own, on the real tables; the lock is a row of the registry. A search
goes through all states that can be reached, and takes each of them back by a savepoint.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

from celery import Celery
from celery.app.task import Context
from django.db import connection, transaction

from django_fencedlock import conf
from django_fencedlock.celery import coalesce, single_instance
from django_fencedlock.celery.coalesce import Coalescing, unpack
from django_fencedlock.celery.duplicates import NUMBER, SERVE
from django_fencedlock.celery.names import single_of
from django_fencedlock.celery.worker import Maintenance
from django_fencedlock.models import HeldLock, PendingRun
from django_fencedlock.storage.message_records import Message

NAME = "rebuild"

app = Celery("interleavings", broker="memory://", set_as_current=False)


@app.task(name="interleavings.rebuild", shared=False)
@single_instance(NAME, on_conflict="coalesce", ttl=5)
def rebuild(version: int) -> None:
    raise AssertionError("never called here")


#: The steps of a run, in their order. The body is between "won" and "ended".
ORDER = ("before", "acquire", "lost", "won", "ended", "release", "released")


@dataclass(frozen=True)
class Actor:
    """A run of the task: a trigger with arguments of its own, or a message that serves."""

    label: str
    owner: str
    version: int
    serves: int = 0
    retries: int = 0
    retried: int = 0
    nonce: str = ""
    step: str = "before"
    #: Attributes of its Coalescing.
    claimed: Any = None
    is_counted: bool | None = None
    #: Triggers that it covers once it has ended.
    covers: frozenset[str] = frozenset()

    def key(self) -> Any:
        claimed = self.claimed and self.claimed.number
        place = (self.label, self.version, self.serves > 0, self.retried, self.step, self.covers)
        return *place, claimed, self.is_counted


@dataclass(frozen=True)
class World:
    actors: tuple[Actor, ...]
    #: Messages on their way.
    queue: tuple[Actor, ...] = ()
    #: Owners that died with the lock.
    dead: frozenset[str] = frozenset()
    kills: int = 0
    #: Triggers that were counted, and that no run has covered that ended.
    owed: frozenset[str] = frozenset()
    #: Messages whose trigger was counted, ever.
    counted: frozenset[str] = frozenset()
    latest: int = 0
    #: Whether a trigger was counted since a run last took on.
    fresh: bool = True
    ended: int = 0
    surplus: int = 0
    killed: bool = False
    trace: tuple[str, ...] = field(default=(), compare=False)


class Broken(AssertionError):
    """A promise was broken; the trace tells how."""


class Explorer:
    """
    Goes through all the orders of `triggers` runs that begin at once.

    Args:
        kills: How many of them may die, each before any of its steps.
        late: Whether a message is delivered again when its run has died.
        retry: Whether the first run ends by a retry.
        most: Go through so many states at the most, in an order drawn by `seed`.
        order: The steps; another order than the package's shows what the order is good for.
    """

    def __init__(
        self,
        triggers: int,
        kills: int = 0,
        late: bool = False,
        order: tuple[str, ...] = ORDER,
        retry: bool = False,
        most: int | None = None,
        seed: int = 0,
    ) -> None:
        self._most, self._random = most, random.Random(seed)
        self.order, self.late, self.retry = order, late, retry
        self.states = self.ends = self.most_surplus = 0
        self._seen: set[Any] = set()
        self._start = World(
            tuple(
                Actor(f"t{number}", _owner(), number, nonce=f"n{number}" if late else "")
                for number in range(1, triggers + 1)
            ),
            kills=kills,
        )
        self._maintenance = Maintenance(app)

    def explore(self) -> None:
        self._go(self._start)

    def _go(self, world: World) -> None:
        key = self._key(world)
        if key in self._seen or (self._most is not None and self.states >= self._most):
            return
        self._seen.add(key)
        self.states += 1
        moves = list(self._moves(world))
        if self._most is not None:
            self._random.shuffle(moves)
        if not moves:
            self._finish(world)
            return
        for move in moves:
            with transaction.atomic():
                self._go(move(world))
                transaction.set_rollback(True)

    def _moves(self, world: World) -> Iterator[Callable[[World], World]]:
        waits = False
        for place, actor in enumerate(world.actors):
            untouched = actor in self._start.actors
            if untouched and waits and not self.retry:
                # Those that did nothing yet are all alike.
                continue
            waits = waits or untouched
            yield lambda world, place=place: self._step(world, place)
            if world.kills and (actor.step != "before" or actor.serves):
                yield lambda world, place=place: self._kill(world, place)
        for place in range(len(world.queue)):
            yield lambda world, place=place: self._deliver(world, place)
        if world.dead:
            yield self._free

    def _step(self, world: World, place: int) -> World:
        actor = world.actors[place]
        run, steps = self._run(actor, world)
        before = actor.step
        world, actor = getattr(self, f"_{before}")(world, actor, run, steps)
        actor = replace(actor, claimed=steps._claimed, is_counted=steps._is_counted)
        kept = () if actor.step == "over" else (actor,)
        actors = (*world.actors[:place], *kept, *world.actors[place + 1 :])
        return replace(world, actors=actors, trace=(*world.trace, f"{actor.label}.{before}"))

    def _run(self, actor: Actor, world: World) -> tuple[Any, Coalescing]:
        headers = {SERVE: actor.serves} if actor.serves else {}
        if actor.retried:
            headers = {NUMBER: actor.retried}
        message = None
        if actor.nonce and not actor.serves:
            message = Message(actor.nonce, NAME, actor.owner, "id", 1000.0)
        told = {"headers": headers, "retries": actor.retries, "called_directly": False}
        run: Any = SimpleNamespace(
            task=rebuild,
            name=NAME,
            title=rebuild.name,
            policy=single_of(rebuild).policy,
            service=SimpleNamespace(config=conf.config()),
            owner=SimpleNamespace(id=actor.owner),
            leases=(),
            ttl=5,
            args=(actor.version,),
            kwargs={},
            is_called_directly=False,
            request=Context(id=actor.label, args=[actor.version], kwargs={}, **told),
        )
        delivery: Any = None
        if message is not None:
            delivery = SimpleNamespace(message=message, judge=lambda begun: None)
        steps = Coalescing(run, delivery)
        if actor.is_counted is not None:
            steps._claimed, steps._is_counted = actor.claimed, actor.is_counted
        return run, steps

    def _before(self, world: World, actor: Actor, run: Any, steps: Coalescing) -> Any:
        return world, self._next(actor, "before") if steps.before() is None else _over(actor)

    def _acquire(self, world: World, actor: Actor, run: Any, steps: Coalescing) -> Any:
        if HeldLock.objects.exists():
            return world, replace(actor, step="lost")
        now = datetime.now(UTC)
        times = dict.fromkeys(("acquired_at", "renewed_at"), now)
        times["expires_at"] = now + timedelta(hours=1)
        facts = {"name": NAME, "owner": actor.owner, "fenced": True, "pid": 0, "pid_started": 0}
        HeldLock.objects.create(**facts, **times)
        return world, replace(actor, step="won")

    def _lost(self, world: World, actor: Actor, run: Any, steps: Coalescing) -> Any:
        wanted = _wanted()
        why = steps.refused()
        if _wanted() > wanted:
            world = _counted(world, actor)
        return world, _over(actor) if why else replace(actor, step="acquire")

    def _won(self, world: World, actor: Actor, run: Any, steps: Coalescing) -> Any:
        wanted = _wanted()
        why, latest = steps.begin()
        if _wanted() > wanted:
            world = _counted(world, actor)
        if why is not None:
            return world, replace(actor, step=self._from("release"))
        version = latest[0][0] if latest else actor.version
        if version != world.latest:
            raise Broken(f"ran with {version} and not {world.latest}: {world.trace}")
        if any(other.step == "ended" for other in world.actors):
            raise Broken(f"two bodies at once: {world.trace}")
        surplus = 0 if world.fresh else 1
        world = replace(world, fresh=False, surplus=world.surplus + surplus)
        return world, replace(self._next(actor, "won"), covers=world.owed, version=version)

    def _ended(self, world: World, actor: Actor, run: Any, steps: Coalescing) -> Any:
        if self.retry and actor.label == "t1" and not actor.retries:
            again = replace(self._start.actors[0], owner=_owner(), nonce="n1r" if self.late else "")
            again = replace(again, retries=1, retried=actor.claimed.number, version=actor.version)
            world = replace(world, queue=(*world.queue, again))
        steps.ended("success")
        world = replace(world, owed=world.owed - actor.covers, ended=world.ended + 1)
        return world, self._next(actor, "ended")

    def _release(self, world: World, actor: Actor, run: Any, steps: Coalescing) -> Any:
        HeldLock.objects.filter(owner=actor.owner).delete()
        return world, self._next(actor, "release")

    def _released(self, world: World, actor: Actor, run: Any, steps: Coalescing) -> Any:
        sent: list[Any] = []
        with mock.patch.object(coalesce, "serve", lambda app, pending: sent.append(pending)):
            steps.released()
        served = tuple(_served(pending) for pending in sent)
        return replace(world, queue=(*world.queue, *served)), self._next(actor, "released")

    def _next(self, actor: Actor, step: str) -> Actor:
        place = self.order.index(step) + 1
        return _over(actor) if place == len(self.order) else replace(actor, step=self.order[place])

    def _from(self, step: str) -> str:
        """The first of the steps after the body that a run takes which has nothing to run."""
        after = self.order[self.order.index("ended") + 1 :]
        return after[0] if after else step

    # What else may happen

    def _kill(self, world: World, place: int) -> World:
        actor = world.actors[place]
        dead = world.dead
        if HeldLock.objects.filter(owner=actor.owner).exists():
            dead |= {actor.owner}
        queue = world.queue
        if self.late:
            value = int(actor.nonce[1]) if actor.nonce else actor.version
            again = Actor(actor.label, _owner(), value, actor.serves, actor.retries, actor.retried)
            fresh = replace(again, nonce=actor.nonce)
            queue = (*queue, fresh)
        return replace(
            world,
            actors=world.actors[:place] + world.actors[place + 1 :],
            queue=queue,
            dead=dead,
            kills=world.kills - 1,
            killed=True,
            trace=(*world.trace, f"KILL {actor.label}.{actor.step}"),
        )

    def _free(self, world: World) -> World:
        HeldLock.objects.filter(owner__in=world.dead).delete()
        return replace(world, dead=frozenset(), trace=(*world.trace, "FREE"))

    def _deliver(self, world: World, place: int) -> World:
        actor = world.queue[place]
        return replace(
            world,
            actors=(*world.actors, actor),
            queue=world.queue[:place] + world.queue[place + 1 :],
            trace=(*world.trace, f"DELIVER {actor.label}"),
        )

    def _finish(self, world: World) -> None:
        self.ends += 1
        if not world.killed:
            self.most_surplus = max(self.most_surplus, world.surplus)
            if world.owed:
                raise Broken(f"{set(world.owed)} wait for a rescue: {world.trace}")
        for _ in range(10):
            world = self._rescued(world)
            if not world.queue:
                break
            while world.queue or world.actors:
                move = next(iter(self._moves(replace(world, kills=0))))
                world = move(world)
        row = PendingRun.objects.first()
        if world.owed or (row is not None and row.wanted > row.done):
            raise Broken(f"{set(world.owed)} are lost: {world.trace}")

    def _rescued(self, world: World) -> World:
        PendingRun.objects.update(due_at=datetime.now(UTC) - timedelta(hours=1))
        sent: list[Any] = []
        note = lambda app, pending, **options: not sent.append(pending)  # noqa: E731
        with mock.patch.object(coalesce, "serve", note):
            self._maintenance.look()
        served = tuple(_served(pending) for pending in sent)
        return replace(world, queue=(*world.queue, *served), trace=(*world.trace, "RESCUE"))

    def _key(self, world: World) -> Any:
        labels = {each.owner: each.label for each in (*world.actors, *world.queue)}
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT wanted, started, done, body, tries, owner FROM django_fencedlock_pendingrun"
            )
            pending_runs = [(*row, labels.get(owner)) for *row, owner in cursor.fetchall()]
            cursor.execute("SELECT owner FROM django_fencedlock_heldlock")
            held = [labels.get(owner) for (owner,) in cursor.fetchall()]
            cursor.execute(
                "SELECT nonce, outcome, owner FROM django_fencedlock_messagerecord ORDER BY nonce"
            )
            nonces = [(*row, labels.get(owner)) for *row, owner in cursor.fetchall()]
        return (
            tuple(sorted((each.key() for each in world.actors), key=repr)),
            tuple(sorted((each.key() for each in world.queue), key=repr)),
            *(bool(world.dead), world.kills, world.killed, world.owed, world.counted),
            *(world.latest, world.fresh, world.surplus),
            repr((pending_runs, held, nonces)),
        )


def _owner() -> str:
    return uuid.uuid4().hex


def _over(actor: Actor) -> Actor:
    return replace(actor, step="over")


def _wanted() -> int:
    row = PendingRun.objects.first()
    return row.wanted if row else 0


def _counted(world: World, actor: Actor) -> World:
    mark = actor.label + ("r" if actor.retries else "")
    if mark in world.counted:
        raise Broken(f"{mark} was counted twice: {world.trace}")
    return replace(
        world,
        owed=world.owed | {mark},
        counted=world.counted | {mark},
        # A retry has the arguments of the run that it retries: any newer trigger's are later.
        latest=world.latest if actor.retries else actor.version,
        fresh=True,
    )


def _served(pending: Any) -> Actor:
    args, _ = unpack(pending.message)
    json.loads(pending.message.options)
    return Actor(f"s{pending.number}", _owner(), args[0], serves=pending.number)
