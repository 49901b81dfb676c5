"""Sets of locks: all of them or none."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ...core.identity import is_process_gone
from ...exceptions import LeaseLost, LockNotAcquired, StaleFence
from ...lock_sets import LeaseSet, LockSet, lock_all
from ...ops.force_release import force_release
from ...storage.tables import HeldLock
from ..processes import TIMEOUT, AnotherProcess, AnotherThread, Processes, wait_until
from . import acts
from .acts import LONG
from .base import SHORT, Contract
from .dying import SOON, kill


class SetContract(Contract):
    """A set is held as a whole, each name with a token of its own."""

    @pytest.fixture
    def names(self, name: str) -> list[str]:
        """Return names that were never used, in the order of their bytes."""
        return [f"{name}:{letter}" for letter in "abc"]

    def lock_all(self, names: list[str], **terms: Any) -> LockSet:
        return lock_all(names, **{"ttl": LONG, "backend": self.alias, **terms})

    def take_all(self, names: list[str], **terms: Any) -> LeaseSet:
        leases = self.lock_all(names, **terms).acquire(blocking=False)
        assert leases is not None, f"One of {names} isn't free."
        return leases

    def test_a_set_excludes_each_of_its_names(
        self, names: list[str], thread: AnotherThread, process: AnotherProcess
    ) -> None:
        with self.lock_all(names):
            for other in (thread, process):
                for each in names:
                    assert not self.is_free_for(other, each)
                assert not other.call(acts.try_to_take_all, self.alias, names[1:])
        assert process.call(acts.try_to_take_all, self.alias, names)

    def test_each_name_has_a_token_of_its_own_and_all_are_recorded(self, names: list[str]) -> None:
        with self.lock(names[1]) as first:
            pass
        with self.lock_all(names) as leases, leases.atomic(self.database):
            assert self.is_next(leases[names[1]].token, first.token)
            for lease in leases.values():
                assert self.recorded(lease.name) == (lease.token, lease.owner_id)
                assert lease.verify()

    def test_all_or_none(self, names: list[str], process: AnotherProcess) -> None:
        process.call(acts.hold, self.alias, names[1])
        assert self.lock_all(names).acquire(blocking=False) is None
        assert self.lock_all(names).acquire(blocking_timeout=0.1) is None
        for each in (names[0], names[2]):
            assert self.is_free(each)
        assert process.call(acts.let_go, names[1])
        assert self.take_all(names).release()

    def test_the_refusal_names_the_holders_of_all_that_are_taken(
        self, names: list[str], process: AnotherProcess, thread: AnotherThread
    ) -> None:
        process.call(acts.hold, self.alias, names[0])
        thread.call(self.take, names[2])
        with (
            pytest.raises(LockNotAcquired) as caught,
            self.lock_all(names, blocking_timeout=0.1),
        ):
            pytest.fail("the block was entered")
        holders = caught.value.holders
        assert holders is not None
        assert list(holders) == [names[0], names[2]]
        assert holders[names[0]].owner_id == process.call(acts.held_by, names[0])  # type: ignore[union-attr]
        assert process.call(acts.let_go, names[0])

    def test_a_waiter_acquires_the_set_once_all_are_free(
        self, names: list[str], process: AnotherProcess, thread: AnotherThread
    ) -> None:
        process.call(acts.hold_all, self.alias, names[1:])
        waiting = thread.start(self.lock_all(names).acquire, blocking_timeout=TIMEOUT)
        wait_until(lambda: not self.is_free(names[0]), "the waiter to have the lowest name")
        assert process.call(acts.let_go, names[1])
        assert not waiting.done()
        assert process.call(acts.let_go, names[2])
        leases: Any = waiting.result()
        assert leases.verify()
        assert thread.call(leases.release)

    def test_no_deadlock_and_one_holder_of_each_name(self, name: str, processes: Processes) -> None:
        names = [f"{name}:{number}" for number in range(8)]
        with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile() as log:
            several = [stack.enter_context(processes.borrow()) for _ in range(4)]
            runs = [
                each.start(acts.take_pairs, self.alias, names, 8, 2, log.name) for each in several
            ]
            for run in runs:
                run.result(2 * TIMEOUT)
            steps = self.steps_of(names, log.name)
        self.check_each_of_32_took_two_pairs(steps)

    def test_no_deadlock_of_32_processes(self, name: str, process: AnotherProcess) -> None:
        names = [f"{name}:{number}" for number in range(8)]
        with tempfile.NamedTemporaryFile() as log:
            terms = self.alias, names, 32, 2, log.name
            codes = process.start(acts.take_pairs_in_children, *terms).result(3 * TIMEOUT)
            steps = self.steps_of(names, log.name)
        assert codes == [0] * 32
        self.check_each_of_32_took_two_pairs(steps)

    def steps_of(self, names: list[str], log: str) -> dict[str, list[tuple[str, int]]]:
        """Return for each name when a holder came and went, and its token."""
        lines = [line.rsplit(" ", 2) for line in Path(log).read_text().splitlines()]
        return {
            name: [(step, int(token)) for about, step, token in lines if about == name]
            for name in names
        }

    def check_each_of_32_took_two_pairs(self, steps: dict[str, list[tuple[str, int]]]) -> None:
        assert sum(map(len, steps.values())) == 32 * 2 * 2 * 2
        for of_one in steps.values():
            tokens = [token for step, token in of_one if step == "in"]
            assert [step for step, _ in of_one] == ["in", "out"] * len(tokens)
            assert tokens == [token for step, token in of_one if step == "out"]
            # A try that was refused may have used tokens.
            assert tokens == sorted(set(tokens))

    # Death

    def test_a_set_of_a_killed_process_is_free_before_its_ttl(
        self, names: list[str], process: AnotherProcess
    ) -> None:
        tokens = process.call(acts.hold_all, self.alias, names)
        kill(process)
        leases = self.lock_all(names).acquire(blocking_timeout=SOON)
        assert leases is not None
        for lease, token in zip(leases.values(), tokens, strict=True):
            assert lease.token > token
        leases.release()

    def test_a_process_that_is_killed_between_two_grants_leaves_nothing(
        self, names: list[str], process: AnotherProcess, thread: AnotherThread
    ) -> None:
        held = self.take(names[1])
        who = process.call(acts.who)
        process.start(acts.hold_all, self.alias, names, TIMEOUT)
        wait_until(
            lambda: not self.is_free_for(thread, names[0]), "the process to have the lowest name"
        )
        process.kill()
        wait_until(lambda: is_process_gone(who) is not False, "the end of the process")
        held.release()
        leases = self.lock_all(names).acquire(blocking_timeout=SOON)
        assert leases is not None
        assert leases.verify()
        leases.release()

    def test_processes_that_are_killed_at_any_moment_leave_nothing(
        self, name: str, process: AnotherProcess
    ) -> None:
        names = [f"{name}:{number}" for number in range(4)]
        with tempfile.NamedTemporaryFile() as log:
            terms = self.alias, names, 12, 8, log.name
            run = process.start(acts.take_pairs_in_children, *terms, kills=8)
            codes = run.result(3 * TIMEOUT)
            steps = self.steps_of(names, log.name)
        assert codes.count(0) >= 4
        assert set(codes) == {0, -signal.SIGKILL}
        for of_one in steps.values():
            newest = 0
            for step, token in of_one:
                # Who was killed didn't note that it went, but nobody came before.
                assert token == newest if step == "out" else token > newest
                newest = token
        leases = self.lock_all(names).acquire(blocking_timeout=SOON)
        assert leases is not None
        assert leases.verify()
        leases.release()

    # Loss

    def test_the_late_write_of_a_set_that_lost_one_name_is_rejected(
        self, names: list[str], thread: AnotherThread
    ) -> None:
        leases = self.take_all(names, ttl=SHORT)
        for lease in leases.values():
            self.pause_holder(lease)
        self.interrupt_holder(leases[names[2]])
        successor = thread.call(self.take_when_free, names[2])
        assert self.recorded(names[2]) == (successor.token, successor.owner_id)
        with pytest.raises((StaleFence, LeaseLost)), leases.atomic(self.database):
            pytest.fail("the block was entered")
        thread.call(successor.release)

    def test_the_forced_release_of_one_name_is_the_loss_of_the_set(self, names: list[str]) -> None:
        with (
            pytest.raises(LeaseLost, match="by the boss"),
            self.lock_all(names, ttl=3.0) as leases,
        ):
            force_release(names[1], by="the boss", backend=self.alias)
            with pytest.raises(StaleFence, match="the boss"), leases.atomic(self.database):
                pytest.fail("the block was entered")
            wait_until(lambda: leases[names[0]].lost, "the loss to be noticed")
            assert leases[names[2]].lost
        for each in names:
            assert self.is_free(each)

    def test_the_rows_of_the_registry(self, names: list[str]) -> None:
        rows = HeldLock.objects.using(self.database).filter(name__in=names)
        with self.lock_all(names) as leases:
            owners = {lease.owner_id for lease in leases.values()}
            assert {row.owner for row in rows.all()} == owners
        self.service.keeper.clear()
        assert not rows.all()
