"""Celery tasks that run once at a time. Importing this imports Celery."""

# It hooks into every worker.
from . import worker as _worker  # noqa: F401
from .decorator import lock_name, lock_names, single_instance
from .policy import SkippedRun

__all__ = ["SkippedRun", "lock_name", "lock_names", "single_instance"]
