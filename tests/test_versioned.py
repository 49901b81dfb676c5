"""An optimistic version: alone, and together with a fence."""

import pickle

import pytest
from django.core import serializers
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, models, transaction
from django.db.models import F

from django_fencedlock.exceptions import StaleFence, VersionConflict
from django_fencedlock.models import Fencing
from tests.models import Contract, Deed, Document, Letter, Paper
from tests.test_write_paths import database, overtake, plainly, refused, set_, statements
from tests.test_write_rules import all_refused, update_conflicts, values_of

__all__ = ["database"]


@pytest.fixture
def document(database):
    return Document.objects.create(text="first")


def versions(model=Document):
    return [version for (version,) in values_of(model, "version")]


SAVES = {
    "save": lambda row: row.save(),
    "save_base": lambda row: row.save_base(),
    "update_fields": lambda row: row.save(update_fields=["text"]),
    "force_update": lambda row: row.save(force_update=True),
    "pickled": lambda row: pickle.loads(pickle.dumps(row)).save(),
    "bulk_update": lambda row: type(row).objects.bulk_update([row], ["text"]),
}
WRITES = {**SAVES, "delete": lambda row: row.delete()}


def all_conflict(row):
    before = row.version
    for write in WRITES.values():
        with refused(VersionConflict, type(row)):
            write(set_(row, text="stale"))
        assert row.version == before


@pytest.mark.parametrize("how", SAVES)
def test_every_write_raises_the_version_in_one_statement(document, how):
    with statements(1):
        SAVES[how](set_(document, text="second"))
    assert values_of(Document, "text", "version") == [("second", 1)]
    if how != "pickled":
        with statements(1):
            document.save()
        assert document.version == 2


def test_what_another_process_has_written_is_not_overwritten(document):
    Document.objects.get().save()
    all_conflict(document)
    all_conflict(document)  # What failed once fails again.
    with pytest.raises(VersionConflict) as caught:
        document.save()
    error = caught.value
    assert (error.model, error.pk, error.version) == ("tests.Document", document.pk, 0)
    assert "it was loaded as version 0, and its row has version 1 now" in str(error)


def test_what_another_process_has_deleted_is_not_inserted_again(document):
    models.QuerySet(Document).delete()
    for write in WRITES.values():
        with refused(VersionConflict, Document, match="row was deleted"):
            write(document)


def test_update_counts_without_comparing(document):
    with statements(1):
        Document.objects.update(text="all")
    assert versions() == [1]
    document.refresh_from_db()
    Document.objects.filter(text="all").update(text=F("text"))
    all_conflict(document)


def test_the_version_cannot_be_set(document):
    with pytest.raises(TypeError, match="can't set 'version'"):
        Document.objects.update(version=7)
    with pytest.raises(TypeError, match="can't set 'version'"):
        Document.objects.bulk_update([document], ["version"])


def test_bulk_update_compares_each_version(database):
    Document.objects.bulk_create([Document(text=str(n)) for n in range(5)])
    rows = list(Document.objects.order_by("pk"))
    rows[0].save()
    with statements(3):
        assert Document.objects.bulk_update(rows, ["text"], batch_size=2) == 5
    assert versions() == [row.version for row in rows] == [2, 1, 1, 1, 1]
    Document.objects.filter(pk=rows[3].pk).update(text="newer")
    with refused(VersionConflict, Document, match="one of the rows was written since"):
        Document.objects.bulk_update([set_(row, text="x") for row in rows], ["text"], batch_size=2)
    assert [row.version for row in rows] == [2, 1, 1, 1, 1]
    models.QuerySet(Document).filter(pk=rows[3].pk).delete()
    with refused(VersionConflict, Document, match="row was deleted"):
        Document.objects.bulk_update(rows, ["text"])


def test_a_version_that_was_not_loaded_is_no_version(document):
    found = models.QuerySet(Document).defer("version").get()
    many = Document.objects.bulk_update
    writes = (found.save, found.delete, lambda: many([found], ["text"]))
    all_refused(VersionConflict, (Document,), *writes, match="wasn't loaded")


def test_the_version_is_loaded_whatever_is_deferred(document):
    for rows in (Document.objects.only("text"), Document.objects.defer("version", "text")):
        assert "version" not in rows.get().get_deferred_fields()
        set_(rows.get(), text="second").save()
    assert versions() == [2]


def test_an_object_that_was_never_loaded_takes_no_others_place(document):
    new = Document(pk=document.pk, text="other")
    with refused(IntegrityError, Document), transaction.atomic(using=document._state.db):
        new.save()
    document.save()
    all_refused(VersionConflict, (Document,), lambda: new.save(update_fields=["text"]))
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
    with pytest.raises(ImproperlyConfigured, match="can't compare the versions"):
        update_conflicts(Document, [Document(pk=5)], "text", "id")
    Document.objects.bulk_create([Document(pk=5, text="a")])
    Document.objects.bulk_create([Document(pk=5, text="b")], ignore_conflicts=True)
    assert values_of(Document, "id", "text", "version") == [(5, "a", 0)]


def test_a_fixture_overwrites_the_row_and_counts(document):
    letter = Letter.objects.create(sender="ada")
    text = serializers.serialize("json", [set_(document, text="fixture"), letter])
    assert "version" not in text
    found = Document.objects.get()
    found.save()
    fixture, of_letter = serializers.deserialize("json", text)
    fixture.save()
    assert values_of(Document, "text", "version") == [("fixture", 2)]
    assert fixture.object.version == 2
    all_conflict(found)
    of_letter.save()
    assert versions(Paper) == [1]
    all_refused(VersionConflict, (Letter, Paper), set_(letter, sender="stale").save)


def test_get_or_create_and_update_or_create(database):
    document, created = Document.objects.get_or_create(text="a")
    assert created
    document, created = Document.objects.update_or_create(text="a", defaults={"text": "b"})
    assert not created
    assert versions() == [document.version] == [1]


def test_a_delete_is_one_statement(document):
    with statements(1):
        document.delete()
    assert document.pk is None
    Document.objects.bulk_create([Document(), Document()])
    with statements(1):  # Without comparing.
        assert Document.objects.all().delete()[0] == 2


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
    set_(old, sender="x")
    writes = (old.save, lambda: old.save(update_fields=["sender"]), old.delete)
    many = lambda: Letter.objects.bulk_update([old], ["sender"])  # noqa: E731
    all_refused(VersionConflict, (Letter, Paper), *writes, many)


def test_a_child_that_fails_half_way_can_be_saved_again(database):
    Letter.objects.create(sender="taken")
    letter = Letter.objects.create(sender="free")
    alias = letter._state.db
    with refused(IntegrityError, Letter, Paper), transaction.atomic(using=alias):
        set_(letter, sender="taken").save()
    assert letter.version == 0
    set_(letter, sender="free").save()
    assert letter.version == 1


# Together with a fence


@pytest.mark.parametrize("model", [Contract, Deed])
class TestBoth:
    def test_both_are_written_and_compared(self, database, model):
        row = model.objects.create()
        with row.fencing.lock() as lease:
            twin = model.objects.get()
            for write in SAVES.values():
                row = model.objects.get()
                with statements(1):
                    write(row)
            # The twin is no older than the lock, but older than the row.
            all_conflict(twin)
            assert (twin.fence, twin.version) == (0, 0)
            row.refresh_from_db()
            assert (row.fence, row.version) == (lease.token, len(SAVES))
            overtake(lease)
            for write in WRITES.values():
                with refused(StaleFence, model):
                    write(set_(row, text="x"))
                assert (row.fence, row.version) == (lease.token, len(SAVES))

    def test_allowed_writes_without_lock_count_and_compare(self, database, model, monkeypatch):
        monkeypatch.setattr(model, "fencing", Fencing(without_lock="allow"))
        row = model.objects.create()
        plainly(model, fence=5)
        twin = model.objects.get()
        row.refresh_from_db()
        row.save()
        model.objects.update(text="x")
        row.refresh_from_db()
        model.objects.bulk_update([row], ["text"])
        assert values_of(model, "fence", "version") == [(5, 3)]
        all_conflict(twin)


@pytest.mark.django_db
def test_within_a_tests_own_transaction():
    document = Document.objects.create()
    twin = Document.objects.get()
    document.save()
    for write in WRITES.values():
        with refused(VersionConflict, Document), transaction.atomic():
            write(set_(twin, text="x"))
    document.save()
    assert connections["default"].in_atomic_block
