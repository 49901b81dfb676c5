"""
Eight processes that want one lock again and again: how long it lies idle, and who gets it.

Run from the top of the checkout: ``python -m benchmarks.contention``. Each has the lock for a
millisecond, and waits another before it asks again. Idle is the share of the time in which nobody
had it. What is asked of the servers is counted in a turn of its own, and beside it what one process
alone asks. Nothing is pinned.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence

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
from benchmarks.processor import computed
from benchmarks.project import Servers
from benchmarks.report import COUNTED, Report, options
from benchmarks.team import Stay, Team, team

WORK = "8 processes contending"
PROCESSES = 8
HOLD = THINK = 0.001
#: The share of time, in percent, that nobody has the lock.
IDLE_AIMS = {REDIS_UNFENCED: 35, REDIS: 35, POSTGRES: 20}
FAIR_AIM, MORE_COMMANDS_AIM = 1.5, 3
OF_OURS = (REDIS, REDIS_UNFENCED, POSTGRES, ROWS)
#: Slow enough that a turn has few acquisitions; with them the others' would be short.
PASSED_OVER = ("pottery", "portalocker")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--only", default="", help="contestants that have this in their name")
    given = parser.parse_args()
    if given.short:
        given.rounds, given.seconds = 1, 0.4
    report = Report(given)
    size = 3 if given.short else PROCESSES
    with project.started() as servers, team(servers.given, size) as them:
        print(f"load {os.getloadavg()[0]:.1f}, {given.rounds} rounds of {given.seconds:g} s")
        found = [
            who
            for who in contestants(servers.given)
            if given.only in who and not who.startswith(PASSED_OVER)
        ]
        if given.short:
            found = [who for who in found if who in (*OF_OURS, BATON, ADVISORY)]
        _report(found, given.rounds, given.seconds, servers, them, report)
        _count(found, min(given.seconds, 0.5), servers, them, report)


def _report(
    found: Sequence[str],
    rounds: int,
    seconds: float,
    servers: Servers,
    them: Team,
    report: Report,
) -> None:
    print("\n                                     idle %  a second  max/min  us of CPU each")
    told: dict[str, list[tuple[float, float, float, float]]] = {who: [] for who in found}
    for turn in range(rounds):
        for who in found[:: 1 if turn % 2 else -1]:
            _contend(who, 0.1, PROCESSES, them)
            before = computed([*servers.pids, *them.pids])
            until, seen = _contend(who, seconds, PROCESSES, them)
            spent = computed([*servers.pids, *them.pids]) - before
            each = [len(stays) for stays in seen]
            told[who].append(
                (
                    _idle(seen, until) * 100,
                    sum(each) / seconds,
                    max(each) / max(1, min(each)),
                    spent / sum(each) * 1e6,
                )
            )
    for who in found:
        idle, rate, fair, spent = (statistics.median(part) for part in zip(*told[who], strict=True))
        print(f"  {who:34} {idle:7.1f} {rate:9.0f} {fair:8.2f} {spent:8.0f}", flush=True)
        report.add(WORK, who, "idle", idle, "%", aim=IDLE_AIMS.get(who))
        report.add(WORK, who, "acquisitions", rate, "/s")
        fair_aim = FAIR_AIM if who in IDLE_AIMS else None
        report.add(WORK, who, "max/min", fair, aim=fair_aim)
        report.add(WORK, who, "CPU time", spent, "us")


def _contend(
    who: str, seconds: float, processes: int, them: Team
) -> tuple[float, list[list[Stay]]]:
    """When they stopped to ask again, and what each process saw."""
    until = time.perf_counter() + seconds
    name = f"contended:{place_of(who)}"
    them.ask(who, name, processes, hold=HOLD, think=THINK, until=until)
    return until, them.seen()


def _idle(seen: Sequence[Sequence[Stay]], until: float) -> float:
    """The share of the time in which nobody had the lock, from when all want it until they stop."""
    begin = max(stays[0].asked for stays in seen)
    had = sum(
        max(0.0, min(stay.left, until) - max(stay.got, begin)) for stays in seen for stay in stays
    )
    return 1 - had / (until - begin)


def _count(
    found: Sequence[str], seconds: float, servers: Servers, them: Team, report: Report
) -> None:
    print("\nasked of the servers per acquisition:    alone, contended")
    for who in found:
        alone, contended = (
            _asked(who, seconds, processes, servers, them) for processes in (1, PROCESSES)
        )
        print(f"  {who:34} {alone:10.2f} {contended:10.2f}")
        aim = MORE_COMMANDS_AIM if who in IDLE_AIMS else None
        report.add(WORK, who, "commands alone", alone, COUNTED)
        report.add(WORK, who, "commands more", contended - alone, COUNTED, aim=aim)


def _asked(who: str, seconds: float, processes: int, servers: Servers, them: Team) -> float:
    _contend(who, 0.05, processes, them)
    with counted(servers.redis, servers.postgres) as counts:
        _, seen = _contend(who, seconds, processes, them)
    return counts.asked / sum(len(stays) for stays in seen)


if __name__ == "__main__":
    main()
