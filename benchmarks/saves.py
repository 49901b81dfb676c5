"""
What fencing costs a save, as ratios to the same operation on an equal table without the mixin.

Run from the top of the checkout: ``python -m benchmarks.saves``. Contestants of a group take turns
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
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pymysql

from benchmarks import project
from benchmarks.processor import computed
from benchmarks.report import COUNTED, Report
from benchmarks.report import options as common
from tests.servers import MariaDB, Postgres, ServerMissing, finding

SAVES, ROWS = 100, 1000
#: What a fenced save should cost at most, as a ratio to a plain one.
AIMS = {"sqlite": 1.10, "postgres": 1.25, "mariadb": 1.25}

Run = Callable[[], object]
Group = Mapping[str, Run]


def main() -> None:
    options = _options()
    report = Report(options)
    pymysql.install_as_MySQLdb()
    with ExitStack() as stack:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        databases = {"sqlite": _sqlite(stack)}
        servers = []
        for alias, launch in {"postgres": _postgres, "mariadb": _mariadb}.items():
            try:
                server = stack.enter_context(closing(launch()))
            except ServerMissing as exc:
                print(exc)
                continue
            databases[alias] = server.django()
            servers.append(server.process.pid)
            if alias == "postgres":
                databases["prepared"] = _prepared(server)
        _configure(databases)
        print(f"load {os.getloadavg()[0]:.1f}, {options.rounds} rounds")
        for alias in databases:
            if options.only not in alias:
                continue
            _prepare(alias)
            for title, group in _groups(alias):
                found = _report(f"{alias}, {title}", alias, group, servers, options.rounds)
                _keep(report, alias, title, found)


def _options() -> argparse.Namespace:
    parser = common(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="databases that have this in their alias")
    given = parser.parse_args()
    if given.short:
        given.rounds = 1
    return given


def _sqlite(stack: ExitStack) -> dict[str, object]:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return project.sqlite(str(Path(folder) / "db.sqlite3"))


def _postgres() -> Any:
    return Postgres.launch(finding.postgres())


def _prepared(server: Any) -> dict[str, object]:
    """Another database there, where Django is allowed to have statements prepared."""
    options = {"server_side_binding": True, "prepare_threshold": 5}
    return {**server.django(server.create_database()), "OPTIONS": options}


def _mariadb() -> Any:
    server = MariaDB.launch(finding.mariadb())
    server.execute(
        f"CREATE DATABASE IF NOT EXISTS {server.database} CHARACTER SET utf8mb4", database="mysql"
    )
    return server


def _configure(databases: dict[str, dict[str, object]]) -> None:
    import django
    from django.conf import settings

    settings.configure(
        INSTALLED_APPS=["django_fencedlock"],
        DATABASES={"default": databases["sqlite"], **databases},
        FENCEDLOCK={
            "default": {},
            **{alias: {"FENCE_DATABASE": alias, "TTL": 600} for alias in databases},
        },
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
    )
    django.setup()
    _make_models()


#: By name: models of the same columns.
_models: dict[str, Any] = {}


def _make_models() -> None:
    from django.db import models

    from django_fencedlock.models import FencedModel, Fencing

    class Columns(models.Model):
        amount = models.IntegerField(default=0)
        note = models.CharField(max_length=50, default="")

        class Meta:
            abstract = True
            app_label = "django_fencedlock"

    class Plain(Columns):  # noqa: DJ008
        stamp = models.BigIntegerField(default=0)

        class Meta(Columns.Meta):
            db_table = "benchmark_plain"

    class Fenced(FencedModel, Columns):  # noqa: DJ008
        class Meta(Columns.Meta):
            db_table = "benchmark_fenced"

    class Batch(FencedModel, Columns):  # noqa: DJ008
        fencing = Fencing("benchmark")

        class Meta(Columns.Meta):
            db_table = "benchmark_batch"

    _models.update(plain=Plain, fenced=Fenced, batch=Batch)
    if find_spec("concurrency"):
        from concurrency.fields import IntegerVersionField

        class Concurrency(Columns):  # noqa: DJ008
            version = IntegerVersionField()

            class Meta(Columns.Meta):
                db_table = "benchmark_concurrency"

        _models["concurrency"] = Concurrency


def _prepare(alias: str) -> None:
    from django.core.management import call_command
    from django.db import connections

    call_command("migrate", database=alias, verbosity=0)
    with connections[alias].schema_editor() as editor:
        for model in _models.values():
            editor.create_model(model)


def _groups(alias: str) -> Iterator[tuple[str, Group]]:
    """The plain ones come first in each group; the ratios are to them."""
    from django.db import transaction

    from django_fencedlock import lock

    rows = {
        name: model._default_manager.using(alias).create()
        for name, model in _models.items()
        if name != "batch"
    }
    plain, fenced = rows["plain"], rows["fenced"]

    def saves(instance: Any) -> Run:
        def run() -> None:
            for _ in range(SAVES):
                instance.save(using=alias)

        return run

    def by_tens(instance: Any, block: Callable[[], Any]) -> Run:
        def run() -> None:
            for _ in range(SAVES // 10):
                with block():
                    for _ in range(10):
                        instance.save(using=alias)

        return run

    @contextmanager
    def atomic() -> Iterator[None]:
        with transaction.atomic(using=alias):
            yield

    def bulk(model: Any) -> Run:
        found = model._default_manager.using(alias)
        found.bulk_create([model() for _ in range(ROWS)])
        objects = list(found.all()[:ROWS])
        return lambda: found.bulk_update(objects, ["amount"])

    with fenced.fencing.lock(backend=alias) as lease, lock("benchmark", backend=alias):
        others = {"django-concurrency": saves(rows["concurrency"])} if "concurrency" in rows else {}
        yield "save()", {"plain": saves(plain), "FencedModel": saves(fenced), **others}
        yield (
            "the statement of save() alone, by the driver",
            {"plain": _replay(alias, plain), "FencedModel": _replay(alias, fenced)},
        )
        yield (
            "10 saves in a transaction",
            {
                "atomic(), plain": by_tens(plain, atomic),
                "atomic(), FencedModel": by_tens(fenced, atomic),
                "lease.atomic(), FencedModel": by_tens(fenced, lambda: lease.atomic(alias)),
                "lease.atomic(), plain": by_tens(plain, lambda: lease.atomic(alias)),
            },
        )
        yield (
            f"bulk_update() of {ROWS:,} rows",
            {"plain": bulk(_models["plain"]), "FencedModel": bulk(_models["batch"])},
        )


def _replay(alias: str, instance: Any) -> Run:
    """What a save sends, sent again without Django."""
    from django.db import connections

    ((statement, given),) = _sent(alias, lambda: instance.save(using=alias))
    if connections[alias].vendor == "sqlite":
        statement = statement.replace("%s", "?")
    cursor: Any = connections[alias].connection.cursor()

    def run() -> None:
        for _ in range(SAVES):
            cursor.execute(statement, given)

    return run


def _sent(alias: str, run: Run) -> list[tuple[str, Any]]:
    from django.db import connections

    found: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        found.append((sql, params))
        return execute(sql, params, many, context)

    with connections[alias].execute_wrapper(note):
        run()
    return found


def _report(
    title: str, alias: str, group: Group, servers: list[int], rounds: int
) -> dict[str, tuple[float, float, float]]:
    """The ratios of the time and of the CPU's, and the queries of one save, by contestant."""
    queries = {key: len(_sent(alias, run)) for key, run in group.items()}
    gc.collect()
    found: dict[str, list[tuple[float, float, float]]] = {key: [] for key in group}
    for turn in range(rounds):
        for key in list(group)[:: 1 if turn % 2 else -1]:
            found[key].append(_measure(group[key], servers))
    print(f"\n{title:54}   time    CPU    us   client's and servers' CPU in us, queries")
    base = next(iter(found.values()))
    told = {}
    for key, each in found.items():
        pairs = list(zip(each, base, strict=True))
        elapsed = statistics.median(its[0] / first[0] for its, first in pairs)
        spent = statistics.median(sum(its[1:]) / sum(first[1:]) for its, first in pairs)
        us = [statistics.median(part) * 1e6 / SAVES for part in zip(*each, strict=True)]
        print(
            f"  {key:52} {elapsed:6.3f} {spent:6.3f} {us[0]:5.0f}   {us[1]:.0f} + {us[2]:.0f}"
            f"   {queries[key] / SAVES:g}",
            flush=True,
        )
        told[key] = (elapsed, spent, queries[key] / SAVES)
    return told


def _keep(
    report: Report, alias: str, title: str, found: Mapping[str, tuple[float, float, float]]
) -> None:
    work = f"{title}, {alias}"
    for who, (elapsed, spent, queries) in found.items():
        aim = AIMS.get(alias) if title == "save()" and who == "FencedModel" else None
        report.add(work, who, "time", elapsed, aim=aim)
        report.add(work, who, "CPU", spent, aim=aim)
        if title == "save()":
            report.add(work, who, "queries", queries, COUNTED, aim=1 if aim else None)


def _measure(run: Run, servers: list[int]) -> tuple[float, float, float]:
    """Seconds on the clock; and those that this process, and the servers, computed."""
    theirs, ours, began = computed(servers), time.process_time(), time.perf_counter()
    run()
    ended, spent = time.perf_counter(), time.process_time()
    return ended - began, spent - ours, computed(servers) - theirs


if __name__ == "__main__":
    main()
