"""One runs, and any number of triggers become one further run."""

import contextlib
import functools
import json
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from celery.exceptions import Reject
from django.db.models import F

from django_fencedlock import LockNotAcquired, lock, signals
from django_fencedlock.celery import SkippedRun, single_instance, worker
from django_fencedlock.celery.coalesce import MOST_TRIES, Coalescing, unpack
from django_fencedlock.celery.duplicates import DELIVERY, NUMBER, SERVE
from django_fencedlock.celery.worker import Maintenance
from django_fencedlock.core.manager import service
from django_fencedlock.models import Fence, MessageRecord, PendingRun
from django_fencedlock.storage.message_records import SETTLED, MessageRecords
from django_fencedlock.storage.pending_runs import PendingRuns
from tests.deliveries import QUEUE, Done, app, as_current_app, deliver, deliver_sent, sending
from tests.failing import raising, unavailable
from tests.interleavings import ORDER, Broken, Explorer
from tests.threads import at_once, elsewhere

NAME = "index"
ran: list[object] = []
within: list = []


def body(self, value):
    ran.append(value)
    if within:
        return within.pop(0)(self) or value
    return value


def make(name, **options):
    made = app.task(bind=True, shared=False, name=f"coalescing.{name}", **options)
    return made(single_instance(NAME, on_conflict="coalesce")(body))


def convert(function):
    @functools.wraps(function)
    def convert_and_call(self, value):
        return function(self, f"{value}!")

    return convert_and_call


rebuild = make("rebuild")
converted = app.task(
    bind=True, shared=False, name="coalescing.converted", autoretry_for=(ZeroDivisionError,)
)(convert(single_instance(NAME, on_conflict="coalesce")(body)))
other = make("other")
late = make("late", acks_late=True)
pickled = make("pickled", serializer="pickle")


@pytest.fixture
def here():
    with as_current_app(ran, within):
        yield


def meanwhile(*calls):

    def make_them(self=None):
        for call in calls:
            elsewhere(call)

    within.append(make_them)


def while_held(*calls):
    with lock(NAME):
        for call in calls:
            elsewhere(call)


def coalesced(task, value, **more):
    return lambda: reason(deliver(task, value, **more), "coalesced")


def applied(task, value):
    return Done(task.apply((value,)).get(disable_sync_subtasks=False), "")


def reason(done, expected):
    found = SkippedRun.of(done.result)
    assert found is not None, done
    assert found.reason == expected


def overdue():
    """Let the time pass in which the living leave a pending run alone."""
    PendingRun.objects.update(due_at=datetime.now(UTC) - timedelta(hours=1))


unreachable = raising(OSError("no broker"))


def retry(self):
    raise self.retry(countdown=60)


def rescued():
    overdue()
    with sending() as sent:
        Maintenance(app).look()
    return sent[0]


@pytest.mark.slow
@pytest.mark.django_db
class TestEveryOrder:
    """Of the steps of a few runs, on the real tables: no trigger is lost, no run too many."""

    @pytest.mark.parametrize("kills", [0, 1, 2])
    def test_of_two(self, kills):
        found = Explorer(2, kills=kills)
        found.explore()
        assert found.states > 100
        assert found.most_surplus == 0

    def test_of_two_whose_messages_are_delivered_again(self):
        found = Explorer(2, kills=1, late=True)
        found.explore()
        assert found.states > 1000

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("kills", [0, 1, 2])
    def test_of_three(self, kills, seed):
        found = Explorer(3, kills=kills, late=kills == 2, most=500, seed=seed)
        found.explore()
        assert found.ends
        assert found.most_surplus == 0

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("kills", [0, 1])
    def test_of_two_and_a_retry(self, kills, seed):
        found = Explorer(2, kills=kills, retry=True, most=500, seed=seed)
        found.explore()
        assert found.ends


@pytest.mark.django_db
class TestWhatTheOrderIsGoodFor:
    """Each of these slips loses something, and is found."""

    def test_looking_before_the_lock_is_released(self):
        place = ORDER.index("release")
        order = (*ORDER[:place], "released", "release")
        with pytest.raises(Broken, match="wait for a rescue"):
            Explorer(2, order=order).explore()

    @pytest.mark.slow
    def test_ending_triggers_whose_run_only_began(self, monkeypatch):
        begin = Coalescing.begin

        def hasty(self):
            found = begin(self)
            self.ended("success")
            return found

        monkeypatch.setattr(Coalescing, "begin", hasty)
        with pytest.raises(Broken, match="are lost"):
            Explorer(2, kills=1).explore()

    @pytest.mark.slow
    def test_running_with_its_own_arguments_after_it_was_counted(self, monkeypatch):
        begin = Coalescing.begin
        monkeypatch.setattr(Coalescing, "begin", lambda self: (begin(self)[0], None))
        with pytest.raises(Broken, match="ran with"):
            Explorer(3, most=5000).explore()

    def test_counting_a_message_again_at_its_second_delivery(self, monkeypatch):
        count = PendingRuns.count
        without = lambda self, *args: count(self, *args[:3], None, *args[4:])  # noqa: E731
        monkeypatch.setattr(PendingRuns, "count", without)
        with pytest.raises(Broken, match="counted twice"):
            Explorer(2, kills=1, late=True).explore()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("here")
class TestTasks:
    def test_triggers_become_one_further_run_with_the_latest_arguments(self):
        meanwhile(*(coalesced(rebuild, value) for value in (2, 3, 4)))
        with sending() as sent:
            assert deliver(rebuild, 1).result == 1
            (serve,) = sent
            assert serve.headers[SERVE] == 4
            assert deliver_sent(serve).result == 4
        assert ran == [1, 4]
        assert len(sent) == 1

    def test_a_message_that_serves_comes_twice_and_runs_once(self):
        meanwhile(coalesced(rebuild, 2))
        with sending() as sent:
            deliver(rebuild, 1)
        deliver_sent(sent[0])
        reason(deliver_sent(sent[0]), "served")
        assert ran == [1, 2]
        # The second didn't even ask for the lock, which it would have kept others from.
        assert Fence.objects.get().token == 2

    def test_a_message_that_serves_is_dropped_where_the_lock_is_held(self, monkeypatch):
        meanwhile(coalesced(late, 2))
        with sending() as sent:
            deliver(late, 1)
            # Its pending run tells whether there is something to do, whoever has the lock.
            monkeypatch.setattr(MessageRecords, "newest", unavailable)
            while_held(lambda: reason(deliver_sent(sent[0], redelivered=True), "coalesced"))
        assert len(sent) == 1
        assert PendingRun.objects.get().wanted == 2
        assert MessageRecord.objects.count() == 2

    def test_arguments_that_came_after_the_message_was_sent_are_the_latest(self):
        meanwhile(coalesced(rebuild, 2))
        with sending() as sent:
            deliver(rebuild, 1)
            while_held(coalesced(rebuild, 3))
            assert deliver_sent(sent[0]).result == 3
        assert ran == [1, 3]

    def test_they_are_converted_as_those_of_a_message(self):
        """What stands between Celery and the function sees them, too, as with ``pydantic=True``."""
        meanwhile(coalesced(converted, 2))
        with sending() as sent:
            assert deliver(converted, 1).result == "1!"
            while_held(coalesced(converted, 3))
            within.append(lambda task: reason(applied(task, 4), "coalesced"))
            assert deliver_sent(sent[0]).result == "3!"
        assert ran == ["1!", "3!"]

    def test_the_message_that_serves_goes_where_the_trigger_went_and_out_of_its_chain(self):
        headers = {"tenant": "a", DELIVERY: "n", NUMBER: 9, "x-death": [], "odd": {1}}
        told = {"headers": headers, "timelimit": [60, 50]}
        told |= {"chain": [other.si(9)], "group": "g", "callbacks": [other.si(9)]}
        meanwhile(coalesced(rebuild, 2, **told, root_id="r"))
        with sending() as sent:
            deliver(rebuild, 1)
        (serve,) = [each for each in sent if each.task == rebuild.name]
        assert (serve.queue, serve.headers["tenant"]) == (QUEUE, "a")
        assert serve.headers["timelimit"] == [60, 50]
        assert serve.headers["group"] is None
        assert serve.headers[DELIVERY] != "n"
        assert {NUMBER, "x-death", "odd"}.isdisjoint(serve.headers)
        del sent[:]
        deliver_sent(serve)
        assert sent == []

    def test_arguments_are_stored_as_json_whatever_the_serializer_is(self):
        told = {"who": "é", "when": datetime(2026, 7, 1, tzinfo=UTC), "raw": b"\xff"}
        meanwhile(lambda: reason(applied(pickled, told), "coalesced"))
        with sending():
            pickled(1)
        assert json.loads(PendingRun.objects.get().body)[0][0]["who"] == "é"
        (found,) = PendingRuns(service("default").config).waiting(NAME)
        assert unpack(found.message) == ([told], {})

    def test_what_cannot_be_stored_is_a_clear_error(self):
        with pytest.raises(TypeError, match="Pass plain values"):
            rebuild(object())
        assert lock(NAME).holder() is None

    def test_a_plain_call_raises_and_stores_no_trigger(self):
        def call():
            with pytest.raises(LockNotAcquired, match="is held by"):
                rebuild(2)

        meanwhile(call, call)
        with sending() as sent:
            assert rebuild(1) == 1
        assert (sent, ran) == ([], [1])

    def test_a_plain_call_that_gets_the_lock_serves_triggers_before_and_after_it(self):
        while_held(coalesced(rebuild, 1))
        meanwhile(coalesced(rebuild, 3))
        with sending() as sent:
            assert rebuild(2) == 2
        assert [each.args[0] for each in sent] == [3]
        assert PendingRun.objects.get().done == 2

    def test_tasks_that_share_a_lock_do_their_own(self):
        meanwhile(coalesced(other, 2), coalesced(rebuild, 3))
        with sending() as sent:
            deliver(rebuild, 1)
        assert sorted((each.task, each.args[0]) for each in sent) == [
            ("coalescing.other", 2),
            ("coalescing.rebuild", 3),
        ]

    def test_a_retry_keeps_its_count(self):
        while_held(coalesced(rebuild, 1, retries=2))
        assert rescued().headers["retries"] == 2

    @pytest.mark.parametrize("how", [ValueError("no"), SystemExit(1), Reject(requeue=True)])
    def test_however_it_ends_the_others_are_served(self, how):
        meanwhile(coalesced(rebuild, 2))
        inner = within.pop()

        def end(self):
            inner()
            raise how

        within.append(end)
        with sending() as sent, contextlib.suppress(SystemExit):
            deliver(rebuild, 1)
        # Who goes in good order sees to it at once. One that is being killed has no time, and one
        # that goes back to the queue comes again: the rest is the rescue's.
        assert bool(sent) is isinstance(how, ValueError)
        if not sent:
            overdue()
            with sending() as sent:
                Maintenance(app).look()
        assert [each.args[0] for each in sent] == [2]
        assert deliver_sent(sent[0]).result == 2

    def test_the_pending_run_is_kept_when_the_message_cannot_be_sent(self, monkeypatch, caplog):
        meanwhile(coalesced(rebuild, 2))
        monkeypatch.setattr("django_fencedlock.celery.coalesce.serve", unreachable)
        assert deliver(rebuild, 1).result == 1
        assert "have to wait" in caplog.text
        monkeypatch.undo()
        overdue()
        with sending() as sent:
            assert Maintenance(app).look() == 1
        assert deliver_sent(sent[0]).result == 2

    def test_the_end_is_no_failure_when_it_cannot_be_recorded(self, monkeypatch, caplog):
        monkeypatch.setattr(PendingRuns, "end", unavailable)
        assert deliver(rebuild, 1).result == 1
        assert "wasn't recorded" in caplog.text


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("here")
class TestRetries:
    def retried(self):
        within.append(retry)
        with sending() as sent:
            assert deliver(rebuild, 1).state == "RETRY"
        return sent[0]

    def test_a_retry_runs(self):
        again = self.retried()
        assert again.headers[NUMBER] == 1
        assert deliver_sent(again).result == 1
        assert ran == [1, 1]

    def test_a_retry_of_a_run_that_served_runs_too(self):
        meanwhile(coalesced(rebuild, 2))
        within.append(retry)
        with sending() as sent:
            deliver(rebuild, 1)
            deliver_sent(sent[0])
            assert deliver_sent(sent[1]).result == 2
        assert ran == [1, 2, 2]

    def test_a_retry_that_newer_triggers_have_overtaken_is_not_needed(self):
        again = self.retried()
        deliver(rebuild, 2)
        reason(deliver_sent(again), "served")
        assert ran == [1, 2]

    def test_a_retry_runs_for_newer_triggers_that_wait(self):
        again = self.retried()
        while_held(coalesced(rebuild, 2))
        assert deliver_sent(again).result == 2

    def test_its_arguments_never_replace_those_of_a_newer_trigger(self):
        """The newer one is counted after the retry has looked for newer ones."""
        again = self.retried()

        def trigger(sender, **kwargs):
            signals.lock_not_acquired.disconnect(trigger)
            meanwhile(coalesced(rebuild, 2))
            within.pop()()

        signals.lock_not_acquired.connect(trigger)
        while_held(lambda: reason(deliver_sent(again), "coalesced"))
        assert deliver_sent(rescued()).result == 2
        assert ran == [1, 2]


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("here")
class TestMessagesAgain:
    def told(self):
        return {"id": uuid.uuid4().hex, "headers": {DELIVERY: uuid.uuid4().hex}}

    def die(self, *args):
        raise SystemExit(1)

    def died(self, told=None):
        told = told or self.told()
        within.append(self.die)
        with pytest.raises(SystemExit):
            deliver(late, 1, **told)
        return told

    def test_after_a_death_it_runs_with_the_latest_arguments(self):
        told = self.died()
        while_held(coalesced(late, 2, **self.told()))
        assert deliver(late, 1, **told, redelivered=True).result == 2
        assert ran == [1, 2]

    def test_after_a_rescue_it_has_nothing_to_do(self):
        told = self.died()
        assert deliver_sent(rescued()).result == 1
        reason(deliver(late, 1, **told, redelivered=True), "served")
        assert ran == [1, 1]

    def test_after_a_death_between_its_two_records_it_has_nothing_to_do(self, monkeypatch):
        told = self.told()
        monkeypatch.setattr(MessageRecords, "finish", self.die)
        with pytest.raises(SystemExit):
            deliver(late, 1, **told)
        monkeypatch.undo()
        reason(deliver(late, 1, **told, redelivered=True), "served")
        assert ran == [1]

    def test_a_run_that_finds_its_trigger_done_looks_for_others_as_well(self, monkeypatch):
        told = self.died()
        PendingRun.objects.update(done=F("wanted"))
        backend = service("default").backend
        release = backend.release

        def late_release(lease):
            monkeypatch.undo()
            meanwhile(coalesced(late, 2, **self.told()))
            within.pop()()
            return release(lease)

        monkeypatch.setattr(backend, "release", late_release)
        with sending() as sent:
            reason(deliver(late, 1, **told), "served")
        assert [each.args[0] for each in sent] == [2]

    def failed(self):
        told = self.told()

        within.append(raising(ValueError))
        deliver(late, 1, **told)
        app.AsyncResult(told["id"]).forget()
        for row in MessageRecord.objects.all():
            row.finished_at -= timedelta(seconds=SETTLED)
            row.save()
        return told

    def test_one_that_failed_is_run_again(self):
        told = self.failed()
        assert deliver(late, 1, **told, redelivered=True).result == 1
        assert ran == [1, 1]

    def test_one_that_failed_before_a_newer_trigger_ran_is_not_run_again(self):
        told = self.failed()
        deliver(late, 2, **self.told())
        reason(deliver(late, 1, **told, redelivered=True), "served")
        assert ran == [1, 2]

    def test_one_that_failed_does_not_replace_the_arguments_of_a_newer_trigger(self):
        told = self.failed()
        while_held(coalesced(late, 2, **self.told()), coalesced(late, 1, **told, redelivered=True))
        assert deliver_sent(rescued()).result == 2
        assert ran == [1, 2]

    def test_a_finished_one_is_not_run_again(self):
        told = self.told()
        deliver(late, 1, **told)
        assert deliver(late, 1, **told).state == "IGNORED"
        assert PendingRun.objects.get().wanted == 1

    def test_a_coalesced_one_is_not_counted_again(self):
        told = self.told()
        while_held(*[coalesced(late, 1, **told)] * 3)
        assert PendingRun.objects.get().wanted == 1

    def test_messages_that_serve_are_not_on_record(self):
        meanwhile(coalesced(late, 2, **self.told()))
        with sending() as sent:
            deliver(late, 1, **self.told())
        deliver_sent(sent[0])
        assert MessageRecord.objects.count() == 2

    def test_one_that_kills_its_worker_each_time_is_given_up(self, caplog):
        told = self.told()
        for _ in range(MOST_TRIES):
            self.died(told)
        for _ in range(2):
            reason(deliver(late, 1, **told), "given up")
        assert ran == [1] * MOST_TRIES
        assert (
            caplog.text.count(f"Gave up task coalescing.late under lock 'index': {MOST_TRIES} runs")
            == 1
        )
        assert deliver(late, 2, **self.told()).result == 2


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("here")
class TestRescue:
    @pytest.fixture(autouse=True)
    def left_over(self):
        while_held(coalesced(rebuild, 7))

    def look(self, rescue=None):
        with sending() as sent:
            served = (rescue or Maintenance(app)).look()
        assert served == len(sent)
        return sent

    def test_serves_what_is_left_over(self):
        assert self.look() == []
        overdue()
        (sent,) = self.look()
        assert self.look() == []
        assert sent.headers["ignore_result"] is True
        assert deliver_sent(sent).result == 7
        overdue()
        assert self.look() == []

    def test_a_task_of_an_unknown_alias_delays_no_other(self):
        lost = app.task(name="coalescing.lost", shared=False)(
            single_instance(NAME, on_conflict="coalesce", backend="nowhere")(print)
        )
        try:
            overdue()
            assert len(self.look()) == 1
            assert Maintenance(app).period() > 0
        finally:
            del app.tasks[lost.name]

    def test_the_pauses_double(self):
        pauses = []
        for _ in range(9):
            overdue()
            self.look()
            row = PendingRun.objects.get()
            pauses.append(round((row.due_at - datetime.now(UTC)).total_seconds() / 30))
        assert pauses == [1, 2, 4, 8, 16, 32, 64, 120, 120]
        # After two months of messages that nothing takes.
        PendingRun.objects.update(rescues=2000)
        overdue()
        assert len(self.look()) == 1

    def test_of_several_workers_one_serves(self):
        overdue()
        with sending() as sent:
            assert sum(at_once([lambda: Maintenance(app).look()] * 4)) == 1
        assert len(sent) == 1

    @pytest.mark.parametrize("of_others", [{"task_name": "gone.task"}, {"queue": "slow"}])
    def test_leaves_alone_what_is_for_other_apps_or_queues(self, of_others):
        PendingRun.objects.update(**of_others)
        overdue()
        assert self.look() == []

    def test_gives_up_what_kills_each_time_and_says_so_once(self, caplog):
        for _ in range(MOST_TRIES):
            overdue()
            (sent,) = self.look()
            within.append(lambda self: exec("raise SystemExit"))
            with pytest.raises(SystemExit):
                deliver_sent(sent)
        overdue()
        assert self.look() == self.look() == []
        assert caplog.text.count(f"{MOST_TRIES} runs began and none ended") == 1
        assert deliver(rebuild, 8).result == 8

    def test_a_broker_that_is_down_does_not_raise(self, monkeypatch, caplog):
        monkeypatch.setattr("django_fencedlock.celery.coalesce.serve", unreachable)
        overdue()
        assert self.look() == []
        assert "wait for the broker" in caplog.text

    def test_one_that_cannot_be_published_delays_no_other(self, caplog):
        while_held(coalesced(other, 8))
        overdue()
        due_first = PendingRun.objects.filter(task_name=rebuild.name)
        due_first.update(body="[[1, 2], {}]", due_at=F("due_at") - timedelta(hours=1))
        assert [sent.args for sent in self.look()] == [(8,)]
        assert "coalescing.rebuild" in caplog.text

    def test_a_database_that_is_down_is_logged_once(self, monkeypatch, caplog):
        monkeypatch.setattr(PendingRuns, "overdue", unavailable)
        rescue, message = Maintenance(app), "Database 'default' can't be used: no answer."
        assert [rescue.look() for _ in range(3)] == [0, 0, 0]
        assert caplog.text.count(message) == 1
        with monkeypatch.context() as works:
            works.setattr(PendingRuns, "overdue", lambda *args: [])
            rescue.look()
        rescue.look()
        assert caplog.text.count(message) == 2

    def test_deletes_what_is_old_now_and_then(self, monkeypatch):
        now, rescue, deleted = [0.0], Maintenance(app), []
        monkeypatch.setattr(worker, "clock", lambda: now[0])
        monkeypatch.setattr(MessageRecords, "sweep", lambda *args: deleted.append(args))
        for now[0] in (0.0, 1.0, 59.0, 61.0, 62.0, 122.0):
            rescue.look()
        assert len(deleted) == 3

    def test_looks_as_often_as_the_shortest_ttl_wants(self, settings):
        assert Maintenance(app).period() == 15
        settings.FENCEDLOCK = {"default": {"TTL": 8}}
        assert Maintenance(app).period() == 4
        settings.FENCEDLOCK = {"default": {"TTL": 0.5}}
        assert Maintenance(app).period() == 1
