"""Locks on a primary that Sentinels choose, and on the nodes of a Cluster."""

import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.crc import key_slot
from redis.retry import Retry

from django_fencedlock.backends.interface import Granted, Held, Renewal, Wait
from django_fencedlock.backends.redis import RedisBackend
from django_fencedlock.backends.redis.scripts import Keys
from django_fencedlock.core import runtime
from django_fencedlock.core.names import permit_name
from django_fencedlock.exceptions import BackendUnavailable
from tests.servers import Redis, workspace
from tests.servers.process import Process, free_port, wait_until
from tests.test_backend_interface import claim, grant, take
from tests.test_redis_backend import NAME, config_of, works

pytestmark = pytest.mark.slow

FACTORY = f"{__name__}.cluster_client"
SLOTS = 16384
PATIENCE = 30


@pytest.fixture(params=["redis", "valkey"])
def make_any_redis(request):
    return request.getfixturevalue(f"make_{request.param}")


def backend_of(closing, location="", **options):
    return closing(RedisBackend(config_of(location, prefix="fencedlock", **options)))


class Sentinels:
    """Three that watch a primary, and take half a second's silence for its death."""

    def __init__(self, primary: Redis, closing: Callable[[Any], Any]) -> None:
        self._all = [start_sentinel(primary, closing) for _ in range(3)]
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self._all)
        self.location = f"redis+sentinel://{hosts}/shop/0"
        wait_until(self._know_each_other, "the Sentinels to know each other and the replica")

    def _know_each_other(self) -> bool:
        known = [self._asked(sentinel) for sentinel in self._all]
        return all(it["num-other-sentinels"] == "2" and it["num-slaves"] == "1" for it in known)

    def primary(self) -> int:
        ports = {self._asked(sentinel)["port"] for sentinel in self._all}
        return int(ports.pop()) if len(ports) == 1 else 0

    def _asked(self, sentinel: Redis) -> dict[str, str]:
        # sentinel_master() of redis-py 6 fails.
        flat = sentinel.execute("SENTINEL", "MASTER", "shop")
        told = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
        return {key: str(value) for key, value in told.items()}


def start_sentinel(primary: Redis, closing: Callable[[Any], Any]) -> Redis:
    directory = workspace.new_directory("sentinel")
    port = free_port()
    file = directory / "sentinel.conf"
    file.write_text(
        f"port {port}\n"
        "bind 127.0.0.1\n"
        f"sentinel monitor shop 127.0.0.1 {primary.port} 2\n"
        "sentinel down-after-milliseconds shop 500\n"
        "sentinel failover-timeout shop 5000\n"
    )
    # It notes there what it found out, and runs as another user.
    file.chmod(0o666)
    sentinel = Redis(f"redis://127.0.0.1:{port}")
    command = [primary.process._command[0], file, "--sentinel"]
    sentinel._process = Process(command, directory, lambda process: sentinel.answers())
    closing(sentinel).start()
    return sentinel


def test_a_lease_outlives_the_primary_that_granted_it(make_any_redis, closing):
    primary = make_any_redis()
    replica = make_any_redis(replica_of=primary)
    sentinels = Sentinels(primary, closing)
    backend = backend_of(closing, sentinels.location)
    held = take(backend, claim("invoice:42", ttl=60))
    with primary.client() as client:
        assert client.wait(1, 5000) == 1
    primary.kill()
    with pytest.raises(BackendUnavailable) as refused:
        backend.verify(held)
    assert len(str(refused.value)) < 1000

    def is_verified():
        with contextlib.suppress(BackendUnavailable):
            return backend.verify(held)

    wait_until(is_verified, "a new primary", PATIENCE)
    wait_until(lambda: sentinels.primary() == replica.port, "one word of all sentinels", PATIENCE)
    assert backend.renew([held]) == [Renewal.KEPT]
    assert backend.release(held)
    assert take(backend, claim("invoice:42")).token == 2


@pytest.mark.parametrize("batch", [False, True])
def test_sentinels_are_asked_again_if_the_primary_is_a_replica(make_any_redis, closing, batch):
    """Redis before 7 reports READONLY from a script as an error that the driver doesn't know."""
    old, new = make_any_redis(), make_any_redis()
    sentinel = start_sentinel(old, closing)
    backend = backend_of(closing, f"redis+sentinel://127.0.0.1:{sentinel.port}/shop/0")
    held = take(backend, claim("invoice:42", ttl=60))
    # By hand: a Sentinel that does it itself closes the connections of clients, if it can.
    sentinel.execute("SENTINEL", "REMOVE", "shop")
    sentinel.execute("SENTINEL", "MONITOR", "shop", "127.0.0.1", new.port, 1)
    old.execute("REPLICAOF", new.host, new.port)
    if batch:
        backend.renew([held])
    else:
        with contextlib.suppress(BackendUnavailable):
            backend.acquire(claim("invoice:43"), Wait())
    take(backend, claim("invoice:44"))
    assert new.execute("EXISTS", Keys.of("", "invoice:44").lock)


_nodes: list[Redis] = []


def cluster_client() -> redis.RedisCluster:
    return redis.RedisCluster(
        startup_nodes=[ClusterNode(node.host, node.port) for node in _nodes],
        socket_timeout=2,
        socket_connect_timeout=2,
        retry=Retry(NoBackoff(), 1),
    )


@pytest.fixture
def nodes(make_any_redis, monkeypatch):
    """Three nodes with a third of the slots each. One that dies takes its own slots along alone."""
    flat = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
    flat += ["--cluster-require-full-coverage", "no"]
    made = [make_any_redis(*flat) for _ in range(3)]
    for number, node in enumerate(made):
        slots = range(SLOTS * number // 3, SLOTS * (number + 1) // 3)
        node.execute("CLUSTER", "ADDSLOTS", *slots)
        node.execute("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        node.execute("CLUSTER", "MEET", made[0].host, made[0].port)
    wait_until(lambda: all(map(_is_whole, made)), "the cluster", PATIENCE)
    monkeypatch.setattr(f"{__name__}._nodes", made)
    return made


def _is_whole(node: Redis) -> bool:
    told = str(node.execute("CLUSTER", "INFO"))
    wanted = ("cluster_state:ok", f"cluster_slots_ok:{SLOTS}", "cluster_known_nodes:3")
    return all(each in told for each in wanted)


def _slot(name: str) -> int:
    return key_slot(Keys.of("", name).lock.encode())


def _name_on(number: int) -> str:
    names = (f"lock:{count}" for count in itertools.count())
    return next(name for name in names if _slot(name) * 3 // SLOTS == number)


def _move(slot: int, here: Redis, there: Redis) -> None:
    ids = [str(node.execute("CLUSTER", "MYID")) for node in (here, there)]
    there.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    here.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    keys = here.execute("CLUSTER", "GETKEYSINSLOT", slot, 100)
    here.execute("MIGRATE", there.host, there.port, "", 0, 5000, "KEYS", *keys)
    for node in (there, here):
        node.execute("CLUSTER", "SETSLOT", slot, "NODE", ids[1])


def test_a_dead_node_loses_no_leases_of_other_nodes(nodes, closing, caplog):
    backend = backend_of(closing, CLIENT_FACTORY=FACTORY)
    names = [_name_on(number) for number in range(3)]
    held = [take(backend, claim(name, ttl=60)) for name in names]
    assert backend.renew(held) == [Renewal.KEPT] * 3
    nodes[0].kill()
    assert backend.renew(held) == [Renewal.UNKNOWN, Renewal.KEPT, Renewal.KEPT]
    runtime.worker.finish(60)
    assert "could not renew 1 of 3 leases" in caplog.text
    with pytest.raises(BackendUnavailable):
        backend.holders(names[:1])
    assert set(backend.holders(names[1:])) == set(names[1:])
    assert backend.release(held[1])
    assert take(backend, claim(names[1])).token == 2
    assert backend.verify(held[2])


def test_a_cluster_that_is_gone_is_unavailable(nodes, closing):
    backend = backend_of(closing, CLIENT_FACTORY=FACTORY)
    held = take(backend, claim("x"))
    for node in nodes:
        node.kill()
    with pytest.raises(BackendUnavailable, match="Redis Cluster cannot be connected"):
        take(backend, claim("another"))
    assert backend.renew([held]) == [Renewal.UNKNOWN]


def test_a_slot_moves_to_another_node_with_the_lock_and_its_queue(nodes, closing):
    backend = backend_of(closing, CLIENT_FACTORY=FACTORY)
    name = _name_on(0)
    held = take(backend, claim(name, ttl=60))
    sent = claim(name)
    waiter = ThreadPoolExecutor(1).submit(backend.acquire, sent, Wait(60))
    queue = Keys.of("", name).queue
    wait_until(lambda: nodes[0].execute("ZCARD", queue), "a waiter in the queue")
    _move(_slot(name), *nodes[:2])
    assert backend.renew([held]) == [Renewal.KEPT]
    assert backend.verify(held)
    assert backend.release(held)
    answer = waiter.result(PATIENCE)
    assert isinstance(answer, Granted)
    assert backend.verify(grant(sent, answer))
    assert isinstance(backend.acquire(claim(name), Wait()), Held)


def test_a_set_in_a_cluster_is_taken_as_a_whole_or_not_at_all(nodes, closing):
    backend, other = (backend_of(closing, CLIENT_FACTORY=FACTORY) for _ in range(2))
    claims = [claim(_name_on(number), ttl=60) for number in range(3)]
    names = [each.name for each in claims]
    held = [take(other, claim(name)) for name in names[1:]]
    found = backend.acquire_all(claims)
    assert {name: each.owner for name, each in found.items()} == {
        each.name: each.owner for each in held
    }
    assert set(other.holders(names)) == set(names[1:])
    assert other.release_all(held) == [True] * 2
    for _ in range(2):
        granted = backend.acquire_all(claims)
        assert [each.token for each in granted] == [2, 2, 2]
    taken = [grant(*each) for each in zip(claims, granted, strict=True)]
    nodes[0].kill()
    with pytest.raises(BackendUnavailable):
        backend.release_all(taken)
    assert backend.holders(names[1:]) == {}
    with pytest.raises(BackendUnavailable):
        backend.acquire_all([*claims[1:], claims[0]])
    assert backend.holders(names[1:]) == {}


def test_permits_in_a_cluster(nodes, closing):
    backend = backend_of(closing, CLIENT_FACTORY=FACTORY)
    names = [permit_name("gpu", number) for number in (1, 2)]
    one, two, late = (
        [claim(name, ttl=60)._replace(owner=owner * 32) for name in names] for owner in "abc"
    )
    held = [grant(*backend.acquire_any(claims, Wait())) for claims in (one, two)]
    assert [each.name for each in held] == names
    waiter = ThreadPoolExecutor(1).submit(backend.acquire_any, late, Wait(60))
    wait_until(lambda: backend.holders(names[:1])[names[0]].waiting, "a waiter in the queue")
    assert backend.release_all(held[1:]) == [True]
    sent, granted = waiter.result(PATIENCE)
    assert sent == late[1]
    assert backend.release_all([held[0], grant(sent, granted)]) == [True, True]


def test_one_node_of_a_cluster_is_not_enough(nodes, closing):
    backend = backend_of(closing, nodes[0].url)
    assert "E017" in [problem.id for problem in backend.check()]
    whole = backend_of(closing, CLIENT_FACTORY=FACTORY)
    works(whole, nodes[_slot(NAME) * 3 // SLOTS])
    assert {problem.id for problem in whole.check()} == {"", "I001"}
