"""One message, delivered more than once."""

import contextlib
import threading
import time
import uuid
from datetime import timedelta
from unittest import mock

import pytest
from celery import Signature
from celery.exceptions import Ignore, Reject
from celery.signals import before_task_publish
from django.db import connections

from django_fencedlock import conf, current_lease, lock
from django_fencedlock.celery import SkippedRun, duplicates, single_instance
from django_fencedlock.celery.duplicates import DELIVERY, NUMBER, kept, nonce
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.identity import LocalHolder, new_owner
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import BackendUnavailable, LockNotAcquired, SettingsError
from django_fencedlock.models import HeldLock, MessageRecord
from django_fencedlock.storage.message_records import SETTLED, Message, MessageRecords
from django_fencedlock.test import hold_lock, lose_lease
from tests.backends import REDIS
from tests.deliveries import app, as_current_app, deliver, deliver_sent, sending
from tests.servers import shared
from tests.threads import elsewhere

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "x"
DEAD = "0" * 32
ran: list[object] = []
ends: dict[str, object] = {}


def body(self, value):
    ran.append(value)
    how = ends.get("how")
    if isinstance(how, dict):
        return how[value](self) if value in how else value
    if isinstance(how, BaseException):
        raise how
    if how == "retry" and not self.request.retries:
        raise self.retry(countdown=60)
    return value


def make(name, terms=None, **options):
    options = {"bind": True, "shared": False, "acks_late": True, **options}
    made = app.task(name=f"redelivery.{name}", **options)
    return made(single_instance(**{"name": NAME, **(terms or {})})(body))


late = make("late")
late_coalesce = make("late_coalesce", {"on_conflict": "coalesce"})
late_retry = make("late_retry", {"on_conflict": "retry"})
late_wait = make("late_wait", {"on_conflict": "wait", "blocking_timeout": 30})
late_brief = make("late_brief", {"on_conflict": "wait", "blocking_timeout": 0.05})
late_raise = make("late_raise", {"on_conflict": "raise"})
early = make("early", acks_late=False)
nesting = make("nesting", {"name": "{value}"})
nesting_retry = make("nesting_retry", {"name": "{value}", "on_conflict": "retry"})
nesting_coalesce = make("nesting_coalesce", {"name": "{value}", "on_conflict": "coalesce"})
careless = make("careless", {"redelivery": "run"})
unfenced = make("unfenced", {"fenced": False})
unfenced_run = make("unfenced_run", {"fenced": False, "redelivery": "run"})
open_ = make("open", {"fenced": False, "on_backend_error": "run"})
silent = make("silent", ignore_result=True)
patient = make("patient", autoretry_for=(ValueError,))


@app.task(name="redelivery.plain", shared=False)
def plain():
    """Do nothing, under no lock."""


@pytest.fixture(autouse=True)
def clean():
    with as_current_app(ran, ends):
        yield


def message():
    return {"id": uuid.uuid4().hex, "headers": {DELIVERY: uuid.uuid4().hex}}


@pytest.fixture
def told():
    return message()


def forget(told, *, a_while_ago=True):
    """Lose the result of a message, or never have stored it; by default, it ended a while ago."""
    app.AsyncResult(told["id"]).forget()
    for row in MessageRecord.objects.all() if a_while_ago else ():
        row.finished_at -= timedelta(seconds=SETTLED)
        row.save()


class TestAfterItsEnd:
    def test_a_message_that_succeeded_is_not_run_again(self, told):
        assert deliver(late, 1, **told).result == 1
        assert deliver(late, 1, **told, redelivered=True).state == "IGNORED"
        assert ran == [1]
        assert app.AsyncResult(told["id"]).result == 1

    @pytest.mark.parametrize("task", [late, late_coalesce], ids=["skip", "coalesce"])
    @pytest.mark.parametrize("end", [None, ValueError("no")], ids=["success", "failure"])
    def test_an_end_just_now_without_a_result_is_looked_at_later(self, task, end, monkeypatch):
        """Its worker may be about to store the result; nobody's worker waits for that."""
        monkeypatch.setattr(duplicates, "UNDECIDED", 60.0)
        told = message()
        ends["how"] = end
        deliver(task, 1, **told)
        forget(told, a_while_ago=False)
        began = time.monotonic()
        with sending() as sent:
            assert deliver(task, 1, **told, redelivered=True).state == "IGNORED"
        assert time.monotonic() - began < duplicates.UNDECIDED / 2
        (copy,) = sent
        assert copy.headers[DELIVERY] == told["headers"][DELIVERY]
        assert copy.headers["eta"] is not None
        assert ran == [1]

    @pytest.mark.parametrize("task", [late, late_coalesce], ids=["skip", "coalesce"])
    def test_a_success_whose_result_was_never_stored_is_a_skip(self, task, told):
        deliver(task, 1, **told)
        forget(told)
        done = deliver(task, 1, **told, redelivered=True)
        assert SkippedRun.of(done.result).reason == "finished"
        assert ran == [1]

    def test_without_results_a_second_delivery_is_ignored(self, told):
        deliver(silent, 1, **told)
        assert deliver(silent, 1, **told).state == "IGNORED"

    @pytest.mark.parametrize("end", [ValueError("no"), Ignore()])
    def test_a_failure_is_final_and_ignore_is_an_end(self, end, told):
        ends["how"] = end
        assert deliver(late, 1, **told).state in ("FAILURE", "IGNORED")
        assert deliver(late, 1, **told).state == "IGNORED"
        assert ran == [1]

    def test_a_failure_that_was_not_reported_is_run_again(self, told):
        ends["how"] = ValueError("no")
        deliver(late, 1, **told)
        forget(told)
        assert deliver(late, 1, **told).state == "FAILURE"
        assert ran == [1, 1]

    @pytest.mark.parametrize("task", [late, patient], ids=["retry", "autoretry"])
    def test_a_retry_is_another_message(self, task, told):
        ends["how"] = "retry" if task is late else ValueError("no")
        with sending() as sent:
            assert deliver(task, 1, **told).state == "RETRY"
            assert deliver(task, 1, **told).state == "IGNORED"
        (again,) = sent
        assert again.headers[DELIVERY] != told["headers"][DELIVERY]
        ends.clear()
        assert deliver_sent(again).result == 1
        assert ran == [1, 1]

    def test_the_last_try_of_autoretry_is_a_failure(self, told):
        ends["how"] = ValueError("no")
        deliver(patient, 1, **told, retries=patient.max_retries)
        assert MessageRecord.objects.get().outcome == "failure"

    def test_a_run_that_lost_its_lock_is_on_record_as_the_failure_that_it_is(self):
        ends["how"] = {1: lambda task: lose_lease(current_lease())}
        assert deliver(late, 1, **message()).state == "FAILURE"
        assert MessageRecord.objects.get().outcome == "failure"

    def test_what_goes_back_to_the_queue_has_not_ended(self, told):
        ends["how"] = Reject("later", requeue=True)
        deliver(late, 1, **told)
        ends.clear()
        assert deliver(late, 1, **told).result == 1

    def test_what_was_killed_has_not_ended(self, told):
        ends["how"] = SystemExit(1)
        with pytest.raises(SystemExit):
            deliver(late, 1, **told)
        ends.clear()
        assert MessageRecord.objects.get().outcome == ""
        assert MessageRecord.objects.get().finished_at is None
        assert deliver(late, 1, **told).result == 1
        assert MessageRecord.objects.get().tries == 2

    def test_the_end_is_on_record_before_the_lock_is_free(self, monkeypatch):
        seen = []
        release = service("default").backend.release

        def look(lease):
            seen.append(MessageRecord.objects.get().outcome)
            return release(lease)

        monkeypatch.setattr(service("default").backend, "release", look)
        deliver(late, 1, **message())
        assert seen == ["success"]


class TestWhileItRuns:
    @pytest.fixture
    def running(self):
        leases = []

        def begin(told=None, *, recorded=True, task_id=None):
            told = told or message()
            owner = new_owner()._replace(task_name="t", task_id=task_id or told["id"])
            lease = service("default").acquire(new_claim(NAME, 30, owner=owner), who=LocalHolder())
            leases.append(lease)
            if recorded:
                record(told, owner.id)
            return lease

        yield begin
        for lease in leases:
            service("default").release([lease], lease.who)

    @pytest.mark.parametrize("task", [late, late_raise, late_brief], ids=["skip", "raise", "wait"])
    def test_a_second_delivery_comes_later_as_the_same_message(self, running, task, told):
        running(told)
        with sending() as sent:
            assert deliver(task, 1, **told, redelivered=True).state == "IGNORED"
        (copy,) = sent
        assert copy.headers[DELIVERY] == told["headers"][DELIVERY]
        assert copy.id == told["id"]
        assert copy.headers["eta"] is not None
        assert ran == []

    def test_what_a_receiver_publishes_meanwhile_is_a_message_of_its_own(self, running):
        def audit(sender, headers, **kwargs):
            if headers["id"] == told["id"]:
                late.delay(2)

        told = message()
        running(told)
        before_task_publish.connect(audit)
        try:
            with sending() as sent:
                assert deliver(late, 1, **told, redelivered=True).state == "IGNORED"
        finally:
            before_task_publish.disconnect(audit)
        named = {each.headers["id"] == told["id"]: each.headers[DELIVERY] for each in sent}
        assert named[True] == told["headers"][DELIVERY]
        assert named[False] != told["headers"][DELIVERY]

    @pytest.mark.parametrize("died", [False, True])
    def test_the_copy_runs_only_if_the_first_died(self, running, died, told):
        lease = running(told)
        with sending() as sent:
            deliver(late, 1, **told)
            if not died:
                MessageRecord.objects.update(outcome="success")
                app.backend.store_result(told["id"], 1, "SUCCESS")
            service("default").release([lease], lease.who)
            assert deliver_sent(sent[0]).state == ("SUCCESS" if died else "IGNORED")
        assert ran == [1] * died

    def test_another_message_is_an_ordinary_conflict(self, running):
        running()
        with sending() as sent:
            done = deliver(late, 1, **message())
        assert SkippedRun.of(done.result).reason == "held"
        assert sent == []

    def test_it_is_the_same_message_after_a_conflict_too(self, running, told):
        """Delivered twice while another message runs, it comes again twice, and runs once."""
        lease = running()
        with sending() as sent:
            for _ in range(2):
                assert deliver(late_retry, 1, **told).state == "RETRY"
        service("default").release([lease], lease.who)
        assert {copy.headers[DELIVERY] for copy in sent} == {told["headers"][DELIVERY]}
        assert [deliver_sent(copy).state for copy in sent] == ["SUCCESS", "IGNORED"]
        assert ran == [1]

    @pytest.mark.parametrize("task", [late, late_wait])
    def test_a_delivery_whose_process_is_gone_delays_no_other(self, running, task, told):
        running(told)
        # As if the pid were another process's by now.
        HeldLock.objects.update(pid_started=1)
        assert deliver(task, 1, **told).result == 1

    def test_a_delivery_waits_for_another_that_is_about_to_release(self, running, told):
        lease = running(told)
        finish(told, lease.owner_id)
        app.backend.store_result(told["id"], 1, "SUCCESS")
        with sending() as sent, soon(lease_back, lease):
            assert deliver(late_wait, 1, **told).state == "IGNORED"
        assert (sent, ran) == ([], [])

    def test_a_delivery_waits_for_another_message(self, running, told):
        """Though a delivery of its own began before, and died."""
        record(told, DEAD)
        lease = running()
        with sending() as sent, soon(lease_back, lease):
            assert deliver(late_wait, 1, **told).result == 1
        assert sent == []

    def test_a_message_that_ended_long_ago_has_no_conflict(self, running, told):
        deliver(late, 1, **told)
        running()
        with sending() as sent:
            assert deliver(late, 1, **told).state == "IGNORED"
        assert sent == []

    def test_a_failure_to_be_repeated_meets_conflicts_as_any_other(self, running, told):
        ends["how"] = ValueError("no")
        deliver(late, 1, **told)
        forget(told)
        running()
        assert SkippedRun.of(deliver(late, 1, **told).result).reason == "held"

    @pytest.mark.parametrize("known_by", ["task", "record"])
    def test_the_run_of_another_delivery_is_known(self, running, known_by, told):
        if known_by == "task":
            # The first died, and the second hasn't recorded yet that it runs.
            record(told, DEAD)
            running(told, recorded=False)
        else:
            running(told, task_id="unknown")
        with sending() as sent:
            assert deliver(late, 1, **told).state == "IGNORED"
        assert len(sent) == 1

    def test_a_message_whose_delivery_died_is_an_ordinary_conflict(self, running, told):
        record(told, DEAD)
        running()
        with sending() as sent:
            assert SkippedRun.of(deliver(late, 1, **told).result).reason == "held"
        assert sent == []

    def test_a_first_delivery_that_is_about_to_record_itself_is_waited_for(self, running, told):
        lease = running(told, recorded=False)
        with sending() as sent, soon(record, told, lease.owner_id):
            assert deliver(late, 1, **told).state == "IGNORED"
        assert len(sent) == 1

    def test_a_retry_waits_for_its_former_run_but_not_for_long(self, running, monkeypatch):
        told = message()
        with soon(lease_back, running(task_id=told["id"])):
            assert deliver(late, 1, **told).result == 1
        monkeypatch.setattr(duplicates, "UNDECIDED", 0.1)
        told = message()
        running(task_id=told["id"])
        assert SkippedRun.of(deliver(late, 1, **told).result).reason == "held"

    def test_if_the_copy_cannot_be_sent_the_message_stays(self, running, monkeypatch, told):
        running(told)
        monkeypatch.setattr(Signature, "apply_async", broken)
        assert deliver(late, 1, **told).state == "REJECTED"

    def test_a_plain_lock_of_that_name_is_an_ordinary_conflict(self):
        with lock(NAME):
            assert SkippedRun.of(elsewhere(deliver, late, 1, **message()).result).reason == "held"


class TestCallsWithin:
    """A body calls its own task for another lock, with the message's request or a copy."""

    @pytest.fixture(params=["task", "function"])
    def calls(self, request):
        is_task = request.param == "task"
        return lambda task, *args: task(*args) if is_task else task.run(*args)

    def test_are_no_delivery(self, calls):
        def look(task):
            assert calls(task, 2) == 2
            row = MessageRecord.objects.get()
            assert (row.name, row.tries, row.outcome) == ("1", 1, "")
            return "looked"

        ends["how"] = {1: look}
        assert deliver(nesting, 1, **message()).result == "looked"
        assert MessageRecord.objects.get().outcome == "success"

    def test_are_not_retried(self, calls):
        ends["how"] = {1: lambda task: calls(task, 2)}
        with sending() as sent, hold_lock("2"):
            done = deliver(nesting_retry, 1, **message())
        assert isinstance(done.result.exception, LockNotAcquired)
        assert sent == []

    def test_are_no_retry(self, calls):
        for _ in range(2):
            deliver(nesting_coalesce, 2)
        ends["how"] = {1: lambda task: calls(task, 2)}
        assert deliver(nesting_coalesce, 1, headers={NUMBER: 1}, retries=1).result == 2

    def test_are_no_delivery_where_the_run_has_no_lock(self, calls, monkeypatch):
        """Its lock service was down, and is no more."""
        backend = service("default").backend

        def fail_once(*args):
            monkeypatch.undo()
            raise BackendUnavailable("down")

        monkeypatch.setattr(backend, "acquire", fail_once)
        ends["how"] = {1: lambda task: calls(task, 2)}
        assert deliver(open_, 1, **message()).result == 2
        assert ran == [1, 2]
        assert MessageRecord.objects.count() == 0


class TestWhatIsRecorded:
    @pytest.mark.parametrize(
        ("task", "more", "rows"),
        [
            (late, {}, 1),
            (early, {}, 0),
            (early, {"redelivered": True}, 1),
            (early, {"eta": "2030-01-01T00:00:00+00:00"}, 1),
            (careless, {"redelivered": True}, 0),
        ],
    )
    def test_is_what_may_come_again(self, task, more, rows):
        deliver(task, 1, **message(), **more)
        assert MessageRecord.objects.count() == rows

    def test_is_nothing_of_calls(self):
        late(1)
        late.apply((1,))
        assert ran == [1, 1]
        assert MessageRecord.objects.count() == 0

    def test_names_what_it_is_of(self, told):
        deliver(late, 1, **told)
        row = MessageRecord.objects.get()
        assert (row.nonce, row.name, row.task_id) == (told["headers"][DELIVERY], NAME, told["id"])

    def test_a_message_of_others_is_known_by_its_id_and_retries(self):
        told = {"id": "chosen"}
        deliver(late, 1, **told)
        assert deliver(late, 1, **told).state == "IGNORED"
        assert deliver(late, 1, **told, retries=1).result == 1
        assert deliver(late_raise, 1, **told).result == 1

    def test_a_message_is_named_whichever_app_is_the_current_one(self, celery_app):
        celery_app.set_current()
        with sending() as sent:
            late.delay(1)
            plain.delay()
        assert [DELIVERY in message.headers for message in sent] == [True, False]

    @pytest.mark.parametrize("given", ["", 5, "x" * 37, None])
    def test_a_strange_nonce_is_none(self, given):
        request = type("Request", (), {"headers": {DELIVERY: given}, "id": "i", "retries": 0})
        assert len(nonce(request, "t")) == 32

    def test_is_kept_for_longer_than_a_message_is_out(self):
        assert kept(app) == 86400
        app.conf.broker_transport_options = {"visibility_timeout": 100_000}
        assert kept(app) == 200_000
        app.conf.broker_transport_options = {}


class TestWithoutAnAnswer:
    @pytest.fixture
    def table_away(self, settings, make_alias, tmp_path):
        entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db.sqlite3")}
        alias = make_alias(entry)
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": alias}}

        def drop():
            with connections[alias].cursor() as cursor:
                cursor.execute("DROP TABLE django_fencedlock_messagerecord")

        return drop

    def test_a_run_does_not_begin_and_releases_its_lock(self, table_away):
        table_away()
        for task in (late, unfenced):
            done = deliver(task, 1, **message())
            assert done.state == "FAILURE"
            assert isinstance(done.result.exception, SettingsError)
        assert ran == []
        assert lock(NAME).holder() is None

    @pytest.mark.parametrize("task", [unfenced, late])
    def test_a_worker_without_a_database(self, settings, make_alias, tmp_path, task):
        """Its error names the way out, if only the record of the message needs the database."""
        directory = tmp_path / "there"
        directory.mkdir()
        entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(directory / "db.sqlite3")}
        alias = make_alias(entry)
        connections[alias].close()
        directory.rename(tmp_path / "away")
        redis = {"BACKEND": REDIS, "LOCATION": shared.redis().url, "KEY_PREFIX": "without:"}
        settings.FENCEDLOCK = {"default": {**redis, "FENCE_DATABASE": alias}}
        done = deliver(task, 1, **message())
        assert isinstance(done.result.exception, BackendUnavailable)
        # With "skip", the message of a dead worker would be skipped while its lock lasts.
        terms = 'redelivery="run" and on_conflict="retry"'
        hint = f"A task with fenced=False needs no database with {terms}."
        assert str(done.result.exception).endswith(hint) is (task is unfenced)
        assert deliver(unfenced_run, 1, **message()).result == 1
        assert ran == [1]

    def test_a_run_begins_all_the_same_if_that_is_wanted(self, table_away, caplog):
        table_away()
        assert deliver(open_, 1, **message()).result == 1
        with lock(NAME, fenced=False):
            assert SkippedRun.of(elsewhere(deliver, open_, 1, **message()).result).reason == "held"
        assert "without a record of its message" in caplog.text

    def test_a_run_that_ended_is_a_success_all_the_same(self, table_away, monkeypatch, caplog):
        ends["how"] = None
        finish = MessageRecords.finish

        def late_drop(self, *args):
            table_away()
            return finish(self, *args)

        monkeypatch.setattr(MessageRecords, "finish", late_drop)
        assert deliver(late, 1, **message()).result == 1
        assert "wasn't recorded" in caplog.text


@contextlib.contextmanager
def soon(function, *args):
    timer = threading.Timer(0.2, function, args)
    timer.start()
    with mock.patch.object(duplicates, "UNDECIDED", 20.0):
        yield
    timer.join()


def record(told, owner):
    MessageRecords(conf.config()).begin(delivery(told, owner))
    connections.close_all()


def finish(told, owner):
    assert MessageRecords(conf.config()).finish(delivery(told, owner), "success")


def delivery(told, owner):
    return Message(told["headers"][DELIVERY], NAME, owner, told["id"], 1000.0)


def lease_back(lease):
    service("default").release([lease], lease.who)
    connections.close_all()


def broken(*args):
    raise OSError("no broker")
