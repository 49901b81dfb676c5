"""The table at the end."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from .runs import BROKEN, CALM, Result

_COLUMNS = ("grants", "writes", "injections", "takeovers", "refusals")
_HEAD = ("backend", "fault", "kind", "runs", *_COLUMNS, "violations", "too calm", "broken", "hung")


def table(results: Sequence[Result], skipped: Mapping[str, str]) -> str:
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.site, result.plan.fault.name, result.plan.kind].append(result)
    rows = [_row(*key, group) for key, group in sorted(groups.items())]
    rows.append(_row("all", "all", "all", list(results)))
    lines = [line(_HEAD), line(["---"] * len(_HEAD)), *map(line, rows)]
    lines += [f"not run: {what}: {why}" for what, why in sorted(skipped.items())]
    return "\n".join(lines)


def _row(site: str, fault: str, kind: str, group: Sequence[Result]) -> list[str]:
    sums = [sum(result.facts[column] for result in group) for column in _COLUMNS]
    wrong = sum(len(result.violations) for result in group)
    calm = sum(result.verdict == CALM for result in group)
    broken = sum(result.verdict == BROKEN for result in group)
    hung = sum(len(result.hung) for result in group)
    return [site, fault, kind, *map(str, [len(group), *sums, wrong, calm, broken, hung])]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
