"""A project that forgot the app, or its tables: each error says what to do."""

import pytest

from tests.scripts import run_python

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
for page in ("heldlock/", "heldlock/x/change/", "fence/", "lockevent/"):
    answer = browser.get(f"/admin/django_fencedlock/{page}")
    assert answer.status_code == 503, page
    assert "Run: manage.py migrate django_fencedlock" in answer.content.decode(), page
"""
MIGRATE = "manage.py migrate django_fencedlock"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("code", [LOCKS, TASK, MODEL, FORCED])
def test_a_missing_app_is_named(code: str) -> None:
    told = _last_line([], code)
    assert ". Add 'django_fencedlock' to INSTALLED_APPS, and run: " + MIGRATE in told


@pytest.mark.parametrize("code", [LOCKS, TASK, COMMAND])
def test_missing_tables_name_the_command_that_makes_them(code: str) -> None:
    told = _last_line(["django.contrib.contenttypes", "django_fencedlock"], code)
    assert ". Run: " + MIGRATE in told
    assert "INSTALLED_APPS" not in told


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
