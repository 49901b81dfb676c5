"""Readers and writers of the database backend: rows, tokens, and that they never overlap."""

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import Error, connections, transaction

from django_fencedlock import conf
from django_fencedlock.backends.database import DatabaseBackend
from django_fencedlock.backends.interface import (
    SHARED,
    Claim,
    Grant,
    Granted,
    Held,
    Renewal,
    Wait,
    grant_of,
)
from django_fencedlock.core.identity import new_owner
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.storage import connections as sessions
from django_fencedlock.storage import postgresql, readers
from django_fencedlock.storage.connections import private
from django_fencedlock.storage.dialect import Entry
from django_fencedlock.storage.records import rows_of
from django_fencedlock.storage.unfenced import KEPT, ExpiredRows
from django_fencedlock.storage.vendors import LEDGERS
from tests.servers.process import wait_until
from tests.test_ledgers import on, own

NAME = "catalog"
on_postgres = pytest.mark.parametrize("connection", [on("postgres")], indirect=True)


@pytest.fixture(params=[on("default"), on("postgres"), on("mariadb")])
def connection(request):
    return connections[request.param]


@pytest.fixture
def ledger(connection):
    return LEDGERS[connection.vendor]


@pytest.fixture
def config(connection):
    return replace(conf.config("default"), fence_database=connection.alias)


@pytest.fixture
def backend(config):
    with contextlib.closing(DatabaseBackend(config)) as backend:
        yield backend


def claim(shared=True, ttl=30.0, **facts):
    owner = new_owner()
    return Claim(NAME, new_owner().id, ttl, owner.identity, shared=shared, **facts)


def entry(shared=True, ttl=30.0, fenced=True):
    owner = new_owner()
    return Entry(NAME, "default", "database", owner, ttl, fenced=fenced, shared=shared)


def take(backend, sent, wait=None):
    answer = backend.acquire(sent, wait or Wait())
    assert isinstance(answer, Granted), answer
    return grant_of(sent, answer)


def refused(backend, sent, wait=None):
    answer = backend.acquire(sent, wait or Wait())
    assert isinstance(answer, Held), answer
    return answer


def fence(connection):
    return Fence.objects.using(connection.alias).values_list("token", "owner").get()


def anchors(connection):
    return rows_of("HeldLock", connection.alias).filter(slot="", owner=SHARED)


def expire(connection, **which):
    rows = rows_of("HeldLock", connection.alias).filter(**which).exclude(owner=SHARED)
    rows.update(expires_at=rows.first().expires_at - timedelta(days=1))


def test_readers_have_the_token_of_the_first_one(connection, backend):
    writer = take(backend, claim(shared=False))
    refused(backend, claim())
    backend.release(writer)
    first, second = take(backend, claim()), take(backend, claim())
    assert (first.token, second.token) == (2, 2)
    assert fence(connection) == (2, SHARED)
    assert refused(backend, claim(shared=False)).owner == first.owner
    assert backend.release(first)
    assert not backend.release(first)
    assert refused(backend, claim(shared=False)).owner == second.owner
    assert backend.release(second)
    assert take(backend, claim(shared=False)).token == 3


def test_the_last_reader_leaves_nothing_behind(connection, backend):
    first, second = take(backend, claim()), take(backend, claim())
    assert anchors(connection).count() == 1
    assert set(HeldLock.objects.using(connection.alias).values_list("slot", "owner")) == {
        (each.owner, each.owner) for each in (first, second)
    }
    assert backend.release_all([first, second]) == [True, True]
    assert not rows_of("HeldLock", connection.alias).exists()


def test_a_readers_claim_that_comes_twice_has_one_row(connection, backend):
    sent = claim()
    first = take(backend, sent)
    assert take(backend, sent).token == first.token
    # A writer that came meanwhile doesn't stop what is there.
    refused(backend, claim(shared=False), Wait(10))
    refused(backend, claim())
    assert take(backend, sent).token == first.token
    assert HeldLock.objects.using(connection.alias).count() == 1


def test_unfenced_readers_draw_no_tokens(connection, backend):
    assert take(backend, claim(fenced=False)).token is None
    assert take(backend, claim(fenced=False)).token is None
    assert not Fence.objects.using(connection.alias).exists()
    refused(backend, claim(shared=False, fenced=False))


def test_the_token_of_a_row_is_that_of_all_readers(connection, backend):
    take(backend, claim())
    take(backend, claim())
    assert [row.token for row in HeldLock.objects.using(connection.alias)] == [1, 1]
    assert [held.token for held in all_holders(backend)] == [1, 1]


def all_holders(backend):
    held = backend.holders([NAME])[NAME]
    return [held, *held.others]


def test_each_reader_is_a_holder(backend):
    sent = [claim(), claim(), claim()]
    for each in sent:
        take(backend, each)
    held = all_holders(backend)
    assert [each.owner for each in held] == [each.owner for each in sent]
    assert all(each.shared and each.identity == sent[0].identity for each in held)


def test_a_dead_reader_expires_alone(connection, backend):
    dead, alive = take(backend, claim()), take(backend, claim())
    expire(connection, owner=dead.owner)
    assert [each.owner for each in all_holders(backend)] == [alive.owner]
    assert refused(backend, claim(shared=False)).owner == alive.owner
    assert backend.renew([dead, alive]) == [Renewal.KEPT, Renewal.KEPT]
    expire(connection, owner=dead.owner)
    backend.release(alive)
    writer = take(backend, claim(shared=False))
    assert backend.renew([dead, writer]) == [Renewal.LOST, Renewal.KEPT]
    assert not backend.verify(dead)
    assert not backend.release(dead)
    assert backend.verify(writer)


def test_an_expired_writer_is_followed_by_a_reader(connection, backend):
    writer = take(backend, claim(shared=False))
    expire(connection, owner=writer.owner)
    reader = take(backend, claim())
    assert fence(connection) == (2, SHARED)
    assert backend.renew([writer, reader]) == [Renewal.LOST, Renewal.KEPT]


def test_a_waiting_writer_stops_new_readers_for_a_while(connection, backend, monkeypatch):
    first = take(backend, claim())
    # A writer that doesn't wait stops none.
    refused(backend, claim(shared=False))
    second = take(backend, claim())
    sent, wait = claim(shared=False), Wait(30)
    wait.held = refused(backend, sent, wait)
    assert refused(backend, claim()).owner == first.owner
    backend.release_all([first, second])
    # Also between the release and the writer's next try.
    assert refused(backend, claim()) == Held()
    writer = take(backend, sent, wait)
    refused(backend, claim())
    backend.release(writer)
    third = take(backend, claim())
    # One that gives up, or dies, is forgotten.
    refused(backend, claim(shared=False), Wait(30))
    refused(backend, claim())
    past = anchors(connection).get().no_readers_until - timedelta(seconds=readers.NOTED)
    anchors(connection).update(no_readers_until=past)
    backend.release_all([third, take(backend, claim())])


def test_a_set_follows_readers(connection, backend):
    names = ["a", NAME, "z"]
    claims = [claim(shared=False)._replace(name=name) for name in names]
    reader = take(backend, claim())
    assert {name: held.owner for name, held in backend.acquire_all(claims).items()} == {
        NAME: reader.owner
    }
    LEDGERS[connection.vendor].clear(connection, [reader])
    assert anchors(connection).exists()
    assert [each.token for each in backend.acquire_all(claims)] == [1, 2, 1]


def test_a_set_of_readers_and_writers(backend):
    claims = [claim(shared)._replace(name=name) for name, shared in (("a", True), ("b", False))]
    granted = backend.acquire_all(claims)
    grants = [grant_of(*each) for each in zip(claims, granted, strict=True)]
    assert all(map(backend.verify, grants))
    assert backend.release_all(grants) == [True, True]


def test_the_rows_of_killed_readers_are_swept(connection, backend, config):
    take(backend, claim())
    long_ago = timedelta(seconds=2 * KEPT)
    now = anchors(connection).get().renewed_at
    rows = rows_of("HeldLock", connection.alias)
    rows.update(renewed_at=now - long_ago)
    # A live one keeps the row that readers lock.
    assert ExpiredRows(config).sweep(3) == 0
    rows.exclude(slot="").update(expires_at=now - long_ago)
    ExpiredRows(config).sweep(3)
    ExpiredRows(config).sweep(3)
    assert not rows.exists()


def test_the_row_that_readers_lock_is_no_other_service(connection, backend, ledger):
    reader = take(backend, claim())
    other = replace(entry(), alias="other", backend="redis")
    assert not ledger.record(connection, other, 9)
    ledger.clear(connection, [reader])
    assert anchors(connection).exists()
    assert ledger.record(connection, other, 9)


def test_a_reader_is_recorded_under_the_readers_token(connection, ledger):
    first, second = (replace(entry(), backend="redis") for _ in range(2))
    assert ledger.record(connection, first, 1, (0, ""))
    assert fence(connection) == (1, SHARED)
    assert not ledger.record(connection, second, 2, (1, "another"))
    assert ledger.record(connection, second, 1, (1, SHARED))
    assert fence(connection) == (1, SHARED)
    assert HeldLock.objects.using(connection.alias).count() == 2
    assert not ledger.record(connection, entry(), 1, (2, SHARED))
    # A row that is gone is written again by a renewal, beside the other readers.
    ledger.clear(connection, [Grant(NAME, first.owner.id)])
    assert ledger.claim(connection, first, draw=False) == (True, None)
    writer = replace(entry(shared=False), backend="redis")
    assert ledger.record(connection, writer, 2, (1, SHARED))
    assert fence(connection) == (2, writer.owner.id)


@pytest.mark.parametrize("connection", [on("postgres"), on("mariadb")], indirect=True)
def test_no_reader_waits_for_the_transaction_of_another(connection, backend):
    take(backend, claim())
    with transaction.atomic(connection.alias):
        list(Fence.objects.using(connection.alias).select_for_update())
        assert take(backend, claim()).token == 1


@pytest.mark.parametrize("connection", [on("postgres"), on("mariadb")], indirect=True)
def test_the_first_reader_waits_for_a_transaction_of_the_writer(connection, backend):
    backend.release(take(backend, claim(shared=False)))
    with transaction.atomic(connection.alias):
        list(Fence.objects.using(connection.alias).select_for_update())
        refused(backend, claim())
    assert not HeldLock.objects.using(connection.alias).exists()
    assert take(backend, claim()).token == 2


@on_postgres
def test_statements_on_postgresql(backend, request):
    server = request.getfixturevalue("postgres")
    counts = []
    for shared in (False, True):
        with server.statements() as seen:
            grant = take(backend, claim(shared))
        counts.append(sum(seen.values()))
        with server.statements() as seen:
            backend.release(grant)
        counts.append(sum(seen.values()))
    assert counts == [1, 1, 2, 1]


# Under load


class Load:
    """Threads that read or write one name, and count who is inside at once."""

    def __init__(self, backend, seconds=2.0, threads=8):
        self.backend, self.until, self.threads = backend, time.monotonic() + seconds, threads
        self.mutex, self.inside = threading.Lock(), {True: 0, False: 0}
        self.overlaps, self.granted, self.most = 0, {True: 0, False: 0}, 0

    def run(self):
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(self._run, range(self.threads)))
        return self

    def _run(self, seed):
        chance, connection = random.Random(seed), connections[self.backend.config.fence_database]
        with own(connection) as session:
            while time.monotonic() < self.until:
                sent = claim(shared=seed % 4 != 0)
                wait = Wait(30)
                answer = self._try(sent, wait, session)
                while isinstance(answer, Held) and time.monotonic() < self.until:
                    time.sleep(chance.uniform(0, 0.002))
                    answer = self._try(sent, wait, session)
                if isinstance(answer, Granted):
                    self._hold(sent, grant_of(sent, answer), session)

    def _try(self, sent, wait, session):
        # Not acquire(), which makes a connection for each call of a test.
        try:
            return self.backend._claim(sent, wait, 0.0, session)
        except Error as exc:
            self.backend._raise_unless_held(sent, exc)
            return Held()

    def _hold(self, sent, grant, session):
        with self.mutex:
            self.inside[sent.shared] += 1
            self.granted[sent.shared] += 1
            self.most = max(self.most, self.inside[True])
            writers = self.inside[False]
            self.overlaps += writers > 1 or bool(writers and self.inside[True])
        time.sleep(random.uniform(0, 0.002))
        with self.mutex:
            self.inside[sent.shared] -= 1
        ledger = LEDGERS[session.vendor]
        assert ledger.leave(session, grant) if sent.shared else ledger.clear(session, [grant])


@pytest.mark.slow
def test_readers_and_writers_never_overlap(backend):
    load = Load(backend).run()
    assert load.overlaps == 0
    assert min(load.granted.values()) >= 5
    assert load.most > 1


class TestOneAtATime:
    """Another session has done its part, and commits while a claim waits for that."""

    @pytest.fixture(params=[on("postgres"), on("mariadb")])
    def connection(self, request, monkeypatch):
        # Statements wait for a row for as long as it takes on a busy machine.
        for each in ("CLAIM", "CLAIM_SHARED", "SETTLE", "LEAVE"):
            text = getattr(postgresql, each).replace("'250'", "'20000'")
            monkeypatch.setattr(postgresql, each, text)
        monkeypatch.setattr(sessions, "_limit_row_waits", lambda connection: None)
        return connections[request.param]

    @pytest.fixture
    def during(self, connection):
        """Call the second function in a session of its own, before the first one's commit."""

        def call(first, second, waits=True):
            with (
                contextlib.closing(private(connection.alias, 30)) as other,
                ThreadPoolExecutor(1) as pool,
            ):
                with transaction.atomic(connection.alias):
                    assert first(connection)
                    called = pool.submit(second, other)
                    if not waits:
                        return called.result(20)
                    wait_until(lambda: is_waited_for(connection), "a statement that waits")
                return called.result(20)

        return call

    def test_a_writer_finds_the_reader_that_came_first(self, ledger, during):
        assert during(
            lambda one: ledger.claim_shared(one, entry())[0],
            lambda other: ledger.claim(other, entry(shared=False)),
        ) == (False, None)

    def test_a_reader_finds_the_writer_that_came_first(self, ledger, during):
        assert during(
            lambda one: ledger.claim(one, entry(shared=False))[0],
            lambda other: ledger.claim_shared(other, entry()),
        ) == (False, None)

    def leave_anchor(self, connection, ledger):
        former = entry()
        ledger.claim_shared(connection, former)
        ledger.clear(connection, [Grant(NAME, former.owner.id)])
        assert anchors(connection).exists()

    def test_a_writer_does_not_free_what_a_reader_came_to(self, connection, ledger, during):
        self.leave_anchor(connection, ledger)
        assert not during(
            lambda one: ledger.claim_shared(one, entry())[0],
            lambda other: ledger.settle(other, NAME),
        )
        assert ledger.claim(connection, entry(shared=False)) == (False, None)

    def test_the_last_reader_does_not_free_what_another_came_to(self, connection, ledger, during):
        last = entry()
        ledger.claim_shared(connection, last)
        assert during(
            lambda one: ledger.claim_shared(one, entry())[0],
            lambda other: ledger.leave(other, Grant(NAME, last.owner.id)),
        )
        assert ledger.claim(connection, entry(shared=False)) == (False, None)

    def test_a_writer_does_not_overtake_a_reader_that_is_renewed(self, connection, ledger, during):
        reader = entry()
        ledger.claim_shared(connection, reader)
        expire(connection, owner=reader.owner.id)
        assert not during(
            lambda one: ledger.renew(one, [Grant(NAME, reader.owner.id, 30.0)]),
            lambda other: ledger.settle(other, NAME),
        )
        assert ledger.claim(connection, entry(shared=False)) == (False, None)

    # What happens without each of these comparisons.

    @pytest.mark.parametrize("connection", ["postgres"], indirect=True)
    @pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
    def test_without_the_row_that_readers_lock_both_are_granted(self, ledger, during, monkeypatch):
        text = f"""
            WITH {postgresql.LIMITS} {postgresql.INTO_HELD}
            SELECT {postgresql.VALUES}, {postgresql.TIMES}
            FROM s, (SELECT clock_timestamp() AS now) c WHERE NOT EXISTS (
                SELECT 1 FROM django_fencedlock_heldlock x WHERE x.name = %(name)s::text
                AND x.slot = '' AND x.expires_at > clock_timestamp())
            RETURNING h.name
        """
        monkeypatch.setattr(postgresql, "CLAIM_SHARED", text)
        assert during(
            lambda one: ledger.claim_shared(one, entry(fenced=False))[0],
            lambda other: ledger.claim(other, entry(shared=False)),
            waits=False,
        ) == (True, 1)

    @pytest.mark.parametrize("connection", ["postgres"], indirect=True)
    @pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
    def test_without_its_number_the_row_is_freed_under_a_reader(
        self, connection, ledger, during, monkeypatch
    ):
        text = postgresql.SETTLE.replace("AND h.renewed_at = a.renewed_at", "")
        assert text != postgresql.SETTLE
        monkeypatch.setattr(postgresql, "SETTLE", text)
        self.leave_anchor(connection, ledger)
        assert during(
            lambda one: ledger.claim_shared(one, entry())[0],
            lambda other: ledger.settle(other, NAME),
        )
        rows = HeldLock.objects.using(connection.alias)
        # A writer has only the look at the readers' rows left then, which isn't serialised.
        assert rows.count() == 1


def is_waited_for(connection):
    waiters = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    if connection.vendor == "mysql":
        waiters = "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        # The table is brought up to date if it wasn't read for a tenth of a second.
        time.sleep(0.15)
    with connection.cursor() as cursor:
        cursor.execute(waiters)
        return cursor.fetchone()[0]


@pytest.mark.slow
@pytest.mark.parametrize("connection", [on("postgres"), on("mariadb")], indirect=True)
def test_an_expired_reader_is_either_renewed_or_overtaken(connection, ledger):
    outcomes = set()

    def renew(grant, barrier):
        with own(connection) as session:
            session.ensure_connection()
            barrier.wait()
            with contextlib.suppress(Error):
                return bool(ledger.renew(session, [grant]))
            return False

    def overtake(sent, barrier):
        with own(connection) as session:
            session.ensure_connection()
            barrier.wait()
            with contextlib.suppress(Error):
                return ledger.settle(session, NAME) and ledger.claim(session, sent)[0]
            return False

    for _ in range(60):
        reader, writer, barrier = entry(), entry(shared=False), threading.Barrier(2)
        assert ledger.claim_shared(connection, reader)[0]
        expire(connection, owner=reader.owner.id)
        grant = Grant(NAME, reader.owner.id, 30.0, shared=True)
        with ThreadPoolExecutor(2) as pool:
            renewed = pool.submit(renew, grant, barrier)
            overtaken = pool.submit(overtake, writer, barrier)
            outcome = (renewed.result(20), overtaken.result(20))
        assert outcome != (True, True)
        outcomes.add(outcome)
        rows_of("HeldLock", connection.alias).all().delete()
    assert outcomes


@pytest.mark.slow
def test_a_stream_of_readers_does_not_starve_a_writer(backend):
    stop = threading.Event()

    def read():
        while not stop.is_set():
            sent = claim()
            answer = backend.acquire(sent, Wait(30))
            if isinstance(answer, Granted):
                time.sleep(0.005)
                backend.release(grant_of(sent, answer))

    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(read) for _ in range(4)]
        try:
            for _ in range(3):
                sent, wait = claim(shared=False), Wait(30)

                def try_it(sent=sent, wait=wait):
                    answer = backend.acquire(sent, wait)
                    wait.held = answer if isinstance(answer, Held) else None
                    return isinstance(answer, Granted)

                wait_until(try_it, "the writer", 20)
                backend.release(grant_of(sent))
        finally:
            stop.set()
        for each in reading:
            each.result(20)
