"""Texts that come from elsewhere, made fit to be shown and kept: nothing hidden, nothing secret."""

from __future__ import annotations

import re
import shlex
import unicodedata
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

#: What stands for a secret, and for a blank that couldn't be seen.
HIDDEN, BLANK = "***", "\N{OPEN BOX}"

_SECRET_OPTION = re.compile(
    r"([?&][^=&]*(?:pass|secret|token|key)[^=&]*=)[^&]*?(?=&|['\"\]})]*$)",
    re.IGNORECASE | re.DOTALL,
)


def visible(text: str) -> str:
    """Write what can't be seen, or does something to a terminal or a log, as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each
        if unicodedata.category(each)[0] != "C" and each not in "\u2028\u2029"
        else _escape(each)
        for each in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def telling(text: str) -> str:
    """Write a name so that a page tells it from others: none hides a blank of it."""
    return re.sub(r"^ | (?= )| $", BLANK, visible(text))


def in_ascii(text: str) -> str:
    """Write whatever isn't plain ASCII as an escape."""
    return visible(text).encode("ascii", "backslashreplace").decode()


def for_shell(text: str) -> str:
    """Write a text as one word of a command that may be copied into a shell."""
    return visible(shlex.quote(text))


def without_secrets(text: str) -> str:
    """Hide passwords of the URLs in a text; the user's name stays, if a colon tells it apart."""
    return _SECRET_OPTION.sub(rf"\1{HIDDEN}", _without_credentials(text))


def _without_credentials(text: str) -> str:
    # Up to the last "@": passwords that weren't quoted have what else would end them.
    start, end = text.find("://"), text.rfind("@")
    if not 0 <= start < end:
        return text
    user, colon, _ = text[start + 3 : end].partition(":")
    return f"{text[: start + 3]}{user if colon else ''}{colon}{HIDDEN}{text[end:]}"


#: So many characters of a text for people are kept, where the table is one for people alone.
LONGEST = 400

_WORDS = ("host", "thread", "task_name", "task_id")


def knows(connection: BaseDatabaseWrapper, text: str) -> bool:
    """
    Whether any column can have a text, or be compared with it.

    MariaDB was installed with the characters of Western Europe for long, and a database that was
    made then has them still.
    """
    if connection.vendor != "mysql" or text.isascii():
        return True
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@character_set_database")
        return str(cursor.fetchone()[0]).startswith("utf8")


def storable(connection: BaseDatabaseWrapper, text: str, longest: int | None = None) -> str:
    """A text for people, with what a column doesn't know as an escape, and not longer than that."""
    return (text if knows(connection, text) else in_ascii(text))[:longest]


def words_storable(connection: BaseDatabaseWrapper, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a row of the registry, with what tells of its holder made storable."""
    return values | {each: storable(connection, values[each]) for each in _WORDS}
