"""Paths: a lock excludes the holders of those above it and beneath it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ...core.names import path_name, path_names
from ...exceptions import LeaseLost, LockNotAcquired, LockUpgrade, StaleFence
from ...lease import Lease, current_lease
from ...ops.force_release import force_release
from ...storage.tables import HeldLock
from ..processes import (
    TIMEOUT,
    AnotherProcess,
    AnotherThread,
    Processes,
    another_thread,
    wait_until,
)
from . import acts
from .base import SHORT, Contract
from .dying import SOON, kill

SHARED = "shared"


class PathContract(Contract):
    """A path is exclusive at its end, and shared above. For backends with ``supports_shared``."""

    @pytest.fixture
    def path(self, name: str) -> str:
        """Return a path of three names that were never used."""
        return f"{name}/7/shelf"

    def take_path(self, path: str, **terms: Any) -> Lease:
        lease = self.lock(path, path=True, **terms).acquire(blocking=False)
        assert lease is not None, f"Path {path!r} isn't free."
        return lease

    def take_path_when_free(self, path: str) -> Lease:
        lease = self.lock(path, path=True).acquire(blocking_timeout=TIMEOUT)
        assert lease is not None, f"Path {path!r} is still held."
        return lease

    def is_path_free(self, other: AnotherThread | AnotherProcess, path: str) -> bool:
        return other.call(acts.try_to_take, self.alias, path, path=True)

    def is_valid(self, lease: Lease) -> bool:
        """Return whether a transaction under the lease would commit."""
        try:
            with lease.atomic(self.database):
                return True
        except (StaleFence, LeaseLost):
            return False

    def interrupt_path(self, lease: Lease) -> None:
        """Let the next acquire get each lock of a path of this process."""
        for each in (*lease.above, lease):
            self.pause_holder(each)
        for each in (*lease.above, lease):
            self.interrupt_holder(each)

    # Exclusion

    def test_paths_beside_each_other_do_not_exclude_each_other(
        self, path: str, thread: AnotherThread, process: AnotherProcess
    ) -> None:
        lease = self.take_path(f"{path}/1")
        for other in (thread, process):
            assert self.is_path_free(other, f"{path}/2")
            assert self.is_path_free(other, f"{path}/10")
            assert not self.is_path_free(other, f"{path}/1")
        assert lease.verify()
        assert self.is_valid(lease)
        assert lease.release()
        assert self.is_path_free(process, f"{path}/1")

    def test_a_path_excludes_those_beneath_and_above_it(
        self, path: str, thread: AnotherThread, process: AnotherProcess
    ) -> None:
        root, seven, _ = (each.removesuffix(" [path]") for each in path_names(path))
        lease = self.take_path(path)
        for other in (thread, process):
            for each in (root, seven, path, f"{path}/1", f"{path}/1/a"):
                assert not self.is_path_free(other, each)
            assert self.is_path_free(other, f"{root}/8")
        assert lease.release()
        for each in (root, seven, path, f"{path}/1"):
            assert self.is_path_free(process, each)

    def test_a_lock_of_the_same_text_is_another_one(self, path: str, thread: AnotherThread) -> None:
        with self.lock(path) as plain, self.lock(path, path=True) as lease:
            assert plain is not lease
            assert not self.is_free_for(thread, path)
            assert not self.is_path_free(thread, path)

    def test_a_waiter_acquires_once_all_paths_beneath_are_released(
        self, path: str, thread: AnotherThread, process: AnotherProcess
    ) -> None:
        first, second = f"{path}/1", f"{path}/2"
        process.call(acts.hold, self.alias, first, path=True)
        mine = self.take_path(second)
        waiting = thread.start(self.take_path_when_free, path)
        name = path_names(path)[0]
        wait_until(lambda: len(self.service.holders(name)) == 3, "the waiter to share the root")
        assert process.call(acts.let_go, first)
        assert not waiting.done()
        assert mine.release()
        lease = waiting.result(TIMEOUT)
        assert not self.is_path_free(process, first)
        assert thread.call(lease.release)

    def test_all_or_none(self, path: str, process: AnotherProcess) -> None:
        process.call(acts.hold, self.alias, path, path=True)
        for timeout in (0.0, 0.2):
            lock = self.lock(f"{path}/1", path=True)
            assert lock.acquire(blocking_timeout=timeout) is None
            for name in path_names(path):
                assert len(self.service.holders(name)) == 1
        with (
            pytest.raises(LockNotAcquired) as caught,
            self.lock(f"{path}/1", path=True, blocking_timeout=0.1),
        ):
            pytest.fail("the block was entered")
        assert caught.value.name == path_name(path)
        assert caught.value.holder is not None
        assert caught.value.holder.owner_id == process.call(acts.held_by, path)
        assert process.call(acts.let_go, path)
        assert self.take_path(f"{path}/1").release()

    def test_the_holder_is_that_of_a_lock_above_or_beneath(
        self, path: str, thread: AnotherThread
    ) -> None:
        lease = thread.call(self.take_path, path)
        for asked in (path, f"{path}/1"):
            holder = self.lock(asked, path=True).holder()
            assert holder is not None
            assert holder.owner_id == lease.owner_id
        above = self.lock(path.rpartition("/")[0], path=True).holder()
        assert above is not None
        assert above.shared
        assert self.lock(f"{path}-2", path=True).holder() is None
        assert thread.call(lease.release)

    def test_random_paths_of_eight_processes(self, name: str, processes: Processes) -> None:
        with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile() as log:
            several = [stack.enter_context(processes.borrow()) for _ in range(8)]
            runs = [
                each.start(acts.take_random_paths, self.alias, name, 6, log.name)
                for each in several
            ]
            for run in runs:
                run.result(2 * TIMEOUT)
            steps = [line.split() for line in Path(log.name).read_text().splitlines()]
        inside: list[str] = []
        newest: dict[str, int] = {}
        for step, path, token in steps:
            if step == "out":
                inside.remove(path)
                continue
            for other in inside:
                assert not f"{path}/".startswith(f"{other}/"), (path, inside)
                assert not f"{other}/".startswith(f"{path}/"), (path, inside)
            inside.append(path)
            assert int(token) > newest.get(path, 0)
            newest[path] = int(token)
        assert len(steps) == 8 * 6 * 2

    # Tokens

    def test_a_lease_has_the_tokens_of_all_names(self, path: str) -> None:
        with self.lock(path, path=True) as lease, lease.atomic(self.database):
            assert lease.name == path_name(path)
            assert self.recorded(lease.name) == (lease.token, lease.owner_id)
            *above, _ = path_names(path)
            assert [each.name for each in reversed(lease.above)] == above
            for each in lease.above:
                assert self.recorded(each.name) == (each.token, SHARED)

    def test_a_paused_holder_is_rejected_once_an_ancestor_was_granted(
        self, path: str, thread: AnotherThread
    ) -> None:
        lease = self.take_path(f"{path}/1", ttl=SHORT)
        self.interrupt_path(lease)
        ancestor = thread.call(self.take_path_when_free, path)
        # Nothing has touched the lock of its own name.
        assert self.recorded(lease.name) == (lease.token, lease.owner_id)
        with pytest.raises((StaleFence, LeaseLost)), lease.atomic(self.database):
            pytest.fail("the block was entered")
        assert thread.call(self.is_valid, ancestor)
        assert thread.call(ancestor.release)
        # Nor does it commit beside later holders of paths beneath.
        beside = thread.call(self.take_path, f"{path}/2")
        assert not self.is_valid(lease)
        assert thread.call(self.is_valid, beside)
        assert thread.call(beside.release)

    def test_a_paused_holder_is_rejected_once_a_path_beneath_was_granted(
        self, path: str, thread: AnotherThread
    ) -> None:
        lease = self.take_path(path, ttl=SHORT)
        self.interrupt_path(lease)
        beneath = thread.call(self.take_path_when_free, f"{path}/1/a")
        with pytest.raises((StaleFence, LeaseLost)), lease.atomic(self.database):
            pytest.fail("the block was entered")
        assert thread.call(self.is_valid, beneath)
        assert thread.call(beneath.release)

    def test_the_grant_of_an_ancestor_waits_for_the_transaction_of_an_expired_holder(
        self, path: str, thread: AnotherThread
    ) -> None:
        if self.one_writer:
            pytest.skip("Any open transaction under a lease locks SQLite's file.")
        lease = self.take_path(f"{path}/1")
        with lease.atomic(self.database):
            # Its transaction outlives its locks.
            for each in (lease, *lease.above):
                self.pause_holder(each)
                assert self.service.backend.release(each.grant)
            assert thread.call(self.lock(path, path=True).acquire, blocking_timeout=0.3) is None
        ancestor = thread.call(self.take_path_when_free, path)
        assert not self.is_valid(lease)
        assert thread.call(ancestor.release)

    # Entering again

    def test_paths_of_one_holder_share_the_leases_above(
        self, path: str, thread: AnotherThread
    ) -> None:
        with self.lock(f"{path}/1", path=True) as first, another_thread() as writer:
            waiting = writer.start(self.take_path_when_free, path)
            wait_until(lambda: not self.is_path_free(thread, f"{path}/3"), "the writer to be seen")
            with self.lock(f"{path}/2", path=True) as second:
                assert second.above == first.above
                with self.lock(f"{path}/2", path=True) as again:
                    assert again is second
                assert self.is_valid(second)
            assert first.verify()
            assert self.is_valid(first)
            assert not waiting.done()
            assert first.release()
            lease = waiting.result(TIMEOUT)
            assert writer.call(lease.release)
        assert current_lease(path_name(path)) is None

    def test_a_holder_can_not_acquire_a_path_above_or_beneath_its_own(
        self, path: str, thread: AnotherThread
    ) -> None:
        with self.lock(path, path=True) as lease:
            with pytest.raises(LockUpgrade, match="excludes every path beneath it"):
                self.lock(f"{path}/1", path=True).acquire()
            with pytest.raises(LockUpgrade, match="A path beneath"):
                self.lock(path.rpartition("/")[0], path=True).acquire()
            assert lease.verify()
            assert self.is_valid(lease)
        for each in (path, f"{path}/1", path.rpartition("/")[0]):
            assert self.is_path_free(thread, each)

    def test_a_coroutine_holds_a_path(self, path: str, thread: AnotherThread) -> None:
        async def hold() -> None:
            async with self.lock(path, path=True) as lease:
                assert await lease.averify()
                assert not await asyncio.to_thread(self.is_path_free, thread, f"{path}/1")
            found = await self.lock(path, path=True).aacquire()
            assert found is not None
            assert await found.arelease()

        asyncio.run(hold())
        assert self.is_path_free(thread, path_names(path)[0].removesuffix(" [path]"))

    # Loss

    def test_a_path_of_a_killed_process_is_free_before_its_ttl(
        self, path: str, process: AnotherProcess
    ) -> None:
        process.call(acts.hold, self.alias, f"{path}/1", path=True)
        kill(process)
        ancestor = self.lock(path, path=True).acquire(blocking_timeout=2 * SOON)
        assert ancestor is not None
        assert ancestor.release()

    @pytest.mark.parametrize("level", [0, 1, 2])
    def test_the_forced_release_of_one_name_is_the_loss_of_the_path(
        self, path: str, thread: AnotherThread, level: int
    ) -> None:
        with (
            pytest.raises(LeaseLost, match="by the boss"),
            self.lock(path, path=True, ttl=1.0) as lease,
        ):
            assert force_release(path_names(path)[level], by="the boss", backend=self.alias).done
            with pytest.raises(StaleFence, match="the boss"), lease.atomic(self.database):
                pytest.fail("the block was entered")
            wait_until(lambda: lease.lost, "the loss to be noticed")
        assert self.is_path_free(thread, path_names(path)[0].removesuffix(" [path]"))

    def test_the_rows_of_the_registry(self, path: str) -> None:
        rows = HeldLock.objects.using(self.database).filter(name__in=path_names(path))
        with self.lock(path, path=True) as lease:
            owners = {each.owner_id for each in (lease, *lease.above)}
            assert {row.owner for row in rows.all()} == owners
        self.service.keeper.clear()
        assert not rows.all()
