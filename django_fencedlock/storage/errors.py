"""What database errors mean for this package, and what to do about them."""

from __future__ import annotations

from django.apps import apps
from django.db import DatabaseError


def shorten_error(exc: BaseException) -> str:
    """Return the message of an error: some list all their connections."""
    text = str(exc).strip()
    return text if len(text) <= 500 else f"{text[:500]}..."


def is_table_missing(exc: BaseException | None) -> bool:
    """Return whether an error, or its cause, says that the package's tables are missing."""
    # SQLite: "no such table"; Postgres: "does not exist"; MySQL: "doesn't exist".
    while exc is not None:
        text = str(exc)
        ours = isinstance(exc, DatabaseError) and "django_fencedlock_" in text
        if ours and ("no such table" in text or "exist" in text):
            return True
        exc = exc.__cause__
    return False


def describe_error(exc: BaseException, database: str) -> str:
    """Return the message of an error; for missing tables, with the command that makes them."""
    if not is_table_missing(exc):
        return shorten_error(exc)
    missing = shorten_error(exc).partition("\n")[0]
    command = f"manage.py migrate django_fencedlock --database {database}"
    if apps.is_installed("django_fencedlock"):
        return f"{missing}. Run: {command}"
    return f"{missing}. Add 'django_fencedlock' to INSTALLED_APPS, and run: {command}"
