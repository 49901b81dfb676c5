"""Statements that a private connection prepares, and those that lead through a pooler."""

import contextlib
from dataclasses import replace
from datetime import UTC, datetime

import psycopg
import pytest
from django.db import DataError, connections

from django_fencedlock.backends.interface import Grant
from django_fencedlock.core.identity import new_owner
from django_fencedlock.storage import connections as sessions
from django_fencedlock.storage.connections import PREPARE_THRESHOLD, ConnectionPool
from django_fencedlock.storage.dialect import Entry
from django_fencedlock.storage.vendors import LEDGERS

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres"]),
    pytest.mark.usefixtures("keep_connections"),
]

#: More executions than it takes to prepare a statement.
OFTEN = PREPARE_THRESHOLD + 3


@pytest.fixture
def pool():
    with pool_of("postgres") as pool:
        yield pool


@contextlib.contextmanager
def pool_of(alias):
    pool = ConnectionPool(alias, timeout=5)
    try:
        yield pool
    finally:
        pool.close()


def entry(**options):
    return Entry("x", "default", "database", new_owner(), ttl=30.0, **options)


def claim(connection):
    ledger = LEDGERS[connection.vendor]
    mine = entry()
    taken, token = ledger.claim(connection, mine)
    assert taken
    assert ledger.clear(connection, [Grant("x", mine.owner.id)]) == 1
    return token


def prepared_in(connection):
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement FROM pg_prepared_statements")
        return "\n".join(statement for (statement,) in cursor.fetchall())


class TestAKeptConnection:
    def test_statements_are_prepared(self, pool):
        assert [pool.run(claim) for _ in range(OFTEN)] == [*range(1, OFTEN + 1)]
        known = pool.run(prepared_in)
        assert "INSERT INTO django_fencedlock_fence" in known
        assert "DELETE FROM django_fencedlock_heldlock" in known

    def test_prepared_statements_do_the_same(self, pool):
        pool.run(prepared_in)

        def acts(connection):
            ledger = LEDGERS[connection.vendor]
            token = (ledger.newest(connection, "x") or (0, ""))[0] + 1
            mine = entry()
            held = Grant("x", mine.owner.id)
            assert ledger.record(connection, mine, token)
            assert not ledger.record(connection, mine, token)
            assert ledger.newest(connection, "x") == (token, mine.owner.id)
            other = entry()
            assert ledger.claim(connection, other, draw=False) == (False, None)
            assert ledger.claim(connection, other) == (False, None)
            elsewhere = replace(other, alias="other", backend="redis")
            assert not ledger.record(connection, elsewhere, 10**6)
            assert ledger.look(connection, "x").owner.id == mine.owner.id
            assert ledger.clear(connection, [Grant("x", other.owner.id)]) == 0
            assert ledger.clear(connection, [held, Grant("y", other.owner.id)]) == 1
            assert ledger.claim(connection, entry(fenced=False)) == (True, None)
            assert ledger.look(connection, "x").live
            with connection.cursor() as cursor:
                cursor.execute("DELETE FROM django_fencedlock_heldlock")

        for _ in range(OFTEN):
            pool.run(acts)

    def test_its_errors_are_djangos(self, pool):
        def fail(connection):
            with LEDGERS[connection.vendor].cursor(connection) as cursor:
                cursor.execute("SELECT 1/0")

        pool.run(prepared_in)
        with pytest.raises(Exception, match="division by zero") as caught:
            pool.run(fail)
        assert caught.type.__module__ == "django.db.utils"


class TestParameters:
    """Their types are those that the statement says."""

    STATEMENT = """
        SELECT %(text)s::text, %(nothing)s::text, %(big)s::bigint, %(yes)s::boolean,
        %(part)s::double precision, %(at)s::timestamptz, %(text)s::text || '%%'
    """

    def test_values_come_back_unchanged(self, pool):
        at = datetime(2027, 3, 1, 12, 30, 0, 250, tzinfo=UTC)
        values = ("50% of Łódź's\n\\x", None, -(2**63), True, 0.1, at)
        names = ("text", "nothing", "big", "yes", "part", "at")
        given = dict(zip(names, values, strict=True))

        def ask(connection):
            with LEDGERS[connection.vendor].cursor(connection) as cursor:
                cursor.execute(self.STATEMENT, given)
                return cursor.fetchone()

        pool.run(prepared_in)
        for _ in range(OFTEN):
            assert pool.run(ask) == (*values, values[0] + "%")

    def test_a_nul_character_is_rejected(self, pool):
        def ask(connection):
            with LEDGERS[connection.vendor].cursor(connection) as cursor:
                cursor.execute("SELECT %(text)s::text", {"text": "one\0two"})

        pool.run(prepared_in)
        for _ in range(OFTEN):
            with pytest.raises(DataError, match="NUL"):
                pool.run(ask)


class TestATableThatIsChanged:
    """By a migration, while processes have prepared statements that read it."""

    @pytest.fixture
    def change(self):
        def change(length):
            with connections["postgres"].cursor() as cursor:
                cursor.execute(
                    f"ALTER TABLE django_fencedlock_heldlock ALTER name TYPE varchar({length})"
                )

        yield change
        change(200)

    def record(self, connection):
        ledger = LEDGERS[connection.vendor]
        token = (ledger.newest(connection, "x") or (0, ""))[0] + 1
        mine = entry()
        assert ledger.record(connection, mine, token)
        ledger.clear(connection, [Grant("x", mine.owner.id)])
        return token

    def test_grants_go_on(self, pool, change):
        for _ in range(OFTEN):
            pool.run(self.record)
        change(250)
        assert [pool.run(self.record) for _ in range(OFTEN)] == [*range(OFTEN + 1, 2 * OFTEN + 1)]
        assert "INSERT INTO django_fencedlock_fence" in pool.run(prepared_in)


def test_a_connection_that_is_not_kept_costs_no_round_trip(pool, postgres, monkeypatch):
    monkeypatch.setattr(sessions, "under_test", lambda: True)
    with postgres.statements() as seen:
        pool.run(claim)
    assert sum(seen.values()) == 2


class TestThroughAPooler:
    @pytest.fixture
    def route(self, make_postgres, make_pgbouncer, make_alias):
        """Two sessions of a server, which change from one transaction to the next."""
        server = make_postgres()
        make_alias(server.django())
        bouncer = make_pgbouncer(server, pool_mode="transaction", pool_size=2)
        entry = server.django(by=bouncer)
        return make_alias(entry)

    def test_nothing_is_prepared(self, route):
        with pool_of(route) as pool:
            assert [pool.run(claim) for _ in range(OFTEN)] == [*range(1, OFTEN + 1)]
            assert "django_fencedlock" not in pool.run(prepared_in)

    def test_a_pooler_that_looks_like_the_server(self, route, monkeypatch):
        make = sessions._keep_cursor

        def prepare(connection):
            make(connection)
            connection.connection.prepare_threshold = PREPARE_THRESHOLD
            connection._fencedlock_cursor = psycopg.Cursor(connection.connection)

        monkeypatch.setattr(sessions, "_keep_cursor", prepare)
        with pool_of(route) as pool, contextlib.closing(connections[route].copy()) as other:
            for _ in range(OFTEN):
                pool.run(claim)
            assert "django_fencedlock" in pool.run(prepared_in)
            other.set_autocommit(False)
            with other.cursor() as cursor:
                # It keeps the session where the statements are known.
                cursor.execute("SELECT 1")
                assert [pool.run(claim) for _ in range(3)] == [OFTEN + 1, OFTEN + 2, OFTEN + 3]


class TestAnEngineWithACursorOfItsOwn:
    """Such as an engine for tenants, which sets the search_path in each cursor."""

    @pytest.fixture
    def connection(self):
        connection = sessions.private("postgres", 5)
        make = connection.create_cursor

        def create_cursor(name=None):
            with connection.connection.cursor() as cursor:
                cursor.execute("SET search_path = elsewhere")
            return make(name)

        connection.create_cursor = create_cursor
        yield connection
        connection.close()

    def test_its_cursor_is_used_once_before(self, connection):
        sessions._keep_cursor(connection)
        with LEDGERS[connection.vendor].cursor(connection) as cursor:
            cursor.execute("SHOW search_path")
            assert cursor.fetchone() == ("elsewhere",)


def test_a_renewal_of_many_is_one_statement_and_planned_for_as_many(pool, postgres):
    leases = []
    for number in range(20):
        mine = replace(entry(), name=str(number))
        pool.run(lambda connection, mine=mine: LEDGERS[connection.vendor].claim(connection, mine))
        leases.append(lease_of(mine))
    ours = {lease.owner for lease in leases}
    with postgres.statements() as statements:
        for _ in range(OFTEN):
            assert pool.run(lambda c: LEDGERS[c.vendor].renew(c, leases)) == ours
    assert sum(n for text, n in statements.items() if "SKIP LOCKED" in text) == OFTEN
    assert "SKIP LOCKED" not in pool.run(prepared_in)
    stranger = lease_of(replace(entry(), name="0"))
    kept = pool.run(lambda c: LEDGERS[c.vendor].renew(c, [stranger, *leases[1:]]))
    assert kept == ours - {leases[0].owner}


def lease_of(mine):
    return Grant(mine.name, mine.owner.id, mine.ttl)
