"""The postgres backend on real servers: the interface's tests, and what is its own."""

import contextlib
import ctypes
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from textwrap import dedent

import pytest
from django.core.management import call_command
from django.db import connections
from django.utils import timezone

from django_fencedlock.backends.interface import SHARED, Grant, Granted, Held, Renewal, Wait
from django_fencedlock.backends.postgres import PostgresBackend, holding
from django_fencedlock.backends.postgres import backend as backend_module
from django_fencedlock.backends.postgres.holding import MAX_IDLE
from django_fencedlock.backends.postgres.sessions import Session, open_session
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core import runtime
from django_fencedlock.core.jobs import Job, NoAnswer
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.models import Fence, ForcedRelease, HeldLock
from tests.backends import POSTGRES
from tests.scripts import python
from tests.servers.process import wait_until
from tests.test_backend_interface import BackendInterface, claim, grant, take

ALIAS = "sessions"
_numbers = itertools.count()


def configured(using=ALIAS, alias="default", **options):
    terms = {"ttl": 30.0, "blocking_timeout": 10.0, "key_prefix": "", "fence_database": using}
    return AliasConfig(alias=alias, backend=POSTGRES, location="", options=options, **terms)


@pytest.fixture(scope="module")
def database(postgres, django_db_blocker):
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
def make(database, monkeypatch):
    # Otherwise sessions that hold nothing are closed, so that a test database can be dropped.
    monkeypatch.setattr(holding, "under_test", lambda: False)
    made = []

    def make(using=ALIAS, **options):
        backend = PostgresBackend(configured(using, **options))
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()
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
    return f"name:{next(_numbers)}"


@pytest.fixture
def taken(peer, name):
    return take(peer, claim(name))


def refused(backend, name, seconds=0.0, **terms):
    answer = backend.acquire(claim(name, **terms), Wait(seconds))
    return isinstance(answer, Held)


def waits(backend, name, seconds=20.0, **terms):
    sent = claim(name, **terms)
    answer = backend.acquire(sent, Wait(seconds))
    assert isinstance(answer, Granted), answer
    return grant(sent, answer)


def take_all(backend, claims):
    answer = backend.acquire_all(claims)
    assert isinstance(answer, list), answer
    return [grant(*each) for each in zip(claims, answer, strict=True)]


def anew(claims):
    """Return claims of the same locks by other owners."""
    return [claim(each.name, fenced=each.fenced) for each in claims]


def names(claims):
    return {each.name for each in claims}


def held_names(claims):
    rows = HeldLock.objects.using(ALIAS).filter(name__in=names(claims))
    return set(rows.values_list("name", flat=True))


def row_of(name):
    return HeldLock.objects.using(ALIAS).filter(name=name)


def in_database(postgres):
    return postgres.connect(connections[ALIAS].settings_dict["NAME"])


def sessions(postgres, state="true"):
    rows = postgres.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'fencedlock %%' AND "
        f"datname = '{connections[ALIAS].settings_dict['NAME']}' AND {state}"
    )
    return [pid for (pid,) in rows]


def waiting(postgres, count):
    condition = "wait_event_type = 'Lock' AND wait_event = 'advisory'"
    wait_until(lambda: len(sessions(postgres, condition)) == count, f"{count} waiting sessions")


def queued(backend, name, count):
    queues, key = backend._local._queues, backend._requests.key(name)
    wait_until(lambda: len(queues.get(key, ())) == count, f"{count} queued threads")


def idle(backend):
    return [session for session in backend._local._opened() if session.idle]


def end_sessions(backend):
    for session in backend._local._opened():
        session.close()


def terminate(postgres, taken):
    postgres.execute(f"SELECT pg_terminate_backend({taken.handle.session.pid})")


@pytest.fixture
def threads():
    with ThreadPoolExecutor(60) as pool:
        yield pool.submit


class TestStatements:
    def test_acquire_release_refusal_are_one_statement_each(self, postgres, backend, peer, name):
        backend.release(take(backend, claim(name)))
        peer.release(take(peer, claim(name)))
        with postgres.statements() as counted:
            taken = take(backend, claim(name))
            assert refused(peer, name)
            assert backend.release(taken)
        assert sum(counted.values()) == 3, counted
        assert taken.token == 3

    def test_a_lock_of_this_process_is_refused_without_asking(self, postgres, backend, name):
        take(backend, claim(name))
        with postgres.statements() as counted:
            assert refused(backend, name)
        assert not counted

    def test_an_unfenced_lock_writes_to_no_table(self, postgres, backend, name):
        with postgres.statements() as counted:
            taken = take(backend, claim(name, fenced=False))
            assert backend.verify(taken)
            assert backend.renew([taken]) == [Renewal.KEPT]
            assert backend.release(taken)
        assert not [text for text in counted if "INSERT" in text or "DELETE" in text]
        assert not Fence.objects.using(ALIAS).filter(name=name).exists()

    @pytest.mark.slow
    def test_a_thousand_locks_live_on_one_session(self, postgres, backend, name):
        taken = [take(backend, claim(f"{name}:{number}")) for number in range(1000)]
        assert len(sessions(postgres)) == 1
        with postgres.statements() as counted:
            assert set(backend.renew(taken)) == {Renewal.KEPT}
        assert sum(counted.values()) == 1
        with pytest.raises(BackendUnavailable, match=r"the 1000 that .*MAX_LOCKS"):
            backend.acquire(claim(name), Wait())

    def test_a_session_goes_on_after_its_tables_were_altered(self, backend, name):
        def alter(length):
            with connections[ALIAS].cursor() as cursor:
                cursor.execute(
                    f"ALTER TABLE django_fencedlock_heldlock ALTER host TYPE varchar({length})"
                )

        for _ in range(7):
            backend.release(take(backend, claim(name)))
        alter(120)
        try:
            assert backend.release(take(backend, claim(name)))
        finally:
            alter(100)


class TestGrants:
    def test_a_refused_try_changes_and_locks_no_row(self, postgres, backend, peer, name):
        taken = take(backend, claim(name))
        before = row_of(name).values().get()
        peer._local.ask(lambda: peer._local.session(30.0).raw.execute("BEGIN"))
        assert refused(peer, name)
        assert row_of(name).values().get() == before
        assert backend.renew([taken]) == [Renewal.KEPT]
        assert Fence.objects.using(ALIAS).get(name=name).token == 1

    @pytest.mark.parametrize("other", [{"alias": "other"}, {"backend": "redis"}])
    @pytest.mark.parametrize("seconds", [0, 20])
    def test_a_name_that_is_live_elsewhere_is_refused(self, backend, peer, name, other, seconds):
        backend.release(take(backend, claim(name)))
        take(peer, claim(name))
        row_of(name).update(**other)
        end_sessions(peer)
        wait_until(lambda: not backend.holders([name]), "the end of the session")
        held = backend.acquire(claim(name), Wait(seconds))
        row = row_of(name).get()
        assert (held.alias, held.label, held.owner) == (row.alias, row.backend, row.owner)
        assert not backend._local.by_key
        assert not backend.holders([name])
        row_of(name).update(expires_at="2020-01-01T00:00Z")
        assert take(backend, claim(name)).token == 3

    def test_a_name_that_became_live_elsewhere_during_the_wait_is_refused(
        self, postgres, backend, peer, name, threads, taken
    ):
        asked = threads(backend.acquire, claim(name), Wait(20))
        waiting(postgres, 1)
        row_of(name).update(alias="other")
        end_sessions(peer)
        held = asked.result(30)
        assert (held.alias, held.owner) == ("other", taken.owner)
        assert not backend._local.by_key

    def test_the_holder_of_an_unfenced_lock_is_shown_by_its_session(self, backend, peer, name):
        take(peer, claim(name, fenced=False))
        for held in (backend.acquire(claim(name), Wait()), backend.holders([name])[name]):
            assert f"pid {os.getpid()}" in held.identity
            assert held.session_pid

    def test_only_advisory_locks_of_this_database_count(self, postgres, backend, name, threads):
        key = backend._requests.key(name)
        low = key & 0xFFFFFFFF
        with postgres.connect() as elsewhere, in_database(postgres) as here:
            elsewhere.execute("SELECT pg_advisory_lock(%s)", [key])
            low -= (1 << 32) if low >= 1 << 31 else 0
            here.execute("SELECT pg_advisory_lock(%s, %s)", [key >> 32, low])
            assert not backend.holders([name])
            taken = take(backend, claim(name))
            waiter = threads(here.execute, "SELECT pg_advisory_lock(%s::bigint)", [key])
            wait_until(lambda: backend.holders([name])[name].waiting == 1, "a waiter")
            assert backend.release(taken)
            waiter.result(20)

    def test_a_pinned_fence_delays_a_grant_and_holds_nothing(self, postgres, backend, peer, name):
        peer.release(take(peer, claim(name)))
        with in_database(postgres) as writer:
            writer.execute("BEGIN")
            writer.execute(f"SELECT 1 FROM {Fence._meta.db_table} FOR SHARE")
            began = time.monotonic()
            assert refused(backend, name)
            assert refused(backend, name, 0.4)
            assert time.monotonic() - began < 20
            assert not backend.holders([name])
            writer.execute("ROLLBACK")
        assert take(peer, claim(name)).token == 2

    def test_a_read_only_server_is_no_grant_and_no_lock(self, backend, peer, name):
        read_only = "SELECT set_config('default_transaction_read_only', 'on', false)"
        backend._local.ask(lambda: backend._local.session(30.0).all(read_only, {}))
        with pytest.raises(BackendUnavailable, match="read-only"):
            backend.acquire(claim(name), Wait())
        assert not peer.holders([name])


@pytest.fixture
def claims(name):
    return [claim(f"{name}:{number}") for number in range(3)]


class TestSets:
    @pytest.mark.parametrize("fenced", [True, False])
    def test_a_set_is_taken_refused_and_released_by_one_statement_each(
        self, postgres, backend, peer, claims, fenced
    ):
        claims = [each._replace(fenced=fenced) for each in claims]
        for each in (backend, peer):
            each.release_all(take_all(each, claims))
        with postgres.statements() as counted:
            taken = take_all(backend, claims)
            if fenced:
                assert peer.acquire_all(anew(claims)).keys() == names(claims)
            assert backend.release_all(taken) == [True] * 3
        assert sum(counted.values()) == 2 + fenced, counted
        assert [each.token for each in taken] == [3 if fenced else None] * 3
        assert not held_names(claims)

    def test_each_lock_of_a_set_is_recorded(self, backend, claims):
        taken = take_all(backend, claims)
        assert backend.renew(taken) == [Renewal.KEPT] * 3
        for each in taken:
            row = row_of(each.name).get()
            assert (row.owner, row.token, row.pid) == (each.owner, each.token, os.getpid())
            assert row.session_key == backend._requests.key(each.name)
        assert backend.release_all([each._replace(handle=None) for each in taken]) == [True] * 3
        assert backend.release_all([]) == []

    def test_a_refusal_names_the_holder_of_each_lock_and_changes_nothing(
        self, backend, peer, claims
    ):
        peer.release_all(take_all(peer, claims))
        first = take(peer, claim(claims[0].name))
        last = take(peer, claim(claims[2].name, fenced=False))
        refused = backend.acquire_all(claims)
        assert refused[first.name].owner == first.owner
        assert f"pid {os.getpid()}" in refused[last.name].identity
        assert refused.keys() == {first.name, last.name}
        # One of this process excludes as well.
        mine = take(backend, claim(claims[1].name))
        assert backend.acquire_all(claims).keys() == {mine.name}
        assert held_names(claims) == {first.name, mine.name}
        assert len(backend._local.by_key) == 1
        peer.release_all([first, last])
        backend.release(mine)
        assert [each.token for each in take_all(peer, claims)] == [3, 3, 2]

    def test_locks_that_the_owners_had_before_go_as_well(self, backend, peer, claims):
        assert backend.release_all(take_all(backend, claims[:1])) == [True]
        take(peer, claims[2])
        take(backend, claims[0])
        assert backend.acquire_all(anew(claims[2:])).keys() == {claims[2].name}
        assert backend.acquire_all(anew(claims[:2]) + claims[2:]).keys() == {claims[0].name}
        assert backend.acquire_all(claims[:2] + anew(claims[2:])).keys() == {claims[2].name}
        assert not backend._local.by_key
        assert held_names(claims) == {claims[2].name}
        first = take(backend, claims[0])
        taken = take_all(backend, claims[:2])
        assert (taken[0].token, taken[0].handle) == (first.token, first.handle)

    @pytest.mark.parametrize("other", [{"alias": "other"}, {"backend": "redis"}])
    def test_a_name_that_is_live_elsewhere_refuses_the_set(self, backend, peer, claims, other):
        before = take(peer, claims[1])
        row_of(before.name).update(**other)
        end_sessions(peer)
        wait_until(lambda: not backend.holders([before.name]), "the end of the session")
        refused = backend.acquire_all(anew(claims))
        row = row_of(before.name).get()
        assert {name: (held.alias, held.label, held.owner) for name, held in refused.items()} == {
            before.name: (row.alias, row.backend, row.owner)
        }
        assert not backend._local.by_key
        assert not backend.holders(names(claims))
        assert held_names(claims) == {before.name}

    def test_a_pinned_fence_refuses_the_set_and_holds_nothing(
        self, postgres, backend, peer, claims
    ):
        peer.release_all(take_all(peer, claims))
        table = Fence._meta.db_table
        with in_database(postgres) as writer:
            writer.execute("BEGIN")
            writer.execute(f"SELECT 1 FROM {table} WHERE name = %s FOR SHARE", [claims[1].name])
            assert backend.acquire_all(claims) == dict.fromkeys(names(claims), Held())
            assert not backend.holders(names(claims))
            taken = take_all(backend, [claims[0], claims[2]])
            assert [each.token for each in taken] == [2, 2]

    def test_a_read_only_server_is_no_grant_and_no_lock(self, backend, peer, claims):
        read_only = "SELECT set_config('default_transaction_read_only', 'on', false)"
        backend._local.ask(lambda: backend._local.session(30.0).all(read_only, {}))
        with pytest.raises(BackendUnavailable, match="read-only"):
            backend.acquire_all(claims)
        assert not peer.holders(names(claims))

    def test_a_set_whose_caller_has_left_is_released(self, backend, claims, threads):
        go_on = threading.Event()
        send = backend._requests._send

        def slowly(*given):
            answers = send(*given)
            assert go_on.wait(20)
            return answers

        backend._requests._send = slowly
        backend._local._timeout = 0.1
        with pytest.raises(BackendUnavailable, match="no answer"):
            backend.acquire_all(claims)
        backend._local._timeout = 20
        assert backend._local.by_key
        go_on.set()
        wait_until(lambda: not backend._local.by_key, "the release")
        assert not backend.holders(names(claims))

    def test_a_lock_that_was_waited_for_is_released_with_the_others(
        self, postgres, backend, peer, claims, threads
    ):
        before = take(peer, claims[0])
        asked = threads(waits, backend, before.name)
        waiting(postgres, 1)
        peer.release(before)
        taken = [asked.result(20), *take_all(backend, claims[1:])]
        with postgres.statements() as counted:
            assert backend.release_all(taken) == [True] * 3
        assert sum(counted.values()) == 2
        assert len(idle(backend)) == 1

    def test_a_session_that_fails_keeps_no_locks_of_others(
        self, postgres, backend, peer, claims, threads, name
    ):
        taken = take_all(backend, claims)
        other = take(backend, claim(name, fenced=False))
        drop = f"SELECT 1 FROM {HeldLock._meta.db_table} FOR UPDATE"
        with in_database(postgres) as writer:
            writer.execute("BEGIN")
            writer.execute(drop)
            # The rows stay, and the keys are free.
            assert backend.release_all([*taken, other]) == [True] * 4
        assert not backend.holders([*names(claims), name])
        taken = [*take_all(backend, claims), take(backend, claim(name, ttl=7))]
        terminate(postgres, taken[0])
        assert backend.release_all(taken) == [False] * 3 + [True]

    def test_a_set_counts_as_many_locks(self, make, claims):
        backend = make(MAX_LOCKS=2)
        with pytest.raises(BackendUnavailable, match=r"the 2 that .*MAX_LOCKS"):
            backend.acquire_all(claims)
        assert take_all(backend, claims[1:])

    @pytest.mark.slow
    def test_two_processes_with_sets_that_overlap_never_hold_a_name_both(self, make, name, threads):
        wanted = [f"{name}:{number}" for number in range(8)]
        inside, overlaps, count = Counter(), [], Counter()

        def work(backend, seed):
            draw = random.Random(seed)
            while count[seed] < 100:
                mine = sorted(draw.sample(wanted, 3))
                sent = [claim(each) for each in mine]
                answer = backend.acquire_all(sent)
                if isinstance(answer, dict):
                    assert answer
                    continue
                for each in mine:
                    inside[each] += 1
                    overlaps.extend([each] * (inside[each] != 1))
                count[seed] += 1
                for each in mine:
                    inside[each] -= 1
                grants = [grant(*each) for each in zip(sent, answer, strict=True)]
                assert backend.release_all(grants) == [True] * 3

        backends = [make(), make()]
        runs = [threads(work, backends[seed % 2], seed) for seed in range(6)]
        for run in runs:
            run.result(120)
        assert not overlaps
        assert not backends[0].holders(wanted)


def reader(name, **terms):
    return claim(name, **terms)._replace(shared=True)


def fence_of(name):
    return Fence.objects.using(ALIAS).values_list("token", "owner").get(name=name)


class TestReaders:
    def test_readers_share_a_lock_and_exclude_a_writer(self, postgres, backend, peer, name):
        backend.release(take(backend, claim(name)))
        with postgres.statements() as counted:
            taken = [take(each, reader(name)) for each in (backend, backend, peer)]
        # One each, and two to open a session.
        assert sum("advisory_lock_shared" in text for text in counted.elements()) == 3, counted
        assert [each.token for each in taken] == [2, 2, 2]
        assert fence_of(name) == (2, SHARED)
        readers = {each.owner for each in taken}
        for each in (backend, peer):
            held = each.acquire(claim(name), Wait())
            assert held.owner in readers
            assert held.shared
        for each in taken:
            assert isinstance(backend.acquire(claim(name), Wait()), Held)
            assert isinstance(peer.acquire(claim(name), Wait()), Held)
            assert (peer if each is taken[2] else backend).release(each)
        assert take(peer, claim(name)).token == 3
        held = backend.acquire(reader(name), Wait())
        assert isinstance(held, Held)
        assert not held.shared

    def test_each_reader_has_a_row_and_is_renewed_by_itself(self, backend, peer, name):
        taken = [take(each, reader(name)) for each in (backend, backend, peer)]
        assert set(row_of(name).values_list("owner", flat=True)) == {each.owner for each in taken}
        assert backend.renew(taken[:2]) == [Renewal.KEPT] * 2
        row_of(name).filter(owner=taken[0].owner).delete()
        assert backend.renew(taken[:2]) == [Renewal.LOST, Renewal.KEPT]
        assert backend.verify(taken[1])
        assert peer.renew([taken[2]]) == [Renewal.KEPT]

    def test_a_reader_that_is_released_by_force_leaves_the_others(self, backend, peer, name):
        first, second = take(backend, reader(name)), take(backend, reader(name))
        notes = ForcedRelease.objects.using(ALIAS)
        notes.create(owner=first.owner, name=name, released_by="me", released_at=timezone.now())
        assert backend.renew([first, second]) == [Renewal.LOST, Renewal.KEPT]
        assert isinstance(peer.acquire(claim(name), Wait()), Held)
        assert backend.release(second)
        assert take(peer, claim(name))

    def test_a_look_up_shows_all_readers(self, backend, peer, name):
        taken = [take(each, reader(name)) for each in (backend, backend, peer)]
        held = peer.holders([name])[name]
        assert held.owner == taken[0].owner
        assert {each.owner for each in (held, *held.others)} == {each.owner for each in taken}
        assert {(each.shared, each.token) for each in (held, *held.others)} == {(True, 1)}

    @pytest.mark.parametrize("shared", [True, False])
    def test_a_reader_elsewhere_refuses_a_claim(self, backend, peer, name, shared):
        first = take(peer, reader(name))
        row_of(name).update(alias="other")
        end_sessions(peer)
        wait_until(lambda: not backend.holders([name]), "the end of the session")
        refused = claim(name)._replace(shared=shared)
        held = backend.acquire(refused, Wait())
        assert (held.alias, held.owner) == ("other", first.owner)
        if not shared:
            assert backend.acquire_all([claim(f"{name}-"), refused])[name].alias == "other"
        assert not backend._local.by_key
        assert not backend.holders([name])

    def test_a_writer_elsewhere_refuses_a_reader(self, backend, peer, name):
        first = take(peer, claim(name))
        row_of(name).update(alias="other")
        end_sessions(peer)
        wait_until(lambda: not backend.holders([name]), "the end of the session")
        held = backend.acquire(reader(name), Wait())
        assert (held.alias, held.owner) == ("other", first.owner)
        assert not backend.holders([name])
        assert fence_of(name) == (1, first.owner)

    def test_the_rows_of_dead_readers_stop_no_writer(self, backend, peer, make, name):
        former = [take(peer, reader(name)) for _ in range(3)]
        end_sessions(peer)
        wait_until(lambda: not backend.holders([name]), "the end of the session")
        writer = take(backend, claim(name))
        held = make().acquire(claim(name), Wait())
        assert held.owner == writer.owner
        assert peer.renew(former) == [Renewal.LOST] * 3

    def test_the_first_reader_of_a_new_name_raises_its_fence(self, backend, name):
        assert take(backend, reader(name)).token == 1
        assert take(backend, reader(name)).token == 1

    def test_a_reader_after_a_forced_release_raises_the_fence(self, backend, peer, name):
        take(backend, reader(name))
        Fence.objects.using(ALIAS).filter(name=name).update(token=7, owner="")
        assert take(backend, reader(name)).token == 8
        assert take(peer, reader(name)).token == 8

    def test_a_reader_does_not_wait_for_the_transaction_of_another(
        self, postgres, backend, peer, name
    ):
        take(backend, reader(name))
        with in_database(postgres) as pin:
            pin.execute("BEGIN")
            pin.execute(f"SELECT 1 FROM {Fence._meta.db_table} FOR SHARE")
            assert take(peer, reader(name)).token == 1
            assert take(backend, reader(name)).token == 1

    def test_a_pinned_fence_of_a_writer_delays_the_first_reader_and_holds_nothing(
        self, postgres, backend, peer, name
    ):
        peer.release(take(peer, claim(name)))
        with in_database(postgres) as writer:
            writer.execute("BEGIN")
            writer.execute(f"SELECT 1 FROM {Fence._meta.db_table} FOR SHARE")
            assert backend.acquire(reader(name), Wait()) == Held()
            assert backend.acquire(reader(name), Wait(0.4)) == Held()
            assert not backend.holders([name])
            writer.execute("ROLLBACK")
        assert take(backend, reader(name)).token == 2

    @pytest.mark.parametrize("fenced", [True, False])
    def test_a_waiting_writer_stops_new_readers_of_all_processes(
        self, postgres, backend, peer, make, name, threads, fenced
    ):
        first = take(backend, reader(name, fenced=fenced))
        asked = threads(waits, peer, name, fenced=fenced)
        waiting(postgres, 1)
        for each in (backend, peer, make()):
            assert isinstance(each.acquire(reader(name, fenced=fenced), Wait()), Held)
        late = threads(backend.acquire, reader(name, fenced=fenced), Wait(20))
        waiting(postgres, 2)
        assert backend.release(first)
        writer = asked.result(20)
        assert not late.done()
        assert peer.release(writer)
        assert isinstance(late.result(20), Granted)
        if fenced:
            assert (writer.token, late.result().token) == (2, 3)

    def test_readers_that_waited_read_the_fence_of_the_writer_before_them(
        self, postgres, backend, peer, make, name, threads
    ):
        # Their snapshots are of the time when readers had the fence.
        first, second, third = take(peer, reader(name)), make(), make()
        writer = threads(waits, backend, name)
        waiting(postgres, 1)
        late = []
        for each in (second, third):
            late.append(threads(each.acquire, reader(name), Wait(20)))
            waiting(postgres, 1 + len(late))
        peer.release(first)
        writer = writer.result(20)
        assert writer.token == 2
        backend.release(writer)
        assert [each.result(20).token for each in late] == [3, 3]
        assert fence_of(name) == (3, SHARED)

    def test_readers_of_one_process_wait_on_one_session(
        self, postgres, backend, peer, name, threads
    ):
        writer = take(peer, claim(name))
        asked = [threads(backend.acquire, reader(name), Wait(20)) for _ in range(20)]
        queued(backend, name, 20)
        waiting(postgres, 1)
        peer.release(writer)
        assert {each.result(20).token for each in asked} == {2}
        # The one that waited, and the shared one.
        held = backend._local.by_key[backend._requests.key(name)]
        assert len(held) == 20
        assert len({hold.session for hold in held.values()}) == 2
        for each in asked:
            hold = each.result().handle
            assert backend.release(grant(hold.claim, each.result()))
        assert not backend.holders([name])

    def test_a_writer_that_polls_stops_new_readers_of_its_process(
        self, postgres, make, peer, name, threads
    ):
        backend = make(MAX_WAITERS=1)
        busy = take(peer, claim(f"{name}:other"))
        other = threads(backend.acquire, claim(f"{name}:other"), Wait(20))
        waiting(postgres, 1)
        first = take(backend, reader(name))
        writer = threads(waits, backend, name)
        queued(backend, name, 1)
        held = backend.acquire(reader(name), Wait())
        assert (held.owner, held.shared) == (first.owner, True)
        backend.release(first)
        assert writer.result(20).token == 2
        assert not other.done()
        peer.release(busy)
        other.result(20)

    def test_an_error_of_one_reader_leaves_the_others_their_lock(
        self, postgres, backend, peer, name
    ):
        first = take(backend, reader(name))
        read_only = "SELECT set_config('default_transaction_read_only', %(value)s, false)"
        session = first.handle.session
        backend._local.ask(lambda: session.all(read_only, {"value": "on"}))
        with pytest.raises(BackendUnavailable, match="read-only"):
            backend.acquire(reader(name), Wait())
        backend._local.ask(lambda: session.all(read_only, {"value": "off"}))
        assert backend.verify(first)
        second = take(backend, reader(name))
        assert backend.release(second)
        assert isinstance(peer.acquire(claim(name), Wait()), Held)
        assert backend.release(first)
        assert take(peer, claim(name))

    def test_a_failed_first_reader_leaves_no_lock(self, backend, peer, name):
        read_only = "SELECT set_config('default_transaction_read_only', 'on', false)"
        backend._local.ask(lambda: backend._local.session(30.0).all(read_only, {}))
        with pytest.raises(BackendUnavailable, match="read-only"):
            backend.acquire(reader(name), Wait())
        assert not peer.holders([name])

    @pytest.mark.slow
    def test_a_stream_of_readers_does_not_starve_writers(self, make, name, threads):
        ended = threading.Event()
        reading, writing, overlaps = set(), set(), []

        def read(backend):
            count = 0
            while not ended.is_set():
                sent = reader(name)
                answer = backend.acquire(sent, Wait(20))
                reading.add(sent.owner)
                overlaps.extend(writing)
                reading.discard(sent.owner)
                assert backend.release(grant(sent, answer))
                count += 1
            return count

        def write(backend):
            tokens = []
            for _ in range(20):
                taken = waits(backend, name)
                overlaps.extend(writing)
                writing.add(taken.owner)
                overlaps.extend(reading)
                writing.discard(taken.owner)
                tokens.append(taken.token)
                assert backend.release(taken)
            return tokens

        backends = [make(), make(), make()]
        readers = [threads(read, each) for each in backends for _ in range(4)]
        writers = [threads(write, each) for each in backends[:2]]
        tokens = [token for each in writers for token in each.result(120)]
        ended.set()
        assert sum(each.result(30) for each in readers) > 40
        assert not overlaps
        assert len(set(tokens)) == 40
        assert not backends[0].holders([name])


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

    def test_a_locked_row_is_skipped(self, postgres, backend, peer, name):
        taken, other = take(backend, claim(name)), take(backend, claim(f"{name}:other"))
        with in_database(postgres) as contender:
            contender.execute("BEGIN")
            contender.execute(
                f"SELECT 1 FROM {HeldLock._meta.db_table} WHERE name = %s FOR UPDATE", [name]
            )
            assert backend.renew([taken, other]) == [Renewal.UNKNOWN, Renewal.KEPT]
            assert backend.release(taken)
            assert not peer.holders([name])
            contender.execute("ROLLBACK")
        assert backend.renew([other]) == [Renewal.KEPT]

    @pytest.mark.parametrize("by_force", [True, False])
    @pytest.mark.parametrize("fenced", [True, False])
    def test_a_key_that_another_session_has_or_that_was_released_by_force_is_lost(
        self, backend, peer, name, fenced, by_force
    ):
        taken, key = take(backend, claim(name, fenced=fenced)), backend._requests.key(name)
        assert backend.renew([taken]) == [Renewal.KEPT]
        if by_force:
            facts = {"owner": taken.owner, "name": name, "released_by": "x"}
            ForcedRelease.objects.using(ALIAS).create(released_at=timezone.now(), **facts)
        else:
            backend._local.ask(lambda: taken.handle.session.unlock([key]))
            take(peer, claim(name, fenced=False))
        assert not backend.verify(taken)
        assert backend.renew([taken]) == [Renewal.LOST]
        assert not by_force or take(peer, claim(name))

    def test_no_lock_means_no_idle_limit(self, backend, name):
        def limits():
            show = "SHOW idle_session_timeout"
            asked = [partial(backend._local.session(ttl).one, show, {}) for ttl in (20, 30)]
            return [backend._local.ask(each)[0] for each in asked]

        short, long = (
            take(backend, claim(f"{name}:{ttl}", ttl=ttl, fenced=ttl > 20)) for ttl in (20, 30)
        )
        assert limits() == ["20s", "30s"]
        assert backend.release(long)
        assert backend.renew([short]) == [Renewal.KEPT]
        assert limits() == ["20s", "0"]
        assert backend.release(short)
        assert limits() == ["0", "0"]

    def test_few_sessions_without_locks_are_kept(self, postgres, backend, name):
        for ttl in range(20, 28):
            assert backend.release(take(backend, claim(name, ttl=ttl)))
        assert len(backend._local._shared) == MAX_IDLE + 1


class TestWaiting:
    def test_threads_of_one_process_get_the_lock_in_order(self, backend, peer, name, threads):
        taken, order = take(peer, claim(name)), []

        def work(number):
            mine = waits(backend, name)
            order.append(number)
            backend.release(mine)

        asked = []
        for number in range(6):
            asked.append(threads(work, number))
            queued(backend, name, number + 1)
        peer.release(taken)
        for each in asked:
            each.result()
        assert order == list(range(6))

    @pytest.mark.slow
    def test_fifty_threads_wait_on_one_session(self, postgres, backend, peer, name, threads):
        take(peer, claim(name))
        asked = [threads(refused, backend, name, 2) for _ in range(50)]
        queued(backend, name, 50)
        waiting(postgres, 1)
        # The peer's session, the one that tried, and the one that waits.
        assert len(sessions(postgres)) == 3
        assert all(each.result() for each in asked)

    def test_beyond_the_cap_a_process_polls(self, postgres, make, name, threads):
        backend, peer = make(MAX_WAITERS=1), make()
        held = [take(peer, claim(f"{name}:{number}")) for number in range(2)]
        first = threads(waits, backend, held[0].name)
        waiting(postgres, 1)
        second = threads(waits, backend, held[1].name)
        peer.release(held[1])
        assert second.result()
        waiting(postgres, 1)
        peer.release(held[0])
        assert first.result()

    def test_a_wait_that_times_out_leaves_nothing(self, postgres, backend, peer, name, taken):
        began = time.monotonic()
        assert refused(backend, name, 0.3)
        assert 0.3 <= time.monotonic() - began < 20
        # If the time is up before a session is open, there is none yet.
        wait_until(lambda: refused(backend, name, 0.3) and idle(backend), "a session")
        peer.release(taken)
        assert not peer.holders([name])
        assert len(idle(backend)) == 1

    def test_short_waits_one_after_the_other_use_one_session(
        self, postgres, backend, peer, name, taken
    ):
        other = take(peer, claim(f"{name}:other"))
        assert refused(backend, name, 0.1)
        before = sorted(sessions(postgres))
        for each in (other.name, name, other.name):
            assert refused(backend, each, 0.1)
        assert sorted(sessions(postgres)) == before

    @pytest.mark.parametrize("fenced", [True, False])
    def test_a_lease_counts_from_before_the_wait(
        self, postgres, backend, peer, name, threads, fenced
    ):
        taken, before = take(peer, claim(name)), clock()
        asked = threads(waits, backend, name, fenced=fenced)
        waiting(postgres, 1)
        released = clock()
        peer.release(taken)
        mine = asked.result()
        assert before <= mine.handle.granted.since < released
        assert backend.verify(mine)
        assert backend.renew([mine]) == [Renewal.KEPT]
        assert backend.release(mine)

    def test_a_waiter_that_is_interrupted_leaves_the_queue(self, postgres, peer, name, taken):
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
            waiting(postgres, 0)
            peer.release(taken)
            assert take(peer, claim(name)).token == 2


class TestLosses:
    def test_the_end_of_a_session_loses_its_locks(self, postgres, backend, peer, name, threads):
        held = [take(backend, claim(f"{name}:{number}")) for number in range(3)]
        taken = take(peer, claim(name))
        asked = threads(waits, backend, name)
        waiting(postgres, 1)
        peer.release(taken)
        waited = asked.result()
        terminate(postgres, held[0])
        assert backend.renew([*held, waited]) == [Renewal.LOST] * 3 + [Renewal.KEPT]
        assert not backend.verify(held[0])
        assert not backend.release(held[0])
        terminate(postgres, waited)
        assert not backend.verify(waited)

    def test_a_session_that_ended_idle_is_replaced_at_the_next_lock(self, postgres, backend, name):
        first = take(backend, claim(name))
        terminate(postgres, first)
        wait_until(lambda: not sessions(postgres), "the end of the session")
        assert take(backend, claim(f"{name}:other"))
        assert not backend.verify(first)
        assert take(backend, claim(name)).token == 2

    def test_a_waiters_idle_session_is_used_again_unless_it_ended(
        self, postgres, backend, peer, name
    ):
        def wait():
            # If the time is up before a session is open, there is none yet.
            wait_until(lambda: refused(backend, name, 0.3) and idle(backend), "a session")
            (session,) = idle(backend)
            return session

        take(peer, claim(name))
        first = wait()
        assert wait() is first
        postgres.execute(f"SELECT pg_terminate_backend({first.pid})")
        wait_until(lambda: first.pid not in sessions(postgres), "the end of the session")
        assert wait() is not first
        assert first.closed

    def test_a_restart_loses_all_but_the_next_token(self, make_postgres, make_alias, make, name):
        server = make_postgres()
        backend = make(make_alias(server.django()), TIMEOUT=10)
        taken = take(backend, claim(name))
        server.kill()
        assert backend.renew([taken]) == [Renewal.LOST]
        with pytest.raises(BackendUnavailable):
            backend.acquire(claim(name), Wait())
        server.start()
        assert take(backend, claim(name)).token == 2

    def test_a_server_that_hangs_is_reported_in_time(self, make_postgres, make_alias, make, name):
        server = make_postgres()
        backend = make(make_alias(server.django()), TIMEOUT=1)
        taken = take(backend, claim(name))
        server.pause()
        began = time.monotonic()
        with pytest.raises(BackendUnavailable, match="no answer within 1 s"):
            backend.acquire(claim(f"{name}:other"), Wait())
        with pytest.raises(BackendUnavailable):
            backend.renew([taken])
        with pytest.raises(BackendUnavailable):
            backend.acquire(claim(f"{name}:third"), Wait(0.1))
        assert time.monotonic() - began < 20
        server.resume()

        def is_kept():
            with contextlib.suppress(BackendUnavailable):
                return backend.renew([taken]) == [Renewal.KEPT]

        wait_until(is_kept, "an answer")
        assert set(backend.holders([name, f"{name}:other", f"{name}:third"])) == {name}
        rows = HeldLock.objects.using(backend._route).values_list("name", flat=True)
        assert list(rows) == [name]

    def test_a_full_lock_table_leaves_nothing_held(self, make_postgres, make_alias, make, name):
        server = make_postgres(
            max_connections="10",
            max_locks_per_transaction="10",
            max_wal_senders="0",
            max_worker_processes="1",
        )
        backend = make(make_alias(server.django()), MAX_LOCKS=100_000)
        assert [problem.id for problem in backend.check()] == ["W001"]
        held = []

        def fill():
            while True:
                held.append(take(backend, claim(f"{name}:{len(held)}", fenced=False)))

        with pytest.raises(BackendUnavailable, match="max_locks_per_transaction"):
            fill()
        with pytest.raises(BackendUnavailable, match="max_locks_per_transaction"):
            backend.acquire_all([claim(f"{name}:{each}", fenced=False) for each in "abcdefghij"])
        assert len(backend._local.by_key) == len(held)
        assert backend.release(held.pop())
        assert backend.release(held.pop())
        count = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        assert backend._local.ask(lambda: backend._local.session(30.0).one(count, {})) == (
            len(held),
        )


@pytest.mark.slow
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

    def test_a_paused_waiter_delays_others_for_its_ttl(self, postgres, backend, peer, name, taken):
        with child(f"waits(backend, {name!r}, ttl=1.0)") as process:
            waiting(postgres, 1)
            os.kill(process.pid, signal.SIGSTOP)
            peer.release(taken)
            assert waits(backend, name).token == 3


@pytest.mark.slow
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

    def test_the_row_of_a_holder_without_a_session_is_cleared(
        self, postgres, backend, peer, name, taken
    ):
        terminate(postgres, taken)
        wait_until(lambda: not backend.holders([name]), "the end of the session")
        assert backend.release(Grant(name, taken.owner))
        assert not row_of(name).exists()

    def test_greenlets_share_a_session_and_killed_ones_hold_no_lock(self, postgres, backend, name):
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
            for turn in range(300):
                sent = claim({name + ":killed"!r})
                killed = gevent.spawn(backend.acquire, sent, Wait(5))
                gevent.sleep(random.choice([0, 0, 0.0002, 0.001]))
                killed.kill()
                backend.release(Grant(sent.name, sent.owner))
            while len(backend._local.by_key) > 1: gevent.sleep(0.01)
            assert backend.verify(kept)
            backend.release(take(backend, claim({name + ":killed"!r})))
            say("done")
            sys.stdin.read()
        """
        with child(code, gevent=True) as process:
            assert said(process) == "done"
            waiting(postgres, 0)


class TestInterrupts:
    def test_a_late_one_cancels_no_later_wait(self, backend, peer, name, threads, monkeypatch):
        take(peer, claim(name))
        take(peer, claim(f"{name}:other"))
        given_back, go_on = threading.Event(), threading.Event()
        give_back = backend._local.give_back

        def slowly(session, **how):
            give_back(session, **how)
            if not given_back.is_set():
                given_back.set()
                go_on.wait(20)

        monkeypatch.setattr(backend._local, "give_back", slowly)
        first = Wait(2.0)
        waiter = threads(backend.acquire, claim(name), first)
        assert given_back.wait(20)
        # Its time is up, and its session is free; the thread hasn't said so yet.
        following = threads(refused, backend, f"{name}:other", 1.0)
        first.cancel()
        assert following.result(20)
        go_on.set()
        assert isinstance(waiter.result(20), Held)

    def test_one_that_is_sent_after_the_grant_cancels_no_later_wait(
        self, postgres, backend, peer, name, threads, monkeypatch, taken
    ):
        take(peer, claim(f"{name}:other"))
        begun, go_on, cancel = threading.Event(), threading.Event(), Session.cancel

        def late(session):
            begun.set()
            go_on.wait(20)
            cancel(session)

        monkeypatch.setattr(Session, "cancel", late)
        first = Wait(20.0)
        waiter = threads(backend.acquire, claim(name), first)
        waiting(postgres, 1)
        first.cancel()
        assert begun.wait(20)
        assert peer.release(taken)
        assert isinstance(waiter.result(20), Held)
        wait_until(lambda: not peer.holders([name]), "the release")
        following = threads(refused, backend, f"{name}:other", 3.0)
        waiting(postgres, 1)
        go_on.set()
        assert following.result(20)

    def test_the_late_end_of_a_cancelled_wait_releases_no_later_grant(
        self, backend, peer, name, threads, monkeypatch
    ):
        sent, wait, waited, go_on = claim(name), Wait(20), threading.Event(), threading.Event()
        ended = threading.Event()
        run = Job.run

        def take_waiter(most):
            waited.set()
            go_on.wait(20)

        def run_and_tell(job):
            run(job)
            if waited.is_set():
                ended.set()

        monkeypatch.setattr(backend_module, "LEAVES_WITHIN", 0.0)
        monkeypatch.setattr(backend._local, "take_waiter", take_waiter)
        monkeypatch.setattr(Job, "run", run_and_tell)
        other = take(peer, claim(name))
        asked = threads(backend.acquire, sent, wait)
        assert waited.wait(20)
        wait.cancel()
        assert isinstance(asked.result(20), Held)
        peer.release(other)
        mine = take(backend, sent)
        ended.clear()
        go_on.set()
        assert ended.wait(20)
        assert backend.verify(mine)

    def test_a_release_follows_the_claim_of_an_interrupted_caller(self, backend, name, threads):
        sent, go_on = claim(name), threading.Event()
        backend._local.submit(lambda: go_on.wait(20))
        claims = partial(backend._requests.acquire, sent, backend._requests.key(name))
        backend._local.submit(claims, first=False)
        released = threads(backend.release, Grant(name, sent.owner))
        wait_until(lambda: len(backend._local._jobs) == 2, "the release")
        go_on.set()
        assert released.result(20)
        assert not backend.holders([name])


class TestTurns:
    """The queue of the threads of one process."""

    @pytest.mark.parametrize("method", ["append", "remove"])
    def test_an_interrupted_thread_keeps_no_place(self, make, method):
        locks = make()._local
        locks._queues[1] = queue = deque_that_is_interrupted(method)
        with contextlib.suppress(Interrupt), locks.turn(1, Wait(5), lambda: None):
            pass
        assert queue.interrupted
        with locks.turn(1, Wait(20), lambda: None) as is_first:
            assert is_first

    def test_interrupted_threads_lose_no_other_lock(self, postgres, peer, name):
        taken = take(peer, claim(f"{name}:waited"))
        with child(f"say(interrupt_threads(backend, {name!r})); sys.stdin.read()") as process:
            assert said(process) == "[<Renewal.KEPT: 'the service renewed it'>] True False"
            waiting(postgres, 0)
            names = [f"{name}:{number}" for number in range(3)]
            wait_until(lambda: not peer.holders(names), "the releases")
            assert peer.verify(taken)
            assert refused(peer, f"{name}:kept")


class TestJobs:
    @pytest.mark.parametrize("can_be_undone", [True, False])
    def test_work_whose_caller_has_left_is_skipped_if_it_can_be_undone(self, can_be_undone):
        done = []
        undo = [lambda answer: done.append("undo")] if can_be_undone else []
        job = Job(lambda job: done.append("work"), *undo)
        with pytest.raises(NoAnswer):
            job.answer(0.0)
        job.run()
        assert done == ([] if can_be_undone else ["work"])

    def test_work_whose_caller_leaves_meanwhile_is_undone(self):
        done = []

        def work(job):
            with pytest.raises(NoAnswer):
                job.answer(0.0)
            done.append("work")

        Job(work, lambda answer: done.append("undo")).run()
        assert done == ["work", "undo"]

    def test_work_is_done_once(self):
        done = []
        job = Job(lambda job: done.append("work"))
        job.run()
        job.run()
        assert done == ["work"]

    def test_a_deadline_that_passed_during_a_pause(self):
        job = Job(lambda job: "answer")
        with pytest.raises(NoAnswer):
            job.answer(-3.5)
        job.run()
        assert job.answer(-3.5) == "answer"


@pytest.mark.usefixtures("database")
class TestSessions:
    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("idle_session_timeout", "0"),
            ("idle_in_transaction_session_timeout", "0"),
            ("statement_timeout", "0"),
            ("lock_timeout", "250ms"),
            ("synchronous_commit", "on"),
            ("default_transaction_isolation", "read committed"),
        ],
    )
    def test_settings_of_a_database_are_overridden(self, setting, value):
        found = connections[ALIAS].settings_dict["NAME"]
        unlike = {"0": "'1h'", "250ms": "'1h'", "on": "off"}.get(value, "'repeatable read'")
        with connections[ALIAS].cursor() as cursor:
            cursor.execute(f'ALTER DATABASE "{found}" SET {setting} = {unlike}')
        try:
            with contextlib.closing(open_session(ALIAS, 5.0, 30.0)) as session:
                assert session.one(f"SHOW {setting}", {}, prepare=False) == (value,)
        finally:
            with connections[ALIAS].cursor() as cursor:
                cursor.execute(f'ALTER DATABASE "{found}" RESET {setting}')

    @pytest.mark.parametrize("ttl", [None, 30.0, 1e10])
    def test_a_dead_peer_is_given_up(self, ttl):
        names = ("tcp_user_timeout", "tcp_keepalives_idle", "tcp_keepalives_count")
        shown = ", ".join(f"current_setting('{each}')" for each in names)
        with contextlib.closing(open_session(ALIAS, 5.0, ttl)) as session:
            address, *limits = session.one(f"SELECT inet_client_addr(), {shown}", {}, prepare=False)
            parameters = session.raw.info.get_parameters()
        assert (parameters["keepalives_idle"], parameters["keepalives_count"]) == ("5", "3")
        if address is None:
            pytest.skip("a socket of the system has no cable")
        assert all(int(each.removesuffix("ms").removesuffix("s")) > 0 for each in limits)

    def test_a_closed_backend_keeps_its_locks(self, backend, peer, name):
        taken = take(backend, claim(name))
        session = taken.handle.session
        backend.close()
        assert backend.verify(taken)
        assert refused(peer, name)
        assert backend.release(taken)
        backend.close()
        assert session.closed

    def test_at_the_interpreters_exit_it_waits_for_no_thread(self, make, name, monkeypatch):
        monkeypatch.setattr(runtime, "IDLE_SECONDS", 0.01)
        backend = make(TIMEOUT=2)
        taken = take(backend, claim(name))
        assert backend.release(taken)
        worker = backend._local._worker
        wait_until(lambda: worker.thread() is None, "the end of the idle thread")

        def refuse(target):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        monkeypatch.setattr(worker, "_start", refuse)
        backend.close()
        assert taken.handle.session.closed

    def test_djangos_pool_is_not_used(self, name):
        code = f"""
            taken = take(backend, claim({name!r}))
            say(type(taken.handle.session.wrapper.settings_dict["OPTIONS"].get("pool")).__name__)
        """
        with child(code, pool=True) as process:
            assert said(process) == "NoneType"


class TestChecks:
    def test_a_transaction_pooler_is_refused(self, postgres, make_pgbouncer, make, name):
        bouncer = make_pgbouncer(postgres, pool_mode="transaction")
        with route_to(bouncer) as route:
            backend = make(DATABASE=route)
            assert [problem.id for problem in backend.check()] == ["E011"]
            with pytest.raises(BackendUnavailable, match="pooler"):
                backend.acquire(claim(name), Wait())

    def test_a_pooler_that_changes_the_session_is_no_grant(self, backend, name):
        taken = take(backend, claim(f"{name}:first"))
        taken.handle.session.pid += 1
        with pytest.raises(BackendUnavailable, match="PoolsTransactions"):
            backend.acquire(claim(name), Wait())
        assert taken.handle.session.closed

    def test_a_session_pooler_is_accepted(self, postgres, make_pgbouncer, make, name):
        bouncer = make_pgbouncer(postgres, pool_mode="session", pool_size=10)
        with route_to(bouncer) as route:
            backend = make(DATABASE=route)
            assert not list(backend.check())
            assert backend.release(take(backend, claim(name)))

    def test_a_route_to_another_database_or_to_no_server_is_a_problem(self, postgres, make):
        with route_to(postgres, "postgres") as route:
            (problem,) = make(DATABASE=route).check()
            assert problem.id == "E008"
            connections.settings[route]["PORT"] = "1"
            (problem,) = make(DATABASE=route, TIMEOUT=1).check()
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
    def test_settings_are_checked(self, database, settings, problem):
        config = replace(configured(), **settings)
        found = [each.id for each in PostgresBackend.problems(config)]
        assert found == ([problem] if problem else [])


@contextlib.contextmanager
def route_to(server, database=None):
    alias = f"route{next(_numbers)}"
    entry = server.django(database or connections[ALIAS].settings_dict["NAME"])
    configured = connections.configure_settings({"default": {}, alias: entry})
    connections.settings[alias] = configured[alias]
    yield alias
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]


class Interrupt(BaseException):
    pass


def deque_that_is_interrupted(method):
    """Return a queue one of whose calls a signal interrupts: after an append, before a remove."""

    class Queue(deque):
        interrupted = False

        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name != method or self.interrupted:
                return found
            self.interrupted = True

            def call(*args):
                if method == "append":
                    found(*args)
                raise Interrupt

            return call

    return Queue()


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
            backend.release(Grant(sent.name, sent.owner))

    def release_rest():
        for hold in [
            each for holds in [*backend._local.by_key.values()] for each in holds.values()
        ]:
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
    return f"{[*renewals]} {backend.verify(kept)} {backend._local._mutex.locked()}"


_PRELUDE = """
import os, sys, time
if {gevent}:
    from gevent import monkey; monkey.patch_all()
import django
from django.conf import settings
settings.configure(DATABASES={{"sessions": {database!r}, "default": {database!r}}}, USE_TZ=True,
                   INSTALLED_APPS=["django_fencedlock"])
django.setup()
from {tests} import *
def say(words): print(words, flush=True)
def another():
    return PostgresBackend(configured())
backend = PostgresBackend(configured())
"""


@contextlib.contextmanager
def child(code, *, gevent=False, pool=False):
    settings = connections[ALIAS].settings_dict
    keys = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
    database = {key: settings[key] for key in keys}
    if pool:
        database["OPTIONS"] = {"pool": True}
    prelude = _PRELUDE.format(gevent=gevent, database=database, tests=__name__)
    with python(code=prelude + dedent(code)) as process:
        yield process


def said(process):
    return process.stdout.readline().strip()
