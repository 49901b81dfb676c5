"""What the pages name is there by that name, and numbers that they tell are those of the code."""

import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from django_fencedlock import conf
from django_fencedlock.celery.policy import _CHOICES
from django_fencedlock.contrib import prometheus
from django_fencedlock.models.fencing import MODES
from tests.test_docs import PAGES, ROOT, _check_ids

TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}


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
    known = {**_CHOICES, "without_lock": conf.WITHOUT_LOCK, "mode": MODES}
    for argument, allowed in known.items():
        named = _named(rf'\b{argument}="(\w+)"', set(allowed))
        assert named == {}, argument


def test_metrics_that_are_named_exist(metrics: set[str]) -> None:
    assert _named(r"\bfencedlock_[a-z]+_[a-z_]+\b", metrics) == {}


def test_tests_that_are_named_exist() -> None:
    page = (ROOT / "docs/dev/promises.md").read_text()
    rows = re.findall(r"^\| .* \| (.*`) \|$", page, re.M)
    named = {
        (module, name)
        for module, names in re.findall(r"([\w/]+): ([^;]*)", "; ".join(rows))
        for name in re.findall(r"`(\w+)`", names)
    }
    assert len(rows) > 70
    assert named - _tests() == set()


def _tests() -> set[tuple[str, str]]:
    contract = ROOT / "django_fencedlock/test/contract"
    modules = dict.fromkeys(contract.rglob("*.py"), "contract")
    folder = ROOT / "tests"
    for page in folder.rglob("test_*.py"):
        modules[page] = str(page.relative_to(folder).with_suffix(""))
    found = {page: re.findall(r"def test_(\w+)", page.read_text()) for page in modules}
    return {(modules[page], name) for page, names in found.items() for name in names}


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
