"""
Metrics of locks for Prometheus, by the pattern of their names.

Name ``django_fencedlock.contrib.prometheus`` in ``INSTALLED_APPS``, or call `install()`.
"""

from .metrics import install, uninstall

__all__ = ["install", "uninstall"]
