"""
Django settings for the tests.

Reading them starts no server. The addresses of PostgreSQL and MariaDB are filled in by conftest.py
before the first test that needs a database, or come from the environment: a child process of a
test gets them that way.
"""

import os

import pymysql

from tests.servers import MariaDB, Postgres, shared, workspace

# mysqlclient has to be compiled; PyMySQL does not.
pymysql.install_as_MySQLdb()

SECRET_KEY = "only for tests"
DEBUG = False
USE_TZ = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_fencedlock",
    "tests",
]

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

# A file, for tests as well: other connections and other processes have to see the same rows.
_sqlite = os.environ.get("FENCEDLOCK_TEST_SQLITE") or str(workspace.root() / "db.sqlite3")

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": _sqlite,
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
        "TEST": {"NAME": f"{_sqlite}.test"},
    },
    "postgres": Postgres(shared.url("postgres") or "postgres:///fencedlock").django(),
}

if shared.available("mariadb"):
    DATABASES["mariadb"] = MariaDB(shared.url("mariadb") or "mysql:///fencedlock").django()

# No test database needs another to be made first.
for _entry in DATABASES.values():
    _entry.setdefault("TEST", {})["DEPENDENCIES"] = []
