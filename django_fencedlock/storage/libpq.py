"""
Statements of a private PostgreSQL session, without what a cursor does around each.

A cursor of the driver's finds out the types of all parameters and columns anew each time. For a
short statement that takes longer than all the rest, and leaves the server's caches cold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import psycopg
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.generators import execute
from psycopg.pq import ExecStatus

from ..core import runtime

#: How often a statement is executed before the server is told to keep its plan.
AFTER = 5


class Executor:
    """
    Executes statements with named parameters, in a session whose every statement commits.

    Each of them is prepared once it has come often enough. Parameters go as text, so their types
    have to be clear from the statement.

    Of `brief` ones nobody needs to be called back before their answer, or a time limit, is there.
    So a signal's handler doesn't strike between a question and its answer.
    """

    def __init__(
        self, raw: psycopg.Connection[Any], errors: Any, *, brief: bool, after: float = AFTER
    ) -> None:
        self._raw = raw
        self._brief = brief
        self._after = after
        # Not where greenlets would all stand still meanwhile.
        self._in_one_call = brief and not runtime.is_patched("socket")
        #: Makes the driver's errors Django's.
        self._errors = errors
        self._known: dict[str, _Statement] = {}
        self._made = 0
        self._result: Any = None
        self._rows = Transformer(raw)

    def execute(self, statement: str, given: Mapping[str, Any] | None = None) -> None:
        """Execute a statement, which returns rows or a count."""
        with self._errors:
            self._execute(statement, given)

    def _execute(self, statement: str, given: Mapping[str, Any] | None) -> None:
        known = self._known.get(statement)
        if known is None:
            known = self._known[statement] = _Statement(statement, given)
        values = _as_texts([given[name] for name in known.parameters]) if given else []
        known.times += 1
        if known.times > self._after and not known.name:
            self._prepare(known)
        pgconn = self._raw.pgconn
        if known.name and self._in_one_call:
            self._result = self._checked(pgconn.exec_prepared(known.name, values))
            return
        if known.name:
            pgconn.send_query_prepared(known.name, values)
        else:
            pgconn.send_query_params(known.text, values)
        self._result = self._answer()

    @cached_property
    def planning(self) -> Executor:
        """Executes statements that are planned each time."""
        return Executor(self._raw, self._errors, brief=self._brief, after=math.inf)

    def forget(self, statement: str) -> bool:
        """Have a statement prepared anew, as its tables have changed; whether it was prepared."""
        known = self._known.pop(statement, None)
        return known is not None and bool(known.name)

    def fetchall(self) -> list[tuple[Any, ...]]:
        self._rows.set_pgresult(self._result)
        rows: list[tuple[Any, ...]] = self._rows.load_rows(0, self._result.ntuples, tuple)
        return rows

    def fetchone(self) -> tuple[Any, ...] | None:
        return next(iter(self.fetchall()), None)

    @property
    def rowcount(self) -> int:
        return int(self._result.command_tuples or 0)

    def _prepare(self, known: _Statement) -> None:
        self._made += 1
        name = b"fencedlock_%d" % self._made
        self._raw.pgconn.send_prepare(name, known.text)
        self._answer()
        known.name = name

    def _answer(self) -> Any:
        # By the driver, which knows how to wait under gevent, and for what else may come in.
        results = self._raw.wait(execute(self._raw.pgconn))
        if not results:
            raise psycopg.OperationalError("the server gave no result")
        return self._checked(results[-1])

    def _checked(self, result: Any) -> Any:
        if result.status in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            return result
        if self._raw.closed:
            raise psycopg.OperationalError(result.error_message.decode(errors="replace"))
        raise error_from_result(result)


class _Statement:
    def __init__(self, statement: str, given: Mapping[str, Any] | None) -> None:
        places = _Places()
        self.text = (statement if given is None else statement % places).encode()
        self.parameters = tuple(places)
        self.times = 0
        self.name = b""


class _Places(dict[str, str]):
    """Numbers the parameters that it is asked for."""

    def __missing__(self, name: str) -> str:
        self[name] = place = f"${len(self) + 1}"
        return place


def _as_texts(values: Sequence[object]) -> list[Any]:
    texts = [None if value is None else str(value).encode() for value in values]
    if b"\0" in b"".join(filter(None, texts)):
        # All that follows would be cut off.
        raise psycopg.DataError("PostgreSQL text can't contain NUL bytes")
    return texts
