"""Names of locks that are made of texts which the database takes for equal, such as a and A."""

import re

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, models
from django.test.utils import isolate_apps

from django_fencedlock import lock
from django_fencedlock.exceptions import LockRequired, StaleFence
from django_fencedlock.models import FencedModel, Fencing, checks
from tests.test_write_paths import database, overtake, plainly, refused, rows_of, statements

__all__ = ["database"]

COLLATIONS = {"default": "NOCASE", "postgres": "tests_nocase", "mariadb": "utf8mb4_unicode_ci"}


@pytest.fixture
def tables(database):
    connection = connections[database]
    if database == "postgres":
        try:
            with connection.cursor() as cursor:
                cursor.execute(
                    "CREATE COLLATION IF NOT EXISTS tests_nocase "
                    "(provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
                )
        except DatabaseError as exc:
            pytest.skip(f"this PostgreSQL has no such collations: {exc}")
    terms = {"max_length": 20, "db_collation": COLLATIONS[database]}
    with isolate_apps("tests"):

        class Code(FencedModel):
            fencing = Fencing("code:{text}")

            text = models.CharField(**terms)
            number = models.IntegerField(default=0)

            class Meta:
                app_label = "tests"

        class Key(FencedModel):
            text = models.CharField(primary_key=True, **terms)
            number = models.IntegerField(default=0)

            class Meta:
                app_label = "tests"

    with connection.schema_editor() as editor:
        editor.create_model(Code)
        editor.create_model(Key)
    yield Code, Key
    with connection.schema_editor() as editor:
        editor.delete_model(Code)
        editor.delete_model(Key)


@pytest.mark.parametrize("order", ["aA", "Aa"])
def test_rows_of_one_lock_are_distinguished_from_those_of_the_other(tables, order):
    code = tables[0]
    for text in order:
        with lock(f"code:{text}"):
            code.objects.create(text=text)
    assert code.objects.filter(text="a").count() == 2
    small = next(row for row in code.objects.all() if row.text == "a")
    with lock("code:a"):
        for write in (
            lambda: code.objects.filter(text="a").update(number=9),
            lambda: code.objects.update(number=9),
            lambda: code.objects.filter(text="a").delete(),
        ):
            with refused(LockRequired, code, match="'code:A'"):
                write()
        with statements(2):
            assert code.objects.filter(pk=small.pk).update(number=5) == 1
        assert {row["text"]: row["number"] for row in rows_of(code)} == {"A": 0, "a": 5}
    with lock("code:A") as upper, lock("code:a") as lower:
        assert upper.token != lower.token
        assert code.objects.filter(text="a").update(number=7) == 2
        fences = {row["text"]: row["fence"] for row in rows_of(code)}
        assert fences == {"A": upper.token, "a": lower.token}
        overtake(upper)
        for write in (lambda: code.objects.update(number=9), lambda: code.objects.all().delete()):
            with refused(StaleFence, code):
                write()
        assert code.objects.filter(pk=small.pk).delete()[0] == 1


def _writes_of(row, text):
    code = type(row)
    row.text = text
    return (
        row.save,
        lambda: row.save(update_fields=["number"]),
        lambda: code.objects.bulk_update([row], ["number"]),
        lambda: code(pk=row.pk, text=text, number=9).save(force_update=True),
        row.delete,
    )


def test_an_object_is_not_written_under_the_lock_of_an_equal_text(tables):
    code = tables[0]
    with lock("code:A"):
        code.objects.create(text="A")
    plainly(code, fence=0)
    for text in ("a", "A "):
        with lock(f"code:{text}"):
            for write in _writes_of(code.objects.get(), text):
                with refused(StaleFence, code):
                    write()


def test_a_row_is_not_written_under_the_lock_of_an_equal_key(tables):
    key = tables[1]
    with key.fencing.lock(pk="A"):
        key.objects.create(pk="A")
    plainly(key, fence=0)
    with key.fencing.lock(pk="a"):
        for write in (
            lambda: key(pk="a", number=9).save(force_update=True),
            lambda: key(pk="a", number=9).save(update_fields=["number"]),
            lambda: key.objects.bulk_update([key(pk="a", number=9)], ["number"]),
            lambda: key(pk="a").delete(),
            lambda: key.objects.filter(pk="a").update(number=9),
            lambda: key.objects.filter(pk="a").delete(),
            lambda: key.objects.update_or_create(pk="a", defaults={"number": 9}),
        ):
            with refused((StaleFence, LockRequired), key):
                write()
    with key.fencing.lock(pk="A"):
        with statements(1):
            key(pk="A", number=5).save(force_update=True)
        key.objects.filter(pk="a").update(number=6)
        key(pk="A").delete()


def test_a_conflict_with_an_equal_key_does_not_show_the_lock(tables, database):
    key = tables[1]
    target = {} if database == "mariadb" else {"unique_fields": ["text"]}
    why = "rows of another lock, as the database takes 'a' for 'A'"
    with key.fencing.lock(pk="a"), refused(ImproperlyConfigured, key, match=why):
        key.objects.bulk_create(
            [key(pk="a")], update_conflicts=True, update_fields=["number"], **target
        )


def test_the_check_reports_them(tables, database, monkeypatch):
    monkeypatch.setattr(checks.apps, "get_models", lambda: tables)
    found = {str(each) for each in checks.table_problems([database]) if each.id == "W026"}
    for column in ("tests_code", "tests_key"):
        assert any(
            re.search(rf"'text' of '{column}' .*{database!r} takes 'a' for 'A'", each)
            for each in found
        )
    assert len(found) == 2
    if database == "postgres":
        assert all("db_collation='C'" in each for each in found)
