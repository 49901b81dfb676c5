"""Who may import whom: downwards only, and no backend another one."""

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import django_fencedlock

ROOT = Path(django_fencedlock.__file__).parent

# A name stands for the module and all that is inside of it.
LAYERS: dict[int, list[str]] = {
    0: [
        *("exceptions", "lease", "logs", "problems"),
        *("core.identity", "core.names", "core.runtime", "storage.text"),
    ],
    1: [
        *("backends.interface", "conf", "core.aio", "core.events", "signals"),
        *("storage.background_writer", "storage.connections", "storage.message_records"),
        *("storage.dialect", "storage.fenced_atomic", "storage.fences"),
        *("storage.pending_runs", "storage.postgresql"),
        *("storage.records", "storage.rows", "storage.tables", "storage.vendors"),
    ],
    2: ["backends.database", "backends.postgres", "backends.redis"],
    3: [*("core.grants", "core.keeper", "core.manager"), *("storage.history", "storage.unfenced")],
    4: ["locks"],
    5: ["celery", "checks", "models", "operations", "ops"],
    6: ["admin", "apps", "contrib", "management", "test"],
}
# The inits that only collect names. The root is for users: nothing below it imports from it.
COLLECTORS = {"": 5, "backends": 2, "celery": 5, "core": 0, "models": 5, "ops": 5, "storage": 0}
# What one may import of one's own layer. Backends share nothing with each other.
SIDEWAYS = {0, 1, 3, 5}

DRIVERS = (
    *("celery", "django_redis", "gevent", "kombu", "MySQLdb", "prometheus_client", "psycopg"),
    *("pymysql", "redis"),
    # No driver, but much that a process which only locks has no use for.
    "django.test.utils",
)


def _modules() -> dict[str, Path]:
    """Every module but the migrations, by its name inside of the package."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "migrations":
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = _modules()


def test_every_module_has_a_layer() -> None:
    homeless = [module for module in MODULES if module not in COLLECTORS and _place(module) is None]
    assert not homeless, "say in LAYERS where these belong"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_lead_downwards(module: str) -> None:
    wrong = [
        f"{module or 'the root'} line {line} imports {imported}"
        for imported, line in _imports(module)
        if not _may_import(module, imported)
    ]
    assert not wrong


def test_no_imports_in_a_circle() -> None:
    graph = {module: {name for name, _ in _imports(module)} - {module} for module in MODULES}
    list(TopologicalSorter(graph).static_order())


def test_the_rule_can_fail() -> None:
    assert not _may_import("lease", "locks")
    assert not _may_import("backends.database", "backends.redis.scripts")
    assert not _may_import("core.manager", "checks")
    assert not _may_import("admin", "management")
    assert not _may_import("locks", "")
    assert _may_import("backends.redis.backend", "backends.redis.scripts")
    assert _may_import("core.manager", "core.keeper")


def test_importing_the_package_loads_no_driver() -> None:
    assert _loaded("import django_fencedlock") == []


@pytest.mark.slow
def test_a_lock_on_sqlite_loads_no_driver(tmp_path: Path) -> None:
    script = f"""
        import django
        from django.conf import settings
        settings.configure(
            INSTALLED_APPS=["django_fencedlock"],
            DATABASES={{"default": {{
                "ENGINE": "django.db.backends.sqlite3", "NAME": {str(tmp_path / "db")!r}}}}},
        )
        django.setup()
        from django.core.management import call_command
        call_command("migrate", verbosity=0)
        call_command("check")
        from django_fencedlock import lock
        with lock("x") as lease:
            assert lease.token == 1
    """
    assert _loaded(script) == []


def _may_import(module: str, imported: str) -> bool:
    if imported == module:
        return True
    mine, theirs = _place(module), _place(imported)
    if mine is None or theirs is None:
        return False
    return theirs[0] < mine[0] or (
        theirs[0] == mine[0] and (mine[0] in SIDEWAYS or mine[1] == theirs[1])
    )


def _place(module: str) -> tuple[int, str] | None:
    """The layer of a module, and the name in `LAYERS` that stands for it."""
    if module in COLLECTORS:
        return COLLECTORS[module], module
    for layer, names in LAYERS.items():
        for name in names:
            start = name.rstrip("*")
            if module == name or module.startswith(f"{start}." if start == name else start):
                return layer, name
    return None


@functools.cache
def _imports(module: str) -> list[tuple[str, int]]:
    """The modules of the package that a module imports, wherever in it; with the lines."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = list(_from(node, package))
        else:
            continue
        for name in names:
            head, _, inside = name.partition(".")
            if head == ROOT.name:
                found.append((_module(inside), node.lineno))
    return found


def _from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        # Each dot beyond the first leads out of one package.
        parts = package.split(".") if package else []
        parts = [ROOT.name, *parts[: len(parts) - (node.level - 1)]]
        base = ".".join([*parts, *([base] if base else [])])
    for alias in node.names:
        yield f"{base}.{alias.name}"


def _module(name: str) -> str:
    """The longest start of a dotted name that is a module: the rest is something inside of it."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def _loaded(script: str) -> list[Any]:
    """The drivers that are loaded after a script ran in an interpreter of its own."""
    lines = script.strip().splitlines()
    code = "\n".join(line.removeprefix("        ") for line in lines)
    code += f"\nimport json, sys\nprint(json.dumps([m for m in {DRIVERS!r} if m in sys.modules]))"
    environment = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
