"""From a try that is refused to a place in line, and out of it."""

import time

import pytest

from django_fencedlock import lock
from django_fencedlock.backends import base
from django_fencedlock.backends.base import Request
from django_fencedlock.core.identity import LocalHolder, new_owner
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import LockNotAcquired
from django_fencedlock.test.processes import another_thread, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def backend(settings, redis_server):
    redis_server.empty()
    settings.FENCEDLOCK = {
        "default": {
            "BACKEND": "django_fencedlock.backends.redis.RedisBackend",
            "LOCATION": redis_server.url,
        }
    }
    # Connections introduce themselves.
    with lock("warm"):
        pass
    return service("default").backend


@pytest.fixture
def holder():
    """Another thread, which has the lock "x"."""
    with another_thread() as thread:
        lease = thread.call(lock("x").acquire)
        yield lambda: thread.call(lease.release)


@pytest.fixture
def gone(monkeypatch):
    """Have each process be gone."""
    monkeypatch.setattr(base, "is_process_gone", lambda process: True)


def wish(**terms):
    return Request("x", new_owner(), 30.0, timeout=10.0, **terms)


def in_line(backend):
    return backend.waiting(["x"])["x"]


def asked(seen):
    names = ("EVALSHA", "BLPOP", "HELLO")
    return [command.name for command in seen if command.name in names and not command.lua]


def test_who_waits_stands_in_line_from_his_first_try_on(backend, holder, redis_server):
    release = holder
    with redis_server.monitor() as seen, another_thread() as thread:
        waiting = thread.start(lock("x").acquire, blocking_timeout=10)
        wait_until(lambda: in_line(backend) == 1, "the waiter")
        wait_until(lambda: redis_server.info("clients")["blocked_clients"], "his sleep")
        release()
        thread.call(waiting.result(10).release)
    # He claims, sleeps, claims and releases; the former holder released.
    commands = [name for name in asked(seen) if name != "HELLO"]
    # On a busy machine a sleep may end before the release: then he claims and sleeps once more.
    while commands[3:4] == ["BLPOP"]:
        del commands[1:3]
    assert commands == ["EVALSHA", "BLPOP", "EVALSHA", "EVALSHA", "EVALSHA"]


def test_who_need_not_wait_opens_nothing_to_wait_on(redis_server):
    with redis_server.monitor() as seen:
        lock("x").acquire(blocking_timeout=10).release()
    assert asked(seen) == ["EVALSHA", "EVALSHA"]


def test_whose_time_is_up_after_his_try_has_left_the_line(backend, holder, monkeypatch):
    acquire = backend.acquire

    def slow(request):
        answer = acquire(request)
        assert in_line(backend) == 1
        time.sleep(0.06)
        return answer

    monkeypatch.setattr(backend, "acquire", slow)
    assert lock("x").acquire(blocking_timeout=0.05) is None
    assert in_line(backend) == 0


def test_who_is_asked_whether_to_wait_does_not_stand_in_line_meanwhile(backend, holder):
    places = []

    def refuse(seen):
        places.append(in_line(backend))
        raise LockNotAcquired("changed his mind", name="x", alias="default")

    with pytest.raises(LockNotAcquired, match="changed his mind"):
        service("default").acquire(wish(on_refusal=refuse))
    assert places == [0]
    assert in_line(backend) == 0


@pytest.mark.django_db
def test_who_does_not_wait_in_a_tests_transaction_has_no_place_in_line(backend):
    with lock("x"):
        assert service("default").acquire(wish(), LocalHolder()) is None
        assert in_line(backend) == 0


def test_whose_holder_is_dead_gets_the_lock_at_his_first_try(backend, holder, gone, monkeypatch):
    monkeypatch.setattr(backend, "wait", None)
    with lock("x", blocking_timeout=10):
        assert in_line(backend) == 0
