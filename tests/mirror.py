"""
The schema as plain SQL, in the top-level migrations/. Generated from Django's migrations:

    python -m tests.mirror

It needs the servers of the tests. Without MariaDB, its folder is left as it is.
"""

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from django.core.management import call_command
from django.db import connections
from django.db.migrations.loader import MigrationLoader

APP = "django_fencedlock"
ROOT = Path(__file__).resolve().parent.parent / "migrations"
#: The folder of each alias in the tests' DATABASES.
FOLDERS = {"default": "sqlite", "postgres": "postgresql", "mariadb": "mariadb"}
HEADER = """\
-- Generated from {module} by: python -m tests.mirror
-- Never edit this file.
"""


def names() -> list[str]:
    loader = MigrationLoader(None)
    return sorted(name for app, name in loader.disk_migrations if app == APP)


def files(alias: str) -> Iterator[tuple[Path, str]]:
    for name in names():
        for direction in ("up", "down"):
            path = ROOT / FOLDERS[alias] / f"{name}.{direction}.sql"
            yield path, render(name, alias, backwards=direction == "down")


def render(name: str, alias: str, *, backwards: bool) -> str:
    answer = io.StringIO()
    call_command(
        "sqlmigrate", APP, name, database=alias, backwards=backwards, stdout=answer, no_color=True
    )
    header = HEADER.format(module=f"{APP}/migrations/{name}.py")
    return header + answer.getvalue().strip() + "\n"


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from tests.servers import shared, stop_everything

    try:
        for alias, folder in FOLDERS.items():
            if alias in ("postgres", "mariadb"):
                if not shared.available(alias):
                    print(f"{folder}: no server, so its files stay as they are", file=sys.stderr)
                    continue
                server = getattr(shared, alias)()
                # Every server has this database. Nothing is created in it.
                connections.settings[alias].update(
                    server.django("postgres" if alias == "postgres" else "mysql")
                )
            for path, text in files(alias):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                print(path.relative_to(ROOT.parent))
    finally:
        stop_everything()


if __name__ == "__main__":
    main()
