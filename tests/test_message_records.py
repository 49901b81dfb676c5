"""The record of messages, on each database."""

import threading
import time
import uuid
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.db.models import QuerySet
from django.db.models.signals import post_delete, pre_delete

from django_fencedlock import conf, lock
from django_fencedlock.exceptions import BackendUnavailable, SettingsError
from django_fencedlock.models import MessageRecord
from django_fencedlock.storage.dialect import BATCH
from django_fencedlock.storage.message_records import SETTLED, Begun, Message, MessageRecords
from django_fencedlock.storage.pending_runs import PendingRuns, Place, StoredMessage
from tests.threads import at_once

DAY = 86400.0

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])


@pytest.fixture
def deliveries(using):
    return MessageRecords(conf.config())


@pytest.fixture
def rows(using):
    return MessageRecord.objects.using(using)


def message(nonce=None, **changes):
    made = Message(nonce or uuid.uuid4().hex, "invoice:1", uuid.uuid4().hex, "task-1", DAY)
    return replace(made, **changes)


@pytest.fixture
def first():
    return message()


def another(first):
    return replace(first, owner=uuid.uuid4().hex)


def test_a_message_that_never_began_is_the_first(deliveries, rows, first):
    for _ in range(2):  # Also if the request is repeated.
        assert deliveries.begin(first) == Begun(1, "", owner=first.owner)
    row = rows.get()
    assert (row.nonce, row.name, row.owner) == (first.nonce, "invoice:1", first.owner)
    assert row.finished_at is None
    assert (row.kept_until - row.began_at).total_seconds() == pytest.approx(DAY, abs=1)


def test_a_finished_message_stays_finished(deliveries, rows, first):
    deliveries.begin(first)
    assert deliveries.finish(first, "success")
    kept = rows.get().kept_until
    for _ in range(2):
        assert deliveries.begin(another(first)) == Begun(1, "success", owner=first.owner)
    assert rows.get().kept_until == kept
    assert rows.get().owner == first.owner
    assert rows.get().finished_at is not None


def test_an_end_is_past_after_a_while(deliveries, rows, first):
    deliveries.begin(first)
    deliveries.finish(first, "failure")
    for ago, is_past in ((0, False), (SETTLED - 5, False), (SETTLED, True)):
        row = rows.get()
        row.finished_at -= timedelta(seconds=ago)
        row.save()
        known = Begun(1, "failure", is_past, first.owner)
        assert deliveries.newest(first) == known
        assert deliveries.begin(another(first)) == known


def test_only_the_newest_delivery_can_finish(deliveries, rows, first):
    deliveries.begin(first)
    second = another(first)
    deliveries.begin(second)
    assert not deliveries.finish(first, "failure")
    assert rows.get().outcome == ""
    assert deliveries.finish(second, "success")
    assert not deliveries.finish(second, "failure")
    assert rows.get().outcome == "success"


def test_of_deliveries_that_begin_at_once_no_two_are_the_first(deliveries, rows):
    for _ in range(10):
        first = message()
        begun = at_once([lambda first=first: deliveries.begin(another(first))] * 6)
        assert sum(each.is_first for each in begun) <= 1
        assert rows.get(nonce=first.nonce).tries == 6


def test_nonces_differ_by_case_and_blanks(deliveries):
    for nonce in ("a", "A", "a "):
        assert deliveries.begin(message(nonce)).is_first


@pytest.mark.parametrize("using", ["postgres", "mariadb"], indirect=True)
def test_a_callers_transaction_that_is_rolled_back_undoes_nothing(using, deliveries, rows, first):
    with transaction.atomic(using=using):
        deliveries.begin(first)
        transaction.set_rollback(True, using=using)
    assert rows.count() == 1


def test_a_row_that_the_table_rejects_is_an_error(deliveries):
    with pytest.raises(BackendUnavailable, match="could not record the beginning of a delivery"):
        deliveries.begin(message(name=None))
    with pytest.raises(BackendUnavailable, match="could not count a trigger"):
        stored = StoredMessage(None, "{}")
        PendingRuns(conf.config()).count(Place("x", "app.charge"), stored, 1.0)


class TestSweeping:
    def test_deletes_what_was_kept_long_enough(self, deliveries, rows):
        old, young, begun = message(kept=-1), message(), message(kept=-1)
        for each in (old, young, begun):
            deliveries.begin(each)
        deliveries.finish(old, "success")
        deliveries.finish(young, "success")
        assert deliveries.sweep(5) == 2
        assert rows.get().nonce == young.nonce

    def test_spares_what_still_runs(self, deliveries, rows):
        with lock("invoice:1") as lease:
            running = message(owner=lease.owner_id, kept=-1)
            deliveries.begin(running)
            assert deliveries.sweep(5) == 0
        assert deliveries.sweep(5) == 1

    @pytest.mark.parametrize("using", ["default"], indirect=True)
    def test_sends_no_signals(self, deliveries):
        """As all writes here: a receiver for every model may write, or raise."""
        seen = []
        for signal in (pre_delete, post_delete):
            signal.connect(receive := lambda sender, **facts: seen.append(sender), weak=False)
            try:
                deliveries.begin(message(kept=-1))
                assert deliveries.sweep(5)
            finally:
                signal.disconnect(receive)
        assert seen == []

    # On SQLite nothing can: a sweep has the file.
    @pytest.mark.parametrize("using", ["postgres", "mariadb"], indirect=True)
    def test_a_delivery_that_begins_meanwhile_is_not_lost(self, deliveries, rows, monkeypatch):
        old = message(kept=-1)
        deliveries.begin(old)

        def after_it_came_again(rows, using):
            # The sweep has the row: the delivery waits, and begins anew once it is deleted.
            threads.append(thread := threading.Thread(target=begin_again))
            thread.start()
            time.sleep(0.1)
            return delete(rows, using)

        def begin_again():
            begun.append(deliveries.begin(replace(another(old), kept=DAY)))
            connections.close_all()

        threads, begun, delete = [], [], QuerySet._raw_delete
        monkeypatch.setattr(QuerySet, "_raw_delete", after_it_came_again)
        assert deliveries.sweep(1) == 1
        threads[0].join()
        assert begun[0].is_first
        assert rows.get().outcome == ""

    def test_does_a_bounded_number_at_a_time(self, deliveries, rows):
        fill(deliveries, rows, 2 * BATCH + 10)
        assert deliveries.sweep(1) == BATCH
        assert deliveries.sweep(5) == BATCH + 10
        assert rows.count() == 0

    def test_two_sweeps_at_once_do_no_harm(self, deliveries, rows):
        fill(deliveries, rows, 3 * BATCH)
        at_once([lambda: deliveries.sweep(5)] * 3)
        assert rows.count() == 0


@pytest.mark.parametrize("using", ["postgres", "mariadb"], indirect=True)
def test_the_number_of_statements(using, deliveries, request):
    server = request.getfixturevalue(using)
    deliveries.begin(message())
    first = message()
    with server.statements() as seen:
        deliveries.begin(first)
    # BEGIN, INSERT, COMMIT. MariaDB's driver has one more for autocommit, before and after.
    assert sum(seen.values()) <= 5, seen
    with server.statements() as seen:
        deliveries.finish(first, "success")
    assert sum(seen.values()) == 1, seen


def test_missing_tables_name_the_command_that_makes_them(make_alias, settings, tmp_path):
    entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db.sqlite3")}
    alias = make_alias(entry)
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": alias}}
    with connections[alias].cursor() as cursor:
        cursor.execute("DROP TABLE django_fencedlock_messagerecord")
    with pytest.raises(SettingsError, match="migrate django_fencedlock --database"):
        MessageRecords(conf.config()).begin(message())


def fill(deliveries, rows, number):
    deliveries.begin(message(kept=-1))
    row = rows.get()
    facts = {"name": row.name, "owner": "o", "task_id": "t", "tries": 1, "outcome": "success"}
    facts |= {"began_at": row.began_at, "kept_until": row.kept_until}
    rows.bulk_create(MessageRecord(nonce=f"n{place}", **facts) for place in range(number - 1))
