"""The system checks over tasks, and how `manage.py check` finds the tasks."""

import os
import signal
import sys
import textwrap
from itertools import count

import pytest
from celery import Celery
from django.core.checks import INFO

from django_fencedlock import checks, conf
from django_fencedlock.celery import checks as task_checks
from django_fencedlock.celery import single_instance
from django_fencedlock.checks import check_tasks
from tests.scripts import run_python

_numbers = count(1)


def body(pk=1):
    """Do nothing: the function of every task here."""


def app_with(**config):
    app = Celery(f"checked{next(_numbers)}", set_as_current=False)
    app.conf.update({"broker_url": "redis://localhost:1/0", **config})
    # Without the shared tasks of other tests.
    app.finalize()
    app.tasks.clear()
    return app


def add(app, function, name="shop.charge", **options):
    # Not shared: Celery would make it a task of every app that the tests make later.
    app.task(function, name=name, shared=False, **options)


def found(policy=None, task=None, **config):
    app = app_with(**config)
    add(app, single_instance("x:{pk}", **(policy or {}))(body), **(task or {}))
    return {problem.id: str(problem) for problem in task_checks.problems([app])}


def test_nothing_is_wrong_with_a_plain_task():
    assert found() == {}
    assert found(task={"acks_late": True, "time_limit": 600, "soft_time_limit": 500}) == {}


def test_tasks_that_are_not_under_single_instance_have_no_problems():
    app = app_with(worker_pool="solo")
    add(app, body, time_limit=3, acks_late=True)
    assert list(task_checks.problems([app])) == []


def test_an_alias_that_is_not_configured(settings):
    words = found({"backend": "jobz"})["E030"]
    assert words.startswith("Task shop.charge: backend='jobz' is no alias")
    assert "Known keys: default" in words
    settings.FENCEDLOCK = {"default": {}, "jobz": {}}
    assert found({"backend": "jobz"}) == {}
    settings.FENCEDLOCK = {"TTL": 3}  # Which can't be read.
    assert found({}) == found({"backend": "jobz"}) == {}


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("tests.Invoce", "App 'tests' doesn't have a 'Invoce' model."),
        ("nowhere.Invoice", "No installed app with label 'nowhere'."),
        ("auth.User", "User is not a FencedModel, so it has no lock."),
        ("tests.Warehouse", "The lock of Warehouse is named by town, floor."),
    ],
)
def test_a_label_that_names_no_lock(label, words):
    app = app_with()
    add(app, single_instance(label, pk="{pk}")(body))
    (problem,) = task_checks.problems([app])
    start = f'Task shop.charge: @single_instance("{label}"): {words}'
    assert (problem.id, problem.message[: len(start)]) == ("E032", start)
    assert task_checks.problems([app])  # It is found each time.
    app.tasks.clear()
    add(app, single_instance("tests.Invoice", pk="{pk}")(body))
    assert list(task_checks.problems([app])) == []


class TestVisibilityTimeout:
    @pytest.mark.parametrize("limit", [{"time_limit": 7200}, {"soft_time_limit": 7200}])
    def test_shorter_than_a_time_limit(self, limit):
        words = found(task={"acks_late": True, **limit})["W030"]
        assert "time limit of 7200 s" in words
        assert "within 3600 s" in words

    def test_shorter_than_the_time_limit_of_the_app(self):
        assert "W030" in found(task={"acks_late": True}, task_time_limit=7200)
        assert "W030" in found(task_acks_late=True, task_time_limit=7200)

    def test_shorter_than_the_ttl(self, settings):
        assert "ttl of 4000 s" in found({"ttl": 4000}, {"acks_late": True})["W030"]
        settings.FENCEDLOCK = {"default": {"TTL": 4000}}
        assert "W030" in found(task={"acks_late": True})

    def test_only_for_tasks_that_acknowledge_late(self):
        assert found({"ttl": 4000}, {"time_limit": 7200}) == {}

    @pytest.mark.parametrize("url", ["rediss://x", "sentinel://a;sentinel://b"])
    def test_of_other_brokers_that_have_one(self, url):
        assert "W030" in found(task={"acks_late": True, "time_limit": 3601}, broker_url=url)
        assert found(task={"acks_late": True, "time_limit": 3600}, broker_url=url) == {}

    @pytest.mark.parametrize("url", ["amqp://", "memory://", "filesystem://", "nosuch://x", "::"])
    def test_not_of_brokers_that_have_none(self, url):
        assert found(task={"acks_late": True, "time_limit": 7200}, broker_url=url) == {}

    def test_as_configured(self):
        task = {"acks_late": True, "time_limit": 100}
        for timeout, ids in ((50, {"W030"}), (100, set()), (200, set())):
            options = {"visibility_timeout": timeout}
            assert set(found(task=task, broker_transport_options=options)) == ids
        # A broker that has none doesn't get one by a setting.
        options = {"visibility_timeout": 50}
        assert not found(task=task, broker_url="amqp://", broker_transport_options=options)

    def test_shorter_than_the_pauses_between_conflicts(self):
        policy = {"on_conflict": "retry", "retry_countdown": 301}
        words = found(policy)["W031"]
        assert "up to 3612 s" in words
        assert found({**policy, "retry_countdown": 300}) == {}
        assert found({**policy, "max_conflict_retries": 1}) == {}
        assert found(policy, broker_url="amqp://") == {}
        assert found({"retry_countdown": 301}) == {}


class TestTimeLimitsOfNoEffect:
    @pytest.mark.parametrize("pool", ["threads", "solo", "celery.concurrency.thread:TaskPool"])
    @pytest.mark.parametrize("limit", ["time_limit", "soft_time_limit"])
    def test_on_pools_that_ignore_them(self, pool, limit):
        words = found(task={limit: 60}, worker_pool=pool)["W032"]
        assert f"{limit} of 60 s, which the pool {pool!r} ignores" in words

    def test_on_gevent_the_soft_one_alone_is_ignored(self):
        assert "W032" in found(task={"soft_time_limit": 60}, worker_pool="gevent")
        assert found(task={"time_limit": 60}, worker_pool="gevent") == {}

    @pytest.mark.parametrize(
        "pool", ["prefork", "processes", "", "celery.concurrency.prefork:TaskPool"]
    )
    def test_not_on_others(self, pool):
        assert found(task={"time_limit": 60, "soft_time_limit": 50}, worker_pool=pool) == {}

    def test_not_where_the_lock_is_bounded_otherwise(self):
        assert found({"max_hold": 60}, {"time_limit": 60}, worker_pool="threads") == {}
        assert found(worker_pool="threads") == {}


class TestShortTtl:
    def test_leaves_no_time_for_a_second_request(self):
        words = found({"ttl": 14})["W033"]
        assert "may take 5 s to answer" in words
        assert "at least 15 s" in words
        assert found({"ttl": 15}) == {}

    def test_goes_by_the_settings(self, settings):
        settings.FENCEDLOCK = {"default": {"TTL": 10}}
        assert "W033" in found()
        settings.FENCEDLOCK = {"default": {"TTL": 10, "OPTIONS": {"TIMEOUT": 3}}}
        assert found() == {}
        settings.FENCEDLOCK = {"default": {"OPTIONS": {"TIMEOUT": 11}}}
        assert "FENCEDLOCK['default']['OPTIONS']['TIMEOUT']" in found()["W033"]

    def test_backends_without_a_timeout_are_not_judged(self, settings):
        settings.FENCEDLOCK = {"default": {"BACKEND": "django_fencedlock.test.aids.NoService"}}
        assert found({"ttl": 1}) == {}


class TestLongWait:
    def test_longer_than_a_time_limit(self):
        policy = {"on_conflict": "wait", "blocking_timeout": 60}
        for limits in ({"time_limit": 60}, {"soft_time_limit": 50, "time_limit": 70}):
            assert "waits up to 60 s" in found(policy, limits)["W034"]
        assert found(policy, {"time_limit": 61}) == {}
        assert found(policy) == found({"on_conflict": "raise"}, {"time_limit": 8}) == {}

    def test_goes_by_the_settings(self, settings):
        assert "waits up to 10 s" in found({"on_conflict": "wait"}, {"time_limit": 8})["W034"]
        settings.FENCEDLOCK = {"default": {"BLOCKING_TIMEOUT": 5}}
        assert found({"on_conflict": "wait"}, {"time_limit": 8}) == {}

    def test_without_a_limit(self):
        policy = {"on_conflict": "wait", "blocking_timeout": None}
        assert "waits for its lock without a limit" in found(policy)["W040"]
        assert "waits without a limit for its lock" in found(policy, {"time_limit": 60})["W034"]
        ids = set(found(policy, {"time_limit": 60}, worker_pool="threads"))
        assert ids == {"W032", "W040"}

    def test_limits_of_no_effect_are_no_limits(self):
        ids = set(found({"on_conflict": "wait"}, {"time_limit": 8}, worker_pool="threads"))
        assert ids == {"W032"}


def test_max_hold_below_the_ttl():
    assert "W035" in found({"max_hold": 29})
    assert "W035" in found({"max_hold": 59, "ttl": 60})
    assert found({"max_hold": 30}) == {}


def test_rejecting_on_a_lost_worker_what_is_acknowledged_already():
    assert "W036" in found(task={"reject_on_worker_lost": True})
    assert found(task={"reject_on_worker_lost": True, "acks_late": True}) == {}
    # The app's setting is for those of its tasks that acknowledge late.
    assert found(task_reject_on_worker_lost=True) == {}


def test_redeliveries_that_are_skipped_for_the_dead():
    policy = {"redelivery": "run"}
    assert "W037" in found(policy, {"acks_late": True})
    assert "W037" in found(policy, task_acks_late=True)
    assert found(policy) == {}
    assert found({**policy, "on_conflict": "retry"}, {"acks_late": True}) == {}
    assert found(task={"acks_late": True}) == {}


def test_a_signal_for_aborts_that_other_code_uses():
    number = conf.abort_signal()
    before = signal.signal(number, lambda *given: None)
    try:
        assert f"signal {int(number)}" in found({"on_lost": "abort"})["W038"]
        assert found() == {}
        signal.signal(number, signal.SIG_DFL)
        assert found({"on_lost": "abort"}) == {}
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("pool", ["gevent", "celery.concurrency.gevent:TaskPool"])
def test_aborts_that_gevent_does_not_know(pool):
    words = found({"on_lost": "abort"}, worker_pool=pool)["W039"]
    assert 'the same as "raise"' in words
    assert found({"on_lost": "raise"}, worker_pool=pool) == {}
    assert found({"on_lost": "abort"}, worker_pool="threads") == {}


def test_unseen_skips_are_reported_as_information():
    assert "if no code needs it" in found(task={"ignore_result": True})["I030"]
    assert "I030" in found(task_ignore_result=True)
    assert found({"on_conflict": "retry"}, {"ignore_result": True}) == {}


def test_what_is_no_warning_is_of_level_info(monkeypatch):
    app = app_with(task_ignore_result=True)
    add(app, single_instance(body))
    monkeypatch.setattr(checks, "_celery_apps", lambda: [app])
    (message,) = check_tasks()
    assert (message.id, message.level) == ("django_fencedlock.I030", INFO)


def test_settings_that_can_not_be_followed_are_left_to_their_own_checks(settings):
    settings.FENCEDLOCK = {"default": {"TTL": "x"}}
    assert found({"on_conflict": "wait", "max_hold": 1}, {"time_limit": 8}) == {}


def test_many_tasks_with_one_fault_are_one_message():
    app = app_with(task_ignore_result=True)
    for number in range(7):
        add(app, single_instance(body), f"shop.t{number}")
    (problem,) = task_checks.problems([app])
    assert problem.message.startswith(
        "Tasks shop.t0, shop.t1, shop.t2, shop.t3, shop.t4, shop.t5 and 1 more: only"
    )


def test_a_task_of_two_apps_is_named_once():
    apps = [app_with(task_ignore_result=True) for _ in range(2)]
    for app in apps:
        add(app, single_instance(body))
    (problem,) = task_checks.problems(apps)
    assert problem.message.startswith("Task shop.charge: ")


SETTINGS = """
    SECRET_KEY = "x"
    INSTALLED_APPS = ["django_fencedlock", "shop"]
    DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    USE_TZ = True
    CELERY_BROKER_URL = "redis://localhost:1/0"
    CELERY_WORKER_POOL = "threads"
"""
APP = """
    import os
    from celery import Celery
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "proj.settings")
    app = Celery("proj")
    app.config_from_object("django.conf:settings", namespace="CELERY")
    app.autodiscover_tasks()
"""
TASKS = """
    from celery import shared_task
    from django_fencedlock.celery import single_instance

    @shared_task(time_limit=60)
    @single_instance("invoice:{pk}")
    def charge(pk): ...
"""


@pytest.mark.slow
class TestInAProject:
    """As in the documentation of Celery: nothing imports the tasks but autodiscovery."""

    @pytest.fixture
    def project(self, tmp_path):
        def write(path, text=""):
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(textwrap.dedent(text))

        write("proj/settings.py", SETTINGS)
        write("proj/celery.py", APP)
        write("proj/__init__.py", "from .celery import app as celery_app")
        write("shop/__init__.py")
        write("shop/tasks.py", TASKS)
        self.write, self.path = write, tmp_path
        return self

    def check(self, *arguments):
        done = run_python(
            *(arguments or ("-m", "django", "check")),
            check=False,
            cwd=self.path,
            DJANGO_SETTINGS_MODULE="proj.settings",
            PYTHONPATH=os.pathsep.join([str(self.path), *sys.path]),
        )
        return done.returncode, done.stdout + done.stderr

    def test_check_finds_the_tasks(self, project):
        code, output = project.check()
        assert code == 0
        assert "(django_fencedlock.W032) Task shop.tasks.charge: time_limit of 60 s" in output
        assert output.count("W032") == 1

    def test_so_does_the_doctor(self, project):
        _, output = project.check("-m", "django", "fencedlock", "doctor")
        assert "W032: Task shop.tasks.charge: time_limit of 60 s" in output

    def test_check_finds_nothing_where_nothing_is(self, project):
        project.write("proj/settings.py", SETTINGS.replace('"threads"', '"prefork"'))
        assert project.check() == (0, "System check identified no issues (0 silenced).\n")

    def test_tasks_that_can_not_be_imported_here_break_nothing(self, project):
        project.write("shop/tasks.py", "import no_such_module")
        assert project.check() == (0, "System check identified no issues (0 silenced).\n")

    def test_a_project_without_such_tasks_is_spared_our_part_for_celery(self, project):
        project.write("shop/tasks.py", "from celery import shared_task")
        code, output = project.check(
            "-c",
            "import django, sys; django.setup()\n"
            "from django.core.management import call_command; call_command('check')\n"
            "assert 'shop.tasks' in sys.modules\n"
            "assert 'django_fencedlock.celery' not in sys.modules",
        )
        assert code == 0, output


def test_defaults_of_visibility_are_those_of_kombu():
    from kombu.transport.redis import Channel

    assert Channel.visibility_timeout == task_checks.VISIBILITY_TIMEOUTS["redis"]
