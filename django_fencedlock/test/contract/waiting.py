"""The queue of waiters."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import time
from pathlib import Path

import pytest

from ...exceptions import LeaseLost
from ...ops.force_release import force_release
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


class WaitingContract(Contract):
    """For backends with ``supports_waiting``: waiters queue."""

    #: Seconds that a dead waiter may delay the others.
    dead_waiter_bound = 10.0

    def waiters(self, name: str) -> int | None:
        """Return the length of the queue, if known: the tests run faster."""
        return None

    def wait_for_waiters(self, name: str, count: int) -> None:
        """Return when `count` waiters are in the queue."""
        if self.waiters(name) is None:
            time.sleep(1)
        else:
            wait_until(lambda: self.waiters(name) == count, f"{count} waiters")

    def test_first_come_first_served(self, name: str) -> None:
        served: list[int] = []

        def wait(place: int) -> None:
            with self.lock(name, blocking_timeout=TIMEOUT):
                served.append(place)

        with contextlib.ExitStack() as stack:
            lease = self.take(name)
            waiting = []
            for place in range(6):
                thread = stack.enter_context(another_thread())
                waiting.append(thread.start(wait, place))
                self.wait_for_waiters(name, place + 1)
            lease.release()
            for each in waiting:
                each.result(TIMEOUT)
        assert served == list(range(6))

    def test_the_first_waiter_acquires_a_lock_that_was_released_by_force(self, name: str) -> None:
        served: list[int] = []

        def wait(place: int) -> int:
            with self.lock(name, blocking_timeout=TIMEOUT) as lease:
                served.append(place)
                return lease.token

        with contextlib.ExitStack() as stack:
            former = self.take(name)
            waiting = []
            for place in range(3):
                thread = stack.enter_context(another_thread())
                waiting.append(thread.start(wait, place))
                self.wait_for_waiters(name, place + 1)
            done = force_release(name, by="the boss", backend=self.alias)
            with pytest.raises(LeaseLost):
                former.renew()
            tokens = [each.result(TIMEOUT) for each in waiting]
        assert served == [0, 1, 2]
        assert done.token is not None
        assert [done.token, *tokens] == list(range(done.token, done.token + 4))

    def test_waiters_are_counted(self, name: str, thread: AnotherThread) -> None:
        def wait() -> None:
            with self.lock(name, blocking_timeout=TIMEOUT):
                pass

        with self.lock(name):
            waiting = thread.start(wait)
            self.wait_for_waiters(name, 1)
            assert self.service.backend.holders([name])[name].waiting == 1
        waiting.result(TIMEOUT)

    def test_first_come_first_served_among_processes(self, name: str, processes: Processes) -> None:
        lease = self.take(name)
        with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile() as log:
            waiting = []
            for place in range(3):
                process = stack.enter_context(processes.borrow())
                waiting.append(
                    process.start(acts.note_when_served, self.alias, name, place, log.name)
                )
                self.wait_for_waiters(name, place + 1)
            lease.release()
            for each in waiting:
                each.result(TIMEOUT)
            assert Path(log.name).read_text().split() == ["0", "1", "2"]

    def test_a_waiter_whose_time_is_up_leaves_the_queue(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = thread.call(self.take, name)
        assert self.lock(name).acquire(blocking_timeout=0.2) is None
        thread.call(lease.release)
        self.take_when_free(name).release()

    def test_a_waiter_whose_time_is_up_acquires_nothing_later(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = self.take(name)
        assert thread.call(self._wait_until_timeout, name)
        lease.release()
        time.sleep(0.2)
        assert self.lock(name).holder() is None
        assert self.is_free(name)

    def test_a_waiter_that_an_event_cancels_leaves_the_queue(
        self, name: str, thread: AnotherThread
    ) -> None:
        cancels = [threading.Event() for _ in range(3)]
        endless = self.lock(name, blocking_timeout=None)
        with contextlib.ExitStack() as stack:
            lease, waiting = self.take(name), []
            for place, cancel in enumerate(cancels):
                other = stack.enter_context(another_thread())
                waiting.append(other.start(functools.partial(endless.acquire, cancel=cancel)))
                self.wait_for_waiters(name, place + 1)
            # The second one in the queue, then the first.
            for count, place in ((2, 1), (1, 0)):
                cancelled = time.monotonic()
                cancels[place].set()
                assert waiting[place].result(TIMEOUT) is None
                assert time.monotonic() - cancelled < 2 + self.slack
                self.wait_for_waiters(name, count)
            lease.release()
            last = waiting[2].result(TIMEOUT)
            assert last is not None
            assert self.is_next(last.token, lease.token)

    def test_a_dead_waiter_does_not_stop_the_others(
        self, name: str, thread: AnotherThread, process: AnotherProcess
    ) -> None:
        lease = self.take(name)
        process.start(acts.hold, self.alias, name, TIMEOUT)
        self.wait_for_waiters(name, 1)
        waiting = thread.start(self.take_when_free, name)
        self.wait_for_waiters(name, 2)
        process.kill()
        released = time.monotonic()
        lease.release()
        assert waiting.result(TIMEOUT).verify()
        assert time.monotonic() - released < self.dead_waiter_bound + self.slack

    def test_a_waiter_acquires_a_lock_whose_lease_is_lost(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = self.take(name, ttl=SHORT)
        waiting = thread.start(self.take_when_free, name)
        self.wait_for_waiters(name, 1)
        self.interrupt_holder(lease)
        assert self.is_next(waiting.result(TIMEOUT).token, lease.token)

    def _wait_until_timeout(self, name: str) -> bool:
        return self.lock(name).acquire(blocking_timeout=0.3) is None
