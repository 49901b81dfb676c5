"""
Everything, one part after the other, and a table at the end.

Run from the top of the checkout: ``python -m benchmarks``. It takes some ten minutes; with
``--short`` less than two, and then only what was counted means anything. Each part starts its own
servers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from platform import python_version

from benchmarks import peers, tables
from benchmarks.plot import draw
from benchmarks.report import COUNTED, Figure, read
from tests.servers import ServerMissing, finding

#: In the order in which they run; with arguments for a run in full.
PARTS: dict[str, Sequence[str]] = {
    "locks": (),
    "handoff": (),
    "contention": (),
    "leases": (),
    "hammering": (),
    "names": (),
    "saves": (),
    "tasks": ("--cpus", "2", "--concurrency", "4", "--rounds", "3", "--tasks", "3000"),
    "listing": (),
    "imports": (),
}
#: Seconds that one part may take.
LONGEST = 600


def main() -> int:
    given = _options()
    began = time.monotonic()
    machine = _machine()
    print(*machine, sep="\n", flush=True)
    found: dict[str, list[Figure]] = {}
    failed, loads = [], []
    with tempfile.TemporaryDirectory() as folder:
        for part in given.parts:
            print(f"\n== {part}", flush=True)
            path = Path(folder, f"{part}.json")
            loads.append(f"{part} {os.getloadavg()[0]:.1f}")
            if not _run(part, path, given.short):
                failed.append(part)
            found[part] = read(path) if path.exists() else []
    _tell(found, given.short)
    machine.append(f"Load when each part began: {', '.join(loads)}")
    print(f"\n{machine[-1]}; {time.monotonic() - began:.0f} s in all")
    if given.json:
        told = {part: [asdict(each) for each in figures] for part, figures in found.items()}
        given.json.write_text(json.dumps({"machine": machine, "parts": told}, indent=1))
    if given.plot and found.get("handoff"):
        given.plot.write_text(draw(found["handoff"]))
    for part in failed:
        print(f"{part} failed; what it says is above.", file=sys.stderr)
    return bool(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--short", action="store_true", help="for the counts alone")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--plot", type=Path, help="a file for the plot of hand-offs, SVG")
    given = parser.parse_args()
    given.parts = given.parts or list(PARTS)
    if unknown := sorted(set(given.parts) - set(PARTS)):
        parser.error(f"There is no part {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    return given


def _run(part: str, path: Path, short: bool) -> bool:
    arguments = ["--short"] if short else PARTS[part]
    command = [sys.executable, "-m", f"benchmarks.{part}", "--figures", str(path), *arguments]
    process = subprocess.Popen(command)
    try:
        return process.wait(LONGEST) == 0
    except subprocess.TimeoutExpired:
        print(f"{part} was ended after {LONGEST} s.", file=sys.stderr)
        return False
    finally:
        # Ends by itself what it started, if it is told to end.
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _machine() -> list[str]:
    """What the figures were measured on, and with."""
    packages = ("Django", "celery", "psycopg", "redis")
    ours = ", ".join(f"{package} {version(package)}" for package in packages)
    servers = []
    for find in (finding.redis, finding.postgres, finding.mariadb):
        try:
            found = find()
            servers.append(f"{found.name} {found.version}")
        except ServerMissing as exc:
            servers.append(f"no {exc.name}")
    theirs = ", ".join(f"{package} {number}" for package, number in peers.versions().items())
    lines = [
        f"{date.today()}, {len(os.sched_getaffinity(0))} CPUs ({_processor()})",
        f"Python {python_version()}, {ours}; {', '.join(servers)}",
        f"Peers: {theirs}",
    ]
    if missing := peers.missing():
        lines.append(f"Not installed, and left out: {', '.join(missing)}")
    return lines


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2].strip()
    return "unknown"


def _tell(found: dict[str, list[Figure]], short: bool) -> None:
    """The aims first; then the rest, and the curves."""
    if short:
        found = {
            part: [each for each in figures if each.unit in (COUNTED, "bytes")]
            for part, figures in found.items()
        }
    print("\n== aims\n", *tables.aims(itertools.chain(*found.values())), sep="\n")
    for part, figures in found.items():
        print(f"\n== {part}\n", *tables.compared(figures), "", sep="\n")
        print(*tables.curves(figures), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
