"""
What every lock service has to show on real servers, whatever the backend.

Derive a class from `ServiceAcceptance` for a backend, and override its hooks, not its tests.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from django_fencedlock import LockNotAcquired, StaleFence, lock
from django_fencedlock.core import grants
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import BackendUnavailable, LeaseLost
from django_fencedlock.lease import Lease
from django_fencedlock.test.contract import acts
from django_fencedlock.test.processes import TIMEOUT, Processes, wait_until
from tests.models import Invoice
from tests.scripts import run_python
from tests.servers import Proxy, start_together
from tests.servers.process import wait_until as wait_for_server
from tests.threads import beside

ALIAS = "default"
DATABASE = "postgres"


class Address(Protocol):
    """A server of tests.servers, or a `Proxy` in front of one."""

    host: str
    port: int


class Turn(NamedTuple):
    """One holder's time in the block of a lock, by the clock of the host."""

    begun: float
    ended: float
    token: int


# Called in other processes


def take_turns(name: str, log: str, times: int, seconds: float, ttl: float) -> list[str]:
    """Acquire a lock so often, or until `stop()`, and log each turn; return the errors."""
    end, errors, turns = time.monotonic() + seconds, list[str](), 0
    with open(log, "a", buffering=1) as file:
        while turns < times or (time.monotonic() < end and not _end_of(log).exists()):
            try:
                with lock(name, ttl=ttl, backend=ALIAS, blocking_timeout=TIMEOUT) as lease:
                    begun = time.monotonic()
                    time.sleep(0)
                    file.write(f"{begun} {time.monotonic()} {lease.token}\n")
                turns += 1
            except (BackendUnavailable, LeaseLost, LockNotAcquired) as exc:
                errors.append(repr(exc))
                time.sleep(0.02)
    return errors


def _end_of(log: str | Path) -> Path:
    return Path(f"{log}.end")


def stop(log: Path) -> None:
    """Let a crowd that takes turns for some seconds end now."""
    _end_of(log).touch()


_row: list[tuple[Any, Lease]] = []


def hold_row(using: str, pk: int, ttl: float) -> int:
    row = Invoice.objects.using(using).get(pk=pk)
    lease = row.fencing.lock(ttl=ttl).acquire(blocking=False)
    assert lease is not None, "the lock isn't free"
    _row.append((row, lease))
    return lease.token


def write_row(note: str) -> str:
    """Save the row that this process has locked; return the name of the error."""
    row, _ = _row[-1]
    row.note = note
    try:
        row.save()
    except (StaleFence, LeaseLost) as exc:
        return type(exc).__name__
    return ""


def wait_for_loss() -> None:
    wait_until(lambda: _row[-1][1].lost, "the lease to be lost")


def release_row() -> bool:
    return _row.pop()[1].release()


# Load, and what came of it


@contextlib.contextmanager
def crowd(
    processes: Processes,
    log: Path,
    name: str,
    *,
    count: int = 8,
    times: int = 0,
    seconds: float = 0.0,
    ttl: float = 10.0,
) -> Iterator[list[str]]:
    """Let processes take turns beside the block; yield their errors, a list filled at its end."""
    errors: list[str] = []
    with contextlib.ExitStack() as stack:
        several = [stack.enter_context(processes.borrow()) for _ in range(count)]
        runs = [each.start(take_turns, name, str(log), times, seconds, ttl) for each in several]
        yield errors
        for run in runs:
            errors += run.result(2 * TIMEOUT)


def turns_in(log: Path) -> list[Turn]:
    """Return the turns that a crowd has logged, in their order."""
    # The last line may be half written.
    lines = [line.split() for line in log.read_text().splitlines(True) if line.endswith("\n")]
    return sorted(Turn(float(begun), float(ended), int(token)) for begun, ended, token in lines)


def assert_exclusive(turns: Sequence[Turn]) -> None:
    """No turn overlaps the next, and tokens rise."""
    for one, other in itertools.pairwise(turns):
        assert one.ended <= other.begun, f"two holders at once: {one}, {other}"
        assert one.token < other.token, f"the token fell: {one}, {other}"


def longest_gap(turns: Sequence[Turn]) -> float:
    """Return the longest time without a holder."""
    return max((b.begun - a.ended for a, b in itertools.pairwise(turns)), default=0.0)


def seconds_until_free(name: str, timeout: float, **terms: Any) -> float:
    """Wait for a lock, release it, and return how long that took."""
    began = time.monotonic()
    with lock(name, backend=ALIAS, blocking_timeout=timeout, **terms):
        return time.monotonic() - began


def until_it_works(act: Callable[[], Any], timeout: float = TIMEOUT) -> Any:
    """Call `act` until the service answers."""
    end = time.monotonic() + timeout
    while True:
        try:
            return act()
        except BackendUnavailable:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


#: For each class: marks of a base class are added.
on_postgres = pytest.mark.django_db(transaction=True, databases=["default", DATABASE])


class ServiceAcceptance:
    """Real processes and servers."""

    pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

    #: The dotted path.
    backend = ""
    #: Where the fences and the rows are.
    database = DATABASE
    #: The shortest ttl that the tests' server allows.
    ttl = 2.0
    #: A lost holder's lock is free after so many `lost_ttl`, and `late` seconds.
    ttls, lost_ttl, late = 1.0, 5.0, 5.0
    #: Seconds without a grant once a leader was killed. On a quiet machine: 3.
    gap = 20.0
    #: The backend's TIMEOUT.
    timeout = 2.0
    #: Grants of each of the 8 processes.
    times = 200
    #: The keeper renews while a greenlet computes.
    keeps_beside_greenlet = True

    # Hooks

    def location(self, *addresses: Address) -> object:
        """Return LOCATION for servers or proxies."""
        raise NotImplementedError

    #: Further keys of the alias's entry, and of its OPTIONS.
    entry: dict[str, Any] = {}
    options: dict[str, Any] = {}

    @pytest.fixture
    def servers(self) -> list[Any]:
        """Return the servers of one service, the shared ones."""
        raise NotImplementedError

    @pytest.fixture
    def cluster(self) -> list[Any]:
        """Start three nodes of one service. A service without a leader overrides `leader()`."""
        raise NotImplementedError

    @pytest.fixture
    def single(self) -> Any:
        """Start a server of its own, which may lose its data."""
        raise NotImplementedError

    def leader(self, nodes: Sequence[Any]) -> Any:
        """Return the node to kill."""
        return next(node for node in nodes if node.is_leader())

    def entries(self, name: str) -> int:
        """Return how many owners have or want the lock, as the service says."""
        held = until_it_works(lambda: service(ALIAS).backend.holders([name])).get(name)
        return 0 if held is None else 1 + (held.waiting or 0)

    # Fixtures

    @pytest.fixture
    def use(self, settings: Any) -> Iterator[Callable[..., None]]:
        """Return a function that makes servers or proxies the service of the default alias."""

        def configure(*addresses: Address, **options: Any) -> None:
            settings.FENCEDLOCK = {ALIAS: self.settings_of(*addresses, **options)}

        yield configure
        service(ALIAS).backend.close()

    def settings_of(self, *addresses: Address, **options: Any) -> dict[str, Any]:
        return {
            "BACKEND": self.backend,
            "LOCATION": self.location(*addresses),
            "FENCE_DATABASE": self.database,
            "KEY_PREFIX": f"acceptance/{uuid.uuid4().hex}/",
            **self.entry,
            "OPTIONS": {"TIMEOUT": self.timeout, **self.options, **options},
        }

    @pytest.fixture(scope="class")
    @classmethod
    def processes(cls) -> Iterator[Processes]:
        with contextlib.closing(Processes()) as processes:
            yield processes
            for each in processes._idle:
                # Each would take a second to end.
                each.kill()

    @pytest.fixture
    def name(self) -> str:
        return f"acceptance:{uuid.uuid4().hex}"

    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        return tmp_path / "turns"

    @pytest.fixture
    def of_other_hosts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Other processes are on other hosts, as far as this process can tell."""
        monkeypatch.setattr(grants, "is_process_gone", lambda process: None)

    # Tests

    def test_eight_processes_take_turns(self, servers, use, processes, log, name):
        # A disk may take seconds.
        use(*servers, TIMEOUT=30)
        with crowd(processes, log, name, times=self.times) as errors:
            pass
        turns = turns_in(log)
        assert errors == []
        assert len(turns) == 8 * self.times
        assert_exclusive(turns)
        assert self.entries(name) == 0

    def test_a_killed_process_of_this_host_is_evicted(self, servers, use, processes, name):
        use(*servers)
        with processes.borrow() as process:
            process.call(acts.hold, ALIAS, name, 0.0, 60.0)
            process.kill()
        assert seconds_until_free(name, 60) < 20

    @pytest.mark.usefixtures("of_other_hosts")
    def test_a_killed_process_of_another_host_is_succeeded(self, servers, use, processes, name):
        use(*servers)
        with processes.borrow() as process:
            token = process.call(acts.hold, ALIAS, name, 0.0, self.lost_ttl)
            process.kill()
        began = time.monotonic()
        with lock(name, backend=ALIAS, blocking_timeout=60) as lease:
            waited = time.monotonic() - began
            assert lease.token > token
        assert waited < self.ttls * self.lost_ttl + self.late

    @pytest.mark.usefixtures("of_other_hosts")
    def test_a_stopped_process_loses_its_lease(self, servers, use, processes):
        use(*servers)
        row = Invoice.objects.using(self.database).create(note="new")
        with processes.borrow() as process:
            token = process.call(hold_row, self.database, row.pk, self.lost_ttl)
            process.pause()
            began = time.monotonic()
            with Invoice.fencing.lock(row.pk, blocking_timeout=60) as lease:
                waited = time.monotonic() - began
                assert lease.token > token
                late = process.start(write_row, "late")
                process.resume()
                assert late.result(TIMEOUT) in ("StaleFence", "LeaseLost")
                process.call(wait_for_loss)
                assert process.call(release_row) is False
                assert lease.verify()
            process.healthy = True
        row.refresh_from_db()
        assert row.note == "new"
        assert waited < self.ttls * self.lost_ttl + self.late

    def test_a_leader_is_killed_under_load(self, cluster, use, processes, log, name):
        use(*cluster)
        with crowd(processes, log, name, count=4, seconds=TIMEOUT) as errors:
            try:
                wait_until(lambda: log.exists() and len(turns_in(log)) > 50, "the crowd to begin")
                self.leader(cluster).kill()
                killed = time.monotonic()
                wait_until(lambda: turns_in(log)[-50].begun > killed, "grants after the kill")
            finally:
                stop(log)
        turns = turns_in(log)
        assert_exclusive(turns)
        assert longest_gap(turns) < self.gap, errors

    def test_no_quorum_is_an_error_in_time_and_leaves_nothing_locked(self, cluster, use, name):
        use(*cluster)
        with lock(name, backend=ALIAS, ttl=self.ttl):
            pass
        dead = cluster[: len(cluster) // 2 + 1]
        for node in dead:
            node.kill()
        began = time.monotonic()
        with pytest.raises(BackendUnavailable):
            lock(name, backend=ALIAS, ttl=self.ttl).acquire(blocking=False)
        assert time.monotonic() - began < 2 * self.timeout + self.late
        start_together(dead)
        # A request of before may have been carried out: it is released within the doubts' pause.
        until_it_works(lambda: seconds_until_free(name, 30, ttl=self.ttl))
        wait_for_server(lambda: self.entries(name) == 0, "the queue to be empty")

    def test_a_server_that_starts_empty(self, single, use, name):
        use(single)

        def token() -> int:
            with lock(name, backend=ALIAS) as lease:
                return lease.token

        first = [token() for _ in range(20)]
        assert first == sorted(set(first))
        with contextlib.suppress(LeaseLost), lock(name, backend=ALIAS) as former:
            single.kill()
            single.start(empty=True)
            later = [until_it_works(lambda: beside(token).result(TIMEOUT)) for _ in range(3)]
            assert [first[-1], former.token, *later] == sorted({first[-1], former.token, *later})
            with pytest.raises((StaleFence, LeaseLost)), former.atomic():
                pass

    def test_lost_and_late_answers(self, servers, use, make_proxy, name):
        proxies = [make_proxy(each.host, each.port) for each in servers]
        use(*proxies, TIMEOUT=1)
        end = time.monotonic() + 4.5
        workers = [beside(work_despite_errors, name, 10.0, end) for _ in range(4)]
        while time.monotonic() < end:
            for misbehave in FAULTS:
                for proxy in proxies:
                    misbehave(proxy)
                time.sleep(0.3)
                for proxy in proxies:
                    proxy.pass_through()
                time.sleep(0.15)
        turns = sorted(turn for worker in workers for turn in worker.result(TIMEOUT))
        assert_exclusive(turns)
        # Of this process's own doubts, each is released within 5 s, again and again.
        assert until_it_works(lambda: seconds_until_free(name, 30, ttl=self.ttl)) < 15
        wait_until(lambda: self.entries(name) == 0, "the queue to be empty", 15)

    def test_a_lease_survives_a_greenlet_that_computes(self, servers, use, child_environment):
        if not self.keeps_beside_greenlet:
            pytest.skip("its client renews in a greenlet")
        use(*servers)
        code = """
            from gevent import monkey
            monkey.patch_all()
            import django, gevent, json, os, time
            from django.conf import settings
            django.setup()
            settings.FENCEDLOCK = json.loads(os.environ["ENTRY"])
            from django_fencedlock import lock
            ttl = float(os.environ["TTL"])
            with lock("green", ttl=ttl) as lease:
                waiter = gevent.spawn(lambda: lock("green", blocking_timeout=60).acquire())
                gevent.sleep(0.2)
                end = time.monotonic() + 2 * ttl
                while time.monotonic() < end:
                    pass  # the hub never gets a turn
                lease.check()
                assert lease.verify()
                token = lease.token
            after = waiter.get(timeout=30)
            assert after.token > token
            after.release()
        """
        entry = json.dumps({ALIAS: self.settings_of(*servers)})
        environment = {**child_environment(), "ENTRY": entry, "TTL": str(self.lost_ttl)}
        run_python(code=code, env=environment)


#: What a `Proxy` does for 0.3 s each, to open connections as well.
FAULTS: list[Callable[[Proxy], object]] = [
    lambda proxy: proxy.cut(),
    lambda proxy: proxy.drop_replies(),
    lambda proxy: proxy.delay(0.1, 0.1),
    lambda proxy: proxy.cut_after(to_client=1),
    lambda proxy: proxy.black_hole(),
]


def work_despite_errors(name: str, ttl: float, end: float) -> list[Turn]:
    turns = []
    while time.monotonic() < end:
        with (
            contextlib.suppress(BackendUnavailable, LeaseLost, LockNotAcquired),
            lock(name, ttl=ttl, backend=ALIAS, blocking_timeout=1) as lease,
        ):
            begun = time.monotonic()
            time.sleep(0.002)
            turns.append(Turn(begun, time.monotonic(), lease.token))
    return turns
