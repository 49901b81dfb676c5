"""
Code that is struck while it takes a lock, by a time limit or an abort: no lock is left behind.

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

from django_fencedlock import lock, locks
from django_fencedlock.backends import database
from django_fencedlock.backends.postgres import backend as postgres_backend
from django_fencedlock.backends.postgres import holding, jobs
from django_fencedlock.backends.redis import backend as redis_backend
from django_fencedlock.backends.redis import connections as redis_connections
from django_fencedlock.core import grants, keeper, manager
from django_fencedlock.core.grants import Grants
from django_fencedlock.core.identity import current_holder
from django_fencedlock.core.manager import Service, give_back_left_over, service
from django_fencedlock.core.runtime import clock
from django_fencedlock.storage import connections as sessions
from tests.servers.process import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True, databases=["default", "postgres"]),
]

#: Where the strikes hit.
MODULES = [locks, manager, grants, keeper, sessions, database, postgres_backend, holding, jobs]
FILES = {each.__file__ for each in (*MODULES, redis_backend, redis_connections)}


class Struck(BaseException):
    """Raised where nothing expects it."""


class Strike:
    """Strikes at the n-th line that is executed in `FILES`, from where a function begins on."""

    def __init__(self, place, begins):
        self.left = place
        self.begins = begins.__code__
        self.has_begun = False

    def __enter__(self):
        self.former = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *error):
        sys.settrace(self.former)
        return isinstance(error[1], Struck)

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
                raise Struck
        return self.trace


@pytest.fixture
def backend(backend):
    with lock("first"):
        pass
    found = service("default").backend
    yield found
    if isinstance(found, database.DatabaseBackend):
        # A strike before a call of C, which no signal does, loses a place of the pool.
        room = found._sessions._room
        while room.qsize() < sessions.MAX_CONNECTIONS:
            room.put(room)


def struck_everywhere(act, check, least=20):
    """Call `act` struck at one place after the other, until there is no further place."""
    for place in itertools.count(1):
        # Each in a thread of its own: Python 3.11 goes on handling the error whose handler was
        # struck, so that whatever is raised in that thread later has it as its context.
        with ThreadPoolExecutor(1) as thread:
            was_struck = thread.submit(act, place).result()
            check(place)
            assert not thread.submit(lambda: current_holder().leases).result()
        if not was_struck:
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
    struck_everywhere(partial(take_struck, how), assert_free)


@pytest.mark.parametrize("backend", ["database"], indirect=True)
@pytest.mark.parametrize("how", ["acquire", "with"])
def test_no_line_leaves_a_lock_that_was_entered_again(assert_free, how):
    struck_everywhere(partial(enter_struck, how), assert_free, least=10)


def enter_struck(how, place):
    outer = lock(f"x{place}").acquire()
    was_struck = take_struck(how, place, begins=Service.enter_again)
    outer.release()
    connections.close_all()
    return was_struck


def take_struck(how, place, name="x{}", timeout=0, begins=Grants.acquire):
    strike, mine = Strike(place, begins), lock(name.format(place), blocking_timeout=timeout)
    lease = None
    with strike:
        if how == "acquire":
            lease = mine.acquire()
        else:
            with mine:
                strike.end()
    was_struck = strike.left <= 0
    if lease is not None:
        lease.release()
    connections.close_all()
    return was_struck


def test_no_line_of_a_release_leaves_a_lock(backend, monkeypatch):
    monkeypatch.setattr(keeper, "FIRST_DOUBT", 0.01)

    def wait_until_free(place):
        wait_until(lambda: not backend.holders([f"x{place}"]), "a free lock")

    struck_everywhere(release_struck, wait_until_free)


@pytest.mark.parametrize("backend", ["redis"], indirect=True)
def test_no_line_of_a_release_in_a_transaction_leaves_a_lock(assert_free):
    def release_within(place):
        return release_struck(place, transaction.atomic())

    struck_everywhere(release_within, assert_free, least=10)


def release_struck(place, block=None):
    began, lease = clock(), lock(f"x{place}").acquire()
    with block or contextlib.nullcontext():
        with (strike := Strike(place, Service.release)):
            lease.release()
        strike.end()
    # As after each body of a task.
    give_back_left_over(began)
    connections.close_all()
    return strike.left <= 0


@pytest.mark.parametrize("backend", ["redis", "postgres"], indirect=True)
def test_no_line_leaves_a_waiter_in_the_queue(backend):
    """It would get the lock, and keep it from others for seconds."""

    def wait_until_gone(place):
        wait_until(lambda: not backend.holders(["x"])["x"].waiting, f"no waiter, {place}")

    with lock("x"):
        wait = partial(take_struck, "acquire", name="x", timeout=0.01)
        struck_everywhere(wait, wait_until_gone)
        # And none is in the way of those that come later.
        assert not take_struck("acquire", 1000, "x", 0.01)
        if backend.label == "postgres":
            assert not any(backend._local._queues.values())


def test_what_was_noted_already_is_nobodys(backend, monkeypatch):
    class Leases(dict):
        def __setitem__(self, key, lease):
            super().__setitem__(key, lease)
            raise Struck

    monkeypatch.setattr(current_holder(), "leases", Leases())
    with pytest.raises(Struck):
        lock("x").acquire()
    assert not current_holder().leases
    assert not backend.holders(["x"])
