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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from benchmarks import peers, raw
from benchmarks.processor import computed
from tests.servers import Postgres, Redis, finding

#: Locks that take turns: their rows and keys are there, as they are in an application that runs.
NAMES = 100

Once = Callable[[str], object]
Group = Mapping[str, Once]


def main() -> None:
    options = _options()
    with ExitStack() as stack:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        redis = stack.enter_context(closing(Redis.launch(finding.redis())))
        postgres = stack.enter_context(closing(Postgres.launch(finding.postgres())))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        configure(redis, postgres, folder)
        stack.callback(give_back_all)
        servers = [redis.process.pid, postgres.process.pid]
        print(f"load {os.getloadavg()[0]:.1f}, {options.rounds} rounds of {options.times}")
        for title, group in _groups(redis, postgres):
            if options.only in title:
                _report(title, group, servers, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--times", type=int, default=200, help="in each round, by the hundred")
    parser.add_argument("--only", default="", help="groups that have this in their title")
    return parser.parse_args()


def configure(redis: Redis, postgres: Postgres, folder: Path, **options: object) -> None:
    """Have an alias for each backend; `options` are the postgres backend's."""
    import django
    from django.conf import settings
    from django.core.management import call_command

    backends = "django_fencedlock.backends"
    settings.configure(
        INSTALLED_APPS=["django_fencedlock"],
        DATABASES={
            "default": postgres.django(),
            "sqlite": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(folder / "db.sqlite3"),
                "OPTIONS": {
                    "transaction_mode": "IMMEDIATE",
                    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
                },
            },
        },
        FENCEDLOCK={
            "default": {},
            "sqlite": {"FENCE_DATABASE": "sqlite"},
            "postgres": {"BACKEND": f"{backends}.postgres.PostgresBackend", "OPTIONS": options},
            "redis": {"BACKEND": f"{backends}.redis.RedisBackend", "LOCATION": redis.url},
        },
        USE_TZ=True,
    )
    django.setup()
    for alias in ("default", "sqlite"):
        call_command("migrate", database=alias, verbosity=0)


def give_back_all() -> None:
    """Leave nothing to be done when the servers are gone."""
    from django_fencedlock import conf
    from django_fencedlock.services import service

    for alias in conf.aliases():
        service(alias).drop_all()


def _groups(redis: Redis, postgres: Postgres) -> Iterator[tuple[str, Group]]:
    """The bare commands come first in each group; the ratios are to them."""
    yield (
        "redis, unfenced",
        {
            "SET NX PX, one script": raw.redis_unfenced(redis),
            "django_fencedlock": _ours("redis", fenced=False),
            **peers.on_redis(redis),
        },
    )
    yield (
        "redis, fenced",
        {
            "two scripts, one upsert": raw.redis_fenced(redis, postgres),
            "django_fencedlock": _ours("redis"),
        },
    )
    yield (
        "postgres",
        {
            "grant and release, prepared": raw.advisory(postgres),
            "django_fencedlock": _ours("postgres"),
            "django_fencedlock, unfenced": _ours("postgres", fenced=False),
            **peers.on_postgres(),
        },
    )
    yield (
        "row lease, Postgres",
        {
            "claim and delete, prepared": raw.rows_on_postgres(postgres),
            "django_fencedlock": _ours("default"),
            **peers.of_rows("default"),
        },
    )
    yield (
        "row lease, SQLite",
        {
            "its statements": raw.rows_on_sqlite(),
            "django_fencedlock": _ours("sqlite"),
            **peers.of_rows("sqlite"),
        },
    )


def _ours(alias: str, fenced: bool = True) -> Once:
    from django_fencedlock import lock

    def once(name: str) -> None:
        with lock(name, backend=alias, fenced=fenced):
            pass

    return once


def _report(title: str, group: Group, servers: list[int], options: argparse.Namespace) -> None:
    # Of its own: two lock services on one name exclude nobody, and the second is refused.
    names = [f"{title}:{number}" for number in range(NAMES)]
    for once in group.values():
        for name in names:
            once(name)
    gc.collect()
    found: dict[str, list[tuple[float, float, float]]] = {key: [] for key in group}
    for turn in range(options.rounds):
        for key in list(group)[:: 1 if turn % 2 else -1]:
            found[key].append(_measure(group[key], names * (options.times // NAMES), servers))
    print(f"\n{title:34}   time    CPU    us   client's and servers' CPU in us")
    base = next(iter(found.values()))
    for key, each in found.items():
        elapsed = statistics.median(ours[0] / its[0] for ours, its in zip(each, base, strict=True))
        spent = statistics.median(
            sum(ours[1:]) / sum(its[1:]) for ours, its in zip(each, base, strict=True)
        )
        us = [statistics.median(part) * 1e6 / options.times for part in zip(*each, strict=True)]
        print(
            f"  {key:32} {elapsed:6.2f} {spent:6.2f} {us[0]:5.0f}   {us[1]:.0f} + {us[2]:.0f}",
            flush=True,
        )


def _measure(once: Once, names: list[str], servers: list[int]) -> tuple[float, float, float]:
    """Seconds on the clock; and those that this process, and its servers, computed."""
    theirs, ours, began = computed(servers), time.process_time(), time.perf_counter()
    for name in names:
        once(name)
    ended, spent = time.perf_counter(), time.process_time()
    return ended - began, spent - ours, computed(servers) - theirs


if __name__ == "__main__":
    main()
