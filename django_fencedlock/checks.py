"""System checks: what is wrong with settings and models, and, if asked, with the services."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error, Tags, Warning, register

from . import conf, model_checks
from .services import service


@register(Tags.compatibility)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """Look at the settings alone."""
    return _messages(conf.problems())


@register(Tags.database)
def check_services(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Ask the lock services themselves; run by ``check --database ALIAS``."""
    if not databases or any(not problem.warning for problem in conf.problems()):
        return []
    return _messages(_live_problems(databases))


@register(Tags.models)
def check_models(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Look at the fenced models as they are written."""
    configs = apps.get_app_configs() if app_configs is None else app_configs
    models = [model for config in configs for model in config.get_models()]
    return _messages(model_checks.problems(models))


@register(Tags.database)
def check_tables(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Look at the fenced models' tables; run by ``check --database ALIAS``."""
    return _messages(model_checks.database_problems(databases or ()))


def _live_problems(databases: Sequence[str]) -> Iterator[conf.Problem]:
    for alias in conf.aliases():
        if conf.config(alias).fence_database in databases:
            yield from service(alias).backend.live_problems()


def _messages(problems: Iterable[conf.Problem]) -> list[CheckMessage]:
    return [
        (Warning if problem.warning else Error)(
            problem.message, hint=problem.hint or None, id=f"django_fencedlock.{problem.id}"
        )
        for problem in problems
    ]
