"""One sentence, sometimes two, on what just happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mirror import Mirror, Seen

EMPTIED = (
    "Redis is emptied: it knows neither that somebody has the lock, nor which tokens it gave out."
)


#: What counts when several things happen at once.
_WEIGHTS = {"verdict": 9, "error": 5, "refused": 4, "acquired": 3, "success": 2, "warning": 1}
#: Seconds within which things happen at once, and what somebody does, with which it starts anew.
AT_ONCE = 0.5
_DONE_BY_HAND = ("paused", "woke", "cut", "mended", "emptied")


def latest(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What tells most of the things that happened last."""
    told = [event for event in events if event.get("text")]
    if not told:
        return None
    together = [event for event in told if event["at"] > told[-1]["at"] - AT_ONCE]
    by_hand = [event["seq"] for event in together if event["kind"] in _DONE_BY_HAND]
    if by_hand:
        together = [event for event in together if event["seq"] >= by_hand[-1]]
    return max(together, key=lambda event: (_weight(event), event["seq"]))


def _weight(event: dict[str, Any]) -> int:
    return _WEIGHTS.get(event["kind"]) or _WEIGHTS.get(event.get("tone", ""), 1)


def verdict(mirror: Mirror) -> str:
    """What it comes to in the end."""
    accepted = _count(mirror.accepted, "write was", "writes were")
    end = f"In the end {accepted} accepted and the counter is {mirror.value}"
    if mirror.lost_updates:
        lost = _count(mirror.lost_updates, "update is", "updates are")
        return f"{end}: wrong. {lost.capitalize()} lost, and nobody was told."
    if mirror.rejected:
        return f"{end}: right. What came too late was refused, and its writer told."
    return f"{end}: right."


def _count(number: int, one: str, many: str) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return f"{words[number] if number < len(words) else number} {one if number == 1 else many}"


def waits(mirror: Mirror, client: Seen) -> str:
    holder = mirror.holders.get(mirror.service or 0)
    return f"{client.name} waits: {holder or 'somebody'} has the lock."


def acquired(mirror: Mirror, client: Seen, waited: bool) -> str:
    read = f"The counter reads {client.value}."
    others = mirror.believers(but=client)
    if others:
        other = others[0]
        return (
            f"{client.name} has the lock, with token {client.token}, while {other.name} still "
            f"takes itself for the holder, with token {other.token}. {read}"
        )
    how = "is next: it has" if waited else "has"
    return f"{client.name} {how} the lock, with token {client.token}. {read}"


def revived(client: Seen) -> str:
    return (
        f"{client.name} renews its lease, although it had run out: nobody else had come, so token "
        f"{client.token} is still the newest."
    )


def lost(mirror: Mirror, client: Seen) -> str:
    if mirror.newest is not None and client.token is not None and mirror.newest > client.token:
        newer = mirror.holders[mirror.newest]
        return (
            f"{client.name} learns that it has lost the lock: {newer} got it, with token "
            f"{mirror.newest}."
        )
    return (
        f"{client.name} can't renew its lease and gives it up by its own clock. Code that doesn't "
        "ask goes on all the same."
    )


def wrote(mirror: Mirror, client: Seen, told: dict[str, Any]) -> str:
    """What a write means, just before it is noted."""
    token, value, before = told["token"], told["value"], mirror.value
    newest = mirror.newest or token
    overwrote, stale = told["seen"] != before, token < newest
    if stale and overwrote:
        return (
            f"{client.name}'s write under token {token} is accepted after {mirror.holders[newest]} "
            f"wrote under token {newest}: nobody compared them. The counter goes from {before} to "
            f"{value}, and what was written since {client.name} read it is lost."
        )
    if stale:
        return (
            f"{client.name}'s write under token {token} is accepted, though token {newest} is out: "
            f"{mirror.holders[newest]} has read {before} already, and hasn't written yet."
        )
    if overwrote:
        return (
            f"{client.name} writes {value}, from the {told['seen']} that it read. It is the "
            f"rightful holder, and yet the {before} written meanwhile is lost."
        )
    return f"{client.name} writes {value}, under token {token}."


def refused(mirror: Mirror, client: Seen) -> str:
    return (
        f"{client.name}'s write under token {client.token} is refused, StaleFence: token "
        f"{mirror.newest} has been granted since. The counter stays {mirror.value}."
    )


def released(client: Seen) -> str:
    return f"{client.name} gives the lock back."


def dropped(client: Seen, message: str) -> str:
    if message:
        return f"{client.name} drops its lease; it can't tell the lock service."
    return f"{client.name} drops its lease, which it had lost: LeaseLost."


def failed(client: Seen, doing: str) -> str:
    if doing == "acquire":
        return (
            f"{client.name} gets no answer from the lock service, which is never taken for a lock: "
            "BackendUnavailable."
        )
    return f"{client.name} couldn't write: the database didn't answer."


def ran_out(client: Seen, lasts_on: bool) -> str:
    whom = f"{client.name}'s lease"
    if lasts_on:
        return (
            f"The time of {whom} is over. Its session lives, so PostgreSQL keeps the lock until "
            "somebody wants it."
        )
    why = " It stands still, and can't know." if client.paused else ""
    why = " It runs, and couldn't renew it." if client.cut and not client.paused else why
    return f"{whom} has run out: the lock is free.{why}"


def freed(who: str, lasts_on: bool) -> str:
    if lasts_on:
        return f"{who}'s session has ended with it: the lock is free at once."
    return f"The lease that {who} left behind has run out: the lock is free."


def killed(client: Seen) -> str:
    if client.token is not None:
        return f"{client.name} is dead, and has given nothing back."
    return f"{client.name}'s process has ended."


def paused(client: Seen) -> str:
    if client.believes:
        return f"{client.name} stands still (SIGSTOP). Nothing in it runs, nor renews its lease."
    return f"{client.name} stands still (SIGSTOP)."


def woke(client: Seen) -> str:
    if client.about_to_write:
        return f"{client.name} goes on (SIGCONT), and can't know how long it stood still."
    return f"{client.name} goes on (SIGCONT)."


def cut(client: Seen) -> str:
    if client.believes:
        return f"{client.name} no longer reaches the lock service. It does reach the counter."
    return f"{client.name} no longer reaches the lock service."


def mended(client: Seen) -> str:
    return f"{client.name} reaches the lock service again."
