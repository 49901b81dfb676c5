"""Readers, which share a lock, and writers, which exclude them."""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from ...exceptions import LeaseLost, LockNotAcquired, LockUpgrade, StaleFence
from ...lease import Lease, current_lease
from ...ops.force_release import Outcome, force_release, held_by
from ...ops.registry import State, listing
from ..processes import (
    TIMEOUT,
    AnotherProcess,
    AnotherThread,
    Processes,
    another_thread,
    wait_until,
)
from . import acts
from .base import SHORT, all_at_once
from .dying import SOON, kill
from .paths import PathContract

SHARED = "shared"


class SharedContract(PathContract):
    """
    For backends with ``supports_shared``: readers share, and a writer excludes them.

    So do the holders of paths and those above them.
    """

    # Hooks

    def pause_all(self, *leases: Lease) -> None:
        """Let the next writer get a lock that these leases of this process have."""
        for lease in leases:
            self.interrupt_holder(lease)

    # Aids

    def read(self, name: str, **terms: Any) -> Lease:
        """Acquire a lock that readers may have, but no writer."""
        return self.take(name, shared=True, **terms)

    def may_read(self, thread: AnotherThread, name: str) -> bool:
        return thread.call(self.try_to_take, name, shared=True)

    def is_current(self, lease: Lease) -> bool:
        """Return whether a transaction under the lease would commit."""
        try:
            with lease.atomic(self.database):
                return True
        except StaleFence:
            return False

    # Exclusion

    def test_readers_share_the_lock_and_its_token(self, name: str, thread: AnotherThread) -> None:
        mine = self.read(name)
        other = thread.call(self.read, name)
        assert mine.shared
        assert mine.owner_id != other.owner_id
        assert mine.token == other.token
        assert self.recorded(name) == (mine.token, SHARED)
        assert self.is_current(mine)
        assert thread.call(self.is_current, other)
        assert mine.verify()
        assert thread.call(other.release)
        assert mine.verify()
        assert mine.release()
        assert self.is_free_for(thread, name)

    def test_a_reader_excludes_writers(self, name: str, thread: AnotherThread) -> None:
        lease = self.read(name)
        assert not self.is_free_for(thread, name)
        with pytest.raises(LockNotAcquired, match="reader") as caught:
            thread.call(self.enter, name)
        assert caught.value.holder is not None
        assert caught.value.holder.owner_id == lease.owner_id
        assert lease.release()
        assert self.is_free_for(thread, name)

    def test_a_writer_excludes_readers(self, name: str, thread: AnotherThread) -> None:
        lease = self.take(name)
        assert not self.may_read(thread, name)
        with pytest.raises(LockNotAcquired) as caught:
            thread.call(self.enter, name, shared=True)
        assert caught.value.holder is not None
        assert caught.value.holder.owner_id == lease.owner_id
        assert lease.release()
        assert self.may_read(thread, name)

    def enter(self, name: str, **terms: Any) -> None:
        with self.lock(name, blocking_timeout=0.1, **terms):
            pass

    def test_another_process_shares_and_is_excluded(
        self, name: str, process: AnotherProcess, thread: AnotherThread
    ) -> None:
        token = process.call(acts.hold, self.alias, name, shared=True)
        lease = self.read(name)
        assert lease.token == token
        assert lease.release()
        assert not self.is_free(name)
        assert process.call(acts.let_go, name)
        assert self.is_free(name)

    def test_readers_and_writers_of_eight_threads(self, name: str) -> None:
        inside: list[bool] = []
        tokens: list[tuple[int, bool]] = []

        def take_turns() -> None:
            for _ in range(5):
                shared = random.random() < 0.6
                with self.lock(name, blocking_timeout=TIMEOUT, shared=shared) as lease:
                    inside.append(shared)
                    tokens.append((lease.token, shared))
                    assert all(inside) or len(inside) == 1, inside
                    time.sleep(0.002)
                    inside.remove(shared)

        all_at_once([take_turns] * 8)
        assert len(tokens) == 40
        assert [token for token, _ in tokens] == sorted(token for token, _ in tokens)
        written = [token for token, shared in tokens if not shared]
        assert len(set(written)) == len(written)
        assert not set(written) & {token for token, shared in tokens if shared}

    def test_readers_and_writers_of_several_processes(
        self, name: str, processes: Processes
    ) -> None:
        with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile() as log:
            several = [stack.enter_context(processes.borrow()) for _ in range(8)]
            terms = (self.alias, name, 6, log.name)
            runs = [each.start(acts.read_and_write, *terms) for each in several]
            for run in runs:
                run.result(TIMEOUT)
            steps = [line.split() for line in Path(log.name).read_text().splitlines()]
        inside: list[str] = []
        newest = 0
        for step, kind, number in steps:
            if step == "out":
                inside.remove(kind)
                continue
            inside.append(kind)
            assert inside == ["writer"] or set(inside) == {"reader"}
            assert int(number) >= newest
            assert int(number) > newest or kind == "reader"
            newest = int(number)
        assert len(steps) == 8 * 6 * 2

    # Tokens

    def test_the_first_reader_after_a_writer_gets_a_higher_token(
        self, name: str, thread: AnotherThread
    ) -> None:
        tokens = []
        for shared in (False, True, True, False, False, True):
            lease = self.take(name, shared=shared)
            tokens.append(lease.token)
            assert self.recorded(name) == (lease.token, SHARED if shared else lease.owner_id)
            assert lease.release()
        steps = [later - former for former, later in itertools.pairwise(tokens)]
        assert [step > 0 for step in steps] == [True, False, True, True, True]
        if self.counts_tokens:
            assert tokens == [1, 2, 2, 3, 4, 5]

    def test_an_expired_writer_is_rejected_once_a_reader_was_granted(
        self, name: str, thread: AnotherThread
    ) -> None:
        writer = self.take(name, ttl=SHORT)
        self.pause_all(writer)
        reader = thread.call(self.take_when_free, name, shared=True)
        assert reader.token > writer.token
        with pytest.raises(StaleFence, match=f"token is {reader.token}"):
            self.pin(writer)
        with pytest.raises(LeaseLost):
            writer.renew()
        assert reader.verify()
        assert thread.call(self.is_current, reader)
        thread.call(reader.release)

    def test_an_expired_reader_is_rejected_once_a_writer_was_granted(
        self, name: str, thread: AnotherThread
    ) -> None:
        reader = self.read(name, ttl=SHORT)
        self.pause_all(reader)
        writer = thread.call(self.take_when_free, name)
        assert writer.token > reader.token
        with pytest.raises(StaleFence, match=f"token is {writer.token}"):
            self.pin(reader)
        assert writer.verify()
        thread.call(writer.release)
        # Nor does it commit once there are readers again.
        again = thread.call(self.read, name)
        assert not self.is_current(reader)
        thread.call(again.release)

    def test_an_expired_reader_is_not_renewed_beside_a_writer(
        self, name: str, thread: AnotherThread
    ) -> None:
        reader = self.read(name, ttl=SHORT)
        self.pause_all(reader)
        writer = thread.call(self.take_when_free, name)
        with pytest.raises(LeaseLost):
            reader.renew()
        assert not reader.release()
        assert self.holders(name) == [writer.owner_id]
        thread.call(writer.release)

    def test_a_reader_does_not_wait_for_the_transaction_of_another(
        self, name: str, thread: AnotherThread
    ) -> None:
        if self.one_writer:
            pytest.skip("Any open transaction under a lease locks SQLite's file.")
        lease = self.read(name)
        with lease.atomic(self.database):
            other = thread.call(self.read, name)
            assert thread.call(self.is_current, other)
            thread.call(other.release)
        assert other.token == lease.token

    def test_a_writer_waits_for_the_transaction_of_an_expired_reader(
        self, name: str, thread: AnotherThread
    ) -> None:
        if self.one_writer:
            pytest.skip("Any open transaction under a lease locks SQLite's file.")
        reader = self.read(name)
        with reader.atomic(self.database):
            # Its transaction outlives its lock.
            assert self.service.backend.release(reader.grant)
            waiting = thread.start(self.take_when_free, name)
            time.sleep(0.3)
            assert not waiting.done()
        writer = waiting.result(TIMEOUT)
        assert writer.token > reader.token
        thread.call(writer.release)

    def test_a_reader_is_granted_inside_a_transaction(
        self, name: str, thread: AnotherThread
    ) -> None:
        if self.one_writer:
            pytest.skip("SQLite's file is locked.")
        with transaction.atomic(using=self.database):
            with self.lock(name, shared=True) as lease:
                assert lease.verify()
            # It is released at the end of the transaction.
            assert not self.is_free_for(thread, name)
        assert self.is_free_for(thread, name)

    # Entering again

    def test_a_holder_enters_its_shared_lease_again(self, name: str, thread: AnotherThread) -> None:
        with self.lock(name, shared=True) as lease:
            assert current_lease(name) is lease
            with self.lock(name, shared=True) as again:
                assert again is lease
            assert lease.verify()
        assert self.is_free_for(thread, name)

    @pytest.mark.parametrize("shared", [True, False])
    def test_a_lease_is_not_upgraded_or_downgraded(self, name: str, shared: bool) -> None:
        with self.lock(name, shared=shared) as lease:
            with pytest.raises(LockUpgrade, match="upgraded or downgraded"):
                self.lock(name, shared=not shared).acquire()
            with pytest.raises(LockUpgrade):
                self.lock(name, shared=not shared).acquire(blocking=False)
            assert lease.verify()
        assert self.is_free(name)

    def test_a_waiting_writer_stops_new_readers_but_no_holder(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = self.read(name)
        with another_thread() as second:
            waiting = second.start(self.take_when_free, name)
            wait_until(lambda: not self.may_read(thread, name), "the writer to be seen")
            with pytest.raises(LockNotAcquired, match=r"reader .*, and an exclusive holder waits"):
                thread.call(self.enter, name, shared=True)
            assert self.take(name, shared=True) is lease
            assert lease.release()
            assert lease.verify()
            assert not waiting.done()
            assert lease.release()
            writer = waiting.result(TIMEOUT)
            assert writer.token > lease.token
            second.call(writer.release)
        # The writer's place ended with its grant.
        assert self.may_read(thread, name)

    def test_a_writer_that_gave_up_stops_no_readers(self, name: str, thread: AnotherThread) -> None:
        lease = self.read(name)
        assert thread.call(self.lock(name).acquire, blocking_timeout=0.3) is None
        wait_until(lambda: self.may_read(thread, name), "readers to be let in", SOON * 2)
        assert lease.verify()

    def test_a_stream_of_readers_does_not_starve_a_writer(
        self, name: str, thread: AnotherThread
    ) -> None:
        ended, granted = threading.Event(), []

        def read() -> None:
            while not ended.is_set():
                with self.lock(name, shared=True, blocking_timeout=TIMEOUT):
                    granted.append(1)
                    time.sleep(random.uniform(0.005, 0.01))

        def write() -> None:
            try:
                wait_until(lambda: len(granted) > 50, "the readers")
                with self.lock(name, blocking_timeout=self.slack):
                    pass
            finally:
                ended.set()

        all_at_once([*[read] * 8, write])

    # Holders that are gone

    def test_the_lease_of_a_dead_reader_ends_alone(
        self, name: str, process: AnotherProcess, thread: AnotherThread
    ) -> None:
        process.call(acts.hold, self.alias, name, ttl=SHORT, shared=True)
        lease = self.read(name)
        process.kill()
        wait_until(lambda: not self.holders(name)[1:], "the end of the dead reader's lease")
        assert self.holders(name) == [lease.owner_id]
        assert lease.verify()
        assert self.is_current(lease)
        assert not self.is_free_for(thread, name)

    def holders(self, name: str) -> list[str]:
        return [each.owner_id for each in self.service.holders(name)]

    def test_a_writer_evicts_dead_readers(
        self, name: str, process: AnotherProcess, thread: AnotherThread
    ) -> None:
        process.call(acts.hold, self.alias, name, shared=True)
        lease = self.read(name)
        kill(process)
        waiting = thread.start(self.lock(name).acquire, blocking_timeout=2 * SOON)
        assert lease.release()
        writer = waiting.result(TIMEOUT)
        assert writer is not None
        thread.call(writer.release)

    # Operations

    def test_each_reader_is_listed(self, name: str, thread: AnotherThread) -> None:
        mine, other = self.read(name), thread.call(self.read, name)
        holders = self.service.holders(name)
        assert {each.owner_id for each in holders} == {mine.owner_id, other.owner_id}
        assert all(each.shared for each in holders)
        holder = self.lock(name, shared=True).holder()
        assert holder is not None
        assert holder.shared
        rows = {row.owner: row for row in listing([self.alias]).entries if row.name == name}
        assert set(rows) == {mine.owner_id, other.owner_id}
        assert {row.state for row in rows.values()} == {State.HELD}
        assert {row.token for row in rows.values()} == {mine.token}
        thread.call(other.release)

    def test_one_reader_is_released_by_force(self, name: str, thread: AnotherThread) -> None:
        mine, other = self.read(name), thread.call(self.read, name)
        done = self.force(name, owner_id=mine.owner_id)
        assert done.done
        assert done.holder.owner_id == mine.owner_id
        assert not done.others
        assert done.token > mine.token
        assert self.recorded(name) == (done.token, "")
        with pytest.raises(LeaseLost, match="by the boss"):
            mine.renew()
        # The other one has the lock, but had the same token.
        assert other.verify()
        with pytest.raises(StaleFence, match="forced release of another reader"):
            thread.call(self.pin, other)
        assert thread.call(other.release)
        again = thread.call(self.read, name)
        assert again.token > done.token
        assert thread.call(self.is_current, again)
        thread.call(again.release)

    def test_all_readers_are_released_by_force(self, name: str, thread: AnotherThread) -> None:
        mine, other = self.read(name), thread.call(self.read, name)
        found = held_by(name, self.alias)
        assert found is not None
        both = {mine.owner_id, other.owner_id}
        assert {each.owner_id for each in found.holders} == both
        done = self.force(name)
        assert done.done
        assert {each.owner_id for each in (done.holder, *done.others)} == both
        for lease in (mine, other):
            with pytest.raises(StaleFence, match="by the boss"):
                self.pin(lease)
            with pytest.raises(LeaseLost, match="by the boss"):
                lease.renew()
        assert not mine.release()
        writer = self.take_when_free(name)
        assert writer.token > done.token
        assert self.force(name, owner_id=mine.owner_id).outcome is Outcome.CHANGED_HANDS
        assert writer.verify()

    def test_an_expired_reader_is_released_by_force(self, name: str, thread: AnotherThread) -> None:
        if not self.service.backend.supports_ttl:
            pytest.skip("A reader is gone with its session.")
        mine, other = self.read(name, ttl=SHORT), thread.call(self.read, name)
        self.pause_holder(mine)
        wait_until(lambda: mine.expired, "the end of the lease")
        time.sleep(0.1)
        assert self.is_current(mine)
        done = self.force(name, owner_id=mine.owner_id)
        assert done.done
        assert done.holder.owner_id == mine.owner_id
        with pytest.raises(StaleFence, match="by the boss"):
            self.pin(mine)
        assert other.verify()
        thread.call(other.release)

    def test_a_reader_that_is_recorded_during_a_forced_release_is_rejected(
        self, name: str, thread: AnotherThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.read(name)
        release, late = self.service.backend.release, list[Lease]()

        def release_late(grant: Any) -> bool:
            late.append(thread.call(self.read, name))
            return release(grant)

        monkeypatch.setattr(self.service.backend, "release", release_late)
        done = self.force(name)
        monkeypatch.undo()
        assert done.token > late[0].token
        assert not thread.call(self.is_current, late[0])
        thread.call(late[0].release)

    def pin(self, lease: Lease) -> None:
        with lease.atomic(self.database):
            pass

    def force(self, name: str, **terms: Any) -> Any:
        return force_release(name, by="the boss", backend=self.alias, **terms)
