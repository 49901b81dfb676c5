"""
Real servers for the tests, on loopback, in temp directories, gone when the tests are.

``shared`` has one of each for all tests of a process, started when first asked for. The classes
start private ones, which a test may kill, pause and restart. ``Proxy`` is a network that fails.
Programs come from the system, else from wheels (``finding``); FENCEDLOCK_TEST_POSTGRES_URL,
_REDIS_URL, _VALKEY_URL, _MARIADB_URL and _RABBITMQ_URL name servers to use instead of the shared
ones. What such a server holds may get deleted.
"""

from .clock import Clock
from .finding import ServerMissing
from .mariadb import MariaDB
from .pgbouncer import PgBouncer
from .postgres import Postgres
from .process import stop_everything
from .proxy import Proxy
from .rabbitmq import RabbitMQ
from .redis import Command, Redis
from .server import Server, ServerNotOurs

__all__ = [
    "Clock",
    "Command",
    "MariaDB",
    "PgBouncer",
    "Postgres",
    "Proxy",
    "RabbitMQ",
    "Redis",
    "Server",
    "ServerMissing",
    "ServerNotOurs",
    "stop_everything",
]
