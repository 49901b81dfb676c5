"""The core step on a service in memory: what each rule of its order keeps from happening."""

from __future__ import annotations

import itertools

import pytest
from django.db import OperationalError
from django.db.models import F

from django_fencedlock import conf, lock
from django_fencedlock.backends.interface import Backend, Granted, Held, Renewal, Wait, grant_of
from django_fencedlock.core import grants as grants_module
from django_fencedlock.core import manager
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.identity import new_owner
from django_fencedlock.core.manager import Service
from django_fencedlock.exceptions import AliasConflict, BackendUnavailable, LockNotAcquired
from django_fencedlock.models import Fence, HeldLock
from tests.backends import DATABASE, POSTGRES, REDIS
from tests.failing import raising, unavailable
from tests.stub_backend import StubBackend, StubService
from tests.threads import without_threads

pytestmark = pytest.mark.django_db(transaction=True)


class NoTokens(StubBackend):
    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        return answer._replace(token=None) if isinstance(answer, Granted) else answer


@pytest.fixture
def stub(monkeypatch):
    found = StubService()
    monkeypatch.setattr(StubBackend, "service", found)
    return found


@pytest.fixture
def make(stub):
    made = []

    def process(backend=StubBackend):
        service = Service("default", backend(conf.config("default")))
        # What the keeper was asked for stays to be looked at.
        without_threads(service.keeper)
        made.append(service)
        return service.grants

    yield process
    for service in made:
        service.keeper.doubts.clear()


@pytest.fixture
def step(make):
    return make()


def take(step, claim=None, seconds=0.0):
    claim = claim or new_claim("x", 30)
    answer = step.acquire(claim, Wait(seconds))
    assert not isinstance(answer, Held)
    return answer[0]


def fence():
    return Fence.objects.values_list("token", "owner").get(name="x")


def doubts(step):
    return set(step._keeper.doubts)


def release_doubts(keeper):
    """Do what the keeper does with doubts, now."""
    keeper._release_at = 0
    keeper.tend()


def test_a_grant_is_recorded_with_its_row_before_it_is_returned(step):
    grant = take(step)
    assert fence() == (1, grant.owner)
    row = HeldLock.objects.get()
    assert (row.owner, row.alias, row.backend) == (grant.owner, "default", "stub")


def test_an_unfenced_grant_is_not_recorded(step):
    grant = take(step, new_claim("x", 30, fenced=False))
    assert grant.token is None
    assert not Fence.objects.exists()
    assert not HeldLock.objects.exists()


def test_a_service_that_lost_its_data_goes_on_above_the_fence(step, stub):
    for _ in range(3):
        step.backend.release(take(step))
    stub.tokens.clear()
    grant = take(step)
    assert fence() == (4, grant.owner) == (grant.token, grant.owner)
    assert stub.tokens["x"] == 4


def test_a_service_without_tokens_gets_numbers(make):
    step = make(NoTokens)
    for number in (1, 2, 3):
        grant = take(step)
        assert fence() == (number, grant.owner) == (grant.token, grant.owner)
        step.backend.release(grant)


def test_a_raised_fence_is_followed(step):
    Fence.objects.create(name="x", token=7, owner="")
    assert take(step).token == 8


def test_a_grant_whose_recording_was_answered_late_is_recorded_once(step, monkeypatch):
    record = step.fences.record

    def without_answer(*args):
        assert record(*args)
        return False

    monkeypatch.setattr(step.fences, "record", without_answer)
    grant = take(step)
    assert fence() == (1, grant.owner) == (grant.token, grant.owner)


def test_only_a_service_that_lost_its_data_is_warned_of(step, stub, caplog):
    step.backend.release(take(step))
    Fence.objects.update(token=4, owner="")  # As after a forced release.
    step.backend.release(take(step))
    assert not caplog.records
    stub.tokens.clear()
    take(step)
    assert "was behind the tokens of lock 'x', which go on from 6" in caplog.text


def test_a_service_that_stays_behind_is_warned_of_once(step, stub, caplog, monkeypatch):
    # etcd, ZooKeeper and Consul number grants by a counter of the whole service.
    monkeypatch.setattr(type(step.backend), "suggest", Backend.suggest)
    step.backend.release(take(step))
    Fence.objects.update(token=5_000_000)
    for _ in range(3):
        step.backend.release(take(step))
    assert fence()[0] == 5_000_003
    assert [each.levelname for each in caplog.records if each.levelname != "DEBUG"] == ["WARNING"]


def test_a_fence_that_rises_again_and_again_ends_in_a_refusal(step, monkeypatch):
    read = step.fences.read

    def overtaken(name):
        found = read(name)
        Fence.objects.update(token=F("token") + 1)
        return found

    Fence.objects.create(name="x", token=7, owner="")
    monkeypatch.setattr(step.fences, "read", overtaken)
    assert isinstance(step.acquire(new_claim("x", 30), Wait()), Held)
    assert not step.backend.holders(["x"])


# What would be recorded too late


@pytest.mark.parametrize("lost_its_data", [False, True])
def test_a_process_paused_before_recording_is_refused_and_leaves_its_successor_alone(
    make, stub, lost_its_data
):
    kind = [NoTokens] if lost_its_data else []
    former, present = make(*kind), make(*kind)
    claim = new_claim("x", 30)
    granted = former.backend.acquire(claim, Wait())
    stub.locks.clear()  # It expired during the pause.
    if lost_its_data:
        stub.tokens.clear()
    successor = take(present)
    assert former.confirm(claim, granted) is None
    assert fence() == (successor.token, successor.owner)
    assert present.backend.verify(successor)


def test_nothing_is_recorded_once_the_ttl_has_passed(make, monkeypatch):
    """Its lock may be another owner's by then, though the service said otherwise before."""
    step = make(NoTokens)
    claim = new_claim("x", 30)
    granted, verify = step.backend.acquire(claim, Wait()), step.backend.verify

    def paused(grant):
        found = verify(grant)
        monkeypatch.setattr(step, "_clock", lambda: granted.since + 30)
        return found

    monkeypatch.setattr(step.backend, "verify", paused)
    assert step.confirm(claim, granted) is None
    assert not Fence.objects.filter(name="x").exists()


def test_the_fence_is_read_before_the_service_is_asked(make, stub, monkeypatch):
    """In the other order a holder that was verified, and then overtaken, is recorded last."""
    former, present = make(NoTokens), make(NoTokens)
    claim, asked = new_claim("x", 30), []
    granted = former.backend.acquire(claim, Wait())
    read, verify = former.fences.read, former.backend.verify

    def noting_read(name):
        asked.append("read")
        return read(name)

    def then_overtaken(grant):
        asked.append("verify")
        held = verify(grant)
        if len(asked) == 2:
            stub.locks.clear()
            asked.append(take(present))
        return held

    monkeypatch.setattr(former.fences, "read", noting_read)
    monkeypatch.setattr(former.backend, "verify", then_overtaken)
    assert former.confirm(claim, granted) is None
    assert asked[:2] == ["read", "verify"]
    assert fence() == (asked[2].token, asked[2].owner)


def test_a_number_is_not_recorded_over_a_fence_that_a_crash_set_back(make, stub, monkeypatch):
    """Both would act as the holder: the number is above the fence of before the crash."""
    former, present = make(NoTokens), make(NoTokens)
    Fence.objects.create(name="x", token=3, owner="w")
    claim, successors = new_claim("x", 30), []
    granted = former.backend.acquire(claim, Wait())
    verify = former.backend.verify

    def then_crash(grant):
        held = verify(grant)
        if not successors:
            Fence.objects.all().delete()
            stub.locks.clear()
            successors.append(take(present))
        return held

    monkeypatch.setattr(former.backend, "verify", then_crash)
    assert former.confirm(claim, granted) is None
    assert fence() == (1, successors[0].owner)


def test_a_number_is_recorded_only_over_the_fence_that_was_read(step):
    """Also by the token alone: a crash of the database may have set it back."""
    first, other = take(step), new_claim("x", 30)
    seen = fence()
    Fence.objects.update(owner=other.owner)
    assert not step.fences.record(grant_of(other), 2, seen)
    assert step.fences.record(grant_of(other), 2, (1, other.owner))
    assert seen == (1, first.owner)


def test_a_restored_backup_gives_an_old_holder_the_key_and_no_write(make, stub):
    old, new = make(), make()
    former = take(old)
    backup = dict(stub.locks)
    old.backend.release(former)
    present = take(new)
    stub.locks = backup
    assert old.backend.renew([former]) == [Renewal.KEPT]
    assert fence() == (present.token, present.owner) != (former.token, former.owner)


# Time


@pytest.mark.parametrize(("waited", "is_renewed"), [(5, False), (15, True), (31, True)])
def test_what_is_due_before_it_is_recorded_is_renewed_first(step, stub, waited, is_renewed):
    claim = new_claim("x", 30)
    granted = step.backend.acquire(claim, Wait())
    _, since = step.confirm(claim, granted._replace(since=granted.since - waited))
    assert (since > granted.since) == is_renewed


def test_what_was_lost_before_it_was_recorded_is_no_grant(step, stub):
    claim = new_claim("x", 30)
    granted = step.backend.acquire(claim, Wait())
    stub.locks.clear()
    assert step.confirm(claim, granted._replace(since=granted.since - 15)) is None
    assert not Fence.objects.exists()


def test_what_expired_while_it_was_recorded_is_released(step, stub, monkeypatch):
    record, clock = step.fences.record, step._clock

    def pause(*args):
        monkeypatch.setattr(step, "_clock", lambda: clock() + 31)
        return record(*args)

    monkeypatch.setattr(step.fences, "record", pause)
    assert isinstance(step.acquire(new_claim("x", 30), Wait()), Held)
    assert not stub.locks
    monkeypatch.undo()
    assert take(step).token == 2


# Refusals


def test_a_dead_holder_is_evicted_and_its_lock_acquired(step, stub, monkeypatch):
    dead = new_owner()._replace(pid=2**22 + 1, pid_started=1)
    gone = []
    monkeypatch.setattr(grants_module, "is_process_gone", lambda process: gone.append(process) or 1)
    step.backend.acquire(new_claim("x", 30, owner=dead), Wait())
    grant = take(step)
    assert grant.token == 2
    assert gone == [dead.process]


def test_a_live_holder_is_not_evicted(step):
    held = take(step)
    claim, wait = new_claim("x", 30), Wait()
    assert isinstance(step.acquire(claim, wait), Held)
    assert (wait.held.owner, wait.held.token) == (held.owner, 1)


def test_refused_is_called_once_and_may_end_the_wait(step):
    take(step)
    seen = []

    def refuse(held):
        seen.append(held)
        raise LockNotAcquired("changed its mind", name="x", alias="default")

    with pytest.raises(LockNotAcquired, match="changed"):
        step.acquire(new_claim("x", 30), Wait(10, refuse))
    assert len(seen) == 1
    assert not doubts(step)


def test_a_waiter_polls_until_the_lock_is_free(step, monkeypatch):
    held, pauses = take(step), itertools.count()

    def sleep(seconds):
        if next(pauses) == 3:
            step.backend.release(held)

    monkeypatch.setattr(grants_module.time, "sleep", sleep)
    assert take(step, seconds=20).token == 2


def test_a_name_that_is_live_through_another_alias_is_a_conflict(step, settings):
    settings.FENCEDLOCK = {"default": {}, "elsewhere": {}}
    with lock("x", backend="elsewhere"), pytest.raises(AliasConflict, match="elsewhere"):
        take(step)
    assert not step.backend.holders(["x"])
    # Nor did it lead to a number: the holder's grant is the newest still.
    assert fence()[0] == 1


# A name that was just released through another alias: its row is deleted up to a second later.


@pytest.fixture
def pair(settings, request, backend_name):
    """Two aliases with one fence database, of which the first is released before its row is."""
    url = request.getfixturevalue(f"{backend_name}_server").url
    kept = {"database": {"BACKEND": DATABASE}, "postgres": {"BACKEND": POSTGRES}}
    settings.FENCEDLOCK = {
        "default": {},
        "redis": {"BACKEND": REDIS, "LOCATION": url, "FENCE_DATABASE": "postgres"},
        **{name: {**terms, "FENCE_DATABASE": "postgres"} for name, terms in kept.items()},
    }


@pytest.mark.parametrize("other", ["database", "postgres"])
@pytest.mark.parametrize("backend_name", ["redis", "valkey"])
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
class TestReleasedThroughAnotherAlias:
    def test_a_free_name_is_no_conflict(self, pair, other):
        for _ in range(200):
            for alias in ("redis", other):
                with lock("x", backend=alias):
                    pass

    def test_a_held_name_is_a_conflict_in_both_directions(self, pair, other):
        for first, second in (("redis", other), (other, "redis")):
            with lock("x", backend=first) as lease:
                with pytest.raises(AliasConflict) as caught:
                    lock("x", backend=second).acquire()
                assert caught.value.holder.token == lease.token
                assert str(caught.value) == (
                    f"Lock 'x' is held through alias {first!r} ({first}), so it can't be acquired "
                    f"through alias {second!r} ({second}). Always lock a name through the same "
                    "alias."
                )
                assert lease.verify()
                assert HeldLock.objects.using("postgres").get().owner == lease.owner_id

    def test_a_name_that_the_service_gave_to_another_owner_is_a_conflict(self, pair, other):
        with lock("x", backend="redis"):
            pass
        # Between the service's grant and its record.
        step = manager.service("redis").grants
        claim = new_claim("x", 30)
        grant = grant_of(claim, step.backend.acquire(claim, Wait()))
        with pytest.raises(AliasConflict):
            lock("x", backend=other).acquire()
        step.backend.release(grant)
        with lock("x", backend=other):
            pass

    def test_it_is_a_conflict_if_the_other_service_is_unknown_or_away(
        self, pair, other, settings, monkeypatch
    ):
        def acquire():
            with pytest.raises(AliasConflict):
                lock("x", backend=other).acquire()

        with lock("x", backend="redis"):
            pass
        with monkeypatch.context() as patch:
            patch.setattr(manager.service("redis").backend, "holders", unavailable)
            acquire()
        known = settings.FENCEDLOCK
        for changed in (
            {},
            {"redis": {}},
            {"redis": {**known["redis"], "FENCE_DATABASE": "default"}},
        ):
            rest = {name: terms for name, terms in known.items() if name != "redis"}
            settings.FENCEDLOCK = rest | changed
            acquire()


# Errors


def test_a_claim_without_an_answer_is_doubted(step, stub, monkeypatch):
    acquire = step.backend.acquire

    def lose_answer(claim, wait):
        acquire(claim, wait)
        raise BackendUnavailable("no answer", name="x", alias="default")

    monkeypatch.setattr(step.backend, "acquire", lose_answer)
    claim = new_claim("x", 30)
    with pytest.raises(BackendUnavailable):
        step.acquire(claim, Wait())
    assert doubts(step) == {claim.owner}
    release_doubts(step._keeper)
    assert not stub.locks


def test_an_interrupted_claim_is_released_now_and_doubted(step, stub, monkeypatch):

    monkeypatch.setattr(step.fences, "record", raising(KeyboardInterrupt))
    claim = new_claim("x", 30)
    (service,) = (each for each in manager._living if each.grants is step)
    with pytest.raises(KeyboardInterrupt):
        service.acquire(claim, Wait())
    assert doubts(step) == {claim.owner}
    assert not stub.locks


def test_an_owner_that_gets_the_lock_in_the_end_is_not_released(step):
    claim = new_claim("x", 30)
    step.drop(claim)
    assert doubts(step) == {claim.owner}
    take(step, claim)
    assert not doubts(step)


def test_a_release_without_an_answer_ends_the_acquire(step, monkeypatch):
    """The keeper repeats it at any time: it would release what the same owner got later."""
    release, record, keeper = step.backend.release, step.fences.record, step._keeper

    def locked(*args):
        monkeypatch.setattr(step.backend, "release", unavailable)
        raise OperationalError("locked")

    def recorded(*args):
        monkeypatch.setattr(step.backend, "release", release)
        release_doubts(keeper)
        return record(*args)

    tries = iter([locked, recorded])
    monkeypatch.setattr(step.fences, "record", lambda *args: next(tries)(*args))
    monkeypatch.setattr(step.fences, "is_row_locked", lambda error: True)
    monkeypatch.setattr(grants_module.connections["default"], "vendor", "other")
    monkeypatch.setattr(grants_module.time, "sleep", lambda seconds: None)
    claim = new_claim("x", 30)
    with pytest.raises(BackendUnavailable):
        step.acquire(claim, Wait(10))
    assert doubts(step) == {claim.owner}


def test_a_database_that_fails_leaves_no_lock(step, stub, settings, monkeypatch):

    monkeypatch.setattr(step.fences, "record", raising(OperationalError("gone")))
    with pytest.raises(BackendUnavailable, match="could not record the grant of lock 'x'"):
        take(step)
    assert not stub.locks


# The registry


@pytest.fixture
def leased(stub, settings):
    settings.FENCEDLOCK = {"default": {"BACKEND": "tests.stub_backend.StubBackend"}}
    lease = lock("x").acquire()
    yield lease._control, lease
    lease.release()


def test_a_row_that_is_gone_is_written_again(leased):
    service, lease = leased
    HeldLock.objects.all().delete()
    assert service.keeper.compare([lease]) == []
    assert HeldLock.objects.get().owner == lease.owner_id


def test_a_lease_that_a_newer_grant_came_after_is_released(leased, make):
    service, lease = leased
    HeldLock.objects.update(owner="b" * 32)
    Fence.objects.update(token=2, owner="b" * 32)
    assert service.keeper.compare([lease]) == [lease]
    assert not service.backend.holders(["x"])


def test_leases_are_kept_while_the_database_fails(leased, monkeypatch, caplog):
    service, lease = leased

    monkeypatch.setattr(service.grants.fences, "renew", raising(OperationalError("gone")))
    lease.renew()
    assert not lease.lost
    assert "The registry of alias 'default' wasn't renewed: gone" in caplog.text


def test_a_lock_whose_release_got_no_answer_leaves_no_row_and_a_doubt(leased, monkeypatch):
    service, lease = leased

    with monkeypatch.context() as patch, pytest.raises(BackendUnavailable):
        patch.setattr(service.backend, "release", unavailable)
        lease.release()
    service.keeper.clear()
    assert not HeldLock.objects.exists()
    assert set(service.keeper.doubts) == {lease.owner_id}
    release_doubts(service.keeper)
    assert not service.backend.holders(["x"])
