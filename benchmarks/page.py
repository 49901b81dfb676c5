"""
Writes the figures of a run into docs/dev/performance.md.

Run from the top of the checkout: ``python -m benchmarks.page FIGURES``, with the file that
``python -m benchmarks --json FIGURES`` kept. What stands between ``<!-- figures: locks -->`` and
``<!-- end -->`` is replaced by the tables of that part, and the plot is drawn anew.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import tables
from benchmarks.plot import draw
from benchmarks.report import Figure

DOCS = Path(__file__).resolve().parent.parent / "docs/dev"
PAGE, PLOT = DOCS / "performance.md", DOCS / "handoff.svg"
#: A block says which part it tells of; if it is of its curves, perhaps of which measure.
BLOCK = re.compile(r"(<!-- figures: ([^>]*?) -->\n).*?(<!-- end -->)", re.S)


def filled(page: str, machine: Sequence[str], parts: Mapping[str, Sequence[Figure]]) -> str:
    """The page, with the figures of a run in its blocks."""

    def fill(block: re.Match[str]) -> str:
        return f"{block[1]}{_text(block[2], machine, parts)}{block[3]}"

    return BLOCK.sub(fill, page)


def _text(told: str, machine: Sequence[str], parts: Mapping[str, Sequence[Figure]]) -> str:
    if told == "machine":
        return "".join(f"* {line}\n" for line in machine)
    part, what, measure = [*told.split(maxsplit=2), "", ""][:3]
    figures = parts[part]
    if what == "curves":
        lines = tables.curves(each for each in figures if measure in ("", each.measure))
    elif what == "aims":
        lines = tables.aims(figures)
    else:
        lines = tables.compared(figures)
    return "\n" + "\n".join(lines) + "\n\n"


def main(path: Path) -> None:
    told = json.loads(path.read_text())
    parts = {part: [Figure(**each) for each in found] for part, found in told["parts"].items()}
    PAGE.write_text(filled(PAGE.read_text(), told["machine"], parts))
    PLOT.write_text(draw(parts["handoff"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
