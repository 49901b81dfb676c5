"""Rows of unfenced locks in the registry, written in the background."""

from unittest import mock

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_fencedlock import force_release, lock
from django_fencedlock.core import runtime
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.ops.registry import State, listing
from django_fencedlock.storage import unfenced
from django_fencedlock.storage.connections import ConnectionPool
from django_fencedlock.storage.unfenced import rows as unfenced_rows
from django_fencedlock.test.processes import another_thread
from tests.failing import unavailable

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres"]),
    pytest.mark.parametrize("backend", ["redis", "postgres"], indirect=True),
]


@pytest.fixture
def rows(backend):
    unfenced_rows.after_fork()
    return HeldLock.objects.using("postgres" if backend == "postgres" else "default")


def renew_all(writing=None):
    keeper = service("default").keeper
    with keeper._lock:
        keeper._due = dict.fromkeys(keeper._due, 0.0)
    keeper.tick()
    runtime.worker.finish(10)
    if writing:
        writing.flush()


def test_one_that_was_renewed_is_in_the_registry_until_its_release(writing, rows):
    with lock("report", fenced=False, ttl=60) as lease, lock("invoice"):
        lease.granted_at -= 100
        writing.flush()
        assert [row.name for row in rows.all()] == ["invoice"]
        renew_all(writing)
        row = rows.get(name="report")
        assert (row.owner, row.fenced, row.token) == (lease.owner_id, False, None)
        entry = next(each for each in listing().entries if each.name == "report")
        assert (entry.state, entry.holder) == (State.HELD, str(lease.holder))
        assert 99 < entry.held_for < 130
        assert 30 < entry.remaining <= 60
    writing.flush()
    assert not rows.filter(name="report").exists()
    assert not Fence.objects.using(rows.db).filter(name="report").exists()


def test_a_short_one_gets_no_row(writing, rows):
    with lock("report", fenced=False):
        pass
    assert not unfenced_rows.labels


def test_a_row_is_renewed_with_its_lease(writing, rows):
    with lock("report", fenced=False, ttl=60):
        renew_all(writing)
        first = rows.get()
        renew_all(writing)
        again = rows.get()
        assert again.acquired_at == first.acquired_at
        assert again.expires_at > first.expires_at


def test_each_reader_has_a_row(writing, rows):
    reading, others = lock("report", fenced=False, shared=True, ttl=60), lock("x", fenced=False)
    with another_thread() as thread, reading as mine, others as other:
        lease = thread.call(reading.acquire, blocking=False)
        for _ in range(2):
            renew_all(writing)
            owners = {mine.owner_id, lease.owner_id, other.owner_id}
            assert {row.owner for row in rows.all()} == owners
        thread.call(lease.release)
        writing.flush()
        assert {row.owner for row in rows.all()} == {mine.owner_id, other.owner_id}
    writing.flush()
    assert not rows.exists()


def test_the_row_of_a_dead_holder_is_replaced(writing, rows):
    with lock("report", fenced=False, ttl=60):
        renew_all(writing)
        # As if its process were killed: nothing deletes the row.
        unfenced_rows.after_fork()
    row = rows.get()
    row.owner = "b" * 32
    row.save(using=rows.db)
    with lock("report", fenced=False, ttl=60) as lease:
        renew_all(writing)
        assert rows.get().owner == "b" * 32
        rows.update(expires_at=row.acquired_at)
        renew_all(writing)
        assert rows.get().owner == lease.owner_id


def test_the_row_of_another_alias_is_left_alone(writing, rows):
    with lock("report", fenced=False, ttl=60):
        renew_all(writing)
        row = rows.get()
        row.alias, row.owner = "other", "c" * 32
        row.save(using=rows.db)
        rows.update(expires_at=row.acquired_at)
        renew_all(writing)
        assert rows.get().alias == "other"


def test_one_that_is_lost(writing, rows):
    with lock("report", fenced=False, ttl=60) as lease:
        renew_all(writing)
        service("default").lose(lease, "for a test")
        writing.flush()
        assert not rows.exists()
        service("default").drop_all()
        lease.why_lost = ""


def test_one_whose_release_gets_no_answer(writing, rows, monkeypatch):

    lease = lock("report", fenced=False, ttl=60).acquire()
    renew_all(writing)
    assert rows.exists()
    with monkeypatch.context() as patched, pytest.raises(BackendUnavailable):
        patched.setattr(service("default").backend, "release", unavailable)
        lease.release()
    writing.flush()
    assert not rows.exists()
    service("default").backend.release(lease.grant)


def test_one_that_ends_while_it_is_written(writing, rows, monkeypatch):
    lease = lock("report", fenced=False, ttl=60).acquire()

    def write_and_release(*args):
        write(*args)
        lease.release()

    write = unfenced.write
    with monkeypatch.context() as patched:
        patched.setattr(unfenced, "write", write_and_release)
        renew_all(writing)
    writing.flush()
    assert not rows.exists()


def test_a_row_that_another_process_inserts_meanwhile(writing, rows, monkeypatch):
    ended = lock("ended", fenced=False, ttl=60).acquire()
    renew_all(writing)
    ended.release()
    other = rows.get()
    other.pk, other.name, other.owner = 1, "report", "b" * 32

    def insert_and_make(*args, **options):
        other.save(using=rows.db, force_insert=True)
        return make(*args, **options)

    make = unfenced.Entry
    with lock("report", fenced=False, ttl=60), monkeypatch.context() as patched:
        patched.setattr(unfenced, "Entry", insert_and_make)
        renew_all(writing)
        assert [row.owner for row in rows.all()] == ["b" * 32]


def test_many_at_once(writing, rows):
    leases = [lock(f"report {number}", fenced=False, ttl=60).acquire() for number in range(100)]
    renew_all()
    own = mock.patch.object(ConnectionPool, "run_orm", lambda pool, work, timeout: work())
    with own, CaptureQueriesContext(connections[rows.db]) as queries:
        writing.flush()
    assert sum("INSERT" in each["sql"] for each in queries) <= 3
    assert rows.count() == 100
    for lease in leases:
        lease.release()
    writing.flush()
    assert rows.count() == 0


def test_one_that_is_released_by_force(writing, rows):
    lease = lock("report", fenced=False, ttl=60).acquire()
    renew_all(writing)
    done = force_release("report", by="ada")
    assert done.done
    renew_all()
    assert lease.lost
    runtime.worker.finish(60)
    assert "by ada" in lease.why_lost
    assert service("default").holder("report") is None
    writing.flush()
    assert not rows.exists()


@pytest.mark.parametrize("verifies", [False, True])
def test_a_release_after_a_forced_release_returns_false(writing, rows, verifies):
    lease = lock("report", fenced=False, ttl=60).acquire()
    renew_all(writing)
    force_release("report", by="ada")
    # verify() finds it lost before the release does.
    assert not verifies or not lease.verify()
    assert not lease.release()
    assert service("default").holder("report") is None
