"""Texts for columns that don't know every character: those of lock names alone always do."""

from __future__ import annotations

from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..texts import in_ascii

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
