"""A task under a set of locks: `@single_instance(["account:{source}", "account:{target}"])`."""

import sys
import threading
from unittest import mock

import pytest
from celery.exceptions import Retry
from django.db import transaction

from django_fencedlock import (
    LeaseLost,
    LockNotAcquired,
    current_lease,
    current_leases,
    force_release,
    lock,
    lock_all,
    signals,
)
from django_fencedlock.celery import SkippedRun, lock_name, lock_names, single_instance
from django_fencedlock.celery.duplicates import FOLLOWS
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.identity import LocalHolder, new_owner
from django_fencedlock.core.manager import service
from django_fencedlock.lease_context import held_names
from django_fencedlock.models import HeldLock, MessageRecord
from django_fencedlock.storage.message_records import MessageRecords
from django_fencedlock.test import assert_locked, assert_not_locked, hold_lock, lose_lease
from tests.backends import POSTGRES, REDIS
from tests.deliveries import app, as_current_app, deliver, deliver_sent, sending
from tests.models import Invoice
from tests.servers.process import wait_until
from tests.test_redelivery import lease_back, message, soon
from tests.test_single_instance import DOWN
from tests.threads import beside, elsewhere

pytestmark = pytest.mark.django_db(transaction=True)

PAIR = ["account:{source}", "account:{target}"]
NAMES = ("account:1", "account:2")
ran: list[tuple[int, int]] = []
within: list = []


def body(self, source=2, target=1):
    ran.append((source, target))
    return within.pop(0)(self) if within else current_leases()


def look(self):
    return list(current_leases())


def make(kind, naming=PAIR, options=None, **terms):
    app.tasks.pop(f"sets.{kind}", None)
    made = app.task(name=f"sets.{kind}", bind=True, shared=False, **(options or {}))
    return made(single_instance(naming, **terms)(body))


LATE = {"acks_late": True}
skip = make("skip")
raising = make("raise", on_conflict="raise")
retrying = make("retry", on_conflict="retry", retry_countdown=0)
waiting = make("wait", on_conflict="wait", blocking_timeout=20)
late = make("late", options=LATE)
late_retry = make("late_retry", options=LATE, on_conflict="retry")
unfenced = make("unfenced", fenced=False)
one_account = make("one", "account:{source}")


@pytest.fixture(autouse=True)
def here():
    with as_current_app(ran, within):
        yield
    assert held_names() == ()
    assert current_leases() is None


def assert_free(*names):
    for name in names or NAMES:
        assert_not_locked(name)


class TestNames:
    @pytest.mark.parametrize("kind", [list, tuple])
    def test_are_made_of_templates_sorted_and_each_once(self, celery_app, kind):
        def move(source, target="10", *, day=7):
            pass

        naming = kind(["account:{target}", "account:{source.pk}", "day:{day:02}", "all"])
        moving = celery_app.task(single_instance(naming)(move), shared=False)
        source = mock.Mock(pk="9")
        assert lock_names(moving, source) == ("account:10", "account:9", "all", "day:07")
        assert lock_names(moving, source, target="9") == ("account:9", "all", "day:07")

    def test_a_callable_may_return_a_list_of_them(self):
        def name(task, arguments):
            return [f"row:{pk}" for pk in arguments["pks"]]

        def rows(pks):
            return list(current_leases())

        task = app.task(single_instance(name)(rows), name="sets.pks", shared=False)
        assert lock_names(task, [3, 1, 3]) == ("row:1", "row:3")
        assert task([3, 1, 3]) == ["row:1", "row:3"]
        with pytest.raises(ValueError, match=r"returned \[\], which names no lock"):
            task([])

    @pytest.mark.parametrize(
        ("names", "error", "words"),
        [([3], TypeError, "is a str, not int"), (["x" * 201], ValueError, "201 characters")],
    )
    def test_a_callable_that_returns_others_fails_at_the_call(self, names, error, words):
        with pytest.raises(error, match=words):
            single_instance(lambda task, arguments: names)(body)(None)

    def test_of_a_task_with_one_lock(self):
        assert lock_names(one_account, 1) == (lock_name(one_account, 1),) == ("account:1",)

    @pytest.mark.parametrize("target", [1, 2])
    def test_the_name_of_one_lock_is_an_error(self, target):
        with pytest.raises(TypeError, match=r"sets.skip has a set.*lock_names\(\)"):
            lock_name(skip, 1, target)

    def test_keep_the_task_from_running(self):
        with lock_all(*lock_names(raising, 1, 2)), pytest.raises(LockNotAcquired):
            elsewhere(raising, 1, 2)

    def test_show_no_sensitive_argument(self):
        @app.task(name="sets.pay", shared=False)
        @single_instance(["card:{card}", "shop:{shop}"], sensitive="card")
        def task(card, shop):
            """Take no money."""

        first, second = lock_names(task, "4111", 7)
        assert first.startswith("card:#")
        assert "4111" not in first
        assert second == "shop:7"

    @pytest.mark.parametrize(
        ("naming", "error", "words"),
        [
            ([], ValueError, "names no lock"),
            ((), ValueError, "names no lock"),
            (["a", 3], TypeError, "has templates alone, not 3"),
            (["a", None], TypeError, "has templates alone, not None"),
            ([PAIR], TypeError, "has templates alone"),
            ([Invoice], TypeError, 'not Invoice. .*such as "billing.invoice:{source}"'),
            (["tests.Invoice"], TypeError, "not 'tests.Invoice'"),
            ([lambda task, arguments: "x"], TypeError, "has templates alone"),
            (["account:{sauce}"], TypeError, "Did you mean {source}?"),
            ({"account:{source}"}, TypeError, "a template, a list of templates"),
        ],
    )
    def test_that_can_not_be_are_errors_where_the_task_is_decorated(self, naming, error, words):
        def move(source, target):
            pass

        with pytest.raises(error, match=words):
            single_instance(naming, on_conflict="raise")(move)

    def test_take_no_columns(self):
        with pytest.raises(TypeError, match="Column 'pk' needs a model"):
            single_instance(PAIR, pk="{source}")(body)

    def test_can_not_be_coalesced(self):
        words = "would miss triggers of other lists"
        with pytest.raises(ValueError, match=words):
            make("coalesce", on_conflict="coalesce")
        task = make("called", lambda task, arguments: ["a", "b"], on_conflict="coalesce")
        with pytest.raises(ValueError, match=words):
            task()
        assert ran == []

    def test_have_no_limit(self):
        with pytest.raises(TypeError, match="limit= is for one lock name"):
            make("limited", limit=3)
        task = make("limited", lambda task, arguments: ["a", "b"], limit=3)
        with pytest.raises(TypeError, match="limit= is for one lock name"):
            task()


class TestRuns:
    @pytest.mark.parametrize("task", [skip, unfenced], ids=["fenced", "unfenced"])
    @pytest.mark.parametrize(
        "alias",
        [
            {},
            {"FENCE_DATABASE": "postgres"},
            {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"},
            {"BACKEND": REDIS},
        ],
        ids=["sqlite", "rows", "sessions", "redis"],
    )
    @pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
    def test_have_all_locks_on_every_backend(self, request, settings, task, alias):
        def act(self):
            taken = [elsewhere(lock(each, fenced=fenced).acquire, blocking=False) for each in NAMES]
            return list(current_leases()), taken

        fenced = task is skip
        if "redis" in alias.get("BACKEND", ""):
            alias = {**alias, "LOCATION": request.getfixturevalue("redis_server").url}
        elif alias:
            request.getfixturevalue("postgres")
        settings.FENCEDLOCK = {"default": alias}
        within.append(act)
        assert deliver(task).result == ([*NAMES], [None, None])
        with lock_all(*NAMES, blocking_timeout=0, fenced=fenced):
            pass

    def test_find_each_lease(self):
        def act(self):
            assert [current_lease(name).name for name in NAMES] == [*NAMES]
            assert current_lease().name == NAMES[-1]
            assert current_leases()[NAMES[0]] is current_lease(NAMES[0])
            with lock("another"):
                assert [*current_leases()] == [*NAMES]
            with lock_all("another", NAMES[0]):
                assert [*current_leases()] == [NAMES[0], "another"]
            return [*current_leases()]

        within.append(act)
        assert skip() == [*NAMES]
        assert_free()

    def test_of_an_account_with_itself_take_one_lock(self):
        within.append(look)
        assert deliver(skip, 1, 1).result == ["account:1"]

    def test_fence_rows_of_all_names(self):
        def act(self):
            for row in rows:
                row.amount += 1
                row.save()
            with current_leases().atomic():
                Invoice.objects.update(note="x")
            return "written"

        rows = [Invoice.objects.create(amount=pk) for pk in (1, 2)]
        task = make("rows", ["tests.invoice:{source}", "tests.invoice:{target}"])
        within.append(act)
        assert deliver(task, rows[0].pk, rows[1].pk).result == "written"
        assert [*Invoice.objects.values_list("amount", "note").order_by("pk")] == [
            (2, "x"),
            (3, "x"),
        ]

    @pytest.mark.django_db(transaction=False)
    @pytest.mark.parametrize("name", NAMES)
    def test_within_the_transaction_of_a_test(self, name):
        def act(self):
            with current_leases().atomic():
                Invoice.objects.create()
            return [*current_leases()]

        within.extend([act, look])
        assert skip.apply().get() == [*NAMES]
        with transaction.atomic():
            assert skip.apply().get() == [*NAMES]
        with hold_lock(name):
            assert SkippedRun.of(skip.apply().get()).lock == name
        assert_free()

    def test_have_the_policys_ttl_and_max_hold(self):
        def act(self):
            leases = current_leases().values()
            return [(each.ttl, each.renewed_until - each.granted_at) for each in leases]

        within.append(act)
        assert deliver(make("brief", ttl=7, max_hold=9)).result == [(7, pytest.approx(9))] * 2

    def test_are_counted_by_the_templates(self):
        seen = []

        def note(sender, lease, **kwargs):
            seen.append((lease.name, lease.pattern))

        signals.lock_acquired.connect(note)
        try:
            deliver(skip)
        finally:
            signals.lock_acquired.disconnect(note)
        assert seen == [(name, " + ".join(PAIR)) for name in NAMES]

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, Retry])
    def test_that_fail_release_all(self, error):
        def act(self):
            for name in NAMES:
                assert_locked(name)
            raise error

        within.append(act)
        with pytest.raises(error):
            skip()
        assert_free()

    @pytest.mark.parametrize("place", ["_enter", "_leave", "enter"])
    def test_an_interrupt_around_the_body_leaves_nothing_behind(self, place):
        def interrupt(frame, event, arg):
            if (event, frame.f_code.co_name) == ("call", place):
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                skip()
        finally:
            sys.setprofile(None)
        assert_free()

    def test_without_their_lock_service(self, settings):
        settings.FENCEDLOCK = {"default": {}, "down": DOWN}
        terms = {"fenced": False, "on_backend_error": "run", "backend": "down"}
        bypassed = []

        def note(sender, name, **kwargs):
            bypassed.append(name)

        signals.lock_bypassed.connect(note)
        try:
            assert deliver(make("open", **terms)).result is None
        finally:
            signals.lock_bypassed.disconnect(note)
        assert (ran, bypassed) == ([(2, 1)], ["account:1, account:2"])


class TestCalls:
    def test_one_goes_into_a_block_that_has_some_of_the_locks(self):
        within.append(look)
        with lock("account:2") as lease:
            assert raising() == [*NAMES]
            assert lease.verify()
            with pytest.raises(LockNotAcquired, match=r"'account:2' is held by the code that call"):
                raising.apply(throw=True)
            assert_not_locked("account:1")
        assert_free()

    def test_the_refusal_of_one_in_such_a_block_names_the_others_alone(self):
        with lock("account:1"), hold_lock("account:2"), pytest.raises(LockNotAcquired) as caught:
            skip()
        assert [*caught.value.holders] == ["account:2"]

    @pytest.mark.parametrize("inner", [skip, one_account], ids=["set", "one"])
    @pytest.mark.parametrize("outer", [skip, one_account], ids=["set", "one"])
    def test_one_within_a_run_that_has_one_of_the_locks(self, outer, inner):
        def act(self):
            with pytest.raises(LockNotAcquired, match="can't continue before this call returns"):
                inner(1, 3)
            assert_not_locked("account:3")
            return "refused"

        within.append(act)
        assert outer(1, 2) == "refused"
        assert ran == [(1, 2)]

    def test_one_within_a_run_of_others(self):
        within.extend([lambda self: (skip(3, 4), look(self)), look])
        assert skip() == (["account:3", "account:4"], [*NAMES])


class TestConflicts:
    @pytest.fixture
    def taken(self):
        """The second of three locks, and the third, each held by another holder."""
        with hold_lock("b") as first, hold_lock("c") as second:
            yield {"b": first, "c": second}

    def three(self, **terms):
        return make("three", ["a", "b", "c", "d:{source}"], **terms)

    def test_raise_names_all_holders(self, taken):
        done = deliver(self.three(on_conflict="raise"))
        assert (done.state, ran) == ("FAILURE", [])
        error = done.result.exception
        assert {name: each.owner_id for name, each in error.holders.items()} == {
            name: lease.owner_id for name, lease in taken.items()
        }
        assert "2 locks of a set of 4 are held: 'b' by " in str(error)
        assert_free("a", "d:2")

    @pytest.mark.parametrize("call", [deliver, lambda task: mock.Mock(result=task.apply().get())])
    def test_skip_names_the_first(self, taken, call):
        skipped = SkippedRun.of(call(self.three()).result)
        assert (skipped.lock, skipped.reason, skipped.token) == ("b", "held", taken["b"].token)
        assert skipped.holder == str(taken["b"].holder)
        assert_free("a", "d:2")

    def test_a_direct_call_raises(self, taken):
        with pytest.raises(LockNotAcquired):
            self.three()()
        assert_free("a", "d:2")

    def test_retry_comes_again(self):
        with hold_lock("account:2"), sending() as sent:
            assert deliver(retrying).state == "RETRY"
        assert_free()
        within.append(look)
        assert deliver_sent(sent[0]).result == [*NAMES]

    @pytest.mark.parametrize("name", NAMES)
    def test_wait_waits_for_each_of_them(self, name):
        held = hold_lock(name, let_wait=True)
        held.__enter__()
        within.append(look)
        run = beside(deliver, waiting)
        other = NAMES[0] if name == NAMES[1] else None
        if other is not None:
            # It waits for the second one with the first.
            wait_until(lambda: HeldLock.objects.filter(name=other).exists(), "the first lock")
        held.__exit__(None, None, None)
        assert run.result(20).result == [*NAMES]

    def test_a_wait_that_ends_has_none_of_them(self):
        task = make("impatient", on_conflict="wait", blocking_timeout=0.05)
        with hold_lock("account:2", let_wait=True):
            assert deliver(task).state == "FAILURE"
            assert_not_locked("account:1")


class TestLosses:
    @pytest.mark.parametrize("name", NAMES)
    def test_of_one_fails_the_task(self, name):
        within.append(lambda self: lose_lease(current_lease(name)))
        done = deliver(skip)
        assert done.state == "FAILURE"
        assert isinstance(done.result.exception, LeaseLost)
        assert done.result.exception.name == name
        assert_free()

    @pytest.mark.parametrize("on_lost", ["raise", "abort"])
    def test_by_force_names_the_author(self, on_lost):
        def act(self):
            force_release("account:2", by="the boss")
            # As the thread that renews does, before the author is looked up.
            current_lease("account:2").mark_lost("refused", guessed=True)

        within.append(act)
        error = deliver(make("forced", on_lost=on_lost)).result.exception
        assert isinstance(error, LeaseLost)
        assert error.name == "account:2"
        assert "the boss" in str(error)
        assert_free()

    def test_that_shows_at_the_release_fails_the_task(self):
        within.append(lambda self: HeldLock.objects.filter(name="account:2").delete())
        with pytest.raises(LeaseLost, match=r"'account:2'.* at the release"):
            skip()
        assert_free()

    def test_may_be_ignored(self):
        within.append(lambda self: lose_lease(current_lease()))
        assert deliver(make("ignore", on_lost="ignore")).state == "SUCCESS"
        assert_free()

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("call", [lambda f, *a: f(*a), elsewhere], ids=["main", "thread"])
    def test_of_one_interrupts_the_body(self, name, call):
        def act(self):
            losing = beside(lose_lease, current_lease(name))
            try:
                for _ in range(2000):
                    threading.Event().wait(0.01)
            finally:
                losing.result(20)
            return "not interrupted"

        within.append(act)
        done = call(deliver, make("abort", on_lost="abort"))
        assert isinstance(done.result.exception, LeaseLost), done
        assert done.result.exception.name == name
        assert_free()

    @pytest.mark.parametrize("on_lost", ["raise", "abort"])
    def test_leave_nothing_behind_at_the_leases_of_a_callers_block(self, on_lost):
        with lock_all(*NAMES) as outer:
            before = [len(lease._interrupts) for lease in outer.values()]
            inner = make("nested", on_lost=on_lost)()
            assert [*inner] == [*outer] == [*NAMES]
            assert current_leases() is outer
            assert [len(lease._interrupts) for lease in outer.values()] == before

    def test_of_a_set_leaves_the_callers_block_its_lock(self):
        with lock("account:1") as lease:
            skip()
            with pytest.raises(LeaseLost), lock("account:2") as second:
                lose_lease(second)
            assert not lease.lost
            assert lease.verify()


class TestMessages:
    def publish(self, task, action):
        """Let a body publish something that another worker gets while the body holds its locks."""
        done = []

        def act(self):
            try:
                with sending() as sent:
                    return action(self)
            finally:
                with sending() as copies:
                    done.extend(elsewhere(deliver_sent, each) for each in sent)
                done.extend(copies)

        within.append(act)
        return deliver(task), *done

    @pytest.mark.parametrize("task", [skip, late], ids=["early", "late"])
    def test_a_retry_is_no_conflict_with_its_own_run(self, task):
        def retry(self):
            raise self.retry(countdown=0)

        first, done, copy = self.publish(task, retry)
        assert (first.state, done.state) == ("RETRY", "IGNORED")
        within.append(look)
        assert deliver_sent(copy).result == [*NAMES]

    @pytest.mark.parametrize("account", [1, 2])
    @pytest.mark.parametrize("follower", [one_account, skip], ids=["one", "set"])
    def test_a_step_with_any_of_the_locks_waits_for_the_end(self, follower, account):
        step = follower.si(account, 3)
        _, done, copy = self.publish(skip, lambda self: self.replace(step))
        assert done.state == "IGNORED"
        within.append(lambda self: "ran")
        assert deliver_sent(copy).result == "ran"

    def test_a_set_that_follows_a_run_with_one_of_the_locks_waits_for_its_end(self):
        _, done, copy = self.publish(one_account, lambda self: self.replace(skip.si(1, 2)))
        assert done.state == "IGNORED"
        within.append(look)
        assert deliver_sent(copy).result == [*NAMES]

    def test_a_follower_is_an_ordinary_conflict_with_another_holder(self):
        with hold_lock("account:2"):
            done = deliver(skip, headers={FOLLOWS: "0" * 32 + " " + "1" * 32})
        assert SkippedRun.of(done.result).reason == "held"


class TestRedelivery:
    def test_a_message_that_ended_is_not_run_again(self):
        told = message()
        within.append(look)
        assert deliver(late, **told).result == [*NAMES]
        assert deliver(late, **told, redelivered=True).state == "IGNORED"
        assert ran == [(2, 1)]
        assert_free()

    def test_a_second_delivery_comes_later_as_the_same_message(self):
        told, done = message(), []

        def act(self):
            with sending() as sent:
                done.append(elsewhere(lambda: deliver(late, **told, redelivered=True)))
            done.extend(sent)
            return "ran"

        within.append(act)
        assert deliver(late, **told).result == "ran"
        second, copy = done
        assert second.state == "IGNORED"
        assert deliver_sent(copy).state == "IGNORED"
        assert ran == [(2, 1)]

    @pytest.mark.parametrize("known_by", ["task", "record"])
    def test_the_run_of_another_delivery_is_known(self, known_by):
        told, done = message(), []

        def act(self):
            if known_by == "task":
                MessageRecord.objects.update(owner="0" * 32)
            else:
                HeldLock.objects.update(task_id="unknown")
            with sending() as sent:
                done.append(elsewhere(lambda: deliver(late, **told, redelivered=True)))
            done.extend(sent)

        within.append(act)
        deliver(late, **told)
        assert done[0].state == "IGNORED"
        assert len(done) == 2

    def test_a_retry_waits_for_its_former_run(self):
        told = message()
        owner = new_owner()._replace(task_id=told["id"], task_name="t")
        claim = new_claim("account:2", 30, owner=owner)
        lease = service("default").acquire(claim, who=LocalHolder())
        within.append(look)
        with soon(lease_back, lease):
            assert deliver(late, **told).result == [*NAMES]

    def test_the_run_of_another_delivery_is_known_though_it_lost_the_first_lock(self):
        def act(self):
            service("default").backend.release(current_lease("account:1").grant)
            # In another thread, where it isn't a lock of the same task.
            other = elsewhere(lock("account:1").acquire, blocking=False)
            done.append(elsewhere(lambda: deliver(late, **told, redelivered=True)))
            other.release()

        told, done = message(), []
        within.append(act)
        assert deliver(late, **told).state == "FAILURE"
        assert done[0].state == "IGNORED"

    def test_another_message_is_an_ordinary_conflict(self):
        done = []
        within.append(lambda self: done.append(elsewhere(lambda: deliver(late, **message()))))
        deliver(late, **message())
        assert SkippedRun.of(done[0].result).reason == "held"

    def test_the_record_of_an_active_run_is_kept(self):
        """Also of one that acquired its locks at a second try, with owners of its own."""

        def act(self):
            MessageRecord.objects.update(kept_until="2000-01-01T00:00Z")
            return MessageRecords(service("default").config).sweep(1)

        told = message()
        with hold_lock("account:2"), sending() as sent:
            deliver(late_retry, **told)
        within.append(act)
        assert deliver_sent(sent[0]).result == 0
        record = MessageRecord.objects.get()
        assert (record.name, record.outcome) == ("account:1", "success")

    def test_a_delivery_that_was_killed_runs_again(self):
        told = message()
        within.extend([mock.Mock(side_effect=SystemExit(1)), look])
        with pytest.raises(SystemExit):
            deliver(late, **told)
        assert deliver(late, **told, redelivered=True).result == [*NAMES]
