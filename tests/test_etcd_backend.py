"""The etcd backend on real servers."""

import contextlib
import itertools
import shutil
import subprocess
import threading
import time
import uuid

import pytest

from django_fencedlock import LeaseLost, StaleFence, lock
from django_fencedlock.backends import etcd as module
from django_fencedlock.backends.etcd import EtcdBackend
from django_fencedlock.backends.etcd_json import decode
from django_fencedlock.backends.interface import Grant, Granted, Held, Renewal, Wait
from django_fencedlock.backends.places import Place, Watch
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import BackendUnavailable
from tests.backends import ETCD
from tests.servers import Authority, Etcd, finding
from tests.servers.etcd import encode
from tests.servers.process import wait_until
from tests.services import ALIAS, DATABASE, ServiceAcceptance, on_postgres
from tests.test_backend_interface import BackendInterface, claim, grant, owners, reader, take
from tests.test_http_nodes import Server, answer, close_without_answer
from tests.test_queued import NEAREST, owners_ahead
from tests.threads import beside

pytestmark = pytest.mark.slow


def config_of(*urls, prefix=None, **options):
    return AliasConfig(
        alias="default",
        backend=ETCD,
        location=",".join(urls),
        ttl=30.0,
        blocking_timeout=10.0,
        key_prefix=prefix or f"{uuid.uuid4().hex}/",
        fence_database="default",
        options={"TIMEOUT": 5, **options},
    )


@pytest.fixture
def make(closing):
    return lambda *urls, **options: closing(EtcdBackend(config_of(*urls, **options)))


@pytest.fixture
def backend(make, shared_etcd):
    return make(shared_etcd.url)


@pytest.fixture
def requests(backend, monkeypatch):
    """The requests that the backend sends."""
    sent, really = [], backend._nodes.ask

    def ask(method, path, body=None):
        sent.append(path.removeprefix("/v3/"))
        return really(method, path, body)

    monkeypatch.setattr(backend._nodes, "ask", ask)
    return sent


def works(backend):
    """Grant, wait, hand over, renew and release."""
    taken, second = take(backend, claim("works")), claim("works")
    waiter = beside(backend.acquire, second, Wait(20))
    try:
        while not (backend.holders(["works"])["works"].waiting or waiter.done()):
            pass
        assert backend.renew([taken]) == [Renewal.KEPT]
    finally:
        backend.release(taken)
    answer = waiter.result(20)
    assert isinstance(answer, Granted)
    return backend.verify(grant(second, answer)) and backend.release(grant(second, answer))


def refusal(backend):
    with pytest.raises(BackendUnavailable) as caught:
        backend.acquire(claim("x"), Wait())
    message = str(caught.value)
    assert "secret" not in message
    return message


def problems(backend):
    return [(each.id, each.message) for each in backend.check() if each.id]


class TestInterface(BackendInterface):
    @pytest.fixture
    def make(self, shared_etcd, closing):
        config = config_of(shared_etcd.url)
        return lambda: closing(EtcdBackend(config))


class TestRequests:
    """How many requests each step takes."""

    def test_an_acquire_is_one_and_a_release_is_one(self, backend, requests):
        backend.release(take(backend, claim("first")))
        assert requests == ["lease/grant", "kv/txn", "kv/deleterange"]
        requests.clear()
        backend.release(take(backend, claim("x")))
        assert requests == ["kv/txn", "kv/deleterange"]

    def test_a_refused_try_is_one(self, backend, make, requests):
        take(backend, claim("x"))
        requests.clear()
        assert isinstance(backend.acquire(claim("x"), Wait()), Held)
        assert requests == ["kv/txn"]

    def test_a_refused_try_of_a_reader_is_one(self, backend, make, requests):
        take(backend, claim("x"))
        requests.clear()
        assert isinstance(backend.acquire(reader("x"), Wait()), Held)
        assert requests == ["kv/txn"]

    def test_a_reader_takes_as_many_as_a_writer(self, backend, requests):
        taken = [take(backend, reader("x"))]
        requests.clear()
        taken.append(take(backend, reader("x")))
        assert backend.verify(taken[1])
        for each in taken:
            backend.release(each)
        assert requests == ["kv/txn", "kv/txn", "kv/deleterange", "kv/deleterange"]

    def test_a_look_at_readers_is_one_more(self, backend, requests):
        taken = [take(backend, reader("x")) for _ in range(3)]
        take(backend, claim("y"))
        requests.clear()
        found = backend.holders(["x", "y"])
        assert found["x"].waiting == 0
        assert {each.owner for each in (found["x"], *found["x"].others)} == {
            each.owner for each in taken
        }
        assert requests == ["kv/txn"] * 2

    def test_a_renewal_of_many_locks_is_two(self, backend, requests):
        taken = [take(backend, claim(f"x{number}")) for number in range(50)]
        requests.clear()
        assert set(backend.renew(taken)) == {Renewal.KEPT}
        assert requests == ["lease/keepalive", "lease/timetolive"]

    def test_a_look_at_many_locks_is_one_for_each_hundred(self, backend, requests):
        taken = take(backend, claim("x7"))
        requests.clear()
        found = backend.holders([f"x{number}" for number in range(150)])
        assert found["x7"].owner == taken.owner
        assert requests == ["kv/txn"] * 2

    def test_a_waiter_is_served_with_few(self, backend, make, requests):
        taken = take(backend, claim("x"))
        requests.clear()
        waiter = beside(backend.acquire, claim("x"), Wait(20))
        while "kv/txn" not in requests or not backend.holders(["x"])["x"].waiting:
            pass
        requests.clear()
        backend.release(taken)
        assert isinstance(waiter.result(20), Granted)
        # The release, the look when the watch began (maybe), and one when it told of the release.
        assert requests.count("kv/deleterange") == 1
        assert len(requests) <= 5


def test_a_reader_waits_for_the_nearest_writer_and_a_writer_for_the_nearest_entry(backend):
    def owner_of(key):
        return decode(key).rpartition("\0")[2]

    assert owners_ahead(backend, "x", owner_of) == NEAREST


def test_a_reader_is_released_whose_kind_is_not_known(backend, make, shared_etcd):
    """An eviction, and a doubt, have the owner's id alone."""
    readers = [take(backend, reader("x")) for _ in range(3)]
    other = make(shared_etcd.url, prefix=backend.config.key_prefix)
    assert other.release(Grant("x", readers[0].owner))
    assert not other.release(Grant("x", readers[0].owner))
    assert owners(other, "x") == {each.owner for each in readers[1:]}
    assert backend.renew(readers) == [Renewal.LOST, Renewal.KEPT, Renewal.KEPT]
    assert not backend.verify(readers[0])


def test_a_reader_of_another_prefix_or_name_is_apart(backend):
    taken = [take(backend, reader("x")), take(backend, claim("xy")), take(backend, claim("x/"))]
    assert backend.renew(taken) == [Renewal.KEPT] * 3
    found = backend.entries(taken[0].handle.session.id, {})
    assert found == {each.owner: each.name for each in taken}


def test_prefixes_keep_locks_apart(make, shared_etcd):
    one, other = make(shared_etcd.url, prefix="a"), make(shared_etcd.url, prefix="a/")
    taken = [take(one, claim("x")), take(other, claim("x"))]
    assert one.holders(["x"])["x"].owner == taken[0].owner
    for each, its in zip((one, other), taken, strict=True):
        each.release(its)


def test_names_that_begin_alike_are_apart(backend):
    taken = [take(backend, claim(name)) for name in ("a", "a/", "ab", "a\N{SNOWMAN}")]
    assert len(backend.holders([each.name for each in taken])) == 4
    assert {each.owner for each in backend.holders(["a", "ab"]).values()} == {
        taken[0].owner,
        taken[2].owner,
    }


class TestLogin:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, shared_etcd):
        with contextlib.closing(Etcd.launch(finding.etcd())) as server:
            server.enable_login("worker", "secret")
            yield server

    def url(self, server, login):
        return server.url.replace("//", f"//{login}@")

    def test_a_user_and_password(self, server, make):
        assert works(make(self.url(server, "worker:secret")))

    def test_a_login_that_the_server_forgot_is_repeated(self, server, make):
        backend = make(self.url(server, "worker:secret"))
        assert works(backend)
        server.stop()
        server.start()
        assert works(backend)

    def test_a_login_outlives_a_change_of_the_users(self, server, make):
        backend = make(self.url(server, "worker:secret"))
        assert works(backend)
        server.request("/v3/auth/user/add", {"name": "another", "password": "x"})
        assert works(backend)

    def test_a_user_of_the_prefix_alone(self, server, make):
        prefix = "mine/"
        server.request("/v3/auth/role/add", {"name": "locks"})
        permission = {
            "permType": "READWRITE",
            "key": encode(prefix),
            "range_end": encode("mine0"),
        }
        server.request("/v3/auth/role/grant", {"name": "locks", "perm": permission})
        server.request("/v3/auth/user/add", {"name": "limited", "password": "secret"})
        server.request("/v3/auth/user/grant", {"user": "limited", "role": "locks"})
        backend = make(self.url(server, "limited:secret"), prefix=prefix)
        assert works(backend)
        assert problems(backend) == []
        other = make(self.url(server, "limited:secret"), prefix="others/")
        assert "permission denied" in refusal(other)

    @pytest.mark.parametrize("login", ["worker:wrong-secret", "nobody:secret"])
    def test_a_wrong_password(self, server, make, login):
        backend = make(self.url(server, login))
        assert "invalid user ID or password" in refusal(backend)
        ((number, message),) = problems(backend)
        assert number == "E013"
        assert "secret" not in message

    def test_no_password(self, server, make):
        message = refusal(make(server.url))
        assert "user name is empty" in message
        assert "LOCATION needs a user" in message


class TestTLS:
    @pytest.fixture(scope="class")
    @classmethod
    def authority(cls, shared_etcd):
        return Authority()

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, authority):
        with contextlib.closing(Etcd.launch(finding.etcd(), tls=authority)) as server:
            yield server

    @pytest.fixture(scope="class")
    @classmethod
    def server_with_users(cls, authority):
        with contextlib.closing(Etcd.launch(finding.etcd(), tls=authority)) as server:
            server.enable_login("worker", "secret")
            yield server

    def files(self, authority, client=None):
        client = client or authority.client
        return {
            "CA": str(authority.certificate),
            "CERT": str(client.certificate),
            "KEY": str(client.key),
        }

    def test_a_client_certificate(self, server, authority, make):
        backend = make(server.url, **self.files(authority))
        assert works(backend)
        assert problems(backend) == []

    def test_a_client_certificate_and_a_password(self, server_with_users, authority, make):
        url = server_with_users.url.replace("//", "//worker:secret@")
        assert works(make(url, **self.files(authority)))

    def test_a_client_certificate_with_a_common_name_and_a_password(
        self, server_with_users, authority, make
    ):
        """etcd's gateway refuses it, and says why."""
        url = server_with_users.url.replace("//", "//worker:secret@")
        named = make(url, **self.files(authority, authority.issue("named", "CN")))
        assert "CommonName" in refusal(named)

    def test_no_client_certificate(self, server, authority, make):
        assert "TLS" in refusal(make(server.url, CA=str(authority.certificate), TIMEOUT=2)).upper()

    def test_another_authority(self, server, authority, make):
        other = {**self.files(authority), "CA": str(Authority().certificate), "TIMEOUT": 2}
        assert "certificate verify failed" in refusal(make(server.url, **other))

    def test_a_url_without_tls(self, server, make):
        assert "https://" in refusal(make(server.url.replace("https:", "http:"), TIMEOUT=2))


def test_a_url_with_tls_for_a_server_without(shared_etcd, make):
    message = refusal(make(shared_etcd.url.replace("http:", "https:"), TIMEOUT=2))
    assert "http://" in message


def test_a_server_without_its_gateway(make_etcd, make):
    backend = make(make_etcd("--enable-grpc-gateway=false").url)
    assert "it has no JSON gateway: etcd 3.4 or newer, and enable-grpc-gateway" in refusal(backend)
    assert "no JSON gateway" in problems(backend)[0][1]


def test_something_else_that_answers_is_no_etcd(make, closing):
    other = closing(Server())
    for text in ("<html>", "[]", "{}", '"yes"', ""):
        other.otherwise = answer(text)
        assert "etcd" in refusal(make(other.url))


def test_a_watch_that_is_cut_within_a_line_is_a_hint_only(make, closing):
    server = closing(Server())
    backend = make(server.url)

    def cut(handler):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b'10\r\n{"result": {"cre\r\n')
        close_without_answer(handler)

    server.script = [cut]
    watch = Watch()
    watch.seconds = 5
    backend.watch("x", "owner", Place(2, encode("ahead"), Held()), watch)
    assert len(server.requests) == 1


def test_a_release_whose_answer_is_lost_is_unknown(make, shared_etcd, make_proxy):
    """The repeated one finds nothing: either the first one did it, or the lock was lost."""
    proxy = make_proxy(shared_etcd.host, shared_etcd.port)
    backend = make(f"http://{proxy.host}:{proxy.port}")
    taken = take(backend, claim("x"))
    proxy.cut_after(to_client=1)
    with pytest.raises(BackendUnavailable, match="could not release lock 'x'"):
        backend.release(taken)
    assert backend.holders(["x"]) == {}
    assert backend.release(taken) is False


def test_an_entry_that_a_late_copy_made_again_is_no_lease(make, shared_etcd, make_proxy):
    """A forced release came in between, and another holder."""
    proxy = make_proxy(shared_etcd.host, shared_etcd.port)
    backend = make(f"http://{proxy.host}:{proxy.port}", prefix="late/")
    other = make(shared_etcd.url, prefix="late/")
    kept = take(backend, claim("warm"))
    proxy.cut_after(to_client=1)
    taken = take(backend, sent := claim("x"))
    assert backend.renew([taken, kept]) == [Renewal.KEPT, Renewal.KEPT]
    assert other.release(Grant("x", taken.owner))
    newer = take(other, claim("x"))
    backend.enter(taken.handle.session.id, sent, alone=False)
    assert not backend.verify(taken)
    assert backend.renew([taken, kept]) == [Renewal.LOST, Renewal.KEPT]
    assert other.renew([newer]) == [Renewal.KEPT]
    backend.release(taken)
    assert other.release(newer)
    backend.release(kept)


def test_a_beat_releases_no_claim_that_is_repeated_meanwhile(backend, monkeypatch):
    """The claim was sent twice and refused. Then the core evicted the holder, and repeats it."""
    kept, former = take(backend, claim("warm")), take(backend, sent := claim("x"))
    backend._doubts.repeated.add(sent.owner)
    backend.release(former)
    really, begun = backend.leave, threading.Event()

    def leave(*given):
        begun.set()
        time.sleep(0.5)
        return really(*given)

    monkeypatch.setattr(backend, "leave", leave)
    beat = beside(backend.renew, [kept])
    assert begun.wait(20)
    taken = take(backend, sent)
    assert beat.result(20) == [Renewal.KEPT]
    monkeypatch.undo()
    assert backend.verify(taken)
    backend.release(taken)
    backend.release(kept)


def test_a_request_that_was_repeated_before_a_login_is_a_repeated_one(make, closing):
    """A server that starts again may have carried it out, and has forgotten the token."""
    server = closing(Server())
    backend = make(server.url.replace("//", "//user:password@"))
    server.script = [
        close_without_answer,
        answer('{"message": "etcdserver: invalid auth token"}', 401),
        answer('{"header": {}, "token": "new"}'),
        answer('{"header": {}}'),
    ]
    assert backend.leave("x", "owner") is None


def test_one_of_several_nodes_is_away(make_etcd_cluster, make):
    nodes = make_etcd_cluster()
    nodes.sort(key=lambda node: node.is_leader())
    # The first one is asked first; without the leader, nothing works until the next election.
    backend = make(*(node.url for node in nodes), TIMEOUT=8)
    assert works(backend)
    nodes[0].pause()
    try:
        assert works(backend)
    finally:
        nodes[0].resume()


def test_a_full_server_says_what_to_do_and_lets_locks_go(make_etcd, make):
    server = make_etcd("--quota-backend-bytes", str(2**20))
    backend = make(server.url)
    taken, evicted = take(backend, claim("before")), take(backend, reader("evicted"))
    big = {"value": encode("x" * 200_000)}
    numbers = itertools.count()

    def is_full():
        with contextlib.suppress(OSError):
            server.request("/v3/kv/put", {"key": encode(f"big{next(numbers)}"), **big})
        return server.request("/v3/maintenance/status").get("errors")

    wait_until(is_full, "the alarm", 60)
    message = refusal(backend)
    assert "space exceeded" in message
    assert "Compact and defragment" in message
    assert backend.renew([taken]) == [Renewal.KEPT]
    assert backend.verify(taken)
    assert backend.release(taken)
    other = make(server.url, prefix=backend.config.key_prefix)
    assert other.release(Grant("evicted", evicted.owner))
    ((number, message), *_) = problems(backend)
    assert number == "W050"
    assert "NOSPACE" in message


class TestCheck:
    def test_a_lost_majority_is_not_taken_for_a_full_disk(self, make, make_etcd_cluster):
        nodes = make_etcd_cluster()
        for node in nodes[1:]:
            node.kill()
        backend = make(nodes[0].url, TIMEOUT=1)

        def is_without_leader():
            status = nodes[0].request("/v3/maintenance/status")
            return "etcdserver: no leader" in status.get("errors", [])

        wait_until(is_without_leader, "the node to notice it", 20)
        ((number, message),) = problems(backend)
        assert number == "E013"
        assert "a majority of the nodes" in message

    def test_a_large_database(self, backend, monkeypatch):
        monkeypatch.setattr(module, "LARGE", 1)
        ((number, message),) = problems(backend)
        assert number == "W050"
        assert "MiB" in message

    def test_a_history_that_was_never_compacted(self, make, make_etcd, monkeypatch):
        server = make_etcd()
        backend = make(server.url)
        assert problems(backend) == []
        monkeypatch.setattr(module, "MANY", 1)
        backend.release(take(backend, claim("x")))
        ((number, message),) = problems(backend)
        assert number == "W051"
        assert "never compacted" in message
        revision = server.request("/v3/kv/range", {"key": encode("x")})["header"]["revision"]
        server.request("/v3/kv/compaction", {"revision": revision})
        assert problems(backend) == []

    def test_it_names_the_version(self, backend):
        (first, *_) = backend.check()
        assert "is etcd 3." in first.message

    def test_settings(self, shared_etcd):
        def found(*urls, **options):
            return [each.id for each in EtcdBackend.problems(config_of(*urls, **options))]

        assert found(shared_etcd.url) == []
        assert found("etcd://h") == ["E007"]
        assert found("http://h", CERT="x") == ["E008"]
        assert found("http://h", USER="x") == ["E008"]
        assert found("http://h", TIMEOUT=0) == ["E003"]


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
class TestForgetfulServer:
    """The service proposes lower numbers; the fence goes on."""

    @pytest.fixture
    def server(self, make_etcd, settings):
        server = make_etcd()
        entry = {"BACKEND": ETCD, "LOCATION": server.url, "FENCE_DATABASE": DATABASE}
        settings.FENCEDLOCK = {ALIAS: entry}
        yield server
        service(ALIAS).backend.close()

    def token(self):
        with lock("x") as lease:
            return lease.token

    def assert_rising(self, server, lose):
        first = [self.token() for _ in range(20)][-1]
        with contextlib.suppress(LeaseLost), lock("x", ttl=60) as former:
            lose()
            later = [beside(self.token).result(30) for _ in range(3)]
            assert later == [former.token + 1, former.token + 2, former.token + 3]
            with pytest.raises((StaleFence, LeaseLost)), former.atomic():
                pass
            assert former.token > first

    def test_a_server_that_starts_empty(self, server):
        def lose():
            server.kill()
            server.start(empty=True)

        self.assert_rising(server, lose)

    def test_a_server_that_was_restored_from_a_backup(self, server, tmp_path):
        self.token()
        server.stop()
        backup = tmp_path / "backup"
        # With its owner, as which the server runs.
        subprocess.run(["cp", "-a", server._data, backup], check=True)
        server.start()

        def lose():
            server.kill()
            shutil.rmtree(server._data)
            subprocess.run(["cp", "-a", backup, server._data], check=True)
            server.start()

        self.assert_rising(server, lose)


@on_postgres
class TestAcceptance(ServiceAcceptance):
    backend = ETCD

    def location(self, *addresses):
        return [f"http://{each.host}:{each.port}" for each in addresses]

    @pytest.fixture
    def servers(self, shared_etcd):
        return [shared_etcd]

    @pytest.fixture
    def cluster(self, make_etcd_cluster):
        return make_etcd_cluster()

    @pytest.fixture
    def single(self, make_etcd):
        return make_etcd()
