"""Many coroutines that wait: for one lock, for many, and while a lock service is frozen."""

import asyncio
import contextlib
import threading
from functools import partial

import pytest

from django_fencedlock import lock
from django_fencedlock.core import aio
from django_fencedlock.core.aio import WAITERS
from django_fencedlock.core.manager import service
from tests.backends import REDIS

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])

#: Seconds after which a test has hung.
PATIENCE = 100.0


def within_patience(main):
    """Run a coroutine function, and fail with all its tasks cancelled if it hangs."""
    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    # A thread of a cancelled waiter would record its grant after the database was emptied.
    waiters = aio._threads.may_wait
    for _ in range(WAITERS):
        assert waiters.acquire(timeout=PATIENCE)
    waiters.release(WAITERS)


async def end(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_a_thousand_coroutines_get_one_lock_in_order_of_arrival():
    served, enough = [], asyncio.Event()

    async def work(number):
        async with lock("x", blocking_timeout=PATIENCE):
            served.append(number)
            if len(served) == 30:
                enough.set()

    async def main():
        async with lock("x"):
            tasks = [asyncio.create_task(work(number)) for number in range(1000)]
            await asyncio.sleep(0)
        await enough.wait()
        await end(tasks)
        assert served == list(range(len(served)))
        assert await lock("x", blocking_timeout=PATIENCE).aacquire()

    within_patience(main)


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_more_coroutines_than_may_wait_in_threads_nest_two_locks():
    inside = []

    async def work():
        async with lock("a", blocking_timeout=float("inf")):
            # So that all others wait for the outer lock.
            await asyncio.sleep(0.2 if not inside else 0)
            async with lock("b", blocking_timeout=float("inf")):
                inside.append(1)

    async def main():
        await asyncio.gather(*(work() for _ in range(2 * WAITERS)))
        assert len(inside) == 2 * WAITERS

    within_patience(main)


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_a_free_lock_is_granted_while_more_wait_than_may_in_threads():
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            for number in range(WAITERS + 4):
                await stack.enter_async_context(lock(f"held{number}"))
            tasks = [
                asyncio.create_task(lock(f"held{number}", blocking_timeout=PATIENCE).aacquire())
                for number in range(WAITERS + 4)
                for _ in range(2)
            ]
            async with lock("free", blocking_timeout=PATIENCE):
                assert not any(task.done() for task in tasks)
        # The lock of a task that has ended may be released by any code.
        for task in tasks:
            assert await (await task).arelease()

    within_patience(main)


@pytest.mark.usefixtures("backend")
def test_a_coroutine_that_waits_no_longer_holds_up_none_behind_it():
    async def main():
        wait = partial(lock("x").aacquire, blocking_timeout=PATIENCE)
        async with lock("x"):
            first, second, third, last = (asyncio.create_task(wait()) for _ in range(4))
            short = asyncio.create_task(lock("x").aacquire(blocking_timeout=0.1))
            assert await short is None
            await end([second, first])
        assert await (await third).arelease()
        assert await (await last).arelease()

    within_patience(main)


@pytest.mark.usefixtures("backend")
def test_the_holder_acquires_again_although_others_wait():
    async def main():
        async with lock("x") as lease:
            wait = partial(lock("x").aacquire, blocking_timeout=2 * PATIENCE)
            others = [asyncio.create_task(wait()) for _ in range(3)]
            await asyncio.sleep(0)
            async with lock("x", blocking_timeout=2 * PATIENCE) as again:
                assert again is lease
            await end(others)

    within_patience(main)


@pytest.mark.slow
def test_a_frozen_lock_service_holds_up_no_other(settings, make_redis, make_proxy):
    server = make_redis()
    proxy = make_proxy(server.host, server.port)
    frozen = {"BACKEND": REDIS, "LOCATION": f"redis://{proxy.host}:{proxy.port}/0"}
    settings.FENCEDLOCK = {"default": {}, "frozen": {**frozen, "OPTIONS": {"TIMEOUT": PATIENCE}}}

    async def hold(name, leave):
        async with lock(name, backend="frozen", fenced=False, ttl=600):
            await leave.wait()

    async def wait(name):
        async with lock(name, backend="frozen", fenced=False, blocking_timeout=PATIENCE):
            pass

    async def main():
        leave = asyncio.Event()
        tasks = [asyncio.create_task(hold(f"x{number}", leave)) for number in range(2 * WAITERS)]
        async with lock("healthy"):
            while not all([await lock(f"x{n}", backend="frozen").aholder() for n in range(32)]):
                await asyncio.sleep(0.01)
            proxy.black_hole()
            leave.set()
            tasks += [asyncio.create_task(wait(f"y{number}")) for number in range(2 * WAITERS)]
            await asyncio.sleep(0.1)
        async with lock("healthy", blocking_timeout=PATIENCE):
            assert not any(task.done() for task in tasks)
        proxy.pass_through()
        await asyncio.gather(*tasks)

    within_patience(main)


def test_a_lock_whose_release_was_cancelled_is_granted_anew(monkeypatch):
    backend, may_go_on = service("default").backend, threading.Event()
    release = backend.release

    def release_late(grant):
        assert may_go_on.wait(PATIENCE)
        return release(grant)

    async def main():
        former = await lock("x").aacquire()
        monkeypatch.setattr(backend, "release", release_late)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await former.arelease()
        asyncio.get_running_loop().call_later(0.2, may_go_on.set)
        async with lock("x", blocking_timeout=PATIENCE) as lease:
            assert lease is not former
            assert await lease.averify()

    within_patience(main)
