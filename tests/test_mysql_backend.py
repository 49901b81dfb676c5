"""The mysql backend on real servers: the interface's tests, and what is its own."""

import contextlib
import ctypes
import itertools
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from textwrap import dedent

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections
from django.utils import timezone

from django_fencedlock.backends import mysql as backend_module
from django_fencedlock.backends.interface import Grant, Granted, Held, Renewal, Wait
from django_fencedlock.backends.mysql import MysqlBackend, several_writers
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.models import Fence, ForcedRelease, HeldLock
from django_fencedlock.storage.connections import MAX_IDLE
from tests.backends import MYSQL
from tests.scripts import python
from tests.servers.process import wait_until
from tests.test_backend_interface import BackendInterface, claim, grant, take

pytestmark = pytest.mark.slow

ALIAS = "sessions"
_numbers = itertools.count()


def configured(using=ALIAS, alias="default", **options):
    terms = {"ttl": 30.0, "blocking_timeout": 10.0, "key_prefix": "", "fence_database": using}
    return AliasConfig(alias=alias, backend=MYSQL, location="", options=options, **terms)


@pytest.fixture(scope="module", params=["mariadb", "shared_mysql"])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def database(server, django_db_blocker):
    name = f"sessions{os.getpid()}"
    server.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    entry = server.django(name)
    connections.settings[ALIAS] = connections.configure_settings({"default": {}, ALIAS: entry})[
        ALIAS
    ]
    with django_db_blocker.unblock():
        call_command("migrate", database=ALIAS, verbosity=0)
        yield ALIAS
        connections[ALIAS].close()
    server.execute(f"DROP DATABASE {name}")
    del connections[ALIAS]
    del connections.settings[ALIAS]


@pytest.fixture
def make(database):
    made = []

    def make(using=ALIAS, **options):
        backend = MysqlBackend(configured(using, **options))
        made.append(backend)
        return backend

    yield make
    for backend in made:
        end_sessions(backend)


class TestInterface(BackendInterface):
    releases_live_holders = False

    @pytest.fixture
    def make(self, make):
        return make


@pytest.fixture
def backend(make):
    return make()


@pytest.fixture
def peer(make):
    return make()


@pytest.fixture
def name():
    return f"name:{os.getpid()}:{next(_numbers)}"


@pytest.fixture
def taken(peer, name):
    return take(peer, claim(name))


@pytest.fixture
def threads():
    with ThreadPoolExecutor(60) as pool:
        yield pool.submit


def refused(backend, name, seconds=0.0, **terms):
    answer = backend.acquire(claim(name, **terms), Wait(seconds))
    return isinstance(answer, Held)


def waits(backend, name, seconds=20.0, **terms):
    sent = claim(name, **terms)
    answer = backend.acquire(sent, Wait(seconds))
    assert isinstance(answer, Granted), answer
    return grant(sent, answer)


def row_of(name):
    return HeldLock.objects.using(ALIAS).filter(name=name)


def sessions_of(backend):
    found = {*backend._shared.values(), *backend._waiters}
    return [session for session in found if session.id and not session.closed]


def end_sessions(backend):
    for session in {*backend._shared.values(), *backend._waiters}:
        session.worker.put(session.close)


def on(session, statement):
    """Execute a statement on a session of the backend."""
    return session.submit(partial(session.one, statement)).answer(20)


def waiting(server, backend, count):
    """Wait until so many sessions wait in the server for any lock."""

    def is_so():
        rows = server.execute("SHOW FULL PROCESSLIST")
        return sum("GET_LOCK" in (row[7] or "") for row in rows) == count

    wait_until(is_so, f"{count} waiting sessions")


def in_server(server):
    return {row[0] for row in server.execute("SHOW PROCESSLIST")}


def kill(server, taken):
    session = taken.handle.session.id
    server.execute(f"KILL {session}")
    wait_until(lambda: session not in in_server(server), "the end of the session")


def shape(statements):
    """Return the first words of statements, with how often each was executed."""
    words = [re.sub(r"\s+", " ", text)[:19] for text in statements.elements()]
    return sorted(words)


class TestStatements:
    def test_acquire_and_release(self, server, backend, name):
        backend.release(take(backend, claim(name)))
        with server.statements() as counted:
            taken = take(backend, claim(name))
        assert sum(counted.values()) == 3, counted
        with server.statements() as counted:
            assert backend.release(taken)
        assert sum(counted.values()) == 2, counted
        assert taken.token == 2

    def test_a_refusal_is_two_and_writes_nothing(self, server, backend, peer, name, taken):
        backend.release(take(backend, claim(f"{name}:other")))
        before = row_of(name).values().get()
        with server.statements() as counted:
            assert refused(backend, name)
        assert sum(counted.values()) == 2, counted
        assert row_of(name).values().get() == before

    def test_a_lock_of_this_process_is_refused_without_asking(self, server, backend, name):
        take(backend, claim(name))
        with server.statements() as counted:
            assert refused(backend, name)
        assert not counted

    def test_an_unfenced_lock_writes_to_no_table(self, server, backend, name):
        backend.release(take(backend, claim(name, fenced=False)))
        with server.statements() as counted:
            taken = take(backend, claim(name, fenced=False))
            assert backend.verify(taken)
            assert backend.renew([taken]) == [Renewal.KEPT]
            assert backend.release(taken)
        assert not [text for text in counted if "INSERT" in text or "DELETE" in text]
        assert not Fence.objects.using(ALIAS).filter(name=name).exists()

    def test_a_thousand_locks_live_on_one_session(self, server, backend, name):
        taken = [take(backend, claim(f"{name}:{number}")) for number in range(1000)]
        assert len(sessions_of(backend)) == 1
        with server.statements() as counted:
            assert set(backend.renew(taken)) == {Renewal.KEPT}
        assert sum("IS_USED_LOCK" in text for text in counted) == 1
        assert sum(counted.values()) < 12
        assert len(backend.holders([each.name for each in taken])) == 1000


class TestGrants:
    @pytest.mark.parametrize("other", [{"alias": "other"}, {"backend": "redis"}])
    @pytest.mark.parametrize("seconds", [0, 20])
    def test_a_name_that_is_live_elsewhere_is_refused(
        self, server, backend, peer, name, other, seconds
    ):
        kill(server, take(peer, claim(name)))
        row_of(name).update(**other)
        held = backend.acquire(claim(name), Wait(seconds))
        row = row_of(name).get()
        assert (held.alias, held.label, held.owner) == (row.alias, row.backend, row.owner)
        assert not backend._holds
        assert not backend.holders([name])
        row_of(name).update(expires_at="2020-01-01T00:00Z")
        assert take(backend, claim(name)).token == 2

    def test_the_row_of_a_holder_whose_session_ended_is_replaced(self, server, backend, peer, name):
        kill(server, take(peer, claim(name)))
        assert row_of(name).exists()
        mine = take(backend, claim(name))
        assert mine.token == 2
        assert row_of(name).get().owner == mine.owner

    def test_the_holder_of_an_unfenced_lock_is_shown_by_its_session(self, backend, peer, name):
        taken = take(peer, claim(name, fenced=False))
        for held in (backend.acquire(claim(name), Wait()), backend.holders([name])[name]):
            assert held.session_pid == taken.handle.session.id
            assert str(held.session_pid) in held.identity

    def test_a_pinned_fence_delays_a_grant_and_holds_nothing(self, server, backend, peer, name):
        peer.release(take(peer, claim(name)))
        with server.connect(connections[ALIAS].settings_dict["NAME"]) as writer:
            cursor = writer.cursor()
            cursor.execute("BEGIN")
            cursor.execute(f"SELECT 1 FROM {Fence._meta.db_table} FOR UPDATE")
            began = time.monotonic()
            assert refused(backend, name)
            assert refused(backend, name, 0.4)
            assert time.monotonic() - began < 20
            assert not backend.holders([name])
            assert not row_of(name).exists()
            cursor.execute("ROLLBACK")
        assert take(peer, claim(name)).token == 2

    def test_a_claim_that_fails_after_get_lock_leaves_the_lock_free(
        self, backend, peer, name, monkeypatch
    ):
        kept = take(backend, claim(f"{name}:kept"))

        def fail(connection, entry):
            raise OperationalError(1105, "no space")

        monkeypatch.setattr(backend._ledger, "claim", fail)
        with pytest.raises(BackendUnavailable, match="no space"):
            backend.acquire(claim(name), Wait())
        monkeypatch.undo()
        assert not peer.holders([name])
        assert take(peer, claim(name))
        assert backend.verify(kept)

    def test_a_session_that_changes_is_no_grant(self, backend, peer, name):
        taken = take(backend, claim(f"{name}:first"))
        taken.handle.session.id += 1
        with pytest.raises(BackendUnavailable, match="proxy"):
            backend.acquire(claim(name), Wait())
        assert not peer.holders([name])

    def test_names_that_differ_in_case_are_two_locks(self, backend, peer, name):
        take(backend, claim(f"{name}:a"))
        assert take(peer, claim(f"{name}:A"))

    def test_a_prefix_makes_another_lock(self, backend, make, name):
        other = make()
        other.config = replace(other.config, key_prefix="other")
        assert backend._key(name) != other._key(name)
        assert len(backend._key("x" * 1000)) <= 64


class TestRenewals:
    def test_a_lock_whose_row_was_deleted_is_lost_and_free(self, backend, peer, name):
        taken, other = take(backend, claim(name)), take(backend, claim(f"{name}:other"))
        row_of(name).delete()
        assert not backend.verify(taken)
        assert backend.renew([taken, other]) == [Renewal.LOST, Renewal.KEPT]
        assert take(peer, claim(name)).token == 2
        assert not backend.release(taken)

    def test_another_owners_row_is_left_alone(self, backend, name):
        taken = take(backend, claim(name))
        row_of(name).update(owner="another")
        before = row_of(name).values().get()
        assert not backend.verify(taken)
        assert backend.renew([taken]) == [Renewal.LOST]
        assert not backend.release(taken)
        assert row_of(name).values().get() == before

    def test_a_locked_row_is_skipped(self, server, backend, peer, name):
        taken, other = take(backend, claim(name)), take(backend, claim(f"{name}:other"))
        with server.connect(connections[ALIAS].settings_dict["NAME"]) as contender:
            cursor = contender.cursor()
            cursor.execute("BEGIN")
            cursor.execute(
                f"SELECT 1 FROM {HeldLock._meta.db_table} WHERE name = %s FOR UPDATE", [name]
            )
            assert backend.renew([taken, other]) == [Renewal.UNKNOWN, Renewal.KEPT]
            assert backend.release(taken)
            assert not peer.holders([name])
            cursor.execute("ROLLBACK")
        assert backend.renew([other]) == [Renewal.KEPT]

    def test_a_locked_table_ends_no_session(self, server, make, name):
        backend = make(TIMEOUT=3)
        taken = take(backend, claim(name))
        with server.connect(connections[ALIAS].settings_dict["NAME"]) as contender:
            cursor = contender.cursor()
            cursor.execute(f"LOCK TABLES {HeldLock._meta.db_table} WRITE")
            assert backend.renew([taken]) == [Renewal.UNKNOWN]
            assert refused_or_unavailable(backend, f"{name}:other")
            time.sleep(2)
            cursor.execute("UNLOCK TABLES")
        wait_until(lambda: backend.renew([taken]) == [Renewal.KEPT], "the renewal")

    @pytest.mark.parametrize("fenced", [True, False])
    def test_a_lock_that_was_released_by_force_is_lost_and_no_other(
        self, backend, peer, name, fenced
    ):
        taken = take(backend, claim(name, fenced=fenced))
        other = take(backend, claim(f"{name}:other"))
        facts = {"owner": taken.owner, "name": name, "released_by": "x"}
        ForcedRelease.objects.using(ALIAS).create(released_at=timezone.now(), **facts)
        assert not peer.release(Grant(name, taken.owner, fenced=fenced))
        assert not backend.verify(taken)
        assert backend.renew([taken, other]) == [Renewal.LOST, Renewal.KEPT]
        assert take(peer, claim(name))
        assert backend.verify(other)

    def test_the_longest_ttl_of_a_session_limits_its_silence(self, backend, name):
        def silence(session):
            return on(session, "SELECT @@session.wait_timeout")[0]

        taken = take(backend, claim(name, ttl=9.2))
        other = take(backend, claim(f"{name}:other", ttl=9.2))
        session = taken.handle.session
        assert silence(session) == 10
        assert backend.renew([taken._replace(ttl=40)]) == [Renewal.KEPT]
        assert silence(session) == 40
        assert backend.renew([taken._replace(ttl=8), other]) == [Renewal.KEPT] * 2
        assert silence(session) == 10
        assert take(backend, claim(f"{name}:long", ttl=1e10))


class TestWaiting:
    def test_threads_of_one_process_get_the_lock_in_order(
        self, server, backend, peer, name, threads
    ):
        taken, order = take(peer, claim(name)), []

        def work(number):
            mine = waits(backend, name)
            order.append(number)
            backend.release(mine)

        asked = []
        for number in range(6):
            asked.append(threads(work, number))
            waiting(server, backend, number + 1)
        peer.release(taken)
        for each in asked:
            each.result()
        assert order == list(range(6))
        # The one that tried, and idle ones.
        wait_until(lambda: len(sessions_of(backend)) == 1 + MAX_IDLE, "the end of the others")

    def test_beyond_the_limit_a_process_polls(self, server, make, name, threads):
        backend, peer = make(MAX_WAITERS=1), make()
        held = [take(peer, claim(f"{name}:{number}")) for number in range(2)]
        first = threads(waits, backend, held[0].name)
        waiting(server, backend, 1)
        second = threads(waits, backend, held[1].name)
        peer.release(held[1])
        assert second.result()
        waiting(server, backend, 1)
        peer.release(held[0])
        assert first.result()

    @pytest.mark.parametrize("seconds", [0.3, 0.6, 1.2])
    def test_a_wait_that_times_out_leaves_nothing(
        self, server, backend, peer, name, taken, seconds
    ):
        began = time.monotonic()
        assert refused(backend, name, seconds)
        assert seconds <= time.monotonic() - began < 20
        waiting(server, backend, 0)
        peer.release(taken)
        assert not peer.holders([name])
        wait_until(lambda: len(sessions_of(backend)) == 1, "the end of the waiter's session")

    def test_a_slice_that_ends_is_followed_by_another(
        self, server, backend, peer, name, threads, taken, monkeypatch
    ):
        monkeypatch.setattr("django_fencedlock.backends.session_locks.SLICE", 1.0)
        asked = threads(waits, backend, name)
        time.sleep(2.5)
        peer.release(taken)
        assert asked.result().token == 2

    @pytest.mark.parametrize("fenced", [True, False])
    def test_a_lease_counts_from_before_the_wait(
        self, server, backend, peer, name, threads, fenced
    ):
        taken, before = take(peer, claim(name)), clock()
        asked = threads(waits, backend, name, fenced=fenced)
        waiting(server, backend, 1)
        released = clock()
        peer.release(taken)
        mine = asked.result()
        assert before <= mine.handle.granted.since < released
        assert backend.verify(mine)
        assert backend.renew([mine]) == [Renewal.KEPT]
        assert backend.release(mine)

    def test_a_limit_of_the_server_ends_no_wait(self, server, make, name, threads, taken, peer):
        (variable, value) = next(
            (name, value)
            for name, value in (("max_statement_time", 1), ("max_execution_time", 1000))
            if server.execute(f"SHOW VARIABLES LIKE '{name}'")
        )
        server.execute(f"SET GLOBAL {variable} = {value}")
        try:
            backend = make()
            asked = threads(waits, backend, name)
            waiting(server, backend, 1)
            time.sleep(1.5)
            waiting(server, backend, 1)
            peer.release(taken)
            assert asked.result()
        finally:
            server.execute(f"SET GLOBAL {variable} = 0")

    def test_a_waiter_that_is_interrupted_leaves_the_queue(self, server, backend, peer, name):
        taken = take(peer, claim(name))
        code = f"""
            import signal
            def stop(*args): raise KeyboardInterrupt
            signal.signal(signal.SIGALRM, stop)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                waits(backend, {name!r})
            except KeyboardInterrupt:
                say("out")
            sys.stdin.read()
        """
        with child(code) as process:
            assert said(process) == "out"
            waiting(server, backend, 0)
            peer.release(taken)
            assert take(peer, claim(name)).token == 2

    def test_an_idle_session_waits_again_unless_it_ended(self, server, backend, peer, name):
        def wait():
            taken = take(peer, claim(name))
            timer = threading.Timer(0.3, peer.release, [taken])
            timer.start()
            mine = waits(backend, name)
            timer.join()
            assert backend.release(mine)
            return mine

        first = wait()
        assert wait().handle.session is first.handle.session
        kill(server, first)
        last = wait()
        assert last.handle.session is not first.handle.session
        assert first.handle.session.closed
        backend.close()
        wait_until(lambda: last.handle.session.closed, "the end of the idle session")

    def test_a_late_cancellation_meets_no_later_wait(
        self, server, backend, peer, name, threads, monkeypatch, taken
    ):
        take(peer, claim(f"{name}:other"))
        begun, go_on, cancel = threading.Event(), threading.Event(), backend._cancel

        def late(session):
            begun.set()
            go_on.wait(20)
            cancel(session)

        monkeypatch.setattr(backend, "_cancel", late)
        first = Wait(20.0)
        waiter = threads(backend.acquire, claim(name), first)
        waiting(server, backend, 1)
        first.cancel()
        assert begun.wait(20)
        assert peer.release(taken)
        wait_until(lambda: not peer.holders([name]), "the release")
        following = threads(refused, backend, f"{name}:other", 3.0)
        waiting(server, backend, 1)
        monkeypatch.undo()
        go_on.set()
        assert isinstance(waiter.result(20), Held)
        assert following.result(20)


class TestLosses:
    def test_the_end_of_a_session_loses_its_locks(self, server, backend, peer, name, threads):
        held = [take(backend, claim(f"{name}:{number}")) for number in range(3)]
        taken = take(peer, claim(name))
        asked = threads(waits, backend, name)
        waiting(server, backend, 1)
        peer.release(taken)
        waited = asked.result()
        kill(server, held[0])
        assert backend.renew([*held, waited]) == [Renewal.LOST] * 3 + [Renewal.KEPT]
        assert not backend.verify(held[0])
        assert not backend.release(held[0])
        kill(server, waited)
        assert not backend.verify(waited)
        assert not backend._holds

    def test_a_session_that_ended_idle_is_replaced_at_the_next_lock(self, server, backend, name):
        first = take(backend, claim(name))
        kill(server, first)
        assert take(backend, claim(f"{name}:other"))
        assert not backend.verify(first)
        assert take(backend, claim(name)).token == 2

    def test_a_restart_loses_all_but_the_next_token(self, own_server, make, name):
        server, using = own_server
        backend = make(using, TIMEOUT=10)
        taken = take(backend, claim(name))
        server.kill()
        assert backend.renew([taken]) == [Renewal.LOST]
        with pytest.raises(BackendUnavailable):
            backend.acquire(claim(name), Wait())
        server.start()
        assert take(backend, claim(name)).token == 2

    def test_a_server_that_hangs_is_reported_in_time(self, own_server, make, name):
        server, using = own_server
        backend = make(using, TIMEOUT=3)
        taken = take(backend, claim(name))
        server.pause()
        began = time.monotonic()
        with pytest.raises(BackendUnavailable, match="no answer within 3 s"):
            backend.acquire(claim(f"{name}:other"), Wait())
        assert backend.renew([taken]) == [Renewal.UNKNOWN]
        with pytest.raises(BackendUnavailable):
            backend.verify(taken)
        with pytest.raises(BackendUnavailable):
            backend.acquire(claim(f"{name}:third"), Wait(0.1))
        assert time.monotonic() - began < 30
        server.resume()

        def is_free(name):
            with contextlib.suppress(BackendUnavailable):
                return name not in backend.holders([name])

        for each in ("other", "third"):
            wait_until(partial(is_free, f"{name}:{each}"), "the release")


class TestPausedHolders:
    """The server ends a session that is idle for the ttl of its locks."""

    @pytest.mark.parametrize("fenced", [True, False])
    def test_the_locks_of_a_paused_process_are_freed_after_their_own_ttl(
        self, backend, name, fenced
    ):
        code = f"""
            taken = take(backend, claim({name!r}, ttl=1.0, fenced={fenced}))
            other = take(backend, claim({name + ":other"!r}))
            say("held")
            sys.stdin.read()
            say([each.name for each in backend.renew([taken, other])])
        """
        with child(code) as process:
            assert said(process) == "held"
            os.kill(process.pid, signal.SIGSTOP)
            try:
                assert waits(backend, name)
                assert refused(backend, f"{name}:other")
            finally:
                os.kill(process.pid, signal.SIGCONT)
            process.stdin.close()
            assert said(process) == "['LOST', 'KEPT']"

    def test_a_paused_waiter_delays_others_for_its_ttl(self, server, backend, peer, name, taken):
        with child(f"waits(backend, {name!r}, ttl=1.0)") as process:
            waiting(server, backend, 1)
            os.kill(process.pid, signal.SIGSTOP)
            peer.release(taken)
            assert waits(backend, name)

    def test_a_killed_process_frees_its_lock_at_once(self, server, backend, name, threads):
        with child(f"take(backend, claim({name!r}, ttl=60.0)); say(1); sys.stdin.read()") as holder:
            assert said(holder)
            asked = threads(waits, backend, name, 20)
            waiting(server, backend, 1)
            killed = time.monotonic()
            holder.kill()
            assert asked.result().token == 2
            assert time.monotonic() - killed < 10


class TestProcesses:
    def test_a_child_after_fork_owns_nothing_and_ends_nothing(self, backend, name):
        code = f"""
            taken = take(backend, claim({name!r}))
            pid = os.fork()
            if not pid:
                free = not refused(backend, {name!r})
                other = take(backend, claim({name + ":child"!r}))
                bad = free or backend.verify(taken) or backend.release(taken)
                backend.release(other)
                backend.close()
                import gc
                gc.collect()
                os._exit(bad)
            status = os.waitpid(pid, 0)[1]
            say(f"{{status}} {{backend.verify(taken)}} {{backend.renew([taken])[0].name}}")
            sys.stdin.read()
        """
        with child(code) as process:
            assert said(process) == "0 True KEPT"
            assert refused(backend, name)

    def test_a_killed_process_is_evicted_although_its_child_has_the_session(self, backend, name):
        code = f"""
            taken = take(backend, claim({name!r}))
            take(backend, claim({name + ":other"!r}))
            pid = os.fork() or time.sleep(60) or os._exit(0)
            say(f"{{pid}} {{taken.owner}}")
            sys.stdin.read()
        """
        with child(code) as process:
            grandchild, owner = said(process).split()
            assert not backend.release(Grant(name, owner))
            process.kill()
            process.wait()
            try:
                time.sleep(0.1)
                assert refused(backend, name)
                assert backend.release(Grant(name, owner))
                successor = take(backend, claim(name))
                assert successor.token == 2
                assert take(backend, claim(f"{name}:other")).token == 2
                assert not backend.release(Grant(name, owner))
                assert backend.verify(successor)
            finally:
                os.kill(int(grandchild), signal.SIGKILL)

    def test_the_row_of_a_holder_without_a_session_is_cleared(self, server, backend, name, taken):
        kill(server, taken)
        assert backend.release(Grant(name, taken.owner))
        assert not row_of(name).exists()

    def test_greenlets_share_a_session_and_killed_ones_hold_no_lock(self, server, backend, name):
        code = f"""
            import gevent, random
            def work(number):
                for turn in range(10):
                    taken = take(backend, claim(f"{name}:{{number}}"))
                    assert backend.renew([taken])[0].name == "KEPT"
                    gevent.sleep(0)
                    assert backend.release(taken)
            gevent.joinall([gevent.spawn(work, n) for n in range(20)], raise_error=True)
            kept = take(backend, claim({name!r}))
            ticks = []
            def tick():
                while True:
                    gevent.sleep(0.01)
                    ticks.append(1)
            gevent.spawn(tick)
            waiter = gevent.spawn(waits, another(), {name!r})
            while len(ticks) < 25: gevent.sleep(0.01)
            assert not waiter.ready()
            waiter.kill()
            for turn in range(100):
                sent = claim({name + ":killed"!r})
                killed = gevent.spawn(backend.acquire, sent, Wait(5))
                gevent.sleep(random.choice([0, 0, 0.0002, 0.001]))
                killed.kill()
                backend.release(Grant(sent.name, sent.owner))
            while len(backend._holds) > 1: gevent.sleep(0.01)
            assert backend.verify(kept)
            backend.release(take(backend, claim({name + ":killed"!r})))
            say("done")
            sys.stdin.read()
        """
        with child(code, gevent=True) as process:
            assert said(process) == "done"
            waiting(server, backend, 0)


class TestInterrupts:
    def test_a_release_follows_the_claim_of_an_interrupted_caller(self, backend, name, threads):
        sent, go_on = claim(name), threading.Event()
        session = backend._session(sent.ttl)
        session.submit(lambda: go_on.wait(20))
        session.submit(partial(backend._try_on_session, session, sent, backend._key(name)))
        released = threads(backend.release, Grant(name, sent.owner, sent.ttl))
        wait_until(lambda: len(session._jobs) == 2, "the release")
        go_on.set()
        assert released.result(20)
        assert not backend.holders([name])

    def test_interrupted_threads_lose_no_other_lock(self, server, backend, peer, name):
        taken = take(peer, claim(f"{name}:waited"))
        with child(f"say(interrupt_threads(backend, {name!r})); sys.stdin.read()") as process:
            assert said(process) == "[<Renewal.KEPT: 'the service renewed it'>] True False"
            waiting(server, backend, 0)
            names = [f"{name}:{number}" for number in range(3)]
            wait_until(lambda: not peer.holders(names), "the releases")
            assert peer.verify(taken)
            assert refused(peer, f"{name}:kept")

    def test_a_grant_outlives_the_time_limit_of_another_caller(
        self, backend, peer, name, monkeypatch
    ):
        backend.release(take(backend, claim(name)))
        record = backend._record

        def wait_for_row(session, sent):
            # The claim before this one took all of its own caller's time.
            backend._retire(session)
            return record(session, sent)

        monkeypatch.setattr(backend, "_record", wait_for_row)
        taken = take(backend, claim(name))
        assert backend.verify(taken)
        assert refused(peer, name)
        assert backend.renew([taken]) == [Renewal.KEPT]
        assert backend.release(taken)
        wait_until(lambda: taken.handle.session.closed, "the end of the session")

    def test_the_session_of_an_interrupted_wait_gets_no_other_lock(
        self, server, backend, peer, name, taken, threads
    ):
        sent, go_on = claim(name), threading.Event()

        def refuse(held):
            (session,) = backend._waiters
            peer.release(taken)
            wait_until(lambda: backend._holds, "the grant")
            # The thread is slow to leave its loop.
            session.submit(lambda: go_on.wait(20))
            wait_until(lambda: not session._jobs, "the thread")
            raise Interrupt

        asked = []

        def tell(held):
            # The first call is about the try.
            asked.append(held)
            if len(asked) == 2:
                refuse(held)

        with pytest.raises(Interrupt):
            backend.acquire(sent, Wait(20, tell))
        released = threads(backend.release, Grant(name, sent.owner, sent.ttl))
        wait_until(lambda: any(each._jobs for each in backend._waiters), "the release")
        go_on.set()
        released.result(20)
        wait_until(lambda: not sessions_of(backend)[1:], "the end of the session")
        assert not backend._idle


class TestHousekeeping:
    def test_a_closed_backend_keeps_its_locks(self, backend, peer, name):
        taken = take(backend, claim(name))
        session = taken.handle.session
        backend.close()
        assert backend.verify(taken)
        assert refused(peer, name)
        assert backend.release(taken)
        backend.close()
        wait_until(lambda: session.closed, "the end of the session")

    def test_idle_sessions_of_many_ttls_are_closed(self, backend, name):
        for ttl in range(20, 40):
            assert backend.release(take(backend, claim(name, ttl=ttl)))
        wait_until(lambda: len(sessions_of(backend)) <= 8, "the end of idle sessions")

    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({"fence_database": "default"}, "E010"),
            ({"location": "redis://"}, "E007"),
            ({"options": {"MAX_WAITER": 1}}, "E008"),
            ({"options": {"MAX_WAITERS": "many"}}, "E008"),
            ({"options": {"TIMEOUT": -1}}, "E003"),
            ({}, None),
        ],
    )
    def test_settings_are_checked(self, database, settings, problem):
        config = replace(configured(), **settings)
        found = [each.id for each in MysqlBackend.problems(config)]
        assert found == ([problem] if problem else [])

    def test_a_server_that_is_away_is_a_problem(self, make):
        with route_to(1) as route:
            (problem,) = make(route, TIMEOUT=1).check()
        assert problem.id == "E013"


class TestBinlog:
    def test_statement_format_records_no_grant_and_is_a_problem(
        self, server, request, make_alias, make, name
    ):
        make_server = request.getfixturevalue(f"make_{server.name}")
        own = make_server("--log-bin=binlog", "--binlog-format=ROW", "--server-id=1")
        own.execute("CREATE DATABASE fencedlock")
        backend = make(make_alias(own.django("fencedlock")))
        assert not list(backend.check())
        own.execute("SET GLOBAL binlog_format = 'STATEMENT'")
        assert [problem.id for problem in backend.check()] == ["E059"]
        with pytest.raises(BackendUnavailable, match="BINLOG_FORMAT"):
            backend.acquire(claim(name), Wait())
        assert not backend.holders([name])


class TestClusters:
    """No test runs such a cluster: what its servers answer decides."""

    ALONE = {"wsrep_on": "OFF", "log_bin": "OFF", "binlog_format": "MIXED", "proxy": ""}
    GALERA = {**ALONE, "wsrep_on": "ON", "wsrep_cluster_size": "3"}
    GROUP = {**ALONE, "group_replication_group_name": "aa-bb"}

    @pytest.mark.parametrize(
        ("facts", "why"),
        [
            (ALONE, None),
            ({**GALERA, "wsrep_cluster_size": "1"}, None),
            (GALERA, "Galera cluster of 3 nodes"),
            ({**GROUP, "group_replication_single_primary_mode": "ON"}, None),
            ({**GROUP, "group_replication_single_primary_mode": "OFF"}, "several primaries"),
            (
                {**ALONE, "group_replication_group_name": ""}
                | {"group_replication_single_primary_mode": "OFF"},
                None,
            ),
        ],
    )
    def test_several_writers(self, facts, why):
        found = several_writers(facts)
        assert (why in found) if why else found is None

    def test_a_cluster_grants_nothing(self, backend, name, monkeypatch):
        monkeypatch.setattr(backend_module, "_facts", lambda used: self.GALERA)
        with pytest.raises(BackendUnavailable, match="Galera cluster of 3 nodes") as caught:
            backend.acquire(claim(name), Wait())
        assert len(str(caught.value)) < 300
        assert [problem.id for problem in backend.check()] == ["E058"]

    def test_a_server_that_became_one_of_several_grants_nothing_to_a_new_session(
        self, backend, name, monkeypatch
    ):
        taken = take(backend, claim(name))
        monkeypatch.setattr(backend_module, "_facts", lambda used: self.GALERA)
        with pytest.raises(BackendUnavailable, match="Galera cluster of 3 nodes"):
            backend.acquire(claim(f"{name}:other", ttl=20.0), Wait())
        assert backend.release(taken)

    @pytest.mark.parametrize(
        ("facts", "problem"),
        [
            ({"log_bin": "ON", "binlog_format": "STATEMENT"}, "E059"),
            ({"log_bin": "ON", "binlog_format": "ROW"}, None),
            ({"log_bin": "OFF", "binlog_format": "STATEMENT"}, None),
            ({"proxy": "yes"}, "W058"),
        ],
    )
    def test_checks(self, backend, monkeypatch, facts, problem):
        monkeypatch.setattr(backend_module, "_facts", lambda used: self.ALONE | facts)
        assert [each.id for each in backend.check()] == ([problem] if problem else [])


def refused_or_unavailable(backend, name):
    try:
        return refused(backend, name)
    except BackendUnavailable:
        return True


@contextlib.contextmanager
def route_to(port):
    alias = f"route{next(_numbers)}"
    entry = {**connections.settings[ALIAS], "PORT": str(port)}
    connections.settings[alias] = entry
    yield alias
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]


@pytest.fixture
def own_server(server, request, make_alias):
    own = request.getfixturevalue(f"make_{server.name}")()
    own.execute("CREATE DATABASE fencedlock")
    return own, make_alias(own.django("fencedlock"))


class Interrupt(BaseException):
    pass


def interrupt_threads(backend, name, times=200):
    """Interrupt threads that acquire, wait and release, while another lock is held."""
    # In a process of its own: CPython may raise the exception in a thread that the target starts.
    kept = take(backend, claim(f"{name}:kept"))
    interrupts, stop, inside, renewals = [], threading.Event(), set(), set()

    def attempt():
        sent = claim(f"{name}:{random.randrange(3)}")
        inside.add(threading.get_ident())
        try:
            backend.acquire(sent, Wait(0.01))
            backend.acquire(claim(f"{name}:waited"), Wait(random.choice([0, 0.02])))
        finally:
            backend.release(Grant(sent.name, sent.owner, sent.ttl))

    def release_rest():
        for hold in list(backend._holds.values()):
            if hold is not kept.handle:
                backend.release(Grant(hold.claim.name, hold.claim.owner))

    def work():
        while not stop.is_set():
            try:
                while not stop.is_set():
                    attempt()
            except Interrupt:
                interrupts.append(1)
            except BackendUnavailable:
                pass
            release_rest()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    while len(interrupts) < times:
        time.sleep(random.random() * 0.005)
        renewals.update(backend.renew([kept]))
        target = random.choice(threads).ident
        # One at a time, and only where it is caught.
        if target in inside:
            inside.discard(target)
            send = ctypes.pythonapi.PyThreadState_SetAsyncExc
            send(ctypes.c_ulong(target), ctypes.py_object(Interrupt))
    stop.set()
    for each in threads:
        each.join(20)
    release_rest()
    return f"{[*renewals]} {backend.verify(kept)} {backend._mutex.locked()}"


_PRELUDE = """
import os, sys, time
if {gevent}:
    from gevent import monkey; monkey.patch_all()
import django
import pymysql
from django.conf import settings
pymysql.install_as_MySQLdb()
settings.configure(DATABASES={{"sessions": {database!r}, "default": {database!r}}}, USE_TZ=True,
                   INSTALLED_APPS=["django_fencedlock"])
django.setup()
from {tests} import *
def say(words): print(words, flush=True)
def another():
    return MysqlBackend(configured())
backend = MysqlBackend(configured())
"""


@contextlib.contextmanager
def child(code, *, gevent=False):
    settings = connections[ALIAS].settings_dict
    keys = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
    database = {key: settings[key] for key in keys}
    prelude = _PRELUDE.format(gevent=gevent, database=database, tests=__name__)
    with python(code=prelude + dedent(code)) as process:
        yield process


def said(process):
    return process.stdout.readline().strip()
