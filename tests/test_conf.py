"""The settings and the system checks over them."""

import re
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError

from django_fencedlock import checks, conf, lock
from django_fencedlock.checks import check_services, check_settings
from django_fencedlock.exceptions import SettingsError
from django_fencedlock.storage.connections import ConnectionPool
from tests.backends import DATABASE, DYNAMODB, POSTGRES, REDIS, REDLOCK
from tests.failing import raising
from tests.scripts import run_python

PACKAGE = "django_fencedlock.backends"


def found(messages=None):
    messages = check_settings() if messages is None else messages
    return {
        message.id.removeprefix("django_fencedlock."): f"{message.msg} {message.hint}"
        for message in messages
    }


def test_no_setting_at_all_means_the_database_backend_on_default(settings):
    settings.FENCEDLOCK = None
    config = conf.config()
    assert config.backend == f"{PACKAGE}.database.DatabaseBackend"
    assert (config.ttl, config.blocking_timeout, config.fence_database) == (30, 10, "default")
    assert found() == {}


def test_durations_may_be_timedeltas_and_are_read_again_when_they_change(settings):
    settings.FENCEDLOCK = {"default": {"TTL": timedelta(minutes=1), "BLOCKING_TIMEOUT": 0}}
    assert (conf.config().ttl, conf.config().blocking_timeout) == (60, 0)
    settings.FENCEDLOCK = {"default": {"TTL": 6}}
    assert conf.config().ttl == 6


@pytest.mark.parametrize(
    ("given", "found_id", "words"),
    [
        ({"default": {"TLL": 3}}, "E002", "unknown key 'TLL'.*Did you mean 'TTL'"),
        ({"default": {}, "a" * 101: {}}, "E002", "'a+' has 101 characters.*at most 100"),
        ({"default": {"BACKEND": 3}}, "E002", "is 3.*str"),
        ({"default": {"FENCE_DATABASE": []}}, "E002", r"is \[\].*str"),
        ({"default": {"TTL": "30"}}, "E003", "'TTL'.*'30'.*number of seconds or a timedelta"),
        ({"default": {"TTL": 0}}, "E003", "0; it has to be more than zero"),
        ({"default": {"TTL": True}}, "E003", "True"),
        ({"default": {"TTL": float("inf")}}, "E003", "inf.*finite"),
        ({"default": {"BLOCKING_TIMEOUT": -1}}, "E003", "-1.*zero or more, or None for no limit"),
        ({"default": {"BLOCKING_TIMEOUT": "9"}}, "E003", "'9'.*timedelta, or None for no limit"),
        ({"default": {"BACKEND": "no.such.Backend"}}, "E004", "no.such.Backend.*dotted path"),
        ({"default": {"BACKEND": "datetime.datetime"}}, "E004", "isn't a lock backend"),
        ({"default": {"FENCE_DATABASE": "other"}}, "E006", "'other'.*Use one of 'default'"),
        ({"default": {"LOCATION": "localhost"}}, "E007", "Leave it out"),
        ({"default": {"OPTIONS": []}}, "E002", r"\[\].*dict"),
        ({"default": {"OPTIONS": {"TIMOUT": 3}}}, "E008", "'TIMOUT'.*Did you mean 'TIMEOUT'"),
        ({"default": {"OPTIONS": {"TIMEOUT": "x"}}}, "E003", "TIMEOUT.*'x'"),
        ({"default": {"OPTIONS": {"TIMEOUT": 0}}}, "E003", "TIMEOUT.* more than zero"),
    ],
)
def test_a_slip_in_the_settings_is_an_error_with_its_remedy(settings, given, found_id, words):
    settings.FENCEDLOCK = given
    errors = found()
    assert list(errors) == [found_id]
    assert re.search(words, errors[found_id]), errors[found_id]


SHAPE = 'FENCEDLOCK must be a dict of aliases, like CACHES. Wrap {} in {{"default": {{...}}}}.'
ALIAS = "FENCEDLOCK['default']"


@pytest.mark.parametrize(
    ("given", "found_id", "text"),
    [
        ("redis://", "E001", SHAPE.format("the settings of an alias")),
        ({"BACKEND": "x", "LOCATION": "x"}, "E001", SHAPE.format("BACKEND and LOCATION")),
        ({"BACKEND": "x", "TIMEOUT": 3}, "E001", SHAPE.format("BACKEND")),
        (
            {"default": "redis://"},
            "E001",
            f'{ALIAS} is \'redis://\'. Make it a dict, such as {{"BACKEND": ..., "TTL": 30}}.',
        ),
        (
            {"redis": {}},
            "E001",
            "FENCEDLOCK has no alias 'default'; it has 'redis'. "
            "Add it: a lock without backend= uses it.",
        ),
        (
            {"default": {"TIMEOUT": 30}},
            "E002",
            f"{ALIAS} has an unknown key 'TIMEOUT'. Use TTL for the expiry, BLOCKING_TIMEOUT for "
            "how long to wait for a lock, or OPTIONS['TIMEOUT'] for the limit of a request.",
        ),
        (
            {"default": {"LOCATOIN": "x"}},
            "E002",
            f"{ALIAS} has an unknown key 'LOCATOIN'. Did you mean 'LOCATION'?",
        ),
        (
            {"default": {"x": 1}},
            "E002",
            f"{ALIAS} has an unknown key 'x'. Known keys: BACKEND, BLOCKING_TIMEOUT, "
            "FENCE_DATABASE, KEY_PREFIX, LOCATION, OPTIONS and 1 more.",
        ),
        (
            {"default": {"BACKEND": "redis"}},
            "E004",
            f"{ALIAS}['BACKEND'] is 'redis', which can't be used. Did you mean '{REDIS}'?",
        ),
        *(
            (
                {"default": {"BACKEND": given}},
                "E004",
                f"{ALIAS}['BACKEND'] is {given!r}, which can't be used. Did you mean {meant!r}?",
            )
            for given, meant in [
                ("postgresql", POSTGRES),
                ("Database", DATABASE),
                (f"{PACKAGE}.redis", REDIS),
                (f"{PACKAGE}.postgres", POSTGRES),
                (DATABASE.replace("Database", "Databse"), DATABASE),
                ("django.core.cache.backends.redis.RedisCache", REDIS),
            ]
        ),
        (
            {"default": {"BACKEND": "mine"}},
            "E004",
            f"{ALIAS}['BACKEND'] is 'mine', which can't be used: mine doesn't look like a module "
            f"path. Use a dotted path, such as '{DATABASE}'.",
        ),
        *(
            (
                {"default": {"LOCATION": f"{scheme}://x"}},
                "E007",
                f"{ALIAS}['LOCATION'] is '{scheme}://x', which this backend can't use. Add "
                f"'BACKEND': '{REDIS}'.",
            )
            for scheme in ("redis", "rediss+sentinel", "unix")
        ),
        (
            {"default": {"BLOCKING_TIMEOUT": None}},
            "W010",
            f"{ALIAS}['BLOCKING_TIMEOUT'] is None: a lock without blocking_timeout= waits for "
            "ever, in web requests too. Set seconds here, and blocking_timeout=None where a wait "
            "may have no limit.",
        ),
    ],
)
def test_each_message_says_what_to_do(settings, given, found_id, text):
    settings.FENCEDLOCK = given
    assert found()[found_id] == text
    assert len(text) <= 200


@pytest.mark.parametrize("given", ["redis://", {"default": {"TTL": 0}}, {"locks": {}}])
def test_a_lock_with_broken_settings_says_the_same_as_the_check(settings, given):
    settings.FENCEDLOCK = given
    with pytest.raises(SettingsError) as caught:
        lock("x").acquire()
    assert isinstance(caught.value, ImproperlyConfigured)
    assert str(caught.value) in next(iter(found().values()))


@pytest.mark.parametrize(
    ("driver", "fences", "terms", "text"),
    [
        (
            "psycopg",
            "default",
            {"BACKEND": POSTGRES},
            f"{ALIAS}['FENCE_DATABASE'] is 'default', a database of vendor 'sqlite'. Session locks "
            f"need PostgreSQL. Name such a database, or use the backend '{DATABASE}'.",
        ),
        (
            "psycopg",
            "postgres",
            {"BACKEND": POSTGRES},
            f"{ALIAS}['BACKEND']: The postgres backend needs psycopg 3 (psycopg2 is not "
            "supported). Run: pip install 'django-fencedlock[postgres]'",
        ),
        (
            "libpq",
            "postgres",
            {"BACKEND": POSTGRES},
            f"{ALIAS}['BACKEND']: psycopg found no libpq. Run: pip install 'psycopg[binary]'",
        ),
        (
            "redis",
            "default",
            {"BACKEND": REDIS, "LOCATION": "redis://x"},
            f"{ALIAS}['BACKEND']: The redis backend needs redis-py. "
            "Run: pip install 'django-fencedlock[redis]'",
        ),
        (
            "redis",
            "default",
            {"BACKEND": REDLOCK, "LOCATION": ["redis://x", "redis://y", "redis://z"]},
            f"{ALIAS}['BACKEND']: The redis backend needs redis-py. "
            "Run: pip install 'django-fencedlock[redis]'",
        ),
        (
            "boto3",
            "default",
            {"BACKEND": DYNAMODB, "LOCATION": "locks"},
            f"{ALIAS}['BACKEND']: The dynamodb backend needs boto3. "
            "Run: pip install 'django-fencedlock[dynamodb]'",
        ),
    ],
)
def test_a_missing_driver_is_named_with_its_extra(driver, fences, terms, text):
    code = f"""
        import os, sys
        sys.modules[{driver!r}] = None
        if {driver!r} == "libpq":
            os.environ["PSYCOPG_IMPL"] = "none"
        from types import SimpleNamespace
        from django.conf import settings
        from django.db import connections
        sqlite = {{"ENGINE": "django.db.backends.sqlite3", "NAME": "x"}}
        settings.configure(DATABASES={{"default": sqlite, "postgres": sqlite}})
        # With psycopg2, Django has a connection to PostgreSQL.
        connections["postgres"] = SimpleNamespace(vendor="postgresql")
        from django_fencedlock.conf import alias_problems
        print(*alias_problems("default", {{**{terms!r}, "FENCE_DATABASE": {fences!r}}}))
    """
    assert run_python(code=code).stdout.strip() == text


def test_an_alias_that_is_not_there_is_named_with_those_that_are(settings):
    settings.FENCEDLOCK = {"default": {}, "fast": {}}
    with pytest.raises(SettingsError, match="no alias 'slow'; it has 'default', 'fast'"):
        lock("x", backend="slow").acquire()
    settings.FENCEDLOCK = {"default": {}, "broken": {"TTL": 0}}
    assert conf.config("default").ttl == 30


def test_the_policy_for_writes_without_lock_is_checked(settings):
    settings.FENCEDLOCK_WITHOUT_LOCK = "ignore"
    assert "'reject', 'warn' or 'allow'" in found()["E012"]
    # An unknown one, followed, would let every write pass.
    with pytest.raises(SettingsError, match=r"WITHOUT_LOCK is 'ignore'\. Set it to 'rej"):
        conf.without_lock()


@pytest.mark.parametrize(
    "name",
    [
        *("FENCEDLOCKS", "FENCEDLOCK_UNLEASD", "FENCEDLOCK_TTL", "FENCED_LOCK", "FENCE_LOCK"),
        *("DJANGO_FENCEDLOCK", "FENCED_LOCK_HISTORY", "FENCELOCK"),
    ],
)
def test_a_setting_that_nothing_reads_is_named(settings, name):
    settings.REDLOCK = settings.SELECT_LOCK = settings.ENHANCED_LOCK = settings.DEFENCE_LOCK = {}
    assert found() == {}
    setattr(settings, name, "warn")
    assert f"the setting {name}." in found()["W003"]
    assert "FENCEDLOCK_WITHOUT_LOCK" in found()["W003"]
    assert conf.config().ttl == 30


@pytest.mark.parametrize(
    "given",
    [
        {"BACKEND": DATABASE},
        {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"},
        {"BACKEND": REDIS, "LOCATION": "redis://localhost"},
    ],
    ids=["database", "postgres", "redis"],
)
def test_every_backend_takes_a_time_out_as_a_timedelta(settings, given):
    settings.FENCEDLOCK = {"default": {**given, "OPTIONS": {"TIMEOUT": timedelta(seconds=2)}}}
    config = conf.config()
    backend = conf.backend_class(config.backend)(config)
    assert config.timeout == backend.config.timeout == 2


def test_an_unreachable_database_is_an_error_of_the_database_checks_alone(settings, monkeypatch):
    settings.FENCEDLOCK = {"default": {}}
    monkeypatch.setattr(ConnectionPool, "run", raising(OperationalError("It is gone.")))
    monkeypatch.setattr(checks, "_table_problems", raising(OperationalError("It is gone.")))
    assert found() == {}
    assert found(check_services()) == {}
    assert found(check_services(databases=["postgres"])) == {}
    assert found(check_services(databases=["default"]))["E013"] == (
        "Lock service 'default' (database) could not answer: OperationalError: It is gone. "
        "Start the database, or correct its settings."
    )


class TestLockArguments:
    def test_other_arguments_are_refused_naming_the_known(self):
        with pytest.raises(TypeError, match=r"argument tll\. Did you mean 'ttl'\?"):
            lock("x", tll=5)

    @pytest.mark.parametrize("ttl", [0, -1, "30", None.__class__, True])
    def test_a_bad_ttl_is_refused_when_the_lock_is_named(self, ttl):
        with pytest.raises((TypeError, ValueError), match="ttl"):
            lock("x", ttl=ttl)

    def test_durations_are_seconds_or_timedeltas_and_a_wait_may_be_endless(self):
        terms = lock("x", ttl=timedelta(minutes=2), blocking_timeout=timedelta(seconds=1))
        assert (terms.ttl, terms.blocking_timeout) == (120, 1)
        with pytest.raises(ValueError, match="ttl is inf; it has to be more than zero and finite"):
            lock("x", ttl=float("inf"))

    @pytest.mark.parametrize("endless", [None, float("inf")])
    def test_a_wait_has_no_limit_if_it_or_the_setting_is_none(self, settings, endless):
        assert lock("x").blocking_timeout == 10
        assert lock("x", blocking_timeout=endless).blocking_timeout == float("inf")
        settings.FENCEDLOCK = {"default": {"BLOCKING_TIMEOUT": endless}}
        assert list(found()) == ["W010"]
        assert lock("x").blocking_timeout == float("inf")
        assert lock("x", blocking_timeout=0).blocking_timeout == 0

    @pytest.mark.parametrize("wait", [-1, float("nan"), float("-inf")])
    def test_the_error_of_a_refused_wait_says_what_is_allowed(self, wait):
        allowed = "zero or more, or None for no limit"
        message = re.escape(f"blocking_timeout is {wait}; it has to be {allowed}.")
        for refused in (
            lambda: lock("x", blocking_timeout=wait),
            lambda: lock("x").acquire(blocking_timeout=wait),
        ):
            with pytest.raises(ValueError, match=f"^{message}$"):
                refused()
