"""
What fencing costs a save, as ratios to the same operation on an equal table without the mixin.

Run from the top of the checkout: ``python -m benchmarks.saves``. Plain and fenced operations take
turns within each round; the figure is the median of the rounds' ratios. Client and servers share
one CPU, or the ratios don't repeat.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pymysql

from tests.servers import MariaDB, Postgres, ServerMissing, finding

ROUNDS, SAVES, ROWS = 30, 60, 1000


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = options.parse_args().rounds
    pymysql.install_as_MySQLdb()
    with ExitStack() as stack:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        databases = {"sqlite": _sqlite(stack)}
        databases["postgres"] = stack.enter_context(
            closing(Postgres.launch(finding.postgres()))
        ).django()
        try:
            mariadb = stack.enter_context(closing(MariaDB.launch(finding.mariadb())))
            mariadb.execute(
                f"CREATE DATABASE IF NOT EXISTS {mariadb.database} CHARACTER SET utf8mb4",
                database="mysql",
            )
            databases["mariadb"] = mariadb.django()
        except ServerMissing as exc:
            print(exc)
        _configure(databases)
        for alias in databases:
            _prepare(alias)
            for name, plain, fenced in _operations(alias):
                print(f"{alias:9} {name:34} {_ratio(plain, fenced, rounds):.2f}")


def _sqlite(stack: ExitStack) -> dict[str, object]:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(Path(folder) / "db.sqlite3"),
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }


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


def _models() -> tuple[type, type, type]:
    from django.db import models

    from django_fencedlock.models import FencedModel, Fencing

    if "Plain" not in _made:

        class Plain(models.Model):  # noqa: DJ008
            amount = models.IntegerField(default=0)
            note = models.CharField(max_length=50, default="")
            stamp = models.BigIntegerField(default=0)

            class Meta:
                app_label = "django_fencedlock"
                db_table = "benchmark_plain"

        class Fenced(FencedModel):
            amount = models.IntegerField(default=0)
            note = models.CharField(max_length=50, default="")

            class Meta:
                app_label = "django_fencedlock"
                db_table = "benchmark_fenced"

        class Batch(FencedModel):
            fencing = Fencing("benchmark")
            amount = models.IntegerField(default=0)
            note = models.CharField(max_length=50, default="")

            class Meta:
                app_label = "django_fencedlock"
                db_table = "benchmark_batch"

        _made.update(Plain=Plain, Fenced=Fenced, Batch=Batch)
    return _made["Plain"], _made["Fenced"], _made["Batch"]


_made: dict[str, type] = {}


def _prepare(alias: str) -> None:
    from django.core.management import call_command
    from django.db import connections

    call_command("migrate", database=alias, verbosity=0)
    with connections[alias].schema_editor() as editor:
        for model in _models():
            editor.create_model(model)


def _operations(alias: str) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    from django.db import transaction

    from django_fencedlock import lock

    plain_model, fenced_model, batch_model = _models()
    plain = plain_model._default_manager.using(alias).create()
    fenced = fenced_model._default_manager.using(alias).create()
    with fenced.fencing.lock(backend=alias) as lease, lock("benchmark", backend=alias):

        def saves(instance: object) -> Callable[[], None]:
            return lambda: [instance.save(using=alias) for _ in range(SAVES)] and None

        yield "save()", saves(plain), saves(fenced)

        def in_atomic(instance: object) -> Callable[[], None]:
            def run() -> None:
                with transaction.atomic(using=alias):
                    for _ in range(SAVES):
                        instance.save(using=alias)

            return run

        yield "save() in atomic()", in_atomic(plain), in_atomic(fenced)

        @contextmanager
        def plain_block() -> Iterator[None]:
            with transaction.atomic(using=alias):
                yield

        def ten(instance: object, block: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                for _ in range(SAVES // 10):
                    with block():
                        for _ in range(10):
                            instance.save(using=alias)

            return run

        yield (
            "lease.atomic() with 10 saves",
            ten(plain, plain_block),
            ten(fenced, lambda: lease.atomic(alias)),
        )

        def bulk(model: type) -> Callable[[], None]:
            rows = model._default_manager.using(alias).bulk_create([model() for _ in range(ROWS)])
            rows = list(model._default_manager.using(alias).all()[:ROWS])
            return lambda: (
                model._default_manager.using(alias).bulk_update(rows, ["amount"]) and None
            )

        yield f"bulk_update() of {ROWS:,} rows", bulk(plain_model), bulk(batch_model)


def _ratio(plain: Callable[[], None], fenced: Callable[[], None], rounds: int) -> float:
    for warm in (plain, fenced):
        warm()
    return statistics.median(_time(fenced) / _time(plain) for _ in range(rounds))


def _time(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
