"""Redlock: locks on a majority of independent Redis servers."""

import contextlib
import itertools
import os
import random
import socket
import textwrap
import threading
import time
import uuid
from functools import partial

import pytest
import redis
from django.test import override_settings

from django_fencedlock import LeaseLost, lock
from django_fencedlock.backends import redlock
from django_fencedlock.backends.interface import Grant, Granted, Held, Renewal, Wait
from django_fencedlock.backends.redis import nodes as transport
from django_fencedlock.backends.redis.nodes import Nodes
from django_fencedlock.backends.redlock import KEPT, RedlockBackend
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import BackendUnavailable, StaleFence
from django_fencedlock.models import Fence
from tests.backends import REDLOCK
from tests.failing import raising
from tests.scripts import run_python
from tests.servers import Authority, Redis, ServerMissing, finding
from tests.servers.process import free_port, wait_until
from tests.services import ServiceAcceptance, on_postgres
from tests.test_backend_interface import BackendInterface, claim, grant, take
from tests.threads import at_once

#: Seconds that a busy machine may add to a time limit.
SLACK = 10.0
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
#: Nobody listens there: a port below those that the system gives to servers.
NOWHERE = "redis://127.0.0.1:1"


@pytest.fixture(scope="module")
def launched():
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Redis.launch(finding.redis(), *DURABLE)))
            for _ in range(5)
        ]


@pytest.fixture
def nodes(launched):
    """Return five nodes, which a test may kill, pause and empty."""
    for node in launched:
        if not node.process.running:
            node.start()
        node.resume()
        node.empty()
    return launched


def config_of(nodes, prefix=None, **options):
    urls = ",".join(node if isinstance(node, str) else node.url for node in nodes)
    terms = {"ttl": 30, "blocking_timeout": 10, "fence_database": "default"}
    prefix = prefix or uuid.uuid4().hex
    return AliasConfig(
        "default", REDLOCK, urls, key_prefix=prefix, options={"TIMEOUT": 2, **options}, **terms
    )


@pytest.fixture
def backend(nodes, closing):
    return closing(RedlockBackend(config_of(nodes)))


class TestInterface(BackendInterface):
    @pytest.fixture
    def make(self, nodes, closing):
        config = config_of(nodes)
        return lambda: closing(RedlockBackend(config))


def refused(backend, name="x"):
    return isinstance(backend.acquire(claim(name), Wait()), Held)


def key(backend, name="x"):
    return backend._key(name)


def wait_until_gone(backend, nodes, name="x"):
    """A slow node may carry it out later."""
    wait_until(lambda: values(backend, nodes, name) == [None] * len(nodes), "the keys to be gone")


def values(backend, nodes, name="x"):
    return [node.execute("GET", key(backend, name)) for node in nodes]


# What the answers of the nodes mean


class Answers(Nodes):
    """Five nodes; the answers of each request are given, None for a node that was silent."""

    def __init__(self, *given):
        super().__init__([f"redis://h{number}" for number in range(5)], 1.0)
        self.given, self.sent = list(given), []

    def ask(self, *command, **terms):
        self.sent.append((command, terms))
        found = zip(self.all, self.given.pop(0), strict=True)
        return {node: answer for node, answer in found if answer is not None}


@pytest.fixture
def answering(monkeypatch):
    def answer(*given):
        backend, nodes = RedlockBackend(config_of([NOWHERE] * 5)), Answers(*given)
        monkeypatch.setattr(backend, "_nodes", nodes)
        nodes.get = lambda: nodes
        return backend

    monkeypatch.setattr(redlock, "SPLIT_PAUSES", ())
    return answer


MINE = [b"o:1:who", KEPT + 1000]
OTHERS = [b"p:2:else", KEPT + 5000]
EXPIRED = [b"p:2:else", KEPT]
UNLIMITED = [b"set by other software", -1]
FREE = [None, -2]
NOTHING = [None] * 5


@pytest.mark.parametrize(
    ("votes", "answer"),
    [
        ([1, 1, 1, 1, 1], Renewal.KEPT),
        ([1, 1, 1, None, None], Renewal.KEPT),
        ([1, 1, 1, 0, 0], Renewal.KEPT),
        ([0, 0, 0, 1, 1], Renewal.LOST),
        ([0, 0, 0, None, None], Renewal.LOST),
        ([1, 1, 0, 0, None], Renewal.UNKNOWN),
        ([1, 1, None, None, None], Renewal.UNKNOWN),
        ([0, 0, None, None, None], Renewal.UNKNOWN),
        (NOTHING, Renewal.UNKNOWN),
    ],
)
def test_a_majority_decides_on_a_lease(answering, votes, answer):
    lists = [None if vote is None else [vote] for vote in votes]
    held = Grant("x", "o", 30)
    assert answering(lists).renew([held]) == [answer]
    for ask in ("release", "verify"):
        backend = answering(lists)
        if answer is Renewal.UNKNOWN:
            with pytest.raises(BackendUnavailable, match="3 must agree"):
                getattr(backend, ask)(held)
        else:
            assert getattr(backend, ask)(held) == (answer is Renewal.KEPT)


def test_each_lease_of_a_batch_has_votes_of_its_own(answering):
    votes = [[1, 0, 1], [1, 0, 0], [1, 1, 1], None, [0, 0, 0]]
    kept, lost, unknown = Renewal.KEPT, Renewal.LOST, Renewal.UNKNOWN
    leases = [Grant(name, "o", 30) for name in "abc"]
    assert answering(votes).renew(leases) == [kept, lost, unknown]


@pytest.mark.parametrize(
    ("answers", "owner"),
    [
        ([1, 1, 1, OTHERS, OTHERS], "granted"),
        ([1, 1, 1, None, None], "granted"),
        ([1, 1, OTHERS, OTHERS, OTHERS], "p"),
        ([1, None, None, OTHERS, OTHERS], "p"),
        ([1, 1, OTHERS, None, None], "p"),
        ([1, 1, OTHERS, OTHERS, MINE], ""),
        ([UNLIMITED] * 5, ""),
        ([1, 1, None, None, None], "unavailable"),
        (NOTHING, "unavailable"),
    ],
)
def test_a_claim_is_granted_by_a_majority(answering, answers, owner):
    backend = answering(answers, NOTHING)
    if owner == "unavailable":
        with pytest.raises(BackendUnavailable, match="of 5 nodes answered"):
            backend.acquire(claim("x"), Wait())
    else:
        answer = backend.acquire(claim("x"), Wait())
        assert isinstance(answer, Granted) == (owner == "granted")
        assert isinstance(answer, Granted) or answer.owner == owner
    undone = [terms for command, terms in backend._nodes.sent if command[1] == redlock.GIVE]
    # At once, also on the nodes that may carry it out yet; it waits for those that did.
    is_open = owner != "granted" and (1 in answers or None in answers)
    assert undone == [{"needed": answers.count(1), "undoes": True}] * is_open


def test_a_grant_that_came_too_late_is_given_back(answering, monkeypatch):
    now = itertools.count(1000.0, 0.99)
    monkeypatch.setattr(redlock, "clock", lambda: next(now))
    backend = answering([1] * 5, NOTHING)
    assert backend.acquire(claim("x", ttl=1), Wait()) == Held()
    assert not backend._nodes.given


@pytest.mark.parametrize(
    ("seen", "owner", "seconds"),
    [
        ([OTHERS] * 5, "p", 5),
        ([OTHERS, OTHERS, OTHERS, FREE, FREE], "p", 5),
        ([OTHERS, OTHERS, None, FREE, FREE], "p", 5),
        ([OTHERS, OTHERS, FREE, FREE, FREE], None, 0),
        ([OTHERS, MINE, OTHERS, MINE, OTHERS], "p", 5),
        ([EXPIRED] * 5, None, 0),
        ([FREE] * 5, None, 0),
        ([UNLIMITED] * 5, "", None),
    ],
)
def test_the_holder_is_who_keeps_others_out(answering, seen, owner, seconds):
    # A node's answer is a list of one.
    backend = answering([each and [each] for each in seen])
    found = backend.holders(["x"])
    assert [(each.owner, each.expires_in) for each in found.values()] == (
        [] if owner is None else [(owner, seconds and pytest.approx(seconds, rel=0.02))]
    )


def test_the_others_have_twice_the_time_of_a_majority(monkeypatch):
    monkeypatch.setattr(transport, "clock", lambda: 1003.0)
    cut = partial(transport._cut, 1005.0, 1002.5, needed=3)
    assert cut(2, 3) == 1005
    assert cut(3, 2) == 1004
    assert cut(0, 2) == 1004, "no majority can come any more"
    assert transport._cut(1005.0, 1003.0, 3, 2, 3) == 1003 + transport.GRACE


# Several claims at once


def test_one_of_several_claims_at_once_is_granted(nodes, closing):
    """Without repeated split votes, a third of such rounds grants none."""
    config = config_of(nodes)
    backends = [closing(RedlockBackend(config)) for _ in range(4)]
    for each in backends:
        each.release(take(each, claim("warm")))
    rounds = []
    for number in range(30):
        sent = [claim(f"x{number}") for _ in backends]
        tries = [partial(b.acquire, c, Wait()) for b, c in zip(backends, sent, strict=True)]
        rounds.append(sum(isinstance(answer, Granted) for answer in at_once(tries)))
    assert rounds == [1] * 30


def test_nothing_overlaps_or_stays(backend, nodes):
    inside, faults, grants = [], [], itertools.count()

    def run(seed):
        rng = random.Random(seed)
        while clock() < end:
            sent = claim("x", ttl=5)
            answer = backend.acquire(sent, Wait())
            if isinstance(answer, Held):
                time.sleep(rng.uniform(0, 0.005))
                continue
            inside.append(seed)
            if len(inside) > 1:
                faults.append("two inside")
            next(grants)
            inside.pop()
            if not backend.release(grant(sent, answer)):
                faults.append("lost")

    end = clock() + 1.5
    at_once([partial(run, seed) for seed in range(8)])
    assert faults == []
    assert next(grants) > 5
    wait_until_gone(backend, nodes)


def test_an_expired_lock_is_its_owners_unless_another_came(backend, nodes):
    # A grant that takes longer than the ttl is none.
    former = take(backend, claim("x", ttl=2))
    time.sleep(2.1)
    assert not backend.holders(["x"])
    assert backend.verify(former)
    assert backend.renew([former._replace(ttl=30)]) == [Renewal.KEPT]
    assert refused(backend)
    # A forced release, of which two nodes didn't hear.
    for node in nodes[:3]:
        node.execute("DEL", key(backend))
    assert backend.renew([former]) == [Renewal.LOST]
    assert values(backend, nodes)[:3] == [None] * 3


def test_asking_extends_nothing(backend, nodes):
    held = take(backend, claim("x", ttl=5))
    left = max(node.execute("PTTL", key(backend)) for node in nodes)
    time.sleep(0.05)
    assert backend.verify(held)
    assert max(node.execute("PTTL", key(backend)) for node in nodes) < left - 40


def test_a_node_whose_clock_is_fast_frees_no_lock_of_a_lease(backend, nodes):
    before, held = clock(), take(backend, claim("x", ttl=100))
    for ask in (lambda: None, partial(backend.renew, [held])):
        ask()
        shortest = min(node.execute("PTTL", key(backend)) for node in nodes) - KEPT
        # A clock that is 1 % fast has counted that much when the lease ends.
        assert shortest / (1 + redlock.DRIFT) > (100 - (clock() - before)) * 1000
        assert 90 < backend.holders(["x"])["x"].expires_in <= 100


# Nodes that fail


@pytest.fixture
def patient(nodes, closing):
    """Return a backend whose requests may take much longer than any of them should."""
    return closing(RedlockBackend(config_of(nodes, TIMEOUT=3 * SLACK)))


@pytest.fixture
def gaps(patient):
    """Return a function that locks for some seconds, and returns how long each lock took."""
    backend = patient

    def work(seconds):
        moments, end = [clock()], clock() + seconds
        while moments[-1] < end:
            backend.release(take(backend, claim(f"x{len(moments)}")))
            moments.append(clock())
        return sorted(after - before for before, after in itertools.pairwise(moments))

    backend.release(take(backend, claim("warm")))
    return work


def test_one_node_killed_and_one_paused_delay_no_lock(gaps, nodes):
    nodes[0].kill()
    nodes[1].pause()
    found = gaps(2.5)
    # The limit of a request is 30 s. On a quiet machine the longest took 0.06 s, five times or so,
    # and four of five took less than `GRACE`.
    assert found[-1] < SLACK


def test_a_first_request_is_not_delayed_either(nodes, patient):
    nodes[0].kill()
    nodes[1].pause()
    began = clock()
    patient.release(take(patient, claim("x")))
    assert clock() - began < SLACK


@pytest.fixture
def deaf():
    """Return the URL of a server that accepts no connection, and refuses none."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(server.getsockname())
        yield f"redis://127.0.0.1:{server.getsockname()[1]}"


def test_a_node_that_accepts_no_connection_delays_no_lock(nodes, deaf, closing):
    backend = closing(RedlockBackend(config_of([deaf, *nodes[:2]], TIMEOUT=3 * SLACK)))
    began = clock()
    held = take(backend, claim("x"))
    assert backend.renew([held]) == [Renewal.KEPT]
    assert backend.release(held)
    assert clock() - began < SLACK


def test_a_node_that_comes_back_is_asked_again(backend, nodes, monkeypatch):
    monkeypatch.setattr(transport, "MUTE", 0.05)
    take(backend, claim("warm"))
    nodes[0].kill()
    backend.release(take(backend, claim("x")))
    nodes[0].start()
    nodes[0].resume()

    def is_asked():
        name = uuid.uuid4().hex
        take(backend, claim(name))
        return values(backend, nodes[:1], name)[0]

    wait_until(is_asked, "the node to get a lock")


def test_one_request_at_a_time_asks_whether_a_node_is_back(backend, nodes):
    take(backend, claim("warm"))
    nodes[0].pause()
    take(backend, claim("x"))
    asked, (paused, *_) = [], backend._nodes.get().all
    paused.is_mute_until = clock()
    paused.connect = lambda done: asked.append(done)
    at_once([partial(take, backend, claim(f"x{number}")) for number in range(4)])
    assert len(asked) == 1


def test_silent_nodes_that_are_asked_again_replace_none_that_answers(patient, nodes):
    backend = patient
    taken = take(backend, claim("warm"))
    nodes[0].kill()
    nodes[1].pause()
    killed, paused, slow, *_ = backend._nodes.get().all
    for node in (killed, paused):
        node.mute("it was silent, a second ago")
        node.is_mute_until = clock()
    # Its disk took a moment.
    slow.mute("no answer in time")
    began = clock()
    assert backend.renew([taken]) == [Renewal.KEPT]
    # Half of the limit of a request is for connections.
    assert clock() - began < SLACK


def test_a_node_restarted_empty_frees_no_lock_that_others_have(nodes, closing):
    config = config_of(nodes[:3])
    backend, other = (closing(RedlockBackend(config)) for _ in range(2))
    held = take(backend, claim("x"))
    nodes[0].execute("FLUSHALL")
    assert refused(other)
    assert backend.verify(held)
    assert backend.renew([held]) == [Renewal.KEPT]
    assert values(backend, nodes[:1]) == [None], "a renewal sets no key"


def test_without_a_majority_the_error_says_who_failed_and_why(nodes, closing, monkeypatch):
    backend = closing(RedlockBackend(config_of([*nodes[:2], NOWHERE], TIMEOUT=2)))
    held, other = (take(backend, claim(name)) for name in ("x", "other"))
    nodes[0].pause()
    with pytest.raises(BackendUnavailable, match="no answer in time"):
        take(backend, claim("y"))
    for ask in (
        lambda: take(backend, claim("y")),
        lambda: backend.release(other),
        lambda: backend.verify(held),
        lambda: backend.holders(["x"]),
    ):
        began = clock()
        with pytest.raises(BackendUnavailable) as caught:
            ask()
        assert clock() - began < 2 + SLACK
        text = str(caught.value)
        assert "1 of 3 nodes answered, 2 must agree" in text
        assert "Connection refused: 127.0.0.1:1" in text
        assert f": 127.0.0.1:{nodes[0].port}" in text
        assert len(text) < 300
    # The first part of a batch failed: the others aren't tried.
    asked, ask = [], backend._nodes.get().ask
    monkeypatch.setattr(
        backend._nodes.get(), "ask", lambda *args, **terms: asked.append(1) or ask(*args, **terms)
    )
    assert backend.renew([held] * 600) == [Renewal.UNKNOWN] * 600
    assert len(asked) == 1
    nodes[0].resume()
    wait_until(lambda: backend.renew([held]) == [Renewal.KEPT], "a majority")


def test_a_wrong_password_is_told_and_hidden(nodes, closing):
    for node in nodes[:2]:
        node.execute("CONFIG", "SET", "requirepass", "s3cret")
    try:
        wrong = [node.url.replace("//", "//:n0tthis@") for node in nodes[:3]]
        backend = closing(RedlockBackend(config_of(wrong)))
        with pytest.raises(BackendUnavailable, match="URL is wrong or missing: 127") as caught:
            take(backend, claim("x"))
        assert "n0tthis" not in str(caught.value)
        assert "E013" in {problem.id for problem in backend.check()}
        right = [node.url.replace("//", "//:s3cret@") for node in nodes[:2]]
        mixed = closing(RedlockBackend(config_of([*right, wrong[2]])))
        mixed.release(take(mixed, claim("x")))
    finally:
        for node in nodes[:2]:
            with redis.Redis(port=node.port, password="s3cret") as client:
                client.config_set("requirepass", "")


def test_tls_and_a_password_for_each_node(make_redis, closing):
    authority, urls = Authority(), []
    certificate = authority.issue("server")
    for number in range(3):
        port = free_port()
        options = {"tls-port": port, "tls-auth-clients": "no"}
        options |= {"tls-cert-file": certificate.certificate, "tls-key-file": certificate.key}
        options["tls-ca-cert-file"] = authority.certificate
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        try:
            node = make_redis(*words)
        except RuntimeError as exc:
            if "tls-port" not in str(exc):
                raise
            pytest.skip(str(ServerMissing("Redis with TLS", "apt-get install redis-server")))
        node.execute("CONFIG", "SET", "requirepass", f"secret{number}")
        urls.append(f"rediss://:secret{number}@127.0.0.1:{port}?ssl_ca_certs=")
    trusting = closing(RedlockBackend(config_of([f"{url}{authority.certificate}" for url in urls])))
    for _ in range(3):
        trusting.release(take(trusting, claim("x")))
    # What TLS sends besides answers doesn't close a connection.
    assert sum(len(node.idle) for node in trusting._nodes.get().all) == 3
    foreign = Authority().certificate
    wary = closing(RedlockBackend(config_of([f"{url}{foreign}" for url in urls])))
    with pytest.raises(BackendUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        take(wary, claim("x"))


def test_an_error_of_a_node_is_no_vote(nodes, backend):
    for node in nodes[:2]:
        node.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        held = take(backend, claim("x"))
        assert values(backend, nodes)[:2] == [None] * 2
        assert backend.release(held)
        nodes[2].execute("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(BackendUnavailable, match=r"2 of 5 nodes answered.*'maxmemory'\.: 127"):
            take(backend, claim("x"))
        wait_until_gone(backend, nodes)
    finally:
        for node in nodes[:3]:
            node.execute("CONFIG", "SET", "maxmemory", "0")


# Networks that fail


@pytest.fixture
def proxied(nodes, make_proxy, closing):
    proxies = [make_proxy(node.host, node.port) for node in nodes[:3]]
    urls = [f"redis://{proxy.host}:{proxy.port}" for proxy in proxies]
    config = config_of(urls, TIMEOUT=5)
    backend = closing(RedlockBackend(config))
    backend.release(take(backend, claim("warm")))
    return backend, proxies


def test_a_node_whose_replies_are_lost_or_late_is_not_waited_for(proxied):
    backend, (first, *_) = proxied
    for fault in (first.drop_replies, partial(first.delay, to_client=4), first.black_hole):
        fault()
        began = clock()
        held = take(backend, claim("x"))
        assert backend.renew([held]) == [Renewal.KEPT]
        assert backend.release(held)
        assert clock() - began < 3.5
        first.pass_through()
        wait_until(lambda: len(backend.holders(["x"])) == 0, "the lock to be free")
        backend._nodes.get().all[0].hear()


@pytest.fixture
def overtaken(proxied, nodes, closing):
    """Return a function that repeats a claim while a request to a node is late."""
    backend, (proxy, *_) = proxied
    other = closing(RedlockBackend(config_of(nodes[:3], backend.config.key_prefix)))

    def repeat(sent):
        proxy.delay()
        nodes[1].kill()
        # Another thread has this connection now.
        late = backend._nodes.get().all[0]
        line = late.idle.pop()
        # On a busy machine it was silent for so long that it is left out: no majority.
        late.hear()
        mine = take(backend, sent)
        wait_until(lambda: line.is_usable() and not line.open, "the answers")
        assert all(values(backend, [nodes[0], nodes[2]]))
        nodes[1].start()
        assert refused(other)
        assert backend.verify(mine)
        line.close()

    return backend, other, proxy, repeat


@pytest.mark.parametrize("late", [1, 2], ids=["its end", "all of it"])
def test_a_refused_try_that_comes_late_takes_nothing_from_the_next(
    overtaken, nodes, monkeypatch, late
):
    backend, other, proxy, repeat = overtaken
    former, sent = take(other, claim("x")), claim("x")
    nodes[0].execute("DEL", key(backend))
    asked, ask = backend._nodes.get(), backend._nodes.get().ask

    def ask_late(*command, **terms):
        proxy.delay(to_server=0.5 if terms or late == 2 else 0)
        return ask(*command, **terms)

    monkeypatch.setattr(asked, "ask", ask_late)
    assert isinstance(backend.acquire(sent, Wait()), Held)
    monkeypatch.undo()
    other.release(former)
    repeat(sent)


def test_a_release_that_comes_late_takes_nothing_from_the_owners_next_claim(overtaken):
    backend, _, proxy, repeat = overtaken
    sent = claim("x")
    taken = take(backend, sent)
    proxy.delay(to_server=0.5)
    # Its grant couldn't be recorded: the core releases it, and repeats the claim.
    assert backend.release(taken)
    repeat(sent)


def test_a_claim_whose_answers_were_lost_leaves_nothing(proxied, nodes):
    backend, proxies = proxied
    for proxy in proxies[:2]:
        proxy.drop_replies()
    sent = claim("x")
    with pytest.raises(BackendUnavailable):
        take(backend, sent)
    # Each node carries it out, and then its release.
    wait_until_gone(backend, nodes[:3])
    for proxy in proxies[:2]:
        proxy.pass_through()
    again = take(backend, sent)
    assert backend.verify(again)
    assert backend.release(again)


def test_a_paused_node_carries_out_its_requests_in_their_order(backend, nodes):
    """Otherwise two such nodes of three would refuse all claims for a ttl."""
    for name in "xyz":
        backend.release(take(backend, claim(name)))
    nodes[0].pause()
    held = take(backend, claim("x"))
    backend.release(take(backend, claim("y")))
    time.sleep(transport.SILENCE)
    take(backend, claim("z"))
    assert backend._nodes.get().all[0].is_mute_until > clock()
    backend.release(held)
    nodes[0].resume()
    for name in "xy":
        wait_until_gone(backend, nodes[:1], name)


# Connections


def test_idle_connections_that_the_servers_closed_are_replaced(backend, nodes):
    take(backend, claim("warm"))
    for node in nodes:
        node.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    lines = [line for node in backend._nodes.get().all for line in node.idle]
    wait_until(lambda: not any(line.is_usable() for line in lines), "the end of the connections")
    assert backend.release(take(backend, claim("x")))


def test_the_files_of_a_connection_are_found_in_each_redis_py(nodes):
    """In redis-py 5.2, 6.4, 7.1 and 8.1 the attribute is called `_sock`."""
    connection = redis.connection.Connection(port=nodes[0].port)
    connection.connect()
    line = transport.Line(connection)
    number = line.number
    assert os.path.samestat(os.fstat(number), os.fstat(connection._sock.fileno()))
    assert line.is_usable()
    connection.send_command("PING")
    wait_until(lambda: not line.is_usable(), "an answer that no request has")
    assert connection.read_response(disable_decoding=True) == b"PONG"
    connection.disconnect()


def test_an_interrupted_request_leaves_no_answer_to_the_next(backend, monkeypatch):
    held = take(backend, claim("x"))
    (_, second, *_) = backend._nodes.get().all
    connection = second.idle[0].connection
    monkeypatch.setattr(connection, "read_response", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        backend.verify(held)
    monkeypatch.undo()
    for _ in range(5):
        assert backend.verify(held)
        assert set(backend.holders(["x", "y"])) == {"x"}
    assert backend.release(held)


def test_without_a_thread_it_connects_by_itself(backend, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    held = take(backend, claim("x"))
    assert backend.release(held)


SET_UP = """
import sys
import django; django.setup()
from tests.test_redlock_backend import *
backend = RedlockBackend(config_of(sys.argv[1].split(","), prefix="process"))
"""


@pytest.fixture
def run_process(nodes, child_environment):
    def run(text, before=""):
        code = before + SET_UP + textwrap.dedent(text)
        urls = ",".join(node.url for node in nodes)
        return run_python(urls, code=code, env=child_environment()).stdout

    return run


def test_a_fork_leaves_the_parents_connections_alone(run_process):
    told = run_process(
        """
        held = take(backend, claim("x"))
        before = [id(node.idle[0]) for node in backend._nodes.get().all]
        if os.fork() == 0:
            assert refused(backend)
            backend.close()
            sys.exit()
        assert os.wait()[1] == 0
        assert backend.release(held)
        print(before == [id(node.idle[0]) for node in backend._nodes.get().all], flush=True)
        """
    )
    assert told == "True\n"


def test_greenlets_go_on_while_one_waits_for_a_node(run_process, nodes):
    pytest.importorskip("gevent")
    nodes[0].pause()
    told = run_process(
        """
        import gevent
        from django_fencedlock.core import runtime

        def work(number):
            for _ in range(20):
                backend.release(take(backend, claim(f"x{number}")))

        gevent.joinall([gevent.spawn(work, number) for number in range(5)], raise_error=True)
        done = []
        runtime.start(lambda: done.append(work("of a real thread")))
        while not done:
            gevent.sleep(0.01)
        print("done", flush=True)
        """,
        before="from gevent import monkey; monkey.patch_all()\n",
    )
    assert told == "done\n"


# With the fence


def settings_of(nodes, **terms):
    urls = [node.url for node in nodes]
    terms = {"BACKEND": REDLOCK, "LOCATION": urls, "OPTIONS": {"TIMEOUT": 2}, **terms}
    return override_settings(FENCEDLOCK={"default": {"KEY_PREFIX": uuid.uuid4().hex, **terms}})


@pytest.fixture
def on(nodes):
    with settings_of(nodes[:3]):
        yield


@pytest.mark.django_db(transaction=True)
def test_nodes_restarted_empty_may_grant_twice_and_the_fence_decides(on, nodes):
    former = lock("x", ttl=30).acquire()
    for node in nodes[:2]:
        node.execute("FLUSHALL")
    newer = at_once([lambda: lock("x", ttl=30).acquire(blocking=False)])[0]
    assert newer.token == former.token + 1
    with pytest.raises((StaleFence, LeaseLost)), former.atomic():
        Fence.objects.create(name="written late", token=1, owner="o")
    assert not Fence.objects.filter(name="written late").exists()
    with pytest.raises(LeaseLost):
        former.renew()
    assert former.release() is False
    assert newer.verify()


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_an_acquire_is_two_requests_and_three_statements(nodes, postgres, keep_connections):
    with settings_of(nodes[:3], FENCE_DATABASE="postgres"):
        lock("warm").acquire().release()
        with postgres.statements() as seen, nodes[0].monitor() as sent:
            lease = lock("x").acquire()
        assert [each.name for each in sent if not each.lua] == ["EVAL", "EVAL"]
        ours = [text for text in seen.elements() if "django_fencedlock" in text]
        # The registry's row and the fence are read, then the grant is recorded.
        assert len(ours) == 3, seen
        with nodes[0].monitor() as sent:
            lease.release()
        assert [each.name for each in sent if not each.lua] == ["EVAL"]
        with nodes[0].monitor() as sent, postgres.statements() as seen:
            lock("y", fenced=False).acquire().release()
        assert [each.name for each in sent if not each.lua] == ["EVAL", "EVAL"]
        assert not [text for text in seen if "django_fencedlock" in text]


# Settings and checks


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        (["redis://a", "redis://b", "redis://c"], []),
        (["redis://a", "redis://b"], ["E054"]),
        ([], ["E054"]),
        (["redis://a", "redis://b", "redis://a"], ["E054"]),
        (["redis://a", "redis://b", "redis://:secret@a:6379/1"], ["E054"]),
        (["unix:///a", "unix:///b", "unix:///a?db=1"], ["E054"]),
        (["redis://a:1", "redis://a:2", "redis://a:3"], []),
        (["redis://a", "redis://b", "redis://c", "redis://d"], ["W054"]),
        (["redis://a", "redis://b", "http://c"], ["E007"]),
        (["redis://a", "redis://b", "redis+sentinel://c/service"], ["E007"]),
    ],
)
def test_problems_of_the_settings(urls, expected):
    assert [each.id for each in RedlockBackend.problems(config_of(urls))] == expected


def test_the_remedy_for_a_wrong_url_names_the_forms_that_redlock_accepts():
    urls = ["redis://a", "redis://b", "http://c"]
    (problem,) = RedlockBackend.problems(config_of(urls))
    assert "sentinel" not in str(problem)
    assert len(problem.hint) < 200


def test_problems_hide_passwords_and_stay_short():
    urls = ["redis://:p@ss/w0rd@h", "redis://:s3cret@h", "redis://:s3cret@h"]
    texts = [str(each) for each in RedlockBackend.problems(config_of(urls))]
    assert len(texts) == 2
    assert not any(secret in "".join(texts) for secret in ("w0rd", "s3cret"))


def ids(backend):
    return {each.id for each in backend.check()} - {""}


def test_a_healthy_service_has_no_findings(backend):
    assert ids(backend) == set()


def test_nodes_that_forget_are_noted(backend, nodes):
    with nodes[0].configured(appendfsync="everysec"):
        (found,) = [each for each in backend.check() if each.id]
    assert found.id == "I054"
    assert f"127.0.0.1:{nodes[0].port}." in found.message


def test_the_same_server_listed_twice_is_found(nodes, closing):
    again = nodes[0].url.replace("127.0.0.1", "localhost")
    assert ids(closing(RedlockBackend(config_of([*nodes[:2], again])))) == {"E054"}


def test_a_replica_of_another_node_is_found(nodes, make_redis, closing):
    replica = make_redis(*DURABLE, replica_of=nodes[0])
    assert ids(closing(RedlockBackend(config_of([*nodes[:2], replica])))) >= {"E054", "W008"}


def test_a_node_that_drops_keys_is_found(backend, nodes):
    with nodes[0].configured(maxmemory="1gb", maxmemory_policy="allkeys-lru"):
        assert ids(backend) == {"W002"}


def test_nodes_that_do_not_answer_are_found(nodes, closing):
    few = closing(RedlockBackend(config_of([*nodes[:2], NOWHERE])))
    (found,) = [each for each in few.check() if each.id]
    assert found.id == "W055"
    assert "127.0.0.1:1" in found.message
    none = closing(RedlockBackend(config_of([nodes[0], NOWHERE, NOWHERE])))
    assert "E013" in ids(none)


def test_a_user_that_may_not_ask_is_found(nodes, closing):
    rights = ("on", "nopass", "~*", "+@all", "-info")
    nodes[0].execute("ACL", "SETUSER", "worker", *rights)
    limited = nodes[0].url.replace("//", "//worker:x@")
    assert ids(closing(RedlockBackend(config_of([limited, *nodes[1:3]])))) == {"W055"}


@on_postgres
class TestAcceptance(ServiceAcceptance):
    backend = REDLOCK
    # Nodes that forget are above, and in tests/test_contract.py.
    test_a_server_that_starts_empty = None

    def location(self, *addresses):
        return [f"redis://{each.host}:{each.port}" for each in addresses]

    @pytest.fixture
    def servers(self, shared_redlock):
        return shared_redlock

    @pytest.fixture
    def cluster(self, make_redis):
        return [make_redis(*DURABLE) for _ in range(3)]

    def leader(self, nodes):
        return nodes[0]
