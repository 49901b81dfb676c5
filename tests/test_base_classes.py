"""Guarded models beside base classes that save and delete in their own way, in every order."""

import contextlib

import pytest
from django.db import connections, models
from django.test.utils import isolate_apps

from django_fencedlock.exceptions import LockRequired, StaleFence, VersionConflict
from django_fencedlock.lease_context import leave
from django_fencedlock.models import FencedModel
from django_fencedlock.models.queryset import BaseRowsManager
from tests import models as m
from tests.models import FencedAfterTrash, FencedBeforeTrash, TrashChild, VersionedAfterTrash
from tests.test_write_paths import (
    awaited,
    database,
    overtake,
    plainly,
    refused,
    rows_of,
    statements,
)

__all__ = ["database"]

FENCED = [FencedBeforeTrash, FencedAfterTrash, m.BetweenTheTwo]
VERSIONED = [m.VersionedBeforeTrash, VersionedAfterTrash, m.BetweenTheTwo]
EVERY = [*FENCED, m.VersionedBeforeTrash, VersionedAfterTrash]


def held(row):
    return row.fencing.lock() if hasattr(row, "fencing") else contextlib.nullcontext()


def test_the_delete_of_another_base_class_is_called_with_all_arguments(database):
    for model in EVERY:
        row = model.objects.create()
        with held(row):
            assert row.delete() == (0, {"kept": 1})
            (found,) = rows_of(model)
            assert found["gone"]
            assert found.get("fence", 1) == found.get("version", 1) == 1
            row.delete(using=database, why="spam")
            assert rows_of(model)[0]["why"] == "spam"
            row.delete(database, False, why="again")
            assert rows_of(model)[0]["why"] == "again"
            awaited(row.adelete)


def test_the_save_of_another_base_class_is_called(database):
    for model in EVERY:
        row = model.objects.create()
        row.saves = 0
        with held(row):
            row.save()
            awaited(row.asave)
        assert row.saves == 2


def test_a_delete_that_ends_in_djangos_removes_the_row(database):
    for model in EVERY:
        row = model.objects.create()
        with held(row):
            count, by_model = row.delete(hard=True)
        assert (count, by_model) == (1, {model._meta.label: 1})
        assert row.pk is None
        assert not rows_of(model)


@pytest.mark.parametrize("hard", [False, True])
def test_such_a_delete_needs_the_newest_lease(database, hard):
    for model in FENCED:
        row = model.objects.create()
        with refused(LockRequired, model):
            row.delete(hard=hard)
        with row.fencing.lock() as lease:
            overtake(lease)
            with refused(StaleFence, model):
                row.delete(hard=hard)
        with row.fencing.lock() as lease:
            plainly(model, fence=overtake(lease))
            with refused(StaleFence, model):
                row.delete(hard=hard)


@pytest.mark.parametrize("hard", [False, True])
def test_such_a_delete_of_an_object_that_is_older_than_the_lock_is_refused(database, hard):
    for model in FENCED:
        row = model.objects.create()
        with row.fencing.lock():
            model.objects.get().save()
        with row.fencing.lock(), refused((StaleFence, VersionConflict), model):
            row.delete(hard=hard)


@pytest.mark.parametrize("hard", [False, True])
def test_such_a_delete_compares_the_version(database, hard):
    for model in VERSIONED:
        row = model.objects.create()
        with held(row):
            model.objects.get().save()
            with refused(VersionConflict, model):
                row.delete(hard=hard)


def test_such_a_delete_takes_the_lease_that_it_is_given(database):
    for model in FENCED:
        row = model.objects.create()
        lease = row.fencing.lock().acquire()
        leave(lease)
        with refused(LockRequired, model):
            row.delete(hard=True)
        row.delete(hard=True, lease=lease)
        lease.release()
        assert not rows_of(model)


@pytest.mark.parametrize("hard", [False, True])
def test_the_row_of_a_child_is_guarded_as_well(database, hard):
    row = TrashChild.objects.create(size=1)
    with refused(LockRequired, TrashChild, FencedBeforeTrash):
        row.delete(hard=hard)
    with row.fencing.lock() as lease:
        overtake(lease)
        with refused(StaleFence, TrashChild, FencedBeforeTrash):
            row.delete(hard=hard)
    with row.fencing.lock():
        row.delete(hard=hard)
    assert bool(rows_of(TrashChild)) == (not hard)
    assert [each["gone"] for each in rows_of(FencedBeforeTrash)] == ([] if hard else [True])


def test_a_row_with_dependents_is_guarded_as_well(database):
    row = FencedBeforeTrash.objects.create()
    m.FolderOfTrash.objects.create(trash=row)
    with refused(LockRequired, FencedBeforeTrash, m.FolderOfTrash):
        row.delete(hard=True)
    with row.fencing.lock():
        assert row.delete(hard=True)[0] == 2


def test_rows_that_are_deleted_by_the_queryset_are_guarded(database):
    row = FencedBeforeTrash.objects.create()
    with refused(LockRequired, FencedBeforeTrash):
        FencedBeforeTrash.objects.all().delete()
    with row.fencing.lock():
        FencedBeforeTrash.objects.all().delete()
    assert not rows_of(FencedBeforeTrash)


def test_to_mark_a_row_as_deleted_is_one_statement(database):
    row = FencedBeforeTrash.objects.create()
    with row.fencing.lock(), statements(1):
        row.delete()


def test_other_base_classes_may_open_transactions_and_take_locks(database):
    """The package opens no transaction around their code, in which no lock could be acquired."""
    row = FencedBeforeTrash.objects.create()
    row.to_lock = "while-deleting"
    with row.fencing.lock():
        row.delete()
    assert rows_of(FencedBeforeTrash)[0]["gone"]


@pytest.mark.django_db(transaction=True)
@isolate_apps("tests")
def test_a_fence_in_the_table_of_a_further_parent_is_that_of_its_own_row():
    class Mooring(models.Model):  # noqa: DJ008
        number = models.AutoField(primary_key=True)

        class Meta:
            app_label = "tests"

    class Boat(FencedModel):
        class Meta:
            app_label = "tests"

    class Ferry(Mooring, Boat):  # noqa: DJ008
        class Meta:
            app_label = "tests"

    with connections["default"].schema_editor() as editor:
        for model in (Mooring, Boat, Ferry):
            editor.create_model(model)
    try:
        other = Boat.objects.create()
        ferry = Ferry.objects.create()
        assert ferry.pk == other.pk != ferry.id
        with ferry.fencing.lock() as lease:
            assert lease.name == f"tests.boat:{ferry.id}"
            with pytest.raises(StaleFence):
                models.QuerySet(Boat).filter(pk=ferry.id).update(fence=overtake(lease))
                ferry.delete()
        with ferry.fencing.lock():
            Ferry.objects.get().delete()
        assert rows_of(Boat) == [{"id": other.pk, "fence": 0}]
    finally:
        with connections["default"].schema_editor() as editor:
            for model in (Ferry, Boat, Mooring):
                editor.delete_model(model)


def test_cascades_reach_rows_that_come_first_among_the_bases_or_last(database):
    """Django asks the first base class alone for the manager that it looks rows up with."""
    for model in (FencedAfterTrash, VersionedAfterTrash):
        assert isinstance(model._base_manager, BaseRowsManager)
    folder = m.Folder.objects.create()
    row = FencedAfterTrash.objects.create(folder=folder)
    with refused(LockRequired, FencedAfterTrash, m.Folder):
        folder.delete()
    with row.fencing.lock():
        folder.delete()
    assert not rows_of(FencedAfterTrash)
