"""The top-level migrations/: the same schema as Django's, on every database."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from django_fencedlock.models import (
    Fence,
    ForcedRelease,
    HeldLock,
    LockEvent,
    MessageRecord,
    PendingRun,
)
from tests import mirror

TABLES = (MessageRecord, PendingRun, Fence, ForcedRelease, HeldLock, LockEvent)
ALIASES = [
    # SQLite edits no schema within a test's transaction.
    pytest.param("default", marks=pytest.mark.django_db(transaction=True)),
    pytest.param("postgres", marks=pytest.mark.django_db(databases=["default", "postgres"])),
    pytest.param("mariadb", marks=pytest.mark.django_db(databases=["default", "mariadb"])),
]


@pytest.mark.parametrize("alias", ALIASES)
def test_files_equal_the_migrations(alias: str) -> None:
    folder = mirror.ROOT / mirror.FOLDERS[alias]
    found = {path: path.read_text() for path in folder.iterdir()}
    assert found == dict(mirror.files(alias)), "run: python -m tests.mirror"


@pytest.mark.django_db
def test_migrations_equal_the_models() -> None:
    call_command("makemigrations", "django_fencedlock", check=True, dry_run=True, verbosity=0)


def test_down_removes_the_tables_and_up_makes_the_same_again(migrated: str) -> None:
    alias = migrated
    vendor = connections[alias].vendor
    files = mirror.ROOT / ("mariadb" if vendor == "mysql" else vendor)
    before = _schema(alias)

    for name in reversed(mirror.names()):
        _run(alias, files / f"{name}.down.sql")
    assert _schema(alias) == {}

    for name in mirror.names():
        _run(alias, files / f"{name}.up.sql")
    assert _schema(alias) == before
    assert set(before) == {model._meta.db_table for model in TABLES}
    Fence.objects.using(alias).create(name="x", token=1, owner="me")


@pytest.mark.django_db(databases=["default", "postgres"])
def test_no_table_has_an_index_for_searches_by_prefix() -> None:
    with connections["postgres"].cursor() as cursor:
        cursor.execute(
            "SELECT indexname FROM pg_indexes WHERE indexdef LIKE '%pattern_ops%'"
            " AND starts_with(tablename, 'django_fencedlock_')"
        )
        assert cursor.fetchall() == []


@pytest.mark.django_db(databases=["default", "postgres"])
def test_a_grant_writes_no_unused_index() -> None:
    connection = connections["postgres"]
    with connection.cursor() as cursor:
        for model in (Fence, HeldLock):
            table = model._meta.db_table
            # Not get_constraints(): PostgreSQL 18 lists each NOT NULL there.
            cursor.execute(
                "SELECT indisprimary FROM pg_index WHERE indrelid = %s::regclass", [table]
            )
            # The rows of held locks have a key for the admin, and their name and slot are unique.
            found = sorted(cursor.fetchall(), reverse=True)
            assert found == [(True,), (False,)][: 2 if model is HeldLock else 1], table
            # Django makes a second one for "varchar", which is the same type.
            cursor.execute(
                "SELECT format_type(atttypid, atttypmod) FROM pg_attribute "
                "WHERE attrelid = %s::regclass AND attname IN ('name', 'owner') ORDER BY attname",
                [table],
            )
            types = [("character varying(200)",), ("character varying(32)",)]
            assert cursor.fetchall() == types
    made = Fence.objects.using("postgres").bulk_create(
        [Fence(name=name, token=1, owner="me") for name in ("x", "y")]
    )
    assert list(Fence.objects.using("postgres").order_by("name")) == made


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def migrated(
    request: pytest.FixtureRequest, make_alias: Callable[[dict[str, Any]], str], tmp_path: Path
) -> Iterator[str]:
    if request.param == "sqlite":
        entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db.sqlite3")}
        yield make_alias(entry)
        return
    server = request.getfixturevalue(request.param)
    with _database(server, f"mirror_{request.param}") as name:
        alias = make_alias(server.django(name))
        yield alias
        connections[alias].close()


@contextlib.contextmanager
def _database(server: Any, name: str) -> Iterator[str]:
    server.execute(f"DROP DATABASE IF EXISTS {name}")
    server.execute(f"CREATE DATABASE {name}")
    yield name
    server.execute(f"DROP DATABASE {name}")


def _run(alias: str, path: Path) -> None:
    connection = connections[alias]
    with connection.cursor() as cursor:
        for statement in connection.ops.prepare_sql_script(path.read_text()):
            cursor.execute(statement)


def _schema(alias: str) -> dict[str, Any]:
    connection = connections[alias]
    introspection = connection.introspection
    with connection.cursor() as cursor:
        return {
            table: (
                introspection.get_table_description(cursor, table),
                introspection.get_constraints(cursor, table),
            )
            for table in introspection.table_names(cursor)
            if table.startswith("django_fencedlock_")
        }
