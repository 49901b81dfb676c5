"""The check for caches of the ORM's queries; the settings are those of the released packages."""

import pytest
from django.apps import apps

from django_fencedlock.checks import check_settings, problems

OURS = "django_fencedlock"
ALL = {"ops": "all", "timeout": 60}


@pytest.fixture
def install(monkeypatch):
    """Pass for a project that has installed one of the caches."""
    is_installed = apps.is_installed

    def install(name):
        monkeypatch.setattr(apps, "is_installed", lambda app: app == name or is_installed(app))

    return install


def found():
    return [message for message in check_settings() if message.id == "django_fencedlock.W004"]


def test_without_such_a_cache_nothing_is_found(settings):
    settings.CACHEOPS = {"*.*": ALL}
    assert found() == []


@pytest.mark.parametrize(
    ("given", "is_cached"),
    [
        ({}, True),
        ({"CACHALOT_ENABLED": False}, False),
        ({"CACHALOT_UNCACHABLE_APPS": ["shop"]}, True),
        ({"CACHALOT_UNCACHABLE_APPS": ["shop", OURS]}, False),
        ({"CACHALOT_ONLY_CACHABLE_APPS": ["shop"]}, False),
        ({"CACHALOT_ONLY_CACHABLE_APPS": [OURS]}, True),
        ({"CACHALOT_ONLY_CACHABLE_TABLES": ["shop_sale"]}, False),
        ({"CACHALOT_ONLY_CACHABLE_APPS": [OURS], "CACHALOT_UNCACHABLE_APPS": [OURS]}, False),
    ],
)
def test_cachalot(settings, install, given, is_cached):
    install("cachalot")
    for name, value in given.items():
        setattr(settings, name, value)
    hints = ["Add 'django_fencedlock' to CACHALOT_UNCACHABLE_APPS."] if is_cached else []
    assert [message.hint for message in found()] == hints


@pytest.mark.parametrize(
    ("given", "is_cached"),
    [
        ({}, False),
        ({"CACHEOPS": {"shop.*": ALL}}, False),
        ({"CACHEOPS": {"*.*": ALL}}, True),
        ({"CACHEOPS": {"*.*": ALL}, "CACHEOPS_ENABLED": False}, False),
        ({"CACHEOPS": {"*.*": ALL, "django_fencedlock.*": None}}, False),
        ({"CACHEOPS": {"*.*": ALL, "django_fencedlock.*": {"ops": ()}}}, False),
        ({"CACHEOPS": {"django_fencedlock.*": ALL}}, True),
        # By hand alone, unless the defaults say another.
        ({"CACHEOPS": {"*.*": {"timeout": 60}}}, False),
        ({"CACHEOPS": {"*.*": {"timeout": 60}}, "CACHEOPS_DEFAULTS": {"ops": "get"}}, True),
    ],
)
def test_cacheops(settings, install, given, is_cached):
    install("cacheops")
    for name, value in given.items():
        setattr(settings, name, value)
    hints = ["Add 'django_fencedlock.*': None to CACHEOPS."] if is_cached else []
    assert [message.hint for message in found()] == hints


@pytest.mark.slow
def test_the_doctor_is_told_too(install):
    install("cachalot")
    (problem,) = [each for each in problems() if each.id == "W004"]
    assert "show locks that were released" in problem.message
