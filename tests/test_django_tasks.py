"""`@lock` under the `@task` of Django 6."""

import re
from pathlib import Path

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from django_fencedlock import LockNotAcquired, current_lease, lock
from django_fencedlock.models import Fence
from django_fencedlock.test import assert_locked, assert_not_locked, hold_lock, lose_lease

tasks = pytest.importorskip("django.tasks", reason="Django 6 brings django.tasks")
PAGE = Path(__file__).resolve().parent.parent / "docs/guides/recipes.md"


@tasks.task
@lock("report:{pk}", blocking_timeout=0)
def build(pk, fresh=False):
    assert_locked(f"report:{pk}")
    return current_lease().token


@tasks.task
@lock("report:{pk}", blocking_timeout=0)
async def abuild(pk, fresh=False):
    lease = current_lease()
    assert await lease.averify()
    return lease.token


@tasks.task(takes_context=True, priority=7)
@lock("report:{pk}", blocking_timeout=0)
def with_context(context, pk):
    return [context.attempt, current_lease(f"report:{pk}").token]


@tasks.task
@lock("report:{pk}")
def loses(pk):
    lose_lease(current_lease())


@tasks.task
@lock("report:{pk}")
def saves(pk):
    with current_lease().atomic():
        Fence.objects.create(name="other", token=1, owner="x")


@pytest.fixture(params=["db", "transactional_db"])
def db_(request):
    request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def immediate(settings):
    settings.TASKS = {"default": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"}}


@pytest.mark.usefixtures("db_")
class TestImmediately:
    @pytest.mark.parametrize("task", [build, abuild])
    def test_each_run_takes_the_lock(self, task):
        results = [task.enqueue(7), task.enqueue(pk=7, fresh=True)]
        assert [result.return_value for result in results] == [1, 2]
        assert_not_locked("report:7")
        assert task.enqueue(8).return_value == 1

    @pytest.mark.parametrize("task", [build, abuild])
    def test_a_held_lock_fails_the_task(self, task):
        with hold_lock("report:7") as held:
            result = task.enqueue(7)
            other = task.enqueue(8)
        assert result.status == tasks.TaskResultStatus.FAILED
        assert result.errors[0].exception_class is LockNotAcquired
        assert "'report:7' is held by" in result.errors[0].traceback
        assert other.return_value == 1
        assert task.enqueue(7).return_value == held.token + 1

    @pytest.mark.parametrize("task", [build, abuild])
    def test_enqueued_by_a_coroutine(self, task):
        @async_to_sync
        async def run():
            results = [await task.aenqueue(7), await task.aenqueue(7)]
            return [result.return_value for result in results] + [await task.acall(7)]

        assert run() == [1, 2, 3]

    def test_with_a_context(self):
        assert with_context.enqueue(7).return_value == [1, 1]
        assert with_context.priority == 7

    def test_a_lease_that_is_lost_fails_the_task(self):
        result = loses.enqueue(7)
        assert result.errors[0].exception_class_path == "django_fencedlock.exceptions.LeaseLost"

    def test_fenced_writes(self):
        assert saves.enqueue(7).status == tasks.TaskResultStatus.SUCCESSFUL
        assert Fence.objects.get(name="report:7").token == 1


def test_the_dummy_backend_runs_nothing_and_locks_nothing(settings):
    settings.TASKS = {"default": {"BACKEND": "django.tasks.backends.dummy.DummyBackend"}}
    for task in (build, abuild):
        result = task.enqueue(7)
        assert result.status == tasks.TaskResultStatus.READY
        assert [each.args for each in tasks.default_task_backend.results] == [[7]]
        tasks.default_task_backend.clear()


@pytest.mark.parametrize("task", [build, abuild, with_context])
def test_wrong_arguments_ask_for_no_lock(task):
    with pytest.raises(TypeError):
        task.call()


def test_the_wrong_order():
    for name in ("report", build):
        with pytest.raises(
            TypeError, match=r"@lock\(.*name|Put @lock\('report'\) below @task, dir"
        ):
            lock(name)(build)


@pytest.mark.django_db(transaction=True)
def test_the_code_of_the_page():
    names = {"__name__": "page", "transaction": transaction}
    for block in re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if "django.tasks" in block:
            exec(block, names)
    assert names["build_report"].enqueue(7).return_value == "report of 7"
    assert names["send_digest"].enqueue(7).return_value == "digest for 7"
    assert names["nightly"].enqueue().return_value == "done"
    with hold_lock("nightly"):
        assert names["nightly"].enqueue().return_value == "another run does it"
