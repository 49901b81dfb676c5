"""
What a million lock names cost: time to acquire beside that many, and room for each.

Run from the top of the checkout: ``python -m benchmarks.names``. A fence is never deleted, so the
table has a row for each name that was ever locked. Two databases of one server take turns, one with
an empty table of fences. Redis keeps a counter for each name, for two weeks. All share one CPU.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pymysql

from benchmarks import project
from benchmarks.processor import computed
from benchmarks.report import COUNTED, OURS, Report, options
from tests.servers import MariaDB, Postgres, Redis, ServerMissing, finding

WORK, CURVE = "many names, ratio to none", "names in the table"
ROOM, ON_REDIS = "room for a name", "a name on Redis"
AIM = 1.1
#: Locks of one turn, each with another name.
TIMES = 200
FENCE = "django_fencedlock_fence"
OWNER = "0123456789abcdef0123456789abcdef"


class Place(NamedTuple):
    """A database twice, once with names in it and once with none."""

    empty: str
    full: str
    server: int | None
    fill: Callable[[int, int], object]
    room: Callable[[], Mapping[str, float]]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--curve", type=int, nargs="*", default=[1000, 10_000, 100_000, 1_000_000])
    given = parser.parse_args()
    if given.short:
        given.rounds, given.curve = 1, [20_000]
    report = Report(given)
    pymysql.install_as_MySQLdb()
    with ExitStack() as stack:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        folder = Path(stack.enter_context(TemporaryDirectory()))
        places = _places(stack, folder, given.short)
        redis = stack.enter_context(closing(Redis.launch(finding.redis())))
        _configure(places, redis)
        stack.callback(project.give_back_all)
        print(f"load {os.getloadavg()[0]:.1f}, {given.rounds} rounds of {TIMES}")
        for title, (_, place) in places.items():
            _report(title, place, given, report)
        _on_redis(redis, given.curve[-1], report)


def _places(stack: ExitStack, folder: Path, short: bool) -> dict[str, tuple[dict[str, Any], Place]]:
    """By title: the databases, and what is done with them."""
    found = {"Postgres": _postgres(stack), "SQLite": _sqlite(folder)}
    if not short:
        try:
            found["MariaDB"] = _mariadb(stack)
        except ServerMissing as exc:
            print(exc)
    return found


def _postgres(stack: ExitStack) -> tuple[dict[str, Any], Place]:
    # A million rows and their index fit, as they do on a server of its own.
    server = stack.enter_context(
        closing(Postgres.launch(finding.postgres(), shared_buffers="256MB", max_wal_size="4GB"))
    )
    full, empty = server.create_database(), server.create_database()

    def fill(start: int, end: int) -> None:
        server.execute(
            f"INSERT INTO {FENCE} (name, token, owner) SELECT 'names:' || i, 1, '{OWNER}' "
            f"FROM generate_series({start}, {end - 1}) i",
            database=full,
        )
        server.execute(f"VACUUM ANALYZE {FENCE}", database=full)

    def room() -> Mapping[str, float]:
        sizes = f"SELECT pg_table_size('{FENCE}'), pg_indexes_size('{FENCE}')"
        ((rows, index),) = server.execute(sizes, database=full)
        return {"table and indexes": rows + index, "of it indexes": index}

    databases = {"pg_empty": server.django(empty), "pg_full": server.django(full)}
    return databases, Place("pg_empty", "pg_full", server.process.pid, fill, room)


def _sqlite(folder: Path) -> tuple[dict[str, Any], Place]:
    import sqlite3

    path = folder / "full.sqlite3"
    before: list[int] = []

    def pages(raw: sqlite3.Connection) -> int:
        (count,), (size,), (free,) = (
            raw.execute(f"PRAGMA {each}").fetchone()
            for each in ("page_count", "page_size", "freelist_count")
        )
        return int((count - free) * size)

    def fill(start: int, end: int) -> None:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as raw:
            if not before:
                before.append(pages(raw))
            raw.execute(
                "WITH RECURSIVE n(i) AS (SELECT ? UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
                f"INSERT INTO {FENCE} (name, token, owner) SELECT 'names:' || i, 1, '{OWNER}' "
                "FROM n",
                (start, end - 1),
            )
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def room() -> Mapping[str, float]:
        with closing(sqlite3.connect(path)) as raw:
            return {"table and indexes": pages(raw) - before[0]}

    databases = {
        "lite_empty": project.sqlite(str(folder / "empty.sqlite3")),
        "lite_full": project.sqlite(str(path)),
    }
    return databases, Place("lite_empty", "lite_full", None, fill, room)


def _mariadb(stack: ExitStack) -> tuple[dict[str, Any], Place]:
    server = stack.enter_context(
        closing(MariaDB.launch(finding.mariadb(), "--innodb-buffer-pool-size=512M"))
    )
    full, empty = f"{server.database}_full", f"{server.database}_empty"
    for name in (full, empty):
        server.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4", database="mysql")

    def fill(start: int, end: int) -> None:
        server.execute(
            f"INSERT INTO {FENCE} (name, token, owner) SELECT concat('names:', seq), 1, '{OWNER}' "
            f"FROM seq_{start}_to_{end - 1}",
            database=full,
        )
        server.execute(f"ANALYZE TABLE {FENCE}", database=full)

    def room() -> Mapping[str, float]:
        ((rows, index),) = server.execute(
            "SELECT data_length, index_length FROM information_schema.tables "
            f"WHERE table_schema = '{full}' AND table_name = '{FENCE}'",
            database="mysql",
        )
        return {"table and indexes": rows + index, "of it indexes": index}

    databases = {
        "maria_empty": {**server.django(), "NAME": empty},
        "maria_full": {**server.django(), "NAME": full},
    }
    return databases, Place("maria_empty", "maria_full", server.process.pid, fill, room)


def _configure(places: Mapping[str, tuple[dict[str, Any], Place]], redis: Redis) -> None:
    import django
    from django.conf import settings

    databases = {alias: each for made, _ in places.values() for alias, each in made.items()}
    backends = "django_fencedlock.backends"
    session = {"BACKEND": f"{backends}.postgres.PostgresBackend"}
    settings.configure(
        INSTALLED_APPS=["django_fencedlock"],
        DATABASES={"default": databases["pg_empty"], **databases},
        FENCEDLOCK={
            "default": {},
            **{alias: {"FENCE_DATABASE": alias} for alias in databases},
            "pg_empty_session": {**session, "FENCE_DATABASE": "pg_empty"},
            "pg_full_session": {**session, "FENCE_DATABASE": "pg_full"},
            "redis": {"BACKEND": f"{backends}.redis.RedisBackend", "LOCATION": redis.url},
        },
        USE_TZ=True,
    )
    django.setup()
    project.migrate()


def _report(title: str, place: Place, given: argparse.Namespace, report: Report) -> None:
    filled = 1
    for count in given.curve:
        place.fill(filled, count + 1)
        filled = count + 1
        for who, empty, full in _pairs(title, place):
            known, new = _ratios(empty, full, count, place.server, given.rounds)
            print(
                f"  {who:34} {count:9,} names: acquire and release against an empty table, CPU: "
                f"a name that is there {known:.2f}, a new one {new:.2f}",
                flush=True,
            )
            last = count == given.curve[-1]
            report.add(CURVE, who, "CPU, a name that is there", known, at=count)
            report.add(CURVE, who, "CPU, a new name", new, at=count)
            if last:
                report.add(WORK, who, "CPU, a name that is there", known, aim=AIM)
                report.add(WORK, who, "CPU, a new name", new, aim=AIM)
        for what, size in place.room().items():
            report.add(CURVE, title, what, size / count, "bytes", at=count)
    room = {what: size / given.curve[-1] for what, size in place.room().items()}
    for what, size in room.items():
        print(f"  {title}: {what}, for each name: {size:.0f} bytes")
        report.add(ROOM, title, what, size, "bytes")


def _pairs(title: str, place: Place) -> Iterator[tuple[str, str, str]]:
    yield f"{OURS}, database on {title}", place.empty, place.full
    if title == "Postgres":
        yield f"{OURS}, postgres", f"{place.empty}_session", f"{place.full}_session"


def _ratios(
    empty: str, full: str, count: int, server: int | None, rounds: int
) -> tuple[float, float]:
    """CPU time beside that many names, to that beside none: of a known name, and of a new one."""
    choose = random.Random(count)
    known, new = [], []
    for turn in range(rounds + 1):
        there = [f"names:{choose.randint(1, count)}" for _ in range(TIMES)]
        absent = [f"new:{full}:{count}:{turn}:{place}" for place in range(TIMES)]
        few = [f"few:{number}" for number in range(TIMES)]
        for full_names, empty_names, found in ((there, few, known), (absent, absent, new)):
            order = [(full, full_names), (empty, empty_names)]
            spent = {
                alias: _spent(alias, names, server)
                for alias, names in order[:: 1 if turn % 2 else -1]
            }
            # The first round opens connections.
            if turn:
                found.append(spent[full] / spent[empty])
    return statistics.median(known), statistics.median(new)


def _spent(alias: str, names: list[str], server: int | None) -> float:
    """CPU seconds of this process and of the server."""
    from django_fencedlock import lock

    pids = [server] if server else []
    theirs, ours = computed(pids), time.process_time()
    for name in names:
        with lock(name, backend=alias):
            pass
    return time.process_time() - ours + computed(pids) - theirs


def _on_redis(redis: Redis, count: int, report: Report) -> None:
    """What a lock leaves behind there, and what many of that take."""
    from django_fencedlock import lock

    client = redis.client()
    with lock("names:0", backend="redis"):
        held = {key: client.memory_usage(key) for key in client.keys("*")}
    left = client.keys("*")
    days = max(client.pttl(key) for key in left) / 86_400_000
    report.add(ON_REDIS, OURS, "keys while held", len(held), COUNTED)
    report.add(ON_REDIS, OURS, "keys after release", len(left), COUNTED)
    report.add(ON_REDIS, OURS, "days that it stays", days, COUNTED)
    before = redis.info("memory")["used_memory"]
    _like(client, left[0], count)
    each = (redis.info("memory")["used_memory"] - before) / count
    print(
        f"  Redis: {len(held)} keys of {sum(held.values())} bytes while held; {len(left)} after "
        f"the release, for {days:.0f} days; {count:,} names took {each:.0f} bytes each"
    )
    report.add(ON_REDIS, OURS, "memory of each name", each, "bytes")


def _like(client: Any, key: str, count: int) -> None:
    """Many keys as that one, made by the server itself."""
    assert key == "{fencedlock:names:0}:seq", key
    make = client.register_script(
        """
        for i = ARGV[1], ARGV[2] do
          redis.call('SET', '{fencedlock:names:' .. string.format('%d', i) .. '}:seq',
                     ARGV[3], 'PX', ARGV[4])
        end
        """
    )
    value, left = client.get(key), client.pttl(key)
    for start in range(1, count + 1, 20_000):
        make(args=[start, min(count, start + 19_999), value, left])


if __name__ == "__main__":
    main()
