"""
What `@single_instance` costs a worker and a publisher, as ratios to the same task without it.

Run from the top of the checkout: ``python -m benchmarks.tasks``. A real worker on Redis drains
queues of tasks that do nothing, each with a name of its own. Kinds of tasks take turns; the figure
is the median of the rounds' ratios. Worker and servers share one CPU, or the ratios don't repeat.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from typing import Any

from redis import Redis as Client

from benchmarks.counting import counted
from benchmarks.processor import by_itself, computed
from benchmarks.report import COUNTED, Report
from benchmarks.report import options as common
from tests.servers import Postgres, Redis, finding

KINDS = ("bare", "unfenced", "fenced", "once", "fenced_once")
PEERS = {"celery_once": "celery-once", "celery_singleton": "celery-singleton"}
#: As ratios to the bare task, of worker and servers together.
AIMS = {"unfenced": 1.06, "fenced": 1.15}
PUBLISH_AIM = 1.02
#: Seconds for one queue to be drained.
PATIENCE = 300

_numbers = itertools.count(1)


def main() -> None:
    parser = common(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=5000)
    parser.add_argument("--pool", default="prefork")
    parser.add_argument("--concurrency", default="1")
    parser.add_argument("--cpus", type=int, default=1, help="how many CPUs all of it shares")
    parser.add_argument("--results", action="store_true", help="store results, in Redis")
    peers = [kind for module, kind in PEERS.items() if find_spec(module)]
    parser.add_argument("--kinds", nargs="*", default=[*KINDS[:3], *peers])
    options = parser.parse_args()
    if options.short:
        options.rounds, options.tasks, options.kinds = 1, 200, list(KINDS[:3])
    report = Report(options)
    with ExitStack() as stack:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: options.cpus]))
        redis = stack.enter_context(closing(Redis.launch(finding.redis())))
        postgres = stack.enter_context(closing(Postgres.launch(finding.postgres())))
        _configure(redis, postgres, options.results)
        _prepare()
        worker = stack.enter_context(_worker(options.pool, options.concurrency))
        _report(worker, [redis.process.pid, postgres.process.pid], options, report)
        _count(worker, redis, postgres, options, report)


def _configure(redis: Redis, postgres: Postgres, results: bool) -> None:
    base = redis.url.rpartition("/")[0]
    given = {
        "broker": f"{base}/0",
        "locks": f"{base}/1",
        "results": f"{base}/2" if results else None,
        "database": postgres.django(),
    }
    os.environ["FENCEDLOCK_BENCHMARK"] = json.dumps(given)


def _prepare() -> None:
    from django.core.management import call_command

    from benchmarks import drained  # noqa: F401

    call_command("migrate", verbosity=0)


@contextmanager
def _worker(pool: str, concurrency: str) -> Iterator[int]:
    arguments = ["-P", pool, "-c", concurrency, "-Q", "control", "-l", "ERROR", "-n", "drained@%h"]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "benchmarks.drained", "worker", *arguments, *quiet],
        stdout=subprocess.DEVNULL,
    )
    try:
        _await_ready()
        yield process.pid
    finally:
        # Its queues go with their server.
        process.kill()
        process.wait()


def _await_ready() -> None:
    from benchmarks import drained

    deadline = time.monotonic() + 60
    while not drained.app.control.ping(timeout=2, limit=1):
        assert time.monotonic() < deadline, "The worker didn't start."


#: What is measured of a round: two times, and four parts of the CPU's, which other programs don't
#: blur as they do the clock.
MEASURED = ("published", "drained", "publisher", "main process", "its children", "servers")


def _report(worker: int, servers: list[int], options: argparse.Namespace, report: Report) -> None:
    kinds = list(options.kinds)
    client = Client.from_url(json.loads(os.environ["FENCEDLOCK_BENCHMARK"])["locks"])
    for kind in kinds:
        _drain(client, worker, servers, kind, 200)
    rounds = [
        {
            kind: _drain(client, worker, servers, kind, options.tasks)
            for kind in (kinds if turn % 2 else kinds[::-1])
        }
        for turn in range(options.rounds)
    ]
    per_task = 1e6 / options.tasks
    print(f"load {os.getloadavg()[0]:.1f}")
    work = f"{options.pool} -c {options.concurrency} on {options.cpus} CPUs, ratio to a bare task"
    for kind in kinds:
        for place, what in enumerate(MEASURED):
            ratio = statistics.median(each[kind][place] / each[kinds[0]][place] for each in rounds)
            cost = statistics.median(each[kind][place] for each in rounds) * per_task
            print(f"{kind:16} {what:12} {ratio:.3f}  {cost:6.0f} us a task")
            aim = AIMS.get(kind) if what == "drained" else None
            if what in ("published", "publisher") and kind in AIMS:
                aim = PUBLISH_AIM
            report.add(work, kind, what, ratio, aim=aim)
        ratio = statistics.median(sum(each[kind][3:]) / sum(each[kinds[0]][3:]) for each in rounds)
        print(f"{kind:16} {'all CPU':12} {ratio:.3f}", flush=True)
        report.add(work, kind, "CPU", ratio)


def _count(
    worker: int, redis: Redis, postgres: Postgres, options: argparse.Namespace, report: Report
) -> None:
    """What the locks of a task ask of the servers, beside what the bare task does."""
    client = Client.from_url(json.loads(os.environ["FENCEDLOCK_BENCHMARK"])["locks"])
    for kind in (kind for kind in options.kinds if kind in KINDS):
        with counted(redis, postgres) as counts:
            _drain(client, worker, [], kind, 100)
        report.add("a task's locks", kind, "scripts", counts.scripts / 100, COUNTED)
        report.add("a task's locks", kind, "statements", counts.statements / 100, COUNTED)


def _drain(
    client: Any, worker: int, servers: list[int], kind: str, tasks: int
) -> tuple[float, ...]:
    """
    Publish to a queue that nobody reads, then have it read; returns the seconds of `MEASURED`.
    """
    from benchmarks import drained

    queue = f"queue{next(_numbers)}"
    task = drained.app.tasks[kind]
    client.delete(drained.BEGUN, drained.ENDED)
    drained.mark.apply_async((drained.BEGUN,), queue=queue)
    published, publisher = -time.perf_counter(), -time.process_time()
    for number in range(tasks):
        task.apply_async((number,), queue=queue)
    published += time.perf_counter()
    publisher += time.process_time()
    drained.mark.apply_async((drained.ENDED,), queue=queue)
    before = _cpu(worker, servers)
    drained.app.control.add_consumer(queue, reply=True, timeout=30, limit=1)
    deadline = time.monotonic() + PATIENCE
    while not client.exists(drained.ENDED):
        assert time.monotonic() < deadline, f"The worker didn't drain {kind} in {PATIENCE} s."
        time.sleep(0.05)
    spent = [after - then for then, after in zip(before, _cpu(worker, servers), strict=True)]
    drained.app.control.cancel_consumer(queue, reply=True, timeout=30, limit=1)
    begun, ended = (float(client.get(key)) for key in (drained.BEGUN, drained.ENDED))
    return published, ended - begun, publisher, *spent


def _cpu(worker: int, servers: list[int]) -> tuple[float, float, float]:
    """What the worker's main process, its children and the servers have computed."""
    main = by_itself(worker)
    return main, computed([worker]) - main, computed(servers)


if __name__ == "__main__":
    main()
