"""
Bodies that are interrupted when their lock is lost, in each kind of place that runs them.

What is thrown into running code may arrive anywhere: see `tests.hammer` for how that is searched.
"""

import contextlib
import os
import queue
import signal
import threading
import time
from functools import partial

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error, ProgrammingError, connection, connections, transaction
from django.test import TestCase

from django_fencedlock import LeaseLost, conf, lock, signals
from django_fencedlock.celery import interrupts
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import SettingsError
from django_fencedlock.test import lose_lease
from django_fencedlock.test.contract.base import connected
from tests import hammer
from tests.hammer import (
    Hammer,
    Sweep,
    a_lease,
    busy_switching,
    enter,
    late_interrupts,
    run_interruptible,
)
from tests.servers import shared
from tests.servers.process import wait_until

RUNS = int(os.environ.get("FENCEDLOCK_TEST_ABORTS", "300"))
#: No body is meant to last so long.
LONG = 20.0


@pytest.fixture(autouse=True)
def handler_of_ours():
    yield
    # An interrupt may still be on its way, and would end the process without a handler.
    signal.signal(conf.abort_signal(), interrupts.on_signal)


@pytest.fixture(params=["main thread", "other thread"])
def place(request):
    """Runs a function where the runs are, and returns or raises what it does."""
    if request.param == "main thread":
        assert interrupts.Interruptible().signal is not None
        return lambda function: function()
    return in_thread


def in_thread(function):
    answers = queue.SimpleQueue()

    def work():
        try:
            answers.put((function(), None))
        except BaseException as exc:
            answers.put((None, exc))
        finally:
            connections.close_all()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    answer, error = answers.get(timeout=3 * LONG)
    if error is not None:
        raise error
    return answer


@contextlib.contextmanager
def lost_soon(lease, after=0.05, begun=None):
    """Lose `lease` from another thread, after its body has `begun` if that is to be told."""

    def lose_lease():
        if begun is not None:
            begun.wait(LONG)
        lease.mark_lost("removed")

    timer = threading.Timer(after, lose_lease)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def aborted(body, place=lambda function: function(), **more):
    lease, started = a_lease(), time.monotonic()
    with lost_soon(lease, **more), pytest.raises(LeaseLost, match="removed") as caught:
        place(lambda: run_interruptible(lease, body))
    assert time.monotonic() - started < LONG / 2
    assert caught.value.owner_id == lease.owner_id
    return caught


def loop():
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        pass
    return "ended"


def sleep_in_slices():
    for _ in range(int(LONG * 100)):
        time.sleep(0.01)
    return "ended"


def loop_that_swallows():
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        with contextlib.suppress(Exception):
            loop()
    return "ended"


@pytest.mark.parametrize("body", [loop, sleep_in_slices, loop_that_swallows])
def test_a_body_is_interrupted_when_its_lock_is_lost(place, body):
    caught = aborted(body, place)
    assert any(entry.name == body.__name__ for entry in caught.traceback) or caught.value.__cause__


def test_a_signal_ends_a_call_of_the_system():
    aborted(lambda: time.sleep(LONG))


def test_what_a_body_returns_or_raises_is_its_own(place):
    def work():
        assert run_interruptible(a_lease(), lambda: 42) == 42
        with pytest.raises(ZeroDivisionError):
            run_interruptible(a_lease(), lambda: 1 // 0)
        assert not hammer.is_within_run()

    place(work)


def test_a_body_that_cleans_up_has_the_time(place):
    cleaned = []

    def body():
        try:
            loop()
        finally:
            time.sleep(0.05)
            cleaned.append(True)

    aborted(body, place)
    assert cleaned == [True]


def test_a_lock_that_was_lost_before_runs_no_body(place):
    lease = a_lease()
    lease.mark_lost("removed")
    with pytest.raises(LeaseLost, match="removed"):
        place(lambda: run_interruptible(lease, pytest.fail))


def test_a_loss_after_the_end_interrupts_no_code(place):
    def work():
        lease = a_lease()
        run_interruptible(lease, lambda: None)
        assert lease._callbacks == []
        in_thread(lambda: lease.mark_lost("removed"))
        return Hammer(1).idle(0.01)

    place(work)


@pytest.mark.parametrize("again", [False, True])
def test_a_body_that_swallows_everything_ends_by_itself(place, again):
    """It is interrupted once: a second time could hit what comes after it."""
    lease = a_lease()

    def body():
        with contextlib.suppress(BaseException):
            loop()
        if again:
            in_thread(interrupts._innermost[interrupts._thread_id()].interrupt)
            for _ in range(1000):
                pass
        return "ended"

    with lost_soon(lease):
        assert place(lambda: run_interruptible(lease, body)) == "ended"
    assert lease.lost


# Runs within runs


def test_the_loss_of_the_outer_lock_ends_the_inner_body_as_well(place):
    outer, inner = a_lease("outer"), a_lease("inner")

    def work():
        with pytest.raises(LeaseLost) as caught:
            enter([outer, inner], loop)
        assert not hammer.is_within_run()
        return caught.value.owner_id

    started = time.monotonic()
    with lost_soon(outer):
        assert place(work) == outer.owner_id
    assert time.monotonic() - started < LONG / 2


def test_the_loss_of_the_outer_lock_ends_its_body_after_an_inner_one(place):
    begun = threading.Event()

    def body():
        run_interruptible(a_lease("inner"), lambda: None)
        begun.set()
        loop()

    aborted(body, place, begun=begun)


def test_the_outer_body_goes_on_after_the_loss_of_an_inner_lock(place):
    outer, inner = a_lease("outer"), a_lease("inner")

    def body():
        with pytest.raises(LeaseLost) as caught:
            run_interruptible(inner, loop)
        return caught.value.owner_id

    with lost_soon(inner):
        assert place(lambda: run_interruptible(outer, body)) == inner.owner_id


def test_the_loss_of_both_ends_both(place):
    """The abort of the inner run may have been the last that came through."""
    outer, inner = a_lease("outer"), a_lease("inner")
    went_on = []
    begun = threading.Event()

    def body():
        with contextlib.suppress(LeaseLost):
            run_interruptible(inner, lose_both)
        went_on.append(True)

    def lose_both():
        try:
            begun.set()
            loop()
        finally:
            # Noted only: whatever was thrown for it was swallowed.
            interrupts._innermost[interrupts._thread_id()]._outer.is_lost = True

    with lost_soon(inner, begun=begun), pytest.raises(LeaseLost) as caught:
        place(lambda: run_interruptible(outer, body))
    assert caught.value.owner_id == outer.owner_id
    assert went_on == []


def test_a_thread_of_the_body_is_not_interrupted_in_its_place():
    inner, done, ended = a_lease("inner"), threading.Event(), []

    def work():
        ended.append(run_interruptible(inner, partial(done.wait, LONG)))

    aborted(lambda: in_thread(work))
    assert not inner.lost
    done.set()
    wait_until(lambda: ended, "the end of the thread")
    assert ended == [True]


# Where it may arrive


def sweep(**options):
    outcomes = Sweep(**options).run()
    assert set(outcomes) == {"aborted", "ended"}, outcomes
    assert min(outcomes.values()) > 10


@pytest.mark.slow
@pytest.mark.parametrize("nested", [{}, {"nested": True}, {"nested": True, "outer": False}])
def test_no_instruction_around_a_body_lets_an_abort_escape(place, nested):
    place(lambda: sweep(**nested))


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_a_time_limit_leaves_no_armed_run_behind(place, nested):
    def work():
        outcomes = Sweep(nested=nested, foreign=True).run()
        assert set(outcomes) == {"time limit", "ended"}, outcomes

    place(work)


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("pause", [None, time.sleep])
def test_aborts_at_random_moments_hit_their_own_run_alone(place, pause, nested):
    def work():
        one = Hammer(RUNS, pause=pause, nested=nested)
        one.work()
        return one.outcomes

    with busy_switching(), late_interrupts():
        outcomes = place(work)
    assert set(outcomes) == {"aborted", "ended"}, outcomes


@pytest.mark.slow
def test_several_threads_are_interrupted_at_once():
    with busy_switching(), late_interrupts():
        outcomes = hammer.hammer_threads(4, RUNS // 4, pause=time.sleep)
    assert set(outcomes) == {"aborted", "ended"}, outcomes


@pytest.mark.slow
def test_the_hammer_hits():
    """An abort that isn't meant for one run hits others."""

    def armed_only(cell):
        return cell.armed and not cell.interrupted

    with pytest.MonkeyPatch.context() as patch, busy_switching(), late_interrupts():
        patch.setattr(interrupts.Interruptible, "is_due", armed_only)
        one = Hammer(2000)
        while one.left and not one.outcomes["escaped"]:
            one.work_through()
    assert one.outcomes["escaped"]


def test_a_handler_of_other_code_is_left_alone():
    def mine(number, frame):
        pass

    signal.signal(conf.abort_signal(), mine)
    with pytest.raises(SettingsError, match="Set FENCEDLOCK_ABORT_SIGNAL"):
        run_interruptible(a_lease(), pytest.fail)
    assert signal.getsignal(conf.abort_signal()) is mine


def test_another_handler_of_the_signal_gets_no_interrupt():
    lease, heard = a_lease(), []

    def body():
        signal.signal(conf.abort_signal(), lambda *args: heard.append(args))
        in_thread(lambda: lease.mark_lost("removed"))
        return "ended"

    assert run_interruptible(lease, body) == "ended"
    assert heard == []


def test_another_signal_may_be_named(settings):
    settings.FENCEDLOCK_ABORT_SIGNAL = signal.SIGUSR2
    try:
        aborted(loop)
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


@pytest.mark.parametrize("found", [signal.SIGTERM, signal.SIGUSR1, 0, "SIGUSR2", None])
def test_a_signal_with_another_use_is_refused(settings, found):
    settings.FENCEDLOCK_ABORT_SIGNAL = found
    assert [problem.id for problem in conf.problems()] == ["E015"]
    with pytest.raises(SettingsError, match="FENCEDLOCK_ABORT_SIGNAL is"):
        run_interruptible(a_lease(), pytest.fail)


def test_a_signal_without_a_lost_lease_does_nothing():
    run_interruptible(a_lease(), lambda: os.kill(os.getpid(), conf.abort_signal()))
    os.kill(os.getpid(), conf.abort_signal())


@pytest.mark.django_db(transaction=True)
def test_a_body_learns_of_a_loss_that_it_noticed_itself(place, monkeypatch):
    """But not before others were told, which happens in its very thread."""
    # On a busy machine, a shorter pause may end while lose_lease() still talks to the database.
    monkeypatch.setattr(interrupts, "SOON", 1.0)
    told, mine = [], []

    def work():
        with lock("x", ttl=60) as lease, pytest.raises(LeaseLost, match="no longer knows"):
            mine.append(lease)
            run_interruptible(lease, lambda: (lose_lease(lease), loop()))

    def receive(lease, **facts):
        told.append(lease)

    with connected(signals.lock_lost, receive), pytest.raises(LeaseLost):
        place(work)
    # The interrupt may hit lose() before it has released the lock, and that lease is lost as well.
    assert [lease for lease in told if lease in mine] == mine


@pytest.mark.django_db(transaction=True)
def test_max_hold_ends_a_body_that_hangs():
    lease = service("default").acquire(new_claim("x", 0.5), max_hold=0.1)
    with pytest.raises(LeaseLost, match=r"held for longer than max_hold=0\.1 s"):
        run_interruptible(lease, lambda: time.sleep(LONG))
    assert lease.release() is False
    with lock("x", blocking_timeout=20):
        pass


@pytest.mark.django_db(transaction=True)
def test_a_lock_of_an_interrupted_body_is_released(place):
    """It would be renewed as long as the worker lives."""
    begun = threading.Event()

    def work():
        lease = a_lease()
        with lock("outside") as outside:
            with lost_soon(lease, begun=begun), pytest.raises(LeaseLost):
                run_interruptible(lease, body)
            assert outside.verify()
        assert lock("inside").holder() is None

    def body():
        # Interrupted between the grant and the block that would give it back.
        lock("inside").acquire()
        lock("inside").acquire()
        begun.set()
        loop()

    place(work)


# Connections that were interrupted


@pytest.fixture
def postgres_kept_open(django_db_blocker):
    """The connection of the main thread, as a worker keeps it from task to task."""
    found = connections["postgres"]
    before = found.settings_dict["CONN_MAX_AGE"]
    found.settings_dict["CONN_MAX_AGE"] = 60
    # One that is open already closes as it was told to.
    found.close()
    try:
        yield found
    finally:
        found.settings_dict["CONN_MAX_AGE"] = before
        found.close()


def query(sql="SELECT pg_sleep(20)"):
    with connections["postgres"].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()


def short_query():
    query("SELECT pg_sleep(5)")


def short_query_in_transaction():
    with transaction.atomic(using="postgres"):
        short_query()


def in_query():
    active = "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND query = %s"
    return shared.postgres().execute(active, "SELECT pg_sleep(20)")


class InQuery:
    @staticmethod
    def wait(seconds):
        wait_until(in_query, "the query", seconds)


def interrupt_in_query(body):
    """Interrupt `body` in the middle of its query; then do as Celery does between two tasks."""
    aborted(body, begun=InQuery)
    connections["postgres"].close_if_unusable_or_obsolete()


def in_transaction():
    with transaction.atomic(using="postgres"):
        query("SELECT 1")
        query()


def in_savepoint():
    with transaction.atomic(using="postgres"), transaction.atomic(using="postgres"):
        query()


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.parametrize("body", [query, in_transaction, in_savepoint])
def test_the_next_task_has_a_connection_that_works(postgres_kept_open, body):
    query("SELECT 1")
    interrupt_in_query(body)
    assert query("SELECT 42") == (42,)
    assert not postgres_kept_open.in_atomic_block
    with transaction.atomic(using="postgres"):
        assert query("SELECT 42") == (42,)
    wait_until(lambda: not in_query(), "its end there")


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.parametrize("run", [partial(run_interruptible, lease) for lease in (None, a_lease())])
@pytest.mark.parametrize("body", [short_query, short_query_in_transaction])
def test_a_time_limit_leaves_a_connection_that_works(postgres_kept_open, run, body):
    def handler(number, frame):
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    main = threading.get_ident()
    try:
        timer.start()
        with pytest.raises(SoftTimeLimitExceeded):
            run(body)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    postgres_kept_open.close_if_unusable_or_obsolete()
    assert query("SELECT 42") == (42,)


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_without_the_cleanup_the_connection_is_of_no_use(postgres_kept_open, monkeypatch):
    monkeypatch.setattr(interrupts, "close_broken", lambda blocks: None)
    interrupt_in_query(query)
    with pytest.raises(Exception, match="already in progress"):
        query("SELECT 42")


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_the_callers_transaction_is_the_callers(postgres_kept_open):
    """A quiet one goes on; one that was interrupted in a statement can only end."""
    for statements in (0, 1):
        with transaction.atomic(using="postgres"):
            for _ in range(statements):
                query("SELECT 1")
            aborted(loop)
            assert query("SELECT 42") == (42,)

    with pytest.raises(Error), transaction.atomic(using="postgres"):
        interrupt_in_query(query)
        query("SELECT 42")
    assert query("SELECT 42") == (42,)


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_a_block_that_was_interrupted_at_its_begin_or_end_is_left(postgres_kept_open):
    """Else every task to come would write into a transaction that nobody commits."""

    def body():
        transaction.atomic(using="postgres").__enter__()
        query("SELECT 1")
        loop()

    aborted(body)
    assert not postgres_kept_open.in_atomic_block
    assert query("SELECT 42") == (42,)
    assert postgres_kept_open.get_autocommit()


@pytest.mark.django_db(transaction=True)
def test_sqlite_is_left_without_a_transaction():
    def body():
        transaction.atomic().__enter__()
        loop()

    aborted(body)
    assert not connection.in_atomic_block
    assert connection.connection is None or not connection.connection.in_transaction


def test_an_error_that_an_interrupted_connection_raises_instead_is_a_loss(place):
    """Django resets the connection as a block ends, which a driver in a statement refuses."""

    def body():
        try:
            loop()
        finally:
            raise ProgrammingError("can't change 'autocommit' now")

    aborted(body, place)


def test_a_bodys_own_database_error_is_no_loss(place):
    lease = a_lease()

    def body():
        in_thread(lambda: setattr(lease, "why_lost", "removed"))
        raise ProgrammingError("no such column")

    with pytest.raises(ProgrammingError):
        place(lambda: run_interruptible(lease, body))


class TestInATestCase(TestCase):
    def test_a_tests_own_transaction_goes_on(self):
        def body():
            with transaction.atomic():
                loop()

        aborted(body)
        with connection.cursor() as cursor:
            cursor.execute("SELECT 42")
            assert cursor.fetchone() == (42,)


def query_again_and_again():
    while True:
        query("SELECT pg_sleep(0.2)")


class TestInATestCaseOnPostgres(TestCase):
    """Were its connection closed, its own transaction would be gone, and all that it had made."""

    databases = frozenset({"default", "postgres"})

    def setUp(self):
        query("SELECT set_config('application_name', 'as it was', true)")

    def test_an_interrupted_statement_ends_first(self):
        aborted(query_again_and_again)
        assert query("SHOW application_name") == ("as it was",)

    def test_so_is_one_in_a_block_of_the_body(self):
        def body():
            with transaction.atomic(using="postgres"):
                query("SELECT set_config('application_name', 'another', true)")
                query_again_and_again()

        aborted(body)
        assert query("SHOW application_name") == ("as it was",)

    def test_a_body_that_noticed_the_loss_itself(self):
        """What it does when it is interrupted, a moment later, is a statement of its test."""

        def lose_and_go_on(lease):
            lose_lease(lease)
            query_again_and_again()

        with pytest.raises(LeaseLost), lock("x") as lease:
            run_interruptible(lease, partial(lose_and_go_on, lease))
        assert query("SHOW application_name") == ("as it was",)
