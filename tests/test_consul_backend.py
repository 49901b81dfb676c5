"""The Consul backend on real servers."""

import contextlib
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

from django_fencedlock import conf
from django_fencedlock.backends import queued
from django_fencedlock.backends.consul import NODE, PORT, WATCHES, ConsulBackend
from django_fencedlock.backends.interface import Granted, Held, Renewal, Wait
from django_fencedlock.conf import AliasConfig
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.problems import Level
from tests.backends import CONSUL
from tests.servers.certificates import Authority
from tests.servers.process import free_port, wait_until
from tests.services import ServiceAcceptance, on_postgres
from tests.test_backend_interface import BackendInterface, claim, grant, reader, take
from tests.test_http_nodes import Server, answer
from tests.test_queued import NEAREST, owners_ahead
from tests.threads import beside

#: Seconds that a busy machine may add to a time limit.
SLACK = 10.0
TOKEN = "b1a2c3d4-0000-0000-0000-000000000000"
NO_TOKEN = "ffffffff-1111-2222-3333-444444444444"


def config_of(*urls, prefix=None, ttl=30, **options):
    options = {"SESSION_TTL_MIN": 1, **options}
    terms = {"ttl": ttl, "blocking_timeout": 10, "fence_database": "default", "options": options}
    prefix = f"{uuid.uuid4().hex}/" if prefix is None else prefix
    location = ",".join(urls)
    return AliasConfig(
        alias="default", backend=CONSUL, location=location, key_prefix=prefix, **terms
    )


@pytest.fixture
def config(shared_consul):
    return config_of(shared_consul.url)


@pytest.fixture
def make(config, closing):
    return lambda: closing(ConsulBackend(config))


@pytest.fixture
def backend(make):
    return make()


@pytest.fixture
def other(make):
    return make()


@pytest.fixture
def connect(closing):
    return lambda *urls, **terms: closing(ConsulBackend(config_of(*urls, **terms)))


class TestInterface(BackendInterface):
    @pytest.fixture
    def make(self, make):
        return make


def test_a_reader_waits_for_the_nearest_writer_and_a_writer_for_the_nearest_entry(backend):
    assert owners_ahead(backend, "x", lambda ahead: ahead.owner) == NEAREST


def test_a_reader_that_is_tried_again_keeps_its_entry(backend, other):
    """A writer that came after it doesn't refuse it."""
    taken = take(backend, sent := reader("x"))
    waiter = beside(other.acquire, writer := claim("x"), Wait(20))
    wait_until(lambda: backend.holders(["x"])["x"].waiting == 1, "the writer")
    assert take(backend, sent).handle.number == taken.handle.number
    assert backend.release(taken)
    assert other.release(grant(writer, waiter.result(20)))


class TestSettings:
    """What is found without a server."""

    @pytest.mark.parametrize(
        ("terms", "id_", "text"),
        [
            ({"LOCATION": ""}, "E007", "LOCATION is empty"),
            ({"LOCATION": "127.0.0.1:8500"}, "E007", "doesn't begin with http:// or https://"),
            ({"LOCATION": "http://h:1,https://h:2"}, "E007", "both http:// and https://"),
            ({"LOCATION": "http://user:pw@h:1"}, "E008", "a user or a password"),
            ({"OPTIONS": {"TOKEN": "secret\n"}}, "E008", "strip the end of the line"),
            ({"OPTIONS": {"TOKEN": 7}}, "E008", "isn't a text"),
            ({"OPTIONS": {"SESSION_TTL_MIN": "1s"}}, "E003", "a number of seconds"),
            ({"OPTIONS": {"TIMEOUT": 0}}, "E003", "more than zero"),
            ({"OPTIONS": {"CA": "ca.pem"}}, "E008", "LOCATION begins with http://"),
            ({"OPTIONS": {"TOKENS": ""}}, "E008", "'TOKEN'"),
            ({"TTL": 86401}, "E003", "at most 86400 s. Use a shorter one."),
            ({"TTL": 5}, "W053", "at least 10 s: a dead process's lock is free after up to 20 s"),
            ({"TTL": 2, "OPTIONS": {"SESSION_TTL_MIN": 3}}, "W053", "after up to 6 s"),
        ],
    )
    def test_mistakes_are_reported(self, terms, id_, text):
        (found,) = _problems(**terms)
        assert (found.id, text in str(found)) == (id_, True), found
        assert "secret" not in str(found)
        assert "pw" not in str(found)

    @pytest.mark.parametrize(
        "terms",
        [
            {},
            {"TTL": 10},
            {"TTL": 1, "OPTIONS": {"SESSION_TTL_MIN": 1}},
            {"LOCATION": ["https://a", "https://b:8501"], "OPTIONS": {"TOKEN": TOKEN}},
        ],
    )
    def test_valid_settings_have_no_problems(self, terms):
        assert _problems(**terms) == []

    def test_the_token_is_hidden_where_errors_show_variables(self):
        backend = ConsulBackend(config_of("http://127.0.0.1:1", TOKEN="secret"))
        headers = backend._nodes.headers
        assert headers["X-Consul-Token"] == "secret"
        assert "secret" not in repr((headers, vars(backend), backend.config))

    def test_each_lock_has_a_folder_of_its_own(self):
        backend = ConsulBackend(config_of("http://h", prefix="team/"))
        key = backend._key("a/b %\N{SNOWMAN}", "owner")
        assert key == "team/fencedlock/a%2Fb%20%25%E2%98%83/owner"


def _problems(**terms):
    given = {"BACKEND": CONSUL, "LOCATION": f"http://127.0.0.1:{PORT}", **terms}
    return list(conf.alias_problems("default", given))


def test_a_server_that_is_not_consul_is_reported(closing):
    server = Server()
    server.otherwise = answer("<html>It works!</html>")
    backend = closing(ConsulBackend(config_of(server.url)))
    with contextlib.closing(server):
        with pytest.raises(BackendUnavailable, match="doesn't answer as Consul does: '<html>It"):
            take(backend, claim("x"))
        with pytest.raises(BackendUnavailable, match="doesn't answer as Consul does"):
            backend.holders(["x"])
        assert [each.id for each in backend.check() if each.id] == ["E013"]


class TestEntries:
    def test_the_locks_of_another_prefix_are_others(self, shared_consul, connect, name):
        one = connect(shared_consul.url, prefix=f"{name}/")
        # Its keys are in the folder of the lock "x" of the first.
        inner = connect(shared_consul.url, prefix=f"{name}/fencedlock/x/")
        held = [take(each, claim("x")) for each in (inner, one)]
        assert one.acquire(claim("x"), Wait()).owner == held[1].owner
        assert set(one.holders(["x", "x/fencedlock/x"])) == {"x"}
        assert one.release(held[1])
        assert inner.verify(held[0])

    @pytest.mark.parametrize("part", ["x" * 200, "\N{SNOWMAN}" * 200, "a\0b\n/../c%2F?x#y"])
    def test_a_waiter_of_any_name_is_woken(self, backend, other, name, part, monkeypatch):
        # Otherwise it would look for itself, in time.
        monkeypatch.setattr(queued, "WATCH", 10 * SLACK)
        sent = claim(f"{part}{name}"[-200:], ttl=30 * SLACK)
        taken = take(backend, sent)
        waiting = beside(other.acquire, claim(sent.name, ttl=sent.ttl), Wait(10 * SLACK))
        _wait_for_waiters(backend, sent.name, 1)
        time.sleep(0.1)
        backend.release(taken)
        assert isinstance(waiting.result(SLACK), Granted)

    def test_a_lock_that_was_unlocked_by_hand_is_not_taken_back(
        self, shared_consul, backend, other, name
    ):
        sent = claim(name)
        former = take(backend, sent)
        key = backend._key(name, sent.owner)
        session = former.handle.session.id
        shared_consul.request(f"/v1/kv/{quote(key)}?release={session}", "", method="PUT")
        present = take(other, claim(name))
        # A late copy of the first request.
        assert isinstance(backend.acquire(sent, Wait()), Held)
        waiting = backend.acquire(sent, Wait(0.3))
        assert isinstance(waiting, Held)
        assert waiting.owner == present.owner
        assert not backend.verify(former)
        assert backend.renew([former]) == [Renewal.LOST]
        assert other.verify(present)

    def test_the_end_of_a_session_frees_its_locks_at_once(self, backend, other, name):
        # By default Consul would keep them for another 15 s.
        taken = take(backend, claim(name))
        waiting = beside(other.acquire, claim(name), Wait(SLACK))
        _wait_for_waiters(other, name, 1)
        backend.end(taken.handle.session.id)
        ended = time.monotonic()
        assert isinstance(waiting.result(SLACK), Granted)
        assert time.monotonic() - ended < SLACK
        assert backend.renew([taken]) == [Renewal.LOST]
        assert not backend.release(taken)

    def test_a_waiter_whose_session_ended_goes_on_waiting(self, backend, other, name):
        taken = take(backend, claim(name))
        waiting = beside(other.acquire, claim(name, ttl=2), Wait(SLACK))
        _wait_for_waiters(other, name, 1)
        (session,) = other._sessions.values()
        other.end(session.id)
        _wait_for_waiters(other, name, 1)
        backend.release(taken)
        assert isinstance(waiting.result(SLACK), Granted)

    @pytest.mark.slow
    def test_the_lock_of_a_process_that_died_elsewhere_is_free_within_two_ttls(
        self, backend, other, name
    ):
        # It isn't renewed, as if its process had died.
        take(backend, claim(name, ttl=2))
        began = time.monotonic()
        answer = other.acquire(claim(name), Wait(4 + SLACK))
        assert isinstance(answer, Granted)
        assert 2 < time.monotonic() - began < 4 + SLACK

    def test_many_locks_are_renewed_in_a_few_requests(self, backend, name, monkeypatch):
        taken = [take(backend, claim(f"{name}:{number}")) for number in range(130)]
        for each in taken[::13]:
            backend.release(each)
        asked = []
        ask = backend._nodes.ask
        monkeypatch.setattr(
            backend._nodes, "ask", lambda *args: asked.append(args[1]) or ask(*args)
        )
        kept = [Renewal.LOST if place % 13 == 0 else Renewal.KEPT for place in range(130)]
        assert backend.renew(taken) == kept
        assert len(asked) == 1 + 3
        assert len(backend.holders([each.name for each in taken])) == 120

    @pytest.mark.slow
    def test_more_waiters_than_consul_allows_connections(self, backend, other, name):
        taken = take(backend, claim(name))
        # One address may have 200 connections.
        waiters = 210
        assert waiters > 2 * WATCHES

        def wait_for_turn(_):
            sent = claim(name)
            answer = other.acquire(sent, Wait(100))
            assert isinstance(answer, Granted), answer
            assert other.release(grant(sent, answer))
            return answer.token

        with ThreadPoolExecutor(waiters) as threads:
            waiting = threads.map(wait_for_turn, range(waiters))
            wait_until(lambda: backend.holders([name])[name].waiting == waiters, "waiters", 60)
            for _ in range(3):
                assert backend.renew([taken]) == [Renewal.KEPT]
                time.sleep(1)
            backend.release(taken)
            assert len(set(waiting)) == waiters


class TestNetwork:
    """A proxy in front of the server."""

    @pytest.fixture
    def proxy(self, shared_consul, make_proxy):
        return make_proxy(shared_consul.host, shared_consul.port)

    def test_a_release_whose_answer_is_lost_is_unknown(self, proxy, connect, name):
        """The repeated one finds nothing: either the first one did it, or the lock was lost."""
        backend = connect(_url(proxy))
        taken = take(backend, claim(name))
        proxy.cut_after(to_client=1)
        with pytest.raises(BackendUnavailable, match="could not release lock"):
            backend.release(taken)
        assert backend.holders([name]) == {}
        assert backend.release(taken) is False

    def test_a_claim_whose_answer_was_lost_keeps_its_place(
        self, shared_consul, proxy, connect, name
    ):
        backend = connect(_url(proxy), shared_consul.url, TIMEOUT=5)
        backend.release(take(backend, claim(name)))
        backend._nodes._nodes.rotate(_place_of(backend, proxy))
        proxy.drop_replies()
        sent = claim(name)
        taken = grant(sent, backend.acquire(sent, Wait(SLACK)))
        (held,) = backend.holders([name]).values()
        assert held == Held(sent.owner, sent.identity, taken.token, waiting=0)
        assert backend.verify(taken)

    def test_a_late_copy_of_a_claim_is_released_at_the_next_beat(
        self, shared_consul, proxy, connect, name
    ):
        backend = connect(_url(proxy), shared_consul.url, TIMEOUT=5)
        kept = take(backend, claim(f"{name}:other"))
        # The proxy has the request, and the other address gets it again.
        backend._nodes._nodes.rotate(_place_of(backend, proxy))
        proxy.black_hole()
        sent = claim(name)
        granted = backend.acquire(sent, Wait(SLACK))
        assert backend.release(grant(sent, granted))
        assert backend.holders([name]) == {}
        proxy.pass_through()
        wait_until(lambda: backend.holders([name]), "the late copy")
        assert backend.renew([kept]) == [Renewal.KEPT]
        assert backend.holders([name]) == {}

    def test_slow_answers_change_nothing(self, proxy, connect, name):
        backend = connect(_url(proxy), TIMEOUT=SLACK)
        proxy.delay(to_server=0.1, to_client=0.1)
        taken = take(backend, claim(name))
        assert backend.renew([taken]) == [Renewal.KEPT]
        assert backend.verify(taken)
        assert backend.release(taken)

    def test_a_waiter_outlives_a_cut_connection(self, shared_consul, proxy, connect, name):
        backend, other = connect(shared_consul.url, prefix="p/"), connect(_url(proxy), prefix="p/")
        taken = take(backend, claim(name))
        waiting = beside(other.acquire, claim(name), Wait(SLACK))
        _wait_for_waiters(backend, name, 1)
        for _ in range(5):
            time.sleep(0.1)
            proxy.cut()
        backend.release(taken)
        assert isinstance(waiting.result(SLACK), Granted)

    def test_a_waiter_that_gets_errors_does_not_keep_the_process_busy(
        self, backend, other, name, monkeypatch
    ):
        taken = take(backend, claim(name))
        monkeypatch.setattr(other._nodes, "stream", lambda *args: iter(["No cluster leader"]))
        watched = []
        watch = other.watch
        monkeypatch.setattr(other, "watch", lambda *args: watched.append(1) or watch(*args))
        assert isinstance(other.acquire(claim(name), Wait(1)), Held)
        assert len(watched) <= 5
        backend.release(taken)

    def test_silence_is_reported_in_time(self, proxy, connect, name):
        backend = connect(_url(proxy), TIMEOUT=SLACK)
        taken = take(backend, claim(name))
        backend._nodes.timeout = 0.5
        proxy.black_hole()
        for act in (
            lambda: backend.acquire(claim(name), Wait()),
            lambda: backend.release(taken),
            lambda: backend.verify(taken),
            lambda: backend.renew([taken]),
            lambda: backend.holders([name]),
        ):
            began = time.monotonic()
            with pytest.raises(BackendUnavailable, match="timed out"):
                act()
            assert time.monotonic() - began < 0.5 + SLACK / 2
        proxy.pass_through()


class TestAnswers:
    """What a server refuses, and what `check()` says of it."""

    def test_a_healthy_server(self, backend):
        found = list(backend.check())
        assert {each.level for each in found} == {Level.OK}
        assert "version 1." in found[0].message

    def test_an_unreachable_server(self, connect):
        backend = connect(f"http://127.0.0.1:{free_port()}", TIMEOUT=0.3)
        (found,) = backend.check()
        assert found.id == "E013"
        assert "Connection refused" in found.message
        assert "Start the server" in found.hint

    @pytest.fixture
    def strict(self, make_consul):
        return make_consul(session_ttl_min="10s", token=TOKEN)

    def test_a_server_whose_sessions_are_longer(self, strict, connect, name):
        backend = connect(strict.url, ttl=5, TOKEN=TOKEN, TIMEOUT=2)
        found = list(backend.check())
        assert [each.id for each in found] == ["", "E053"]
        assert "must be between [10s=24h" in found[1].message
        assert "SESSION_TTL_MIN" in found[1].hint
        with pytest.raises(BackendUnavailable, match="10s=24h"):
            backend.acquire(claim(name, ttl=5), Wait())
        # With the default, the ttl is made longer.
        longer = connect(strict.url, ttl=5, TOKEN=TOKEN, SESSION_TTL_MIN=10)
        assert [each.id for each in longer.check()] == ["", ""]
        taken = take(longer, claim(name, ttl=5))
        assert taken.handle.session.ttl == 10

    def test_a_wrong_token(self, strict, connect, name):
        backend = connect(strict.url, TOKEN=NO_TOKEN, TIMEOUT=2 * SLACK)
        began = time.monotonic()
        with pytest.raises(BackendUnavailable) as caught:
            backend.acquire(claim(name), Wait())
        assert time.monotonic() - began < backend.config.timeout
        assert "OPTIONS['TOKEN']" in str(caught.value)
        assert NO_TOKEN not in str(caught.value)
        *_, found = backend.check()
        assert found.id == "E053"
        assert NO_TOKEN not in str(found)

    def test_a_token_that_may_write_elsewhere(self, strict, connect, name):
        write = '{ policy = "write" }'
        rules = f'session "{NODE}" {write} node "{NODE}" {write} key_prefix "a/" {write}'
        strict.request("/v1/acl/policy", {"Name": "locks", "Rules": rules})
        made = strict.request("/v1/acl/token", {"Policies": [{"Name": "locks"}]})
        allowed = connect(strict.url, prefix="a/", TOKEN=made["SecretID"], SESSION_TTL_MIN=10)
        assert all(not each.id for each in allowed.check())
        taken = take(allowed, claim(name))
        assert allowed.renew([taken]) == [Renewal.KEPT]
        waiting = beside(allowed.acquire, claim(name), Wait(SLACK))
        _wait_for_waiters(allowed, name, 1)
        assert allowed.release(taken)
        assert isinstance(waiting.result(SLACK), Granted)
        refused = connect(strict.url, prefix="b/", TOKEN=made["SecretID"], SESSION_TTL_MIN=10)
        *_, found = refused.check()
        assert (found.id, "KEY_PREFIX" in found.hint) == ("E053", True)
        with pytest.raises(BackendUnavailable, match="Permission denied"):
            refused.acquire(claim(name), Wait())

    @pytest.mark.slow
    def test_tls(self, make_consul, connect, name):
        ours, foreign = Authority(), Authority()
        server = make_consul(tls=ours)
        files = {"CERT": str(ours.client.certificate), "KEY": str(ours.client.key)}
        backend = connect(server.url, CA=str(ours.certificate), **files)
        taken = take(backend, claim(name))
        assert backend.release(taken)
        plain = server.url.replace("https", "http")
        for url, options, text in (
            (server.url, {"CA": str(foreign.certificate), **files}, "certificate verify failed"),
            (
                server.url,
                {"CA": str(ours.certificate)},
                "certificate required|alert|reset|EOF|pipe",
            ),
            (plain, {}, "HTTP request to an HTTPS server"),
        ):
            began = time.monotonic()
            with pytest.raises(BackendUnavailable, match=text):
                connect(url, TIMEOUT=2, **options).acquire(claim(name), Wait())
            assert time.monotonic() - began < 2 + SLACK / 2

    def test_https_to_a_server_without_tls(self, shared_consul, connect, name):
        backend = connect(shared_consul.url.replace("http", "https"), TIMEOUT=2)
        with pytest.raises(BackendUnavailable, match="If it has no TLS, write http://"):
            backend.acquire(claim(name), Wait())


@pytest.mark.slow
class TestClusters:
    @pytest.fixture
    def cluster(self, make_consul_cluster):
        return make_consul_cluster()

    def test_a_lock_outlives_the_server_that_was_asked_for_it(self, cluster, connect, name):
        backend = connect(*(node.url for node in cluster))
        taken = take(backend, claim(name))
        cluster[0].kill()

        def is_removed():
            nodes = cluster[1].request("/v1/catalog/nodes?stale")
            return "n0" not in {each["Node"] for each in nodes}

        # The other servers do that by themselves.
        wait_until(is_removed, "the removal of a dead server", 40)
        assert backend.renew([taken]) == [Renewal.KEPT]
        assert backend.verify(taken)

    def test_a_lost_quorum_is_reported_in_time_and_its_return_is_noticed(
        self, cluster, connect, name
    ):
        backend = connect(*(node.url for node in cluster), TIMEOUT=2)
        taken = take(backend, claim(name, ttl=20))
        for node in cluster[1:]:
            node.kill()
        wait_until(lambda: not cluster[0].answers(), "the loss of the leader")
        for act in (
            lambda: backend.acquire(claim(f"{name}:2"), Wait()),
            lambda: backend.verify(taken),
        ):
            began = time.monotonic()
            with pytest.raises(BackendUnavailable):
                act()
            assert time.monotonic() - began < 2 + SLACK / 2
        *_, found = backend.check()
        assert found.id == "E013"
        cluster[1].start()
        wait_until(cluster[0].answers, "a leader", 30)
        assert backend.renew([taken]) == [Renewal.KEPT]
        assert backend.verify(taken)


@on_postgres
class TestAcceptance(ServiceAcceptance):
    backend = CONSUL
    options = {"SESSION_TTL_MIN": 1}
    # Consul ends a session after up to two ttls.
    ttls = 2.0

    def location(self, *addresses):
        return [f"http://{each.host}:{each.port}" for each in addresses]

    @pytest.fixture
    def servers(self, shared_consul):
        return [shared_consul]

    @pytest.fixture
    def cluster(self, make_consul_cluster):
        return make_consul_cluster()

    @pytest.fixture
    def single(self, make_consul):
        return make_consul()


def _wait_for_waiters(backend, name, count):
    def waiting():
        found = backend.holders([name]).get(name)
        return found and found.waiting == count

    wait_until(waiting, f"{count} waiters")


def _url(proxy):
    return f"http://{proxy.host}:{proxy.port}"


def _place_of(backend, proxy):
    return -[node.port for node in backend._nodes._nodes].index(proxy.port)


@pytest.fixture
def name():
    return f"consul:{uuid.uuid4().hex}"
