"""A message whose publisher still holds its lock: a retry, a replacement, a step of a workflow."""

import contextlib
import uuid
from datetime import UTC, datetime

import pytest
from celery import chain, chord, group
from kombu.exceptions import OperationalError

from django_fencedlock import lock, signals
from django_fencedlock.backends.database import DatabaseBackend
from django_fencedlock.backends.interface import Held
from django_fencedlock.celery import SkippedRun, duplicates, single_instance
from django_fencedlock.celery.duplicates import DELIVERY, FOLLOWS, LONGEST_PAUSE, POSTPONED
from django_fencedlock.models import MessageRecord
from django_fencedlock.test import hold_lock
from tests.backends import POSTGRES, REDIS
from tests.deliveries import QUEUE, app, as_current_app, deliver, deliver_sent, sending
from tests.failing import raising, unavailable
from tests.threads import elsewhere

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "published"
POLICIES = ("skip", "retry", "wait", "raise", "coalesce")
ran: list[tuple[str, int]] = []
within: list = []


def body(self, value):
    ran.append((self.name, self.request.retries))
    return within.pop(0)(self) if within else value


def make(name, terms=None, **options):
    made = app.task(name=f"publisher.{name}", bind=True, shared=False, **options)
    return made(single_instance(**{"name": NAME, **(terms or {})})(body))


tasks = {policy: make(policy, {"on_conflict": policy}) for policy in POLICIES}
late = {
    policy: make(f"late_{policy}", {"on_conflict": policy}, acks_late=True) for policy in POLICIES
}
skip = tasks["skip"]
unfenced = make("unfenced", {"fenced": False})
next_step = make("next_step")
autoretry = make("autoretry", autoretry_for=(ValueError,), default_retry_delay=0)


@app.task(name="publisher.plain", shared=False)
def plain(value):
    """Do nothing, under no lock."""


@pytest.fixture(autouse=True)
def here():
    with as_current_app(ran, within):
        yield


@pytest.fixture
def conflicts():
    seen = []

    def note(sender, name, **kwargs):
        seen.append(name)

    signals.lock_not_acquired.connect(note)
    yield seen
    signals.lock_not_acquired.disconnect(note)


def publish(task, action, **request):
    """Let a body publish something that another worker gets while the body holds its lock."""
    done, copies = [], []

    def act(self):
        try:
            with sending() as sent:
                return action(self)
        finally:
            for message in sent:
                with sending() as further:
                    done.append(elsewhere(deliver_sent, message))
                copies.extend(further)

    within.append(act)
    first = deliver(task, 1, **request)
    return first, done, copies


def retry(self):
    raise self.retry(countdown=0)


def assert_runs(copy, expected=1):
    assert deliver_sent(copy).result == expected


class TestRetry:
    @pytest.mark.parametrize("acks", [tasks, late], ids=["early", "late"])
    @pytest.mark.parametrize("policy", POLICIES)
    def test_comes_again_and_runs_under_every_policy(self, policy, acks, conflicts):
        task = acks[policy]
        first, (done,), (copy,) = publish(task, retry)
        assert (first.state, done.state) == ("RETRY", "IGNORED")
        assert conflicts == []
        assert_runs(copy)
        assert ran == [(task.name, 0), (task.name, 1)]

    @pytest.mark.parametrize(
        "alias",
        [
            {"FENCE_DATABASE": "postgres"},
            {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"},
            {"BACKEND": REDIS},
        ],
        ids=["database", "postgres", "redis"],
    )
    @pytest.mark.parametrize("task", [skip, unfenced], ids=["fenced", "unfenced"])
    @pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
    def test_comes_again_on_every_backend(self, request, settings, task, alias, conflicts):
        if "redis" in alias.get("BACKEND", ""):
            alias = {**alias, "LOCATION": request.getfixturevalue("redis_server").url}
        else:
            request.getfixturevalue("postgres")
        settings.FENCEDLOCK = {"default": alias}
        _, (done,), (copy,) = publish(task, retry)
        assert done.state == "IGNORED"
        assert conflicts == []
        assert_runs(copy)

    def test_is_the_same_message_in_the_same_queue(self):
        first = {
            "id": uuid.uuid4().hex,
            "headers": {"tenant": "acme"},
            "expires": datetime(2100, 1, 1, tzinfo=UTC).isoformat(),
            "timelimit": [20, 10],
            "root_id": "root",
            "chain": [plain.si(2)],
        }
        within.append(retry)
        with sending() as sent:
            deliver(skip, 1, **first)
        (message,) = sent
        with hold_lock(NAME) as lease, sending() as sent:
            ours = {DELIVERY: message.headers[DELIVERY], "tenant": "acme", FOLLOWS: lease.owner_id}
            route = {"exchange": "topics", "routing_key": "a.b", "priority": 7}
            done = deliver(
                skip, 1, **{**first, "headers": ours, "retries": 1, "delivery_info": route}
            )
        (copy,) = sent
        assert done.state == "IGNORED"
        assert copy.headers[DELIVERY] == message.headers[DELIVERY]
        assert copy.headers["retries"] == 1
        assert copy.headers["tenant"] == "acme"
        for each in ("id", "root_id", "timelimit", "expires"):
            assert copy.headers[each] == first[each], each
        assert copy.queue == "a.b"
        assert copy.headers["eta"] is not None

    def test_goes_to_the_queue_that_it_came_from(self):
        _, _, (copy,) = publish(skip, retry)
        assert copy.queue == QUEUE

    def test_comes_again_ever_later_up_to_a_bound(self, monkeypatch):
        pauses, postpone = [], duplicates.postpone
        noting = lambda call, pause, *more: pauses.append(pause) or postpone(call, pause, *more)  # noqa: E731
        monkeypatch.setattr(duplicates, "postpone", noting)
        with hold_lock(NAME) as lease:
            headers = {FOLLOWS: lease.owner_id}
            for times in (None, 1, 4, 60, 10**400):
                more = {} if times is None else {POSTPONED: times}
                began = datetime.now(UTC)
                with sending() as sent:
                    deliver(skip, 1, headers={**headers, **more}, retries=1)
                eta = datetime.fromisoformat(sent[0].headers["eta"])
                assert (eta - began).total_seconds() > pauses[-1] - 0.01
                assert sent[0].headers[POSTPONED] == (times or 0) + 1
        assert 0 < pauses[0] <= 0.5
        assert pauses[0] < pauses[1] < pauses[2] < pauses[3]
        assert LONGEST_PAUSE / 2 <= pauses[4] <= LONGEST_PAUSE

    def test_counts_its_postponements_from_zero_for_the_next_attempt(self):
        within.append(retry)
        with sending() as sent:
            deliver(skip, 1, headers={FOLLOWS: "x", POSTPONED: 5}, retries=1)
        assert POSTPONED not in sent[0].headers
        assert sent[0].headers[FOLLOWS] != "x"

    def test_is_an_ordinary_conflict_with_another_holder(self, conflicts):
        within.append(retry)
        with sending() as sent:
            deliver(skip, 1)
        with hold_lock(NAME):
            done = deliver_sent(sent[0])
        assert SkippedRun.of(done.result).reason == "held"
        assert conflicts == [NAME]

    @pytest.mark.parametrize("holder", [None, Held("", "another application")])
    def test_comes_again_if_the_holder_is_not_known(self, monkeypatch, holder):
        """The publisher may have held it when the lock was refused, and released it since."""

        def tell(self, names):
            return {} if holder is None else {NAME: holder}

        def forget(self, claim, wait):
            monkeypatch.undo()
            monkeypatch.setattr(DatabaseBackend, "holders", tell)
            return Held()

        within.append(retry)
        with sending() as sent:
            deliver(skip, 1)
        monkeypatch.setattr(DatabaseBackend, "acquire", forget)
        with sending() as further:
            assert deliver_sent(sent[0]).state == "IGNORED"
        monkeypatch.undo()
        assert_runs(further[0])

    def test_is_not_lost_with_a_broker_that_is_down(self, monkeypatch, caplog):
        within.append(retry)
        with sending() as sent:
            deliver(late["skip"], 1)
            within.append(retry)
            deliver(skip, 1)
        with hold_lock(NAME) as lease:

            def fail(*args, **kwargs):
                raise OperationalError("no broker")

            monkeypatch.setattr(app.amqp, "send_task_message", fail)
            # The broker still has the message that isn't acknowledged yet; of the other one
            # nobody would learn but by a failure.
            for message, state in zip(sent, ("REJECTED", "FAILURE"), strict=True):
                message.headers[FOLLOWS] = lease.owner_id
                assert deliver_sent(message).state == state
            assert "reject requeue=True" in caplog.text

    def test_a_second_delivery_of_it_does_not_run_beside_the_copy(self):
        _, _, (copy,) = publish(late["skip"], retry)
        assert_runs(copy)
        assert deliver_sent(copy, redelivered=True).state == "IGNORED"
        assert len(ran) == 2
        assert MessageRecord.objects.get(nonce=copy.headers[DELIVERY]).outcome == "success"

    def test_of_the_task_by_itself_follows_the_run_whose_lock_was_not_released(self, monkeypatch):
        """``autoretry_for`` publishes when the lock has been released, if that worked."""

        monkeypatch.setattr(DatabaseBackend, "release", unavailable)
        within.append(raising(ValueError))
        with sending() as sent:
            assert deliver(autoretry, 1).state == "RETRY"
            assert deliver_sent(sent[0]).state == "IGNORED"
        monkeypatch.undo()


class TestReplacement:
    @pytest.mark.parametrize("task", [next_step, skip], ids=["next_step", "itself"])
    def test_by_a_task_of_the_same_lock(self, conflicts, task):
        first, (done,), (copy,) = publish(skip, lambda self: self.replace(task.si(2)))
        assert (first.state, done.state) == ("IGNORED", "IGNORED")
        assert_runs(copy, 2)
        assert conflicts == []

    @pytest.mark.parametrize(
        "workflow",
        [
            lambda: chain(skip.si(2), plain.si(3)),
            lambda: group(skip.si(2), skip.si(2)),
            lambda: chord([skip.si(2), skip.si(2)], plain.si(3)),
        ],
        ids=["chain", "group", "chord"],
    )
    def test_by_a_workflow_of_itself(self, workflow, conflicts):
        _, done, copies = publish(skip, lambda self: self.replace(workflow()))
        assert {each.state for each in done} == {"IGNORED"}
        for copy in copies:
            assert_runs(copy, 2)
        assert len(ran) == 1 + len(copies) > 1
        assert conflicts == []


class TestStep:
    @pytest.mark.parametrize(
        "step",
        [lambda self: chain(skip.si(2), plain.si(3)).delay(), lambda self: next_step.delay(2)],
        ids=["of a chain", "another task of the same lock"],
    )
    def test_that_the_body_published(self, conflicts, step):
        _, (done,), (copy,) = publish(skip, step)
        assert done.state == "IGNORED"
        assert_runs(copy, 2)
        assert conflicts == []

    def test_a_call_of_the_task_by_itself_follows_its_policy(self, conflicts):
        _, (done,), copies = publish(skip, lambda self: self.delay(2))
        assert SkippedRun.of(done.result).reason == "held"
        assert copies == []
        assert conflicts == [NAME]

    def test_what_no_run_publishes_follows_nothing(self):
        with sending() as sent:
            skip.delay(1)
        assert FOLLOWS not in sent[0].headers
        with contextlib.suppress(ValueError), lock(NAME), sending() as sent:
            skip.delay(1)
        assert FOLLOWS not in sent[0].headers

    def test_eager_runs_know_no_publisher(self):
        with lock(NAME) as lease:
            result = skip.apply((1,), headers={FOLLOWS: lease.owner_id})
        assert result.state == "SUCCESS"
