"""A pause between the grant and the caller's code: the deadline is looked at once more."""

import time

import pytest

from django_fencedlock import lock
from django_fencedlock.backends.base import Request
from django_fencedlock.owners import new_owner
from django_fencedlock.services import service

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def pause_after_grant(monkeypatch):
    """Have the process sleep past the ttl after its grant, and `meanwhile` happen."""
    backend = service("default").backend
    acquire = backend.acquire

    def install(meanwhile=lambda: None):
        def slow(request):
            grant = acquire(request)
            time.sleep(0.1)
            meanwhile()
            return grant

        monkeypatch.setattr(backend, "acquire", slow)
        return acquire

    return install


def test_a_grant_that_ran_out_is_renewed_if_nobody_came(pause_after_grant):
    pause_after_grant()
    lease = lock("x", ttl=0.08).acquire(blocking=False)
    assert lease is not None
    assert not lease.expired
    lease.release()


def test_a_grant_that_somebody_else_has_by_now_is_not_handed_out(pause_after_grant):
    taken = []

    def take_over():
        taken.append(acquire(Request(name="x", owner=new_owner(), ttl=30)))

    acquire = pause_after_grant(take_over)
    assert lock("x", ttl=0.08).acquire(blocking=False) is None
    assert [grant.token for grant in taken] == [2]
    assert lock("x").holder() is not None  # the successor's lock wasn't given back
