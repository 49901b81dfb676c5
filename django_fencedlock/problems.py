"""What checks report: system checks, `check --database`, and the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """The severity of a problem; docs/reference/operations.md explains each."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


_LEVELS = {"": Level.OK, "I": Level.NOTE, "W": Level.WARNING, "E": Level.ERROR}


@dataclass(frozen=True, slots=True)
class Problem:
    """
    One result of a check.

    The first letter of the id is the severity: ``E``, ``W`` or ``I``; an empty id means OK. A
    system check has a number as well (``E001``), since a project may silence it.
    """

    id: str
    message: str
    hint: str = ""

    @property
    def level(self) -> Level:
        return _LEVELS[self.id[:1]]

    @property
    def is_error(self) -> bool:
        return self.level is Level.ERROR

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


def ok(message: str) -> Problem:
    return Problem("", message)


def note(message: str, hint: str = "") -> Problem:
    return Problem("I", message, hint)


def warning(message: str, hint: str) -> Problem:
    return Problem("W", message, hint)


def error(message: str, hint: str) -> Problem:
    return Problem("E", message, hint)


#: Seconds by which two clocks may differ.
CLOCK_TOLERANCE = 2.0


def clock_problem(ahead: float, prefix: str = "") -> Problem:
    """Return the result of comparing a server's clock, which is `ahead` seconds ahead of ours."""
    what = f"{prefix}its clock differs by {abs(ahead):.1f} s"
    if abs(ahead) <= CLOCK_TOLERANCE:
        return ok(what)
    return warning(
        f"{what} ({'ahead' if ahead > 0 else 'behind'})",
        "Locks still work, since each lease uses one clock. Times in logs and lists can't "
        "be compared. Synchronise both clocks with NTP.",
    )
