"""Check for query caches, which would show outdated rows of the registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.conf import settings

from .conf import Problem

APP = "django_fencedlock"


def problems() -> Iterator[Problem]:
    """Yield the installed caches that cache the package's tables."""
    # Rows are written on private connections, which such caches don't notice.
    for name, is_caching, remedy in (
        ("cachalot", _cachalot, f"Add {APP!r} to CACHALOT_UNCACHABLE_APPS."),
        ("cacheops", _cacheops, f"Add '{APP}.*': None to CACHEOPS."),
    ):
        if apps.is_installed(name) and is_caching():
            yield Problem(
                "W004",
                f"django-{name} caches the tables of {APP}: the admin and `manage.py fencedlock` "
                "show locks that were released, and miss new ones. Locks and fences still work.",
                remedy,
            )


def _cachalot() -> bool:
    def chosen(kind: str) -> set[str]:
        whole = APP in _setting(f"CACHALOT_{kind}_APPS", ())
        return _tables() if whole else set(_setting(f"CACHALOT_{kind}_TABLES", ()))

    cached = _tables() - chosen("UNCACHABLE")
    if _setting("CACHALOT_ONLY_CACHABLE_APPS", ()) or _setting("CACHALOT_ONLY_CACHABLE_TABLES", ()):
        cached &= chosen("ONLY_CACHABLE")
    return bool(_setting("CACHALOT_ENABLED", True) and cached)


def _cacheops() -> bool:
    profiles = {key.lower(): value for key, value in _setting("CACHEOPS", {}).items()}
    defaults = _setting("CACHEOPS_DEFAULTS", {})

    def is_cached(model: str) -> bool:
        # The first key decides, even if its value is None.
        keys = (key for key in (f"{APP}.{model}", f"{APP}.*", "*.*") if key in profiles)
        profile = profiles.get(next(keys, ""))
        return profile is not None and bool({**defaults, **profile}.get("ops"))

    names = [str(model._meta.model_name) for model in apps.get_app_config(APP).get_models()]
    return bool(_setting("CACHEOPS_ENABLED", True)) and any(map(is_cached, names))


def _tables() -> set[str]:
    return {model._meta.db_table for model in apps.get_app_config(APP).get_models()}


def _setting(name: str, default: Any) -> Any:
    return getattr(settings, name, default)
