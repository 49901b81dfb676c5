"""The scripted scenarios: what happens in which order, and what each step waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """
    One step: a command to a client, or a wait.

    Args:
        does: ``acquire``, ``queue`` (acquire, and stand in line), ``write``, ``release``,
            ``pause``, ``wake``, ``cut``, ``mend``, ``kill``, ``empty``; or a wait: ``run_out``,
            ``gets`` (the lock), ``kept`` (renewed once).
        who: Which client; ``?`` for whoever has the lock.
        caption: What it does, for people.
    """

    does: str
    who: str
    caption: str


@dataclass(frozen=True)
class Scenario:
    title: str
    about: str
    steps: Sequence[Step] = ()
    fencing: str = "serialised"
    backend: str = "database"
    needs_network: bool = False
    needs_emptying: bool = False


def _takes(who: str) -> Step:
    return Step("acquire", who, f"{who} takes the lock and reads the counter")


def _writes(who: str, again: bool = False) -> Step:
    return Step("write", who, f"{who} writes once more" if again else f"{who} writes")


def _gives_back(who: str) -> Step:
    return Step("release", who, f"{who} gives the lock back")


def _stops(who: str) -> Step:
    return Step("pause", who, f"{who} stands still before it writes, as in a long GC")


def _runs_out(who: str) -> Step:
    return Step("run_out", who, f"Nobody renews {who}'s lease: it runs out")


def _wakes_writing(who: str) -> Step:
    return Step("wake", who, f"{who} wakes, and writes what it was about to write")


SCENARIOS: dict[str, Scenario] = {
    "pause": Scenario(
        "A pauses, B takes over, A writes anyway",
        "Why a lease is not a lock: its holder can stand still past its end, and not know it.",
        (
            _takes("A"),
            _stops("A"),
            _runs_out("A"),
            _takes("B"),
            _writes("B"),
            _writes("B", again=True),
            _gives_back("B"),
            _wakes_writing("A"),
            Step("acquire", "A", "A takes the lock anew, and reads the counter anew"),
            _writes("A"),
            _gives_back("A"),
        ),
    ),
    "unfenced": Scenario(
        "The same without fencing: a lost update",
        "With the lock alone, what the late writer writes is accepted, and nobody hears of it.",
        (
            _takes("A"),
            _stops("A"),
            _runs_out("A"),
            _takes("B"),
            _writes("B"),
            _writes("B", again=True),
            _gives_back("B"),
            _wakes_writing("A"),
            Step("acquire", "C", "C takes the lock, and trusts what it reads"),
            _writes("C"),
            _gives_back("C"),
        ),
        fencing="off",
    ),
    "high-water": Scenario(
        "High water: a late write before the new holder's first",
        "The row's own fence rises with the writes alone. Until B has written, A's old token "
        "passes. Serialised fencing compares with the newest grant instead.",
        (
            _takes("A"),
            _stops("A"),
            _runs_out("A"),
            _takes("B"),
            _wakes_writing("A"),
            _writes("B"),
            _gives_back("B"),
        ),
        fencing="high_water",
    ),
    "unharmed": Scenario(
        "A pauses, and nobody comes",
        "A pause costs nothing unless somebody else took the lock meanwhile: the token is still "
        "the newest.",
        (
            _takes("A"),
            _stops("A"),
            _runs_out("A"),
            _wakes_writing("A"),
            Step("kept", "A", "A's lease is renewed"),
            _gives_back("A"),
        ),
    ),
    "cut": Scenario(
        "A is cut off from the lock service",
        "A runs, and reaches the database, but not the lock service: it can't renew its lease.",
        (
            _takes("A"),
            Step("cut", "A", "The network between A and the lock service goes dead"),
            _runs_out("A"),
            _takes("B"),
            _writes("B"),
            Step("write", "A", "A writes anyway"),
            _gives_back("B"),
            Step("mend", "A", "The network is mended"),
            Step("acquire", "A", "A takes the lock anew, and reads the counter anew"),
            _writes("A"),
            _gives_back("A"),
        ),
        backend="redis",
        needs_network=True,
    ),
    "queue": Scenario(
        "Four clients want one lock",
        "One has it, three wait. Redis and PostgreSQL serve first who came first; of a database "
        "row, whoever looks first gets it.",
        (
            _takes("A"),
            Step("queue", "B", "B wants it too, and waits"),
            Step("queue", "C", "C waits"),
            Step("queue", "D", "D waits"),
            _writes("A"),
            _gives_back("A"),
            Step("gets", "?", "One of those who wait gets the lock"),
            Step("write", "?", "It writes"),
            Step("release", "?", "It gives the lock back"),
            Step("gets", "?", "The next one gets it"),
            Step("write", "?", "It writes"),
            Step("release", "?", "It gives the lock back"),
            Step("gets", "?", "The last one gets it"),
            Step("write", "?", "It writes"),
            Step("release", "?", "It gives the lock back"),
        ),
    ),
    "killed": Scenario(
        "A is killed",
        "A dead holder gives nothing back. Whoever waits on the same machine sees that its "
        "process is gone; from elsewhere B would have to wait for the end of the lease. A session "
        "of PostgreSQL ends with its process.",
        (
            _takes("A"),
            _writes("A"),
            Step("queue", "B", "B wants the lock too, and waits"),
            Step("kill", "A", "A is killed (SIGKILL), lock in hand"),
            Step("gets", "B", "B gets the lock"),
            _writes("B"),
            _gives_back("B"),
        ),
    ),
    "emptied": Scenario(
        "Redis forgets everything",
        "An emptied Redis knows neither the holder nor the last token. The tokens rise all the "
        "same, for the newest grant is recorded in the database.",
        (
            _takes("A"),
            _stops("A"),
            Step("empty", "A", "Redis is emptied: the lock and the counter of tokens are gone"),
            Step("acquire", "B", "B asks for the lock, which Redis now takes for free"),
            _writes("B"),
            _gives_back("B"),
            _wakes_writing("A"),
        ),
        backend="redis",
        needs_emptying=True,
    ),
    "free": Scenario(
        "No script: play yourself",
        "Have the clients do what you like, in any order.",
    ),
}
