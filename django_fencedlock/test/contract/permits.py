"""Permits: several holders of one name at a time, by ``limit=``."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

import pytest

from ...core.names import permit_name
from ...exceptions import LeaseLost, LockNotAcquired, StaleFence
from ...lease import Lease
from ...ops.force_release import force_release
from ..processes import TIMEOUT, AnotherProcess, AnotherThread, Processes, another_thread
from . import acts
from .base import SHORT, Contract, all_at_once
from .dying import SOON, kill


class PermitContract(Contract):
    """At most `limit` holders at a time, each with a token of its own permit."""

    #: Seconds within which a waiter gets a permit that was released.
    permit_within = 3.0

    def take_permits(
        self, stack: contextlib.ExitStack, name: str, limit: int
    ) -> list[tuple[AnotherThread, Lease]]:
        """Acquire all permits, each in a thread of its own."""
        threads = [stack.enter_context(another_thread()) for _ in range(limit)]
        return [(thread, thread.call(self.take, name, limit=limit)) for thread in threads]

    def is_permit_free(self, thread: AnotherThread, name: str, limit: int) -> bool:
        return thread.call(acts.try_to_take, self.alias, name, limit)

    def test_any_free_permit_is_granted_and_no_more(self, name: str, thread: AnotherThread) -> None:
        with contextlib.ExitStack() as stack:
            held = self.take_permits(stack, name, 4)
            assert {each.name for _, each in held} == {permit_name(name, n + 1) for n in range(4)}
            assert not self.is_permit_free(thread, name, 4)
            for holder, lease in held:
                assert holder.call(lease.release)
                again = holder.call(self.take, name, limit=4)
                assert again.name == lease.name
                assert self.is_next(again.token, lease.token)
            assert not self.is_permit_free(thread, name, 4)

    def test_at_most_limit_threads_are_inside(self, name: str) -> None:
        inside: list[int] = []

        def take_turns() -> None:
            for _ in range(5):
                with self.lock(name, limit=3, blocking_timeout=TIMEOUT):
                    inside.append(1)
                    assert len(inside) <= 3
                    time.sleep(0.002)
                    inside.pop()

        all_at_once([take_turns] * 8)

    def test_at_most_limit_processes_are_inside(self, name: str, processes: Processes) -> None:
        with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile() as log:
            several = [stack.enter_context(processes.borrow()) for _ in range(8)]
            terms = self.alias, name, 6, log.name
            runs = [each.start(acts.take_turns, *terms, limit=3) for each in several]
            for run in runs:
                run.result(2 * TIMEOUT)
            steps = [line.split()[0] for line in Path(log.name).read_text().splitlines()]
        assert len(steps) == 2 * 8 * 6
        inside = 0
        for step in steps:
            inside += 1 if step == "in" else -1
            assert inside <= 3

    def test_at_most_limit_asyncio_tasks_are_inside(self, name: str) -> None:
        inside: list[int] = []

        async def take_turns() -> None:
            for _ in range(3):
                async with self.lock(name, limit=2, blocking_timeout=TIMEOUT):
                    inside.append(1)
                    assert len(inside) <= 2
                    await asyncio.sleep(0.001)
                    inside.pop()

        async def main() -> None:
            await asyncio.gather(*(take_turns() for _ in range(5)))

        asyncio.run(main())

    def test_a_waiter_gets_a_permit_soon_after_a_release(
        self, name: str, thread: AnotherThread
    ) -> None:
        with contextlib.ExitStack() as stack:
            held = self.take_permits(stack, name, 3)
            waiting = thread.start(self.lock(name, limit=3).acquire, blocking_timeout=TIMEOUT)
            time.sleep(0.3)
            assert not waiting.done()
            released = time.monotonic()
            holder, former = held[1]
            holder.call(former.release)
            lease = waiting.result(TIMEOUT)
            assert time.monotonic() - released < self.permit_within + self.slack
            assert lease is not None
            assert lease.name == former.name
            thread.call(lease.release)

    def test_the_refusal_names_the_holders(self, name: str) -> None:
        with contextlib.ExitStack() as stack:
            held = self.take_permits(stack, name, 2)
            with (
                pytest.raises(LockNotAcquired) as caught,
                self.lock(name, limit=2, blocking_timeout=0.1),
            ):
                pass
            holder = self.lock(name, limit=2).holder()
            thread, lease = held[0]
            thread.call(lease.release)
            assert self.lock(name, limit=2).holder() is None
        assert str(caught.value).startswith(f"All 2 permits of lock {name!r} are held, by ")
        assert caught.value.name == name
        assert holder is not None
        assert {holder.owner_id} < {each.owner_id for _, each in held}

    def test_one_holder_has_one_permit(self, name: str, thread: AnotherThread) -> None:
        with self.lock(name, limit=2) as lease:
            with self.lock(name, limit=5) as inner:
                assert inner is lease
            assert not lease.released
            assert self.is_permit_free(thread, name, 2)

    def test_the_lock_without_a_limit_is_another_one(
        self, name: str, thread: AnotherThread
    ) -> None:
        with self.lock(name, limit=1) as permit, self.lock(name) as lease:
            assert permit is not lease
            assert not self.is_permit_free(thread, name, 1)
            assert not self.is_free_for(thread, name)

    def test_a_raised_limit_adds_permits_and_a_lowered_one_removes_none(
        self, name: str, thread: AnotherThread
    ) -> None:
        with contextlib.ExitStack() as stack:
            held = self.take_permits(stack, name, 2)
            assert self.is_permit_free(thread, name, 3)
            more = thread.call(self.take, name, limit=3)
            assert more.name == permit_name(name, 3)
            holder, former = held[0]
            holder.call(former.release)
            # Two of the three are held now, and both permits below are counted.
            with another_thread() as other:
                again = other.call(self.take, name, limit=2)
                assert again.name == former.name
                assert self.lock(name, limit=2).acquire(blocking=False) is None
            assert more.verify()

    def test_a_second_release_frees_nothing(self, name: str, thread: AnotherThread) -> None:
        lease = self.take(name, limit=1)
        assert lease.release()
        other = thread.call(self.take, name, limit=1)
        assert not lease.release()
        assert other.verify()
        assert self.lock(name, limit=1).acquire(blocking=False) is None

    def test_the_permit_of_a_killed_process_alone_is_free(
        self, name: str, process: AnotherProcess, thread: AnotherThread
    ) -> None:
        mine = thread.call(self.take, name, limit=2)
        process.call(acts.hold, self.alias, name, limit=2)
        kill(process)
        lease = self.lock(name, limit=2).acquire(blocking_timeout=SOON)
        assert lease is not None
        assert lease.name != mine.name
        assert mine.verify()

    def test_a_forced_release_frees_one_permit(self, name: str, thread: AnotherThread) -> None:
        with contextlib.ExitStack() as stack:
            (_, former), (_, kept) = self.take_permits(stack, name, 2)
            done = force_release(former.name, by="the boss", backend=self.alias)
            assert done.done
            assert done.token is not None
            assert done.token > former.token
            with pytest.raises(StaleFence), former.atomic():
                pass
            with kept.atomic():
                pass

    def test_the_late_writes_of_an_expired_holder_are_rejected(
        self, name: str, process: AnotherProcess, thread: AnotherThread
    ) -> None:
        process.call(acts.hold, self.alias, name, limit=2)
        former = self.take(name, ttl=SHORT, limit=2)
        self.interrupt_holder(former)
        acquire = self.lock(name, limit=2).acquire
        successor = thread.call(acquire, blocking_timeout=TIMEOUT)
        assert successor is not None
        assert successor.name == former.name
        with pytest.raises((StaleFence, LeaseLost)), former.atomic():
            pass
        with successor.atomic():
            pass
        process.call(acts.write_fenced, name)
