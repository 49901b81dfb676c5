"""Every mutation can be made, and has tests to notice it. Whether they do takes most of an hour."""

from __future__ import annotations

import pytest

from tests.faults.mutants import ROOT, fault_of
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
