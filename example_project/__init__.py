"""A small Django project that shows what django_fencedlock is for."""
