"""What docs/fault_lab.md says to do when a promise can't be kept: it heals what was broken."""

import time

import pytest

from django_fencedlock import lock
from django_fencedlock.backends.base import Request
from django_fencedlock.owners import new_owner
from django_fencedlock.services import service
from tests.servers.process import wait_until

TTL = 0.5

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def redis_gone_back(settings, make_redis, make_clock):
    """A Redis whose clock was set back an hour under a holder who then died."""
    server, watch = make_redis(), make_clock()
    server.go_by(watch)
    backend = "django_fencedlock.backends.redis.RedisBackend"
    settings.FENCEDLOCK = {"default": {"BACKEND": backend, "LOCATION": server.url}}
    # Taken past the keeper, so that nobody renews it: of a holder on another machine.
    assert service("default").backend.acquire(Request(name="x", owner=new_owner(), ttl=TTL))
    watch.jump(-3600)
    yield
    service("default").drop_all()


def test_a_clock_set_back_keeps_a_dead_holders_lock(redis_gone_back):
    time.sleep(TTL)
    assert lock("x").acquire(blocking_timeout=TTL) is None


def test_it_is_freed_by_hand_and_the_next_token_is_higher(redis_gone_back):
    held = lock("x").holder()
    assert service("default").backend.evict("x", held.owner)
    with lock("x", blocking_timeout=5) as lease:
        assert lease.token == 2


def test_freeing_by_hand_takes_nothing_from_who_came_since(redis_gone_back):
    held = lock("x").holder()
    backend = service("default").backend
    assert backend.evict("x", held.owner)
    with lock("x", blocking_timeout=5) as lease:
        assert not backend.evict("x", held.owner)
        assert lease.verify()


def test_a_live_holder_who_was_freed_by_mistake_has_it_back(settings, make_redis):
    backend = "django_fencedlock.backends.redis.RedisBackend"
    settings.FENCEDLOCK = {"default": {"BACKEND": backend, "LOCATION": make_redis().url}}
    lease = lock("x", ttl=TTL).acquire()
    assert service("default").backend.evict("x", lease.owner)
    wait_until(lambda: lock("x").holder() is not None, "the keeper to renew it")
    assert lock("x").holder().owner == lease.owner
    assert lease.release()
