"""Session advisory locks of PostgreSQL, as a lock backend."""

from django.core.exceptions import ImproperlyConfigured

from .checks import without_driver

try:
    from .backend import PostgresBackend
except ImproperlyConfigured as exc:
    PostgresBackend = without_driver(str(exc))  # type: ignore[misc]

__all__ = ["PostgresBackend"]
