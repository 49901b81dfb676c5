"""What an examination finds: how bad it is, what it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

#: Seconds by which two clocks may differ without a word.
CLOCKS = 2.0


class Level(IntEnum):
    """How bad a finding is."""

    #: Works, or was measured.
    OK = 0
    #: Works as it was built to, which not everybody expects.
    NOTE = 1
    #: Works, and should be seen to.
    WARNING = 2
    #: Doesn't work, or doesn't protect.
    ERROR = 3

    @property
    def exit_code(self) -> int:
        """What a command ends with whose worst finding this is."""
        return max(0, self - Level.NOTE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found."""

    level: Level
    what: str
    remedy: str = ""


def ok(what: str) -> Finding:
    return Finding(Level.OK, what)


def note(what: str, remedy: str = "") -> Finding:
    return Finding(Level.NOTE, what, remedy)


def warning(what: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, what, remedy)


def error(what: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, what, remedy)


def of_clock(ahead: float, what: str = "") -> Finding:
    """What is to be said of a clock that is so many seconds ahead of ours."""
    what += f"its clock differs by {abs(ahead):.1f} s"
    if abs(ahead) <= CLOCKS:
        return ok(what)
    return warning(
        f"{what} ({'ahead' if ahead > 0 else 'behind'})",
        "Locks are right all the same, since leases go by one clock each; times in logs and lists "
        "can't be compared. Keep both by NTP.",
    )
