import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client, override_settings
from django.urls import reverse
from django.utils import timezone

from django_fencedlock import lock
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.owners import running_task
from django_fencedlock.services import service
from django_fencedlock.test import lose
from tests.servers import Redis

pytestmark = pytest.mark.django_db(transaction=True)

REDIS = "django_fencedlock.backends.redis.RedisBackend"
LIST = "/admin/django_fencedlock/heldlock/"
FENCES = "/admin/django_fencedlock/fence/"


@pytest.fixture
def page(client: Client) -> Callable[..., str]:
    """Return a function that gets a page as a user who may view locks, and no more."""
    user = User.objects.create_user("viewer", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=["view_heldlock"]))
    client.force_login(user)

    def get(path: str = LIST, status: int = 200, **query: Any) -> str:
        answer = client.get(path, query)
        assert answer.status_code == status
        return answer.content.decode()

    return get


@pytest.fixture
def in_task() -> Iterator[None]:
    mark = running_task.set(("billing.charge", "0714a454"))
    yield
    running_task.reset(mark)


def states(html: str) -> dict[str, str]:
    """The state of each lock that a list shows."""
    rows = re.findall(r"<tr.*?</tr>", html.partition("<tbody>")[2], re.DOTALL)
    found = {}
    for row in rows:
        name = re.search(r"field-name.*?<a [^>]*>(.*?)</a>", row, re.DOTALL)
        state = re.search(r"fencedlock-state fencedlock-(\w+)", row)
        assert name, row
        assert state, row
        found[name[1]] = state[1]
    return found


def test_a_held_lock(page: Callable[..., str], in_task: None) -> None:
    with lock("invoice:42") as lease:
        html = page()
    assert states(html) == {"invoice:42": "held"}
    assert "billing.charge" in html
    assert "0714a454" in html
    assert f'<td class="field-token_number">{lease.token}</td>' in html


def test_an_unfenced_lock(page: Callable[..., str]) -> None:
    with lock("cache", fenced=False):
        assert "unfenced" in page()


def test_no_locks(page: Callable[..., str]) -> None:
    assert "0 held locks" in page()


def test_a_holder_that_died(page: Callable[..., str]) -> None:
    lock("invoice:42").acquire()
    past = timezone.now() - timedelta(minutes=5)
    HeldLock.objects.update(renewed_at=past, expires_at=past + timedelta(seconds=30))
    assert states(page()) == {"invoice:42": "expired"}


def test_a_late_holder(page: Callable[..., str]) -> None:
    with lock("invoice:42", ttl=3600):
        past = timezone.now() - timedelta(seconds=50)
        HeldLock.objects.update(renewed_at=past, expires_at=past + timedelta(seconds=60))
        assert states(page()) == {"invoice:42": "expiring"}


def test_the_state_is_the_services_word(page: Callable[..., str], redis_server: Redis) -> None:
    """Not what the registry remembers."""
    redis = {"BACKEND": REDIS, "LOCATION": redis_server.url, "KEY_PREFIX": uuid4().hex}
    with override_settings(FENCEDLOCK={"default": redis}):
        lease = lock("invoice:42").acquire()
        assert lease is not None
        assert states(page()) == {"invoice:42": "held"}
        # The row is cleared a second later.
        service("default").backend._store.release(lease)  # type: ignore[attr-defined]
        assert states(page()) == {"invoice:42": "free"}
        with hold_lock_unrecorded("invoice:42"):
            assert states(page()) == {"invoice:42": "lost"}


@contextlib.contextmanager
def hold_lock_unrecorded(name: str) -> Iterator[None]:
    """Take a lock of Redis whose grant the registry doesn't get."""
    lease = service("default").acquire(name, ttl=30, timeout=0, fenced=False, who=object())
    assert lease is not None
    yield
    service("default").release(lease, lease.who)


def test_a_server_that_is_gone(page: Callable[..., str], make_redis: Callable[..., Redis]) -> None:
    server = make_redis()
    redis = {"BACKEND": REDIS, "LOCATION": server.url, "OPTIONS": {"TIMEOUT": 0.5}}
    with override_settings(FENCEDLOCK={"default": redis}):
        lock("invoice:42").acquire()
        server.kill()
        html = page()
    assert states(html) == {"invoice:42": "unknown"}
    assert "be asked: what is shown" in html


def test_a_service_that_is_gone(page: Callable[..., str]) -> None:
    with lock("invoice:42"):
        HeldLock.objects.update(alias="gone")
        html = page()
    assert states(html) == {"invoice:42": "unknown"}
    assert "gone" in html[html.index("fencedlock-notices") :]


def test_filters_and_search(page: Callable[..., str], in_task: None) -> None:
    with lock("a"), lock("b"):
        past = timezone.now() - timedelta(minutes=5)
        HeldLock.objects.filter(name="b").update(
            renewed_at=past, expires_at=past, host="other", task_name="", task_id=""
        )
        assert states(page(state="expired")) == {"b": "expired"}
        assert states(page(state="held")) == {"a": "held"}
        assert states(page(host="other")) == {"b": "expired"}
        assert states(page(q="0714a454")) == {"a": "held"}


def test_one_lock(page: Callable[..., str], in_task: None) -> None:
    with lock("invoice:42"):
        html = page(reverse("admin:django_fencedlock_heldlock_change", args=["invoice:42"]))
    assert "The lock service says that this holder has the lock." in html
    assert 'name="_save"' not in html


def test_a_lock_that_is_gone(page: Callable[..., str]) -> None:
    page(reverse("admin:django_fencedlock_heldlock_change", args=["gone"]), status=302)


@pytest.mark.parametrize("path", [LIST, FENCES, f"{LIST}invoice_3A42/change/"])
def test_nothing_without_permission(client: Client, path: str) -> None:
    client.force_login(User.objects.create_user("staff", is_staff=True))
    with lock("invoice:42"):
        assert client.get(path).status_code == 403


def test_nobody_may_change_anything(client: Client) -> None:
    client.force_login(User.objects.create_superuser("root"))
    with lock("invoice:42"):
        for path in ("add/", "invoice_3A42/delete/"):
            assert client.get(LIST + path).status_code == 403
            assert client.post(LIST + path, {"post": "yes"}).status_code == 403
        assert client.post(f"{LIST}invoice_3A42/change/", {"alias": "x"}).status_code == 403
        assert HeldLock.objects.get().alias == "default"


def test_fences(client: Client) -> None:
    client.force_login(User.objects.create_superuser("root"))
    with lock("invoice:42"):
        pass
    assert "invoice:42" in client.get(FENCES).content.decode()
    assert Fence.objects.get().token == 1


@pytest.mark.parametrize("count", [1, 150])
def test_queries_are_constant(client: Client, django_assert_num_queries: Any, count: int) -> None:
    client.force_login(User.objects.create_superuser("root"))
    with lock("x"):
        row = HeldLock.objects.get()
        for number in range(count):
            row.name = f"lock {number}"
            row.save(force_insert=True)
        # Two for the login, four for the filters, the count, the page itself and the time; services
        # are asked on connections of their own.
        with django_assert_num_queries(9):
            assert client.get(LIST).status_code == 200


def test_hostile_names_are_text(page: Callable[..., str]) -> None:
    with lock("<script>alert(1)</script>"):
        assert "<script>alert(1)" not in page()


def test_a_lost_lease(page: Callable[..., str]) -> None:
    lease = lock("invoice:42").acquire()
    assert lease is not None
    lose(lease)
    assert states(page()) == {}


@override_settings(USE_TZ=False)
def test_naive_times(page: Callable[..., str]) -> None:
    with lock("invoice:42"):
        assert states(page()) == {"invoice:42": "held"}
