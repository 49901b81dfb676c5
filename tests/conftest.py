import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from django_fencedlock.core import runtime
from django_fencedlock.core.manager import _living, drop_leases_of_test
from django_fencedlock.lease import current_lease
from django_fencedlock.lease_context import leave
from django_fencedlock.storage import connections as sessions
from django_fencedlock.storage.background_writer import BackgroundWriter, writer
from tests.backends import BACKENDS
from tests.browser import Browser
from tests.servers import (
    Clock,
    Consul,
    DynamoDB,
    Etcd,
    MariaDB,
    MySQL,
    PgBouncer,
    Postgres,
    Proxy,
    RabbitMQ,
    Redis,
    Server,
    ServerMissing,
    ZooKeeper,
    clock,
    finding,
    shared,
    stop_everything,
)

_NOT_FOUND = "was not found on this machine"
#: Where pytest keeps the ids of tests that were skipped because a program is missing.
SKIPPED = "fencedlock/skipped"
_alias_numbers = itertools.count(1)
_app_numbers = itertools.count(1)


# Tests mostly wait, so one core serves three processes. The least helps a single core; the most
# limits the memory, of which a process with its servers and workers takes up to 1 GB.
_PROCESSES = min(max(3 * (os.cpu_count() or 1), 4), 12)
# Tests that are not slow keep a core busy, and each process imports Django and migrates first.
_PROCESSES_IF_NOT_SLOW = min((os.cpu_count() or 1) + 1, 12)
#: All tests in these directories are slow,
_SLOW_DIRECTORIES = ("tests/acceptance/", "tests/faults/")
#: and so is a test that starts one of these for itself,
_SLOW_FIXTURES = {
    *("make_postgres", "make_mariadb", "make_pgbouncer", "make_rabbitmq", "make_clock"),
    *("mariadb", "pgbouncer", "rabbitmq", "browser", "process", "child_environment"),
    *("make_etcd_cluster", "make_zookeeper_cluster", "make_consul_cluster"),
    *("make_zookeeper", "make_consul", "make_mysql"),
    *("shared_zookeeper", "shared_consul", "shared_mysql"),
}
#: or that repeats on another server what PostgreSQL, SQLite and Redis show,
_SLOW_PARAMETERS = {"mariadb", "valkey"}
#: or on PostgreSQL what it shows on SQLite.
_SLOW_BESIDE_SQLITE = "postgres"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes run the tests: none besides this one for a single file."""
    files = [Path(each.partition("::")[0]) for each in config.args]
    if config.option.capture == "no" or (len(files) == 1 and files[0].is_file()):
        return 0
    most = _PROCESSES_IF_NOT_SLOW if config.option.markexpr == "not slow" else _PROCESSES
    return min(most, len(files)) if all(map(Path.is_file, files)) else most


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    on_sqlite = {_without_parameters(item) for item in items if "default" in _parameters(item)}
    for item in items:
        _leave_mariadb_alone(item)
        repeats = _SLOW_BESIDE_SQLITE in _parameters(item)
        if _is_slow(item) or (repeats and _without_parameters(item) in on_sqlite):
            item.add_marker("slow")
    yield
    # xdist hands out classes and modules in this order. A long one at the end would run alone.
    all_of, slow = Counter(map(_scope, items)), Counter[str]()
    slow.update(_scope(item) for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: slow[_scope(item)] / all_of[_scope(item)], reverse=True)


def pytest_report_header() -> list[str]:
    return shared.report()


def pytest_unconfigure() -> None:
    # Not left to atexit alone: an xdist worker may end without it.
    stop_everything()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "mariadb" in aliases(item) and not shared.available("mariadb"):
        _optional(finding.mariadb)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    # Before the fixtures end: a keeper would release these where pytest allows no database.
    for each in list(_living):
        if each.keeper.doubts:
            each.keeper.doubts.clear()
            each.keeper._tending.finish(5)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2] for report in skipped)
    # None under -p no:cacheprovider.
    if cache := getattr(terminalreporter.config, "cache", None):
        missing = [each.nodeid for each in skipped if _NOT_FOUND in each.longrepr[2]]
        cache.set(SKIPPED, missing)
    for reason, count in reasons.items():
        if _NOT_FOUND in reason:
            terminalreporter.write_line(f"{count} not run: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def no_leases_left_behind() -> Iterator[None]:
    yield
    # A receiver of the next test would get what is reported late.
    runtime.worker.finish(10)
    drop_leases_of_test()
    # The context of the tests that follow is this one.
    while lease := current_lease():
        leave(lease)


@pytest.fixture
def holders() -> Iterator[Any]:
    # pytest imports this file before there are settings.
    from tests.threads import Holders

    with Holders() as found:
        yield found


@pytest.fixture
def keep_connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep idle private connections, as outside of a test runner."""
    monkeypatch.setattr(sessions, "under_test", lambda: False)
    yield
    sessions.close_all()


@pytest.fixture
def boss(client: Any, django_user_model: Any) -> Any:
    client.force_login(django_user_model.objects.create_superuser("boss"))
    return client


@pytest.fixture(params=["default", "postgres", "mariadb"])
def using(request: pytest.FixtureRequest, settings: Any, keep_connections: None) -> str:
    # SQLite serves those who wait for its file in no order.
    options = {"TIMEOUT": 20}
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": request.param, "OPTIONS": options}}
    database: str = request.param
    return database


@pytest.fixture(params=BACKENDS)
def backend(
    request: pytest.FixtureRequest, settings: Any, redis_server: Redis, postgres: Postgres
) -> str:
    terms: dict[str, Any] = dict(BACKENDS[request.param])
    if request.param == "redis":
        redis_server.empty()
        terms["LOCATION"] = redis_server.url
    settings.FENCEDLOCK = {"default": terms}
    name: str = request.param
    return name


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundWriter]:
    """Return the background writer, which writes when the test calls `flush()`."""
    monkeypatch.setattr(writer, "is_off", lambda: False)
    monkeypatch.setattr(writer._worker, "start", lambda: None)
    writer.after_fork()
    yield writer
    writer.close()
    writer.after_fork()
    writer._worker.after_fork()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    request: pytest.FixtureRequest, django_db_modify_db_settings_parallel_suffix: None
) -> None:
    needed = set().union(*(aliases(item) for item in request.session.items))
    for alias in needed & {"postgres", "mariadb"} & set(connections.settings):
        address = getattr(shared, alias)().django()
        for key in ("HOST", "PORT", "USER", "PASSWORD"):
            connections.settings[alias][key] = address[key]


@pytest.fixture(scope="session")
def django_db_keepdb() -> bool:
    """Leave the test databases alone at the end: they go with their servers."""
    return not (shared.url("postgres") or shared.url("mariadb"))


def _shared(get: Callable[[], Any]) -> Any:
    return pytest.fixture(scope="session")(lambda: _optional(get))


postgres = _shared(shared.postgres)
redis_server = _shared(shared.redis)
valkey_server = _shared(shared.valkey)
mariadb = _shared(shared.mariadb)
#: It pools transactions of the shared PostgreSQL.
pgbouncer = _shared(shared.pgbouncer)
rabbitmq = _shared(shared.rabbitmq)
shared_etcd = _shared(shared.etcd)
shared_zookeeper = _shared(shared.zookeeper)
shared_consul = _shared(shared.consul)
shared_dynamodb = _shared(shared.dynamodb)
shared_mysql = _shared(shared.mysql)
#: Three durable Redis.
shared_redlock = _shared(shared.redlock)


@pytest.fixture(scope="session")
def shared_browser() -> Iterator[Browser]:
    with contextlib.closing(_optional(Browser)) as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: Browser) -> Browser:
    shared_browser.reset()
    return shared_browser


def _own(launch: Callable[..., Server], find: Callable[[], Any]) -> Any:
    @pytest.fixture
    def make(closing: Callable[[Server], Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: closing(launch(_optional(find), *arguments, **options))

    return make


def _own_cluster(launch: Callable[..., list[Any]], find: Callable[[], Any]) -> Any:
    @pytest.fixture
    def make(closing: Callable[[Server], Any]) -> Callable[..., list[Any]]:
        return lambda *arguments, **options: [
            closing(node) for node in launch(_optional(find), *arguments, **options)
        ]

    return make


make_postgres = _own(Postgres.launch, finding.postgres)
make_redis = _own(Redis.launch, finding.redis)
make_valkey = _own(Redis.launch, finding.valkey)
make_mariadb = _own(MariaDB.launch, finding.mariadb)
#: In front of a PostgreSQL.
make_pgbouncer = _own(PgBouncer.launch, finding.pgbouncer)
make_rabbitmq = _own(RabbitMQ.launch, finding.rabbitmq)
make_etcd = _own(Etcd.launch, finding.etcd)
make_etcd_cluster = _own_cluster(Etcd.launch_cluster, finding.etcd)
make_zookeeper = _own(ZooKeeper.launch, finding.zookeeper)
make_zookeeper_cluster = _own_cluster(ZooKeeper.launch_cluster, finding.zookeeper)
make_consul = _own(Consul.launch, finding.consul)
make_consul_cluster = _own_cluster(Consul.launch_cluster, finding.consul)
make_dynamodb = _own(DynamoDB.launch, finding.dynamodb)
make_mysql = _own(MySQL.launch, finding.mysql)


@pytest.fixture
def make_proxy(closing: Callable[[Proxy], Any]) -> Callable[[str, int], Proxy]:
    return lambda host, port: closing(Proxy(host, port))


@pytest.fixture
def make_clock() -> Callable[[], Clock]:
    _optional(clock.compiler)
    return Clock


@pytest.fixture
def make_alias(
    django_db_setup: None, django_db_blocker: Any
) -> Iterator[Callable[[dict[str, Any]], str]]:
    with contextlib.ExitStack() as stack, django_db_blocker.unblock():

        def make(entry: dict[str, Any]) -> str:
            alias = f"private{next(_alias_numbers)}"
            configured = connections.configure_settings({"default": {}, alias: entry})
            connections.settings[alias] = configured[alias]
            stack.callback(_forget_alias, alias)
            call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
            return alias

        yield make


@pytest.fixture(scope="session")
def child_environment(request: pytest.FixtureRequest) -> Callable[[], dict[str, str]]:
    """Return a function: the environment of a process with the same settings and servers."""

    def environment() -> dict[str, str]:
        variables = {
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": str(request.config.rootpath),
            "FENCEDLOCK_TEST_SQLITE": connections["default"].settings_dict["NAME"],
        }
        for name, server in shared.started().items():
            if name in connections.settings:
                url = server.url_of(connections[name].settings_dict["NAME"])
            else:
                nodes = server if isinstance(server, list) else [server]
                url = ",".join(node.url for node in nodes)
            variables[f"FENCEDLOCK_TEST_{name.upper()}_URL"] = url
        return {**os.environ, **variables}

    return environment


@pytest.fixture
def celery_app() -> Iterator[Any]:
    from celery import Celery, _state

    before = _state._tls.current_app, _state.default_app
    app = Celery(f"tests{next(_app_numbers)}", broker="memory://", backend="cache+memory://")
    # The brokers of all apps in memory are one.
    app.conf.task_default_queue = app.main
    yield app
    _state._tls.current_app, _state.default_app = before


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


#: What is found nowhere fails, as each of them has a wheel.
_REQUIRED = {"PostgreSQL", "Redis", "Valkey"}
#: What a mirror may not have, or no longer: the suites are Debian's oldest and its newest. If
#: `fetch` has tried, the tests are skipped with its reason.
_MAY_BE_MISSING = {"Consul", "MySQL"}


def _optional(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except ServerMissing as exc:
        if exc.name in _REQUIRED:
            raise
        excused = exc.name in _MAY_BE_MISSING and exc.failure
        if os.environ.get("FENCEDLOCK_TEST_REQUIRE") and not excused:
            pytest.fail(f"{exc} (FENCEDLOCK_TEST_REQUIRE is set.)", pytrace=False)
        pytest.skip(str(exc))


def aliases(item: pytest.Item) -> set[str]:
    databases: Iterable[str] | None = getattr(getattr(item, "cls", None), "databases", None)
    for marker in item.iter_markers("django_db"):
        # The closest comes first, and is the one that counts.
        databases = databases or marker.kwargs.get("databases")
    return set(connections.settings) if databases == "__all__" else set(databases or ())


def _parameters(item: pytest.Item) -> set[str]:
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {each for each in values if isinstance(each, str)}


def _without_parameters(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _leave_mariadb_alone(item: pytest.Item) -> None:
    """Take MariaDB from a test's databases if its parameter is another one: it starts slowly."""
    marker = item.get_closest_marker("django_db")
    named = _parameters(item) & {"default", "postgres", "mariadb"}
    if marker and named and "mariadb" not in named and "mariadb" in aliases(item):
        databases = sorted(aliases(item) - {"mariadb"})
        narrow = pytest.mark.django_db(**{**marker.kwargs, "databases": databases})
        item.add_marker(narrow, append=False)


def _is_slow(item: pytest.Item) -> bool:
    return bool(
        item.nodeid.startswith(_SLOW_DIRECTORIES)
        or _SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        or _SLOW_PARAMETERS & _parameters(item)
        or "mariadb" in aliases(item)
    )


def _scope(item: pytest.Item) -> str:
    return item.nodeid.rpartition("::")[0]


def _forget_alias(alias: str) -> None:
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]
