"""`assert_all_writes_fenced()`: finds writes that no lease covers."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple
from unittest import mock

from django.apps import apps
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.deletion import Collector

from ..models import FencedModel, FencedQuerySet
from ..models.queryset import GuardedModel
from ..storage.fenced_atomic import PinnedBlock

#: The entry points of fenced writes: the package itself checks the statements inside them.
PATHS: tuple[tuple[type, str], ...] = (
    (GuardedModel, "_save_table"),
    (GuardedModel, "delete"),
    (FencedQuerySet, "update"),
    (FencedQuerySet, "bulk_create"),
    (FencedQuerySet, "delete"),
    (FencedQuerySet, "_raw_delete"),
    (Collector, "delete"),
)


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

    Only statements of this thread on Django's connections are seen: no COPY by the driver's own
    method, no triggers, no cascades of the database. It can't check whether ``lease.atomic()``
    belongs to the right lock.
    """
    found: list[UnfencedWrite] = []
    with contextlib.ExitStack() as stack:
        for owner, name in PATHS:
            path = _entry_point(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, path))
        watch = _Watch(found)
        for connection in connections.all():
            stack.enter_context(connection.execute_wrapper(watch))
        yield found
    if found:
        listed = "\n".join(f"  {write}" for write in found)
        raise AssertionError(f"{len(found)} writes to fenced tables weren't fenced:\n{listed}")


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


class _Watch:
    """An execute wrapper that notes unfenced writes."""

    def __init__(self, found: list[UnfencedWrite]) -> None:
        self._found = found
        self._columns = _fenced_tables()

    def __call__(
        self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any
    ) -> Any:
        connection: BaseDatabaseWrapper = context["connection"]
        answer = execute(sql, params, many, context)
        # A statement that raised wrote nothing.
        text = _text(sql, connection)
        for verb, table in writes_in(text, connection.vendor):
            if table in self._columns:
                why = self._why_unfenced(verb, table, text, context["cursor"])
                if why:
                    self._found.append(UnfencedWrite(table, text, why))
        return answer

    def _why_unfenced(self, verb: str, table: str, sql: str, cursor: Any) -> str:
        if any(isinstance(block, PinnedBlock) for block in cursor.db.atomic_blocks):
            return ""
        claimed = _claimed.get()
        if claimed is None:
            return "bypasses the fenced model"
        # From here on, the statement is one that Django's compiler made.
        column = self._columns[table]
        if column is None or (verb == "INSERT" and " UPDATE " not in sql):
            return ""
        fence = cursor.db.ops.quote_name(column)
        if verb == "DELETE" and (fence in sql or table in claimed):
            return ""
        # Conditions name the column with its table.
        if verb != "DELETE" and re.search(rf"(?<!\.){re.escape(fence)} = ", sql):
            claimed.add(table)
            return ""
        # Without a row, the model has no lock name to check. SQLite's rowcount is 0 until the
        # returned rows have been read.
        return "without a lease" if cursor.rowcount or " RETURNING " in sql else ""


def _fenced_tables() -> dict[str, str | None]:
    """Return fenced tables and their fence columns; None if a parent has it."""
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


def _text(sql: Any, connection: BaseDatabaseWrapper) -> str:
    if hasattr(sql, "as_string"):  # psycopg's composed SQL
        sql = sql.as_string(connection.connection)
    return sql.decode() if isinstance(sql, bytes) else str(sql)


# Reading SQL: words instead of a parser. It finds WITH ... UPDATE, and several statements in one.

_COMMENTS = r"--[^\n]*|/\*(?!!).*?\*/"
_NOISE = re.compile(rf"{_COMMENTS}|'(?:[^']|'')*'", re.S)
_NOISE_OF_MYSQL = re.compile(rf"{_COMMENTS}|'(?:[^'\\]|''|\\.)*'", re.S)
_TOKEN = re.compile(r'"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[\w+\]|%\(\w+\)s|%s|\w+|[^\s\w]')
#: Words between a verb and its table.
_FILLERS = {
    *("INTO", "FROM", "TABLE", "ONLY", "IGNORE", "LOW_PRIORITY", "HIGH_PRIORITY", "DELAYED"),
    *("QUICK", "OR", "ABORT", "FAIL", "REPLACE", "ROLLBACK"),
}
#: Words before an UPDATE or DELETE that is no verb: FOR UPDATE, ON DELETE CASCADE.
_NO_VERB = {"FOR", "KEY", "DO", "ON", "THEN", "AFTER", "BEFORE", "OF"}
#: Words that end the list of tables.
_ENDS = {"SET", "WHERE", "USING", "RETURNING", "RESTART", "CASCADE", ")"}
#: Verbs at any place of a statement.
_VERBS = {"INSERT", "UPDATE", "DELETE"}
#: Verbs only at the beginning of a statement.
_FIRST_VERBS = {"MERGE", "REPLACE", "TRUNCATE", "COPY", "LOAD"}
#: Statements that define something: verbs in them aren't executed.
_DEFINING = {"CREATE", "ALTER", "DROP", "COMMENT", "GRANT", "REVOKE"}


def writes_in(sql: str, vendor: str = "") -> Iterator[tuple[str, str]]:
    """Yield the verb and the table of each write, also of doubtful ones."""
    noise = _NOISE_OF_MYSQL if vendor == "mysql" else _NOISE
    for statement in _statements(_TOKEN.findall(noise.sub(" '' ", sql))):
        upper = [token.upper() for token in statement]
        if upper[0] in _DEFINING:
            if {"$", "BEGIN"} & set(upper):
                return  # The rest is the body of a function or trigger.
            continue
        for place, verb in enumerate(upper):
            if _is_verb(upper, place):
                for table in dict.fromkeys(_targets(verb, statement[place + 1 :])):
                    yield verb, table


def _statements(tokens: list[str]) -> Iterator[list[str]]:
    statement: list[str] = []
    for token in [*tokens, ";"]:
        if token != ";":
            statement.append(token)
        elif statement:
            yield statement
            statement = []


def _is_verb(upper: list[str], place: int) -> bool:
    word = upper[place]
    if word in _VERBS:
        return place == 0 or upper[place - 1] not in _NO_VERB
    if place == 0:
        return word in _FIRST_VERBS
    return word == "MERGE" and upper[place + 1 : place + 2] == ["INTO"]


def _targets(verb: str, rest: list[str]) -> Iterator[str]:
    """Yield the tables that follow a verb."""
    upper = [token.upper() for token in rest]
    if verb == "COPY" and "FROM" not in upper[: upper.index("TO") if "TO" in upper else None]:
        return
    if verb == "LOAD":
        upper[: upper.index("TABLE")] = ["TABLE"] * upper.index("TABLE")
    several = verb in ("UPDATE", "DELETE", "TRUNCATE")
    for place, (token, word) in enumerate(zip(rest, upper, strict=True)):
        if word in _ENDS or word == "(":
            return
        if word in _FILLERS or not _is_name(token):
            continue
        if upper[place + 1 : place + 2] == ["."]:
            continue  # A schema.
        yield _plain(token)
        if not several:
            return


def _is_name(token: str) -> bool:
    return token[0] in '"`[' or token[0].isalpha() or token[0] == "_"


def _plain(token: str) -> str:
    """Return a name without its quotes, in lower case."""
    if token[0] in '"`':
        token = token[1:-1].replace(token[0] * 2, token[0])
    elif token[0] == "[":
        token = token[1:-1]
    return token.casefold()
