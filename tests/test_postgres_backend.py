"""
The postgres backend, on real servers.

A peer is a backend with sessions and a thread of its own, as another process has them.
"""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import close_old_connections, connections

from django_fencedlock.backends import postgres_home, postgres_waiting
from django_fencedlock.backends.base import Grant, Renewal, Request
from django_fencedlock.backends.postgres import PostgresBackend
from django_fencedlock.backends.postgres_home import Home
from django_fencedlock.backends.postgres_waiting import Room
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core.identity import new_owner
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import AliasConflict, BackendUnavailable
from django_fencedlock.lease import Lease
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.storage.connections import PREPARE_THRESHOLD as AFTER
from django_fencedlock.storage.vendors import Entry, ledger_for
from tests.leases import lease_of
from tests.servers import Postgres
from tests.servers.process import wait_until

ALIAS = "sessions"
_names = iter(range(10**9))


def configured(using: str = ALIAS, *, alias: str = "default", **options: Any) -> AliasConfig:
    return AliasConfig(
        alias=alias,
        backend="django_fencedlock.backends.postgres.PostgresBackend",
        location="",
        ttl=30.0,
        blocking_timeout=10.0,
        key_prefix="",
        fence_database=using,
        options=options,
    )


def request_for(name: str, *, ttl: float = 30.0, **terms: Any) -> Request:
    return Request(name=name, owner=new_owner(), ttl=ttl, **terms)


def take(backend: PostgresBackend, name: str, **terms: Any) -> Lease:
    request = request_for(name, **terms)
    return lease_of(request, backend.acquire(request))


def expire(name: str, using: str = ALIAS) -> None:
    HeldLock.objects.using(using).filter(name=name).update(expires_at="2020-01-01T00:00Z")


@pytest.fixture(scope="module")
def database(postgres: Postgres, django_db_blocker: Any) -> Iterator[str]:
    entry = postgres.django(postgres.create_database())
    connections.settings[ALIAS] = connections.configure_settings({"default": {}, ALIAS: entry})[
        ALIAS
    ]
    with django_db_blocker.unblock():
        call_command("migrate", database=ALIAS, verbosity=0)
        yield ALIAS
        connections[ALIAS].close()
    del connections[ALIAS]
    del connections.settings[ALIAS]


@pytest.fixture
def name() -> str:
    return f"name:{next(_names)}"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PostgresBackend]]:
    """
    Make backends, each as if in a process of its own.
    """
    for module in (postgres_home, postgres_waiting):
        # Else sessions close as soon as they hold nothing, so that a test database can be dropped.
        monkeypatch.setattr(module, "under_test", lambda: False)
    made: list[PostgresBackend] = []

    def make(using: str = ALIAS, **options: Any) -> PostgresBackend:
        backend = PostgresBackend(configured(using, **options))
        backend._home = Home(backend._route, backend._timeout)
        backend._room = Room(backend._route, backend._timeout)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()
        backend._home.end()


@pytest.fixture
def backend(database: str, make: Callable[..., PostgresBackend]) -> PostgresBackend:
    return make()


@pytest.fixture
def peer(database: str, make: Callable[..., PostgresBackend]) -> PostgresBackend:
    return make()


def sessions(postgres: Postgres, state: str = "true") -> list[int]:
    rows = postgres.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'fencedlock %%' AND "
        f"datname = '{connections[ALIAS].settings_dict['NAME']}' AND {state}"
    )
    return [pid for (pid,) in rows]


def waiting(postgres: Postgres, count: int) -> None:
    """
    Wait until so many sessions wait for an advisory lock.
    """
    condition = "wait_event_type = 'Lock' AND wait_event = 'advisory'"
    wait_until(lambda: len(sessions(postgres, condition)) == count, f"{count} waiting sessions")


def standing(backend: PostgresBackend, name: str, count: int) -> None:
    """
    Wait until so many threads of a process stand in line for a name.
    """
    lines, key = backend._room._lines, backend._key(name)
    wait_until(lambda: len(lines.get(key, ())) == count, f"{count} threads in line")


class TestOneStatementEach:
    def test_acquire_and_release_are_one_statement_each(
        self, postgres: Postgres, backend: PostgresBackend, name: str
    ) -> None:
        backend.release(take(backend, name))
        with postgres.statements() as counted:
            lease = take(backend, name)
            assert backend.release(lease)
        assert sum(counted.values()) == 2, counted
        assert lease.token == 2

    def test_a_refusal_is_one_statement(
        self, postgres: Postgres, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        take(peer, name)
        assert backend.acquire(request_for(name)) is None
        with postgres.statements() as counted:
            assert backend.acquire(request_for(name)) is None
        assert sum(counted.values()) == 1, counted

    def test_what_this_process_holds_is_refused_without_asking(
        self, postgres: Postgres, backend: PostgresBackend, name: str
    ) -> None:
        take(backend, name)
        with postgres.statements() as counted:
            assert backend.acquire(request_for(name)) is None
        assert not counted

    def test_an_unfenced_lock_touches_no_table(
        self, postgres: Postgres, backend: PostgresBackend, name: str
    ) -> None:
        with postgres.statements() as counted:
            lease = take(backend, name, fenced=False)
            assert backend.verify(lease)
            assert backend.renew([lease]) == [Renewal.KEPT]
            assert backend.release(lease)
        assert not [text for text in counted if "INSERT" in text or "DELETE" in text]
        assert not Fence.objects.using(ALIAS).filter(name=name).exists()

    def test_the_holder_of_an_unfenced_lock_is_told_by_its_session(
        self, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        take(peer, name, fenced=False)
        holder = backend.holder(name)
        assert holder is not None
        assert f"pid {os.getpid()}" in holder.description


class TestGrants:
    def test_tokens_rise_and_rows_tell_the_holder(
        self, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        first = take(backend, name)
        holder = peer.holder(name)
        assert holder is not None
        assert (holder.owner, holder.token) == (first.owner_id, 1)
        assert backend.release(first)
        assert peer.holder(name) is None
        second = take(peer, name)
        fence = Fence.objects.using(ALIAS).get(name=name)
        assert (fence.token, fence.owner) == (2, second.owner_id)

    def test_the_same_request_may_come_twice(self, backend: PostgresBackend, name: str) -> None:
        request = request_for(name)
        assert backend.acquire(request) is backend.acquire(request)

    @pytest.mark.slow
    def test_a_thousand_locks_live_on_one_session(
        self, postgres: Postgres, backend: PostgresBackend, name: str
    ) -> None:
        leases = [take(backend, f"{name}:{number}") for number in range(1000)]
        assert len(sessions(postgres)) == 1
        with postgres.statements() as counted:
            assert set(backend.renew(leases)) == {Renewal.KEPT}
        assert sum(counted.values()) == 1
        with pytest.raises(BackendUnavailable, match=r"the 1000 that .*MAX_LOCKS"):
            backend.acquire(request_for(name))

    def test_threads_of_one_process_exclude_each_other(
        self, backend: PostgresBackend, name: str
    ) -> None:
        with ThreadPoolExecutor(8) as pool:
            grants = list(pool.map(lambda _: backend.acquire(request_for(name)), range(8)))
        assert len([grant for grant in grants if grant]) == 1

    def test_a_name_live_through_another_alias_is_refused_and_both_are_named(
        self, make: Callable[..., PostgresBackend], backend: PostgresBackend, name: str
    ) -> None:
        other = make(alias="other")
        other.config = configured(alias="other")
        object.__setattr__(other.config, "key_prefix", "elsewhere")
        take(other, name)
        with pytest.raises(AliasConflict, match=r"'other'.*'default'"):
            backend.acquire(request_for(name))
        with pytest.raises(AliasConflict, match=r"'other'.*'default'"):
            backend.wait(request_for(name), 1)
        assert backend._home.held == 0
        assert Fence.objects.using(ALIAS).get(name=name).token == 1

    def test_a_refused_try_records_nothing(
        self, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        lease = take(backend, name)
        assert peer.acquire(request_for(name)) is None
        assert HeldLock.objects.using(ALIAS).get(name=name).owner == lease.owner_id
        fence = Fence.objects.using(ALIAS).get(name=name)
        assert (fence.token, fence.owner) == (lease.token, lease.owner_id)

    @pytest.mark.parametrize("other", [{"alias": "other"}, {"backend": "redis"}])
    def test_a_name_is_refused_as_long_as_it_is_live_at_another_service(
        self, backend: PostgresBackend, name: str, other: dict[str, str]
    ) -> None:
        backend.release(take(backend, name))
        entry = Entry(name, "default", "postgres", new_owner(), 30.0)
        assert ledger_for(connections[ALIAS]).enter(connections[ALIAS], replace(entry, **other))
        with pytest.raises(AliasConflict):
            backend.acquire(request_for(name))
        expire(name)
        assert take(backend, name).token == 2

    def test_a_renewal_of_what_was_taken_away_is_a_loss_and_frees_the_key(
        self, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        lease, other = take(backend, name), take(backend, f"{name}:other")
        HeldLock.objects.using(ALIAS).filter(name=name).delete()
        assert not backend.verify(lease)
        assert backend.renew([lease, other]) == [Renewal.LOST, Renewal.KEPT]
        assert take(peer, name).token == 2
        assert backend.release(lease) is False

    def test_the_row_of_whoever_came_next_outlasts_a_late_release(
        self, backend: PostgresBackend, name: str
    ) -> None:
        lease, following = take(backend, name), new_owner().id
        rows = HeldLock.objects.using(ALIAS).filter(name=name)
        # The key is free a moment before the row is gone.
        rows.update(owner=following)
        backend.release(lease)
        assert rows.get().owner == following

    def test_a_waiter_thrown_out_leaves_the_row_of_whoever_came_next(
        self, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        take(peer, name)
        backend._home.ask(partial(backend._clear, request_for(name)))
        assert HeldLock.objects.using(ALIAS).filter(name=name).exists()

    def test_a_row_that_somebody_has_locked_is_passed_over(
        self, postgres: Postgres, backend: PostgresBackend, name: str
    ) -> None:
        lease, other = take(backend, name), take(backend, f"{name}:other")
        with postgres.connect(connections[ALIAS].settings_dict["NAME"]) as contender:
            contender.execute("BEGIN")
            contender.execute(
                f"SELECT 1 FROM {HeldLock._meta.db_table} WHERE name = %s FOR UPDATE", [name]
            )
            assert backend.renew([lease, other]) == [Renewal.UNKNOWN, Renewal.KEPT]
            contender.execute("ROLLBACK")
        assert backend.renew([lease]) == [Renewal.KEPT]

    def test_a_pinned_fence_is_waited_for_but_shortly_and_nothing_stays_held(
        self, postgres: Postgres, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        peer.release(take(peer, name))
        with postgres.connect(connections[ALIAS].settings_dict["NAME"]) as writer:
            writer.execute("BEGIN")
            writer.execute(
                f"SELECT 1 FROM {Fence._meta.db_table} WHERE name = %s FOR SHARE", [name]
            )
            started = time.monotonic()
            assert backend.acquire(request_for(name)) is None
            assert time.monotonic() - started < 1
            assert backend.is_free(name)
            assert backend.wait(request_for(name), 0.4) is None
            writer.execute("ROLLBACK")
        assert take(peer, name).token == 2

    def test_a_test_s_own_transaction_gets_the_record_and_others_the_exclusion(
        self, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        from django.db import transaction

        connection = connections[ALIAS]
        with transaction.atomic(using=ALIAS):
            lease = take(backend, name, connection=connection)
            assert lease.token == 1
            assert HeldLock.objects.using(ALIAS).filter(name=name).exists()
            assert peer.acquire(request_for(name)) is None
            assert backend.verify(lease)
            assert backend.release(lease)
            assert not HeldLock.objects.using(ALIAS).filter(name=name).exists()
            transaction.set_rollback(True, using=ALIAS)
        assert peer.acquire(request_for(name)) is not None


class TestWaiting:
    def test_threads_get_the_lock_in_order_of_arrival(
        self, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        lease = take(peer, name)
        order: list[int] = []

        def wait(number: int) -> None:
            request = request_for(name)
            mine = lease_of(request, backend.wait(request, 20))
            order.append(number)
            backend.release(mine)

        threads = []
        for number in range(6):
            threads.append(threading.Thread(target=wait, args=[number]))
            threads[-1].start()
            standing(backend, name, number + 1)
        peer.release(lease)
        for thread in threads:
            thread.join()
        assert order == list(range(6))

    def test_processes_get_the_lock_in_order_of_arrival(
        self, postgres: Postgres, make: Callable[..., PostgresBackend], database: str, name: str
    ) -> None:
        peers = [make() for _ in range(5)]
        lease = take(peers[0], name)
        tokens: dict[int, int | None] = {}

        def wait(number: int) -> None:
            request = request_for(name)
            mine = lease_of(request, peers[number].wait(request, 20))
            tokens[number] = mine.token
            peers[number].release(mine)

        threads = []
        for number in range(1, 5):
            threads.append(threading.Thread(target=wait, args=[number]))
            threads[-1].start()
            waiting(postgres, number)
        peers[0].release(lease)
        for thread in threads:
            thread.join()
        assert tokens == {1: 2, 2: 3, 3: 4, 4: 5}

    @pytest.mark.slow
    def test_fifty_threads_on_one_name_wait_on_one_session(
        self, postgres: Postgres, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        lease = take(peer, name)
        with ThreadPoolExecutor(50) as pool:
            asked = [pool.submit(backend.wait, request_for(name), 2) for _ in range(50)]
            standing(backend, name, 50)
            waiting(postgres, 1)
            # The holder's, the one that waits, and after a second one that looks after the holder.
            assert len(sessions(postgres)) <= 3
            assert not [each for each in asked if each.result()]
        peer.release(lease)

    def test_beyond_the_cap_one_tries_until_it_is_free(
        self, postgres: Postgres, make: Callable[..., PostgresBackend], database: str, name: str
    ) -> None:
        backend, peer = make(MAX_WAITERS=1), make()
        held = [take(peer, f"{name}:{number}") for number in range(2)]
        requests = [request_for(lease.name) for lease in held]
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(backend.wait, requests[0], 20)
            waiting(postgres, 1)
            second = pool.submit(backend.wait, requests[1], 20)
            peer.release(held[1])
            assert second.result() is not None
            waiting(postgres, 1)
            peer.release(held[0])
            assert first.result() is not None

    def test_a_wait_that_times_out_leaves_nothing(
        self, postgres: Postgres, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        lease = take(peer, name)
        started = time.monotonic()
        assert backend.wait(request_for(name), 0.3) is None
        assert 0.3 <= time.monotonic() - started < 2
        peer.release(lease)
        assert peer.is_free(name)

    @pytest.fixture
    def wanted(
        self, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> Callable[[], bool]:
        """A lock that was refused a moment ago; called, its holder gives it back."""
        lease = take(peer, name)
        request = request_for(name, timeout=0.05)
        assert backend.acquire(request) is None
        assert backend.wait(request, 0.05) is None
        return lambda: peer.release(lease)

    def test_who_waits_for_a_lock_that_was_refused_lately_asks_once(
        self,
        postgres: Postgres,
        backend: PostgresBackend,
        wanted: Callable[[], bool],
        name: str,
    ) -> None:
        request = request_for(name, timeout=20)
        with ThreadPoolExecutor(1) as pool, postgres.statements() as statements:
            assert backend.acquire(request) is None
            asked = pool.submit(backend.wait, request, 20)
            waiting(postgres, 1)
            wanted()
            assert asked.result() is not None
        assert [n for text, n in statements.items() if "pg_advisory_lock(" in text] == [1]
        assert not [text for text in statements if "pg_try_advisory_lock(" in text]
        assert not request.place

    def test_whose_time_is_up_before_he_asked_asks_all_the_same(
        self, backend: PostgresBackend, wanted: Callable[[], bool], name: str
    ) -> None:
        request = request_for(name, timeout=20)
        assert backend.acquire(request) is None
        wanted()
        assert backend.wait(request, 0.0) is not None

    @pytest.mark.parametrize("why", ["he will not wait", "no session is idle", "it is long ago"])
    def test_else_who_waits_tries_first(
        self,
        backend: PostgresBackend,
        wanted: Callable[[], bool],
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        why: str,
    ) -> None:
        wanted()
        if why == "no session is idle":
            backend._room.close()
        if why == "it is long ago":
            later = clock() + postgres_waiting.WANTED
            monkeypatch.setattr(postgres_waiting, "clock", lambda: later)
        timeout = 0 if why == "he will not wait" else 20
        assert backend.acquire(request_for(name, timeout=timeout)) is not None

    def test_a_wait_can_be_cancelled(
        self, postgres: Postgres, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        lease = take(peer, name)
        request = request_for(name)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(backend.wait, request, math.inf)
            waiting(postgres, 1)
            request.cancel.cancel()
            assert asked.result(5) is None
        peer.release(lease)
        assert take(peer, name).token == 2

    @pytest.mark.slow
    def test_the_lease_of_a_wait_begins_when_it_is_taken_up(
        self, postgres: Postgres, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        lease = take(peer, name)
        request = request_for(name, ttl=0.5)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(backend.wait, request, 10)
            waiting(postgres, 1)
            time.sleep(0.6)
            peer.release(lease)
            mine = lease_of(request, asked.result())
        assert not mine.expired
        assert backend.verify(mine)
        assert backend.renew([mine]) == [Renewal.KEPT]
        assert backend.release(mine)

    @pytest.mark.parametrize("fenced", [True, False])
    def test_the_lease_of_a_short_wait_begins_before_it_and_takes_one_statement(
        self,
        postgres: Postgres,
        backend: PostgresBackend,
        peer: PostgresBackend,
        name: str,
        fenced: bool,
    ) -> None:
        lease = take(peer, name)
        request = request_for(name, ttl=120, fenced=fenced)
        with ThreadPoolExecutor(1) as pool, postgres.statements() as statements:
            before = clock()
            asked = pool.submit(backend.wait, request, 20)
            waiting(postgres, 1)
            released = clock()
            peer.release(lease)
            grant = asked.result()
        assert before <= grant.since < released
        mine = lease_of(request, grant)
        assert backend.verify(mine)
        assert backend.renew([mine]) == [Renewal.KEPT]
        assert backend.release(mine)
        assert [n for text, n in statements.items() if "pg_advisory_lock(" in text] == [1]
        renewals = ("UPDATE django_fencedlock_heldlock", "FROM locks k WHERE")
        assert not [text for text in statements if any(part in text for part in renewals)]

    @pytest.mark.slow
    @pytest.mark.parametrize("before", [0, AFTER + 1], ids=["its_first", "prepared"])
    def test_a_waiter_thrown_out_leaves_the_lock_free(
        self,
        postgres: Postgres,
        backend: PostgresBackend,
        peer: PostgresBackend,
        name: str,
        before: int,
    ) -> None:
        lease = take(peer, name)
        code = f"""
            import signal
            for number in range({before}):
                request = request_for(f"{name}:{{number}}")
                backend.release(lease_of(request, backend.wait(request, 10)))
            def stop(*args): raise KeyboardInterrupt
            signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            try:
                backend.wait(request_for({name!r}), 30)
            except KeyboardInterrupt:
                say("out")
            sys.stdin.read()
        """
        with child(code) as process:
            assert said(process) == "out"
            waiting(postgres, 0)
        peer.release(lease)
        assert take(backend, name).token == 2


class TestLosses:
    def test_a_session_that_dies_loses_its_leases_at_once_and_no_others(
        self, postgres: Postgres, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        lost: list[str] = []
        backend.lost_hook = lost.extend
        held = [take(backend, f"{name}:{number}") for number in range(3)]
        lease = take(peer, name)
        request = request_for(name)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(backend.wait, request, 10)
            waiting(postgres, 1)
            peer.release(lease)
            waited = lease_of(request, asked.result())
        postgres.execute(f"SELECT pg_terminate_backend({held[0].handle.session.pid})")
        wait_until(lambda: len(lost) == 3, "the loss", timeout=1)
        assert sorted(lost) == sorted(each.owner_id for each in held)
        assert backend.renew([*held, waited]) == [Renewal.LOST] * 3 + [Renewal.KEPT]
        assert not backend.verify(held[0])
        assert backend.release(held[0]) is False
        postgres.execute(f"SELECT pg_terminate_backend({waited.handle.session.pid})")
        wait_until(lambda: waited.owner_id in lost, "the loss", timeout=1)

    def test_an_immediate_restart_loses_all_and_the_next_grant_has_the_next_token(
        self,
        make_postgres: Callable[..., Postgres],
        make_alias: Callable[[dict[str, Any]], str],
        make: Callable[..., PostgresBackend],
        name: str,
    ) -> None:
        server = make_postgres()
        backend = make(make_alias(server.django()), TIMEOUT=2)
        lost: list[str] = []
        backend.lost_hook = lost.extend
        lease = take(backend, name)
        server.kill()
        wait_until(lambda: lost == [lease.owner_id], "the loss", timeout=1)
        with pytest.raises(BackendUnavailable):
            backend.acquire(request_for(name))
        server.start()
        request = request_for(name)

        def again() -> Grant | None:
            try:
                return backend.acquire(request)
            except BackendUnavailable:
                return None

        wait_until(again, "the server to be asked again")
        assert lease_of(request, backend.acquire(request)).token == 2

    def test_a_server_that_hangs_is_told_within_the_bound(
        self,
        make_postgres: Callable[..., Postgres],
        make_alias: Callable[[dict[str, Any]], str],
        make: Callable[..., PostgresBackend],
        name: str,
    ) -> None:
        server = make_postgres()
        backend = make(make_alias(server.django()), TIMEOUT=1)
        lease = take(backend, name)
        server.pause()
        request = request_for(f"{name}:other")
        started = time.monotonic()
        with pytest.raises(BackendUnavailable):
            backend.acquire(request)
        assert backend.renew([lease]) == [Renewal.UNKNOWN]
        with pytest.raises(BackendUnavailable):
            backend.wait(request_for(f"{name}:third"), 0.1)
        assert time.monotonic() - started < 8
        server.resume()
        wait_until(lambda: backend.renew([lease]) == [Renewal.KEPT], "the server to answer")
        assert backend.is_free(request.name)
        assert not HeldLock.objects.using(backend._route).filter(name=request.name).exists()

    def test_a_full_lock_table_says_so_and_leaves_nothing_held(
        self,
        make_postgres: Callable[..., Postgres],
        make_alias: Callable[[dict[str, Any]], str],
        make: Callable[..., PostgresBackend],
        name: str,
    ) -> None:
        server = make_postgres(
            max_connections="10",
            max_locks_per_transaction="10",
            max_wal_senders="0",
            max_worker_processes="1",
        )
        backend = make(make_alias(server.django()), MAX_LOCKS=100_000)
        problems = list(backend.live_problems())
        assert [problem.id for problem in problems] == ["W001"]
        held: list[Lease] = []

        def fill() -> None:
            while True:
                held.append(take(backend, f"{name}:{len(held)}", fenced=False))

        with pytest.raises(BackendUnavailable, match="max_locks_per_transaction"):
            fill()
        assert backend._home.held == len(held)
        assert backend.release(held.pop())
        assert backend.release(held.pop())
        found = backend._home.ask(
            lambda: backend._home.session().one(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'", {}
            )
        )
        assert found == (len(held),)

    def test_a_read_only_server_is_no_grant_and_no_lock(
        self, postgres: Postgres, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        backend._home.ask(
            lambda: backend._home.session().all(
                "SELECT set_config('default_transaction_read_only', 'on', false)", {}
            )
        )
        with pytest.raises(BackendUnavailable, match="read-only"):
            backend.acquire(request_for(name))
        assert peer.is_free(name)

    def test_what_django_does_to_its_connections_does_not_matter(
        self, postgres: Postgres, backend: PostgresBackend, peer: PostgresBackend, name: str
    ) -> None:
        connections[ALIAS].ensure_connection()
        connections[ALIAS].settings_dict["CONN_MAX_AGE"] = 0
        lease = take(backend, name)
        close_old_connections()
        connections.close_all()
        assert peer.acquire(request_for(name)) is None
        assert backend.verify(lease)

    @pytest.mark.slow
    def test_a_pool_is_not_used(self, postgres: Postgres, database: str, name: str) -> None:
        code = f"""
            lease = take(backend, {name!r})
            say(type(lease.handle.session.wrapper.settings_dict["OPTIONS"].get("pool")).__name__)
        """
        with child(code, pool=True) as process:
            assert said(process) == "NoneType"


@pytest.mark.slow
class TestHungHolders:
    def test_a_stopped_holder_past_its_time_is_ended(
        self, postgres: Postgres, backend: PostgresBackend, name: str
    ) -> None:
        code = f"""
            take(backend, {name!r}, ttl=1.0)
            other = take(backend, {name + ":other"!r}, ttl=60.0)
            say("held")
            sys.stdin.read()
        """
        with child(code) as process:
            assert said(process) == "held"
            os.kill(process.pid, signal.SIGSTOP)
            try:
                expire(name)
                # One row of the session is live: its holder may be at work on that.
                assert backend.acquire(request_for(name)) is None
                expire(f"{name}:other")
                assert take(backend, name).token == 2
            finally:
                os.kill(process.pid, signal.SIGCONT)

    def test_a_waiter_does_not_wait_for_a_hung_holder_either(
        self, postgres: Postgres, backend: PostgresBackend, name: str
    ) -> None:
        with child(f"take(backend, {name!r}); say('held'); sys.stdin.read()") as process:
            assert said(process) == "held"
            os.kill(process.pid, signal.SIGSTOP)
            try:
                with ThreadPoolExecutor(1) as pool:
                    request = request_for(name)
                    asked = pool.submit(backend.wait, request, 20)
                    waiting(postgres, 1)
                    expire(name)
                    assert lease_of(request, asked.result(5)).token == 2
            finally:
                os.kill(process.pid, signal.SIGCONT)

    def test_a_live_holder_past_its_time_in_this_process_is_left_alone(
        self, backend: PostgresBackend, name: str
    ) -> None:
        lease = take(backend, name)
        expire(name)
        assert backend.acquire(request_for(name)) is None
        assert backend.wait(request_for(name), 1.5) is None
        assert backend.renew([lease]) == [Renewal.KEPT]


@pytest.mark.slow
class TestProcesses:
    def test_a_child_after_fork_owns_nothing_and_ends_nothing(
        self, postgres: Postgres, backend: PostgresBackend, name: str
    ) -> None:
        code = f"""
            lease = take(backend, {name!r})
            pid = os.fork()
            if not pid:
                mine = backend.acquire(request_for({name!r}))
                other = take(backend, {name + ":child"!r})
                ok = mine is None and not backend.release(lease) and not backend.verify(lease)
                backend.release(other)
                backend.close()
                import gc
                gc.collect()
                os._exit(0 if ok else 1)
            status = os.waitpid(pid, 0)[1]
            say(f"{{status}} {{backend.verify(lease)}} {{backend.renew([lease])[0].name}}")
            sys.stdin.read()
        """
        with child(code) as process:
            assert said(process) == "0 True KEPT"
            assert backend.acquire(request_for(name)) is None

    def test_a_process_that_is_killed_frees_its_locks(
        self, backend: PostgresBackend, name: str
    ) -> None:
        with child(f"take(backend, {name!r}); say('held'); sys.stdin.read()") as process:
            assert said(process) == "held"
            process.kill()
            request = request_for(name)
            assert lease_of(request, backend.wait(request, 5)).token == 2

    def test_a_killed_process_whose_child_has_the_session_open_is_evicted(
        self, postgres: Postgres, backend: PostgresBackend, name: str
    ) -> None:
        code = f"""
            lease = take(backend, {name!r})
            take(backend, {name + ":other"!r})
            pid = os.fork() or time.sleep(60) or os._exit(0)
            say(f"{{pid}} {{lease.owner_id}}")
            sys.stdin.read()
        """
        with child(code) as process:
            grandchild, owner = said(process).split()
            process.kill()
            process.wait()
            try:
                time.sleep(0.1)
                assert backend.acquire(request_for(name)) is None
                assert backend.evict(name, owner)
                successor = take(backend, name)
                assert successor.token == 2
                # It was the dead process's whole session.
                assert take(backend, f"{name}:other").token == 2
                assert not backend.evict(name, owner)
                assert backend.verify(successor)
            finally:
                os.kill(int(grandchild), signal.SIGKILL)

    def test_greenlets_share_the_session_and_a_killed_one_leaves_no_lock(
        self, postgres: Postgres, backend: PostgresBackend, name: str
    ) -> None:
        code = f"""
            import gevent, time
            ticks = []
            def tick():
                while True:
                    gevent.sleep(0.01)
                    ticks.append(1)
            ticking = gevent.spawn(tick)
            def work(number):
                for turn in range(10):
                    lease = take(backend, f"{name}:{{number}}")
                    assert backend.renew([lease])[0].name == "KEPT"
                    gevent.sleep(0)
                    assert backend.release(lease)
            gevent.joinall([gevent.spawn(work, n) for n in range(20)], raise_error=True)
            take(backend, {name!r})
            ticks.clear()
            peer = another(backend)
            waiter = gevent.spawn(peer.wait, request_for({name!r}), 30)
            wait_for(lambda: len(ticks) > 25)
            assert not waiter.ready()
            waiter.kill()
            request = request_for("{name}:killed")
            killed = gevent.spawn(backend.acquire, request)
            gevent.sleep(0)
            killed.kill()
            if isinstance(killed.value, Grant):
                # It was faster.
                backend.release(lease_of(request, killed.value))
            wait_for(lambda: backend.is_free("{name}:killed"))
            say("done")
            sys.stdin.read()
        """
        with child(code, gevent=True) as process:
            assert said(process) == "done"
            waiting(postgres, 0)


class TestChecks:
    def test_a_transaction_pooler_is_refused(
        self,
        postgres: Postgres,
        database: str,
        make_pgbouncer: Callable[..., Any],
        make: Callable[..., PostgresBackend],
        name: str,
    ) -> None:
        bouncer = make_pgbouncer(postgres, pool_mode="transaction")
        with route_to(bouncer) as route:
            backend = make(DATABASE=route)
            assert [problem.id for problem in backend.live_problems()] == ["E011"]
            with pytest.raises(BackendUnavailable, match="pooler"):
                backend.acquire(request_for(name))

    def test_a_session_pooler_is_accepted(
        self,
        postgres: Postgres,
        database: str,
        make_pgbouncer: Callable[..., Any],
        make: Callable[..., PostgresBackend],
        name: str,
    ) -> None:
        bouncer = make_pgbouncer(postgres, pool_mode="session", pool_size=10)
        with route_to(bouncer) as route:
            backend = make(DATABASE=route)
            assert not list(backend.live_problems())
            assert backend.release(take(backend, name))

    def test_a_route_to_another_database_is_refused(
        self, postgres: Postgres, database: str, make: Callable[..., PostgresBackend]
    ) -> None:
        with route_to(postgres, "postgres") as route:
            (problem,) = make(DATABASE=route).live_problems()
        assert problem.id == "E008"

    def test_an_unreachable_server_is_told(
        self, postgres: Postgres, database: str, make: Callable[..., PostgresBackend]
    ) -> None:
        with route_to(postgres) as route:
            connections.settings[route]["PORT"] = "1"
            (problem,) = make(DATABASE=route, TIMEOUT=1).live_problems()
        assert problem.id == "E013"

    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({"fence_database": "default"}, "E010"),
            ({"location": "redis://"}, "E007"),
            ({"options": {"MAX_LOCK": 1}}, "E008"),
            ({"options": {"MAX_LOCKS": 0}}, "E008"),
            ({"options": {"MAX_WAITERS": "many"}}, "E008"),
            ({"options": {"DATABASE": "nowhere"}}, "E008"),
            ({"options": {"DATABASE": "default"}}, "E010"),
            ({"options": {"TIMEOUT": -1}}, "E003"),
            ({}, None),
        ],
    )
    def test_settings_are_checked(
        self, database: str, settings: dict[str, Any], problem: str | None
    ) -> None:
        config = configured()
        for field, value in settings.items():
            object.__setattr__(config, field, value)
        found = [each.id for each in PostgresBackend.problems(config)]
        assert found == ([problem] if problem else [])

    @pytest.mark.slow
    def test_without_psycopg_3_the_extra_is_named(self) -> None:
        code = (
            "import sys; sys.modules['psycopg'] = None\n"
            "from django.conf import settings\n"
            "database = {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}\n"
            "settings.configure(DATABASES={'default': database})\n"
            "from django_fencedlock.conf import alias_problems\n"
            "backend = 'django_fencedlock.backends.postgres.PostgresBackend'\n"
            "(problem,) = alias_problems('default', {'BACKEND': backend})\n"
            "print(problem.id, problem)"
        )
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert told.stdout.startswith("E005"), told
        assert "django-fencedlock[postgres]" in told.stdout


class route_to:  # noqa: N801
    """
    A second way to the tests' database, as an alias.
    """

    def __init__(self, server: Any, database: str | None = None) -> None:
        self._server = server
        self._database = database or connections[ALIAS].settings_dict["NAME"]

    def __enter__(self) -> str:
        self.alias = f"route{next(_names)}"
        entry = self._server.django(self._database)
        connections.settings[self.alias] = connections.configure_settings(
            {"default": {}, self.alias: entry}
        )[self.alias]
        return self.alias

    def __exit__(self, *exc: object) -> None:
        connections[self.alias].close()
        del connections[self.alias]
        del connections.settings[self.alias]


_PRELUDE = """
import os, sys, threading, time
if {gevent}:
    from gevent import monkey; monkey.patch_all()
import django
from django.conf import settings
settings.configure(DATABASES={{"sessions": {database!r}, "default": {database!r}}}, USE_TZ=True,
                   INSTALLED_APPS=["django_fencedlock"])
django.setup()
from tests.test_postgres_backend import *
def say(words): print(words, flush=True)
def another(backend):
    peer = PostgresBackend(configured())
    peer._home, peer._room = Home("sessions", 5.0), Room("sessions", 5.0)
    return peer
def wait_for(condition):
    while not condition(): time.sleep(0.01)
backend = PostgresBackend(configured())
"""


class child:  # noqa: N801
    """
    Another process with a backend on the same database.
    """

    def __init__(self, code: str, *, gevent: bool = False, pool: bool = False) -> None:
        from textwrap import dedent

        settings = connections[ALIAS].settings_dict
        database = {
            key: settings[key] for key in ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
        }
        if pool:
            database["OPTIONS"] = {"pool": True}
        self._code = _PRELUDE.format(gevent=gevent, database=database) + dedent(code)

    def __enter__(self) -> "subprocess.Popen[str]":
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        return self._process

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
