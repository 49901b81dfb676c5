"""Every mutation can be made, has tests to notice it, and is told of in docs/mutants.md."""

from __future__ import annotations

import pytest

from tests.faults import mutants_page
from tests.faults.mutants import ROOT, fault_of
from tests.faults.mutants_page import Row
from tests.faults.mutations import MUTATIONS, Mutation


def test_every_mutation_applies():
    found = {each.what: fault for each in MUTATIONS if (fault := fault_of(each))}
    assert found == {}


def test_their_tests_are_there():
    files = {test.partition("::")[0] for each in MUTATIONS for test in each.tests}
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


def test_no_two_are_the_same():
    assert len({(each.file, each.old, each.new) for each in MUTATIONS}) == len(MUTATIONS)
    assert len({each.what for each in MUTATIONS}) == len(MUTATIONS)


def test_the_page_has_a_row_for_each():
    """What isn't so is mended by `python -m tests.faults.mutants --table --only` and its number."""
    rows = mutants_page.known()
    assert list(rows) == [each.what for each in MUTATIONS]


def test_the_tests_that_it_names_are_there():
    rows = mutants_page.known().values()
    files = {row.test.partition("::")[0] for row in rows if row.is_caught}
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


def test_what_is_written_to_the_page_is_read_again(monkeypatch, tmp_path):
    monkeypatch.setattr(mutants_page, "PAGE", tmp_path / "mutants.md")
    assert mutants_page.known() == {}
    rows = {each.what: Row("tests/test_x.py::test_y[a|b]", "2001-02-03") for each in MUTATIONS}
    first, second, third = list(rows)[:3]
    rows[first] = Row(mutants_page.NOBODY, "2001-02-03")
    del rows[second]
    mutants_page.write({**rows, "A mutation that was dropped": Row("a test", "2001-02-03")})
    assert mutants_page.known() == {**rows, second: Row(mutants_page.UNTRIED, "")}
    assert [rows[third].is_caught, rows[first].is_caught] == [True, False]
    assert (
        f"\n{len(MUTATIONS) - 2} of {len(MUTATIONS)} were noticed." in mutants_page.PAGE.read_text()
    )


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("nowhere to be found", "", "found 0 times"),
        ("import", "", "has to be once"),
        ("BEATS = 3", "BEATS = 3", "is the old one"),
        ("BEATS = 3", "BEATS = (", "isn't Python"),
    ],
)
def test_one_that_does_not_is_told(old, new, fault):
    assert fault in fault_of(Mutation("", "keeper.py", old, new, ()))
