"""What comes from strangers: names, arguments, passwords. See docs/concepts/security.md."""

import enum
import traceback
import tracemalloc
from decimal import Decimal

import pytest

from django_fencedlock import conf, lock
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core.names import Template
from django_fencedlock.exceptions import SettingsError
from tests.backends import REDIS


class Order:
    pk = 5
    _password = "s3cret"


class Boxed(enum.Enum):
    IT = object()


def build(order, width=3): ...


class TestTemplates:
    @pytest.mark.parametrize(
        "text",
        [
            "{order.__class__}",
            "{order.__class__.__name__}",
            "{order._password}",
            "{order.pk.__doc__}",
            "{order[0].__init__.__globals__}",
            "{width:{order.__doc__}}",
            "{width:{order._password}}",
        ],
    )
    def test_what_is_private_cannot_be_named(self, text):
        with pytest.raises(TypeError, match="a private attribute"):
            Template(text, build)

    @pytest.mark.parametrize(
        "text", ["{0.pk}", "{}", "{nobody}", "{width:{nobody}}", "{width:{0.pk}}"]
    )
    def test_only_parameters_can_be_named(self, text):
        with pytest.raises(TypeError, match=r"not a parameter of build|Positional"):
            Template(text, build)

    @pytest.mark.parametrize("text", ["{width:{}", "{width:}}", "{width:{order"])
    def test_what_is_no_template_says_so(self, text):
        with pytest.raises(ValueError, match="Invalid lock name template"):
            Template(text, build)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            *((text, Order()) for text in ("{order!r}", "{order!s}", "{order!a:>9}")),
            ("{order}", Boxed.IT),
        ],
    )
    def test_no_conversion_or_member_makes_a_name_of_what_has_none(self, text, value):
        with pytest.raises(TypeError, match="has no fixed text"):
            Template(text, build).render((value,), {})

    @pytest.mark.parametrize(
        ("text", "arguments"),
        [
            ("{order:>999999999}", (1,)),
            ("{order:.999999999f}", (Decimal(1),)),
            ("{order:0999999999}", (1,)),
            ("{order:f}", (Decimal("1E+999999"),)),
            ("{order:.2f}", (Decimal("-1E+999999"),)),
            ("{order:{width}}", (1, 999_999_999)),
            ("{order!s:>{width}}", (1, "9" * 5000)),
        ],
    )
    def test_no_argument_makes_a_text_as_long_as_memory(self, text, arguments):
        template = Template(text, build)
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match="more than 200 characters"):
                template.render(arguments, {})
            assert tracemalloc.get_traced_memory()[1] < 500_000
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(
        "value", ["{order.__class__}", "{0.x}", "{a[b]}", "{x!r:>{y}}", "{x:>999999999}", "%(x)s"]
    )
    def test_a_value_is_no_template(self, value):
        assert Template("x:{order}", build).render((value,), {}) == f"x:{value}"
        assert lock(value).name == value


PASSWORD = "s3/cr@et"
SLIPS = [
    f"redis://:{PASSWORD}@host",
    {"default": f"redis://:{PASSWORD}@host"},
    {"default": [f"redis://:{PASSWORD}@host"]},
    {"default": {"BACKEND": f"redis://:{PASSWORD}@host"}},
    {"default": {"LOCATION": f"redis://:{PASSWORD}@host"}},
    {"default": {"LOCATION": [f"redis://:{PASSWORD}@host"]}},
    {"default": {"OPTIONS": f"redis://:{PASSWORD}@host"}},
    *(
        {"default": {"BACKEND": REDIS, **given}}
        for given in (
            {"LOCATION": f"redis://:{PASSWORD}@host"},
            {"LOCATION": f"redis://user:{PASSWORD}@host:6379/0"},
            {"LOCATION": "redis://:s3#cr@host:6379"},
            {"LOCATION": "redis://:6379/s3cr@host:6379"},
            {"LOCATION": f"redis+sentinel://user:{PASSWORD}@one"},
            {"LOCATION": f"postgres://user:{PASSWORD}@host"},
            {"LOCATION": "redis://host?password=s3cr&socket_timeout=soon"},
            {"LOCATION": "redis+sentinel://one?sentinel_password=s3cr"},
            {"OPTIONS": {"CACHE": f"redis://:{PASSWORD}@host"}},
            {"OPTIONS": {"CLIENT_FACTORY": f"redis://:{PASSWORD}@host"}},
        )
    ),
]


class TestPasswords:
    @pytest.mark.parametrize("given", SLIPS)
    def test_no_check_and_no_error_shows_one(self, settings, given):
        settings.FENCEDLOCK = given
        problems = list(conf.problems())
        assert problems
        told = " ".join(map(str, problems))
        with pytest.raises(SettingsError) as caught:
            lock("x").acquire()
        told += "".join(traceback.format_exception(caught.value))
        for piece in ("s3", "cr@", "et@"):
            assert piece not in told

    def test_no_report_of_a_frame_shows_one(self):
        config = AliasConfig(
            "x", REDIS, f"redis://:{PASSWORD}@h", 30, 10, "", "default", {"a": "s3"}
        )
        assert "s3" not in repr(config)

    def test_one_that_has_to_be_quoted_is_reported(self, settings):
        settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, "LOCATION": "redis://:a/b@host"}}
        (problem,) = conf.problems()
        assert "'redis://:***@host'" in str(problem)
        assert "a character in *** must be quoted" in str(problem)
        assert "urllib.parse.quote" in str(problem)
