"""
``python -m tests.faults.load``: many processes on few locks, and few processes on many.

Nothing goes wrong here, so exclusion itself is checked: no lock may have two holders. And nothing
may grow: descriptors, threads and memory of the processes, sessions, keys and rows of the servers.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import checker
from .checker import Terms
from .history import FAIL, OK, UNKNOWN, History, Operation, entries, read_operations
from .hosts import Crew, Host
from .report import line
from .sites import SITES, Site

#: Enough for every process to wait on one session and hold on another.
ROOM = {"max_connections": "600"}
#: Kilobytes by which a process may have grown since it had warmed up.
GROWTH = 6000
HEAD = (
    *("backend", "shape", "s", "grants", "grants/s", "refused", "errors", "violations"),
    *("descriptors", "threads", "MB", "sessions", "keys", "held rows", "fences", "leaks"),
)


@dataclass(frozen=True)
class Shape:
    """So many processes on so many locks, each holding some at once."""

    processes: int
    locks: int
    holds: int

    def __str__(self) -> str:
        return f"{self.processes} on {self.locks}"


SHAPES = {"crowd": Shape(64, 8, 1), "spread": Shape(8, 10_000, 100)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return 1 if a lock had two holders, or something leaked."""
    options = _parser().parse_args(arguments)
    print(line(HEAD))
    print(line(["---"] * len(HEAD)), flush=True)
    wrong = 0
    for name in options.backend or ("sqlite", "rows", "mariadb", "postgres", "redis"):
        with contextlib.closing(SITES[name](**ROOM)) as site:
            for shape in options.shape or SHAPES:
                cells, found = _run(site, SHAPES[shape], options.seconds)
                print(line(cells))
                for each in found[:10]:
                    print(f"  {each}")
                sys.stdout.flush()
                wrong += len(found)
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.load", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="of each run")
    parser.add_argument("--backend", action="append", choices=[*SITES])
    parser.add_argument("--shape", action="append", choices=[*SHAPES])
    return parser


def _run(site: Site, shape: Shape, seconds: float) -> tuple[list[str], list[str]]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        site.renew(directory)
        with contextlib.closing(Host(_lab(site, shape, directory), directory / "log")) as host:
            host.ask("prepare", directory / "prepared")
            crew = Crew([host], shape.processes, order="load")
            crew.fill()
            time.sleep(seconds / 2)
            before = site.sessions()
            time.sleep(seconds / 2)
            after = site.sessions()
            (directory / "stop").touch()
            hung = crew.wait_for_end(120)
            found = host.ask("collect", directory / "trail.json")
        history = History(read_operations(directory), entries(found["trail"]))
        problems = [f"{name} didn't end" for name in hung]
        problems += [str(each) for each in checker.violations(history, Terms(30, forgets=True))]
        problems += _two_holders(history)
        # A release without an answer leaves the row to run out.
        found["held"] -= len(history.of("release", UNKNOWN))
        leaks = [*_leaks(history), *_server_leaks(site, shape, found, before, after)]
        cells = _cells(site, shape, seconds, history, found, (before, after), problems, leaks)
        return cells, problems + leaks


def _lab(site: Site, shape: Shape, directory: Path) -> dict[str, Any]:
    lab = site.lab()
    # The default: no client is disconnected here, and many have to wait.
    lab["locks"]["default"]["OPTIONS"].pop("TIMEOUT")
    return lab | {
        "seed": "load",
        "ttl": 30.0,
        "rows": 1,
        "fenced": True,
        "directory": str(directory),
        "habits": {},
        "locks_in_all": shape.locks,
        "holds": shape.holds,
    }


def _two_holders(history: History) -> Iterator[str]:
    """Report locks that had two holders at once."""
    given_back = {each.owner: each.begun for each in history.of("release")}
    spans: dict[str, list[Operation]] = defaultdict(list)
    for each in history.of("acquire", OK):
        spans[each.name].append(each)
    for name, operations in spans.items():
        for earlier, later in pairwise(sorted(operations, key=lambda each: each.token or 0)):
            if given_back.get(earlier.owner, later.ended or 0) > (later.ended or 0):
                yield f"{name}: {earlier.client} and {later.client} had it at once"


def _samples(history: History) -> dict[str, list[Operation]]:
    samples: dict[str, list[Operation]] = defaultdict(list)
    for each in history.of("sample", OK):
        samples[each.client].append(each)
    return samples


def _leaks(history: History) -> Iterator[str]:
    for client, samples in _samples(history).items():
        # Half of the time is for warming up. The last sample is after everything was released.
        early, late = samples[len(samples) // 2], samples[-1]
        if late.descriptors > early.descriptors + 2:
            yield f"{client}: {early.descriptors} descriptors became {late.descriptors}"
        if late.threads > early.threads + 2:
            yield f"{client}: {early.threads} threads became {late.threads}"
        if late.memory > early.memory + GROWTH:
            yield f"{client}: {early.memory} kB became {late.memory}"


def _server_leaks(
    site: Site, shape: Shape, found: dict[str, Any], before: int, after: int
) -> Iterator[str]:
    # One that a process opens when it has to is open in all of them sooner or later.
    if after > before + shape.processes:
        yield f"{before} sessions became {after}"
    if found["held"] > 0:
        yield f"{found['held']} rows of held locks are left"
    if found["fences"] > shape.locks:
        yield f"there are {found['fences']} fences of {shape.locks} locks"
    if site.keys() > 3 * shape.locks + 10:
        yield f"{site.keys()} keys are left"


def _cells(
    site: Site,
    shape: Shape,
    seconds: float,
    history: History,
    found: dict[str, Any],
    sessions: tuple[int, int],
    problems: list[str],
    leaks: list[str],
) -> list[str]:
    grants = len(history.of("acquire", OK))
    samples = _samples(history).values()

    def course(what: str, unit: int = 1) -> str:
        early = statistics.median(getattr(each[len(each) // 2], what) / unit for each in samples)
        late = statistics.median(getattr(each[-1], what) / unit for each in samples)
        return f"{early:.0f} -> {late:.0f}"

    numbers: list[Any] = [
        *(site.name, shape, round(seconds), grants, round(grants / seconds)),
        *(len(history.of("acquire", FAIL)), len(history.of("acquire", UNKNOWN)), len(problems)),
        *(course("descriptors"), course("threads"), course("memory", 1000)),
        *(f"{sessions[0]} -> {sessions[1]}", site.keys(), found["held"], found["fences"]),
        len(leaks),
    ]
    return [str(number) for number in numbers]


if __name__ == "__main__":
    sys.exit(main())
