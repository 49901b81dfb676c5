"""Rows of the registry that no live fenced lock has."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import DataError

from django_fencedlock import conf, lock
from django_fencedlock.models import HeldLock
from django_fencedlock.storage import unfenced
from django_fencedlock.storage.dialect import BATCH
from django_fencedlock.storage.unfenced import KEPT, ExpiredRows
from django_fencedlock.test.processes import another_thread

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])


@pytest.fixture
def rows(using):
    return HeldLock.objects.using(using)


def add(rows, *names, ago, **facts):
    then = datetime.now(UTC) - timedelta(seconds=ago)
    times = dict.fromkeys(("acquired_at", "renewed_at", "expires_at"), then)
    facts = {"fenced": True, "pid": 1, "pid_started": 1, "alias": "default", **times, **facts}
    rows.bulk_create(HeldLock(name=name, owner=f"o-{name}", **facts) for name in names)


def names(rows):
    return sorted(rows.values_list("name", flat=True))


def test_what_expired_long_ago_is_deleted(rows):
    add(rows, "long ago", "long ago, unfenced", ago=KEPT + 60)
    add(rows, "lately", ago=KEPT - 60)
    add(rows, "live", ago=-30)
    assert ExpiredRows(conf.config()).sweep(1) == 2
    assert names(rows) == ["lately", "live"]


def test_a_lock_that_is_held_stays(rows, using):
    with another_thread() as thread:
        lease = thread.call(lock("held").acquire)
        assert ExpiredRows(conf.config()).sweep(1) == 0
        assert thread.call(lease.release)


def test_so_many_at_once(rows):
    add(rows, *(f"x{number}" for number in range(BATCH + 5)), ago=KEPT + 60)
    sweeper = ExpiredRows(conf.config())
    assert sweeper.sweep(1) == BATCH
    assert sweeper.sweep(5) == 5
    assert not rows.exists()


def test_a_row_whose_session_lives_stays(postgres, settings):
    """A session lock of a process that hangs: the admin has to show it for as long."""
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
    rows = HeldLock.objects.using("postgres")
    with postgres.connect() as session:
        add(rows, "hung", ago=KEPT + 60, session_pid=session.info.backend_pid)
        add(rows, "dead", ago=KEPT + 60, session_pid=2**30)
        assert ExpiredRows(conf.config()).sweep(1) == 1
    assert names(rows) == ["hung"]


def test_mariadb_stores_no_row_of_an_unfenced_lock_that_it_would_have_to_cut():
    with lock("report", fenced=False) as lease, pytest.raises(DataError):
        unfenced.write("mariadb", [(lease, "x" * 31)])
    assert not HeldLock.objects.using("mariadb").exists()
