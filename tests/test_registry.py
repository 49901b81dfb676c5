"""The registry, and the portrait of a lock, as people read them, with what services really say."""

import contextlib
from datetime import timedelta
from unittest import mock

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections
from django.db.models import F

from django_fencedlock import conf, force_release, lock
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import ReleaseBlocked
from django_fencedlock.models import HeldLock
from django_fencedlock.ops import registry
from django_fencedlock.ops.registry import State, listing, portrait
from django_fencedlock.storage.connections import time_limited
from django_fencedlock.test.processes import wait_until
from tests.backends import REDIS
from tests.threads import beside

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


def rows(backend):
    return HeldLock.objects.using("postgres" if backend == "postgres" else "default")


def states(*aliases):
    return {each.name: each.state for each in listing(aliases).entries}


def test_held_and_expiring_and_everything_about_it(backend):
    with lock("invoice:1", ttl=30) as lease, lock("invoice:2", ttl=30):
        rows(backend).filter(name="invoice:2").update(
            renewed_at=F("renewed_at") - timedelta(seconds=21),
            expires_at=F("expires_at") - timedelta(seconds=21),
        )
        one, two = listing().entries
        assert (one.state, two.state) == (State.HELD, State.EXPIRING)
        assert (one.name, one.alias, one.backend) == ("invoice:1", "default", backend)
        assert (one.token, one.owner, one.fenced) == (lease.token, lease.owner_id, True)
        assert one.holder == str(lease.holder)
        assert 0 <= one.held_for < 20 < one.remaining <= 30
        assert one.acquired_at.utcoffset() == timedelta(0)


def try_reader():
    if lease := lock("catalog", shared=True).acquire(blocking=False):
        lease.release()
    return lease


def test_permits_and_readers(backend, holders):
    for number in (10, 2):
        holders.permit("gpu", number, 12)
    readers = [holders.acquire(lock("catalog", shared=True)) for _ in range(2)]
    # It waits in the service's queue, or leaves a note there.
    waiter = beside(lock("catalog").acquire, blocking_timeout=60)
    wait_until(lambda: try_reader() is None, "the writer")
    # Redis leaves the rows of released locks for a second.
    held = [each for each in listing().entries if each.state is not State.FREE]
    assert [(each.name, each.of_kind, each.state) for each in held] == [
        *[("catalog", "reader", State.HELD)] * 2,
        ("gpu [permit 2]", "permit 2 of 12, 2 used", State.HELD),
        ("gpu [permit 10]", "permit 10 of 12, 2 used", State.HELD),
    ]
    (permits,) = portrait("gpu").permits
    assert list(permits.held) == ["gpu [permit 2]", "gpu [permit 10]"]
    assert permits.free == [1, *range(3, 10), 11, 12]
    (asked,) = portrait("catalog").services
    assert {asked.holder.owner_id, asked.others[0].owner_id} == {each.owner_id for each in readers}
    holders.leave()
    waiter.result(60).release()


def test_the_other_readers_do_not_take_the_lock_from_an_expired_one(backend, holders):
    one, two = (holders.acquire(lock("catalog", shared=True)) for _ in range(2))
    service("default").keeper.forget(one)
    service("default").backend.release(one.grant)
    past = {"expires_at": F("expires_at") - timedelta(hours=1)}
    if not rows(backend).filter(owner=one.owner_id).update(**past):
        # The release has deleted the row.
        row = rows(backend).get(owner=two.owner_id)
        row.pk, row.slot, row.owner, row.expires_at = 1, *[one.owner_id] * 2, row.acquired_at
        row.save(using=rows(backend).db, force_insert=True)
    found = {each.owner: each.state for each in listing().entries}
    assert found == {one.owner_id: State.EXPIRED, two.owner_id: State.HELD}
    rows(backend).filter(owner=one.owner_id).delete()


def test_a_lock_past_its_ttl_is_expired_until_the_next_grant(backend, redis_server):
    lease = lock("x", ttl=30).acquire()
    service("default").keeper.forget(lease)
    past = {"expires_at": F("expires_at") - timedelta(hours=1)}
    rows(backend).filter(name="x").update(**past)
    if backend == "redis":
        # Only the registry wasn't renewed.
        assert states() == {"x": State.HELD}
        redis_server.empty()
    assert states() == {"x": State.EXPIRED}
    lease.release()


def test_a_lock_whose_service_forgot_it_is_free(backend, redis_server, postgres):
    if backend == "database":
        pytest.skip("the registry is the service")
    lease = lock("x", ttl=30).acquire()
    service("default").keeper.forget(lease)
    if backend == "redis":
        redis_server.empty()
    else:
        lease.grant.handle.session.raw.close()
    # It may be this very look that finds the session dead.
    wait_until(lambda: states() == {"x": State.FREE}, "the lock to be free")
    service("default").drop_all()


def test_a_lock_that_another_holder_has_is_lost(backend):
    if backend == "database":
        pytest.skip("the registry is the service")
    with lock("x"):
        rows(backend).filter(name="x").update(owner="0" * 32, thread="ann")
        (entry,) = listing().entries
        if backend == "redis":
            assert entry.state is State.LOST
            assert "thread ann" in entry.holder
        else:
            # The registry's row of that very session is all that tells of the owner.
            assert entry.state is State.HELD
        rows(backend).filter(name="x").delete()
        service("default").drop_all()


def test_a_service_that_does_not_answer_is_said(settings, make_redis):
    server = make_redis()
    jobs = {"BACKEND": REDIS, "LOCATION": server.url, "OPTIONS": {"TIMEOUT": 1}}
    settings.FENCEDLOCK = {"default": {}, "jobs": jobs}
    with lock("near"):
        lease = lock("far", backend="jobs", ttl=60).acquire()
        server.kill()
        found = listing()
        told = {each.name: each.state for each in found.entries}
        assert told == {"near": State.HELD, "far": State.UNKNOWN}
        assert set(found.unanswered) == {"jobs"}
        shown = portrait("far")
        assert shown.unanswered
        assert not shown.is_held
        assert shown.fences[0].token == lease.token
        service("jobs").drop_all()


@pytest.fixture
def far(settings, make_postgres, make_alias):
    server = make_postgres()
    database = make_alias(server.django())
    terms = {"FENCE_DATABASE": database, "OPTIONS": {"TIMEOUT": 2}}
    settings.FENCEDLOCK = {"default": {}, "far": terms}
    with lock("near"):
        lease = lock("far", backend="far", ttl=600).acquire()
        service("far").keeper.forget(lease)
        yield server
    lease.released = True


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(registry, "ANSWERED", 2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["pause", "kill"])
def test_a_database_that_does_not_answer_hides_no_other(far, how):
    """Be it paused: the project's own connection would wait for ever."""
    database = conf.config("far").fence_database
    assert {each.name for each in listing().entries} == {"near", "far"}
    connections[database].ensure_connection()
    getattr(far, how)()
    found = listing()
    assert {each.name: each.state for each in found.entries} == {"near": State.HELD}
    assert f"its fence database {database!r} could not be read: " in found.unanswered["far"]
    shown = portrait("near")
    assert shown.is_held
    assert list(shown.away) == [database]
    assert [bool(each.error) for each in shown.services] == [False, True]
    assert shown.unanswered
    if how == "pause":
        # One that is paused takes its time to be ended.
        far.resume()


def test_a_database_that_falls_silent_is_cut_off(far):
    database = conf.config("far").fence_database
    with time_limited(database, 2):
        assert HeldLock.objects.using(database).get().name == "far"
        far.pause()
        with pytest.raises(OperationalError, match=r"no answer within 2 s"):
            HeldLock.objects.using(database).get()
    far.resume()
    assert HeldLock.objects.using(database).get().name == "far"


@pytest.mark.slow
def test_a_locked_table_keeps_a_lock_from_being_released_by_force(settings, postgres):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
    database = connections["postgres"].settings_dict["NAME"]
    with lock("x") as lease, postgres.connect(database, autocommit=False) as other:
        other.execute("LOCK TABLE django_fencedlock_forcedrelease IN SHARE MODE")
        with pytest.raises(
            ReleaseBlocked, match="in 'postgres' can't be raised before the end of a trans"
        ):
            force_release("x", by="the boss")
        other.rollback()
        assert lease.verify()


def test_tables_that_there_are_not_are_said_with_the_remedy(settings, make_postgres, make_alias):
    database = make_alias(make_postgres().django())
    settings.FENCEDLOCK = {"default": {}, "far": {"FENCE_DATABASE": database}}
    call_command("migrate", "django_fencedlock", "zero", database=database, verbosity=0)
    remedy = f"manage.py migrate django_fencedlock --database {database}"
    assert remedy in listing().unanswered["far"]
    assert remedy in portrait("x").away[database]


def test_a_row_of_an_alias_that_the_settings_lost(settings):
    with lock("x"):
        HeldLock.objects.update(alias="former")
        found = listing()
        assert found.entries[0].state is State.UNKNOWN
        assert "no alias 'former'" in found.unanswered["former"]
        HeldLock.objects.update(alias="default")


@contextlib.contextmanager
def statements():
    seen = []

    def note(execute, sql, *rest):
        seen.append(sql)
        return execute(sql, *rest)

    @contextlib.contextmanager
    def noting(database, timeout):
        with time_limited(database, timeout), connections[database].execute_wrapper(note):
            yield

    with mock.patch.object(registry, "time_limited", noting):
        yield seen
    assert seen


def test_many_locks_are_asked_of_in_few_queries(backend, redis_server):
    def cost():
        with statements() as queries:
            if backend == "redis":
                with redis_server.monitor() as commands:
                    found = listing()
                seen = len([each for each in commands if each.name == "GET"])
                assert seen == len(found.entries)
            else:
                found = listing()
        assert all(each.state is State.HELD for each in found.entries)
        return len(queries), len(found.entries)

    leases = [lock(f"many:{number}").acquire() for number in range(2)]
    few, _ = cost()
    leases += [lock(f"many:{number}").acquire() for number in range(2, 50)]
    assert cost() == (few, 50)
    for lease in leases:
        lease.release()


def test_portrait(backend):
    unknown = portrait("x")
    assert not unknown.is_held
    assert (unknown.fences, unknown.entries) == ([], [])
    with lock("x") as lease:
        found = portrait("x")
        assert found.is_held
        assert found.services[0].holder.owner_id == lease.owner_id
        assert (found.fences[0].token, found.fences[0].owner) == (lease.token, lease.owner_id)
        assert found.entries[0].state is State.HELD
        if backend == "postgres":
            with lease.atomic():
                assert "server session" in portrait("x").fences[0].pinned_by
    after = portrait("x")
    assert not after.is_held
    assert after.fences[0].token == lease.token


def test_an_unfenced_lock_is_shown_by_its_service(backend):
    with lock("x", fenced=False):
        found = portrait("x")
        assert found.is_held
        assert found.fences == []
