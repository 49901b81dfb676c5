"""The admin's pages of locks where two databases have fences."""

import contextlib
import re
from datetime import timedelta
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages
from django.core.management import call_command
from django.db import connections
from django.utils import timezone

from django_fencedlock import LeaseLost, lock
from django_fencedlock.admin import base
from django_fencedlock.core.manager import service
from django_fencedlock.models import Fence, HeldLock, LockEvent
from tests.servers import shared

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])

LIST = "/admin/django_fencedlock/heldlock/"
FENCES = "/admin/django_fencedlock/fence/"
EVENTS = "/admin/django_fencedlock/lockevent/"
OTHER = {"database": "postgres"}


@pytest.fixture(autouse=True)
def two_databases(settings):
    shared.postgres()
    settings.FENCEDLOCK = {"default": {}, "ledger": {"FENCE_DATABASE": "postgres"}}


@pytest.fixture
def held():
    here, there = lock("here").acquire(), lock("there", backend="ledger").acquire()
    yield there
    here.release()
    with contextlib.suppress(LeaseLost):
        there.release()


def names(answer):
    assert answer.status_code == 200
    cells = r'<th class="field-lock_name">\s*<a [^>]*>(.*?)</a>'
    return re.findall(cells, answer.content.decode())


def link(answer, text):
    found = re.search(rf'<a [^>]*href="([^"]*)"[^>]*>\s*{text}\s*</a>', answer.content.decode())
    assert found, text
    return unescape(found[1])


def test_the_filter_chooses_the_database(boss, held):
    page = boss.get(LIST)
    assert names(page) == names(boss.get(LIST, {"database": "unknown"})) == ["here"]
    other = boss.get(LIST + link(page, "postgres"))
    assert names(other) == ["there"]
    assert names(boss.get(LIST + link(other, "default"))) == ["here"]
    assert names(boss.get(LIST, {**OTHER, "state": "held", "q": "the"})) == ["there"]
    assert names(boss.get(LIST, {**OTHER, "state": "expired"})) == []


@pytest.mark.django_db(transaction=True, databases=["default", "mariadb"])
@pytest.mark.parametrize("page", [LIST, FENCES, EVENTS])
def test_a_search_for_what_latin1_lacks(boss, settings, page):
    settings.FENCEDLOCK = {"default": {}, "ledger": {"FENCE_DATABASE": "mariadb"}}
    kind, now = LockEvent.Kind.REJECTED, timezone.now()
    LockEvent.objects.using("mariadb").create(name="冰 1", kind=kind, happened_at=now, times=1)
    with lock("冰 1", backend="ledger"):
        for text in ("冰", "雪"):
            found = boss.get(page, {"database": "mariadb", "q": text})
            assert (found.status_code, "冰 1" in found.content.decode()) == (200, text == "冰")


@pytest.mark.django_db(transaction=True, databases=["default", "mariadb"])
def test_a_form_with_what_latin1_lacks(boss, settings):
    settings.FENCEDLOCK = {"default": {}, "ledger": {"FENCE_DATABASE": "mariadb"}}
    form = {"lock": "冰", "step": "release"}
    assert boss.post(f"{LIST}release/?database=mariadb", form).status_code == 400


def test_the_page_of_a_lock(boss, held):
    now = timezone.now()
    LockEvent.objects.using("postgres").create(
        name="there", alias="ledger", kind="rejected", happened_at=now, note="pk=7", times=1
    )
    listed = boss.get(LIST, OTHER)
    events = link(listed, "1")
    assert "pk=7" in boss.get(events).content.decode()
    one = boss.get(link(listed, "there"))
    assert "confirms this holder" in one.content.decode()
    assert "pk=7" in one.content.decode()
    assert boss.get(f"{LIST}{held_id()}/change/").status_code == 302


def held_id():
    return HeldLock.objects.using("postgres").get(name="there").pk


def test_a_lock_is_released_by_force(boss, held):
    key = held_id()
    one = boss.get(link(boss.get(LIST, OTHER), "there"))
    asked = boss.get(link(one, "Release by force"))
    page = asked.content.decode()
    (mark,) = re.findall(r'name="lock" value="([^"]*)"', page)
    (action,) = re.findall(r'<form method="post" action="([^"]*release[^"]*)"', page)
    done = boss.post(unescape(action), {"lock": unescape(mark), "step": "release"})
    assert [each.level_tag for each in get_messages(done.wsgi_request)] == ["success"]
    assert not held.verify()
    assert LogEntry.objects.get().object_id == str(key)
    assert (done.status_code, done.url) == (302, f"{LIST}?database=postgres")
    assert link(asked, "No, take me back") == done.url


def test_locks_are_released_by_the_action(boss, held):
    form = {"action": "release_by_force", "_selected_action": [held_id(), 1]}
    asked = boss.post(f"{LIST}?database=postgres", form)
    found = re.findall(r'name="lock" value="([^"]*)"', asked.content.decode())
    assert found == [held.owner_id]


def test_fences_and_events(boss, held):
    event = {"name": "x", "kind": "lost", "happened_at": timezone.now(), "times": 1}
    LockEvent.objects.using("postgres").create(**event)
    assert names(boss.get(FENCES)) == ["here"]
    assert names(boss.get(FENCES, OTHER)) == ["there"]
    assert "0 lock events" in boss.get(EVENTS).content.decode()
    assert "1 lock event" in boss.get(EVENTS, OTHER).content.decode()


def test_an_unavailable_database(boss, monkeypatch):
    connections["postgres"].close()
    monkeypatch.setitem(connections["postgres"].settings_dict, "PORT", "1")
    answer = boss.get(LIST, OTHER)
    assert answer.status_code == 503
    html = answer.content.decode()
    assert "Database <strong>postgres</strong> is unavailable: " in html
    assert link(answer, "default") == f"{LIST}?database=default"
    assert link(answer, "Try again") == f"{LIST}?database=postgres"
    assert names(boss.get(LIST)) == []


@pytest.fixture
def silent(settings, make_postgres, make_alias, monkeypatch):
    monkeypatch.setattr(base, "ANSWERED", 0.5)
    server = make_postgres()
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": make_alias(server.django())}}
    lease = lock("x", ttl=600).acquire()
    service("default").keeper.forget(lease)
    server.pause()
    yield
    # One that is paused takes its time to be ended.
    server.resume()
    lease.released = True


def test_a_paused_database_hangs_no_page(boss, silent):
    for path in (LIST, f"{LIST}1/change/", f"{LIST}release/?name=x"):
        answer = boss.get(path)
        assert answer.status_code == 503, path
        assert "is unavailable: " in answer.content.decode()
    answer = boss.post(f"{LIST}release/", {"lock": '["x", "default", "me"]', "step": "release"})
    assert answer.status_code == 503
    assert "is unavailable: " in answer.content.decode()


def test_a_table_that_a_session_locks_delays_no_page(boss, held, postgres, monkeypatch):
    monkeypatch.setattr(base, "ANSWERED", 2)
    database = connections["postgres"].settings_dict["NAME"]
    with postgres.connect(database, autocommit=False) as other:
        other.execute("LOCK TABLE django_fencedlock_heldlock IN ACCESS EXCLUSIVE MODE")
        answer = boss.get(LIST, OTHER)
    assert answer.status_code == 503
    assert "no answer within 2 s" in answer.content.decode()
    assert names(boss.get(LIST, OTHER)) == ["there"]


def test_missing_tables_are_reported_with_the_remedy(boss, settings, make_postgres, make_alias):
    database = make_alias(make_postgres().django())
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": database}}
    call_command("migrate", "django_fencedlock", "zero", database=database, verbosity=0)
    answer = boss.get(LIST)
    assert answer.status_code == 503
    remedy = f"Run: manage.py migrate django_fencedlock --database {database}"
    assert remedy in answer.content.decode()


def test_a_single_database_has_no_filter(boss, settings):
    """Not even if the tables are elsewhere than the routers think."""
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
    with lock("there"):
        page = boss.get(LIST)
    assert names(page) == ["there"]
    assert "database=" not in page.content.decode()
    assert Fence.objects.using("postgres").get().name == "there"


def test_invalid_settings(boss, settings):
    settings.FENCEDLOCK = {"default": {"BACKEND": "nope"}}
    assert names(boss.get(LIST)) == []


@pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
@pytest.mark.parametrize("using", ["default", "postgres", "mariadb"])
def test_events_by_date(boss, settings, using):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": using}}
    for days in (0, 3, 40):
        happened = timezone.now() - timedelta(days=days)
        LockEvent.objects.using(using).create(name="x", kind="lost", happened_at=happened, times=1)
    # MariaDB and MySQL may have no tables of time zones.
    with timezone.override("Europe/Berlin"):
        for dates, count in (("Any date", 3), ("Today", 1), ("Past 7 days", 2)):
            page = boss.get(EVENTS + link(boss.get(EVENTS), dates))
            assert f"{count} lock event" in page.content.decode()
