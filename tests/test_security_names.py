"""Any text as a lock's name, and as what tells of its holder, on every lock service there is."""

import contextlib
import html
import io
import json
import logging
import re
import socket
import threading
import unicodedata
from datetime import timedelta
from functools import partial

import pytest
from django.core.management import CommandError, call_command
from django.urls import reverse
from django.utils import timezone
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from django_fencedlock import LeaseLost, force_release, lock
from django_fencedlock.backends.interface import Held
from django_fencedlock.backends.redis.scripts import Keys
from django_fencedlock.core import identity
from django_fencedlock.core.grants import holder_of
from django_fencedlock.core.identity import Owner, running_task
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import LockNotAcquired
from django_fencedlock.models import HeldLock
from django_fencedlock.storage import connections
from django_fencedlock.storage.text import show_blanks
from tests.backends import DATABASE, POSTGRES, REDIS
from tests.servers import shared
from tests.threads import elsewhere

pytestmark = pytest.mark.slow

SERVICES = {
    "sqlite": {"BACKEND": DATABASE},
    "rows": {"BACKEND": DATABASE, "FENCE_DATABASE": "postgres"},
    "mariadb": {"BACKEND": DATABASE, "FENCE_DATABASE": "mariadb"},
    "sessions": {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"},
    "redis": {"BACKEND": REDIS, "FENCE_DATABASE": "postgres"},
}


def on(*names):
    def param(name):
        databases = {"default", SERVICES[name].get("FENCE_DATABASE", "default")}
        return pytest.param(
            name, marks=pytest.mark.django_db(transaction=True, databases=sorted(databases))
        )

    return pytest.mark.parametrize("service_name", [param(name) for name in names])


every_service = on(*SERVICES)


@pytest.fixture
def alias(service_name, settings, monkeypatch):
    # As outside of tests: private connections stay open.
    monkeypatch.setattr(connections, "under_test", lambda: False)
    given = dict(SERVICES[service_name])
    if given["BACKEND"] == REDIS:
        given["LOCATION"] = shared.redis().url
    settings.FENCEDLOCK = {"default": given}
    yield given.get("FENCE_DATABASE", "default")
    service("default").drop_all()
    connections.close_all()


def command(*arguments):
    out = io.StringIO()
    with contextlib.suppress(SystemExit):
        call_command("fencedlock", *arguments, stdout=out, stderr=out)
    return out.getvalue()


def texts_of(answer):
    assert answer.status_code == 200
    found = answer.content.decode()
    # Whatever of a name was markup would be no entity.
    assert "<script>alert" not in found
    return html.unescape(found)


def is_quiet(text):
    return all(each == "\n" or unicodedata.category(each)[0] != "C" for each in text)


LIST = "/admin/django_fencedlock/heldlock/"
CHANGE = "admin:django_fencedlock_heldlock_change"


def row_id(alias, name):
    return HeldLock.objects.using(alias).get(name=name).pk


ODD = [
    *("{x}", "a}b", "{", "}", "{}", "x}:lock", "a{b}c", ":lock", "a:seq", "*", "a?[b]"),
    *("%s", "%(name)s", "100%", "_", "\\", "a\\'", "'; DROP TABLE x; --", '"', "`", "$1", "?"),
    *("'); redis.call('FLUSHALL') --", "]]", "\r\nSET x y\r\n", "a\nb", "\t", "\x1b[2J", "\x9b1m"),
    *("<script>alert(1)</script>", "&amp;", "&", "%00", "%0d%0aX: y", "../../etc", "/", "//evil"),
    *("{x.__class__}", "{0}", "{{x}}", "${jndi:x}", "$(id)", "`id`", "-", "--help", "_0A", "_5F"),
    *(" ", " a", "a ", "a  b", "A", "a", "ä", "a\u0308", "ß", "ss", "SS", "İ", "i", "I", "\u0131"),
    *("é", "e\u0301", "ﬁ", "fi", "\uff21", "\u0430", "a\u200b", "a\u202eb", "\ufeffa", "\u2028"),
    *("🔒", "x" * 200),
]
ANYTHING = st.text(min_size=1, max_size=20).filter(
    lambda text: "\0" not in text and not any(0xD800 <= ord(each) <= 0xDFFF for each in text)
)
LOOK_ALIKES = st.sampled_from(
    [
        *(str.upper, str.lower, str.swapcase, str.strip),
        *(form.format for form in ("{} ", "{}:", "{}\u200b", "{{{}}}")),
        *(partial(unicodedata.normalize, form) for form in ("NFC", "NFD", "NFKC")),
    ]
)


@st.composite
def some_names(draw):
    found = draw(st.lists(st.sampled_from(ODD) | ANYTHING, min_size=1, max_size=3))
    found += [draw(LOOK_ALIKES)(each) for each in found]
    return sorted({each for each in found if 0 < len(each) <= 200})


@every_service
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(names=some_names())
@example(names=["A", "a", "a ", "ä", "a\u0308"])
@example(names=["{x}", "x", "x}", "{x", "{x}:lock", "x}:lock"])
def test_each_name_has_a_lock_of_its_own(alias, names):
    with contextlib.ExitStack() as stack:
        leases = {name: stack.enter_context(lock(name, blocking_timeout=0)) for name in names}
        refused = elsewhere(
            lambda: {name: lock(name).acquire(blocking_timeout=0) for name in names}
        )
        assert refused == dict.fromkeys(names)
        held = {row.name: row for row in HeldLock.objects.using(alias)}
        for name, lease in leases.items():
            assert lock(name).holder().owner_id == held[name].owner == lease.owner_id
            assert held[name].token == lease.token
        found = service("default").backend.holders(names)
        assert {name: holder.owner for name, holder in found.items()} == {
            name: lease.owner_id for name, lease in leases.items()
        }
    assert all(lock(name).holder() is None for name in names)


@on("sqlite", "rows", "mariadb", "redis")
def test_whatever_is_held_is_shown_as_it_is(alias, boss):
    names = sorted(set(ODD))
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(lock(name))
        page = boss.get(LIST, {"database": alias}).content.decode()
        found = re.findall(r'field-lock_name"><a [^>]*>([^<]*)</a>', page)
        assert sorted(map(html.unescape, found)) == sorted(map(show_blanks, names))
        assert len(set(found)) == len(names)
        listed = command("list", "--format", "json")
        assert is_quiet(listed)
        states = {each["name"]: each["state"] for each in json.loads(listed)["locks"]}
        assert states == dict.fromkeys(names, "held")
        assert is_quiet(command("list"))


@on("sqlite", "redis")
def test_each_page_of_a_lock_is_there(alias, boss):
    query = {"database": alias}
    for name in ODD[::4]:
        with lock(name) as lease:
            for answer in (
                boss.get(LIST, {**query, "q": name}),
                boss.get(reverse(CHANGE, args=[row_id(alias, name)]), query),
                boss.get(f"{LIST}release/", {**query, "name": name}),
            ):
                assert show_blanks(name) in texts_of(answer)
            assert is_quiet(command("show", "--", name))
            assert json.loads(command("show", "--format", "json", "--", name))["name"] == name
            assert lease.verify()


UGLY = ["a\0b", "\ud800", "a\nWARNING all is well", "\x1b[31m\x9b1m", "\u202e", "]}>'\""]
UGLY += ["日本", "x" * 9999]


@pytest.fixture(params=["thread", "task", "task id", "host"])
def told_by(request, monkeypatch):
    def take(ugly, work):
        task = ("t", "") if request.param == "host" else ("", "")
        task = ("t", ugly) if request.param == "task id" else task
        task = (ugly, "1") if request.param == "task" else task
        mark = running_task.set(task)
        threading.current_thread().name = ugly if request.param == "thread" else before
        if request.param == "host":
            monkeypatch.setattr(socket, "gethostname", lambda: ugly)
        identity._here.cache_clear()
        try:
            return work()
        finally:
            running_task.reset(mark)

    before = threading.current_thread().name
    yield take
    threading.current_thread().name = before
    monkeypatch.undo()
    identity._here.cache_clear()


@every_service
@pytest.mark.usefixtures("alias")
def test_a_holder_of_any_identity_gets_the_lock_and_forges_nothing(told_by, caplog):
    caplog.set_level(logging.DEBUG, "django_fencedlock")
    for ugly in UGLY:
        lease = told_by(ugly, lock("x").acquire)
        refused = elsewhere(lambda: refusal("x"))
        assert is_quiet(refused)
        assert "\n" not in refused
        assert is_quiet(command("show", "x"))
        assert is_quiet(command("list", "--format", "json"))
        assert is_quiet(str(force_release("x", by=f"me{ugly[:100]}")))
        assert not lease.verify()
        assert is_quiet(str(lease.loss()))
        with contextlib.suppress(LeaseLost):
            lease.release()
    assert caplog.messages
    assert all(is_quiet(each) and "\n" not in each for each in caplog.messages)


@on("sqlite", "rows", "mariadb")
def test_a_successor_of_any_identity_forges_nothing(alias, told_by):
    for ugly in UGLY:
        # Referenced, or it would be released as abandoned.
        former = elsewhere(lambda: lock("x").acquire())
        long_ago = timezone.now() - timedelta(hours=1)
        HeldLock.objects.using(alias).update(
            expires_at=long_ago, renewed_at=long_ago, pid_started=0
        )
        lease = told_by(ugly, lock("x", blocking_timeout=0).acquire)
        assert lease.verify()
        assert not former.verify()
        lease.release()


def refusal(name):
    with pytest.raises(LockNotAcquired) as caught, lock(name, blocking_timeout=0):
        raise AssertionError("somebody has it")
    return f"{caught.value} {caught.value.holder}"


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 201, "x" * 10_000, ""])
@on("sqlite", "rows")
def test_what_can_be_no_name_is_refused_everywhere(alias, boss, name):
    for ask in (lock, lambda name: force_release(name, by="me")):
        with pytest.raises(ValueError, match="name"):
            ask(name)
    for arguments in (["show"], ["release", "--yes"]):
        with pytest.raises(CommandError) as caught:
            command(*arguments, "--", name)
        assert is_quiet(str(caught.value))
    mark = json.dumps([name, "default", "me"])
    for answer in (
        boss.get(f"{LIST}release/", {"database": alias, "name": name.encode(errors="replace")}),
        boss.post(f"{LIST}release/", {"lock": mark, "step": "release"}),
        boss.get(LIST, {"database": alias, "q": name.encode(errors="replace")}),
        boss.get(LIST, {"database": alias, "host": name.encode(errors="replace")}),
    ):
        assert answer.status_code in (200, 302, 400)


@given(st.lists(st.sampled_from(ODD) | ANYTHING, min_size=2, max_size=2, unique=True))
@example(["x}:lock", "x"])
@example(["}", "{}"])
def test_keys_of_two_names_are_others_and_each_name_has_one_slot(names):
    one, two = (set(Keys.of("", name)) for name in names)
    assert one.isdisjoint(two)
    for keys in (one, two):
        assert len({key_slot(key.encode()) for key in keys}) == 1
        # What Redis takes for the tag tells the name: else all names would be in one slot.
        assert len({key[key.index("{") : key.index("}")] for key in keys}) == 1


@given(st.text(max_size=30), st.text(max_size=30))
def test_whatever_a_service_says_of_a_holder_can_be_shown(owner, identity):
    held = Held(owner, identity)
    assert is_quiet(str(holder_of(held, "default")))
    assert is_quiet(str(Owner.read(owner, identity)))
