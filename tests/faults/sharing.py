"""
Every order of steps by which readers and writers of one lock are recorded in its fence.

Wanted: once a holder was granted and recorded, no former holder that it excludes can commit any
more, though it was paused for that long; nor can one whose lock was released by force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: What `core.grants` does: a reader reads the fence, asks the service, and raises the fence by the
#: pair it read, unless readers were recorded last. Both check the deadline after they recorded.
OURS = "ours"
#: The same with one rule left out.
WEAK = (
    "does not raise",
    "reads after it asked",
    "does not check the deadline",
    "asks once",
    "raises once",
)

#: Owners in the fence. Those of writers are the numbers of their grants.
SHARED, NONE = -1, 0


class Fence(NamedTuple):
    token: int = 0
    owner: int = NONE


class Client(NamedTuple):
    step: str = "idle"
    #: The number of its grant in the service's order.
    grant: int = 0
    #: The fence that it read; once it holds, the one that its transactions require.
    seen: Fence = Fence()
    #: Whether the ttl is over, on its own clock too.
    expired: bool = False
    #: Whether its lock was released by force, and that has ended.
    forced: bool = False


class Forcing(NamedTuple):
    """A forced release: read the fence, ask for the holders, raise, release, raise again."""

    step: str = "idle"
    #: The clients whose lock it releases, with their grants; and those that are left.
    targets: tuple[tuple[int, int], ...] = ()
    left: tuple[tuple[int, int], ...] = ()
    last: Fence = Fence()


class State(NamedTuple):
    clients: tuple[Client, ...]
    #: The clients that hold the lock, for the service.
    held: frozenset[int] = frozenset()
    grants: int = 0
    fence: Fence = Fence()
    #: The newest grant of a writer, and of a reader, that was recorded in time.
    writer: int = 0
    reader: int = 0
    forcing: Forcing = Forcing()
    forces: int = 0
    losses: int = 0


@dataclass(frozen=True)
class Model:
    rule: str = OURS
    writers: int = 1
    readers: int = 1
    max_grants: int = 3
    #: How often a lock is released by force, and how often the service loses its data.
    forces: int = 0
    losses: int = 0

    def search(self) -> tuple[int, list[str]]:
        """Return the number of states, and the shortest way to a stale commit."""
        clients = (Client(),) * (self.writers + self.readers)
        start = State(clients, forces=self.forces, losses=self.losses)
        before: dict[State, tuple[State, str] | None] = {start: None}
        todo = deque([start])
        while todo:
            state = todo.popleft()
            if stale := self._stale(state):
                return len(before), [*_way(before, state), stale]
            for words, after in self.steps(state):
                if after not in before:
                    before[after] = state, words
                    todo.append(after)
        return len(before), []

    def is_writer(self, who: int) -> bool:
        return who < self.writers

    def _stale(self, now: State) -> str:
        for who, client in enumerate(now.clients):
            if client.step != "holds" or not self._may_commit(now, client):
                continue
            # Readers don't exclude each other.
            newest = max(now.writer, now.reader) if self.is_writer(who) else now.writer
            if client.forced or newest > client.grant:
                return f"{self._name(who)} commits"
        return ""

    def _may_commit(self, now: State, client: Client) -> bool:
        if self.rule == "does not raise" and client.seen.owner == SHARED:
            return now.fence.token == client.seen.token
        return now.fence == client.seen

    def _name(self, who: int) -> str:
        return f"writer {who}" if self.is_writer(who) else f"reader {who - self.writers}"

    def steps(self, now: State) -> Iterator[tuple[str, State]]:
        for who in sorted(now.held):
            client = now.clients[who]._replace(expired=True)
            after = self._with(now, who, client)
            yield f"the lock of {self._name(who)} expires", after._replace(held=now.held - {who})
        if now.losses and now.held:
            yield (
                "the service loses its data",
                now._replace(held=frozenset(), losses=now.losses - 1),
            )
        for who in range(len(now.clients)):
            for words, after in self._steps_of(who, now):
                yield f"{self._name(who)} {words}", after
        yield from self._force(now)

    def _with(self, now: State, who: int, client: Client) -> State:
        return now._replace(clients=(*now.clients[:who], client, *now.clients[who + 1 :]))

    def _steps_of(self, who: int, now: State) -> Iterator[tuple[str, State]]:
        me, is_writer = now.clients[who], self.is_writer(who)
        asks_first = self.rule == "reads after it asked" and not is_writer

        def go(words: str, client: Client, **changes: object) -> tuple[str, State]:
            return words, self._with(now, who, client)._replace(**changes)

        match me.step:
            case "idle":
                is_free = not now.held or (not is_writer and not any(map(self.is_writer, now.held)))
                if is_free and now.grants < self.max_grants:
                    number = now.grants + 1
                    client = Client("asks" if asks_first else "reads", number)
                    yield go(f"gets grant {number}", client, held=now.held | {who}, grants=number)
            case "reads":
                step = "records" if asks_first else "asks"
                yield go(f"reads {now.fence}", me._replace(step=step, seen=now.fence))
            case "asks":
                step = "reads" if asks_first else "records"
                holds = who in now.held
                yield go(f"asks: {holds}", me._replace(step=step) if holds else Client())
            case "records":
                yield self._record(go, now, me, me.grant if is_writer else SHARED)
            case "recorded":
                if me.expired and self.rule != "does not check the deadline":
                    yield go("is too late", Client(), held=now.held - {who})
                    return
                newest = {"writer": me.grant} if is_writer else {"reader": me.grant}
                newest = {key: max(number, getattr(now, key)) for key, number in newest.items()}
                yield go("holds", me._replace(step="holds"), **newest)
            case "holds":
                yield go("releases", Client(), held=now.held - {who})

    def _record(self, go, now: State, me: Client, owner: int) -> tuple[str, State]:  # type: ignore[no-untyped-def]
        if now.fence != me.seen:
            return go("is refused", me._replace(step="reads"))
        if owner == SHARED and me.seen.owner == SHARED:
            return go("finds readers", me._replace(step="recorded"))
        if owner == SHARED and self.rule == "does not raise":
            seen = Fence(me.seen.token, SHARED)
            return go("does not raise", me._replace(step="recorded", seen=seen))
        fence = Fence(me.seen.token + 1, owner)
        return go(f"records {fence}", me._replace(step="recorded", seen=fence), fence=fence)

    def _force(self, now: State) -> Iterator[tuple[str, State]]:
        it = now.forcing

        def go(words: str, forcing: Forcing, **changes: object) -> tuple[str, State]:
            return f"the forced release {words}", now._replace(forcing=forcing, **changes)

        match it.step:
            case "idle":
                if now.forces:
                    it = Forcing("asks", last=now.fence)
                    yield go(f"reads {now.fence}", it, forces=now.forces - 1)
            case "asks":
                found = tuple((who, now.clients[who].grant) for who in sorted(now.held))
                for targets in {found, *((each,) for each in found)} - {()}:
                    names = " and ".join(self._name(who) for who, _ in targets)
                    yield go(f"finds {names}", it._replace(step="raises", targets=targets))
                if not found:
                    yield go("finds none", Forcing())
            case "raises":
                fence = self._raised(now, it)
                if now.fence == fence != it.last and self.rule != "asks once":
                    # Another holder was recorded since the fence was read.
                    yield go(f"starts again from {fence}", Forcing("asks", last=fence))
                    return
                it = it._replace(step="releases", left=it.targets, last=Fence(fence.token))
                yield go(f"raises: {fence}", it, fence=fence)
            case "releases":
                (who, grant), *left = it.left
                held = now.held - {who} if now.clients[who].grant == grant else now.held
                step = "releases" if left else "raises again"
                it = it._replace(step=step, left=tuple(left))
                yield go(f"releases {self._name(who)}", it, held=held)
            case "raises again":
                fence = now.fence if self.rule == "raises once" else self._raised(now, it)
                clients = tuple(
                    each._replace(forced=True) if (who, each.grant) in it.targets else each
                    for who, each in enumerate(now.clients)
                )
                yield go(f"raises again: {fence}", Forcing(), fence=fence, clients=clients)

    def _raised(self, now: State, it: Forcing) -> Fence:
        who, grant = it.targets[0]
        owner = grant if self.is_writer(who) else SHARED
        is_below = now.fence.owner == owner or now.fence == it.last
        return Fence(now.fence.token + 1) if is_below else now.fence


def _way(before: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    words: list[str] = []
    while found := before[state]:
        state, step = found
        words.append(step)
    return words[::-1]
