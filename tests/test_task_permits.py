"""Tasks with ``limit=``: runs of one name, so many at a time."""

import contextlib
import uuid

import pytest

from django_fencedlock import LockNotAcquired, current_lease, lock
from django_fencedlock.celery import SkippedRun, lock_name, single_instance
from django_fencedlock.celery.duplicates import DELIVERY
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.identity import LocalHolder, new_owner
from django_fencedlock.core.manager import service
from django_fencedlock.core.names import permit_name
from django_fencedlock.models import MessageRecord
from django_fencedlock.storage.message_records import Message, MessageRecords
from django_fencedlock.test.processes import TIMEOUT, another_thread
from tests.brokered import deliver, waiting
from tests.deliveries import app, as_current_app, sending
from tests.deliveries import deliver as deliver_directly
from tests.models import Invoice
from tests.threads import beside

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def task(celery_app):
    def make(*naming, options=None, **policy):
        policy.setdefault("limit", 2)

        def call(account_id=7):
            return current_lease().name

        decorated = single_instance(*(naming or ("stripe:{account_id}",)), **policy)(call)
        celery_app.tasks.pop("shop.call", None)
        return celery_app.task(decorated, name="shop.call", shared=False, **(options or {}))

    return make


@contextlib.contextmanager
def permits_held(name="stripe:7", limit=2, held=0):
    with contextlib.ExitStack() as stack:
        for _ in range(held or limit):
            thread = stack.enter_context(another_thread())
            lease = thread.call(lock(name, limit=limit).acquire, blocking=False)
            stack.callback(thread.call, lease.release)
        yield


def permits(limit=2):
    return {permit_name("stripe:7", number + 1) for number in range(limit)}


class TestTheDecorator:
    @pytest.mark.parametrize("limit", [0, 1001, -3])
    def test_a_wrong_limit_is_an_error_where_the_task_is_decorated(self, limit):
        with pytest.raises(ValueError, match=f"The limit is {limit}. It must be from 1 to 1000."):
            single_instance("x", limit=limit)

    def test_a_bool_is_no_limit(self):
        with pytest.raises(TypeError, match="The limit is True"):
            single_instance("x", limit=True)

    def test_coalesce_has_no_limit(self):
        with pytest.raises(ValueError, match="with limit= there are several runs at a time"):
            single_instance("x", limit=2, on_conflict="coalesce")

    @pytest.mark.parametrize("model", [Invoice, "tests.Invoice"])
    def test_a_row_has_no_limit(self, task, model):
        with pytest.raises(TypeError, match="a permit covers no row") as caught:
            task(model, pk="{account_id}")
        assert '@single_instance("call:{account_id}", limit=...)' in str(caught.value)

    def test_a_callable_is_called_for_each_run(self, task):
        limits = iter([1, 2])
        call = task(limit=lambda: next(limits), on_conflict="raise")
        with permits_held(limit=1):
            with pytest.raises(LockNotAcquired, match="All 1 permits"):
                call()
            assert call() == permit_name("stripe:7", 2)

    def test_a_callable_with_a_wrong_result_fails_the_run(self, task):
        with pytest.raises(TypeError, match="The limit of lock 'stripe:7' is None"):
            task(limit=lambda: None)()

    def test_lock_name_is_the_name_without_a_permit(self, task):
        assert lock_name(task(), 7) == "stripe:7"


class TestRuns:
    def test_a_run_has_a_permit(self, task):
        call = task()
        assert call() in permits()
        result = call.delay()
        deliver(call.app)
        assert result.get(timeout=20) in permits()

    def test_runs_of_other_names_are_not_counted(self, task):
        with permits_held():
            assert task()(8).startswith("stripe:8 [permit ")

    def test_a_run_beside_a_run_has_another_permit(self, task):
        with permits_held(limit=1):
            assert task()() == permit_name("stripe:7", 2)

    def test_skip_names_the_lock(self, task):
        call = task()
        result = call.delay()
        with permits_held():
            deliver(call.app)
        skipped = SkippedRun.of(result.get(timeout=20))
        assert skipped.lock == "stripe:7"
        assert skipped.reason == "held"
        assert skipped.holder

    def test_raise_names_the_permits(self, task):
        call = task(on_conflict="raise")
        with permits_held(), pytest.raises(LockNotAcquired, match="All 2 permits of lock"):
            call()

    def test_retry_publishes_the_next_try(self, task):
        call = task(on_conflict="retry", retry_countdown=0)
        result = call.delay()
        with permits_held():
            deliver(call.app)
            assert result.state == "RETRY"
        deliver(call.app)
        assert result.get(timeout=20) in permits()
        assert waiting(call.app) == 0

    def test_wait_waits_for_a_permit(self, task):
        call = task(on_conflict="wait", blocking_timeout=TIMEOUT)
        with permits_held():
            run = beside(call)
        assert run.result(TIMEOUT) in permits()

    def test_wait_gives_up(self, task):
        call = task(on_conflict="wait", blocking_timeout=0.2)
        with permits_held(), pytest.raises(LockNotAcquired, match="All 2 permits"):
            call()

    def test_a_nested_run_of_the_same_name_is_refused(self, celery_app):
        @celery_app.task(name="shop.outer", shared=False)
        @single_instance("stripe:7", limit=2, on_conflict="raise")
        def outer(again=True):
            return outer(again=False) if again else "ran"

        with pytest.raises(LockNotAcquired, match="held by the code that called"):
            outer()


ran = []


@app.task(name="permits.late", shared=False, acks_late=True)
@single_instance("x", limit=2)
def late(value):
    ran.append(value)
    return value


@pytest.fixture
def told():
    with as_current_app(ran):
        yield {"id": uuid.uuid4().hex, "headers": {DELIVERY: uuid.uuid4().hex}}


@contextlib.contextmanager
def running(told, *, recorded=True):
    """Be another worker's run of a message, with a permit."""
    control, who = service("default"), LocalHolder()
    owner = new_owner()._replace(task_name="t", task_id=told["id"])
    claim = new_claim("x", 30, owner=owner)._replace(permits=2)
    lease = control.acquire(claim, who=who)
    if recorded:
        facts = {"nonce": told["headers"][DELIVERY], "name": "x", "owner": owner.id}
        MessageRecords(control.config).begin(Message(**facts, task_id=told["id"], kept=60))
    try:
        yield lease
    finally:
        control.keeper.forget(lease)
        control.grants.release(lease.grant)
        lease.released = True


class TestRedelivery:
    def test_a_second_delivery_comes_later_though_a_permit_is_free(self, told):
        with running(told), sending() as sent:
            assert deliver_directly(late, 1, **told, redelivered=True).state == "IGNORED"
        assert len(sent) == 1
        assert ran == []
        assert not service("default").grants.look_up(["x [permit 1]", "x [permit 2]"])

    def test_a_second_delivery_comes_later_if_all_permits_are_held(self, told):
        with running(told), permits_held("x", 2, held=1), sending() as sent:
            assert deliver_directly(late, 1, **told, redelivered=True).state == "IGNORED"
        assert len(sent) == 1
        assert ran == []

    def test_the_copy_runs_if_the_first_run_is_gone(self, told):
        with running(told):
            pass
        assert deliver_directly(late, 1, **told, redelivered=True).result == 1
        assert MessageRecord.objects.get().tries == 2
        # And a message that succeeded isn't run again.
        assert deliver_directly(late, 1, **told, redelivered=True).state == "IGNORED"
        assert ran == [1]

    def test_two_deliveries_that_begin_together_run_once(self, told, monkeypatch):
        newest = MessageRecords.newest
        with contextlib.ExitStack() as stack:

            def look(records, message):
                found = newest(records, message)
                # Between the look and the record, the other one begins.
                monkeypatch.setattr(MessageRecords, "newest", newest)
                stack.enter_context(running(told))
                return found

            monkeypatch.setattr(MessageRecords, "newest", look)
            with sending() as sent:
                assert deliver_directly(late, 1, **told, redelivered=True).state == "IGNORED"
        assert len(sent) == 1
        assert ran == []
        assert MessageRecord.objects.get().tries == 1

    def test_another_message_runs_meanwhile(self, told):
        other = {"id": uuid.uuid4().hex, "headers": {DELIVERY: uuid.uuid4().hex}}
        with running(other):
            assert deliver_directly(late, 1, **told).result == 1
