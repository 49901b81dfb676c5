"""Locks on Redis or Valkey: one server, a primary that Sentinels choose, or a Cluster."""

from django.core.exceptions import ImproperlyConfigured

try:
    import redis as _driver  # noqa: F401
except ImportError as exc:
    raise ImproperlyConfigured(
        "The redis backend needs redis-py. Run: pip install 'django-fencedlock[redis]'"
    ) from exc

from .backend import RedisBackend

__all__ = ["RedisBackend"]
