"""An optimistic version: alone, and together with a fence."""

import contextlib
import pickle

import pytest
from django.core import serializers
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, models, transaction
from django.db.models import F

from django_fencedlock.exceptions import LockRequired, StaleFence, VersionConflict
from django_fencedlock.models import Fencing
from tests.models import Contract, Deed, Document, Letter, Paper
from tests.test_write_paths import database, overtake, plainly, refused, rows_of, statements

__all__ = ["database"]


def _set(row, **values):
    for name, value in values.items():
        setattr(row, name, value)
    return row


@pytest.fixture
def document(database):
    return Document.objects.create(text="first")


def versions(model=Document):
    return [row["version"] for row in rows_of(model)]


WRITES = {
    "save": lambda row: row.save(),
    "save_base": lambda row: row.save_base(),
    "update_fields": lambda row: row.save(update_fields=["text"]),
    "force_update": lambda row: row.save(force_update=True),
    "pickled": lambda row: pickle.loads(pickle.dumps(row)).save(),
    "bulk_update": lambda row: type(row).objects.bulk_update([row], ["text"]),
}


@pytest.mark.parametrize("how", WRITES)
def test_every_write_raises_the_version_in_one_statement(document, how):
    with statements(1):
        WRITES[how](_set(document, text="second"))
    assert [(row["text"], row["version"]) for row in rows_of(Document)] == [("second", 1)]
    if how != "pickled":
        with statements(1):
            document.save()
        assert document.version == 2


@pytest.mark.parametrize("how", [*WRITES, "delete"])
def test_what_another_process_has_written_is_not_overwritten(document, how):
    Document.objects.get().save()
    write = WRITES.get(how) or (lambda row: row.delete())
    for _ in range(2):  # what failed once fails again
        with refused(VersionConflict, Document):
            write(_set(document, text="stale"))
        assert document.version == 0
    with pytest.raises(VersionConflict) as caught:
        document.save()
    error = caught.value
    assert (error.model, error.pk, error.version) == ("tests.Document", document.pk, 0)
    assert "it was loaded as version 0, and is 1 now" in str(error)


@pytest.mark.parametrize("how", [*WRITES, "delete"])
def test_what_another_process_has_deleted_is_not_inserted_again(document, how):
    models.QuerySet(Document).delete()
    write = WRITES.get(how) or (lambda row: row.delete())
    with refused(VersionConflict, Document, match="gone"):
        write(document)


def test_update_counts_without_comparing(document):
    with statements(1):
        Document.objects.update(text="all")
    assert versions() == [1]
    document.refresh_from_db()
    Document.objects.filter(text="all").update(text=F("text"))
    with refused(VersionConflict, Document):
        document.save()


@pytest.mark.parametrize("method", ["update", "bulk_update"])
def test_the_version_cannot_be_set(document, method):
    with pytest.raises(TypeError, match="can't set 'version'"):
        if method == "update":
            Document.objects.update(version=7)
        else:
            Document.objects.bulk_update([document], ["version"])


def test_bulk_update_compares_each_version(database):
    rows = Document.objects.bulk_create([Document(text=str(n)) for n in range(5)])
    rows = list(Document.objects.order_by("pk"))
    rows[0].save()
    with statements(3):
        assert Document.objects.bulk_update(rows, ["text"], batch_size=2) == 5
    assert versions() == [row.version for row in rows] == [2, 1, 1, 1, 1]
    Document.objects.filter(pk=rows[3].pk).update(text="newer")
    with refused(VersionConflict, Document, match="one of the rows has another version now"):
        Document.objects.bulk_update([_set(row, text="x") for row in rows], ["text"], batch_size=2)
    assert [row.version for row in rows] == [2, 1, 1, 1, 1]


def test_bulk_update_of_a_row_that_is_gone_writes_none(database):
    rows = [Document.objects.create() for _ in range(2)]
    models.QuerySet(Document).filter(pk=rows[0].pk).delete()
    with refused(VersionConflict, Document, match="gone"):
        Document.objects.bulk_update([_set(row, text="x") for row in rows], ["text"])


def test_a_version_that_was_not_loaded_is_no_version(document):
    found = Document.objects.defer("version").get()
    for write in (
        found.save,
        found.delete,
        lambda: Document.objects.bulk_update([found], ["text"]),
    ):
        with refused(VersionConflict, Document, match="wasn't loaded"):
            write()


def test_an_object_that_was_never_loaded_takes_no_others_place(document, database):
    alias = document._state.db
    with refused(IntegrityError, Document), transaction.atomic(using=alias):
        Document(pk=document.pk, text="other").save()
    document.save()
    with refused(VersionConflict, Document):
        Document(pk=document.pk, text="other").save(update_fields=["text"])
    # A form may carry the version along.
    Document(pk=document.pk, text="other", version=1).save(force_update=True)
    assert versions() == [2]


def test_new_rows_begin_at_0(database):
    Document.objects.create(version=7)
    Document.objects.bulk_create([Document(version=7)])
    document = Document(version=7)
    document.save()
    assert versions() == [0, 0, 0]
    assert document.version == 0
    document.save()


def test_rows_that_conflict_cannot_be_counted(database):
    target = {} if database == "mariadb" else {"unique_fields": ["id"]}
    with pytest.raises(ImproperlyConfigured, match="can't compare the versions"):
        Document.objects.bulk_create(
            [Document(pk=5)], update_conflicts=True, update_fields=["text"], **target
        )
    Document.objects.bulk_create([Document(pk=5, text="a")])
    Document.objects.bulk_create([Document(pk=5, text="b")], ignore_conflicts=True)
    assert rows_of(Document) == [{"id": 5, "text": "a", "version": 0}]


def test_a_fixture_overwrites_the_row_and_counts(document):
    text = serializers.serialize("json", [_set(document, text="fixture")])
    assert "version" not in text
    found = Document.objects.get()
    found.save()
    (fixture,) = serializers.deserialize("json", text)
    fixture.save()
    assert [(row["text"], row["version"]) for row in rows_of(Document)] == [("fixture", 2)]
    assert fixture.object.version == 2
    with refused(VersionConflict, Document):
        found.save()


def test_a_fixture_of_a_child_counts_in_its_parents_table(database):
    letter = Letter.objects.create(sender="ada")
    text = serializers.serialize("json", [_set(letter, sender="fixture")])
    (fixture,) = serializers.deserialize("json", text)
    fixture.save()
    assert versions(Paper) == [1]
    with refused(VersionConflict, Letter, Paper):
        _set(letter, sender="stale").save()


def test_get_or_create_and_update_or_create(database):
    document, created = Document.objects.get_or_create(text="a")
    assert created
    document, created = Document.objects.update_or_create(text="a", defaults={"text": "b"})
    assert not created
    assert versions() == [document.version] == [1]


def test_many_are_deleted_without_comparing(database):
    Document.objects.bulk_create([Document(), Document()])
    with statements(1):
        assert Document.objects.all().delete()[0] == 2


def test_an_object_is_deleted_in_one_statement(document):
    with statements(1):
        document.delete()
    assert document.pk is None
    assert not rows_of(Document)


def test_a_parents_version(database):
    letter = Letter.objects.create(pages=1, sender="ada")
    old = Letter.objects.get()
    with statements(2):
        letter.save()
    with statements(2):
        letter.save(update_fields=["sender"])
    Letter.objects.update(sender="bo")
    letter.refresh_from_db()
    assert letter.version == 3
    Letter.objects.bulk_update([letter], ["sender"])
    assert versions(Paper) == [letter.version] == [4]
    for write in (
        lambda: _set(old, sender="x").save(),
        lambda: old.save(update_fields=["sender"]),
        lambda: Letter.objects.bulk_update([_set(old, sender="x")], ["sender"]),
        lambda: old.delete(),
    ):
        with refused(VersionConflict, Letter, Paper):
            write()


def test_a_child_that_fails_half_way_can_be_saved_again(database):
    Letter.objects.create(sender="taken")
    letter = Letter.objects.create(sender="free")
    letter.sender = "taken"
    alias = letter._state.db
    with refused(IntegrityError, Letter, Paper), transaction.atomic(using=alias):
        letter.save()
    assert letter.version == 0
    letter.sender = "free"
    letter.save()
    assert letter.version == 1


# Together with a fence


@pytest.mark.parametrize("model", [Contract, Deed])
class TestBoth:
    def test_both_are_written_in_one_statement(self, database, model):
        row = model.objects.create()
        with row.fencing.lock() as lease:
            for write in [*WRITES.values()]:
                row = model.objects.get()
                with statements(1):
                    write(row)
            assert [(each["fence"], each["version"]) for each in rows_of(model)] == [
                (lease.token, len(WRITES))
            ]
            with statements(2):
                model.objects.update(text="x")
            row = model.objects.get()
            with statements(1):
                row.delete()

    def test_both_are_compared(self, database, model):
        row = model.objects.create()
        with row.fencing.lock() as lease:
            twin = model.objects.get()
            row.save()
            # The twin is no older than the lock, but older than the row.
            for write in (*WRITES.values(), lambda row: row.delete()):
                with refused(VersionConflict, model):
                    write(_set(twin, text="x"))
                assert (twin.fence, twin.version) == (0, 0)
            overtake(lease)
            for write in (*WRITES.values(), lambda row: row.delete()):
                with refused(StaleFence, model):
                    write(_set(row, text="x"))
                assert (row.fence, row.version) == (1, 1)
            for write in (
                lambda: model.objects.update(text="x"),
                lambda: model.objects.all().delete(),
            ):
                with refused(StaleFence, model):
                    write()

    def test_a_version_is_no_lease(self, database, model):
        row = model.objects.create()
        for write in (*WRITES.values(), lambda row: row.delete()):
            with refused(LockRequired, model):
                write(row)

    def test_writes_without_lock_that_are_allowed_are_counted_and_compared(
        self, database, model, monkeypatch
    ):
        monkeypatch.setattr(model, "fencing", Fencing(without_lock="allow"))
        row = model.objects.create()
        plainly(model, fence=5)
        twin = model.objects.get()
        row.refresh_from_db()
        row.save()
        model.objects.update(text="x")
        row.refresh_from_db()
        model.objects.bulk_update([row], ["text"])
        assert [(each["fence"], each["version"]) for each in rows_of(model)] == [(5, 3)]
        for write in (*WRITES.values(), lambda row: row.delete()):
            with refused(VersionConflict, model):
                write(twin)


@pytest.mark.django_db
def test_within_a_tests_own_transaction():
    document = Document.objects.create()
    twin = Document.objects.get()
    document.save()
    for write in (*WRITES.values(), lambda row: row.delete()):
        with refused(VersionConflict, Document), transaction.atomic():
            write(_set(twin, text="x"))
    with contextlib.suppress(VersionConflict), transaction.atomic():
        twin.save()
    document.save()
    assert connections["default"].in_atomic_block
