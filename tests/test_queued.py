"""The recipe of locks as queues, on a service in memory."""

import contextlib
import gc
import itertools
import random
import threading
import weakref
from functools import partial

import pytest

from django_fencedlock.backends import doubts, queued
from django_fencedlock.backends.doubts import LATE
from django_fencedlock.backends.interface import Grant, Granted, Held, Renewal, Wait
from django_fencedlock.backends.queued import WATCH, Entry
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import BackendUnavailable
from tests.failing import raising
from tests.stub_queue import NoAnswer, QueueService, StubQueue, Time, random_faults
from tests.test_backend_interface import BackendInterface, claim, grant, reader, take
from tests.threads import beside

CONFIG = AliasConfig(
    alias="default",
    backend="tests.stub_queue.StubQueue",
    location="",
    ttl=30.0,
    blocking_timeout=10.0,
    key_prefix="",
    fence_database="default",
    options={},
)


class TestInterface(BackendInterface):
    @pytest.fixture
    def make(self):
        service = QueueService()
        return lambda: StubQueue(CONFIG, service)


def owners_ahead(backend, name, owner_of):
    """Queue writers (w) and readers (r), and return which one each of them waits for."""
    owners, ahead = {}, []
    session = backend._session(30)
    for kind in "rrwrrww":
        sent = claim(name)._replace(shared=kind == "r")
        owners[sent.owner] = len(owners)
        backend._doubts.begin(sent.owner, sent.shared)
        entered = backend.enter(session.id, sent, alone=False)
        found = backend.look(name, sent.owner, entered.number)
        assert (found.number, found.ahead) == (entered.number, entered.ahead)
        ahead.append(owners[owner_of(entered.ahead)] if entered.ahead else None)
    held = backend.holders([name])[name]
    assert [owners[each.owner] for each in (held, *held.others)] == [0, 1]
    assert all(each.shared and each.token is None for each in (held, *held.others))
    assert held.waiting == 5
    # One that doesn't wait adds nothing.
    assert backend.acquire(reader(name), Wait()).owner == held.owner
    assert backend.holders([name])[name].waiting == 5
    for owner in owners:
        assert backend.leave(name, owner)
    return ahead


#: What `owners_ahead()` returns: a writer waits for the entry before, a reader for a writer's.
NEAREST = [None, None, 1, 2, 2, 4, 5]


def test_a_reader_waits_for_the_nearest_writer_and_a_writer_for_the_nearest_entry():
    service = QueueService()

    def owner_of(number):
        (owner,) = (each.owner for each in service.entries if each.number == number)
        return owner

    assert owners_ahead(StubQueue(CONFIG, service), "x", owner_of) == NEAREST


@pytest.mark.parametrize("lists_strays", [True, False])
def test_a_shared_claim_that_is_repeated_has_its_first_entry(make, other, time, lists_strays):
    """A writer's entry after it refuses it no more than at first."""
    backend = make(lists_strays=lists_strays)
    taken = take(backend, sent := reader("x"))
    assert taken.token is None
    number = taken.handle.number
    other.enter(other._session(30).id, claim("x"), False)
    assert take(backend, sent).handle.number == number
    assert backend.renew([taken]) == [Renewal.KEPT]


@pytest.fixture
def time(monkeypatch):
    """Set the time of backends, waits and the service."""
    time = Time()
    for module in (queued, doubts):
        monkeypatch.setattr(module, "clock", time)
    return time


@pytest.fixture
def service(time):
    return QueueService(time)


@pytest.fixture
def make(service):
    return partial(StubQueue, CONFIG, service)


@pytest.fixture
def backend(make):
    return make()


@pytest.fixture
def other(make):
    return make()


def waiting(time, seconds=10.0, refused=lambda held: None):
    return Wait(seconds, refused, now=time, since=time())


def meanwhile(service, *acts):
    """Do one of these in each watch, then nothing but let the time pass."""
    left = list(acts)

    def wait(watch):
        if left:
            left.pop(0)()
        else:
            service.clock.pass_by(watch.seconds)

    service.meanwhile = wait


# Sessions


def test_a_process_has_one_session_for_each_ttl(backend, other, service):
    for ttl in (30, 30, 10, 29.5):
        take(backend, claim(f"a {ttl} {random.random()}", ttl=ttl))
    assert sorted(ttl for ttl, _ in service.sessions.values()) == [10, 30]
    take(other, claim("b"))
    assert len(service.sessions) == 3


def test_a_session_is_no_shorter_than_the_service_allows(backend, service):
    backend.shortest = 10.0
    taken = take(backend, claim("x", ttl=0.5))
    assert taken.handle.session.ttl == 10
    assert backend.renew([taken]) == [Renewal.KEPT]


def test_a_ttl_beyond_the_longest_session_is_refused(backend, service):
    """The session would end before the lease does."""
    backend.longest = 40.0
    take(backend, claim("x", ttl=40))
    with pytest.raises(ValueError, match="at most 40 s"):
        backend.acquire(claim("y", ttl=41), Wait())
    assert service.owners("y") == []
    assert not backend._doubts.owners.keys() - {service.owners("x")[0]}


def test_a_lease_counts_from_before_the_request_that_renewed_the_session(backend, service, time):
    service.fail = lambda what: time.pass_by(1) or ""
    began = time()
    answer = backend.acquire(claim("x"), Wait())
    assert answer.since == began
    time.pass_by(15)
    began = time()
    assert backend.acquire(claim("y"), Wait()).since == began
    (session,) = service.sessions
    assert service.sessions[session][1] >= began + 30


def test_a_session_that_needs_no_renewal_gets_none(backend, service, time):
    take(backend, claim("x"))
    time.pass_by(9)
    service.requests.clear()
    take(backend, claim("y"))
    assert service.requests == ["enter"]


def test_a_session_that_ended_is_opened_again(backend, service, time):
    take(backend, claim("x"))
    service.end_all()
    assert take(backend, claim("y")).token == 2
    time.pass_by(31)
    assert take(backend, claim("z")).token == 3


def test_an_acquire_gives_up_on_sessions_that_end_at_once(backend, service):
    service.fail = lambda what: service.end_all() or "" if what == "enter" else ""
    with pytest.raises(BackendUnavailable, match="each session ended"):
        backend.acquire(claim("x"), Wait())


def test_a_session_that_is_gone_loses_only_its_own_leases(backend, service, time):
    short, long = take(backend, claim("x", ttl=10)), take(backend, claim("y", ttl=30))
    time.pass_by(11)
    assert backend.renew([short, long]) == [Renewal.LOST, Renewal.KEPT]
    assert not backend.verify(short)
    assert backend.verify(long)


def test_a_lease_of_a_ttl_longer_than_its_session_is_refused(backend, service, time):
    short, long = take(backend, claim("x", ttl=10)), take(backend, claim("y", ttl=30))
    with pytest.raises(ValueError, match=r"'x' has a session of 10 s, which can't be extended"):
        backend.renew([short._replace(ttl=11.0)])
    assert backend.renew([short._replace(ttl=5.0), long]) == [Renewal.KEPT, Renewal.KEPT]


def test_a_failed_renewal_is_an_error_and_loses_nothing(backend, service):
    taken = take(backend, claim("x"))
    service.faults = [("keep", "lost")]
    with pytest.raises(BackendUnavailable, match="renew"):
        backend.renew([taken])
    assert backend.renew([taken]) == [Renewal.KEPT]


def test_a_session_without_an_answer_fails_no_other(backend, service, time):
    """With ZooKeeper each has its own connection, and the server of one may hang."""
    long, short = take(backend, claim("x", ttl=90)), take(backend, claim("y", ttl=6))
    really = backend.keep

    def keep(session):
        if session == long.handle.session.id:
            raise NoAnswer
        return really(session)

    backend.keep = keep
    for _ in range(3):
        time.pass_by(5)
        assert backend.renew([long, short]) == [Renewal.UNKNOWN, Renewal.KEPT]
    assert backend.verify(short)


def test_two_threads_may_notice_the_end_of_a_session(backend, service, monkeypatch):
    """One of them had a KeyError, or dropped the session that the other had opened."""
    session = take(backend, claim("x")).handle.session

    class Sessions(dict):
        def get(self, ttl):
            found = super().get(ttl)
            if not others and found is session:
                others.append(beside(backend._drop, session))
                # The other thread goes on, if nothing stops it.
                with contextlib.suppress(TimeoutError):
                    others[0].result(0.2)
            return found

    others = []
    backend._sessions = Sessions(backend._sessions)
    backend._drop(session)
    others[0].result(20)
    assert backend._sessions == {}


def test_a_failure_to_open_a_session_keeps_nothing_of_its_caller(backend, service):
    """Its traceback would: frames refer to the frames that called them, and to their variables."""

    class Thing:
        pass

    def fail():
        thing = Thing()
        seen.append(weakref.ref(thing))
        with contextlib.suppress(BackendUnavailable):
            backend.acquire(claim("x"), Wait())

    seen = []
    service.fail = lambda what: "lost"
    fail()
    gc.collect()
    assert seen[0]() is None
    assert backend._failed


def test_grants_of_other_processes_are_not_renewed(backend, other):
    taken = take(other, claim("x"))
    assert backend.renew([taken._replace(handle=None)]) == [Renewal.LOST]


# Waiting


def test_a_waiter_alone_keeps_its_session_and_its_place(backend, other, service, time):
    taken, sent = take(other, claim("x", ttl=1000)), claim("x", ttl=3)
    acts = [*[lambda: time.pass_by(1)] * 50, lambda: other.release(taken)]
    meanwhile(service, *acts)
    answer = backend.acquire(sent, waiting(time, 60))
    assert isinstance(answer, Granted)
    assert answer.token == taken.token + 1
    assert service.requests.count("open") == 2


def test_a_place_in_the_queue_is_no_lock(backend, other, service):
    take(other, claim("x"))
    session, sent = backend._session(30), claim("x")
    place = backend.enter(session.id, sent, False)
    entry = Entry(session, place.number)
    assert not backend.verify(Grant("x", sent.owner, handle=entry))


@pytest.fixture(autouse=True)
def no_real_watch(request):
    """With a clock that stands still, a watch would never end."""
    if "time" in request.fixturenames and "service" in request.fixturenames:
        meanwhile(request.getfixturevalue("service"))


def test_a_waiter_whose_session_ended_enters_again(backend, other, service, time):
    taken = take(other, claim("x", ttl=1000))
    sent = claim("x", ttl=3)

    def end_the_waiters():
        with service.changed:
            (session,) = (each.session for each in service.entries if each.owner == sent.owner)
            service.end(session)

    meanwhile(service, end_the_waiters, end_the_waiters, lambda: other.release(taken))
    answer = backend.acquire(sent, waiting(time, 60))
    assert isinstance(answer, Granted)
    assert backend.verify(grant(sent, answer))


def test_a_waiter_that_was_released_by_force_enters_again(backend, other, service, time):
    taken = take(other, claim("x", ttl=1000))
    sent = claim("x")
    meanwhile(
        service,
        lambda: other.release(Grant("x", sent.owner)),
        lambda: other.release(taken),
    )
    assert isinstance(backend.acquire(sent, waiting(time, 60)), Granted)


def test_a_waiter_whose_entry_is_gone_at_once_goes_on_waiting(backend, other, service, time):
    """A service that looks after it has entered finds nothing: it returns who is first."""
    taken = take(other, claim("x", ttl=1000))
    sent, really = claim("x"), backend.enter
    answers = [Held("else")]

    def enter(*given):
        return answers.pop() if answers else really(*given)

    backend.enter = enter
    meanwhile(service, lambda: other.release(taken))
    assert isinstance(backend.acquire(sent, waiting(time)), Granted)


def test_a_waiter_follows_another_if_the_one_ahead_dies(backend, other, make, service, time):
    taken = take(other, claim("x", ttl=1000))
    dying, sent = make(), claim("x")
    dead = claim("x", ttl=3)
    session = dying._session(3)
    dying.enter(session.id, dead, False)
    seen = []

    def look():
        seen.append(service.owners("x"))

    meanwhile(
        service,
        lambda: (time.pass_by(4), service.send("", look)),
        look,
        lambda: other.release(taken),
    )
    assert isinstance(backend.acquire(sent, waiting(time, 60)), Granted)
    assert seen == [[taken.owner, sent.owner]] * 2


def test_refused_is_called_at_the_first_refusal_and_every_two_seconds(
    backend, other, service, time
):
    taken, calls = take(other, claim("x", ttl=1000)), []

    def refused(held):
        calls.append((time(), held.owner))

    began = time()
    answer = backend.acquire(claim("x", ttl=60), waiting(time, 21, refused))
    assert isinstance(answer, Held)
    assert answer.owner == taken.owner
    moments = [moment for moment, _ in calls]
    assert moments[0] == began
    assert max(b - a for a, b in itertools.pairwise(moments)) <= WATCH
    assert {owner for _, owner in calls} == {taken.owner}
    assert service.owners("x") == [taken.owner]
    assert time() <= began + 21 + WATCH


def test_a_holder_that_refused_releases_is_succeeded(backend, other, service, time):
    taken = take(other, claim("x", ttl=1000))

    def evict(held):
        backend.release(Grant("x", held.owner))

    assert isinstance(backend.acquire(claim("x"), waiting(time, 10, evict)), Granted)
    assert not other.verify(taken)


def test_an_error_of_refused_leaves_the_queue(backend, other, service, time):
    taken = take(other, claim("x", ttl=1000))
    with pytest.raises(LookupError):
        backend.acquire(claim("x"), waiting(time, 10, raising(LookupError("no"))))
    assert service.owners("x") == [taken.owner]
    assert backend._doubts.owners == {}


@pytest.mark.parametrize("lists_strays", [True, False])
def test_an_entry_that_could_not_leave_is_deleted_by_a_beat(
    make, other, service, time, lists_strays
):
    backend = make(lists_strays=lists_strays)
    kept, taken = take(backend, claim("y")), take(other, claim("x", ttl=1000))
    service.faults = [("leave", "lost")]
    with pytest.raises(LookupError):
        backend.acquire(claim("x"), waiting(time, 10, raising(LookupError("no"))))
    assert len(service.owners("x")) == 2
    for _ in range(2):
        backend.renew([kept])
    assert service.owners("x") == [taken.owner]


@pytest.mark.parametrize("by_event", [True, False])
def test_a_cancelled_wait_leaves_the_queue(backend, other, service, time, by_event):
    taken = take(other, claim("x", ttl=1000))
    wait = waiting(time, 1000)
    wait.cancelled_by = threading.Event()
    meanwhile(service, wait.cancelled_by.set if by_event else wait.cancel)
    assert isinstance(backend.acquire(claim("x"), wait), Held)
    assert service.owners("x") == [taken.owner]


def test_a_cancelled_wait_ends_its_watch():
    service = QueueService()
    backend, other = StubQueue(CONFIG, service), StubQueue(CONFIG, service)
    refused, wait = threading.Event(), Wait(60)
    taken = take(other, claim("x"))
    wait.refused = lambda held: refused.set()
    waiter = beside(backend.acquire, claim("x"), wait)
    assert refused.wait(20)
    # The watch may not have begun.
    for _ in range(1000):
        wait.cancel()
        if waiter.done():
            break
        threading.Event().wait(0.001)
    assert isinstance(waiter.result(20), Held)
    assert service.owners("x") == [taken.owner]


def test_a_wait_that_is_cancelled_before_its_watch_begins_has_none():
    service = QueueService()
    backend, other = StubQueue(CONFIG, service), StubQueue(CONFIG, service)
    wait, really = Wait(60), backend.watch

    def watch(*given):
        wait.cancel()
        really(*given)

    backend.watch = watch
    take(other, claim("x"))
    began = clock()
    assert isinstance(backend.acquire(claim("x"), wait), Held)
    assert clock() < began + WATCH / 2


def test_a_wait_that_was_cancelled_before_it_began_enters_no_queue(backend, other, service, time):
    take(other, claim("x"))
    wait = waiting(time, 10)
    wait.cancel()
    assert isinstance(backend.acquire(claim("x"), wait), Held)
    assert len(service.owners("x")) == 1


# Doubts


def beats(backend, time, seconds, *kept):
    """Let the keeper renew these every three seconds."""
    end = time() + seconds
    while time() < end:
        time.pass_by(3)
        assert set(backend.renew(kept)) <= {Renewal.KEPT}


def test_an_acquire_that_was_sent_twice_is_released_only_after_its_lease(backend, service, time):
    kept = take(backend, claim("y"))
    service.faults = [("enter", "twice, one late")]
    taken = take(backend, claim("x"))
    service.requests.clear()
    beats(backend, time, 30, kept, taken)
    assert "leave" not in service.requests
    assert backend.verify(taken)
    backend.release(taken)
    service.requests.clear()
    backend.renew([kept])
    assert service.requests.count("leave") == 1


@pytest.mark.parametrize("lists_strays", [True, False])
@pytest.mark.parametrize("after", [1, 30, 56])
def test_a_late_copy_of_an_acquire_is_released_at_the_next_beats(
    make, service, time, lists_strays, after
):
    backend = make(lists_strays=lists_strays)
    kept = take(backend, claim("y"))
    service.faults = [("enter", "twice, one late")]
    taken = take(backend, claim("x"))
    backend.release(taken)
    beats(backend, time, after, kept)
    service.deliver()
    assert service.owners("x") == [taken.owner]
    beats(backend, time, 6, kept)
    assert service.owners("x") == []


def test_a_repeated_acquire_is_released_for_a_minute(backend, service, time):
    kept = take(backend, claim("y"))
    service.faults = [("enter", "twice, one late")]
    backend.release(take(backend, claim("x")))
    beats(backend, time, LATE + 3, kept)
    service.requests.clear()
    beats(backend, time, 30, kept)
    assert "leave" not in service.requests
    assert backend._doubts.late == {}


def test_a_claim_that_is_tried_again_is_not_released_for_its_first_try(
    backend, other, service, time
):
    """The core repeats a claim, of the same owner, once it has evicted the holder."""
    kept, taken = take(backend, claim("y")), take(other, claim("x", ttl=1000))
    sent = claim("x")
    service.faults = [("enter", "twice")]
    assert isinstance(backend.acquire(sent, waiting(time, 1)), Held)
    other.release(taken)
    again = take(backend, sent)
    beats(backend, time, 90, kept, again)
    assert backend.verify(again)
    backend.release(again)


def test_a_late_copy_of_a_claim_that_was_tried_again_is_released(make, other, service, time):
    backend = make(lists_strays=False)
    kept, taken = take(backend, claim("y")), take(other, claim("x", ttl=1000))
    sent = claim("x")
    service.faults = [("enter", "twice, one late")]
    assert isinstance(backend.acquire(sent, waiting(time, 1)), Held)
    other.release(taken)
    backend.release(take(backend, sent))
    service.deliver()
    assert service.owners("x") == [sent.owner]
    beats(backend, time, 3, kept)
    assert service.owners("x") == []


def test_strays_are_removed_when_seen_at_two_beats(backend, other, service, time):
    kept, foreign = take(backend, claim("y")), take(other, claim("z"))
    session = kept.handle.session
    backend.enter(session.id, claim("x"), False)
    backend.renew([kept])
    assert len(service.owners("x")) == 1
    backend.renew([kept])
    assert service.owners("x") == []
    assert service.owners("z") == [foreign.owner]


def test_a_stray_that_is_not_seen_again_is_not_removed(backend, service, time):
    kept, sent = take(backend, claim("y")), claim("x")
    backend.enter(kept.handle.session.id, sent, False)
    backend.renew([kept])
    backend.leave("x", sent.owner)
    backend.renew([kept])
    taken = take(backend, sent)
    service.requests.clear()
    for _ in range(3):
        backend.renew([kept, taken])
    assert "leave" not in service.requests


def test_a_waiter_is_not_stuck_behind_a_stray_of_its_own_session(backend, service, time):
    """Without a lease in the process, only waiters keep the session."""
    sent, stray = claim("x", ttl=3), claim("x", ttl=3)
    backend.enter(backend._session(3).id, stray, False)
    assert isinstance(backend.acquire(sent, waiting(time, 30)), Granted)
    assert service.owners("x") == [sent.owner]


def test_a_beat_renews_every_session_before_it_releases_doubts(backend, service, time):
    """A release that gets no answer takes a whole timeout."""
    kept = [take(backend, claim("y", ttl=10)), take(backend, claim("z", ttl=30))]
    service.faults = [("enter", "twice, one late")]
    backend.release(take(backend, claim("x")))
    service.requests.clear()
    service.faults = [("leave", "lost")]
    assert backend.renew(kept) == [Renewal.KEPT] * 2
    assert service.requests == ["keep", "entries", "keep", "entries", "leave"]


def test_a_failed_release_is_repeated_and_its_entry_removed(backend, service, time):
    """The core repeats it for a minute. What is left then is a stray."""
    kept, taken = take(backend, claim("y", ttl=100)), take(backend, claim("x", ttl=100))
    service.faults = [("leave", "lost")]
    with pytest.raises(BackendUnavailable, match="release"):
        backend.release(taken)
    for _ in range(2):
        backend.renew([kept])
    assert service.owners("x") == []
    assert backend.release(taken) is False


def test_a_release_that_was_repeated_and_finds_nothing_is_unknown(backend, service):
    """The first request may have released it: that is no lost lease."""
    taken = take(backend, claim("x"))
    service.faults = [("leave", "twice")]
    with pytest.raises(BackendUnavailable, match="could not release lock 'x'"):
        backend.release(taken)
    assert taken.owner not in backend._doubts.owners
    assert backend.release(taken) is False


def test_a_failed_release_of_an_acquire_that_was_sent_twice_is_a_doubt(make, service, time):
    backend = make(lists_strays=False)
    kept = take(backend, claim("y"))
    service.faults = [("enter", "twice, one late"), ("leave", "answer lost")]
    taken = take(backend, claim("x"))
    with pytest.raises(BackendUnavailable):
        backend.release(taken)
    backend.release(taken)
    beats(backend, time, 30, kept)
    service.deliver()
    beats(backend, time, 3, kept)
    assert service.owners("x") == []


def test_an_acquire_without_an_answer_is_an_error(backend, service):
    for fault in ("lost", "answer lost", "late"):
        service.faults = [("enter", fault)]
        with pytest.raises(BackendUnavailable, match="could not acquire lock 'x'"):
            backend.acquire(claim("x"), Wait())
        assert backend._doubts.owners == {}


def test_a_repeated_claim_has_its_first_entry(backend, service):
    sent = claim("x")
    service.faults = [("enter", "answer lost")]
    with pytest.raises(BackendUnavailable):
        backend.acquire(sent, Wait())
    assert take(backend, sent).token == 1


def test_many_doubts_delay_no_beat(backend, service, time):
    """After a long outage there may be thousands; a beat takes half a second for them."""
    kept = take(backend, claim("y"))
    service.fail = lambda what: "lost" if what == "enter" else ""
    for number in range(1100):
        with pytest.raises(BackendUnavailable):
            backend.acquire(claim(f"x{number}"), Wait())
    assert len(backend._doubts.late) == 1000
    service.fail = lambda what: time.pass_by(0.01) or ""
    service.requests.clear()
    first = set(list(backend._doubts.late)[:10])
    backend.renew([kept])
    assert 45 < service.requests.count("leave") < 55
    assert first < set(list(backend._doubts.late)[-60:])


def test_a_doubt_that_cannot_be_released_keeps_no_other(backend, service):
    """With ZooKeeper, each may be on another connection."""
    kept, really = take(backend, claim("y")), backend.leave

    def leave(name, owner):
        if name == "bad":
            raise NoAnswer
        return really(name, owner)

    for name in ("bad", "good"):
        service.faults = [("enter", "answer lost")]
        with pytest.raises(BackendUnavailable):
            backend.acquire(claim(name), Wait())
    backend.leave = leave
    for _ in range(2):
        backend.renew([kept])
    assert "leave" in service.requests
    assert service.owners("good") == []
    # It is released once that is possible.
    backend.leave = really
    backend.renew([kept])
    assert service.owners("bad") == []


def test_one_of_many_waiters_renews_the_session(backend, other, service, time):
    taken = take(other, claim("x", ttl=1000))
    requests, really = [], service.send

    def send(what, act):
        if what == "keep":
            # The others come along before it is answered.
            assert backend._is_kept(next(iter(backend._sessions.values())))
        requests.append(what)
        return really(what, act)

    service.send = send
    backend._session(30)
    time.pass_by(11)
    assert isinstance(backend.acquire(claim("x"), waiting(time, 1)), Held)
    assert requests.count("keep") == 1
    other.release(taken)


# Close and fork


def test_close_ends_sessions_without_entries(backend, service):
    used = take(backend, claim("x", ttl=30))
    backend.release(take(backend, claim("y", ttl=10)))
    backend.close()
    assert list(service.sessions) == [used.handle.session.id]
    assert backend.verify(used)
    backend.release(used)
    backend.close()
    assert not service.sessions


def test_close_keeps_the_session_of_a_waiter(backend, other, service, time):
    taken = take(other, claim("x", ttl=1000))
    seen = []

    def close():
        backend.close()
        seen.append(len(service.sessions))

    meanwhile(service, close, lambda: other.release(taken))
    assert isinstance(backend.acquire(claim("x"), waiting(time)), Granted)
    assert seen == [2]


def test_close_needs_no_answer(backend, service):
    backend.release(take(backend, claim("x")))
    service.faults = [("end", "lost")]
    backend.close()
    assert take(backend, claim("x")).token == 2


def test_a_child_process_has_sessions_of_its_own(backend, service, time):
    taken = take(backend, claim("x"))
    sessions = list(service.sessions)
    parent = dict(vars(backend))
    backend.after_fork()
    assert backend.forgotten == 1
    assert isinstance(backend.acquire(claim("x"), Wait()), Held)
    take(backend, claim("y"))
    backend.close()
    assert set(sessions) < set(service.sessions)
    vars(backend).update(parent)
    assert backend.renew([taken]) == [Renewal.KEPT]


# Any order


class Walk:
    """Some processes that acquire, release, renew and fail at random, in one thread."""

    NAMES = ("a", "b")

    def __init__(self, seed, monkeypatch, *, lists_strays):
        self.random = random.Random(seed)
        self.time = Time()
        for module in (queued, doubts):
            monkeypatch.setattr(module, "clock", self.time)
        self.service = QueueService(self.time)
        self.service.meanwhile = self.meanwhile
        faults = random_faults(self.random, 0.2)
        self.service.fail = lambda what: next(faults)
        make = partial(StubQueue, CONFIG, self.service, lists_strays=lists_strays)
        self.backends = [make() for _ in range(3)]
        self.held = {}
        #: By owner id: the backend, the grant, and until when the core releases it.
        self.doubts = {}
        self.depth = 0
        self.tokens = {name: [] for name in self.NAMES}

    def run(self, steps):
        for _ in range(steps):
            self.step()
        self.service.fail = lambda what: ""
        for owner in list(self.held):
            self.release(owner)

    def step(self):
        act = self.random.choice(
            [self.acquire] * 4
            + [self.release_one] * 4
            + [self.beat] * 3
            + [self.deliver, self.end_a_session]
        )
        act()
        self.time.pass_by(self.random.choice([0, 0, 0.1, 1]))
        self.assert_holders()

    def meanwhile(self, watch):
        self.time.pass_by(watch.seconds * self.random.random())
        if self.depth < 3:
            self.step()
        if self.random.random() < 0.2:
            self.time.pass_by(watch.seconds)

    def acquire(self):
        backend = self.random.choice(self.backends)
        sent = claim(self.random.choice(self.NAMES), ttl=self.random.choice([9, 12]))
        sent = sent._replace(shared=self.random.random() < 0.5)
        wait = Wait(self.random.choice([0, 0, 5]), now=self.time, since=self.time())
        self.depth += 1
        try:
            answer = backend.acquire(sent, wait)
        except BackendUnavailable:
            self.doubt(backend, Grant(sent.name, sent.owner, sent.ttl))
            return
        finally:
            self.depth -= 1
        if not isinstance(answer, Granted):
            return
        taken = grant(sent, answer)
        deadline = answer.since + sent.ttl
        if self.time() >= deadline:
            self.forgiving(backend, taken)
            return
        self.held[sent.owner] = backend, taken, deadline
        if not sent.shared:
            self.tokens[sent.name].append(answer.token)
        assert self.tokens[sent.name] == sorted(set(self.tokens[sent.name]))

    def release_one(self):
        if self.held:
            self.release(self.random.choice(list(self.held)))

    def release(self, owner):
        backend, taken, _ = self.held.pop(owner)
        self.forgiving(backend, taken)

    def forgiving(self, backend, taken):
        try:
            backend.release(taken)
        except BackendUnavailable:
            self.doubt(backend, taken)

    def doubt(self, backend, taken):
        self.doubts[taken.owner] = backend, taken, self.time() + 60

    def beat(self):
        for backend in self.backends:
            mine = {owner: taken for owner, (of, taken, _) in self.held.items() if of is backend}
            since = self.time()
            try:
                answers = backend.renew(list(mine.values()))
            except BackendUnavailable:
                continue
            for (owner, taken), answer in zip(mine.items(), answers, strict=True):
                if answer is Renewal.KEPT:
                    self.held[owner] = backend, taken, since + taken.ttl
                else:
                    self.release(owner)
        for owner, (backend, taken, until) in list(self.doubts.items()):
            if until < self.time():
                del self.doubts[owner]
            with contextlib.suppress(BackendUnavailable):
                backend.release(taken)

    def deliver(self):
        self.service.deliver(LATE - 3)

    def end_a_session(self):
        with self.service.changed:
            if self.service.sessions and self.random.random() < 0.3:
                # As a service that starts again without its data; its locks are lost at once.
                session = self.random.choice(list(self.service.sessions))
                self.service.end(session)
                for owner, (_, taken, _) in list(self.held.items()):
                    if taken.handle.session.id == session:
                        self.release(owner)

    def assert_holders(self):
        now = self.time()
        for name in self.NAMES:
            holders = [
                taken
                for _, taken, deadline in self.held.values()
                if taken.name == name and deadline > now
            ]
            readers = [taken.shared for taken in holders]
            assert all(readers) or len(holders) == 1, (name, holders)


@pytest.mark.parametrize("lists_strays", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_there_is_one_writer_or_readers_and_nothing_is_left(monkeypatch, seed, lists_strays):
    walk = Walk(seed, monkeypatch, lists_strays=lists_strays)
    walk.run(150)
    service, time = walk.service, walk.time
    # Leases that keep the sessions for as long as a request may be late.
    kept = []
    for backend in walk.backends:
        kept += [(backend, take(backend, claim(f"kept {random.random()}", ttl=9)))]
        kept += [(backend, take(backend, claim(f"kept {random.random()}", ttl=12)))]
    walk.held = {taken.owner: (backend, taken, 0) for backend, taken in kept}
    end = time() + LATE + 6
    while time() < end:
        # At once: the core renews what was granted late in a session's ttl.
        walk.beat()
        time.pass_by(2.5)
        if time() > end - LATE / 2:
            walk.deliver()
    walk.beat()
    assert len(walk.held) == 6
    assert {each.owner for each in service.entries} == set(walk.held)
    assert all(backend._doubts.owners.keys() <= walk.held.keys() for backend in walk.backends)
    assert not any(each._doubts.repeated | each._doubts.late.keys() for each in walk.backends)


def test_an_entry_is_compared_by_its_session_and_number(backend, service):
    taken = take(backend, claim("x"))
    assert taken.handle == Entry(taken.handle.session, 1)
    assert backend.verify(taken)
    assert not backend.verify(taken._replace(handle=None))
