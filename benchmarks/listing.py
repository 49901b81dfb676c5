"""
How long it takes to tell who has each of many session locks, as the admin's page asks.

Run from the top of the checkout: ``python -m benchmarks.listing``. Locks are held on the postgres
backend, ever more of them; what is told is the shortest of a few tries.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from benchmarks import locks
from benchmarks.processor import computed
from tests.servers import Postgres, Redis, finding

STEPS = (100, 1000, 10_000)
TRIES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="*", default=STEPS)
    steps = sorted(parser.parse_args().steps)
    with ExitStack() as stack:
        redis = stack.enter_context(closing(Redis.launch(finding.redis())))
        # At default settings some 12,800 locks fill the server's table.
        postgres = Postgres.launch(finding.postgres(), max_locks_per_transaction="256")
        stack.enter_context(closing(postgres))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        locks.configure(redis, postgres, folder, MAX_LOCKS=2 * steps[-1])
        stack.callback(locks.give_back_all)
        print(
            f"load {os.getloadavg()[0]:.1f}\nlocks held      ms   client's and server's CPU in ms"
        )
        for step in steps:
            _report(step, postgres.process.pid)


def _report(step: int, server: int) -> None:
    from django_fencedlock import lock
    from django_fencedlock.services import service

    names = [f"listed:{number}" for number in range(step)]
    for name in names:
        assert lock(name, backend="postgres", ttl=3600).acquire(blocking=False)
    backend = service("postgres").backend
    found = [
        _measure(lambda: (backend.holders(names), backend.waiting(names)), server)
        for _ in range(TRIES)
    ]
    elapsed, client, theirs = (min(part) * 1000 for part in zip(*found, strict=True))
    print(f"{step:10} {elapsed:7.1f}   {client:.1f} + {theirs:.1f}", flush=True)


def _measure(ask: Callable[[], object], server: int) -> tuple[float, float, float]:
    theirs, ours, began = computed([server]), time.process_time(), time.perf_counter()
    ask()
    ended, spent = time.perf_counter(), time.process_time()
    return ended - began, spent - ours, computed([server]) - theirs


if __name__ == "__main__":
    main()
