"""The connections on which the Redis backend asks."""

import threading

import pytest
import redis as driver
from redis.sentinel import SentinelConnectionPool

from django_fencedlock.backends.redis_lines import ask_many, lines
from tests.servers.process import wait_until


@pytest.fixture
def client(redis_server):
    redis_server.empty()
    client = driver.Redis.from_url(redis_server.url)
    yield client
    client.close()


@pytest.fixture
def asked(client):
    asked = lines(client)
    assert asked is not None
    yield asked
    asked.close()


def connected(client, name):
    return [each for each in client.client_list() if each["name"] == name]


def test_an_answer_is_the_clients(asked, client):
    client.set("key", "välue")
    assert asked.execute_command("GET", "key") == client.get("key")
    assert asked.execute_command("SET", "näme", 42) in ("OK", b"OK")
    assert client.get("näme") == b"42"
    assert asked.execute_command("GET", "none") is None


def test_one_connection_serves_one_request_after_another(asked, client):
    asked.execute_command("CLIENT", "SETNAME", "ours")
    for _ in range(3):
        asked.execute_command("PING")
    assert asked.execute_command("CLIENT", "GETNAME") == b"ours"
    assert len(connected(client, "ours")) == 1
    asked.close()
    wait_until(lambda: not connected(client, "ours"), "the server to notice", 10)


def test_threads_have_a_connection_each_at_a_time(asked):
    ids = []
    together = threading.Barrier(3, timeout=10)

    def ask():
        together.wait()
        asked.execute_command("BLPOP", "nothing", 0.2)
        ids.append(asked.execute_command("CLIENT", "ID"))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(ids) == 3
    assert len(asked._idle) == 3


def test_what_strikes_before_the_answer_is_read_leaves_it_to_nobody(asked, monkeypatch):
    class Struck(BaseException):
        pass

    def strike(*args, **kwargs):
        raise Struck

    asked.execute_command("PING")
    monkeypatch.setattr("django_fencedlock.backends.redis_lines._answer", strike)
    with pytest.raises(Struck):
        asked.execute_command("ECHO", "of the first")
    monkeypatch.undo()
    assert asked.execute_command("ECHO", "of the second") == b"of the second"


def test_an_error_that_the_server_tells_keeps_the_connection(asked):
    before = asked.execute_command("CLIENT", "ID")
    with pytest.raises(driver.ResponseError):
        asked.execute_command("NO-SUCH-COMMAND")
    assert asked.execute_command("CLIENT", "ID") == before


def test_a_connection_that_the_server_closed_is_opened_anew(client):
    client = driver.Redis.from_url(
        client_url(client), retry=driver.retry.Retry(driver.backoff.NoBackoff(), 1)
    )
    asked = lines(client)
    asked.execute_command("CLIENT", "SETNAME", "doomed")
    (doomed,) = connected(client, "doomed")
    client.client_kill_filter(_id=doomed["id"])
    assert asked.execute_command("PING") in ("PONG", b"PONG")
    asked.close()


def client_url(client):
    given = client.connection_pool.connection_kwargs
    return f"redis://{given['host']}:{given['port']}/{given.get('db', 0)}"


@pytest.mark.parametrize("through", ["lines", "client"])
def test_many_commands_are_sent_at_once_and_errors_are_answers(asked, client, through):
    commands = [("SET", "a", 1), ("LPOP", "a"), ("GET", "a")]
    first, error, last = ask_many(asked if through == "lines" else client, commands)
    assert first in (True, "OK", b"OK")
    assert isinstance(error, driver.ResponseError)
    assert last == b"1"


def test_what_the_clients_own_pool_does_better_is_left_to_it(redis_server):
    sentinel = driver.sentinel.Sentinel([("127.0.0.1", 1)])
    pool = SentinelConnectionPool("primary", sentinel)
    assert lines(driver.Redis(connection_pool=pool)) is None
    latin = driver.Redis.from_url(redis_server.url, encoding="latin-1")
    assert lines(latin) is None


@pytest.mark.parametrize("batch", [False, True])
def test_a_server_that_became_a_replica_is_looked_for_anew(make_redis, make_proxy, batch):
    """A name, or an address, leads to another server after a failover."""
    old, new = make_redis(), make_redis()
    name = make_proxy(old.host, old.port)
    asked = lines(driver.Redis(host=name.host, port=name.port))

    def write(value):
        command = ("EVAL", "return redis.call('SET', KEYS[1], ARGV[1])", 1, "key", value)
        if not batch:
            return asked.execute_command(*command)
        (answer,) = ask_many(asked, [command])
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert write(1) in ("OK", b"OK")
    with old.client() as client:
        client.replicaof(new.host, new.port)
    name.retarget(new.host, new.port)
    with pytest.raises(driver.ResponseError, match="read only replica"):
        write(2)
    assert write(3) in ("OK", b"OK")
    with new.client() as client:
        assert client.get("key") == "3"
    asked.close()
