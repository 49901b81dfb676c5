"""The background writer: what it retries, what it logs, and when it writes nothing."""

import pytest
from django.db import OperationalError, connections

from django_fencedlock.core.runtime import clock
from django_fencedlock.storage import background_writer as module
from django_fencedlock.storage.background_writer import RETRY_AFTER, BackgroundWriter

pytestmark = pytest.mark.django_db(transaction=True)


class Job:
    """Some data that is written by calling functions."""

    def __init__(self, *work):
        self.database = "default"
        self.work = list(work)
        self.tries = 0

    def write(self):
        self.tries += 1
        self.work.pop(0)()
        return bool(self.work)

    def forget(self):
        self.work.clear()


@pytest.fixture
def writer(monkeypatch):
    """A writer of the test's own, which has no thread."""
    made = BackgroundWriter()
    monkeypatch.setattr(made, "is_off", lambda: False)
    monkeypatch.setattr(made._worker, "start", lambda: None)
    yield made
    made.close()


@pytest.fixture
def time(monkeypatch):
    """The writer's clock, which the test moves."""
    now = [clock()]
    monkeypatch.setattr(module, "clock", lambda: now[0])
    return now


def failing(message):
    def fail():
        raise OperationalError(message)

    return fail


def test_it_is_off_in_a_test_and_in_a_process_that_forks(monkeypatch):
    made = BackgroundWriter()
    assert made.is_off()
    monkeypatch.setattr(module, "under_test", lambda: False)
    assert not made.is_off()
    made.disable()
    assert made.is_off()
    made.after_fork()
    assert not made.is_off()


def test_a_job_is_queued_once_until_all_is_written(writer):
    done = []
    job = Job(*[lambda: done.append(1)] * 3)
    writer.put(job)
    writer.put(job)
    assert [writer.flush() for _ in range(4)] == [True, True, False, False]
    assert len(done) == 3


def test_an_error_of_a_job_leaves_the_others(writer, caplog):
    done = []
    for work in (lambda: 1 / 0, lambda: done.append(1)):
        writer.put(Job(work))
    assert not writer.flush()
    assert done == [1]
    assert "A background write to 'default' failed" in caplog.text


def test_a_locked_row_is_tried_again_with_the_next_write(writer, caplog):
    job = Job(failing("database is locked"), lambda: None)
    writer.put(job)
    assert writer.flush()
    assert not writer.flush()
    assert job.tries == 2
    assert caplog.text == ""


def test_a_failing_database_is_tried_again_after_a_while(writer, time, caplog):
    caplog.set_level("INFO")
    job = Job(*[failing("no such server")] * 2, lambda: None)
    writer.put(job)
    for _ in range(3):
        assert writer.flush()
    assert job.tries == 1
    time[0] += RETRY_AFTER + 1
    assert writer.flush()
    assert len(caplog.records) == 1
    time[0] += RETRY_AFTER + 1
    assert not writer.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_another_writer_of_sqlites_file_is_not_delayed(writer):
    """SQLite has one writer at a time: a write that waits delays locks."""
    waits = []

    def write():
        with connections["default"].cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout")
            waits.append(cursor.fetchone()[0])

    writer.put(Job(lambda: writer.run("default", write)))
    writer.flush()
    assert waits == [module.SQLITE_BUSY_TIMEOUT * 1000]


def test_a_child_leaves_its_parents_jobs_alone(writer):
    job = Job(lambda: None)
    writer.put(job)
    writer.after_fork()
    assert not writer.flush()
    assert job.work == []
