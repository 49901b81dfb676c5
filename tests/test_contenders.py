"""Who waits, written down for others to see."""

import threading

import pytest
from django.db.models import F

from django_fencedlock import conf, lock
from django_fencedlock.backends.base import Request
from django_fencedlock.contenders import contenders
from django_fencedlock.fences import contenders as table
from django_fencedlock.fences.contenders import Wait
from django_fencedlock.fences.records import Statements
from django_fencedlock.models import Contender
from django_fencedlock.owners import new_owner
from django_fencedlock.test.holders import wait_until
from tests.test_registry import backend, rows  # noqa: F401

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


@pytest.fixture
def waiting():
    """A function that has another thread wait for a lock, until it gets it or its time is up."""
    threads = []

    def wait(name, seconds=30):
        def take():
            lease = lock(name).acquire(blocking_timeout=seconds)
            if lease:
                lease.release()

        threads.append(threading.Thread(target=take, name=f"waiter-{len(threads)}"))
        threads[-1].start()
        return threads[-1]

    yield wait
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def long_waited(count, seconds):
    """Await so many waits, and make it look as if they had begun so long ago."""
    wait_until(lambda: len(contenders._waiting) == count, "the waiters")
    for each in contenders._waiting.values():
        each.since -= seconds


def test_who_waits_long_has_a_row_until_he_gets_it(writing, waiting, backend):  # noqa: F811
    found = Contender.objects.using("postgres" if backend == "postgres" else "default")
    with lock("x"):
        waiter = waiting("x")
        wait_until(lambda: contenders._waiting, "the waiter")
        writing.flush()
        assert not found.exists()
        long_waited(1, 5)
        writing.flush()
        row = found.get()
        assert (row.name, row.alias) == ("x", "default")
        assert "thread waiter-0" in row.words
        assert 4.9 < (row.seen_at - row.since).total_seconds() < 60
        assert writing.flush()
    waiter.join(30)
    assert not writing.flush()
    assert not found.exists()


def test_a_row_is_written_again_now_and_then(writing, waiting):
    with lock("x"):
        waiting("x")
        long_waited(1, 5)
        writing.flush()
        Contender.objects.update(words="changed")
        writing.flush()
        assert Contender.objects.get().words == "changed"
        next(iter(contenders._waiting.values())).written_at -= 10
        writing.flush()
        assert "waiter-0" in Contender.objects.get().words


def test_one_that_waits_in_vain(writing, waiting):
    with lock("x"):
        waiter = waiting("x", 1.5)
        long_waited(1, 5)
        writing.flush()
        assert Contender.objects.exists()
        waiter.join(30)
        writing.flush()
        assert not Contender.objects.exists()


@pytest.mark.parametrize("alias", ["default", "postgres", "mariadb"])
@pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
def test_the_dead_are_taken_out_by_others(alias):
    from django.db import connections

    def write(*owners):
        statements = Statements(connections[alias])
        table.write(statements, [Wait(owner, "x", "default", "me", 3.0) for owner in owners])

    kept = Contender.objects.using(alias)
    write("a", "b")
    kept.filter(owner="a").update(seen_at=F("since"))
    write("c")
    assert {each.owner for each in kept.all()} == {"a", "b", "c"}
    stale = kept.get(owner="a").since.replace(year=2020)
    kept.filter(owner="a").update(seen_at=stale)
    write("b")
    assert {each.owner for each in kept.all()} == {"b", "c"}
    table.clear(Statements(connections[alias]), ["b", "c"])
    assert not kept.exists()


def test_so_many_are_noted_and_no_more(writing, monkeypatch):
    monkeypatch.setattr("django_fencedlock.contenders.MOST", 1)
    one, other = (Request("x", new_owner(), 30.0) for _ in range(2))
    with contenders.noted(one, conf.config()), contenders.noted(other, conf.config()):
        assert list(contenders._waiting) == [one.owner.id]
    assert contenders.is_empty()


def test_nothing_is_noted_in_a_test(waiting):
    with lock("x"):
        waiting("x", 0.2).join(30)
        assert contenders.is_empty()
