"""Forced release in the admin: the confirmation page, the release, and its messages."""

import html
import re
from urllib.parse import urlencode

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import connections
from django.test import override_settings

from django_fencedlock import LeaseLost, lock
from django_fencedlock.admin import locks
from django_fencedlock.core.manager import service
from django_fencedlock.models import Fence, HeldLock
from tests.backends import POSTGRES, REDIS
from tests.servers import shared
from tests.sessions import as_in_another_process
from tests.threads import sqlite_written_to

pytestmark = pytest.mark.django_db(transaction=True)

LEFT_ALONE = "Locks that the holder you saw no longer holds, which were left alone: 1"
LIST = "/admin/django_fencedlock/heldlock/"
RELEASE = f"{LIST}release/"


def log_in(client, *codenames):
    user = User.objects.create_user("anna", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client.force_login(user)
    return client


@pytest.fixture
def anna(client):
    return log_in(client, "view_heldlock", "release_heldlock")


def marks(answer):
    found = re.findall(r'name="lock" value="([^"]*)"', answer.content.decode())
    return [html.unescape(each) for each in found]


def told(answer):
    return [(message.level_tag, str(message)) for message in get_messages(answer.wsgi_request)]


def choose(client, *names):
    # Locks that are free by now have no row.
    ids = dict(HeldLock.objects.values_list("name", "pk"))
    chosen = [ids.get(name, number) for number, name in enumerate(names)]
    data = {"action": "release_by_force", "_selected_action": chosen}
    return client.post(LIST, data)


def confirm(client, asked):
    return client.post(RELEASE, {"lock": marks(asked), "step": "release"})


def test_the_action_and_the_button(anna):
    with lock("invoice:42"):
        assert 'value="release_by_force"' in anna.get(LIST).content.decode()
        page = anna.get(f"{LIST}{HeldLock.objects.get().pk}/change/").content.decode()
    assert f'href="{RELEASE}?name=invoice%3A42"' in page
    assert 'name="_save"' not in page
    assert "deletelink" not in page


@pytest.mark.parametrize("method", ["get", "head", "options", "put", "delete", "patch"])
def test_only_a_posted_form_releases_a_lock(anna, method):
    with lock("invoice:42") as lease:
        form = {"lock": lease.owner_id, "step": "release", "post": "yes"}
        query = urlencode({"name": "invoice:42", **form})
        assert getattr(anna, method)(f"{RELEASE}?{query}").status_code in (200, 405)
        lease.renew()


def test_no_other_site_can_show_the_confirmation_in_a_frame(anna):
    with lock("invoice:42"):
        answer = anna.get(RELEASE, {"name": "invoice:42"})
    assert answer.headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize("key", ["next", "_to", "_popup", "_changelist_filters", "database"])
def test_no_parameter_leads_to_another_site(anna, key):
    away = {key: "//evil.example/"}
    with lock("invoice:42"):
        for answer in (
            anna.get(LIST, away),
            anna.get(f"{LIST}42/change/", away),
            anna.get(RELEASE, {**away, "name": "unknown"}),
            anna.post(f"{RELEASE}?{key}=//evil.example/", {**away, "step": "release"}),
        ):
            assert not answer.headers.get("Location", "/").startswith(("//", "http"))
            assert 'href="//evil' not in answer.content.decode()


class TestReleasing:
    def test_one_lock(self, anna):
        lease = lock("invoice:42").acquire()
        asked = anna.get(RELEASE, {"name": "invoice:42"})
        page = asked.content.decode()
        assert str(lease.holder) in html.unescape(page)
        assert "The fence is raised" in page
        answer = confirm(anna, asked)
        assert (answer.status_code, answer.url) == (302, LIST)
        assert told(answer) == [
            (
                "success",
                f"Lock 'invoice:42' (alias 'default') of {lease.holder} was released by force. "
                "The holder's writes are rejected: the fence is at 2.",
            )
        ]
        assert Fence.objects.get().token == 2
        with pytest.raises(LeaseLost, match=r"by anna \(admin\)"):
            lease.renew()
        entry = LogEntry.objects.get()
        assert (entry.user.username, entry.object_repr) == ("anna", "invoice:42")
        assert entry.change_message == told(answer)[0][1]

    def test_several_by_the_action(self, anna):
        leases = [lock(name).acquire() for name in ("a", "b", "c")]
        asked = choose(anna, "a", "c")
        assert marks(asked) == [leases[0].owner_id, leases[2].owner_id]
        assert [level for level, _ in told(confirm(anna, asked))] == ["success"] * 2
        assert [lease.verify() for lease in leases] == [False, True, False]
        assert LogEntry.objects.count() == 2

    def test_more_locks_than_allowed(self, anna, monkeypatch):
        monkeypatch.setattr(locks, "MAX_LOCKS", 2)
        leases = [lock(name).acquire() for name in "abc"]
        answer = choose(anna, "a", "b", "c")
        assert told(answer) == [
            ("error", "At most 2 locks can be released at once. Nothing was released.")
        ]
        data = [each.owner_id for each in leases]
        anna.post(RELEASE, {"lock": data, "step": "release"})
        assert [lease.verify() for lease in leases] == [False, False, True]

    def test_locks_after_the_time_limit_are_not_tried(self, anna, monkeypatch):
        leases = [lock(name).acquire() for name in "ab"]
        asked = choose(anna, "a", "b")
        monkeypatch.setattr(locks, "TIME_LIMIT", -1.0)
        answers = told(confirm(anna, asked))
        assert answers == [
            ("error", f"Lock “{name}” was not tried: others before it took too long.")
            for name in "ab"
        ]
        assert all(lease.verify() for lease in leases)

    def test_a_lock_that_another_holder_acquired_since_is_not_released(self, anna):
        former = lock("invoice:42").acquire()
        asked = anna.get(RELEASE, {"name": "invoice:42"})
        former.release()
        with lock("invoice:42") as lease:
            ((level, text),) = told(confirm(anna, asked))
            assert (level, text) == ("info", LEFT_ALONE)
            lease.renew()
        assert not LogEntry.objects.exists()

    def test_a_lock_that_was_released_since(self, anna):
        former = lock("invoice:42").acquire()
        asked = anna.get(RELEASE, {"name": "invoice:42"})
        former.release()
        assert told(confirm(anna, asked)) == [("info", LEFT_ALONE)]
        answer = anna.get(RELEASE, {"name": "invoice:42"})
        assert (answer.status_code, answer.url) == (302, LIST)

    @pytest.mark.slow
    def test_a_failure_is_reported_and_does_not_stop_the_others(self, anna):
        free, pinned = lock("a").acquire(), lock("b").acquire()
        asked = choose(anna, "a", "b")
        with sqlite_written_to():
            answer = confirm(anna, asked)
        assert [level for level, _ in told(answer)] == ["error", "error"]
        assert "its fence in 'default' can't be raised" in told(answer)[0][1]
        free.release()
        anna.get(LIST)
        levels = [level for level, _ in told(confirm(anna, asked))]
        assert sorted(levels) == ["info", "success"]
        assert not pinned.verify()

    def test_an_unfenced_lock(self, anna):
        lock("cache", fenced=False).acquire()
        asked = anna.get(RELEASE, {"name": "cache"})
        assert "writes are not rejected" in asked.content.decode()
        ((level, text),) = told(confirm(anna, asked))
        assert level == "success"
        assert "are not rejected" in text

    def test_the_pages_ignore_atomic_requests(self, anna, monkeypatch):
        """The fence couldn't be raised beside the request's transaction: SQLite has one writer."""
        lease = lock("invoice:42").acquire()
        monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
        asked = anna.get(RELEASE, {"name": "invoice:42"})
        assert [level for level, _ in told(confirm(anna, asked))] == ["success"]
        assert not lease.verify()

    @pytest.mark.parametrize("data", [{"step": "no"}, {"step": "release", "lock": "\0"}])
    def test_an_invalid_form(self, anna, data):
        assert anna.post(RELEASE, data).status_code == 400

    def test_an_unknown_alias(self, anna):
        lease = lock("invoice:42").acquire()
        HeldLock.objects.update(alias="nope")
        form = {"lock": lease.owner_id, "step": "release"}
        ((level, text),) = told(anna.post(RELEASE, form))
        assert level == "error"
        assert "nope" in text


def test_an_unavailable_service(anna, make_redis):
    server = make_redis()
    redis = {"BACKEND": REDIS, "LOCATION": server.url, "OPTIONS": {"TIMEOUT": 0.5}}
    with override_settings(FENCEDLOCK={"default": redis}):
        lock("a").acquire()
        lock("b").acquire()
        asked = choose(anna, "a", "b")
        assert len(marks(asked)) == 2
        server.kill()
        again = choose(anna, "a", "b")
        assert marks(again) == []
        assert "Its lock service is unavailable" in html.unescape(again.content.decode())
        assert all("was not released: " in text for _, text in told(confirm(anna, asked)))
        service("default").drop_all()


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
class TestSessions:
    @pytest.fixture(autouse=True)
    def on_postgres(self, settings):
        shared.postgres()
        settings.FENCEDLOCK = {"default": {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"}}
        settings.DATABASE_ROUTERS = [f"{__name__}.ToPostgres"]

    def test_it_is_left_to_its_holder(self, anna):
        lease = lock("x").acquire()
        asked = anna.get(RELEASE, {"name": "x"})
        page = html.unescape(asked.content.decode())
        assert "at its next renewal, within a third of its ttl" in page
        pid = HeldLock.objects.using("postgres").get(name="x").session_pid
        assert f"SELECT pg_terminate_backend({pid})" in page
        with as_in_another_process():
            ((level, text),) = told(confirm(anna, asked))
        assert level == "warning"
        assert "The holder's writes are rejected" in text
        assert LogEntry.objects.get().change_message == text
        with pytest.raises(LeaseLost, match="by anna"):
            lease.renew()
        assert lock("x").holder() is None


class ToPostgres:
    def db_for_read(self, model, **hints):
        return "postgres" if model in (HeldLock, Fence) else None
