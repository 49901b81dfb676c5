"""Private connections: apart from the caller's, limited in time and number, and prepared."""

import contextlib
import gc
import os
import sys
import threading
import time
from functools import partial

import pytest
from celery import Celery
from celery.fixups.django import DjangoWorkerFixup
from django.db import OperationalError, close_old_connections, connections, transaction

from django_fencedlock.core import runtime
from django_fencedlock.core.runtime import Watchdog, clock, watchdog
from django_fencedlock.storage import connections as sessions
from django_fencedlock.storage.connections import ConnectionPool, private, time_limited
from django_fencedlock.storage.vendors import LEDGERS
from tests.failing import raising
from tests.scripts import run_python
from tests.servers.process import wait_until
from tests.threads import at_once

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres"]),
    pytest.mark.usefixtures("keep_connections"),
]


@pytest.fixture
def pool():
    pool = ConnectionPool("postgres", timeout=20)
    yield pool
    pool.close()


def session_of(connection):
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return cursor.fetchone()[0]


def test_a_block_with_a_time_limit_leaves_no_session_behind(postgres):
    own = connections["postgres"]
    with pytest.raises(ValueError, match="of the caller"), time_limited("postgres", 20):
        seen = session_of(connections["postgres"])
        raise ValueError("of the caller")
    # It isn't the server that has closed the connection, as the driver would have it.
    with (
        pytest.raises(OperationalError, match=r"^no answer within 2 s$"),
        time_limited("postgres", 2),
    ):
        connections["postgres"].cursor().execute("SELECT pg_sleep(9)")
    assert connections["postgres"] is own
    left = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
    wait_until(lambda: postgres.execute(left, seen) == [(0,)], "the session to end")


@pytest.mark.parametrize(
    "clean_up",
    [close_old_connections, connections.close_all, DjangoWorkerFixup(Celery("app")).close_database],
)
def test_clean_ups_of_django_and_celery_leave_it_alone(pool, clean_up):
    before = pool.run(session_of)
    connections["postgres"].ensure_connection()
    clean_up()
    assert pool.run(session_of) == before


def test_the_callers_options_for_pooling_and_isolation_stay_out(monkeypatch):
    options = {"pool": True, "isolation_level": 3}
    monkeypatch.setitem(connections["postgres"].settings_dict, "OPTIONS", options)
    monkeypatch.setitem(connections["postgres"].settings_dict, "ATOMIC_REQUESTS", True)
    monkeypatch.setitem(connections["postgres"].settings_dict, "CONN_MAX_AGE", 0)
    copy = private("postgres", timeout=2)
    try:
        settings = copy.settings_dict
        assert "pool" not in settings["OPTIONS"]
        assert (settings["ATOMIC_REQUESTS"], settings["CONN_MAX_AGE"]) == (False, None)
        # The level is that of the transactions which the driver begins.
        copy.set_autocommit(False)
        with copy.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            assert cursor.fetchone() == ("read committed",)
        copy.rollback()
        assert connections["postgres"].settings_dict["OPTIONS"] == options
    finally:
        copy.close()


@pytest.mark.parametrize(
    ("options", "name"), [({}, "fencedlock"), ({"application_name": "web"}, "web")]
)
def test_the_server_shows_the_name_of_the_package_or_of_the_project(monkeypatch, options, name):
    monkeypatch.setitem(connections["postgres"].settings_dict, "OPTIONS", options)
    with contextlib.closing(private("postgres", timeout=20)) as copy, copy.cursor() as cursor:
        cursor.execute("SHOW application_name")
        assert cursor.fetchone() == (name,)


def test_a_connection_that_died_while_idle_is_replaced(pool, postgres):
    before = pool.run(session_of)
    postgres.execute("SELECT pg_terminate_backend(%s)", before)
    after = pool.run(session_of)
    assert after != before


def test_an_error_of_the_statement_is_raised_and_not_repeated(pool):
    tries = []

    def fail(connection):
        tries.append(1)
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1/0")

    with pytest.raises(Exception, match="division by zero"):
        pool.run(fail)
    assert tries == [1]


def test_a_connection_interrupted_in_a_statement_is_closed(pool):
    seen = []

    class Killed(BaseException):
        pass

    def interrupt(connection):
        seen.append(session_of(connection))
        raise Killed

    with pytest.raises(Killed):
        pool.run(interrupt)
    assert pool.run(session_of) not in seen


def test_an_interrupted_statement_leaves_sqlites_file_free(tmp_path, monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "NAME", tmp_path / "own.sqlite3")
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {})
    writer = private("default", 1)

    class Interrupted(BaseException):
        pass

    def interrupt(connection):
        with LEDGERS[connection.vendor].cursor(connection) as cursor:
            cursor.execute("SELECT 1 FROM sqlite_master")
            raise Interrupted

    try:
        with writer.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout = 0")
            cursor.execute("CREATE TABLE t (x)")
            with pytest.raises(Interrupted):
                ConnectionPool("default", timeout=20).run(interrupt)
            cursor.execute("DROP TABLE t")
    finally:
        writer.close()


def test_a_statement_that_takes_too_long_is_cut_off():
    pool = ConnectionPool("postgres", timeout=0.3)

    def sleep(connection):
        with connection.cursor() as cursor:
            # The server goes on with it: no other test that looks for one of its own has this.
            cursor.execute("SELECT pg_sleep(19)")

    started = time.monotonic()
    with pytest.raises(OperationalError, match=r"^no answer within 0\.3 s$"):
        pool.run(sleep)
    assert time.monotonic() - started < 15


def test_a_wait_for_sqlites_file_ends_as_sqlite_says():
    def wait(connection):
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout = 300")
            cursor.execute("BEGIN IMMEDIATE")

    writer, waiter = private("default", 1), ConnectionPool("default", timeout=0.05)
    try:
        with writer.cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            # Another holder has the lock then; it is no service that fails to answer.
            with pytest.raises(OperationalError, match="is locked"):
                waiter.run(wait)
    finally:
        writer.close()


class TestBusyTimeout:
    """How long a private connection waits for SQLite's file."""

    def waits(self, **options):
        def ask(connection):
            with connection.cursor() as cursor:
                cursor.execute("PRAGMA busy_timeout")
                return cursor.fetchone()[0]

        return ConnectionPool("default", timeout=2).run(ask, **options)

    def test_as_long_as_the_pool_allows_or_as_given(self):
        assert self.waits() == 2000
        assert self.waits(busy_timeout=0.1) == 100

    def test_as_long_as_the_limit_whatever_the_project_has_set(self):
        assert connections["default"].settings_dict["OPTIONS"]["timeout"] > 2
        with time_limited("default", 2), connections["default"].cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout")
            assert cursor.fetchone() == (2000,)

    def test_not_long_if_the_caller_may_have_it_locked(self):
        with transaction.atomic():
            assert self.waits() == sessions.SQLITE_BUSY_TIMEOUT * 1000
            assert self.waits(busy_timeout=0.1) == 100


class TestATestsTransaction:
    @pytest.mark.django_db(databases=["default", "postgres"])
    @pytest.mark.parametrize("alias", ["default", "postgres"])
    def test_work_gets_the_tests_own_connection(self, alias):
        pool = ConnectionPool(alias, timeout=2)
        assert pool.run(lambda connection: connection) is connections[alias]
        assert pool.run_orm(lambda: connections[alias]) is connections[alias]
        assert not pool._idle
        assert not sessions.is_open(connections[alias])
        with transaction.atomic(alias):
            assert not sessions.is_open(connections[alias])
            assert sessions.has_own_block(connections[alias])

    def test_without_one_work_gets_another_connection(self):
        pool = ConnectionPool("default", timeout=2)
        with transaction.atomic():
            assert sessions.is_open(connections["default"])
            assert pool.run(lambda connection: connection) is not connections["default"]
        pool.close()


def test_a_burst_of_threads_uses_a_bounded_number_of_connections(pool):
    lock_, now, most = threading.Lock(), [0], [0]

    def work(connection):
        with lock_:
            now[0] += 1
            most[0] = max(most[0], now[0])
        session_of(connection)
        with lock_:
            now[0] -= 1

    at_once([partial(pool.run, work)] * 40)
    assert most[0] <= sessions.MAX_CONNECTIONS
    assert len(pool._idle) <= sessions.MAX_IDLE


class TestRoom:
    @pytest.fixture(autouse=True)
    def room_for_one(self, monkeypatch):
        monkeypatch.setattr(sessions, "MAX_CONNECTIONS", 1)

    def test_without_room_a_thread_waits_for_another_to_leave(self):
        pool, gate, done = ConnectionPool("default", timeout=30), threading.Event(), []
        first = threading.Thread(target=pool.run, args=(lambda connection: gate.wait(30),))
        others = [threading.Thread(target=pool.run, args=(done.append,)) for _ in range(3)]
        first.start()
        wait_until(pool._room.empty, "the room to be taken")
        for other in others:
            other.start()
        time.sleep(0.1)
        assert not done
        gate.set()
        for each in (first, *others):
            each.join(20)
        assert len(done) == len(others)
        assert pool._room.qsize() == 1

    def test_without_room_in_time_an_error_is_raised(self):
        pool = ConnectionPool("default", timeout=0.05)
        with pytest.raises(OperationalError, match="all 1 private connections to 'default'"):
            pool.run(lambda connection: pool.run(lambda another: None))
        assert pool._room.qsize() == 1
        pool.run(lambda connection: None)

    def test_a_renewal_has_room_when_all_other_is_taken(self):
        pool, done = ConnectionPool("default", timeout=0.05), []

        def renew(connection):
            pool.run(done.append, renews=True)
            with pytest.raises(OperationalError):
                pool.run(lambda one: pool.run(done.append, renews=True), renews=True)

        pool.run(renew)
        assert len(done) == 1
        assert pool._room.qsize() == pool._spare.qsize() == 1

    @pytest.mark.parametrize("renews", [False, True])
    def test_an_interrupt_anywhere_returns_the_room(self, renews):
        """A signal handler may raise after each call, of C or of Python."""
        pool, calls = ConnectionPool("default", timeout=20), 0
        if renews:
            pool._room.get()

        def interrupt(frame, event, argument):
            nonlocal left
            if frame.f_code.co_filename == sessions.__file__ and event in ("call", "c_return"):
                left -= 1
                if left == 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        interrupted = True
        while interrupted:
            calls, interrupted = calls + 1, False
            left = calls
            sys.setprofile(interrupt)
            try:
                pool.run(lambda connection: None, renews=renews)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.setprofile(None)
            assert (pool._room.qsize(), pool._spare.qsize()) == (not renews, 1), calls
        assert calls > 10

    def test_every_waiter_gets_its_turn(self):
        pool, done = ConnectionPool("default", timeout=30), []

        def come_and_go():
            for _ in range(200):
                pool.run(done.append)

        at_once([come_and_go] * 8)
        assert len(done) == 200 * 8
        assert pool._room.qsize() == 1


@pytest.mark.slow
def test_a_child_after_fork_leaves_the_parents_session_alone():
    shared = sessions.pool("postgres", 2.0)
    before = shared.run(session_of)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = shared.run(session_of)
            gc.collect()
            code = 0 if own != before else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared.run(session_of) == before


@pytest.mark.slow
def test_a_child_after_fork_loses_no_grant_on_sqlite(tmp_path):
    """Another process closes the file and deletes the log, unless the child has locks on it."""
    told = run_python(
        code="""
            import os
            import django
            django.setup()
            from django.core.management import call_command
            from django.db import connections
            from django_fencedlock import lock
            from django_fencedlock.core.manager import service

            def token():
                with lock("x") as lease:
                    return lease.token

            call_command("migrate", "django_fencedlock", verbosity=0)
            connections.close_all()
            assert token() == 1
            child, parent = os.pipe(), os.pipe()
            if not os.fork():
                assert token() == 2
                os.write(child[1], b"1")
                os.read(parent[0], 1)
                assert token() == 3
                os.write(child[1], b"2")
                os.read(parent[0], 1)
                os._exit(0)
            os.read(child[0], 1)
            service("default").keeper.clear()
            service("default").backend.close()
            os.write(parent[1], b"1")
            os.read(child[0], 1)
            print(token())
            os.write(parent[1], b"2")
        """,
        DJANGO_SETTINGS_MODULE="tests.settings",
        FENCEDLOCK_TEST_SQLITE=str(tmp_path / "db.sqlite3"),
    )
    assert told.stdout == "4\n"


class Meanwhile(float):
    """A deadline whose comparison sets another limit, as a finalizer might."""

    def __le__(self, other):
        self.begin()
        return super().__le__(other)


class TestWatchdog:
    def test_a_limit_that_its_own_thread_sets_while_it_looks(self):
        dog, called = Watchdog(), threading.Event()
        late = Meanwhile(clock() + 0.05)
        late.begin = lambda: dog.begin(60, lambda: None)
        dog._watched[-1] = (late, called.set)
        dog.begin(60, lambda: None)
        assert called.wait(20)

    def test_a_block_that_ends_in_time(self):
        called = threading.Event()
        dog = Watchdog()
        with dog.limit(1.5, called.set):
            pass
        with dog.limit(60, lambda: None):
            assert not called.wait(1.7)

    @pytest.mark.parametrize("longer", [False, True])
    def test_a_block_that_takes_too_long_also_under_a_longer_limit(self, longer):
        dog, called = Watchdog(), threading.Event()
        outer = dog.limit(60, lambda: None) if longer else contextlib.nullcontext()
        with outer, dog.limit(0.05, called.set):
            assert called.wait(20)

    def test_many_limits_leave_nothing_behind(self):
        for _ in range(1000):
            with watchdog.limit(60, lambda: None):
                pass
        assert not watchdog._watched

    def test_a_thread_that_could_not_be_started_is_started_by_the_next_one(self, monkeypatch):

        dog, called = Watchdog(), threading.Event()
        monkeypatch.setattr(runtime, "start", raising(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            dog.begin(0.05, lambda: None)
        assert not dog._watched
        monkeypatch.undo()
        with dog.limit(0.05, called.set):
            assert called.wait(20)
