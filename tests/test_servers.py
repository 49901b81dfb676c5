import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest
import redis

from tests.servers import Postgres, Redis, ServerNotOurs, workspace
from tests.servers.process import _family, _processes, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(params=["redis", "valkey"])
def make_any_redis(request):
    return request.getfixturevalue(f"make_{request.param}")


@pytest.fixture
def echo(make_proxy):
    """A proxy to a server that sends everything back, and what that server got."""
    got = []

    def serve(connection):
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                got.append(data)
                connection.sendall(data)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield make_proxy(*listener.getsockname()), got
        listener.shutdown(socket.SHUT_RDWR)


# The first message of a session: "may I use TLS?"
_SSL_REQUEST = struct.pack("!II", 8, 80877103)


def connect(proxy, timeout=5):
    return socket.create_connection((proxy.host, proxy.port), timeout=timeout)


def is_silent(connection):
    connection.settimeout(0.1)
    try:
        return connection.recv(100) and False
    except TimeoutError:
        return True
    finally:
        connection.settimeout(5)


def is_cut(connection):
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_postgres_keeps_what_was_committed_before_it_was_killed(make_postgres):
    server = make_postgres()
    server.execute("CREATE TABLE t AS SELECT 1 AS i")
    server.kill()
    with pytest.raises(psycopg.OperationalError):
        server.connect()
    server.start()
    assert server.execute("SELECT i FROM t") == [(1,)]


def test_paused_postgres_hangs_in_open_sessions_and_new_ones(make_postgres):
    server = make_postgres()
    with server.connect() as old, socket.socket(fileno=os.dup(old.fileno())) as old_socket:
        server.pause()
        old.pgconn.send_query(b"SELECT 42")
        old.pgconn.flush()
        assert is_silent(old_socket)
        with socket.create_connection((server.host, server.port)) as new_socket:
            new_socket.sendall(_SSL_REQUEST)
            assert is_silent(new_socket)
            server.resume()
            assert new_socket.recv(1) == b"N"
        assert old.pgconn.get_result().get_value(0, 0) == b"42"
        assert old.pgconn.get_result() is None


def test_redis_that_was_killed_has_forgotten_everything(make_any_redis):
    server = make_any_redis()
    with server.client() as client:
        client.set("key", 1)
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.start()
        assert client.get("key") is None


def test_paused_redis_hangs(make_any_redis):
    server = make_any_redis()
    with server.client(socket_timeout=0.1) as client:
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.resume()
        assert client.ping()


def test_promoted_replica_lacks_the_last_writes(make_any_redis):
    primary = make_any_redis()
    primary.execute("SET", "key", "early")
    replica = make_any_redis(replica_of=primary)
    with pytest.raises(redis.ReadOnlyError):
        replica.execute("SET", "key", "refused")
    replica.promote()
    primary.execute("SET", "key", "late")
    primary.kill()
    assert replica.execute("GET", "key") == "early"
    replica.execute("SET", "key", "after the failover")


def test_monitor_tells_commands_from_those_of_scripts(make_any_redis):
    server = make_any_redis()
    with server.client() as client, server.monitor() as seen:
        client.set("key", 'a "quoted" value')
        client.eval("return redis.call('GET', KEYS[1])", 1, "key")
    ours = [command for command in seen if command.name not in ("HELLO", "CLIENT", "SELECT")]
    assert [(command.name, command.lua) for command in ours] == [
        ("SET", False),
        ("EVAL", False),
        ("GET", True),
    ]
    assert ours[2].text == "GET key"


def test_rabbitmq_leaves_no_process_and_nothing_at_home(make_rabbitmq):
    cookie = Path("~/.erlang.cookie").expanduser()
    before = cookie.exists()
    server = make_rabbitmq()
    pids = {*_family(server.process.pid), *_family(server._names.pid)}
    assert len(pids) > 2
    server.close()
    # What the server had started ends when it finds that the server has.
    wait_until(lambda: not running(pids), "all of its processes to end", 5)
    assert cookie.exists() == before


class TestClock:
    def test_a_server_goes_by_a_clock_that_is_set(self, make_redis, make_clock):
        server, watch = make_redis(), make_clock()
        server.go_by(watch)
        server.execute("SET", "lock", "me", "PX", 30_000)
        watch.jump(-20)
        assert 45_000 < server.execute("PTTL", "lock") <= 50_000
        watch.jump(60)
        assert server.execute("EXISTS", "lock") == 0
        assert abs(int(server.execute("TIME")[0]) - time.time() - 40) < 5


def test_proxy_delays_each_direction(echo):
    proxy, _ = echo
    proxy.delay(to_server=0.1, to_client=0.1)
    with connect(proxy) as connection:
        before = time.monotonic()
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"
    assert time.monotonic() - before >= 0.2


def test_black_hole_holds_everything_back_until_it_ends(echo):
    proxy, got = echo
    proxy.black_hole()
    with connect(proxy) as connection:
        connection.sendall(b"hello")
        assert is_silent(connection)
        assert got == []
        proxy.pass_through()
        assert connection.recv(100) == b"hello"


def test_dropped_replies_are_lost_and_their_connection_with_them(echo):
    proxy, got = echo
    proxy.drop_replies()
    with connect(proxy) as connection:
        connection.sendall(b"hello")
        assert is_silent(connection)
        assert got == [b"hello"]
        proxy.pass_through()
        assert is_cut(connection)
    with connect(proxy) as connection:
        connection.sendall(b"again")
        assert connection.recv(100) == b"again"


def test_cut_ends_open_connections_and_takes_new_ones(echo):
    proxy, _ = echo
    with connect(proxy) as one, connect(proxy) as other:
        for connection in (one, other):
            connection.sendall(b"hello")
            assert connection.recv(100) == b"hello"
        proxy.cut()
        assert is_cut(one)
        assert is_cut(other)
    with connect(proxy) as connection:
        connection.sendall(b"again")
        assert connection.recv(100) == b"again"


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_cut_after_some_bytes_delivers_just_those(echo, direction):
    proxy, got = echo
    proxy.cut_after(**{direction: 7})
    with connect(proxy) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"
        connection.sendall(b"again")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(100):
                received += data
    if direction == "to_client":
        assert received == b"ag"
    wait_until(lambda: len(got) == 2, "the server to get both")
    assert got[1] == (b"ag" if direction == "to_server" else b"again")


def test_server_from_the_environment_is_nobodys_to_kill():
    assert not Redis("redis://127.0.0.1:6379").can_kill
    with pytest.raises(ServerNotOurs, match="make_postgres"):
        Postgres("postgres://127.0.0.1").kill()


_SCRIPT = """
import os, signal
from tests.servers import Postgres, Redis, finding, workspace
servers = [Postgres.launch(finding.postgres()), Redis.launch(finding.valkey())]
servers[1].pause()
print(workspace.root(), *(server.process.pid for server in servers), flush=True)
if os.fork() == 0:
    raise SystemExit
os.wait()
assert servers[0].execute("SELECT 1") == [(1,)], "the fork took the servers along"
"""


def run_script(end, root):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _SCRIPT + end],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    )
    directory, *pids = done.stdout.split()
    return done.returncode, Path(directory), {int(pid) for pid in pids}


def running(pids):
    return {pid for pid, _, state in _processes() if pid in pids and state != "Z"}


def test_nothing_is_left_behind(pytestconfig):
    code, directory, pids = run_script("", pytestconfig.rootpath)
    assert code == 0
    assert not running(pids)
    assert not directory.exists()


def test_killed_test_process_leaves_no_server_and_the_next_one_sweeps(pytestconfig):
    end = "os.kill(os.getpid(), signal.SIGKILL)"
    code, directory, pids = run_script(end, pytestconfig.rootpath)
    assert code == -signal.SIGKILL
    wait_until(lambda: not running(pids), "the servers to die along")
    assert directory.exists()
    workspace._sweep()
    assert not directory.exists()
    assert workspace.root().exists()
