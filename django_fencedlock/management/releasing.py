"""``manage.py fencedlock release``: what it says, and what it asks before it does it."""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from ..exceptions import FencedLockError
from ..ops.force_release import HeldBy, Release, end_of_session, force_release, held_by
from ..storage.text import escape_control


class Refused(Exception):
    """It is not to be done, or nobody is there to say so."""


def find(name: str, aliases: Sequence[str]) -> tuple[HeldBy | None, dict[str, str]]:
    """Who has a lock, and which aliases couldn't be asked; raises `LookupError` if several do."""
    found: list[HeldBy] = []
    unanswered: dict[str, str] = {}
    for alias in aliases:
        try:
            each = held_by(name, alias)
        except FencedLockError as exc:
            unanswered[alias] = str(exc)
            continue
        if each is not None:
            found.append(each)
    if len(found) > 1:
        by = ", ".join(f"{each.holder} ({each.alias!r})" for each in found)
        raise LookupError(f"Lock {name!r} is held through several aliases: {by}. Name one: --alias")
    return (found[0] if found else None), unanswered


def about(found: HeldBy) -> Iterator[str]:
    """What will happen, for people."""
    over = ", whose lease is over" if found.expired else ""
    where = f"alias {found.alias!r}, {found.backend}"
    yield f"Lock {found.name!r} ({where}) is held by {found.holder}{over}."
    if found.owner:
        yield f"Its owner is {found.owner}."
    if found.fenced:
        yield "The fence is lifted first: nothing that he writes under it is accepted any more."
    else:
        yield "It isn't fenced: nothing that he writes will be refused."
    if found.holder.session_pid is None:
        yield "Then it is free for the next one, and he is told when he next renews it."
        return
    if found.owner:
        yield "Then his process gives it back when it next renews it."
    else:
        yield "It isn't in the registry: only the end of its session frees it."
    yield end_of_session(found.holder).strip()


def confirm(found: HeldBy, say: Callable[[str], object], stdin: TextIO | None = None) -> None:
    """Tell what will happen, and ask; raises `Refused`."""
    stdin = stdin or sys.stdin
    for line in about(found):
        say(escape_control(line))
    if not stdin.isatty():
        raise Refused("There is no terminal to ask at, so nothing was done. Say it with --yes")
    say("Release it by force? [y/N]")
    if stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("Nothing was done.")


def release(found: HeldBy, by: str, owner: str | None) -> Release:
    """Do it, to the holder that was seen or named, and to no other."""
    return force_release(found.name, by=by, backend=found.alias, owner=owner or found.owner)


def current_holder() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container, a number without a name.
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def plain(release: Release) -> dict[str, Any]:
    """What was done, for scripts."""
    return {
        "name": release.name,
        "alias": release.alias,
        "outcome": release.outcome.value,
        "done": release.done,
        "token": release.token,
        "holder": None if release.holder is None else asdict(release.holder),
        "message": str(release),
    }
