"""Who is the holder, what a lease tells him, and which names there are."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.test import override_settings

from ... import signals
from ...exceptions import LeaseLost, LockNotAcquired, NotTheHolder
from ...lease import Lease, clock, current_lease
from ...owners import Holder
from ..holders import AnotherProcess, AnotherThread, wait_until
from . import acts
from .base import Contract, connected, counted_batches, keepers, listening, open_files

#: Names that a careless backend mixes up or can't take. Each pair is two locks.
ODD_NAMES = {
    "capital": ("Invoice", "invoice"),
    "trailing blank": ("invoice", "invoice "),
    "leading blank": (" invoice", "invoice"),
    "accent": ("caf\u00e9", "cafe"),
    "composed": ("caf\u00e9", "cafe\u0301"),
    "eszett": ("stra\u00dfe", "strasse"),
    "other scripts": ("\u8bf7\u6c42\u4e66", "\u0441\u0447\u0451\u0442"),
    "beyond 16 bits": ("\U0001f512", "\U0001f513"),
    "braces": ("{invoice}:{0}", "{invoice}:{1}"),
    "closing brace": ("}invoice{", "{invoice}"),
    "newline": ("in\nvoice", "in\r\nvoice"),
    "per cent": ("%s", "%(name)s"),
    "quotes": ("in'voice", 'in"voice'),
    "backslash": ("in\\voice", "in\\\\voice"),
    "glob": ("invoice:*", "invoice:?"),
    "colons": ("a::b", "a:b"),
}


class HoldingContract(Contract):
    """One holder: what may enter again, read and release, and how long its lease is kept."""

    # Holders

    def test_entering_again_gives_the_same_lease_and_counts(
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
            # One token for all entries, and one for the thread that looked.
            assert after.token == outer.token + 2

    def test_what_was_taken_unfenced_is_not_entered_again_as_fenced(self, name: str) -> None:
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
            async with self.alock(name) as lease:
                with pytest.raises(NotTheHolder):
                    await asyncio.create_task(lease.arelease())
                assert await lease.averify()
                assert await asyncio.create_task(self._is_taken(name))

        asyncio.run(main())
        assert self.is_free(name)

    def test_a_generator_that_another_thread_throws_away_gives_the_lock_back(
        self, name: str, thread: AnotherThread
    ) -> None:
        def rows() -> Iterator[None]:
            with self.lock(name):
                yield

        begun = [rows()]
        next(begun[0])
        # It was the last reference, as where the garbage collector comes along.
        thread.call(begun.clear)
        wait_until(lambda: self.is_free(name), "the lock of a generator that is gone")

    def test_an_async_generator_that_is_left_half_way_gives_the_lock_back(self, name: str) -> None:
        async def rows() -> AsyncIterator[int]:
            async with self.alock(name):
                yield 1
                yield 2

        async def main() -> None:
            async for _ in rows():
                break
            # The event loop closes it, in a task of its own.
            await asyncio.to_thread(
                wait_until, lambda: self.is_free(name), "the lock of a generator that is gone"
            )

        asyncio.run(main())

    def test_a_coroutine_that_is_thrown_away_gives_the_lock_back(self, name: str) -> None:
        async def wait() -> None:
            async with self.alock(name):
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
        wait_until(lambda: self.is_free(name), "the lock of a coroutine that is gone")

    def test_a_child_task_is_another_holder_that_may_read_the_lease(self, name: str) -> None:
        async def child() -> Lease | None:
            assert await self._is_taken(name)
            return current_lease(name)

        async def main() -> None:
            async with self.alock(name) as lease:
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

    @pytest.mark.parametrize("thread_sensitive", [True, False])
    def test_a_task_enters_again_through_sync_to_async(
        self, name: str, thread_sensitive: bool
    ) -> None:
        def enter() -> Lease:
            with self.lock(name, blocking_timeout=0) as lease:
                return lease

        async def main() -> None:
            async with self.alock(name) as lease:
                entered = sync_to_async(enter, thread_sensitive=thread_sensitive)
                assert await entered() is lease
                assert await lease.averify()

        asyncio.run(main())
        assert self.is_free(name)

    def test_the_holders_of_many_locks_are_told_at_once(self, name: str) -> None:
        whole = [f"{name[-40:]}{each}" for pair in ODD_NAMES.values() for each in pair]
        odd = list(dict.fromkeys(whole))
        held = odd[::2]
        with contextlib.ExitStack() as stack:
            leases = {each: stack.enter_context(self.lock(each)) for each in held}
            found = self.service.backend.holders([*odd, f"{name}:nobody's"])
            assert list(found) == [*odd, f"{name}:nobody's"]
            told = {each: holder.owner for each, holder in found.items() if holder is not None}
            assert told == {each: lease.owner for each, lease in leases.items()}
            alone = self.service.backend.holder(held[0])
            assert isinstance(alone, Holder)
            assert str(found[held[0]]) == str(alone)
        assert self.service.backend.holders([]) == {}

    def test_a_holder_is_told_in_words(self, name: str, thread: AnotherThread) -> None:
        assert self.lock(name).holder() is None
        lease = thread.call(self.take, name)
        holder = self.lock(name).holder()
        assert isinstance(holder, Holder)
        assert (holder.owner, holder.alias) == (lease.owner, self.alias)
        assert str(holder) == str(lease.holder)
        assert str(os.getpid()) in str(holder)
        assert "thread another" in str(holder)
        thread.call(lease.release)
        assert self.lock(name).holder() is None

    def test_a_holder_in_another_process_is_told_in_words(
        self, name: str, process: AnotherProcess
    ) -> None:
        process.call(acts.hold, self.alias, name)
        assert f"pid {process.pid}" in str(self.lock(name).holder())
        process.call(acts.let_go, name)

    def test_a_released_lease_is_nobodys(self, name: str, thread: AnotherThread) -> None:
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
            lease.renew(ttl=300)
            assert before + 300 <= lease.deadline <= clock() + 300
            lease.check()
            assert lease.verify()

    # Processes

    def test_a_child_after_fork_owns_nothing_and_releases_nothing(
        self, name: str, process: AnotherProcess
    ) -> None:
        told = process.call(acts.fork_while_holding, self.alias, name)
        assert told["inherited"] is None
        assert told["lost"]
        assert told["verified"] is False
        assert told["released"] is False
        assert told["taken"] is False
        assert told["parent verified"] is True

    def test_a_child_after_fork_takes_the_lock_after_its_parent_let_go(
        self, name: str, process: AnotherProcess
    ) -> None:
        told = process.call(acts.fork_while_holding, self.alias, name)
        assert told["waited"]
        assert told["token"] == told["parent token"] + 1
        assert self.is_free(name)

    # The keeper

    def test_a_lease_is_kept_for_several_ttls(self, name: str, thread: AnotherThread) -> None:
        with self.lock(name, ttl=1) as lease:
            time.sleep(3.3)
            # On a machine so busy that the keeper is late, nobody is to come just then.
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
            # Once they were renewed together they stay together.
            assert set(batches) == {many}
        assert keepers(self.alias) - threads <= 1
        assert open_files() - files <= 20
        assert not any(lease.lost for lease in leases)
        assert all(lease.release() for lease in leases)

    async def _is_taken(self, name: str) -> bool:
        return await self.alock(name).acquire(blocking=False) is None


class NameContract(Contract):
    """Which names there are, and what is told of them."""

    @pytest.mark.parametrize("kind", ODD_NAMES)
    def test_odd_names_are_locks_of_their_own(self, kind: str, thread: AnotherThread) -> None:
        prefix = uuid.uuid4().hex
        first, second = (f"{odd}{prefix}{odd}" for odd in ODD_NAMES[kind])
        with self.lock(first) as lease:
            assert not self.is_free_for(thread, first)
            assert (lease.name, lease.token) == (first, 1)
            assert self.is_free_for(thread, second)
            assert self.recorded(first) == (1, lease.owner)

    @pytest.mark.parametrize("character", ["x", "\u00e9", "\U0001f512"])
    def test_names_of_200_characters_are_told_apart_by_the_last(
        self, character: str, thread: AnotherThread
    ) -> None:
        name = uuid.uuid4().hex.ljust(199, character)
        with self.lock(f"{name}a") as lease:
            assert lease.token == 1
            assert not self.is_free_for(thread, f"{name}a")
            assert self.is_free_for(thread, f"{name}b")

    def test_a_name_that_is_live_at_another_service_is_refused_naming_both(
        self, name: str, thread: AnotherThread
    ) -> None:
        elsewhere = {"FENCE_DATABASE": self.database}
        both = {**getattr(settings, "FENCEDLOCK", {}), "elsewhere": elsewhere}
        with override_settings(FENCEDLOCK=both):
            for held, asked in ((self.alias, "elsewhere"), ("elsewhere", self.alias)):
                lease = thread.call(self.take, name, backend=held)
                with pytest.raises(LockNotAcquired) as caught:
                    self.lock(name, backend=asked).acquire(blocking=False)
                assert repr(held) in str(caught.value)
                assert repr(asked) in str(caught.value)
                thread.call(lease.release)
                # The registry may be cleared later than the lock is released.
                self.service.backend.tidy()
                self.take(name, backend=asked).release()
                self.service.backend.tidy()

    # Signals

    def test_signals_tell_of_a_locks_life(self, name: str, thread: AnotherThread) -> None:
        heard: list[str] = []
        with contextlib.ExitStack() as stack:
            for kind in ("lock_acquired", "lock_not_acquired", "lock_released"):
                stack.enter_context(listening(getattr(signals, kind), name, kind, heard))
            with self.lock(name):
                assert not self.is_free_for(thread, name)
        assert heard == ["lock_acquired", "lock_not_acquired", "lock_released"]

    def test_a_receiver_that_raises_breaks_nothing(self, name: str) -> None:
        def receive(**kwargs: Any) -> None:
            raise ZeroDivisionError

        with contextlib.ExitStack() as stack:
            for signal in (signals.lock_acquired, signals.lock_released):
                stack.enter_context(connected(signal, receive))
            with self.lock(name) as lease:
                assert lease.verify()
        assert self.is_free(name)
