"""Sets of locks, permits and shared locks on real Redis and Valkey servers."""

import random
import time
from functools import partial

import pytest

from django_fencedlock.backends.interface import Grant, Granted, Held, Renewal, Wait
from django_fencedlock.backends.redis import RedisBackend
from django_fencedlock.backends.redis.scripts import ALIVE, BEAT, CLAIM, RELEASE, Keys
from django_fencedlock.core.names import permit_name
from django_fencedlock.core.runtime import clock
from tests.failing import raising
from tests.servers.process import wait_until
from tests.test_backend_interface import grant, reader, take
from tests.test_redis_backend import NAME, SLACK, config_of, fenced, mine, refused, sent_by
from tests.threads import at_once, beside

NAMES = ["set:1", "set:2", "set:3"]


@pytest.fixture(params=["redis", "valkey"])
def server(request):
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture
def backend(server, closing):
    return closing(RedisBackend(config_of(server.url)))


@pytest.fixture
def redis(server):
    with server.client() as client:
        yield client


def keys_of(backend, name):
    return Keys.of(backend.config.key_prefix, name)


def left(backend, redis):
    """The keys that are left, but for the counters."""
    found = redis.keys(f"*{backend.config.key_prefix}*")
    return {key for key in found if ":seq" not in key}


# Sets


def taken_together(backend, claims):
    answers = backend.acquire_all(claims)
    assert isinstance(answers, list), answers
    return [grant(*each) for each in zip(claims, answers, strict=True)]


def queue_up(backend, name):
    """Leave a waiter in the queue, as a process does that is between two requests."""
    sent = fenced(name)
    assert backend._claim([sent], "0").arrival
    return sent


def test_a_set_takes_one_request_each_way(backend, server):
    claims = [*map(fenced, NAMES), mine("set:4")]
    backend.release_all(taken_together(backend, claims))
    with server.monitor() as seen:
        held = taken_together(backend, claims)
    assert sent_by(seen) == ["EVALSHA"]
    assert [each.token for each in held] == [2, 2, 2, None]
    assert backend.renew(held) == [Renewal.KEPT] * 4
    assert all(map(backend.verify, held))
    with server.monitor() as seen:
        assert backend.release_all(held) == [True] * 4
    assert sent_by(seen) == ["EVALSHA"]


def test_a_refused_set_takes_nothing_and_names_every_holder(backend, redis):
    first, last = take(backend, fenced(NAMES[0])), take(backend, mine(NAMES[2], ttl=5))
    before = left(backend, redis)
    found = backend.acquire_all([*map(fenced, NAMES)])
    assert {name: held.owner for name, held in found.items()} == {
        first.name: first.owner,
        last.name: last.owner,
    }
    assert found[first.name].token == first.token
    assert 4 < found[last.name].expires_in <= 5
    assert left(backend, redis) == before


def test_a_set_does_not_pass_a_waiter_of_a_free_lock(backend, redis):
    take(backend, fenced(NAMES[1]))
    waiter = queue_up(backend, NAMES[1])
    redis.delete(keys_of(backend, NAMES[1]).lock)
    assert {NAMES[1]: waiter.owner} == {
        name: held.owner for name, held in backend.acquire_all([*map(fenced, NAMES)]).items()
    }
    assert backend.holders(NAMES)[NAMES[1]].owner == waiter.owner
    assert take(backend, waiter)


def test_a_set_passes_dead_waiters(backend, redis):
    take(backend, fenced(NAMES[1]))
    waiter = queue_up(backend, NAMES[1])
    keys = keys_of(backend, NAMES[1])
    redis.delete(keys.lock)
    redis.zadd(f"{keys.queue}:", {waiter.owner: 1})
    backend.release_all(taken_together(backend, [*map(fenced, NAMES)]))
    assert left(backend, redis) == {f"{keys.queue}:{waiter.owner}"} & left(backend, redis)


def test_a_lock_of_a_set_that_was_handed_to_its_owner_is_its_own(backend, redis):
    former = take(backend, fenced(NAMES[1]))
    waiter = queue_up(backend, NAMES[1])
    keys = keys_of(backend, NAMES[1])
    redis.eval(RELEASE.text, 3, *keys, former.owner, "")
    claims = [fenced(NAMES[0]), waiter, fenced(NAMES[2])]
    for _ in range(2):
        assert [each.token for each in backend.acquire_all(claims)] == [1, 2, 1]
        # A message left in the mailbox would prove that the owner sleeps.
        assert not redis.exists(f"{keys.queue}:{waiter.owner}")


def test_a_set_of_one_that_waits_first_takes_its_own_place(backend, redis):
    take(backend, fenced(NAMES[1]))
    waiter, next_one = queue_up(backend, NAMES[1]), queue_up(backend, NAMES[1])
    keys = keys_of(backend, NAMES[1])
    redis.delete(keys.lock)
    taken_together(backend, [fenced(NAMES[0]), waiter])
    assert redis.zrange(keys.queue, 0, -1) == [next_one.owner]


def test_a_set_sent_twice_that_lost_a_lock_meanwhile_has_none(backend, redis):
    claims = [*map(fenced, NAMES)]
    taken_together(backend, claims)
    redis.delete(keys_of(backend, NAMES[1]).lock)
    other = take(backend, fenced(NAMES[1]))
    assert [*backend.acquire_all(claims)] == [NAMES[1]]
    assert {name: held.owner for name, held in backend.holders(NAMES).items()} == {
        NAMES[1]: other.owner
    }


def test_locks_that_are_released_together_are_handed_over(backend):
    held = taken_together(backend, [*map(fenced, NAMES)])
    waiters = [beside(partial(backend.acquire, sent, Wait(SLACK))) for sent in map(fenced, NAMES)]
    for name in NAMES:
        wait_until(lambda name=name: backend.holders([name])[name].waiting, "a waiter")
    released = clock()
    backend.release_all(held)
    assert all(isinstance(waiter.result(SLACK), Granted) for waiter in waiters)
    assert clock() - released < BEAT


# Permits


def permits(limit, owner=None, name="gpu", **more):
    first = fenced(name, **more)
    return [
        first._replace(name=permit_name(name, number), owner=owner or first.owner, permits=limit)
        for number in range(1, limit + 1)
    ]


def taken(backend, limit, **more):
    answer = backend.acquire_any(permits(limit, **more), Wait())
    return None if isinstance(answer, Held) else grant(*answer)


def number_of(held):
    return int(held.name.split()[-1].strip("]"))


class Waiting:
    """A waiter for any of so many permits, in the queue since its constructor returned."""

    def __init__(self, backend, limit, seconds=SLACK, name="gpu", **wait):
        self.backend, self.claims = backend, permits(limit, name=name)
        self.owner, self.done_at = self.claims[0].owner, 0.0
        self.wait = Wait(seconds, **wait)
        queue = keys_of(backend, self.claims[0].name).queue
        self.answered = beside(self._run)
        wait_until(
            lambda: backend._here.execute("ZSCORE", queue, self.owner), "a waiter in the queue"
        )
        # Longer than GATE: it is in its blocking pop.
        time.sleep(0.06)

    def _run(self):
        answer = self.backend.acquire_any(self.claims, self.wait)
        self.done_at = clock()
        return None if isinstance(answer, Held) else grant(*answer)

    @property
    def waits(self):
        return not self.answered.done()

    def result(self):
        return self.answered.result(2 * SLACK)


def left_waiting(backend, limit):
    """Leave a waiter in the queue that never asks again."""
    claims = permits(limit)
    assert backend._claim(claims, "0").arrival
    return claims


def test_the_first_free_permit_is_granted_in_one_request(backend, server):
    backend.release(taken(backend, 1, name="other"))
    with server.monitor() as seen:
        held = [taken(backend, 5) for _ in range(3)]
    assert sent_by(seen) == ["EVALSHA"] * 3
    assert [each.name for each in held] == [permit_name("gpu", number) for number in (1, 2, 3)]
    assert backend.release(held[1])
    again = taken(backend, 5)
    assert (number_of(again), again.token) == (2, 2)
    assert backend.renew([*held, again]) == [*[Renewal.KEPT, Renewal.LOST], *[Renewal.KEPT] * 2]
    assert [number_of(taken(backend, 5)) for _ in range(2)] == [4, 5]
    assert taken(backend, 5) is None


def test_permits_are_not_the_lock_of_that_name(backend):
    lock = take(backend, fenced("gpu"))
    held = taken(backend, 1)
    waiter = Waiting(backend, 1)
    assert backend.release(lock)
    assert isinstance(backend.acquire(fenced("gpu"), Wait()), Granted)
    assert waiter.waits
    backend.release(held)
    assert waiter.result()


def test_a_refusal_says_who_holds_the_permit_that_expires_first(backend):
    taken(backend, 2, ttl=20)
    second = taken(backend, 2, ttl=5)
    held = backend.acquire_any(permits(2), Wait())
    assert (held.owner, held.identity, held.token) == (second.owner, second.identity, 1)
    assert 4 < held.expires_in <= 5


def test_the_names_of_permits_share_their_queue_and_their_slot():
    one, two = (Keys.of("shop", permit_name("a}b", number)) for number in (1, 20))
    lock = Keys.of("shop", "a}b")
    assert one.queue == two.queue != lock.queue
    assert len({*one, *two, *lock}) == 8
    assert len({key.partition("}")[0] for key in (*one, *two, *lock)}) == 1


def test_a_claim_for_any_permit_that_is_sent_twice_gets_the_same_one(backend, redis):
    taken(backend, 3)
    claims = permits(3)
    first = backend.acquire_any(claims, Wait())
    redis.delete(keys_of(backend, permit_name("gpu", 1)).lock)
    second = backend.acquire_any(claims, Wait())
    assert (first[0], first[1].token) == (second[0], second[1].token)
    assert number_of(first[0]) == 2
    assert len(backend.holders([each.name for each in claims])) == 1


def test_a_wait_for_any_permit_that_is_sent_twice_has_one_place(backend, redis):
    held = [taken(backend, 2) for _ in range(2)]
    claims = permits(2)
    queue = keys_of(backend, claims[0].name).queue
    first, second = (backend._claim(claims, "0") for _ in range(2))
    assert first.arrival == second.arrival
    assert redis.zcard(queue) == 1
    redis.eval(RELEASE.text, 3, *keys_of(backend, held[1].name), held[1].owner, "")
    one, two = (backend._claim(claims, first.arrival) for _ in range(2))
    assert (one[0], one[1].token) == (two[0], two[1].token) == (claims[1], 2)
    backend.release_all([held[0], grant(*two)])
    assert left(backend, redis) == set()


def test_waiters_for_any_permit_are_served_in_order(backend):
    held = [taken(backend, 2) for _ in range(2)]
    waiters = [Waiting(backend, 2) for _ in range(4)]
    served = []
    for waiter in waiters:
        backend.release(held.pop())
        held.insert(0, waiter.result())
        served.append(waiter)
        assert [each.waits for each in waiters] == [each not in served for each in waiters]


def test_a_newcomer_does_not_pass_the_queue_of_permits(backend, redis):
    for _ in range(2):
        taken(backend, 2)
    first, second = left_waiting(backend, 2), left_waiting(backend, 2)
    names = [each.name for each in first]
    redis.delete(*(keys_of(backend, name).lock for name in names))
    # It hands them on instead.
    assert taken(backend, 2) is None
    found = {name: held.owner for name, held in backend.holders(names).items()}
    assert found == {names[0]: first[0].owner, names[1]: second[0].owner}
    third = left_waiting(backend, 2)
    redis.delete(keys_of(backend, names[1]).lock)
    assert refused(backend, fenced(names[1]))
    assert backend.holders(names)[names[1]].owner == third[0].owner
    assert backend._claim(third, "")[0] == third[1]


def test_permits_that_expire_go_to_the_waiters_in_order(backend):
    for _ in range(2):
        taken(backend, 2, ttl=2)
    began = clock()
    waiters = [Waiting(backend, 2) for _ in range(3)]
    held = [waiter.result() for waiter in waiters[:2]]
    assert all(waiter.done_at - began < SLACK for waiter in waiters[:2])
    assert waiters[2].waits
    backend.release(held[0])
    assert waiters[2].result().name == held[0].name


@pytest.mark.parametrize("number", [1, 8])
def test_waiters_for_permits_that_died_delay_no_other(backend, number):
    held = [taken(backend, 2) for _ in range(2)]
    for _ in range(number):
        left_waiting(backend, 2)
    waiter = Waiting(backend, 2)
    released = clock()
    backend.release(held[1])
    assert waiter.result().name == held[1].name
    assert waiter.done_at - released < BEAT


@pytest.mark.slow
def test_a_permit_whose_new_holder_died_goes_to_the_next(backend):
    held = [taken(backend, 2) for _ in range(2)]
    dead = left_waiting(backend, 2)
    released = clock()
    backend.release(held[1])
    assert backend.holders([held[1].name])[held[1].name].owner == dead[0].owner
    waiter = Waiting(backend, 2)
    assert waiter.result().name == held[1].name
    assert waiter.done_at - released < CLAIM + SLACK


def test_a_permit_above_its_limit_passes_a_waiter_over(backend):
    held = [taken(backend, 3) for _ in range(3)]
    low, high = Waiting(backend, 2), Waiting(backend, 3)
    backend.release(held[2])
    assert high.result().name == held[2].name
    assert low.waits
    backend.release(high.result())
    # It keeps nobody from a permit that it doesn't wait for, and no newcomer passes it.
    held[2] = taken(backend, 3)
    assert number_of(held[2]) == 3
    assert taken(backend, 3) is None
    backend.release(held[0])
    assert low.result().name == held[0].name


def test_a_waiter_for_one_permit_gets_no_other(backend):
    held = [taken(backend, 12) for _ in range(12)]
    one = fenced(held[1].name)
    waiter = beside(partial(backend.acquire, one, Wait(SLACK)))
    queue = keys_of(backend, one.name).queue
    wait_until(lambda: backend._here.execute("ZCARD", queue), "a waiter in the queue")
    for number in (11, 0, 10):
        backend.release(held[number])
    assert not waiter.done()
    backend.release(held[1])
    assert isinstance(waiter.result(SLACK), Granted)


@pytest.mark.parametrize("way", ["cancelled", "raises", "time"])
def test_a_waiter_that_leaves_takes_no_permit_along(backend, redis, way):
    held = [taken(backend, 2) for _ in range(2)]
    calls = {"refused": raising(LookupError("changed its mind"))} if way == "raises" else {}
    if way == "raises":
        with pytest.raises(LookupError):
            backend.acquire_any(permits(2), Wait(SLACK, **calls))
    else:
        waiter = Waiting(backend, 2, seconds=1.5 if way == "time" else SLACK)
        if way == "cancelled":
            cancelled = clock()
            waiter.wait.cancel()
        assert waiter.result() is None
        assert way == "time" or waiter.done_at - cancelled < BEAT
    assert not redis.zcard(keys_of(backend, held[0].name).queue)
    backend.release_all(held)
    wait_until(lambda: left(backend, redis) <= wakes(backend, redis), "the keys of the waiter")


def wakes(backend, redis):
    """Mailboxes with a message that came after their owner had left; they expire."""
    return {key for key in left(backend, redis) if redis.type(key) == "list"}


def test_a_waiter_that_fails_after_it_got_a_permit_passes_it_on(backend, monkeypatch):
    held = [taken(backend, 2) for _ in range(2)]

    def refused(told):
        # Its place is the first: what is released is handed to it.
        backend.release(held[1])
        raise LookupError("changed its mind")

    with pytest.raises(LookupError):
        backend.acquire_any(permits(2), Wait(SLACK, refused))
    assert taken(backend, 2).name == held[1].name


def test_a_permit_handed_over_at_the_time_limit_is_used(backend, redis):
    held = [taken(backend, 2) for _ in range(2)]
    late = left_waiting(backend, 2)
    redis.eval(RELEASE.text, 3, *keys_of(backend, held[1].name), held[1].owner, "")
    sent, granted = backend.acquire_any(late, Wait())
    assert sent == late[1]
    backend.release_all([held[0], grant(sent, granted)])
    assert left(backend, redis) == set()


def test_a_waiter_for_permits_is_called_while_it_waits(backend):
    held = [taken(backend, 2) for _ in range(2)]
    seen = []

    def refused(told):
        seen.append(told.owner)
        if len(seen) == 2:
            # As the core does for a dead holder.
            backend.release(Grant(held[0].name, held[0].owner))

    waiter = Waiting(backend, 2, refused=refused)
    assert waiter.result().name == held[0].name
    assert len(seen) >= 2


def test_no_permit_has_two_holders_and_none_stays_when_many_come_and_go(backend, redis):
    inside, faults = [], []

    def run(seed):
        rng = random.Random(seed)
        while clock() < end or (clock() < end + SLACK and len(grants) <= 50):
            claims = permits(rng.choice([2, 3]), ttl=5)
            answer = backend.acquire_any(claims, Wait(rng.uniform(0.0005, 0.05)))
            if isinstance(answer, Held):
                continue
            name = answer[0].name
            if name in inside:
                faults.append(name)
            inside.append(name)
            grants.append(name)
            time.sleep(rng.uniform(0, 0.002))
            inside.remove(name)
            if not backend.release(grant(*answer)):
                faults.append("lost")

    grants = []
    end = clock() + 1.5
    at_once([partial(run, seed) for seed in range(8)])
    assert faults == []
    assert len(grants) > 50
    assert set(grants) == {permit_name("gpu", number) for number in (1, 2, 3)}
    assert left(backend, redis) == set()


# Shared locks


def readers_of(backend, number, name=NAME, **more):
    return [take(backend, reader(name, **more)) for _ in range(number)]


class WaitingFor:
    """A waiter for one claim, in the queue since its constructor returned."""

    def __init__(self, backend, sent, seconds=SLACK):
        self.sent, self.wait, self.done_at = sent, Wait(seconds), 0.0
        queue = keys_of(backend, sent.name).queue
        self.answered = beside(partial(self._run, backend))
        wait_until(
            lambda: backend._here.execute("ZSCORE", queue, sent.owner), "a waiter in the queue"
        )
        # Longer than GATE: it is in its blocking pop.
        time.sleep(0.06)

    def _run(self, backend):
        answer = backend.acquire(self.sent, self.wait)
        self.done_at = clock()
        return None if isinstance(answer, Held) else grant(self.sent, answer)

    @property
    def waits(self):
        return not self.answered.done()

    def result(self):
        return self.answered.result(2 * SLACK)


def test_a_shared_lock_takes_one_request_each_way(backend, server, redis):
    backend.release(*readers_of(backend, 1))
    first = readers_of(backend, 1)
    with server.monitor() as seen:
        second = readers_of(backend, 1)
        assert backend.release(second[0])
    assert sent_by(seen) == ["EVALSHA", "EVALSHA"]
    assert second[0].token is None
    assert backend.release(first[0])
    assert left(backend, redis) == set()


def test_the_first_reader_after_a_writer_raises_the_counter(backend):
    tokens = []
    for _ in range(2):
        writer = take(backend, fenced())
        tokens.append(writer.token)
        backend.release(writer)
        backend.release_all([*readers_of(backend, 3), *readers_of(backend, 1)])
    assert tokens == [1, 3]


def test_an_expired_writer_is_not_renewed_after_a_reader(backend, redis):
    writer = take(backend, fenced())
    redis.delete(keys_of(backend, NAME).lock)
    (read,) = readers_of(backend, 1)
    assert backend.renew([writer]) == [Renewal.LOST]
    assert not backend.verify(writer)
    assert not backend.release(writer)
    assert backend.verify(read)
    assert backend.release(read)
    assert not backend.verify(writer)
    assert backend.renew([writer]) == [Renewal.LOST]


def test_a_shared_lock_lives_as_long_as_its_last_reader(backend, redis):
    short, long = (take(backend, reader(NAME, ttl=ttl)) for ttl in (5, 20))
    lock = keys_of(backend, NAME).lock
    assert 19_000 < redis.pttl(lock) <= 20_000
    held = backend.holders([NAME])[NAME]
    assert (held.owner, held.identity, held.token) == (short.owner, short.identity, None)
    assert backend.renew([short]) == [Renewal.KEPT]
    assert 19_000 < redis.pttl(lock) <= 20_000
    backend.release(long)
    assert 4000 < redis.pttl(lock) <= 5000
    backend.renew([short._replace(ttl=30)])
    assert 29_000 < redis.pttl(lock) <= 30_000
    backend.renew([short._replace(ttl=10)])
    assert 9000 < redis.pttl(lock) <= 10_000


def test_a_look_up_finds_each_reader_with_the_end_of_its_lease(backend, server):
    ends = {take(backend, reader(NAME, ttl=ttl)).owner: ttl for ttl in (5, 20, 10)}
    writer = take(backend, fenced("other"))
    backend.holders([NAME])
    with server.monitor() as seen:
        found = backend.holders([NAME, "free", "other"])
    assert sent_by(seen) == ["EVALSHA"]
    held = found[NAME]
    readers = (held, *held.others)
    assert {each.owner for each in readers} == set(ends)
    for each in readers:
        assert each.shared
        assert ends[each.owner] - 1 < each.expires_in <= ends[each.owner]
        assert each.token is None
    assert (found["other"].owner, found["other"].shared) == (writer.owner, False)
    assert set(found) == {NAME, "other"}


def test_a_refusal_says_that_it_was_a_reader(backend):
    (held,) = readers_of(backend, 1)
    answer = backend.acquire(fenced(NAME), Wait())
    assert (answer.owner, answer.shared) == (held.owner, True)
    backend.release(held)
    unfenced = take(backend, mine())
    assert not backend.acquire(reader(NAME), Wait()).shared
    backend.release(unfenced)


def test_readers_and_others_are_renewed_in_one_batch(backend, server):
    writer, held = take(backend, fenced("other")), readers_of(backend, 3)
    backend.release(held[1])
    backend.renew([writer])
    with server.monitor() as seen:
        answers = backend.renew([*held, writer])
    assert sent_by(seen) == ["EVALSHA"]
    assert answers == [Renewal.KEPT, Renewal.LOST, Renewal.KEPT, Renewal.KEPT]


@pytest.mark.parametrize("known", [{}, {"shared": True}])
def test_a_reader_is_released_by_its_owner_id_alone(backend, known):
    one, two = readers_of(backend, 2)
    assert backend.release(Grant(NAME, one.owner, **known))
    assert not backend.release(Grant(NAME, one.owner, **known))
    assert not backend.verify(one)
    assert backend.verify(two)


def test_readers_before_the_next_writer_get_in_together(backend):
    held = take(backend, fenced())
    one, two = (WaitingFor(backend, reader(NAME)) for _ in range(2))
    writer, last = WaitingFor(backend, fenced()), WaitingFor(backend, reader(NAME))
    released = clock()
    backend.release(held)
    readers = [each.result() for each in (one, two)]
    assert max(one.done_at, two.done_at) - released < BEAT
    assert writer.waits
    assert last.waits
    backend.release_all(readers[:1])
    assert writer.waits
    backend.release_all(readers[1:])
    backend.release(writer.result())
    assert last.result()
    assert last.done_at >= writer.done_at


@pytest.mark.parametrize("way", ["time", "cancelled", "dead"])
def test_readers_get_in_when_the_writer_before_them_leaves(backend, redis, way):
    readers_of(backend, 1)
    if way == "dead":
        queue_up(backend, NAME)
        left_at = clock() + ALIVE
    else:
        writer = WaitingFor(backend, fenced(), 1.5 if way == "time" else SLACK)
    waiter = WaitingFor(backend, reader(NAME))
    if way != "dead":
        if way == "cancelled":
            writer.wait.cancel()
        assert writer.result() is None
        left_at = writer.done_at
    assert waiter.result()
    assert waiter.done_at - left_at < BEAT + SLACK / 4


def test_a_reader_that_does_not_wait_passes_no_writer(backend, redis):
    readers_of(backend, 1)
    writer = queue_up(backend, NAME)
    assert refused(backend, reader(NAME))
    redis.delete(keys_of(backend, NAME).lock)
    assert refused(backend, reader(NAME))
    assert backend.holders([NAME])[NAME].owner == writer.owner


def test_a_writer_lets_the_readers_in_that_wait_for_a_free_lock(backend, redis):
    take(backend, fenced())
    sent = [reader(NAME) for _ in range(2)]
    for each in sent:
        assert backend._claim([each], "0").arrival
    redis.delete(keys_of(backend, NAME).lock)
    assert refused(backend, fenced())
    # Both, before they ask again.
    assert all(backend.verify(grant(each)) for each in sent)
    assert [*backend.acquire_all([fenced(), fenced("other")])] == [NAME]
    for each in sent:
        assert backend.verify(take(backend, each))


@pytest.mark.slow
def test_a_reader_that_was_let_in_and_died_delays_a_writer_by_one_claim(backend):
    held = take(backend, fenced())
    assert backend._claim([reader(NAME)], "0").arrival
    released = clock()
    backend.release(held)
    writer = WaitingFor(backend, fenced())
    assert writer.result()
    assert CLAIM - 0.1 < writer.done_at - released < CLAIM + SLACK


def test_a_shared_lock_sent_twice_in_any_state(backend, redis):
    held = take(backend, fenced())
    sent = reader(NAME)
    first, second = (backend._claim([sent], "0") for _ in range(2))
    assert first.arrival == second.arrival
    backend.release(held)
    assert len({take(backend, sent).handle for _ in range(2)}) == 1
    assert redis.zcard(keys_of(backend, NAME).lock) == 1
    backend.release(take(backend, sent))
    assert left(backend, redis) == set()


def test_shared_and_exclusive_locks_may_be_one_set(backend):
    claims = [reader("a"), fenced("b")]
    take(backend, reader("a"))
    held = taken_together(backend, claims)
    assert isinstance(backend.acquire(fenced("b"), Wait()), Held)
    backend.release_all(held)
    (read,) = readers_of(backend, 1, "b")
    assert backend.acquire_all(claims)["b"].owner == read.owner
    assert take(backend, fenced("a2"))
    assert len(backend.holders(["a", "b"])) == 2


def test_no_writer_is_inside_with_another_when_many_come_and_go(backend, redis):
    inside, faults, done = [], [], []

    def run(seed):
        rng = random.Random(seed)
        while clock() < end or (clock() < end + SLACK and not enough()):
            reads = rng.random() < 0.7
            sent = reader(NAME, ttl=5) if reads else fenced(ttl=5)
            answer = backend.acquire(sent, Wait(rng.uniform(0.0005, 0.1)))
            if isinstance(answer, Held):
                continue
            inside.append(reads)
            if inside != [False] and not all(inside):
                faults.append([*inside])
            done.append(reads)
            time.sleep(rng.uniform(0, 0.002))
            inside.remove(reads)
            if not backend.release(grant(sent, answer)):
                faults.append("lost")

    def enough():
        return min(done.count(True), done.count(False)) > 20

    end = clock() + 1.5
    at_once([partial(run, seed) for seed in range(8)])
    assert faults == []
    assert enough()
    assert left(backend, redis) == set()


def test_a_newcomer_joins_the_readers_that_it_lets_in(backend, redis):
    readers_of(backend, 1)
    writer, waiting = queue_up(backend, NAME), reader(NAME)
    assert backend._claim([waiting], "0").arrival
    redis.zrem(keys_of(backend, NAME).queue, writer.owner)
    (late,) = readers_of(backend, 1)
    assert backend.verify(late)
    assert backend.verify(grant(waiting))


def test_a_reader_that_expired_does_not_pass_a_writer(backend, redis):
    readers_of(backend, 1)
    sent = reader(NAME)
    dead = take(backend, sent)
    queue_up(backend, NAME)
    assert take(backend, sent)
    redis.zadd(keys_of(backend, NAME).lock, {dead.handle: 1})
    assert refused(backend, sent)


def test_a_reader_that_expired_was_not_released(backend, redis):
    dead, alive = readers_of(backend, 2)
    redis.zadd(keys_of(backend, NAME).lock, {dead.handle: 1})
    assert backend.holders([NAME])[NAME].owner == alive.owner
    assert not backend.verify(dead)
    assert not backend.release(dead)
    assert backend.release(alive)


# The queue of all kinds


def test_only_the_first_waiter_looks_as_soon_as_a_lock_expires(backend, monkeypatch):
    """Others that wake up with it would take it for dead."""
    really, popped, seen = backend._here.pop, [], []
    monkeypatch.setattr(
        backend._here, "pop", lambda key, limit: (popped.append(limit), really(key, limit))
    )
    for number, sent in enumerate([fenced("1"), fenced("2"), reader("3")]):
        take(backend, fenced(sent.name, ttl=1.5))
        if number:
            # The first one, which never asks again.
            queue_up(backend, sent.name)
        popped.clear()
        seen.clear()
        assert isinstance(backend.acquire(sent, Wait(SLACK, seen.append)), Granted)
        assert (popped[0] > seen[0].expires_in + 0.1) == bool(number)
