"""Holders and their leases."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from ...core.grants import holder_of
from ...core.identity import Holder
from ...core.runtime import clock
from ...exceptions import LeaseLost, LockNotAcquired, NotTheHolder
from ...lease import Lease, current_lease
from ..processes import TIMEOUT, AnotherProcess, AnotherThread, another_thread, wait_until
from . import acts
from .base import SHORT, Contract, counted_batches, keepers, open_files
from .naming import ODD_NAMES

#: A ttl whose renewals aren't late on a busy machine: the lease would be lost.
RENEWED = 5.0

#: Ways to run a function in a thread that other tasks use too.
IN_THREADS: dict[str, Callable[..., Callable[..., Coroutine[Any, Any, Any]]]] = {
    "sync_to_async": sync_to_async,
    "any thread": lambda function: sync_to_async(function, thread_sensitive=False),
    "to_thread": lambda function: partial(asyncio.to_thread, function),
}


class HoldingContract(Contract):
    """One holder: who may acquire again, read and release its lease."""

    # Blocks of a lease

    def test_a_block_of_an_acquired_lease_releases_it(self, name: str) -> None:
        with self.take(name) as lease:
            assert current_lease(name) is lease
            assert not self.is_free(name)
            # A nested one ends one of the two acquires.
            with self.take(name) as again:
                assert again is lease
            assert lease.verify()
            assert not self.is_free(name)
        assert current_lease(name) is None
        assert self.is_free(name)
        with pytest.raises(LeaseLost, match="it was released"), lease:
            pass

        async def main() -> None:
            acquired = await self.lock(name).aacquire()
            assert acquired is not None
            async with acquired as lease:
                assert not await asyncio.to_thread(self.is_free, name)
                assert current_lease(name) is lease
            assert current_lease(name) is None

        asyncio.run(main())
        assert self.is_free(name)

    def test_a_block_of_a_lost_lease_ends_with_its_loss(
        self, name: str, thread: AnotherThread
    ) -> None:
        for how in ("lost before", "lost in it", "lost in a block that fails"):
            lease = self.take(name, ttl=SHORT)
            if how == "lost before":
                self.lose(lease, thread)
            error = ValueError if how == "lost in a block that fails" else LeaseLost
            with pytest.raises(error), lease:
                assert how != "lost before"
                self.lose(lease, thread)
                if error is ValueError:
                    raise ValueError
            # The loss is no more in the way of this thread.
            self.take(name).release()

    def lose(self, lease: Lease, thread: AnotherThread) -> None:
        """Let another holder acquire the lock, and release it."""
        self.interrupt_holder(lease)
        successor = thread.call(self.take_when_free, lease.name)
        thread.call(successor.release)
        assert not lease.verify()

    # Holders

    def test_acquiring_again_returns_the_same_lease_and_counts(
        self, name: str, thread: AnotherThread
    ) -> None:
        with self.lock(name) as outer:
            with self.lock(name) as inner:
                assert inner is outer
            assert not self.is_free_for(thread, name)
            again = self.lock(name).acquire(blocking=False)
            assert again is outer
            assert again.release()
            assert outer.verify()
            assert not self.is_free_for(thread, name)
        assert self.is_free_for(thread, name)
        with self.lock(name) as after:
            # One token for all entries, and one for the thread's try.
            assert self.is_next(after.token, outer.token, grants=2)

    def test_an_unfenced_lock_is_not_acquired_again_as_fenced(self, name: str) -> None:
        refused = pytest.raises(LockNotAcquired, match="fenced=False")
        with self.lock(name, fenced=False), refused:
            self.lock(name).acquire(blocking=False)

    def test_only_the_thread_that_acquired_may_release(
        self, name: str, thread: AnotherThread
    ) -> None:
        with self.lock(name) as lease:
            with pytest.raises(NotTheHolder):
                thread.call(lease.release)
            assert lease.verify()
            assert not self.is_free_for(thread, name)

    def test_only_the_task_that_acquired_may_release(self, name: str) -> None:
        async def main() -> None:
            async with self.lock(name) as lease:
                with pytest.raises(NotTheHolder):
                    await asyncio.create_task(lease.arelease())
                assert await lease.averify()
                assert await asyncio.create_task(self._is_taken(name))

        asyncio.run(main())
        assert self.is_free(name)

    @pytest.mark.parametrize("block", ["lock", "lease"])
    def test_a_generator_that_another_thread_deletes_releases_its_lock(
        self, name: str, thread: AnotherThread, block: str
    ) -> None:
        def rows() -> Iterator[None]:
            with self.lock(name) if block == "lock" else self.take(name):
                yield

        begun = [rows()]
        next(begun[0])
        # It was the last reference, as if the garbage collector had run there.
        thread.call(begun.clear)
        wait_until(lambda: self.is_free(name), "the lock of a deleted generator")

    @pytest.mark.parametrize("block", ["lock", "lease"])
    def test_an_abandoned_async_generator_releases_its_lock(self, name: str, block: str) -> None:
        async def rows() -> AsyncIterator[int]:
            wanted = self.lock(name)
            async with wanted if block == "lock" else await wanted.aacquire():  # type: ignore[union-attr]
                yield 1
                yield 2

        async def main() -> None:
            async for _ in rows():
                break
            # The event loop closes it in another task.
            await asyncio.to_thread(
                wait_until, lambda: self.is_free(name), "the lock of a deleted generator"
            )

        asyncio.run(main())

    def test_a_deleted_coroutine_releases_its_lock(self, name: str) -> None:
        async def wait() -> None:
            async with self.lock(name):
                await asyncio.Event().wait()

        begun = wait()
        loop = asyncio.new_event_loop()
        try:
            task = loop.create_task(begun)
            while self.is_free(name):
                loop.run_until_complete(asyncio.sleep(0.01))
                assert not task.done()
        finally:
            loop.close()
        begun.close()
        wait_until(lambda: self.is_free(name), "the lock of a deleted coroutine")

    def test_a_child_task_is_another_holder_that_may_read_the_lease(self, name: str) -> None:
        async def child() -> Lease | None:
            assert await self._is_taken(name)
            return current_lease(name)

        async def main() -> None:
            async with self.lock(name) as lease:
                assert await asyncio.create_task(child()) is lease

        asyncio.run(main())

    def test_a_copied_context_is_another_holder_that_may_read_the_lease(
        self, name: str, thread: AnotherThread
    ) -> None:
        with self.lock(name) as lease:
            context = contextvars.copy_context()
            assert thread.call(context.run, current_lease, name) is lease
            assert not thread.call(context.run, self.try_to_take, name)

    def test_a_thread_that_inherits_nothing_has_no_lease(
        self, name: str, thread: AnotherThread
    ) -> None:
        with self.lock(name) as lease:
            assert current_lease(name) is lease
            assert thread.call(current_lease, name) is None
        assert current_lease(name) is None

    @pytest.mark.parametrize("calls", IN_THREADS)
    def test_tasks_that_lock_in_threads_exclude_each_other(self, name: str, calls: str) -> None:
        in_thread = IN_THREADS[calls]
        inside: list[int] = []
        tokens: list[int] = []

        # The frames of the async generator hide the task from the thread.
        @contextlib.asynccontextmanager
        async def locked() -> AsyncIterator[Lease]:
            while (lease := await in_thread(self.lock(name).acquire)(blocking=False)) is None:
                await asyncio.sleep(0.005)
            try:
                yield lease
            finally:
                assert await in_thread(lease.release)()

        async def work() -> None:
            async with locked() as lease:
                inside.append(1)
                tokens.append(lease.token)
                await asyncio.sleep(0.02)
                assert len(inside) == 1
                inside.pop()

        async def main() -> None:
            await asyncio.gather(*(work() for _ in range(3)))

        asyncio.run(main())
        assert self.in_a_row(tokens, 3)

    @pytest.mark.parametrize("calls", IN_THREADS)
    def test_a_call_in_a_thread_is_a_holder_that_may_acquire_again(
        self, name: str, calls: str
    ) -> None:
        def work() -> int:
            with self.lock(name) as lease, self.lock(name) as again:
                assert again is lease
                # Code of another call runs in this thread.
                async_to_sync(IN_THREADS[calls](lambda: self.is_free(f"{name}:other")))()
                with self.lock(name) as again:
                    assert again is lease
            assert self.is_free(name)
            return lease.token

        token = asyncio.run(IN_THREADS[calls](work)())
        assert self.is_next(work(), token, grants=2)

    def test_any_code_may_release_the_lease_of_an_ended_call(
        self, name: str, thread: AnotherThread
    ) -> None:
        def acquire_twice() -> Lease:
            self.take(name)
            return self.take(name)

        async def main(calls: str) -> None:
            lease = await IN_THREADS[calls](acquire_twice)()
            assert await lease.arelease()
            assert self.is_free(name)
            lease = await IN_THREADS[calls](acquire_twice)()
            assert thread.call(lease.release)
            assert self.is_free(name)

        for calls in IN_THREADS:
            asyncio.run(main(calls))

    @pytest.mark.parametrize("inner", [asyncio.wait_for, asyncio.gather])
    def test_any_code_may_release_the_lease_of_an_ended_task(self, name: str, inner: Any) -> None:
        async def main() -> None:
            terms = (TIMEOUT,) if inner is asyncio.wait_for else ()
            # Each runs acquire() in a task of its own (wait_for() only before Python 3.12).
            found = await inner(self.lock(name).aacquire(), *terms)
            lease = found if inner is asyncio.wait_for else found[0]
            assert await lease.arelease()
            assert self.is_free(name)

        asyncio.run(main())

    def test_any_code_may_release_the_lease_of_an_ended_thread(self, name: str) -> None:
        with another_thread() as ended:
            lease = ended.call(self.take, name)
        assert lease.release()
        assert self.is_free(name)

    # Leases whose holder has ended

    @pytest.mark.parametrize("where", ["thread", "task", *IN_THREADS])
    def test_a_lease_to_which_nothing_refers_is_released_with_a_warning(
        self, name: str, where: str, acquired: list[Lease]
    ) -> None:
        def forget() -> None:
            lease = self.take(name, ttl=RENEWED)
            acquired.clear()
            # The lease refers to itself, as through a method of the object that has it.
            lease.on_lost(partial(print, lease))

        async def forget_in_task() -> None:
            assert await self.lock(name, ttl=RENEWED).aacquire()
            acquired.clear()

        async def main() -> None:
            ended = asyncio.create_task(asyncio.sleep(0))
            if where == "thread":
                with another_thread() as thread:
                    thread.call(forget)
            elif where == "task":
                ended = asyncio.create_task(forget_in_task())
                await ended
            else:
                await IN_THREADS[where](forget)()
            await asyncio.to_thread(wait_until, is_warned, "the warning")
            await ended

        def is_warned() -> bool:
            gc.collect()
            return any(f"Lock {name!r} was never released" in str(each.message) for each in caught)

        with pytest.warns(ResourceWarning) as caught:
            asyncio.run(main())
        assert self.is_free(name)

    def wait_for_renewal(self) -> None:
        with counted_batches(self.service) as batches:
            gc.collect()
            wait_until(lambda: bool(batches), "a renewal")

    def test_a_lease_that_another_thread_has_is_kept(
        self, name: str, thread: AnotherThread
    ) -> None:
        with another_thread() as ended:
            lease = ended.call(self.take, name, ttl=RENEWED)
        self.wait_for_renewal()
        assert not self.is_free_for(thread, name)
        assert thread.call(lease.release)

    def test_a_lease_of_a_living_thread_is_kept(self, name: str, thread: AnotherThread) -> None:
        thread.call(lambda: bool(self.take(name, ttl=RENEWED)))
        self.wait_for_renewal()
        assert not self.is_free(name)
        lease = thread.call(current_lease, name)
        assert lease is not None
        assert lease.verify()
        assert thread.call(lease.release)

    @pytest.mark.parametrize("calls", IN_THREADS)
    def test_waiting_for_the_task_that_made_the_call_is_an_error(
        self, name: str, calls: str
    ) -> None:
        async def main() -> None:
            async with self.lock(name) as lease:
                acquire = IN_THREADS[calls](self.lock(name).acquire)
                assert await acquire(blocking=False) is None
                with pytest.raises(LockNotAcquired, match="held by the code that called"):
                    await acquire(blocking_timeout=TIMEOUT)
                assert await lease.averify()
            assert await acquire(blocking_timeout=0)

        asyncio.run(main())

    def test_waiting_for_the_sync_code_that_made_the_call_is_an_error(self, name: str) -> None:
        async def main() -> None:
            with pytest.raises(LockNotAcquired, match="held by the code that called"):
                await sync_to_async(self.lock(name).acquire)(blocking_timeout=TIMEOUT)

        with self.lock(name):
            async_to_sync(main)()
        assert self.is_free(name)

    def test_a_busy_event_loop_delays_no_release(self, name: str) -> None:
        entered, go_on, left = (threading.Event() for _ in range(3))

        def work() -> None:
            with self.lock(name):
                entered.set()
                assert go_on.wait(TIMEOUT)
            left.set()

        async def main() -> None:
            working = asyncio.create_task(sync_to_async(work)())
            while not entered.is_set():
                await asyncio.sleep(0.005)
            go_on.set()
            # The loop is blocked from here on.
            assert left.wait(TIMEOUT)
            await working

        asyncio.run(main())
        assert self.is_free(name)

    def test_the_holders_of_many_locks_are_read_at_once(self, name: str) -> None:
        whole = [f"{name[-40:]}{each}" for pair in ODD_NAMES.values() for each in pair]
        odd = list(dict.fromkeys(whole))
        held = odd[::2]
        with contextlib.ExitStack() as stack:
            leases = {each: stack.enter_context(self.lock(each)) for each in held}
            found = self.service.backend.holders([*odd, f"{name}:free"])
            owners = {each: holder.owner for each, holder in found.items()}
            assert owners == {each: lease.owner_id for each, lease in leases.items()}
            alone = self.service.holder(held[0])
            assert isinstance(alone, Holder)
            assert str(holder_of(found[held[0]], self.alias)) == str(alone)
        assert self.service.backend.holders([]) == {}

    def test_a_holder_is_described(self, name: str, thread: AnotherThread) -> None:
        assert self.lock(name).holder() is None
        lease = thread.call(self.take, name)
        for holder in (self.lock(name).holder(), lease.holder):
            assert isinstance(holder, Holder)
            assert (holder.owner_id, holder.alias) == (lease.owner_id, self.alias)
            assert str(holder) == str(lease.holder)
        assert str(os.getpid()) in str(holder)
        assert "thread another" in str(holder)
        thread.call(lease.release)
        assert self.lock(name).holder() is None

    def test_a_holder_in_another_process_is_described(
        self, name: str, process: AnotherProcess
    ) -> None:
        process.call(acts.hold, self.alias, name)
        assert f"pid {process.pid}" in str(self.lock(name).holder())
        process.call(acts.let_go, name)

    def test_a_released_lease_no_longer_holds_the_lock(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = self.take(name)
        assert lease.release()
        assert thread.call(self.take, name)
        assert not lease.release()
        assert not lease.verify()
        with pytest.raises(LeaseLost, match="released"):
            lease.check()
        assert not self.is_free(name)

    def test_a_lease_counts_down_and_is_renewed_from_now(self, name: str) -> None:
        with self.lock(name, ttl=30) as lease:
            left = lease.remaining()
            assert 0 < left <= 30
            time.sleep(0.02)
            assert lease.remaining() < left
            before = clock()
            lease.renew(ttl=self.renewed_ttl)
            assert before + self.renewed_ttl <= lease.deadline <= clock() + self.renewed_ttl
            lease.check()
            assert lease.verify()

    # Processes

    def test_a_child_after_fork_owns_nothing_and_releases_nothing(
        self, name: str, process: AnotherProcess
    ) -> None:
        seen = process.call(acts.fork_while_holding, self.alias, name)
        assert seen["inherited"] is None
        assert seen["lost"]
        assert seen["verified"] is False
        assert seen["released"] is False
        assert seen["taken"] is False
        assert seen["parent verified"] is True

    def test_a_child_after_fork_acquires_the_lock_after_its_parent_released_it(
        self, name: str, process: AnotherProcess
    ) -> None:
        seen = process.call(acts.fork_while_holding, self.alias, name)
        assert seen["waited"]
        assert self.is_next(seen["token"], seen["parent token"])
        assert self.is_free(name)

    # The keeper

    def test_a_lease_is_kept_for_several_ttls(self, name: str, thread: AnotherThread) -> None:
        with self.lock(name, ttl=3) as lease:
            time.sleep(6.3)
            # If a busy machine delays the keeper, the try below would get the lock.
            wait_until(lambda: lease.remaining() > 0.5, "the lease to be renewed")
            assert not self.is_free_for(thread, name)
            assert not lease.lost
            assert lease.verify()

    def test_one_keeper_renews_a_thousand_leases_in_one_batch(self, name: str) -> None:
        many = 1000
        threads, files = keepers(self.alias), open_files()
        with counted_batches(self.service) as batches:
            leases = [self.take(f"{name}:{number}", ttl=6) for number in range(many)]
            wait_until(lambda: batches.count(many) >= 3, "three rounds of renewals")
            del batches[: batches.index(many)]
            # Leases that were renewed together stay together.
            assert set(batches) == {many}
        assert keepers(self.alias) - threads <= 1
        assert open_files() - files <= 20
        assert not any(lease.lost for lease in leases)
        assert all(lease.release() for lease in leases)

    async def _is_taken(self, name: str) -> bool:
        return await self.lock(name).aacquire(blocking=False) is None
