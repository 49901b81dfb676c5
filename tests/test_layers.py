"""Who may import whom: downwards only, and no backend another one, but Redlock that of Redis."""

import ast
import functools
import json
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import django_fencedlock
from tests.scripts import run_python

ROOT = Path(django_fencedlock.__file__).parent
#: From the bottom. A name stands for what is inside of it, too, unless that is named itself.
LAYERS = [
    "core.identity core.jobs core.names core.runtime exceptions lease lease_context logs problems "
    "storage.text",
    "backends.interface conf core.aio core.events signals storage",
    "backends backends.database backends.postgres backends.redis",
    "backends.redlock",
    "core storage.history storage.unfenced",
    "acquiring",
    "lock_sets locks",
    "celery checks forms models operations ops",
    "admin apps contrib management test",
]
PLACES = {name: layer for layer, names in enumerate(LAYERS) for name in names.split()}
#: The layers whose modules may import one another. Backends share nothing with each other.
SIDEWAYS = {0, 1, 4, 7}
DRIVERS = (
    *("celery", "django_redis", "gevent", "kombu", "MySQLdb", "prometheus_client", "psycopg"),
    *("boto3", "pymysql", "redis"),
    # No driver, but much that a process which only locks has no use for.
    "django.test.utils",
)
#: Every module but the root, which is for users, and the migrations.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
    if path.parent.name != "migrations" and path != ROOT / "__init__.py"
}


def place(module: str) -> tuple[int, str]:
    """The layer of a module, and the name that stands for it: the longest one."""
    inside = [name for name in PLACES if f"{module}.".startswith(f"{name}.")]
    assert inside, f"say in LAYERS where {module} belongs"
    return PLACES[max(inside, key=len)], max(inside, key=len)


def may_import(module: str, imported: str) -> bool:
    if not imported:
        return False  # Nothing imports from the root.
    mine, theirs = place(module), place(imported)
    return mine[0] > theirs[0] or mine == theirs or (mine[0] == theirs[0] and mine[0] in SIDEWAYS)


@functools.cache
def imports(module: str) -> set[str]:
    path, own = MODULES[module], f"{ROOT.name}.{module}"
    package = own if path.name == "__init__.py" else own.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names += [f"{base}.{alias.name}" for alias in node.names]
    return {_module(name) for name in names if name.startswith(ROOT.name)} - {module}


def _module(name: str) -> str:
    """The longest start of a dotted name that is a module: the rest is something inside of it."""
    name = name.removeprefix(ROOT.name).removeprefix(".")
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def test_imports_lead_downwards() -> None:
    pairs = [(module, imported) for module in MODULES for imported in imports(module)]
    assert not [pair for pair in pairs if not may_import(*pair)]


def test_no_imports_in_a_circle() -> None:
    list(TopologicalSorter({module: imports(module) for module in MODULES}).static_order())


def test_the_rule_can_fail() -> None:
    for wrong in (
        *(("lease", "locks"), ("backends.database", "backends.redis.scripts"), ("locks", "")),
        *(("core.manager", "checks"), ("admin", "management")),
    ):
        assert not may_import(*wrong)
    assert may_import("backends.redis.backend", "backends.redis.scripts")
    assert may_import("core.manager", "core.keeper")


def loaded(code: str, *arguments: object) -> list[str]:
    code += f"import json; print(json.dumps([m for m in {DRIVERS!r} if m in sys.modules]))"
    done = run_python(*arguments, code=f"import sys\n{code}", DJANGO_SETTINGS_MODULE=None)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


LOCK = """
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_fencedlock"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
)
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
call_command("check")
from django_fencedlock import lock
with lock("x") as lease:
    assert lease.token == 1
"""


def test_importing_the_package_loads_no_driver() -> None:
    assert loaded("import django_fencedlock\n") == []


@pytest.mark.slow
def test_a_lock_on_sqlite_loads_no_driver(tmp_path: Path) -> None:
    assert loaded(LOCK, tmp_path / "db") == []
