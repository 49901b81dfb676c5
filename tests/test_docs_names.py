"""What the pages name is there by that name, and numbers that they tell are those of the code."""

import ast
import itertools
import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from django_fencedlock import conf
from django_fencedlock.admin import locks as admin
from django_fencedlock.backends.redis import connections
from django_fencedlock.celery import policy
from django_fencedlock.contrib import prometheus
from django_fencedlock.core import aio, names, runtime
from django_fencedlock.models.fencing import MODES
from django_fencedlock.ops import doctor, resync
from django_fencedlock.ops.registry import State
from django_fencedlock.problems import Level
from django_fencedlock.storage import history
from tests import test_write_mutants
from tests.faults import checker, test_model
from tests.test_docs import (
    DOCS,
    FOR_CONTRIBUTORS,
    PACKAGE,
    PAGES,
    ROOT,
    Block,
    _blocks,
    _check_ids,
    _rows,
    _table,
)

TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in [*PAGES, *FOR_CONTRIBUTORS]}
INVARIANTS = DOCS / "dev/invariants.md"
COLUMNS = " model | weak variants that break it | fault lab | tests | mutants of the code |"

#: What is said of the defaults and limits, and what they are.
NUMBERS = {
    r"(?:by default|expires?:?|is held|free) (?:after|for) (\d+) seconds": conf.DEFAULTS["TTL"],
    r"(?:default is|waits up to|for up to) (\d+) (?:s\b|seconds)": conf.DEFAULTS[
        "BLOCKING_TIMEOUT"
    ],
    r"1 to (\d+) characters": names.MAX_LENGTH,
    r"newest (\d+) events of each kind": conf.history(),
    r"about ([\d,]+) in all": history.MAX_ROWS,
    r"counts up to (\d+) patterns": prometheus.MAX_PATTERNS,
    r"[Aa]t most (\d+) threads": aio.WAITERS,
    r"first (\d+) locks": admin.STATE_FILTER_LIMIT,
    r"at most (\d+) locks and": admin.MAX_LOCKS,
    r"(\d+) s \(`--timeout`\)": doctor.LIMIT,
    r"in batches of (\d+)": resync.BATCH,
    r"per (\d+) leases": connections.AT_ONCE,
    r"[Mm]ore than ([\d,]+) reports": runtime.MAX_QUEUED,
}
OF_DJANGO = {"E005", "E032"}
SETTINGS = {
    "FENCEDLOCK",
    "FENCEDLOCK_WITHOUT_LOCK",
    "FENCEDLOCK_HISTORY",
    "FENCEDLOCK_ABORT_SIGNAL",
}


def test_checks_that_are_named_exist() -> None:
    known = {*_check_ids(), *OF_DJANGO}
    assert _named(r"\b[EIW]0\d\d\b", known) == {}


def test_settings_that_are_named_exist() -> None:
    source = (ROOT / "django_fencedlock/conf.py").read_text()
    assert all(f'"{each}"' in source for each in SETTINGS)
    assert _named(r"\bFENCEDLOCK(?!_TEST)(?:_[A-Z]+)*\b", SETTINGS) == {}


def test_values_of_arguments_that_are_named_exist() -> None:
    known = {**policy._CHOICES, "without_lock": conf.WITHOUT_LOCK, "mode": MODES}
    for argument, allowed in known.items():
        named = _named(rf'\b{argument}="(\w+)"', set(allowed))
        assert named == {}, argument


def test_metrics_that_are_named_exist(metrics: set[str]) -> None:
    assert _named(r"(?<!#)\bfencedlock_[a-z]+_[a-z_]+\b", metrics) == {}


def test_tests_that_are_named_exist() -> None:
    safety, features = (_rows(text) for text in INVARIANTS.read_text().split("|---|\n")[2:])
    named = {
        (module, name)
        for cell in [*(row[4] for row in safety), *(row[1] for row in features)]
        for module, names in re.findall(r"([\w/]+): ([^;]*)", cell)
        for name in re.split(r", ", names)
    }
    assert len(named) > 100
    assert named - _tests() == set()


def test_the_invariants_are_those_of_the_models_and_of_the_fault_lab() -> None:
    rows = _table(INVARIANTS, f"| invariant |{COLUMNS}")
    weak: dict[str, set[tuple[str, str]]] = {promise: set() for promise in test_model.PROMISES}
    for model, variant, _, broken in test_model.WEAK:
        for promise in broken.split():
            weak[promise].add((model, variant))
    told = {
        row[1]: {
            (model, variant)
            for model, variants in re.findall(r"(\w+): ([^;]*)", row[2])
            for variant in variants.split(", ")
        }
        for row in rows
        if row[1]
    }
    assert told == weak
    checked = {re.match(r"I\d+", check.__doc__ or "")[0] for check in checker.CHECKS}  # type: ignore[index]
    assert {each for row in rows for each in row[3].split(", ") if each} == checked


def test_the_mutants_of_the_invariants_are_tried() -> None:
    cells = [row[5] for row in _table(INVARIANTS, f"| invariant |{COLUMNS}") if row[5]]
    functions = {function.__name__ for function in test_write_mutants.FUNCTIONS}
    named = {name for cell in cells for name in cell.split(", ")}
    assert named == functions | set(test_write_mutants.STATEMENTS)


def _tests() -> set[tuple[str, str]]:
    contract = ROOT / "django_fencedlock/test/contract"
    modules = dict.fromkeys(contract.rglob("*.py"), "contract")
    folder = ROOT / "tests"
    for page in folder.rglob("test_*.py"):
        modules[page] = str(page.relative_to(folder).with_suffix(""))
    found = {page: re.findall(r"def test_(\w+)", page.read_text()) for page in modules}
    return {(modules[page], name) for page, names in found.items() for name in names}


@pytest.mark.parametrize("pattern", list(NUMBERS))
def test_numbers_that_are_quoted_are_right(pattern: str) -> None:
    found = {
        number for text in TEXTS.values() for number in re.findall(pattern, " ".join(text.split()))
    }
    assert {float(number.replace(",", "")) for number in found} == {float(NUMBERS[pattern])}


def test_messages_that_are_quoted_exist() -> None:
    """The words of an output, except for values, follow each other so in texts of the package."""
    unknown = {
        f"{block}: {pair}"
        for page in PAGES
        if page != ROOT / "example_project/README.md"  # By test_example.py.
        for block in _blocks(page)
        for pair in _pairs(_outputs(block))
        if pair not in CORPUS
    }
    assert unknown == set()


def test_a_message_that_does_not_exist_is_found() -> None:
    assert not set(_pairs("It is held by somebody else.")) <= CORPUS


def test_a_name_that_does_not_exist_is_found() -> None:
    assert _named(r"\bFENCEDLOCK_[A-Z]+\b", SETTINGS - {"FENCEDLOCK_HISTORY"})


@pytest.fixture
def metrics() -> Iterator[set[str]]:
    registry = CollectorRegistry()
    prometheus.install(registry=registry)
    yield {
        f"{family.name}{end}"
        for family in registry.collect()
        for end in ("", "_total", "_count", "_sum", "_bucket")
    }
    prometheus.uninstall()


def _named(pattern: str, known: set[str]) -> dict[str, set[str]]:
    found = {page: set(re.findall(pattern, text)) - known for page, text in TEXTS.items()}
    return {page: names for page, names in found.items() if names}


def _outputs(block: Block) -> str:
    """What a block shows of outputs of this package: not those of Celery, Django and readers."""
    if block.language not in ("", "text"):
        return ""
    commands = [line for line in block.text.splitlines() if line.startswith("$ ")]
    if block.language == "" and not any("fencedlock " in line for line in commands):
        return ""
    lines = [line for line in block.text.splitlines() if not FOREIGN.search(line)]
    return "\n".join(lines)


#: Commands, their answers to a question, and lines of Celery, of Django and of a reader's code.
FOREIGN = re.compile(
    r"^\$ |^y$|beat: |\bTask [\w.]+\[|^\[|^\{|^System check|is paused"
    r"|^Migrations for|^Operations to|pply all migrations|^Running m|\+ Create|DONE$|^Superuser"
)
#: Words that are values: in tables, and in the texts of others.
VALUES = {*map(str, State), *(level.name.lower() for level in Level), "MainThread", "ms", "s"}
VALUES |= {"idle", "needs", "nightly", "raised", "server", "task", "token", "transaction", "would"}
WORD = re.compile(r"(?![A-Z]{2})([A-Za-z]+(?:['-][a-z]+)*),?")


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Words of a text that follow each other: no names, no numbers, and nothing in quotes."""
    for line in re.sub(r"'[^' ]*'|\(.*?\)", "0", text).splitlines():
        tokens = ["0" if token.strip(",.:;") in VALUES else token for token in line.split()]
        for first, second in itertools.pairwise(tokens):
            # A sentence ends with the second one, if at all.
            found = WORD.fullmatch(first), WORD.fullmatch(second.rstrip(".:;"))
            if found[0] and found[1]:
                yield found[0][1], found[1][1]


def _texts() -> Iterator[str]:
    """The texts of the package, with a 0 for each value in them."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else " 0 " for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%\w", " 0 ", node.value)


#: What every text of the package says, by two words each.
CORPUS = {pair for text in _texts() for pair in _pairs(" ".join(text.split()))}
