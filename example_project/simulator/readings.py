"""Sentences that describe events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mirror import Mirror, Seen

EMPTIED = "Redis is emptied: it has lost the lock and the counter of tokens."


#: The weight of an event among several at the same time.
_WEIGHTS = {"verdict": 9, "error": 5, "refused": 4, "acquired": 3, "success": 2, "warning": 1}
#: Seconds within which events count as simultaneous. A command of the user starts again.
AT_ONCE = 0.5
_DONE_BY_HAND = ("paused", "woke", "cut", "mended", "emptied")


def latest(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the most important of the latest events."""
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
    """Return the final result."""
    accepted = _count(mirror.accepted, "write was", "writes were")
    end = f"In the end {accepted} accepted and the counter is {mirror.value}"
    if mirror.lost_updates:
        lost = _count(mirror.lost_updates, "update is", "updates are")
        return f"{end}: wrong. {lost.capitalize()} lost, without any error."
    if mirror.rejected:
        return f"{end}: right. The stale write was rejected, and its client got an error."
    return f"{end}: right."


def _count(number: int, one: str, many: str) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return f"{words[number] if number < len(words) else number} {one if number == 1 else many}"


def waits(mirror: Mirror, client: Seen) -> str:
    holder = mirror.holders.get(mirror.service or 0)
    return f"{client.name} waits: {holder or 'another client'} has the lock."


def acquired(mirror: Mirror, client: Seen, waited: bool) -> str:
    read = f"The counter reads {client.value}."
    others = mirror.believers(but=client)
    if others:
        other = others[0]
        return (
            f"{client.name} has the lock, with token {client.token}, while {other.name} still "
            f"considers itself the holder, with token {other.token}. {read}"
        )
    how = "was next: it has" if waited else "has"
    return f"{client.name} {how} the lock, with token {client.token}. {read}"


def revived(client: Seen) -> str:
    return (
        f"{client.name} renews its lease after it had expired: no other client acquired the lock, "
        f"so token {client.token} is still the newest."
    )


def lost(mirror: Mirror, client: Seen) -> str:
    if mirror.newest is not None and client.token is not None and mirror.newest > client.token:
        newer = mirror.holders[mirror.newest]
        return (
            f"{client.name} notices that it has lost the lock: {newer} acquired it with "
            f"token {mirror.newest}."
        )
    return (
        f"{client.name} can't renew its lease, and loses it by its own clock. Code that doesn't "
        "check the lease continues."
    )


def wrote(mirror: Mirror, client: Seen, told: dict[str, Any]) -> str:
    """Describe a write before it is recorded."""
    token, value, before = told["token"], told["value"], mirror.value
    newest = mirror.newest or token
    overwrote, stale = told["seen"] != before, token < newest
    if stale and overwrote:
        return (
            f"{client.name}'s write with token {token} is accepted after {mirror.holders[newest]} "
            f"wrote with token {newest}: no write checks the token. The counter changes from "
            f"{before} to {value}, and the writes since {client.name} read it are lost."
        )
    if stale:
        return (
            f"{client.name}'s write with token {token} is accepted, although token {newest} was "
            f"granted: {mirror.holders[newest]} has already read {before}, but has not written yet."
        )
    if overwrote:
        return (
            f"{client.name} writes {value}, based on the {told['seen']} that it read. It is the "
            f"current holder, but the {before} written since then is lost."
        )
    return f"{client.name} writes {value} with token {token}."


def refused(mirror: Mirror, client: Seen) -> str:
    return (
        f"{client.name}'s write with token {client.token} is rejected, StaleFence: token "
        f"{mirror.newest} has been granted since. The counter stays {mirror.value}."
    )


def released(client: Seen) -> str:
    return f"{client.name} releases the lock."


def dropped(client: Seen, message: str) -> str:
    if message:
        return f"{client.name} drops its lease, but can't reach the lock service."
    return f"{client.name} drops its lost lease: LeaseLost."


def failed(client: Seen, doing: str) -> str:
    if doing == "acquire":
        return (
            f"{client.name} gets no answer from the lock service, so it doesn't get the lock: "
            "BackendUnavailable."
        )
    return f"{client.name} couldn't write: the database was unavailable."


def ran_out(client: Seen, ends_sessions: str) -> str:
    lease = f"{client.name}'s lease"
    why = " It is paused, so it can't notice." if client.paused else ""
    why = " It runs, but couldn't renew it." if client.cut and not client.paused else why
    if ends_sessions:
        return f"{lease} has expired.{why} {ends_sessions} ends its session, which frees the lock."
    return f"{lease} has expired: the lock is free.{why}"


def freed(who: str, ends_with_process: bool) -> str:
    if ends_with_process:
        return f"{who}'s session has ended with its process: the lock is free at once."
    return f"{who}'s lease has expired: the lock is free."


def killed(client: Seen) -> str:
    if client.token is not None:
        return f"{client.name} is dead, and has not released the lock."
    return f"{client.name}'s process has ended."


def paused(client: Seen) -> str:
    if client.believes:
        return f"{client.name} is paused (SIGSTOP). It can't renew its lease."
    return f"{client.name} is paused (SIGSTOP)."


def woke(client: Seen) -> str:
    if client.about_to_write:
        return f"{client.name} continues (SIGCONT), and can't know how long it was paused."
    return f"{client.name} continues (SIGCONT)."


def cut(client: Seen) -> str:
    if client.believes:
        return f"{client.name} can't reach the lock service. It can reach the counter."
    return f"{client.name} can't reach the lock service."


def mended(client: Seen) -> str:
    return f"{client.name} can reach the lock service again."
