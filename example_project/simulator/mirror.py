"""
The state of the clients, the lock and the counter, as their messages report it.

Each message becomes events for the page. Times are of the system's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import readings

NAMES = ("A", "B", "C", "D")


@dataclass
class Seen:
    """The known state of one client."""

    name: str
    #: off, starting, idle, asking, waiting, holding
    state: str = "off"
    #: Its process was started and has ended.
    ended: bool = False
    #: It has a command that it hasn't answered yet.
    busy: bool = False
    token: int | None = None
    deadline: float = 0.0
    ran_out: bool = False
    #: It has noticed that it lost the lock.
    lost: bool = False
    #: The value of the counter in its memory.
    value: int | None = None
    paused: bool = False
    cut: bool = False
    #: It will write as soon as it continues.
    about_to_write: bool = False

    @property
    def believes(self) -> bool:
        """Whether it considers itself the holder."""
        return self.state == "holding" and not self.lost

    def forget_lease(self) -> None:
        self.token, self.value = None, None
        self.ran_out = self.lost = False


Event = dict[str, Any]


class Mirror:
    """The state of one run."""

    def __init__(self, ends_sessions: str = "", ends_with_process: bool = False) -> None:
        #: See `backends.Backend`.
        self.ends_sessions, self.ends_with_process = ends_sessions, ends_with_process
        self.clients = {name: Seen(name) for name in NAMES}
        self.newest: int | None = None
        self.holders: dict[int, str] = {}
        #: The token of the current holder, as the service reports it.
        self.service: int | None = None
        self._service_since = 0.0
        self.value = 0
        self._written_at = 0.0
        self.highest: int | None = None
        self.accepted = 0
        self.rejected = 0

    @property
    def lost_updates(self) -> int:
        return self.accepted - self.value

    def believers(self, but: Seen | None = None) -> list[Seen]:
        """Return the clients that consider themselves the holder."""
        return [each for each in self.clients.values() if each.believes and each is not but]

    def hear(self, name: str, told: dict[str, Any]) -> list[Event]:
        """Process a message of a client."""
        handler = getattr(self, f"_{told['event']}", None)
        if handler is None:
            return []
        return list(handler(self.clients[name], told))

    def is_live(self) -> bool:
        """Whether the page must follow the clock: a client holds, requests, or is paused."""
        return self.service is not None or any(
            each.believes or each.paused or each.busy or each.state in ("starting", "waiting")
            for each in self.clients.values()
        )

    def verdict(self, at: float) -> list[Event]:
        """Return the final result."""
        tone = "error" if self.lost_updates else "success"
        text = readings.verdict(self)
        return [{"at": at, "who": None, "kind": "verdict", "text": text, "tone": tone}]

    # Messages of clients

    def _ready(self, client: Seen, told: Event) -> Iterator[Event]:
        client.state, client.busy = "idle", False
        yield _event(client, told)

    def _waits(self, client: Seen, told: Event) -> Iterator[Event]:
        client.state = "waiting"
        yield _event(client, told, text=readings.waits(self, client))

    def _acquired(self, client: Seen, told: Event) -> Iterator[Event]:
        waited = client.state == "waiting"
        token = told["token"]
        client.state, client.busy = "holding", False
        client.token, client.value = token, told["value"]
        client.deadline = told["at"] + told["left"]
        client.ran_out = client.lost = False
        self.holders[token] = client.name
        self.newest = max(token, self.newest or 0)
        yield from self._service_is(token, told["at"])
        text = readings.acquired(self, client, waited)
        yield _event(client, told, text=text, token=token, value=told["value"])

    def _renewed(self, client: Seen, told: Event) -> Iterator[Event]:
        if client.token != told["token"]:
            return
        client.deadline = told["at"] + told["left"]
        revived, client.ran_out = client.ran_out, False
        text = ""
        if revived:
            text = readings.revived(client)
            yield from self._service_is(client.token, told["at"])
        yield _event(client, told, text=text, token=client.token)

    def _lost(self, client: Seen, told: Event) -> Iterator[Event]:
        if client.token != told["token"]:
            return
        client.lost = True
        yield _event(
            client,
            told,
            text=readings.lost(self, client),
            token=client.token,
            message=told["message"],
            tone="warning",
        )

    def _wrote(self, client: Seen, told: Event) -> Iterator[Event]:
        token, before = told["token"], self.value
        text = readings.wrote(self, client, told)
        stale, overwrote = token < (self.newest or 0), told["seen"] != before
        client.busy = client.about_to_write = False
        client.value = self.value = told["value"]
        self._written_at = told["at"]
        self.accepted += 1
        self.highest = max(token, self.highest or 0)
        tone = "error" if overwrote else "warning" if stale else "success"
        yield _event(
            client,
            told,
            text=text,
            tone=tone,
            token=token,
            value=told["value"],
            before=before,
            stale=stale,
            overwrote=overwrote,
        )

    def _refused(self, client: Seen, told: Event) -> Iterator[Event]:
        client.busy = client.about_to_write = False
        self.rejected += 1
        yield _event(
            client,
            told,
            text=readings.refused(self, client),
            tone="refused",
            token=told["token"],
            value=told["value"],
            message=told["message"],
        )

    def _released(self, client: Seen, told: Event) -> Iterator[Event]:
        yield from self._let_go(client, told, readings.released(client))
        if self.service == told["token"]:
            yield from self._service_is(None, told["at"])

    def _dropped(self, client: Seen, told: Event) -> Iterator[Event]:
        text = readings.dropped(client, told["message"])
        yield from self._let_go(client, told, text, message=told["message"])

    def _let_go(self, client: Seen, told: Event, text: str, **facts: Any) -> Iterator[Event]:
        # An acquire first drops a lost lease, as a part of the same command.
        client.busy = client.state == "asking"
        if not client.busy:
            client.state = "idle"
        client.forget_lease()
        yield _event(client, told, text=text, token=told["token"], **facts)

    def _gave_up(self, client: Seen, told: Event) -> Iterator[Event]:
        client.state, client.busy = "idle", False
        yield _event(client, told, text=f"{client.name} gives up waiting.")

    def _failed(self, client: Seen, told: Event) -> Iterator[Event]:
        client.busy = client.about_to_write = False
        if told["doing"] == "acquire":
            client.state = "idle"
        text = readings.failed(client, told["doing"])
        yield _event(client, told, text=text, tone="warning", message=told["message"])

    # Messages of the referee

    def overdue(self, now: float) -> bool:
        """Whether to ask the service now: a lease may have expired."""
        return any(
            each.state == "holding" and not each.ran_out and not each.lost and each.deadline < now
            for each in self.clients.values()
        )

    def looked(self, told: Event) -> list[Event]:
        """Process the state of the lock service and the row."""
        if "message" in told:
            return []
        events = [event for each in self.clients.values() for event in self._run_out(each, told)]
        if told["since"] > self._service_since and told["token"] != self.service:
            events += self._noticed(told)
        if told["since"] > self._written_at and told["value"] is not None:
            self.value = told["value"]
        return events

    def _run_out(self, client: Seen, told: Event) -> Iterator[Event]:
        at = told["since"]
        if client.state != "holding" or client.ran_out or client.lost or client.deadline >= at:
            return
        if told["token"] == client.token and (told["left"] or 0) > 0:
            # Renewed, and paused before it could report that.
            client.deadline = at + told["left"]
            yield _event(client, told, kind="renewed", token=client.token)
            return
        client.ran_out = True
        text = readings.ran_out(client, self.ends_sessions)
        yield _event(client, told, kind="ran_out", text=text, token=client.token, tone="warning")

    def _noticed(self, told: Event) -> Iterator[Event]:
        before, token = self.service, told["token"]
        dead = before is not None and self.clients[self.holders[before]].token != before
        yield from self._service_is(token, told["since"])
        if token is None and dead and before is not None:
            who = self.holders[before]
            yield {
                "at": told["since"],
                "who": who,
                "kind": "freed",
                "token": before,
                "text": readings.freed(who, self.ends_with_process),
            }

    def _service_is(self, token: int | None, at: float) -> Iterator[Event]:
        self._service_since = at
        if token != self.service:
            self.service = token
            yield {"at": at, "who": None, "kind": "service", "token": token}

    # Commands to clients

    def starting(self, name: str, at: float) -> list[Event]:
        self.clients[name].state = "starting"
        return [{"at": at, "who": name, "kind": "starting"}]

    def ended(self, name: str, at: float) -> list[Event]:
        """Record that a process has ended."""
        client = self.clients[name]
        text = readings.killed(client)
        token = client.token
        self.clients[name] = Seen(name, ended=True)
        return [{"at": at, "who": name, "kind": "ended", "text": text, "token": token}]

    def paused(self, name: str, at: float) -> list[Event]:
        client = self.clients[name]
        client.paused = True
        return [{"at": at, "who": name, "kind": "paused", "text": readings.paused(client)}]

    def woke(self, name: str, at: float) -> list[Event]:
        client = self.clients[name]
        client.paused = False
        return [{"at": at, "who": name, "kind": "woke", "text": readings.woke(client)}]

    def cut(self, name: str, at: float) -> list[Event]:
        client = self.clients[name]
        client.cut = True
        return [{"at": at, "who": name, "kind": "cut", "text": readings.cut(client)}]

    def mended(self, name: str, at: float) -> list[Event]:
        client = self.clients[name]
        client.cut = False
        return [{"at": at, "who": name, "kind": "mended", "text": readings.mended(client)}]

    def emptied(self, at: float) -> list[Event]:
        return [
            {"at": at, "who": None, "kind": "emptied", "text": readings.EMPTIED, "tone": "warning"},
            *self._service_is(None, at),
        ]


def _event(client: Seen, told: Event, kind: str = "", **facts: Any) -> Event:
    return {"at": told["at"], "who": client.name, "kind": kind or told["event"], **facts}
