"""A project that forgot the app, or its tables: each error says what to do."""

import contextlib
import sqlite3
from pathlib import Path

import pytest
from django.db import connections

from django_fencedlock import lock
from django_fencedlock.exceptions import SettingsError
from tests.scripts import ROOT, run_python

SET_UP = """
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS={apps!r},
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
)
django.setup()
"""
LOCKS = "from django_fencedlock import lock; lock('x').acquire()"
TASK = """
from django_fencedlock.celery import single_instance
@single_instance
def task(): pass
task()
"""
FORCED = """
from django_fencedlock import conf
from django_fencedlock.backends.interface import Grant
from django_fencedlock.storage.fences import Revoking
Revoking(conf.config()).revoke(Grant("x", "o"), "ada", proposed=1)
"""
MODEL = "from django_fencedlock.models import FencedModel"
COMMAND = "from django.core.management import call_command; call_command('fencedlock', 'list')"
ADMIN = """
import sys, types
import django
from django.conf import settings
APPS = ["admin", "auth", "contenttypes", "messages", "sessions"]
settings.configure(
    INSTALLED_APPS=[*(f"django.contrib.{app}" for app in APPS), "django_fencedlock"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[{
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": ["django.template.context_processors.request"]},
    }],
    ALLOWED_HOSTS=["testserver"],
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    ROOT_URLCONF="pages",
    SECRET_KEY="of no worth",
    STATIC_URL="static/",
)
django.setup()
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import path
sys.modules["pages"] = pages = types.ModuleType("pages")
pages.urlpatterns = [path("admin/", admin.site.urls)]
for app in ("contenttypes", "auth", "sessions"):
    call_command("migrate", app, verbosity=0)
browser = Client()
browser.force_login(User.objects.create_superuser("ada"))
for page in ("heldlock/", "heldlock/1/change/", "fence/", "lockevent/"):
    answer = browser.get(f"/admin/django_fencedlock/{page}")
    assert answer.status_code == 503, page
    assert "Run: manage.py migrate django_fencedlock" in answer.content.decode(), page
"""
MIGRATE = "manage.py migrate django_fencedlock"
NO_APP = f"django_fencedlock is not in INSTALLED_APPS. Add it, then run: {MIGRATE}"
NO_TABLES = f"The tables of django_fencedlock are missing. Run: {MIGRATE}"
SETTINGS_ERROR = "django_fencedlock.exceptions.SettingsError: "
HOLDER = "from django_fencedlock import lock; lock('x').holder()"
UNLESS_AWAY = """
from django_fencedlock.celery import single_instance
@single_instance("x", fenced=False, on_backend_error="run")
def task(): pass
task()
"""
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("code", [LOCKS, TASK, FORCED, HOLDER])
def test_a_missing_app_is_an_error_of_the_settings(code: str) -> None:
    assert _last_line([], code) == f"{SETTINGS_ERROR}{NO_APP} --database default"


def test_a_missing_app_is_named_to_a_fenced_model() -> None:
    assert _last_line([], MODEL) == f"django.core.exceptions.ImproperlyConfigured: {NO_APP}"


@pytest.mark.parametrize("code", [LOCKS, TASK, FORCED, HOLDER, UNLESS_AWAY])
def test_missing_tables_are_an_error_of_the_settings(code: str) -> None:
    told = _last_line(["django.contrib.contenttypes", "django_fencedlock"], code)
    assert told == f"{SETTINGS_ERROR}{NO_TABLES} --database default"


def test_missing_tables_are_named_by_the_command() -> None:
    told = _last_line(["django.contrib.contenttypes", "django_fencedlock"], COMMAND)
    assert told == (
        "Alias 'default' is unavailable: its fence database 'default' could not be read: "
        f"{NO_TABLES} --database default"
    )


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.parametrize("backend", ["database", "postgres", "redis"], indirect=True)
def test_a_table_that_was_dropped_is_an_error_of_the_settings(backend, settings) -> None:
    settings.FENCEDLOCK["default"]["FENCE_DATABASE"] = "postgres"
    with connections["postgres"].cursor() as cursor:
        cursor.execute("ALTER TABLE django_fencedlock_heldlock RENAME TO elsewhere")
        try:
            for _ in range(2):
                with pytest.raises(SettingsError) as caught:
                    lock("x").acquire()
        finally:
            cursor.execute("ALTER TABLE elsewhere RENAME TO django_fencedlock_heldlock")
    assert str(caught.value) == f"{NO_TABLES} --database postgres"
    # The service keeps nothing of what failed.
    with lock("x", blocking_timeout=0):
        pass


PROJECT = """
SECRET_KEY = "of no worth"
INSTALLED_APPS = ["django_fencedlock"]
DATABASES = {
    alias: {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{alias}.sqlite3"}
    for alias in ("default", "other")
}
DATABASE_ROUTERS = ["project.OnlyOther"] if __import__("os").environ.get("ROUTED") else []
class OnlyOther:
    def allow_migrate(self, using, *args, **hints):
        return using == "other"
"""


def test_check_reports_a_forgotten_migrate_and_migrate_does_not(tmp_path: Path) -> None:
    def manage(*words: str, **changes: str) -> str:
        changes |= {"DJANGO_SETTINGS_MODULE": "project", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        done = run_python("-m", "django", *words, cwd=tmp_path, **changes)
        return " ".join((done.stdout + done.stderr).split())

    def check(using: str = "default", **changes: str) -> str:
        return manage("check", "--database", using, **changes)

    (tmp_path / "project.py").write_text(PROJECT)
    names = "fence, heldlock, forcedrelease, lockevent, pendingrun, messagerecord"
    told = (
        "(django_fencedlock.W009) Tables of django_fencedlock in database 'default' are missing "
        f"or outdated: {names}. HINT: "
    )
    assert f"{told}Run: {MIGRATE} --database default System" in check()
    assert (
        f"{told}allow_migrate() of DATABASE_ROUTERS keeps them out. Allow django_fencedlock in "
        f"'default', then run: {MIGRATE} --database default System"
    ) in check(ROUTED="1")
    assert "no issues" in check("other")
    done = manage("migrate")
    assert "0001_initial... OK" in done
    assert "W009" not in done
    assert "no issues" in check()
    with contextlib.closing(sqlite3.connect(tmp_path / "default.sqlite3")) as connection:
        connection.execute("ALTER TABLE django_fencedlock_heldlock DROP COLUMN thread")
    assert "missing or outdated: heldlock." in check()
    assert "No migrations to apply" in manage("migrate")


def test_pages_of_the_admin_name_it_as_well() -> None:
    assert _run(ADMIN) is None


def _last_line(apps: list[str], code: str) -> str:
    told = _run(SET_UP.format(apps=apps) + code)
    assert told is not None
    return told.rstrip().splitlines()[-1]


def _run(code: str) -> str | None:
    # In development mode, Python tells of databases in memory, which Django doesn't close.
    done = run_python(code=code, check=False, DJANGO_SETTINGS_MODULE=None, PYTHONDEVMODE=None)
    return done.stderr if done.returncode else None
