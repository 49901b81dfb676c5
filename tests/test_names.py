"""What a lock name may be, and how templates make one."""

import datetime as dt
import enum
import functools
import inspect
import itertools
import uuid
from collections.abc import Hashable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Optional, SupportsInt, TypeVar

import pytest

from django_fencedlock.core.names import Parameters, Template, validate


class Colour(enum.Enum):
    RED = "red"
    BOTH = ("red", "blue")


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
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        (1e300, "1e+300"),
        (-0.0, "0.0"),
        (dt.timedelta(hours=1), "1:00:00"),
    ],
)
def test_plain_values_have_their_usual_text(value, text):
    for conversion in ("", "!s"):
        template = Template(f"{{it{conversion}}}", lambda it: ...)
        assert template.render((value,), {}) == text


def test_equal_numbers_have_one_text_under_each_conversion():
    for template in ("{it}", "{it!r}", "{it!s}", "{it!a:>5}"):
        made = Template(template, lambda it: ...)
        assert made.render((-0.0,), {}) == made.render((0.0,), {})


def test_a_part_of_an_argument_may_be_named():
    order = type("Order", (), {"pk": 5})()
    assert Template("order:{order.pk}", lambda order: ...).render((order,), {}) == "order:5"


class Order:
    pk = 5


NO_TEXT = "Parameter 'it' is {}, which has no fixed text for lock name 'x:{{it}}'. {}."
PART = "Use a plain value of it, such as {}"
ORDER = NO_TEXT.format("an Order", PART.format("{it.pk}"))
DICT = NO_TEXT.format("a dict", PART.format("{it[id]}"))


def no_part(what):
    """Return the message where a part that every value has might be the same in two of them."""
    return NO_TEXT.format(what, "Pass a plain value instead")


@pytest.mark.parametrize(
    ("template", "value", "message"),
    [
        ("x:{it}", Order(), ORDER),
        ("x:{it}", {"a": 1}, DICT),
        ("x:{it}", [1], no_part("a list")),
        ("x:{it}", b"x", no_part("a bytes")),
        ("x:{it}", Path("a/b"), no_part(f"a {type(Path()).__name__}")),
        ("x:{it}", Colour.BOTH, no_part("a Colour")),
        ("x:{it!r}", Colour.BOTH, no_part("a Colour").replace("{it}", "{it!r}")),
        ("x:{it}", object(), no_part("an object")),
        (
            "{it[a]}",
            {"a": Order()},
            "{it[a]} is an Order, which has no fixed text for lock name '{it[a]}'. Use a plain "
            "value of it, such as {it[a].pk}.",
        ),
        (
            "{it.pk}",
            3,
            "build(): Lock name '{it.pk}' needs {it.pk}: 'int' object has no attribute 'pk'.",
        ),
        ("{it[a]}", {}, "build(): Lock name '{it[a]}' needs {it[a]}: key 'a' is missing."),
    ],
)
def test_values_whose_text_is_not_the_same_everywhere_are_refused(template, value, message):
    def build(it): ...

    build.__qualname__ = "build"
    with pytest.raises(TypeError) as caught:
        Template(template, build).render((value,), {})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (Order, ORDER),
        ("Order", ORDER),
        (Order | None, ORDER),
        (Optional["Order"], ORDER),
        (dict[str, int], DICT),
        (list[int], no_part("a list")),
        (Path, no_part("a Path")),
    ],
)
def test_an_annotation_shows_that_values_have_no_text(annotation, message):
    def build(it, other): ...

    # Another annotation may be a name that only type checkers import.
    build.__annotations__ = {"other": "Unknown", "it": annotation}
    with pytest.raises(TypeError) as caught:
        Template("x:{it}", build)
    assert str(caught.value) == message
    Template("x:{it.pk}", build)
    Template("x:{it}", build, hidden={"it"})


@pytest.mark.parametrize(
    "annotation",
    [
        *(int, str | None, Order | int, object, Any, Hashable, Literal["a"], Colour, "Unknown"),
        *(SupportsInt, NewType("Pk", int), TypeVar("T"), Annotated[int, "pk"], None),
    ],
)
def test_other_annotations_are_no_error(annotation):
    def build(it): ...

    build.__annotations__["it"] = annotation
    assert Template("x:{it}", build).render((5,), {}) == "x:5"


def test_the_annotations_of_a_function_below_a_decorator_are_not_those_of_the_call():
    def charge(it: Order): ...

    @functools.wraps(charge)
    def load(it):
        charge(Order())

    assert Template("x:{it}", load).render((5,), {}) == "x:5"


def test_keys_of_kwargs_may_be_used():
    def build(a, **more): ...

    build.__qualname__ = "build"
    template = Template("{a}:{b}:{c[x]}", build)
    assert template.render((1,), {"b": 2, "c": {"x": 3}}) == "1:2:3"
    with pytest.raises(TypeError) as caught:
        template.render((1,), {"c": {"x": 3}})
    assert (
        str(caught.value)
        == "build(): Lock name '{a}:{b}:{c[x]}' needs {b}: argument 'b' is missing."
    )


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
