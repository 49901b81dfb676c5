"""
What it takes to keep leases: CPU time, threads, requests, and how many are lost.

Run from the top of the checkout: ``python -m benchmarks.leases``. A process of its own takes that
many locks with a ttl of three seconds, then does nothing for ten: what it computes meanwhile is
what keeping them costs. Requests are counted for one round of renewal.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from benchmarks import project
from benchmarks.counting import counted
from benchmarks.processor import computed
from benchmarks.project import Given, Servers
from benchmarks.report import COUNTED, OURS, Report, options

CURVE = "leases kept, ttl 3 s"
TTL = 3.0
#: Those whose cost is asked for most; rows in a table are written at each renewal.
UNFENCED, REDIS, POSTGRES, ROWS = (
    f"{OURS}, redis, unfenced",
    f"{OURS}, redis",
    f"{OURS}, postgres",
    f"{OURS}, database",
)
PEER = "python-redis-lock, auto_renewal"
MANY = 1000
CPU_AIM, THREADS_AIM, LOST_AIM = 0.05, 1, 0
#: Seconds for a process to take all its locks.
PATIENCE = 120


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--curve", type=int, nargs="*", default=[1, 10, 100, MANY, 10_000])
    parser.add_argument("--holder", help="what a process of its own is told; not for you")
    given = parser.parse_args()
    if given.holder:
        _hold(json.loads(given.holder))
        return
    if given.short:
        given.seconds, given.curve = 2, [100]
    report = Report(given)
    # Each lock that a session has takes a place in the server's table.
    room = {"max_locks_per_transaction": "256", "max_connections": "100"}
    with project.started(postgres=room, MAX_LOCKS=20_000) as servers:
        print(f"load {os.getloadavg()[0]:.1f}, {given.seconds:g} s")
        print("\n                                      leases  CPU s  server's  threads  lost")
        many = given.curve[-1] if given.short else MANY
        _report(f"{many:,} leases, ttl 3 s", many, given.seconds, servers, report)
        for count in given.curve:
            if count != many:
                _report(CURVE, count, TTL, servers, report)


def _report(work: str, count: int, seconds: float, servers: Servers, report: Report) -> None:
    """The curve is told for ten seconds too, so that its points compare."""
    ours = (UNFENCED, REDIS, POSTGRES, ROWS)
    peer = (PEER,) if work != CURVE and find_spec("redis_lock") else ()
    for who in (*ours, *peer):
        found = _kept(who, count, seconds, servers)
        print(
            f"  {who:34} {count:8,} {found['ours']:6.3f} {found['theirs']:9.3f}"
            f" {found['threads']:8} {found['lost']:5}",
            flush=True,
        )
        scale = 10 / seconds
        if work != CURVE:
            aimed = who != PEER
            cpu_aim = CPU_AIM if aimed else None
            report.add(work, who, "CPU in 10 s", found["ours"] * scale, "s", aim=cpu_aim)
            threads_aim, lost_aim = (THREADS_AIM, LOST_AIM) if aimed else (None, None)
            report.add(work, who, "threads", found["threads"], COUNTED, aim=threads_aim)
            report.add(work, who, "lost", found["lost"], COUNTED, aim=lost_aim)
        report.add(CURVE, who, "CPU in 10 s", found["ours"] * scale, "s", at=count)
        report.add(CURVE, who, "servers' CPU in 10 s", found["theirs"] * scale, "s", at=count)
        report.add(CURVE, who, "lost", found["lost"], COUNTED, at=count)
        for what in ("commands", "statements"):
            if who != PEER:
                asked = found[what]
                report.add(CURVE, who, f"{what} to renew all", asked, COUNTED, at=count)


def _kept(who: str, count: int, seconds: float, servers: Servers) -> dict[str, Any]:
    """What one process found that kept so many, and what the servers computed meanwhile."""
    told = {"who": who, "count": count, "given": servers.given}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.leases", "--holder", json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    watch = threading.Timer(2 * PATIENCE, process.kill)
    watch.start()
    try:
        _say(process, "begin", "taken")
        before = computed(servers.pids)
        time.sleep(seconds)
        theirs = computed(servers.pids) - before
        found = _say(process, "count", "kept")
        if who.startswith(OURS):
            _say(process, "quiet", "quiet")
            with counted(servers.redis, servers.postgres) as counts:
                _say(process, "counted", "beat")
            found["commands"] = counts.commands
            found["statements"] = counts.on_held
        _say(process, "end", "ended")
    finally:
        watch.cancel()
        process.kill()
        process.wait()
    return {**found, "theirs": theirs}


def _say(process: Any, word: str, answer: str) -> dict[str, Any]:
    process.stdin.write(word + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, f"The process that held leases ended instead of {answer!r}."
    found = json.loads(line)
    assert found.pop("said") == answer
    return dict(found)


# In the process that holds them


def _hold(told: dict[str, Any]) -> None:
    project.configure(told["given"])
    names = [f"kept:{told['who'].replace(' ', '-')}:{number}" for number in range(told["count"])]
    # Thousands of losses would fill the screen.
    logging.disable()
    before = _threads()
    _hear("begin")
    lost, end = _HOLDERS[told["who"]](names, told["given"])
    threads = _threads() - before
    spent = time.process_time()
    _answer("taken")
    _hear("count")
    _answer("kept", ours=time.process_time() - spent, threads=threads, lost=lost())
    for word in sys.stdin:
        if word.strip() == "quiet":
            _quieten()
            _answer("quiet")
        elif word.strip() == "counted":
            _beat()
            _answer("beat")
        else:
            end()
            _answer("ended")
            # Threads of a peer go on renewing.
            os._exit(0)


def _threads() -> int:
    """All that the system knows of, whoever started them."""
    return len(os.listdir("/proc/self/task"))


def _hear(word: str) -> None:
    assert sys.stdin.readline().strip() == word


def _answer(said: str, **found: Any) -> None:
    print(json.dumps({"said": said, **found}), flush=True)


def _ours(alias: str, fenced: bool = True) -> Callable[[list[str], Given], Any]:
    def hold(names: list[str], given: Given) -> Any:
        from django_fencedlock import lock

        leases = [
            lock(name, backend=alias, fenced=fenced, ttl=PATIENCE).acquire(blocking=False)
            for name in names
        ]
        _shorten(leases)
        _held.extend(leases)

        def end() -> None:
            project.give_back_all()

        return lambda: sum(lease is None or lease.lost for lease in leases), end

    return hold


_held: list[Any] = []


def _shorten(leases: list[Any]) -> None:
    """Only now: those that were taken first would be renewed while the others are taken."""
    _keep_for(TTL, leases)


def _quieten() -> None:
    """Have the keeper leave all of them alone, and be done with what it has under way."""
    # What is renewed just now gets its old ttl back, so the end of that has to be seen.
    quiet = 0
    for _ in range(20):
        if all(lease.lost or lease.ttl == PATIENCE for lease in _held):
            quiet += 1
        else:
            _keep_for(PATIENCE, _held)
            # The service as well: they would run out meanwhile.
            _beat()
            quiet = 0
        if quiet == 3:
            return
        time.sleep(1)


def _keep_for(ttl: float, leases: list[Any]) -> None:
    from django_fencedlock.core.manager import service
    from django_fencedlock.core.runtime import clock

    keeper = service(leases[0].alias).keeper
    for lease in leases:
        lease.ttl, lease.deadline = ttl, clock() + ttl
        keeper.keep(lease)


def _beat() -> None:
    """Renew all leases once more, now."""
    from django_fencedlock.core.manager import service

    assert _held
    kept_by = service(_held[0].alias)
    held = [lease for lease in _held if not lease.lost]
    kept_by.backend.renew([lease.grant for lease in held])
    # As the keeper does: the fence says nothing about an unfenced lock.
    kept_by.keeper.compare([lease for lease in held if lease.fenced])


def _python_redis_lock(names: list[str], given: Given) -> Any:
    import redis
    import redis_lock

    # The default has room for a hundred connections, one of which each thread takes at times.
    client = redis.Redis.from_url(given["redis"], max_connections=10_000)
    # Each of its threads that comes too late ends with a traceback.
    threading.excepthook = lambda args: None
    # Its expiry is a whole number of seconds.
    held = [redis_lock.Lock(client, name, expire=int(TTL), auto_renewal=True) for name in names]
    for each in held:
        each.acquire(blocking=False)
    return lambda: sum(not each._held for each in held), lambda: None


_HOLDERS: Mapping[str, Callable[[list[str], Given], Any]] = {
    UNFENCED: _ours("redis", fenced=False),
    REDIS: _ours("redis"),
    POSTGRES: _ours("postgres"),
    ROWS: _ours("default"),
    PEER: _python_redis_lock,
}


if __name__ == "__main__":
    main()
