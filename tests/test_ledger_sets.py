"""Sets of names: all rows are taken or none, in one order, and each token is recorded by itself."""

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import Error, connections

from django_fencedlock import conf
from django_fencedlock.backends.database import DatabaseBackend
from django_fencedlock.backends.interface import Claim, Grant, Granted, Held, grant_of
from django_fencedlock.core.identity import new_owner
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.storage import postgresql, sets
from django_fencedlock.storage.dialect import Entry
from django_fencedlock.storage.fences import Fences
from django_fencedlock.storage.vendors import LEDGERS
from tests.test_ledgers import locked, on, own

# As their bytes are sorted: another collation has another order.
NAMES = ["B", "a", "a b", "Ä"]

on_postgres = pytest.mark.parametrize("connection", [on("postgres")], indirect=True)


@pytest.fixture(params=[on("default"), on("postgres"), on("mariadb")])
def connection(request):
    return connections[request.param]


@pytest.fixture
def ledger(connection):
    return LEDGERS[connection.vendor]


@pytest.fixture
def backend(connection):
    config = replace(conf.config("default"), fence_database=connection.alias)
    with contextlib.closing(DatabaseBackend(config)) as backend:
        yield backend


def entries(names=NAMES, **facts):
    facts = {"alias": "default", "backend": "database", "ttl": 30.0} | facts
    owner = new_owner()
    return [Entry(name, owner=owner._replace(id=new_owner().id), **facts) for name in names]


def claims(names=NAMES, **facts):
    owner = new_owner()
    return [Claim(name, new_owner().id, 30.0, owner.identity, **facts) for name in names]


def held(connection):
    rows = HeldLock.objects.using(connection.alias)
    return {row.name: row.owner for row in rows}


def fences(connection):
    rows = Fence.objects.using(connection.alias)
    return {row.name: (row.token, row.owner) for row in rows}


def by_owner(wanted, token=1):
    return {entry.name: (token, entry.owner.id) for entry in wanted}


@pytest.mark.parametrize("part", [1, 3, 200])
def test_a_set_is_taken_and_its_tokens_are_drawn(connection, ledger, part, monkeypatch):
    monkeypatch.setattr(sets, "PART", part)
    first = entries()
    for _ in range(2):
        # A request that comes twice has the same answer.
        assert ledger.claim_all(connection, first) == [1] * 4
    assert held(connection) == {entry.name: entry.owner.id for entry in first}
    assert fences(connection) == by_owner(first)
    assert ledger.claim_all(connection, entries(["C", "a"])) is None
    assert held(connection).keys() == set(NAMES)
    assert fences(connection) == by_owner(first)


def test_expired_and_missing_rows_are_taken_together(connection, ledger):
    former, second = entries(["a", "Ä"]), entries()
    assert ledger.claim_all(connection, former) == [1, 1]
    with connection.cursor() as cursor:
        past = HeldLock.objects.using(connection.alias).get(name="a").expires_at
        cursor.execute(
            "UPDATE django_fencedlock_heldlock SET expires_at = %s", [past - timedelta(days=1)]
        )
    assert ledger.claim_all(connection, second) == [1, 2, 1, 2]
    assert held(connection) == {entry.name: entry.owner.id for entry in second}


def test_an_unfenced_set_draws_no_tokens(connection, ledger):
    assert ledger.claim_all(connection, entries(fenced=False)) == [None] * 4
    assert held(connection).keys() == set(NAMES)
    assert fences(connection) == {}
    assert ledger.claim_all(connection, entries(fenced=False)) is None


def test_each_row_has_the_columns_of_its_entry(connection, ledger):
    first = entries()
    first[1].permits = 5
    ledger.claim_all(connection, first)
    rows = {row.name: row for row in HeldLock.objects.using(connection.alias)}
    one = rows["a"]
    assert [rows[name].permits for name in NAMES] == [None, 5, None, None]
    assert (one.alias, one.backend, one.fenced, one.token) == ("default", "database", True, 1)
    assert (one.host, one.pid, one.pid_started) == first[0].owner[1:2] + first[0].owner[4:6]
    assert one.expires_at - one.acquired_at == timedelta(seconds=30)


def test_the_newer_tokens_of_a_set_are_recorded(connection, ledger):
    first, second = entries(), entries()
    assert ledger.record_all(connection, [(entry, 5) for entry in first]) == set(NAMES)
    assert fences(connection) == by_owner(first, 5)
    tokens = [4, 5, 6, 7]
    newer = {"a b", "Ä"}
    assert ledger.record_all(connection, list(zip(second, tokens, strict=True))) == newer
    assert fences(connection) == by_owner(first[:2], 5) | {
        "a b": (6, second[2].owner.id),
        "Ä": (7, second[3].owner.id),
    }
    assert held(connection) == {entry.name: entry.owner.id for entry in (*first[:2], *second[2:])}


@pytest.mark.parametrize("other", [{"alias": "other"}, {"backend": "redis"}])
def test_a_name_that_is_live_at_another_service_is_left_out(connection, ledger, other):
    ledger.claim_all(connection, entries(["a"]))
    before = fences(connection)
    second = entries(**other)
    assert ledger.record_all(connection, [(entry, 9) for entry in second]) == {"B", "a b", "Ä"}
    assert fences(connection)["a"] == before["a"]
    assert held(connection)["a"] == before["a"][1]


def test_rows_are_deleted_by_their_owners(connection, ledger):
    first = entries()
    ledger.claim_all(connection, first)
    grants = [Grant(entry.name, entry.owner.id) for entry in first]
    assert ledger.clear_all(connection, [Grant("B", "nobody"), *grants[:2]]) == {
        grant.owner for grant in grants[:2]
    }
    assert held(connection).keys() == {"a b", "Ä"}


def test_a_set_is_recorded_by_the_fences_of_an_alias(connection):
    config = replace(conf.config("default"), fence_database=connection.alias)
    grants = [
        grant_of(sent, Granted(token, 0.0))
        for sent, token in zip(claims(), [1, 2, None, 3], strict=True)
    ]
    assert Fences(config, "redis").record_all(grants) == {"B", "a", "Ä"}
    assert fences(connection).keys() == {"B", "a", "Ä"}
    assert Fences(config, "redis").record_all([]) == set()


# The backend


def test_the_backend_names_the_holder_of_each_name_that_is_taken(backend):
    other = claims(["a", "Ä"])
    assert len(backend.acquire_all(other)) == 2
    refused = backend.acquire_all(claims())
    assert {name: answer.owner for name, answer in refused.items()} == {
        sent.name: sent.owner for sent in other
    }


def test_claims_of_two_kinds_are_taken_one_by_one(backend, connection):
    first, second = claims()[:2], claims(fenced=False)[2:]
    answer = backend.acquire_all([*first, *second])
    assert [each.token for each in answer] == [1, 1, None, None]
    assert fences(connection).keys() == {"B", "a"}


@pytest.mark.parametrize("connection", [on("postgres"), on("mariadb")], indirect=True)
@pytest.mark.parametrize("table", ["fence", "heldlock"])
def test_a_locked_row_refuses_the_whole_set(connection, backend, table):
    backend.release_all([grant_of(sent, Granted(1, 0.0)) for sent in taken(backend, claims())])
    if table == "heldlock":
        taken(backend, claims(["a"]))
        expire_rows(connection)
    with locked(connection, "a", table):
        refused = backend.acquire_all(claims())
    assert refused == {"B": Held()}
    assert len(backend.acquire_all(claims())) == 4


def taken(backend, wanted):
    answer = backend.acquire_all(wanted)
    assert isinstance(answer, list)
    return wanted


def expire_rows(connection):
    rows = HeldLock.objects.using(connection.alias)
    rows.update(expires_at=rows.first().expires_at - timedelta(days=1))


@on_postgres
def test_on_postgresql_a_set_is_one_statement(backend, request):
    server = request.getfixturevalue("postgres")
    with server.statements() as seen:
        grants = [grant_of(sent, Granted(1, 0.0)) for sent in taken(backend, claims())]
    assert sum(seen.values()) == 1
    with server.statements() as seen:
        assert isinstance(backend.acquire_all(claims()), dict)
    assert sum(seen.values()) == 2  # and the look at the holders
    with server.statements() as seen:
        assert backend.release_all(grants) == [True] * 4
    assert sum(seen.values()) == 1
    fences = Fences(backend.config, "redis")
    with server.statements() as seen:
        assert len(fences.record_all([each._replace(token=9) for each in grants])) == 4
    assert sum(seen.values()) == 1


@pytest.mark.parametrize("connection", [on("default")], indirect=True)
def test_on_sqlite_a_set_is_one_transaction_of_a_few_statements(connection, ledger):
    seen = []
    with own(connection) as session:
        session.ensure_connection()
        session.connection.set_trace_callback(lambda text: seen.append(text.split()[0]))
        ledger.claim_all(session, entries())
    assert seen == ["BEGIN", "SELECT", "INSERT", "INSERT", "SELECT", "COMMIT"]


@on_postgres
def test_a_set_of_which_a_row_is_taken_meanwhile_is_given_back(connection, ledger, monkeypatch):
    # As if another session had committed its row after this statement had begun.
    text = postgresql.CLAIM_SET.replace("x.expires_at > clock_timestamp()", "false", 1)
    monkeypatch.setattr(postgresql, "CLAIM_SET", text)
    other = entries(["a b"])
    ledger.claim_all(connection, other)
    before = fences(connection)
    assert ledger.claim_all(connection, entries()) is None
    assert held(connection) == {"a b": other[0].owner.id}
    assert fences(connection) == before


@pytest.mark.parametrize("connection", [on("postgres"), on("mariadb")], indirect=True)
@pytest.mark.parametrize("records", [False, True])
def test_overlapping_sets_do_not_deadlock(connection, ledger, records):
    # Sets of five of eight names. A deadlock is an error that the server reports.
    failed, granted, names = [], [], [f"n{place}" for place in range(8)]
    stop = threading.Event()

    def run(seed):
        chance, count = random.Random(seed), 0
        with own(connection) as session, contextlib.suppress(IndexError):
            while not stop.is_set() and count < 60:
                wanted = entries(sorted(chance.sample(names, 5)))
                count += 1
                try:
                    if records:
                        token = chance.randrange(1000)
                        ledger.record_all(session, [(entry, token) for entry in wanted])
                        granted.append(1)
                    elif ledger.claim_all(session, wanted) is not None:
                        granted.append(1)
                    else:
                        continue
                    grants = [Grant(entry.name, entry.owner.id) for entry in wanted]
                    ledger.clear_all(session, grants)
                except Error as exc:
                    failed.append(str(exc))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    deadlocks = [each for each in failed if "eadlock" in each]
    assert granted
    assert not deadlocks
