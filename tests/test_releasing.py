"""Forced releases, as far as they are the same whatever the backend: notes, models, test cases."""

import re
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import connections
from django.utils import timezone

from django_fencedlock import LeaseLost, StaleFence, force_release, lock
from django_fencedlock.backends.interface import Grant, Held, Wait, grant_of
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.models import Fence, ForcedRelease, HeldLock
from django_fencedlock.ops.force_release import Outcome, held_by
from django_fencedlock.storage import connections as storage_connections
from django_fencedlock.storage import fences
from tests import stub_backend
from tests.backends import POSTGRES, REDIS
from tests.models import Invoice
from tests.servers.process import wait_until
from tests.sessions import as_in_another_process
from tests.stub_backend import StubBackend, StubService

real = pytest.mark.django_db(transaction=True)


@real
def test_a_save_is_refused_before_the_holder_notices():
    invoice = Invoice.objects.create(amount=1)
    with pytest.raises(LeaseLost), Invoice.fencing.lock(pk=invoice.pk) as lease:
        invoice = Invoice.objects.get(pk=invoice.pk)
        invoice.amount = 2
        force_release(lease.name, by="the boss")
        assert not lease.lost
        with pytest.raises(StaleFence, match="the newest token is 2: it was released by force, by"):
            invoice.save()
    invoice.refresh_from_db()
    assert invoice.amount == 1
    with Invoice.fencing.lock(pk=invoice.pk) as lease:
        assert lease.token == 3
        invoice.save()


@real
def test_a_release_needs_a_name():
    with lock("x"), pytest.raises(ValueError, match="who releases"):
        force_release("x", by=" ")
    with pytest.raises(ValueError, match="empty"):
        force_release("", by="the boss")


@real
def test_the_first_user_who_did_it_is_named():
    lease = lock("x").acquire()
    config = fences.Revoking(lease._control.config)
    one = config.revoke(lease.grant, "one", proposed=lease.token)
    other = config.revoke(lease.grant, "other", proposed=lease.token)
    assert (one.is_new, other.is_new) == (True, False)
    assert other.note == one.note
    assert (one.token, other.token) == (2, 2)
    force_release("x", by="third")
    with pytest.raises(LeaseLost, match="by one"):
        lease.renew()


@real
def test_a_user_who_did_it_at_the_same_moment_is_named_too(monkeypatch):
    lease = lock("x").acquire()
    config = fences.Revoking(lease._control.config)
    one = config.revoke(lease.grant, "one", proposed=lease.token)
    looks = iter([dict])

    def notes_of_a_moment_before(*given):
        return next(looks, lambda: revoking_notes(*given))()

    revoking_notes = fences.notes
    monkeypatch.setattr(fences, "notes", notes_of_a_moment_before)
    other = config.revoke(lease.grant, "other", proposed=lease.token)
    assert (other.is_new, other.note, other.token) == (False, one.note, 2)


@real
def test_a_holder_whose_grant_is_about_to_be_recorded_is_above_no_fence():
    """Its token is the lock service's; the fence is behind it, or isn't there yet."""
    with lock("x") as lease:
        config = fences.Revoking(lease._control.config)
        assert config.revoke(Grant("x", "somebody"), "me", proposed=7).token == 8
        assert config.revoke(Grant("y", "somebody else"), "me", proposed=7).token == 8
        fences_now = set(Fence.objects.values_list("name", "token", "owner"))
        assert fences_now == {("x", 8, ""), ("y", 8, "")}


@real
def test_a_newer_grant_is_not_fenced_off():
    former = lock("x").acquire()
    former.release()
    with lock("x") as lease:
        found = fences.Revoking(lease._control.config).revoke(
            former.grant, "me", proposed=former.token
        )
        assert found.token == lease.token
        assert Fence.objects.get().owner == lease.owner_id


@real
def test_old_notes_are_deleted_unless_their_holder_may_come_back():
    lease = lock("x").acquire()
    long_ago = timezone.now() - timedelta(days=15)
    for owner in ("a", lease.owner_id):
        ForcedRelease.objects.create(owner=owner, name="x", released_by="me", released_at=long_ago)
    ForcedRelease.objects.create(owner="b", name="x", released_by="me", released_at=timezone.now())
    assert fences.Revoking(lease._control.config).forget() == 1
    assert set(ForcedRelease.objects.values_list("owner", flat=True)) == {"b", lease.owner_id}
    HeldLock.objects.all().delete()
    lock("y").acquire()
    force_release("y", by="me")
    assert not ForcedRelease.objects.filter(owner=lease.owner_id).exists()


@real
def test_a_lease_that_is_over_is_taken_away_too():
    lease = lock("x").acquire()
    lease._control.keeper.forget(lease)
    HeldLock.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    found = held_by("x")
    assert found is not None
    assert found.expired
    assert force_release("x", by="me").outcome is Outcome.FREED
    with pytest.raises(LeaseLost, match="by me"):
        lease.renew()


@pytest.mark.django_db
@pytest.mark.parametrize("fenced", [True, False])
def test_within_a_test_case(fenced):
    lease = lock("x", fenced=fenced).acquire()
    assert force_release("x", by="me").outcome is Outcome.FREED
    assert not lease.verify()
    with pytest.raises(LeaseLost, match="by me"):
        lease.check()
    lease.release()
    assert lock("x").acquire(blocking=False).token == (3 if fenced else 1)


@pytest.mark.django_db
def test_within_a_test_case_on_redis(settings, redis_server):
    settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, "LOCATION": redis_server.url}}
    lease = lock("x").acquire()
    assert force_release("x", by="me").outcome is Outcome.FREED
    assert not HeldLock.objects.exists()
    assert not lease.verify()


@real
def test_an_unfenced_lock_of_redis_needs_no_tables(settings, redis_server, make_alias, tmp_path):
    entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "empty.sqlite3")}
    terms = {"LOCATION": redis_server.url, "FENCE_DATABASE": (alias := make_alias(entry))}
    settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, **terms}}
    call_command("migrate", "django_fencedlock", "zero", database=alias, verbosity=0)
    lease = lock("x", fenced=False).acquire()
    assert force_release("x", by="me").outcome is Outcome.FREED
    assert not lease.verify()


@real
def test_a_fenced_lock_is_not_freed_while_the_database_is_away(settings, make_redis, monkeypatch):
    settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, "LOCATION": make_redis().url}}
    lease = lock("x").acquire()

    def fail(*args):
        connections["default"].cursor().execute("SELECT nothing")

    monkeypatch.setattr(fences, "durable", fail)
    with pytest.raises(BackendUnavailable, match="could not force the release"):
        force_release("x", by="me")
    assert lease.verify()
    lease.release()


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.slow
@pytest.mark.parametrize("fenced", [True, False])
def test_a_session_lock_tells_how_to_end_its_session(settings, postgres, fenced):
    settings.FENCEDLOCK = {"default": {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"}}
    lease = lock("x", fenced=fenced).acquire()
    with as_in_another_process():
        done = force_release("x", by="me")
    assert done.outcome is (Outcome.LEFT_TO_HOLDER if fenced else Outcome.NEEDS_END_OF_SESSION)
    (statement,) = re.findall(r"SELECT pg_terminate_backend\(\d+\)", str(done))
    with connections["postgres"].cursor() as cursor:
        cursor.execute(statement)
    wait_until(lambda: lease.lost, "the lock to be lost with its session")
    assert lock("x").holder() is None


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_an_owner_that_is_not_in_the_registry_is_not_said_to_have_changed(settings, postgres):
    settings.FENCEDLOCK = {"default": {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"}}
    with lock("x", fenced=False) as lease:
        done = force_release("x", by="me", owner_id=lease.owner_id)
        assert done.outcome is Outcome.NEEDS_END_OF_SESSION
        assert lease.verify()


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_a_raise_outlasts_a_crash(settings, postgres, monkeypatch):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
    private, seen = storage_connections.private, []

    def watched(*args):
        made = private(*args)
        # As on a server where it is off.
        options = made.settings_dict["OPTIONS"]
        options["options"] = f"{options.get('options', '')} -c synchronous_commit=off"
        commit = made._commit

        def watch():
            with made.cursor() as cursor:
                cursor.execute("SHOW synchronous_commit")
                seen.append(cursor.fetchone()[0])
            commit()

        made._commit = watch
        return made

    lock("x").acquire()
    monkeypatch.setattr(storage_connections, "private", watched)
    force_release("x", by="me")
    assert seen[:2] == ["on", "on"]
    seen.clear()
    with storage_connections.time_limited("postgres", 5):
        fences.lift("postgres", {"x": 9})
    assert seen == ["on"]


class TestAHolderThatRecordsItsGrantMeanwhile:
    """Between the raise of the fence and the release of the lock."""

    @pytest.fixture
    def stub(self, settings, monkeypatch):
        monkeypatch.setattr(StubBackend, "service", StubService())
        settings.FENCEDLOCK = {"default": {"BACKEND": "tests.stub_backend.StubBackend"}}
        return service("default")

    @real
    @pytest.mark.parametrize("expires", [False, True])
    def test_its_writes_are_rejected(self, stub, monkeypatch, expires):
        claim, backend = new_claim("x", 30.0), stub.backend
        granted = backend.acquire(claim, Wait())
        release, tokens = backend.release, []

        def after_it_recorded(grant):
            monkeypatch.setattr(backend, "release", release)
            found, _ = stub.grants.confirm(claim, granted)
            tokens.append(found.token)
            if expires:
                backend.service.locks.clear()
            return release(grant)

        monkeypatch.setattr(backend, "release", after_it_recorded)
        done = force_release("x", by="the boss")
        assert done.outcome is Outcome.FREED
        assert tokens[0] > granted.token
        fence = Fence.objects.get()
        assert fence.owner == ""
        assert fence.token > tokens[0]
        assert not backend.holders(["x"])
        assert backend.service.tokens["x"] == fence.token

    @real
    @pytest.mark.parametrize("has_tokens", [True, False])
    def test_it_is_too_late_after_the_second_raise(self, stub, monkeypatch, has_tokens):
        if not has_tokens:
            monkeypatch.setattr(stub_backend, "_held", lambda claim, *_: Held(claim.owner))
        claim, fences = new_claim("x", 30.0), stub.grants.fences
        grant = grant_of(claim, stub.backend.acquire(claim, Wait()))
        release, seen = stub.backend.release, []
        # Its token isn't newer, so it reads the fence and asks the service, in this order.
        fences.record(new_claim("x", 30.0), 5)

        def after_it_was_verified(released):
            seen.append(fences.read("x")[1])
            assert stub.backend.verify(grant)
            return release(released)

        monkeypatch.setattr(stub.backend, "release", after_it_was_verified)
        assert force_release("x", by="the boss").outcome is Outcome.FREED
        assert seen == [(6, "")]
        assert not fences.record(grant, 7, seen[0])


@real
def test_a_claim_that_comes_again_at_that_moment_is_fenced_off_too(monkeypatch):
    """A driver repeats a request whose first answer was lost, and the row knows its owner."""
    backend, claim = service("default").backend, new_claim("x", 30.0)
    grants = [backend.acquire(claim, Wait())]
    release = backend.release

    def after_it_came_again(grant):
        grants.append(backend.acquire(claim, Wait()))
        return release(grant)

    monkeypatch.setattr(backend, "release", after_it_came_again)
    done = force_release("x", by="the boss")
    assert (done.outcome, done.before) == (Outcome.FREED, "")
    assert grants[1].token > grants[0].token
    assert done.token > grants[1].token
    assert (Fence.objects.get().token, Fence.objects.get().owner) == (done.token, "")
    assert not backend.holders(["x"])
