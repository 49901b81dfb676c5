"""Findings of the system checks, as the doctor tells them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..conf import Problem
from ..findings import Finding, Level


def of_problems(problems: Iterable[Problem]) -> Iterator[Finding]:
    for problem in problems:
        yield Finding(_LEVELS[problem.id[0]], f"{problem.id}: {problem.message}", problem.hint)


_LEVELS = {"E": Level.ERROR, "W": Level.WARNING, "I": Level.NOTE}
