"""
The Redis backend, by its own class, on real Redis and Valkey servers.
"""

import contextlib
import itertools
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from typing import Any

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections, transaction
from redis.crc import key_slot

from django_fencedlock.backends import base, redis_health
from django_fencedlock.backends.base import Cancel, Grant, Renewal, Request, Taken
from django_fencedlock.backends.redis import RedisBackend
from django_fencedlock.backends.redis_scripts import BEAT, CLAIM, RECHECK, RELEASE
from django_fencedlock.backends.redis_store import InLine, Keys, Store
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core.identity import new_owner
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import AliasConflict, BackendUnavailable, InsideTransaction
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.storage.sqlite import SQLiteLedger
from tests.leases import lease_of
from tests.servers.process import wait_until

#: What a loaded machine may add to a bound.
SLACK = 0.3

recorded = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["redis", "valkey"])
def server(request):
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture(params=["redis", "valkey"])
def make_any_redis(request):
    return request.getfixturevalue(f"make_{request.param}")


@pytest.fixture
def config(server):
    """
    The settings of an alias, with keys that no other test has.
    """
    return config_of(server.url)


@pytest.fixture
def backend(config):
    with contextlib.closing(RedisBackend(config)) as made:
        yield made


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def config_of(url="", alias="default", prefix=None, database="default", **options):
    return AliasConfig(
        alias=alias,
        backend="django_fencedlock.backends.redis.RedisBackend",
        location=url,
        ttl=30,
        blocking_timeout=10,
        key_prefix=prefix or uuid.uuid4().hex,
        fence_database=database,
        options=options,
    )


def wish(name="lock", *, ttl=10, fenced=False, **more):
    return Request(name, new_owner(), ttl, fenced=fenced, **more)


def take(backend, name="lock", **more):
    """
    Acquire without waiting; returns the lease, or None.
    """
    request = wish(name, **more)
    grant = backend.acquire(request)
    return grant and lease_of(request, grant)


class Waiter(threading.Thread):
    """
    Waits for a lock, and keeps it until told to release it.
    """

    def __init__(self, backend, request, timeout=10):
        super().__init__(daemon=True)
        self.backend, self.request, self.timeout = backend, request, timeout
        self.lease: Any = None
        self.error: BaseException | None = None
        self.done_at = 0.0
        self.start()

    def run(self):
        try:
            if grant := self.backend.wait(self.request, self.timeout):
                self.lease = lease_of(self.request, grant)
        except BaseException as exc:
            self.error = exc
        self.done_at = clock()

    def result(self):
        self.join(20)
        assert not self.is_alive()
        assert self.error is None
        return self.lease


def keys_of(backend, name="lock"):
    return Keys.of(backend.config.key_prefix, name)


def queued(client, backend):
    return client.zcard(keys_of(backend).queue)


def start_waiter(client, backend, request=None, **more):
    """
    Start a waiter, and return when he stands in line.
    """
    before = queued(client, backend)
    waiter = Waiter(backend, request or wish(), **more)
    wait_until(lambda: queued(client, backend) > before, "a waiter to stand in line")
    # And is in his blocking pop, more than the time in which he wouldn't be asked for it.
    time.sleep(0.06)
    return waiter


def dead_waiter(backend, *, pause=0.06):
    """
    Stand in line as one does who is killed before, or in, the blocking pop.
    """
    request = wish()
    place = backend._store.claim(request, "0")
    time.sleep(pause)
    return request, place


def left_over(client, backend):
    return set(client.keys(backend_pattern(backend))) - {keys_of(backend).seq}


def backend_pattern(backend):
    return f"*{backend.config.key_prefix}*"


def sent(seen):
    return [command for command in seen if not command.lua]


# What an uncontended lock costs


@recorded
def test_an_uncontended_lock_takes_one_request_each_way(backend, server):
    take_and_release(backend, fenced=True)
    with server.monitor() as seen:
        lease = take(backend, fenced=True)
    assert [command.name for command in sent(seen)] == ["EVALSHA"]
    assert len(seen) - 1 <= 4
    with server.monitor() as seen:
        assert backend.release(lease)
    assert [command.name for command in sent(seen)] == ["EVALSHA"]
    assert len(seen) - 1 <= 3


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_a_grant_is_recorded_by_one_statement_on_postgres(server, statements):
    backend = RedisBackend(config_of(server.url, database="postgres"))
    take_and_release(backend, fenced=True)
    del statements[:]
    lease = take(backend, fenced=True)
    assert len(statements) == 1
    backend.release(lease)
    assert len(statements) == 1


@pytest.fixture
def statements(monkeypatch):
    """
    The statements that private connections execute.
    """
    seen: list[str] = []

    def note(execute, sql, *rest):
        seen.append(sql)
        return execute(sql, *rest)

    def private(*args):
        connection = make(*args)
        connection.execute_wrappers.append(note)
        return connection

    from django_fencedlock.storage import connections as sessions

    make = sessions.private
    monkeypatch.setattr(sessions, "private", private)
    return seen


def take_and_release(backend, **more):
    lease = take(backend, **more)
    assert backend.release(lease)
    return lease


def test_a_lock_that_is_not_fenced_needs_no_database(backend, client):
    # pytest-django lets nobody touch a database here.
    lease = take(backend)
    assert not lease.fenced
    assert backend.renew([lease]) == [Renewal.KEPT]
    assert backend.verify(lease)
    assert backend.release(lease)
    backend.tidy()
    assert client.keys(backend_pattern(backend)) == []


@recorded
def test_a_fenced_and_an_unfenced_lock_of_one_name_exclude_each_other(backend):
    fenced = take(backend, fenced=True)
    assert take(backend) is None
    backend.release(fenced)
    take(backend)
    assert take(backend, fenced=True) is None


# Whose it is


@recorded
def test_the_holder_is_known_by_his_words(backend):
    lease = take(backend, fenced=True)
    holder = backend.holder("lock")
    assert (holder.owner, holder.token) == (lease.owner_id, lease.token)
    assert str(holder) == str(lease.holder)
    assert holder.expires_at is not None
    assert not backend.is_free("lock")


def test_the_holder_of_an_unfenced_lock_is_known_without_a_database(backend):
    lease = take(backend)
    assert str(backend.holder("lock")) == str(lease.holder)
    assert backend.holder("lock").token is None
    assert backend.holder("another") is None


def test_nobody_releases_or_renews_the_lock_of_another(backend):
    lease, stranger = take(backend), lease_of(wish(), Grant(None, 0))
    assert backend.release(stranger) is False
    assert backend.renew([stranger]) == [Renewal.LOST]
    assert not backend.verify(stranger)
    assert backend.verify(lease)


@pytest.mark.parametrize("name", ["a{b", "a}b", "}ab", "{}ab", "{a}b", "}", "{", "a{b}{c}"])
def test_a_name_with_braces_has_all_keys_in_one_slot(backend, client, name):
    keys = keys_of(backend, name)
    slots = {key_slot(key.encode()) for key in (*keys, keys.mailbox(new_owner()))}
    assert len(slots) == 1
    lease = take(backend, name)
    assert take(backend, name) is None
    assert backend.release(lease)


def test_names_never_share_a_key():
    names = ["a", "a}", "}a", "{a}", "{a", "a:lock", "a}:lock", "a:", "A", "ä", "a}:lock}"]
    keys = [key for name in names for key in Keys.of("", name)]
    assert len(set(keys)) == len(keys)


def test_locks_of_different_prefixes_are_different_locks(server):
    assert take(RedisBackend(config_of(server.url, prefix="one")), "same")
    other = RedisBackend(config_of(server.url, prefix="two"))
    assert other.release(take(other, "same"))


# Every script may be run twice


def free(store, client, me):
    pass


def mine(store, client, me):
    store.claim(me)


def handed_to_me(store, client, me):
    holder = wish(fenced=True)
    store.claim(holder)
    store.claim(me, "0")
    store.release(lease_of(holder, Grant(1, 0)))


def anothers(store, client, me):
    store.claim(wish(fenced=True))


def anothers_and_me_in_line(store, client, me):
    anothers(store, client, me)
    store.claim(me, "0")


def mine_and_another_in_line(store, client, me):
    mine(store, client, me)
    store.claim(wish(fenced=True), "0")


def run_out_and_another_in_line(store, client, me):
    mine_and_another_in_line(store, client, me)
    client.delete(store._keys("lock").lock)


def run_out_and_the_dead_in_line(store, client, me):
    run_out_and_another_in_line(store, client, me)
    keys = store._keys("lock")
    client.zadd(keys.alive, dict.fromkeys(client.zrange(keys.queue, 0, -1), 1))


def forgotten(store, client, me):
    mine(store, client, me)
    client.delete(store._keys("lock").seq)


STATES = [
    free,
    mine,
    handed_to_me,
    anothers,
    anothers_and_me_in_line,
    mine_and_another_in_line,
    run_out_and_another_in_line,
    run_out_and_the_dead_in_line,
    forgotten,
]
SCRIPTS = {
    # Refused, he who had the lock before is told, and the first time handed it on.
    "acquire": lambda store, me: getattr(store.claim(me), "arrival", "granted"),
    "wait": lambda store, me: getattr(store.claim(me, "0"), "arrival", "granted"),
    "leave": lambda store, me: store.leave(me),
    "repair": lambda store, me: store.repair(me, 41),
    "renew": lambda store, me: store.renew([lease_of(me, Grant(1, 0))]),
    "release": lambda store, me: store.release(lease_of(me, Grant(None, 0))) and None,
    "give_back": lambda store, me: store.give_back(me.name, me.owner.id) and None,
    "take_away": lambda store, me: store.take_away(me.name, me.owner.id, 5) and None,
}


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_run_twice_does_what_it_does_once(backend, client, state, script):
    store, me = backend._store, wish(fenced=True)
    state(store, client, me)
    first = SCRIPTS[script](store, me)
    after_first = snapshot(client, backend)
    second = SCRIPTS[script](store, me)
    assert snapshot(client, backend) == after_first
    # A release can't tell the second time whether it was the first that gave the lock back.
    assert script in ("release", "give_back", "take_away") or first == second


def test_a_recheck_run_twice_does_what_it_does_once(backend, client):
    store, holder = backend._store, wish(fenced=True)
    token = store.claim(holder)
    (first, _), (second, _) = (dead_waiter(backend) for _ in range(2))
    release_without_recheck(client, backend, holder)
    handed = [first.owner.id, str(token + 1), 60]
    store._recheck(keys_of(backend), handed)
    after_first = snapshot(client, backend)
    assert after_first[keys_of(backend).lock].startswith(second.owner.id)
    store._recheck(keys_of(backend), handed)
    assert snapshot(client, backend) == after_first


def release_without_recheck(client, backend, request):
    return RELEASE.run(client, keys_of(backend), request.owner.id, 0)


def snapshot(client, backend):
    """
    What is in Redis, less the times.
    """
    found = {}
    for key in client.keys(backend_pattern(backend)):
        read = {
            "string": client.get,
            "zset": lambda key: client.zrange(key, 0, -1),
            "list": lambda key: client.lrange(key, 0, -1),
        }
        found[key] = read[client.type(key)](key)
    return found


def test_a_lost_reply_that_the_driver_asks_for_again_draws_one_token(server, make_proxy, client):
    proxy = make_proxy(server.host, server.port)
    impatient = redis.Redis(
        port=proxy.port,
        socket_timeout=0.2,
        retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 10),
        retry_on_error=[redis.TimeoutError, redis.ConnectionError],
    )
    backend = RedisBackend(config_of(CLIENT_FACTORY="unused"))
    with impatient, using(backend, impatient):
        assert backend._store.is_free("warm")
        proxy.drop_replies()
        threading.Timer(0.5, proxy.pass_through).start()
        assert backend._store.claim(wish(fenced=True)) == 1
        assert client.get(keys_of(backend).seq).startswith("1:")


@contextlib.contextmanager
def using(backend, client):
    """
    Let a backend use a client that was made elsewhere.
    """
    from django_fencedlock.backends import redis_client

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_client, "make_client", lambda *args: client)
        assert backend._store.client is client
        yield
        backend.close()


def test_a_request_that_comes_again_after_its_lock_ran_out_draws_the_same_token(backend, client):
    store, me = backend._store, wish(fenced=True)
    first = store.claim(me)
    client.delete(keys_of(backend).lock)
    assert store.claim(me) == first


def test_scripts_that_the_server_forgot_are_sent_again(backend, client):
    lease = take(backend)
    client.script_flush()
    assert backend.renew([lease]) == [Renewal.KEPT]
    client.script_flush()
    assert backend.release(lease)


# What Redis may forget


def grow(backend, times=1):
    """
    Take a fenced lock some times over; returns its tokens.
    """
    return [take_and_release(backend, fenced=True).token for _ in range(times)]


@recorded
def test_tokens_rise_after_redis_was_emptied(backend, client):
    tokens = grow(backend, 3)
    client.flushall()
    tokens += grow(backend, 2)
    assert tokens == [1, 2, 3, 4, 5]


@recorded
def test_tokens_rise_after_the_counter_was_evicted_from_under_the_holder(backend, client):
    tokens = grow(backend, 2)
    lease = take(backend, fenced=True)
    client.delete(keys_of(backend).seq)
    assert backend.renew([lease]) == [Renewal.KEPT]
    assert backend.release(lease)
    assert grow(backend)[0] > lease.token > tokens[-1]


@recorded
def test_tokens_rise_after_a_restart_without_persistence(make_any_redis):
    server = make_any_redis()
    with contextlib.closing(RedisBackend(config_of(server.url))) as backend:
        tokens = grow(backend, 2)
        server.kill()
        server.start()
        tokens += grow(backend, 2)
    assert tokens == [1, 2, 3, 4]


@recorded
def test_tokens_rise_after_a_failover_to_a_replica_that_lags(make_any_redis, make_proxy):
    primary = make_any_redis()
    proxy = make_proxy(primary.host, primary.port)
    with contextlib.closing(RedisBackend(config_of(f"redis://127.0.0.1:{proxy.port}"))) as backend:
        tokens = grow(backend, 2)
        replica = make_any_redis(replica_of=primary)
        replica.promote()
        old = take(backend, fenced=True)
        proxy.retarget(replica.host, replica.port)
        proxy.cut()
        new = take(backend, fenced=True)
        assert [*tokens, old.token, new.token] == [1, 2, 3, 4]
        assert backend.renew([old, new]) == [Renewal.LOST, Renewal.KEPT]


@recorded
def test_an_old_holder_who_has_the_key_back_is_told_that_he_lost_it(backend, client):
    old = take(backend, fenced=True)
    keys = keys_of(backend)
    value = client.get(keys.lock)
    client.delete(keys.lock)
    new = take(backend, fenced=True)
    # A replica that didn't hear of the second grant becomes the primary.
    client.mset({keys.lock: value, keys.seq: f"{old.token}:{old.owner_id}"})
    other = take(backend, "other", fenced=True)
    assert backend.renew([old, other]) == [Renewal.KEPT] * 2
    assert backend.renew_rows([old, other]) == [old]
    assert backend.is_free("lock")
    assert take(backend, fenced=True).token > new.token


@recorded
def test_one_who_was_overtaken_before_his_grant_was_recorded_gets_none(
    backend, client, monkeypatch
):
    grow(backend, 3)
    client.flushall()
    lock = keys_of(backend).lock
    read = RedisBackend._read

    def be_slow(self, request):
        client.set(lock, f"{'e' * 32}:1:another")
        return read(self, request)

    monkeypatch.setattr(RedisBackend, "_read", be_slow)
    assert take(backend, fenced=True) is None
    assert client.get(lock).endswith("another")


@recorded
def test_only_a_redis_that_forgot_is_said_to_have_forgotten(backend, client, monkeypatch, caplog):
    record = RedisBackend._record

    def record_late(self, request, token):
        monkeypatch.setattr(RedisBackend, "_record", record)
        # His key runs out, and another comes.
        client.delete(keys_of(backend).lock)
        assert take(backend, fenced=True).token == 2
        return record(self, request, token)

    monkeypatch.setattr(RedisBackend, "_record", record_late)
    assert take(backend, fenced=True) is None
    assert "forgotten" not in caplog.text
    client.flushall()
    assert take(backend, fenced=True).token == 3
    assert "forgotten" in caplog.text


@recorded
def test_a_redis_that_goes_on_forgetting_grants_nothing(backend, client, monkeypatch):
    grow(backend, 3)
    client.flushall()
    monkeypatch.setattr(Store, "repair", lambda self, request, recorded: recorded)
    assert take(backend, fenced=True) is None
    assert backend.is_free("lock")


# Recording


@recorded
def test_a_name_that_is_live_under_another_alias_is_refused_naming_both(server):
    one = RedisBackend(config_of(server.url, alias="one"))
    two = RedisBackend(config_of(server.url, alias="two"))
    lease = take(one, fenced=True)
    with pytest.raises(AliasConflict, match=r"'one'.*'two'") as caught:
        take(two, fenced=True)
    holder = caught.value.holder
    assert holder
    assert holder.owner == lease.owner_id
    assert two.is_free("lock")
    one.release(lease)
    one.tidy()
    assert take(two, fenced=True)


@recorded
@pytest.mark.parametrize("error", [KeyboardInterrupt, OperationalError])
def test_a_grant_that_could_not_be_recorded_is_given_back(backend, monkeypatch, error):
    def fail(*args):
        raise error("at the worst moment")

    monkeypatch.setattr(SQLiteLedger, "record", fail)
    with pytest.raises((KeyboardInterrupt, BackendUnavailable)):
        backend.acquire(wish(fenced=True))
    with pytest.raises((KeyboardInterrupt, BackendUnavailable)):
        backend.wait(wish(fenced=True), 1)
    assert backend.is_free("lock")


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_a_fence_that_an_open_transaction_pins_counts_as_held(server):
    backend = RedisBackend(config_of(server.url, database="postgres"))
    backend.release(take(backend, fenced=True))
    with transaction.atomic(using="postgres"):
        Fence.objects.using("postgres").select_for_update().get(name="lock")
        assert take(backend, fenced=True) is None
        assert backend.is_free("lock")
        waiter = Waiter(backend, wish(fenced=True))
        time.sleep(0.8)
        assert waiter.is_alive()
    assert waiter.result().token > 1


@recorded
def test_a_writing_transaction_on_sqlite_is_refused_with_the_remedy(backend):
    with transaction.atomic():
        Fence.objects.create(name="other", token=1, owner="x")
        with pytest.raises(InsideTransaction, match="Acquire the lock first"):
            take(backend, fenced=True, in_transaction=True)
    assert backend.is_free("lock")


@recorded
def test_the_registry_is_cleared_in_one_batch_when_it_is_tidied(backend):
    leases = [take(backend, f"lock{number}", fenced=True) for number in range(3)]
    for lease in leases:
        backend.release(lease)
    assert HeldLock.objects.count() == 3
    backend.tidy()
    assert HeldLock.objects.count() == 0


@recorded
def test_a_lock_whose_release_got_no_answer_leaves_no_row(hasty):
    server, backend = hasty
    lease = take(backend, fenced=True)
    server.kill()
    with pytest.raises(BackendUnavailable):
        backend.release(lease)
    backend.tidy()
    assert not HeldLock.objects.exists()


@pytest.mark.django_db
def test_a_grant_within_a_tests_transaction_uses_the_tests_connection(backend):
    lease = take(backend, fenced=True, connection=connections["default"])
    assert Fence.objects.get().token == lease.token
    assert backend.renew([lease]) == [Renewal.KEPT]
    assert backend.release(lease)
    assert not HeldLock.objects.exists()


# Keeping


@recorded
def test_a_lease_that_ran_out_is_renewed_if_nobody_came(backend, client):
    lease = take(backend, fenced=True)
    client.delete(keys_of(backend).lock)
    assert backend.verify(lease)
    assert backend.renew([lease]) == [Renewal.KEPT]
    assert 0 < client.pttl(keys_of(backend).lock) <= 10_000
    assert take(backend, fenced=True) is None


@recorded
def test_a_request_that_comes_late_after_redis_was_emptied_gives_nobody_his_lease_back(
    backend, client
):
    take_and_release(backend, fenced=True)
    request = wish(fenced=True)
    lease = lease_of(request, backend.acquire(request))
    client.flushall()
    # Of his own, once more; it draws the first token anew.
    assert backend._store.claim(request) == 1
    assert not backend.verify(lease)
    assert backend.renew([lease]) == [Renewal.LOST]


@recorded
def test_the_counter_outlasts_whoever_may_still_record_its_token(backend, client):
    seq, hours = keys_of(backend).seq, 48 * 3600 * 1000
    lease = take(backend, fenced=True)
    assert client.pttl(seq) > hours
    client.delete(keys_of(backend).lock, seq)
    assert backend.renew([lease]) == [Renewal.KEPT]
    assert client.pttl(seq) > hours
    assert backend._store.take_away(lease.name, lease.owner_id, lease.token + 1)
    assert client.pttl(seq) > hours


@recorded
def test_a_renewal_after_redis_was_emptied_takes_the_counter_along(backend, client):
    """Else the next grants are behind the fence, and each has to be repaired."""
    take_and_release(backend, fenced=True)
    lease = take(backend, fenced=True)
    client.flushall()
    assert backend.renew([lease]) == [Renewal.KEPT]
    assert client.get(keys_of(backend).seq) == f"{lease.token}:{lease.owner_id}"
    assert lease.token == 2


@recorded
def test_a_lease_that_ran_out_is_released_as_it_should_be_if_nobody_came(backend, client):
    lease = take(backend, fenced=True)
    client.delete(keys_of(backend).lock)
    assert backend.release(lease)
    assert take(backend, fenced=True)


@recorded
def test_a_lease_that_ran_out_is_lost_if_somebody_came_and_went(backend, client):
    lease = take(backend, fenced=True)
    client.delete(keys_of(backend).lock)
    grow(backend)
    assert not backend.verify(lease)
    assert backend.renew([lease]) == [Renewal.LOST]
    assert not backend.release(lease)
    assert backend.is_free("lock")


@recorded
def test_a_lease_that_ran_out_is_lost_if_an_unfenced_holder_came(backend, client):
    lease = take(backend, fenced=True)
    client.delete(keys_of(backend).lock)
    other = take(backend)
    assert not backend.release(lease)
    assert backend.verify(other)


def test_an_unfenced_lease_that_ran_out_is_lost(backend, client):
    lease = take(backend)
    client.delete(keys_of(backend).lock)
    assert not backend.verify(lease)
    assert backend.renew([lease]) == [Renewal.LOST]
    assert not backend.release(lease)


@recorded
def test_a_batch_is_renewed_in_one_round_trip_each_by_its_own_ttl(backend, server, client):
    leases = [take(backend, f"lock{number}", ttl=5 + number, fenced=True) for number in range(20)]
    for lease in leases:
        client.pexpire(keys_of(backend, lease.name).lock, 100)
    with server.monitor() as seen:
        assert backend.renew(leases) == [Renewal.KEPT] * 20
    assert {command.name for command in sent(seen)} <= {"EVALSHA", "EVAL"}
    for number, lease in enumerate(leases):
        left = client.pttl(keys_of(backend, lease.name).lock)
        assert 4000 < left - number * 1000 <= 5000


def test_many_leases_are_renewed_by_one_request_for_each_hundred(backend, server, client):
    leases = [take(backend, f"lock{number}") for number in range(201)]
    backend.renew(leases)
    client.pexpire(keys_of(backend, "lock200").lock, 100)
    with server.monitor() as seen:
        assert backend.renew(leases) == [Renewal.KEPT] * 201
    assert [command.name for command in sent(seen)] == ["EVALSHA"] * 3
    assert client.pttl(keys_of(backend, "lock200").lock) > 9000


@recorded
def test_each_lease_of_a_batch_has_its_own_answer(backend, client):
    first, taken, run_out, overtaken, last = (
        take(backend, name, fenced=True) for name in ("a", "b", "c", "d", "e")
    )
    client.delete(*(keys_of(backend, name).lock for name in ("b", "c", "d")))
    take(backend, "b", fenced=True)
    take_and_release(backend, name="d", fenced=True)
    answers = backend.renew([first, taken, run_out, overtaken, last])
    kept, lost = Renewal.KEPT, Renewal.LOST
    assert answers == [kept, lost, kept, lost, kept]
    assert str(backend.holder("c")) == str(run_out.holder)


@recorded
def test_an_earlier_token_of_the_same_owner_is_not_renewed(backend, client):
    request = wish(fenced=True)
    former = lease_of(request, backend.acquire(request))
    client.delete(keys_of(backend).lock)
    take_and_release(backend, fenced=True)
    newer = backend.acquire(request)
    assert newer.token > former.token
    assert backend.renew([former]) == [Renewal.LOST]


@pytest.mark.slow
def test_a_cluster_behind_a_client_of_one_server_renews_leases_one_by_one(make_any_redis):
    """As a proxy has it: no script gets keys of several slots."""
    server = make_any_redis("--cluster-enabled", "yes")
    server.execute("CLUSTER", "ADDSLOTS", *range(16384))
    wait_until(lambda: "state:ok" in str(server.execute("CLUSTER", "INFO")), "the cluster")
    with contextlib.closing(RedisBackend(config_of(server.url))) as backend:
        leases = [take(backend, name) for name in "abc"]
        lost = lease_of(wish("a"), Grant(None, 0))
        assert backend.renew([*leases, lost]) == [Renewal.KEPT] * 3 + [Renewal.LOST]


@recorded
@pytest.mark.parametrize("fenced", [True, False])
def test_a_lease_counts_from_before_it_was_asked_for(backend, monkeypatch, fenced):
    claim, asked_at = backend._store.claim, []

    def claim_later(*args):
        asked_at.append(clock())
        return claim(*args)

    monkeypatch.setattr(backend._store, "claim", claim_later)
    assert backend.acquire(wish(fenced=fenced)).since <= asked_at[0]


@recorded
def test_an_error_about_one_lock_of_a_batch_refuses_no_renewal(backend, client):
    """Whoever can't be answered may have the lock still."""
    broken, fine = take(backend, "broken", fenced=True), take(backend, "fine", fenced=True)
    key = keys_of(backend, "broken").lock
    client.delete(key)
    client.rpush(key, "no text")
    assert backend.renew([broken, fine]) == [Renewal.UNKNOWN, Renewal.KEPT]
    client.delete(key)


@recorded
def test_a_row_that_is_gone_from_the_registry_is_put_back(backend):
    lease = take(backend, fenced=True)
    HeldLock.objects.all().delete()
    assert backend.renew_rows([lease]) == []
    assert HeldLock.objects.get().owner == lease.owner_id
    assert Fence.objects.get().token == lease.token


@recorded
def test_leases_are_kept_while_the_database_fails(backend, monkeypatch, caplog):
    lease = take(backend, fenced=True)

    def fail(*args):
        raise OperationalError("gone fishing")

    monkeypatch.setattr(SQLiteLedger, "renew", fail)
    assert backend.renew_rows([lease]) == []
    assert "gone fishing" in caplog.text
    assert backend.renew([lease]) == [Renewal.KEPT]


# Standing in line


def test_a_lock_is_handed_to_the_next_in_line_at_once(backend, client):
    lease = take(backend)
    waiter = start_waiter(client, backend)
    released = clock()
    backend.release(lease)
    waiter.join()
    assert waiter.done_at - released < 0.1
    assert waiter.lease.deadline >= released + 9.9
    assert 0 < client.pttl(keys_of(backend).lock) <= 10_000
    assert str(backend.holder("lock")) == str(waiter.lease.holder)


def test_eight_are_served_in_the_order_in_which_they_came(backend, client):
    lease = take(backend)
    waiters = [start_waiter(client, backend) for _ in range(8)]
    for waiter in waiters:
        assert [other.lease for other in waiters if other.is_alive()] == [None] * (
            len(waiters) - waiters.index(waiter)
        )
        backend.release(lease)
        lease = waiter.result()
    backend.release(lease)
    assert left_over(client, backend) == set()


def test_a_newcomer_does_not_pass_those_who_wait(backend, client):
    lease = take(backend, ttl=0.5)
    waiter = start_waiter(client, backend)
    wait_until(lambda: not lease.remaining(), "the lease to run out")
    while waiter.is_alive():
        newcomer = take(backend)
        assert newcomer is None or waiter.lease
    assert waiter.result()


def test_who_waits_for_a_dead_holder_is_served_when_his_lease_ends(backend, client):
    lease = take(backend, ttl=0.7)
    waiter = start_waiter(client, backend)
    waiter.result()
    assert -0.05 < waiter.done_at - lease.deadline < SLACK
    # He isn't in line any more, where his own release would hand it to him.
    backend.release(waiter.lease)
    assert left_over(client, backend) == set()


def test_waiting_ends_in_time_and_leaves_nothing(backend, client):
    take(backend)
    started = clock()
    assert backend.wait(wish(), 0.3) is None
    assert 0.3 <= clock() - started < 0.3 + SLACK
    assert left_over(client, backend) == {keys_of(backend).lock}


def test_who_may_wait_for_ever_gets_the_lock(backend, client):
    lease = take(backend)
    waiter = start_waiter(client, backend, timeout=float("inf"))
    backend.release(lease)
    assert waiter.result()


def test_a_grant_that_comes_as_time_runs_out_is_used(backend, client):
    lease, request = take(backend), wish()
    assert isinstance(backend._store.claim(request, "0"), InLine)
    release_without_recheck(client, backend, wish_of(lease))
    grant = backend._leave(request)
    assert backend.release(lease_of(request, grant))
    assert left_over(client, backend) == set()


def wish_of(lease):
    return Request(lease.name, lease.holder, lease.ttl, fenced=lease.fenced)


def test_an_eviction_wakes_who_waits(backend, client):
    dead = take(backend)
    waiter = start_waiter(client, backend)
    evicted = clock()
    assert backend.evict("lock", dead.owner_id, fenced=False)
    assert waiter.result()
    assert waiter.done_at - evicted < 0.2


def test_what_is_taken_away_is_handed_to_the_first_in_line_at_once(backend, client):
    former = take(backend, fenced=False)
    first, second = (start_waiter(client, backend) for _ in range(2))
    done = clock()
    assert backend.take_away("lock", former.owner_id) is Taken.FREED
    assert backend.holder("lock").owner == first.request.owner.id
    assert first.result()
    assert first.done_at - done < 0.2
    assert backend.renew([former]) == [Renewal.LOST]
    assert backend.verify(first.lease)
    backend.release(first.lease)
    assert second.result()


def test_what_is_taken_away_has_its_counter_lifted(backend, client):
    store, me = backend._store, wish(fenced=True)
    for _ in range(2):
        token = store.claim(me)
        assert store.take_away("lock", me.owner.id, token + 7)
        # As if it had run out and nobody came, which would be renewed.
        assert store.renew([lease_of(me, Grant(token, 0))]) == [False]
        assert backend.is_free("lock")
        me = wish(fenced=True)
        assert store.claim(me) == token + 8
        store.give_back("lock", me.owner.id)
        me = wish(fenced=True)


def test_what_is_taken_away_leaves_a_counter_that_is_higher(backend, client):
    store, me = backend._store, wish(fenced=True)
    store.claim(me)
    client.set(keys_of(backend).seq, "9:somebody")
    assert store.take_away("lock", me.owner.id, 5)
    assert store.claim(wish(fenced=True)) == 10


def test_a_repaired_grant_is_renewed_and_the_next_one_has_the_next_token(backend, client):
    store, me = backend._store, wish(fenced=True)
    store.claim(me)
    assert store.repair(me, 41) == 42
    assert store.renew([lease_of(me, Grant(42, 0))]) == [True]
    store.give_back("lock", me.owner.id)
    assert store.claim(wish(fenced=True)) == 43


def test_a_repeated_recheck_takes_the_lock_from_nobody(backend, client):
    store, holder = backend._store, wish(fenced=True)
    token = store.claim(holder)
    first, second, _ = (dead_waiter(backend)[0] for _ in range(3))
    release_without_recheck(client, backend, holder)
    for _ in range(2):
        RECHECK.run(client, keys_of(backend), first.owner.id, token + 1)
        assert backend.holder("lock").owner == second.owner.id


def test_a_lease_that_ran_out_is_taken_away_as_well(backend, client):
    store, me = backend._store, wish(fenced=True)
    token = store.claim(me)
    client.delete(keys_of(backend).lock)
    assert store.take_away("lock", me.owner.id, token + 1)
    assert store.renew([lease_of(me, Grant(token, 0))]) == [False]


def test_nothing_is_taken_away_from_somebody_else(backend, client):
    store, me = backend._store, wish(fenced=True)
    store.claim(me)
    before = snapshot(client, backend)
    assert not store.take_away("lock", new_owner().id, 50)
    assert snapshot(client, backend) == before


def test_one_who_died_in_line_is_evicted_from_it(backend, client):
    holder = take(backend)
    dead, _ = dead_waiter(backend)
    assert not backend.evict("lock", dead.owner.id, fenced=False)
    assert queued(client, backend) == 0
    assert backend.verify(holder)


def test_one_who_was_handed_the_lock_and_died_is_evicted(backend, client):
    holder = take(backend)
    dead, _ = dead_waiter(backend, pause=0)
    backend.release(holder)
    assert not backend.is_free("lock")
    assert backend.evict("lock", dead.owner.id, fenced=False)
    assert take(backend)


def test_a_refused_try_sees_the_dead_without_asking_for_more(backend, server, monkeypatch):
    """The lock itself tells whose process has it."""
    looks = []

    def look(process):
        looks.append(process)
        return False

    monkeypatch.setattr(base, "is_process_gone", look)
    lease = take(backend)
    with server.monitor() as seen:
        assert take(backend) is None
    assert [command.name for command in sent(seen)] == ["EVALSHA"]
    process = lease.holder.process
    assert looks == [process]

    monkeypatch.setattr(base, "is_process_gone", lambda process: True)
    assert take(backend)


@pytest.mark.parametrize("number", [1, 8])
def test_waiters_who_died_in_line_delay_nobody(backend, client, number):
    lease = take(backend)
    for _ in range(number):
        dead_waiter(backend, pause=0)
    waiter = start_waiter(client, backend)
    released = clock()
    backend.release(lease)
    waiter.join()
    assert waiter.done_at - released < 0.2


@pytest.mark.slow
def test_a_waiter_who_died_as_he_came_delays_the_next_for_one_claim(backend, client):
    lease = take(backend)
    dead, _ = dead_waiter(backend, pause=0)
    released = clock()
    assert backend.release(lease)
    holder = backend.holder("lock")
    assert holder
    assert holder.owner == dead.owner.id
    waiter = Waiter(backend, wish())
    waiter.join()
    assert waiter.done_at - released < CLAIM + SLACK


def test_who_comes_while_the_servers_clock_goes_back_stands_behind(backend, client):
    take(backend)
    first, _ = dead_waiter(backend, pause=0)
    queue = keys_of(backend).queue
    client.zincrby(queue, 3_600_000_000, first.owner.id)
    second, _ = dead_waiter(backend, pause=0)
    assert client.zrange(queue, 0, -1) == [first.owner.id, second.owner.id]


def test_whatever_the_dead_leave_behind_runs_out(backend, client):
    holder, keys = wish(), keys_of(backend)
    backend._store.claim(holder)
    first, _ = dead_waiter(backend)
    dead_waiter(backend)
    release_without_recheck(client, backend, holder)
    assert left_over(client, backend) == {
        keys.lock,
        keys.queue,
        keys.alive,
        keys.mailbox(first.owner),
    }
    assert all(client.pttl(key) > 0 for key in left_over(client, backend))
    assert client.pttl(keys.lock) <= 3000


def test_a_paused_waiter_who_comes_back_has_his_old_place(backend, client):
    lease = take(backend)
    paused, place = dead_waiter(backend)
    waiters = [start_waiter(client, backend) for _ in range(2)]
    backend.release(lease)
    first = waiters[0].result()
    assert isinstance(backend._store.claim(paused, place.arrival), InLine)
    assert client.zrange(keys_of(backend).queue, 0, 0) == [paused.owner.id]
    backend.release(first)
    assert backend._store.claim(paused, place.arrival) == 0


@pytest.mark.slow
def test_a_waiter_whose_message_is_lost_looks_after_a_beat(backend, client):
    lease = take(backend)
    waiter = start_waiter(client, backend)
    # Within a pipeline nobody can send it again, whole.
    client.script_load(RELEASE.text)
    with client.pipeline() as together:
        release_without_recheck(together, backend, wish_of(lease))
        together.delete(keys_of(backend).mailbox(waiter.request.owner))
        together.execute()
    released = clock()
    assert waiter.result()
    assert waiter.done_at - released < BEAT + SLACK


@pytest.mark.slow
def test_waiting_goes_on_after_the_server_was_emptied(backend, client):
    take(backend)
    waiters = [start_waiter(client, backend) for _ in range(3)]
    client.flushall()
    client.script_flush()
    flushed = clock()
    for _ in waiters:
        wait_until(lambda: any(waiter.lease for waiter in waiters), "a waiter to be served")
        served = next(waiter for waiter in waiters if waiter.lease)
        waiters.remove(served)
        backend.release(served.result())
    assert clock() - flushed < BEAT + SLACK + 0.5


def test_a_cancelled_waiter_stops_at_once_and_leaves_the_line(backend, client):
    take(backend)
    waiter = start_waiter(client, backend)
    cancelled = clock()
    waiter.request.cancel.cancel()
    assert waiter.result() is None
    assert waiter.done_at - cancelled < 0.2
    assert queued(client, backend) == 0


def test_a_waiter_cancelled_before_he_waits_does_not_wait(backend):
    take(backend)
    cancel = Cancel()
    cancel.cancel()
    started = clock()
    assert backend.wait(wish(cancel=cancel), 5) is None
    assert clock() - started < 0.2


def test_a_waiter_cancelled_as_he_is_handed_the_lock_hands_it_on(backend, client):
    lease = take(backend)
    first, second = (start_waiter(client, backend) for _ in range(2))
    released = clock()
    first.request.cancel.cancel()
    backend.release(lease)
    first.join()
    if first.lease:
        backend.release(first.lease)
    assert second.result()
    assert second.done_at - released < SLACK


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_while_waiting_leaves_the_line(backend, client, monkeypatch, error):
    take(backend)
    claim = Store.claim

    def fail_the_second_time(self, request, arrival=None):
        if arrival not in (None, "0"):
            raise error
        return claim(self, request, arrival)

    monkeypatch.setattr(Store, "claim", fail_the_second_time)
    with pytest.raises(error):
        backend.wait(wish(), 5)
    assert queued(client, backend) == 0


def test_waiting_takes_no_connection_of_the_application(server, client):
    pool = redis.BlockingConnectionPool.from_url(server.url, max_connections=1, timeout=1)
    backend = RedisBackend(config_of(CLIENT_FACTORY="unused"))
    with redis.Redis(connection_pool=pool) as application, using(backend, application):
        lease = take(backend)
        waiters = [start_waiter(client, backend) for _ in range(4)]
        assert application.ping()
        for waiter in waiters:
            backend.release(lease)
            lease = waiter.result()
    pool.disconnect()


def test_connections_that_nobody_waits_on_are_closed_when_it_is_tidied(backend, client):
    lease = take(backend)
    waiter = start_waiter(client, backend)
    backend.release(lease)
    waiter.result()
    open_before = client.info("clients")["connected_clients"]
    backend.tidy()
    wait_until(
        lambda: client.info("clients")["connected_clients"] == open_before - 1,
        "the connection to close",
    )


def test_nothing_overlaps_or_stays_when_many_give_up_and_come_again(backend, client):
    grants = itertools.count()
    inside: list[int] = []
    problems: list[str] = []

    def run(seed):
        rng = random.Random(seed)
        while clock() < end:
            request = wish(ttl=5)
            grant = backend.wait(request, rng.uniform(0.0005, 0.05))
            if grant is None:
                continue
            inside.append(seed)
            if len(inside) > 1:
                problems.append("two inside")
            next(grants)
            time.sleep(rng.uniform(0, 0.002))
            inside.pop()
            if not backend.release(lease_of(request, grant)):
                problems.append("lost")

    end = clock() + 1.5
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert next(grants) > 50
    assert left_over(client, backend) == set()


SET_UP = "import django; django.setup()\n"
WAIT_IN_A_PROCESS = """
    import sys
    from tests.test_redis_backend import config_of, wish, RedisBackend
    backend = RedisBackend(config_of(sys.argv[1], prefix=sys.argv[2]))
    print(bool(backend.wait(wish(), 20)), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start_process(child_environment):
    """
    Run a piece of Python in a process of its own.
    """
    with contextlib.ExitStack() as stack:

        def start(text, *arguments):
            child = subprocess.Popen(
                [sys.executable, "-c", SET_UP + textwrap.dedent(text), *arguments],
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            return child

        yield start


@pytest.mark.slow
def test_processes_that_were_killed_in_line_delay_nobody(backend, client, server, start_process):
    lease = take(backend, ttl=30)
    children = [
        start_process(WAIT_IN_A_PROCESS, server.url, backend.config.key_prefix) for _ in range(2)
    ]
    wait_until(lambda: queued(client, backend) == 2, "two processes to stand in line")
    waiter = start_waiter(client, backend)
    for child in children:
        child.kill()
        child.wait()
    released = clock()
    backend.release(lease)
    assert waiter.result()
    assert waiter.done_at - released < CLAIM + SLACK


@pytest.mark.slow
def test_a_fork_leaves_the_parents_connections_alone(backend, server, start_process):
    child = start_process(
        """
        import os, sys
        from tests.test_redis_backend import config_of, lease_of, take, wish, RedisBackend
        backend = RedisBackend(config_of(sys.argv[1], prefix=sys.argv[2]))
        lease = take(backend)
        assert backend.wait(wish(), 0.01) is None
        number = backend._store.client.client_id()
        if os.fork() == 0:
            backend.forget_after_fork()
            assert backend._store.client.client_id() != number
            assert take(backend) is None
            backend.close()
            sys.exit()
        assert os.wait()[1] == 0
        assert backend._store.client.client_id() == number
        print(backend.release(lease), flush=True)
        """,
        server.url,
        backend.config.key_prefix,
    )
    assert child.stdout.readline() == "True\n"


# Servers that don't answer


@pytest.fixture
def hasty(make_any_redis):
    """
    A server of the test's own, and a backend that gives it half a second.
    """
    server = make_any_redis()
    with contextlib.closing(RedisBackend(config_of(server.url, TIMEOUT=0.5))) as backend:
        yield server, backend


@pytest.mark.slow
def test_a_server_that_hangs_is_given_up_in_time(hasty):
    server, backend = hasty
    lease = take(backend, "warm")
    server.pause()
    for ask in (
        lambda: take(backend),
        lambda: backend.verify(lease),
        lambda: backend.release(lease),
        lambda: backend.holder("lock"),
        lambda: backend.is_free("lock"),
        lambda: backend.wait(wish(), 10),
    ):
        started = clock()
        with pytest.raises(BackendUnavailable, match="'default'"):
            ask()
        assert clock() - started < 0.5 + SLACK
    assert backend.renew([lease]) == [Renewal.UNKNOWN]
    server.resume()
    with server.client() as client:
        assert client.pttl(keys_of(backend).lock) <= 10_000


@pytest.mark.slow
def test_a_server_that_hangs_is_given_up_by_one_in_line(hasty):
    server, backend = hasty
    take(backend)
    with server.client() as client:
        waiter = start_waiter(client, backend)
    paused = clock()
    server.pause()
    waiter.join(10)
    assert isinstance(waiter.error, BackendUnavailable)
    assert waiter.done_at - paused < BEAT + 1 + 0.5 + SLACK


def test_a_server_that_is_gone_is_unavailable_at_once(hasty):
    server, backend = hasty
    lease = take(backend)
    server.kill()
    started = clock()
    with pytest.raises(BackendUnavailable):
        take(backend)
    assert backend.renew([lease]) == [Renewal.UNKNOWN]
    assert clock() - started < 0.5
    server.start()
    assert take(backend)


def test_a_read_only_server_grants_nothing(make_any_redis):
    primary = make_any_redis()
    replica = make_any_redis(replica_of=primary)
    backend = RedisBackend(config_of(replica.url))
    with pytest.raises(BackendUnavailable, match="ReadOnly"):
        take(backend)


# Clients


@pytest.mark.slow
def test_a_cluster_keeps_each_lock_in_one_slot(make_any_redis):
    server = make_any_redis("--cluster-enabled", "yes")
    server.execute("CLUSTER", "ADDSLOTS", *range(16384))
    wait_until(lambda: "state:ok" in str(server.execute("CLUSTER", "INFO")), "the cluster")
    cluster = redis.RedisCluster(host=server.host, port=server.port)
    backend = RedisBackend(config_of(CLIENT_FACTORY="unused"))
    with using(backend, cluster), server.client() as client:
        leases = [take(backend, name) for name in ("lock", "b", "{c}", "}")]
        waiter = start_waiter(client, backend)
        assert backend.renew(leases) == [Renewal.KEPT] * 4
        assert str(backend.holder("}")) == str(leases[-1].holder)
        assert backend.verify(leases[0])
        backend.release(leases[0])
        assert waiter.result()
        assert list(backend.live_problems()) == []
    cluster.close()


def test_a_client_that_decodes_answers_will_do(server):
    backend = RedisBackend(config_of(f"{server.url}?decode_responses=true"))
    with contextlib.closing(backend), server.client() as client:
        lease = take(backend)
        waiter = start_waiter(client, backend)
        assert str(backend.holder("lock")) == str(lease.holder)
        backend.release(lease)
        assert waiter.result()


def test_a_unix_socket_will_do(make_any_redis):
    server = make_any_redis()
    backend = RedisBackend(config_of(f"unix://{server.socket}?db=0"))
    with contextlib.closing(backend), server.client() as client:
        lease = take(backend)
        waiter = start_waiter(client, backend)
        backend.release(lease)
        assert waiter.result()


def test_a_cache_of_django_redis_lends_its_client(server, settings):
    settings.CACHES = {
        "locks": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url}
    }
    config = config_of(CACHE="locks")
    assert list(RedisBackend.problems(config)) == []
    backend = RedisBackend(config)
    with server.client() as client:
        lease = take(backend)
        waiter = start_waiter(client, backend)
        backend.release(lease)
        backend.release(waiter.result())
        assert left_over(client, backend) == set()
    backend.close()


# Settings


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
        ("redis+sentinel://one:x/mymaster", "'one:x'"),
    ],
)
def test_a_url_that_can_not_be_used_is_e007(url, why):
    [(number, text)] = found(url=url)
    assert number == "E007"
    assert why in text
    assert "redis+sentinel://[user:password@]host1" in text


def test_a_problem_does_not_tell_the_password():
    [(_, text)] = found(url="redis+sentinel://user:secret@one")
    assert "secret" not in text
    assert "user:***@one" in text


def test_no_place_or_two_places_for_a_server_are_e007():
    [(number, text)] = found()
    assert number == "E007"
    assert 'OPTIONS["CACHE"]' in text
    [(number, text)] = found(url="redis://localhost", CACHE="default")
    assert number == "E007"
    assert "has LOCATION and OPTIONS['CACHE']" in text


def test_a_cache_that_is_no_redis_is_e009(settings):
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    [(number, text)] = found(CACHE="default")
    assert number == "E009"
    assert "LocMemCache" in text
    [(number, text)] = found(CACHE="nowhere")
    assert number == "E009"
    assert "it has 'default'" in text


@pytest.mark.parametrize("path", ["nowhere.to_be_found", "os.sep", "justaword", 7])
def test_a_factory_that_can_not_be_called_is_e008(path):
    [(number, text)] = found(CLIENT_FACTORY=path)
    assert number == "E008"
    assert repr(path) in text


def test_unknown_options_and_bad_durations_are_named():
    assert [number for number, _ in found(url="redis://x", TIMEOUT="soon")] == ["E003"]
    [(number, text)] = found(url="redis://x", CASHE="default")
    assert number == "E008"
    assert "Did you mean 'CACHE'?" in text


@pytest.mark.slow
def test_a_driver_that_is_missing_is_named_with_its_extra():
    text = """
        import sys
        sys.modules["redis"] = None
        try:
            import django_fencedlock.backends.redis
        except Exception as exc:
            print(type(exc).__name__, exc)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "django.conf.global_settings"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(ImproperlyConfigured.__name__), done.stderr
    assert "pip install 'django-fencedlock[redis]'" in done.stdout


class OldServer:
    """
    Answers as a server before 6.2 does.
    """

    def info(self, section):
        return {"redis_version": "6.0.16"} if section == "server" else {}


def test_a_server_that_is_too_old_is_e014():
    [problem] = redis_health.problems(OldServer(), "default")
    assert problem.id == "E014"
    assert "6.0.16" in str(problem)
    assert "6.2" in str(problem)


def test_a_server_that_may_drop_locks_is_warned_of(backend, server):
    assert list(backend.live_problems()) == []
    with server.configured(maxmemory="100mb", maxmemory_policy="volatile-lru"):
        [problem] = backend.live_problems()
    assert problem.id == "W002"
    assert not problem.is_error
    assert "volatile-lru" in str(problem)


def test_a_server_that_can_not_be_reached_is_e013(hasty):
    server, backend = hasty
    server.kill()
    [problem] = backend.live_problems()
    assert problem.id == "E013"
    assert "Start the server" in str(problem)
