"""Tasks in users' tests: run at once, each with its lock and its policy."""

from contextlib import ExitStack, nullcontext

import pytest
from celery import Celery, chain, chord, group
from celery.signals import task_prerun
from django.db import transaction
from django.test import TestCase, TransactionTestCase

from django_fencedlock import LockNotAcquired, current_lease, lock
from django_fencedlock import test as aids
from django_fencedlock.celery import SkippedRun, single_instance
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.test import assert_not_locked, disable_locking, eager_tasks, hold_lock
from tests.scripts import run_python
from tests.test_single_instance import DOWN

pytest_plugins = ["pytest_fencedlock"]


@pytest.fixture
def task(celery_app, eager_tasks):
    def make(**policy):
        options = policy.pop("options", {})

        def charge(pk):
            runs.append(pk)
            return current_lease().token

        runs = []
        charge = single_instance("invoice:{pk}", **policy)(charge)
        made = celery_app.task(charge, name="shop.charge", shared=False, **options)
        made.runs = runs
        return made

    return make


@pytest.fixture
def charge(task):
    return task()


@pytest.fixture(params=["in a transaction", "without"])
def db_(request):
    kind = "db" if request.param == "in a transaction" else "transactional_db"
    request.getfixturevalue(kind)


def calling(celery_app, charge):
    @celery_app.task(shared=False)
    @single_instance("invoice:{pk}")
    def outer(pk):
        return charge.delay(pk).get(disable_sync_subtasks=False)

    return outer


@pytest.mark.usefixtures("db_")
class TestPolicies:
    def test_the_lock_is_acquired_and_released(self, charge):
        assert [charge.delay(42).get() for _ in range(3)] == [1, 2, 3]
        assert_not_locked("invoice:42")
        assert charge.apply((42,)).get() == 4
        assert charge(42) == 5

    def test_skip(self, hold_lock, charge):
        held = hold_lock("invoice:42")
        result = charge.delay(42)
        assert result.successful()
        assert SkippedRun.of(result.get()).token == held.token
        assert charge.delay(43).get() == 1
        assert charge.runs == [43]

    @pytest.mark.parametrize(
        "policy",
        [
            {"on_conflict": "raise"},
            {"on_conflict": "wait", "blocking_timeout": 100},
            {"on_conflict": "retry", "retry_countdown": 1000},
        ],
        ids=lambda policy: policy["on_conflict"],
    )
    def test_policies_that_fail_do_so_at_once(self, task, hold_lock, policy):
        charge = task(**policy)
        hold_lock("invoice:42")
        result = charge.delay(42)
        assert result.failed()
        with pytest.raises(LockNotAcquired, match="'invoice:42' is held by"):
            result.get()
        assert charge.runs == []

    def test_retry_gets_the_lock_when_it_is_free(self, task):
        charge = task(on_conflict="retry", options={"max_retries": 0})
        tries = []

        def count(**kwargs):
            tries.append(1)
            if len(tries) == 3:
                held.close()

        with ExitStack() as held:
            held.enter_context(hold_lock("invoice:42"))
            held.callback(task_prerun.disconnect, count)
            task_prerun.connect(count)
            assert charge.delay(42).get() == 2
        assert len(tries) == 3
        assert charge.runs == [42]

    def test_retries_of_a_task_acquire_the_lock_again(self, celery_app, eager_tasks):
        tokens = []

        @celery_app.task(bind=True, max_retries=2, shared=False)
        @single_instance("invoice:{pk}")
        def charge(self, pk):
            tokens.append(current_lease().token)
            raise self.retry(exc=ArithmeticError())

        with pytest.raises(ArithmeticError):
            charge.delay(42).get()
        assert tokens == [1, 2, 3]

    def test_a_canvas(self, hold_lock, celery_app, charge):

        @celery_app.task(shared=False)
        def both(results):
            return results

        hold_lock("invoice:42")
        assert group(charge.s(1), charge.s(42)).apply_async().get()[0] == 1
        first, skipped = chord([charge.s(1), charge.s(42)])(both.s()).get()
        assert (first, skipped["reason"]) == (2, "held")
        assert chain(charge.si(42), charge.si(1)).delay().get() == 3

    def test_a_task_that_calls_another_under_the_same_lock(self, task, celery_app):
        outer = calling(celery_app, task())
        assert SkippedRun.of(outer.delay(42).get()).holder


class TestInTestCases:
    """The aid as a context manager, in Django's own test cases."""

    class Cases:
        def test_it(self):
            with eager_tasks(self.app), hold_lock("invoice:43"):
                assert self.charge.delay(42).get() == 1
                assert self.charge.delay(43).get()["reason"] == "held"
                with self.block():
                    assert self.charge.delay(42).get() == 2
            assert Fence.objects.get(name="invoice:42").token == 2
            assert not HeldLock.objects.exists()
            assert not self.app.conf.task_always_eager

        @classmethod
        def setUpClass(cls):
            super().setUpClass()
            cls.app = Celery("cases", set_as_current=False)

            @cls.app.task(shared=False)
            @single_instance("invoice:{pk}")
            def charge(pk):
                return current_lease().token

            cls.charge = charge

    class TestRollback(Cases, TestCase):
        block = staticmethod(transaction.atomic)

    class TestTruncation(Cases, TransactionTestCase):
        # SQLite has one writer at a time, so that a transaction would be in the way here.
        block = staticmethod(nullcontext)


@pytest.mark.django_db
class TestTheAid:
    def test_it_restores_the_settings(self, celery_app):
        celery_app.conf.task_eager_propagates = True
        with pytest.raises(ZeroDivisionError), eager_tasks():
            assert celery_app.conf.task_always_eager
            assert not celery_app.conf.task_eager_propagates
            raise ZeroDivisionError
        assert not celery_app.conf.task_always_eager
        assert celery_app.conf.task_eager_propagates

    def test_an_app_whose_settings_were_not_read_yet(self):
        app = Celery("fresh", set_as_current=False)
        with eager_tasks(app):
            assert app.conf.task_always_eager
        assert not app.conf.task_always_eager

    def test_results_are_stored_if_the_app_says_so(self, task, celery_app):
        celery_app.conf.task_store_eager_result = True
        charge = task()
        result = charge.delay(42)
        assert celery_app.AsyncResult(result.id).get() == 1

    def test_it_is_the_same_thing_from_the_package(self):
        assert aids.eager_tasks is eager_tasks
        with pytest.raises(AttributeError):
            _ = aids.lazy_tasks


class TestLocksOff:
    def test_a_held_lock_excludes_no_task(self, task, disable_locking, hold_lock):
        hold_lock("invoice:42")
        assert task().delay(42).get() == 2

    def test_a_calling_task_excludes_no_task(self, disable_locking, celery_app, charge):
        assert calling(celery_app, charge).delay(42).get() == 1
        with lock("invoice:42"):
            assert charge.delay(42).get() == 2

    @pytest.mark.parametrize("on_conflict", ["skip", "retry", "wait", "raise", "coalesce"])
    @pytest.mark.parametrize("redelivery", ["defer", "run"])
    def test_under_every_policy(self, task, disable_locking, on_conflict, redelivery):
        charge = task(on_conflict=on_conflict, redelivery=redelivery)
        assert [charge.delay(42).get() for _ in range(2)] == [1, 2]

    @pytest.mark.django_db
    def test_locks_work_again_afterwards(self, charge):
        with disable_locking(), hold_lock("invoice:42"):
            assert charge.delay(42).get() == 2
        with hold_lock("invoice:42"):
            assert charge.delay(42).get()["reason"] == "held"


@pytest.mark.django_db
def test_an_unavailable_service(task, settings):
    settings.FENCEDLOCK = {"default": DOWN}
    with pytest.raises(BackendUnavailable):
        task().delay(42).get()


@pytest.mark.slow
def test_the_helpers_import_celery_only_if_they_need_it():
    code = """
        import sys
        import pytest_fencedlock, django_fencedlock.test
        assert "celery" not in sys.modules
        django_fencedlock.test.eager_tasks().__enter__()
        assert "celery" in sys.modules
    """
    run_python(code=code)
