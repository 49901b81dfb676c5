"""What is done to clients: faults of processes. Those of servers are in ``server_faults``."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checker import held_by
from .history import NEMESIS, OK, History, Recorder, now, read_operations
from .sites import SITES, Site

#: A site of which little may be expected has faults of its own.
EVERYWHERE = tuple(name for name in SITES if name != "forgetful")
#: Of locks; each has clients of its own in `kinds`.
KINDS = ("exclusive", "permits", "shared")
#: Sites whose lock services have readers.
WITH_READERS = (
    "sqlite",
    "rows",
    "postgres",
    "pgbouncer",
    "redis",
    "valkey",
    "forgetful",
    "mariadb",
)


@dataclass(frozen=True)
class Fault:
    """
    Something that goes wrong, again and again.

    Args:
        name: As it is called on the command line.
        inject: Has it happen once, and returns when it is over.
        sites: Where it can happen.
        needs: How much has to have happened, or the run shows nothing: least counts by name.
        forgets: The lock service may lose its memory, or be out of reach.
        far: Which of the clients reach the servers through proxies: "none", "some" or "all".
        habits: Of the clients: how often they starve their threads, or fork.
        ways: In which clients write, and how often each; None for all of them.
        environments: Of the processes; clients are spread over them.
        missing: Tells what is missing on this machine; None if nothing is.
        tolerates: Promises that this breaks by its nature.
        celery: Has the clients be tasks: ``celery``, ``task`` and ``on_lost`` of them.
    """

    name: str
    inject: "Callable[[Lab], None]"
    sites: tuple[str, ...] = EVERYWHERE
    needs: Mapping[str, int] = field(
        default_factory=lambda: {"injections": 2, "takeovers": 1, "refusals": 1}
    )
    forgets: bool = False
    far: str = "none"
    habits: Mapping[str, float] = field(default_factory=dict)
    ways: Mapping[str, int] | None = None
    environments: "Callable[[Path], list[dict[str, str]]]" = lambda directory: [{}]
    missing: Callable[[], str | None] = lambda: None
    celery: Mapping[str, Any] | None = None
    tolerates: frozenset[str] = frozenset()


def is_possible(site: str, fault: Fault, kind: str) -> bool:
    """Return whether clients with this kind of locks can be at work there. Tasks are exclusive."""
    if kind == "exclusive":
        return True
    return fault.celery is None and (kind == "permits" or site in WITH_READERS)


class Lab:
    def __init__(
        self, site: Site, crew: Any, directory: Path, ttl: float, chance: random.Random
    ) -> None:
        self.site: Any = site
        self.crew = crew
        self.ttl = ttl
        self.random = chance
        self.injections: list[dict[str, Any]] = []
        self._directory = directory
        self._notes = Recorder(directory, NEMESIS)

    def note(self, what: str, **facts: Any) -> None:
        self.injections.append({"what": what, "at": now(), **facts})
        self._notes.write(what=what, **facts)

    def sleep(self, least: float, most: float) -> None:
        """Wait for so many times the ttl."""
        time.sleep(self.random.uniform(least, most) * self.ttl)

    def anybody(self) -> str:
        self.crew.fill()
        holders = self.holders() if self.random.random() < 0.9 else []
        return self.random.choice(holders or list(self.crew.pids))

    def await_holder(self, is_meant: Callable[[str], bool] = bool) -> str | None:
        for _ in range(40):
            if found := [name for name in self.holders() if is_meant(name)]:
                return self.random.choice(found)
            time.sleep(0.05)
        return None

    def await_successor(self, who: str) -> None:
        history = self._history()
        had = {name: _newest(history, name, who) for name in held_by(history, who, now())}
        end = time.monotonic() + 3 * self.ttl
        while had and time.monotonic() < end:
            time.sleep(0.02)
            history = self._history()
            if any(_newest(history, name) > token for name, token in had.items()):
                return

    def holders(self) -> list[str]:
        history, at = self._history(), now()
        return [name for name in self.crew.pids if held_by(history, name, at)]

    def _history(self) -> History:
        return History(read_operations(self._directory))


def _newest(history: History, name: str, client: str | None = None) -> int:
    return max(
        (
            each.token or 0
            for each in history.of("acquire", OK)
            if each.name == name and client in (None, each.client)
        ),
        default=0,
    )


def pause(lab: Lab) -> None:
    who = lab.anybody()
    with lab.crew.paused(who):
        lab.note("pause", client=who)
        if lab.random.random() < 0.6:
            # It continues exactly when it may not write any more.
            lab.await_successor(who)
        else:
            lab.sleep(0.7, 2.5)


def pause_many(lab: Lab) -> None:
    lab.crew.fill()
    who = lab.random.sample(list(lab.crew.pids), max(1, len(lab.crew.pids) - 1))
    with lab.crew.paused(*who):
        lab.note("pause", client=",".join(who))
        lab.sleep(1.2, 2)


def kill(lab: Lab) -> None:
    who = lab.anybody()
    lab.note("kill", client=who)
    lab.crew.kill(who)
    lab.sleep(0.2, 1)


def watch(lab: Lab) -> None:
    """Do nothing: the clients' own behaviour is the fault."""
    lab.note("watch")
    lab.sleep(0.5, 1)


#: Elsewhere no client starves long enough: their leases outlive the ttl by as much again.
STARVED = tuple(name for name in EVERYWHERE if name not in ("consul", "dynamodb"))
#: What runs in transactions that stay open while their holder stands still.
OPEN = {"held": 1, "atomic": 1}

PROCESS_FAULTS = (
    Fault("pause", pause),
    Fault("pause-many", pause_many),
    Fault("open-transaction", pause, needs={"injections": 3}, ways=OPEN),
    Fault("kill", kill, needs={"injections": 3, "takeovers": 1}),
    Fault("starve", watch, STARVED, habits={"starve": 0.12}),
    Fault("fork", watch, habits={"fork": 0.4}, needs={"inherits": 3}),
)
