"""
How long a lock takes from one holder to the next, with 1 to 64 waiting.

Run from the top of the checkout: ``python -m benchmarks.handoff``. All wait for a lock that this
process holds; then it is given back, and each has it once, for a millisecond. Eight processes, and
beyond eight waiters several threads in each. Nothing is pinned, since hand-offs are what the
scheduler does too: on a busy machine, go by the commands.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence

from benchmarks import project
from benchmarks.contestants import (
    ADVISORY,
    BATON,
    POSTGRES,
    REDIS,
    REDIS_UNFENCED,
    ROWS,
    contestants,
    place_of,
)
from benchmarks.counting import counted
from benchmarks.peers import Take
from benchmarks.project import Servers
from benchmarks.report import COUNTED, Report, options
from benchmarks.team import Gone, Stay, Team, team

WORK = "8 waiters, each once"
CURVE = "hand-off"
HOLD = 0.001
#: Those who wait have asked by then, and are asleep.
SETTLED = 0.15
#: Seconds for all rounds of one contestant with one number of waiters.
LONGEST = 3.0
#: Who has no line of its own: both poll as redis-py's Lock does, the first by that very class.
PASSED_OVER = ("django-redis' cache.lock", "sherlock")
#: Who takes most of a minute for more than this many waiters.
SLOW, MOST_OF_SLOW = "portalocker's RedisLock, fencing", 8
#: Milliseconds in which eight waiters should be through.
AIMS = {REDIS_UNFENCED: 14, REDIS: 14, POSTGRES: 13}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waiters", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--only", default="", help="contestants that have this in their name")
    given = parser.parse_args()
    if given.short:
        given.rounds, given.waiters = 1, [8]
    report = Report(given)
    size = 3 if given.short else 8
    with project.started() as servers, team(servers.given, size) as them:
        print(f"load {os.getloadavg()[0]:.1f}, {given.rounds} rounds")
        takes = contestants(servers.given)
        found = [who for who in takes if given.only in who and who not in PASSED_OVER]
        if given.short:
            found = [who for who in found if who in (*AIMS, ROWS, BATON, ADVISORY)]
        for waiters in given.waiters:
            some = [who for who in found if who != SLOW or waiters <= MOST_OF_SLOW]
            _report(waiters, {who: takes[who] for who in some}, given.rounds, them, report)
        _count({who: takes[who] for who in found}, servers, them, report)


def _report(
    waiters: int, takes: Mapping[str, Take], rounds: int, them: Team, report: Report
) -> None:
    latencies: dict[str, list[list[float]]] = {who: [] for who in takes}
    lengths: dict[str, list[float]] = {who: [] for who in takes}
    spent = dict.fromkeys(takes, 0.0)
    # The first round opens connections, and counts for nothing.
    for turn in range(rounds + 1):
        for who in list(takes)[:: 1 if turn % 2 else -1]:
            if turn > 1 and spent[who] > LONGEST:
                continue
            began = time.perf_counter()
            length, latency = _convoy(who, takes[who], waiters, them)
            spent[who] += time.perf_counter() - began
            if turn:
                lengths[who].append(length)
                latencies[who].append(latency)
    print(f"\n{waiters:2} waiting: ms for all; of one hand-off the median, the 99th percentile")
    for who in takes:
        all_of_them = statistics.median(lengths[who]) * 1000
        each = sorted(itertools.chain(*latencies[who]))
        middle, worst = statistics.median(each) * 1000, each[int(len(each) * 0.99)] * 1000
        print(f"  {who:34} {all_of_them:8.1f} {middle:8.2f} {worst:8.2f}", flush=True)
        if waiters == 8:
            report.add(WORK, who, "all through", all_of_them, "ms", aim=AIMS.get(who))
        # Of the rounds, so that one which the machine spoiled says nothing.
        mean = statistics.median(map(statistics.fmean, latencies[who])) * 1000
        report.add(CURVE, who, "median", middle, "ms", at=waiters)
        report.add(CURVE, who, "mean", mean, "ms", at=waiters)
        report.add(CURVE, who, "99th percentile", worst, "ms", at=waiters)


def _convoy(who: str, take: Take, waiters: int, them: Team) -> tuple[float, list[float]]:
    """Seconds until all were through, and those of each hand-off."""
    name = f"convoy:{place_of(who)}"
    with take(name):
        them.ask(who, name, waiters, hold=HOLD)
        time.sleep(SETTLED)
        began = time.perf_counter()
    stays = sorted(stay for seen in them.seen() for stay in seen)
    stays.sort(key=lambda stay: stay.got)
    _exclude_each_other(who, stays)
    leaves = [began, *(stay.left for stay in stays)]
    return stays[-1].left - began, [
        stay.got - left for left, stay in zip(leaves, stays, strict=False)
    ]


def _exclude_each_other(who: str, stays: Sequence[Stay]) -> None:
    for one, other in itertools.pairwise(stays):
        if other.got < one.left:
            raise Gone(f"Two had the lock of {who} at once.")


def _count(takes: Mapping[str, Take], servers: Servers, them: Team, report: Report) -> None:
    """Commands of eight waiters and of this process, for each acquisition."""
    print("\nasked of the servers, per acquisition:")
    for who in takes:
        with counted(servers.redis, servers.postgres) as counts:
            _convoy(who, takes[who], 8, them)
        print(f"  {who:34} {counts.asked / 9:5.1f}")
        report.add(WORK, who, "commands", counts.asked / 9, COUNTED)


if __name__ == "__main__":
    main()
