"""The Redis backend on real Redis and Valkey servers."""

import contextlib
import itertools
import random
import sys
import textwrap
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import redis
from django.core import checks

from django_fencedlock.backends.interface import Grant, Granted, Held, Renewal, Wait
from django_fencedlock.backends.redis import RedisBackend, client, connections
from django_fencedlock.backends.redis.backend import server_problems
from django_fencedlock.backends.redis.scripts import BEAT, CLAIM, RECHECK, RELEASE, Keys
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import BackendUnavailable
from tests.backends import REDIS
from tests.failing import raising
from tests.scripts import run_python
from tests.servers.process import wait_until
from tests.test_backend_interface import BackendInterface, claim, grant, take
from tests.threads import at_once

#: Seconds that a busy machine may add to a time limit.
SLACK = 10.0
NAME = "lock"


@pytest.fixture(params=["redis", "valkey"])
def server(request):
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture(params=["redis", "valkey"])
def make_any_redis(request):
    return request.getfixturevalue(f"make_{request.param}")


def config_of(url="", alias="default", prefix=None, **options):
    terms = {"ttl": 30, "blocking_timeout": 10, "fence_database": "default", "options": options}
    prefix = prefix or uuid.uuid4().hex
    return AliasConfig(alias=alias, backend=REDIS, location=url, key_prefix=prefix, **terms)


@pytest.fixture
def backend(server, closing):
    return closing(RedisBackend(config_of(server.url)))


@pytest.fixture
def store(server, backend):
    with server.client() as client:
        yield Store(client, backend)


class TestInterface(BackendInterface):
    @pytest.fixture
    def make(self, server, closing):
        config = config_of(server.url)
        return lambda: closing(RedisBackend(config))


class Store:
    def __init__(self, client, backend):
        self.client, self.backend = client, backend
        self.keys = Keys.of(backend.config.key_prefix, NAME)

    def queued(self):
        return self.client.zcard(self.keys.queue)

    def left(self):
        found = self.client.keys(f"*{self.backend.config.key_prefix}*")
        return set(found) - {self.keys.counter}

    def run(self, script, *args):
        return self.client.eval(script.text, 3, *self.keys, *args)

    def expire(self):
        self.client.delete(self.keys.lock)

    def snapshot(self):
        read = {
            "string": self.client.get,
            "zset": lambda key: self.client.zrange(key, 0, -1),
            "list": lambda key: self.client.lrange(key, 0, -1),
        }
        return {
            key: read[self.client.type(key)](key)
            for key in self.left() | {self.keys.counter}
            if self.client.exists(key)
        }

    def wait(self, sent=None, seconds=10):
        """Start a waiter, and return when it is in its blocking pop for longer than GATE."""
        before = self.queued()
        waiter = Waiter(self.backend, sent or mine(), seconds)
        wait_until(lambda: self.queued() > before, "a waiter in the queue")
        time.sleep(0.06)
        return waiter

    def dead(self, *, pause=0.06):
        sent = mine()
        arrival = self.backend._claim([sent], "0").arrival
        time.sleep(pause)
        return sent, arrival


class Waiter(threading.Thread):
    def __init__(self, backend, sent, seconds=10):
        super().__init__(daemon=True)
        self.backend, self.sent, self.wait = backend, sent, Wait(seconds)
        self.answer = self.error = None
        self.done_at = 0.0
        self.start()

    def run(self):
        try:
            self.answer = self.backend.acquire(self.sent, self.wait)
        except BaseException as exc:
            self.error = exc
        self.done_at = clock()

    def result(self):
        self.join(20)
        assert not self.is_alive()
        if self.error:
            raise self.error
        return grant(self.sent, self.answer) if isinstance(self.answer, Granted) else None


def mine(name=NAME, **more):
    return claim(name, **{"ttl": 10, "fenced": False} | more)


@pytest.fixture
def held(backend):
    return take(backend, mine())


def fenced(name=NAME, **more):
    return mine(name, fenced=True, **more)


def refused(backend, sent=None):
    return isinstance(backend.acquire(sent or mine(), Wait()), Held)


def sent_by(seen):
    return [command.name for command in seen if not command.lua]


def test_an_uncontended_lock_takes_one_request_each_way(backend, server):
    backend.release(take(backend, fenced()))
    with server.monitor() as seen:
        held = take(backend, fenced())
    assert sent_by(seen) == ["EVALSHA"]
    assert len(seen) <= 5
    with server.monitor() as seen:
        assert backend.release(held)
    assert sent_by(seen) == ["EVALSHA"]
    assert len(seen) <= 6


def test_a_batch_is_renewed_in_one_round_trip_each_by_its_own_ttl(backend, server, store):
    held = [take(backend, fenced(f"lock{number}", ttl=5 + number)) for number in range(150)]
    backend.renew(held[:1])
    keys = [Keys.of(backend.config.key_prefix, each.name).lock for each in held]
    for key in keys:
        store.client.pexpire(key, 1000)
    with server.monitor() as seen:
        assert backend.renew(held) == [Renewal.KEPT] * 150
    assert sent_by(seen) == ["EVALSHA"]
    for number, key in enumerate(keys):
        assert 4000 < store.client.pttl(key) - number * 1000 <= 5000


def test_an_unfenced_lock_leaves_nothing(backend, store, held):
    assert backend.renew([held]) == [Renewal.KEPT]
    assert backend.release(held)
    assert store.snapshot() == {}


def test_a_grant_counts_from_before_its_request(backend, monkeypatch):
    run, asked_at = backend._here.run, []

    def run_later(*args):
        asked_at.append(clock())
        return run(*args)

    monkeypatch.setattr(backend._here, "run", run_later)
    assert backend.acquire(mine(), Wait()).since <= asked_at[0]


def test_scripts_that_the_server_forgot_are_sent_again(backend, store, held):
    store.client.script_flush()
    assert backend.renew([held]) == [Renewal.KEPT]
    store.client.script_flush()
    assert backend.release(held)


def test_a_request_that_the_driver_repeats_draws_one_token(server, make_proxy, store, closing):
    proxy = make_proxy(server.host, server.port)
    retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 100)
    errors = [redis.TimeoutError, redis.ConnectionError]
    impatient = redis.Redis(port=proxy.port, socket_timeout=0.2, retry=retry, retry_on_error=errors)
    with impatient, using(impatient, closing, store.backend.config.key_prefix) as backend:
        assert backend.holders([NAME]) == {}
        proxy.drop_replies()
        threading.Timer(0.5, proxy.pass_through).start()
        assert take(backend, fenced()).token == 1
        assert store.client.get(store.keys.counter).startswith("1:")


@contextlib.contextmanager
def using(made, closing, prefix=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "import_string", lambda path: lambda: made)
        yield closing(RedisBackend(config_of(prefix=prefix, CLIENT_FACTORY="any.path")))


def test_an_error_before_the_answer_was_read_leaves_it_to_no_other_request(backend, monkeypatch):
    class Interrupt(BaseException):
        pass

    take(backend, mine("other"))
    here = backend._here
    one = here._spare._idle[0]
    monkeypatch.setattr(one, "read_response", raising(Interrupt))
    with pytest.raises(Interrupt):
        here.execute("ECHO", "first")
    monkeypatch.undo()
    assert here.execute("ECHO", "second") == b"second"


def test_a_request_of_another_thread_has_a_connection_of_its_own(backend):
    here, key = backend._here, f"{backend.config.key_prefix}:list"
    with ThreadPoolExecutor(1) as other:
        waiter = other.submit(here.execute, "BLPOP", key, 5)
        wait_until(lambda: "blpop" in str(here.execute("CLIENT", "LIST")), "a thread that waits")
        assert here.execute("ECHO", "mine") == b"mine"
        here.execute("RPUSH", key, "its own")
        assert tuple(waiter.result(20)) == (key.encode(), b"its own")


def test_an_error_of_the_server_keeps_the_connection(backend):
    here = backend._here
    name = here.execute("CLIENT", "ID")
    with pytest.raises(redis.ResponseError):
        here.execute("EVAL", "return redis.error_reply('no')", 0)
    assert here.execute("CLIENT", "ID") == name


def test_a_connection_that_the_server_closed_is_opened_again(backend, store, held):
    for each in store.client.client_list():
        if each["cmd"] == "evalsha":
            store.client.client_kill_filter(_id=each["id"])
    assert backend.release(held)


def test_locks_of_different_prefixes_are_different_locks(server, closing):
    one, two = (closing(RedisBackend(config_of(server.url, prefix=each))) for each in "ab")
    held = take(one, mine())
    assert two.release(take(two, mine()))
    assert one.release(held)


# Every script may run twice


def free(store, me):
    pass


def held_by_me(store, me):
    store.backend.acquire(me, Wait())


def handed_to_me(store, me):
    holder = take(store.backend, fenced())
    store.backend._claim([me], "0")
    store.run(RELEASE, holder.owner, "")


def anothers(store, me):
    take(store.backend, fenced())


def anothers_and_i_wait(store, me):
    anothers(store, me)
    store.backend._claim([me], "0")


def mine_and_another_waits(store, me):
    held_by_me(store, me)
    store.backend._claim([fenced()], "0")


def expired_and_another_waits(store, me):
    mine_and_another_waits(store, me)
    store.expire()


def expired_and_a_dead_one_waits(store, me):
    expired_and_another_waits(store, me)
    dead = store.client.zrange(store.keys.queue, 0, -1)
    store.client.zadd(f"{store.keys.queue}:", dict.fromkeys(dead, 1))


def without_counter(store, me):
    held_by_me(store, me)
    store.client.delete(store.keys.counter)


STATES = [
    free,
    held_by_me,
    handed_to_me,
    anothers,
    anothers_and_i_wait,
    mine_and_another_waits,
    expired_and_another_waits,
    expired_and_a_dead_one_waits,
    without_counter,
]
SCRIPTS = {
    # The first refusal may hand the lock on, so the second has another holder.
    "acquire": lambda backend, me: isinstance(backend._claim([me], "")[1], Granted),
    "wait": lambda backend, me: isinstance(backend._claim([me], "0")[1], Granted),
    "renew": lambda backend, me: backend.renew([grant(me, Granted(1, 0.0))]),
    # A repeated release can't tell that it was the first that released.
    "release": lambda backend, me: backend.release(Grant(me.name, me.owner, me.ttl, 1)) and None,
    "suggest": lambda backend, me: backend.suggest(me.name, 41),
}


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_run_twice_does_what_it_does_once(backend, store, state, script):
    me = fenced()
    state(store, me)
    first = SCRIPTS[script](backend, me)
    after_first = store.snapshot()
    second = SCRIPTS[script](backend, me)
    assert store.snapshot() == after_first
    assert script == "release" or first == second


def test_a_repeated_recheck_passes_over_one_waiter(backend, store):
    holder = take(backend, fenced())
    (first, _), (second, _), _ = (store.dead() for _ in range(3))
    store.run(RELEASE, holder.owner, "")
    for _ in range(2):
        store.run(RECHECK, first.owner, holder.token + 1)
        assert backend.holders([NAME])[NAME].owner == second.owner


def test_a_claim_sent_again_after_its_lock_expired_draws_the_same_token(backend, store):
    me = fenced()
    first = take(backend, me)
    store.expire()
    assert take(backend, me).token == first.token


# Leases that expire, and a Redis that loses data


def test_an_expired_lease_is_renewed_if_no_other_came(backend, store):
    held = take(backend, fenced())
    store.expire()
    assert backend.verify(held)
    assert backend.renew([held]) == [Renewal.KEPT]
    assert 0 < store.client.pttl(store.keys.lock) <= 10_000
    assert backend.holders([NAME])[NAME].identity == held.identity
    store.expire()
    assert backend.release(held)
    assert not backend.release(held)


def test_an_expired_unfenced_lease_is_lost(backend, store, held):
    store.expire()
    assert not backend.verify(held)
    assert backend.renew([held]) == [Renewal.LOST]
    assert not backend.release(held)


@pytest.mark.parametrize("known", ["grant", "token", "owner"])
@pytest.mark.parametrize("expired", [True, False])
def test_a_released_lease_is_not_renewed(backend, store, known, expired):
    """Neither by a renewal that arrives late, nor by the holder of a lock released by force."""
    held = take(backend, fenced())
    if expired:
        store.expire()
    by_force = Grant(NAME, held.owner, token=held.token if known == "token" else None)
    known = held if known == "grant" else by_force
    assert backend.release(known)
    assert backend.renew([held]) == [Renewal.LOST]
    assert backend.holders([NAME]) == {}
    assert take(backend, fenced()).token == held.token + 1


def test_an_earlier_token_of_the_same_owner_is_not_renewed(backend, store):
    me = fenced()
    former = take(backend, me)
    store.expire()
    backend.release(take(backend, fenced()))
    assert take(backend, me).token > former.token
    assert backend.renew([former]) == [Renewal.LOST]


def test_a_claim_that_arrives_after_a_flush_brings_no_lease_back(backend, store):
    backend.release(take(backend, fenced()))
    me = fenced()
    held = take(backend, me)
    store.client.flushall()
    assert take(backend, me).token == 1
    assert not backend.verify(held)
    assert backend.renew([held]) == [Renewal.LOST]


def test_a_renewal_after_a_flush_restores_the_counter(backend, store):
    backend.release(take(backend, fenced()))
    held = take(backend, fenced())
    store.client.flushall()
    assert backend.renew([held]) == [Renewal.KEPT]
    assert store.client.get(store.keys.counter) == f"2:{held.owner}"


def test_a_suggested_floor_raises_the_next_token(backend):
    held = take(backend, fenced())
    backend.suggest(NAME, 41)
    assert backend.verify(held)
    assert backend.renew([held]) == [Renewal.KEPT]
    assert backend.release(held)
    assert take(backend, fenced()).token == 42


@pytest.mark.parametrize(
    "change",
    [
        lambda backend, held: backend.renew([held]),
        lambda backend, held: backend.suggest(NAME, 41),
        lambda backend, held: backend.release(held),
    ],
)
def test_the_counter_outlives_every_holder_that_may_record_its_token(backend, store, change):
    hours = 48 * 3600 * 1000
    held = take(backend, fenced())
    assert store.client.pttl(store.keys.counter) > hours
    store.client.delete(store.keys.lock, store.keys.counter)
    change(backend, held)
    assert store.client.pttl(store.keys.counter) > hours


def test_an_error_about_one_lock_of_a_batch_refuses_no_renewal(backend, store):
    broken, fine = take(backend, fenced()), take(backend, fenced("fine"))
    store.expire()
    store.client.rpush(store.keys.lock, "not a string")
    assert backend.renew([broken, fine]) == [Renewal.LOST, Renewal.KEPT]


@pytest.mark.parametrize("value", ["what is this", "", "owner:text", "owner:\N{SUPERSCRIPT TWO}:x"])
def test_a_key_of_other_software_is_a_held_lock(backend, store, value):
    store.client.set(store.keys.lock, value)
    assert backend.acquire(mine(), Wait()) == Held()
    assert backend.holders([NAME]) == {NAME: Held(waiting=0)}


# The queue


@pytest.mark.parametrize("seconds", [10, float("inf")])
def test_a_lock_is_handed_to_the_next_waiter_at_once(backend, store, seconds, held):
    waiter = store.wait(seconds=seconds)
    assert backend.holders([NAME])[NAME].waiting == 1
    released = clock()
    backend.release(held)
    got = waiter.result()
    assert waiter.done_at - released < BEAT
    assert waiter.answer.since >= released - 0.01
    assert 0 < store.client.pttl(store.keys.lock) <= 10_000
    assert backend.holders([NAME])[NAME].identity == got.identity


def test_a_newcomer_does_not_pass_the_queue(backend, store):
    take(backend, mine(ttl=0.5))
    waiter = store.wait()
    while waiter.is_alive():
        answer = backend.acquire(mine(), Wait())
        assert isinstance(answer, Held)
    assert waiter.result()


def test_a_waiter_gets_the_lock_when_a_dead_holders_ttl_ends(backend, store):
    held = backend.acquire(mine(ttl=0.7), Wait())
    waiter = store.wait()
    got = waiter.result()
    assert -0.05 < waiter.done_at - held.since - 0.7 < SLACK
    backend.release(got)
    assert store.left() == set()


def test_a_lock_handed_over_at_the_time_limit_is_used(backend, store, held):
    sent, _ = store.dead()
    store.run(RELEASE, held.owner, "")
    assert backend.release(take(backend, sent))
    assert store.left() == set()


@pytest.mark.parametrize("has_the_lock", [False, True])
def test_a_waiter_that_died_is_released(backend, store, has_the_lock):
    holder = take(backend, mine())
    dead, _ = store.dead(pause=0 if has_the_lock else 0.06)
    if has_the_lock:
        backend.release(holder)
        assert backend.holders([NAME])[NAME].owner == dead.owner
    assert backend.release(Grant(NAME, dead.owner, fenced=False))
    assert store.queued() == 0
    assert backend.verify(holder) is not has_the_lock
    assert bool(backend.holders([NAME])) is not has_the_lock


@pytest.mark.parametrize("number", [1, 8])
def test_waiters_that_died_in_the_queue_delay_no_other(backend, store, number, held):
    for _ in range(number):
        store.dead(pause=0)
    waiter = store.wait()
    released = clock()
    backend.release(held)
    assert waiter.result()
    assert waiter.done_at - released < BEAT


@pytest.mark.slow
def test_a_waiter_that_died_on_arrival_delays_the_next_by_one_claim(backend, store, held):
    dead, _ = store.dead(pause=0)
    released = clock()
    assert backend.release(held)
    assert backend.holders([NAME])[NAME].owner == dead.owner
    waiter = Waiter(backend, mine())
    assert waiter.result()
    assert waiter.done_at - released < CLAIM + SLACK


def test_a_waiter_that_arrives_while_the_servers_clock_goes_back_is_last(backend, store):
    take(backend, mine())
    first, _ = store.dead(pause=0)
    store.client.zincrby(store.keys.queue, 3_600_000_000, first.owner)
    second, _ = store.dead(pause=0)
    assert store.client.zrange(store.keys.queue, 0, -1) == [first.owner, second.owner]


def test_all_that_dead_waiters_leave_expires(backend, store, held):
    first, _ = store.dead()
    store.dead()
    store.run(RELEASE, held.owner, "")
    keys = store.keys
    assert store.left() == {keys.lock, keys.queue, f"{keys.queue}:", f"{keys.queue}:{first.owner}"}
    assert all(store.client.pttl(key) > 0 for key in store.left())
    assert store.client.pttl(keys.lock) <= CLAIM * 1000


def test_a_paused_waiter_has_its_old_place(backend, store, held):
    paused, arrival = store.dead()
    waiters = [store.wait() for _ in range(2)]
    backend.release(held)
    first = waiters[0].result()
    backend._claim([paused], arrival)
    assert store.client.zrange(store.keys.queue, 0, 0) == [paused.owner]
    backend.release(first)
    assert isinstance(backend._claim([paused], arrival)[1], Granted)


@pytest.mark.slow
def test_a_waiter_whose_message_is_lost_tries_again_after_a_beat(backend, store, held):
    waiter = store.wait()
    with store.client.pipeline() as together:
        together.eval(RELEASE.text, 3, *store.keys, held.owner, "")
        together.delete(f"{store.keys.queue}:{waiter.sent.owner}")
        together.execute()
    released = clock()
    assert waiter.result()
    assert waiter.done_at - released < BEAT + SLACK


@pytest.mark.slow
def test_waiting_goes_on_after_the_server_lost_its_data(backend, store):
    take(backend, mine())
    waiters = [store.wait() for _ in range(3)]
    store.client.flushall()
    store.client.script_flush()
    flushed = clock()
    while waiters:
        wait_until(lambda: any(waiter.answer for waiter in waiters), "a waiter to be served")
        served = next(waiter for waiter in waiters if waiter.answer)
        waiters.remove(served)
        backend.release(served.result())
    assert clock() - flushed < BEAT + SLACK


def test_a_cancelled_waiter_returns_at_once_and_leaves_the_queue(backend, store):
    take(backend, mine())
    waiter = store.wait()
    cancelled = clock()
    waiter.wait.cancel()
    assert waiter.result() is None
    assert waiter.done_at - cancelled < BEAT
    assert store.queued() == 0
    later = Wait(60)
    later.cancel()
    assert isinstance(backend.acquire(mine(), later), Held)
    assert clock() - cancelled < 20


def test_waiting_takes_no_connection_of_the_application(server, closing):
    pool = redis.BlockingConnectionPool.from_url(server.url, max_connections=1, timeout=1)
    application = redis.Redis(connection_pool=pool)
    with application, using(application, closing) as backend, server.client() as other:
        store = Store(other, backend)
        held = take(backend, mine())
        waiters = [store.wait() for _ in range(4)]
        assert application.ping()
        for waiter in waiters:
            backend.release(held)
            held = waiter.result()
    pool.disconnect()


def test_idle_connections_of_waiters_are_closed(server, closing, monkeypatch):
    monkeypatch.setattr(connections, "MAX_IDLE", 1)
    ours = uuid.uuid4().hex
    backend = closing(RedisBackend(config_of(f"{server.url}?client_name={ours}")))
    with server.client() as client:
        store = Store(client, backend)

        def waiting():
            found = [each for each in client.client_list() if each["name"] == ours]
            return sum(each["cmd"] == "blpop" for each in found)

        held = take(backend, mine())
        waiters = [store.wait() for _ in range(4)]
        wait_until(lambda: waiting() == 4, "all of them to wait")
        for waiter in waiters:
            backend.release(held)
            held = waiter.result()
        wait_until(lambda: waiting() <= 1, "the connections to close")
        backend.close()
        wait_until(lambda: waiting() == 0, "the last connection to close")


def test_nothing_overlaps_or_stays_when_many_give_up_and_come_again(backend, store):
    grants = itertools.count()
    inside, faults = [], []

    def run(seed):
        rng = random.Random(seed)
        while clock() < end:
            sent = mine(ttl=5)
            answer = backend.acquire(sent, Wait(rng.uniform(0.0005, 0.05)))
            if isinstance(answer, Held):
                continue
            inside.append(seed)
            if len(inside) > 1:
                faults.append("two inside")
            next(grants)
            time.sleep(rng.uniform(0, 0.002))
            inside.pop()
            if not backend.release(grant(sent, answer)):
                faults.append("lost")

    end = clock() + 1.5
    at_once([partial(run, seed) for seed in range(8)])
    assert faults == []
    assert next(grants) > 50
    assert store.left() == set()


# Processes

SET_UP = """
import os, sys
import django; django.setup()
from tests.test_redis_backend import *
backend = RedisBackend(config_of(sys.argv[1], prefix=sys.argv[2]))
"""


@pytest.fixture
def run_process(child_environment, server, backend):
    def run(text, before=""):
        code = before + SET_UP + textwrap.dedent(text)
        place = (server.url, backend.config.key_prefix)
        return run_python(*place, code=code, env=child_environment()).stdout

    return run


@pytest.mark.slow
def test_a_fork_leaves_the_parents_connections_alone(run_process):
    told = run_process(
        """
        held = take(backend, mine())
        assert isinstance(backend.acquire(mine(), Wait(0.01)), Held)
        number = backend._here.execute("CLIENT", "ID")
        if os.fork() == 0:
            assert backend._here.execute("CLIENT", "ID") != number
            assert refused(backend)
            backend.close()
            sys.exit()
        assert os.wait()[1] == 0
        assert backend._here.execute("CLIENT", "ID") == number
        print(backend.release(held), flush=True)
        """
    )
    assert told == "True\n"


def test_a_thread_under_gevent_uses_no_connection_of_a_thread_that_has_ended(run_process):
    """The system gives the id of a thread that has ended to the next one."""
    pytest.importorskip("gevent")
    told = run_process(
        """
        import gevent
        from django_fencedlock.core import runtime

        sent, done = mine(), []

        def acquire():
            thread = runtime.original("_thread", "get_ident")()
            try:
                done.append((thread, take(backend, sent).owner == sent.owner))
            except BaseException as exc:
                done.append((thread, exc))

        for number in range(6):
            runtime.start(acquire)
            while len(done) == number:
                gevent.sleep(0.01)
            gevent.sleep(0.1)
        print(len({thread for thread, _ in done}) < 6 and [each for _, each in done], flush=True)
        """,
        before="from gevent import monkey; monkey.patch_all()\n",
    )
    assert told == f"{[True] * 6}\n"


# Servers that don't answer


@pytest.fixture
def hasty(make_any_redis, closing):
    server = make_any_redis()
    return server, closing(RedisBackend(config_of(server.url, TIMEOUT=2)))


@pytest.mark.slow
def test_every_request_to_a_server_that_hangs_ends_in_time(hasty):
    server, backend = hasty
    held = take(backend, mine("warm"))
    server.pause()
    for ask in (
        lambda: take(backend, mine()),
        lambda: backend.verify(held),
        lambda: backend.release(held),
        lambda: backend.holders([NAME]),
        lambda: backend.suggest(NAME, 7),
        lambda: backend.acquire(mine(), Wait(60)),
    ):
        started = clock()
        with pytest.raises(BackendUnavailable, match="'default'"):
            ask()
        assert clock() - started < SLACK
    assert backend.renew([held]) == [Renewal.UNKNOWN]
    server.resume()


def test_a_server_that_is_gone_is_unavailable_at_once(hasty):
    server, backend = hasty
    held = take(backend, mine())
    server.kill()
    started = clock()
    with pytest.raises(BackendUnavailable):
        take(backend, mine())
    assert backend.renew([held]) == [Renewal.UNKNOWN]
    [problem] = backend.check()
    assert problem.id == "E013"
    assert "Start the server" in str(problem)
    assert clock() - started < SLACK
    server.start()
    assert take(backend, mine())


def test_a_read_only_server_grants_nothing(make_any_redis, closing):
    primary = make_any_redis()
    replica = make_any_redis(replica_of=primary)
    backend = closing(RedisBackend(config_of(replica.url)))
    for sent in (mine(), fenced()):
        with pytest.raises(BackendUnavailable, match="ReadOnly"):
            take(backend, sent)
    assert "W008" in [problem.id for problem in backend.check()]


@pytest.mark.parametrize("batch", [False, True])
def test_a_server_that_became_a_replica_is_left(make_any_redis, make_proxy, closing, batch):
    """After a failover a name or an address leads to another server."""
    old, new = make_any_redis(), make_any_redis()
    address = make_proxy(old.host, old.port)
    backend = closing(RedisBackend(config_of(f"redis://127.0.0.1:{address.port}")))
    held = take(backend, mine())
    assert backend.renew([held]) == [Renewal.KEPT]
    with old.client() as client:
        client.replicaof(new.host, new.port)
    address.retarget(new.host, new.port)
    if batch:
        assert backend.renew([held]) == [Renewal.UNKNOWN]
    else:
        with pytest.raises(BackendUnavailable, match="ReadOnly"):
            take(backend, mine())
    take(backend, mine("other"))
    assert new.execute("EXISTS", Keys.of(backend.config.key_prefix, "other").lock)


def test_no_error_contains_the_password(make_any_redis, closing):
    server = make_any_redis()
    server.execute("ACL", "SETUSER", "shop", "on", ">correct")
    backend = closing(RedisBackend(config_of(server.url.replace("://", "://shop:s3cret@"))))
    with pytest.raises(BackendUnavailable, match="username-password") as caught:
        take(backend, mine())
    shown = [str(caught.value), repr(backend.config), *map(str, backend.check())]
    assert not [text for text in shown if "s3cret" in text]


@pytest.mark.parametrize("query", ["?decode_responses=true", "?protocol=2", "?protocol=3"])
def test_a_url_may_have_options_of_the_driver(server, closing, query):
    works(closing(RedisBackend(config_of(f"{server.url}{query}"))), server)


def test_a_unix_socket_will_do(make_any_redis, closing):
    server = make_any_redis()
    works(closing(RedisBackend(config_of(f"unix://{server.socket}?db=0"))), server)


def test_a_cache_of_django_redis_lends_its_client(server, settings, closing):
    backend = "django_redis.cache.RedisCache"
    settings.CACHES = {"locks": {"BACKEND": backend, "LOCATION": server.url}}
    config = config_of(CACHE="locks")
    assert list(RedisBackend.problems(config)) == []
    works(closing(RedisBackend(config)), server)


def works(backend, server):
    with server.client() as client:
        store = Store(client, backend)
        held = take(backend, fenced())
        waiter = store.wait(fenced())
        found = backend.holders([NAME])[NAME]
        assert (found.owner, found.identity) == (held.owner, held.identity)
        assert backend.renew([held]) == [Renewal.KEPT]
        assert backend.verify(held)
        backend.release(held)
        assert backend.release(waiter.result())
        assert store.left() == set()


def found(**settings):
    return [(problem.id, str(problem)) for problem in RedisBackend.problems(config_of(**settings))]


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://user:secret@host:6379/3?socket_timeout=1",
        "rediss://host/0",
        "unix:///tmp/redis.sock?db=2",
        "redis+sentinel://one:26379,two/mymaster/1",
        "rediss+sentinel://user:secret@[::1]:26379/mymaster?sentinel_password=x",
    ],
)
def test_a_url_that_can_be_used_is_no_problem(url):
    assert found(url=url) == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("localhost:6379", "following schemes"),
        ("http://localhost", "following schemes"),
        ("redis://localhost/0?socket_timeout=soon", "socket_timeout"),
        ("redis+sentinel://one,two", "names no service"),
        ("redis+sentinel://one/mymaster/first", "'first'"),
        ("redis+sentinel://one:x/mymaster", "as 'x'"),
        ("redis+sentinel://one,/mymaster", "'' isn't a host"),
    ],
)
def test_a_url_that_can_not_be_used_is_e007(url, why):
    [(number, text)] = found(url=url)
    assert number == "E007"
    assert why in text
    assert "redis+sentinel://[user:password@]host1" in text


@pytest.mark.parametrize(
    ("terms", "expected", "words"),
    [
        ({}, "E007", 'OPTIONS["CACHE"]'),
        ({"url": "redis://x", "CACHE": "default"}, "E007", "has LOCATION and OPTIONS['CACHE']"),
        ({"CACHE": "default"}, "E009", "LocMemCache"),
        ({"CACHE": "nowhere"}, "E009", "it has 'default'"),
        *(
            ({"CLIENT_FACTORY": path}, "E008", repr(path))
            for path in ("nowhere.to_be_found", "os.sep", "justaword", 7)
        ),
        ({"url": "redis://x", "TIMEOUT": "soon"}, "E003", "'soon'"),
        ({"url": "redis://x", "CASHE": "default"}, "E008", "Did you mean 'CACHE'?"),
    ],
)
def test_settings_that_can_not_be_used_are_named(settings, terms, expected, words):
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    [(number, text)] = found(**terms)
    assert number == expected
    assert words in text


def test_a_cache_without_django_redis_names_the_extra(settings, monkeypatch):
    settings.CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "x"}}
    monkeypatch.setitem(sys.modules, "django_redis", None)
    monkeypatch.delitem(sys.modules, "django_redis.cache", raising=False)
    [(number, text)] = found(CACHE="default")
    assert number == "E009"
    assert text.endswith(
        "['CACHE'] is 'default', a cache of django-redis, which isn't installed. "
        "Run: pip install 'django-fencedlock[django-redis]'"
    )


# Checks of the server


def ids(backend):
    return {problem.id for problem in backend.check() if problem.id}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"I001"}),
        ({"appendonly": "yes"}, set()),
        ({"save": "3600 1"}, {"I002"}),
        ({"maxmemory": "100mb", "maxmemory_policy": "volatile-lru"}, {"I001", "W002"}),
        ({"maxmemory": "1", "maxmemory_policy": "noeviction"}, {"I001", "W006"}),
    ],
)
def test_the_configuration_of_a_server_is_reported(make_any_redis, closing, options, expected):
    server = make_any_redis()
    backend = closing(RedisBackend(config_of(server.url)))
    with server.configured(**options):
        assert ids(backend) == expected


def test_a_primary_with_a_replica_is_reported(make_any_redis, closing):
    primary = make_any_redis()
    make_any_redis(replica_of=primary)
    assert "I003" in ids(closing(RedisBackend(config_of(primary.url))))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"redis_version": "6.0.16"}, "E014"),
        ({"rdb_last_bgsave_status": "err"}, "W007"),
        ({"aof_last_write_status": "err"}, "W007"),
    ],
)
def test_what_a_server_reports_of_itself_is_checked(backend, values, expected):
    class Client:
        def __getattr__(self, name):
            return getattr(backend._here.client, name)

        def info(self, *sections):
            return {"redis_version": "7.2"} | values

    assert expected in {problem.id for problem in server_problems(Client(), "default")}


@pytest.mark.django_db
def test_check_with_a_database_reports_the_problems_of_the_server(server, settings):
    settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, "LOCATION": server.url}}
    found = checks.run_checks(databases=["default"], tags=[checks.Tags.database])
    assert {each.id for each in found} == {"django_fencedlock.I001"}


def test_a_clock_that_differs_is_w005(backend, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: time.monotonic())
    assert "W005" in ids(backend)
