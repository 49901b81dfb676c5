"""A project that forgot the app, or its tables: each error says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
MODEL = "from django_fencedlock.models import FencedModel"
COMMAND = "from django.core.management import call_command; call_command('fencedlock', 'list')"
MIGRATE = "manage.py migrate django_fencedlock"


@pytest.mark.parametrize("code", [LOCKS, TASK, MODEL])
def test_a_missing_app_is_named(code: str) -> None:
    told = _last_line([], code)
    assert "Add 'django_fencedlock' to INSTALLED_APPS, and run: " + MIGRATE in told


@pytest.mark.parametrize("code", [LOCKS, TASK, COMMAND])
def test_missing_tables_name_the_command_that_makes_them(code: str) -> None:
    told = _last_line(["django.contrib.contenttypes", "django_fencedlock"], code)
    assert "Run: " + MIGRATE in told
    assert "INSTALLED_APPS" not in told


def _last_line(apps: list[str], code: str) -> str:
    # In development mode, Python tells of databases in memory, which Django doesn't close.
    apart = ("DJANGO_SETTINGS_MODULE", "PYTHONDEVMODE")
    variables = {k: v for k, v in os.environ.items() if k not in apart}
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", SET_UP.format(apps=apps) + code],
        env={**variables, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    return done.stderr.rstrip().splitlines()[-1]
