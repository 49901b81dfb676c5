"""The background writer: what it drops, what it logs, and when it writes nothing."""

import pytest
from django.db import OperationalError, connections

from django_fencedlock.storage import background_writer as module
from django_fencedlock.storage.background_writer import BackgroundWriter

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def writer(monkeypatch):
    made = BackgroundWriter()
    monkeypatch.setattr(made, "is_off", lambda: False)
    monkeypatch.setattr(made._worker, "start", lambda: None)
    yield made
    made.close()


def failing(message, times=1000):
    done, left = [], [times]

    def write(database, items):
        if left[0]:
            left[0] -= 1
            raise OperationalError(message)
        done.extend(items)

    return write, done


def test_it_is_off_in_a_test_and_in_a_process_that_forks(monkeypatch):
    made = BackgroundWriter()
    assert made.is_off()
    monkeypatch.setattr(module, "under_test", lambda: False)
    assert not made.is_off()
    made.disable()
    assert made.is_off()
    made.after_fork()
    assert not made.is_off()


def test_items_are_written_in_order_a_batch_at_a_time(writer, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 2)
    write, done = failing("", times=0)
    for number in range(5):
        writer.put("default", write, number)
    assert [writer.flush() for _ in range(4)] == [True, True, False, False]
    assert done == [0, 1, 2, 3, 4]


def test_with_too_many_the_oldest_are_dropped(writer, monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED", 2)
    write, done = failing("", times=0)
    for number in range(5):
        writer.put("default", write, number)
    assert not writer.flush()
    assert done == [3, 4]


def test_an_error_of_a_function_leaves_the_others(writer, caplog):
    write, done = failing("", times=0)
    writer.put("default", lambda database, items: 1 / 0, 1)
    writer.put("default", write, 2)
    assert not writer.flush()
    assert done == [2]
    assert "A background write to 'default' failed" in caplog.text


def test_a_locked_row_is_tried_again_with_the_next_write(writer, caplog):
    write, done = failing("database is locked", times=1)
    writer.put("default", write, 1)
    writer.put("default", write, 2)
    assert writer.flush()
    assert not writer.flush()
    assert done == [1, 2]
    assert caplog.text == ""


def test_items_are_dropped_while_a_database_fails(writer, caplog):
    caplog.set_level("INFO")
    write, done = failing("no such server", times=2)
    for number in range(3):
        writer.put("default", write, number)
        assert not writer.flush()
    assert done == [2]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_project_without_the_app_hears_of_it_once(writer, caplog):
    """Unfenced locks alone need neither the app nor its tables."""

    def missing(database, items):
        raise LookupError("No installed app with label 'django_fencedlock'.")

    caplog.set_level("INFO")
    for number in range(2):
        writer.put("default", missing, number)
        assert not writer.flush()
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_another_writer_of_sqlites_file_is_not_delayed(writer):
    """SQLite has one writer at a time: a write that waits delays locks."""
    waits = []

    def write(database, items):
        with connections[database].cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout")
            waits.append(cursor.fetchone()[0])

    writer.put("default", write, 1)
    writer.flush()
    assert waits == [module.SQLITE_BUSY_TIMEOUT * 1000]


def test_a_child_leaves_its_parents_items_alone(writer):
    write, done = failing("", times=0)
    writer.put("default", write, 1)
    writer.after_fork()
    assert not writer.flush()
    assert done == []
