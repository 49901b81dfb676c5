"""Clients of the Redis backend: from the settings, and others of our own to wait on."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from django.core.cache import InvalidCacheBackendError, caches
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..conf import TIMEOUT, AliasConfig, Problem, shown, timeout_problems
from ..core import runtime
from ..core.runtime import cut
from ..storage.text import HIDDEN, without_secrets
from .base import Cancel

try:
    import redis
except ImportError as exc:
    raise ImproperlyConfigured(
        "The Redis backend needs the driver redis, which isn't installed. "
        "Install it: pip install 'django-fencedlock[redis]'"
    ) from exc
import redis.connection
import redis.exceptions
import redis.sentinel
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from .redis_scripts import BEAT

#: What the driver raises. That a cluster can't be reached is told by an error of another family.
RedisError = (redis.RedisError, redis.exceptions.RedisClusterException)
# The driver's own annotations of these are none, or mix in the answers of its asyncio twin.
#: A redis.Redis or a redis.RedisCluster.
Client = Any
parse_url: Any = redis.connection.parse_url
Sentinel: Any = redis.sentinel.Sentinel
SentinelConnectionPool: Any = redis.sentinel.SentinelConnectionPool

#: Seconds after which a blocking pop that failed is followed by another look.
PAUSE = 0.1

_MANY = 2**31
_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_FORMS = (
    "redis://[user:password@]host:6379/0, rediss://... for TLS, unix:///path/to/socket?db=0, or "
    "redis+sentinel://[user:password@]host1:26379,host2:26379/service_name/0 (with TLS: "
    "rediss+sentinel://...)"
)
_SOURCES = (
    'Name one of them: LOCATION (a URL), OPTIONS["CACHE"] (an alias of a django-redis cache) or '
    'OPTIONS["CLIENT_FACTORY"] (the dotted path of a function that returns a client).'
)


def make_client(config: AliasConfig, timeout: float) -> Client:
    """Make the client that the settings describe. Asks no server."""
    if "CACHE" in config.options:
        from django_redis import get_redis_connection

        return get_redis_connection(config.options["CACHE"])
    if "CLIENT_FACTORY" in config.options:
        return import_string(config.options["CLIENT_FACTORY"])()
    return redis.Redis.from_pool(_pool_of_url(config.location, timeout))


def is_ours(config: AliasConfig) -> bool:
    """Whether the client's connections are nobody else's."""
    return bool(config.location)


def is_cluster(client: Client) -> bool:
    return isinstance(client, redis.RedisCluster)


def _limits(timeout: float) -> dict[str, Any]:
    # A connection that the server closed while it was idle is worth a second try. What timed out
    # isn't: it may be done yet, and the bound would double.
    return {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 1, (redis.ConnectionError,)),
        # redis-py before 6 retries nothing else, whatever the line above says.
        "retry_on_error": [redis.ConnectionError],
    }


def _pool_of_url(url: str, timeout: float) -> Any:
    if urlsplit(url).scheme in _SENTINEL_SCHEMES:
        return _pool_of_sentinels(url, timeout)
    options = {"max_connections": _MANY, **_limits(timeout), **parse_url(url)}
    if options.get("connection_class") is UnixDomainSocketConnection:
        del options["socket_connect_timeout"]
    return redis.ConnectionPool(**options)


def _pool_of_sentinels(url: str, timeout: float) -> Any:
    addresses, service, options = _parse_sentinel_url(url)
    tls = {"ssl": options.pop("connection_class", None) is SSLConnection}
    secrets = {
        key: options.pop(f"sentinel_{key}")
        for key in ("username", "password")
        if f"sentinel_{key}" in options
    }
    # They are asked one after the other: all of them together get the time of one server.
    limits = _limits(timeout / len(addresses))
    sentinel = Sentinel(addresses, sentinel_kwargs={**limits, **tls, **secrets})
    return SentinelConnectionPool(
        service, sentinel, **{"max_connections": _MANY, **_limits(timeout), **tls, **options}
    )


def _parse_sentinel_url(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """Take a Sentinel URL apart: addresses, name of the service, and the servers' options."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("it names no service")
    if db and not db.isdigit():
        raise ValueError(f"{db!r} isn't the number of a database")
    scheme = parts.scheme.partition("+")[0]
    options = parse_url(urlunsplit((scheme, f"{user}{at}any", f"/{db}", parts.query, "")))
    del options["host"]
    return [_address(host) for host in hosts.split(",")], unquote(service), options


def _address(host: str) -> tuple[str, int]:
    # An IPv6 address has its brackets off.
    found = re.fullmatch(r"(?:\[([^]]+)\]|([^:\[\]]+))(?::(\d+))?", host)
    if found is None:
        raise ValueError(f"{host!r} isn't a host with a port")
    return found[1] or found[2], int(found[3] or 26379)


def _own_pool(pool: Any, **changes: Any) -> Any:
    """Make a pool to the same server, with connections of its own that never retry."""
    options = {
        **pool.connection_kwargs,
        "max_connections": _MANY,
        "retry": Retry(NoBackoff(), 0),
        **changes,
    }
    for key in ("connection_pool", "retry_on_timeout", "retry_on_error"):
        options.pop(key, None)
    if isinstance(pool, SentinelConnectionPool):
        return SentinelConnectionPool(
            pool.service_name,
            pool.sentinel_manager,
            connection_class=pool.connection_class,
            is_master=pool.is_master,
            **options,
        )
    return redis.ConnectionPool(connection_class=pool.connection_class, **options)


def with_own_pool(client: Client) -> Client:
    """Make a client with connections of its own. A cluster's client is left as it is."""
    if is_cluster(client):
        return client
    return redis.Redis.from_pool(_own_pool(client.connection_pool))


class Mailboxes:
    """
    Opens mailboxes, each on a connection of its own.

    Never one of the application's pool: a few waiters would leave it with none.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = runtime.allocate_lock()
        self._pools: dict[Any, Any] = {}

    @contextlib.contextmanager
    def open(self, key: str, cancel: Cancel) -> Iterator[Mailbox]:
        """Open the mailbox `key`, whose every wait ends when `cancel` is cancelled."""
        mailbox = Mailbox(partial(self._connect, key), key, cancel)
        try:
            yield mailbox
        finally:
            mailbox.close()

    def close(self) -> None:
        """Close the connections that nobody waits on."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.disconnect(inuse_connections=False)

    def _connect(self, key: str) -> Client:
        return redis.Redis(connection_pool=self._pool(key), single_connection_client=True)

    def _pool(self, key: str) -> Any:
        # The client's own pool, or that of the key's node in a cluster.
        client = self._client
        if is_cluster(client):
            client = client.get_redis_connection(client.get_node_from_key(key))
        pool = client.connection_pool
        with self._lock:
            if pool not in self._pools:
                self._pools[pool] = _own_pool(pool, socket_timeout=BEAT + 1)
            return self._pools[pool]


class Mailbox:
    """Where somebody who waits for a lock is told that it may be his."""

    def __init__(self, connect: Any, key: str, cancel: Cancel) -> None:
        self._connect = connect
        self._key = key
        self._cancel = cancel
        self._client: Client = None
        # Keeps a cancellation from cutting a connection that was handed on.
        self._lock = runtime.allocate_lock()
        cancel.on_cancel(self._cut)

    def wait(self, limit: float) -> None:
        """
        Sleep until there is a message, at most `limit` seconds, or less.

        Whatever happens, an error included, means the same: to look at the lock itself.
        """
        try:
            if self._client is None:
                self._client = self._connect()
            # Asked when there is a connection to be cut, and not before.
            if not self._cancel:
                # Zero, or what a server takes for it, would be for ever.
                self._client.blpop([self._key], max(0.001, round(limit, 3)))
        except RedisError:
            if not self._cancel:
                time.sleep(min(PAUSE, limit))

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _cut(self) -> None:
        with self._lock:
            connection = self._client and self._client.connection
            socket = getattr(connection, "_sock", None)
            if socket is not None:
                with contextlib.suppress(OSError, ValueError):
                    cut(socket.fileno())


def problems(config: AliasConfig) -> Iterator[Problem]:
    """What is wrong with the settings of a client, without asking a server."""
    named = [f"OPTIONS[{key!r}]" for key in ("CACHE", "CLIENT_FACTORY") if key in config.options]
    if config.location:
        named.insert(0, "LOCATION")
    if len(named) != 1:
        found = f"has {' and '.join(named)}" if named else "names no Redis"
        yield Problem("E007", f"{config.where()} {found}.", _SOURCES)
        return
    yield from _url_problems(config)
    yield from _cache_problems(config)
    yield from _factory_problems(config)
    yield from timeout_problems(config)


def _url_problems(config: AliasConfig) -> Iterator[Problem]:
    if not config.location:
        return
    shown_url = without_secrets(config.location)
    if not _trouble_with(config.location):
        return
    # Of the URL that is shown, lest the reason quote a piece of the password.
    why = _trouble_with(shown_url) or f"there is a character in {HIDDEN} that has to be quoted"
    yield Problem(
        "E007",
        f"{config.where('LOCATION')} is {shown_url!r}: {why}.",
        f"Write it in one of these forms: {_FORMS}. In user and password, whatever is neither a "
        'letter nor a digit is quoted: urllib.parse.quote(password, safe="").',
    )


def _trouble_with(url: str) -> str:
    """Why a URL can't be used; empty if it can."""
    try:
        # What isn't quoted in a password ends the host, and the rest is taken for a path.
        if urlsplit(url).scheme != "unix" and "@" in urlsplit(url).path:
            return "it has an @ in its path"
        _pool_of_url(url, TIMEOUT)
    # A pool whose URL has an unknown option fails only when it makes a connection.
    except (TypeError, ValueError) as exc:
        return str(exc).removesuffix(".")
    return ""


def _cache_problems(config: AliasConfig) -> Iterator[Problem]:
    if "CACHE" not in config.options:
        return
    alias = config.options["CACHE"]
    where = f"{config.where('OPTIONS')}['CACHE'] is {shown(alias)}"
    remedy = "Name the alias of a django-redis cache, or give the URL of the server as LOCATION."
    if not isinstance(alias, str) or alias not in caches.settings:
        known = ", ".join(map(repr, caches.settings))
        yield Problem("E009", f"{where}, which CACHES doesn't have; it has {known}.", remedy)
        return
    try:
        cache = caches[alias]
    except (InvalidCacheBackendError, ImproperlyConfigured) as exc:
        yield Problem("E009", f"{where}, which can't be used: {exc}.", remedy)
        return
    if not hasattr(getattr(cache, "client", None), "get_client"):
        kind = f"{type(cache).__module__}.{type(cache).__name__}"
        yield Problem("E009", f"{where}, a {kind}.", remedy)


def _factory_problems(config: AliasConfig) -> Iterator[Problem]:
    if "CLIENT_FACTORY" not in config.options:
        return
    path = config.options["CLIENT_FACTORY"]
    try:
        factory = import_string(path)
        why = "" if callable(factory) else f"{factory!r} can't be called"
    except (ImportError, TypeError, AttributeError) as exc:
        why = str(exc)
    if why:
        yield Problem(
            "E008",
            f"{config.where('OPTIONS')}['CLIENT_FACTORY'] is {shown(path)}: "
            f"{without_secrets(why)}.",
            "Give the dotted path of a function without arguments that returns a redis.Redis or a "
            "redis.RedisCluster.",
        )
