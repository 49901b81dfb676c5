"""Text for a terminal: aligned tables and durations, with or without colour."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from itertools import zip_longest

from ..storage.text import escape_control

#: Makes a text coloured.
Paint = Callable[[str], str]


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    paint: Callable[[int, str], Paint | None] = lambda column, text: None,
) -> list[str]:
    """Align columns; `paint` gives the colour of a cell by its column and its text."""
    # A lock name may hold anything: nothing of it may move the cursor or colour the terminal.
    head, *rows = [[escape_control(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(_width, column)) for column in zip_longest(head, *rows, fillvalue="")]

    def line(cells: Sequence[str]) -> str:
        padded = []
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            colour = paint(place, cell)
            # Padded by what is seen: codes of colour have no width.
            gap = " " * (width - _width(cell))
            padded.append((colour(cell) if colour else cell) + gap)
        return "  ".join(padded).rstrip()

    return [line(head), *map(line, rows)]


def _width(text: str) -> int:
    """The cells of a terminal that a text takes."""
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1
        for each in text
    )


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if hours < 1:
        return f"{minutes} min {int(seconds % 60)} s"
    if days < 1:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"
