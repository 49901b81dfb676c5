"""The keeper's timing, with a clock of the test's own and no thread; and its threads."""

import contextlib
import ctypes
import gc
import math
import sys
import threading
import weakref

import pytest

from django_fencedlock import signals
from django_fencedlock.backends.interface import Grant, Renewal
from django_fencedlock.core import keeper as keeper_module
from django_fencedlock.core import runtime
from django_fencedlock.core.identity import new_owner
from django_fencedlock.core.keeper import CLEAR_AFTER, DOUBTED, Keeper
from django_fencedlock.core.runtime import clock as real_clock
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.lease import Lease
from tests.clocks import Clock
from tests.failing import raising, unavailable
from tests.scripts import run_python
from tests.servers.process import wait_until
from tests.threads import without_threads


class Service:
    class config:  # noqa: N801
        alias = "default"

    def __init__(self) -> None:
        self.answer = Renewal.KEPT
        self.batches: list[int] = []
        self.supports_ttl = True
        self.released: list[Grant] = []

    def renew(self, grants):
        self.batches.append(len(grants))
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * len(grants)

    def release(self, grant):
        self.released.append(grant)
        return True

    def release_all(self, grants):
        return [self.release(tuple(grants))]


class Registry:
    def __init__(self) -> None:
        self.overtaken: list[Lease] = []
        self.rows: list[list[str]] = []
        self.cleared: list[list[str]] = []

    def renew(self, grants):
        self.rows.append([grant.owner for grant in grants])
        owners = {lease.owner_id for lease in self.overtaken}
        return [grant for grant in grants if grant.owner in owners]

    def clear(self, grants):
        self.cleared.append([grant.owner for grant in grants])


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def losses():
    return []


@pytest.fixture
def keeper(service, registry, clock, losses, monkeypatch):
    def call(function, *args, **kwargs):
        function(*args, **kwargs)

    monkeypatch.setattr(keeper_module, "notify", call)
    keeper = without_threads(Keeper(service, noting(losses), clock, registry))
    tick = keeper.tick

    def all_tick():
        waits = [tick(), keeper.tend()]
        return min((wait for wait in waits if wait is not None), default=None)

    keeper.tick = all_tick

    def after(seconds):
        clock.now += seconds
        return all_tick()

    keeper.after = after
    return keeper


def noting(losses):
    return lambda leases: losses.extend((lease, lease.why_lost) for lease in leases)


def a_lease(name, ttl, clock=real_clock, **given):
    grant = Grant(name, new_owner().id, ttl, token=1)
    return Lease(grant, None, since=clock(), clock=clock, **given)


def lost_of(losses):
    return [found for found, _ in losses]


@pytest.fixture
def lease(clock):
    # The keeper keeps no lease to which nothing else refers.
    everything = []

    def make(ttl=30.0, name="x", max_hold=math.inf, kept_by=None):
        made = a_lease(name, ttl, clock, max_hold=max_hold)
        everything.append(made)
        if kept_by:
            kept_by.keep(made)
        return made

    make.forget = everything.clear
    return make


def test_a_lease_is_renewed_each_third_of_its_ttl(keeper, service, lease):
    kept = lease(kept_by=keeper)
    assert keeper.tick() == pytest.approx(10)
    assert service.batches == []
    assert keeper.after(10) == pytest.approx(10)
    assert service.batches == [1]
    assert kept.remaining() == pytest.approx(30)


def test_leases_acquired_at_different_times_soon_share_one_batch(keeper, service, clock, lease):
    for _ in range(5):
        keeper.keep(lease(ttl=30))
        clock.now += 1
    keeper.after(5)
    keeper.after(10)
    assert service.batches == [5, 5]


def test_a_batch_that_a_lease_is_not_in_delays_no_release(keeper, service, clock, lease):
    early, late = lease(), None
    keeper.keep(early)
    clock.now += 10
    late = lease(kept_by=keeper)

    def renew(leases):
        keeper.drop(late)  # would hang if it waited
        return [Renewal.KEPT] * len(leases)

    service.renew = renew
    keeper.tick()


@pytest.mark.parametrize("answer", [Renewal.KEPT, Renewal.LOST])
def test_a_lease_released_during_its_renewal_is_neither_lost_nor_renewed_again(
    keeper, service, lease, losses, answer
):
    kept = lease(kept_by=keeper)
    renew, service.answer = service.renew, answer
    service.renew = lambda leases: keeper.forget(kept) or renew(leases)
    assert keeper.after(10) is None
    keeper.after(100)
    assert service.batches == [1]
    assert losses == []


def test_a_lease_wakes_no_thread_that_will_wake_in_time(keeper, lease):
    released = lease(kept_by=keeper)
    keeper.drop(released)
    keeper.tick()
    keeper._thread.thread = lambda: True
    keeper._thread._jobs.get()
    keeper.keep(lease())
    assert not keeper._thread.waiting
    keeper.keep(lease(ttl=3))
    assert keeper._thread.waiting


def test_the_rows_of_released_leases_are_deleted_together_soon_after(keeper, registry, lease):
    released = [lease(name=name) for name in "abc"]
    for each in released:
        keeper.keep(each)
        keeper.drop(each)
        keeper.clear_row(each.grant)
    keeper.tick()
    assert registry.cleared == []
    keeper.after(CLEAR_AFTER)
    keeper.tick()
    assert registry.cleared == [[each.owner_id for each in released]]


def test_a_doubt_is_released_again_and_again_for_a_minute(keeper, service, clock):
    doubted = Grant("x", "an owner")
    keeper.doubt(doubted)
    times = []
    while (wait := keeper.tick()) is not None:
        if len(service.released) > len(times):
            times.append(round(clock.now - 1000))
        clock.now += wait
    times.append(round(clock.now - 1000))
    assert set(service.released) == {doubted}
    assert times[:3] == [1, 6, 11]
    assert DOUBTED <= times[-1] < 2 * DOUBTED
    # A backend whose session outlives its locks keeps the session meanwhile.
    assert service.batches == [0] * len(times)


def test_doubts_of_one_owner_take_one_place_and_one_request(keeper, service, monkeypatch):
    monkeypatch.setattr("django_fencedlock.core.keeper.MAX_DOUBTS", 2)
    asked = [Grant(f"gpu [permit {number}]", "a") for number in range(1, 1001)]
    keeper.doubt(*asked)
    other, third = Grant("x", "b"), Grant("x", "c")
    keeper.doubt(other)
    keeper.doubt(third)
    keeper.after(1)
    assert service.released == [tuple(asked), other]
    # The owner has got one of them.
    keeper.trust("a", asked[7].name)
    keeper.trust("b", "x")
    keeper.doubt(third)
    service.released.clear()
    keeper.after(5)
    assert service.released == [tuple(asked[:7] + asked[8:]), third]


def test_doubts_of_a_node_that_is_away_do_not_keep_those_of_another(keeper, service, clock):
    def release(grant):
        service.released.append(grant)
        if grant.name == "away":
            clock.now += service.timeout
            raise BackendUnavailable("no answer", name=grant.name, alias="default")

    service.release = release
    for owner in "abc":
        keeper.doubt(Grant("away", owner))
    keeper.doubt(Grant("there", "d"))
    # A node that refuses connections takes no time.
    service.timeout = 0
    keeper.after(1)
    assert len(service.released) == 4
    # One that doesn't answer is asked once in a round, about another doubt each time.
    service.timeout = 5
    service.released.clear()
    for _ in range(4):
        keeper.after(5)
    assert {grant.owner for grant in service.released} == {*"abcd"}
    assert [grant.name for grant in service.released].count("away") == 4


def test_a_renewal_by_the_holder_puts_the_keepers_off(keeper, service, clock, lease):
    kept = lease(kept_by=keeper)
    clock.now += 9
    kept.ttl, kept.deadline = 60, clock.now + 60
    keeper.renewed(kept)
    assert keeper.tick() == pytest.approx(20)


@pytest.mark.parametrize(("ttl", "remaining"), [(300, 30), (5, 5)])
def test_the_shorter_of_two_ttls_counts_if_it_changes_meanwhile(
    keeper, service, clock, lease, ttl, remaining
):
    kept = lease(kept_by=keeper)

    def renew(leases):
        kept.ttl = ttl  # What lease.renew(ttl) does before it asks.
        if ttl < 30:
            # It comes to the service last, and is answered first.
            kept.deadline = clock.now + ttl
        return [Renewal.KEPT]

    service.renew = renew
    keeper.after(10)
    assert kept.remaining() == pytest.approx(remaining)


def drive(keeper, clock, until):
    while (wait := keeper.tick()) is not None and clock.now + wait <= until:
        clock.now += max(wait, 0.001)
    clock.now = until


def test_a_lease_is_renewed_until_its_max_hold_and_lost_a_ttl_later(
    keeper, service, clock, lease, losses
):
    start = clock.now
    kept = lease(max_hold=60, kept_by=keeper)
    drive(keeper, clock, start + 60)
    assert service.batches == [1] * 6
    drive(keeper, clock, start + 89.9)
    assert service.batches == [1] * 6
    assert losses == []
    kept.check()
    drive(keeper, clock, start + 90.1)
    assert lost_of(losses) == [kept]
    assert "held for longer than max_hold=60 s; it is no longer renewed" in losses[0][1]
    assert keeper.tick() is None


@pytest.mark.parametrize(("max_hold", "pause"), [(5, 30), (60, 500)])
def test_a_short_max_hold_or_a_pause_beyond_it_renews_nothing(
    keeper, service, lease, losses, max_hold, pause
):
    kept = lease(max_hold=max_hold, kept_by=keeper)
    assert keeper.tick() == pytest.approx(30 if max_hold < 10 else 10)
    assert keeper.after(pause) is None
    assert service.batches == []
    assert lost_of(losses) == [kept]


@pytest.fixture
def asked(service):
    asked = []
    service.renew = lambda leases: asked.append(list(leases)) or [Renewal.KEPT] * len(leases)
    return asked


def test_what_was_held_too_long_is_not_renewed_with_others(keeper, asked, clock, lease, losses):
    bounded, endless = lease(name="bounded", max_hold=12), lease(name="endless")
    for each in (bounded, endless):
        keeper.keep(each)
    drive(keeper, clock, clock.now + 60)
    assert [len(batch) for batch in asked] == [2, 1, 1, 1, 1, 1]
    assert lost_of(losses) == [bounded]


def test_what_was_held_too_long_is_not_renewed_near_its_end(keeper, asked, clock, lease, losses):
    keeper.keep(lease(name="bounded", max_hold=5))
    clock.now += 16
    endless = lease(name="endless", kept_by=keeper)
    keeper.after(10)
    assert asked == [[endless.grant]]
    assert losses == []


@pytest.mark.parametrize("supports_ttl", [True, False])
def test_a_lock_without_ttl_is_released_once_it_is_lost(keeper, service, lease, supports_ttl):
    service.supports_ttl = supports_ttl
    order = []
    service.release = lambda lease: order.append("released")
    kept = lease(ttl=30, max_hold=5)
    kept.interrupt_by(lambda lease: order.append("lost"))
    keeper.keep(kept)
    keeper.after(30)
    assert order == (["lost"] if supports_ttl else ["lost", "released"])


def test_a_failed_release_disturbs_no_others(keeper, service, clock, lease):

    service.supports_ttl, service.release = (False, unavailable)
    keeper.keep(lease(name="bounded", max_hold=5))
    kept = lease(name="kept", kept_by=keeper)
    drive(keeper, clock, clock.now + 40)
    assert not kept.expired


def test_the_thread_ends_without_leases_and_starts_again(monkeypatch, service, losses):
    monkeypatch.setattr(runtime, "IDLE_SECONDS", 0.05)
    keeper = Keeper(service, losses.extend)
    for round_ in range(2):
        kept = a_lease("x", 0.06)
        keeper.keep(kept)
        wait_until(lambda before=round_: len(service.batches) > before, "a renewal")
        keeper.drop(kept)
        wait_until(lambda: not keeper._thread.thread(), "the thread's end")
    assert losses == []


@pytest.fixture
def threaded(service, registry, losses):
    keeper = Keeper(service, losses.extend, fences=registry)
    kept = []

    def keep(ttl):
        lease = a_lease(f"n{len(kept)}", ttl)
        kept.append(lease)
        keeper.keep(lease)

    keeper.keep_for, keeper.kept = keep, kept
    yield keeper
    for lease in kept:
        keeper.drop(lease)


@pytest.fixture
def busy():
    began, go_on = threading.Event(), threading.Event()

    def take_long(*args, **kwargs):
        began.set()
        assert go_on.wait(60)

    take_long.began = began
    take_long.go_on = go_on
    yield take_long
    go_on.set()


def test_a_slow_handler_of_logs_delays_no_renewal(threaded, service, busy, monkeypatch):
    monkeypatch.setattr(keeper_module.logger, "warning", busy)
    renew = service.renew

    def fail_once(grants):
        service.renew = renew
        raise RuntimeError("driver")

    service.renew = fail_once
    threaded.keep_for(6)
    assert busy.began.wait(60)
    wait_until(lambda: service.batches, "a renewal")


@pytest.mark.parametrize("work", ["renew", "clear"])
def test_a_slow_registry_delays_no_renewal(threaded, service, registry, busy, work, monkeypatch):
    monkeypatch.setattr(keeper_module, "CLEAR_AFTER", 0.0)
    monkeypatch.setattr(registry, work, busy)
    threaded.keep_for(0.3)
    threaded.drop(threaded.kept[0])
    threaded.clear_row(threaded.kept[0].grant)
    threaded.keep_for(0.3)
    assert busy.began.wait(60)
    before = len(service.batches)
    wait_until(lambda: len(service.batches) > before + 2, "renewals")
    assert threaded._tending.waiting <= 1


def test_renewals_are_reported_until_the_notifier_is_behind(keeper, service, lease, monkeypatch):
    heard = []
    receiver = lambda leases, **facts: heard.append(leases)  # noqa: E731
    signals.leases_renewed.connect(receiver)
    try:
        kept = lease(kept_by=keeper)
        for behind in (False, True):
            monkeypatch.setattr(runtime, "MAX_QUEUED", -1 if behind else 0)
            keeper.after(10)
    finally:
        signals.leases_renewed.disconnect(receiver)
    assert heard == [[kept]]


def test_rows_are_renewed_of_what_is_fenced_and_kept(keeper, service, registry, lease):
    fenced, unfenced = lease(), lease(name="unfenced")
    unfenced.fenced = False
    for each in (fenced, unfenced):
        keeper.keep(each)
    keeper.after(10)
    service.answer = Renewal.UNKNOWN
    keeper.after(10)
    service.answer = Renewal.KEPT
    service.renew = lambda leases: keeper.forget(fenced) or [Renewal.KEPT] * len(leases)
    keeper.after(10)
    assert registry.rows == [[fenced.owner_id]]


def test_a_database_that_hangs_keeps_no_lease_alive(keeper, service, clock, lease, monkeypatch):
    """One to which nothing else refers is to be released."""
    kept = lease(kept_by=keeper)
    clock.now += 10
    type(keeper).tick(keeper)
    reference = weakref.ref(kept)
    del kept
    lease.forget()
    gc.collect()
    assert reference() is None


def test_a_service_that_records_grants_itself_has_no_rows_renewed(service, clock, lease):
    keeper = without_threads(Keeper(service, print, clock))
    kept = lease(kept_by=keeper)
    clock.now += 10
    keeper.tick()
    keeper.drop(kept)
    keeper.clear_row(kept.grant)
    clock.now += 10
    assert keeper.tick() is None
    assert not keeper._renewed
    assert not keeper._ended


def test_a_lease_before_a_newer_grant_is_released_and_lost(
    keeper, service, registry, lease, losses
):
    overtaken, kept = lease(), lease(name="y")
    for each in (overtaken, kept):
        keeper.keep(each)
    registry.overtaken = [overtaken]
    keeper.after(10)
    assert overtaken.lost
    assert lost_of(losses) == [overtaken]
    assert service.released == [overtaken.grant]
    assert not kept.lost


def test_rows_are_deleted_if_others_could_not_be_renewed(keeper, registry, lease, monkeypatch):

    monkeypatch.setattr(registry, "renew", raising(RuntimeError("driver")))
    kept, released = lease(), lease(name="y")
    keeper._renewed = {kept: None}
    keeper._due = dict.fromkeys(keeper._renewed, 1e9)
    keeper.clear_row(released.grant)
    keeper._clock.now += CLEAR_AFTER
    with pytest.raises(RuntimeError):
        keeper.tend()
    assert registry.cleared == [[released.owner_id]]


def test_a_loss_without_a_thread_is_reported_later(service, clock, lease, losses, monkeypatch):

    worker = runtime.Worker("notifier")
    monkeypatch.setattr(keeper_module.runtime, "worker", worker)
    keeper = without_threads(Keeper(service, noting(losses), clock=clock))
    refused, other = lease(), lease(name="y")
    keeper.keep(refused)
    service.answer = Renewal.LOST
    clock.now += 10
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "start", raising(RuntimeError("can't start new thread")))
        keeper.tick()
    assert refused.lost
    assert losses == []
    keeper.keep(other)
    clock.now += 10
    keeper.tick()
    wait_until(lambda: len(losses) == 2, "the reports")
    assert lost_of(losses) == [refused, other]


class TestWorkers:
    def test_jobs_are_done_in_order_though_one_fails(self, caplog):
        worker, done = runtime.Worker("worker"), []
        worker.put(lambda: done.append(threading.current_thread().name))
        worker.put(lambda: [][0])
        worker.put(lambda: sys.exit())
        worker.put(lambda: done.append("last"))
        wait_until(lambda: len(done) == 2, "the jobs")
        assert done == ["worker", "last"]
        wait_until(lambda: "A job of thread 'worker' failed" in caplog.text, "the log")

    def test_the_thread_ends_and_starts_again(self, monkeypatch):
        monkeypatch.setattr(runtime, "IDLE_SECONDS", 0.01)
        worker, done = runtime.Worker("worker"), []
        for _ in range(2):
            worker.put(lambda: done.append(None))
            wait_until(lambda: done, "the job")
            wait_until(lambda: not worker.thread(), "the thread's end")
            done.clear()

    def test_a_thread_does_not_end_while_a_job_has_just_come(self):
        worker = runtime.Worker("worker")
        worker._jobs.put(print)
        worker.thread = lambda: True
        assert not worker._may_end()
        assert worker.thread()
        worker._jobs.get()
        assert worker._may_end()
        assert not worker.thread()

    def test_the_end_waits_for_the_jobs_but_not_for_ever(self, busy):
        worker, done = runtime.Worker("worker"), []
        worker.finish(60)  # Nothing to wait for.
        worker.put(lambda: done.append(None))
        worker.finish(60)
        assert done
        worker.put(busy)
        worker.finish(0.01)

    @pytest.mark.slow
    def test_a_child_has_its_own_and_the_end_of_a_process_waits_for_reports(self):
        script = """
            import os, time, django
            django.setup()
            from django_fencedlock import lock
            from django_fencedlock.core.runtime import notify, worker


            def say(word):
                time.sleep(0.2)
                os.write(1, word.encode())


            notify(say, "parent, ")
            worker.finish(60)
            child = os.fork()
            if not child:
                notify(say, "child, ")
                worker.finish(60)
                os._exit(0)
            os.waitpid(child, 0)
            notify(say, "end")
        """
        done = run_python(
            code=script, DJANGO_SETTINGS_MODULE="tests.settings", PYTHONWARNINGS="ignore"
        )
        assert done.stdout == "parent, child, end", done.stderr


@pytest.fixture
def asleep(threaded):
    threaded.keep_for(600)
    wait_until(lambda: threaded._wakes_at > real_clock() + 100, "the thread's first look")
    wait_until(lambda: not threaded._thread.waiting, "the thread's first look")
    return threaded


def test_a_lease_that_is_due_sooner_wakes_the_thread(asleep, service):
    asleep.keep_for(0.3)
    wait_until(lambda: service.batches, "a renewal")


def test_a_shorter_ttl_that_the_holder_asks_for_wakes_the_thread(asleep, service):
    (kept,) = asleep.kept
    kept.ttl, kept.deadline = 6, real_clock() + 6
    asleep.renewed(kept)
    wait_until(lambda: service.batches, "a renewal")


def test_a_doubt_whose_thread_did_not_start_is_released_after_the_next_beat(
    keeper, service, lease, monkeypatch
):
    lease(kept_by=keeper)
    woken = []
    with monkeypatch.context() as patch:
        patch.setattr(keeper._tending, "wake", lambda: False)
        keeper.doubt(Grant("y", "an owner"))
    monkeypatch.setattr(keeper._tending, "wake", lambda: woken.append(1))
    service.answer = Renewal.UNKNOWN
    keeper.after(10)
    assert woken


def _interrupt(*args):
    raise KeyboardInterrupt


def test_an_interrupt_as_the_thread_starts_leaves_none_unrenewed(threaded, service, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(runtime, "start", _interrupt)
        threaded.keep_for(0.3)
    threaded.keep_for(0.3)
    wait_until(lambda: service.batches, "a renewal")


def test_an_interrupt_as_the_thread_is_woken_leaves_none_unrenewed(asleep, service, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(runtime.Worker, "wake", _interrupt)
        asleep.keep_for(0.3)
    asleep.keep_for(0.6)
    wait_until(lambda: service.batches, "a renewal")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_registry_thread_that_did_not_start_is_started_by_the_next_release(
    threaded, registry, monkeypatch, error
):
    def fail(*args):
        raise error

    monkeypatch.setattr(keeper_module, "CLEAR_AFTER", 0.0)
    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(runtime, "start", fail)
        threaded.clear_row(a_lease("x", 60).grant)
    threaded.clear_row(a_lease("y", 60).grant)
    wait_until(lambda: not threaded._ended, "the rows' deletion")


def test_a_thread_that_an_exception_ended_is_replaced(asleep, service, monkeypatch):
    """One that is meant for a thread of the same id, which has just ended."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    found = []
    asleep._thread.put(lambda: found.append(threading.get_ident()))
    wait_until(lambda: found, "the thread")
    exception = ctypes.py_object(ZeroDivisionError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(found[0]), exception)
    asleep._thread._jobs.put(lambda: None)
    wait_until(lambda: asleep._thread.thread() is None, "the thread's end")
    asleep.keep_for(900)
    asleep.keep_for(0.3)
    wait_until(lambda: service.batches, "a renewal")


def test_an_unforeseen_error_does_not_end_the_thread(threaded, service, caplog):
    tick, failed = threaded.tick, []

    def fail():
        if not failed:
            failed.append(True)
            raise ZeroDivisionError
        return tick()

    threaded._thread._tick = fail
    threaded.keep_for(0.3)
    wait_until(lambda: service.batches, "a renewal")
    assert failed
    wait_until(lambda: "thread 'fencedlock-keeper-default' failed" in caplog.text, "the log")
