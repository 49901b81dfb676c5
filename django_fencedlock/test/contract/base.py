"""The base class of the contract's parts, and helpers."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ... import signals
from ...core.manager import Service, service
from ...exceptions import BackendUnavailable
from ...lease import Lease
from ...locks import Lock, lock
from ...storage.connections import private
from ..processes import TIMEOUT, AnotherProcess, AnotherThread, Processes, another_thread
from . import acts
from .acts import LONG

#: Seconds for a lease that expires during the test.
SHORT = 0.5


class Contract:
    """Override the attributes and the hooks, not the tests."""

    #: The alias in ``FENCEDLOCK`` of the tested backend.
    alias = "default"
    #: Whether the tokens of a lock are 1, 2, 3 and so on. Otherwise they only rise.
    counts_tokens = True
    #: A ttl that a lease of 30 s can be renewed to.
    renewed_ttl = 300.0
    #: The ttl of a lease while others try to acquire its lock all the time.
    hammered_ttl = 1.5
    #: Seconds that any step may take longer on a busy machine.
    slack = 20.0

    # Fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def processes(cls) -> Iterator[Processes]:
        """Return processes that the tests of a class share."""
        with contextlib.closing(Processes()) as processes:
            yield processes

    @pytest.fixture
    def process(self, processes: Processes) -> Iterator[AnotherProcess]:
        """Return a process with its own Django, which the test may kill."""
        with processes.borrow() as process:
            yield process

    @pytest.fixture
    def thread(self) -> Iterator[AnotherThread]:
        """Return another holder: a thread that calls functions."""
        with another_thread() as thread:
            yield thread

    @pytest.fixture
    def name(self, request: pytest.FixtureRequest) -> str:
        """Return a lock name that was never used."""
        return f"{request.node.name[:60]}:{uuid.uuid4().hex}"

    @pytest.fixture
    def prepared(self) -> None:
        """
        Override it to start a service or to change the settings for each test.

        It is set up before all other fixtures, and torn down after them.
        """

    @pytest.fixture(autouse=True)
    def acquired(self, prepared: None) -> Iterator[list[Lease]]:
        """Release at the end what a test still holds in this process."""
        taken: list[Lease] = []

        def receive(lease: Lease, **kwargs: Any) -> None:
            taken.append(lease)

        with connected(signals.lock_acquired, receive):
            yield taken
        for lease in taken:
            release(lease)

    # Hooks

    def pause_holder(self, lease: Lease) -> None:
        """Stop the renewals of a lease of this process."""
        self.service.keeper.forget(lease)

    def interrupt_holder(self, lease: Lease) -> None:
        """
        Let the next acquire get a lock of this process with a short ttl.

        If locks live as long as a session, override it to end that session.
        """
        self.pause_holder(lease)

    def wake_holder(self, lease: Lease) -> None:
        """Start the renewals of a paused lease again."""
        self.service.keeper.keep(lease)

    # Aids

    @property
    def service(self) -> Service:
        return service(self.alias)

    @property
    def database(self) -> str:
        """Return the alias of the fence database."""
        return self.service.config.fence_database

    @property
    def one_writer(self) -> bool:
        """Return whether an open transaction that wrote blocks all other grants."""
        return connections[self.database].vendor == "sqlite"

    def is_next(self, token: int, former: int = 0, grants: int = 1) -> bool:
        """Return whether `token` may be of the grant that came so many `grants` after `former`."""
        return token == former + grants if self.counts_tokens else token > former

    def in_a_row(self, tokens: list[int], count: int) -> bool:
        """Return whether these may be the tokens of the first `count` grants of a lock."""
        whole = range(1, count + 1) if self.counts_tokens else sorted(set(tokens))
        return tokens == list(whole) and len(tokens) == count

    def lock(self, name: str, **terms: Any) -> Lock:
        return lock(name, **{"ttl": LONG, "backend": self.alias, **terms})

    def take(self, name: str, **terms: Any) -> Lease:
        """Acquire a free lock."""
        lease = self.lock(name, **terms).acquire(blocking=False)
        assert lease is not None, f"Lock {name!r} isn't free: {self.lock(name).holder()}."
        return lease

    def try_to_take(self, name: str, **terms: Any) -> bool:
        """Return whether the lock could be acquired, and release it."""
        lease = self.lock(name, **terms).acquire(blocking=False)
        return lease is not None and lease.release()

    def take_when_free(self, name: str, **terms: Any) -> Lease:
        """Acquire a lock that its holder is about to lose."""
        lease = self.lock(name, **terms).acquire(blocking_timeout=TIMEOUT)
        assert lease is not None, f"Lock {name!r} is still held: {self.lock(name).holder()}."
        return lease

    def is_free_for(self, other: AnotherThread | AnotherProcess, name: str) -> bool:
        return other.call(acts.try_to_take, self.alias, name)

    def is_free(self, name: str) -> bool:
        """Return whether a new holder could acquire the lock."""
        with another_thread() as thread:
            return self.is_free_for(thread, name)

    def recorded(self, name: str) -> tuple[int, str] | None:
        """Return the token and the owner id of the newest recorded grant."""
        from ...models import Fence

        found = Fence.objects.using(self.database).filter(name=name).values_list("token", "owner")
        return found.first()

    def lost_lease(self, name: str, thread: AnotherThread) -> tuple[Lease, Lease]:
        """Return a lost lease, and that of its successor in `thread`."""
        former = self.take(name, ttl=SHORT)
        self.interrupt_holder(former)
        return former, thread.call(self.take_when_free, name)


def release(lease: Lease) -> None:
    if not lease.released:
        lease.entries = 1
        with contextlib.suppress(BackendUnavailable):
            # Not service(alias): the settings may have changed.
            lease._control.release([lease], lease.who)


@contextlib.contextmanager
def left_open(using: str) -> Iterator[BaseDatabaseWrapper]:
    """Yield a separate connection in an open transaction."""
    connection = private(using, TIMEOUT)
    try:
        with connection.cursor() as cursor:
            # SQLite locks nothing before the first statement that needs it.
            cursor.execute("BEGIN")
            connection.in_atomic_block = True
            yield connection
            cursor.execute("ROLLBACK")
    finally:
        connection.in_atomic_block = False
        connection.close()


class Rollback(Exception):
    pass


@contextlib.contextmanager
def ended_by(using: str, ends_by: str) -> Iterator[None]:
    with contextlib.suppress(Rollback), transaction.atomic(using=using):
        yield
        if ends_by == "rollback":
            raise Rollback


def all_at_once(functions: list[Callable[[], object]]) -> None:
    with contextlib.ExitStack() as stack:
        threads = [stack.enter_context(another_thread()) for _ in functions]
        started = [
            thread.start(function) for thread, function in zip(threads, functions, strict=True)
        ]
        for each in started:
            each.result(TIMEOUT)


@contextlib.contextmanager
def connected(signal: Any, receiver: Callable[..., None]) -> Iterator[None]:
    signal.connect(receiver, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receiver)


@contextlib.contextmanager
def listening(signal: Any, name: str, word: str, heard: list[str]) -> Iterator[None]:
    """Note `word` whenever `signal` is sent about lock `name`."""
    about = name

    def receive(name: str, **kwargs: Any) -> None:
        if name == about:
            heard.append(word)

    with connected(signal, receive):
        yield


@contextlib.contextmanager
def counted_batches(service: Service) -> Iterator[list[int]]:
    """Note the size of each batch that is renewed."""
    sizes: list[int] = []
    renew = service.backend.renew

    def noting(leases: Any) -> Any:
        sizes.append(len(leases))
        return renew(leases)

    service.backend.renew = noting  # type: ignore[assignment, method-assign]
    try:
        yield sizes
    finally:
        del service.backend.renew


def keepers(alias: str) -> int:
    return sum(thread.name == f"fencedlock-keeper-{alias}" for thread in threading.enumerate())


def open_files() -> int:
    """Return the number of open files and sockets; 0 without /proc."""
    here = Path("/proc/self/fd")
    return len(list(here.iterdir())) if here.exists() else 0
