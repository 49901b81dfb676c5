"""What is done to servers, and to the ways that lead to them."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from tests.servers import Proxy
from tests.servers.process import _family, run_as_server_user, wait_until

from .nemesis import OPEN, Fault, Lab

ON_POSTGRES = ("rows", "postgres", "redis", "valkey")
ON_REDIS = ("redis", "valkey")
WITH_LEADER = ("etcd", "zookeeper", "consul")
ON_NODES = (*WITH_LEADER, "redlock")
ON_MARIADB = ("mariadb", "mysql")
PROXIED = ("rows", "postgres", *ON_MARIADB, "redis", "valkey", *ON_NODES, "dynamodb")
#: No takeover and no rejection is expected: no client outlives its lease unnoticed.
BARE = {"injections": 2}
UNANSWERED = {"injections": 2, "unknown": 2}
TAKEN = {"injections": 2, "takeovers": 1}


# Redis


@contextlib.contextmanager
def _while_holding(lab: Lab, chance: float = 0.5) -> Iterator[None]:
    """Pause a holder during the block, so that it continues without noticing."""
    who = lab.await_holder()
    if who is None or lab.random.random() > chance:
        yield
        return
    with lab.crew.paused(who):
        yield
        lab.await_successor(who)


def empty(lab: Lab) -> None:
    with _while_holding(lab):
        lab.note("empty")
        lab.site.redis.empty()
    lab.sleep(0.5, 1.5)


def fill_memory(lab: Lab) -> None:
    """Leave Redis no memory: it drops keys, or refuses to write."""
    policy = lab.random.choice(["allkeys-lru", "noeviction"])
    lab.await_holder()
    lab.note(f"fill memory, {policy}")
    with lab.site.redis.configured(maxmemory="1", maxmemory_policy=policy):
        lab.sleep(0.7, 2)
    lab.sleep(0.5, 1)


def fill_file(lab: Lab) -> None:
    """Let Redis persist to a file that can't grow: it rejects writes until it can."""
    redis = lab.site.redis
    with redis.configured(appendonly="yes", appendfsync="everysec"):
        wait_until(lambda: _is_kept(redis), "Redis to keep its file")
        lab.await_holder()
        lab.note("fill file")
        _limit_files(redis.process.pid, 1)
        try:
            wait_until(lambda: not _is_kept(redis), "Redis to find its disk full", 5)
            lab.sleep(0.7, 2)
        finally:
            _limit_files(redis.process.pid, "unlimited")
        wait_until(lambda: _is_kept(redis), "Redis to write again")
    lab.sleep(0.5, 1)


def _is_kept(redis: Any) -> bool:
    found = redis.info("persistence")
    begun = found["aof_enabled"] and not found["aof_rewrite_in_progress"]
    return bool(begun and found["aof_last_write_status"] == "ok")


def restart_redis(lab: Lab) -> None:
    with _while_holding(lab):
        lab.note("restart redis")
        lab.site.redis.kill()
        lab.sleep(0, 0.5)
        lab.site.redis.start()
    lab.sleep(0.5, 1.5)


def fail_over(lab: Lab) -> None:
    site = lab.site
    replica = site.launch(replica_of=site.redis)
    # From here on it gets nothing more, and the primary goes on granting.
    replica.promote()
    lab.sleep(0.3, 1)
    with _while_holding(lab, chance=0.8):
        lab.note("fail over")
        old, site.redis = site.redis, replica
        site.redis_proxy.retarget(replica.host, replica.port)
        old.kill()
        site.redis_proxy.cut()
    lab.sleep(0.5, 1.5)


# Services of several nodes


def kill_leader(lab: Lab) -> None:
    lab.await_holder()
    leader = lab.site.leader
    lab.note("kill leader")
    leader.kill()
    lab.sleep(1, 3)
    leader.start()
    lab.sleep(0.5, 1.5)


def lose_quorum(lab: Lab) -> None:
    """Pause most nodes: nothing is granted or renewed."""
    nodes = lab.site.nodes
    with _while_holding(lab), contextlib.ExitStack() as stack:
        lab.note("lose quorum")
        for node in lab.random.sample(nodes, len(nodes) // 2 + 1):
            node.pause()
            stack.callback(node.resume)
        lab.sleep(1, 2.5)
    lab.sleep(0.5, 1.5)


def empty_node(lab: Lab) -> None:
    """Restart one node without its data."""
    node = lab.random.choice(lab.site.nodes)
    with _while_holding(lab):
        lab.note("empty node")
        node.kill()
        node.start(empty=True)
    lab.sleep(0.5, 1.5)


# Databases


def restart_database(lab: Lab) -> None:
    server = _database(lab)
    lab.await_holder()
    lab.note("restart database")
    server.kill()
    lab.sleep(0, 0.3)
    server.start()
    lab.sleep(1, 2)


def end_sessions(lab: Lab) -> None:
    lab.await_holder()
    lab.note("end sessions")
    server = _database(lab)
    if hasattr(server, "terminate_sessions"):
        server.terminate_sessions()
    else:
        _kill_connections(server)
    lab.sleep(0.7, 1.5)


def fill_disk(lab: Lab) -> None:
    server = lab.site.postgres
    lab.await_holder()
    lab.note("fill disk")
    _limit_files(server.process.pid, lab.random.choice([200_000, 500_000]))
    lab.sleep(1, 2)
    _limit_files(server.process.pid, "unlimited")
    if not server.process.running:
        server.process.start()
    _wait_for_postgres(server)
    lab.sleep(1, 2)


def _limit_files(pid: int, size: int | str) -> None:
    # New processes inherit it from the first. The soft limit alone, so that it can be lifted.
    for member in _family(pid):
        with contextlib.suppress(RuntimeError):
            run_as_server_user(shutil.which("prlimit"), "--pid", member, f"--fsize={size}:")


def _no_prlimit() -> str | None:
    return None if shutil.which("prlimit") else "prlimit (of util-linux) was not found"


def _wait_for_postgres(server: Any) -> None:
    def answers() -> bool:
        try:
            server.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    wait_until(answers, "PostgreSQL to recover", 30)


def _kill_connections(server: Any) -> None:
    mine = "SELECT CONNECTION_ID()"
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(mine)
        own = cursor.fetchone()[0]
        cursor.execute("SELECT id FROM information_schema.processlist WHERE user = %s", ["root"])
        for (session,) in cursor.fetchall():
            if session != own:
                with contextlib.suppress(Exception):
                    cursor.execute(f"KILL {session}")


def _database(lab: Lab) -> Any:
    return getattr(lab.site, "mariadb", None) or lab.site.postgres


# The network


@contextlib.contextmanager
def _healed(proxies: list[Proxy]) -> Iterator[None]:
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.pass_through()


def _is_far(name: str) -> bool:
    # Where some clients are far away, these are.
    return int(name.split("-")[1]) % 2 == 1


def _some(lab: Lab) -> list[Proxy]:
    proxies: list[Proxy] = lab.site.proxies
    return lab.random.sample(proxies, lab.random.randint(1, len(proxies)))


def _silence(lab: Lab, what: str, fail: Callable[[Proxy], None]) -> None:
    proxies = _some(lab)
    lab.await_holder(_is_far)
    with _healed(proxies):
        lab.note(what)
        for proxy in proxies:
            fail(proxy)
        lab.sleep(1.2, 2.5)
    lab.sleep(0.5, 1)


def lose_replies(lab: Lab) -> None:
    _silence(lab, "lose replies", Proxy.drop_replies)


def hold_back(lab: Lab) -> None:
    """Hold everything back, and deliver it late: after others have come."""
    _silence(lab, "hold back", Proxy.black_hole)


def slow_down(lab: Lab) -> None:
    proxies = _some(lab)
    with _healed(proxies):
        lab.note("slow down")
        for proxy in proxies:
            proxy.delay(lab.random.uniform(0, 0.5) * lab.ttl, lab.random.uniform(0, 0.5) * lab.ttl)
        lab.sleep(1, 3)
    lab.sleep(0.5, 1)


def cut(lab: Lab) -> None:
    proxies = _some(lab)
    with _healed(proxies):
        lab.note("cut")
        for _ in range(3):
            for proxy in proxies:
                way = lab.random.choice(["to_server", "to_client"])
                proxy.cut_after(**{way: lab.random.randint(1, 3000)})
            lab.sleep(0.1, 0.6)


def kill_half_open(lab: Lab) -> None:
    """Kill a holder whose connections stay open, for the server doesn't hear of it."""
    proxies: list[Proxy] = lab.site.proxies
    who = lab.await_holder(_is_far)
    if who is None:
        return
    with _healed(proxies):
        for proxy in proxies:
            proxy.black_hole()
        lab.note("half open", client=who)
        lab.crew.kill(who)
        lab.sleep(2, 4)


SERVER_FAULTS = (
    Fault("empty", empty, ON_REDIS, TAKEN | {"refusals": 1}, forgets=True),
    Fault("empty-open", empty, ON_REDIS, {"injections": 4}, forgets=True, ways=OPEN),
    Fault("full-memory", fill_memory, ON_REDIS, UNANSWERED | {"takeovers": 1}, forgets=True),
    Fault("full-file", fill_file, ON_REDIS, UNANSWERED, forgets=True, missing=_no_prlimit),
    Fault("restart-redis", restart_redis, ON_REDIS, TAKEN | {"refusals": 1}, forgets=True),
    Fault("fail-over", fail_over, ON_REDIS, TAKEN, forgets=True, far="all"),
    Fault("kill-leader", kill_leader, WITH_LEADER, UNANSWERED, forgets=True),
    Fault("lose-quorum", lose_quorum, ON_NODES, UNANSWERED, forgets=True),
    Fault("empty-node", empty_node, ON_NODES, {"injections": 2}, forgets=True),
    Fault(
        "restart-database", restart_database, (*ON_POSTGRES, *ON_MARIADB), UNANSWERED, forgets=True
    ),
    Fault(
        "lost-commits",
        restart_database,
        ("forgetful",),
        {"injections": 3},
        forgets=True,
        # What was confirmed is gone. Nothing stale comes in its place.
        tolerates=frozenset({"I6"}),
    ),
    Fault("end-sessions", end_sessions, (*ON_POSTGRES, *ON_MARIADB), UNANSWERED, forgets=True),
    Fault("full-disk", fill_disk, ON_POSTGRES, UNANSWERED, forgets=True, missing=_no_prlimit),
    Fault("lose-replies", lose_replies, PROXIED, UNANSWERED, forgets=True, far="some"),
    Fault("hold-back", hold_back, PROXIED, TAKEN, forgets=True, far="some"),
    Fault("slow", slow_down, PROXIED, BARE, forgets=True, far="all"),
    Fault("cut", cut, PROXIED, UNANSWERED, forgets=True, far="all"),
    Fault("half-open", kill_half_open, PROXIED, TAKEN, forgets=True, far="some"),
)
