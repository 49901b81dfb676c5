"""
Every order of steps by which grants get their tokens, for services with and without a number.

Wanted: grants are recorded in the order in which the service gave the lock. If an older grant is
recorded after a newer one, the present holder's writes are rejected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: What `core.grants` does: it reads the fence, asks the service, and records by the pair it read.
OURS = "ours"
#: The same with one rule left out.
WEAK = ("reads after it asked", "does not ask", "compares the token alone")


class Fence(NamedTuple):
    token: int = 0
    #: The number of the grant in the service's order; 0 after a raise.
    grant: int = 0


class Client(NamedTuple):
    step: str = "idle"
    #: The number of its grant in the service's order, and the service's own number.
    grant: int = 0
    number: int = 0
    seen: Fence = Fence()


class State(NamedTuple):
    clients: tuple[Client, ...]
    #: Which client the service has as the holder; -1 for none.
    holder: int
    #: The grants so far, and the service's next number, which a service that lost its data repeats.
    grants: int
    next_number: int
    fence: Fence
    #: What a crash of the database leaves of the fence.
    durable: Fence
    raises: int
    losses: int
    crashes: int


@dataclass(frozen=True)
class Model:
    rule: str = OURS
    #: Whether the service proposes a number.
    has_number: bool = False
    clients: int = 2
    max_grants: int = 4
    #: How often the fence may be raised, the service lose its data, and the database crash.
    raises: int = 0
    losses: int = 0
    crashes: int = 0

    def search(self) -> tuple[int, list[str]]:
        """Return the number of states, and the shortest way to record an older grant last."""
        start = State(
            (Client(),) * self.clients,
            *(-1, 0, 1, Fence(), Fence()),
            *(self.raises, self.losses, self.crashes),
        )
        before: dict[State, tuple[State, str] | None] = {start: None}
        todo = deque([start])
        while todo:
            state = todo.popleft()
            for words, after in self.steps(state):
                if after not in before:
                    before[after] = state, words
                    todo.append(after)
                # A crash takes the fence back as well, but records nothing.
                is_older = 0 < after.fence.grant < state.fence.grant
                if is_older and not words.endswith("crashes"):
                    return len(before), [*_way(before, state), words]
        return len(before), []

    def steps(self, now: State) -> Iterator[tuple[str, State]]:
        if now.holder >= 0:
            yield f"the lock of {now.holder} expires", now._replace(holder=-1)
        if now.raises:
            fence = Fence(now.fence.token + 1)
            yield (
                "the fence is raised",
                now._replace(fence=fence, durable=fence, raises=now.raises - 1),
            )
        if now.losses and now.grants:
            yield (
                "the service loses its data",
                now._replace(holder=-1, next_number=1, losses=now.losses - 1),
            )
        if now.crashes and now.fence != now.durable:
            yield "the database crashes", now._replace(fence=now.durable, crashes=now.crashes - 1)
        if self.crashes and now.fence != now.durable:
            yield "the fence is on disk", now._replace(durable=now.fence)
        for who in range(self.clients):
            yield from self._steps_of(who, now)

    def _steps_of(self, who: int, now: State) -> Iterator[tuple[str, State]]:
        me = now.clients[who]

        def go(words: str, client: Client, **changes: object) -> tuple[str, State]:
            clients = (*now.clients[:who], client, *now.clients[who + 1 :])
            return f"{who} {words}", now._replace(clients=clients, **changes)

        def record(token: int) -> tuple[str, State]:
            held = me._replace(step="held")
            # A raise is durable at once; a grant need not be.
            changes = {"fence": Fence(token, me.grant)}
            if not self.crashes:
                changes["durable"] = changes["fence"]
            return go(f"records {token}", held, **changes)

        match me.step:
            case "idle":
                if now.holder < 0 and now.grants < self.max_grants:
                    step = "has a number" if self.has_number else self._first
                    client = Client(step, now.grants + 1, now.next_number)
                    yield go(
                        f"gets grant {now.grants + 1}",
                        client,
                        holder=who,
                        grants=now.grants + 1,
                        next_number=now.next_number + 1,
                    )
            case "has a number":
                if now.fence.token < me.number:
                    yield record(me.number)
                else:
                    yield go(f"is refused {me.number}", me._replace(step=self._first))
            case "reads":
                step = {"does not ask": "records", "reads after it asked": "records"}
                found = me._replace(step=step.get(self.rule, "asks"), seen=now.fence)
                yield go(f"reads {now.fence.token}", found)
            case "asks":
                step = "reads" if self.rule == "reads after it asked" else "records"
                holds = now.holder == who
                yield go(f"asks: {holds}", me._replace(step=step) if holds else Client())
            case "records":
                same = me.seen == now.fence
                if self.rule == "compares the token alone":
                    same = now.fence.token < me.seen.token + 1
                yield (
                    record(me.seen.token + 1)
                    if same
                    else go("is refused", me._replace(step=self._first))
                )
            case "held":
                # By owner id: a grant that expired releases no other one.
                yield go("releases", Client(), holder=-1 if now.holder == who else now.holder)

    @property
    def _first(self) -> str:
        return "asks" if self.rule == "reads after it asked" else "reads"


def _way(before: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    words: list[str] = []
    while found := before[state]:
        state, step = found
        words.append(step)
    return words[::-1]
