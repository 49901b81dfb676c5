"""Locks whose holder's process was killed."""

from __future__ import annotations

import time

import pytest

from ...backends.interface import Grant
from ...core.identity import is_process_gone
from ...storage.tables import HeldLock
from ..processes import AnotherProcess, AnotherThread, wait_until
from . import acts
from .acts import LONG
from .base import Contract

#: Seconds within which a waiter detects that a holder on its machine is gone.
SOON = 5.0


class DeathContract(Contract):
    """The holder's process was killed, with most of the ttl left."""

    @pytest.mark.parametrize("fenced", [True, False])
    def test_the_lock_of_a_killed_process_of_this_machine_is_free_before_its_ttl(
        self, name: str, process: AnotherProcess, fenced: bool
    ) -> None:
        token = process.call(acts.hold, self.alias, name, 0.0, LONG, fenced)
        kill(process)
        lease = self.lock(name, fenced=fenced).acquire(blocking_timeout=SOON)
        assert lease is not None
        assert lease.verify()
        if fenced:
            assert self.is_next(lease.token, token)

    def test_a_waiter_detects_that_a_process_of_this_machine_was_killed(
        self, name: str, process: AnotherProcess, thread: AnotherThread
    ) -> None:
        token = process.call(acts.hold, self.alias, name)
        waiting = thread.start(self.lock(name).acquire, blocking_timeout=SOON)
        time.sleep(0.1)
        assert not waiting.done()
        kill(process)
        lease = waiting.result()
        assert lease is not None
        assert self.is_next(lease.token, token)
        thread.call(lease.release)

    def test_a_stopped_process_keeps_its_lock(self, name: str, process: AnotherProcess) -> None:
        process.call(acts.hold, self.alias, name)
        process.pause()
        assert self.lock(name).acquire(blocking_timeout=0.3) is None
        process.resume()
        assert process.call(acts.let_go, name)

    def test_evicting_frees_the_lock_of_a_killed_process(
        self, name: str, process: AnotherProcess, thread: AnotherThread
    ) -> None:
        process.call(acts.hold, self.alias, name)
        owner = process.call(acts.held_by, name)
        kill(process)
        self.service.backend.release(Grant(name, owner))
        assert self.is_free(name)
        assert self.is_free_for(thread, name)
        self.service.keeper.clear()
        assert not HeldLock.objects.using(self.database).filter(name=name).exists()

    def test_evicting_frees_no_lock_of_another_holder(
        self, name: str, process: AnotherProcess, thread: AnotherThread
    ) -> None:
        process.call(acts.hold, self.alias, name)
        owner = process.call(acts.held_by, name)
        kill(process)
        successor = self.take_when_free(name)
        assert not self.service.backend.release(Grant(name, owner))
        self.service.keeper.clear()
        assert successor.verify()
        assert not self.is_free_for(thread, name)
        assert HeldLock.objects.using(self.database).get(name=name).owner == successor.owner_id


def kill(process: AnotherProcess) -> None:
    """Kill a process, and wait until it is gone."""
    who = process.call(acts.who)
    process.kill()
    wait_until(lambda: is_process_gone(who) is not False, "the end of a process")
