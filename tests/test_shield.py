"""A soft time limit that hits while a task is at its lock."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from billiard.pool import SIG_SOFT_TIMEOUT, soft_timeout_sighandler
from celery.exceptions import SoftTimeLimitExceeded

from django_fencedlock import current_lease
from django_fencedlock.celery import single_instance
from django_fencedlock.celery.interrupts import DeferredTimeLimit
from django_fencedlock.core.manager import service
from django_fencedlock.test import assert_not_locked, hold_lock

pytestmark = pytest.mark.skipif(SIG_SOFT_TIMEOUT is None, reason="no soft time limits here")


@pytest.fixture(autouse=True)
def handler():
    runs.clear()
    before = signal.signal(SIG_SOFT_TIMEOUT, soft_timeout_sighandler)
    yield
    signal.signal(SIG_SOFT_TIMEOUT, before)


@single_instance("x")
def charge():
    runs.append(current_lease().token)


runs: list[int] = []


def reach_limit():
    signal.raise_signal(SIG_SOFT_TIMEOUT)


def reach_limit_at(monkeypatch, method, *, before):
    backend = service("default").backend
    original = getattr(backend, method)

    def interrupted(*args, **kwargs):
        if before:
            reach_limit()
        result = original(*args, **kwargs)
        if not before:
            reach_limit()
        return result

    monkeypatch.setattr(backend, method, interrupted)


@pytest.mark.django_db(transaction=True)
class TestARun:
    @pytest.mark.parametrize("before", [True, False])
    @pytest.mark.parametrize(("method", "ran"), [("acquire", []), ("release", [1])])
    def test_leaves_no_lock_behind(self, monkeypatch, method, before, ran):
        reach_limit_at(monkeypatch, method, before=before)
        with pytest.raises(SoftTimeLimitExceeded):
            charge()
        assert runs == ran
        assert_not_locked("x")
        assert current_lease() is None
        assert signal.getsignal(SIG_SOFT_TIMEOUT) is soft_timeout_sighandler
        monkeypatch.undo()
        charge()

    def test_is_interrupted_in_its_body_at_once(self):
        @single_instance("x")
        def body():
            try:
                reach_limit()
            except SoftTimeLimitExceeded:
                runs.append(1)

        body()
        assert runs == [1]

    def test_is_interrupted_in_the_body_of_an_inner_run(self):
        @single_instance("z")
        def inner():
            reach_limit()

        @single_instance("y")
        def outer(function):
            function()

        with pytest.raises(SoftTimeLimitExceeded):
            outer(inner)
        outer(charge)
        assert_not_locked("y")
        assert_not_locked("z")

    def test_is_interrupted_while_it_waits(self):
        waits = single_instance("x", on_conflict="wait", blocking_timeout=60)(charge.__wrapped__)
        main = threading.main_thread().ident
        timer = threading.Timer(0.2, signal.pthread_kill, (main, SIG_SOFT_TIMEOUT))
        started = time.monotonic()
        with hold_lock("x", let_wait=True), pytest.raises(SoftTimeLimitExceeded):
            timer.start()
            waits()
        assert time.monotonic() - started < 40
        assert runs == []

    # What hits within a finalizer, one of Django's for example, is ignored by Python.
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_at_any_moment(self):
        """Nothing here knows where the limit hits; a run takes less than a millisecond."""
        interrupted = 0
        for step in range(300):
            killer = threading.Thread(target=_kill_main_thread_after, args=(step * 1e-5,))
            try:
                try:
                    killer.start()
                    charge()
                finally:
                    killer.join()
            except SoftTimeLimitExceeded:
                interrupted += 1
            assert service("default").holder("x") is None
            assert current_lease() is None
        assert interrupted > 250


def _kill_main_thread_after(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    signal.pthread_kill(threading.main_thread().ident, SIG_SOFT_TIMEOUT)


def test_handlers_of_others_are_left_alone():
    mine = signal.signal(SIG_SOFT_TIMEOUT, lambda *given: runs.append(1))
    assert mine is soft_timeout_sighandler
    with DeferredTimeLimit():
        reach_limit()
        assert runs == [1]


def test_other_threads_have_no_handlers():
    def run():
        with DeferredTimeLimit():
            return signal.getsignal(SIG_SOFT_TIMEOUT)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result() is soft_timeout_sighandler
