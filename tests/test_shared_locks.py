"""Shared locks on a service in memory, and what is the same whatever the backend."""

from __future__ import annotations

import asyncio

import pytest
from django.core.management import call_command
from django.test import override_settings

from django_fencedlock import (
    LeaseLost,
    LockNotAcquired,
    LockRequired,
    LockUpgrade,
    StaleFence,
    conf,
    current_lease,
    force_release,
    lock,
)
from django_fencedlock.backends.interface import Held, Wait
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.manager import Service, service
from django_fencedlock.exceptions import SettingsError
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.ops.force_release import Outcome
from django_fencedlock.test import disable_locking, hold_lock, lose_lease
from django_fencedlock.test.contract import SharedContract
from django_fencedlock.test.processes import another_thread
from tests.backends import REDLOCK
from tests.models import Invoice
from tests.shared_stub import SharedStubBackend, SharedStubService
from tests.threads import without_threads

real = pytest.mark.django_db(transaction=True)


class NoTokens(SharedStubBackend):
    has_tokens = False


class Unfair(SharedStubBackend):
    """A reader is let in although a writer waits."""

    def acquire(self, claim, wait):
        if claim.shared:
            self.service.place(claim.name).waiting.clear()
        return super().acquire(claim, wait)


class NoExclusion(SharedStubBackend):
    """A reader is let in beside a writer."""

    def acquire(self, claim, wait):
        place, kept = self.service.place(claim.name), {}
        if claim.shared:
            kept, place.holders = place.holders, {}
        try:
            return super().acquire(claim, wait)
        finally:
            place.holders = {**kept, **place.holders}


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    found = SharedStubService()
    monkeypatch.setattr(SharedStubBackend, "service", found)
    return found


def on(backend):
    return override_settings(
        FENCEDLOCK={"default": {"BACKEND": f"{backend.__module__}.{backend.__name__}"}}
    )


@pytest.fixture
def on_stub():
    with on(SharedStubBackend):
        yield


@real
class TestStub(SharedContract):
    backend = SharedStubBackend

    @pytest.fixture
    def prepared(self):
        with on(self.backend):
            yield

    # No other process sees it.

    @pytest.fixture
    def process(self):
        with another_thread() as thread:
            yield thread

    test_a_path_of_a_killed_process_is_free_before_its_ttl = None
    test_random_paths_of_eight_processes = None
    test_another_process_shares_and_is_excluded = None
    test_readers_and_writers_of_several_processes = None
    test_the_lease_of_a_dead_reader_ends_alone = None
    test_a_writer_evicts_dead_readers = None


class TestStubWithoutTokens(TestStub):
    backend = NoTokens


# Recording


@pytest.fixture
def make():
    made = []

    def process(backend=SharedStubBackend):
        found = Service("default", backend(conf.config("default")))
        without_threads(found.keeper)
        made.append(found)
        return found.grants

    yield process
    for each in made:
        each.keeper.doubts.clear()


def claim_of(shared):
    return new_claim("x", 30, shared=shared)


def take(step, shared=True):
    answer = step.acquire(claim_of(shared), Wait())
    assert not isinstance(answer, Held)
    return answer[0]


def fence():
    return Fence.objects.values_list("token", "owner").get(name="x")


@real
def test_a_reader_reads_the_fence_before_it_asks_the_service(make, stub, monkeypatch):
    """In the other order, it may return the token of a writer that came in between."""
    former, present = make(), make()
    claim, writers = claim_of(True), []
    granted = former.backend.acquire(claim, Wait())
    verify = former.backend.verify

    def then_overtaken(grant):
        held = verify(grant)
        if not writers:
            stub.places.clear()
            writers.append(take(present, shared=False))
        return held

    monkeypatch.setattr(former.backend, "verify", then_overtaken)
    assert former.confirm(claim, granted) is None
    assert fence() == (1, writers[0].owner)


@real
def test_a_reader_starts_again_if_another_one_raised_the_fence(make, monkeypatch):
    step, other = make(), make()
    writer = take(step, shared=False)
    step.release(writer)
    read, others = step.fences.read, []

    def then_raised(name):
        found = read(name)
        if not others:
            others.append(take(other))
        return found

    monkeypatch.setattr(step.fences, "read", then_raised)
    grant = take(step)
    assert grant.token == others[0].token == 2
    assert fence() == (2, "shared")


@real
def test_a_reader_after_a_forced_release_raises_the_fence_again(make):
    Fence.objects.create(name="x", token=7, owner="")
    step = make()
    assert [take(step).token, take(step).token] == [8, 8]
    assert fence() == (8, "shared")


@real
def test_a_service_with_a_counter_is_told_of_the_first_reader_alone(make, stub, caplog):
    step = make()
    told = []
    step.backend.suggest = lambda name, floor: told.append(floor)
    take(step)
    take(step)
    assert told == [1]
    del step.backend.suggest
    stub.places.clear()
    # Nor is it a warning that the readers were ahead.
    assert take(step, shared=False).token == 2
    assert not caplog.records


@real
def test_a_reader_that_expired_while_it_was_recorded_is_no_grant(make, stub, monkeypatch):
    step = make()
    record, clock = step.fences.record, step._clock

    def pause(*args):
        monkeypatch.setattr(step, "_clock", lambda: clock() + 31)
        return record(*args)

    monkeypatch.setattr(step.fences, "record", pause)
    assert isinstance(step.acquire(claim_of(True), Wait()), Held)
    assert not stub.place("x").holders


@real
def test_a_writer_that_expired_while_it_was_recorded_is_no_grant_beside_a_reader(
    make, stub, monkeypatch
):
    """A reader doesn't change the fence of other readers: only the deadline ends the writer."""
    step, other = make(NoTokens), make(NoTokens)
    step.release(take(step))
    readers, verify, clock = [], step.backend.verify, step._clock

    def pause(grant):
        held = verify(grant)
        stub.places.clear()
        readers.append(take(other))
        return held

    def then_late(*args):
        monkeypatch.setattr(step, "_clock", lambda: clock() + 31)
        return record(*args)

    record = step.fences.record
    monkeypatch.setattr(step.backend, "verify", pause)
    monkeypatch.setattr(step.fences, "record", then_late)
    claim = claim_of(False)
    granted = step.backend.acquire(claim, Wait())
    assert step.confirm(claim, granted) is None
    assert other.backend.verify(readers[0])


# Entering again, and errors


@real
def test_a_backend_without_shared_locks_is_named_with_those_that_have_them(settings, monkeypatch):
    urls = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    settings.FENCEDLOCK = {"default": {"BACKEND": REDLOCK, "LOCATION": urls}}
    monkeypatch.setitem(conf.BACKENDS, "stub", "tests.shared_stub.SharedStubBackend")
    with pytest.raises(SettingsError, match=r"'default' \(redlock\) has exclusive.*: .*\bstub\."):
        lock("x", shared=True).acquire()


@real
@pytest.mark.usefixtures("on_stub")
def test_an_upgrade_says_why_it_is_refused():
    with lock("x", shared=True) as lease:
        assert repr(lease).startswith("<Lease 'x' token 1, shared held")
        assert lease.holder.shared
        with pytest.raises(LockUpgrade, match="would wait for each other for ever") as caught:
            lock("x").acquire()
    assert (caught.value.name, caught.value.alias) == ("x", "default")
    assert not isinstance(caught.value, LockNotAcquired)
    assert repr(lock("x", shared=True)) == "lock('x', backend='default', shared=True)"


@real
@pytest.mark.usefixtures("on_stub")
def test_coroutines_share():
    async def read():
        async with lock("x", shared=True) as lease:
            await asyncio.sleep(0.01)
            with pytest.raises(LockUpgrade):
                await lock("x").aacquire()
            return lease.token, lease.owner_id

    async def main():
        return await asyncio.gather(read(), read())

    (token, owner), other = asyncio.run(main())
    assert other == (token, other[1])
    assert owner != other[1]


@real
@pytest.mark.usefixtures("on_stub")
def test_a_decorated_function_shares():
    @lock("x", shared=True)
    def read():
        return current_lease("x").shared

    assert read()
    assert not current_lease("x")


@real
@pytest.mark.usefixtures("on_stub")
def test_an_unfenced_reader_records_nothing():
    with lock("x", shared=True, fenced=False) as lease:
        assert lease.shared
        assert not Fence.objects.exists()


@real
@pytest.mark.usefixtures("on_stub")
def test_a_fenced_row_is_not_written_under_a_shared_lease():
    invoice = Invoice.objects.create(amount=1)
    with Invoice.fencing.lock(invoice.pk, shared=True) as lease:
        invoice = Invoice.objects.get(pk=invoice.pk)
        invoice.amount = 2
        for write in (
            invoice.save,
            lambda: invoice.save(lease=lease),
            invoice.delete,
            lambda: Invoice.objects.filter(pk=invoice.pk).update(amount=3),
        ):
            with pytest.raises(LockRequired, match="held shared here"):
                write()
        with lease.atomic():
            assert Invoice.objects.get(pk=invoice.pk).amount == 1
    with Invoice.fencing.lock(invoice.pk):
        invoice.save()


# Writers


@real
@pytest.mark.usefixtures("on_stub")
def test_a_dead_reader_is_evicted_and_the_next_one_is_looked_at(make, stub, monkeypatch):
    from django_fencedlock.core import grants as module
    from django_fencedlock.core.identity import new_owner

    step, gone = make(), []
    dead = [new_owner()._replace(pid=2**22 + number, pid_started=1) for number in (1, 2)]
    alive = new_owner()
    pids = [each.pid for each in dead]
    monkeypatch.setattr(module, "is_process_gone", lambda p: gone.append(p.pid) or p.pid in pids)
    for owner in (dead[0], alive, dead[1]):
        step.backend.acquire(new_claim("x", 30, owner=owner, shared=True), Wait())
    claim = claim_of(False)
    assert isinstance(step.acquire(claim, Wait()), Held)
    assert dead[0].id not in stub.place("x").holders
    del stub.place("x").holders[alive.id]
    assert not isinstance(step.acquire(claim, Wait()), Held)
    assert set(pids) < set(gone)


@real
def test_the_contract_finds_a_backend_that_starves_writers(stub, monkeypatch):
    with on(Unfair):
        case = TestStub()
        monkeypatch.setattr(TestStub, "slack", 0.7)
        with pytest.raises(LockNotAcquired):
            case.test_a_stream_of_readers_does_not_starve_a_writer("x", None)


@real
@pytest.mark.usefixtures("on_stub")
def test_the_keeper_renews_readers_and_notices_a_raised_fence_by_their_rows(stub):
    lease = lock("x", shared=True).acquire()
    keeper = service("default").keeper
    assert keeper.compare([lease]) == []
    # Another reader was released by force: this one keeps the lock.
    Fence.objects.update(token=5, owner="")
    assert keeper.compare([lease]) == []
    with pytest.raises(StaleFence), lease.atomic():
        pass
    stub.places.clear()
    with pytest.raises(LeaseLost):
        lease.renew()


@real
@pytest.mark.usefixtures("on_stub")
def test_a_forced_release_begins_again_if_a_late_grant_was_recorded(monkeypatch):
    """A reader may be about to record the number that follows this grant's."""
    Fence.objects.create(name="x", token=1, owner="former")
    backend = service("default").backend
    claim = claim_of(True)
    granted, holders, asked = backend.acquire(claim, Wait()), backend.holders, []

    def late(names):
        if not asked:
            Fence.objects.update(token=2, owner="late")
        asked.append(names)
        return holders(names)

    monkeypatch.setattr(backend, "holders", late)
    assert force_release("x", by="the boss").done
    assert len(asked) == 2
    assert fence() == (4, "")
    assert service("default").grants.confirm(claim, granted) is None


@real
@pytest.mark.usefixtures("on_stub")
def test_a_forced_release_that_begins_again_releases_no_other_holder(monkeypatch):
    lease = lock("x").acquire()
    backend = service("default").backend
    holders, asked = backend.holders, []

    def then_next(names):
        found = holders(names)
        if not asked:
            asked.append(names)
            lease.release()
            asked.append(take(service("default").grants, shared=False))
        return found

    monkeypatch.setattr(backend, "holders", then_next)
    done = force_release("x", by="the boss")
    assert done.outcome is Outcome.CHANGED_HANDS
    assert done.holder.owner_id == asked[1].owner
    assert fence() == (2, asked[1].owner)
    assert backend.verify(asked[1])


@real
@pytest.mark.usefixtures("on_stub")
def test_the_command_shows_and_releases_all_readers(make, capsys):
    grants = [take(make()), take(make())]
    call_command("fencedlock", "show", "x", "--no-color")
    shown = capsys.readouterr().out
    assert "shared by 2: " in shown
    assert "newest token 1, of readers" in shown
    call_command("fencedlock", "release", "x", "--yes", "--owner", grants[0].owner)
    assert "So are transactions under the leases that other" in capsys.readouterr().out
    assert service("default").backend.verify(grants[1])
    grants.append(take(make()))
    call_command("fencedlock", "release", "x", "--yes")
    assert "Further readers that lost it: 1." in capsys.readouterr().out
    assert not service("default").holders("x")


# Aids for tests of code that uses locks


@pytest.mark.django_db
def test_a_switched_off_lock_is_shared():
    with disable_locking(), lock("x", shared=True) as lease, lease.atomic():
        assert fence() == (lease.token, "shared") == (1, "shared")
        with hold_lock("x", shared=True) as other:
            assert other.token == 1


@pytest.mark.django_db
def test_a_test_holds_a_lock_as_a_reader():
    with hold_lock("x", shared=True) as other:
        with lock("x", shared=True) as lease, lease.atomic():
            assert lease.token == other.token
        with pytest.raises(LockNotAcquired, match=r"held by the reader .*hold_lock"):
            lock("x").__enter__()


@real
def test_a_test_loses_a_shared_lease():
    with pytest.raises(LeaseLost), lock("x", shared=True) as lease:
        lose_lease(lease)
        assert lease.lost
    assert fence()[0] == lease.token + 1


@real
@pytest.mark.usefixtures("on_stub")
def test_a_reader_whose_row_is_missing_is_not_overtaken():
    lease = lock("x", shared=True).acquire()
    HeldLock.objects.all().delete()
    keeper = service("default").keeper
    assert keeper.compare([lease]) == []
    assert HeldLock.objects.get().owner == lease.owner_id
    HeldLock.objects.all().delete()
    Fence.objects.update(token=2, owner="a writer")
    assert keeper.compare([lease]) == [lease]


@real
@pytest.mark.usefixtures("on_stub")
@pytest.mark.parametrize("shared", [False, True])
def test_a_lease_is_overtaken_by_a_grant_of_the_other_kind(stub, shared):
    """Two masters of the service granted it. Its row isn't that of the later grant."""
    lease = lock("x", shared=shared).acquire()
    stub.places.clear()
    with another_thread() as thread:
        later = thread.call(lock("x", shared=not shared).acquire, blocking=False)
        assert service("default").keeper.compare([lease, later]) == [lease]
        thread.call(later.release)


@real
def test_the_contract_finds_readers_beside_a_writer():
    with on(NoExclusion), another_thread() as thread, pytest.raises(AssertionError):
        TestStub().test_a_writer_excludes_readers("x", thread)


@real
def test_a_writer_whose_fence_was_raised_hears_of_no_reader():
    with lock("x") as lease:
        Fence.objects.update(token=5, owner="")
        with pytest.raises(StaleFence) as caught, lease.atomic():
            pass
        assert "reader" not in str(caught.value)
