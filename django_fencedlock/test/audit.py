"""`assert_all_writes_fenced()`: finds writes that no lease covers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple
from unittest import mock

from django.apps import apps
from django.db import connections
from django.db.models.deletion import Collector

from ..storage.fenced_atomic import PinnedBlock


class UnfencedWrite(NamedTuple):
    """A statement that wrote to a fenced table without a lease."""

    table: str
    sql: str
    why: str

    def __str__(self) -> str:
        return f"{self.table}, {self.why}: {self.sql}"


@contextlib.contextmanager
def assert_all_writes_fenced() -> Iterator[list[UnfencedWrite]]:
    """
    Fail if the block writes to the table of a fenced model without a lease.

    Allowed are writes through the model under a lease, everything inside ``lease.atomic()``, and
    new rows added through the model. Not allowed are raw SQL, unfenced querysets and managers, and
    writes that only ``without_lock`` permits.

    Only statements of this thread on Django's connections are seen: no COPY,
    no triggers, no cascades of the database. It can't check whether ``lease.atomic()``
    belongs to the right lock.
    """
    found: list[UnfencedWrite] = []
    with contextlib.ExitStack() as stack:
        for owner, name in _entry_points():
            path = _entry_point(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, path))
        watch = functools.partial(_watch, found, _fenced_tables())
        for connection in connections.all():
            stack.enter_context(connection.execute_wrapper(watch))
        yield found
    if found:
        listed = "\n".join(f"  {write}" for write in found)
        raise AssertionError(f"{len(found)} writes to fenced tables weren't fenced:\n{listed}")


def _entry_points() -> Iterator[tuple[type, str]]:
    """Yield the methods of fenced writes: the package itself checks the statements inside them."""
    # Models can't be imported before Django is ready.
    from ..models import FencedQuerySet
    from ..models.queryset import GuardedModel

    yield GuardedModel, "_save_table"
    yield GuardedModel, "delete"
    yield Collector, "delete"
    for name in ("update", "bulk_create", "delete", "_raw_delete"):
        yield FencedQuerySet, name


#: In an entry point: the fenced tables where it has set the lease's token, and may delete.
_claimed: ContextVar[set[str] | None] = ContextVar("fencedlock_audit_claimed", default=None)


def _entry_point(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        if _claimed.get() is not None:
            return function(*args, **kwargs)
        before = _claimed.set(set())
        try:
            return function(*args, **kwargs)
        finally:
            _claimed.reset(before)

    return within


def _watch(
    found: list[UnfencedWrite],
    columns: Mapping[str, str | None],
    execute: Callable[..., Any],
    sql: Any,
    *given: Any,
) -> Any:
    """Execute a statement, and note its unfenced writes; if it raises, it has written nothing."""
    answer, cursor = execute(sql, *given), given[-1]["cursor"]
    if hasattr(sql, "as_string"):  # psycopg's composed SQL
        sql = sql.as_string(cursor.db.connection)
    text = sql.decode() if isinstance(sql, bytes) else str(sql)
    for verb, table in writes_in(text):
        if table in columns:
            why = _why_unfenced(verb, table, columns[table], text, cursor)
            if why:
                found.append(UnfencedWrite(table, text, why))
    return answer


def _why_unfenced(verb: str, table: str, column: str | None, sql: str, cursor: Any) -> str:
    if any(isinstance(block, PinnedBlock) for block in cursor.db.atomic_blocks):
        return ""
    claimed = _claimed.get()
    if claimed is None:
        return "bypasses the fenced model"
    # From here on, the statement is one that Django's compiler made.
    if column is None or (verb == "INSERT" and " UPDATE " not in sql):
        return ""
    fence = cursor.db.ops.quote_name(column)
    if verb == "DELETE" and (fence in sql or table in claimed):
        return ""
    # Conditions name the column with its table.
    if verb != "DELETE" and re.search(rf"(?<!\.){re.escape(fence)} = ", sql):
        claimed.add(table)
        return ""
    # Without a row, the model has no lock name to check. SQLite's rowcount is 0 until the returned
    # rows have been read.
    return "without a lease" if cursor.rowcount or " RETURNING " in sql else ""


def _fenced_tables() -> dict[str, str | None]:
    """Return fenced tables and their fence columns; None if a parent has it."""
    from ..models import FencedModel

    found: dict[str, str | None] = {}
    for model in apps.get_models():
        if issubclass(model, FencedModel):
            fence = model._meta.get_field("fence")
            own = fence in model._meta.local_fields
            column = str(fence.column) if own else None
            # db_table may include a schema: '"schema"."table"'.
            table = model._meta.db_table.rpartition('"."')[2]
            found.setdefault(_plain(table.strip('"')), column)
    return found


# Reading SQL: words instead of a parser. It finds WITH ... UPDATE, and several statements in one.

_NOISE = re.compile(r"--[^\n]*|/\*(?!!).*?\*/|'(?:[^']|'')*'", re.S)
_TOKEN = re.compile(r'"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[\w+\]|%\(\w+\)s|%s|\w+|[^\s\w]')
#: Words before an UPDATE or DELETE that is no verb: FOR UPDATE, ON DELETE CASCADE.
_NO_VERB = {"FOR", "KEY", "DO", "ON", "THEN", "AFTER", "BEFORE", "OF"}
#: Verbs at any place of a statement, and only at its beginning.
_VERBS = {"INSERT", "UPDATE", "DELETE", "MERGE"}
_FIRST_VERBS = {"REPLACE", "TRUNCATE", "LOAD"}
#: Words that end the list of tables after a verb.
_ENDS = {"SET", "WHERE", "USING", "RETURNING", "VALUES", "SELECT", "(", ")", ";"}


def writes_in(sql: str) -> Iterator[tuple[str, str]]:
    """Yield the verb and each word that may be a table of it, for each write."""
    tokens = _TOKEN.findall(_NOISE.sub(" '' ", sql))
    upper = [";", *(token.upper() for token in tokens), ";"]
    for place, (before, verb) in enumerate(itertools.pairwise(upper)):
        if (verb in _VERBS and before not in _NO_VERB) or (verb in _FIRST_VERBS and before == ";"):
            end = next(i for i in range(place, len(tokens) + 1) if upper[i + 1] in _ENDS)
            for word in dict.fromkeys(map(_plain, tokens[place + 1 : end])):
                yield verb, word


def _plain(token: str) -> str:
    """Return a name without its quotes, in lower case."""
    if token[0] in '"`':
        token = token[1:-1].replace(token[0] * 2, token[0])
    return token.strip("[]").casefold()
