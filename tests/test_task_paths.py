"""Tasks with ``path=True``: a run excludes those above and beneath."""

import pytest

from django_fencedlock import LockUpgrade, current_lease, lock
from django_fencedlock.celery import SkippedRun, lock_name, single_instance
from django_fencedlock.test import hold_lock
from tests.models import Bin

pytestmark = pytest.mark.django_db(transaction=True)
TEMPLATE = "warehouse/{warehouse_id}/shelf/{shelf_id}"


@pytest.fixture
def task(celery_app):
    def make(*naming, body=None, row=None, **policy):
        def call(warehouse_id=7, shelf_id=3):
            return body() if body else current_lease().name

        decorated = single_instance(*naming, **(row or {}), **policy)(call)
        celery_app.tasks.pop("shop.call", None)
        return celery_app.task(decorated, name="shop.call", shared=False)

    return make


def test_a_run_has_the_lock_of_a_path(task):
    count = task(TEMPLATE, path=True)
    assert count.apply().get() == "warehouse/7/shelf/3 [path]"
    assert lock_name(count, 7, 4) == "warehouse/7/shelf/4"
    for held in ("warehouse/7", "warehouse/7/shelf/3", "warehouse/7/shelf/3/x"):
        with hold_lock(held, path=True):
            skipped = SkippedRun.of(count.apply().get())
            assert skipped.reason == "held"
            assert skipped.holder
    with hold_lock("warehouse/7/shelf/4", path=True):
        assert count.apply().get() == "warehouse/7/shelf/3 [path]"
    with lock("warehouse", path=True):
        pass


def test_a_callable_names_a_path(task):
    count = task(lambda task, arguments: f"a/{arguments['shelf_id']}", path=True)
    assert count.apply().get() == "a/3 [path]"


def test_a_value_adds_no_part(task):
    count = task(TEMPLATE, path=True)
    with pytest.raises(ValueError, match="contains '/'"):
        count.apply((7, "3/4")).get()


def test_a_row_has_the_lock_of_its_path(task):
    def write():
        with current_lease().atomic():
            Bin.objects.create(warehouse_id=7, code="3")

    row = {"warehouse_id": "{warehouse_id}", "code": "{shelf_id}"}
    count = task(Bin, row=row, body=write)
    count.apply().get()
    assert Bin.objects.get().fence == 1
    with hold_lock("warehouse/7", path=True):
        assert SkippedRun.of(count.apply().get())
    with pytest.raises(TypeError, match=r"write Fencing\(..., path=True\)"):
        single_instance(Bin, **row, path=True)(lambda warehouse_id, shelf_id: None)
    with pytest.raises(ValueError, match="coalesce"):
        task(Bin, row=row, on_conflict="coalesce").apply().get()


def test_a_run_inside_a_path_above_it(task):
    inner = task(TEMPLATE, path=True)
    with lock("warehouse/7", path=True), pytest.raises(LockUpgrade, match="every path beneath"):
        inner(7, 3)


@pytest.mark.parametrize(
    ("name", "policy", "error", "text"),
    [
        (TEMPLATE, {"limit": 2}, TypeError, "two kinds of locks"),
        (TEMPLATE, {"on_conflict": "coalesce"}, ValueError, "path above or beneath"),
        ("a//{shelf_id}", {}, ValueError, "empty part"),
        (["a/{shelf_id}", "b"], {}, TypeError, "needs one name"),
        (None, {}, TypeError, "needs one name"),
    ],
)
def test_misuse(task, name, policy, error, text):
    with pytest.raises(error, match=text):
        task(name, path=True, **policy)


def test_a_column_of_that_name():
    with pytest.raises(TypeError, match="columns="):
        single_instance("x", path="{path}")
