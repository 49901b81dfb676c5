"""What the README and docs/ say is so: their code runs, their tables match the package."""

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
import types
import unittest
from collections.abc import Iterator
from configparser import ConfigParser
from inspect import get_annotations
from pathlib import Path
from typing import Any, NamedTuple, get_overloads

import pytest
from asgiref.sync import async_to_sync
from django.dispatch import Signal
from django.test import TestCase

import django_fencedlock
from django_fencedlock import conf, exceptions, signals
from django_fencedlock import test as aids
from django_fencedlock.celery import SkippedRun, single_instance
from django_fencedlock.celery.policy import TERMS, Policy, Skip
from django_fencedlock.core.identity import Holder
from django_fencedlock.lease import Lease
from django_fencedlock.lock_sets import LeaseSet, LockSet
from django_fencedlock.locks import Lock

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(django_fencedlock.__file__).parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
#: The pages for users.
PAGES = [
    ROOT / "README.md",
    ROOT / "example_project/README.md",
    ROOT / "example_project/simulator/README.md",
    *(DOCS / f"{name}.md" for name in ("index", "quickstart", "tutorial")),
    *(
        page
        for name in ("guides", "reference", "concepts")
        for page in sorted((DOCS / name).iterdir())
    ),
]
FOR_CONTRIBUTORS = sorted((DOCS / "dev").glob("*.md"))
ALL = [*PAGES, *FOR_CONTRIBUTORS, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY"))]
ALL += [ROOT / "benchmarks/README.md", ROOT / "migrations/README.md"]
SET_UP = "python3 -m venv .venv && .venv/bin/pip install -q -e {} && .venv/bin/python -m {}"
# Followed to the letter by .ci/tutorial.py, in a project of its own.
FOLLOWED = DOCS / "tutorial.md"
BACKENDS = list(conf.BACKENDS)
ERRORS = "| error | carries |"


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def _blocks(page: Path) -> Iterator[Block]:
    found: list[str] | None = None
    language, begin = "", 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.lstrip().startswith("```"):
            if found is not None:
                found.append(line)
        elif found is None:
            language, begin, found = line.lstrip()[3:], number + 1, []
        else:
            yield Block(page, begin, language, textwrap.dedent("\n".join(found)))
            found = None


def _python(page: Path) -> list[Block]:
    return [block for block in _blocks(page) if block.language == "python"]


CODE = [
    block
    for page in [*PAGES, DOCS / "dev/fault_lab.md"]
    if page != FOLLOWED
    for block in _python(page)
]


@pytest.mark.parametrize("block", CODE, ids=str)
@pytest.mark.django_db(transaction=True)
def test_code_runs(block: Block) -> None:
    names = _run(block)
    for name, thing in names.items():
        if inspect.iscoroutinefunction(thing) and not inspect.signature(thing).parameters:
            async_to_sync(thing)()
        if isinstance(thing, type) and issubclass(thing, TestCase) and thing is not TestCase:
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(thing).run(result)
            assert result.testsRun, name
            assert not result.errors + result.failures, str(result.errors)[-3000:]


@pytest.mark.parametrize("block", [b for b in CODE if "FENCEDLOCK = " in b.text], ids=str)
def test_settings_that_are_shown_are_right(
    block: Block, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(settings.DATABASES, "direct", settings.DATABASES["postgres"])
    # Where the page says that its function is.
    for name in ("shop", "shop.redis"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["shop.redis"], "cluster", print, raising=False)
    settings.FENCEDLOCK = _run(block)["FENCEDLOCK"]
    # The pages speak of a project on PostgreSQL; here, "default" is SQLite.
    assert [str(problem) for problem in conf.problems() if problem.id != "E010"] == []


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), target
        if anchor:
            assert anchor in _anchors(linked), target


def test_every_page_is_linked_from_another() -> None:
    """And not from the index alone."""
    index = DOCS / "index.md"
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in ALL
        for target in _links(page)
        if page != index and not target.startswith("#")
    }
    assert {*PAGES, *FOR_CONTRIBUTORS} - linked - {index, ROOT / "README.md"} == set()


def test_every_page_is_in_the_index() -> None:
    listed = {
        page
        for block in _blocks(DOCS / "index.md")
        if block.language == "{toctree}"
        for line in block.text.splitlines()
        if line and not line.startswith(":")
        for page in DOCS.glob(f"{line}.md")
    }
    pages = {page for page in [*PAGES, *FOR_CONTRIBUTORS] if DOCS in page.parents}
    assert listed == pages - {DOCS / "index.md"}


def test_there_are_few_pages_for_users() -> None:
    assert len([page for page in PAGES if DOCS in page.parents]) <= 28


@pytest.mark.parametrize(
    ("marker", "what", "command"),
    [("demo command", ".", "example_project demo"), ("test command", "'.[dev]'", "pytest")],
)
def test_the_two_commands_are_marked(marker: str, what: str, command: str) -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count(f"<!-- {marker} -->") == 1
    assert f"\n<!-- {marker} -->\n```\n{SET_UP.format(what, command)}\n```\n" in text


def test_every_check_has_a_section_and_every_section_a_check() -> None:
    sections = set(re.findall(r"^## ([EIW]\d+)$", (REFERENCE / "checks.md").read_text(), re.M))
    assert sections == set(_check_ids())


def test_defaults_in_the_settings_table() -> None:
    (backend, *others) = _table(REFERENCE / "settings.md", "| key | default | meaning |")
    # Its default is too long for the middle of a table.
    assert backend[:2] == ["BACKEND", "that of database"]
    told = {"BACKEND": ast.literal_eval(backend[2].rpartition(": ")[2])}
    told |= {row[0]: ast.literal_eval(row[1]) for row in others}
    assert told == conf.DEFAULTS


@pytest.mark.parametrize("name", BACKENDS)
def test_options_in_the_settings_tables(name: str) -> None:
    backend = conf.backend_class(conf.BACKENDS[name])
    text = (REFERENCE / "settings.md").read_text()
    section = text.split(f"## `OPTIONS` of the {name} backend")[1].split("\n## ")[0]
    table = dict(row[:2] for row in _rows(section.split("|---|---|---|\n")[1]))
    assert set(table) == backend.option_names

    modules = [importlib.import_module(each.__module__) for each in reversed(backend.__mro__)]
    package = sys.modules[backend.__module__.rpartition(".")[0]]
    if package.__name__ != "django_fencedlock.backends":
        modules += [each for each in vars(package).values() if isinstance(each, types.ModuleType)]
    constants = {key: value for each in [conf, *modules] for key, value in vars(each).items()}
    numbers = {key: float(value) for key, value in table.items() if value.isdigit()}
    assert numbers == {key: constants[key] for key in numbers}
    assert "TIMEOUT" in numbers


def test_every_backend_is_in_the_table_and_on_the_page_to_choose() -> None:
    rows = _table(REFERENCE / "settings.md", "| lock service | path | more |")
    assert [row[1] for row in rows] == list(conf.BACKENDS.values())
    page = DOCS / "guides/backends.md"
    (head,) = (line for line in page.read_text().splitlines() if line.startswith("| service |"))
    named = [re.findall(r"\[`?(\w+)`?\]", row[0])[0] for row in _table(page, head)]
    assert named == list(conf.BACKENDS)


def test_every_error_is_in_the_table() -> None:
    told = dict(_table(REFERENCE / "api.md", ERRORS))
    errors = {
        name: thing
        for name, thing in vars(exceptions).items()
        if isinstance(thing, type) and issubclass(thing, exceptions.FencedLockError)
    }
    del errors["FencedLockError"]
    assert set(told) == set(errors)
    for name in set(told) - {"LockRequired", "VersionConflict"}:
        assert told[name] == ", ".join(errors[name].fields), name


def test_every_error_has_a_remedy() -> None:
    page = DOCS / "guides/troubleshooting.md"
    told = {row[0] for row in _table(page, "| error | why | what to do |")}
    assert told == {row[0] for row in _table(REFERENCE / "api.md", ERRORS)}


def test_every_signal_is_in_the_table() -> None:
    table = _table(REFERENCE / "monitoring.md", "| signal | carries as well |")
    known = {name for name, thing in vars(signals).items() if isinstance(thing, Signal)}
    assert {row[0] for row in table} == known


def test_arguments_of_single_instance() -> None:
    page, head = REFERENCE / "celery.md", "| argument | default | meaning |"
    tables = page.read_text().split(f"\n{head}\n")[1:]
    told = {
        row[0]: conf.UNSET if row[1] == "the setting" else ast.literal_eval(row[1])
        for text in tables
        for row in _rows(text.split("\n", 1)[1])
    }
    # As people see them: the last overload.
    parameters = inspect.signature(get_overloads(single_instance)[-1]).parameters
    known = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    assert told == known
    assert set(told) == {*TERMS, "name", "columns"}
    assert {name: getattr(Policy(), name) for name in TERMS} == {name: told[name] for name in TERMS}


def test_the_workflow_has_the_environments_of_tox() -> None:
    config = ConfigParser()
    config.read(ROOT / "tox.ini")
    ours = {env for env in config["tox"]["env_list"].split() if env.startswith("py3")}
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert set(re.findall(r"env: (py[\w-]+)", workflow)) == ours


@pytest.mark.parametrize("module", ["", ".celery", ".models"])
def test_the_api_page_has_what_can_be_imported(module: str) -> None:
    public = importlib.import_module(f"django_fencedlock{module}")
    told = _table(REFERENCE / "api.md", f"## django_fencedlock{module}\n\n| name | what it is |")
    errors = {each for each in vars(exceptions) if each in public.__all__}
    assert set(_called(told)) == set(public.__all__) - errors
    for name, arguments in _called(told).items():
        if arguments is not None:
            assert _defaults(arguments) == _parameters(getattr(public, name)), name


def test_the_errors_of_the_api_page_can_be_imported_at_the_top() -> None:
    errors = set(dict.fromkeys(row[0] for row in _table(REFERENCE / "api.md", ERRORS)))
    assert {*errors, "FencedLockError"} <= set(django_fencedlock.__all__)


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (Lock, "| name | what it does |"),
        (LockSet, "| name | what it does |"),
        (Lease, "| name | what it is |"),
        (LeaseSet, "| name | what it is |"),
        (Holder, "| name | what it is |"),
    ],
)
def test_the_api_page_has_methods_as_they_are(kind: type, head: str) -> None:
    section = f"\n{(REFERENCE / 'api.md').read_text()}".split(f"\n### {kind.__name__}\n")[1]
    told = _rows(section.split(f"\n{head}\n")[1].split("\n", 1)[1])
    for name, arguments in _called(told).items():
        if arguments is None:
            known = hasattr(kind, name) or name in get_annotations(kind)
            assert known or f"self.{name} = " in inspect.getsource(kind), name
        elif arguments != "()" or not inspect.iscoroutinefunction(getattr(kind, name)):
            assert _defaults(arguments) == _parameters(getattr(kind, name)), name


def test_the_arguments_of_lock_are_explained() -> None:
    told = [row[0] for row in _table(REFERENCE / "api.md", "| argument | meaning |")]
    assert told == list(_parameters(Lock))


def test_the_fields_of_a_holder_are_explained() -> None:
    section = (REFERENCE / "api.md").read_text().split("\n### Holder\n")[1]
    rows = _rows(section.split("|---|---|\n")[1])
    named = {name for row in rows for name in row[0].split(", ")}
    assert named == {field.name for field in dataclasses.fields(Holder)}


def test_the_api_page_names_what_else_there_is() -> None:
    told = dict(_table(REFERENCE / "api.md", "| import | what it is |"))
    for module, text in told.items():
        public = getattr(importlib.import_module(module), "__all__", [])
        if module.endswith((".operations", ".admin", ".prometheus", ".forms")):
            assert set(public) <= set(re.findall(r"\w+", text)), module


def _called(rows: list[list[str]]) -> dict[str, str | None]:
    found = {}
    for row in rows:
        for name, arguments in re.findall(r"(\w+)(\([^)]*\))?(?:, |$)", row[0]):
            found[name] = arguments or None
    return found


def _defaults(arguments: str) -> dict[str, Any]:
    names: dict[str, Any] = {"UNSET": conf.UNSET}
    exec(f"def f{arguments}: ...", names)
    return _parameters(names["f"])


def _parameters(thing: Any) -> dict[str, Any]:
    """Of a function, and how they are given; without what is there for mistakes to be told."""
    return {
        name: (parameter.default, parameter.kind)
        for name, parameter in inspect.signature(thing).parameters.items()
        if name not in ("self", "unknown", "extra")
    }


def test_every_reason_of_a_skip_is_documented() -> None:
    table = _table(REFERENCE / "celery.md", "| `reason` | why the task didn't run |")
    assert [ast.literal_eval(row[0]) for row in table] == [each.value for each in Skip]
    for reason in Skip:
        assert f'"{reason}"' in str(SkippedRun.__doc__)


def test_every_aid_is_in_the_table() -> None:
    table = _table(DOCS / "guides/testing.md", "| name | what it does |")
    assert {row[0].partition("(")[0] for row in table} == set(aids.__all__)


def _run(block: Block) -> dict[str, Any]:
    # Blank lines before it, for the right line numbers in tracebacks.
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    # The names of tasks are made of it.
    names: dict[str, Any] = {"__name__": f"docs_{block.page.parent.name}_{block.page.stem}"}
    exec(code, names)
    return names


def _check_ids() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
                first = node.args[0]
                assert isinstance(first, ast.Constant), f"{path}:{node.lineno}"
                if first.value[1:]:  # The doctor's results have a severity alone.
                    yield first.value


def _links(page: Path) -> list[str]:
    """The files, headings and pictures that a page leads to."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [target for target in targets if not re.match(r"\w+:", target)]


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _table(page: Path, head: str) -> list[list[str]]:
    _, after = page.read_text().split(f"\n{head}\n", 1)
    return _rows(after.split("\n", 1)[1])


def _rows(text: str) -> list[list[str]]:
    rows = []
    for line in text.splitlines():
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows
