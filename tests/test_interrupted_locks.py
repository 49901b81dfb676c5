"""
Code that is interrupted while it takes a lock, by a time limit or an abort: no lock is left behind.

Nobody would know of such a lock; and one of a PostgreSQL session lasts as long as its process.
"""

import contextlib
import itertools
import linecache
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from django.db import connections, transaction

from django_fencedlock import acquiring, lock, lock_all, lock_sets, locks
from django_fencedlock.backends import database
from django_fencedlock.backends.postgres import backend as postgres_backend
from django_fencedlock.backends.postgres import holding
from django_fencedlock.backends.redis import backend as redis_backend
from django_fencedlock.backends.redis import connections as redis_connections
from django_fencedlock.core import endings, grants, jobs, keeper, manager, permits, set_grants
from django_fencedlock.core.grants import Grants
from django_fencedlock.core.identity import current_holder
from django_fencedlock.core.manager import Service, give_back_left_over, service
from django_fencedlock.core.names import permit_name
from django_fencedlock.core.permits import Permits
from django_fencedlock.core.runtime import clock
from django_fencedlock.core.set_grants import SetAcquire
from django_fencedlock.lease_context import held_names
from django_fencedlock.storage import connections as sessions
from tests.servers.process import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True, databases=["default", "postgres"]),
]

#: Where the interrupts hit.
MODULES = [locks, manager, grants, keeper, sessions, database, postgres_backend, holding, jobs]
MODULES += [acquiring, endings, lock_sets, permits, set_grants]
FILES = {each.__file__ for each in (*MODULES, redis_backend, redis_connections)}


class Interrupted(BaseException):
    """Raised where nothing expects it."""


class InterruptAt:
    """Interrupts at the n-th line that is executed in `FILES`, from where a function begins on."""

    def __init__(self, place, begins):
        self.left = place
        self.begins = begins.__code__
        self.has_begun = False

    def __enter__(self):
        self.former = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *error):
        sys.settrace(self.former)
        return isinstance(error[1], Interrupted)

    def end(self):
        sys.settrace(self.former)
        self.has_begun = False

    def trace(self, frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        self.has_begun = self.has_begun or frame.f_code is self.begins
        # Python doesn't interrupt the way out of a block, which has the block's line.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if self.has_begun and event == "line" and not line.strip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                sys.settrace(self.former)
                raise Interrupted
        return self.trace


@pytest.fixture
def backend(backend):
    with lock("first"):
        pass
    found = service("default").backend
    yield found
    refill(found)


def refill(backend):
    """Give back places of the pool: an interrupt before a call of C, which no signal does."""
    room = sessions.pool(backend.config.fence_database, backend.config.timeout)._room
    while room.qsize() < sessions.MAX_CONNECTIONS:
        room.put(room)


def interrupted_everywhere(act, check, least=20):
    """Call `act` interrupted at one place after the other, until there is no further place."""
    for place in itertools.count(1):
        # Each in a thread of its own: Python 3.11 goes on handling the error whose handler was
        # interrupted, so that whatever is raised in that thread later has it as its context.
        with ThreadPoolExecutor(1) as thread:
            was_interrupted = thread.submit(act, place).result()
            check(place)
            assert not thread.submit(lambda: current_holder().leases).result()
        if not was_interrupted:
            break
    assert place > least


@pytest.fixture
def assert_free(backend):
    # The thread of the session locks undoes what it did for a caller that was interrupted.
    undone_within = 20 if isinstance(backend, postgres_backend.PostgresBackend) else 0

    def check(place):
        wait_until(lambda: not backend.holders([f"x{place}"]), f"x{place} free", undone_within)

    return check


@pytest.mark.parametrize("how", ["acquire", "with"])
def test_no_line_leaves_a_lock(assert_free, how):
    interrupted_everywhere(partial(acquire_interrupted, how), assert_free)


@pytest.mark.parametrize("backend", ["database"], indirect=True)
@pytest.mark.parametrize("how", ["acquire", "with"])
def test_no_line_leaves_a_lock_that_was_entered_again(assert_free, how):
    interrupted_everywhere(partial(enter_interrupted, how), assert_free, least=10)


def enter_interrupted(how, place):
    outer = lock(f"x{place}").acquire()
    was_interrupted = acquire_interrupted(how, place, begins=Service.enter_again)
    outer.release()
    connections.close_all()
    return was_interrupted


@pytest.mark.parametrize(("limit", "timeout"), [(1, 0.05), (3, 0)])
def test_no_line_leaves_a_permit(backend, monkeypatch, limit, timeout):
    """The first one is held by another owner, so that all of them are looked at."""
    monkeypatch.setattr(keeper, "FIRST_DOUBT", 0.01)
    monkeypatch.setattr(permits.random, "randint", lambda first, last: 1)
    names = [permit_name("gpu", n + 1) for n in range(limit)]

    def wait_until_free(place):
        refill(backend)
        wait_until(lambda: [*backend.holders(names)] == names[:1], f"free permits, {place}", 20)
        assert not backend.holders(names)[names[0]].waiting

    with lock("gpu", limit=1):
        terms = {"name": "gpu", "timeout": timeout, "limit": limit}
        act = partial(acquire_interrupted, "with", begins=Permits.acquire, **terms)
        interrupted_everywhere(act, wait_until_free)


@pytest.mark.parametrize("beside_another", [False, True])
def test_no_line_leaves_a_reader(backend, monkeypatch, beside_another):
    monkeypatch.setattr(keeper, "FIRST_DOUBT", 0.01)

    def readers():
        held = backend.holders(["x"]).get("x")
        return 0 if held is None else 1 + len(held.others)

    def wait_until_free(place):
        refill(backend)
        wait_until(lambda: readers() == beside_another, f"no reader, {place}", 20)

    with lock("x", shared=True) if beside_another else contextlib.nullcontext():
        act = partial(acquire_interrupted, "with", name="x", shared=True)
        interrupted_everywhere(act, wait_until_free)
    if not beside_another:
        with lock("x", blocking_timeout=5):
            pass


def acquire_interrupted(how, place, name="x{}", timeout=0, begins=Grants.acquire, **kind):
    interrupt = InterruptAt(place, begins)
    mine = lock(name.format(place), blocking_timeout=timeout, required=False, **kind)
    lease = None
    with interrupt:
        if how == "acquire":
            lease = mine.acquire()
        else:
            with mine:
                interrupt.end()
    was_interrupted = interrupt.left <= 0
    if lease is not None:
        lease.release()
    connections.close_all()
    return was_interrupted


@pytest.mark.parametrize("how", ["acquire", "with"])
def test_no_line_leaves_a_lock_of_a_set(backend, monkeypatch, how):
    monkeypatch.setattr(keeper, "FIRST_DOUBT", 0.01)

    def wait_until_free(place):
        names = [f"{each}{place}" for each in "xyz"]
        refill(backend)
        wait_until(lambda: not backend.holders(names), f"free locks, {place}", 20)

    interrupted_everywhere(partial(acquire_set_interrupted, how), wait_until_free, least=60)


def acquire_set_interrupted(how, place):
    outer = lock(f"y{place}").acquire()
    mine = lock_all([f"{each}{place}" for each in "xyz"], blocking_timeout=0)
    interrupt, leases = InterruptAt(place, Service.acquire_all), None
    with interrupt:
        if how == "acquire":
            leases = mine.acquire()
        else:
            with mine:
                interrupt.end()
    was_interrupted = interrupt.left <= 0
    if leases is not None:
        leases.release()
    # It was there before, and stays.
    assert (outer.entries, outer.to_release) == (1, 1)
    outer.release()
    assert held_names() == ()
    connections.close_all()
    return was_interrupted


def test_no_line_of_a_wait_for_a_set_leaves_a_lock(backend, monkeypatch):
    monkeypatch.setattr(keeper, "FIRST_DOUBT", 0.01)

    def wait_until_free(place):
        names = [f"x{place}", f"z{place}"]
        refill(backend)
        wait_until(lambda: not backend.holders(names), f"free locks, {place}", 20)

    def wait_interrupted(place):
        interrupt = InterruptAt(place, SetAcquire.run)
        mine = lock_all(f"x{place}", "y", f"z{place}", blocking_timeout=0.05)
        with interrupt:
            assert mine.acquire() is None
        connections.close_all()
        return interrupt.left <= 0

    with lock("y"):
        interrupted_everywhere(wait_interrupted, wait_until_free, least=60)


def test_no_line_of_a_release_leaves_a_lock(backend, monkeypatch):
    monkeypatch.setattr(keeper, "FIRST_DOUBT", 0.01)

    def wait_until_free(place):
        wait_until(lambda: not backend.holders([f"x{place}"]), "a free lock")

    interrupted_everywhere(release_interrupted, wait_until_free)


def test_no_line_of_a_release_leaves_a_lock_of_a_set(backend, monkeypatch):
    monkeypatch.setattr(keeper, "FIRST_DOUBT", 0.01)

    def wait_until_free(place):
        names = [f"x{place}", f"y{place}"]
        refill(backend)
        wait_until(lambda: not backend.holders(names), f"free locks, {place}")

    def release_set_interrupted(place):
        began, leases = clock(), lock_all(f"x{place}", f"y{place}").acquire()
        with (interrupt := InterruptAt(place, Service.release)):
            leases.release()
        interrupt.end()
        give_back_left_over(began)
        connections.close_all()
        return interrupt.left <= 0

    interrupted_everywhere(release_set_interrupted, wait_until_free)


@pytest.mark.parametrize("backend", ["redis"], indirect=True)
def test_no_line_of_a_release_in_a_transaction_leaves_a_lock(assert_free):
    def release_within(place):
        return release_interrupted(place, transaction.atomic())

    interrupted_everywhere(release_within, assert_free, least=10)


def release_interrupted(place, block=None):
    began, lease = clock(), lock(f"x{place}").acquire()
    with block or contextlib.nullcontext():
        with (interrupt := InterruptAt(place, Service.release)):
            lease.release()
        interrupt.end()
    give_back_left_over(began)
    connections.close_all()
    return interrupt.left <= 0


@pytest.mark.parametrize("backend", ["redis", "postgres"], indirect=True)
def test_no_line_leaves_a_waiter_in_the_queue(backend):
    """It would get the lock, and keep it from others for seconds."""

    def wait_until_gone(place):
        wait_until(lambda: not backend.holders(["x"])["x"].waiting, f"no waiter, {place}")

    with lock("x"):
        wait = partial(acquire_interrupted, "acquire", name="x", timeout=0.01)
        interrupted_everywhere(wait, wait_until_gone)
        assert not acquire_interrupted("acquire", 10**6, "x", 1)
        if backend.label == "postgres":
            assert not any(backend._local._queues.values())


def test_an_interrupt_after_the_lease_was_noted_releases_the_lock(backend, monkeypatch):
    class Leases(dict):
        def __setitem__(self, key, lease):
            super().__setitem__(key, lease)
            raise Interrupted

    monkeypatch.setattr(current_holder(), "leases", Leases())
    with pytest.raises(Interrupted):
        lock("x").acquire()
    assert not current_holder().leases
    assert not backend.holders(["x"])
