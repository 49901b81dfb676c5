"""Exclusion, waiting, and the order of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ... import signals
from ...backends.interface import Held, Renewal, Wait
from ...core.grants import new_claim
from ...exceptions import LockNotAcquired, Unfenced
from ...lease import Lease
from ...storage.connections import ConnectionPool
from ..processes import TIMEOUT, AnotherProcess, AnotherThread, Processes
from . import acts
from .acts import LONG
from .base import Contract, all_at_once, connected, left_open


class ExclusionContract(Contract):
    """One holder at a time, and each has a higher token than all before."""

    # Exclusion and the order of tokens

    def test_one_thread_at_a_time_is_inside_and_tokens_rise(self, name: str) -> None:
        inside: list[int] = []
        tokens: list[int] = []

        def take_turns() -> None:
            for _ in range(5):
                with self.lock(name, blocking_timeout=TIMEOUT) as lease:
                    inside.append(1)
                    tokens.append(lease.token)
                    assert len(inside) == 1
                    inside.pop()

        all_at_once([take_turns] * 8)
        assert self.in_a_row(tokens, 40)

    def test_one_process_at_a_time_is_inside_and_tokens_rise(
        self, name: str, processes: Processes
    ) -> None:
        with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile() as log:
            several = [stack.enter_context(processes.borrow()) for _ in range(4)]
            runs = [each.start(acts.take_turns, self.alias, name, 8, log.name) for each in several]
            for run in runs:
                run.result(TIMEOUT)
            steps = [line.split() for line in Path(log.name).read_text().splitlines()]
        entered, left = steps[::2], steps[1::2]
        assert {step for step, _ in entered} == {"in"}
        assert left == [["out", token] for _, token in entered]
        assert self.in_a_row([int(token) for _, token in entered], 32)

    def test_one_asyncio_task_at_a_time_is_inside_and_tokens_rise(self, name: str) -> None:
        inside: list[int] = []
        tokens: list[int] = []

        async def take_turns() -> None:
            for _ in range(3):
                async with self.lock(name, blocking_timeout=TIMEOUT) as lease:
                    inside.append(1)
                    tokens.append(lease.token)
                    await asyncio.sleep(0.001)
                    assert len(inside) == 1
                    inside.pop()

        async def main() -> None:
            await asyncio.gather(*(take_turns() for _ in range(5)))

        asyncio.run(main())
        assert self.in_a_row(tokens, 15)

    def test_different_names_are_different_locks(self, name: str, thread: AnotherThread) -> None:
        with self.lock(name):
            assert self.is_free_for(thread, f"{name}:other")

    def test_another_process_is_excluded(self, name: str, process: AnotherProcess) -> None:
        with self.lock(name):
            assert not self.is_free_for(process, name)
        assert self.is_free_for(process, name)

    def test_a_process_that_holds_excludes_this_one(
        self, name: str, process: AnotherProcess
    ) -> None:
        token = process.call(acts.hold, self.alias, name)
        assert self.lock(name).acquire(blocking=False) is None
        assert process.call(acts.let_go, name)
        with self.lock(name) as lease:
            assert self.is_next(lease.token, token)

    # Failed tries

    def test_a_failed_try_locks_no_row(
        self, name: str, process: AnotherProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        process.call(acts.hold, self.alias, name)
        with left_open(self.database) as connection:
            # Whatever the try asks the database, it asks there.
            monkeypatch.setattr(ConnectionPool, "run", lambda pool, work, **more: work(connection))
            assert isinstance(self.service.backend.acquire(new_claim(name, LONG), Wait()), Held)
            monkeypatch.undo()
            # The try's transaction is open: a row that it locks would block the renewal.
            process.call(acts.renew, name)
        assert process.call(acts.let_go, name)

    def test_a_lease_survives_three_ttls_of_tries_that_do_not_wait(
        self, name: str, processes: Processes
    ) -> None:
        renewals: list[Renewal] = []

        def receive(answers: list[Renewal], **kwargs: Any) -> None:
            renewals.extend(answers)

        with contextlib.ExitStack() as stack:
            several = [stack.enter_context(processes.borrow()) for _ in range(2)]
            stack.enter_context(connected(signals.leases_renewed, receive))
            lease = self.take(name, ttl=self.hammered_ttl)
            terms = self.alias, name, 3, 3 * self.hammered_ttl
            hammers = [each.start(acts.hammer, *terms) for each in several]
            done = [each.result(TIMEOUT) for each in hammers]
        assert sum(tries for tries, _ in done) > 100
        assert not any(granted for _, granted in done)
        assert lease.verify()
        # None was late, or had to be repeated.
        assert set(renewals) == {Renewal.KEPT}

    # Waiting

    def test_with_names_the_holder_in_its_error_and_never_enters(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = thread.call(self.take, name)
        entered = False
        with pytest.raises(LockNotAcquired) as caught, self.lock(name, blocking_timeout=0):
            entered = True
        assert not entered
        assert repr(name) in str(caught.value)
        assert str(lease.holder) in str(caught.value)
        assert (caught.value.name, caught.value.alias) == (name, self.alias)
        assert caught.value.holder is not None
        assert caught.value.holder.owner_id == lease.owner_id

    def test_async_with_names_the_holder_in_its_error_and_never_enters(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = thread.call(self.take, name)

        async def main() -> None:
            async with self.lock(name, blocking_timeout=0):
                pytest.fail("entered without the lock")

        with pytest.raises(LockNotAcquired) as caught:
            asyncio.run(main())
        assert str(lease.holder) in str(caught.value)

    def test_a_lock_that_is_not_required_gives_none_to_a_block_without_it(
        self, name: str, thread: AnotherThread
    ) -> None:
        wanted = self.lock(name, blocking_timeout=0, required=False)
        taken = thread.call(self.take, name)
        with wanted as none:
            # The same object again: the inner block alone has the lock.
            assert none is None
            thread.call(taken.release)
            with wanted as lease:
                assert lease is not None
                assert lease.verify()
            assert self.is_free(name)

        async def main() -> None:
            async with wanted as lease:
                assert lease is not None
                assert await lease.averify()
            await asyncio.to_thread(thread.call, self.take, name)
            async with wanted as lease:
                assert lease is None

        asyncio.run(main())

    def test_acquire_without_blocking_returns_none(self, name: str, thread: AnotherThread) -> None:
        thread.call(self.take, name)
        assert self.lock(name).acquire(blocking=False) is None
        assert asyncio.run(self.lock(name).aacquire(blocking=False)) is None

    def test_acquire_waits_for_the_blocking_timeout_and_not_much_longer(
        self, name: str, thread: AnotherThread
    ) -> None:
        thread.call(self.take, name)
        started = time.monotonic()
        assert self.lock(name).acquire(blocking_timeout=0.3) is None
        assert 0.25 <= time.monotonic() - started < 0.3 + self.slack

    def test_a_waiter_acquires_the_lock_when_it_is_released(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = self.take(name)
        waiting = thread.start(self.take_when_free, name)
        time.sleep(0.1)
        assert not waiting.done()
        lease.release()
        assert self.is_next(waiting.result(TIMEOUT).token, lease.token)

    def test_a_wait_without_a_limit_ends_when_the_lock_is_released(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = self.take(name)
        waiting = thread.start(self.lock(name, blocking_timeout=None).acquire)
        time.sleep(0.1)
        lease.release()
        got = waiting.result(TIMEOUT)
        assert got is not None
        assert self.is_next(got.token, lease.token)

    @pytest.mark.parametrize("is_early", [False, True], ids=["during_the_wait", "before_it"])
    def test_an_event_ends_a_wait_within_two_seconds(
        self, name: str, thread: AnotherThread, is_early: bool
    ) -> None:
        lease, cancel = self.take(name), threading.Event()
        if is_early:
            cancel.set()
        wait = functools.partial(self.lock(name, blocking_timeout=None).acquire, cancel=cancel)
        waiting = thread.start(wait)
        if not is_early:
            time.sleep(0.3)
            assert not waiting.done()
        cancelled = time.monotonic()
        cancel.set()
        assert waiting.result(TIMEOUT) is None
        assert time.monotonic() - cancelled < 2 + self.slack
        lease.release()
        self.take_when_free(name).release()

    def test_a_waiting_process_acquires_the_lock_when_it_is_released(
        self, name: str, process: AnotherProcess
    ) -> None:
        lease = self.take(name)
        waiting = process.start(acts.hold, self.alias, name, TIMEOUT)
        time.sleep(0.1)
        assert not waiting.done()
        lease.release()
        assert self.is_next(waiting.result(TIMEOUT), lease.token)

    def test_cancelled_waiting_leaves_nothing_held(self, name: str, thread: AnotherThread) -> None:
        lease = thread.call(self.take, name)

        async def main() -> None:
            waiting = asyncio.create_task(self.lock(name).aacquire(blocking_timeout=TIMEOUT))
            await asyncio.sleep(0.2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(main())
        thread.call(lease.release)
        self.take_when_free(name).release()

    def test_cancelling_while_the_lock_is_granted_leaves_nothing_held(
        self, name: str, thread: AnotherThread
    ) -> None:
        async def main(lease: Lease, delay: float) -> None:
            waiting = asyncio.create_task(self.lock(name).aacquire(blocking_timeout=TIMEOUT))
            await asyncio.sleep(0.1)
            releasing = thread.start(lease.release)
            await asyncio.sleep(delay)
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled() and (got := waiting.result()):
                await self.service.in_thread(self.service.release, [got], got.who)
            await asyncio.wrap_future(releasing)

        for step in range(8):
            lease = thread.call(self.take_when_free, name)
            asyncio.run(main(lease, step * 0.002))
        self.take_when_free(name).release()

    # Tokens

    def test_tokens_start_at_one_and_rise(self, name: str) -> None:
        tokens = []
        for _ in range(3):
            with self.lock(name) as lease:
                tokens.append(lease.token)
        assert self.in_a_row(tokens, 3)

    def test_a_grant_is_recorded_before_the_body_runs(self, name: str) -> None:
        with self.lock(name) as lease:
            assert self.recorded(name) == (lease.token, lease.owner_id)
        assert self.recorded(name) == (lease.token, lease.owner_id)

    def test_owner_ids_are_unique(self, name: str) -> None:
        owners = set()
        for _ in range(3):
            with self.lock(name) as lease:
                owners.add(lease.owner_id)
        assert len(owners) == 3

    def test_the_token_of_an_unfenced_lease_raises_an_error_with_the_reason(
        self, name: str
    ) -> None:
        with self.lock(name, fenced=False) as lease, pytest.raises(Unfenced, match="fenced=False"):
            _ = lease.token
        assert self.recorded(name) is None

    def test_fenced_and_unfenced_holders_exclude_each_other(
        self, name: str, thread: AnotherThread
    ) -> None:
        with self.lock(name, fenced=False):
            assert not self.is_free_for(thread, name)
        lease = thread.call(self.take, name)
        assert self.lock(name, fenced=False).acquire(blocking=False) is None
        thread.call(lease.release)
        with self.lock(name, fenced=False) as unfenced:
            assert unfenced.verify()
