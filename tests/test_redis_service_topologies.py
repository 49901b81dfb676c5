"""The Redis backend on a primary that Sentinels choose, and on the nodes of a Cluster."""

import contextlib
import threading

import pytest

from django_fencedlock.backends.interface import Granted, Held, Renewal, Wait
from django_fencedlock.backends.redis import RedisBackend
from django_fencedlock.backends.redis.scripts import Keys
from django_fencedlock.core import runtime
from django_fencedlock.exceptions import BackendUnavailable
from tests import test_redis_topologies as topologies
from tests.servers.process import wait_until
from tests.test_backend_interface import claim, grant, take
from tests.test_redis_service import NAME, config_of, works
from tests.test_redis_topologies import PATIENCE, Sentinels, make_any_redis, nodes  # noqa: F401

pytestmark = pytest.mark.slow

FACTORY = f"{topologies.__name__}.cluster_client"


def backend_of(closing, location="", **options):
    return closing(RedisBackend(config_of(location, prefix="fencedlock", **options)))


def test_a_lease_outlives_the_primary_that_granted_it(make_any_redis, closing):  # noqa: F811
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
def test_sentinels_are_asked_again_when_the_primary_became_a_replica(
    make_any_redis,  # noqa: F811
    closing,
    batch,
):
    """Redis before 7 reports READONLY from a script as an error that the driver doesn't know."""
    old, new = make_any_redis(), make_any_redis()
    sentinel = topologies.start_sentinel(old, closing)
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


def test_a_dead_node_loses_no_leases_of_other_nodes(nodes, closing, caplog):  # noqa: F811
    backend = backend_of(closing, CLIENT_FACTORY=FACTORY)
    names = [topologies._name_on(number) for number in range(3)]
    held = [take(backend, claim(name, ttl=60)) for name in names]
    assert backend.renew(held) == [Renewal.KEPT] * 3
    nodes[0].kill()
    assert backend.renew(held) == [Renewal.UNKNOWN, Renewal.KEPT, Renewal.KEPT]
    runtime.worker.finish(60)
    assert "failed at the renewal of 1 of 3 leases" in caplog.text
    with pytest.raises(BackendUnavailable):
        backend.holders(names[:1])
    assert set(backend.holders(names[1:])) == set(names[1:])
    assert backend.release(held[1])
    assert take(backend, claim(names[1])).token == 2
    assert backend.verify(held[2])


def test_a_cluster_that_is_gone_is_unavailable(nodes, closing):  # noqa: F811
    backend = backend_of(closing, CLIENT_FACTORY=FACTORY)
    held = take(backend, claim("x"))
    for node in nodes:
        node.kill()
    with pytest.raises(BackendUnavailable, match="Redis Cluster cannot be connected"):
        take(backend, claim("another"))
    assert backend.renew([held]) == [Renewal.UNKNOWN]


def test_a_slot_moves_to_another_node_with_the_lock_and_its_queue(nodes, closing):  # noqa: F811
    backend = backend_of(closing, CLIENT_FACTORY=FACTORY)
    name = topologies._name_on(0)
    held = take(backend, claim(name, ttl=60))
    sent, answers = claim(name), []
    waiter = threading.Thread(target=lambda: answers.append(backend.acquire(sent, Wait(60))))
    waiter.start()
    queue = Keys.of("", name).queue
    wait_until(lambda: nodes[0].execute("ZCARD", queue), "a waiter in the queue")
    topologies._move(topologies._slot(name), *nodes[:2])
    assert backend.renew([held]) == [Renewal.KEPT]
    assert backend.verify(held)
    assert backend.release(held)
    waiter.join(PATIENCE)
    assert isinstance(answers[0], Granted)
    assert backend.verify(grant(sent, answers[0]))
    assert isinstance(backend.acquire(claim(name), Wait()), Held)


def test_one_node_of_a_cluster_is_not_enough(nodes, closing):  # noqa: F811
    backend = backend_of(closing, nodes[0].url)
    assert "E017" in [problem.id for problem in backend.check()]
    whole = backend_of(closing, CLIENT_FACTORY=FACTORY)
    works(whole, nodes[topologies._slot(NAME) * 3 // topologies.SLOTS])
    assert {problem.id for problem in whole.check()} == {"", "I001"}
