"""The scenarios: steps in order, and what each step waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """
    One step: a command to a client, or a wait.

    Args:
        does: ``acquire``, ``queue`` (acquire, and wait in the queue), ``write``, ``release``,
            ``pause``, ``wake``, ``cut``, ``mend``, ``kill``, ``empty``; or a wait: ``run_out``,
            ``gets`` (the lock), ``kept`` (renewed once).
        who: The client; ``?`` is the current holder.
        caption: The description on the page.
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
    #: An expired lease is renewed.
    needs_renewal: bool = False


def _acquires(who: str) -> Step:
    return Step("acquire", who, f"{who} acquires the lock and reads the counter")


def _writes(who: str, again: bool = False) -> Step:
    return Step("write", who, f"{who} writes again" if again else f"{who} writes")


def _releases(who: str) -> Step:
    return Step("release", who, f"{who} releases the lock")


def _pauses(who: str) -> Step:
    return Step("pause", who, f"{who} is paused before it writes, as in a long GC")


def _expires(who: str) -> Step:
    return Step("run_out", who, f"{who}'s lease isn't renewed and expires")


def _continues(who: str) -> Step:
    return Step("wake", who, f"{who} continues, and writes")


SCENARIOS: dict[str, Scenario] = {
    "pause": Scenario(
        "A pauses, B takes over, A writes anyway",
        "Why a lease is not a lock: its holder can be paused past its expiry without noticing.",
        (
            _acquires("A"),
            _pauses("A"),
            _expires("A"),
            _acquires("B"),
            _writes("B"),
            _writes("B", again=True),
            _releases("B"),
            _continues("A"),
            Step("acquire", "A", "A acquires the lock again, and reads the counter again"),
            _writes("A"),
            _releases("A"),
        ),
    ),
    "unfenced": Scenario(
        "The same without fencing: a lost update",
        "With the lock alone, the late write is accepted without any error.",
        (
            _acquires("A"),
            _pauses("A"),
            _expires("A"),
            _acquires("B"),
            _writes("B"),
            _writes("B", again=True),
            _releases("B"),
            _continues("A"),
            Step("acquire", "C", "C acquires the lock, and uses the wrong value"),
            _writes("C"),
            _releases("C"),
        ),
        fencing="off",
    ),
    "high-water": Scenario(
        "High water: a late write before the new holder's first",
        "The row's own fence only rises with writes. Until B has written, A's old token is "
        "accepted. Serialised fencing compares with the newest grant instead.",
        (
            _acquires("A"),
            _pauses("A"),
            _expires("A"),
            _acquires("B"),
            _continues("A"),
            _writes("B"),
            _releases("B"),
        ),
        fencing="high_water",
    ),
    "unharmed": Scenario(
        "A pauses, and no client takes over",
        "A pause does no harm unless another client acquired the lock: the token is still the "
        "newest.",
        (
            _acquires("A"),
            _pauses("A"),
            _expires("A"),
            _continues("A"),
            Step("kept", "A", "A's lease is renewed"),
            _releases("A"),
        ),
        needs_renewal=True,
    ),
    "cut": Scenario(
        "A is cut off from the lock service",
        "A can reach the database, but not the lock service: it can't renew its lease.",
        (
            _acquires("A"),
            Step("cut", "A", "The network between A and the lock service fails"),
            _expires("A"),
            _acquires("B"),
            _writes("B"),
            Step("write", "A", "A writes anyway"),
            _releases("B"),
            Step("mend", "A", "The network works again"),
            Step("acquire", "A", "A acquires the lock again, and reads the counter again"),
            _writes("A"),
            _releases("A"),
        ),
        backend="redis",
        needs_network=True,
    ),
    "queue": Scenario(
        "Four clients want one lock",
        "One client has it, three wait. With a database row, Redlock and DynamoDB, the first "
        "client that polls acquires it; the other services are first come, first served.",
        (
            _acquires("A"),
            Step("queue", "B", "B requests it too, and waits"),
            Step("queue", "C", "C waits"),
            Step("queue", "D", "D waits"),
            _writes("A"),
            _releases("A"),
            Step("gets", "?", "A waiting client acquires the lock"),
            Step("write", "?", "It writes"),
            Step("release", "?", "It releases the lock"),
            Step("gets", "?", "The next one acquires it"),
            Step("write", "?", "It writes"),
            Step("release", "?", "It releases the lock"),
            Step("gets", "?", "The last one acquires it"),
            Step("write", "?", "It writes"),
            Step("release", "?", "It releases the lock"),
        ),
    ),
    "killed": Scenario(
        "A is killed",
        "A dead holder doesn't release its lock. A waiter on the same machine notices that its "
        "process has ended; on another machine, B would have to wait until the lease expires. A "
        "session of PostgreSQL or MySQL ends with its process.",
        (
            _acquires("A"),
            _writes("A"),
            Step("queue", "B", "B requests the lock too, and waits"),
            Step("kill", "A", "A is killed (SIGKILL) while it has the lock"),
            Step("gets", "B", "B acquires the lock"),
            _writes("B"),
            _releases("B"),
        ),
    ),
    "emptied": Scenario(
        "Redis loses its data",
        "An emptied Redis has lost the holder and the last token. Tokens still rise, because the "
        "database has the newest grant.",
        (
            _acquires("A"),
            _pauses("A"),
            Step("empty", "A", "Redis is emptied: the lock and the counter of tokens are gone"),
            Step("acquire", "B", "B acquires the lock, which is free according to Redis"),
            _writes("B"),
            _releases("B"),
            _continues("A"),
        ),
        backend="redis",
        needs_emptying=True,
    ),
    "free": Scenario(
        "No script: play yourself",
        "Control the clients yourself, in any order.",
    ),
}
