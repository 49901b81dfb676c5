"""The check for caches of the ORM's queries; the settings are those of the released packages."""

import pytest
from django.apps import apps

from django_fencedlock.checks import check_settings, problems

OURS = "django_fencedlock"
ALL = {"ops": "all", "timeout": 60}
BY_HAND = {"*.*": {"timeout": 60}}


@pytest.fixture
def install(monkeypatch):
    is_installed = apps.is_installed

    def install(name):
        monkeypatch.setattr(apps, "is_installed", lambda app: app == name or is_installed(app))

    return install


def found():
    return [message for message in check_settings() if message.id == "django_fencedlock.W004"]


def test_without_such_a_cache_nothing_is_found(settings):
    settings.CACHEOPS = {"*.*": ALL}
    assert found() == []


CACHALOT = ("cachalot", "Add 'django_fencedlock' to CACHALOT_UNCACHABLE_APPS.")
CACHEOPS = ("cacheops", "Add 'django_fencedlock.*': None to CACHEOPS.")


@pytest.mark.parametrize(
    ("cache", "given", "is_cached"),
    [
        (CACHALOT, {}, True),
        (CACHALOT, {"CACHALOT_ENABLED": False}, False),
        (CACHALOT, {"CACHALOT_UNCACHABLE_APPS": ["shop"]}, True),
        (CACHALOT, {"CACHALOT_UNCACHABLE_APPS": ["shop", OURS]}, False),
        (CACHALOT, {"CACHALOT_ONLY_CACHABLE_APPS": ["shop"]}, False),
        (CACHALOT, {"CACHALOT_ONLY_CACHABLE_APPS": [OURS]}, True),
        (CACHALOT, {"CACHALOT_ONLY_CACHABLE_TABLES": ["shop_sale"]}, False),
        (
            CACHALOT,
            {"CACHALOT_ONLY_CACHABLE_APPS": [OURS], "CACHALOT_UNCACHABLE_APPS": [OURS]},
            False,
        ),
        (CACHEOPS, {}, False),
        (CACHEOPS, {"CACHEOPS": {"shop.*": ALL}}, False),
        (CACHEOPS, {"CACHEOPS": {"*.*": ALL}}, True),
        (CACHEOPS, {"CACHEOPS": {"*.*": ALL}, "CACHEOPS_ENABLED": False}, False),
        (CACHEOPS, {"CACHEOPS": {"*.*": ALL, "django_fencedlock.*": None}}, False),
        (CACHEOPS, {"CACHEOPS": {"*.*": ALL, "django_fencedlock.*": {"ops": ()}}}, False),
        (CACHEOPS, {"CACHEOPS": {"django_fencedlock.*": ALL}}, True),
        (CACHEOPS, {"CACHEOPS": BY_HAND}, False),
        (CACHEOPS, {"CACHEOPS": BY_HAND, "CACHEOPS_DEFAULTS": {"ops": "get"}}, True),
    ],
)
def test_a_cache_of_the_packages_tables_is_found(settings, install, cache, given, is_cached):
    name, hint = cache
    install(name)
    for setting, value in given.items():
        setattr(settings, setting, value)
    assert [message.hint for message in found()] == ([hint] if is_cached else [])


@pytest.mark.slow
def test_the_doctor_reports_it_too(install):
    install("cachalot")
    (problem,) = [each for each in problems() if each.id == "W004"]
    assert "show locks that were released" in problem.message
