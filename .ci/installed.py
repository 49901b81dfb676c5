"""
Look at the installed package, in a virtualenv that has nothing but what the package requires.

Run with the root of the checkout, whose files are compared with those that were installed.
"""

import importlib
import re
import subprocess
import sys
from importlib.metadata import metadata, version
from importlib.util import find_spec
from pathlib import Path

import django_fencedlock

#: What only an extra brings. Nothing may need it on import.
EXTRAS = (
    *("redis", "psycopg", "MySQLdb", "kazoo", "boto3"),
    *("prometheus_client", "pytest", "gevent"),
)
#: Modules that say themselves what they need.
NEED_AN_EXTRA = (
    *("redis", "redlock", "postgres", "zookeeper", "dynamodb"),
    *("contrib", "test"),
)

SETTINGS = """
from django.conf import settings
import django
settings.configure(
    INSTALLED_APPS=[
        *(f"django.contrib.{app}" for app in ("admin", "auth", "contenttypes", "messages")),
        "django_fencedlock",
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()
"""

USE = """
from django.core.management import call_command
call_command("migrate", verbosity=0)
call_command("check", "--tag", "models", "--database", "default")
call_command("makemigrations", "--check", verbosity=0)
from django_fencedlock import lock
with lock("first"):
    pass
with lock("first") as lease:
    assert lease.token == 2, lease
call_command("fencedlock", "list")
"""


def main(checkout: Path) -> None:
    home = Path(django_fencedlock.__file__).parent
    assert checkout not in home.parents, f"{home} is the checkout, not what was installed."
    same_files(checkout / "django_fencedlock", home)
    says_what_it_is()
    needs_no_extra(home)
    subprocess.run([sys.executable, "-W", "error", "-c", SETTINGS + USE], check=True)
    print(f"django-fencedlock {version('django-fencedlock')}: installed, imported, used.")


def same_files(wanted: Path, found: Path) -> None:
    ours = {path.relative_to(wanted) for path in wanted.rglob("*") if path.is_file()}
    theirs = {path.relative_to(found) for path in found.rglob("*") if path.is_file()}
    differ = {path for path in ours ^ theirs if path.suffix != ".pyc"}
    assert not differ, f"Checkout and package differ in {sorted(map(str, differ))}."
    assert (found.parent / "pytest_fencedlock.py").is_file(), "The plugin of pytest is missing."


def says_what_it_is() -> None:
    told = metadata("django-fencedlock")
    assert told["Version"] == django_fencedlock.__version__
    assert told["License-Expression"] == "MIT"
    assert told["Description-Content-Type"] == "text/markdown"
    assert told["Requires-Python"] == ">=3.11"
    assert told.get_all("License-File") == ["LICENSE"]
    # A package index has no files beside it that a link could lead to.
    links = re.findall(r"\]\((?!https?:|#)[^)]*\)", str(told.get_payload()))
    assert not links, f"The long description leads to {links}."


def needs_no_extra(home: Path) -> None:
    present = [name for name in EXTRAS if find_spec(name)]
    assert not present, f"{present} came along: the test would prove nothing."
    exec(SETTINGS)
    for path in sorted(home.rglob("*.py")):
        parts = path.relative_to(home.parent).with_suffix("").parts
        if not any(part.startswith(NEED_AN_EXTRA) for part in parts[1:]):
            importlib.import_module(".".join(part for part in parts if part != "__init__"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
