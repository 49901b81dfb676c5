"""System checks: what is wrong with settings and models, and, if asked, with the services."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error, Info, Tags, Warning, register

from . import conf, query_caches
from .core.manager import service
from .models import checks


@register(Tags.compatibility)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """Look at the settings alone."""
    return _messages([*conf.problems(), *query_caches.problems()])


@register(Tags.database)
def check_services(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Ask the lock services themselves; run by ``check --database ALIAS``."""
    if not databases or any(problem.is_error for problem in conf.problems()):
        return []
    return _messages(_live_problems(databases))


@register(Tags.models)
def check_models(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Look at the fenced models as they are written."""
    configs = apps.get_app_configs() if app_configs is None else app_configs
    models = [model for config in configs for model in config.get_models()]
    return _messages(checks.model_problems(models))


@register(Tags.database)
def check_tables(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Look at the fenced models' tables; run by ``check --database ALIAS``."""
    return _messages(checks.table_problems(databases or ()))


@register(Tags.compatibility)
def check_tasks(**kwargs: Any) -> list[CheckMessage]:
    """Look at the Celery tasks under `single_instance`, in a project that has an app of Celery."""
    return _messages(_task_problems())


def problems() -> list[conf.Problem]:
    """Find all that `check` reports of settings, models and tasks; asks no server."""
    models = checks.model_problems(apps.get_models())
    return [*conf.problems(), *query_caches.problems(), *models, *_task_problems()]


def _task_problems() -> list[conf.Problem]:
    celery_apps = _celery_apps()
    # A project without such a task is spared what the decorator brings along.
    if f"{__package__}.celery" not in sys.modules:
        return []
    from .celery import task_checks

    return list(task_checks.problems(celery_apps))


def _live_problems(databases: Sequence[str]) -> Iterator[conf.Problem]:
    for alias in conf.aliases():
        if conf.config(alias).fence_database in databases:
            yield from service(alias).backend.live_problems()


def _celery_apps() -> list[Any]:
    """The Celery apps of this process, with their tasks imported as a worker would."""
    if "celery.app.base" not in sys.modules:
        return []
    from celery import _state

    state: Any = _state
    found = list(state._get_active_apps())
    for app in found:
        _import_tasks(app)
    # Celery makes one by itself where a thread finds none; it has nobody's settings.
    chosen = [app for app in found if app.set_as_current or app.main != "default"]
    return chosen or found


def _import_tasks(app: Any) -> None:
    before = os.environ.get("CELERY_SKIP_CHECKS")
    # Or else Celery runs Django's checks, these among them, as it imports tasks.
    os.environ["CELERY_SKIP_CHECKS"] = "true"
    try:
        app.loader.import_default_modules()
    except Exception:
        # Not every process has what the tasks need. A worker that can't import them says so.
        return
    finally:
        if before is None:
            del os.environ["CELERY_SKIP_CHECKS"]
        else:
            os.environ["CELERY_SKIP_CHECKS"] = before


_LEVELS = {"E": Error, "W": Warning, "I": Info}


def _messages(problems: Iterable[conf.Problem]) -> list[CheckMessage]:
    return [
        _LEVELS[problem.id[0]](
            problem.message, hint=problem.hint or None, id=f"django_fencedlock.{problem.id}"
        )
        for problem in problems
    ]
