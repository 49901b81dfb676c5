"""`lock(path=True)`: misuse, names, templates, and rows whose locks are paths."""

import asyncio
import gc
import threading

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction

from django_fencedlock import (
    LeaseLost,
    LockNotAcquired,
    LockRequired,
    LockUpgrade,
    SettingsError,
    StaleFence,
    current_lease,
    lock,
    lock_all,
)
from django_fencedlock.core import names
from django_fencedlock.core.manager import service
from django_fencedlock.models import Fencing
from django_fencedlock.models.writes import Write
from django_fencedlock.test import disable_locking, expire_lease, hold_lock, lose_lease
from django_fencedlock.test.processes import another_thread
from tests.backends import REDLOCK
from tests.models import Bin
from tests.test_write_paths import awaited

pytestmark = pytest.mark.django_db(transaction=True)
PATH = "warehouse/7/shelf/3"
NAMES = ("warehouse [path]", "warehouse/7 [path]", "warehouse/7/shelf [path]", f"{PATH} [path]")


@pytest.fixture
def thread():
    with another_thread() as thread:
        yield thread


def is_free(thread, path):
    lease = thread.call(lock(path, path=True).acquire, blocking=False)
    return lease is not None and thread.call(lease.release)


# Names


def test_the_order_by_bytes_is_root_first():
    # Of each character that a part may begin or go on with: the ending comes before.
    for part in ("a", "-", "!", " ", "~", "é", "日", "\x01", "a [path]", "a [permit 1]"):
        found = names.path_names(f"{part}/{part}/{part}b/x")
        assert sorted(found) == list(found)
        assert sorted(found, key=str.encode) == list(found)
        assert len(set(found)) == 4
    assert names.path_names(PATH) == NAMES


def test_each_name_stands_for_one_path():
    # Names that end like this, or have such parts.
    assert set(names.path_names("a [path]/b")).isdisjoint(names.path_names("a/b"))
    assert names.read_path("a [path] [path]") == "a [path]"
    assert names.read_path("a") == "a"


@pytest.mark.parametrize("name", ["a//b", "/a", "a/", "/", "//"])
def test_an_empty_part_is_an_error(name):
    with pytest.raises(ValueError, match="has an empty part"):
        lock(name, path=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "can't be empty"),
        ("/".join("a" * 51), "has 51 parts; 50 are allowed"),
        ("a" * 194, "194 characters; 193 are allowed"),
        ("a" * 201, "201 characters; 200 are allowed"),
        ("a/b [path]", r"lock\('a/b', path=True\)"),
    ],
)
def test_a_name_that_can_not_be_a_path(name, text):
    with pytest.raises(ValueError, match=text):
        lock(name, path=True)


def test_no_other_lock_has_the_name_of_a_path():
    for wrong in (lambda: lock(NAMES[0]), lambda: lock_all("a", NAMES[0])):
        with pytest.raises(ValueError, match=r"lock\('warehouse', path=True\)"):
            wrong()
    with pytest.raises(ValueError, match="ends like the name of a path"):
        lock(NAMES[0], limit=2)


@pytest.mark.parametrize("kind", [{"shared": True}, {"limit": 2}])
def test_a_path_is_of_no_other_kind(kind):
    with pytest.raises(TypeError, match=f"has path= and {next(iter(kind))}="):
        lock(PATH, path=True, **kind)


@pytest.mark.parametrize("path", ["warehouse", PATH])
def test_a_backend_without_shared_locks(settings, path):
    urls = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    settings.FENCEDLOCK = {"default": {"BACKEND": REDLOCK, "LOCATION": urls}}
    with pytest.raises(SettingsError, match=r"Path '.*' can't be locked: .*Remove path=True"):
        lock(path, path=True).acquire()


def test_its_repr():
    assert repr(lock("a/b", path=True)) == "lock('a/b', backend='default', path=True)"


# Holding


def test_a_lease_is_that_of_the_end_and_has_those_above():
    with lock(PATH, path=True, ttl=20) as lease:
        assert (lease.name, lease.ttl, lease.shared) == (NAMES[3], 20, False)
        assert [each.name for each in lease.above] == [*reversed(NAMES[:3])]
        assert all(each.shared and each.ttl == 20 for each in lease.above)
        lease.renew(ttl=30)
        assert {each.ttl for each in (lease, *lease.above)} == {30}
        assert current_lease() is lease
        assert current_lease(NAMES[3]) is lease
        assert current_lease(NAMES[1]) is lease.above[1]
        assert lease.verify()
        assert not lease.lost
    assert all(each.released for each in (lease, *lease.above))
    assert current_lease() is None
    assert current_lease(NAMES[1]) is None


def test_a_path_of_one_part_is_a_lock_without_others(thread):
    with lock("warehouse", path=True) as lease, lease.atomic():
        assert lease.above == ()
    assert is_free(thread, "warehouse")


def test_an_unfenced_path(thread):
    with lock(PATH, path=True, fenced=False):
        assert not is_free(thread, "warehouse")
    assert is_free(thread, "warehouse")


def test_those_above_end_first():
    with lock("warehouse/8", path=True, ttl=5) as outer, lock(PATH, path=True) as lease:
        assert lease.above[-1] is outer.above[-1]
        assert lease.remaining() <= 5


def test_a_lock_above_that_has_expired_ends_the_path():
    with lock(PATH, path=True) as lease:
        expire_lease(lease.above[1])
        assert lease.expired
        with pytest.raises(LeaseLost, match=r"'warehouse/7 \[path\]'.*its ttl"):
            lease.check()
        lease.renew()
        lease.check()


def test_not_required(thread):
    held = thread.call(lock("warehouse/7", path=True).acquire)
    with lock(PATH, path=True, required=False, blocking_timeout=0) as lease:
        assert lease is None
    with pytest.raises(LockNotAcquired, match=r"'warehouse/7 \[path\]' is held by"):
        lock(PATH, path=True, blocking_timeout=0).__enter__()
    thread.call(held.release)


def test_the_refusal_by_a_holder_beneath(thread):
    lease = thread.call(lock(PATH, path=True).acquire)
    with pytest.raises(LockNotAcquired, match="is held by a holder beneath it, "):
        lock("warehouse", path=True, blocking_timeout=0).__enter__()
    thread.call(lease.release)


def test_a_nested_path_counts_once_for_those_above(thread):
    lease = lock(PATH, path=True).acquire()
    again = lock(PATH, path=True).acquire()
    assert again is lease
    assert {each.entries for each in lease.above} == {1}
    beside = lock("warehouse/7/shelf/4", path=True).acquire()
    assert beside.above == lease.above
    assert {each.entries for each in lease.above} == {2}
    assert lease.release()
    assert lease.verify()
    assert lease.release()
    assert not is_free(thread, "warehouse/7")
    assert beside.verify()
    assert beside.release()
    assert is_free(thread, "warehouse")


def test_a_refused_path_leaves_the_entries_of_those_above_as_they_were(thread):
    held = thread.call(lock("warehouse/7/shelf/4", path=True).acquire)
    with lock(PATH, path=True) as lease:
        assert lock("warehouse/7/shelf/4", path=True).acquire(blocking=False) is None
        for wrong in ("warehouse/7", f"{PATH}/a"):
            with pytest.raises(LockUpgrade):
                lock(wrong, path=True).acquire()
        assert {each.entries for each in lease.above} == {1}
    thread.call(held.release)
    assert is_free(thread, "warehouse")


def test_the_loss_of_a_path_is_not_that_of_another_one_beside_it():
    with lock(PATH, path=True) as lease:
        beside = lock("warehouse/7/shelf/4", path=True).acquire()
        lose_lease(beside)
        assert beside.lost
        assert not beside.release()
        assert lease.verify()
        with lease.atomic():
            pass


def test_the_loss_of_a_lock_above_is_that_of_all_paths_beneath():
    lost = []
    with pytest.raises(LeaseLost), lock(PATH, path=True) as lease:
        lease.on_lost(lost.append)
        beside = lock("warehouse/7/shelf/4", path=True).acquire()
        with_loss = threading.Event()
        beside.on_lost(lambda _: with_loss.set())
        lose_lease(lease.above[1])
        assert with_loss.wait(10)
        assert lease.lost
        for each in (lease, beside):
            with pytest.raises(LeaseLost, match=r"'warehouse/7 \[path\]'"):
                each.check()
            with pytest.raises(LeaseLost):
                each.renew()
            with pytest.raises(LeaseLost), each.atomic():
                pytest.fail("the block was entered")
        assert not beside.release()
    assert lost == [lease]


def test_the_service_is_asked_about_each_lock():
    for level in range(3):
        lease = lock(PATH, path=True).acquire()
        assert service("default").backend.release(lease.above[level].grant)
        assert not lease.verify()
        assert lease.lost
        assert not lease.release()


def test_a_lock_above_keeps_no_path_that_was_released():
    with lock("warehouse/7/shelf/4", path=True) as lease:
        for _ in range(3):
            with lock(PATH, path=True):
                pass
        assert {len(each._interrupts) for each in lease.above} == {1}


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_a_release_inside_a_transaction_waits_for_its_end(settings, thread):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
    with transaction.atomic(using="postgres"):
        with lock(PATH, path=True) as lease:
            pass
        assert not lease.released
        # Entered again before the end, and held beyond it.
        assert lock(PATH, path=True).acquire() is lease
        assert {each.entries for each in lease.above} == {1}
    assert lease.verify()
    assert not is_free(thread, "warehouse")
    assert lease.release()
    assert is_free(thread, "warehouse")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_abandoned_path_is_released(thread):
    def abandon():
        lock(PATH, path=True).acquire()

    holder = threading.Thread(target=abandon)
    holder.start()
    holder.join()
    del holder
    gc.collect()
    lease = thread.call(lock("warehouse", path=True).acquire, blocking_timeout=10)
    assert lease is not None
    thread.call(lease.release)


def test_an_interrupt_after_the_grants_leaves_nothing(thread, monkeypatch):
    from django_fencedlock.core import paths

    def interrupt(leaf, above):
        raise KeyboardInterrupt

    with lock("warehouse/7/shelf/4", path=True) as lease:
        monkeypatch.setattr(paths, "put_beneath", interrupt)
        for acquire in (lock(PATH, path=True).acquire, lock(PATH, path=True).__enter__):
            with pytest.raises(KeyboardInterrupt):
                acquire()
        monkeypatch.undo()
        assert {each.entries for each in lease.above} == {1}
        assert is_free(thread, PATH)
        assert lease.verify()
    assert is_free(thread, "warehouse")


def test_an_interrupt_after_the_path_was_made_leaves_nothing(thread, monkeypatch):
    from django_fencedlock import locks

    def interrupt(lease):
        raise KeyboardInterrupt

    with lock("warehouse/7/shelf/4", path=True) as lease:
        monkeypatch.setattr(locks, "enter", interrupt)
        for acquire in (lock(PATH, path=True).acquire, lock(PATH, path=True).__enter__):
            with pytest.raises(KeyboardInterrupt):
                acquire()
        monkeypatch.undo()
        assert {each.entries for each in lease.above} == {1}
        assert is_free(thread, PATH)
        assert lease.verify()
    assert is_free(thread, "warehouse")


def test_coroutines(thread):
    async def hold():
        async with lock(PATH, path=True) as lease:
            assert await lease.averify()
            await lease.arenew(ttl=20)
            assert not await asyncio.to_thread(is_free, thread, "warehouse/7")
            async with lock(PATH, path=True) as again:
                assert again is lease
            with pytest.raises(LockUpgrade):
                await lock("warehouse/7", path=True).aacquire()
        found = await lock(PATH, path=True).aacquire(blocking_timeout=5)
        held = await asyncio.to_thread(lock("warehouse/7", path=True).acquire, blocking=False)
        assert held is None
        assert await found.arelease()

    awaited(hold)
    assert is_free(thread, "warehouse")


def test_a_waiter_for_the_lock_of_the_same_text_is_not_behind_that_of_a_path(thread):
    held = thread.call(lock("a/b", path=True).acquire)
    plain = thread.call(lock("a/b").acquire)

    async def wait_for_both():
        path = asyncio.ensure_future(lock("a/b", path=True, blocking_timeout=60).aacquire())
        waiting = asyncio.ensure_future(lock("a/b", blocking_timeout=60).aacquire())
        await asyncio.sleep(0.1)
        await asyncio.to_thread(thread.call, plain.release)
        found = await asyncio.wait_for(waiting, 30)
        assert not path.done()
        await asyncio.to_thread(thread.call, held.release)
        await found.arelease()
        found = await path
        await found.arelease()

    awaited(wait_for_both)


def test_a_cancelled_wait_leaves_nothing(thread):
    held = thread.call(lock(PATH, path=True).acquire)

    async def wait():
        async with lock(PATH, path=True, blocking_timeout=30):
            pytest.fail("the block was entered")

    async def cancel():
        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    awaited(cancel)
    thread.call(held.release)
    lease = thread.call(lock("warehouse", path=True).acquire, blocking_timeout=10)
    assert thread.call(lease.release)


def test_within_a_transaction_of_a_test(db):
    with lock(PATH, path=True) as lease, lease.atomic():
        assert lease.verify()


@pytest.mark.django_db(transaction=False)
class TestInTestCase:
    def test_a_path_is_held_and_released(self):
        with lock(PATH, path=True) as lease, lease.atomic():
            assert lease.verify()
        with lock("warehouse/7", path=True) as lease:
            assert lease.verify()


def test_another_holder_of_a_test():
    with hold_lock(PATH, path=True):
        for path in (PATH, f"{PATH}/a", "warehouse"):
            assert lock(path, path=True, blocking_timeout=60).acquire() is None
        with lock("warehouse/7/shelf/4", path=True):
            pass
    with lock("warehouse", path=True):
        pass


def test_disabled_locks():
    with disable_locking(), lock(PATH, path=True) as lease, lease.atomic():
        assert lease.verify()


# Templates


def test_a_decorator_names_a_path_by_arguments(thread):
    @lock("warehouse/{warehouse}/shelf/{shelf}", path=True)
    def count(warehouse, shelf):
        assert not is_free(thread, f"warehouse/{warehouse}")
        return current_lease().name

    assert count(7, 3) == NAMES[3]
    for wrong in ("3/4", "/", "3/"):
        with pytest.raises(ValueError, match="contains '/'"):
            count(7, wrong)
    with pytest.raises(ValueError, match="has an empty part"):
        count(7, "")
    with pytest.raises(ValueError, match="has an empty part"):
        lock("{warehouse}//{shelf}", path=True)


# Rows


@pytest.fixture
def row():
    with Bin.fencing.lock(warehouse_id=7, code="a") as lease, lease.atomic():
        return Bin.objects.create(warehouse_id=7, code="a")


def test_the_lock_of_a_row(row):
    assert Bin.fencing.lock(warehouse_id=7, code="a").name == "warehouse/7/bin/a"
    with row.fencing.lock() as lease:
        assert lease.name == "warehouse/7/bin/a [path]"
        assert len(lease.above) == 3
    # A value adds no level.
    assert Bin(warehouse_id=7, code="a/b").fencing.lock().name == "warehouse/7/bin/a%2Fb"
    assert Bin(warehouse_id=7, code="a%2Fb").fencing.lock().name == "warehouse/7/bin/a%252Fb"
    with pytest.raises(ValueError, match="has an empty part"):
        Bin.fencing.lock(warehouse_id=7, code="")


WRITES = {
    "save": lambda row: row.save(),
    "update_fields": lambda row: row.save(update_fields=["count"]),
    "update": lambda row: Bin.objects.filter(pk=row.pk).update(count=5),
    "bulk_update": lambda row: Bin.objects.bulk_update([row], ["count"]),
    "delete": lambda row: row.delete(),
    "delete_all": lambda row: Bin.objects.filter(pk=row.pk).delete(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_row_is_written_inside_atomic_alone(row, write):
    with row.fencing.lock() as lease:
        row.refresh_from_db()
        row.count = 5
        with pytest.raises(LockRequired, match=r"outside of lease.atomic\(\).*as lease, lease"):
            WRITES[write](row)
        with pytest.raises(LockRequired), transaction.atomic():
            WRITES[write](row)
        with lease.atomic():
            WRITES[write](row)
        found = Bin.objects.filter(code="a").first()
        if write.startswith("delete"):
            assert found is None
        else:
            assert (found.count, found.fence) == (5, lease.token)


@pytest.mark.parametrize("write", WRITES)
def test_a_row_is_not_written_without_its_path(row, write):
    with pytest.raises(LockRequired, match=r"as lease, lease\.atomic"):
        WRITES[write](row)
    above = lock("warehouse/7", path=True)
    with above as lease, lease.atomic(), pytest.raises(LockRequired, match="no row beneath"):
        WRITES[write](row)
    plain = lock("warehouse/7/bin/a")
    with plain as lease, lease.atomic(), pytest.raises(LockRequired):
        WRITES[write](row)


def test_a_row_is_added_inside_atomic_alone():
    for add in (
        lambda: Bin(warehouse_id=7, code="b").save(),
        lambda: Bin.objects.create(warehouse_id=7, code="b"),
        lambda: Bin.objects.bulk_create([Bin(warehouse_id=7, code="b")]),
    ):
        with pytest.raises(LockRequired):
            add()
        with Bin.fencing.lock(warehouse_id=7, code="b") as lease:
            with pytest.raises(LockRequired):
                add()
            with lease.atomic():
                add()
                found = Bin.objects.get(code="b")
                assert found.fence == lease.token
                found.delete()


def test_a_new_row_with_a_key_of_its_own_needs_its_path_as_well():
    """The holder of a path above it relies on the rows beneath it."""
    assert Fencing("a/{pk}").__get__(None, Bin).is_of_own_pk
    assert not Fencing("a/{pk}", path=True).__get__(None, Bin).is_of_own_pk


def test_a_holder_relies_on_the_check_whatever_is_allowed(row, monkeypatch):
    monkeypatch.setattr(Bin.fencing.spec, "_without_lock", "allow")
    row.save()
    with row.fencing.lock() as lease:
        row.refresh_from_db()
        with pytest.raises(LockRequired, match="outside"):
            row.save()
        with lease.atomic():
            row.save()


def test_a_write_that_was_prepared_inside_is_not_sent_outside(row):
    with row.fencing.lock() as lease:
        with lease.atomic():
            name = row.fencing.name()
            write = Write(Bin.fencing, "default", "Saving", name, row=row).under(None)
            assert write.pin(connections["default"]) is None
        with pytest.raises(LockRequired, match="outside"):
            write.pin(connections["default"])


def test_the_late_write_of_a_paused_holder_is_rejected(row, thread):
    lease = row.fencing.lock(ttl=5).acquire()
    for each in (lease, *lease.above):
        expire_lease(each)
    ancestor = thread.call(lock("warehouse/7", path=True).acquire, blocking_timeout=10)
    with pytest.raises(StaleFence, match=r"'warehouse/7 \[path\]'"), lease.atomic():
        row.save()
    assert thread.call(ancestor.release)
    with pytest.raises((StaleFence, LeaseLost)), lease.atomic():
        row.save()
    lease.release()


def test_several_rows_by_paths_one_in_the_other(row):
    other = Bin.fencing.lock(warehouse_id=8, code="b")
    with row.fencing.lock() as one, other as two, one.atomic(), two.atomic():
        row.refresh_from_db()
        row.save()
        Bin.objects.create(warehouse_id=8, code="b")
    with pytest.raises(TypeError, match="its locks are paths"):
        Bin.fencing.lock_all(Bin.objects.all())


def test_one_token_of_a_row_needs_the_serialised_mode():
    with pytest.raises(ImproperlyConfigured, match="Remove mode="):
        Fencing("a/{pk}", path=True, mode="high_water")
    with pytest.raises(ValueError, match="empty part"):
        Fencing("a//{pk}", path=True).__get__(None, Bin)


def test_a_callable_names_a_path():
    found = Fencing(lambda row: f"bins/{row.code}", path=True).__get__(None, Bin)
    assert found.name_of_row(Bin(code="x")) == "bins/x [path]"


def test_the_service_is_asked_for_all(thread):
    lease = thread.call(lock(PATH, path=True).acquire)
    assert set(service("default").backend.holders(NAMES)) == set(NAMES)
    thread.call(lease.release)
    assert not service("default").backend.holders(NAMES)
