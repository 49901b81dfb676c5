"""What a lock name may be, and how templates make one."""

import datetime as dt
import enum
import inspect
import itertools
import uuid
from decimal import Decimal

import pytest

from django_fencedlock.core.names import Parameters, Template, validate


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize("name", ["x", "é" * 200, "a b", " a", "{x}", "new\nline", "🔒"])
def test_any_text_of_up_to_200_characters_is_a_name(name):
    assert validate(name) == name


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("", ValueError, "empty"),
        ("x" * 201, ValueError, "201 characters; 200"),
        ("a\0b", ValueError, "NUL"),
        ("\ud800", ValueError, "Unicode"),
        (42, TypeError, "int"),
        (None, TypeError, "NoneType"),
    ],
)
def test_what_a_database_takes_for_equal_is_refused(name, error, words):
    with pytest.raises(error, match=words):
        validate(name)


def test_every_way_to_pass_an_argument_makes_one_name():
    def build(user, kind="full"): ...

    template = Template("report:{user}:{kind}", build)
    assert template.render((7,), {}) == "report:7:full"
    assert template.render((), {"user": 7}) == "report:7:full"
    assert template.render((7, "full"), {}) == "report:7:full"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (dt.date(2026, 1, 2), "2026-01-02"),
        (Decimal("1.50"), "1.50"),
        (Colour.RED, "red"),
    ],
)
def test_plain_values_have_their_usual_text(value, text):
    assert Template("{it}", lambda it: ...).render((value,), {}) == text


def test_a_part_of_an_argument_may_be_named():
    order = type("Order", (), {"pk": 5})()
    assert Template("order:{order.pk}", lambda order: ...).render((order,), {}) == "order:5"


@pytest.mark.parametrize("value", [object(), 1.5, [1], None, {"a": 1}])
def test_values_whose_text_is_not_the_same_everywhere_are_refused(value):
    with pytest.raises(TypeError, match="A lock name can't be made of"):
        Template("{it}", lambda it: ...).render((value,), {})


def test_wrong_arguments_fail_as_the_functions_own_call_would():
    def charge(it): ...

    with pytest.raises(TypeError, match=r"charge\(\): missing a required argument: 'it'"):
        Template("{it}", charge).render((), {})


@pytest.mark.parametrize(
    "function",
    [
        lambda: ...,
        lambda a: ...,
        lambda a, b=2: ...,
        lambda a=1, b=2: ...,
        lambda a, /, b=2: ...,
        lambda a, *, b=2: ...,
        lambda *a, b=2: ...,
        lambda a=1, **b: ...,
        lambda *, b=2: ...,
    ],
)
def test_arguments_are_bound_as_python_does(function):
    parameters = Parameters(function)
    for args, kwargs in itertools.product(
        [(), (10,), (10, 20), (10, 20, 30)],
        [{}, {"a": 1}, {"b": 3}, {"b": 3, "a": 1}, {"c": 4}, {"a": 1, "c": 4}],
    ):
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as exc:
            with pytest.raises(TypeError, match=str(exc)):
                parameters.bind(args, kwargs)
        else:
            bound.apply_defaults()
            assert list(parameters.bind(args, kwargs).items()) == list(bound.arguments.items())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{{x}}:{a}", "{x}:1.5"),
        ("{a:>5}|{b}", "  1.5|7"),
        ("{b:{width}}", "  7"),
        ("{b!s}", "7"),
        ("plain", "plain"),
    ],
)
def test_simple_templates_and_others_are_filled_alike(text, name):
    def build(a, b, width=3): ...

    assert Template(text, build).render((Decimal("1.5"), 7), {}) == name
