"""
What every backend does, by the interface alone.

Derive a class from `BackendInterface` for a backend, with a fixture `make` that returns a backend
object on each call; all are of one service, as those of several processes are.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from django_fencedlock import conf
from django_fencedlock.backends.database import DatabaseBackend
from django_fencedlock.backends.interface import (
    Backend,
    Claim,
    Grant,
    Granted,
    Held,
    Renewal,
    Wait,
)
from django_fencedlock.backends.interface import grant_of as grant
from django_fencedlock.core.identity import new_owner
from django_fencedlock.core.names import permit_name
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.test.processes import wait_until
from tests.failing import raising
from tests.stub_backend import StubBackend, StubService
from tests.threads import beside

#: Seconds that a busy machine may take for anything.
SLACK = 20.0


class BackendInterface:
    """The tests; override the attributes and fixtures, not the tests."""

    #: Seconds of a ttl that is meant to expire.
    short = 0.3
    #: release() frees the lock of a live holder in another process.
    releases_live_holders = True

    @pytest.fixture
    def make(self) -> Callable[[], Backend]:
        raise NotImplementedError

    @pytest.fixture
    def backend(self, make: Callable[[], Backend]) -> Backend:
        return make()

    @pytest.fixture
    def other(self, make: Callable[[], Backend]) -> Backend:
        return make()

    @pytest.fixture
    def name(self) -> str:
        return f"interface:{uuid.uuid4().hex}"

    def test_a_free_lock_is_granted(self, backend, name):
        before = clock()
        granted = backend.acquire(claim(name), Wait())
        assert isinstance(granted, Granted)
        assert before <= granted.since <= clock()

    def test_a_claim_may_be_sent_twice(self, backend, other, name):
        sent = claim(name)
        first, second = backend.acquire(sent, Wait()), backend.acquire(sent, Wait())
        assert isinstance(first, Granted)
        assert isinstance(second, Granted)
        assert first.token == second.token
        assert backend.release(grant(sent, second))
        assert isinstance(other.acquire(claim(name), Wait()), Granted)

    def test_another_owner_is_refused(self, backend, other, name):
        take(backend, claim(name))
        assert isinstance(other.acquire(claim(name), Wait()), Held)
        assert isinstance(backend.acquire(claim(name), Wait()), Held)

    @pytest.mark.parametrize("name", ["a b:{c}|\N{SNOWMAN} ", "%s ' \" \\", "A"])
    def test_any_name_is_a_lock_of_its_own(self, backend, other, name):
        sent = claim(name)
        taken = take(backend, sent)
        try:
            similar = claim(f"{name}.")
            other.release(take(other, similar))
            assert set(other.holders([name, similar.name])) == {name}
        finally:
            backend.release(taken)

    def test_an_unfenced_lock_excludes_as_well(self, backend, other, name):
        taken = take(backend, claim(name, fenced=False))
        assert isinstance(other.acquire(claim(name, fenced=False), Wait()), Held)
        assert backend.renew([taken]) == [Renewal.KEPT]
        assert backend.verify(taken)
        assert backend.release(taken)
        assert isinstance(other.acquire(claim(name, fenced=False), Wait()), Granted)

    def test_tokens_rise_from_grant_to_grant(self, backend, other, name):
        tokens = []
        for each in (backend, other, backend):
            taken = take(each, claim(name))
            tokens.append(taken.token)
            each.release(taken)
        if tokens != [None] * 3:
            assert tokens == sorted(set(tokens))

    def test_a_refusal_says_who_holds_the_lock(self, backend, other, name):
        sent = claim(name)
        taken = take(backend, sent)
        for held in (other.acquire(claim(name), Wait()), other.holders([name])[name]):
            assert (held.owner, held.identity) == (sent.owner, sent.identity)
            assert held.token in (taken.token, None)
            if other.supports_ttl:
                assert 0 < held.expires_in <= sent.ttl

    def test_holders_are_looked_up_in_one_call(self, backend, other, name):
        held = [claim(f"{name}:{number}") for number in range(3)]
        for each in held:
            take(backend, each)
        found = other.holders([f"{name}:free", *(each.name for each in held)])
        assert {key: each.owner for key, each in found.items()} == {
            each.name: each.owner for each in held
        }
        assert not other.holders([])

    def test_a_batch_of_renewals_is_answered_in_order(self, backend, other, name):
        taken = [take(backend, claim(f"{name}:{number}")) for number in range(5)]
        backend.release(taken[1])
        backend.release(taken[3])
        take(other, claim(taken[3].name))
        kept, lost = Renewal.KEPT, Renewal.LOST
        assert backend.renew(taken) == [kept, lost, kept, lost, kept]

    def test_no_renewals_are_a_batch(self, backend):
        assert backend.renew([]) == []

    def test_a_renewed_lock_is_kept_beyond_its_ttl(self, backend, other, name):
        taken = take(backend, claim(name, ttl=5))
        for _ in range(2):
            time.sleep(2.6)
            assert backend.renew([taken]) == [Renewal.KEPT]
        assert isinstance(other.acquire(claim(name), Wait()), Held)

    def test_a_lock_expires_that_is_not_renewed(self, backend, other, name):
        if not backend.supports_ttl:
            pytest.skip("such locks live as long as their session")
        taken = take(backend, claim(name, ttl=self.short))
        wait_until(
            lambda: isinstance(other.acquire(claim(name), Wait()), Granted), "the lock to expire"
        )
        assert backend.renew([taken]) == [Renewal.LOST]
        assert not backend.verify(taken)
        assert not backend.release(taken)
        assert other.holders([name])

    # Release and verify

    def test_a_release_frees_the_lock_once(self, backend, other, name):
        taken = take(backend, claim(name))
        assert backend.release(taken)
        assert not backend.release(taken)
        assert name not in backend.holders([name])
        assert isinstance(other.acquire(claim(name), Wait()), Granted)

    def test_a_release_never_frees_another_owners_lock(self, backend, other, name):
        former = take(backend, claim(name))
        backend.release(former)
        present = take(other, claim(name))
        assert not backend.release(former)
        assert not backend.release(Grant(name, "nobody"))
        assert other.verify(present)

    def test_verify_knows_the_owner(self, backend, other, name):
        former = take(backend, claim(name))
        assert backend.verify(former)
        backend.release(former)
        assert not backend.verify(former)
        present = take(other, claim(name))
        assert other.verify(present)
        assert not backend.verify(former)

    def test_a_suggested_floor_never_lowers_a_token(self, backend, other, name):
        first = take(backend, claim(name))
        backend.suggest(name, 41)
        backend.suggest(name, 7)
        backend.release(first)
        second = take(other, claim(name))
        if first.token is not None:
            assert second.token > first.token

    def test_an_acquire_that_does_not_wait_is_answered_at_once(self, backend, other, name):
        take(backend, claim(name))
        began = time.monotonic()
        assert isinstance(other.acquire(claim(name), Wait(0)), Held)
        assert time.monotonic() - began < SLACK / 4

    def test_a_waiter_gets_the_lock_when_it_is_released(self, backend, other, name, waits):
        taken = take(backend, claim(name))
        waiter = waits(other, claim(name), Wait(SLACK))
        waiter.refused.wait(SLACK)
        assert not waiter.answered.done()
        backend.release(taken)
        assert isinstance(waiter.result(), Granted)

    def test_a_wait_ends_in_time(self, backend, other, name):
        waits_in_the_service(backend)
        sent = claim(name)
        take(backend, sent)
        held = other.acquire(claim(name), Wait(self.short))
        assert isinstance(held, Held)
        assert held.owner in (sent.owner, "")

    def test_waiters_are_served_in_order(self, backend, make, name, waits):
        waits_in_the_service(backend)
        taken = take(backend, claim(name))
        sent, waiters = [], []
        for _ in range(3):
            sent.append(claim(name))
            waiters.append(waits(make(), sent[-1], Wait(SLACK)))
            wait_until(partial(is_waited_for, backend, name, len(waiters)), "a waiter in the queue")
        backend.release(taken)
        for each, waiter in zip(sent, waiters, strict=True):
            waiter.backend.release(grant(each, waiter.result()))

    def test_a_cancelled_wait_leaves_nothing_behind(self, backend, other, name, waits):
        taken = take(backend, claim(name))
        wait = Wait(10 * SLACK)
        waiter = waits(other, claim(name), wait)
        assert waiter.refused.wait(SLACK)
        wait.cancel()
        assert isinstance(waiter.result(), Held)
        backend.release(taken)
        assert isinstance(backend.acquire(claim(name), Wait()), Granted)

    def test_a_waiter_is_called_while_it_is_queued(self, backend, other, name, waits):
        waits_in_the_service(backend)
        sent = claim(name)
        take(backend, sent)
        wait = Wait(SLACK)
        waiter = waits(other, claim(name), wait)
        wait_until(lambda: len(waiter.seen) >= 2, "another call of refused()", SLACK)
        assert {held.owner for held in waiter.seen} <= {sent.owner, ""}
        if not self.releases_live_holders:
            return
        # What refused() releases, as the core does for a dead holder, is the waiter's.
        waiter.evicts = True
        assert isinstance(waiter.result(), Granted)

    def test_an_error_of_refused_ends_the_wait(self, backend, other, name):
        waits_in_the_service(backend)
        taken = take(backend, claim(name))

        sent = claim(name)
        with pytest.raises(LookupError, match="changed its mind"):
            other.acquire(sent, Wait(SLACK, raising(LookupError("changed its mind"))))
        other.release(Grant(name, sent.owner, sent.ttl))
        backend.release(taken)
        assert isinstance(backend.acquire(claim(name), Wait()), Granted)

    # Readers and writers

    def test_readers_share_and_a_writer_excludes(self, backend, other, name):
        needs_readers(backend)
        sent = [claim(name)._replace(shared=True) for _ in range(2)]
        first, second = take(backend, sent[0]), take(other, sent[1])
        refused = other.acquire(claim(name), Wait())
        assert isinstance(refused, Held)
        assert refused.owner in (first.owner, second.owner, "")
        assert owners(other, name) == {first.owner, second.owner}
        assert backend.release(first)
        assert not backend.release(first)
        assert other.verify(second)
        assert other.renew([second, first]) == [Renewal.KEPT, Renewal.LOST]
        assert isinstance(backend.acquire(claim(name), Wait()), Held)
        other.release(second)
        writer = take(backend, claim(name))
        assert isinstance(other.acquire(sent[1], Wait()), Held)
        assert backend.verify(writer)

    def test_readers_have_one_token(self, backend, other, name):
        needs_readers(backend)
        if not backend.records_grants:
            pytest.skip("the core reads it from the fence")
        former = take(backend, claim(name))
        backend.release(former)
        readers = [take(each, claim(name)._replace(shared=True)) for each in (backend, other)]
        assert [each.token for each in readers] == [former.token + 1] * 2
        backend.release(readers[0])
        other.release(readers[1])
        assert take(other, claim(name)).token == former.token + 2

    def test_a_writer_that_polls_or_waits_stops_new_readers(self, backend, other, name, waits):
        needs_readers(backend)
        reader = take(backend, claim(name)._replace(shared=True))
        waiter = waits(other, claim(name), Wait(SLACK))
        waiter.refused.wait(SLACK)
        if backend.supports_waiting:
            wait_until(partial(is_waited_for, backend, name, 1), "a writer in the queue")
        new = claim(name)._replace(shared=True)
        assert isinstance(backend.acquire(new, Wait()), Held)
        backend.release(reader)
        assert isinstance(waiter.result(), Granted)
        other.release(grant(waiter.sent, waiter.result()))
        wait_until(lambda: isinstance(backend.acquire(new, Wait()), Granted), "the new reader")

    def test_readers_share_a_lock_and_exclude_a_writer(self, backend, other, name):
        needs_readers(backend)
        mine, *others = [take(each, reader(name)) for each in (backend, other, other)]
        assert backend.verify(mine)
        assert all(map(other.verify, others))
        refused = backend.acquire(claim(name), Wait())
        assert refused.owner in ("", mine.owner, *(each.owner for each in others))
        assert backend.renew([mine]) == [Renewal.KEPT]
        assert other.renew(others) == [Renewal.KEPT] * 2
        for used, each in ((backend, mine), *((other, each) for each in others)):
            assert isinstance(backend.acquire(claim(name), Wait()), Held)
            assert used.release(each)
            assert not used.release(each)
            assert not used.verify(each)
        assert backend.release(take(backend, claim(name)))
        assert name not in other.holders([name])

    def test_a_writer_excludes_readers(self, backend, other, name):
        needs_readers(backend)
        writer = take(backend, claim(name))
        refused = other.acquire(reader(name), Wait())
        assert refused.owner in (writer.owner, "")
        backend.release(writer)
        assert other.release(take(other, reader(name)))

    def test_a_shared_claim_may_be_sent_twice(self, backend, other, name):
        needs_readers(backend)
        sent = reader(name)
        for _ in range(2):
            taken = take(backend, sent)
        assert backend.release(taken)
        assert isinstance(other.acquire(claim(name), Wait()), Granted)

    def test_a_dead_reader_expires_alone(self, backend, other, name):
        needs_readers(backend)
        if not backend.supports_ttl:
            pytest.skip("such locks live as long as their session")
        take(backend, reader(name, ttl=self.short))
        alive = take(other, reader(name))
        wait_until(lambda: owners(backend, name) == {alive.owner}, "a lease to expire")
        assert other.verify(alive)
        assert other.renew([alive]) == [Renewal.KEPT]
        assert isinstance(backend.acquire(claim(name), Wait()), Held)
        assert other.release(alive)
        assert isinstance(backend.acquire(claim(name), Wait()), Granted)

    def test_a_waiting_writer_stops_new_readers(self, backend, other, make, name, waits):
        needs_readers(backend)
        waits_in_the_service(backend)
        first = take(backend, reader(name))
        sent = claim(name)
        writer = waits(other, sent, Wait(SLACK))
        wait_until(partial(is_waited_for, backend, name, 1), "a writer in the queue")
        assert isinstance(backend.acquire(reader(name), Wait()), Held)
        readers = []
        for number in (2, 3):
            readers.append((reader(name), make()))
            readers[-1] += (waits(readers[-1][1], readers[-1][0], Wait(SLACK)),)
            wait_until(partial(is_waited_for, backend, name, number), "a reader in the queue")
        backend.release(first)
        written = grant(sent, writer.result())
        assert not any(waiter.answered.done() for *_, waiter in readers)
        # They get in together.
        other.release(written)
        taken = [(used, grant(sent, waiter.result())) for sent, used, waiter in readers]
        assert all(used.verify(each) for used, each in taken)

    # Several locks

    def test_all_locks_or_none(self, backend, other, name):
        claims = [claim(f"{name}:{number}") for number in (1, 2, 3)]
        held = take(other, claim(f"{name}:2"))
        refused = backend.acquire_all(claims)
        assert isinstance(refused, dict)
        assert refused[held.name].owner in (held.owner, "")
        assert set(other.holders([each.name for each in claims])) == {held.name}
        other.release(held)
        granted = backend.acquire_all(claims)
        grants = [grant(*each) for each in zip(claims, granted, strict=True)]
        assert all(map(backend.verify, grants))
        # A claim that is sent twice gets the same grants.
        again = backend.acquire_all(claims)
        assert [each.token for each in again] == [each.token for each in granted]
        last = [grant(*each) for each in zip(claims, again, strict=True)]
        assert backend.release_all([*last, last[0]]) == [True, True, True, False]
        assert other.holders([each.name for each in claims]) == {}

    def test_a_failed_release_leaves_no_other_lock(self, backend, other, name, monkeypatch):
        if type(backend).acquire_all is not Backend.acquire_all:
            pytest.skip("it takes all locks or none in one request")

        def release(given):
            if given.name.endswith(":1"):
                raise BackendUnavailable("away")
            return really(given)

        really = backend.release
        monkeypatch.setattr(backend, "release", release)
        take(other, claim(f"{name}:3"))
        claims = [claim(f"{name}:{number}") for number in (1, 2, 3)]
        # Only a backend that takes them one by one has one to release.
        with contextlib.suppress(BackendUnavailable):
            assert backend.acquire_all(claims).keys() == {f"{name}:3"}
        assert f"{name}:2" not in other.holders([each.name for each in claims])

    def test_any_lock(self, backend, other, name):
        if not backend.supports_any:
            pytest.skip("the core tries the locks one by one")
        names = [permit_name(name, number) for number in (1, 2)]
        claims = [each._replace(permits=2) for each in map(claim, names)]
        claims = [each._replace(owner=claims[0].owner) for each in claims]
        held = take(other, claim(names[0]))
        sent, granted = backend.acquire_any(claims, Wait())
        assert sent == claims[1]
        again, repeated = backend.acquire_any(claims, Wait())
        assert (again, repeated.token) == (sent, granted.token)
        last = [claim(each)._replace(owner="of another process") for each in names]
        assert isinstance(other.acquire_any(last, Wait()), Held)
        assert backend.verify(grant(sent, granted))
        other.release(held)
        assert other.acquire_any(last, Wait())[0] == last[0]

    def test_a_closed_backend_may_be_used_again(self, backend, name):
        taken = take(backend, claim(name))
        backend.release(taken)
        backend.close()
        backend.release(take(backend, claim(name)))

    def test_a_healthy_service_has_no_problems(self, backend):
        assert [each for each in backend.check() if each.id.startswith("E")] == []

    @pytest.fixture
    def waits(self):
        waiters = []

        def start(backend, sent, wait):
            waiters.append(Waiter(backend, sent, wait))
            return waiters[-1]

        yield start
        for each in waiters:
            each.wait.cancel()
            each.answered.exception(SLACK)


class Waiter:
    def __init__(self, backend: Backend, sent: Claim, wait: Wait) -> None:
        self.backend, self.sent, self.wait = backend, sent, wait
        self.refused, self.seen, self.evicts = threading.Event(), [], False
        wait.refused = self._refused
        self.answered = beside(self._run)

    def _refused(self, held: Held) -> None:
        self.seen.append(held)
        self.refused.set()
        if self.evicts:
            held = held if held.owner else self.backend.holders([self.sent.name])[self.sent.name]
            self.backend.release(Grant(self.sent.name, held.owner))

    def _run(self) -> Granted | Held:
        answer = self.backend.acquire(self.sent, self.wait)
        while isinstance(answer, Held) and self.wait.left and not self.backend.supports_waiting:
            self._refused(answer)
            time.sleep(0.02)
            answer = self.backend.acquire(self.sent, self.wait)
        return answer

    def result(self) -> Granted | Held:
        return self.answered.result(SLACK)


def is_waited_for(backend: Backend, name: str, count: int) -> bool:
    return backend.holders([name])[name].waiting == count


def owners(backend: Backend, name: str) -> set[str]:
    held = backend.holders([name])[name]
    return {each.owner for each in (held, *held.others)}


def needs_readers(backend: Backend) -> None:
    if not backend.supports_shared:
        pytest.skip("it has no shared locks")


def waits_in_the_service(backend: Backend) -> None:
    if not backend.supports_waiting:
        pytest.skip("the core polls")


def claim(name: str, *, ttl: float = 30.0, fenced: bool = True) -> Claim:
    owner = new_owner()
    return Claim(name, owner.id, ttl, owner.identity, fenced)


def reader(name: str, **more: Any) -> Claim:
    return claim(name, **more)._replace(shared=True)


def take(backend: Backend, sent: Claim) -> Grant:
    answer = backend.acquire(sent, Wait())
    assert isinstance(answer, Granted), answer
    return grant(sent, answer)


class TestStub(BackendInterface):
    @pytest.fixture
    def make(self, monkeypatch):
        monkeypatch.setattr(StubBackend, "service", StubService())
        return lambda: StubBackend(conf.config("default"))


@pytest.mark.django_db(transaction=True)
class TestDatabase(BackendInterface):
    """The tables of `DatabaseBackend`; `test_database_backend.py` has each server's own."""

    @pytest.fixture
    def make(self):
        return lambda: DatabaseBackend(conf.config("default"))
