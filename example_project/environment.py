"""Settings for Django and Celery from environment variables."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

HERE = Path(__file__).resolve().parent

ENGINES = {
    "postgres": "django.db.backends.postgresql",
    "postgresql": "django.db.backends.postgresql",
    "mysql": "django.db.backends.mysql",
}
BACKENDS = {
    "database": "django_fencedlock.backends.database.DatabaseBackend",
    "postgres": "django_fencedlock.backends.postgres.PostgresBackend",
    "mysql": "django_fencedlock.backends.mysql.MysqlBackend",
    "redis": "django_fencedlock.backends.redis.RedisBackend",
    "redlock": "django_fencedlock.backends.redlock.RedlockBackend",
    "etcd": "django_fencedlock.backends.etcd.EtcdBackend",
    "zookeeper": "django_fencedlock.backends.zookeeper.ZooKeeperBackend",
    "consul": "django_fencedlock.backends.consul.ConsulBackend",
    "dynamodb": "django_fencedlock.backends.dynamodb.DynamoDBBackend",
}
#: By the scheme of a URL: the lock service, and the scheme of each of its addresses.
SCHEMES = {
    "redis": ("redis", "redis://"),
    "rediss": ("redis", "rediss://"),
    "unix": ("redis", "unix://"),
    "redis+sentinel": ("redis", "redis+sentinel://"),
    "rediss+sentinel": ("redis", "rediss+sentinel://"),
    "redlock": ("redlock", "redis://"),
    "redlocks": ("redlock", "rediss://"),
    "etcd": ("etcd", "http://"),
    "etcds": ("etcd", "https://"),
    "consul": ("consul", "http://"),
    "consuls": ("consul", "https://"),
    "zookeeper": ("zookeeper", ""),
    "dynamodb": ("dynamodb", ""),
}
#: Options that are numbers.
SECONDS = {"TIMEOUT", "SESSION_TTL_MIN"}
#: Consul keeps a session for 10 s at least, unless its `session_ttl_min` is lower.
SHORTEST = {"consul": 10}


def data_directory() -> Path:
    """Create and return the directory for all files."""
    directory = Path(os.environ.get("EXAMPLE_DATA") or HERE / "var")
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()


def database(data: Path) -> dict[str, Any]:
    """Return the entry for DATABASES: EXAMPLE_DATABASE_URL, or an SQLite file."""
    url = os.environ.get("EXAMPLE_DATABASE_URL")
    if not url:
        return _sqlite(data / "db.sqlite3")
    parts = urlsplit(url)
    if parts.scheme not in ENGINES:
        raise ImproperlyConfigured(
            f"EXAMPLE_DATABASE_URL begins with {parts.scheme!r}; use {' or '.join(ENGINES)}."
        )
    options = dict(parse_qsl(parts.query))
    return {
        "ENGINE": ENGINES[parts.scheme],
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        # A URL can't have the directory of a Unix socket as its host.
        "HOST": parts.hostname or options.pop("host", ""),
        "PORT": str(parts.port or ""),
        "OPTIONS": options,
    }


def _sqlite(path: Path) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "OPTIONS": {
            # Lock the file when a transaction begins. Django's default locks it at the first
            # write, so rows read before that may be out of date.
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            # Readers and the writer don't block each other.
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
        # Other threads and processes must see what a test has written.
        "TEST": {"NAME": path.with_name("test.sqlite3")},
    }


def locks() -> dict[str, Any]:
    """Return the entry for FENCEDLOCK: EXAMPLE_LOCKS, or database rows."""
    value = os.environ.get("EXAMPLE_LOCKS") or "database"
    if value in ("database", "postgres", "mysql"):
        return {"BACKEND": BACKENDS[value]}
    scheme, slashes, _ = value.partition("://")
    if not slashes or scheme not in SCHEMES:
        raise ImproperlyConfigured(
            f"EXAMPLE_LOCKS is {scheme!r}; use 'database', 'postgres', 'mysql', or a URL that "
            f"begins with {'://, '.join(SCHEMES)}://."
        )
    return lock_service(value)


def demo_locks() -> dict[str, Any]:
    """Return the same with a short lease, so that the demonstration waits 4.5 s for its expiry."""
    entry = locks()
    kind = next(kind for kind, path in BACKENDS.items() if path == entry["BACKEND"])
    # A shorter lease needs a shorter timeout.
    options = {**entry.get("OPTIONS", {}), "TIMEOUT": 1.5}
    return {**entry, "TTL": SHORTEST.get(kind, 4.5), "OPTIONS": options}


def lock_service(url: str, prefix: str = "example") -> dict[str, Any]:
    """Return the entry for FENCEDLOCK of a URL, such as ``etcd://host1:2379,host2:2379``."""
    scheme, _, rest = url.partition("://")
    kind, each = SCHEMES[scheme]
    entry: dict[str, Any] = {"BACKEND": BACKENDS[kind], "KEY_PREFIX": prefix}
    if kind == "redis":
        return {**entry, "LOCATION": url}
    addresses, _, query = rest.partition("?")
    # What follows the hosts of a ZooKeeper is a path in it.
    entry["LOCATION"] = [f"{each}{host}" for host in addresses.split(",")]
    if not each:
        entry["LOCATION"] = addresses
    options: dict[str, Any] = {key.upper(): value for key, value in parse_qsl(query)}
    for key in SECONDS & options.keys():
        options[key] = float(options[key])
    return {**entry, "OPTIONS": options} if options else entry


def broker(data: Path) -> dict[str, Any]:
    """Return Celery's broker settings: EXAMPLE_BROKER_URL, or files."""
    url = os.environ.get("EXAMPLE_BROKER_URL")
    if url:
        return {"url": url, "transport": None, "options": {}}
    messages, control = data / "messages", data / "control"
    for directory in (messages, control):
        directory.mkdir(exist_ok=True)
    options = {
        "data_folder_in": str(messages),
        "data_folder_out": str(messages),
        "control_folder": str(control),
        # The default is one second.
        "polling_interval": 0.05,
    }
    transport = "example_project.messages:Transport"
    return {"url": "filesystem://", "transport": transport, "options": options}


def results(data: Path) -> str:
    """Return Celery's result backend: EXAMPLE_RESULTS_URL, or files."""
    url = os.environ.get("EXAMPLE_RESULTS_URL")
    if url:
        return url
    directory = data / "results"
    directory.mkdir(exist_ok=True)
    return f"file://{directory}"
