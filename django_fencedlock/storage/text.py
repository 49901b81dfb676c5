"""Text from other sources, made safe to show and to store; and what errors of a database say."""

from __future__ import annotations

import re
import shlex

from django.apps import apps
from django.db import DatabaseError, IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper

APP = "django_fencedlock"
#: Stands for a secret, and for a blank that would be invisible.
HIDDEN, BLANK = "***", "\N{OPEN BOX}"
#: Limit of a text in a table that only people read.
MAX_NOTE = 400

_SECRET_OPTION = re.compile(
    r"([?&][^=&]*(?:pass|secret|token|key)[^=&]*=)[^&]*?(?=&|['\"\]})]*$)",
    re.IGNORECASE | re.DOTALL,
)


def escape_control(text: str) -> str:
    """Escape characters that are invisible, or that control a terminal or forge a log line."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def show_blanks(text: str) -> str:
    """Make leading, trailing and repeated blanks of a name visible on a page."""
    return re.sub(r"^ | (?= )| $", BLANK, escape_control(text))


def in_ascii(text: str) -> str:
    """Escape all characters other than plain ASCII."""
    return escape_control(text).encode("ascii", "backslashreplace").decode()


def for_shell(text: str) -> str:
    """Quote a text as one word of a shell command."""
    return escape_control(shlex.quote(text))


def without_secrets(text: str) -> str:
    """Hide the passwords of URLs in a text. A user name stays if a colon follows it."""
    return _SECRET_OPTION.sub(rf"\1{HIDDEN}", _without_credentials(text))


def _without_credentials(text: str) -> str:
    # Up to the last "@": an unquoted password may contain what else would end it.
    start, end = text.find("://"), text.rfind("@")
    if not 0 <= start < end:
        return text
    user, colon, _ = text[start + 3 : end].partition(":")
    return f"{text[: start + 3]}{user if colon else ''}{colon}{HIDDEN}{text[end:]}"


def fit_column(connection: BaseDatabaseWrapper, text: str, length: int | None = None) -> str:
    """Escape characters that the database can't store, and cut the text to `length`."""
    if connection.vendor == "mysql" and not text.isascii():
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@character_set_database")
            # Databases made by older MariaDB versions have latin1.
            if not str(cursor.fetchone()[0]).startswith("utf8"):
                text = in_ascii(text)
    return text[:length]


def shorten_error(exc: BaseException) -> str:
    """Return the message of an error: some list all their connections."""
    text = str(exc).strip()
    return text if len(text) <= 500 else f"{text[:500]}..."


def is_table_missing(exc: BaseException | None) -> bool:
    """Return whether an error, or its cause, says that the package's tables are missing."""
    # SQLite: "no such table"; Postgres: "does not exist"; MySQL: "doesn't exist".
    while exc is not None:
        text = str(exc)
        if isinstance(exc, DatabaseError) and "django_fencedlock_" in text:
            # The error of a duplicate key says that it exists.
            is_missing = "no such table" in text or "exist" in text
            return is_missing and not isinstance(exc, IntegrityError)
        # From apps.get_model().
        if isinstance(exc, LookupError) and "'django_fencedlock'" in text:
            return True
        exc = exc.__cause__
    return False


def describe_error(exc: BaseException, database: str) -> str:
    """Return the message of an error; for missing tables, what to do."""
    return missing_tables(database) if is_table_missing(exc) else shorten_error(exc)


def missing_tables(database: str) -> str:
    """Return why the package's tables are missing, and the command that makes them."""
    command = f"manage.py migrate {APP} --database {database}"
    if apps.is_installed(APP):
        return f"The tables of {APP} are missing. Run: {command}"
    return f"{APP} is not in INSTALLED_APPS. Add it, then run: {command}"
