"""Locks that are acquired and released inside the caller's transactions."""

from __future__ import annotations

import pytest
from django.db import connections, transaction

from ...exceptions import InsideTransaction
from ...lease import Lease
from ..processes import TIMEOUT, AnotherThread
from .base import Contract, ended_by


class TransactionContract(Contract):
    """A caller's transaction never shortens a lock; it delays the release."""

    @pytest.mark.parametrize("ends_by", ["commit", "rollback"])
    def test_a_release_inside_a_transaction_happens_at_its_end(
        self, name: str, thread: AnotherThread, ends_by: str
    ) -> None:
        lease = self.take(name)
        with ended_by(self.database, ends_by):
            lease.release()
            assert not self._is_free_now(thread, lease)
        assert self.is_free_for(thread, name)

    @pytest.mark.parametrize("ends_by", ["commit", "rollback"])
    def test_a_release_inside_a_savepoint_happens_at_the_end_of_the_transaction(
        self, name: str, thread: AnotherThread, ends_by: str
    ) -> None:
        lease = self.take(name)
        with transaction.atomic(using=self.database):
            with ended_by(self.database, ends_by):
                lease.release()
            assert not self._is_free_now(thread, lease)
        assert self.is_free_for(thread, name)

    def test_a_block_inside_a_transaction_ends_with_it(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = self.take(name)
        with transaction.atomic(using=self.database):
            with self.lock(name) as again:
                assert again is lease
            lease.release()
            assert not self._is_free_now(thread, lease)
        assert self.is_free_for(thread, name)

    def test_acquiring_again_before_the_end_returns_the_same_lease(
        self, name: str, thread: AnotherThread
    ) -> None:
        lease = self.take(name)
        with transaction.atomic(using=self.database):
            lease.release()
            assert self.take(name) is lease
            assert lease.verify()
        assert not self.is_free_for(thread, name)
        assert lease.release()
        assert self.is_free_for(thread, name)

    def test_a_rollback_grants_no_token_twice(self, name: str) -> None:
        if self.one_writer:
            self._is_refused_after_a_write(name)
            return
        with ended_by(self.database, "rollback"), self.lock(name) as first:
            pass
        with self.lock(name) as second:
            assert self.is_next(second.token, first.token)

    def test_a_lock_in_a_transaction_is_held_until_it_ends(
        self, name: str, thread: AnotherThread
    ) -> None:
        if self.one_writer:
            self._is_refused_after_a_write(name)
            return
        with transaction.atomic(using=self.database):
            with self.lock(name):
                pass
            assert not self.is_free_for(thread, name)
        assert self.is_free_for(thread, name)

    def test_closing_all_connections_of_django_loses_no_lock(
        self, name: str, thread: AnotherThread
    ) -> None:
        with self.lock(name) as lease:
            connections.close_all()
            assert lease.verify()
            assert not self.is_free_for(thread, name)

    def _is_free_now(self, thread: AnotherThread, lease: Lease) -> bool:
        """Return whether another holder could acquire the lock now."""
        if self.one_writer:
            # A try would wait for SQLite's busy timeout.
            return not lease.verify()
        return self.is_free_for(thread, lease.name)

    def _is_refused_after_a_write(self, name: str) -> None:
        from ...models import Fence

        with transaction.atomic(using=self.database):
            Fence.objects.using(self.database).filter(name=name).update(owner="")
            with pytest.raises(InsideTransaction, match="open the transaction inside"):
                self.lock(name).acquire(blocking_timeout=TIMEOUT)
