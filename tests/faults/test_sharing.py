"""Readers and writers of one lock: the order of the steps in `core.grants`, and why it matters."""

import pytest

from tests.faults.sharing import WEAK, Model

TWO_GRANTS = {"writers": 1, "readers": 1, "max_grants": 4}
OTHERS = [
    {"writers": 2, "readers": 1},
    {"writers": 1, "readers": 2},
    {"writers": 1, "readers": 1, "forces": 1},
]
SLOW = [
    {"writers": 2, "readers": 1, "forces": 1},
    {"writers": 1, "readers": 2, "forces": 1},
    {"writers": 2, "readers": 2, "max_grants": 4},
]


@pytest.mark.parametrize("terms", [TWO_GRANTS, *OTHERS], ids=str)
def test_no_former_holder_commits(terms):
    states, way = Model(**terms).search()
    assert way == []
    assert states > 5000, "so few states are no search"


@pytest.mark.slow
@pytest.mark.parametrize("terms", SLOW, ids=str)
def test_no_former_holder_of_three_or_four_commits(terms):
    states, way = Model(**terms).search()
    assert way == []
    assert states > 100_000


@pytest.mark.parametrize(
    ("rule", "forces"),
    [
        ("does not raise", 0),
        ("does not check the deadline", 0),
        ("reads after it asked", 1),
        ("asks once", 1),
        ("raises once", 1),
    ],
)
def test_without_a_rule_a_former_holder_commits(rule, forces):
    assert rule in WEAK
    _, way = Model(rule, forces=forces).search()
    assert way, "no fault was found"
    assert way[-1].endswith("commits"), way


def test_a_former_writer_may_fence_off_readers_after_the_service_lost_its_data():
    """Known and documented: further readers leave the fence as it is, whatever was granted."""
    _, way = Model(losses=1).search()
    assert "the service loses its data" in way
    assert way[-1] == "writer 0 commits"
