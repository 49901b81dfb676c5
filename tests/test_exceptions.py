"""What every error of the package has in common."""

import inspect
import pickle

import pytest
from django.db import DatabaseError

from django_fencedlock import exceptions
from django_fencedlock.core.identity import Holder
from django_fencedlock.exceptions import FencedLockError, LockNotAcquired

ERRORS = [
    each
    for each in vars(exceptions).values()
    if inspect.isclass(each) and each.__module__ == exceptions.__name__
]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_one_base_and_is_no_database_error(error):
    assert issubclass(error, FencedLockError)
    assert not issubclass(error, DatabaseError)


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_comes_through_pickle_with_its_facts(error):
    facts = {field: f"the {field}" for field in error.fields}
    copy = pickle.loads(pickle.dumps(error("what happened", **facts)))
    assert type(copy) is error
    assert str(copy) == "what happened"
    assert {field: getattr(copy, field) for field in error.fields} == facts


def test_a_holder_comes_through_pickle():
    holder = Holder(owner_id="a1", description="web-3, pid 812", alias="default", token=4)
    error = LockNotAcquired("held", name="x", alias="default", holder=holder)
    assert pickle.loads(pickle.dumps(error)).holder == holder


def test_a_fact_that_an_error_does_not_carry_is_refused():
    with pytest.raises(TypeError, match="has no field colour"):
        LockNotAcquired("held", colour="red")
