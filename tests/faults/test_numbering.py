"""How grants get their tokens: the order of the steps in `core.grants`, and why it matters."""

import pytest

from tests.faults.numbering import WEAK, Model

FAULTS = [{}, {"raises": 2}, {"losses": 1}, {"crashes": 1}, {"raises": 1, "crashes": 1}]


@pytest.mark.parametrize("faults", FAULTS, ids=str)
def test_grants_of_a_service_without_numbers_are_recorded_in_order(faults):
    states, way = Model(**faults).search()
    assert way == []
    assert states > 2000, "so few states are no search"


@pytest.mark.parametrize("faults", [{}, {"raises": 2}, {"crashes": 1}], ids=str)
def test_grants_of_a_service_with_numbers_are_recorded_in_order(faults):
    states, way = Model(has_number=True, clients=3, **faults).search()
    assert way == []
    assert states > 2000, "so few states are no search"


def test_three_clients():
    states, way = Model(clients=3, raises=1).search()
    assert way == []
    assert states > 20_000


@pytest.mark.parametrize(
    ("rule", "faults"),
    [
        ("reads after it asked", {}),
        ("does not ask", {}),
        ("compares the token alone", {"crashes": 1}),
    ],
)
def test_without_a_rule_an_older_grant_is_recorded_last(rule, faults):
    assert rule in WEAK
    _, way = Model(rule, **faults).search()
    assert way[-1].split(" ", 1)[1].startswith("records"), way


def test_an_old_number_may_fence_off_the_holder_after_the_service_lost_its_data():
    """Known and documented: one unjustified rejection, and no stale write."""
    _, way = Model(has_number=True, clients=3, losses=1).search()
    assert "the service loses its data" in way
