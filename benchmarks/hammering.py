"""
Tries that don't wait for a held lock: how many of its renewals come late.

Run from the top of the checkout: ``python -m benchmarks.hammering``. This process holds a lock.
Others try to acquire it without waiting, again and again, from several threads. A renewal is late
if it has to be repeated: another session had the row locked. What matters is the count. PostgreSQL
syncs to the disk here, since a lock on a row lasts until then.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import project
from benchmarks.project import Given, Servers
from benchmarks.report import COUNTED, OURS, Report, options

WORK = "a held lock, tried without waiting"
#: The aliases of `benchmarks.project`, by what figures call them.
BACKENDS = {
    f"{OURS}, database": "default",
    f"{OURS}, database, SQLite": "sqlite",
    f"{OURS}, postgres": "postgres",
    f"{OURS}, redis": "redis",
}
PROCESSES, THREADS = 4, 8
TTL = 3.0
LATE_AIM = 0


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=15, help="for each backend")
    parser.add_argument("--only", default="", help="backends that have this in their name")
    parser.add_argument("--hammer", help="what a process of its own is told; not for you")
    given = parser.parse_args()
    if given.hammer:
        _hammer(**json.loads(given.hammer))
        return
    size = (PROCESSES, THREADS)
    if given.short:
        given.seconds, size = 1.5, (2, 2)
    report = Report(given)
    with project.started(postgres={"fsync": "on"}) as servers:
        print(f"load {os.getloadavg()[0]:.1f}, {given.seconds:g} s, {size[0]} x {size[1]} threads")
        print("\n                                      tries/s  renewals  late  lost")
        for who, alias in BACKENDS.items():
            if given.only in who:
                _report(who, alias, given.seconds, size, servers, report)


def _report(
    who: str,
    alias: str,
    seconds: float,
    size: tuple[int, int],
    servers: Servers,
    report: Report,
) -> None:
    from django_fencedlock import lock, signals
    from django_fencedlock.backends.interface import Renewal

    heard: list[Renewal] = []

    def receive(answers: Sequence[Renewal], **kwargs: Any) -> None:
        heard.extend(answers)

    signals.leases_renewed.connect(receive)
    try:
        lease = lock(f"hammered:{alias}", backend=alias, ttl=TTL).acquire(blocking=False)
        assert lease is not None
        tries = _hammered(lease.name, alias, seconds, size, servers.given)
        lost = lease.lost
        lease.release()
    finally:
        signals.leases_renewed.disconnect(receive)
    late = sum(answer is not Renewal.KEPT for answer in heard)
    rate = tries / seconds
    print(f"  {who:34} {rate:10,.0f} {len(heard):9} {late:5} {lost:5}", flush=True)
    report.add(WORK, who, "renewals", len(heard), COUNTED)
    # A session lock has no row whose lock could be in the way; if one is lost here, the server's
    # process had no CPU for longer than the ttl.
    aim = None if alias == "postgres" else LATE_AIM
    report.add(WORK, who, "late renewals", late, COUNTED, aim=aim)


def _hammered(name: str, alias: str, seconds: float, size: tuple[int, int], given: Given) -> int:
    """Have processes try for the lock at once; returns the number of tries."""
    processes, threads = size
    told = {"name": name, "alias": alias, "seconds": seconds, "threads": threads, "given": given}
    command = [sys.executable, "-m", "benchmarks.hammering", "--hammer", json.dumps(told)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    try:
        return sum(int(process.communicate(timeout=seconds + 60)[0]) for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()


# In a process that tries


def _hammer(name: str, alias: str, seconds: float, threads: int, given: Given) -> None:
    project.configure(given)
    logging.disable(logging.WARNING)
    tries: list[int] = []

    def run() -> None:
        from django.db import connections

        tries.append(_try(name, alias, seconds))
        connections.close_all()

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(sum(tries))
    project.give_back_all()


def _try(name: str, alias: str, seconds: float) -> int:
    from django_fencedlock import lock

    tries, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        lease = lock(name, backend=alias, ttl=TTL).acquire(blocking=False)
        tries += 1
        if lease is not None:
            lease.release()
    return tries


if __name__ == "__main__":
    main()
