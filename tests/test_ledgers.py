"""The statements that grant: what they compare, and what they leave as it was."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, timedelta

import pytest
from django.db import Error, connections, transaction

from django_fencedlock import conf
from django_fencedlock.backends.database import DatabaseBackend
from django_fencedlock.backends.interface import Claim, Grant, Wait, grant_of
from django_fencedlock.core.identity import new_owner
from django_fencedlock.models import HeldLock
from django_fencedlock.storage import connections as sessions
from django_fencedlock.storage import postgresql
from django_fencedlock.storage.connections import private
from django_fencedlock.storage.dialect import Entry, entry_of
from django_fencedlock.storage.vendors import LEDGERS
from tests.servers.process import wait_until

NAME = "invoice:42"


def on(database):
    needed = {"default", database}
    return pytest.param(
        database, marks=pytest.mark.django_db(transaction=True, databases=needed), id=database
    )


@pytest.fixture(params=[on("default"), on("postgres"), on("mariadb")])
def connection(request):
    return connections[request.param]


@pytest.fixture
def postgres():
    return connections["postgres"]


@pytest.fixture
def entry():
    def make(owner=None, ttl=30.0, fenced=True):
        owner = owner or new_owner()
        return Entry(NAME, "default", "database", owner, ttl, fenced=fenced)

    return make


def claim(connection, entry):
    return LEDGERS[connection.vendor].claim(connection, entry)


def record(connection, entry, token, seen=None):
    return LEDGERS[connection.vendor].record(connection, entry, token, seen)


def newest(connection):
    return LEDGERS[connection.vendor].newest(connection, NAME)


def look(connection):
    return LEDGERS[connection.vendor].look(connection, NAME)


def lease_of(entry):
    return Grant(entry.name, entry.owner.id, entry.ttl)


def expire(connection):
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE django_fencedlock_heldlock SET expires_at = %s WHERE name = %s",
            [look(connection).expires_at - timedelta(days=1), NAME],
        )


def test_a_claim_that_comes_twice_leaves_the_token(connection, entry):
    first = entry()
    # The holder may be at work by the second: another token would reject its writes.
    for _ in range(2):
        assert claim(connection, first) == (True, 1)
    assert newest(connection) == (1, first.owner.id)


def test_a_takeover_has_the_next_token_and_its_owner(connection, entry):
    first, second = entry(), entry()
    claim(connection, first)
    assert claim(connection, second) == (False, None)
    expire(connection)
    assert claim(connection, second) == (True, 2)
    assert newest(connection) == (2, second.owner.id)
    assert claim(connection, first) == (False, None)
    assert newest(connection) == (2, second.owner.id)
    expire(connection)
    assert claim(connection, first) == (True, 3)
    assert newest(connection) == (3, first.owner.id)
    expire(connection)
    assert claim(connection, entry(fenced=False)) == (True, None)
    assert newest(connection) == (3, first.owner.id)


@pytest.mark.parametrize("token", [4, 5])
def test_a_token_that_is_not_newer_is_not_recorded(connection, entry, token):
    first, second = entry(), entry()
    assert record(connection, first, 5)
    assert not record(connection, second, token)
    assert newest(connection) == (5, first.owner.id)
    assert look(connection).owner.id == first.owner.id


def test_a_newer_token_is_recorded_with_its_owner(connection, entry):
    first, second = entry(), entry()
    record(connection, first, 5)
    # A second answer doesn't tell whether the first recording was this client's.
    assert not record(connection, first, 5) or connection.vendor == "mysql"
    assert newest(connection) == (5, first.owner.id)
    # A fence that a crash lost may have the same token again, or a lower one.
    for seen in ((5, "f" * 32), (4, first.owner.id), (6, first.owner.id)):
        assert not record(connection, second, 7, seen)
        assert newest(connection) == (5, first.owner.id)
    assert record(connection, second, 7, (5, first.owner.id))
    assert newest(connection) == (7, second.owner.id)
    assert look(connection).owner.id == second.owner.id
    assert record(connection, first, 8)
    assert newest(connection) == (8, first.owner.id)


@pytest.mark.parametrize("other", [{"alias": "other"}, {"backend": "redis"}])
def test_nothing_is_recorded_of_a_name_live_at_another_service(connection, entry, other):
    first, second = entry(), replace(entry(), **other)
    claim(connection, first)
    assert not record(connection, second, 9)
    assert newest(connection) == (1, first.owner.id)
    expire(connection)
    assert record(connection, second, 9)


@pytest.mark.parametrize("permits", [None, 5])
def test_the_row_has_the_number_of_permits(connection, permits):
    backend = DatabaseBackend(replace(conf.config("default"), fence_database=connection.alias))
    owner = new_owner()
    sent = Claim(NAME, owner.id, 30.0, owner.identity, permits=permits)
    granted = backend.acquire(sent, Wait())
    rows = HeldLock.objects.using(connection.alias)
    assert rows.get().permits == permits
    backend.release(grant_of(sent, granted))
    assert record(connection, entry_of(grant_of(sent), "default", "redis"), 9)
    assert rows.get().permits == permits


def test_a_renewal_by_another_owner_renews_nothing(connection, entry):
    first, second = entry(), entry()
    claim(connection, first)
    expire(connection)
    ledger = LEDGERS[connection.vendor]
    assert ledger.renew(connection, [lease_of(second)]) == set()
    assert ledger.missing(connection, [lease_of(second)]) == {second.owner.id}
    assert not look(connection).live
    assert ledger.renew(connection, [lease_of(first)]) == {first.owner.id}
    assert look(connection).live


def test_the_row_of_a_holder_has_no_token_of_another(connection, entry):
    claim(connection, entry())
    assert look(connection).token == 1
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_fencedlock_fence SET token = 2, owner = 'another'")
    assert look(connection).token is None


on_servers = pytest.mark.parametrize("connection", [on("postgres"), on("mariadb")], indirect=True)


@contextlib.contextmanager
def own(connection):
    # It bounds the wait for a row: to 1 s on MariaDB, whose default is 50 s.
    with contextlib.closing(private(connection.alias, 5)) as found:
        yield found


def lock_row(cursor, name, table="heldlock"):
    sql = f"SELECT 1 FROM django_fencedlock_{table} WHERE name = %s FOR UPDATE"
    cursor.execute(sql, [name])


@contextlib.contextmanager
def locked(connection, name, table="heldlock"):
    with own(connection) as session, session.cursor() as cursor:
        cursor.execute("BEGIN")
        lock_row(cursor, name, table)
        yield


@on_servers
def test_a_renewal_passes_over_locked_rows(connection, entry):
    taken, free = entry(), replace(entry(), name="invoice:43")
    claim(connection, taken)
    claim(connection, free)
    ledger, leases = LEDGERS[connection.vendor], [lease_of(taken), lease_of(free)]
    with locked(connection, NAME), own(connection) as keeper:
        assert ledger.renew(keeper, leases) == {free.owner.id}
        assert ledger.missing(connection, leases) == set()


@on_servers
def test_a_claim_of_a_locked_fence_fails_and_leaves_nothing(connection, entry):
    """A row lock on the fence may outlive the registry's row."""
    first = entry()
    claim(connection, first)
    ledger = LEDGERS[connection.vendor]
    ledger.clear(connection, [lease_of(first)])
    with (
        locked(connection, NAME, "fence"),
        pytest.raises(Error) as caught,
        own(connection) as other,
    ):
        claim(other, entry())
    assert ledger.is_row_locked(caught.value)
    assert look(connection) is None
    assert newest(connection) == (1, first.owner.id)


@on_servers
def test_a_deadlock_counts_as_a_locked_row(connection, entry):
    for name in ("a", "b"):
        claim(connection, replace(entry(), name=name))
    failed = []

    def try_to_lock(cursor, name):
        try:
            lock_row(cursor, name)
        except Error as exc:
            failed.append(exc)
            cursor.execute("ROLLBACK")

    with (
        own(connection) as one,
        own(connection) as other,
        one.cursor() as first,
        other.cursor() as second,
    ):
        for cursor, name in ((first, "a"), (second, "b")):
            cursor.execute("BEGIN")
            try_to_lock(cursor, name)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(try_to_lock, first, "b")
            try_to_lock(second, "a")
    assert [LEDGERS[connection.vendor].is_row_locked(exc) for exc in failed] == [True]


def test_a_row_is_cleared_by_its_owner_alone(connection, entry):
    present, mine = entry(), replace(entry(), name="invoice:43")
    claim(connection, present)
    claim(connection, mine)
    ledger = LEDGERS[connection.vendor]
    assert ledger.clear(connection, [lease_of(entry())]) == 0
    assert ledger.clear(connection, [lease_of(entry()), lease_of(mine)]) == 1
    assert look(connection).owner.id == present.owner.id
    assert ledger.look(connection, mine.name) is None
    assert ledger.clear(connection, [lease_of(present)]) == 1
    assert look(connection) is None


@pytest.mark.parametrize(
    "name",
    ["NULL", 'a"b', "a\\", '\\"', "{a,b}", "a, b", "it's", "50%", " x ", "a\nb", "\x1f", "Ä😀"],
)
def test_any_name_is_renewed_and_cleared_among_others(connection, entry, name):
    entries = [replace(entry(), name=name), entry()]
    for each in entries:
        assert claim(connection, each)[0]
    leases = [lease_of(each) for each in entries]
    assert LEDGERS[connection.vendor].renew(connection, leases) == {each.owner for each in leases}
    assert LEDGERS[connection.vendor].clear(connection, leases) == 2


@pytest.mark.parametrize("connection", [on("mariadb")], indirect=True)
def test_on_mariadb_no_token_is_drawn_for_a_row_of_another_owner(connection, entry, monkeypatch):
    ledger = LEDGERS[connection.vendor]
    insert = ledger._insert

    def insert_and_be_overtaken(cursor, given):
        done = insert(cursor, given)
        cursor.execute("UPDATE django_fencedlock_heldlock SET owner = 'another'")
        # Asked for where the answer of the draw was lost to a trigger.
        assert ledger._token_of(cursor, given) is None
        return done

    monkeypatch.setattr(ledger, "_insert", insert_and_be_overtaken)
    assert claim(connection, entry()) == (False, None)
    assert newest(connection) is None
    assert look(connection).owner.id == "another"


class TestLockedRows:
    """Another transaction has a row locked, and ends while it is waited for."""

    @pytest.fixture(params=[on("postgres"), on("mariadb")])
    def connection(self, request, monkeypatch):
        # Statements wait for a row for as long as it takes on a busy machine.
        for statement in ("CLAIM", "RENEW"):
            text = getattr(postgresql, statement).replace("'250'", "'20000'")
            monkeypatch.setattr(postgresql, statement, text)
        monkeypatch.setattr(sessions, "_limit_row_waits", lambda connection: None)
        return connections[request.param]

    @pytest.fixture
    def beside(self, connection):
        with (
            ThreadPoolExecutor(1) as executor,
            contextlib.closing(private(connection.alias, 30)) as other,
        ):
            yield lambda function, *args: executor.submit(function, other, *args)

    @pytest.fixture
    def wait_for_waiter(self, connection):
        waiters = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        if connection.vendor == "mysql":
            waiters = (
                "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
            )

        def is_waited_for():
            if connection.vendor == "mysql":
                # The table is brought up to date if it wasn't read for a tenth of a second.
                time.sleep(0.15)
            with connection.cursor() as cursor:
                cursor.execute(waiters)
                return cursor.fetchone()[0]

        return lambda: wait_until(is_waited_for, "a statement that waits for the row")

    def test_a_claim_that_saw_the_row_free_is_refused(
        self, connection, entry, beside, wait_for_waiter
    ):
        first, second = entry(), entry()
        with transaction.atomic(connection.alias):
            assert claim(connection, first) == (True, 1)
            claiming = beside(claim, second)
            wait_for_waiter()
        assert claiming.result(20) == (False, None)
        assert newest(connection) == (1, first.owner.id)

    def test_a_renewal_waits_for_a_row(self, connection, entry, beside, wait_for_waiter):
        mine = entry()
        claim(connection, mine)
        before = look(connection).expires_at
        with transaction.atomic(connection.alias):
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 FROM django_fencedlock_heldlock FOR UPDATE")
            renewing = beside(LEDGERS[connection.vendor].renew, [lease_of(mine)])
            wait_for_waiter()
        assert renewing.result(20) == {mine.owner.id}
        assert look(connection).expires_at > before


@pytest.mark.django_db(transaction=True, databases={"default", "postgres"})
class TestWithinALongTransaction:
    """What a test lends is open for long, and its own time stands still."""

    def test_a_row_expires_by_the_servers_clock_counted_from_the_claim(self, postgres, entry):
        with transaction.atomic("postgres"), postgres.cursor() as cursor:
            assert claim(postgres, entry(ttl=0.01)) == (True, 1)
            cursor.execute("SELECT pg_sleep(0.02), clock_timestamp() AT TIME ZONE 'UTC'")
            before = cursor.fetchone()[1].replace(tzinfo=UTC)
            assert claim(postgres, entry(ttl=30.0)) == (True, 2)
            assert look(postgres).expires_at >= before + timedelta(seconds=30)

    def test_a_grant_outlasts_a_crash_and_waits_for_no_row_for_long(self, postgres, entry):
        with transaction.atomic("postgres"), postgres.cursor() as cursor:
            cursor.execute("SET LOCAL synchronous_commit = off")
            claim(postgres, entry())
            # For this transaction, whose COMMIT it is about.
            cursor.execute(
                "SELECT current_setting('synchronous_commit'), current_setting('lock_timeout')"
            )
            assert cursor.fetchone() == ("on", "250ms")
