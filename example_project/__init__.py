"""A Django project that shows what django_fencedlock is for."""

from .celery import app as celery_app

__all__ = ["celery_app"]
