"""
The picture of the layers in CONTRIBUTING.md, drawn from what tests/test_layers.py allows.

`python -m tests.picture` draws it anew; test_picture.py fails as long as it is another.
"""

from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).resolve().parent.parent / "docs/layers.svg"

#: What the modules of a layer have to do with each other.
TITLES = {
    6: ("at the edge", "nobody imports them"),
    5: ("what users import", "models, tasks, and what goes through the registry"),
    4: ("locks", "lock() and alock()"),
    3: ("one service of a process", "taking, renewing, telling"),
    2: ("lock services", "never each other"),
    1: ("database and settings", "the SQL, its connections, the tables"),
    0: ("the ground", "errors, leases, owners: no database"),
}
WIDTH, LEFT, RIGHT = 860, 230, 812
BOX, GAP, PAD = 24, 8, 12


def names(layer: list[str]) -> list[str]:
    """The boxes of a layer: rooms of one package stand together."""
    rooms: dict[str, list[str]] = {}
    for name in sorted(each.rstrip("*") for each in layer):
        package, _, room = name.rpartition(".")
        rooms.setdefault(package, []).append(room)
    packages = [
        f"{package}: {', '.join(found[start : start + 6])}"
        for package, found in rooms.items()
        if package
        for start in range(0, len(found), 6)
    ]
    return rooms.get("", []) + packages


def draw(layers: dict[int, list[str]]) -> str:
    """The picture, as the text of an SVG."""
    parts: list[str] = []
    top = 16
    for number in sorted(layers, reverse=True):
        lines = _lines(names(layers[number]))
        height = 2 * PAD + len(lines) * BOX + (len(lines) - 1) * GAP
        height = max(height, 56)
        parts += _band(number, top, height) + _boxes(lines, top, height)
        top += height + 8
    arrow = (
        f'<path d="M836 24V{top - 24}" stroke="#37474f" stroke-width="2" marker-end="url(#end)"/>'
    )
    return "\n".join([*_head(top + 8), *parts, f"  {arrow}", "</svg>", ""])


def _head(height: int) -> list[str]:
    story = "Seven layers. A module imports from lower layers alone."
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        'role="img" aria-labelledby="title story" font-size="12" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif\">",
        '  <title id="title">Who may import whom</title>',
        f'  <desc id="story">{story}</desc>',
        '  <defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="#37474f"/></marker></defs>',
        f'  <rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="#fff" '
        'stroke="#d5dadd"/>',
    ]


def _band(number: int, top: int, height: int) -> list[str]:
    title, more = TITLES[number]
    middle = top + height / 2
    heading = f'font-weight="600" fill="#37474f">{escape(title)}</text>'
    return [
        f'  <rect x="16" y="{top}" width="{RIGHT - 16}" height="{height}" rx="6" fill="#f4f7f9"/>',
        f'  <text x="28" y="{middle + 5:g}" font-size="16" fill="#90a4ae">{number}</text>',
        f'  <text x="50" y="{middle - 3:g}" {heading}',
        *(
            f'  <text x="50" y="{middle + 12 + 13 * place:g}" font-size="11" '
            f'fill="#546e7a">{escape(line)}</text>'
            for place, line in enumerate(_wrapped(more, 32))
        ),
    ]


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _lines(boxes: list[str]) -> list[list[str]]:
    """Boxes, as many beside each other as there is room for."""
    lines: list[list[str]] = [[]]
    right = LEFT
    for box in boxes:
        if lines[-1] and right + _width(box) > RIGHT - PAD:
            lines.append([])
            right = LEFT
        lines[-1].append(box)
        right += _width(box) + GAP
    return lines


def _width(box: str) -> int:
    return 18 + round(6.6 * len(box))


def _boxes(lines: list[list[str]], top: int, height: int) -> list[str]:
    found = []
    y = top + (height - len(lines) * BOX - (len(lines) - 1) * GAP) // 2
    for line in lines:
        x = LEFT
        for box in line:
            width = _width(box)
            found.append(
                f'  <rect x="{x}" y="{y}" width="{width}" height="{BOX}" rx="4" fill="#e3eefa" '
                f'stroke="#2f6da8"/><text x="{x + width / 2:g}" y="{y + 16}" '
                f'text-anchor="middle" fill="#123a5e">{escape(box)}</text>'
            )
            x += width + GAP
        y += BOX + GAP
    return found


if __name__ == "__main__":
    from tests.test_layers import LAYERS

    PICTURE.write_text(draw(LAYERS))
