"""
Runs Celery's own integration tests, every task under `single_instance`, and shows what that breaks.

    python -m tests.celery_suite                                # all of them, twice
    python -m tests.celery_suite t/integration/test_canvas.py   # these
    python -m tests.celery_suite --backend postgres

It tests with the Celery that is installed; the tests themselves aren't in its wheel, and are taken
from its sdist (``pip download``). They run in two processes, each with a worker of the pool
prefork: as they are, which tells what fails on this machine anyhow, and with every task's function
under ``@single_instance``, by a name of its own for each call. What fails in the second alone is
run again by itself, and makes the exit status 1 if it fails again.

Redis is broker and result backend, and PostgreSQL has the fences; both are started as for the tests
of this package. Celery's tests want more: ``pip install pytest-rerunfailures pydantic sqlalchemy
cryptography pyyaml msgpack``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.sdists import fetched, run_logged

ROOT = Path(__file__).resolve().parent.parent
TESTS = "t/integration"
#: Tells the process that runs the tests where to note the outcomes, and whether to decorate.
NOTED, DECORATED = "CELERY_SUITE_NOTED", "CELERY_SUITE_DECORATED"
PATIENCE = 300
#: Ours and Celery's; not those that come with the tests of this package.
PLUGINS = ["tests.celery_suite", "celery.contrib.pytest", "no:django", "no:randomly", "no:xdist"]
BACKENDS = {
    "database": {},
    "redis": {"BACKEND": "django_fencedlock.backends.redis.RedisBackend"},
    "postgres": {"BACKEND": "django_fencedlock.backends.postgres.PostgresBackend"},
}


def main() -> int:
    options = _arguments()
    suite = _Suite(options)
    plain = suite.run("plain", options.tests)
    decorated = suite.run("decorated", options.tests)
    new = _failed(decorated) - _failed(plain)
    left = _failed(suite.run("decorated", sorted(new), part="again")) if new else set()
    print(f"\nCelery {suite.version}, backend {options.backend}:")
    for what, outcomes in (("as they are", plain), ("under single_instance", decorated)):
        counts = {kind: sum(1 for each in outcomes.values() if each == kind) for kind in KINDS}
        print(f"{what}:", ", ".join(f"{number} {kind}" for kind, number in counts.items()))
    print(f"{len(new)} new failures, {len(left)} of them again when they are run by themselves")
    for test in sorted(left):
        print(f"    {test}")
    return 1 if left or not decorated else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("tests", nargs="*", default=[TESTS], help="files or tests of Celery's")
    parser.add_argument("--backend", choices=BACKENDS, default="redis")
    parser.add_argument("--work", type=Path, default=ROOT / ".celery_suite")
    parser.add_argument("--timeout", type=int, default=5400, help="seconds for one run of all")
    return parser.parse_args()


KINDS = ("passed", "failed", "skipped")


def _failed(outcomes: dict[str, str]) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome == "failed"}


class _Suite:
    def __init__(self, options: argparse.Namespace) -> None:
        import celery

        from tests.servers import shared

        self.options = options
        self.version = celery.__version__
        self.work: Path = options.work.resolve()
        self.source = fetched("celery", self.version, self.work, _is_kept)
        self.records = self.work / f"{self.version}-{options.backend}"
        self.records.mkdir(parents=True, exist_ok=True)
        self.redis = shared.redis()
        self.settings = _write_settings(
            self.records, shared.postgres().django(), self.redis.url, options.backend
        )

    def run(self, how: str, tests: Sequence[str], part: str = "all") -> dict[str, str]:
        noted = self.records / f"{how}-{part}.json"
        noted.unlink(missing_ok=True)
        began = time.monotonic()
        self._call(["-m", "django", "migrate", "-v", "0"], how, noted, self.records / "migrate.log")
        arguments = ["-m", "pytest", "-q", f"--timeout={PATIENCE}"]
        # Some files want the client of a cloud.
        arguments.append("--continue-on-collection-errors")
        for plugin in PLUGINS:
            arguments += ["-p", plugin]
        log = noted.with_suffix(".log")
        code = self._call([*arguments, *tests], how, noted, log)
        outcomes = json.loads(noted.read_text()) if noted.exists() else {}
        print(f"{how}, {part}: {len(outcomes)} tests, {time.monotonic() - began:.0f} s: {log}")
        if code not in (0, 1):
            raise SystemExit(f"The tests didn't end by themselves (exit status {code}): see {log}")
        return dict(outcomes)

    def _call(self, arguments: Sequence[str], how: str, noted: Path, log: Path) -> int:
        url = f"{self.redis.url.rstrip('/').removesuffix('/0')}/0"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, self.records, self.source))),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "DJANGO_SETTINGS_MODULE": self.settings,
            "TEST_BROKER": url,
            "TEST_BACKEND": url,
            "REDIS_HOST": self.redis.host,
            "REDIS_PORT": str(self.redis.port),
            NOTED: str(noted),
            DECORATED: "1" if how == "decorated" else "",
        }
        command = [sys.executable, "-W", "ignore", *arguments]
        options = {"cwd": self.source, "env": environment}
        return run_logged(command, log, self.options.timeout, **options)


def _is_kept(name: str) -> bool:
    """Whether a file isn't of the package itself, which would take the place of the installed."""
    return name.split("/")[1:2] != ["celery"]


def _write_settings(directory: Path, database: dict[str, Any], redis: str, backend: str) -> str:
    lock = dict(BACKENDS[backend])
    if backend == "redis":
        # Not the database that Celery's tests empty.
        lock["LOCATION"] = f"{redis.rstrip('/').removesuffix('/0')}/1"
    (directory / "celery_suite_settings.py").write_text(
        f"DATABASES = {{'default': {database!r}}}\n"
        "SECRET_KEY = 'celery'\n"
        "USE_TZ = True\n"
        "INSTALLED_APPS = ['django_fencedlock']\n"
        f"FENCEDLOCK = {{'default': {lock!r}}}\n"
    )
    return "celery_suite_settings"


# A plugin of the process that runs the tests

_outcomes: dict[str, str] = {}


def pytest_configure(config: Any) -> None:
    if os.environ.get(DECORATED):
        _decorate_all()


def pytest_runtest_logreport(report: Any) -> None:
    """Note the worst of a test's phases; of several tries, that of the last."""
    if report.when == "setup":
        _outcomes[report.nodeid] = "passed"
    if report.outcome in ("failed", "skipped"):
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: Any) -> None:
    Path(os.environ[NOTED]).write_text(json.dumps(_outcomes, indent=1))


def _decorate_all() -> None:
    import celery
    import celery.app
    import django

    django.setup()
    shared: Any = _decorating(celery.shared_task, 0)
    celery.app.shared_task = shared
    celery.shared_task = shared
    celery.Celery.task = _decorating(celery.Celery.task, 1)  # type: ignore[method-assign]
    from t.integration.tasks import ClassBasedAutoRetryTask

    ClassBasedAutoRetryTask.run = _under_lock(ClassBasedAutoRetryTask.run)


def _decorating(make: Any, bound: int) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        if len(args) > bound and inspect.isfunction(args[bound]):
            return make(*args[:bound], _under_lock(args[bound]), *args[bound + 1 :], **options)
        decorator = make(*args, **options)
        return lambda function: decorator(_under_lock(function))

    return made


def _under_lock(function: Any) -> Any:
    from django_fencedlock.celery import single_instance

    if not inspect.isfunction(function) or function.__module__.startswith("celery."):
        return function  # Celery's own tasks, such as those of chords.
    _decorated.append(function)
    return single_instance(lambda task, arguments: f"{task.name}:{uuid.uuid4()}")(function)


_decorated: list[Any] = []


def pytest_report_header() -> str:
    return f"{len(_decorated)} tasks are under single_instance so far"


if __name__ == "__main__":
    sys.exit(main())
