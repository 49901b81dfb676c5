"""The command that runs the matrix, and the table at its end."""

import argparse
import contextlib
import itertools
import platform
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.servers import ServerMissing

from .faults import FAULTS
from .nemesis import KINDS, Fault, is_possible
from .report import table
from .runs import BROKEN, CALM, VIOLATED, Plan, Result, run
from .sites import SITES, Site


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix; return 1 if a promise was broken, 2 if a run showed nothing."""
    options = _parser().parse_args(arguments)
    results: list[Result] = []
    skipped: dict[str, str] = {}
    sites: dict[str, Site] = {}
    # Also by SIGTERM it ends with its table.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        for result in _runs(options, sites, skipped):
            print(result, flush=True)
            results.append(result)
    print(table(results, skipped))
    print("\n".join(sorted({each for site in sites.values() for each in site.versions()})))
    return _status(results, options.unfenced)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long it may take in all")
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(10**6)))
    parser.add_argument("--backend", action="append", choices=list(SITES))
    parser.add_argument("--fault", action="append", choices=[each.name for each in FAULTS])
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=15, help="how long one run takes at least")
    parser.add_argument("--ttl", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--unfenced", action="store_true", help="write past the fences")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "fault-lab")
    return parser


def _runs(
    options: argparse.Namespace, sites: dict[str, Site], skipped: dict[str, str]
) -> Iterator[Result]:
    end = time.monotonic() + options.minutes * 60
    combinations = [
        (site, fault, kind)
        for fault in FAULTS
        for site in (options.backend or SITES)
        for kind in (options.kind or KINDS)
        if site in fault.sites and (not options.fault or fault.name in options.fault)
        if is_possible(site, fault, kind)
    ]
    # Whatever ends too early has seen some of everything.
    random.Random(options.seed).shuffle(combinations)
    print(f"seed {options.seed}, {len(combinations)} combinations, {versions()}", flush=True)
    with contextlib.ExitStack() as stack:
        for number in itertools.count():
            for name, fault, kind in combinations:
                if time.monotonic() > end:
                    return
                if why := _missing(name, fault, sites, stack):
                    skipped[f"{fault.name} on {name}"] = why
                    continue
                result = run(sites[name], _plan(fault, kind, options, f"{options.seed}.{number}"))
                if result.verdict == BROKEN:
                    # Who knows what state its servers are in.
                    sites.pop(name).close()
                yield result


def versions() -> str:
    import celery
    import django

    return (
        f"Python {platform.python_version()}, Django {django.__version__}, "
        f"Celery {celery.__version__}"
    )


def _missing(
    name: str, fault: Fault, sites: dict[str, Site], stack: contextlib.ExitStack
) -> str | None:
    if why := fault.missing():
        return why
    try:
        if name not in sites:
            sites[name] = SITES[name]()
            stack.callback(sites[name].close)
    except ServerMissing as exc:
        return str(exc)
    return None


def _plan(fault: Fault, kind: str, options: argparse.Namespace, seed: str) -> Plan:
    given = {
        "kind": kind,
        "ttl": options.ttl,
        "clients": options.clients,
        "fenced": not options.unfenced,
    }
    seconds = {"seconds": options.seconds, "most": options.seconds * 6}
    return Plan(fault=fault, seed=seed, directory=options.keep, **seconds, **given)


def _status(results: Sequence[Result], unfenced: bool) -> int:
    verdicts = {result.verdict for result in results}
    if unfenced:
        # What isn't found corrupt shows that the checker is blind.
        return 0 if verdicts == {VIOLATED} else 1
    if verdicts & {VIOLATED, BROKEN} or any(result.hung for result in results):
        return 1
    return 2 if CALM in verdicts or not results else 0
