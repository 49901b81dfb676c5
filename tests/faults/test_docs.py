"""docs/dev/fault_lab.md names the faults, the promises and the options that there are."""

import re
from pathlib import Path

from tests.faults import checker, command
from tests.faults.faults import FAULTS

PAGE = (Path(__file__).parent.parent.parent / "docs/dev/fault_lab.md").read_text()


def first_cells(heading: str) -> list[str]:
    part = PAGE.partition(f"\n{heading}\n")[2].partition("\n\n")[0]
    return [line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| ")]


def test_every_fault_is_there():
    assert first_cells("| fault | what is done |") == [f"`{fault.name}`" for fault in FAULTS]


def test_every_promise_is_there():
    checked = {re.match(r"I\d+", check.__doc__)[0] for check in checker.CHECKS}
    assert set(first_cells("| | promise |")) == checked | {"I11"}


def test_every_option_is_there():
    named = set(re.findall(r"`(--[a-z]+)`", PAGE))
    known = {*command._parser()._option_string_actions}
    assert named == known - {"-h", "--help"}
