"""What is typed without the stubs of Django and Celery; `.ci/package` has none installed."""

import threading
from collections.abc import Coroutine
from typing import Any, assert_type

from django_fencedlock import (
    Holder,
    Lease,
    LeaseSet,
    LockNotAcquired,
    current_lease,
    current_leases,
    lock,
    lock_all,
)
from django_fencedlock.celery import SkippedRun, lock_names, single_instance


def blocks() -> None:
    with lock("invoice:42", ttl=30, blocking_timeout=5) as lease:
        assert_type(lease, Lease)
        assert_type(lease.token, int)
        assert_type(lease.remaining(), float)
        assert_type(lease.verify(), bool)
        with lease.atomic():
            pass
    with lock("invoice:42", blocking_timeout=None, required=False) as found:
        assert_type(found, Lease | None)
    assert_type(lock("invoice:42").acquire(blocking=False), Lease | None)
    if (acquired := lock("invoice:42").acquire(cancel=threading.Event())) is not None:
        with acquired as lease:
            assert_type(lease, Lease)
            assert_type(lease.holder, Holder)
    assert_type(current_lease(), Lease | None)
    try:
        lock("x").acquire()
    except LockNotAcquired as exc:
        assert_type(exc.name, str)
        assert_type(exc.holder, Holder | None)


def sets() -> None:
    with lock_all("account:1", "account:2", ttl=30) as leases, leases.atomic():
        assert_type(leases, LeaseSet)
        assert_type(leases["account:1"], Lease)
        assert_type(leases.lost, bool)
        leases.on_lost(print)
    with lock_all({"account:1", "account:2"}, required=False) as found:
        assert_type(found, LeaseSet | None)
    assert_type(lock_all(["account:1"]).acquire(blocking=False), LeaseSet | None)


async def asynchronous() -> None:
    async with lock_all("account:1", "account:2") as leases:
        assert_type(leases, LeaseSet)
        assert_type(await leases.averify(), bool)
        await leases.arenew(ttl=60)
    async with lock("invoice:42") as lease:
        assert_type(lease, Lease)
        assert_type(await lease.averify(), bool)
        await lease.arenew(ttl=60)
    async with lock("invoice:42", required=False) as found:
        assert_type(found, Lease | None)


@lock("report:{user_id}", ttl=60)
def build(user_id: int, fresh: bool = False) -> str:
    return f"{user_id} {fresh}"


@lock("feed:{url}")
async def fetch(url: str) -> bytes:
    return url.encode()


@single_instance("invoice:{invoice_id}", ttl=30, on_conflict="retry")
def charge(invoice_id: int, currency: str = "EUR") -> str:
    return f"{invoice_id} {currency}"


@single_instance
def nightly() -> int:
    return 1


@single_instance(["account:{source}", "account:{target}"])
def transfer(source: int, target: int) -> int:
    if (leases := current_leases()) is not None:
        assert_type(leases["account:1"], Lease)
    return source


def calls() -> None:
    assert_type(build(7, fresh=True), str)
    download: Coroutine[Any, Any, bytes] = fetch("x")
    download.close()
    assert_type(charge(1, currency="USD"), str)
    assert_type(nightly(), int)
    assert_type(transfer(1, target=2), int)
    assert_type(current_leases(), LeaseSet | None)
    assert_type(lock_names(transfer, 1, 2), tuple[str, ...])
    assert_type(SkippedRun.of({}), SkippedRun | None)
