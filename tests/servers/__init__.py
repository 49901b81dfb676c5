"""
Real servers for the tests, on loopback, in temp directories, gone when the tests are.

``shared`` has one of each for all tests of a process, started when first asked for. The classes
start private ones, which a test may kill, pause and restart. ``Proxy`` is a network that fails.
Programs come from the system, else from wheels, else from what ``python -m tests.servers fetch``
has downloaded (``finding``). FENCEDLOCK_TEST_POSTGRES_URL, _REDIS_URL, _VALKEY_URL, _MARIADB_URL,
_RABBITMQ_URL, _ETCD_URL, _ZOOKEEPER_URL, _CONSUL_URL, _DYNAMODB_URL and _MYSQL_URL name servers to
use instead of the shared ones; _REDLOCK_URL names several, with commas. What such a server holds
may get deleted.
"""

from .certificates import Authority
from .clock import Clock
from .consul import Consul
from .dynamodb import DynamoDB
from .etcd import Etcd
from .finding import ServerMissing
from .mariadb import MariaDB
from .mysql import MySQL
from .pgbouncer import PgBouncer
from .postgres import Postgres
from .process import stop_everything
from .proxy import Proxy
from .rabbitmq import RabbitMQ
from .redis import DURABLE, Command, Redis
from .server import Server, ServerNotOurs, start_together
from .zookeeper import ZooKeeper

__all__ = [
    "DURABLE",
    "Authority",
    "Clock",
    "Command",
    "Consul",
    "DynamoDB",
    "Etcd",
    "MariaDB",
    "MySQL",
    "PgBouncer",
    "Postgres",
    "Proxy",
    "RabbitMQ",
    "Redis",
    "Server",
    "ServerMissing",
    "ServerNotOurs",
    "ZooKeeper",
    "start_together",
    "stop_everything",
]
