"""The checker finds what is wrong, in histories made by hand, and nothing in one that is right."""

import pytest

from tests.faults.checker import SECOND, Terms, refusals, takeovers, violations
from tests.faults.history import (
    FAIL,
    OK,
    UNKNOWN,
    Entry,
    History,
    Operation,
    Recorder,
    read_operations,
)

TERMS = Terms(ttl=1, slack=1)


class Story:
    """Makes a history of events, one per second. It is correct; tests add the errors."""

    def __init__(self):
        self.history = History()
        self.second = 0
        self.counts = {}

    def tick(self):
        self.second += 1
        return self.second * SECOND

    def operation(self, kind, client, outcome=OK, begun=None, ended=None, **facts):
        own = {key: facts.pop(key) for key in ("token", "owner") if key in facts}
        begun = begun or self.tick()
        ended = ended or (self.tick() if outcome != UNKNOWN else None)
        made = Operation(kind, "row:1", begun, ended, outcome, client, facts=facts, **own)
        self.history.operations.append(made)
        return made

    def entry(self, kind, before, after, token, stamp):
        place = len(self.history.trail) + 1
        self.history.trail.append(Entry(place, kind, "row:1", before, after, token, stamp))

    def grant(self, client, token, recorded=True, **facts):
        owner = facts.pop("owner", f"{client}/{token}")
        if recorded:
            self.entry("fence", None, token, token, owner)
        return self.operation("acquire", client, token=token, owner=owner, **facts)

    def write(self, lease, outcome=OK, table="tally", committed=None, read=None, **facts):
        count = self.counts.get(table, 0)
        read = count if read is None else read
        stamp = f"stamp {self.second}"
        if committed if committed is not None else outcome == OK:
            token = None if table == "plain" else facts.pop("left", lease.token)
            self.entry(table, count, read + 1, token, stamp)
            self.counts[table] = read + 1
        own = {"token": lease.token, "owner": lease.owner, "table": table, "stamp": stamp}
        return self.operation("write", lease.client, outcome, **own, **facts)

    def ask(self, lease, kind, outcome, left=0.5, lost=False, **facts):
        return self.operation(
            kind, lease.client, outcome, token=lease.token, owner=lease.owner, left=left, lost=lost
        )

    def release(self, lease):
        return self.operation("release", lease.client, token=lease.token, owner=lease.owner)

    def found(self, terms=TERMS):
        counts = {(table, "row:1"): count for table, count in self.counts.items()}
        self.history.counts = self.history.counts or counts
        return {each.promise for each in violations(self.history, terms)}


@pytest.fixture
def story():
    return Story()


@pytest.fixture
def first(story):
    return story.grant("a", 1)


def test_nothing_is_wrong_with_a_takeover(story, first):
    story.write(first)
    second = story.grant("b", 2)
    story.write(first, FAIL, error="StaleFence")
    story.ask(first, "verify", FAIL, left=-1)
    story.write(second)
    story.write(second, table="plain")
    story.release(second)
    assert story.found() == set()
    assert takeovers(story.history) == refusals(story.history) == 1


def test_a_released_lock_is_not_taken_over(story):
    story.release(story.grant("a", 1))
    story.grant("b", 2)
    assert takeovers(story.history) == 0


def test_the_same_token_twice_by_the_holders_words(story):
    story.grant("a", 1, owner="x")
    story.grant("b", 1, recorded=False)
    assert "I1" in story.found()


@pytest.mark.parametrize(("owner", "promises"), [("y", {"I1"}), ("x", set())])
def test_the_same_token_twice_by_the_database_unless_it_is_one_claim(story, owner, promises):
    story.entry("fence", None, 1, 1, "x")
    story.entry("fence", 1, 1, 1, owner)
    assert story.found() == promises


@pytest.mark.parametrize(("at_once", "promises"), [(False, {"I2"}), (True, set())])
def test_a_token_that_falls_unless_the_grants_were_at_once(story, at_once, promises):
    story.entry("fence", None, 1, 1, "b/1")
    story.entry("fence", 1, 2, 2, "a/2")
    story.grant("a", 2, recorded=False, **({"begun": 1, "ended": 20} if at_once else {}))
    story.grant("b", 1, recorded=False, **({"begun": 2, "ended": 30} if at_once else {}))
    assert story.found() == promises


def test_a_row_whose_fence_falls(story):
    first, second = story.grant("a", 1), story.grant("b", 2)
    story.write(second, table="gauge")
    story.write(first, table="gauge")
    assert story.found() == {"I3"}


@pytest.mark.parametrize(("table", "promises"), [("tally", {"I4"}), ("gauge", set())])
def test_a_write_after_a_newer_holder_came_unless_the_row_is_weak(story, table, promises, first):
    story.grant("b", 2)
    story.write(first, table=table)
    assert story.found() == promises


def test_a_write_between_the_record_of_a_grant_and_its_answer(story, first):
    story.entry("fence", 1, 2, 2, "b/2")
    story.write(first)
    story.grant("b", 2, recorded=False)
    assert story.found() == {"I4"}


def test_a_commit_after_a_newer_holder_came_though_it_was_written_before(story, first):
    write = story.write(first)
    story.grant("b", 2)
    write.begun = story.tick()
    write.ended = story.tick()
    assert story.found() == {"I4"}


@pytest.mark.parametrize("table", ["tally", "plain"])
def test_a_lost_update(story, table):
    lease = story.grant("a", 1)
    story.write(lease, table=table)
    story.write(lease, table=table)
    story.write(lease, table=table, read=1)
    assert story.found() == {"I5"}


@pytest.mark.parametrize(
    ("outcome", "committed", "promises"),
    [
        *((OK, False, {"I6"}), (FAIL, True, {"I6"})),
        *((UNKNOWN, committed, set()) for committed in (True, False)),
    ],
)
def test_a_write_whose_answer_is_untrue(story, outcome, committed, promises):
    story.write(story.grant("a", 1), outcome, committed=committed, error="LeaseLost")
    assert story.found() == promises


def test_a_write_that_is_there_twice(story):
    story.write(story.grant("a", 1))
    last = story.history.trail[-1]
    story.entry("tally", 1, 2, 1, last.stamp)
    story.counts["tally"] = 2
    assert story.found() == {"I6"}


def test_a_write_without_a_client(story):
    story.grant("a", 1)
    story.entry("tally", 0, 1, 1, "from somewhere")
    story.counts["tally"] = 1
    assert story.found() == {"I6"}


def test_a_counter_that_was_changed_unseen(story):
    story.write(story.grant("a", 1))
    story.history.counts = {("tally", "row:1"): 7}
    assert story.found() == {"I6"}


def test_a_holder_whose_grant_was_never_recorded(story):
    story.grant("a", 1, recorded=False)
    assert story.found() == {"I7"}


def test_a_write_that_leaves_another_token(story):
    story.write(story.grant("a", 2), left=1)
    assert story.found() == {"I7"}


@pytest.mark.parametrize(("token", "released"), [(2, False), (1, True)])
def test_entering_again_under_a_new_token_or_releasing_the_outer_lock(story, token, released):
    lease = story.grant("a", 1)
    story.operation("reenter", "a", token=token, outer=1, owner=lease.owner, released=released)
    assert story.found() == {"I8"}


def test_a_child_that_writes_under_its_parents_lease(story):
    lease = story.grant("a", 1)
    story.operation("inherit", "a", OK, token=1, owner=lease.owner)
    assert story.found() == {"I8"}


@pytest.mark.parametrize(("seconds", "promises"), [(1, set()), (3, {"I9"})])
def test_a_waiter_for_the_lock_of_the_dead(story, seconds, promises):
    story.grant("a", 1)
    began = story.tick()
    killed = story.tick()
    story.history.injections = [{"what": "kill", "client": "a", "at": killed}]
    story.operation("acquire", "b", FAIL, begun=began, ended=killed + seconds * SECOND)
    assert story.found() == promises


@pytest.mark.parametrize("kind", ["verify", "renew"])
def test_a_holder_who_is_refused_for_no_reason(story, kind):
    story.ask(story.grant("a", 1), kind, FAIL)
    assert story.found() == {"I10"}
    assert story.found(Terms(ttl=1, forgets=True)) == set()


def test_a_holder_who_is_refused_since_a_newer_came(story, first):
    story.grant("b", 2)
    story.ask(first, "renew", FAIL)
    assert story.found() == set()


@pytest.mark.parametrize(("ttl", "is_renewed"), [(10, False), (4, True)])
def test_a_grant_before_the_holders_ttl_is_over(story, first, ttl, is_renewed):
    if is_renewed:
        story.ask(first, "renew", OK)
    story.grant("b", 2)
    story.release(first)
    assert story.found(Terms(ttl=ttl)) == {"I10"}
    assert story.found(Terms(ttl=2)) == set()
    assert story.found(Terms(ttl=ttl, forgets=True)) == set()


def test_a_grant_after_the_holder_died(story):
    story.grant("a", 1)
    story.grant("b", 2)
    assert story.found(Terms(ttl=10)) == set()


@pytest.mark.parametrize("kind", ["verify", "renew"])
def test_a_former_holder_is_confirmed(story, kind, first):
    story.grant("b", 2)
    story.ask(first, kind, OK)
    assert story.found() == {"I10"}
    assert story.found(Terms(ttl=1, forgets=True)) == set()


def test_the_newest_holder_is_refused_as_stale(story):
    story.write(story.grant("a", 1), FAIL, error="StaleFence")
    assert story.found() == {"I12"}


def test_accounts_survive_a_kill_in_mid_line(tmp_path):
    notes = Recorder(tmp_path, "client-0-0")
    number = notes.invoke("acquire", "row:1")
    notes.answer(number, OK, token=1, owner="x")
    notes.invoke("write", "row:1", token=1, owner="x", stamp="s", table="tally")
    with (tmp_path / "client-0-0.jsonl").open("a") as file:
        file.write('{"at": 12, "num')
    acquired, write = read_operations(tmp_path)
    assert (acquired.outcome, acquired.token, acquired.client) == (OK, 1, "client-0-0")
    assert (write.outcome, write.ended, write.stamp) == (UNKNOWN, None, "s")


# Readers share a token. Their fence has no owner of its own.


def a_reader(story, client, token=1, **facts):
    first = not any(each.after == token for each in story.history.trail if each.kind == "fence")
    if first:
        story.entry("fence", token - 1, token, token, "shared")
    owner = f"{client}/{story.second}"
    return story.grant(client, token, recorded=False, owner=owner, shared=True, **facts)


def a_reading(story, lease, read=None, **facts):
    stamp = f"stamp {story.second}"
    story.entry(
        "reading", None, story.counts.get("stock", 0) if read is None else read, None, stamp
    )
    own = {"token": lease.token, "owner": lease.owner, "table": "reading", "stamp": stamp}
    return story.operation("write", lease.client, **own, shared=True, **facts)


def test_nothing_is_wrong_with_readers_between_writers(story):
    first, other = a_reader(story, "a"), a_reader(story, "b")
    a_reading(story, other)
    a_reading(story, first)
    story.release(first)
    story.release(other)
    writer = story.grant("a", 2)
    story.write(writer, table="stock")
    story.release(writer)
    a_reading(story, a_reader(story, "b", 3))
    assert story.found() == set()
    assert takeovers(story.history) == 0


def test_a_writer_that_takes_over_from_two_readers(story):
    a_reader(story, "a")
    a_reader(story, "b")
    story.grant("c", 2)
    assert story.found() == set()
    assert takeovers(story.history) == 2


def test_a_reader_that_has_the_token_of_a_writer(story):
    story.entry("fence", 0, 1, 1, "a/1")
    story.grant("a", 1, recorded=False, owner="a/1")
    a_reader(story, "b")
    assert story.found() == {"I1", "I7"}


def test_a_reader_that_gets_a_lower_token_than_a_writer_before(story):
    a_reader(story, "a")
    story.grant("b", 2)
    a_reader(story, "a")
    assert story.found() == {"I2"}


def test_a_reader_that_commits_after_the_next_writers_grant(story):
    reader = a_reader(story, "a")
    story.grant("b", 2)
    a_reading(story, reader)
    assert story.found() == {"I4"}


def test_a_writer_that_commits_after_a_readers_grant(story):
    writer = story.grant("a", 1)
    a_reader(story, "b", 2)
    story.write(writer, table="stock")
    assert story.found() == {"I4"}


def test_a_reading_of_something_older(story):
    writer = story.grant("a", 1)
    story.write(writer, table="stock")
    story.release(writer)
    a_reading(story, a_reader(story, "b", 2), read=0)
    assert story.found() == {"I5"}


@pytest.mark.parametrize(("first", "second"), [("writer", "reader"), ("reader", "writer")])
def test_a_reader_beside_a_writer(story, first, second):
    kinds = {
        "reader": lambda client, token: a_reader(story, client, token),
        "writer": lambda client, token: story.grant(client, token),
    }
    earlier = kinds[first]("a", 1)
    kinds[second]("b", 2)
    story.release(earlier)
    assert story.found(Terms(ttl=9)) == {"I10"}


def test_readers_beside_each_other(story):
    earlier, later = a_reader(story, "a"), a_reader(story, "b")
    story.release(earlier)
    story.release(later)
    assert story.found(Terms(ttl=9)) == set()


def test_the_name_of_a_permit_is_known_once_it_was_granted(tmp_path):
    notes = Recorder(tmp_path, "a")
    number = notes.invoke("acquire", "pool", limit=3)
    notes.answer(number, OK, token=1, owner="x", name="pool [permit 2]")
    (operation,) = read_operations(tmp_path)
    assert operation.name == "pool [permit 2]"
