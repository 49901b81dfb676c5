"""The names of tasks' locks: the same for one call everywhere, another for any other."""

import base64
import re
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import MappingProxyType
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from celery import shared_task
from django.apps import apps
from django.utils.translation import gettext_lazy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kombu.serialization import dumps, loads

from django_fencedlock import current_lease
from django_fencedlock.celery import lock_name, single_instance
from django_fencedlock.celery.names import single_of
from django_fencedlock.celery.values import canonical
from django_fencedlock.exceptions import SettingsError
from tests.models import Invoice, LedgerLine, Warehouse
from tests.scripts import run_python

A_UUID = UUID("5f6f4b8e-8f4e-4c1a-9a55-0d9bb6d7a1c2")
BERLIN = datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))


class Colour(Enum):
    RED = "red"
    ONE = 1


class Level(IntEnum):
    HIGH = 3


class Currency(StrEnum):
    EUR = "EUR"


class Text(str):
    def __str__(self):
        return "something else"


Pair = namedtuple("Pair", "a b")


def through_json(*args, **kwargs):
    content_type, encoding, data = dumps((args, kwargs), "json")
    return loads(data, content_type, encoding)


def fenced(model, **values):
    row = model(**values)
    row._state.adding = False
    return row


class TestCanonicalForm:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, "None"),
            (True, "True"),
            (1, "1"),
            (1.0, "1.0"),
            (1e300, "1e+300"),
            (float("inf"), "inf"),
            ("1", '"1"'),
            ("None", '"None"'),
            ('say "no"\n', r'"say \"no\"\n"'),
            ("Müller 🔒", '"Müller 🔒"'),
            ("\0", r'"\u0000"'),
            ("\ud800", r'"\ud800"'),
            (Text("x"), '"x"'),
            ([1, "a", None], '[1, "a", None]'),
            ((1, 2), "[1, 2]"),
            (Pair(1, 2), "[1, 2]"),
            ({"b": 1, "a": [2]}, '{"a": [2], "b": 1}'),
            (MappingProxyType({"a": 1}), '{"a": 1}'),
            ({2: 2, None: 3, True: 4, 1.5: 5}, '{"1.5": 5, "2": 2, "null": 3, "true": 4}'),
            ({Level.HIGH: 2}, '{"3": 2}'),
            ({Colour.RED: 2}, '{"red": 2}'),
            ({2, 1}, "set(1, 2)"),
            (frozenset("ba"), 'set("a", "b")'),
            (set(), "set()"),
            (Colour.RED, '"red"'),
            (Colour.ONE, "1"),
            (Level.HIGH, "3"),
            (Currency.EUR, '"EUR"'),
            (A_UUID, f"UUID({A_UUID})"),
            (Decimal("1.10"), "Decimal(1.1)"),
            (Decimal("-1e3"), "Decimal(-1000)"),
            (Decimal("1.50e-7"), "Decimal(0.00000015)"),
            (Decimal("1e400"), "Decimal(1E+400)"),
            (Decimal("-12e-400"), "Decimal(-1.2E-399)"),
            (Decimal("-0.00"), "Decimal(0)"),
            (Decimal("NaN"), "Decimal(NaN)"),
            (Decimal("1" * 40), f"Decimal({'1' * 40})"),
            (BERLIN, "datetime(2026-07-01T10:00:00+00:00)"),
            (datetime(2026, 7, 1, 12), "datetime(2026-07-01T12:00:00)"),
            (date(2026, 7, 1), "date(2026-07-01)"),
            (time(12, 30), "time(12:30:00)"),
            (timedelta(days=1, microseconds=5), "timedelta(1 day, 0:00:00.000005)"),
            (timedelta(microseconds=-5), "timedelta(-1 day, 23:59:59.999995)"),
            (b"ab\xff", f"bytes({base64.b64encode(b'ab' + bytes([255])).decode()})"),
            (bytearray(b"x"), "bytes(eA==)"),
            (memoryview(b"x"), "bytes(eA==)"),
        ],
    )
    def test_of_every_type(self, value, text):
        assert canonical(value) == text

    def test_one_value_has_one_form(self):
        assert canonical({"a": 1, "b": 2}) == canonical(OrderedDict(b=2, a=1))
        assert canonical(Decimal("1E2")) == canonical(Decimal("100.0"))
        assert canonical(BERLIN) == canonical(BERLIN.astimezone(timezone(timedelta(hours=-9))))
        assert canonical({"b", "a", "c"}) == canonical({"c", "b", "a"})

    def test_of_a_saved_row(self):
        assert canonical(fenced(Invoice, pk=7)) == "tests.invoice:7"
        assert canonical([fenced(Invoice, pk="7")]) == '[tests.invoice:"7"]'

    @pytest.mark.parametrize("row", [Invoice(), Invoice(pk=7)])
    def test_a_row_that_is_not_saved_is_refused(self, row):
        with pytest.raises(TypeError, match="isn't saved"):
            canonical(row)

    @pytest.mark.parametrize(
        "value",
        # A lazy text depends on the language.
        [
            *(object(), range(3), print, Invoice, 1j, iter([]), [object()]),
            *({"a": {1: object()}}, gettext_lazy("yes")),
        ],
    )
    def test_unknown_types_are_refused(self, value):
        with pytest.raises(TypeError, match="no fixed text"):
            canonical(value)

    @pytest.mark.parametrize("key", [(1, object()), object(), Invoice])
    def test_unknown_keys_are_refused(self, key):
        with pytest.raises(TypeError):
            canonical({key: 1})


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False),
    st.text(),
    st.uuids(),
    st.decimals(allow_nan=False, places=4, min_value=-1000, max_value=1000),
    st.datetimes(),
    st.datetimes(timezones=st.timezones(), min_value=datetime(1990, 1, 1)),
    st.dates(),
    st.times(),
    st.binary(),
)


def nested(scalars):
    def within(inner):
        return st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)

    return st.recursive(scalars, within, max_leaves=8)


VALUES = nested(SCALARS)
#: What JSON doesn't have, but other serialisers do.
MORE = nested(SCALARS | st.timedeltas() | st.decimals(allow_nan=False))


def typed(value):
    """Return what tells values apart as names are meant to, in another way than names do."""
    if isinstance(value, list):
        return ("list", tuple(map(typed, value)))
    if isinstance(value, dict):
        return ("dict", frozenset((key, typed(each)) for key, each in value.items()))
    if isinstance(value, datetime) and value.tzinfo is not None:
        return ("moment", value.astimezone(UTC))
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)


@pytest.mark.slow
class TestProperties:
    @settings(max_examples=200, deadline=None)
    @given(VALUES)
    @example(BERLIN)
    @example({"__type__": "x", "__value__": "y", "z": 1})
    def test_a_worker_finds_the_same_form(self, value):
        ((arrived,), _) = through_json(value)
        assert canonical(arrived) == canonical(value)

    @settings(max_examples=200, deadline=None)
    @given(MORE, MORE)
    @example(timedelta.max, timedelta.max - timedelta.resolution)
    @example(1, True)
    @example(1, 1.0)
    @example(0.0, -0.0)
    @example("a, b", ["a", "b"])
    @example(["a, b"], ["a", "b"])
    @example({"a": 1, "b": 2}, {'a": 1, "b': 2})
    @example(datetime(2026, 7, 1), datetime(2026, 7, 1, tzinfo=UTC))
    @example(datetime(2026, 7, 1), date(2026, 7, 1))
    @example(b"", "")
    @example([], {})
    def test_two_values_have_two_forms(self, one, other):
        assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))

    @settings(max_examples=50, deadline=None)
    @given(st.dictionaries(st.sampled_from("abcdef"), VALUES, max_size=6))
    def test_every_form_is_a_valid_name(self, values):
        charge = single_instance()(lambda **given: None)
        assert 0 < len(charge._fencedlock_single.name(None, (), values)[0]) <= 200


@pytest.fixture
def made(celery_app):
    def make(function, *naming, policy=None, **options):
        # Celery compiles it into a definition.
        function.__name__ = "charge"
        celery_app.tasks.pop("shop.charge", None)
        wrapped = single_instance(*naming, **(policy or {}))(function)
        return celery_app.task(wrapped, name="shop.charge", shared=False, **options)

    return make


def charge(invoice_id, currency="EUR", *rest, note=None, **more):
    pass


class TestByCall:
    def test_what_it_looks_like(self, made):
        task = made(lambda a, b="x": None)
        assert lock_name(task, 1) == 'shop.charge(a=1, b="x")'
        assert lock_name(made(charge), 1, "USD", 2, key=[3]) == (
            'shop.charge(invoice_id=1, currency="USD", rest=[2], note=None, more={"key": [3]})'
        )

    def test_one_call_has_one_name_however_it_is_written(self, made):
        task = made(charge)
        names = {
            lock_name(task, 1),
            lock_name(task, invoice_id=1),
            lock_name(task, 1, "EUR"),
            lock_name(task, 1, currency="EUR", note=None),
        }
        assert len(names) == 1

    def test_two_calls_have_two_names(self, made):
        task = made(charge)
        calls = [((1,), {}), (("1",), {}), ((True,), {}), ((1.0,), {}), (([1],), {}), ((None,), {})]
        assert len({lock_name(task, *args, **kwargs) for args, kwargs in calls}) == len(calls)

    def test_two_tasks_have_two_names(self, celery_app):
        wrapped = single_instance(charge)
        one, two = (celery_app.task(wrapped, name=name, shared=False) for name in ("a", "b"))
        assert lock_name(one, 1) != lock_name(two, 1)

    def test_the_worker_finds_the_same_name(self, made):
        task = made(charge)
        given = (
            (1, Currency.EUR, (1, 2)),
            {"note": {1: BERLIN}, "more": [A_UUID, Decimal("1.10"), Level.HIGH, b"\xff"]},
        )
        args, kwargs = through_json(*given[0], **given[1])
        assert lock_name(task, *given[0], **given[1]) == lock_name(task, *args, **kwargs)

    @pytest.mark.slow
    def test_another_process_finds_the_same_name(self, made):
        script = (
            "from datetime import date\n"
            "from django_fencedlock.celery.values import canonical\n"
            "print(canonical({'a': {'x', 'y', 'z', 1, None}, 'b': date(2026, 7, 1)}))"
        )
        found = {run_python(code=script, PYTHONHASHSEED=seed).stdout for seed in ("1", "2", "3")}
        assert len(found) == 1

    def test_long_names_are_cut_and_differ(self, made):
        task = made(lambda text: None)
        one, two = (lock_name(task, "x" * 300 + end) for end in "ab")
        assert len(one) == len(two) == 200
        assert one != two
        assert one[:150] == two[:150]
        assert one.startswith('shop.charge(text="xxx')
        assert lock_name(task, "x" * 100).endswith('x")')
        # Of any alphabet.
        name = lock_name(task, "🔒" * 300)
        assert len(name) == 200
        name.encode()
        room = 200 - len(lock_name(task, ""))
        assert lock_name(task, "x" * room).endswith('x")')
        assert "…#" in lock_name(task, "x" * (room + 1))

    @pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1,), {"invoice_id": 1})])
    def test_wrong_arguments(self, made, args, kwargs):
        with pytest.raises(TypeError):
            lock_name(made(charge), *args, **kwargs)


class TestByTemplate:
    def test_of_the_parameters(self, made):
        task = made(charge, "invoice:{invoice_id}:{currency}")
        assert lock_name(task, 1) == lock_name(task, invoice_id=1) == "invoice:1:EUR"
        assert lock_name(task, 1, currency="USD") == "invoice:1:USD"

    def test_of_parts(self, made):
        task = made(lambda invoice, when: None, "i:{invoice[id]}:{when:%Y-%m}")
        assert lock_name(task, {"id": 4}, date(2026, 7, 1)) == "i:4:2026-07"

    def test_the_worker_finds_the_same_name(self, made):
        task = made(lambda a, b, c, d: None, "{a}:{b}:{c}:{d}")
        given = (A_UUID, BERLIN, Currency.EUR, Decimal("1.10"))
        args, _ = through_json(*given)
        assert lock_name(task, *given) == lock_name(task, *args)

    def test_tasks_may_share_names(self, celery_app):
        tasks = [
            celery_app.task(single_instance("invoice:{pk}")(_pk), name=name, shared=False)
            for name in ("one", "two")
        ]
        assert len({lock_name(task, 1) for task in tasks}) == 1

    @pytest.mark.parametrize(
        ("template", "why"), [("x:{", "x:"), ("x:}", "x:"), ("x:{a!", "x:"), ("", "empty")]
    )
    def test_what_is_no_template_is_an_error_at_once(self, template, why):
        with pytest.raises(ValueError, match=why):
            single_instance(template)(lambda a: None)

    def test_keys_of_kwargs_may_be_used(self, made):
        def mail(self, **kwargs): ...

        task = made(mail, "mail:{outgoing}:{self.name}", bind=True)
        assert lock_name(task, outgoing=7, other=None) == "mail:7:shop.charge"
        with pytest.raises(TypeError, match="argument 'outgoing' is missing"):
            lock_name(task, other=None)
        row = made(mail, Invoice, policy={"pk": "{outgoing}"}, bind=True)
        assert lock_name(row, outgoing=7) == Invoice.fencing.lock(pk=7).name
        with pytest.raises(TypeError, match="argument 'outgoing' is missing"):
            lock_name(row, other=None)

    @pytest.mark.parametrize(
        ("naming", "terms", "words"),
        [
            ("x:{card}", {}, "not a parameter"),
            *((each, {"pk": "{card}"}, "names a row") for each in (Invoice, "tests.Invoice")),
        ],
    )
    def test_keys_of_kwargs_that_are_hidden_are_unknown(self, naming, terms, words):
        with pytest.raises(TypeError, match=words):
            single_instance(naming, sensitive="more", **terms)(charge)

    @pytest.mark.parametrize("naming", [(), ("x:{note}",)])
    def test_values_without_a_text_of_their_own_are_refused_at_the_call(self, made, naming):
        with pytest.raises(TypeError, match="no fixed text"):
            lock_name(made(charge, *naming), 1, note=object())

    def test_a_name_that_gets_too_long_is_refused(self, made):
        with pytest.raises(ValueError, match="200 are allowed"):
            lock_name(made(charge, "x:{currency}"), 1, "x" * 200)


class TestByCallable:
    def test_of_the_arguments(self, made):
        seen = []

        def name(task, arguments):
            seen.append((task.name, arguments))
            return f"invoice:{arguments['invoice_id'] % 10}"

        task = made(charge, name)
        assert lock_name(task, 42) == "invoice:2"
        arguments = {"invoice_id": 42, "currency": "EUR", "rest": (), "note": None, "more": {}}
        assert seen == [("shop.charge", arguments)]

    @pytest.mark.django_db
    def test_of_the_tasks_id(self, made):
        task = made(lambda: current_lease().name, lambda task, arguments: f"run:{task.request.id}")
        assert task.apply(task_id="x-1").get() == "run:x-1"

    @pytest.mark.parametrize("name", [None, 3, "", "x" * 201, "a\0b"])
    def test_what_it_returns_has_to_be_a_name(self, made, name):
        task = made(charge, lambda task, arguments: name)
        with pytest.raises((TypeError, ValueError), match="ock name"):
            lock_name(task, 1)

    def test_it_may_change_the_arguments_without_harm(self, made):
        task = made(lambda pk: pk, lambda task, arguments: f"x{arguments.pop('pk')}")
        assert lock_name(task, 1) == lock_name(task, 1) == "x1"


class TestByModel:
    @pytest.mark.parametrize("model", [Invoice, "tests.Invoice", "tests.invoice"])
    @pytest.mark.parametrize("value", [7, "7", Invoice(pk=7)])
    def test_the_name_is_that_of_the_models_lock(self, made, model, value):
        task = made(lambda invoice_id, dry=False: None, model, policy={"pk": "{invoice_id}"})
        assert lock_name(task, value) == Invoice.fencing.lock(pk=value).name

    def test_a_row_may_be_a_part_of_an_argument_or_of_the_task(self, made):
        for template in ("{data[pk]}", "{self.pk}", "{self.pk:d}", "{data[pk]:03d}"):
            task = made(lambda self, data: None, Invoice, policy={"pk": template}, bind=True)
            task.pk = 7
            assert lock_name(task, {"pk": 7}) == Invoice.fencing.lock(pk=7).name

    def test_columns_may_be_of_several_parameters_and_constants(self, made):
        row = {"town": "{country}-{town}", "floor": "{floor}"}
        expected = Warehouse.fencing.lock(town="DE-Bonn", floor=2).name
        for naming, terms in (((Warehouse,), row), (("tests.Warehouse",), {"columns": row})):
            task = made(lambda town, floor, country="DE": None, *naming, policy=terms)
            assert lock_name(task, "Bonn", 2) == expected

    @pytest.mark.parametrize("column", ["account", "account_id"])
    def test_columns_may_be_named_by_their_fields(self, made, column):
        task = made(lambda account: None, LedgerLine, policy={column: "{account}"})
        assert lock_name(task, 7) == "account:7" == LedgerLine.fencing.lock(account_id=7).name

    @pytest.mark.parametrize(("template", "given"), [("{note}", None), ("x{note}", None)])
    def test_an_argument_of_none_names_no_row(self, made, template, given):
        task = made(charge, Invoice, policy={"pk": template})
        with pytest.raises(
            ValueError,
            match=r"^Argument note is None, so it names no row\. Save the object first, or",
        ):
            lock_name(task, 1, note=given)

    @pytest.mark.parametrize(
        ("town", "call", "empty"),
        [
            ("{town}-x", {"town": None}, "town"),
            ("{town[name]}-x", {"town": {"name": None}}, "town[name]"),
            ("{note}-{key}", {"key": None, "note": 1}, "key"),
        ],
    )
    def test_an_empty_part_of_a_column_names_no_row(self, made, town, call, empty):
        row = {"town": town, "floor": "{floor}"}
        task = made(lambda floor, note=None, **more: None, Warehouse, policy=row)
        with pytest.raises(ValueError, match=f"^Argument {re.escape(empty)} is None, so it names"):
            lock_name(task, 1, **call)

    def test_a_label_before_the_apps_are_ready_says_when_to_ask(self, made, monkeypatch):
        task = made(charge, "tests.Invoice", policy={"pk": "{invoice_id}"})
        monkeypatch.setattr(apps, "models_ready", False)
        with pytest.raises(SettingsError) as caught:
            lock_name(task, 1)
        assert str(caught.value) == (
            '@single_instance("tests.Invoice"): Models aren\'t loaded yet. Call django.setup() '
            "first, or use the task where the apps are ready, as in a function."
        )

    @pytest.mark.parametrize("model", [Invoice, "tests.Invoice"])
    def test_the_alias_is_the_one_of_the_fencing(self, made, monkeypatch, model):
        monkeypatch.setattr(Invoice.fencing.spec, "backend", "elsewhere")
        for terms, alias in (({}, "elsewhere"), ({"backend": "mine"}, "mine")):
            task = made(charge, model, policy={"pk": "{invoice_id}", **terms})
            assert single_of(task).policy.backend == alias

    @pytest.mark.parametrize("label", ["tests.Invoce", "nowhere.Invoice", "tests.Document"])
    def test_a_label_of_no_fenced_model_fails_before_the_lock(self, made, label):
        task = made(charge, label, policy={"pk": "{invoice_id}"})
        with pytest.raises(SettingsError, match=f'^@single_instance."{label}".: '):
            task(1)


@pytest.mark.parametrize("name", [3, object(), {"x"}])
def test_other_names_are_refused(name):
    with pytest.raises(TypeError):
        single_instance(name)(charge)


class TestKindsOfTasks:
    def test_bound(self, made):
        def bound(self, pk):
            pass

        for naming, name in (
            (("invoice:{pk}",), "invoice:1"),
            ((), "shop.charge(pk=1)"),
            ((lambda task, arguments: f"{task.name}:{arguments}",), "shop.charge:{'pk': 1}"),
        ):
            assert lock_name(made(bound, *naming, bind=True), 1) == name

    def test_bound_and_named_by_the_task_itself(self, made):
        task = made(lambda self, pk: None, "x:{self}", bind=True)
        with pytest.raises(TypeError, match="no fixed text"):
            lock_name(task, 1)
        assert lock_name(made(lambda self, pk: None, "{self.name}:{pk}", bind=True), 1) == (
            "shop.charge:1"
        )

    def test_bound_with_autoretry_or_of_a_base_class(self, celery_app, made):
        class Base(celery_app.Task):
            abstract = True

        for options in ({"autoretry_for": (ValueError,)}, {"base": Base}):
            task = made(lambda self, pk: None, bind=True, **options)
            assert lock_name(task, 1) == "shop.charge(pk=1)"

    def test_shared(self, celery_app):
        task = shared_task(name="shop.shared")(single_instance("x:{pk}")(_pk))
        assert lock_name(task, 1) == "x:1"

    def test_with_pydantic(self, celery_app):
        pydantic = pytest.importorskip("pydantic")

        class Order(pydantic.BaseModel):
            pk: int
            lines: list[str] = []

        def charge(order: Order, pk: int = 3):
            pass

        options = {"name": "shop.charge", "pydantic": True, "shared": False}
        task = celery_app.task(single_instance(charge), **options)
        name = lock_name(task, Order(pk=1, lines=["a"]))
        assert name == 'shop.charge(order={"lines": ["a"], "pk": 1}, pk=3)'
        assert lock_name(task, {"pk": 1, "lines": ["a"]}) == name

    def test_tasks_without_a_lock_and_functions(self, celery_app):
        plain = celery_app.task(_pk, name="plain", shared=False)
        with pytest.raises(TypeError, match="'plain' isn't under @single_instance"):
            lock_name(plain, 1)
        with pytest.raises(TypeError, match="isn't under @single_instance"):
            lock_name(charge, 1)


def _pk(pk):
    pass
