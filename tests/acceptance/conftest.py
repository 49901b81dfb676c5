"""
Workers for the acceptance tests.

One worker per pool and broker serves all tests that leave it alone; ``make_worker`` starts one that
a test may kill. Tests don't meet: each has a key, which names its locks and its spans in the
journal.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import _state
from django.db import OperationalError
from django.db.backends.base.operations import BaseDatabaseOperations

from tests.backends import POSTGRES, REDIS
from tests.servers import Redis, finding, shared, workspace
from tests.workers import Beat, Broker, FilesystemBroker, Journal, RabbitBroker, RedisBroker, Worker
from tests.workers.journal import VARIABLE as JOURNAL

_WORKERS = pytest.StashKey[list[Any]]()
_TRANSACTIONS = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # It gets the items of all directories.
        if item.path.parent.name == "acceptance":
            item.add_marker(_TRANSACTIONS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        for used in item.stash.get(_WORKERS, []):
            report.sections.append((f"Log of {used!r}", used.new_log))
    return report


@pytest.fixture(scope="session")
def locks(django_db_setup: None) -> dict[str, Any]:
    redis = {
        "BACKEND": REDIS,
        "LOCATION": shared.redis().url,
        "KEY_PREFIX": f"{workspace.root().name}:",
    }
    return {
        # Rows of SQLite, which is what the settings have if they say nothing.
        "default": {},
        "rows": {"FENCE_DATABASE": "postgres"},
        "sessions": {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"},
        "redis": {**redis, "FENCE_DATABASE": "postgres"},
        "down": {**redis, "LOCATION": "redis://127.0.0.1:1/0"},
    }


@pytest.fixture(scope="session")
def worker_environment(
    locks: dict[str, Any], child_environment: Callable[[], dict[str, str]]
) -> dict[str, str]:
    shared.postgres()
    return {
        **child_environment(),
        "DJANGO_SETTINGS_MODULE": "tests.workers.settings",
        "FENCEDLOCK_TEST_LOCKS": json.dumps(locks),
    }


@pytest.fixture(scope="session")
def journal() -> Iterator[Journal]:
    path = workspace.new_directory("journal") / "journal"
    os.environ[JOURNAL] = str(path)
    yield Journal(path)
    del os.environ[JOURNAL]


@pytest.fixture
def key(request: pytest.FixtureRequest, journal: Journal) -> Iterator[str]:
    name = f"{request.node.originalname[5:45]}-{uuid.uuid4().hex[:8]}"
    yield name
    # A test that failed would otherwise leave children of the shared worker waiting there.
    journal.open_gate(name)


@pytest.fixture(autouse=True, scope="session")
def patient_flush() -> Iterator[None]:
    """Empty the tables again if a worker, which reads several of them, was in the way."""
    flush = BaseDatabaseOperations.execute_sql_flush

    def patiently(self: Any, sql_list: list[str]) -> None:
        for left in reversed(range(10)):
            try:
                return flush(self, sql_list)
            except OperationalError:
                if not left:
                    raise
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseDatabaseOperations, "execute_sql_flush", patiently)
        yield


@pytest.fixture(autouse=True)
def same_locks(settings: Any, locks: dict[str, Any], journal: Journal) -> None:
    settings.FENCEDLOCK = locks


@pytest.fixture(scope="session")
def brokers_redis() -> Iterator[Redis]:
    with contextlib.closing(Redis.launch(finding.redis(), "--databases", "1000")) as server:
        yield server


@pytest.fixture(scope="session")
def make_broker(
    request: pytest.FixtureRequest, brokers_redis: Redis
) -> Iterator[Callable[[str], Broker]]:
    with contextlib.ExitStack() as stack:

        def make(kind: str) -> Broker:
            if kind == "rabbitmq":
                made: Broker = RabbitBroker(request.getfixturevalue("rabbitmq"), brokers_redis)
            else:
                made = FilesystemBroker() if kind == "filesystem" else RedisBroker(brokers_redis)
            return stack.enter_context(contextlib.closing(made))

        yield make


@pytest.fixture
def use(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """Return a function that sends tasks to a worker, whose log is shown if the test fails."""
    before = getattr(_state._tls, "current_app", None)
    used = request.node.stash.setdefault(_WORKERS, [])

    def take(worker: Any) -> Any:
        used.append(worker)
        worker.mark_log()
        if isinstance(worker, Worker):
            worker.app.set_current()
        return worker

    yield take
    _state._tls.current_app = before


@pytest.fixture
def make_worker(
    make_broker: Callable[[str], Broker],
    worker_environment: dict[str, str],
    journal: Journal,
    use: Callable[[Any], Any],
    closing: Callable[[Any], Any],
) -> Callable[..., Worker]:
    """Start a worker that the test may kill. A second one may share ``first.broker``."""

    def make(*arguments: str, broker: str | Broker = "redis", **options: Any) -> Worker:
        queue = make_broker(broker) if isinstance(broker, str) else broker
        worker = closing(Worker(queue, journal, worker_environment, *arguments, **options))
        use(worker)
        worker.start()
        return worker

    return make


@pytest.fixture
def make_beat(
    worker_environment: dict[str, str], use: Callable[[Any], Any], closing: Callable[[Any], Any]
) -> Callable[[Worker, Any], Beat]:

    def make(worker: Worker, schedule: Any) -> Beat:
        beat = use(closing(Beat(worker, worker_environment, schedule)))
        beat.start()
        return beat

    return make


# No longer than a module: their main processes look after the tables now and then, and other tests
# count the statements of the shared server.
@pytest.fixture(scope="module")
def shared_workers(
    make_broker: Callable[[str], Broker], worker_environment: dict[str, str], journal: Journal
) -> Iterator[Callable[[str, str], Worker]]:
    workers: dict[tuple[str, str], Worker] = {}

    def get(pool: str, kind: str) -> Worker:
        if (pool, kind) not in workers:
            queue = make_broker(kind)
            workers[pool, kind] = Worker(queue, journal, worker_environment, pool=pool)
        if not workers[pool, kind].process.running:
            workers[pool, kind].start()
        return workers[pool, kind]

    yield get
    for worker in workers.values():
        worker.close()


@pytest.fixture
def shared_worker(
    shared_workers: Callable[[str, str], Worker], use: Callable[[Any], Any]
) -> Callable[..., Worker]:
    return lambda pool="prefork", broker="redis": use(shared_workers(pool, broker))


@pytest.fixture
def worker(shared_worker: Callable[..., Worker]) -> Worker:
    return shared_worker()


@pytest.fixture(params=["redis", "filesystem", "rabbitmq"])
def any_worker(request: pytest.FixtureRequest, shared_worker: Callable[..., Worker]) -> Worker:
    return shared_worker(broker=request.param)
