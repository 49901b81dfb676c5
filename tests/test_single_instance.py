"""The decorator and the course of a run, with Celery's own code and messages in memory."""

import functools
import inspect
import json
import os
import pickle
import sys
import threading
from types import SimpleNamespace

import pytest
from billiard.pool import soft_timeout_sighandler
from celery import Celery, shared_task
from celery.exceptions import MaxRetriesExceededError, Reject, Retry, SoftTimeLimitExceeded
from django.db import transaction
from kombu.serialization import dumps, loads

from django_fencedlock import LeaseLost, LockNotAcquired, current_lease, lock
from django_fencedlock.celery import SkippedRun, lock_name, single_instance
from django_fencedlock.celery.duplicates import CONFLICTS
from django_fencedlock.core import grants
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import AliasConflict, BackendUnavailable, SettingsError
from django_fencedlock.models import HeldLock, PendingRun
from django_fencedlock.test import (
    assert_locked,
    assert_not_locked,
    eager_tasks,
    hold_lock,
    lose_lease,
)
from tests.backends import REDIS
from tests.brokered import deliver, waiting
from tests.failing import raising, unavailable
from tests.threads import elsewhere

pytestmark = pytest.mark.django_db(transaction=True)


@shared_task(name="tests.shared")
def shared():
    """Do nothing: a task of every app."""


DOWN = {"BACKEND": REDIS, "LOCATION": "redis://127.0.0.1:1/0"}


@pytest.fixture
def app(celery_app):
    return celery_app


@pytest.fixture
def task(app):
    def make(*naming, options=None, **policy):
        def charge(pk=42):
            return current_lease().token

        decorated = single_instance(*(naming or ("invoice:{pk}",)), **policy)(charge)
        app.tasks.pop("shop.charge", None)
        return app.task(decorated, name="shop.charge", shared=False, **(options or {}))

    return make


@pytest.fixture
def charge(task):
    return task()


class TestTheDecorator:
    def test_bare(self, app):
        @app.task(name="shop.nightly", shared=False)
        @single_instance
        def nightly(when="now"):
            assert_locked('shop.nightly(when="now")')
            return when

        assert nightly() == "now"

    @pytest.mark.parametrize("terms", [{}, {"ttl": 5}])
    def test_a_callable_that_names_locks(self, task, terms):
        def name(task, arguments):
            return f"made:{arguments['pk']}"

        partial = functools.partial(lambda prefix, task, arguments: f"{prefix}:42", "made")
        for naming in (name, lambda task, arguments: "made:42", partial):
            charge = task(naming, **terms)
            assert lock_name(charge) == "made:42"

    def test_a_callable_with_terms_is_never_what_is_decorated(self):
        decorator = single_instance(len, on_conflict="raise")
        assert not hasattr(decorator, "_fencedlock_single")

    def test_keeps_what_a_function_is(self):
        @single_instance
        def charge(pk: int, currency: str = "EUR") -> int:
            """Charge."""

        assert charge.__name__ == "charge"
        assert "Charge." in charge.__doc__
        assert str(inspect.signature(charge)) == "(pk: int, currency: str = 'EUR') -> int"
        assert charge.__module__ == __name__

    @pytest.mark.parametrize("terms", [None, {"name": "x"}, {"name": "x", "on_conflict": "raise"}])
    @pytest.mark.parametrize("kind", ["task", "evaluated task", "shared task", "class"])
    def test_above_the_task_is_the_wrong_order(self, app, terms, kind):
        def charge():
            pass

        made = {
            "task": lambda: app.task(charge, shared=False),
            "evaluated task": lambda: app.task(charge, shared=False)._get_current_object(),
            "shared task": lambda: shared,
            "class": lambda: type("Charge", (app.Task,), {"name": "x", "run": charge})(),
        }[kind]()
        with pytest.raises(
            TypeError, match=r"(?s)^Put @single_instance below.*\n +@single_instance"
        ):
            single_instance(made) if terms is None else single_instance(**terms)(made)

    def test_the_wrong_order_does_not_create_the_task(self, app):
        proxy = app.task(lambda: None, name="lazy", shared=False, lazy=True)
        with pytest.raises(TypeError):
            single_instance(proxy)
        assert "lazy" not in app._tasks

    def test_coroutines_and_generators_are_refused(self):
        async def coroutine():
            pass

        def generator():
            yield

        async def agenerator():
            yield

        for function in (coroutine, generator, agenerator):
            for decorate in (single_instance, single_instance("x")):
                with pytest.raises(TypeError, match=f"{function.__name__}"):
                    decorate(function)

    @pytest.mark.parametrize("thing", [3, "x", None])
    def test_what_is_no_function_is_refused(self, thing):
        with pytest.raises(TypeError, match="decorates a function"):
            single_instance("x")(thing)

    @pytest.mark.parametrize(
        ("terms", "words"),
        [
            ({"on_conflict": "queue"}, "'queue'.*'skip', 'retry', 'wait', 'raise', 'coalesce'"),
            ({"on_lost": "die"}, "on_lost is 'die'"),
            ({"on_backend_error": "skip"}, "on_backend_error is 'skip'"),
            ({"redelivery": "drop"}, "'drop'.*'defer', 'run'"),
            ({"max_conflict_retries": None}, "never fails visibly"),
            ({"max_conflict_retries": -1}, "zero or more"),
            ({"max_conflict_retries": True}, "whole number"),
            ({"max_conflict_retries": 1.5}, "whole number"),
            ({"blocking_timeout": 3}, "here on_conflict is 'skip'"),
            ({"on_conflict": "coalesce", "fenced": False}, "requires fenced=True"),
            ({"blocking_timeout": None}, "here on_conflict is 'skip'"),
            ({"on_backend_error": "run"}, "needs fenced=False"),
            ({"ttl": 0}, "ttl is 0; it has to be more than zero"),
            ({"max_hold": -1}, "max_hold is -1"),
            ({"on_conflict": "wait", "blocking_timeout": -1}, "blocking_timeout is -1"),
            ({"retry_countdown": float("inf")}, "retry_countdown is inf"),
        ],
    )
    def test_terms_that_can_not_be(self, terms, words):
        with pytest.raises(ValueError, match=words):
            single_instance("x", **terms)

    @pytest.mark.parametrize("term", ["ttl", "max_hold", "retry_countdown"])
    def test_durations_are_numbers(self, term):
        with pytest.raises(TypeError, match=f"{term} is '5'"):
            single_instance("x", **{term: "5"})

    def test_an_alias_that_is_not_configured_fails_at_the_run(self, task):
        with pytest.raises(SettingsError, match="no alias 'jobs'"):
            task(backend="jobs")()


class TestCalls:
    def test_wrong_arguments_fail_where_the_task_is_called(self, charge):
        for call in (charge.delay, charge.apply_async, charge.s().delay):
            with pytest.raises(TypeError):
                call(*([1, 2, 3] if call != charge.apply_async else [[1, 2, 3]]))
        with pytest.raises(TypeError):
            charge(1, 2, 3)
        assert_not_locked("invoice:1")

    def test_wrong_arguments_of_a_bound_task(self, app):
        @app.task(bind=True, shared=False)
        @single_instance
        def charge(self, pk):
            pass

        for args in ((), (1, 2)):
            with pytest.raises(TypeError):
                charge.delay(*args)
        charge.delay(1)

    @pytest.mark.parametrize("on_conflict", ["skip", "retry", "raise", "wait", "coalesce"])
    def test_a_direct_call_returns_its_own_type_or_raises(self, task, on_conflict):
        wait = {"blocking_timeout": 0} if on_conflict == "wait" else {}
        charge = task(on_conflict=on_conflict, **wait)
        with hold_lock("invoice:42") as held, pytest.raises(LockNotAcquired) as caught:
            charge()
        assert caught.value.holder.token == held.token
        # Nothing is left that runs it later: the caller has the error.
        assert waiting(charge.app) == PendingRun.objects.count() == 0
        assert charge() == 2

    @pytest.mark.parametrize("on_conflict", ["skip", "coalesce"])
    def test_a_direct_call_within_a_run_raises_too(self, app, task, on_conflict):
        charge = task(on_conflict=on_conflict)

        @app.task(shared=False)
        @single_instance("outer")
        def outer():
            with pytest.raises(LockNotAcquired):
                charge()
            return "raised"

        outer.delay()
        with hold_lock("invoice:42"):
            message = deliver(app)
        assert app.AsyncResult(message.headers["id"]).get(timeout=20) == "raised"

    @pytest.mark.parametrize(
        ("on_conflict", "reason"), [("skip", "held"), ("coalesce", "coalesced")]
    )
    def test_a_conflict_of_one_item_does_not_keep_starmap_from_the_others(
        self, task, on_conflict, reason
    ):
        charge = task(on_conflict=on_conflict)
        with hold_lock("invoice:42"):
            skipped, token = charge.starmap([(42,), (43,)]).apply().get()
        assert (skipped["reason"], token) == (reason, 1)
        with hold_lock("invoice:43"):
            assert charge.map([43]).apply().get()[0]["reason"] == reason

    def test_another_task_within_a_mapped_one_raises(self, app):
        """It is code that uses the value."""
        balance = single_instance("balance")(lambda: 5)

        @app.task(shared=False)
        def report(pk):
            return balance()

        with hold_lock("balance"), pytest.raises(LockNotAcquired):
            report.map([1]).apply().get()

    def test_the_function_itself_may_be_called(self):
        @single_instance
        def charge(pk):
            return current_lease().name

        assert charge(1) == f"{__name__}.{charge.__qualname__}(pk=1)"

    def test_only_a_direct_call_goes_into_a_block_that_has_the_lock(self, task):
        charge = task(on_conflict="raise")
        with lock("invoice:42") as lease:
            assert charge() == lease.token
            with pytest.raises(LockNotAcquired, match="the code that called"):
                charge.apply(throw=True)

    def test_a_task_within_itself(self, app):
        @app.task(shared=False)
        @single_instance("x", on_conflict="wait", blocking_timeout=100)
        def outer(deep=True):
            return outer(deep=False) if deep else "in"

        with pytest.raises(LockNotAcquired, match="can't continue before this call returns"):
            outer()
        assert_not_locked("x")

    def test_a_task_that_calls_one_with_another_lock(self, app, charge):

        @app.task(shared=False)
        @single_instance("outer")
        def outer():
            inner = charge()
            return inner, current_lease().name

        assert outer() == (1, "outer")

    def test_delivered_twice_each_has_an_owner_of_its_own(self, task):
        owners = []

        @single_instance("x", redelivery="run")
        def body():
            owners.append(current_lease().owner_id)

        app = task().app
        app.task(body, name="body", shared=False).delay()
        message = deliver(app)
        deliver(app, message)
        assert len(set(owners)) == 2

    def test_sent_by_its_name_alone(self, charge):
        result = charge.app.send_task("shop.charge", kwargs={"pk": 7})
        with hold_lock("invoice:7"):
            deliver(charge.app)
        assert SkippedRun.of(result.get(timeout=20))

    def test_starmap_and_chunks(self, charge):
        assert charge.map([42, 43]).apply().get() == [1, 1]
        assert charge.starmap([(42,), (43,)]).apply().get() == [2, 2]
        with eager_tasks(charge.app):
            assert charge.chunks([(42,), (43,)], 1)().get() == [[3], [3]]

    def test_the_holder_is_named_by_task_and_id(self, app):
        @app.task(name="shop.charge", shared=False)
        @single_instance("x")
        def charge():
            return str(assert_locked("x"))

        assert charge.apply(task_id="id-1").get().startswith("task shop.charge[id-1] on ")
        assert charge().startswith("task shop.charge on ")

    @pytest.mark.parametrize("options", [{}, {"autoretry_for": (ValueError,)}])
    @pytest.mark.parametrize("naming", [("invoice:{pk}",), ("{self.name}:{pk}",), ()])
    def test_of_a_class_whose_run_method_is_decorated(self, app, options, naming):
        """Its first run delivers two more messages, which are skipped."""

        class Charge(app.Task):
            name = "shop.charge"

            @single_instance(*naming)
            def run(self, pk):
                assert_locked(lock_name(self, pk))
                results.append([elsewhere(lambda: deliver(app)) for _ in range(waiting(app))])
                return current_lease().token

        results = []
        charge = app.register_task(Charge(), **options)
        assert charge(1) == 1
        ids = [charge.delay(1) for _ in range(3)]
        deliver(app)
        first, *others = [each.get(timeout=20) for each in ids]
        assert (first, [each["reason"] for each in others]) == (2, ["held", "held"])
        assert len(results) == 2

    @pytest.mark.parametrize(
        ("policy", "state"),
        [("skip", "SUCCESS"), ("retry", "RETRY"), ("raise", "FAILURE"), ("coalesce", "FAILURE")],
    )
    def test_of_a_subclass_whose_own_run_method_calls_the_decorated_one(self, app, policy, state):
        class Base(app.Task):
            abstract = True

            @single_instance("base:{pk}", on_conflict=policy)
            def run(self, pk):
                return current_lease().token

        class Child(Base):
            name = "shop.child"
            acks_late = True

            def run(self, first, second):
                return super().run(first), super().run(second)

        child = app.register_task(Child())
        result = child.delay(1, 2)
        with hold_lock("base:1"):
            deliver(app)
        assert result.state == state
        if policy == "skip":
            skipped, token = result.get(timeout=20)
            assert (skipped["reason"], token) == ("held", 1)
        # Each of the calls is run, also those of a message that may come again.
        result = child.delay(3, 3)
        while waiting(app):
            deliver(app)
        assert result.get(timeout=20) == [1, 2]
        with hold_lock("base:4"), pytest.raises(LockNotAcquired):
            child(4, 5)
        assert PendingRun.objects.count() == 0


class TestErrors:
    @pytest.mark.parametrize(
        "error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, Reject, Retry]
    )
    def test_release_the_lock(self, error):
        @single_instance("x")
        def fails():
            assert_locked("x")
            raise error

        with pytest.raises(error):
            fails()
        assert_not_locked("x")
        assert current_lease() is None

    @pytest.mark.parametrize("place", [("return", "_enter"), ("call", "_leave"), ("call", "enter")])
    def test_an_interrupt_around_the_body_leaves_nothing_behind(self, task, place):
        def interrupt(frame, event, arg):
            if (event, frame.f_code.co_name) == place:
                sys.setprofile(None)
                raise KeyboardInterrupt

        charge = task(on_conflict="retry")
        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                charge()
        finally:
            sys.setprofile(None)
        assert current_lease() is None
        assert_not_locked("invoice:42")
        # Within a run of the same lock, a conflict would be an error.
        result = charge.delay()
        with hold_lock("invoice:42"):
            deliver(charge.app)
        assert result.state == "RETRY"

    def test_a_lost_lease_fails_the_task(self, app):
        @app.task(shared=False)
        @single_instance("x")
        def loses():
            lose_lease(current_lease())
            return "done"

        result = loses.delay()
        deliver(app)
        with pytest.raises(LeaseLost, match="'x'"):
            result.get(timeout=20)

    @pytest.mark.parametrize(
        "terms",
        [
            {},
            {"on_lost": "abort"},
            {"options": {"acks_late": True, "autoretry_for": (OSError,)}},
            {"on_conflict": "coalesce"},
            {"on_conflict": "coalesce", "options": {"bind": True, "autoretry_for": (OSError,)}},
            {"fenced": False, "on_backend_error": "run", "backend": "down", "redelivery": "run"},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("error", [ZeroDivisionError, SoftTimeLimitExceeded])
    def test_pass_three_frames_of_the_package_at_most(self, app, settings, terms, error):
        settings.FENCEDLOCK = {"default": {}, "down": DOWN}

        def fails(*args):
            """Fail, after the arguments of another trigger came."""
            ran.append(args[-1])
            if len(ran) == 1:
                elsewhere(lambda: task.apply((2,)))
            if error is ZeroDivisionError:
                raise error
            soft_timeout_sighandler(None, None)

        ran = []
        options = terms.pop("options", {}) if (terms := dict(terms)) else {}
        task = app.task(single_instance("x", **terms)(fails), name="f", shared=False, **options)
        results = [task.delay(1)]
        deliver(app)
        while waiting(app):
            message = deliver(app)
            results.append(app.AsyncResult(message.headers["id"]))
        if terms.get("on_conflict") == "coalesce":
            assert ran == [1, 2]
        for result in results:
            assert result.state == "FAILURE", result.result
            assert type(result.result) is error
            assert 1 <= result.traceback.count("/django_fencedlock/") <= 3, result.traceback

    def test_a_loss_that_shows_at_the_release_fails_the_task(self):
        @single_instance("x")
        def loses():
            HeldLock.objects.filter(name="x").delete()

        with pytest.raises(LeaseLost, match="at the release"):
            loses()

    def test_a_block_of_the_caller_keeps_its_lock(self):
        with lock("x") as lease:
            single_instance("x")(lambda: None)()
            assert lease.verify()
            with pytest.raises(ZeroDivisionError):
                single_instance("x")(lambda: 1 / 0)()
            assert lease.verify()
        assert_not_locked("x")

    def test_a_lost_lease_may_be_ignored_and_an_error_of_the_body_goes_first(self):
        def loses(error=None):
            lose_lease(current_lease())
            if error:
                raise error
            return "done"

        assert single_instance("x", on_lost="ignore")(loses)() == "done"
        with pytest.raises(ZeroDivisionError):
            single_instance("x")(loses)(ZeroDivisionError())

    @pytest.mark.parametrize("policy", ["skip", "coalesce"])
    def test_a_name_that_lives_under_another_alias_is_no_conflict(self, task, settings, policy):
        settings.FENCEDLOCK = {"default": {}, "other": {}}
        charge = task(backend="other", on_conflict=policy)
        with lock("invoice:42"), pytest.raises(AliasConflict):
            elsewhere(charge)
        assert PendingRun.objects.count() == 0


class TestSkips:
    def test_name_the_holder(self, task):
        with hold_lock("invoice:42") as held:
            skipped = task().apply().get()
        assert isinstance(skipped, SkippedRun)
        assert (skipped.lock, skipped.reason, skipped.token) == ("invoice:42", "held", held.token)
        assert f"pid {os.getpid()}" in skipped.holder
        assert skipped.since is not None
        assert repr(skipped).startswith("<SkippedRun 'invoice:42': held, held by ")

    def test_the_error_after_a_wait_names_the_present_holder(self, task, monkeypatch):
        first = hold_lock("invoice:42", let_wait=True)
        first.__enter__()

        def pass_on(seconds):
            if not holders:
                first.__exit__(None, None, None)
                holders.append(lock("invoice:42", backend="default").acquire())

        holders = []
        monkeypatch.setattr(grants, "time", SimpleNamespace(sleep=pass_on))
        charge = task(on_conflict="wait", blocking_timeout=1)
        with pytest.raises(LockNotAcquired) as caught:
            elsewhere(charge)
        assert caught.value.holder.owner_id == holders[0].owner_id

    def test_a_wait_has_the_limit_of_the_setting_its_own_or_none(self, task, settings):
        settings.FENCEDLOCK = {"default": {"BLOCKING_TIMEOUT": 0.05}}
        held = hold_lock("invoice:42", let_wait=True)
        with held, pytest.raises(LockNotAcquired):
            elsewhere(task(on_conflict="wait"))
        held = hold_lock("invoice:42", let_wait=True)
        held.__enter__()
        timer = threading.Timer(0.5, held.__exit__, (None, None, None))
        timer.start()
        assert elsewhere(task(on_conflict="wait", blocking_timeout=None)) == 3
        timer.join()

    @pytest.mark.parametrize(
        "through",
        [
            lambda value: loads(*[dumps(value, "json")[i] for i in (2, 0, 1)]),
            lambda value: json.loads(json.dumps(value)),
            lambda value: pickle.loads(pickle.dumps(value)),
        ],
        ids=["kombu", "json", "pickle"],
    )
    def test_come_through_serialisers(self, task, through):
        with hold_lock("invoice:42"):
            skipped = task().apply().get()
        arrived = through(skipped)
        assert arrived == skipped
        assert SkippedRun.of(arrived) == skipped
        assert SkippedRun.of(arrived).holder == skipped.holder

    @pytest.mark.parametrize("value", [None, 3, {}, {"lock": "x"}, "skipped", [1]])
    def test_differ_from_other_results(self, value):
        assert SkippedRun.of(value) is None


class TestRetries:
    def test_come_again_by_a_message(self, task):
        charge = task(on_conflict="retry", retry_countdown=0)
        result = charge.delay()
        with hold_lock("invoice:42"):
            first = deliver(charge.app)
            assert result.state == "RETRY"
            second = deliver(charge.app)
        assert (second.headers[CONFLICTS], second.headers["retries"]) == (1, 0)
        assert second.headers["id"] == first.headers["id"]
        deliver(charge.app)
        assert result.get(timeout=20) == 2
        assert waiting(charge.app) == 0

    def test_are_messages_of_the_tasks_own_app(self, task):
        charge = task(on_conflict="retry", retry_countdown=0)
        Celery("another", broker="memory://").set_current()
        with eager_tasks(charge.app), hold_lock("invoice:42"):
            assert isinstance(charge.delay().result, LockNotAcquired)
        charge.delay()
        with hold_lock("invoice:42"):
            deliver(charge.app)
        assert waiting(charge.app) == 1

    def test_end_after_so_many(self, task):
        charge = task(on_conflict="retry", retry_countdown=0, max_conflict_retries=3)
        result = charge.delay()
        with hold_lock("invoice:42"):
            for _ in range(4):
                deliver(charge.app)
        assert waiting(charge.app) == 0
        with pytest.raises(LockNotAcquired):
            result.get(timeout=20)

    @pytest.mark.parametrize("max_retries", [0, 1, None])
    def test_do_not_eat_those_of_the_task(self, app, max_retries):
        runs = []

        @app.task(bind=True, max_retries=max_retries, default_retry_delay=0, shared=False)
        @single_instance("x", on_conflict="retry", retry_countdown=0)
        def charge(self):
            runs.append(self.request.retries)
            raise self.retry()

        result = charge.delay()
        with hold_lock("x"):
            for _ in range(3):
                deliver(app)
        deliver(app)
        assert runs == [0]
        if max_retries == 0:
            with pytest.raises(MaxRetriesExceededError):
                result.get(timeout=20)
            return
        with hold_lock("x"):
            for _ in range(2):
                message = deliver(app)
                assert message.headers["retries"] == 1
        deliver(app)
        assert runs == [0, 1]

    def test_keep_where_and_how_a_message_was_sent(self, task):
        charge = task(on_conflict="retry", retry_countdown=0)
        links = {"link": charge.si(2), "link_error": charge.si(3)}
        terms = {"expires": 1000, "time_limit": 50, "ignore_result": True, **links}
        charge.apply_async((1,), {}, headers={"mine": 1}, **terms)
        with hold_lock("invoice:1"):
            first = deliver(charge.app)
            second = deliver(charge.app)
        for key in ("expires", "timelimit", "ignore_result", "root_id", "group"):
            assert second.headers[key] == first.headers[key], key
        assert second.headers["mine"] == 1
        assert second.payload[2] == first.payload[2]

    def test_pauses_are_random_and_grow(self, task):
        charge = task(on_conflict="retry", retry_countdown=100)
        etas = []
        charge.delay()
        with hold_lock("invoice:42"):
            for _ in range(8):
                message = deliver(charge.app)
                etas.append(message.headers["eta"])
        assert etas[0] is None
        assert len(set(etas)) == 8

    def test_a_broker_that_takes_no_message_gets_this_one_back(self, task, monkeypatch, caplog):
        charge = task(on_conflict="retry")
        charge.delay()

        monkeypatch.setattr(charge.app, "send_task", raising(OSError("no broker")))
        with hold_lock("invoice:42"):
            deliver(charge.app)
        # As Celery does with a retry of a task's own: the broker has a place for such.
        assert "reject requeue=False: no broker" in caplog.text


class TestLinks:
    """A skipped run has succeeded; one that was refused has failed, unless it comes again."""

    @pytest.fixture
    def after(self, app):
        called = []

        @app.task(name="shop.linked", shared=False)
        def linked(result, word):
            called.append((word, SkippedRun.of(result) or result))

        return SimpleNamespace(
            called=called, terms={"link": linked.s("link"), "link_error": linked.si(None, "error")}
        )

    def call(self, charge, after):
        charge.apply_async((1,), **after.terms)
        with hold_lock("invoice:1"):
            deliver(charge.app)
        while waiting(charge.app):
            deliver(charge.app)
        return [word for word, _ in after.called]

    @pytest.mark.parametrize(("policy", "reason"), [("skip", "held"), ("coalesce", "coalesced")])
    def test_a_skipped_run_calls_the_link_with_the_reason(self, task, after, policy, reason):
        assert self.call(task(on_conflict=policy), after) == ["link"]
        assert after.called[0][1].reason == reason

    def test_a_retry_calls_the_link_once_it_has_run(self, task, after):
        charge = task(on_conflict="retry", retry_countdown=0)
        assert self.call(charge, after) == ["link"]
        assert isinstance(after.called[0][1], int)

    @pytest.mark.parametrize(
        ("policy", "terms"),
        [
            ("raise", {}),
            ("wait", {"blocking_timeout": 0}),
            ("retry", {"retry_countdown": 0, "max_conflict_retries": 0}),
        ],
    )
    def test_a_refused_run_and_the_last_retry_call_the_errback(self, task, after, policy, terms):
        assert self.call(task(on_conflict=policy, **terms), after) == ["error"]


def test_an_expired_message_takes_no_lock(monkeypatch, charge):
    asked = []
    monkeypatch.setattr(grants.Grants, "acquire", lambda *given: asked.append(given))
    result = charge.apply_async((1,), expires=-1)
    deliver(charge.app)
    assert (asked, result.state) == ([], "REVOKED")


class TestABackendThatIsDown:
    def test_works_with_autoretry(self, task, settings):
        charge = task(options={"autoretry_for": (BackendUnavailable,), "default_retry_delay": 0})
        settings.FENCEDLOCK = {"default": DOWN}
        result = charge.delay()
        deliver(charge.app)
        assert result.state == "RETRY"
        settings.FENCEDLOCK = {"default": {}}
        deliver(charge.app)
        assert result.get(timeout=20) == 1

    def test_may_be_run_without_its_lock_and_loudly(self, app, settings, caplog):
        settings.FENCEDLOCK = {"default": DOWN}

        @app.task(name="shop.charge", shared=False)
        @single_instance("x", fenced=False, on_backend_error="run")
        def charge():
            return current_lease()

        assert charge() is None
        assert "shop.charge runs without its lock 'x'" in caplog.text
        record = caplog.records[-1]
        assert record.levelname == "ERROR"
        assert (record.lock_name, record.lock_task) == ("x", "shop.charge")
        assert record.lock_reason in record.getMessage()

    def test_at_the_release_does_not_fail_what_is_done(self, monkeypatch, caplog, charge):

        monkeypatch.setattr(service("default").backend, "release", unavailable)
        assert charge() == 1
        assert "left to expire" in caplog.text


class TestTransactions:
    @pytest.mark.django_db(databases=["default", "postgres"], transaction=True)
    def test_of_the_caller_keep_the_lock_until_their_end(self, task, settings):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
        charge = task()
        with transaction.atomic(using="postgres"):
            charge()
            assert_locked("invoice:42")
        assert_not_locked("invoice:42")

    @pytest.mark.django_db(databases=["default", "postgres"], transaction=True)
    def test_that_a_body_leaves_open_end_with_its_error(self, settings):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}

        @single_instance("x")
        def fails():
            with transaction.atomic(using="postgres"):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fails()
        assert_not_locked("x")


@pytest.mark.django_db(databases=["default", "postgres"], transaction=True)
class TestCost:
    """A run pays for its lock what a `with` block does."""

    @pytest.fixture(autouse=True)
    def on_postgres(self, settings):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}

    @pytest.mark.parametrize(
        ("terms", "count"),
        # On record when it begins, and when it has ended.
        [({"redelivery": "run"}, 2), ({"options": {"acks_late": True}}, 2 + 2)],
    )
    def test_of_a_delivery(self, task, postgres, terms, count):
        charge = task(**terms)
        charge()
        charge.delay()
        with postgres.statements() as seen:
            deliver(charge.app)
        assert ours(seen) == count

    def test_of_a_call_and_of_a_skip(self, postgres, charge):
        charge()
        with postgres.statements() as seen:
            charge()
        assert ours(seen) == 2
        with hold_lock("invoice:42") as lease, postgres.statements() as seen:
            skipped = charge.apply().get()
        assert ours(seen) == 2
        assert (skipped.token, skipped.holder) == (lease.token, str(lease.holder))


def ours(statements):
    return sum(count for sql, count in statements.items() if "django_fencedlock" in sql)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("terms", "pattern"),
    [
        ((), "patterns.task"),
        (("invoice:{invoice_id}",), "invoice:{invoice_id}"),
        ((lambda task, arguments: "x",), "patterns.task"),
    ],
)
def test_metrics_get_a_pattern_and_not_a_name(celery_app, terms, pattern):
    def body(invoice_id):
        return current_lease().pattern

    task = celery_app.task(name="patterns.task", shared=False)(single_instance(*terms)(body))
    assert task(42) == pattern
