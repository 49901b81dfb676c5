"""The ZooKeeper backend on real servers, and its pure parts."""

import contextlib
import importlib.util
import itertools
import socket
import time
import uuid
from functools import partial

import pytest
from kazoo.exceptions import NoAuthError

from django_fencedlock.backends.interface import Grant, Granted, Renewal, Wait
from django_fencedlock.backends.zookeeper import ZooKeeperBackend
from django_fencedlock.backends.zookeeper_nodes import is_reader, owner_of, queue_of, write_node
from django_fencedlock.conf import AliasConfig
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.test.processes import wait_until
from tests.backends import ZOOKEEPER
from tests.scripts import run_python
from tests.servers import Authority
from tests.servers.process import free_port
from tests.services import ServiceAcceptance, on_postgres
from tests.test_backend_interface import BackendInterface, claim, grant, reader, take
from tests.test_queued import NEAREST, owners_ahead
from tests.threads import at_once, beside

#: Seconds that a busy machine may add to a time limit.
SLACK = 10.0


def config_of(location="zk1", *, prefix=None, ttl=5, **options):
    terms = {"ttl": ttl, "blocking_timeout": 10, "fence_database": "default", "options": options}
    prefix = uuid.uuid4().hex if prefix is None else prefix
    return AliasConfig("default", ZOOKEEPER, location, key_prefix=prefix, **terms)


@pytest.fixture
def make():
    """Return a function that makes a backend for a LOCATION."""
    made = []

    def make(location, **terms):
        made.append(ZooKeeperBackend(config_of(location, **terms)))
        return made[-1]

    yield make
    for each in made:
        for session in [*each._open]:
            each.end(session)


@pytest.fixture
def backend(shared_zookeeper, make):
    return make(shared_zookeeper.hosts)


@pytest.fixture
def proxied(shared_zookeeper, make_proxy, make):
    """Return a backend behind a proxy, another one beside it, and the proxy."""
    proxy = make_proxy(shared_zookeeper.host, shared_zookeeper.port)
    prefix = uuid.uuid4().hex
    behind = make(f"{proxy.host}:{proxy.port}", prefix=prefix, TIMEOUT=3)
    return behind, make(shared_zookeeper.hosts, prefix=prefix), proxy


def nodes_of(backend, name):
    return backend._queues(backend._any_session(), [name])[name]


def trials(backend, ttl=5.0):
    """Acquire and release, which opens the session."""
    backend.release(take(backend, claim("warm", ttl=ttl)))


class TestInterface(BackendInterface):
    @pytest.fixture
    def make(self, shared_zookeeper, make):
        return partial(make, shared_zookeeper.hosts, prefix=uuid.uuid4().hex)


# Names and numbers of nodes


def test_nodes_are_in_order_when_the_number_wraps():
    numbers = [*range(2**31 - 3, 2**31), *range(-(2**31), -(2**31) + 3)]
    nodes = [f"{write_node('x', f'o{count}')}{each:010d}" for count, each in enumerate(numbers)]
    for some in itertools.permutations(nodes, 3):
        assert queue_of("x", some) == sorted(some, key=nodes.index)


@pytest.mark.parametrize("name", ["x", "a/b", "..", "a!b_1", "%s ' \" \\", "\N{SNOWMAN}" * 200])
@pytest.mark.parametrize("owner", ["0123", "a_b", "a!b/c-1"])
@pytest.mark.parametrize("number", ["0000000012", "-2147483648"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_node_names_its_lock_its_kind_and_its_owner(name, owner, number, shared):
    node = f"{write_node(name, owner, shared)}{number}"
    assert "/" not in node
    assert owner_of(node) == owner
    assert is_reader(node) is shared
    others = [f"{write_node(other, owner)}0000000001" for other in (f"{name}!", f"{name}.", "")]
    assert queue_of(name, [node, *others]) == [node]


def test_a_reader_waits_for_the_nearest_writer_and_a_writer_for_the_nearest_entry(backend):
    assert owners_ahead(backend, "x", owner_of) == NEAREST


@pytest.mark.parametrize("alone", [True, False])
def test_a_reader_whose_answer_is_lost_has_one_node(proxied, alone):
    backend, other, proxy = proxied
    trials(backend)
    first, sent = take(other, reader("x", ttl=5)), reader("x", ttl=5)
    proxy.cut_after(to_client=1)
    answer = backend.acquire(sent, Wait(0 if alone else 1))
    assert isinstance(answer, Granted)
    assert [owner_of(each) for each in nodes_of(other, "x")] == [first.owner, sent.owner]
    assert backend.verify(grant(sent, answer))


def test_a_reader_that_is_tried_again_enters_again_beside_others(backend):
    """It was released by force."""
    take(backend, reader("x", ttl=5))
    taken = take(backend, sent := reader("x", ttl=5))
    (session,) = backend._open
    assert session.delete(backend._nodes[sent.owner].path)
    again = take(backend, sent)
    assert again.handle.number > taken.handle.number


def test_a_reader_whose_first_try_failed_has_one_node(backend):
    """No answer came in time, so the backend doesn't know the node that it made."""
    take(backend, reader("x", ttl=5))
    taken = take(backend, sent := reader("x", ttl=5))
    del backend._nodes[sent.owner]
    assert take(backend, sent).handle.number == taken.handle.number
    assert len(nodes_of(backend, "x")) == 2


def test_another_reader_costs_a_reader_no_round_trip(backend, monkeypatch):
    taken, (session,) = [take(backend, reader("x", ttl=5))], backend._open
    sent, really = [], session.send
    monkeypatch.setattr(session, "send", lambda *a, **k: sent.append(a) or really(*a, **k))
    # A try that doesn't wait lists the nodes first.
    taken.append(take(backend, reader("x", ttl=5)))
    assert len(sent) == 2
    sent.clear()
    third = reader("x", ttl=5)
    assert isinstance(backend.acquire(third, Wait(1)), Granted)
    assert len(sent) == 1


# Settings


@pytest.mark.parametrize(
    "location", ["zk1", "zk1:2181,zk2:2182", "zk1,zk2:2181/a/b", "[::1]:2181,zk2", "10.0.0.1"]
)
def test_a_location_has_hosts_and_a_path(location):
    assert list(ZooKeeperBackend.problems(config_of(location))) == []


@pytest.mark.parametrize(
    ("location", "found"),
    [
        ("", "it is empty"),
        ("zk1:port", "port"),
        ("zk1,,zk2", "bad hostname"),
        ("zk1/path,zk2", "a path comes last"),
        ("zookeeper://zk1", "it is a URL"),
        ("ada:secret@zk1", "USERNAME and PASSWORD"),
    ],
)
def test_a_wrong_location_is_a_problem(location, found):
    (problem,) = ZooKeeperBackend.problems(config_of(location))
    assert problem.id == "E007"
    assert found in problem.message
    assert "secret" not in str(problem)


@pytest.mark.parametrize(
    ("options", "expected", "found"),
    [
        ({"USERNAME": "ada"}, "E008", "USERNAME or PASSWORD alone"),
        ({"USERNAME": "ada", "PASSWORD": 1234}, "E008", "['PASSWORD'] isn't a str"),
        ({"CA": "/missing.pem"}, "E008", "can't be used"),
        ({"USER": "ada"}, "E008", "unknown key"),
        ({"TIMEOUT": 0}, "E003", "TIMEOUT"),
    ],
)
def test_a_wrong_option_is_a_problem(options, expected, found):
    (problem,) = ZooKeeperBackend.problems(config_of(**options))
    assert problem.id == expected
    assert found in problem.message


def test_a_login_by_sasl_needs_a_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = ZooKeeperBackend.problems(config_of(SASL="GSSAPI"))
    assert problem.id == "E005"
    assert "pip install pure-sasl" in problem.hint


def test_without_kazoo_the_error_says_what_to_install():
    code = """
        import sys
        sys.modules["kazoo"] = None
        try:
            import django_fencedlock.backends.zookeeper
        except Exception as exc:
            print(type(exc).__name__, exc)
    """
    told = run_python(code=code, DJANGO_SETTINGS_MODULE="tests.settings").stdout
    assert told.strip() == (
        "ImproperlyConfigured The ZooKeeper backend needs kazoo. "
        "Run: pip install 'django-fencedlock[zookeeper]'"
    )


# Where the nodes are


def test_two_prefixes_share_no_lock(shared_zookeeper, make):
    backends = [make(shared_zookeeper.hosts, prefix=each) for each in ("", "a", "a/", "a%2F")]
    taken = [take(each, claim("prefixes", ttl=5)) for each in backends]
    for each, held in zip(backends, taken, strict=True):
        assert each.release(held)


def test_a_path_that_does_not_exist_is_made_once(shared_zookeeper, make):
    path = f"/team/{uuid.uuid4().hex}"
    for _ in range(2):
        trials(make(shared_zookeeper.hosts + path, prefix="app/"))
    with started(shared_zookeeper) as client:
        assert client.get_children(path) == ["app%2Ffencedlock"]
        assert len(client.get_children(f"{path}/app%2Ffencedlock")) == 64


def test_parents_that_were_deleted_are_made_again(shared_zookeeper, make):
    path = f"/{uuid.uuid4().hex}"
    backend = make(shared_zookeeper.hosts + path)
    trials(backend)
    with started(shared_zookeeper) as client:
        client.delete(path, recursive=True)
    trials(backend)
    assert backend.holders(["x"]) == {}


@contextlib.contextmanager
def started(server):
    client = server.client()
    client.start(timeout=SLACK)
    try:
        yield client
    finally:
        client.stop()
        client.close()


# Sessions


def test_the_token_is_the_change_that_made_the_node(backend):
    taken = take(backend, claim("x", ttl=5))
    (node,) = nodes_of(backend, "x")
    (answer,) = backend._any_session().get(f"{backend._parent('x')}/{node}")
    assert taken.token == answer[1].czxid


def test_a_ttl_that_the_server_would_cut_is_refused(make, make_zookeeper):
    server = make_zookeeper(tick=500)
    backend = make(server.hosts, ttl=30)
    with pytest.raises(BackendUnavailable, match=r"end a session after 10 s, but the ttl is 11 s"):
        backend.acquire(claim("x", ttl=11), Wait())
    trials(backend, ttl=10)
    problems = [each for each in backend.check() if each.id]
    assert [each.id for each in problems] == ["E052"]
    assert "but the ttl is 30 s. Use a shorter ttl, or raise maxSessionTimeout" in str(problems[0])


def test_a_session_that_has_ended_stays_so(backend, shared_zookeeper):
    taken, (session,) = take(backend, claim("x", ttl=5)), backend._open
    number, secret = session.kazoo.client_id
    with contextlib.suppress(Exception):
        thief = shared_zookeeper.client(client_id=(number, secret))
        thief.start(timeout=SLACK)
        thief.stop()
        thief.close()
    wait_until(lambda: session.is_gone, "the end of the session")
    assert not backend.verify(taken)
    assert backend.renew([taken]) == [Renewal.LOST]
    assert not backend.release(taken)
    assert isinstance(backend.acquire(claim("x", ttl=5), Wait()), Granted)
    assert session not in backend._open


def test_an_eviction_is_noticed_at_the_next_beat(backend, shared_zookeeper, make):
    kept, evicted = (take(backend, claim(name, ttl=5)) for name in ("kept", "evicted"))
    assert backend.renew([kept, evicted]) == [Renewal.KEPT, Renewal.KEPT]
    other = make(shared_zookeeper.hosts, prefix=backend.config.key_prefix)
    assert other.release(Grant("evicted", evicted.owner))
    wait_until(
        lambda: backend.renew([kept, evicted]) == [Renewal.KEPT, Renewal.LOST], "the eviction"
    )


def test_a_beat_does_not_count_a_watch_that_has_no_answer_yet(
    backend, shared_zookeeper, make, monkeypatch
):
    """A waiter of this process begins to watch the node; it was deleted before."""
    trials(backend)
    evicted = take(backend, claim("x", ttl=5))
    other = make(shared_zookeeper.hosts, prefix=backend.config.key_prefix)
    assert other.release(Grant("x", evicted.owner))
    (session,), found = backend._open, []
    really = session.ask

    def ask(*requests, **terms):
        monkeypatch.setattr(session, "ask", really)
        found.append(backend.renew([evicted]))
        return really(*requests, **terms)

    monkeypatch.setattr(session, "ask", ask)
    session.watch(backend._nodes[evicted.owner].path)
    assert found == [[Renewal.LOST]]


def test_a_beat_of_many_leases_is_one_request(backend, monkeypatch):
    taken = [take(backend, claim(f"many:{number}", ttl=5)) for number in range(250)]
    assert set(backend.renew(taken)) == {Renewal.KEPT}
    (session,), sent = backend._open, []
    really = session.send
    monkeypatch.setattr(session, "send", lambda *a, **k: sent.append(a) or really(*a, **k))
    assert set(backend.renew(taken)) == {Renewal.KEPT}
    assert list(map(len, sent)) == [1]


def test_watches_of_missing_nodes_are_not_kept(backend):
    trials(backend)
    (session,) = backend._open
    assert session.watch("/missing", backend._root) == {backend._root}
    assert set(session.watched) == {backend._root}
    assert set(session.kazoo._data_watchers) == {backend._root}


def test_requests_without_a_session_open_one(shared_zookeeper, make):
    holder = make(shared_zookeeper.hosts, prefix=(prefix := uuid.uuid4().hex))
    taken = take(holder, claim("x", ttl=5))
    looking = make(shared_zookeeper.hosts, prefix=prefix)
    assert looking.holders(["x"])["x"].owner == taken.owner
    evicting = make(shared_zookeeper.hosts, prefix=prefix)
    assert evicting.release(Grant("x", taken.owner))
    assert not holder.verify(taken)


def test_closing_ends_sessions_without_locks(backend):
    taken = take(backend, claim("x", ttl=5))
    trials(backend, ttl=9)
    assert len(backend._open) == 2
    backend.close()
    (session,) = backend._open
    assert backend.verify(taken)
    backend.release(taken)
    backend.close()
    assert session.is_gone
    assert not backend._open


def test_a_child_process_ends_nothing_of_its_parent(shared_zookeeper):
    code = """
        import os, sys, time
        import django
        django.setup()
        from tests.test_zookeeper_backend import claim, config_of, take
        from django_fencedlock.backends.interface import Held, Wait
        from django_fencedlock.backends.zookeeper import ZooKeeperBackend
        backend = ZooKeeperBackend(config_of(sys.argv[1], prefix="fork"))
        taken = take(backend, claim("parent", ttl=9))
        child = os.fork()
        if not child:
            backend.after_fork()
            own = take(backend, claim("child", ttl=9))
            assert isinstance(backend.acquire(claim("parent", ttl=9), Wait()), Held)
            assert backend.release(own)
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        for _ in range(2):
            time.sleep(1)
            print(backend.renew([taken])[0].name, backend.verify(taken))
    """
    told = run_python(
        shared_zookeeper.hosts, code=code, DJANGO_SETTINGS_MODULE="tests.settings"
    ).stdout
    assert told.split("\n")[:2] == ["KEPT True"] * 2


# Broken connections


def test_a_create_whose_answer_is_lost_is_found(proxied):
    backend, other, proxy = proxied
    trials(backend)
    sent = claim("x", ttl=5)
    proxy.cut_after(to_client=1)
    answer = backend.acquire(sent, Wait(1))
    assert isinstance(answer, Granted)
    assert len(nodes_of(other, "x")) == 1
    assert backend.verify(grant(sent, answer))


def test_a_release_whose_answer_is_lost_is_unknown(proxied):
    """The repeated one finds nothing: either the first one did it, or the lock was lost."""
    backend, other, proxy = proxied
    taken = take(backend, claim("x", ttl=5))
    proxy.cut_after(to_client=1)
    with pytest.raises(BackendUnavailable, match="could not release lock 'x'"):
        backend.release(taken)
    assert nodes_of(other, "x") == []
    assert not backend.release(taken)


def test_an_eviction_behind_a_broken_connection_is_noticed(proxied):
    backend, other, proxy = proxied
    kept, evicted = (take(backend, claim(name, ttl=5)) for name in ("kept", "evicted"))
    assert backend.renew([kept, evicted]) == [Renewal.KEPT, Renewal.KEPT]
    proxy.cut()
    assert other.release(Grant("evicted", evicted.owner))
    assert backend.renew([kept, evicted]) == [Renewal.KEPT, Renewal.LOST]


def test_a_waiter_outlives_a_broken_connection(proxied):
    backend, other, proxy = proxied
    taken = take(other, claim("x", ttl=5))
    waiting = beside(backend.acquire, claim("x", ttl=5), Wait(4 * SLACK))
    wait_until(lambda: len(nodes_of(other, "x")) == 2, "the waiter")
    proxy.cut()
    time.sleep(0.3)
    assert other.release(taken)
    assert isinstance(waiting.result(SLACK), Granted)


@pytest.mark.parametrize("way", ["black_hole", "drop_replies"])
def test_a_request_without_an_answer_fails_in_time(proxied, make, way):
    _, _, proxy = proxied
    backend = make(f"{proxy.host}:{proxy.port}", TIMEOUT=3)
    taken = take(backend, claim("x", ttl=30))
    getattr(proxy, way)()
    for ask in (
        lambda: backend.renew([taken]),
        lambda: backend.acquire(claim("y", ttl=30), Wait()),
        lambda: backend.holders(["x"]),
    ):
        began = time.monotonic()
        with pytest.raises(BackendUnavailable, match="no answer within 3 s"):
            ask()
        assert time.monotonic() - began < 2 * 3 + SLACK
    proxy.pass_through()


def test_a_session_ends_when_its_connection_stays_broken(proxied):
    backend, other, proxy = proxied
    taken, (session,) = take(backend, claim("x", ttl=2)), backend._open
    proxy.black_hole()
    answer = other.acquire(claim("x", ttl=5), Wait(SLACK))
    assert isinstance(answer, Granted)
    wait_until(lambda: session.is_gone, "the end of the session")
    assert backend.renew([taken]) == [Renewal.LOST]
    proxy.pass_through()
    assert isinstance(backend.acquire(claim("y", ttl=2), Wait()), Granted)


def test_a_server_that_accepts_and_does_not_answer_is_left_soon(proxied, make, shared_zookeeper):
    # So does a server that starts. kazoo would wait for it until the session is over.
    _, _, proxy = proxied
    backend = make(f"{proxy.host}:{proxy.port}", TIMEOUT=3)
    taken = take(backend, claim("x", ttl=30))
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        proxy.retarget(*deaf.getsockname())
        proxy.cut()
        time.sleep(0.5)
        proxy.retarget(shared_zookeeper.host, shared_zookeeper.port)
        wait_until(lambda: is_kept(backend, taken), "another connection", SLACK)


def is_kept(backend, taken):
    with contextlib.suppress(BackendUnavailable):
        return backend.renew([taken]) == [Renewal.KEPT]


def test_servers_that_do_not_answer_are_named(make):
    backend = make("127.0.0.1:1,127.0.0.1:2", TIMEOUT=4)
    began = time.monotonic()
    for answer in at_once([partial(caught, backend)] * 4):
        assert "no answer within 4 s" in answer
        assert "Connection refused" in answer
    # One after the other, they would take 16 s.
    assert time.monotonic() - began < 4 + SLACK
    assert {each.id for each in backend.check()} == {"W052", "E013"}
    assert not backend._open


def caught(backend):
    with pytest.raises(BackendUnavailable) as caught:
        backend.acquire(claim("x", ttl=5), Wait())
    return str(caught.value)


# Users and TLS


def test_other_users_neither_read_nor_change_the_nodes(shared_zookeeper, make):
    location, prefix = f"{shared_zookeeper.hosts}/{uuid.uuid4().hex}", uuid.uuid4().hex
    backend = make(location, prefix=prefix, USERNAME="ada", PASSWORD="right")
    take(backend, claim("x", ttl=5))
    (node,) = nodes_of(backend, "x")
    with started(shared_zookeeper) as client:
        for ask in (client.get, client.delete):
            with pytest.raises(NoAuthError):
                ask(f"{backend._parent('x')}/{node}")
    for options in ({"USERNAME": "ada", "PASSWORD": "wrong"}, {}):
        other = make(location, prefix=prefix, **options)
        assert "refused the user: USERNAME or PASSWORD is wrong" in caught(other)
        assert "E013" in {each.id for each in other.check()}


@pytest.mark.skipif(not importlib.util.find_spec("puresasl"), reason="pure-sasl isn't installed")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_user_can_log_in_by_sasl(make_zookeeper, make):
    server = make_zookeeper(login=("ada", "right"))
    options = {"SASL": "DIGEST-MD5", "USERNAME": "ada", "TIMEOUT": 2}
    backend = make(server.hosts, PASSWORD="right", **options)
    trials(backend)
    assert "check USERNAME, PASSWORD" in caught(make(server.hosts, PASSWORD="wrong", **options))
    assert "refused the user" in caught(make(server.hosts, TIMEOUT=2))


def test_tls_checks_the_servers_certificate(make_zookeeper, make):
    authority = Authority()
    server = make_zookeeper(tls=authority)
    identity = {"CERT": str(authority.client.certificate), "KEY": str(authority.client.key)}
    backend = make(server.url, CA=str(authority.certificate), **identity)
    trials(backend)
    assert [each for each in backend.check() if each.id.startswith("E")] == []
    wrong = make(server.url, CA=str(Authority().certificate), TIMEOUT=5, **identity)
    assert "CERTIFICATE_VERIFY_FAILED" in caught(wrong)
    assert "no answer within 1 s" in caught(make(server.url, TIMEOUT=1))


# What check() reports


def test_too_many_connections_of_one_address_are_a_problem(make_zookeeper, make):
    server = make_zookeeper("maxClientCnxns=5")
    backends = [make(server.hosts, TIMEOUT=5) for _ in range(5)]
    for each in backends[:4]:
        trials(each)
    (problem,) = [each for each in backends[0].check() if each.id]
    assert problem.id == "W052"
    assert "has 5 connections from 127.0.0.1, and allows 5" in problem.message
    trials(backends[4])
    answer = caught(make(server.hosts, TIMEOUT=5))
    assert "no quorum, or this host maxClientCnxns (60) connections" in answer


def test_words_that_are_not_allowed_are_a_note(make_zookeeper, make):
    server = make_zookeeper("4lw.commands.whitelist=srvr")
    (problem,) = [each for each in make(server.hosts).check() if each.id]
    assert problem.id == "I052"
    assert "4lw.commands.whitelist=srvr,conf,cons" in problem.hint


# Three nodes


@pytest.mark.slow
def test_without_a_quorum_nothing_is_confirmed(make_zookeeper_cluster, make):
    nodes = make_zookeeper_cluster()
    (near,) = [each for each in nodes if not each.is_leader()][:1]
    backend = make(near.url, TIMEOUT=SLACK)
    taken, (session,) = take(backend, claim("x", ttl=5)), backend._open
    session._timeout = 2
    others = [each for each in nodes if each is not near]
    for each in others:
        each.pause()
    try:
        # The server itself still answers.
        assert session.get(backend._root)[0]
        for ask in (partial(backend.renew, [taken]), partial(backend.verify, taken)):
            with pytest.raises(BackendUnavailable, match="no answer within 2 s"):
                ask()
    finally:
        for each in others:
            each.resume()


@pytest.mark.slow
def test_a_lost_quorum_is_reported(make_zookeeper_cluster, make):
    nodes = make_zookeeper_cluster()
    backend = make(nodes[0].hosts, TIMEOUT=5)
    trials(backend)
    for each in nodes[1:]:
        each.kill()
    wait_until(lambda: "not currently serving" in nodes[0].ask("srvr"), "the loss of the quorum")
    assert "no answer within 5 s" in caught(backend)
    assert "the server has no quorum" in caught(make(nodes[0].url, TIMEOUT=2))
    found = [each for each in backend.check() if each.id]
    assert [each.id for each in found] == ["W052", "W052", "W052", "E013"]
    assert any("not currently serving requests" in each.message for each in found)


@pytest.mark.slow
def test_leases_are_renewed_from_another_thread_under_gevent(shared_zookeeper):
    code = """
        from gevent import monkey
        monkey.patch_all()
        import sys, time
        import django, gevent
        django.setup()
        from django_fencedlock.backends.interface import Granted, Wait
        from django_fencedlock.backends.zookeeper import ZooKeeperBackend
        from django_fencedlock.core import runtime
        from tests.test_zookeeper_backend import claim, config_of, take
        config = config_of(sys.argv[1], prefix="gevent")
        backend, other = ZooKeeperBackend(config), ZooKeeperBackend(config)
        taken = [take(backend, claim(f"x{count}", ttl=10)) for count in range(500)]
        seen = []

        def keep():
            for _ in range(6):
                seen.append({each.name for each in backend.renew(taken)})
                runtime.original("time", "sleep")(0.5)

        runtime.start(keep)
        waiting = gevent.spawn(other.acquire, claim("x0", ttl=10), Wait(60))
        until = time.monotonic() + 40
        while len(seen) < 6 and time.monotonic() < until:
            gevent.sleep(0.1)
        print(seen == [{"KEPT"}] * 6, waiting.ready(), backend.release(taken[0]))
        print(isinstance(waiting.get(timeout=20), Granted))
    """
    told = run_python(shared_zookeeper.hosts, code=code, DJANGO_SETTINGS_MODULE="tests.settings")
    assert told.stdout.split() == ["True", "False", "True", "True"], told.stderr


def test_a_wrong_mechanism_is_a_problem(monkeypatch):
    # As if pure-sasl were there.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    options = {"SASL": "digest", "USERNAME": "ada", "PASSWORD": "secret"}
    (problem,) = ZooKeeperBackend.problems(config_of("zk1", **options))
    assert problem.id == "E008"
    assert "DIGEST-MD5" in problem.hint


def test_without_a_server_each_reason_is_logged_once(closing, caplog):
    config = config_of(f"127.0.0.1:{free_port()}", TIMEOUT=1)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="Connection refused"):
            closing(ZooKeeperBackend(config)).holders(["x"])
    reasons = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert len(reasons) <= 1


@on_postgres
class TestAcceptance(ServiceAcceptance):
    backend = ZOOKEEPER
    # Its client's pings are sent by the hub of greenlets.
    keeps_beside_greenlet = False

    def location(self, *addresses):
        return ",".join(f"{each.host}:{each.port}" for each in addresses)

    @pytest.fixture
    def servers(self, shared_zookeeper):
        return [shared_zookeeper]

    @pytest.fixture
    def cluster(self, make_zookeeper_cluster):
        return make_zookeeper_cluster()

    @pytest.fixture
    def single(self, make_zookeeper):
        return make_zookeeper("maxSessionTimeout=60000")
