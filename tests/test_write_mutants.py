"""
Faults in the write condition and in the recording of grants, and the tests that notice them.

A mutant changes one operator: of Python code in the function's syntax tree, or of SQL in a
statement on its way to the database. Each has to fail one of the tests that are named here.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections, models
from django.db.backends.utils import CursorWrapper

from django_fencedlock import current_lease
from django_fencedlock.core.identity import new_owner
from django_fencedlock.models import Fence, HeldLock, writes
from django_fencedlock.storage import fenced_atomic, fences
from django_fencedlock.storage.dialect import Entry
from django_fencedlock.storage.postgresql import DriverCursor
from tests import test_ledgers, test_pinning, test_write_paths, test_write_rules
from tests.models import Account, Docket, Invoice, LedgerLine
from tests.test_write_paths import PATHS, Everything

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


def entry(owner: Any = None, ttl: float = 30.0, fenced: bool = True) -> Entry:
    owner = owner or new_owner()
    return Entry(test_ledgers.NAME, "default", "database", owner, ttl, fenced=fenced)


Killers = Iterator[tuple[Any, ...]]


def killers_of_writes(settings: Any) -> Killers:
    paths, rules, on = test_write_paths, test_write_rules, "default"
    for name in ("save", "update", "queryset_delete", "column_save", "new_save"):
        for is_pinned in (False, True):
            yield paths.test_under_its_lease_the_row_is_written, on, PATHS[name], is_pinned
        yield paths.test_under_an_overtaken_lease_nothing_is_written, on, PATHS[name]
    invoice = Invoice.objects.create
    yield (
        paths.test_an_object_read_before_the_lock_and_written_since_is_refused,
        *(on, invoice(), "save"),
    )
    yield paths.test_a_loaded_object_whose_row_is_gone_is_refused, on, invoice(), "save"
    for write in ("save", "update", "insert", "atomic"):
        for other in ({"owner": "f" * 32}, {"token": 9}):
            test = rules.test_a_write_needs_the_fences_token_and_its_owner
            yield test, on, rules.WRITES[write], other
    inside = test_pinning.TestWhatIsInside()
    yield inside.test_the_fence_is_looked_at_once, on
    yield inside.test_a_save_under_another_lease_is_checked, on
    yield rules.test_an_object_without_its_fence_is_refused, on, settings, invoice()
    account = Account.objects.create()
    yield (
        rules.test_objects_that_were_read_under_one_lease_may_all_be_saved,
        *(on, invoice(account=account)),
    )
    yield rules.test_bulk_update_compares_the_fence_of_each_object, on
    yield rules.test_a_row_that_was_moved_is_not_written_under_its_former_lock, on
    yield rules.test_moving_rows_to_another_lock_needs_both_leases, on
    yield rules.test_what_is_new_does_not_take_the_place_of_a_row, on, invoice()


def killers_of_grants(settings: Any) -> Killers:
    tests, given = test_ledgers, (connections["default"], entry)
    for token in (4, 5):
        yield tests.test_a_token_that_is_not_newer_is_not_recorded, *given, token
    for other in ({"alias": "other"}, {"backend": "redis"}):
        yield (tests.test_nothing_is_recorded_of_a_name_live_at_another_service, *(*given, other))
    yield tests.test_a_newer_token_is_recorded_with_its_owner, *given

    yield tests.test_a_takeover_has_the_next_token_and_its_owner, *given


def run(killers: Callable[[Any], Killers], settings: Any) -> None:
    for test, *given in killers(settings):
        try:
            test(*given)
        finally:
            while (lease := current_lease()) is not None:
                lease.release()
            settings.FENCEDLOCK_WITHOUT_LOCK = "reject"
            connections["default"].close()
            for model in (LedgerLine, Docket, Invoice, Account, HeldLock, Fence):
                models.QuerySet(model)._raw_delete("default")


def is_killed(killers: Callable[[Any], Killers], settings: Any) -> bool:
    try:
        run(killers, settings)
    except (Exception, pytest.fail.Exception):
        return True
    return False


class Change(ast.NodeTransformer):
    """Change the operator at one place; count the places."""

    COMPARED = {
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.LtE: ast.Gt,
    }

    def __init__(self, place: int) -> None:
        self.place, self.places = place, 0

    def _is_here(self) -> bool:
        self.places += 1
        return self.places - 1 == self.place

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        # SQLite compares every text exactly. test_collations.py has databases that don't.
        is_of_texts = getattr(node.comparators[0], "attr", "") == "texts"
        if not is_of_texts and self._is_here():
            node.ops = [self.COMPARED[type(node.ops[0])](), *node.ops[1:]]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_here():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.BitAnd) and self._is_here():
            node.op = ast.BitOr()
        return node


def mutant_of(function: Any, place: int) -> tuple[Any, int]:
    source = "from __future__ import annotations\n" + textwrap.dedent(inspect.getsource(function))
    change = Change(place)
    tree = ast.fix_missing_locations(change.visit(ast.parse(source)))
    found: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(function), "exec"), function.__globals__, found)
    return found[function.__name__].__code__, change.places


FUNCTIONS = [
    writes.FenceGuard.condition,
    writes.may_write,
    writes.accepted_fences,
    writes._fences_of_many,
    fenced_atomic.is_pinned,
    fences.not_newest,
]
PYTHON = [
    pytest.param(function, place, id=f"{function.__name__}-{place}")
    for function in FUNCTIONS
    for place in range(mutant_of(function, -1)[1])
]


@pytest.mark.parametrize(("function", "place"), PYTHON)
def test_a_mutant_of_the_code_is_noticed(settings, monkeypatch, function, place):
    settings.DATABASE_ROUTERS = [Everything("default")]
    monkeypatch.setattr(function, "__code__", mutant_of(function, place)[0])
    assert is_killed(killers_of_writes, settings)


STATEMENTS = ["save", "insert", "pin", "fence", "registry", "takeover"]
OPERATORS = {"<=": ">", "<": "<=", "=": "<>", "<>": "=", ">": "<="}
OPERATORS |= {"AND": "OR", "OR": "AND", "IN": "NOT IN"}
OPERATOR = re.compile(r"(?<= )(?:<=|<>|<|=|>|AND|OR|IN)(?= )")


@pytest.mark.parametrize(
    ("statement", "places", "killers"),
    [
        (r"UPDATE .tests_invoice.*? WHERE ", 8, killers_of_writes),
        (r"INSERT INTO .tests_ledgerline.*? WHERE ", 5, killers_of_writes),
        (r"SELECT .* FROM django_fencedlock_fence WHERE ", 3, killers_of_writes),
        (r"UPDATE django_fencedlock_fence SET .* WHERE ", 7, killers_of_grants),
        (r"SELECT 1 FROM django_fencedlock_heldlock WHERE ", 7, killers_of_grants),
        (r"UPDATE django_fencedlock_heldlock SET alias.* WHERE ", 5, killers_of_grants),
    ],
    ids=STATEMENTS,
)
def test_a_mutant_of_the_sql_is_noticed(
    settings, monkeypatch, statement, places, killers, subtests
):
    settings.DATABASE_ROUTERS = [Everything("default")]
    for place in range(places):
        changed = []

        def mutating(execute, place=place, changed=changed):
            def mutated(cursor, sql, *given):
                if isinstance(sql, str) and (head := re.match(statement, sql, re.S)):
                    found = list(OPERATOR.finditer(sql, head.end()))
                    if place < len(found):
                        at = found[place]
                        sql = f"{sql[: at.start()]}{OPERATORS[at[0]]}{sql[at.end() :]}"
                        changed.append(sql)
                return execute(cursor, sql, *given)

            return mutated

        with subtests.test(place=place), monkeypatch.context() as context:
            # The statements of models, and those of grants.
            for kind in (CursorWrapper, DriverCursor):
                context.setattr(kind, "execute", mutating(kind.execute))
            assert is_killed(killers, settings)
            assert changed


@pytest.mark.parametrize("killers", [killers_of_writes, killers_of_grants])
def test_without_a_change_nothing_is_noticed(settings, killers):
    settings.DATABASE_ROUTERS = [Everything("default")]
    run(killers, settings)
