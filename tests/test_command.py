"""``manage.py fencedlock``, with text and JSON output."""

import io
import json
import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command, load_command_class
from django.db import connections
from django.db.models import F
from django.utils import timezone

from django_fencedlock import LeaseLost, checks, lock
from django_fencedlock.core.manager import service
from django_fencedlock.management.commands.fencedlock import current_user, table
from django_fencedlock.models import Fence, HeldLock, LockEvent
from django_fencedlock.ops import doctor, resync
from django_fencedlock.ops.registry import State, duration
from django_fencedlock.problems import Level
from tests.backends import POSTGRES, REDIS
from tests.models import Invoice
from tests.scripts import run_python
from tests.sessions import as_in_another_process
from tests.test_docs import REFERENCE, _table
from tests.test_doctor import Only
from tests.test_resync import restored, written
from tests.threads import sqlite_written_to

pytestmark = pytest.mark.django_db(transaction=True)


def run(*arguments, **options):
    out, err = io.StringIO(), io.StringIO()
    try:
        call_command("fencedlock", *arguments, stdout=out, stderr=err, **options)
        code = 0
    except SystemExit as exc:
        code = exc.code
    except CommandError as exc:
        code = exc.returncode
        err.write(str(exc))
    return out.getvalue(), err.getvalue(), code


def on_redis(server):
    return {"BACKEND": REDIS, "LOCATION": server.url, "KEY_PREFIX": uuid4().hex}


def run_json(*arguments):
    out, _, code = run(*arguments, "--format", "json")
    return json.loads(out), code


@pytest.fixture
def dead_redis(settings, make_redis):
    server = make_redis()
    settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, "LOCATION": server.url}}
    lock("x").acquire()
    server.kill()
    yield
    service("default").drop_all()


@pytest.mark.usefixtures("dead_redis")
@pytest.mark.parametrize(
    ("arguments", "shown", "error"),
    [
        (["list"], "unknown", "Alias 'default' is unavailable"),
        (["show", "x"], "alias 'default'", ""),
        (["release", "x", "--yes"], "", "Nothing was released. Name the lock's alias"),
    ],
)
def test_an_unavailable_service_is_reported(arguments, shown, error):
    out, err, code = run(*arguments)
    assert code == 2
    assert shown in out
    assert error in err
    assert "not held" not in out


def test_without_an_action_the_usage_names_them():
    usage = load_command_class("django_fencedlock", "fencedlock").create_parser("manage.py", "x")
    assert "{list,show,release,trim,doctor,resync}" in usage.format_usage()


class TestList:
    def test_nothing(self):
        assert run("list") == ("No locks.\n", "", 0)
        assert run_json("list") == ({"locks": [], "unanswered": {}}, 0)

    def test_for_people_and_scripts(self):
        with lock("invoice:1") as lease, lock("nightly-close", fenced=False):
            out, _, code = run("list")
            found, json_code = run_json("list")
        head, one, two = out.splitlines()
        assert code == 0
        assert head.split("  ")[0] == "NAME"
        columns = [head.index(word) for word in ("STATE", "HOLDER", "ALIAS", "TOKEN")]
        assert [one[at:].split("  ")[0] for at in columns] == [
            *("held", str(lease.holder), "default", str(lease.token))
        ]
        assert "unfenced" in two
        assert "\x1b" not in out
        one = found["locks"][0]
        assert json_code == 0
        assert one["acquired_at"][10] == "T"
        assert (one["name"], one["state"], one["token"]) == ("invoice:1", "held", lease.token)
        assert one["owner"] == lease.owner_id
        assert datetime.fromisoformat(one["expires_at"]).utcoffset() == timedelta(0)
        assert 0 < one["remaining"] <= 30

    def test_only_some(self):
        with lock("a"), lock("b"):
            HeldLock.objects.filter(name="b").update(expires_at=F("acquired_at"))
            assert [
                each["name"] for each in run_json("list", "--state", "expired")[0]["locks"]
            ] == ["b"]
            assert len(run_json("list", "--state", "expired", "--state", "held")[0]["locks"]) == 2
            assert len(run_json("list", "--alias", "default")[0]["locks"]) == 2
        assert run("list", "--alias", "nope")[1:] == (
            "FENCEDLOCK has no alias 'nope'; it has 'default'.",
            2,
        )

    def test_permits_and_readers(self, holders):
        for number in (10, 1, 2):
            holders.permit("gpu", number, 12)
        # The limit was raised since.
        HeldLock.objects.filter(name="gpu [permit 1]").update(permits=3)
        HeldLock.objects.filter(name="gpu [permit 10]").update(expires_at=F("acquired_at"))
        for _ in range(2):
            holders.acquire(lock("catalog", shared=True))
        # A waiting writer has no row, and the row that readers lock isn't a holder's.
        assert lock("catalog").acquire(blocking=False) is None
        with lock("gpu"):
            out, _, _ = run("list")
            found, _ = run_json("list")
        head, *lines = out.splitlines()
        at = head.index("KIND")
        assert [(line.split("  ")[0], line[at:].split("  ")[0]) for line in lines] == [
            *[("catalog", "reader")] * 2,
            ("gpu", ""),
            ("gpu [permit 1]", "permit 1 of 3, 2 used"),
            ("gpu [permit 2]", "permit 2 of 12, 2 used"),
            ("gpu [permit 10]", "permit 10 of 12, 2 used"),
        ]
        keys = "kind", "permit", "permits", "used"
        assert [tuple(map(each.get, keys)) for each in found["locks"]] == [
            *[("reader", None, None, None)] * 2,
            ("exclusive", None, None, None),
            *[("permit", 1, 3, 2), ("permit", 2, 12, 2), ("permit", 10, 12, 2)],
        ]
        holders.leave()
        HeldLock.objects.all().delete()
        with lock("a"):
            assert "KIND" not in run("list")[0]

    def test_a_database_that_does_not_answer(self, settings, make_postgres, make_alias):
        server = make_postgres()
        database = make_alias(server.django())
        settings.FENCEDLOCK = {"default": {}, "far": {"FENCE_DATABASE": database}}
        server.kill()
        with lock("near"):
            out, err, code = run("list")
            assert code == 2
            assert "near" in out
            assert f"Alias 'far' is unavailable: its fence database {database!r} could" in err
            out, _, code = run("show", "near")
            assert code == 0
            assert f"database {database!r}  unavailable: " in out
            found, code = run_json("show", "far")
            assert (code, list(found["away"])) == (2, [database])
            assert "never granted" not in run("show", "far")[0]
        out, _, code = run("list", "--alias", "far")
        assert (out, code) == ("", 2)


class TestShow:
    def test_a_held_lock(self):
        with lock("invoice:1") as lease:
            out, _, code = run("show", "invoice:1")
            found, _ = run_json("show", "invoice:1")
        assert code == 0
        assert f"held by {lease.holder}" in out
        assert f"newest token {lease.token}" in out
        assert lease.owner_id in out
        assert found["services"][0]["holder"]["owner_id"] == lease.owner_id
        assert found["fences"][0]["token"] == lease.token
        assert found["entries"][0]["state"] == "held"

    def test_a_free_lock(self):
        with lock("invoice:1"):
            pass
        out, _, code = run("show", "invoice:1")
        assert code == 1
        assert "not held" in out
        assert "newest token 1" in out
        assert "never granted" in run("show", "invoice:2")[0]

    def test_what_happened(self):
        now = timezone.now()
        event = {"name": "invoice:1", "alias": "default", "holder": "web-3, pid 8"}
        LockEvent.objects.create(
            **event, kind="granted", token=4, times=1, happened_at=now - timedelta(hours=1)
        )
        LockEvent.objects.create(
            **event, kind="rejected", token=4, times=3, happened_at=now, note="tests.Invoice pk=1"
        )
        newest, oldest = run("show", "invoice:1")[0].splitlines()[-2:]
        assert newest.startswith("history")
        assert newest.endswith(" rejected 3 times, token 4, web-3, pid 8: tests.Invoice pk=1")
        assert oldest.endswith(" granted, token 4, web-3, pid 8")
        found, _ = run_json("show", "invoice:1")
        assert [each["times"] for each in found["history"]] == [3, 1]
        assert datetime.fromisoformat(found["history"][0]["at"]) == now

    def test_a_name_that_has_permits_alone(self, holders):
        for number in (10, 2):
            holder = holders.permit("gpu", number, 12).holder
        out, _, code = run("show", "gpu")
        found, _ = run_json("show", "gpu")
        assert code == 0
        assert out.startswith("There is no lock 'gpu', but it has permits.\n")
        for line in (
            "permits          2 of 12 used, alias 'default'\n",
            f"  permit 2       held by {holder}\n  permit 10      held by {holder}\n",
            "  free           1, 3-9, 11-12\n",
        ):
            assert line in out
        assert "never granted" not in out
        (permits,) = found["permits"]
        assert list(permits["held"]) == ["gpu [permit 2]", "gpu [permit 10]"]
        assert (permits["limit"], permits["free"][:2]) == (12, [1, 3])
        assert "kind                permit 2 of 12\n" in run("show", "gpu [permit 2]")[0]
        holders.leave()
        out, _, code = run("show", "gpu")
        assert code == 1
        assert "permits          not held; granted so far: 2, 10\n" in out

    def test_permits_of_an_unavailable_service(self, settings, make_redis):
        server = make_redis()
        settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, "LOCATION": server.url}}
        lease = lock("gpu", limit=2).acquire()
        server.kill()
        out, _, code = run("show", "gpu")
        assert "permits          1 of 2 used, alias 'default'\n" in out
        assert f"held by {lease.holder}" in out
        assert "could not look up" in out
        assert code == 0
        service("default").drop_all()

    def test_readers(self, holders):
        for _ in range(2):
            holders.acquire(lock("catalog", shared=True))
        out, _, code = run("show", "catalog")
        assert code == 0
        assert "shared by 2: " in out
        assert out.count("kind                reader\n") == 2

    def test_an_invalid_name(self):
        assert run("show", "")[1:] == ("A lock name can't be empty.", 2)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestRelease:
    def test_asks_and_does_it(self):
        lease = lock("invoice:1").acquire()
        out, _, code = run("release", "invoice:1", stdin=Terminal("y\n"))
        assert code == 0
        assert f"is held by {lease.holder}." in out
        assert "The fence is raised first" in out
        assert "Release it by force? [y/N]\n" in out
        assert out.endswith("The holder's writes are rejected: the fence is at 2.\n")
        assert Fence.objects.get().token == 2
        assert not HeldLock.objects.exists()
        with pytest.raises(LeaseLost, match=f"by {current_user()}"):
            lease.renew()

    @pytest.mark.parametrize("answer", ["n\n", "\n", "", "yesterday\n"])
    def test_does_nothing_without_a_yes(self, answer):
        with lock("invoice:1"):
            _, err, code = run("release", "invoice:1", stdin=Terminal(answer))
            assert (err, code) == ("Nothing was released.", 1)
        assert Fence.objects.get().token == 1

    def test_does_nothing_without_a_terminal(self):
        with lock("invoice:1"):
            _, err, code = run("release", "invoice:1", stdin=io.StringIO("y\n"))
            assert "Not a terminal" in err
            assert code == 1
            assert run("release", "invoice:1", "--format", "json")[2] == 2
        assert Fence.objects.get().token == 1

    def test_for_scripts(self):
        lease = lock("invoice:1").acquire()
        found, code = run_json("release", "invoice:1", "--yes", "--by", "a script")
        assert code == 0
        assert (found["outcome"], found["done"], found["token"]) == ("freed", True, 2)
        assert found["holder"]["owner_id"] == lease.owner_id
        with pytest.raises(LeaseLost, match="by a script"):
            lease.renew()
        found, code = run_json("release", "invoice:1", "--yes")
        assert (found["outcome"], found["done"], code) == ("not held", False, 1)

    def test_a_permit(self, holders):
        kept, lease = (holders.permit("gpu", number, 3) for number in (1, 2))
        out, _, code = run("release", "gpu", "--yes")
        assert code == 1
        assert out == (
            "Lock 'gpu' itself isn't held, but permits of it are: 'gpu [permit 1]', "
            "'gpu [permit 2]'. Name the one to release: "
            "manage.py fencedlock release 'gpu [permit 1]'\n"
        )
        assert (kept.verify(), lease.verify()) == (True, True)
        assert run("release", "gpu [permit 2]", "--yes")[2] == 0
        assert (kept.verify(), lease.verify()) == (True, False)
        holders.leave()
        out, _, code = run("release", "gpu", "--yes")
        assert (out, code) == ("Lock 'gpu' is free: there is nothing to release.\n", 1)

    def test_readers(self, holders):
        leases = [holders.acquire(lock("catalog", shared=True)) for _ in range(3)]
        owner = leases[0].owner_id
        out = run("release", "catalog", "--owner", owner, stdin=Terminal("n\n"))[0]
        assert "is held by 3 readers.\nThis takes it from 1 of them:\n" in out
        assert f", owner id {owner}\nThe fence is raised first: transactions under the" in out
        assert run("release", "catalog", "--owner", owner, "--yes")[2] == 0
        assert [each.verify() for each in leases] == [False, True, True]
        out, _, code = run("release", "catalog", stdin=Terminal("y\n"))
        assert code == 0
        assert "is held by 2 readers.\nThis takes it from all of them:\n" in out
        assert all(f", owner id {each.owner_id}\n" in out for each in leases[1:])
        assert "Further readers that lost it: 1." in out
        assert not any(each.verify() for each in leases)
        leases = [holders.acquire(lock("catalog", shared=True))]
        out = run("release", "catalog", stdin=Terminal("n\n"))[0]
        assert "is held by one reader.\n  " in out

    def test_only_the_holder_that_was_named_or_shown_loses_it(self):
        with lock("invoice:1"):
            out, _, code = run("release", "invoice:1", "--owner", "0" * 32, "--yes")
            assert code == 1
            assert "has changed hands" in out
        former, kept = lock("invoice:1").acquire(), []

        class Slow(Terminal):
            def readline(self):
                former.release()
                with ThreadPoolExecutor(1) as another:
                    kept.append(another.submit(lock("invoice:1").acquire).result())
                    another.submit(connections.close_all)
                return "y\n"

        out, _, code = run("release", "invoice:1", stdin=Slow())
        assert code == 1
        assert "has changed hands" in out
        assert Fence.objects.get().token == 3

    def test_several_aliases(self, settings, redis_server):
        settings.FENCEDLOCK = {"default": {}, "jobs": on_redis(redis_server)}
        with lock("x") as kept:
            lease = lock("x", backend="jobs", fenced=False).acquire()
            _, err, code = run("release", "x", "--yes")
            assert code == 2
            assert "several aliases" in err
            assert run("release", "x", "--yes", "--alias", "jobs")[2] == 0
            assert not lease.verify()
            assert kept.verify()

    @pytest.mark.slow
    def test_an_open_transaction(self):
        with lock("x") as lease:
            with sqlite_written_to():
                _, err, code = run("release", "x", "--yes")
            assert code == 2
            assert "ReleaseBlocked: " in err
            assert "its fence in 'default' can't be raised" in err
            assert lease.verify()

    @pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
    def test_how_to_end_a_session(self, settings):
        settings.FENCEDLOCK = {"default": {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"}}
        lease = lock("x").acquire()
        pid = HeldLock.objects.using("postgres").get(name="x").session_pid
        assert f", server session {pid}\n" in run("show", "x")[0]
        assert run_json("show", "x")[0]["services"][0]["holder"]["session_pid"] == pid
        with as_in_another_process():
            out, _, code = run("release", "x", stdin=Terminal("y\n"))
        assert code == 0
        assert "releases it at its next renewal" in out
        assert out.count(f"SELECT pg_terminate_backend({pid})") == 2
        with pytest.raises(LeaseLost, match="released by force"):
            lease.renew()


class TestDoctor:
    @pytest.fixture(autouse=True)
    def on_a_busy_machine(self, monkeypatch, settings):
        monkeypatch.setattr(doctor, "SLOW", 5.0)
        monkeypatch.setattr(checks, "_celery_apps", list)
        # The doctor examines every database that may have fenced tables.
        settings.DATABASE_ROUTERS = [Only("default")]

    def test_exit_codes(self, settings, redis_server, make_redis):
        out, _, code = run("doctor")
        assert (code, out.splitlines()[-1]) == (0, "No problems found.")
        with redis_server.configured(maxmemory="100mb", maxmemory_policy="allkeys-lru"):
            settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, "LOCATION": redis_server.url}}
            out, _, code = run("doctor")
        assert (code, out.splitlines()[-1]) == (1, "There are warnings.")
        assert "\n           -> Set maxmemory-policy to noeviction" in out
        server = make_redis()
        server.kill()
        settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, "LOCATION": server.url}}
        out, _, code = run("doctor")
        assert (code, out.splitlines()[-1]) == (2, "There are errors.")
        assert out.count("Connection refused") == 1

    def test_for_scripts_and_one_alias(self, settings):
        settings.FENCEDLOCK = {"default": {}, "other": {"TTL": 20}}
        found, code = run_json("doctor", "--alias", "other", "--timeout", "30")
        assert code == 0
        assert found["level"] == "note"
        assert [each["about"] for each in found["reports"]] == [
            *("settings, models and tasks", "database 'default'", "alias 'other' (database)")
        ]
        assert found["reports"][2]["problems"][0]["message"].startswith("Round trip")

    def test_invalid_settings_are_reported(self, settings):
        settings.FENCEDLOCK = {"default": {"TTL": -1}}
        out, _, code = run("doctor")
        assert code == 2
        assert "E003" in out
        message = "--timeout is 0.0; it has to be more than zero and finite."
        assert run("doctor", "--timeout", "0")[1:] == (message, 2)


class TestResync:
    def test_a_dry_run_and_a_real_one(self):
        row = written(Invoice)
        restored()
        out, _, code = run("resync", "tests.Invoice", "--dry-run", "-v", "2")
        assert code == 1
        assert "tests.Invoice in 'default': 1 rows with a token, 1 fences would be raised" in out
        assert f"'{row.fencing.name()}' above 5" in out
        out, _, code = run("resync", "tests.Invoice")
        assert code == 0
        assert "1 fences raised" in out
        assert Fence.objects.get().token == 6
        found, code = run_json("resync", "--dry-run")
        assert code == 0
        assert {each["model"] for each in found["models"]} > {"tests.Invoice", "tests.Meter"}

    def test_a_fence_that_is_not_raised(self, monkeypatch):
        row = written(Invoice)
        restored()
        monkeypatch.setattr(resync, "_raise", lambda sessions, low: iter(low))
        _, err, code = run("resync", "tests.Invoice")
        assert code == 2
        assert f"The fence of '{row.fencing.name()}' was not raised" in err

    def test_models_that_are_not_fenced(self):
        _, why, code = run("resync", "tests.Account")
        assert why.startswith("tests.Account isn't a fenced model. Name models that ")
        assert code == 2
        assert run("resync", "tests.Nothing")[2] == 2
        assert run("resync", "nothing")[2] == 2

    def test_a_model_without_a_table(self):
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER TABLE tests_meter RENAME TO tests_away")
            try:
                _, err, code = run("resync", "tests.Meter")
            finally:
                cursor.execute("ALTER TABLE tests_away RENAME TO tests_meter")
        assert code == 2
        assert "no such table: tests_meter" in err


@pytest.mark.slow
def test_only_terminals_get_colours(child_environment, settings):
    environment = {key: value for key, value in child_environment().items() if key != "NO_COLOR"}

    def on_terminal(*arguments):
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "rb", 0) as terminal:
            done = subprocess.run(
                [sys.executable, "-m", "django", "fencedlock", *arguments],
                env={**environment, "TERM": "xterm"},
                stdout=theirs,
                stderr=subprocess.PIPE,
                timeout=60,
            )
            # The output is short enough for the terminal's buffer.
            text = terminal.read(65536).decode()
            os.close(theirs)
        assert done.returncode == 0, done.stderr
        return text

    with lock("invoice:1"):
        assert "\x1b[32;1mheld\x1b[0m" in on_terminal("list")
        for plain in (["list", "--no-color"], ["list", "--format", "json"]):
            assert "\x1b" not in on_terminal(*plain)
    settings.DATABASE_ROUTERS = [Only("default")]
    assert "\x1b" in run("doctor", "--force-color")[0]


@pytest.mark.slow
def test_the_page_has_every_action_state_and_level():
    page = REFERENCE / "operations.md"
    out = run_python("-m", "example_project", "manage", "fencedlock", "--help").stdout
    actions = {row[0] for row in _table(page, "| action | what it does | exit code |")}
    assert actions == {"list", "show", "release", "trim", "doctor", "resync"}
    assert all(f"\n    {action}" in out for action in actions), out
    states = _table(page, "| state | the lock service says | the registry says |")
    assert {row[0] for row in states} == {str(state) for state in State}
    levels = {row[0] for row in _table(page, "| level | meaning |")}
    assert levels == {level.name.lower() for level in Level}


def test_columns_are_aligned():
    rows = [("invoice:1", "held", "x"), ("cafe", "lost", "y")]
    plain = ["NAME       STATE  H", "invoice:1  held   x", "cafe       lost   y"]
    assert table(("NAME", "STATE", "H"), rows) == plain
    painted = table(("NAME", "STATE", "H"), rows, lambda word: word.replace("lost", "<lost>"))
    assert painted == [line.replace("lost", "<lost>") for line in plain]
    assert table(("NAME",), [("in\nvoice\x1b[31m\u202e",)])[1] == "in\\nvoice\\x1b[31m\\u202e"


def test_durations():
    seconds = (0, 59.94, 61, 3725, 90000, -5)
    words = ["0.0 s", "59.9 s", "1 min 1 s", "1 h 2 min", "1 d 1 h", "-5.0 s"]
    assert [duration(each) for each in seconds] == words
