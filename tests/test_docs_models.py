"""
Blocks of the pages that are marked py: code over models that the reader has to imagine.

The blocks of a page are run in their order, in one app `billing`: the classes of all first, so that
their tables can be made, then the statements.
"""

import ast
import contextlib
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import RequestFactory
from django.test.utils import isolate_apps

from django_fencedlock import LockNotAcquired
from django_fencedlock import test as aids
from tests.test_docs import DOCS, PAGES, ROOT, _blocks, _python

#: What a page speaks of without a definition of its own.
IMAGINED = {
    "Account": "class Account(models.Model):\n    def __str__(self): return str(self.pk)",
    "Invoice": "class Invoice(FencedModel):\n    amount = models.IntegerField(default=0)",
    "LedgerLine": """
class LedgerLine(FencedModel):
    fencing = Fencing("account:{account_id}")
    account = models.ForeignKey(Account, on_delete=models.CASCADE)""",
    "Closing": "class Closing(models.Model):\n    day = models.DateField(unique=True)",
    "Contract": 'class Contract(VersionedModel):\n    text = models.TextField(default="")',
    "InvoiceSerializer": "class InvoiceSerializer: ...",
    "add_fee": """
@shared_task
@single_instance(Invoice, pk="{invoice_id}", on_conflict="retry")
def add_fee(invoice_id, fee):
    invoice = Invoice.objects.get(pk=invoice_id)
    invoice.amount += fee
    invoice.save()""",
}
BEFORE = """
from celery import shared_task
from django.db import models

from django_fencedlock.celery import single_instance
from django_fencedlock.models import FencedModel, Fencing, VersionedModel
"""
#: Has a test of its own, since not every Django has tasks.
DJANGO_TASKS = "from django.tasks import"


def _statements(page: Path) -> list[list[ast.stmt]]:
    trees = []
    for block in _blocks(page):
        if block.language == "py" and DJANGO_TASKS not in block.text:
            trees.append(ast.increment_lineno(ast.parse(block.text), block.line - 1))
    return [tree.body for tree in trees]


OVER_MODELS = [page for page in PAGES if _statements(page)]
IDS = [str(page.relative_to(ROOT)) for page in OVER_MODELS]


@pytest.mark.parametrize("page", OVER_MODELS, ids=IDS)
@pytest.mark.django_db(transaction=True)
def test_code_over_models_runs(page: Path, billing: dict[str, Any], celery_app: Any) -> None:
    statements = _statements(page)
    # The names of tasks are made of it.
    billing["__name__"] = f"billing.{page.parent.name}_{page.stem}"
    _define(page, statements, billing)
    with _tables(billing["Invoice"]._meta.apps), aids.eager_tasks(celery_app):
        _add_rows(billing)
        for body in statements:
            rest = [node for node in body if not isinstance(node, ast.ClassDef)]
            exec(compile(ast.Module(rest, []), str(page), "exec"), billing)
        FURTHER.get(page.name, lambda names: None)(billing)
        _try_task(billing)


def _define(page: Path, statements: list[list[ast.stmt]], names: dict[str, Any]) -> None:
    nodes = [node for body in statements for node in body]
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    # Those of the blocks before, such as the decorators of Celery.
    for block in _python(page):
        body = ast.parse(block.text).body
        imports += [node for node in body if isinstance(node, ast.ImportFrom)]
    exec(BEFORE, names)
    for name, text in IMAGINED.items():
        if name not in defined and name != "add_fee":
            exec(text, names)
    for node in imports:
        with contextlib.suppress(ImportError):
            exec(compile(ast.Module([node], []), str(page), "exec"), names)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    exec(compile(ast.Module(classes, []), str(page), "exec"), names)
    if "add_fee" not in defined:
        exec(IMAGINED["add_fee"], names)


@pytest.fixture
def billing(
    tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    (tmp_path / "billing").mkdir()
    (tmp_path / "billing/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "billing"]
    for name, made in _rest_framework().items():
        monkeypatch.setitem(sys.modules, name, made)
    module = types.ModuleType("billing.models")
    with isolate_apps("billing"):
        monkeypatch.setitem(sys.modules, "billing.models", module)
        yield module.__dict__
    monkeypatch.delitem(sys.modules, "billing", raising=False)


@contextlib.contextmanager
def _tables(apps: Any) -> Iterator[None]:
    made = list(apps.get_models())
    with connection.schema_editor() as editor:
        for model in made:
            editor.create_model(model)
    try:
        yield
    finally:
        with connection.schema_editor() as editor:
            for model in reversed(made):
                editor.delete_model(model)


def _add_rows(names: dict[str, Any]) -> None:
    """An invoice; a line of account `old`, which was written often, and one of account `new`."""
    names["invoice"] = names["Invoice"].objects.create(amount=1)
    names["pk"] = names["invoice"].pk
    for name, times in (("old", 3), ("new", 1)):
        account = names[name] = names["Account"].objects.create()
        with names["LedgerLine"].fencing.lock(account=account):
            line = names[f"{name}_line"] = names["LedgerLine"](account=account)
            for _ in range(times):
                line.save()


def _try_task(names: dict[str, Any]) -> None:
    add_fee, pk = names["add_fee"], names["pk"]
    before = names["Invoice"].objects.get(pk=pk)
    add_fee.delay(pk, 10)
    with aids.hold_lock(before.fencing.name()), pytest.raises(LockNotAcquired):
        add_fee(pk, 10)
    after = names["Invoice"].objects.get(pk=pk)
    assert after.amount == before.amount + 10
    assert after.fence > before.fence


def _moved(names: dict[str, Any]) -> None:
    line = names["LedgerLine"].objects.get(pk=names["old_line"].pk)
    # The token of the new lock, which has granted fewer than the old one.
    assert (line.account, line.fence) == (names["new"], 2)


def _refused_form(names: dict[str, Any]) -> None:
    contract = names["Contract"].objects.create(text="first")
    shown = names["ContractForm"](instance=contract)
    data = {name: shown[name].value() for name in shown.fields}
    names["Contract"].objects.update(text="second")
    contract.refresh_from_db()
    form = names["ContractForm"]({**data, "text": "third"}, instance=contract)
    assert not form.is_valid()
    assert form["text"].value() == "third"


def _answers(names: dict[str, Any]) -> None:
    request, view = RequestFactory().patch("/"), names["InvoiceViewSet"]()
    view.get_object = lambda: names["Invoice"].objects.get(pk=names["pk"])
    assert view.update(request, pk=names["pk"]) == "updated"
    with aids.hold_lock(names["invoice"].fencing.name()):
        with pytest.raises(LockNotAcquired) as caught:
            view.update(request, pk=names["pk"])
        with pytest.raises(LockNotAcquired):
            view.destroy(request, pk=names["pk"])
    assert names["conflict_handler"](caught.value, {})["status"] == 409


def _rejects_a_stale_write(names: dict[str, Any]) -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(names["StaleWriteTests"]).run(result)
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])


def _closes_once(names: dict[str, Any]) -> None:
    for _ in range(2):
        names["close_day"].delay()
    assert names["Closing"].objects.count() == 1


#: By page: what its functions have to do besides.
FURTHER: dict[str, Callable[[dict[str, Any]], None]] = {
    "fenced-writes.md": _moved,
    "fenced-models.md": _refused_form,
    "views.md": _answers,
    "periodic-tasks.md": _closes_once,
    "testing.md": _rejects_a_stale_write,
}


def test_every_page_with_a_test_of_its_own_is_there() -> None:
    assert set(FURTHER) <= {page.name for page in OVER_MODELS}


def _rest_framework() -> dict[str, types.ModuleType]:
    """As much of Django REST framework as the pages use; it needn't be installed for the tests."""
    found = {
        name: types.ModuleType(name)
        for name in ("rest_framework", *(f"rest_framework.{e}" for e in ("response", "views")))
    }

    class ModelViewSet:
        update = staticmethod(lambda request, *args, **kwargs: "updated")
        destroy = staticmethod(lambda request, *args, **kwargs: "destroyed")
        dispatch = staticmethod(lambda request: None)

    viewsets: Any = types.SimpleNamespace(ModelViewSet=ModelViewSet)
    serializers: Any = types.SimpleNamespace(ModelSerializer=object, IntegerField=object)
    found["rest_framework"].__dict__.update(viewsets=viewsets, serializers=serializers)
    found["rest_framework.response"].__dict__["Response"] = lambda data, **rest: rest
    views: dict[str, Any] = {"exception_handler": lambda exc, context: None}
    found["rest_framework.views"].__dict__.update(views, set_rollback=lambda: None)
    return found


def test_blocks_of_django_tasks_are_run_elsewhere() -> None:
    """By test_django_tasks.py."""
    found = {
        page
        for page in PAGES
        for block in _blocks(page)
        if block.language == "py" and DJANGO_TASKS in block.text
    }
    assert found == {DOCS / "guides/recipes.md"}
