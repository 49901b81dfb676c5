"""The contract on every backend and server."""

import contextlib
import os
import sqlite3

import pytest
from django.core.management import call_command
from django.db import connections
from django.test import override_settings

from django_fencedlock.backends.dynamodb import create_table
from django_fencedlock.backends.postgres import holding
from django_fencedlock.storage import connections as sessions
from django_fencedlock.test.contract import (
    DataLossContract,
    ExpiryContract,
    LockContract,
    OutageContract,
    SharedContract,
    WaitingContract,
)
from tests.backends import (
    CONSUL,
    DATABASE,
    DYNAMODB,
    ETCD,
    MYSQL,
    POSTGRES,
    REDIS,
    REDLOCK,
    ZOOKEEPER,
)
from tests.servers import Consul, DynamoDB, finding, shared

pytestmark = pytest.mark.slow


def real(*databases):
    return pytest.mark.django_db(
        transaction=True, databases=databases, available_apps=["django_fencedlock"]
    )


class Configured:
    options = {}
    #: The fixture of a server; without it, the tests are skipped.
    needed = ""

    @classmethod
    def fencedlock(cls):
        raise NotImplementedError

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def configured(cls, request):
        if cls.needed:
            request.getfixturevalue(cls.needed)
        with pytest.MonkeyPatch.context() as patch:
            # As outside of tests: private connections stay open.
            patch.setattr(sessions, "under_test", lambda: False)
            patch.setattr(holding, "under_test", lambda: False)
            # Else each process of the tests would make a directory for servers of its own.
            patch.setenv("FENCEDLOCK_TEST_SQLITE", os.devnull)
            with override_settings(FENCEDLOCK={"default": cls.fencedlock()}):
                yield
        sessions.close_all()


class OnDatabase(Configured, LockContract, ExpiryContract, SharedContract):
    @classmethod
    def fencedlock(cls):
        return {"BACKEND": DATABASE, "FENCE_DATABASE": cls.fence_database}


@real("default")
class TestDatabaseOnSQLite(OnDatabase):
    fence_database = "default"


@real("default", "postgres")
class TestDatabaseOnPostgres(OnDatabase):
    fence_database = "postgres"


@real("default", "mariadb")
class TestDatabaseOnMariaDB(OnDatabase):
    fence_database = "mariadb"


@real("default", "postgres")
class TestPostgres(Configured, LockContract, WaitingContract, SharedContract):
    @classmethod
    def fencedlock(cls):
        return {"BACKEND": POSTGRES, "FENCE_DATABASE": "postgres"}

    def interrupt_holder(self, lease):
        shared.postgres().execute("SELECT pg_terminate_backend(%s)", lease.grant.handle.session.pid)

    def waiters(self, name):
        # One per process in the server, the others in the process, behind that one.
        name = connections["postgres"].settings_dict["NAME"]
        ((waiting,),) = shared.postgres().execute(
            "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
            " WHERE l.locktype = 'advisory' AND NOT l.granted AND d.datname = %s",
            name,
        )
        lines = self.service.backend._local._queues.values()
        return waiting + sum(len(line) - 1 for line in lines if line)


class OnMysql(Configured, LockContract, WaitingContract):
    hammered_ttl = 3.0

    @classmethod
    def fencedlock(cls):
        return {"BACKEND": MYSQL, "FENCE_DATABASE": cls.fence_database}

    def interrupt_holder(self, lease):
        self.server().execute(f"KILL {lease.grant.handle.session.id}")

    def waiters(self, name):
        key = self.service.backend._key(name)
        rows = self.server().execute("SHOW FULL PROCESSLIST")
        return sum(f"GET_LOCK('{key}'" in (row[7] or "") for row in rows)


@real("default", "mariadb")
class TestMysqlOnMariaDB(OnMysql):
    fence_database = "mariadb"
    server = staticmethod(shared.mariadb)


class TestMysqlOnMySQL(OnMysql):
    fence_database = "mysql"
    server = staticmethod(shared.mysql)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def migrated(cls, shared_mysql, django_db_setup, django_db_blocker):
        # Not in the settings: each test with all databases would start this server.
        shared_mysql.execute("CREATE DATABASE contract")
        entry = {"default": {}, "mysql": shared_mysql.django("contract")}
        connections.settings["mysql"] = connections.configure_settings(entry)["mysql"]
        with django_db_blocker.unblock():
            call_command("migrate", "django_fencedlock", database="mysql", verbosity=0)
            yield
            connections["mysql"].close()
        del connections["mysql"]
        del connections.settings["mysql"]


class OnRedis(
    Configured, LockContract, ExpiryContract, WaitingContract, SharedContract, DataLossContract
):
    #: Of this run's connections: other runs use the server as well.
    client_name = f"contract-{os.getpid()}"

    @classmethod
    def fencedlock(cls):
        url = f"{cls.server().url}?client_name={cls.client_name}"
        return {"BACKEND": REDIS, "LOCATION": url, "FENCE_DATABASE": "postgres"}

    def waiters(self, name):
        queued = self.server().execute("ZCARD", self.service.backend._keys(name).queue)
        # One that isn't in its blocking pop yet may lose its turn.
        with self.server().client() as client:
            named = [each for each in client.client_list() if each["name"] == self.client_name]
        return min(queued, sum(each["cmd"] == "blpop" and "b" in each["flags"] for each in named))

    def lose_data(self):
        self.server().execute("FLUSHALL")


@real("default", "postgres")
class TestRedis(OnRedis):
    server = staticmethod(shared.redis)


@real("default", "postgres")
class TestValkey(OnRedis):
    server = staticmethod(shared.valkey)


class Queued(Configured, LockContract, WaitingContract, SharedContract):
    """For backends of the queue recipe."""

    counts_tokens = False
    hammered_ttl = 3.0
    left_to_holder = False
    # A session can't be made longer.
    renewed_ttl = 20.0

    def interrupt_holder(self, lease):
        self.pause_holder(lease)
        self.service.backend.end(lease.grant.handle.session.id)

    def waiters(self, name):
        held = self.service.backend.holders([name])
        return held[name].waiting if held else 0


@real("default", "postgres")
class TestEtcd(Queued):
    needed = "shared_etcd"

    @classmethod
    def fencedlock(cls):
        location = {"LOCATION": shared.etcd().url, "KEY_PREFIX": "contract/"}
        return {"BACKEND": ETCD, "FENCE_DATABASE": "postgres", **location}


@real("default", "postgres")
class TestZooKeeper(Queued):
    needed = "shared_zookeeper"

    @classmethod
    def fencedlock(cls):
        location = {"LOCATION": shared.zookeeper().hosts, "KEY_PREFIX": "contract/"}
        return {"BACKEND": ZOOKEEPER, "FENCE_DATABASE": "postgres", **location}


@real("default", "postgres")
class TestConsul(Queued):
    needed = "shared_consul"

    @classmethod
    def fencedlock(cls):
        # For leases of half a second, which is less than a session of Consul's can have.
        location = {"LOCATION": shared.consul().url, "KEY_PREFIX": "contract/"}
        options = {"OPTIONS": {"SESSION_TTL_MIN": 1}}
        return {"BACKEND": CONSUL, "FENCE_DATABASE": "postgres", **location, **options}


@real("default", "postgres")
class TestRedlock(Configured, LockContract, ExpiryContract, DataLossContract):
    needed = "shared_redlock"
    hammered_ttl = 3.0
    nodes = staticmethod(shared.redlock)

    # A renewal that sets a key which is gone would undo a forced release.
    test_a_forgotten_holder_keeps_a_lock_that_no_other_holder_acquired = None

    @classmethod
    def fencedlock(cls):
        urls = [node.url for node in cls.nodes()]
        return {"BACKEND": REDLOCK, "LOCATION": urls, "FENCE_DATABASE": "postgres"}

    def lose_data(self):
        for node in self.nodes():
            node.execute("FLUSHALL")


@real("default", "postgres")
class TestDynamoDB(Configured, LockContract, ExpiryContract, DataLossContract):
    needed = "shared_dynamodb"
    hammered_ttl = 3.0
    # A table is restored as a whole, and its locks are lost then.
    test_a_forgotten_holder_keeps_a_lock_that_no_other_holder_acquired = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def table(cls, configured):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", DynamoDB.access_key)
            patch.setenv("AWS_SECRET_ACCESS_KEY", DynamoDB.secret_key)
            create_table()
            yield

    @classmethod
    def fencedlock(cls):
        options = {"REGION": DynamoDB.region, "ENDPOINT": shared.dynamodb().url}
        terms = {"LOCATION": "contract", "OPTIONS": options}
        return {"BACKEND": DYNAMODB, "FENCE_DATABASE": "postgres", **terms}

    def lose_data(self):
        shared.dynamodb().request("DeleteTable", {"TableName": "contract"})
        create_table()


# Unavailable services


class Private(OutageContract):
    answer_within = 5.0
    backend = DATABASE
    timeout = 1.0

    @pytest.fixture
    def prepared(self, request):
        self.server = self.launch(request)
        options = {"TIMEOUT": self.timeout}
        entry = {"BACKEND": self.backend, "OPTIONS": options, **self.address(request)}
        with override_settings(FENCEDLOCK={"default": entry}):
            yield

    def address(self, request):
        make_alias = request.getfixturevalue("make_alias")
        return {"FENCE_DATABASE": make_alias(self.server.django())}

    def paused(self):
        return self.between(self.server.pause, self.server.resume)

    def gone(self):
        return self.between(self.server.kill, self.server.start)

    @contextlib.contextmanager
    def between(self, begin, end):
        begin()
        try:
            yield
        finally:
            end()


@real("default", "postgres")
class TestOutageOfRedis(Private):
    backend = REDIS

    def launch(self, request):
        return request.getfixturevalue("make_redis")()

    def address(self, request):
        return {"LOCATION": self.server.url, "FENCE_DATABASE": "postgres"}


@real("default", "postgres")
class TestOutageOfValkey(TestOutageOfRedis):
    def launch(self, request):
        return request.getfixturevalue("make_valkey")()


@real("default", "postgres")
class TestOutageOfEtcd(TestOutageOfRedis):
    backend = ETCD
    # A disk, or a JVM that starts, may take more than a second.
    timeout = 3.0

    def launch(self, request):
        return request.getfixturevalue("make_etcd")()


@real("default", "postgres")
class TestOutageOfZooKeeper(Private):
    backend = ZOOKEEPER
    timeout = 3.0

    def launch(self, request):
        # For leases of a minute.
        return request.getfixturevalue("make_zookeeper")("maxSessionTimeout=60000")

    def address(self, request):
        return {"LOCATION": self.server.url, "FENCE_DATABASE": "postgres"}


@real("default", "postgres")
class TestOutageOfConsul(Private):
    backend = CONSUL
    timeout = 3.0

    @pytest.fixture(scope="class")
    @classmethod
    def consul(cls, request):
        # Not one for each test: it elects itself for 2 s.
        request.getfixturevalue("shared_consul")
        with contextlib.closing(Consul.launch(finding.consul())) as server:
            yield server

    def launch(self, request):
        return request.getfixturevalue("consul")

    def address(self, request):
        location = {"LOCATION": self.server.url, "FENCE_DATABASE": "postgres"}
        return {**location, "OPTIONS": {"TIMEOUT": self.timeout, "SESSION_TTL_MIN": 1}}


class Several:
    def __init__(self, servers):
        self.servers = servers

    def __getattr__(self, name):
        return lambda: [getattr(server, name)() for server in self.servers]


@real("default", "postgres")
class TestOutageOfAMajorityOfRedlock(Private):
    backend = REDLOCK
    timeout = 3.0

    def launch(self, request):
        launch = request.getfixturevalue("make_redis")
        # Their locks must be there when they are back.
        self.nodes = [launch("--appendonly", "yes") for _ in range(3)]
        return Several(self.nodes[1:])

    def address(self, request):
        return {"LOCATION": [node.url for node in self.nodes], "FENCE_DATABASE": "postgres"}


@real("default", "postgres")
class TestOutageOfDynamoDB(Private):
    backend = DYNAMODB
    timeout = 3.0

    def launch(self, request):
        return request.getfixturevalue("make_dynamodb")(durable=True)

    @pytest.fixture
    def prepared(self, request, monkeypatch):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", DynamoDB.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", DynamoDB.secret_key)
        self.server = self.launch(request)
        options = {"REGION": DynamoDB.region, "ENDPOINT": self.server.url, "TIMEOUT": self.timeout}
        entry = {"BACKEND": DYNAMODB, "LOCATION": "locks", "OPTIONS": options}
        with override_settings(FENCEDLOCK={"default": {**entry, "FENCE_DATABASE": "postgres"}}):
            create_table()
            yield


@real("default")
class TestOutageOfDatabaseOnPostgres(Private):
    def launch(self, request):
        return request.getfixturevalue("make_postgres")()


@real("default")
class TestOutageOfPostgres(TestOutageOfDatabaseOnPostgres):
    backend = POSTGRES

    # Such a lock is lost with its session, at once.
    test_a_short_outage_loses_nothing = None


@real("default", "mariadb")
class TestOutageOfDatabaseOnMariaDB(Private):
    def launch(self, request):
        return request.getfixturevalue("make_mariadb")()

    def address(self, request):
        database = "fencedlock"
        self.server.execute(f"CREATE DATABASE {database}")
        make_alias = request.getfixturevalue("make_alias")
        return {"FENCE_DATABASE": make_alias(self.server.django(database))}


@real("default", "mariadb")
class TestOutageOfMysql(TestOutageOfDatabaseOnMariaDB):
    backend = MYSQL

    # Such a lock is lost with its session, at once.
    test_a_short_outage_loses_nothing = None


@real("default")
class TestOutageOfDatabaseOnSQLite(Private):
    def launch(self, request):
        directory = request.getfixturevalue("tmp_path") / "server"
        directory.mkdir()
        return directory / "db.sqlite3"

    def address(self, request):
        make_alias = request.getfixturevalue("make_alias")
        entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(self.server)}
        return {"FENCE_DATABASE": make_alias(entry)}

    @contextlib.contextmanager
    def paused(self):
        with contextlib.closing(sqlite3.connect(self.server, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            yield

    @contextlib.contextmanager
    def gone(self):
        # The directory: SQLite would make another file, without tables.
        directory = self.server.parent
        away = directory.rename(directory.with_suffix(".away"))
        try:
            yield
        finally:
            away.rename(directory)
