"""
What acquire and release cost, as ratios to the bare commands that they are made of.

Run from the top of the checkout: ``python -m benchmarks.locks``. Contestants of a group take turns
within each round; a figure is the median of the rounds' ratios. Client and servers share one CPU,
or the ratios don't repeat. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from benchmarks import peers, project, raw
from benchmarks.counting import counted
from benchmarks.peers import Take
from benchmarks.processor import computed
from benchmarks.project import Servers
from benchmarks.report import COUNTED, OURS, Report, options

#: Locks that take turns: their rows and keys are there, as they are in an application that runs.
NAMES = 100
#: Seconds that one turn may take: who needs longer has fewer locks in it.
TURN = 0.25

Once = Callable[[str], object]
Group = Mapping[str, Once]


class Work(NamedTuple):
    title: str
    contestants: Group
    aim: float | None = None


def main() -> None:
    given = _options()
    report = Report(given)
    with project.started(cpus=1) as servers:
        print(f"load {os.getloadavg()[0]:.1f}, {given.rounds} rounds of {given.times}")
        for work in _works(servers):
            if given.only in work.title:
                _report(work, servers, given, report)


def _options() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--times", type=int, default=200, help="in each round, by the hundred")
    parser.add_argument("--only", default="", help="groups that have this in their title")
    given = parser.parse_args()
    if given.short:
        given.rounds, given.times = 1, NAMES
    return given


def _works(servers: Servers) -> Iterator[Work]:
    """The bare commands come first in each group; the ratios are to them."""
    redis, postgres, _ = servers
    yield Work(
        "redis, unfenced",
        {
            "SET NX PX, one script": raw.redis_unfenced(redis),
            OURS: _through(_ours("redis", fenced=False)),
            **_each(peers.on_redis(redis.url)),
        },
        1.20,
    )
    yield Work(
        "redis, fenced",
        {
            "two scripts, one upsert": raw.redis_fenced(redis, postgres),
            "with the registry's row": raw.redis_registered(redis, postgres),
            OURS: _through(_ours("redis")),
        },
        1.15,
    )
    yield Work(
        "postgres",
        {
            "grant and release, prepared": raw.advisory(postgres),
            OURS: _through(_ours("postgres")),
            f"{OURS}, unfenced": _through(_ours("postgres", fenced=False)),
            "pg_advisory_lock, unlock": raw.advisory_pair(postgres),
            **_each(peers.on_postgres()),
        },
        1.25,
    )
    yield Work(
        "row lease, Postgres",
        {
            "claim and delete, prepared": raw.rows_on_postgres(postgres),
            OURS: _through(_ours("default")),
            **_each(peers.of_rows("default")),
        },
        1.15,
    )
    yield Work(
        "row lease, SQLite",
        {
            "its statements": raw.rows_on_sqlite(),
            OURS: _through(_ours("sqlite")),
            **_each(peers.of_rows("sqlite")),
        },
        1.15,
    )


def _ours(alias: str, fenced: bool = True) -> Take:
    from django_fencedlock import lock

    return lambda name: lock(name, backend=alias, fenced=fenced)


def _each(takes: Mapping[str, Take]) -> Group:
    return {who: _through(take) for who, take in takes.items()}


def _through(take: Take) -> Once:
    def once(name: str) -> None:
        with take(name):
            pass

    return once


def _report(work: Work, servers: Servers, given: argparse.Namespace, report: Report) -> None:
    # Of its own: two lock services on one name exclude nobody, and the second is refused.
    names = [f"{work.title.replace(' ', '-')}:{number}" for number in range(NAMES)]
    sizes = {who: _size(once, names, given.times) for who, once in work.contestants.items()}
    gc.collect()
    found: dict[str, list[tuple[float, float, float]]] = {who: [] for who in work.contestants}
    for turn in range(given.rounds):
        for who in list(work.contestants)[:: 1 if turn % 2 else -1]:
            turns = (names * (given.times // NAMES + 1))[: sizes[who]]
            found[who].append(_measure(work.contestants[who], turns, servers.pids))
    _tell(work, found, report)
    _count(work, names, servers, report)


def _size(once: Once, names: list[str], times: int) -> int:
    """How many locks one turn has; all of them are there afterwards."""
    once(names[0])
    began = time.perf_counter()
    once(names[1])
    took = time.perf_counter() - began
    if took * times > 20 * TURN:
        return max(2, int(TURN / took))
    for name in names:
        once(name)
    return times


def _tell(
    work: Work, found: Mapping[str, list[tuple[float, float, float]]], report: Report
) -> None:
    print(f"\n{work.title:34}   time    CPU    us   client's and servers' CPU in us")
    base = next(iter(found.values()))
    for who, each in found.items():
        elapsed = statistics.median(ours[0] / its[0] for ours, its in zip(each, base, strict=True))
        spent = statistics.median(
            sum(ours[1:]) / sum(its[1:]) for ours, its in zip(each, base, strict=True)
        )
        us = [statistics.median(part) * 1e6 for part in zip(*each, strict=True)]
        print(
            f"  {who:32} {elapsed:6.2f} {spent:6.2f} {us[0]:5.0f}   {us[1]:.0f} + {us[2]:.0f}",
            flush=True,
        )
        aim = work.aim if who == OURS else None
        report.add(work.title, who, "time", elapsed, aim=aim)
        report.add(work.title, who, "CPU", spent, aim=aim)
        report.add(work.title, who, "CPU time", us[1] + us[2], "us")


def _measure(once: Once, names: list[str], servers: list[int]) -> tuple[float, float, float]:
    """Seconds for a lock, on the clock; and those that this process, and its servers, computed."""
    theirs, ours, began = computed(servers), time.process_time(), time.perf_counter()
    for name in names:
        once(name)
    ended, spent = time.perf_counter(), time.process_time()
    found = (ended - began, spent - ours, computed(servers) - theirs)
    elapsed, client, server = (seconds / len(names) for seconds in found)
    return elapsed, client, server


def _count(work: Work, names: list[str], servers: Servers, report: Report) -> None:
    asked = {}
    for who, once in work.contestants.items():
        few = names[:2] if who.startswith("portalocker") else names[:20]
        with counted(servers.redis, servers.postgres) as counts:
            for name in few:
                once(name)
        for measure, number in (
            ("commands", counts.commands),
            ("commands in scripts", counts.inner),
            ("statements", counts.statements),
        ):
            report.add(work.title, who, measure, number / len(few), COUNTED)
        asked[who] = counts.asked / len(few)
    print("  asked of the servers:", ", ".join(f"{who} {n:.3g}" for who, n in asked.items()))


if __name__ == "__main__":
    main()
