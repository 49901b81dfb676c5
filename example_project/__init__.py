"""A Django project that uses django_fencedlock."""

from .celery import app as celery_app

__all__ = ["celery_app"]
