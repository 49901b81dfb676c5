"""JSON over HTTP to several nodes, on small servers of the test itself."""

import contextlib
import json
import os
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from django_fencedlock.backends import http
from django_fencedlock.backends.http import HttpNodes, NodesFailed
from django_fencedlock.backends.http_settings import credentials, location_problems
from django_fencedlock.conf import AliasConfig
from tests.scripts import run_python
from tests.servers import Authority
from tests.servers.process import free_port, wait_until

#: Seconds that a busy machine may take longer.
SLACK = 5.0


def config_of(*urls, timeout=5.0, **options):
    return AliasConfig(
        alias="default",
        backend="",
        location=",".join(urls),
        ttl=30.0,
        blocking_timeout=10.0,
        key_prefix="",
        fence_database="default",
        options={"TIMEOUT": timeout, **options},
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        node = self.server.node
        node.requests.append((self.client_address, self.path, json.loads(body or b"null")))
        act = node.script.pop(0) if node.script else node.otherwise
        act(self)

    do_GET = do_PUT = do_POST  # noqa: N815


class Server:
    """A node that does what its script says, one act for each request."""

    def __init__(self, context=None):
        self.requests, self.script, self.otherwise = [], [], answer()
        self.over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.node = self
        if context:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    @property
    def connections(self):
        return len({client for client, _, _ in self.requests})

    def close(self):
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


def answer(body="{}", status=200, **headers):
    def act(handler):
        data = body.encode()
        handler.send_response(status)
        for key, value in {"Content-Length": len(data), **headers}.items():
            handler.send_header(key, value)
        handler.end_headers()
        handler.wfile.write(data)

    return act


def answer_and_close(handler):
    answer('"last"')(handler)
    handler.close_connection = True


def close_without_answer(handler):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def hang(handler):
    handler.server.node.over.wait(20)
    handler.close_connection = True


def hang_in_body(seconds):
    def act(handler):
        time.sleep(seconds)
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b"{")
        hang(handler)

    return act


def lines(*parts, then=None, pause=0.0, status=200):
    """Answer in chunks of one line each, as etcd's watches do."""

    def act(handler):
        handler.send_response(status)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for part in parts:
            data = f"{part}\n".encode()
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            time.sleep(pause)
        if then:
            then(handler)
        else:
            handler.wfile.write(b"0\r\n\r\n")

    return act


@pytest.fixture
def make_server(closing):
    return lambda *given: closing(Server(*given))


@pytest.fixture
def server(make_server):
    return make_server()


@pytest.fixture
def other(make_server):
    return make_server()


@pytest.fixture
def make(closing):
    def make(*urls, **options):
        return closing(HttpNodes(config_of(*urls, **options), 2379))

    return make


@pytest.fixture
def refused():
    return f"http://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def within(seconds):
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# Requests


def test_a_request_carries_json(server, make):
    server.script = [answer('{"a": [1]}')]
    found = make(server.url).ask("POST", "/v3/x", {"b": "\N{SNOWMAN}"})
    assert (found.status, found.body, found.is_repeated) == (200, {"a": [1]}, False)
    (request,) = server.requests
    assert request[1:] == ("/v3/x", {"b": "\N{SNOWMAN}"})


def test_a_request_without_a_body(server, make):
    make(server.url).ask("GET", "/v1/x?index=1")
    assert server.requests[0][1:] == ("/v1/x?index=1", None)


@pytest.mark.parametrize(("text", "body"), [("", None), ("no JSON", "no JSON"), ("true", True)])
def test_an_answer_may_be_no_json(server, make, text, body):
    server.script = [answer(text)]
    assert make(server.url).ask("POST", "/").body == body


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409])
def test_a_refusal_is_an_answer(server, make, status):
    server.script = [answer('{"error": "no"}', status)]
    found = make(server.url).ask("POST", "/")
    assert (found.status, found.body) == (status, {"error": "no"})
    assert len(server.requests) == 1


def test_headers_of_an_answer_can_be_read(server, make):
    server.script = [answer("{}", 200, **{"X-Consul-Index": 7})]
    assert make(server.url).ask("GET", "/").headers["X-Consul-Index"] == "7"


# Connections


def test_a_connection_is_used_again(server, make):
    nodes = make(server.url)
    for _ in range(5):
        nodes.ask("POST", "/")
    assert server.connections == 1


def test_threads_at_once_have_connections_of_their_own(server, make):
    nodes, barrier = make(server.url, timeout=10), threading.Barrier(4)

    def meet(handler):
        barrier.wait(10)
        answer()(handler)

    server.otherwise = meet
    threads = [threading.Thread(target=nodes.ask, args=["POST", "/"]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.connections == 4
    server.otherwise = answer()
    for _ in range(4):
        nodes.ask("POST", "/")
    assert server.connections == 4


def test_idle_connections_are_limited(server, make, monkeypatch):
    monkeypatch.setattr(http, "MAX_IDLE", 0)
    nodes = make(server.url)
    for _ in range(3):
        nodes.ask("POST", "/")
    assert server.connections == 3


@pytest.mark.parametrize("way", [answer_and_close, answer('"last"', Connection="close")])
def test_a_connection_that_the_server_closed_is_not_used(server, make, way):
    """Nothing was sent twice: the acquire is no doubt."""
    nodes = make(server.url)
    server.script = [way]
    assert nodes.ask("POST", "/").body == "last"
    wait_until(lambda: all(map(http._is_closed, nodes._idle.get())), "the end of the connection")
    found = nodes.ask("POST", "/")
    assert (found.status, found.is_repeated) == (200, False)
    assert len(server.requests) == 2


def test_a_request_without_an_answer_is_repeated(server, make):
    nodes = make(server.url)
    nodes.ask("POST", "/")
    server.script = [close_without_answer]
    found = nodes.ask("POST", "/", {"a": 1})
    assert (found.status, found.is_repeated) == (200, True)
    assert [body for _, _, body in server.requests] == [None, {"a": 1}, {"a": 1}]


def test_an_interrupt_closes_the_connection(server, make, monkeypatch):
    """Otherwise the next request would read the answer of this one."""
    nodes, really = make(server.url), http._exchange
    nodes.ask("POST", "/")

    def interrupted(connection, *given):
        connection.request(*given[:4])
        raise KeyboardInterrupt

    monkeypatch.setattr(http, "_exchange", interrupted)
    server.script = [answer('"old"'), answer('"new"')]
    with pytest.raises(KeyboardInterrupt):
        nodes.ask("POST", "/")
    monkeypatch.setattr(http, "_exchange", really)
    deadline = time.monotonic() + 10
    while len(server.requests) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert nodes.ask("POST", "/").body == "new"
    assert server.connections == 2


def test_close_closes_idle_connections(server, make):
    nodes = make(server.url)
    nodes.ask("POST", "/")
    nodes.close()
    nodes.ask("POST", "/")
    assert server.connections == 2


def test_a_child_process_leaves_the_sockets_of_its_parent_alone(server, make):
    nodes = make(server.url)
    nodes.ask("POST", "/parent")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            nodes.after_fork()
            for _ in range(2):
                nodes.ask("POST", "/child")
            nodes.close()
            os.write(writing, b"ok")
        finally:
            os._exit(0)
    assert os.read(reading, 2) == b"ok"
    os.waitpid(child, 0)
    found = nodes.ask("POST", "/parent")
    assert (found.status, found.is_repeated) == (200, False)
    clients = [(path, client) for client, path, _ in server.requests]
    assert len({client for path, client in clients if path == "/parent"}) == 1
    assert len(set(clients)) == 2


def test_each_hub_of_gevent_has_connections_of_its_own(server):
    """A socket of gevent can't be used in another hub: the keeper's thread has one."""
    code = """
        from gevent import monkey
        monkey.patch_all()
        import gevent, sys
        import django
        from django.conf import settings
        settings.configure()
        from django_fencedlock.backends.http import HttpNodes
        from django_fencedlock.conf import AliasConfig
        from django_fencedlock.core import runtime
        config = AliasConfig("default", "", sys.argv[1], 30.0, 10.0, "", "default", {"TIMEOUT": 5})
        nodes = HttpNodes(config, 1)
        gevent.joinall([gevent.spawn(nodes.ask, "POST", "/") for _ in range(3)], raise_error=True)
        done = runtime.SimpleQueue()

        def ask():
            done.put(nodes.ask("POST", "/").status)
            done.put(nodes.ask("POST", "/").is_repeated)

        runtime.start(ask)
        assert [done.get(), done.get()] == [200, False]
        assert len(nodes._idle.all()) == 2
        nodes.ask("POST", "/")
    """
    run_python(server.url, code=code)
    assert server.connections == 4


# Nodes that fail


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_another_node_is_asked_if_one_cannot_serve(server, other, make, status):
    nodes = make(server.url, other.url)
    server.otherwise = answer("{}", status)
    # It may have been carried out: a proxy's error, or a leader that was replaced meanwhile.
    assert nodes.ask("POST", "/").is_repeated is (status != 429)
    nodes.ask("POST", "/")
    # The node that answered is asked first from now on.
    assert (len(server.requests), len(other.requests)) == (1, 2)


def test_another_node_is_asked_if_one_refuses(server, make, refused):
    with within(SLACK):
        found = make(refused, server.url).ask("POST", "/")
    assert (found.status, found.is_repeated) == (200, False)


def test_another_node_is_asked_in_time_if_one_hangs(server, other, make):
    nodes = make(server.url, other.url, timeout=2)
    server.otherwise = hang
    with within(1 + SLACK):
        assert nodes.ask("POST", "/").is_repeated
    with within(SLACK):
        assert not nodes.ask("POST", "/").is_repeated


@pytest.mark.parametrize("is_chunked", [True, False])
def test_an_answer_that_is_cut_is_asked_for_again(server, make, is_chunked):
    def cut(handler):
        handler.send_response(200)
        length = {"Transfer-Encoding": "chunked"} if is_chunked else {"Content-Length": "100"}
        handler.send_header(*length.popitem())
        handler.end_headers()
        handler.wfile.write(b"2\r\n{}\r\n" if is_chunked else b"{}")
        close_without_answer(handler)

    server.script = [cut]
    assert make(server.url).ask("POST", "/").is_repeated
    assert len(server.requests) == 2


def test_a_long_answer_in_chunks_leaves_its_connection_usable(server, make):
    server.script = [lines(*["x" * 5000] * 50)]
    nodes = make(server.url)
    assert nodes.ask("POST", "/").body.count("x") == 250_000
    nodes.ask("POST", "/")
    assert server.connections == 1


def test_an_answer_that_comes_in_drops_fails_in_time(server, make):
    """Each drop would have the whole timeout."""

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(50):
                handler.wfile.write(b" ")
                time.sleep(0.1)
        handler.close_connection = True

    server.otherwise = drip
    with within(1 + SLACK), pytest.raises(NodesFailed):
        make(server.url, timeout=1).ask("POST", "/")


def test_a_node_that_recovers_is_asked_again_within_the_timeout(server, make):
    server.script = [answer("{}", 503)] * 3
    assert make(server.url).ask("POST", "/").status == 200


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("act", [hang, hang_in_body(0.4), answer('{"error": "busy"}', 503)])
def test_it_fails_after_the_timeout(make_server, make, number, act):
    servers = [make_server() for _ in range(number)]
    for each in servers:
        each.otherwise = act
    with within(1 + SLACK), pytest.raises(NodesFailed, match=r"127\.0\.0\.1:\d+: "):
        make(*(each.url for each in servers), timeout=1).ask("POST", "/")


@pytest.fixture
def named(monkeypatch, closing):
    """Return a function that gives a name three silent addresses, and then others."""
    look_up = socket.getaddrinfo
    deaf = closing(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(3):
        other = closing(socket.socket())
        other.setblocking(False)
        other.connect_ex(deaf.getsockname())
    silent = [deaf.getsockname()[1]] * 3

    def name(*ports):
        def answers(host, port, *args, **terms):
            if host != "many.example":
                return look_up(host, port, *args, **terms)
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, ("127.0.0.1", each)) for each in (*silent, *ports)]

        monkeypatch.setattr(socket, "getaddrinfo", answers)
        return "http://many.example:1"

    return name


def test_a_name_with_many_addresses_is_an_error_in_time(make, named):
    """Each of them would have the whole timeout."""
    nodes = make(named(), timeout=3)
    with within(3 + SLACK), pytest.raises(NodesFailed, match="timed out"):
        nodes.ask("POST", "/")


def test_the_last_address_of_a_name_is_tried_in_time(make, named, server):
    port = int(server.url.rpartition(":")[2])
    with within(3 + SLACK):
        assert make(named(port), timeout=3).ask("POST", "/").status == 200


def test_the_error_names_the_status_and_the_reason(server, make):
    server.otherwise = answer('{"error": "busy", "code": 14}', 503)
    with pytest.raises(NodesFailed, match="status 503, busy"):
        make(server.url, timeout=0.2).ask("POST", "/")


def test_the_error_names_a_reason_that_says_more_than_a_last_try_without_time(server, make):
    server.script = [answer('{"error": "busy"}', 503)] * 2
    server.otherwise = hang
    with pytest.raises(NodesFailed, match="status 503, busy"):
        make(server.url, timeout=1).ask("POST", "/")


def test_nodes_that_refuse_are_not_asked_without_a_pause(make, refused, monkeypatch):
    calls, really = [], socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda *g, **k: calls.append(1) or really(*g))
    with pytest.raises(NodesFailed, match="refused"):
        make(refused, timeout=1).ask("POST", "/")
    assert 2 <= len(calls) < 15


def test_a_server_of_another_protocol_is_an_error(make, closing):
    listener = closing(socket.create_server(("127.0.0.1", 0)))

    def greet():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.sendall(b"-ERR unknown command\r\n")
                client.close()

    threading.Thread(target=greet, daemon=True).start()
    with pytest.raises(NodesFailed):
        make(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.3).ask("POST", "/")


# Long answers


def streamed(nodes, seconds=30.0, on_open=lambda stop: None):
    return nodes.stream("POST", "/v3/watch", {}, seconds, on_open)


def test_a_stream_yields_lines_until_it_ends(server, make):
    server.script = [lines("a", "b")]
    with within(SLACK):
        assert list(streamed(make(server.url))) == ["a\n", "b\n"]


def test_a_stream_yields_each_line_as_it_comes(server, make):
    server.script = [lines("a", then=hang)]
    with within(SLACK):
        assert next(streamed(make(server.url))) == "a\n"


def test_a_stream_ends_in_time(server, make):
    server.script = [lines("a", then=hang), lines(*"abcdefghij", pause=0.5)]
    for _ in range(2):
        with within(2 + SLACK / 2):
            found = streamed(make(server.url), 2.0)
            assert next(found) == "a\n"
            list(found)


@pytest.mark.parametrize("tls", [False, True])
def test_a_stream_is_stopped_from_another_thread(make_server, make, tls, server):
    options = {}
    if tls:
        authority = Authority()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        issued = authority.issue("server")
        context.load_cert_chain(issued.certificate, issued.key)
        server = make_server(context)
        options = {"CA": str(authority.certificate)}
    server.script = [lines("a", then=hang)]
    stops = []
    with within(20):
        found = streamed(make(server.url, **options), 60, stops.append)
        assert next(found) == "a\n"
        threading.Timer(0.1, stops[0]).start()
        assert list(found) == []
    # Its socket is closed: the number may be that of another file.
    stops[0]()


def test_a_stream_has_a_connection_of_its_own_and_closes_it(server, make):
    nodes = make(server.url)
    nodes.ask("POST", "/")
    server.script = [lines("a", then=hang)]
    found = streamed(nodes)
    next(found)
    nodes.ask("POST", "/")
    found.close()
    nodes.ask("POST", "/")
    assert server.connections == 2


def test_a_stream_of_nothing_ends_at_once(server, make):
    """Consul's answer about a key that is gone."""
    server.script = [lines("{}", status=404)]
    nodes = make(server.url)
    with within(SLACK):
        assert list(streamed(nodes)) == []


def test_a_stream_without_any_time_left_leaves_the_node_alone(server, make):
    """A timeout of 0 is none at all: the connection failed at once, and another node was asked."""
    nodes = make(server.url, "http://127.0.0.1:1")
    assert list(nodes.stream("GET", "/", None, 0.0, lambda stop: None)) == []
    assert str(nodes._nodes[0]) == server.url.removeprefix("http://")


def test_a_request_that_came_too_often_was_not_carried_out(server, make):
    server.script = [answer("{}", 429)]
    assert make(server.url).ask("POST", "/").is_repeated is False
    server.script = [answer("{}", 503), answer("{}", 429)]
    assert make(server.url).ask("POST", "/").is_repeated is True


@pytest.mark.parametrize("status", [400, 401, 503])
def test_a_stream_that_is_refused_yields_nothing_and_pauses(server, make, status):
    """A waiter would look without a pause, and so send thousands of requests."""
    server.script = [lines('{"error": "no"}', status=status)]
    began = time.monotonic()
    assert list(streamed(make(server.url))) == []
    assert time.monotonic() - began >= 0.04


def test_a_stream_whose_node_is_gone_pauses_and_leaves_the_next_to_another(server, make, refused):
    nodes = make(refused, server.url)
    began = time.monotonic()
    assert list(streamed(nodes)) == []
    assert 0.04 < time.monotonic() - began < SLACK
    server.script = [lines("a")]
    assert list(streamed(nodes)) == ["a\n"]


# Settings


def problems(*urls, **options):
    return [
        (each.id, each.message)
        for each in location_problems(config_of(*urls, **options), 1, "Form.")
    ]


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("127.0.0.1:2379", "doesn't begin with http:// or https://"),
        ("etcd://h:2379", "doesn't begin with http:// or https://"),
        ("http://h:99999", "ort"),
        ("http://h:none", "ort"),
        ("http://:2379", "isn't a scheme, a host and a port alone"),
        ("http://h:2379/v3", "isn't a scheme, a host and a port alone"),
        ("http://h:2379?x=1", "isn't a scheme, a host and a port alone"),
        ("http://h:2379#x", "isn't a scheme, a host and a port alone"),
        ("http://[::1", ""),
    ],
)
def test_a_wrong_url_is_a_problem(url, wrong):
    with_password = url.replace("//", "//user:secret@", 1)
    for each in (url, with_password) if "//" in url else (url,):
        ((number, what),) = problems(each)
        assert number == "E007"
        assert wrong in what
        assert "secret" not in what


@pytest.mark.parametrize("url", ["http://h", "http://h/", "https://h:1", "http://[::1]:2379"])
def test_a_right_url_is_none(url):
    assert problems(url) == []


def test_no_url_is_a_problem():
    ((number, what),) = problems()
    assert number == "E007"
    assert "LOCATION is empty" in what


def test_mixed_schemes_are_a_problem():
    ((number, what),) = problems("http://a:1", "https://b:1")
    assert number == "E007"
    assert "both http:// and https://" in what


def test_tls_files_without_tls_are_a_problem():
    ((number, what),) = problems("http://a:1", CA="ca.pem", KEY="key.pem")
    assert number == "E008"
    assert "CA and KEY" in what


def test_tls_files_that_cannot_be_read_are_a_problem(tmp_path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for options in (
        {"CA": "/none/ca.pem"},
        {"CA": str(wrong)},
        {"CERT": str(wrong)},
        {"CERT": "/none/x"},
        {"KEY": str(wrong)},
        {"CA": 1},
    ):
        ((number, what),) = problems("https://a:1", **options)
        assert number == "E008"
        assert next(iter(options)) in what


def test_the_port_has_a_default(make):
    assert [str(node) for node in make("http://a", "http://b:1")._nodes] == ["a:2379", "b:1"]


def test_the_credentials_are_those_of_the_first_url_that_has_them():
    assert credentials(["http://a", "http://us%40er:pass%2Fword@b"]) == ("us@er", "pass/word")
    assert credentials(["http://user@b"]) == ("user", "")
    assert credentials(["http://b"]) is None


def test_no_message_has_the_password(server, make, refused):
    server.otherwise = answer("{}", 503)
    for url in (refused, server.url):
        with pytest.raises(NodesFailed) as caught:
            make(url.replace("//", "//user:secret@"), timeout=0.1).ask("POST", "/")
        assert "secret" not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_tls_with_the_wrong_authority_is_an_error_in_time(make_server, make):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued = Authority().issue("server")
    context.load_cert_chain(issued.certificate, issued.key)
    server = make_server(context)
    with (
        within(1 + SLACK),
        pytest.raises(NodesFailed, match=r"certificate verify failed.*Set .*'CA'"),
    ):
        make(server.url, timeout=1, CA=str(Authority().certificate)).ask("POST", "/")


def test_tls_to_a_server_without_it_is_an_error_in_time(server, make):
    with within(1 + SLACK), pytest.raises(NodesFailed, match="If it has no TLS, write http://"):
        make(server.url.replace("http:", "https:"), timeout=1).ask("POST", "/")


def test_a_server_that_never_ends_its_handshake_is_an_error_in_time(make, closing):
    listener = closing(socket.create_server(("127.0.0.1", 0)))
    with within(1 + SLACK), pytest.raises(NodesFailed):
        make(f"https://127.0.0.1:{listener.getsockname()[1]}", timeout=1).ask("POST", "/")
