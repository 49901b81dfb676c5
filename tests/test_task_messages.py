"""The text of each error of `single_instance`: what happened, why, and what to do."""

import functools

import pytest
from celery import Task, shared_task
from django.contrib.auth.models import User
from django.db import models
from django.test.utils import isolate_apps

from django_fencedlock.celery import lock_name, single_instance
from django_fencedlock.models import FencedModel, Fencing
from django_fencedlock.test import assert_not_locked
from tests.models import Called, Invoice, Warehouse


def charge(invoice_id, currency="EUR"):
    """Do nothing: the function that most errors are about."""


async def acharge(invoice_id): ...


def gcharge(invoice_id):
    yield


def annotated(invoice: Invoice): ...


def bound(self, *args, invoice_id=None, **kwargs): ...


def keyed(self, *args, **kwargs): ...


class Charge(Task): ...


WHERE = "which is not a parameter of charge(). Parameters: invoice_id, currency."
DECORATES = (
    "@single_instance decorates functions. For a class-based task, decorate its run() method: put "
    "@single_instance above def run(self, ...) in Charge."
)
EXAMPLE = "{invoice_id}"
TEMPLATE = 'Write a template: @single_instance("charge:{}").'

BY_ARGUMENTS = (
    'Write @single_instance alone: all arguments name the lock, and on_conflict is "skip".'
)


def said(*given, of=charge, **terms):
    with pytest.raises((TypeError, ValueError)) as caught:
        single_instance(*given, **terms)(of)
    text = str(caught.value)
    assert len(text) <= 200, text
    return text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "invoice:{invocie_id}",
            f"Lock name 'invoice:{{invocie_id}}' uses {{invocie_id}}, {WHERE} Did you mean "
            "{invoice_id}?",
        ),
        *(
            (
                bare,
                f"Lock name {bare!r} has no braces, so all calls of charge() share one lock. Write "
                f'"{braced}", or rename it.',
            )
            for bare, braced in [
                ("invoice_id:x:currency", "{invoice_id}:x:{currency}"),
                ("invoice_id", "{invoice_id}"),
            ]
        ),
        ("x:{day}", f"Lock name 'x:{{day}}' uses {{day}}, {WHERE}"),
        (
            "invoice:{invoice_id",
            "Invalid lock name template 'invoice:{invoice_id': expected '}' before end of string. "
            "Write a parameter as {invoice_id}, and a brace as {{ or }}.",
        ),
        *(
            (
                f"x:{field}",
                f"Positional {shown} is not supported. Name a parameter, such as {EXAMPLE}.",
            )
            for field, shown in [
                *(("{}", "{}"), ("{!r}", "{}"), ("{0:>5}", "{0}"), ("{0.pk}", "{0.pk}")),
            ]
        ),
        (
            "tests.Invoice",
            '"tests.Invoice" names a model and no row. Write @single_instance("tests.Invoice", '
            'pk="{invoice_id}"), or another lock name.',
        ),
    ],
)
def test_of_a_template(template, message):
    assert said(template) == message


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            acharge,
            "@single_instance can't wrap acharge(): Celery doesn't run coroutines. Make it a plain "
            "function that calls async_to_sync() of asgiref.sync on the coroutine function.",
        ),
        (
            gcharge,
            "@single_instance can't wrap gcharge(): Celery doesn't run generators. Make it a plain "
            "function that consumes the generator.",
        ),
        (
            shared_task(charge, name="tests.messages", shared=False),
            "Put @single_instance below @shared_task, directly above the function:\n"
            "    @shared_task\n    @single_instance(...)\n    def my_task(...):",
        ),
        (Charge, DECORATES),
        (3, "@single_instance decorates a function, not 3."),
    ],
)
def test_of_what_is_decorated(function, message):
    assert said("x", of=function) == message


@pytest.mark.django_db
@pytest.mark.parametrize(("function", "what"), [(acharge, "coroutine"), (gcharge, "generator")])
def test_of_a_function_that_leaves_its_work_to_be_done(celery_app, eager_tasks, function, what):
    @celery_app.task(shared=False)
    @single_instance("x")
    def made():
        return function(3)

    with pytest.raises(TypeError) as caught:
        made.delay().get()
    assert str(caught.value) == (
        f"@single_instance can't wrap made(): it returned a {what}, which would run after the "
        "lock was released. Celery doesn't run it: run it to its end in the task, as "
        "async_to_sync() does."
    )
    assert_not_locked("x")


def test_of_a_class_without_a_name():
    with pytest.raises(TypeError) as caught:
        single_instance(Charge)
    assert str(caught.value) == DECORATES


@pytest.mark.parametrize(
    ("terms", "hint"),
    [
        (
            {"timeout": 30},
            "Write ttl= for how long the lock lasts, or blocking_timeout= for how long "
            'on_conflict="wait" waits.',
        ),
        ({"wait_timeout": 30}, 'Write blocking_timeout=, with on_conflict="wait".'),
        (
            {"lock_expiry": 60},
            "Write ttl=. The lock is renewed while the task runs; max_hold= limits that.",
        ),
        (
            {"expires": 60},
            "Write max_hold= for how long a run may keep the lock. Expiry of messages belongs to "
            "the task: @shared_task(expires=...).",
        ),
        ({"raise_on_duplicate": True}, 'Write on_conflict="raise".'),
        (
            {"graceful": True},
            'Leave it out: on_conflict="skip" is the default. on_conflict="raise" is the opposite.',
        ),
        (
            {"unlock_before_run": True},
            'Write on_conflict="coalesce": triggers during a run become one more run.',
        ),
        ({"keys": ["currency"]}, TEMPLATE.format("{currency}")),
        ({"unique_on": ["invoice_id", "currency"]}, TEMPLATE.format("{invoice_id}:{currency}")),
        ({"unique_on": "currency"}, TEMPLATE.format("{currency}")),
        ({"once": {"keys": ["currency"]}}, TEMPLATE.format("{currency}")),
        ({"once": {"graceful": True}}, BY_ARGUMENTS),
        ({"unique_on": []}, BY_ARGUMENTS),
        ({"on_conflct": "skip"}, "Did you mean 'on_conflict'?"),
        (
            {"zzz": 3},
            "Arguments: on_conflict, blocking_timeout, ttl, backend, max_hold, fenced and 8 more.",
        ),
    ],
)
def test_of_arguments_of_other_packages(terms, hint):
    (key,) = terms
    message = f"@single_instance has no argument {key!r}. {hint}"
    for name in ((), ("x:{invoice_id}",), (lambda task, arguments: "x",), ("reports.daily",)):
        assert said(*name, **terms) == message


@pytest.mark.parametrize("once", [{}, {"graceful": True}, {"keys": []}])
def test_of_keys_of_a_task_without_parameters(once):
    message = f"@single_instance has no argument 'once'. {BY_ARGUMENTS}"
    assert said(once=once, of=lambda: None) == said(once=once, of=lambda self: None) == message


USER = (
    "User is not a FencedModel, so it has no lock. Write a template: "
    '@single_instance("user:{invoice_id}").'
)


@pytest.mark.parametrize(
    ("model", "terms", "message"),
    [
        (User, {"pk": "{invoice_id}"}, USER),
        (
            Invoice,
            {},
            "The lock of Invoice is named by id. Write @single_instance(Invoice, "
            'pk="{invoice_id}").',
        ),
        (
            Invoice,
            {"pk": "invoice_id"},
            "@single_instance(Invoice, pk='invoice_id'): it must be a template. Write "
            'pk="{invoice_id}".',
        ),
        (
            Invoice,
            {"pk": 3},
            '@single_instance(Invoice, pk=3): it must be a template. Write pk="{invoice_id}".',
        ),
        (
            Invoice,
            {"pk": "{invoce_id}"},
            f"@single_instance(Invoice): pk '{{invoce_id}}' uses {{invoce_id}}, {WHERE} Did you "
            "mean {invoice_id}?",
        ),
        (
            Invoice,
            {"pk": "{invoice_id}", "tll": 3},
            "@single_instance(Invoice) has no argument 'tll', and Invoice has no such column. Did "
            "you mean 'ttl'?",
        ),
        (
            Warehouse,
            {"pk": "{invoice_id}"},
            "The lock of Warehouse is named by town, floor. Write @single_instance(Warehouse, "
            'town="{invoice_id}", floor="{invoice_id}").',
        ),
        (
            Called,
            {"pk": "{invoice_id}"},
            "@single_instance(Called): its lock is named by a callable, which needs a row. Give a "
            "callable (task, arguments) -> name instead of the model.",
        ),
        (
            "tests.Invoice",
            {"pk": "invoice_id"},
            "@single_instance(\"tests.Invoice\", pk='invoice_id'): it must be a template. Write "
            'pk="{invoice_id}".',
        ),
        (
            "tests.Invoice",
            {"pk": "{invoice_id}", "tll": 3},
            "@single_instance(\"tests.Invoice\") has no argument 'tll'. Did you mean 'ttl'?",
        ),
        (
            Warehouse,
            {"town": "Bern", "floor": "currency"},
            "@single_instance(Warehouse, town='Bern'): it must be a template. Write "
            'town="{invoice_id}".',
        ),
        (
            Warehouse,
            {"floor": "currency", "town": "Bern"},
            "@single_instance(Warehouse, floor='currency'): it must be a template. Write "
            'floor="{currency}".',
        ),
        ("x", {"columns": 3}, 'columns is 3; write columns={"column": "{parameter}"}.'),
        (
            Invoice,
            {"pk": "{invoice_id}", "columns": {"pk": "{invoice_id}"}},
            "@single_instance has 'pk' twice: remove it from columns=.",
        ),
        *(
            (
                name,
                terms,
                "Column 'pk' needs a model: @single_instance(Invoice, pk=\"{invoice_id}\").",
            )
            for name in ("x", None)
            for terms in [{"pk": "{invoice_id}"}, {"columns": {"pk": "{invoice_id}"}}]
        ),
    ],
)
def test_of_a_model(model, terms, message):
    assert said(model, **terms) == message


@pytest.mark.parametrize("function", [bound, keyed])
@pytest.mark.parametrize("naming", [("x:{}",), ("tests.Invoice",), (Invoice,)])
def test_an_example_is_a_parameter_of_one_value(naming, function):
    text = said(*naming, of=function)
    assert EXAMPLE in text
    assert "{self}" not in text
    assert "args}" not in text


@pytest.mark.parametrize("wraps", [False, True])
def test_of_a_second_decoration(wraps):
    once = single_instance("x")(charge)
    below = functools.wraps(once)(lambda *args: once(*args)) if wraps else once
    message = (
        "charge() is under @single_instance already, and a run has one lock of it. Remove one of "
        "them. For a further lock, write `with lock(...):` in the body."
    )
    assert said("y", of=below) == message
    with pytest.raises(TypeError, match="is under @single_instance already"):
        single_instance(below)


@isolate_apps("tests")
def test_of_a_column_with_the_name_of_an_argument():
    class Job(FencedModel):
        fencing = Fencing("job:{backend}:{number}")

        backend = models.CharField(max_length=9)
        number = models.IntegerField()

        class Meta:
            app_label = "tests"

    def run(backend, number): ...

    assert said(Job, backend="{backend}", number="{number}", of=run) == (
        "The lock of Job is named by backend, number. Write @single_instance(Job, "
        'number="{number}", columns={"backend": "{backend}"}).'
    )
    task = single_instance(Job, number="{number}", columns={"backend": "{backend}"})(run)
    single = task._fencedlock_single
    assert single.policy.backend == "default"
    assert single.name(None, ("x", 2), {})[0] == "job:x:2"


@pytest.mark.parametrize(
    ("naming", "function", "message"),
    [
        (
            (),
            charge,
            "Parameter 'invoice_id' of tests.messages: a lock name can't contain an object, which "
            "has no fixed text. Write a template of plain values, or a callable (task, arguments) "
            "-> name.",
        ),
        (
            ("x:{invoice_id}",),
            charge,
            "Parameter 'invoice_id' is an object, which has no fixed text for lock name "
            "'x:{invoice_id}'. Pass a plain value instead.",
        ),
    ],
)
def test_of_a_value_without_a_text(celery_app, naming, function, message):
    made = celery_app.task(name="tests.messages", shared=False)
    task = made(single_instance(*naming)(function))
    with pytest.raises(TypeError) as caught:
        lock_name(task, object())
    assert str(caught.value) == message


def test_of_an_annotation():
    assert said("x:{invoice}", of=annotated) == (
        "Parameter 'invoice' is an Invoice, which has no fixed text for lock name 'x:{invoice}'. "
        "Use a plain value of it, such as {invoice.pk}."
    )
