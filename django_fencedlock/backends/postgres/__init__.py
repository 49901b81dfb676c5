"""Session advisory locks of PostgreSQL, as a lock backend."""

from .backend import PostgresBackend

__all__ = ["PostgresBackend"]
