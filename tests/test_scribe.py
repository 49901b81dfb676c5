"""The scribe's own rules, whatever the books say: what it keeps, leaves out, and never does."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import OperationalError

from django_fencedlock.core.runtime import clock
from django_fencedlock.storage import background_writer as module
from django_fencedlock.storage.background_writer import AGAIN, REST, Page, Scribe

pytestmark = pytest.mark.django_db(transaction=True)


class Book:
    """One that has some pages, and writes each by calling a function."""

    def __init__(self, write, events=1):
        self.write = write
        self.events = events
        self.to_write = 0

    def pages(self):
        while self.to_write:
            self.to_write -= 1
            yield Page("default", self.write, self.events)

    def is_empty(self):
        return not self.to_write

    def forget(self):
        self.to_write = 0


@pytest.fixture
def scribe():
    """A scribe of the test's own, whose thread is the test."""
    made = Scribe()
    made.is_testing = lambda: False
    made.start = lambda run: None
    yield made
    made.close()


@pytest.fixture
def book(scribe):
    written = []
    scribe.books.append(book := Book(written.append))
    book.written = written
    return book


def failing(message):
    tried = []

    def write(statements):
        tried.append(statements)
        raise OperationalError(message)

    write.tried = tried
    return write


def test_nothing_is_noted_by_one_whose_children_do(scribe):
    assert not scribe.is_quiet()
    scribe.hush()
    assert scribe.is_quiet()


def test_where_no_thread_can_be_started_the_next_note_tries_again(scribe):
    started = []

    def start(run):
        started.append(run)
        raise RuntimeError("can't start new thread")

    scribe.start = start
    scribe.rouse()
    scribe.rouse()
    assert len(started) == 2
    scribe.start = started.append
    scribe.rouse()
    scribe.rouse()
    assert len(started) == 3


def test_the_thread_stays_for_what_was_noted_as_it_was_about_to_end(scribe):
    scribe.rouse()
    assert not scribe._may_end()
    # Nobody else was started, nor will be.
    assert scribe._runs
    scribe._noted = False
    assert scribe._may_end()
    assert not scribe._runs


def test_an_error_of_a_book_does_not_end_the_thread(scribe, book, monkeypatch, caplog):
    def pages():
        raise ZeroDivisionError

    class Enough(BaseException):
        pass

    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            monkeypatch.setattr(book, "pages", lambda: iter([Page("default", book.write)]))
        if len(naps) == 3:
            raise Enough

    monkeypatch.setattr(module.threads, "original", lambda *names: sleep)
    monkeypatch.setattr(book, "pages", pages)
    # In a thread of its own: the function renames the thread that runs it.
    with ThreadPoolExecutor(1) as pool, pytest.raises(Enough):
        pool.submit(scribe._run).result()
    assert "isn't written" in caplog.text
    assert len(book.written) == 1


def test_somebody_who_writes_is_not_kept_waiting(scribe, book):
    """SQLite has one writer: whoever waits for the file stands in the way of locks."""
    waits = []

    def write(statements):
        with statements.connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout")
            waits.append(cursor.fetchone()[0])

    book.write, book.to_write = write, 1
    scribe.flush()
    assert waits == [module.BRIEFLY * 1000]


def test_a_few_pages_are_kept_for_another_try(scribe, book):
    book.write, book.to_write = failing("database is locked"), AGAIN + 3
    assert scribe.flush()
    assert len(scribe._again) == AGAIN
    assert scribe._left_out == 3


def test_a_database_that_is_away_is_left_alone_for_a_while(scribe, book, monkeypatch, caplog):
    now = clock()
    monkeypatch.setattr(module, "clock", lambda: now)
    book.write, book.events = failing("no such server"), 7
    for _ in range(3):
        book.to_write = 1
        scribe.flush()
    assert len(book.write.tried) == 1
    assert scribe._left_out == 21
    assert len(caplog.records) == 1
    now += REST + 1
    book.to_write = 1
    scribe.flush()
    assert len(book.write.tried) == 2
    assert "28 events were left out" in caplog.text
    assert scribe._left_out == 0
