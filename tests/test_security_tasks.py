"""Messages and arguments of tasks that strangers, or those who may write tables, have made."""

import json
import logging

import pytest

from django_fencedlock import lock
from django_fencedlock.celery import lock_name, single_instance
from django_fencedlock.celery.coalesce import serve
from django_fencedlock.celery.duplicates import CONFLICTS, DELIVERY
from django_fencedlock.celery.policy import policy
from django_fencedlock.core.manager import service
from django_fencedlock.models import Fence, HeldLock, MessageRecord, PendingRun
from django_fencedlock.storage.pending_runs import PendingRuns
from tests.deliveries import app, as_current_app, deliver, sending
from tests.models import Invoice

pytestmark = pytest.mark.django_db(transaction=True)

CARD = "4111 1111 1111 1111"
NAME = "secure"
ran = []


def task_of(function, *naming, **options):
    terms = options.pop("terms", {})
    wrapped = single_instance(*naming, **terms)(function)
    return app.task(shared=False, name=f"secure.{options.pop('name')}", **options)(wrapped)


def pay(card, amount=1, *more, note=None, **rest):
    ran.append(card)
    return HeldLock.objects.values_list("name", flat=True).first()


def keep(value):
    ran.append(value)


paid = task_of(pay, name="pay", terms={"sensitive": ("card", "rest")}, acks_late=True)
templated = task_of(pay, "card:{card}", name="templated", terms={"sensitive": "card"})
called = task_of(
    pay,
    lambda task, arguments: f"x:{arguments['card']}",
    name="called",
    terms={"sensitive": "card"},
)
coalescing = task_of(keep, NAME, name="keep", terms={"on_conflict": "coalesce"})
other = task_of(keep, "other", name="other")
again = task_of(keep, "again", name="again", terms={"on_conflict": "retry"})


@pytest.fixture(autouse=True)
def here():
    with as_current_app(ran):
        yield


class TestSensitive:
    @pytest.mark.parametrize("task", [paid, templated, called])
    def test_a_name_distinguishes_calls_and_shows_no_argument(self, task, settings):
        names = {lock_name(task, card) for card in (CARD, "4111", 4111, None)}
        assert len(names) == 4
        assert not any("4111" in name for name in names)
        assert lock_name(task, CARD) == lock_name(task, card=CARD)
        settings.SECRET_KEY = "another"
        assert lock_name(task, CARD) not in names

    def test_what_isn_t_sensitive_is_shown(self):
        assert "amount=7" in lock_name(paid, CARD, 7, note=CARD)
        assert "7" not in lock_name(paid, CARD, pin="7").partition("rest=")[2][:2]

    def test_nothing_that_a_run_leaves_shows_it(self, caplog):
        caplog.set_level(logging.DEBUG)
        assert CARD not in deliver(paid, CARD).result
        with lock(lock_name(paid, CARD)):
            assert CARD not in str(deliver(paid, CARD).result)
        assert ran == [CARD]
        for model in (Fence, HeldLock, MessageRecord):
            assert CARD not in json.dumps(list(model.objects.values()), default=str)
        assert CARD not in caplog.text

    def test_what_celery_shows_of_a_message_has_stars(self):
        with sending() as sent:
            paid.delay(CARD, 2, 3, note="x", pin=CARD)
            paid.delay(card=CARD)
        one, two = (each.headers for each in sent)
        assert (one["argsrepr"], one["kwargsrepr"]) == (
            *("('***', 2, 3)", "{'note': 'x', 'pin': '***'}"),
        )
        assert (two["argsrepr"], two["kwargsrepr"]) == ("()", "{'card': '***'}")
        assert sent[0].args[0] == CARD

    @pytest.mark.parametrize("value", [object(), [object()], {CARD: object()}])
    def test_an_error_does_not_show_it(self, value):
        with pytest.raises(TypeError, match=r"'card' is an? .* no fixed text") as caught:
            lock_name(paid, value)
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
        assert "object at" not in str(caught.value)

    def test_a_mistake_is_an_error_where_the_task_is_decorated(self):
        with pytest.raises(TypeError, match=r"sensitive='crad'.*pay\(\) has no such parameter"):
            single_instance(sensitive="crad")(pay)
        with pytest.raises(TypeError, match="parameter names a row"):
            single_instance(Invoice, pk="{card}", sensitive="card")(pay)


class TestStoredMessages:
    """A writer to the table of pending runs can run nothing but the task itself."""

    def test_what_is_sent_is_the_task_and_nothing_is_linked_to_it(self):
        headers = {"task": other.name, "id": "x", "root_id": "y", "tenant": "a", DELIVERY: "z"}
        crafted = {
            "headers": headers,
            "serializer": "pickle",
            "task_id": "x",
            "link": [other.si(1)],
        }
        self.leave(options=json.dumps(crafted))
        with sending() as sent:
            self.serve()
        (serve,) = sent
        assert (serve.task, serve.headers["task"], serve.headers["tenant"]) == (
            *(coalescing.name, coalescing.name, "a"),
        )
        assert {"x", "y", "z"}.isdisjoint(map(str, serve.headers.values()))

    def test_what_hid_the_arguments_goes_along(self):
        self.leave()
        with sending() as sent:
            self.serve()
        assert sent[0].headers["argsrepr"] == "('hidden',)"
        assert sent[0].args[0] == "second"

    def leave(self, **crafted):
        with lock(NAME):
            deliver(coalescing, "second", argsrepr="('hidden',)")
        assert not crafted or PendingRun.objects.update(**crafted) == 1

    def serve(self):
        (pending,) = PendingRuns(service("default").config).waiting(NAME)
        serve(app, pending)


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
class TestMessages:
    @pytest.fixture(autouse=True)
    def on_postgres(self, settings):
        """Which stores no NUL and no surrogate."""
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}

    @pytest.mark.parametrize("crafted", ["a\0b", "\ud800", "\n", 7, None, {}, "x" * 37, ""])
    def test_whatever_a_message_is_known_by_it_runs(self, crafted):
        assert deliver(paid, CARD, headers={DELIVERY: crafted}).state == "SUCCESS"
        assert MessageRecord.objects.using("postgres").get().nonce.isalnum()

    @pytest.mark.parametrize("task_id", ["a\0b", "\x1b[2J", "日本", "x" * 300])
    def test_so_does_one_of_any_id(self, task_id):
        assert deliver(paid, CARD, id=task_id, redelivered=True).state == "SUCCESS"
        with lock(lock_name(paid, CARD)):
            assert deliver(paid, CARD, id=f"{task_id}!").state == "SUCCESS"

    @pytest.mark.parametrize("conflicts", [-(2**70), 2**70, "9", 1.5, None, []])
    def test_nor_is_its_count_of_conflicts_believed(self, conflicts):
        with lock("again"):
            done = deliver(again, 1, headers={CONFLICTS: conflicts})
        assert done.state in ("RETRY", "FAILURE")
        assert not isinstance(done.result, OverflowError)

    def test_what_hid_the_arguments_goes_along_with_the_next_try(self):
        with sending() as sent, lock("again"):
            deliver(again, CARD, argsrepr="('hidden',)", kwargsrepr="{}")
        assert sent[0].headers["argsrepr"] == "('hidden',)"


@pytest.mark.parametrize("tries", [0, 1, 4, 5000])
def test_pauses_grow_and_do_not_overflow(tries):
    assert policy(retry_countdown=1).pause(tries) == min(2**tries, 12)
