"""`single_instance`: Celery tasks that run once at a time. Importing this imports Celery."""

# They hook into the worker, whatever else of this package is used.
from . import rescue as _rescue  # noqa: F401
from . import worker as _worker  # noqa: F401
from .single import lock_name, single_instance
from .skipped import SkippedRun

__all__ = ["SkippedRun", "lock_name", "single_instance"]
