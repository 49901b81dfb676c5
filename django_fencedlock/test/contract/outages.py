"""Services that are unavailable, or lose their data."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from ...exceptions import BackendUnavailable, LeaseLost, LockNotAcquired
from ...lease import Lease
from ...locks import Lock
from ..processes import TIMEOUT, AnotherThread, another_thread
from .acts import LONG
from .base import Contract

T = TypeVar("T")


class OutageContract(Contract):
    """For services that the test may stop. It needs a service of its own."""

    #: Seconds within which a request to an unavailable service must fail.
    answer_within = 15.0

    def paused(self) -> contextlib.AbstractContextManager[object]:
        """Make the service hang inside the block: it never answers."""
        raise NotImplementedError

    def gone(self) -> contextlib.AbstractContextManager[object]:
        """Stop the service inside the block."""
        raise NotImplementedError

    @pytest.fixture(params=["paused", "gone"])
    def outage(
        self, request: pytest.FixtureRequest
    ) -> Callable[[], contextlib.AbstractContextManager[object]]:
        way: Callable[[], contextlib.AbstractContextManager[object]] = getattr(self, request.param)
        return way

    def test_acquire_fails_in_time(self, name: str, outage: Any) -> None:
        self.take(f"{name}:before").release()
        with outage():
            started = time.monotonic()
            with pytest.raises(BackendUnavailable) as caught:
                self.take(name)
            assert time.monotonic() - started < self.answer_within + self.slack
            assert repr(self.alias) in str(caught.value)

    def test_waiting_ends_in_time(self, name: str, outage: Any) -> None:
        self.take(f"{name}:before").release()
        with outage():
            started = time.monotonic()
            with pytest.raises((BackendUnavailable, LockNotAcquired)):
                self._enter(self.lock(name, blocking_timeout=1))
            assert time.monotonic() - started < 1 + 2 * self.answer_within + self.slack

    def test_an_unknown_outcome_leaves_nothing_held_for_longer_than_a_ttl(
        self, name: str, outage: Any
    ) -> None:
        with outage(), pytest.raises(BackendUnavailable):
            self.take(name, ttl=1)
        started = time.monotonic()
        with another_thread() as thread:
            lease = thread.call(self._take_despite_errors, name)
            assert time.monotonic() - started < 1 + self.slack
            assert thread.call(lease.release)

    def test_a_lease_that_can_not_be_renewed_is_lost_after_its_ttl(
        self, name: str, outage: Any
    ) -> None:
        lease = self.take(name, ttl=1)
        lost = threading.Event()
        lease.on_lost(lambda lease: lost.set())
        with outage():
            assert lost.wait(1 + self.answer_within + self.slack)
            assert lease.lost

    def test_a_short_outage_loses_nothing(self, name: str, outage: Any) -> None:
        with self.lock(name, ttl=LONG) as lease:
            with outage(), pytest.raises(BackendUnavailable):
                lease.renew()
            self._insist(lease.renew)
            assert lease.verify()

    def test_a_block_that_ends_meanwhile_raises_no_error_of_the_service(
        self, name: str, outage: Any
    ) -> None:
        with contextlib.ExitStack() as stack:
            try:
                with self.lock(name, ttl=LONG):
                    stack.enter_context(outage())
            except LeaseLost:
                # The session has ended, and its locks with it.
                assert not self.service.backend.supports_ttl

    def _enter(self, lock: Lock) -> None:
        with lock:
            pytest.fail("entered without the lock")

    def _take_despite_errors(self, name: str) -> Lease:
        return self._insist(lambda: self.take_when_free(name))

    def _insist(self, act: Callable[[], T]) -> T:
        """Repeat it until the service works again."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                return act()
            except BackendUnavailable:
                assert time.monotonic() < deadline
                time.sleep(0.05)


class DataLossContract(Contract):
    """For services that can lose their data: tokens rise all the same."""

    def lose_data(self) -> None:
        """Delete the service's data, except in the fence database."""
        raise NotImplementedError

    def test_tokens_rise_after_the_service_lost_its_data(self, name: str) -> None:
        for _ in range(3):
            with self.lock(name) as before:
                pass
        self.lose_data()
        with self.lock(name) as after:
            assert after.token > before.token
            assert self.recorded(name) == (after.token, after.owner_id)

    def test_a_forgotten_holder_notices_its_successor(
        self, name: str, thread: AnotherThread
    ) -> None:
        former = self.take(name)
        self.lose_data()
        successor = thread.call(self.take, name)
        assert successor.token > former.token
        assert not former.verify()
        assert former.release() is False
        assert successor.verify()

    def test_a_forgotten_holder_keeps_a_lock_that_no_other_holder_acquired(self, name: str) -> None:
        with self.lock(name) as lease:
            self.lose_data()
            lease.renew()
            assert lease.verify()
            assert not self.is_free(name)
