"""What the environment says of servers, in the form that Django and Celery want it."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

HERE = Path(__file__).resolve().parent

ENGINES = {
    "postgres": "django.db.backends.postgresql",
    "postgresql": "django.db.backends.postgresql",
    "mysql": "django.db.backends.mysql",
}
BACKENDS = {
    "database": "django_fencedlock.backends.database.DatabaseBackend",
    "postgres": "django_fencedlock.backends.postgres.PostgresBackend",
    "redis": "django_fencedlock.backends.redis.RedisBackend",
}


def data_directory() -> Path:
    """Make and return the directory for whatever isn't on a server."""
    directory = Path(os.environ.get("EXAMPLE_DATA") or HERE / "var")
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()


def database(data: Path) -> dict[str, Any]:
    """Return the entry for DATABASES: EXAMPLE_DATABASE_URL, or an SQLite file."""
    url = os.environ.get("EXAMPLE_DATABASE_URL")
    if not url:
        return _sqlite(data / "db.sqlite3")
    parts = urlsplit(url)
    if parts.scheme not in ENGINES:
        raise ImproperlyConfigured(
            f"EXAMPLE_DATABASE_URL begins with {parts.scheme!r}; use {' or '.join(ENGINES)}."
        )
    options = dict(parse_qsl(parts.query))
    return {
        "ENGINE": ENGINES[parts.scheme],
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        # A host that is a directory, with the server's socket, can't stand where hosts do.
        "HOST": parts.hostname or options.pop("host", ""),
        "PORT": str(parts.port or ""),
        "OPTIONS": options,
    }


def _sqlite(path: Path) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "OPTIONS": {
            # A transaction takes the file when it begins. Django's default takes it at the first
            # write: what was read before that may be old by then.
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            # Readers and the one writer don't wait for each other.
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
        # Other threads and processes have to see what a test has written.
        "TEST": {"NAME": path.with_name("test.sqlite3")},
    }


def locks() -> dict[str, Any]:
    """Return the entry for FENCEDLOCK: EXAMPLE_LOCKS, or rows of the database."""
    said = os.environ.get("EXAMPLE_LOCKS") or "database"
    if said in ("database", "postgres"):
        return {"BACKEND": BACKENDS[said]}
    if not urlsplit(said).scheme.startswith(("redis", "unix")):
        raise ImproperlyConfigured(
            f"EXAMPLE_LOCKS is {said!r}; use 'database', 'postgres' or the URL of a Redis."
        )
    return {"BACKEND": BACKENDS["redis"], "LOCATION": said, "KEY_PREFIX": "example"}


def broker(data: Path) -> dict[str, Any]:
    """Return Celery's settings for its broker: EXAMPLE_BROKER_URL, or files."""
    url = os.environ.get("EXAMPLE_BROKER_URL")
    if url:
        return {"url": url, "transport": None, "options": {}}
    messages, control = data / "messages", data / "control"
    for directory in (messages, control):
        directory.mkdir(exist_ok=True)
    options = {
        "data_folder_in": str(messages),
        "data_folder_out": str(messages),
        "control_folder": str(control),
        # By default it looks once a second.
        "polling_interval": 0.05,
    }
    transport = "example_project.messages:Transport"
    return {"url": "filesystem://", "transport": transport, "options": options}


def results(data: Path) -> str:
    """Return where Celery keeps results: EXAMPLE_RESULTS_URL, or files."""
    url = os.environ.get("EXAMPLE_RESULTS_URL")
    if url:
        return url
    directory = data / "results"
    directory.mkdir(exist_ok=True)
    return f"file://{directory}"
