"""`manage.py fencedlock doctor` on real servers."""

import re
import time
from contextlib import closing
from functools import partial

import pytest
import redis
from django.core.management import call_command
from django.db import connections

from django_fencedlock import checks, conf, problems
from django_fencedlock.backends.database import DatabaseBackend
from django_fencedlock.backends.interface import Granted, Held
from django_fencedlock.core.runtime import clock
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.ops import doctor
from django_fencedlock.ops.registry import portrait
from django_fencedlock.problems import Level, Problem
from django_fencedlock.storage.tables import ForcedRelease, LockEvent, MessageRecord, PendingRun
from django_fencedlock.test import hold_lock
from tests.backends import DATABASE, POSTGRES, REDIS
from tests.servers.process import wait_until
from tests.test_write_paths import Everything

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
ON_MARIADB = pytest.mark.django_db(transaction=True, databases=["default", "mariadb"])


@pytest.fixture(autouse=True)
def no_tasks_of_other_tests(monkeypatch):
    monkeypatch.setattr(checks, "_celery_apps", list)


@pytest.fixture
def server(make_postgres):
    return make_postgres()


def examine(settings, **terms):
    settings.FENCEDLOCK = {"default": terms}
    database = terms.get("FENCE_DATABASE", "default")
    settings.DATABASE_ROUTERS = [Everything(database), Only(database)]
    return {report.about: report for report in doctor.examine()}


def told(reports, level=None):
    found = [each for report in reports.values() for each in report.problems]
    return "\n".join(
        f"{each.id}: {each.message} -> {each.hint}" for each in found if level in (None, each.level)
    )


def worst(reports):
    return max(report.level for report in reports.values())


HEALTHY = [
    (DATABASE, "default"),
    (DATABASE, "postgres"),
    (POSTGRES, "postgres"),
    (REDIS, "default"),
    pytest.param(DATABASE, "mariadb", marks=ON_MARIADB),
]


@pytest.mark.parametrize(("backend", "database"), HEALTHY)
def test_a_healthy_alias_is_reported_and_only_its_fences_remain(
    settings, redis_server, postgres, backend, database, monkeypatch
):
    monkeypatch.setattr(doctor, "SLOW", 5.0)
    redis_server.empty()
    sessions = sessions_of_locks(postgres)
    location = {"LOCATION": redis_server.url} if backend == REDIS else {}
    for _ in range(2):
        reports = examine(settings, BACKEND=backend, FENCE_DATABASE=database, **location)
        words = told(reports, Level.OK)
        steps = ["Round trip", "Acquires a lock", "second owner", "renews", "permit"]
        for step in (*steps, "two readers", "Hands over", "releases"):
            assert step in words, told(reports)
        assert told(reports, Level.ERROR) == ""
        # The servers of the tests keep nothing safe; and one model of theirs has a bad collation.
        for line in told(reports, Level.WARNING).splitlines():
            assert "fsync" in line or "innodb_flush_log_at_trx_commit" in line or "W026" in line
    assert list(HeldLock.objects.using(database)) == []
    names = Fence.objects.using(database).order_by("name").values_list("name", flat=True)
    mine = "django_fencedlock.doctor:default"
    assert sorted(names) == [mine, f"{mine} [permit 1]", f"{mine}:readers"]
    keys = redis_server.execute("KEYS", "*")
    assert [key for key in keys if ":seq" not in key] == []
    wait_until(lambda: sessions_of_locks(postgres) <= sessions, "the doctor's sessions to end")
    assert not portrait("django_fencedlock.doctor:default").is_held


@pytest.mark.parametrize("backend", [DATABASE, POSTGRES])
def test_the_two_owners_share_no_session(settings, postgres, backend):
    """Else this process would refuse the second, and the server not be asked."""
    settings.FENCEDLOCK = {"default": {"BACKEND": backend, "FENCE_DATABASE": "postgres"}}
    config = conf.config("default")
    with (
        closing(doctor.TestOwner(config)) as first,
        closing(doctor.TestOwner(doctor._apart(config))) as second,
    ):
        assert first.acquire()
        with postgres.statements() as statements:
            assert not second.acquire()
        assert any("django_fencedlock_fence" in each for each in statements)


def test_broken_settings_end_the_examination(settings):
    reports = examine(settings, TTL=-1)
    assert list(reports) == ["settings, models and tasks"]
    assert "E003" in told(reports, Level.ERROR)


@pytest.mark.parametrize(
    ("found", "level"), [("E030", Level.ERROR), ("W030", Level.WARNING), ("I030", Level.NOTE)]
)
def test_it_reports_what_check_finds(settings, monkeypatch, found, level):
    settings.DATABASE_ROUTERS = [Only("default")]
    problem = Problem(found, "a task", "Change it.")
    monkeypatch.setattr(checks, "_task_problems", lambda: [problem])
    report = next(doctor.examine())
    assert report.problems == [problem]
    assert report.level is level


class TestServices:
    @pytest.mark.parametrize("hangs", [False, True])
    def test_an_unavailable_service(self, settings, redis_server, make_proxy, hangs):
        proxy = make_proxy(redis_server.host, redis_server.port)
        proxy.black_hole() if hangs else proxy.retarget("127.0.0.1", 1)
        url, began = f"redis://{proxy.host}:{proxy.port}/0", time.monotonic()
        reports = examine(settings, BACKEND=REDIS, LOCATION=url, OPTIONS={"TIMEOUT": 1})
        assert time.monotonic() - began < 40
        assert "Start the" in told(reports, Level.ERROR)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("limit", "words", "level"),
        [(1.0, "took too long", Level.ERROR), (30, "Round trip 3", Level.WARNING)],
    )
    def test_a_slow_service_has_a_limit(self, settings, monkeypatch, limit, words, level):
        settings.DATABASE_ROUTERS = [Only("default")]
        monkeypatch.setattr(f"{__name__}.Slow.delay", 0.3)
        settings.FENCEDLOCK = {"default": {"BACKEND": f"{__name__}.Slow"}}
        began = time.monotonic()
        reports = {each.about: each for each in doctor.examine(limit=limit)}
        assert time.monotonic() - began < limit + 20
        assert words in told(reports, level)

    @pytest.mark.parametrize(
        ("backend", "message"),
        [
            ("ForAnybody", "Two owners hold one lock"),
            ("OneToken", "tokens must rise"),
            ("PermitsForAnybody", "Two owners hold one permit"),
            ("ReadersBesideWriters", "A reader (shared=True) got a lock that is held exclusively"),
            ("OneReader", "Two readers (shared=True) can't share a free lock"),
        ],
    )
    def test_a_service_that_does_not_exclude(self, settings, backend, message):
        reports = examine(settings, BACKEND=f"{__name__}.{backend}")
        assert message in told(reports, Level.ERROR)

    def test_another_doctor(self, settings, monkeypatch):
        monkeypatch.setattr(doctor, "OTHER_DOCTOR_TIMEOUT", 0.3)
        settings.FENCEDLOCK = {"default": {}}
        with hold_lock("django_fencedlock.doctor:default"):
            reports = examine(settings)
            assert "is held by" in told(reports, Level.WARNING)
            assert worst(reports) is Level.WARNING
        assert worst(examine(settings)) <= Level.NOTE


class TestRedis:
    def test_a_failed_save(self, settings, make_redis):
        server = make_redis("--save", "900 1", "--appendonly", "yes", "--dbfilename", "x")
        server.execute("SET", "a", "b")
        server.directory.joinpath("x").mkdir()
        server.execute("BGSAVE")
        info = partial(server.info, "persistence")
        wait_until(lambda: info()["rdb_last_bgsave_status"] != "ok", "the error")
        reports = examine(settings, BACKEND=REDIS, LOCATION=server.url)
        assert "rdb_last_bgsave_status is err" in told(reports, Level.WARNING)
        assert "append-only" in told(reports, Level.OK)

    @pytest.mark.slow
    def test_a_cluster_by_one_of_its_nodes(self, settings, make_redis, monkeypatch):
        monkeypatch.setattr(doctor, "SLOW", 5.0)
        server = make_redis("--cluster-enabled", "yes")
        server.execute("CLUSTER", "ADDSLOTS", *range(16384))
        wait_until(lambda: "state:ok" in str(server.execute("CLUSTER", "INFO")), "the cluster")
        reports = examine(settings, BACKEND=REDIS, LOCATION=server.url)
        assert "redis.RedisCluster" in told(reports, Level.ERROR)

        def cluster():
            return redis.RedisCluster(host=server.host, port=server.port)

        monkeypatch.setattr(doctor, "cluster_of_test", cluster, raising=False)
        factory = {"CLIENT_FACTORY": "django_fencedlock.ops.doctor.cluster_of_test"}
        reports = examine(settings, BACKEND=REDIS, OPTIONS=factory)
        assert worst(reports) == Level.NOTE, told(reports)
        assert f"(node {server.host}:{server.port}): its clock" in told(reports)
        assert "Hands over" in told(reports)

    def test_valkey_is_named(self, settings, valkey_server):
        reports = examine(settings, BACKEND=REDIS, LOCATION=valkey_server.url)
        assert "Valkey" in told(reports, Level.OK)


class TestDatabases:
    @pytest.mark.parametrize("hangs", [False, True])
    def test_an_unavailable_database(
        self, settings, make_alias, make_proxy, monkeypatch, hangs, server
    ):
        proxy = make_proxy(server.host, server.port)
        alias = make_alias(server.django(by=proxy))
        connections[alias].close()
        monkeypatch.setattr(doctor, "QUERY_TIMEOUT", 1.0)
        proxy.black_hole() if hangs else proxy.retarget("127.0.0.1", 1)
        began = time.monotonic()
        reports = examine(settings, FENCE_DATABASE=alias)
        assert time.monotonic() - began < 40
        assert "Unavailable" in told(reports, Level.ERROR)
        assert "Not tried" in told(reports, Level.ERROR)

    def test_durability_of_postgres(self, settings, make_postgres, make_alias):
        careless = make_alias(make_postgres(full_page_writes="off").django())
        reports = examine(settings, FENCE_DATABASE=careless)
        assert "fsync is off" in told(reports, Level.WARNING)
        assert "full_page_writes is off" in told(reports, Level.WARNING)
        settings.DATABASE_ROUTERS = []
        careful = make_alias(make_postgres(fsync="on").django())
        assert "off" not in told(examine(settings, FENCE_DATABASE=careful))

    @ON_MARIADB
    def test_durability_of_mariadb(self, settings, mariadb):
        with connections["mariadb"].cursor() as cursor:
            cursor.execute("SELECT @@innodb_flush_log_at_trx_commit")
            (before,) = cursor.fetchone()
            cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        try:
            reports = examine(settings, FENCE_DATABASE="mariadb")
        finally:
            with connections["mariadb"].cursor() as cursor:
                cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = %s", [before])
        assert "innodb_flush_log_at_trx_commit is 2" in told(reports, Level.WARNING)

    def test_missing_migrations(self, settings, make_alias, server):
        alias = make_alias(server.django())
        with connections[alias].cursor() as cursor:
            cursor.execute("DELETE FROM django_migrations WHERE app = 'django_fencedlock'")
        reports = examine(settings, FENCE_DATABASE=alias)
        assert "aren't applied: 0001_initial" in told(reports, Level.ERROR)
        assert f"migrate django_fencedlock --database {alias}" in told(reports, Level.ERROR)
        assert "Not tried" in told(reports, Level.ERROR)

    def test_tables_that_a_router_excludes(self, settings, make_postgres, make_alias):
        settings.DATABASE_ROUTERS = [Only("default")]
        alias = make_alias(make_postgres().django())
        found = told(examine(settings, FENCE_DATABASE=alias), Level.ERROR)
        assert "django_fencedlock_fence" in found
        assert "router keeps the tables out" in found
        settings.DATABASE_ROUTERS = [Only(alias, app=doctor.APP)]
        for target, fake in (("zero", True), (None, False)):
            only = [target] if target else []
            call_command("migrate", doctor.APP, *only, database=alias, fake=fake, verbosity=0)
        assert told(examine(settings, FENCE_DATABASE=alias), Level.ERROR) == ""

    def test_missing_privileges(self, settings, make_alias, server):
        alias = make_alias(server.django())
        with connections[alias].cursor() as cursor:
            cursor.execute("CREATE ROLE clerk LOGIN")
            cursor.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO clerk")
            cursor.execute("GRANT INSERT, UPDATE ON django_fencedlock_fence TO clerk")
        connections[alias].close()
        connections[alias].settings_dict["USER"] = "clerk"
        reports = examine(settings, FENCE_DATABASE=alias)
        found = told(reports, Level.ERROR)
        assert "'clerk' lacks INSERT, UPDATE, DELETE on django_fencedlock_heldlock" in found
        assert 'GRANT INSERT, UPDATE, DELETE ON django_fencedlock_heldlock TO "clerk";' in found
        assert "on django_fencedlock_fence" not in found
        lacking = told(reports, Level.WARNING)
        for model in (ForcedRelease, LockEvent, MessageRecord, PendingRun):
            assert f" on {model._meta.db_table}; what uses this table fails" in lacking
        remedies = re.findall("GRANT .*;", found + lacking)
        with server.connect() as connection:
            for remedy in remedies:
                connection.execute(remedy)
        connections[alias].close()
        assert "clerk" not in told(examine(settings, FENCE_DATABASE=alias))

    def test_fenced_tables_beside_fences(self, settings, make_alias, server):
        """Rows with mode="high_water" may be in databases that have no fences."""
        alias = make_alias(server.django())
        settings.DATABASE_ROUTERS = [Only("default", alias)]

        def found(*aliases):
            reports = {report.about: report for report in doctor.examine(aliases)}
            rows = f"database {alias!r} (only fenced tables)"
            return told({rows: reports[rows]}) if rows in reports else None

        assert "match the models and the migrations" in found()
        with connections[alias].cursor() as cursor:
            cursor.execute("ALTER TABLE tests_invoice DROP CONSTRAINT tests_invoice_fence_rejected")
        assert "W024" in found()
        assert found("default") is None
        server.kill()
        assert "W: Unavailable" in found()
        settings.DATABASE_ROUTERS = [Only("default")]
        assert found() is None

    def test_a_table_that_another_session_has_locked(self, postgres):
        def look():
            return list(doctor._database("postgres", 20))

        database = connections["postgres"].settings_dict["NAME"]
        with postgres.connect(database, autocommit=False) as other:
            other.execute("LOCK TABLE django_fencedlock_heldlock IN SHARE MODE")
            (found,) = [each for each in look() if "django_fencedlock_heldlock" in each.message]
        assert found.level is Level.WARNING
        assert "has table django_fencedlock_heldlock locked" in found.message
        assert not [each for each in look() if "has table" in each.message]

    def test_clocks(self, settings, monkeypatch):
        monkeypatch.setattr(problems, "CLOCK_TOLERANCE", -1.0)
        assert "with NTP" in told(examine(settings), Level.WARNING)

    def test_a_pooler(self, settings, make_alias, make_pgbouncer, server):
        direct = make_alias(server.django())
        pooler = make_pgbouncer(server)
        entry = server.django(by=pooler)
        pooled = make_alias({**entry, "DISABLE_SERVER_SIDE_CURSORS": True})
        reports = examine(settings, FENCE_DATABASE=pooled)
        assert "goes through a pooler" in told(reports, Level.NOTE)
        assert told(reports, Level.ERROR) == ""
        reports = examine(settings, BACKEND=POSTGRES, FENCE_DATABASE=pooled)
        assert "E011" in told(reports, Level.ERROR)
        assert "pooler" not in told(examine(settings, FENCE_DATABASE=direct))


def sessions_of_locks(postgres):
    ((count,),) = postgres.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'fencedlock %'"
    )
    return count


class Only:
    """Has tables, of one app or of all, in some databases alone."""

    def __init__(self, *databases, app=None):
        self.databases = databases
        self.app = app

    def allow_migrate(self, db, app_label, **hints):
        return db in self.databases and self.app in (None, app_label)


class Slow(DatabaseBackend):
    delay = 0.0

    def holders(self, names):
        time.sleep(self.delay)
        return super().holders(names)


class ForAnybody(DatabaseBackend):
    """Grants whatever is asked for, as two servers behind one address do."""

    tokens = 0

    def acquire(self, claim, wait):
        ForAnybody.tokens += 1
        return Granted(ForAnybody.tokens, clock())


class PermitsForAnybody(DatabaseBackend):
    def acquire(self, claim, wait):
        return Granted(1, clock()) if claim.permits else super().acquire(claim, wait)


class ReadersBesideWriters(DatabaseBackend):
    def acquire(self, claim, wait):
        return Granted(1, clock()) if claim.shared else super().acquire(claim, wait)


class OneReader(DatabaseBackend):
    def acquire(self, claim, wait):
        return super().acquire(claim._replace(shared=False), wait)


class OneToken(DatabaseBackend):
    """Gives the same token to all."""

    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        return answer if isinstance(answer, Held) else Granted(1, answer.since)
