"""Figures as tables in Markdown: for the end of a run, and for docs/dev/performance.md."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.report import Figure, told


def aims(figures: Iterable[Figure]) -> list[str]:
    """What was aimed at, beside what was found; a line for each."""
    lines = _head("work", "by", "measure", "found", "aim", "met")
    for each in figures:
        if each.aim is not None:
            found, aim = told(each.value, each.unit), told(each.aim, each.unit)
            met = "yes" if each.met else "**no**"
            lines.append(_row(each.work, each.who, each.measure, found, f"<= {aim}", met))
    return lines


def compared(figures: Iterable[Figure]) -> list[str]:
    """For each work a table with a line for each contestant, and its aims."""
    points = [each for each in figures if each.at is None]
    lines: list[str] = []
    for work in dict.fromkeys(each.work for each in points):
        of_work = [each for each in points if each.work == work]
        measures = list(dict.fromkeys(each.measure for each in of_work))
        lines += ["", *_head(work, *measures)]
        for who in dict.fromkeys(each.who for each in of_work):
            found = {each.measure: each for each in of_work if each.who == who}
            lines.append(_row(who, *(_cell(found.get(measure)) for measure in measures)))
    return lines[1:]


def curves(figures: Iterable[Figure]) -> list[str]:
    """For each work a table with a line for each curve, and a column for each of its points."""
    points = [each for each in figures if each.at is not None]
    lines: list[str] = []
    for work in dict.fromkeys(each.work for each in points):
        of_work = [each for each in points if each.work == work]
        places = sorted({each.at for each in of_work if each.at is not None})
        lines += ["", *_head(work, "", *(f"{place:,}" for place in places))]
        for who, measure in dict.fromkeys((each.who, each.measure) for each in of_work):
            found = {
                each.at: each for each in of_work if (each.who, each.measure) == (who, measure)
            }
            lines.append(_row(who, measure, *(_cell(found.get(place)) for place in places)))
    return lines[1:]


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|---" * len(cells) + "|"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    aim = "" if figure.aim is None else f" (aim {told(figure.aim, figure.unit)})"
    return told(figure.value, figure.unit) + aim
