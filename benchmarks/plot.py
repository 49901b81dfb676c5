"""
The plot of hand-offs: an SVG that can be read on light and on dark pages.

``python -m benchmarks --plot FILE`` draws what it measured, ``python -m benchmarks.plot FIGURES
FILE`` what an earlier run kept with ``--json``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks.contestants import BATON, POSTGRES, REDIS, REDIS_UNFENCED, ROWS
from benchmarks.report import Figure

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 58, 262, 54, 48
#: Room between two names at the ends of lines.
APART = 15

#: By contestant: its colour's class, and how its line is dashed. Ours are drawn last, and thick.
LINES: Mapping[str, tuple[str, str]] = {
    "redis-py's Lock": ("peer", ""),
    "python-redis-lock": ("peer", "6 3"),
    "pottery's Redlock, one server": ("peer", "2 3"),
    "portalocker's RedisLock, fencing": ("peer", "9 3 2 3"),
    "django-pglock": ("peer", "4 2 1 2"),
    "select_for_update()": ("peer", "1 2"),
    BATON: ("bare", "3 3"),
    ROWS: ("rows", ""),
    POSTGRES: ("postgres", ""),
    REDIS: ("redis", ""),
    REDIS_UNFENCED: ("redis", "7 3"),
}

# The colours stand out from white and from black alike; what is neutral follows the page.
STYLE = """
svg { color-scheme: light dark; font: 12px system-ui, sans-serif; }
text { fill: #333; } .grid { stroke: #ccc; } .axis { stroke: #555; }
path, line.key { fill: none; stroke-width: 1.5; }
.peer { stroke: #888; } .bare { stroke: #b8860b; } .rows { stroke: #8a5fd0; stroke-width: 2.5; }
.postgres { stroke: #2f7fd8; stroke-width: 2.5; } .redis { stroke: #d8432f; stroke-width: 2.5; }
.title { font-size: 15px; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd; } .grid { stroke: #444; } .axis { stroke: #999; } .paper { fill: #181818; }
}
@media (prefers-color-scheme: light) { .paper { fill: #fff; } }
"""

Points = Sequence[tuple[int, float]]


def draw(figures: Iterable[Figure]) -> str:
    """The SVG of hand-offs, both axes logarithmic."""
    curves = _curves(figures)
    waiters = sorted({at for points in curves.values() for at, _ in points})
    values = [value for points in curves.values() for _, value in points]
    scale = _Scale(waiters, values)
    body = [*_frame(scale, waiters), *_lines(scale, curves), *_names(scale, curves)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-labelledby="title">\n'
        '<title id="title">Time from one holder to the next, by how many wait</title>\n'
        f"<style>{STYLE}</style>\n"
        + "\n".join([f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>', *body])
        + "\n</svg>\n"
    )


def _curves(figures: Iterable[Figure]) -> dict[str, Points]:
    found: dict[str, list[tuple[int, float]]] = {who: [] for who in LINES}
    for each in figures:
        if each.measure == "mean" and each.who in found and each.at is not None:
            # Nothing is quicker than a microsecond, and zero has no logarithm.
            found[each.who].append((each.at, max(each.value, 0.001)))
    return {who: sorted(points) for who, points in found.items() if points}


class _Scale:
    """From waiters and milliseconds to places on the paper."""

    def __init__(self, waiters: Sequence[int], values: Sequence[float]) -> None:
        self.most = max(waiters)
        self.low = math.floor(math.log10(min(values)))
        self.high = math.ceil(math.log10(max(values)))

    def x(self, waiters: float) -> float:
        share = math.log2(waiters) / math.log2(self.most) if self.most > 1 else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, ms: float) -> float:
        share = (math.log10(ms) - self.low) / max(1, self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _frame(scale: _Scale, waiters: Sequence[int]) -> Iterable[str]:
    yield f'<text class="title" x="{LEFT}" y="22">From one holder to the next, in ms</text>'
    yield (
        f'<text x="{LEFT}" y="40">Mean of a hand-off, all waiting for one lock; '
        "each has it once, for 1 ms</text>"
    )
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for power in range(scale.low, scale.high + 1):
        y = scale.y(10**power)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    for each in waiters:
        x = scale.x(each)
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{each}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    middle = (LEFT + right) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">waiting</text>'


def _lines(scale: _Scale, curves: Mapping[str, Points]) -> Iterable[str]:
    for who, points in curves.items():
        colour, dashes = LINES[who]
        places = " L".join(f"{scale.x(at):.1f},{scale.y(value):.1f}" for at, value in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield f'<path class="{colour}" d="M{places}"{dashed}/>'


def _names(scale: _Scale, curves: Mapping[str, Points]) -> Iterable[str]:
    """The names beside the ends of the lines, as near as they can be without touching."""
    ends = {who: scale.y(points[-1][1]) for who, points in curves.items()}
    left, y = WIDTH - RIGHT + 8, -math.inf
    order = sorted(ends, key=lambda who: ends[who])
    # They would run out of the paper below: so many have to fit.
    lowest = HEIGHT - BOTTOM - APART * (len(order) - 1)
    for place, who in enumerate(order):
        y = max(y + APART, min(ends[who], lowest + APART * place))
        colour, dashes = LINES[who]
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield (
            f'<line class="key {colour}" x1="{left}" x2="{left + 26}" y1="{y:.1f}" '
            f'y2="{y:.1f}"{dashed}/>'
        )
        yield f'<text x="{left + 32}" y="{y + 4:.1f}">{escape(who, quote=False)}</text>'


def main(figures: Path, target: Path) -> None:
    parts = json.loads(figures.read_text())["parts"]
    target.write_text(draw(Figure(**each) for each in parts["handoff"]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
