"""What is still to be run, on each database."""

import threading
import uuid
from dataclasses import replace

import pytest
from django.db import connections
from django.db.models.sql.compiler import (
    SQLCompiler,
    SQLDeleteCompiler,
    SQLInsertCompiler,
    SQLUpdateCompiler,
)

from django_fencedlock import conf, lock
from django_fencedlock.models import MessageRecord, PendingRun
from django_fencedlock.storage import connections as sessions
from django_fencedlock.storage.dialect import BATCH
from django_fencedlock.storage.message_records import Message, MessageRecords
from django_fencedlock.storage.pending_runs import (
    Claimed,
    PendingRuns,
    Place,
    StoredMessage,
)
from tests.threads import at_once

GRACE = 30.0
PLACE = Place("invoice:1", "app.charge")
WRITES = (SQLDeleteCompiler, SQLInsertCompiler, SQLUpdateCompiler)

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])


@pytest.fixture
def runs(using):
    return PendingRuns(conf.config())


@pytest.fixture
def rows(using):
    return PendingRun.objects.using(using)


@pytest.fixture
def remembered(monkeypatch):
    """Keep the answers to all queries of the ORM, but those that lock rows, as some packages do."""
    execute, answers = SQLCompiler.execute_sql, {}

    def remember(compiler, *args, **kwargs):
        if compiler.query.select_for_update or isinstance(compiler, WRITES):
            return execute(compiler, *args, **kwargs)
        key = str(compiler.as_sql())
        if key not in answers:
            found = execute(compiler, *args, **kwargs)
            answers[key] = found if found is None else list(found)
        return answers[key]

    monkeypatch.setattr(SQLCompiler, "execute_sql", remember)


def stored(body="a"):
    return StoredMessage(body, "{}")


def owner():
    return uuid.uuid4().hex


def message(**changes):
    made = Message(uuid.uuid4().hex, PLACE.name, owner(), "task-1", 86400.0)
    return replace(made, **changes)


def begin(runs, who, body="a"):
    return runs.begin(PLACE, who, stored(body), GRACE)[1]


def run_once(runs, body="a"):
    me = owner()
    claimed = begin(runs, me, body)
    assert runs.end(PLACE, me, claimed.number, GRACE)
    return claimed.number, me


class TestEarlierTriggers:
    """A retry, or a message that failed and is delivered again, has arguments of before."""

    @pytest.fixture
    def former(self, runs):
        def run(body="old"):
            me = owner()
            claimed = begin(runs, me, body)
            runs.end(PLACE, me, claimed.number, GRACE)
            return [claimed.number, me]

        return run

    @pytest.mark.parametrize("known_by", [0, 1], ids=["number", "owner"])
    def test_the_newest_is_counted_again(self, runs, former, known_by):
        run = former()[known_by]
        runs.count(PLACE, stored("again"), GRACE, unless_newer=run)
        assert runs.numbers(PLACE) == (2, 1)
        assert runs.claim(PLACE, owner(), GRACE).message == stored("again")

    @pytest.mark.parametrize("known_by", [0, 1], ids=["number", "owner"])
    @pytest.mark.parametrize("newer", ["counted", "begun", "ended"])
    def test_an_older_one_changes_nothing(self, runs, rows, former, known_by, newer):
        run = former()[known_by]
        if newer == "counted":
            runs.count(PLACE, stored("new"), GRACE)
        elif newer == "begun":
            begin(runs, owner(), "new")
        else:
            former("new")
        before = rows.values().get()
        runs.count(PLACE, stored("old"), GRACE, unless_newer=run)
        assert rows.values().get() == before
        assert before["body"] == "new"

    def test_one_whose_row_was_deleted_is_counted(self, runs, rows, former):
        run, _ = former()
        rows.all().delete()
        runs.count(PLACE, stored("old"), GRACE, unless_newer=run)
        assert runs.numbers(PLACE) == (1, 0)


class TestTriggers:
    def test_a_run_takes_on_its_own_trigger(self, runs, rows):
        me = owner()
        assert begin(runs, me) == Claimed(1, 1)
        row = rows.get()
        assert (row.name, row.task_name, row.alias) == ("invoice:1", "app.charge", "default")
        assert (row.wanted, row.started, row.done, row.owner) == (1, 1, 0, me)
        assert (row.due_at - row.updated_at).total_seconds() == pytest.approx(GRACE, abs=1)

    def test_what_is_counted_during_a_run_waits_for_its_end(self, runs):
        me = owner()
        claimed = begin(runs, me)
        for body in "bcd":
            assert runs.count(PLACE, stored(body), GRACE) is None
        assert runs.end(PLACE, me, claimed.number, GRACE)
        assert runs.numbers(PLACE) == (4, 1)
        (open_,) = runs.waiting("invoice:1")
        assert (open_.place, open_.number, open_.message.body) == (PLACE, 4, "d")

    def test_one_run_claims_all_with_the_latest_arguments(self, runs):
        for body in "abc":
            runs.count(PLACE, stored(body), GRACE)
        me = owner()
        assert runs.claim(PLACE, me, GRACE) == Claimed(3, 1, stored("c"))
        assert runs.end(PLACE, me, 3, GRACE)
        assert runs.numbers(PLACE) == (3, 3)
        assert runs.claim(PLACE, owner(), GRACE) is None

    def test_a_run_that_others_took_over_ends_no_triggers(self, runs):
        first, second = owner(), owner()
        claimed = begin(runs, first)
        later = begin(runs, second)
        assert not runs.end(PLACE, first, claimed.number, GRACE)
        assert runs.numbers(PLACE) == (2, 0)
        assert runs.end(PLACE, second, later.number, GRACE)

    def test_tries_are_counted_for_each_number(self, runs):
        runs.count(PLACE, stored(), GRACE)
        assert [runs.claim(PLACE, owner(), GRACE).tries for _ in range(3)] == [1, 2, 3]
        runs.count(PLACE, stored(), GRACE)
        me = owner()
        tries = [runs.claim(PLACE, who, GRACE).tries for who in (owner(), me, me)]
        assert tries == [1, 2, 2]

    def test_names_differ_by_case(self, runs):
        runs.count(PLACE, stored(), GRACE)
        assert runs.numbers(Place("INVOICE:1", "app.charge")) == (0, 0)
        assert runs.numbers(Place("invoice:1", "app.Charge")) == (0, 0)

    def test_any_text_comes_back_as_it_was(self, runs):
        body = "['%(name)s', \"{}\", '%%', '\\u0000', {now}]" * 1000
        runs.count(PLACE, stored(body), GRACE)
        assert runs.claim(PLACE, owner(), GRACE).message.body == body

    def test_none_is_lost_when_many_count_a_new_one_at_once(self, runs):
        for number in range(5):
            place = Place(f"n{number}", "app.charge")
            at_once([lambda place=place: runs.count(place, stored(), GRACE)] * 8)
            assert runs.numbers(place)[0] == 8

    def test_number_and_arguments_are_of_one_moment(self, runs):
        """The body is the number, so a claim tells if it has another's."""
        counted, claims = iter(range(1, 61)), []
        one_counts = threading.Lock()

        def count():
            for _ in range(15):
                with one_counts:
                    runs.count(PLACE, stored(str(next(counted))), GRACE)

        def take():
            for _ in range(30):
                claims.append(runs.claim(PLACE, owner(), GRACE))

        at_once([count, take, count, take, count, count])
        # Those that were at work may have gone before the first of the others.
        claims.append(runs.claim(PLACE, owner(), GRACE))
        seen = [claimed for claimed in claims if claimed is not None]
        assert seen
        assert all(str(claimed.number) == claimed.message.body for claimed in seen)


class TestMessages:
    """Triggers whose message may be delivered again."""

    def test_the_first_delivery_counts_and_the_second_does_not(self, runs):
        runs.begin(PLACE, owner(), stored("a"), GRACE)
        lost = message()
        assert runs.count(PLACE, stored("b"), GRACE, lost).is_first
        runs.count(PLACE, stored("c"), GRACE, message())
        again = runs.count(PLACE, stored("b"), GRACE, replace(lost, owner=owner()))
        assert not again.is_first
        assert runs.numbers(PLACE)[0] == 3
        assert runs.waiting("invoice:1")[0].message.body == "c"

    def test_what_was_begun_under_another_policy_counts_now(self, runs):
        died = message()
        MessageRecords(conf.config()).begin(died)
        again = replace(died, owner=owner())
        assert runs.begin(PLACE, again.owner, stored("a"), GRACE, again)[1] == Claimed(1, 1)

    def test_message_and_trigger_are_recorded_together_or_not_at_all(self, runs, using, rows):
        first = message(name="x" * 201)  # too long for its column
        place = Place(PLACE.name, "y" * 201)
        if using == "default":
            pytest.skip("SQLite knows no lengths")
        with pytest.raises(Exception, match="could not count a trigger"):
            runs.count(place, stored("a"), GRACE, message())
        with pytest.raises(Exception, match="could not count a trigger"):
            runs.count(PLACE, stored("a"), GRACE, first)
        assert rows.count() == MessageRecord.objects.using(using).count() == 0

    def test_of_deliveries_at_once_one_counts(self, runs):
        runs.begin(PLACE, owner(), stored("a"), GRACE)
        for number in range(2, 8):
            first = message()

            def deliver(first=first):
                runs.count(PLACE, stored("a"), GRACE, replace(first, owner=owner()))

            at_once([deliver] * 4)
            assert runs.numbers(PLACE)[0] == number


def test_no_cache_of_queries_is_asked(runs, remembered):
    me, first = owner(), message()
    records = MessageRecords(conf.config())
    assert runs.numbers(PLACE) == (0, 0)
    assert runs.overdue(["app.charge"], [], 10) == runs.waiting(PLACE.name) == []
    assert records.newest(first) is None

    records.begin(first)
    runs.count(PLACE, stored(), -1)
    assert runs.numbers(PLACE) == (1, 0)
    assert len(runs.overdue(["app.charge"], [], 10)) == len(runs.waiting(PLACE.name)) == 1
    assert records.newest(first).owner == first.owner
    assert runs.claim(PLACE, me, GRACE).number == 1


class TestLookingAfter:
    NAMES = ("app.charge", "app.other")

    def test_finds_what_is_due_and_free(self, runs):
        runs.count(Place("not due", "app.charge"), stored("a"), GRACE)
        runs.count(PLACE, stored("a"), -1)
        with lock("invoice:1"):
            assert runs.overdue(self.NAMES, [], 10) == []
        (open_,) = runs.overdue(self.NAMES, [], 10)
        assert (open_.place, open_.number, open_.tries, open_.rescues) == (PLACE, 1, 0, 0)
        assert open_.message == stored("a")

    def test_finds_no_more_than_asked_for(self, runs):
        for number in range(5):
            runs.count(Place(f"n{number}", "app.charge"), stored("a"), number - 100)
        assert [each.place.name for each in runs.overdue(self.NAMES, [], 2)] == ["n0", "n1"]

    def test_of_several_at_once_one_claims_it(self, runs):
        for number in range(5):
            place = Place(f"n{number}", "app.charge")
            runs.count(place, stored("a"), -1)
            (open_,) = [each for each in runs.overdue(self.NAMES, [], 10) if each.place == place]
            claimed = at_once([lambda open_=open_: runs.reserve(open_.place, GRACE)] * 4)
            assert sum(claimed) == 1
        assert runs.overdue(self.NAMES, [], 10) == []

    def test_what_was_done_meanwhile_cannot_be_claimed(self, runs):
        runs.count(PLACE, stored("a"), -1)
        (open_,) = runs.overdue(self.NAMES, [], 10)
        me = owner()
        runs.end(PLACE, me, runs.claim(PLACE, me, -1).number, -1)
        assert not runs.reserve(open_.place, GRACE)
        assert not runs.give_up(open_.place, open_.number)

    def test_rescues_are_counted_until_a_run_begins(self, runs):
        runs.count(PLACE, stored("a"), -1)
        for rescues in range(3):
            (open_,) = runs.overdue(self.NAMES, [], 10)
            assert open_.rescues == rescues
            assert runs.reserve(open_.place, -1)
        runs.claim(PLACE, owner(), -1)
        assert runs.overdue(self.NAMES, [], 10)[0].rescues == 0

    def test_what_was_given_up_is_left_alone_until_a_new_trigger(self, runs):
        runs.count(PLACE, stored("a"), -1)
        runs.reserve(PLACE, -1)
        (open_,) = runs.overdue(self.NAMES, [], 10)
        assert sum(at_once([lambda: runs.give_up(open_.place, open_.number)] * 4)) == 1
        assert runs.overdue(self.NAMES, [], 10) == []
        runs.count(PLACE, stored("b"), -1)
        assert runs.overdue(self.NAMES, [], 10)[0].rescues == 0

    def test_a_new_trigger_puts_nothing_off(self, runs):
        runs.count(PLACE, stored("a"), -1)
        runs.count(PLACE, stored("b"), GRACE)
        assert len(runs.overdue(self.NAMES, [], 10)) == 1

    def test_a_trigger_after_the_last_was_done_has_a_grace_of_its_own(self, runs, rows):
        run_once(runs)
        row = rows.get()
        assert (row.due_at - row.updated_at).total_seconds() == pytest.approx(86400, abs=1)
        runs.count(PLACE, stored("b"), -1)
        assert len(runs.overdue(self.NAMES, [], 10)) == 1

    def test_what_its_holder_sees_to_at_the_end_has_a_grace(self, runs):
        me = owner()
        claimed = runs.begin(PLACE, me, stored("a"), -1)[1]
        runs.count(PLACE, stored("b"), -1)
        runs.end(PLACE, me, claimed.number, GRACE)
        assert runs.overdue(self.NAMES, [], 10) == []


class TestForgetting:
    @pytest.fixture(autouse=True)
    def kept_no_time(self, monkeypatch):
        monkeypatch.setattr("django_fencedlock.storage.pending_runs.KEPT", -1.0)

    def test_what_is_done_is_deleted(self, runs, rows):
        run_once(runs)
        runs.count(Place("other", "app.charge"), stored(), -1)
        assert runs.sweep(5) == 1
        assert rows.get().name == "other"

    def test_a_bounded_number_goes_at_a_time(self, runs, rows):
        run_once(runs)
        row = rows.get()
        for number in range(BATCH + 10):
            row.pk, row.name = None, f"n{number}"
            row.save(using=rows.db, force_insert=True)
        assert runs.sweep(1) == BATCH
        assert runs.sweep(9) == 11

    def test_a_run_from_before_ends_no_triggers_of_a_new_row(self, runs):
        """Numbers begin again, so a paused run's high number must not count."""
        paused = owner()
        for _ in range(5):
            claimed = begin(runs, paused)
        run_once(runs)
        runs.sweep(5)
        runs.count(PLACE, stored(), GRACE)
        assert not runs.end(PLACE, paused, claimed.number, GRACE)
        assert runs.numbers(PLACE) == (1, 0)


@pytest.mark.parametrize("using", ["postgres", "mariadb"], indirect=True)
def test_the_number_of_statements(using, runs, request):
    server = request.getfixturevalue(using)
    me, first = owner(), message()
    # The first trigger of a name inserts its row, in a savepoint.
    begin(runs, me)
    acts = {
        "begin": lambda: begin(runs, me),
        "count": lambda: runs.count(PLACE, stored("b"), GRACE),
        "claim": lambda: runs.claim(PLACE, me, GRACE),
        "end": lambda: runs.end(PLACE, me, 3, GRACE),
        "waiting": lambda: runs.waiting("invoice:1"),
        "overdue": lambda: runs.overdue(["app.charge"], ["celery"], 10),
        "begin with a message": lambda: runs.begin(PLACE, first.owner, stored("c"), GRACE, first),
    }
    found = {}
    for act, call in acts.items():
        with server.statements() as seen:
            call()
        found[act] = sum(seen.values())
    assert max(found.pop(act) for act in ("begin", "count", "claim")) <= 6
    assert found.pop("begin with a message") <= 9
    assert set(found.values()) == {1}


@pytest.mark.parametrize("using", ["postgres"], indirect=True)
def test_a_stored_message_outlasts_a_crash_and_a_pause_delays_none(using, runs, monkeypatch):
    """On a server that commits without waiting for its disk. A trigger tells what a COMMIT has."""
    private = sessions.private

    def lazy(*args):
        made = private(*args)
        made.settings_dict["OPTIONS"]["options"] = "-c synchronous_commit=off"
        return made

    monkeypatch.setattr(sessions, "private", lazy)
    me, first = owner(), message()
    records = MessageRecords(conf.config())
    with connections[using].cursor() as cursor:
        cursor.execute(WATCH_COMMITS)
        try:
            runs.count(PLACE, stored(), -1)
            assert runs.reserve(PLACE, GRACE)
            assert runs.claim(PLACE, me, GRACE).number == 1
            assert runs.end(PLACE, me, 1, GRACE)
            runs.begin(PLACE, me, stored(), GRACE, first)
            assert not records.begin(replace(first, owner=me)).is_first
            assert records.finish(replace(first, owner=me), "success")
            cursor.execute("SELECT durable, idle FROM commits")
            found = cursor.fetchall()
        finally:
            cursor.execute("DROP FUNCTION watch_commit CASCADE; DROP TABLE commits")
    assert len(found) >= 7
    assert set(found) == {("on", "2s")}


@pytest.mark.django_db(databases=["postgres"])
@pytest.mark.parametrize("using", ["postgres"], indirect=True)
def test_the_transaction_of_a_test_may_pause_afterwards(using, runs):
    runs.begin(PLACE, owner(), stored(), GRACE)
    with connections[using].cursor() as cursor:
        cursor.execute("SHOW idle_in_transaction_session_timeout")
        assert cursor.fetchone() == ("0",)


WATCH_COMMITS = """
CREATE TABLE commits (durable text, idle text);
CREATE FUNCTION watch_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO commits VALUES (current_setting('synchronous_commit'),
        current_setting('idle_in_transaction_session_timeout'));
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER watch AFTER INSERT OR UPDATE ON django_fencedlock_pendingrun
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION watch_commit();
CREATE CONSTRAINT TRIGGER watch AFTER INSERT OR UPDATE ON django_fencedlock_messagerecord
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION watch_commit();
"""
