"""Clients of Redis: made from the settings, and the problems of those settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import redis
import redis.connection
import redis.exceptions
import redis.sentinel
from django.core.cache import InvalidCacheBackendError, caches
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from ...conf import TIMEOUT, AliasConfig, Problem, shown
from ...core import names
from ...storage.text import HIDDEN, without_secrets

#: What the driver raises. An unreachable Cluster raises an error of another family.
RedisError = (redis.RedisError, redis.exceptions.RedisClusterException)
# The driver annotates these not at all, or with the answers of its asyncio twin as well.
#: A redis.Redis or a redis.RedisCluster.
Client = Any
parse_url: Any = redis.connection.parse_url
Sentinel: Any = redis.sentinel.Sentinel
SentinelConnectionPool: Any = redis.sentinel.SentinelConnectionPool

_UNLIMITED = 2**31
_FORMS = (
    "Write it in one of these forms: redis://[user:password@]host:6379/0, rediss://... for TLS, "
    "unix:///path/to/socket?db=0, or redis+sentinel://[user:password@]host1:26379,host2:26379/"
    "service_name/0 (with TLS: rediss+sentinel://...). In user and password, quote every character "
    'but letters and digits: urllib.parse.quote(password, safe="").'
)
#: The forms for one of several independent servers.
NODE_FORMS = (
    "Write it as 'redis://user:password@host:6379/0', 'rediss://...' with TLS, or "
    "'unix:///path/to/socket'. Quote the password: urllib.parse.quote(password, safe='')."
)
_NO_DJANGO_REDIS = "a cache of django-redis, which isn't installed"
_INSTALL = "Run: pip install 'django-fencedlock[django-redis]'"
_SOURCES = (
    'Give one of LOCATION (a URL), OPTIONS["CACHE"] (the alias of a django-redis cache) and '
    'OPTIONS["CLIENT_FACTORY"] (the dotted path of a function without arguments that returns a '
    "redis.Redis or a redis.RedisCluster)."
)


def make_client(config: AliasConfig) -> Client:
    """Make a client as the settings describe it, with connections of its own."""
    if config.location:
        return redis.Redis.from_pool(pool_of_url(config.location, config.timeout))
    if "CACHE" in config.options:
        from django_redis import get_redis_connection

        client = get_redis_connection(config.options["CACHE"])
    else:
        client = import_string(config.options["CLIENT_FACTORY"])()
    return client if is_cluster(client) else redis.Redis.from_pool(copy_pool(client))


def is_cluster(client: Client) -> bool:
    return isinstance(client, redis.RedisCluster)


def copy_pool(client: Client, **changes: Any) -> Any:
    """Make a pool to the server of a client. The application's pool may be small, or in use."""
    pool = client.connection_pool
    options = client.get_connection_kwargs() | {
        "max_connections": _UNLIMITED,
        "connection_class": pool.connection_class,
        **changes,
    }
    options.pop("connection_pool", None)
    if isinstance(pool, SentinelConnectionPool):
        return SentinelConnectionPool(
            pool.service_name, pool.sentinel_manager, is_master=pool.is_master, **options
        )
    return redis.ConnectionPool(**options)


def _limits(timeout: float) -> dict[str, Any]:
    # The server may have closed an idle connection: that deserves a second try. A request that
    # timed out doesn't: the server may still run it, and the time limit would double.
    return {
        "max_connections": _UNLIMITED,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 1, (redis.ConnectionError,)),
        # redis-py before 6 retries only these, whatever `retry` says.
        "retry_on_error": [redis.ConnectionError],
    }


def pool_of_url(url: str, timeout: float) -> Any:
    """Make a pool to the server that a URL names."""
    if urlsplit(url).scheme in ("redis+sentinel", "rediss+sentinel"):
        return _pool_of_sentinels(url, timeout)
    options = _limits(timeout) | parse_url(url)
    if options.get("connection_class") is UnixDomainSocketConnection:
        del options["socket_connect_timeout"]
    return redis.ConnectionPool(**options)


def _pool_of_sentinels(url: str, timeout: float) -> Any:
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("it names no service")
    if db and not db.isdigit():
        raise ValueError(f"{db!r} isn't the number of a database")
    addresses = [_address(host) for host in hosts.split(",")]
    scheme = parts.scheme.partition("+")[0]
    options = parse_url(urlunsplit((scheme, f"{user}{at}any", f"/{db}", parts.query, "")))
    del options["host"]
    tls = {"ssl": options.pop("connection_class", None) is SSLConnection}
    secrets = {key: options.pop(f"sentinel_{key}", None) for key in ("username", "password")}
    # The driver asks one after the other: together they have the time of one server.
    limits = _limits(timeout / len(addresses))
    sentinel = Sentinel(addresses, sentinel_kwargs=limits | tls | secrets)
    return SentinelConnectionPool(unquote(service), sentinel, **_limits(timeout) | tls | options)


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError(f"{host!r} isn't a host with a port")
    return parts.hostname, parts.port or 26379


def settings_problems(config: AliasConfig) -> Iterator[Problem]:
    """Yield the problems of the settings, without a request to a server."""
    named = [f"OPTIONS[{key!r}]" for key in ("CACHE", "CLIENT_FACTORY") if key in config.options]
    if config.location:
        named.insert(0, "LOCATION")
    where = config.where("OPTIONS")
    if len(named) != 1:
        found = f"has {' and '.join(named)}" if named else "names no Redis"
        yield Problem("E007", f"{config.where()} {found}.", _SOURCES)
    elif config.location:
        yield from url_problems(config, config.location)
    elif "CACHE" in config.options:
        alias = config.options["CACHE"]
        if why := _fault_of_cache(alias):
            remedy = _INSTALL if why == _NO_DJANGO_REDIS else _SOURCES
            yield Problem("E009", f"{where}['CACHE'] is {shown(alias)}, {why}.", remedy)
    else:
        path = config.options["CLIENT_FACTORY"]
        if why := _fault_of_factory(path):
            what = f"{where}['CLIENT_FACTORY'] is {shown(path)}: {without_secrets(why)}."
            yield Problem("E008", what, _SOURCES)


def url_problems(config: AliasConfig, url: str, forms: str = _FORMS) -> Iterator[Problem]:
    if fault_of_url(url):
        url = without_secrets(url)
        # The fault of the URL as shown: that of the real one may quote a part of the password.
        why = fault_of_url(url) or f"a character in {HIDDEN} must be quoted"
        yield Problem("E007", f"{config.where('LOCATION')} is {url!r}: {why}.", forms)


def fault_of_url(url: str) -> str:
    """Return why a URL can't be used; empty if it can."""
    try:
        # An unquoted character of a password ends the host, and the rest becomes the path.
        if urlsplit(url).scheme != "unix" and "@" in urlsplit(url).path:
            return "it has an @ in its path"
        pool_of_url(url, TIMEOUT)
    # A pool reports an unknown option of its URL only when it makes a connection.
    except (TypeError, ValueError) as exc:
        return str(exc).removesuffix(".")
    return ""


def server_of(url: str) -> str:
    """Return what two URLs of one server have in common: user and database may differ."""
    parts = urlsplit(url)
    if fault_of_url(url) or parts.scheme == "unix":
        return parts.path or url
    return f"{parts.hostname}:{parts.port or 6379}"


def _fault_of_cache(alias: object) -> str:
    if not isinstance(alias, str) or alias not in caches.settings:
        return f"which CACHES doesn't have; it has {names.shown(map(repr, caches.settings))}"
    try:
        cache = caches[alias]
    except (InvalidCacheBackendError, ImproperlyConfigured) as exc:
        if str(getattr(exc.__cause__, "name", "")).partition(".")[0] == "django_redis":
            return _NO_DJANGO_REDIS
        return f"which can't be used: {exc}"
    if not hasattr(getattr(cache, "client", None), "get_client"):
        return f"a {type(cache).__module__}.{type(cache).__name__}"
    return ""


def _fault_of_factory(path: Any) -> str:
    try:
        factory = import_string(path)
    except (ImportError, TypeError, AttributeError) as exc:
        return str(exc)
    return "" if callable(factory) else f"{factory!r} can't be called"
