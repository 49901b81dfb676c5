"""What a part of the benchmarks found: printed as it comes, and kept for the table at the end."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

#: Units that a number of commands, queries or threads is told in: the same on every machine.
COUNTED = "count"


@dataclass(frozen=True)
class Figure:
    """
    One number that was found.

    Args:
        work: What was done: ``redis, unfenced``.
        who: By whom: this package, a peer, or the bare commands.
        measure: What was measured: ``CPU``, ``commands``.
        value: The number.
        unit: ``x`` for a ratio, ``ms``, ``bytes``, `COUNTED`.
        at: Where a curve has several: the number of waiters, leases or names.
        aim: What the number should not be above.
    """

    work: str
    who: str
    measure: str
    value: float
    unit: str = "x"
    at: int | None = None
    aim: float | None = None

    @property
    def met(self) -> bool:
        return self.aim is None or self.value <= self.aim


#: Who this package is, in figures.
OURS = "django_fencedlock"


class Report:
    """The figures of one part."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path: Path | None = options.figures
        self.figures: list[Figure] = []

    def add(
        self,
        work: str,
        who: str,
        measure: str,
        value: float,
        unit: str = "x",
        *,
        at: int | None = None,
        aim: float | None = None,
    ) -> None:
        self.figures.append(Figure(work, who, measure, round(value, 4), unit, at, aim))
        if self._path is not None:
            # At once: a part that is cut short has told what it knows.
            self._path.write_text(json.dumps([asdict(figure) for figure in self.figures]))


def read(path: Path) -> list[Figure]:
    return [Figure(**each) for each in json.loads(path.read_text())]


def options(described: str | None) -> argparse.ArgumentParser:
    """The arguments that every part has."""
    parser = argparse.ArgumentParser(description=described)
    parser.add_argument(
        "--short", action="store_true", help="a few rounds of everything, for its counts alone"
    )
    parser.add_argument("--figures", type=Path, help="a file to write what was found, as JSON")
    return parser


def told(value: float, unit: str) -> str:
    """A number as people read it."""
    if unit == COUNTED:
        return f"{value:,.2f}".rstrip("0").rstrip(".")
    if not value:
        return f"0 {unit}"
    if unit == "x":
        return f"{value:.2f}x"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:,.{digits}f} {unit}"
