"""
Settings of the example.

EXAMPLE_DATA names the directory of the SQLite file; without it, that is example_project/var.
"""

import os
from pathlib import Path

DATA = Path(os.environ.get("EXAMPLE_DATA") or Path(__file__).parent / "var")
DATA.mkdir(parents=True, exist_ok=True)

SECRET_KEY = "an example has no secrets"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django_fencedlock", "example_project.accounts"]

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATA / "db.sqlite3",
        "OPTIONS": {
            # A transaction takes the file when it begins. Django's default takes it at the first
            # write: what was read before that may be old by then.
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            # Readers and the one writer don't wait for each other.
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }
}

# The default, written out: leases are rows of the database above.
FENCEDLOCK = {"default": {"BACKEND": "django_fencedlock.backends.database.DatabaseBackend"}}
