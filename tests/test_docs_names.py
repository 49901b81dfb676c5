"""What the pages name is there by that name, and numbers that they tell are those of the code."""

import re
from collections.abc import Iterator
from importlib import import_module

import pytest
from prometheus_client import CollectorRegistry

from django_fencedlock import conf
from django_fencedlock.celery.policy import _CHOICES
from django_fencedlock.contrib import prometheus
from django_fencedlock.models.fencing import MODES
from tests.test_docs import PAGES, ROOT, _check_ids

TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}

#: Where, what is told, with a group for the number; and the constant that it is.
NUMBERS = [
    ("admin", r"newest (\d+) of a lock are kept", "conf.HISTORY"),
    ("admin", r"the newest ([\d,]+) in all", "storage.history.MAX_ROWS"),
    ("admin", r"give or take (\d+)", "storage.history.SLACK"),
    ("admin", r"(\d+) rows at most", "storage.history.BATCH"),
    ("admin", r"state asks about (\d+) locks", "admin.locks.STATE_FILTER_LIMIT"),
    ("admin", r"At most (\d+) locks at once", "admin.release.MAX_LOCKS"),
    ("admin", r"tried within (\d+) seconds", "admin.release.TIME_LIMIT"),
    ("backends", r"`MAX_WAITERS` \((\d+)\)", "backends.postgres_taking.MAX_WAITERS"),
    ("backends", r"`MAX_LOCKS` \((\d+)\)", "backends.postgres_taking.MAX_LOCKS"),
    ("backends", r"begins again each (\d+) s", "backends.postgres_waiting.SLICE"),
    ("backends", r"option `TIMEOUT` \((\d+) s\); after", "conf.TIMEOUT"),
    ("choosing", r"more than (\d+) locks held", "backends.postgres_taking.MAX_LOCKS"),
    ("commands", r"covers up to ([\d,]+) locks", "ops.registry.BATCH"),
    ("commands", r"has (\d+) s \(`--timeout`\)", "ops.doctor.LIMIT"),
    ("commands", r"it expires after (\d+) s", "ops.doctor.TTL"),
    ("glossary", r"Up to (\d+) characters", "core.names.MAX_LENGTH"),
    ("metrics", r"counts up to (\d+) patterns", "contrib.prometheus.MAX_PATTERNS"),
    ("pgbouncer", r"`MAX_WAITERS` \((\d+)\)", "backends.postgres_taking.MAX_WAITERS"),
    ("production", r"doctor --timeout (\d+)", "ops.doctor.LIMIT"),
    ("restore", r"batches of (\d+) by", "ops.resync.BATCH"),
    ("restore", r"it waits for (\d+) s, then reports", "storage.fences.RESYNC_PATIENCE"),
    ("settings", r"of a lock: (\d+) unless", "conf.HISTORY"),
    ("settings", r"another number, up to (\d+)", "conf.MOST_HISTORY"),
    ("transactions", r"keeps up to (\w+) idle ones", "storage.connections.MAX_IDLE"),
    ("transactions", r"uses up to (\w+) at once", "storage.connections.MAX_CONNECTIONS"),
]
WORDS = {"two": 2, "ten": 10}


@pytest.mark.parametrize(("page", "told", "constant"), NUMBERS)
def test_numbers_are_those_of_the_code(page: str, told: str, constant: str) -> None:
    text = " ".join(TEXTS[f"docs/{page}.md"].split())
    (number,) = re.findall(told, text)
    module, _, name = constant.rpartition(".")
    found = getattr(import_module(f"django_fencedlock.{module}"), name)
    assert WORDS.get(number) or int(number.replace(",", "")) == found


#: Django's own, which some page names.
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
    """What pages name by a pattern, and isn't known."""
    found = {page: set(re.findall(pattern, text)) - known for page, text in TEXTS.items()}
    return {page: names for page, names in found.items() if names}
