"""docs/mutants.md: each mutation with the test that noticed it. The page is where that is kept."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.servers import shared

from .mutations import GROUPS, Mutation

PAGE = Path(__file__).resolve().parents[2] / "docs/mutants.md"
#: What stands in the place of a test.
NOBODY, UNTRIED = "**nobody**", "not tried"
HEAD = "| what was broken | in | who noticed | on |"

_PACKAGES = ("Django", "celery", "redis", "psycopg", "pytest")
_SERVERS = re.compile(r"^(postgres|redis|valkey|mariadb|pgbouncer): (\S+)")

_ABOVE = """\
# What the tests notice

A test that can't fail proves nothing. So the package is broken on purpose, in one place after the
other, in a copy of it: a comparison is left out, an order is turned round, a permission isn't asked
for. Each time some test has to fail that passes without the change. That is what "noticed" means
here; which test it was that failed first is in the table, and others may have failed after it.

`python -m tests.faults.mutants` makes them all, `--only 12` one of them, and `--table` writes down
here what came of it. The mutations are in `tests/faults/mutations/`.
"""


@dataclass(frozen=True)
class Row:
    """Which test noticed a mutation, and when it was tried last."""

    test: str
    on: str

    @property
    def is_caught(self) -> bool:
        return self.test not in (NOBODY, UNTRIED)


def read(text: str) -> dict[str, Row]:
    """The rows of the page, by what was broken."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if len(cells) == 4 and line.startswith("| ") and line != HEAD:
            what, _, test, on = cells
            test = test.strip("`").replace(r"\|", "|")
            found[what.removeprefix("| ")] = Row(test, on.removesuffix("|").strip())
    return found


def known() -> dict[str, Row]:
    """What the page tells now."""
    return read(PAGE.read_text()) if PAGE.exists() else {}


def today() -> str:
    return datetime.date.today().isoformat()


def write(rows: Mapping[str, Row]) -> None:
    """Write the page, with a row for each mutation that there is."""
    PAGE.write_text("\n".join(_lines(rows)))


def _lines(rows: Mapping[str, Row]) -> Iterator[str]:
    every = [mutation for group in GROUPS.values() for mutation in group]
    told = [rows.get(mutation.what, Row(UNTRIED, "")) for mutation in every]
    caught = sum(row.is_caught for row in told)
    yield _ABOVE
    yield f"{caught} of {len(every)} were noticed. The newest tries were made on {_machine()}."
    for title, group in GROUPS.items():
        yield ""
        yield f"## {title}"
        yield ""
        yield HEAD
        yield "|---|---|---|---|"
        yield from _rows(group, rows)
    yield ""


def _rows(group: Sequence[Mutation], rows: Mapping[str, Row]) -> Iterator[str]:
    for mutation in group:
        row = rows.get(mutation.what, Row(UNTRIED, ""))
        test = row.test.replace("|", r"\|")
        test = f"`{test}`" if row.is_caught else test
        yield f"| {mutation.what} | `{mutation.file}` | {test} | {row.on} |"


def _machine() -> str:
    """The versions of what the tests ran with."""
    packages = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    servers = [" ".join(match.groups()) for match in map(_SERVERS.match, shared.report()) if match]
    return ", ".join([f"Python {platform.python_version()}", *packages, *servers])
