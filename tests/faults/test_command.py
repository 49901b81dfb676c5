"""How the command judges its runs, and the table that it ends with."""

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.command import _status
from tests.faults.faults import BY_NAME
from tests.faults.runs import BROKEN, CALM, HELD, VIOLATED, Plan, Result, _suffices


def a_result(verdict, **more):
    plan = Plan(BY_NAME["pause"], "seed", 1, 2, Path("/"))
    facts = Counter(grants=20, writes=30, injections=3, takeovers=2, refusals=1)
    return Result("sqlite", plan, verdict, facts=facts, **more)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        *(([HELD, HELD], 0), ([HELD, VIOLATED], 1), ([HELD, BROKEN], 1)),
        *(([HELD, CALM], 2), ([CALM, VIOLATED], 1), ([], 2)),
    ],
)
def test_the_exit_code_is_that_of_the_worst_run(verdicts, status):
    assert _status([a_result(verdict) for verdict in verdicts], unfenced=False) == status


def test_a_client_that_hung_is_a_failure():
    assert _status([a_result(HELD, hung=["client-0-0"])], unfenced=False) == 1


@pytest.mark.parametrize(("verdict", "status"), [(VIOLATED, 0), (HELD, 1), (CALM, 1)])
def test_without_fencing_only_corruption_is_a_success(verdict, status):
    assert _status([a_result(verdict)], unfenced=True) == status


@pytest.mark.parametrize("what", ["grants", "writes", "injections", "takeovers", "refusals"])
def test_a_run_in_which_too_little_happened_shows_nothing(what):
    result = a_result(HELD)
    assert _suffices(result.facts, result.plan)
    result.facts[what] = 0
    assert not _suffices(result.facts, result.plan)
