"""``manage.py fencedlock release``: what it says, and what it asks before it does it."""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from ..exceptions import FencedLockError
from ..releasing import HeldBy, Outcome, Release, force_release, held_by
from ..texts import visible


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
    yield f"Its owner is {found.owner}."
    if found.fenced:
        yield "The fence is lifted first: nothing that he writes under it is accepted any more."
    else:
        yield "It isn't fenced: nothing that he writes will be refused."
    if found.session is None:
        yield "Then it is free for the next one, and he is told when he next renews it."
    elif found.holder.owner:
        yield "Then his process gives it back when it next renews it; with --end-session at once."
    else:
        yield "It isn't in the registry: only the end of its session frees it (--end-session)."


def about_session(found: HeldBy) -> Iterator[str]:
    """What falls with a session, for people."""
    assert found.session is not None
    yield f"With it ends {found.session.words}."
    for name, holder in found.session.others:
        yield f"  It holds {name!r} too, of {holder}."
    if found.session.unlisted:
        yield f"  It holds {found.session.unlisted} more that aren't in the registry."
    if not found.session.others and not found.session.unlisted:
        yield "  It holds no other lock."


def confirm(
    found: HeldBy, end_session: bool, say: Callable[[str], object], stdin: TextIO | None = None
) -> None:
    """Tell what will happen, and ask; raises `Refused`."""
    stdin = stdin or sys.stdin
    for line in about(found):
        say(visible(line))
    if not stdin.isatty():
        raise Refused("There is no terminal to ask at, so nothing was done. Say it with --yes")
    _ask("Release it by force?", say, stdin)
    if end_session:
        for line in about_session(found):
            say(visible(line))
        _ask("End the session, and release all of them?", say, stdin)


def _ask(question: str, say: Callable[[str], object], stdin: TextIO) -> None:
    say(f"{question} [y/N]")
    if stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("Nothing was done.")


def release(found: HeldBy, by: str, owner: str | None, end_session: bool) -> Release:
    """Do it, to the holder that was seen or named, and to no other."""
    session = found.session.id if found.session else ""
    return force_release(
        found.name,
        by=by,
        backend=found.alias,
        owner=owner or found.owner,
        end_session=end_session and (session or True),
    )


def whoami() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container, a number without a name.
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def plain(release: Release, found: HeldBy | None, end_session: bool) -> dict[str, Any]:
    """What was done, for scripts."""
    session = found.session if found and end_session else None
    return {
        "name": release.name,
        "alias": release.alias,
        "outcome": release.outcome.value,
        "done": release.done,
        "token": release.token,
        "holder": None if release.holder is None else asdict(release.holder),
        "fell_with_it": [name for name, _ in session.others]
        if session and release.outcome is Outcome.FREED
        else [],
        "message": str(release),
    }
